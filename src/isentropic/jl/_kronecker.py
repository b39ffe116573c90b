"""Kronecker products of small matrices, applied to the rows of a matrix.

A product F ⊗ G is applied one factor at a time: reshape the vector to a matrix, and multiply along one
axis by each factor. `_WAYS` has the libraries for which other products than those of `_in_passes` are
faster.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

from isentropic._loops import is_gpu
from isentropic._namespace import Array, library_of
from isentropic._products import matmul_precision, product, row_products
from isentropic._threads import copies_small_operands

_MAX_COLUMNS = 1024  # the most columns of one product, where NumPy splits a product on columns


def apply_kronecker(
    xp: ModuleType, factors: list[Array], rows: Array, trail: int, out: Any = None
) -> Array:
    """Apply F₁ ⊗ F₂ ⊗ … ⊗ I to each row of a matrix; I is the identity of order `trail`.

    NumPy may write the result into `out`, and return it.
    """
    if rows.shape[0] * rows.shape[1] == 0 or not factors:
        return rows
    return _WAYS.get(library_of(xp), _in_passes)(xp, factors, rows, trail, out)


def sample_kronecker(xp: ModuleType, factors: list[Array], z: Array, coordinates: Any) -> Array:
    """Some coordinates of F₁ ⊗ F₂ ⊗ … along the second of three axes.

    `doublings_to_sample` gives the order of the last factor. The factors commute. So the last one can
    be applied after the others, and only at these coordinates. Each of them is the product of a row of
    that factor with as many numbers.
    """
    (lead, size, trail), (*others, last) = z.shape, factors
    order = last.shape[0]
    # The axis of the last factor joins those behind the others.
    z = apply_kronecker(xp, others, xp.reshape(z, (lead, size * trail)), order * trail)
    z = xp.take(xp.reshape(z, (lead, size // order, order, trail)), coordinates // order, axis=1)
    weights = xp.take(last, coordinates % order, axis=0)
    if trail == 1:
        y = row_products(xp, xp.reshape(z, z.shape[:3]), weights[None, ...])
    else:
        y = product(xp, weights[None, :, None, :], z)
    return xp.reshape(y, (lead, coordinates.shape[0], trail))


def _times_rows(xp: Any, factor: Array, rows: Array) -> Array:
    return product(xp, rows, xp.permute_dims(factor, (1, 0)))


def _times_columns(xp: Any, factor: Array, columns: Array, out: Any) -> Array:
    return product(xp, factor, columns)


def _in_passes(
    xp: Any,
    factors: list[Array],
    rows: Array,
    trail: int,
    out: Any,
    times_rows: Any = _times_rows,
    times_columns: Any = _times_columns,
) -> Array:
    """A product for each factor, the last one first: with rows if `trail` is 1, else with columns.

    ``times_rows(xp, F, rows)`` is ``rows @ F.T``, and ``times_columns(xp, F, columns, out)`` is
    ``F @ columns``, which may be written into `out`.
    """
    shape, size = rows.shape, rows.shape[0] * rows.shape[1]
    for i, factor in reversed(list(enumerate(factors))):
        f = factor.shape[0]
        if trail == 1:
            rows = times_rows(xp, factor, xp.reshape(rows, (size // f, f)))
        else:
            columns = xp.reshape(rows, (size // (f * trail), f, trail))
            rows = times_columns(xp, factor, columns, None if i else out)
        trail = trail * f
    return rows if rows is out else xp.reshape(rows, shape)


def _in_numpy(np: Any, factors: list[Array], rows: Array, trail: int, out: Any) -> Array:
    """The products of `_in_passes`, in sizes for which OpenBLAS is fast.

    It does not copy the operands of small products, if both are in row-major order. For wide ones it
    takes twice the time.
    """
    if trail == 1 and len(factors) > 2 and copies_small_operands():
        return _to_front(np, factors, rows, out)
    return _in_passes(np, factors, rows, trail, out, _times_few_rows, _times_few_columns)


def _times_few_rows(np: Any, factor: Array, rows: Array) -> Array:
    count, f = rows.shape
    # A part divides the rows, so all products have the same size and are one call.
    part = math.gcd(count, 128)
    if part < 16:
        return _times_rows(np, factor, rows)
    # By way of one axis, which makes a copy in row-major order.
    transposed = np.reshape(np.reshape(np.permute_dims(factor, (1, 0)), (f * f,)), (f, f))
    return product(np, np.reshape(rows, (count // part, part, f)), transposed)


def _times_few_columns(np: Any, factor: Array, columns: Array, out: Any) -> Array:
    count, f, trail = columns.shape
    result = np.empty(columns.shape, dtype=columns.dtype, device="cpu") if out is None else out
    part = math.gcd(trail, _MAX_COLUMNS)
    part = trail if part < 256 else part
    source, target = (
        np.permute_dims(np.reshape(x, (count, f, trail // part, part)), (0, 2, 1, 3))
        for x in (columns, result)
    )
    # Both are views, so the result needs no further pass.
    np.matmul(factor, source, out=target)
    return result


def _to_front(np: Any, factors: list[Array], rows: Array, out: Any) -> Array:
    """Products of many columns each, for a BLAS that copies their operands, and axes at the end.

    Each product moves the axis that it maps from the end to the front, so that all other axes are
    columns.
    """
    lead, n = rows.shape
    for i, factor in reversed(list(enumerate(factors))):
        f = factor.shape[0]
        columns = np.matrix_transpose(np.reshape(rows, (lead, n // f, f)))
        target = None if i or out is None else np.reshape(out, (lead, f, n // f))
        rows = np.matmul(factor, columns, out=target)
    return np.reshape(rows, (lead, n)) if out is None else out


def _in_jax(xp: Any, factors: list[Array], rows: Array, trail: int, out: Any) -> Array:
    """On a CPU, where a product of two matrices is faster than a batch, as in `_to_front`."""
    if is_gpu(xp, None):
        return _in_passes(xp, factors, rows, trail, out)
    shape = rows.shape
    size, n = shape[0] * shape[1], shape[1] // trail
    z = xp.permute_dims(xp.reshape(rows, (shape[0], n, trail)), (0, 2, 1))
    precision = matmul_precision()
    # Each product moves its axis to the front. After all of them, the axes are in order again.
    for factor in reversed(factors):
        f = factor.shape[0]
        z = xp.tensordot(factor, xp.reshape(z, (size // f, f)), axes=(1, 1), precision=precision)
    z = xp.reshape(z, (n, shape[0], trail))
    return xp.reshape(xp.permute_dims(z, (1, 0, 2)), shape)


_WAYS = {"numpy": _in_numpy, "jax": _in_jax}
