"""The backends of attention: what computes a call, in the order in which they are asked.

The generic pass is the last of them. Each of the others gives its values and gradients, faster.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

from isentropic._checks import value_error
from isentropic._loops import is_readable
from isentropic._namespace import Array, is_jax, is_numpy, is_torch
from isentropic._numpy_kernel import numpy_output, numpy_state
from isentropic._state import AttentionState, output_of_columns
from isentropic._tiles import Problem
from isentropic._torch_kernels import (
    is_differentiated,
    torch_output,
    torch_state,
    why_not_sdpa,
    why_not_tiles,
)


class Backend(NamedTuple):
    """What computes attention.

    ``why_not(problem, order, is_named)`` tells why it does not compute a problem; None says that it
    does. The order is that of the entropy, or None for the output alone. A backend that the caller has
    named also computes what another one computes faster.
    """

    name: str
    why_not: Callable[[Problem, float | None, bool], str | None]
    output: Callable[[Problem], Array]
    state: Callable[[Problem, float, bool], AttentionState]  # the last: relative to its maximum


def output_of(problem: Problem, implementation: str | None) -> Array:
    """The attention output, (..., L, Ev)."""
    return _chosen(problem, implementation, None).output(problem)


def state_of(
    problem: Problem, implementation: str | None, order: float = 1.0, *, maximum: bool = False
) -> AttentionState:
    """The state with the moment of an order, in columns.

    Relative to the `maximum`, or to any other number.
    """
    return _chosen(problem, implementation, order).state(problem, order, maximum)


def reasons(problem: Problem, implementation: str | None, order: float | None) -> dict[str, str | None]:
    """Why each backend does not compute the problem, in order; None where it could."""
    is_named = implementation is not None
    return {
        backend.name: _why_not(backend, problem, order, is_named)
        if _is_asked(backend, implementation)
        else "`implementation` asks for another"
        for backend in BACKENDS
    }


def _chosen(problem: Problem, implementation: str | None, order: float | None) -> Backend:
    """The first backend that computes the problem."""
    why = []
    for backend in BACKENDS:
        if _is_asked(backend, implementation):
            reason = _why_not(backend, problem, order, implementation is not None)
            if reason is None:
                return backend
            why.append(f"{backend.name}: {reason}")
    must = f"be None or 'generic' for this call ({'; '.join(why)})"
    raise value_error("implementation", must, repr(implementation))


def _is_asked(backend: Backend, implementation: str | None) -> bool:
    if implementation == "native":
        return backend.name != "generic"
    return implementation in (None, backend.name)


def _why_not(backend: Backend, problem: Problem, order: float | None, is_named: bool) -> str | None:
    if backend.name != "generic":
        if problem.n_keys == 0:
            return "there are no keys"
        if problem.score_width is not None:
            return "the scores are not products"
    return backend.why_not(problem, order, is_named)


# The generic pass


def _generic_output(problem: Problem) -> Array:
    return problem.tiles().output()


def _generic_state(problem: Problem, order: float, maximum: bool) -> AttentionState:
    return problem.tiles().state(order)


# NumPy


def _why_not_numpy(problem: Problem, order: float | None, is_named: bool) -> str | None:
    if order not in (None, 1.0):
        return "it has no entropies but Shannon's"
    if problem.bias is not None or problem.softcap is not None:
        return "it has no bias and no soft cap"
    if problem.block_size is not None:
        return "it chooses the sizes of its tiles"
    if not is_named and problem.frame.whole:
        return "torch.compile traces the call"
    if not is_named and not _is_large(problem):
        return "there is too little to compute for it to be faster"
    if not all(_is_on_host(problem.xp, x) for x in problem.arrays):
        return "some array is on another device, traced or differentiated"
    return None


def _is_large(problem: Problem) -> bool:
    """Whether there is enough to do for a pass that makes copies and threads, and goes by elements."""
    size = problem.n_queries * problem.n_keys
    return problem.n_queries >= 128 and size >= 2**16 and size * math.prod(problem.batch) >= 2**20


def _is_on_host(xp: ModuleType, x: Any) -> bool:
    """Whether NumPy can compute with `x` in place: its values can be read and need no gradient."""
    return is_readable(xp, x) and not (is_torch(xp) and is_differentiated(x))


def _on_host(problem: Problem) -> Problem:
    """The same problem in arrays of NumPy, in the same memory where the dtype is that of the sums."""
    if is_numpy(problem.xp):
        return problem
    np: Any = importlib.import_module("array_api_compat.numpy")
    dtype = np.float64 if problem.compute == problem.xp.float64 else np.float32

    def view(x: Any) -> Any:
        if x is None or isinstance(x, float):
            return x
        x = x.detach().to(problem.compute) if is_torch(problem.xp) else x
        return np.asarray(x, dtype=dtype)

    poison = problem.poison and (view(problem.poison[0]), view(problem.poison[1]))
    return replace(
        problem,
        frame=replace(problem.frame, xp=np, device="cpu"),
        dtype=dtype,
        compute=dtype,
        query=view(problem.query),
        multiplier=view(problem.multiplier),
        key=view(problem.key),
        value=view(problem.value),
        poison=poison,
    )


def _numpy_output(problem: Problem) -> Array:
    xp: Any = problem.xp
    out = numpy_output(_on_host(problem))
    return out if is_numpy(xp) else xp.asarray(out, device=problem.frame.device)


def _numpy_state(problem: Problem, order: float, maximum: bool) -> AttentionState:
    xp: Any = problem.xp
    fields: Any = numpy_state(_on_host(problem), maximum=maximum)
    if is_numpy(xp):
        return fields
    fields = (None if x is None else xp.asarray(x, device=problem.frame.device) for x in fields)
    return AttentionState(*fields)


# PyTorch


def _why_not_sdpa(problem: Problem, order: float | None, is_named: bool) -> str | None:
    if not is_torch(problem.xp):
        return "the arrays are not PyTorch's"
    return why_not_sdpa(problem) if order is None else "it gives outputs alone"


def _no_state(problem: Problem, order: float, maximum: bool) -> AttentionState:
    raise AssertionError("this backend gives outputs alone")


def _why_not_torch(problem: Problem, order: float | None, is_named: bool) -> str | None:
    return why_not_tiles(problem) if is_torch(problem.xp) else "the arrays are not PyTorch's"


def _torch_state(problem: Problem, order: float, maximum: bool) -> AttentionState:
    return torch_state(problem, order)


def _output_of_torch_state(problem: Problem) -> Array:
    return output_of_columns(problem.xp, torch_state(problem, None))


# JAX


def _why_not_jax(problem: Problem, order: float | None, is_named: bool) -> str | None:
    if not is_jax(problem.xp):
        return "the arrays are not JAX's"
    if order is not None:
        return "it gives outputs alone"
    if problem.softcap is not None or problem.bias is not None:
        return "it has no soft cap, and a bias only as an L×S array"
    if problem.dtype == problem.xp.float64:
        return "it has no float64"
    if problem.mask is not None and not problem.is_plain_causal:
        return "it has no masks but the causal one"
    width = problem.query.shape[-1]
    if width == 0 or problem.values.shape[-1] != width:
        return "keys and values are not of one width above 0"
    if is_named:
        return None
    import jax

    half = problem.dtype in (problem.xp.float16, problem.xp.bfloat16)
    if jax.default_backend() != "gpu" or not half or width % 8 or width > 128:
        return "it is faster only by cuDNN: on a GPU, in half precision, with heads of 8, 16, … 128"
    return None


def _jax_output(problem: Problem) -> Array:
    import jax

    xp, query, scale = problem.xp, problem.query, problem.multiplier
    if not isinstance(scale, float):
        query, scale = problem.tiles().query, 1.0
    arrays = [
        xp.swapaxes(problem.four_axes(xp.astype(x, problem.dtype), whole=True), 1, 2)
        for x in (query, problem.key, problem.values)
    ]
    kernel = "cudnn" if jax.default_backend() == "gpu" else "xla"
    out = jax.nn.dot_product_attention(
        *arrays, scale=scale, is_causal=problem.mask is not None, implementation=kernel
    )
    out = xp.swapaxes(out, 1, 2)
    out = xp.reshape(out, (*problem.batch, *out.shape[-2:]))
    return out if problem.mask is None else out + xp.astype(problem.causal_poison, out.dtype)


BACKENDS = (
    Backend("sdpa", _why_not_sdpa, torch_output, _no_state),
    Backend("numpy", _why_not_numpy, _numpy_output, _numpy_state),
    Backend("jax", _why_not_jax, _jax_output, _no_state),
    Backend("torch", _why_not_torch, _output_of_torch_state, _torch_state),
    Backend("generic", lambda problem, order, is_named: None, _generic_output, _generic_state),
)
