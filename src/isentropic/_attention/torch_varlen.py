"""The backend for packed sequences on a GPU: FlashAttention, as `torch.nn.attention.varlen` has it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from isentropic._attention.plan import Operands, Plan
from isentropic._attention.torch import kernel_arrays, repairable, with_batch, with_nonfinite
from isentropic._attention.torch_facts import TRANSFORMED
from isentropic._attention.triton import reason_against_sizes
from isentropic._loops import without_autocast
from isentropic._namespace import Array
from isentropic._triton_launch import gpu_kind
from isentropic.masks import numbers_of

_MULTIPLE = 8  # The kernel takes heads of a multiple of so many features.


def unsupported_reason(plan: Plan, order: float | None, is_named: bool) -> str | None:
    """The reason why the kernel does not compute a call, or None."""
    if plan.library != "torch":
        return "the arrays are not PyTorch's"
    if not plan.is_packed:
        return "the mask is not `packed`, alone or with one `causal` or `window`"
    if order is not None:
        return "it computes outputs only"
    if plan.softcap is not None or plan.has_bias:
        return "it has no soft cap and no bias"
    if plan.dtype not in (plan.xp.float16, plan.xp.bfloat16):
        return "it takes float16 and bfloat16 only"
    if reason := reason_against_sizes(plan):
        return reason
    if plan.frame.is_compiling:
        return "torch.compile traces the call"
    if plan.facts.is_transformed:
        return TRANSFORMED
    if not plan.facts.has_plain_tensors:
        return "some tensor has a class of its own"
    return _reason_against(plan)


def _reason_against(plan: Plan) -> str | None:
    """The reason why the kernel cannot run on the device, or None."""
    if plan.device.type != "cuda" or plan.xp.version.hip:
        return "the arrays are not on a GPU of NVIDIA"
    if gpu_kind(plan.xp, plan.device) == "old":
        return "the GPU is too old: the kernel needs one of compute capability 8.0 or more"
    if varlen_attn() is None:
        return "this version of PyTorch has no `varlen_attn` with windows and grouped heads"
    return None


@functools.cache
def varlen_attn() -> Callable[..., Any] | None:
    """PyTorch's function, if it has all that a call may need."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # before PyTorch 2.10
        return None
    needed = {"scale", "window_size", "enable_gqa"}
    return varlen_attn if needed <= set(inspect.signature(varlen_attn).parameters) else None


def output(plan: Plan, operands: Operands) -> Array:
    """The attention output (..., L, Ev)."""
    operands = repairable(plan, operands)
    query, key, value, scale = kernel_arrays(plan, operands, plan.dtype, _MULTIPLE)
    out = _attend(plan, operands.mask, query, key, value, scale)
    return with_batch(plan, with_nonfinite(plan, operands, out))


@without_autocast
def _attend(plan: Plan, mask: Any, query: Any, key: Any, value: Any, scale: float) -> Any:
    batch, heads = query.shape[:2]
    starts, key_starts = mask.starts
    sides = (mask.left, mask.right)
    longest = max(plan.n_queries, plan.n_keys)
    attend: Any = varlen_attn()
    out = attend(
        *(x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)),
        _cumulative(plan, starts, batch, plan.n_queries),
        _cumulative(plan, key_starts, batch, plan.n_keys),
        _longest(starts, plan.n_queries),
        _longest(key_starts, plan.n_keys),
        scale=scale,
        window_size=tuple(-1 if x is None else min(x, longest) for x in sides),
        enable_gqa=heads != key.shape[1],
    )
    return out.unflatten(0, (batch, plan.n_queries)).transpose(1, 2)


def _cumulative(plan: Plan, starts: Any, batch: int, n: int) -> Any:
    """Where the sequences of all batch elements begin, one after the other, and the last one ends."""
    xp: Any = plan.xp
    starts = xp.asarray(starts, device=plan.device).to(xp.int32)
    if batch == 1:
        return starts
    shifts = n * xp.arange(batch, dtype=xp.int32, device=plan.device)
    return xp.nn.functional.pad((starts[:-1] + shifts[:, None]).flatten(), (0, 1), value=batch * n)


def _longest(starts: Any, n: int) -> int:
    """The length of the longest sequence, or n if it would have to be read from a GPU.

    A kernel with a greater bound starts blocks of threads that leave at once.
    """
    numbers = numbers_of(starts)
    return n if numbers is None else max((b - a for a, b in pairwise(numbers)), default=0)
