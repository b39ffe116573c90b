"""Hadamard matrices: orthogonal matrices with all entries ±1/√n, applied in O(n log n).

A matrix of order m·2^j is the Kronecker product of a matrix of order m and Sylvester's matrix of order
2^j. A product H_a ⊗ H_b is applied one factor at a time: reshape the vector to (a, b), and multiply
along one axis by each factor. Factors of order about 16 need few passes over the data, and their
matrix products are dense.
"""

from __future__ import annotations

import functools
import math
from types import ModuleType
from typing import Any, cast

import numpy as np

from isentropic._checks import check_axis, check_choice, check_floating, value_error
from isentropic._loops import is_gpu, map_chunks
from isentropic._namespace import Array, ArrayT, is_dask, is_jax, is_numpy, namespace, to_numpy
from isentropic._numerics import matmul_precision, product, quietly, row_products
from isentropic._row_maps import LinearMap, RowFunction, apply_to_rows
from isentropic._threads import copies_small_operands
from isentropic._triton_launch import gpu_kind, self_test_failure
from isentropic.jl._rounds import INPUT, OUTPUT, Factor, Program, Round, slots_of

# The orders of Paley's matrices that projections use. With order 1, and times powers of two, these are
# all their orders. For n ≥ 17 the least order that is at least n is at most 18 % above n.
_PALEY_ORDERS = (12, 20, 28, 36, 44, 60)
_FACTOR_BITS = 4  # log₂ of the order of a factor: the time of a product grows with the order
_LARGE_FACTOR_BITS = 5  # the same where the BLAS copies the operands, so that fewer products are faster
_MAX_COLUMNS = 1024  # the most columns of one product, where NumPy splits a product on columns
# The least and the greatest log₂ of the order of a last factor that NumPy applies only to a sample of
# coordinates.
_SAMPLED_BITS = (5, 7)
_MAX_DENSE = 64  # up to this order one product with the whole matrix is faster
_MAX_LARGE_DENSE = 128  # the same where the BLAS copies the operands
_SELF_TEST_ERROR = 1e-4  # of numbers of size 1, with products in float32

# An order as (base, doublings): base · 2^doublings.
Order = tuple[int, int]


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
    if is_dask(x):
        return map_chunks(x, lambda part: hadamard_transform(part, axis=axis, norm=norm), axis, n)

    scale = {"backward": 1.0, "ortho": n**-0.5, "forward": 1.0 / n}[norm]
    lead, trail = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 :])
    y = apply_to_rows(xp, _sylvester_map(n, scale, trail), xp.reshape(x, (lead, n * trail)))
    return xp.reshape(y, x.shape)


def _sylvester_map(n: int, scale: float, trail: int) -> LinearMap:
    width, order = n * trail, (1, n.bit_length() - 1)

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
    orders = [(base, max(0, (-(-n // base) - 1).bit_length())) for base in (1, *_PALEY_ORDERS)]
    return min(orders, key=lambda order: order[0] << order[1])


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
        factor.flags.writeable = False
    return factors


def _factors(xp: ModuleType, orders: list[Order], scale: float, dtype: Any, device: Any) -> list[Array]:
    return [_matrix(xp, order, dtype, device) * scale ** (1 / len(orders)) for order in orders]


def _factor_orders(order: Order, last: int | None = None, are_large: bool = False) -> list[Order]:
    """Split an order into those of factors. The last one is applied first."""
    base, doublings = order
    are_large = are_large and last is None
    # A larger product of Paley's matrix would need another order of the factors, which must not change.
    if base << doublings <= (_MAX_LARGE_DENSE if are_large and base == 1 else _MAX_DENSE):
        return [order]
    first = 0 if base == 1 else _doublings_of_paley(order)
    rest = doublings - first
    if are_large:
        parts = _split(rest, _LARGE_FACTOR_BITS)
    else:
        if last is None:
            # It acts along rows, and the others on columns, which must not be too short for them.
            last = rest if rest <= _FACTOR_BITS + 1 else _FACTOR_BITS
        parts = [*_split(rest - last, _FACTOR_BITS), last]
    return [*([] if base == 1 else [(base, first)]), *((1, part) for part in parts if part)]


def _split(bits: int, most: int) -> list[int]:
    """Split log₂ of an order into the fewest parts of at most `most`, which are similar."""
    count = -(-bits // most)
    return [(bits + i) // count for i in range(count)]


def _doublings_of_paley(order: Order) -> int:
    """How many doublings come before Paley's matrix in the Kronecker product; the others follow it.

    This choice determines the Hadamard matrix of an order, and with it the map that a seed gives. So it
    must never change.
    """
    base, doublings = order
    bits = math.log2(base) + doublings
    last = min(doublings, 5)
    bits_of_each = (bits - last) / (math.ceil(bits / 5) - 1)
    return min(doublings - last, max(0, round(bits_of_each - math.log2(base))))


def doublings_to_sample(xp: ModuleType, order: Order, count: int) -> int | None:
    """log₂ of the order of a last factor that is applied only to a sample of `count` coordinates.

    None if the sample is so large that it is faster to apply all factors in full. Each coordinate of
    the sample takes as many multiplications as the order.
    """
    base, doublings = order
    size = base << doublings
    if size <= _MAX_DENSE:
        return None
    # With NumPy a high order saves factors that act on short columns, whose products are slow.
    least, most = _SAMPLED_BITS if is_numpy(xp) else (_FACTOR_BITS, _FACTOR_BITS)
    free = doublings - (0 if base == 1 else _doublings_of_paley(order))
    last = min(most, free, (size // max(count, 1)).bit_length() - 1)
    return last if last >= least else None


def kernel_factors(
    xp: ModuleType, order: Order, device: Any
) -> tuple[tuple[Factor, ...], tuple[Array, ...]]:
    """The factors of a Hadamard matrix with entries ±1 for the kernel, and those that have an array."""
    base, doublings = order
    if base == 1:
        return ((1 << doublings, None),), ()
    is_small = base << doublings <= _MAX_DENSE
    first = doublings if is_small else _doublings_of_paley(order)
    factors: list[Factor] = [(1 << first, None), (base, 0), (1 << doublings - first, None)]
    matrix = _matrix if is_jax(xp) else _kept_matrix  # JAX may be tracing
    return tuple([factor for factor in factors if factor[0] > 1]), (
        matrix(xp, (base, 0), xp.float32, device),
    )


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
    order: Order = (12, 4)
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


# The matrices of `_kept_matrix`, by library, order, dtype and device; devices of CuPy have no hash.
_matrices: dict[tuple[Any, ...], Array] = {}


def _kept_matrix(xp: ModuleType, order: Order, dtype: Any, device: Any) -> Array:
    facts = (xp.__name__, order, str(dtype), str(device))
    if facts not in _matrices:
        _matrices[facts] = _matrix(xp, order, dtype, device)
    return _matrices[facts]


def apply_kronecker(
    xp: ModuleType, factors: list[Array], rows: Array, trail: int, out: Any = None
) -> Array:
    """Apply F₁ ⊗ F₂ ⊗ … ⊗ I to each row of a matrix; I is the identity of order `trail`.

    NumPy may write the result into `out`, and return it.
    """
    shape = rows.shape
    size = shape[0] * shape[1]
    if size == 0 or not factors:
        return rows
    if is_jax(xp) and not is_gpu(xp, None):
        return _apply_in_turn(xp, factors, rows, trail)
    if is_numpy(xp) and trail == 1 and len(factors) > 2 and copies_small_operands():
        return _apply_to_wide(xp, factors, rows, out)
    first, *others = factors
    for factor in reversed(others):
        rows = _times(xp, factor, rows, trail)
        trail = trail * factor.shape[0]
    rows = _times(xp, first, rows, trail, out)
    return rows if rows is out else xp.reshape(rows, shape)


def _times(xp: ModuleType, factor: Array, rows: Array, trail: int, out: Any = None) -> Array:
    """Apply I ⊗ F ⊗ I to each row: F maps numbers that are `trail` entries apart."""
    f, size = factor.shape[0], math.prod(rows.shape)
    if trail == 1:
        return _times_transposed(xp, xp.reshape(rows, (size // f, f)), factor)
    columns = xp.reshape(rows, (size // (f * trail), f, trail))
    return _times_columns(xp, factor, columns, out) if is_numpy(xp) else product(xp, factor, columns)


def sample_kronecker(
    xp: ModuleType, factors: list[Array], rows: Array, trail: int, coordinates: Any
) -> Array:
    """Some coordinates of each row of ``apply_kronecker(xp, factors, rows, trail)``.

    `doublings_to_sample` gives the order of the last factor. The factors commute. So the last one can
    be applied after the others, and only at these coordinates. Each of them is the product of a row of
    that factor with as many numbers.
    """
    lead, (*others, last) = rows.shape[0], factors
    size = math.prod([factor.shape[0] for factor in factors])
    order, count = last.shape[0], coordinates.shape[0]
    z = apply_kronecker(xp, others, rows, order * trail)
    z = xp.take(xp.reshape(z, (lead, size // order, order * trail)), coordinates // order, axis=1)
    weights = xp.take(last, coordinates % order, axis=0)
    if trail == 1:
        return row_products(xp, z, weights[None, ...])
    z = product(xp, weights[None, :, None, :], xp.reshape(z, (lead, count, order, trail)))
    return xp.reshape(z, (lead, count * trail))


def _apply_in_turn(xp: Any, factors: list[Array], rows: Array, trail: int) -> Array:
    """`apply_kronecker` for JAX on a CPU, where a product of two matrices is faster than a batch.

    Each product moves the axis that it maps from the end to the front.
    """
    shape = rows.shape
    size, n = shape[0] * shape[1], shape[1] // trail
    z = xp.permute_dims(xp.reshape(rows, (shape[0], n, trail)), (0, 2, 1))
    precision = matmul_precision()
    for factor in reversed(factors):
        f = factor.shape[0]
        z = xp.tensordot(factor, xp.reshape(z, (size // f, f)), axes=(1, 1), precision=precision)
    z = xp.reshape(z, (n, shape[0], trail))
    return xp.reshape(xp.permute_dims(z, (1, 0, 2)), shape)


def _apply_to_wide(np: Any, factors: list[Array], rows: Array, out: Any) -> Array:
    """`apply_kronecker` for NumPy with products of many columns each, for axes at the end.

    A product takes long if it has few columns and its operands are copied. Here each product moves the
    axis that it maps from the end to the front, so that all other axes are columns.
    """
    lead, n = rows.shape

    def to_front(factor: Array, rows: Array, out: Any = None) -> Array:
        f = factor.shape[0]
        columns = np.matrix_transpose(np.reshape(rows, (lead, n // f, f)))
        return np.matmul(
            factor, columns, out=None if out is None else np.reshape(out, (lead, f, n // f))
        )

    first, *others = factors
    for factor in reversed(others):
        rows = to_front(factor, rows)
    rows = to_front(first, rows, out)
    return np.reshape(rows, (lead, n)) if out is None else out


def _times_transposed(xp: ModuleType, rows: Array, factor: Array) -> Array:
    """``rows @ factor.T``, as a batch of small products with NumPy."""
    factor = xp.permute_dims(factor, (1, 0))
    if is_numpy(xp):
        # OpenBLAS does not copy the operands of small products if both are in row-major order.
        count, f = rows.shape
        part = math.gcd(count, 128)
        if part >= 16:
            rows = xp.reshape(rows, (count // part, part, f))
            factor = xp.reshape(xp.reshape(factor, (f * f,)), (f, f))
    return product(xp, rows, factor)


def _times_columns(np: Any, factor: Array, columns: Array, out: Any) -> Array:
    """``factor @ columns`` by NumPy, for matrices side by side; written into `out`, if it is given."""
    count, f, trail = columns.shape
    result = np.empty(columns.shape, dtype=columns.dtype, device="cpu") if out is None else out
    # OpenBLAS does not copy the operands of small products. For wide ones it takes twice the time.
    part = math.gcd(trail, _MAX_COLUMNS)
    part = trail if part < 256 else part
    source, target = (
        np.permute_dims(np.reshape(x, (count, f, trail // part, part)), (0, 2, 1, 3))
        for x in (columns, result)
    )
    np.matmul(factor, source, out=target)
    return result


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


def paley(order: int) -> list[list[float]] | None:
    """Paley's Hadamard matrix of an order divisible by 4, or None if there is none.

    The order is q + 1 for q = 3 modulo 4, or 2(q + 1) for q = 1 modulo 4, where q is a prime or the
    square of a prime.
    """
    if is_prime(order - 1):
        rows = [[1.0] * order] + [[-1.0, *row] for row in jacobsthal(order - 1)]
        for i in range(1, order):
            rows[i][i] = 1.0
        return rows
    q = order // 2 - 1
    if q % 4 != 1 or not has_field(q):
        return None
    # In a conference matrix each entry e = ±1 becomes the block e·[[1, 1], [1, −1]], and each 0 becomes
    # the block [[1, −1], [−1, −1]].
    rows = conference(order // 2)
    upper = [[y for e in row for y in ((e, e) if e else (1.0, -1.0))] for row in rows]
    lower = [[y for e in row for y in ((e, -e) if e else (-1.0, -1.0))] for row in rows]
    return [row for pair in zip(upper, lower, strict=True) for row in pair]


def conference(order: int) -> list[list[float]]:
    """The symmetric matrix C with zeros on the diagonal, else ±1, and C² = q·I.

    The order is q + 1, where q = 1 modulo 4 is a prime or the square of a prime.
    """
    return [[0.0] + [1.0] * (order - 1)] + [[1.0, *row] for row in jacobsthal(order - 1)]


def jacobsthal(q: int) -> list[list[float]]:
    """The matrix whose entry (i, j) tells whether j − i is a square in the field of q elements.

    The entry is 1 for a square, −1 for an element that is not a square, and 0 for i = j. Rows sum to 0.
    The product with the transpose is q·I − J, where J is the matrix of ones.
    """
    p = q if is_prime(q) else math.isqrt(q)
    # The field is that of integers modulo p, or that of a + b√r, where r is not a square.
    r = next(i for i in range(2, 2 * p) if pow(i, p // 2, p) != 1)
    field = [(a, b) for a in range(p) for b in range(q // p)]
    squares = {((a * a + r * b * b) % p, 2 * a * b % p) for a, b in field}
    symbol = {x: 1.0 if x in squares else -1.0 for x in field} | {(0, 0): 0.0}
    return [[symbol[(c - a) % p, (d - b) % p] for c, d in field] for a, b in field]


def has_field(q: int) -> bool:
    """Whether q is an odd prime or the square of one, so that `jacobsthal` has its field."""
    return q % 2 == 1 and (is_prime(q) or (math.isqrt(q) ** 2 == q and is_prime(math.isqrt(q))))


def is_prime(n: int) -> bool:
    return n > 1 and all(n % i for i in range(2, math.isqrt(n) + 1))
