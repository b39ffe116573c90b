"""Linear maps of the rows of a matrix, computed in blocks of rows.

PyTorch computes small products slowly on a CPU. So NumPy applies the maps to its tensors, in their own
memory, and their gradient is the adjoint map. Eager operations of JAX on a CPU are slow too: adding 1
takes as long as five copies. So NumPy also applies the maps to JAX arrays outside of transformations.

On GPUs a Triton kernel computes those maps that have a program for it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import numpy as np

from isentropic._loops import (
    is_differentiable,
    is_differentiated,
    is_plain,
    is_readable,
    jax_array,
    map_chunks,
    map_rows,
    runs_kernels,
)
from isentropic._namespace import (
    Array,
    accumulator,
    common_device,
    is_dask,
    is_jax,
    is_symbolic,
    is_torch,
    leaves_of,
    library_of,
    namespace,
)
from isentropic._numerics import quietly

_KERNEL_DTYPES = ("float32", "float16", "bfloat16")

# ``function(rows, out)`` maps each row of a matrix. With NumPy it may write into `out`; see `map_rows`.
RowFunction = Callable[[Array, Any], Array]
# ``make(xp, arrays, dtype, device, is_adjoint)`` returns such a function, or that of the adjoint, for
# matrices of this dtype.
MakeRowFunction = Callable[[ModuleType, Any, Any, Any, bool], RowFunction]


class Program(Protocol):
    """A map that a kernel computes for arrays on a GPU. It has no arrays, and is hashable."""

    @property
    def adjoint(self) -> Program: ...

    @property
    def width(self) -> int: ...

    def run(self, xp: ModuleType, x: Array, arrays: Sequence[Array]) -> Array: ...


# ``make(xp, arrays, n_rows, device)`` returns a program and its arrays; None if no kernel has the map.
MakeProgram = Callable[[ModuleType, Any, int, Any], tuple[Program, Sequence[Array]] | None]


class LinearMap(NamedTuple):
    """A linear map of rows and its adjoint, for arrays of any library."""

    rows: MakeRowFunction
    widths: tuple[int, int]  # the sizes of a row that the map and its adjoint return
    # The number of intermediates of a row; None if the map is a single product of matrices.
    row_size: int | None
    arrays: tuple[Any, ...] = ()  # all arrays that the functions use, in nested tuples
    program: MakeProgram | None = None  # of the map, or of its adjoint
    is_adjoint: bool = False

    def adjoint(self) -> LinearMap:
        return self._replace(widths=self.widths[::-1], is_adjoint=not self.is_adjoint)


def apply_along(xp: ModuleType, make: Callable[[int], LinearMap], x: Any, axis: int, size: int) -> Any:
    """Apply ``make(trail)`` to rows that hold vectors along an axis, `trail` of them side by side.

    The axis, which counts from the front, then has `size` entries. A Dask array stays lazy.
    """
    if is_dask(x):
        return map_chunks(x, quietly(lambda part: apply_along(xp, make, part, axis, size)), axis, size)
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    lead, trail = math.prod(before), math.prod(after)
    y = apply_to_rows(xp, make(trail), xp.reshape(x, (lead, x.shape[axis] * trail)))
    return xp.reshape(y, (*before, size, *after))


def apply_to_rows(xp: ModuleType, linear: LinearMap, x: Array, out: Any = None) -> Array:
    """Apply a linear map to each row of a matrix. It is computed in float32 or better.

    The caller may give NumPy an array for the result.
    """
    dtype = accumulator(xp, x.dtype)
    if (kernel := _kernel(xp, linear, x)) is not None:
        return _through_kernel(xp, linear, x, *kernel)
    if _is_for_numpy(xp, linear, x):
        y: Array = _THROUGH_NUMPY[library_of(xp)](linear, xp.astype(x, dtype, copy=False))
        return xp.astype(y, x.dtype, copy=False)
    device = common_device(x=x)
    function = linear.rows(xp, linear.arrays, dtype, device, linear.is_adjoint)

    def in_dtype(part: Array, out: Any) -> Array:
        y = function(xp.astype(part, dtype, copy=False), out if x.dtype == dtype else None)
        return xp.astype(y, x.dtype, copy=False)

    if linear.row_size is None:
        return in_dtype(x, None)
    return map_rows(xp, in_dtype, x, width=linear.widths[0], row_size=linear.row_size, out=out)


def _is_for_numpy(xp: ModuleType, linear: LinearMap, x: Array) -> bool:
    """Whether NumPy computes the map: not if the map's own arrays have gradients."""
    if library_of(xp) not in _THROUGH_NUMPY or linear.row_size is None or not is_readable(xp, x):
        return False
    leaves = tuple(leaves_of(linear.arrays))
    return all(is_readable(xp, a) for a in leaves) and not is_differentiable(xp, *leaves)


def _in_numpy(linear: LinearMap, x: Any, out: Any = None) -> Any:
    """The map of an array of another library, as a NumPy array."""
    import array_api_compat.numpy as np

    xp = namespace(x=x)
    linear = linear._replace(arrays=in_host_memory(xp, linear.arrays))
    return apply_to_rows(np, linear, in_host_memory(xp, x), out)


def _through_numpy_in_jax(linear: LinearMap, x: Any) -> Any:
    # At an address divisible by 64, so that JAX takes over the memory.
    shape = (x.shape[0], linear.widths[0])
    memory = np.empty(math.prod(shape) * x.dtype.itemsize + 64, dtype=np.uint8)
    start = -memory.ctypes.data % 64
    out = memory[start : memory.size - 64 + start].view(x.dtype).reshape(shape)
    y = _in_numpy(linear, x, out)
    return jax_array(y, x.sharding if x.committed else None)


def in_host_memory(xp: Any, x: Any) -> Any:
    """An array, or nested tuples of arrays, as NumPy arrays. Only half precision is copied."""
    if isinstance(x, tuple):
        parts = [in_host_memory(xp, part) for part in x]
        # A map is a named tuple, whose methods the caller needs.
        return tuple(parts) if type(x) is tuple else type(x)(*parts)
    if xp.isdtype(x.dtype, "real floating"):
        x = xp.astype(x, accumulator(xp, x.dtype), copy=False)
    if is_torch(xp):
        return x.numpy(force=True)
    return np.asarray(x)


def _through_numpy_in_torch(linear: LinearMap, x: Any) -> Any:
    import torch

    def compute(linear: LinearMap, x: Any) -> Any:
        return torch.from_numpy(_in_numpy(linear, x))

    return _custom().apply(x, linear, compute, *leaves_of(linear.arrays))


_THROUGH_NUMPY = {"torch": _through_numpy_in_torch, "jax": _through_numpy_in_jax}


@functools.cache
def _custom() -> Any:
    """A node for PyTorch's gradients: ``compute(linear, x)``, whose gradient is the adjoint map."""
    import torch

    class Custom(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: Any, linear: LinearMap, compute: Any, *leaves: Any) -> Any:
            ctx.linear = linear
            ctx.save_for_backward(*leaves)
            return compute(linear, x)

        @staticmethod
        def backward(ctx: Any, upstream: Any) -> Any:
            import array_api_compat.torch as xp

            # Reading them raises PyTorch's error if one of them was modified in place.
            leaves = ctx.saved_tensors
            return apply_to_rows(xp, ctx.linear.adjoint(), upstream), *[None] * (2 + len(leaves))

    return Custom


def _kernel(xp: Any, linear: LinearMap, x: Array) -> tuple[Program, Sequence[Array]] | None:
    """The program of the map and its arrays, if a kernel computes the map."""
    if linear.program is None or not runs_kernels(xp, x):
        return None
    # A grid of no programs cannot be launched.
    if any(map(is_symbolic, x.shape)) or 0 in x.shape:
        return None
    if str(x.dtype).removeprefix("torch.") not in _KERNEL_DTYPES:
        return None
    leaves = tuple(leaves_of(linear.arrays))
    if not is_plain(xp, *leaves) or is_differentiable(xp, *leaves):
        return None
    made = linear.program(xp, linear.arrays, x.shape[0], common_device(x=x))
    if made is None or not linear.is_adjoint:
        return made
    program, arrays = made
    return program.adjoint, arrays


def _through_kernel(
    xp: Any, linear: LinearMap, x: Any, program: Program, arrays: Sequence[Array]
) -> Array:
    if is_differentiated(xp, x):
        leaves = leaves_of(linear.arrays)
        return _custom().apply(x, linear, lambda _, x: program.run(xp, x, arrays), *leaves)
    if is_jax(xp):
        return _primitive().bind(x, *arrays, program=program)
    return program.run(xp, x, arrays)


@functools.cache
def _primitive() -> Any:
    """A primitive of JAX for programs: linear in its first argument, and without derivatives in others.

    Calls of Triton have neither derivatives nor batches in JAX.
    """
    import jax
    from jax.extend.core import Primitive
    from jax.interpreters import ad, batching, mlir

    kernel_rows = Primitive("isentropic_kernel_rows")

    def run(x: Any, *arrays: Any, program: Any) -> Any:
        return program.run(jax.numpy, x, arrays)

    @kernel_rows.def_abstract_eval
    def abstract(x: Any, *arrays: Any, program: Any) -> Any:
        return jax.core.ShapedArray((x.shape[0], program.width), x.dtype)

    def derivative(primals: Any, tangents: Any, **parameters: Any) -> Any:
        y = kernel_rows.bind(*primals, **parameters)
        if type(tangents[0]) is ad.Zero:
            return y, ad.Zero.from_primal_value(y)
        return y, kernel_rows.bind(tangents[0], *primals[1:], **parameters)

    def transpose(upstream: Any, x: Any, *arrays: Any, program: Any) -> Any:
        if type(upstream) is ad.Zero:
            return [ad.Zero(x.aval), *[None] * len(arrays)]
        grad = kernel_rows.bind(upstream, *arrays, program=program.adjoint)
        return [grad, *[None] * len(arrays)]

    def batch(args: Any, axes: Any, *, program: Any) -> Any:
        x, *arrays = args
        x = jax.numpy.moveaxis(x, axes[0], 0)
        # A batch of matrices is a matrix of more rows.
        y = kernel_rows.bind(x.reshape(-1, x.shape[-1]), *arrays, program=program)
        return y.reshape(*x.shape[:2], -1), 0

    kernel_rows.def_impl(run)
    mlir.register_lowering(kernel_rows, mlir.lower_fun(run, multiple_results=False))
    ad.primitive_jvps[kernel_rows] = derivative
    ad.primitive_transposes[kernel_rows] = transpose
    batching.primitive_batchers[kernel_rows] = batch
    return kernel_rows
