"""The backend of Triton kernels for PyTorch, which runs unnamed only where it has been timed."""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from typing import Any

from isentropic._attention import kernels
from isentropic._attention.plan import Operands, Plan
from isentropic._attention.tile import Sums
from isentropic._attention.torch_facts import TRANSFORMED
from isentropic._namespace import Array
from isentropic._numerics import quietly

# For wider heads the kernels need more registers or shared memory than GPUs have.
_MAX_FLOAT32_WIDTH = 128
# Where the entropy kernel was faster: heads of up to so many features, and at least a block of queries.
# It was timed for 64 and 128 features in bfloat16, at 4096 queries and keys. The rest is assumed.
_MAX_TIMED_WIDTH = 128
_MIN_TIMED_QUERIES = 64
# Rows farther apart than so many numbers are copied: places in a block of rows are numbers of 32 bits.
_MAX_ROW_STRIDE = 2**24


def unsupported_reason(plan: Plan, order: float | None, is_named: bool) -> str | None:
    """The reason why the Triton kernels do not compute a call, or None."""
    if plan.library != "torch":
        return "the arrays are not PyTorch's"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install triton"
    if plan.frame.is_compiling:
        return "torch.compile traces the call"
    if plan.facts.is_transformed:
        return TRANSFORMED
    if _is_interpreted():
        if plan.dtype == plan.xp.bfloat16:
            return "the interpreter of Triton does not multiply matrices of bfloat16"
    elif plan.device.type == "cpu":
        return "the tensors are not on a GPU"
    if plan.dtype.itemsize == 4 and max(plan.head_dim, plan.n_values or 0) > _MAX_FLOAT32_WIDTH:
        return f"heads of float32 have more than {_MAX_FLOAT32_WIDTH} features"
    return kernels.unsupported_reason(plan, order)


def opt_in_reason(plan: Plan, order: float | None) -> str | None:
    """The reason why the Triton kernels do not compute a call that does not name them, or None.

    They compute entropies of half precision without gradients on NVIDIA's Hopper, where they have been
    timed. The generic pass takes tens of times as long there. Both have errors of about 1e-6 nats.
    """
    if order is None or plan.n_values is not None or plan.is_differentiated:
        return "it runs only if `implementation` is 'triton'"
    is_timed = (
        plan.dtype.itemsize == 2
        and plan.head_dim <= _MAX_TIMED_WIDTH
        and plan.n_queries >= _MIN_TIMED_QUERIES
        and plan.facts.has_plain_tensors
        and _kind(plan.device) == "hopper"
    )
    if not is_timed:
        return "it has not been timed for such arrays: it runs only if `implementation` is 'triton'"
    return _failure(plan.device)


def _is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _failure(device: Any) -> str | None:
    """The reason why Triton cannot run its kernels here, or None. It needs a compiler for C."""
    import torch

    x = torch.zeros((1, 1, 1, 16), dtype=torch.float16, device=device)
    try:
        _forward(x, x, None, x[..., :1].float(), None, True, False, torch.float32)
    except torch.OutOfMemoryError:  # passes, so it is not remembered
        raise
    except Exception as error:
        return f"Triton cannot run its kernels here: {error}"
    return None


def output(plan: Plan, operands: Operands) -> Array:
    """The attention output (..., L, Ev)."""
    out, *_ = _results(plan, operands, has_moment=False)
    return kernels.finished_output(plan, operands, out)


def state(plan: Plan, operands: Operands, order: float, relative_to_maximum: bool) -> Sums:
    """The state in columns."""
    return kernels.finished_state(plan, operands, *_results(plan, operands, has_moment=True))


@quietly  # the interpreter of Triton computes with NumPy
def _results(plan: Plan, operands: Operands, *, has_moment: bool) -> tuple[Any, Any, Any, Any]:
    """Output, maximum, normalizer and moment.

    The output is None without values. It is of float32 with a moment, and else of the result's dtype.
    The moment is None if it is not asked for.
    """
    arrays = [
        None if x is None else _in_blocks(kernels.with_four_axes(plan, x))
        for x in (operands.query, operands.key, operands.value)
    ]
    factor: Any = kernels.factor(plan, operands)
    interval: Any = kernels.interval(plan, operands)
    if interval is not None:
        interval = tuple(x.contiguous() for x in interval)
    dtype = plan.compute if has_moment else plan.dtype
    out, *columns = _attend().apply(*arrays, factor.contiguous(), interval, has_moment, dtype)
    return None if out is None else out[..., : plan.n_values], *columns


def _in_blocks(x: Any) -> Any:
    """The array with rows of a width that is a power of 2, which begin at multiples of 16 numbers.

    Triton 3.6 computed wrong outputs from rows of 12 float16 numbers on a GPU. Rows that begin at
    multiples of 16 numbers are also copied faster to the shared memory.
    """
    import torch

    from isentropic._attention.triton_kernels import block_width

    if missing := block_width(x.shape[-1]) - x.shape[-1]:
        x = torch.nn.functional.pad(x, (0, missing))
    starts = (*x.stride()[:-1], x.storage_offset())
    is_aligned = x.stride(-1) == 1 and not any(n % 16 for n in starts)
    if is_aligned and x.stride(-2) <= _MAX_ROW_STRIDE:
        return x
    return x.clone(memory_format=torch.contiguous_format)  # `contiguous` may keep the offset


@functools.cache
def _attend() -> Any:
    import torch
    from torch.autograd.function import once_differentiable

    class Attend(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(
            ctx: Any, query: Any, key: Any, value: Any, factor: Any, interval: Any, has_moment: bool,
            out_dtype: Any,
        ) -> Any:  # fmt: skip
            inputs = (query, key, value, factor)
            has_argmax = has_moment and any(ctx.needs_input_grad)
            out, maximum, normalizer, moment, argmax = _forward(
                *inputs, interval, has_moment, has_argmax, out_dtype
            )
            ctx.interval = interval
            ctx.save_for_backward(*inputs, out, maximum, normalizer, moment, argmax)
            return out, maximum, normalizer, moment

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *upstream: Any) -> Any:
            return *_backward(ctx.saved_tensors, ctx.interval, upstream), None, None, None

    return Attend


def _forward(
    query: Any, key: Any, value: Any, factor: Any, interval: Any, has_moment: bool, has_argmax: bool,
    out_dtype: Any,
) -> tuple[Any, Any, Any, Any, Any]:  # fmt: skip
    import torch

    from isentropic._attention.triton_kernels import state_kernel

    rows = query.shape[:-1]
    out = None if value is None else query.new_empty((*rows, value.shape[-1]), dtype=out_dtype)
    maximum, normalizer = torch.empty_like(factor), torch.empty_like(factor)
    moment = torch.empty_like(factor) if has_moment else None
    argmax = torch.empty_like(factor, dtype=torch.int32) if has_argmax else None
    sizes = _sizes(state_kernel, query, value)
    first, end = interval or (None, None)
    # In one axis, as the others of a grid have at most 65535 programs.
    grid = (rows[0] * rows[1] * -(-rows[2] // sizes.rows),)
    with torch.cuda.device_of(query):
        state_kernel[grid](
            query, key, value, factor, first, end, out, maximum, normalizer, moment, argmax,
            **_common(query, key, value, interval, sizes), HAS_MOMENT=has_moment, HAS_ARGMAX=has_argmax,
        )  # fmt: skip
    return out, maximum, normalizer, moment, argmax


def _sizes(kernel: Any, query: Any, value: Any) -> Any:
    from isentropic._attention.triton_kernels import configuration

    width = max(query.shape[-1], 0 if value is None else value.shape[-1])
    return configuration(kernel, width, query.itemsize, _kind(query.device))


@functools.cache
def _kind(device: Any) -> str:
    """Which GPU a device is: "nvidia", "hopper" or "amd"."""
    import torch

    if torch.version.hip is not None:
        return "amd"
    if device.type != "cuda" or _is_interpreted():
        return "nvidia"
    return "hopper" if torch.cuda.get_device_capability(device) == (9, 0) else "nvidia"


def _common(query: Any, key: Any, value: Any, interval: Any, sizes: Any) -> dict[str, Any]:
    """The arguments that the kernels share."""
    from isentropic._attention.triton_kernels import precision

    names = ("batch", "head", "row")
    strides = {
        f"{array}_{name}": 0 if x is None else stride
        for array, x in (("q", query), ("k", key), ("v", value))
        for name, stride in zip(names, (query if x is None else x).stride(), strict=False)
    }
    return strides | {
        "heads": query.shape[1],
        "group": query.shape[1] // key.shape[1],
        "L": query.shape[2],
        "S": key.shape[2],
        "WIDTH": query.shape[-1],
        "VALUE_WIDTH": 16 if value is None else value.shape[-1],
        "HAS_VALUE": value is not None,
        "HAS_MASK": interval is not None,
        "PRECISION": precision(_kind(query.device)),
        "ROWS": sizes.rows,
        "COLUMNS": sizes.columns,
        "num_warps": sizes.warps,
        "num_stages": sizes.stages,
        "enable_fp_fusion": True,
    }


def _backward(saved: Any, interval: Any, upstream: Any) -> tuple[Any, Any, Any, Any]:
    """The gradients of query, key, value and factor."""
    import array_api_compat.torch as xp
    import torch

    from isentropic._attention.triton_kernels import gradient_kernel

    query, key, value, factor, out, maximum, normalizer, moment, argmax = saved
    out_grad = None if out is None else upstream[0].to(query.dtype).contiguous()
    inverse = torch.where(normalizer == 0, 0.0, 1 / normalizer)
    constant, slope, rest = kernels.gradient_terms(xp, out, normalizer, moment, upstream)
    reference = torch.where(maximum == -math.inf, 0.0, maximum)
    first, end = interval or (None, None)
    sizes = _sizes(gradient_kernel, query, value)
    low, high = (None, None) if interval is None else _reach(interval, key.shape[2], sizes.columns)

    # Many programs add to the gradient of the scaled query. So it is accumulated in float32.
    dq = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    dk = torch.empty(key.shape, dtype=key.dtype, device=key.device)
    dv = None if value is None else torch.empty(value.shape, dtype=value.dtype, device=value.device)
    grid = (key.shape[0] * key.shape[1] * -(-key.shape[2] // sizes.columns),)
    with torch.cuda.device_of(query):
        gradient_kernel[grid](
            query, key, value, out_grad, factor, first, end, low, high, reference, inverse, constant,
            slope, rest, argmax, dq, dk, dv,
            **_common(query, key, value, interval, sizes), HAS_MOMENT=slope is not None,
        )  # fmt: skip
    factor_grad = (dq * query).sum(-1, keepdim=True)
    return (dq * factor).to(query.dtype), dk, dv, factor_grad


def _reach(interval: Any, n_keys: int, size: int) -> tuple[Any, Any]:
    """For each block of keys, the range (low, high) of the queries that see one of them.

    Both ends of the intervals of `masks` do not decrease from query to query.
    """
    import torch

    first, end = (x[..., 0] for x in interval)
    start = torch.arange(0, n_keys, size, dtype=torch.int32, device=first.device)
    start = start.expand(*first.shape[:-1], -1).contiguous()
    low = torch.searchsorted(end, start, right=True, out_int32=True)
    return low, torch.searchsorted(first, start + size, out_int32=True)
