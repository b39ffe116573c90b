"""Kernels in front of the generic tile pass, chosen by what they mean.

Each gives the values and gradients of the generic pass, which remains their reference.

- NumPy's own pass (`_numpy_kernel`), for arrays in the memory of the host: those of NumPy, and of
  PyTorch and JAX on the CPU where nothing is traced or differentiated.
- PyTorch's `scaled_dot_product_attention`, for outputs, and gradients that take the tiles again, for
  the rest (`_torch_kernels`).
- JAX's `dot_product_attention`, for outputs: by itself only where it is cuDNN's.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

from isentropic._checks import value_error
from isentropic._loops import is_readable
from isentropic._namespace import Array, is_jax, is_numpy, is_torch
from isentropic._numpy_kernel import numpy_output, numpy_state
from isentropic._state import AttentionState, output_of_columns
from isentropic._tiles import Problem
from isentropic._torch_kernels import (
    is_differentiated,
    means_output,
    means_state,
    torch_output,
    torch_state,
)


def output_of(problem: Problem, implementation: str | None) -> Array:
    """The attention output, (..., L, Ev)."""
    kernel = _output_kernel(problem, implementation)
    return problem.tiles().output() if kernel is None else kernel(problem)


def state_of(
    problem: Problem, implementation: str | None, order: float = 1.0, *, maximum: bool = False
) -> AttentionState:
    """The state with the moment of an order, in columns.

    Relative to the `maximum`, or to any other number.
    """
    kernel = _state_kernel(problem, implementation, order, maximum)
    return problem.tiles().state(order) if kernel is None else kernel(problem)


def _output_kernel(problem: Problem, implementation: str | None) -> Callable[[Problem], Array] | None:
    kernel: Callable[[Problem], Array] | None = None
    if _is_wanted(problem, implementation):
        if is_torch(problem.xp) and means_output(problem):
            kernel = torch_output
        elif _numpy_means_it(problem, implementation):
            kernel = _numpy_output
        elif is_jax(problem.xp) and _jax_means_it(problem, implementation):
            kernel = _jax_output
        elif is_torch(problem.xp) and means_state(problem):
            kernel = _output_of_torch_state
    _require(kernel, implementation)
    return kernel


def _state_kernel(
    problem: Problem, implementation: str | None, order: float, maximum: bool
) -> Callable[[Problem], AttentionState] | None:
    kernel: Callable[[Problem], AttentionState] | None = None
    if _is_wanted(problem, implementation):
        if order == 1 and _numpy_means_it(problem, implementation):
            kernel = partial(_numpy_state, maximum=maximum)
        elif is_torch(problem.xp) and means_state(problem):
            kernel = partial(torch_state, order=order)
    _require(kernel, implementation)
    return kernel


def _is_wanted(problem: Problem, implementation: str | None) -> bool:
    return implementation != "generic" and problem.n_keys > 0 and problem.score_width is None


def _require(kernel: Callable | None, implementation: str | None) -> None:
    """Refuse "native" where no kernel computes the same."""
    if implementation == "native" and kernel is None:
        must = "be None or 'generic', since no native kernel means the same as this call"
        raise value_error("implementation", must, "'native'")


# NumPy


def _numpy_means_it(problem: Problem, implementation: str | None) -> bool:
    if problem.bias is not None or problem.softcap is not None or problem.block_size is not None:
        return False
    if implementation is None and (problem.frame.whole or not _is_large(problem)):
        return False
    return all(_is_on_host(problem.xp, x) for x in problem.arrays)


def _is_large(problem: Problem) -> bool:
    """Whether there is enough to do for a pass that makes copies and threads, and goes by elements."""
    size = problem.n_queries * problem.n_keys
    return problem.n_queries >= 128 and size >= 2**16 and size * math.prod(problem.batch) >= 2**20


def _is_on_host(xp: ModuleType, x: Any) -> bool:
    """Whether NumPy sees all there is to `x`."""
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


def _numpy_state(problem: Problem, maximum: bool) -> AttentionState:
    xp: Any = problem.xp
    fields: Any = numpy_state(_on_host(problem), maximum=maximum)
    if is_numpy(xp):
        return fields
    fields = (None if x is None else xp.asarray(x, device=problem.frame.device) for x in fields)
    return AttentionState(*fields)


def _output_of_torch_state(problem: Problem) -> Array:
    return output_of_columns(problem.xp, torch_state(problem, None))


# JAX


def _jax_means_it(problem: Problem, implementation: str | None) -> bool:
    import jax

    if problem.softcap is not None or problem.bias is not None or problem.dtype == problem.xp.float64:
        return False
    if problem.mask is not None and not problem.is_plain_causal:
        return False
    width = problem.query.shape[-1]
    if width == 0 or problem.values.shape[-1] != width:
        return False
    if implementation == "native":
        return True
    # What cuDNN takes.
    half = problem.dtype in (problem.xp.float16, problem.xp.bfloat16)
    return jax.default_backend() == "gpu" and half and width % 8 == 0 and width <= 128


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
