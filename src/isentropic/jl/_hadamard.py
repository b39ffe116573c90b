"""Hadamard matrices: orthogonal matrices with all entries ±1/√n, applied in O(n log n).

A matrix of order m·2^j is the Kronecker product of a matrix of order m and Sylvester's matrix of order
2^j. Both are split into factors of order about 16, which need few passes over the data, and whose
matrix products are dense; see `_kronecker`.
"""

from __future__ import annotations

import functools
import math
from types import ModuleType
from typing import Any, NamedTuple, cast

import numpy as np

from isentropic._checks import check_axis, check_choice, check_floating, value_error
from isentropic._loops import outside_of_traces
from isentropic._namespace import Array, ArrayT, is_dask, is_numpy, library_of, namespace, to_numpy
from isentropic._numerics import quietly
from isentropic._row_maps import LinearMap, RowFunction, apply_along
from isentropic._threads import copies_small_operands
from isentropic._triton_launch import gpu_kind, self_test_failure
from isentropic.jl._flat import paley
from isentropic.jl._kronecker import apply_kronecker
from isentropic.jl._rounds import INPUT, OUTPUT, Factor, Program, Round, slots_of

# The orders of Paley's matrices that projections use. With order 1, and times powers of two, these are
# all their orders. For n ≥ 17 the least order that is at least n is at most 18 % above n.
_PALEY_ORDERS = (12, 20, 28, 36, 44, 60)
_FACTOR_BITS = 4  # log₂ of the order of a factor: the time of a product grows with the order
_LARGE_FACTOR_BITS = 5  # the same where the BLAS copies the operands, so that fewer products are faster
# The least and the greatest log₂ of the order of a last factor that is applied only to a sample of
# coordinates. With NumPy a high order saves factors that act on short columns, whose products are slow.
_SAMPLED_BITS = {"numpy": (5, 7)}
_MAX_DENSE = 64  # up to this order one product with the whole matrix is faster
_MAX_LARGE_DENSE = 128  # the same where the BLAS copies the operands
_SELF_TEST_ERROR = 1e-4  # of numbers of size 1, with products in float32

_matrices: dict[tuple[str, ...], Array] = {}  # Paley's for the kernel, by library, order and device


class Order(NamedTuple):
    """The order ``base · 2^doublings`` of a Hadamard matrix."""

    base: int
    doublings: int

    @property
    def size(self) -> int:
        return self.base << self.doublings

    @property
    def first_doublings(self) -> int:
        """How many doublings come before Paley's matrix in the Kronecker product; the others follow it.

        This choice determines the Hadamard matrix of an order, and with it the map that a seed gives.
        So it must never change.
        """
        if self.base == 1:
            return 0
        if self.size <= _MAX_DENSE:
            return self.doublings
        bits = math.log2(self.base) + self.doublings
        last = min(self.doublings, 5)
        bits_of_each = (bits - last) / (math.ceil(bits / 5) - 1)
        return min(self.doublings - last, max(0, round(bits_of_each - math.log2(self.base))))


@quietly
def hadamard_transform(x: ArrayT, *, axis: int = -1, norm: str = "ortho") -> ArrayT:
    """Walsh–Hadamard transform along an axis, in Sylvester's (natural) order.

    Along the last axis, the result equals ``x @ scipy.linalg.hadamard(n)`` times a scale. The matrix is
    never formed.

    Parameters
    ----------
    x : array (..., n, ...) of floats
        The length n of the axis must be a power of two. A Dask array stays lazy.
    axis : int
        The axis to transform.
    norm : {"ortho", "backward", "forward"}
        The scale: 1/√n for ``"ortho"``, 1 for ``"backward"``, 1/n for ``"forward"``. With ``"ortho"``
        the transform is its own inverse. The other two are inverses of each other.

    Returns
    -------
    array
        The transform, in the shape and dtype of `x`. It is computed in float32 or better.

    Raises
    ------
    TypeError, ValueError
        For an `x` that is not a floating-point array, a length that is not a power of two, an axis out
        of range, an unknown norm.

    Notes
    -----
    ``H_1 = [1]`` and ``H_2n = [[H_n, H_n], [H_n, −H_n]]``. Each of a few Kronecker factors takes a pass
    over the data. On GPUs with Triton, one pass applies all of them, or two for n > 16384.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic.jl import hadamard_transform
    >>> hadamard_transform(np.asarray([1.0, 0.0, 0.0, 1.0]), norm="backward")
    array([2., 0., 0., 2.])
    >>> x = np.random.default_rng(0).normal(size=(3, 1024))
    >>> bool(np.allclose(hadamard_transform(hadamard_transform(x)), x))
    True
    """
    check_choice("norm", norm, ("backward", "ortho", "forward"))
    sample = x._meta if is_dask(x) else x  # type: ignore[attr-defined]
    xp = namespace(x=sample)
    check_floating(xp, x=sample)
    check_axis(axis, x.ndim)
    axis = int(axis) % x.ndim
    n = x.shape[axis]
    if not n >= 1 or n % 1 or int(n) & (int(n) - 1):
        raise value_error("x", f"have a power of two of entries along axis {axis}", n)
    n = int(n)
    scale = {"backward": 1.0, "ortho": n**-0.5, "forward": 1.0 / n}[norm]
    return apply_along(xp, functools.partial(_sylvester_map, n, scale), x, axis, n)


def _sylvester_map(n: int, scale: float, trail: int) -> LinearMap:
    width, order = n * trail, Order(1, n.bit_length() - 1)

    def rows(xp: ModuleType, arrays: Any, dtype: Any, device: Any, is_adjoint: bool) -> RowFunction:
        # Sylvester's matrix is symmetric, so the transform is its own adjoint.
        factors = hadamard_factors(xp, order, scale=scale, dtype=dtype, device=device)
        return lambda rows, out: apply_kronecker(xp, factors, rows, trail, out)

    def program(xp: ModuleType, arrays: Any, n_rows: int, device: Any) -> Any:
        found = Program((Round(((n, None),), scale, (n, n), (n, n)),), 1, trail)
        return (found, ()) if n > 1 and has_kernel(xp, found, n_rows, device) else None

    row_size = width if n > _MAX_DENSE else None
    return LinearMap(rows, (width, width), row_size, program=program)


def hadamard_order(n: int) -> Order:
    """The smallest order of a Hadamard matrix, among those of this module, that is at least n."""
    sizes = [(base << max(0, (-(-n // base) - 1).bit_length()), base) for base in (1, *_PALEY_ORDERS)]
    size, base = min(sizes)
    return Order(base, (size // base).bit_length() - 1)


def hadamard_factors(
    xp: ModuleType,
    order: Order,
    *,
    scale: float,
    dtype: Any,
    device: Any,
    last: int | None = None,
) -> list[Array]:
    """Matrices whose Kronecker product is `scale` times the Hadamard matrix with entries ±1.

    The last one has the order 2^last, if that is given. It must be one of `doublings_to_sample`.
    """
    if is_numpy(xp):
        return _numpy_factors(order, scale, dtype, last, copies_small_operands())
    return _factors(xp, _factor_orders(order, last), scale, dtype, device)


@functools.lru_cache(maxsize=64)
def _numpy_factors(
    order: Order, scale: float, dtype: Any, last: int | None, are_large: bool
) -> list[Array]:
    factors: list[Any] = _factors(np, _factor_orders(order, last, are_large), scale, dtype, None)
    for factor in factors:
        # All maps of this order share the matrices of the cache.
        factor.flags.writeable = False
    return factors


def _factors(xp: ModuleType, orders: list[Order], scale: float, dtype: Any, device: Any) -> list[Array]:
    return [_matrix(xp, order, dtype, device) * scale ** (1 / len(orders)) for order in orders]


def _factor_orders(order: Order, last: int | None = None, are_large: bool = False) -> list[Order]:
    """Split an order into those of factors. The last one is applied first."""
    base, first = order.base, order.first_doublings
    are_large = are_large and last is None
    # A larger product of Paley's matrix would need another order of the factors, which must not change.
    if order.size <= (_MAX_LARGE_DENSE if are_large and base == 1 else _MAX_DENSE):
        return [order]
    rest = order.doublings - first
    if are_large:
        parts = _split(rest, _LARGE_FACTOR_BITS)
    else:
        if last is None:
            # It acts along rows, and the others on columns, which must not be too short for them.
            last = rest if rest <= _FACTOR_BITS + 1 else _FACTOR_BITS
        parts = [*_split(rest - last, _FACTOR_BITS), last]
    return [*([] if base == 1 else [Order(base, first)]), *(Order(1, part) for part in parts if part)]


def _split(bits: int, most: int) -> list[int]:
    """Split log₂ of an order into the fewest parts of at most `most`, which are similar."""
    count = -(-bits // most)
    return [(bits + i) // count for i in range(count)]


def doublings_to_sample(xp: ModuleType, order: Order, count: int) -> int | None:
    """log₂ of the order of a last factor that is applied only to a sample of `count` coordinates.

    None if the sample is so large that it is faster to apply all factors in full. Each coordinate of
    the sample takes as many multiplications as the order.
    """
    if order.size <= _MAX_DENSE:
        return None
    least, most = _SAMPLED_BITS.get(library_of(xp), (_FACTOR_BITS, _FACTOR_BITS))
    free = order.doublings - order.first_doublings
    last = min(most, free, (order.size // max(count, 1)).bit_length() - 1)
    return last if last >= least else None


def kernel_factors(
    xp: ModuleType, order: Order, device: Any
) -> tuple[tuple[Factor, ...], tuple[Array, ...]]:
    """The factors of a Hadamard matrix with entries ±1 for the kernel, and those that have an array."""
    base, doublings = order
    if base == 1:
        return ((1 << doublings, None),), ()
    first = order.first_doublings
    factors: list[Factor] = [(1 << first, None), (base, 0), (1 << doublings - first, None)]
    # Devices of CuPy have no hash.
    facts = (xp.__name__, str(base), str(device))
    if facts not in _matrices:
        with outside_of_traces(xp):
            _matrices[facts] = _matrix(xp, Order(base, 0), xp.float32, device)
    return tuple([factor for factor in factors if factor[0] > 1]), (_matrices[facts],)


def has_kernel(xp: ModuleType, program: Program, n_rows: int, device: Any) -> bool:
    """Whether the kernel computes a program for a matrix on a GPU."""
    return program.supports(n_rows) and _self_test_failure(xp, device) is None


def _self_test_failure(xp: ModuleType, device: Any) -> str | None:
    error = functools.partial(_self_test_error, xp, device)
    return self_test_failure(
        "Triton kernels of Hadamard matrices", xp, device, xp.float32, error, _SELF_TEST_ERROR
    )


def _self_test_error(xp: ModuleType, device: Any) -> float:
    """The largest error of the kernel for a small map, which NumPy computes in float64."""
    if gpu_kind(xp, device) == "old":
        raise RuntimeError("the GPU is older than the instructions of the kernel")
    order = Order(12, 4)
    x, rows = np.sin(np.arange(5 * 192.0)).reshape(5, 192), np.arange(1, 192, 3)
    signs = 1 - 2.0 * (np.arange(192) % 2)
    exact = apply_kronecker(
        cast(Any, np),
        hadamard_factors(cast(Any, np), order, scale=0.5, dtype=np.float64, device=None),
        x * signs,
        1,
    )
    kind = {"dtype": xp.float32, "device": device}
    numbers, choice = xp.asarray(x, **kind), xp.asarray(rows, dtype=xp.int32, device=device)
    split, arrays = kernel_factors(xp, order, device)
    part = Round(split, 0.5, (192, 192), (192, 64), 1, INPUT, 2, OUTPUT)
    arrays = (*arrays, xp.asarray(signs, **kind), slots_of(xp, choice, 192))
    y = to_numpy(Program((part,), 1, 1).run(xp, numbers, arrays))
    return float(np.max(np.abs(y - exact[:, rows])))


def _matrix(xp: ModuleType, order: Order, dtype: Any, device: Any) -> Array:
    """The Hadamard matrix of a small order, with entries ±1."""
    base, doublings = order
    if base == 1:
        h = xp.ones((1, 1), dtype=dtype, device=device)
    else:
        h = xp.asarray(paley(base), dtype=dtype, device=device)
    for _ in range(doublings):
        h = xp.concat((xp.concat((h, h), axis=1), xp.concat((h, -h), axis=1)), axis=0)
    return h
