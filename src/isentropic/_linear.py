"""Linear maps of the rows of a matrix, computed in blocks of rows.

PyTorch computes small products slowly on a CPU. So NumPy applies the maps to its tensors, in their own
memory, and their gradient is the adjoint map.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from isentropic._loops import is_differentiable, is_readable, map_rows
from isentropic._namespace import Array, accumulator, common_device, is_torch, leaves_of

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


def apply_to_rows(xp: ModuleType, linear: LinearMap, x: Array) -> Array:
    """Apply a linear map to each row of a matrix. It is computed in float32 or better."""
    dtype = accumulator(xp, x.dtype)
    if _is_for_numpy(xp, linear, x):
        y = _through_numpy().apply(xp.astype(x, dtype, copy=False), linear, *leaves_of(linear.arrays))
        return xp.astype(y, x.dtype, copy=False)
    function = linear.rows(xp, linear.arrays, dtype, common_device(x=x))

    def in_dtype(part: Array, out: Any) -> Array:
        y = function(xp.astype(part, dtype, copy=False), out if x.dtype == dtype else None)
        return xp.astype(y, x.dtype, copy=False)

    if linear.row_size is None:
        return in_dtype(x, None)
    return map_rows(xp, in_dtype, x, width=linear.widths[0], row_size=linear.row_size)


def _is_for_numpy(xp: ModuleType, linear: LinearMap, x: Array) -> bool:
    """Whether NumPy computes the map of a tensor: not if the map's own arrays have gradients."""
    if not is_torch(xp) or linear.row_size is None or not is_readable(xp, x):
        return False
    leaves = tuple(leaves_of(linear.arrays))
    return all(is_readable(xp, a) for a in leaves) and not is_differentiable(xp, *leaves)


@functools.cache
def _through_numpy() -> Any:
    import array_api_compat.numpy as np
    import torch

    def host(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(host, x)) if type(x) is tuple else type(x)(*map(host, x))
        x = x.float() if x.is_floating_point() and x.dtype != torch.float64 else x
        return x.numpy(force=True)

    class ThroughNumpy(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: Any, linear: LinearMap, *leaves: Any) -> Any:
            ctx.linear = linear
            ctx.save_for_backward(*leaves)
            linear = linear._replace(arrays=host(linear.arrays))
            return torch.from_numpy(apply_to_rows(np, linear, host(x)))

        @staticmethod
        def backward(ctx: Any, upstream: Any) -> Any:
            import array_api_compat.torch as xp

            # Reading them raises PyTorch's error if one of them was modified in place.
            leaves = ctx.saved_tensors
            return apply_to_rows(xp, ctx.linear.adjoint(), upstream), *[None] * (1 + len(leaves))

    return ThroughNumpy
