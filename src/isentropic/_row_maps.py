"""Linear maps of the rows of a matrix, computed in blocks of rows.

PyTorch computes small products slowly on a CPU. So NumPy applies the maps to its tensors, in their own
memory, and their gradient is the adjoint map. Eager operations of JAX on a CPU are slow too: adding 1
takes as long as five copies. So NumPy also applies the maps to JAX arrays outside of transformations.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from isentropic._loops import is_differentiable, is_readable, jax_array, map_rows
from isentropic._namespace import (
    Array,
    accumulator,
    common_device,
    is_jax,
    is_torch,
    leaves_of,
    namespace,
)

# ``function(rows, out)`` maps each row of a matrix. With NumPy it may write into `out`; see `map_rows`.
RowFunction = Callable[[Array, Any], Array]
# ``make(xp, arrays, dtype, device)`` returns such a function for matrices of this dtype.
MakeRowFunction = Callable[[ModuleType, Any, Any, Any], RowFunction]


class LinearMap(NamedTuple):
    """A linear map of rows and its adjoint, for arrays of any library."""

    rows: MakeRowFunction
    adjoint_rows: MakeRowFunction
    widths: tuple[int, int]  # the sizes of a row that the two functions return
    # The number of intermediates of a row; None if the map is a single product of matrices.
    row_size: int | None
    arrays: tuple[Any, ...] = ()  # all arrays that the two functions use, in nested tuples

    def adjoint(self) -> LinearMap:
        return self._replace(rows=self.adjoint_rows, adjoint_rows=self.rows, widths=self.widths[::-1])


def apply_to_rows(xp: ModuleType, linear: LinearMap, x: Array, out: Any = None) -> Array:
    """Apply a linear map to each row of a matrix. It is computed in float32 or better.

    The caller may give NumPy an array for the result.
    """
    dtype = accumulator(xp, x.dtype)
    if _is_for_numpy(xp, linear, x):
        wide: Any = xp.astype(x, dtype, copy=False)
        if is_torch(xp):
            y = _through_numpy().apply(wide, linear, *leaves_of(linear.arrays))
        else:
            y = _through_numpy_in_jax(linear, wide)
        return xp.astype(y, x.dtype, copy=False)
    function = linear.rows(xp, linear.arrays, dtype, common_device(x=x))

    def in_dtype(part: Array, out: Any) -> Array:
        y = function(xp.astype(part, dtype, copy=False), out if x.dtype == dtype else None)
        return xp.astype(y, x.dtype, copy=False)

    if linear.row_size is None:
        return in_dtype(x, None)
    return map_rows(xp, in_dtype, x, width=linear.widths[0], row_size=linear.row_size, out=out)


def _is_for_numpy(xp: ModuleType, linear: LinearMap, x: Array) -> bool:
    """Whether NumPy computes the map: not if the map's own arrays have gradients."""
    if not (is_torch(xp) or is_jax(xp)) or linear.row_size is None or not is_readable(xp, x):
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
        return tuple(parts) if type(x) is tuple else type(x)(*parts)
    if xp.isdtype(x.dtype, "real floating"):
        x = xp.astype(x, accumulator(xp, x.dtype), copy=False)
    if is_torch(xp):
        return x.numpy(force=True)
    return np.asarray(x)


@functools.cache
def _through_numpy() -> Any:
    import torch

    class ThroughNumpy(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: Any, linear: LinearMap, *leaves: Any) -> Any:
            ctx.linear = linear
            ctx.save_for_backward(*leaves)
            return torch.from_numpy(_in_numpy(linear, x))

        @staticmethod
        def backward(ctx: Any, upstream: Any) -> Any:
            import array_api_compat.torch as xp

            # Reading them raises PyTorch's error if one of them was modified in place.
            leaves = ctx.saved_tensors
            return apply_to_rows(xp, ctx.linear.adjoint(), upstream), *[None] * (1 + len(leaves))

    return ThroughNumpy
