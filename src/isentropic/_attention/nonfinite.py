"""Numbers that are not finite: whether arrays have some, and their replacement under a mask.

Each library finds them in its own fastest way.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from isentropic._loops import is_known_true
from isentropic._namespace import Array
from isentropic._rows import Rows


def without_nonfinite(
    plan: Any, query: Array, key: Array, value: Array | None
) -> tuple[Array, Array, Array | None, tuple[Array, Array]]:
    """Replace NaN and ∞ by 0 in the arrays, and return what to add to the logits in exchange.

    A hidden key has weight 0, but 0 · NaN is NaN in the products, forward and backward. So nonfinite
    numbers are replaced by 0 in the products. Instead NaN is added to the logits of the queries that
    see a nonfinite row.
    """
    xp = plan.xp
    zero = xp.zeros((1,), dtype=plan.compute, device=plan.device)
    query, query_is_finite = _finite_numbers(plan, query)
    key, key_is_finite = _finite_numbers(plan, key)
    if value is not None:
        value, value_is_finite = _finite_numbers(plan, value)
        key_is_finite = key_is_finite & value_is_finite

    query_nan = xp.where(query_is_finite[..., None], zero, math.nan)
    key_nan = xp.where(key_is_finite, zero, math.nan)[..., None, :]
    if key_nan.ndim > 2 and query.ndim > 2 and query.shape[-3] > key_nan.shape[-3] > 1:
        # Logits have a head for each query head, and not for each group.
        key_nan = xp.repeat(key_nan, query.shape[-3] // key_nan.shape[-3], axis=-3)
    return query, key, value, (query_nan, key_nan)


def _finite_numbers(plan: Any, x: Array) -> tuple[Array, Array]:
    """`x` with 0 in place of NaN and ∞, and whether each row had neither of them."""
    xp: Any = plan.xp
    if isinstance(x, Rows):
        return x.finite()
    if plan.library == "torch" and not plan.is_differentiated and x.shape[-1] > 0:
        # Three passes over the memory. PyTorch's `isfinite` alone takes six.
        largest = xp.linalg.vector_norm(x, ord=math.inf, axis=-1)
        # The norm of a row with such a number is ∞ or NaN, and neither is below ∞.
        return xp.nan_to_num(x, 0.0, 0.0, 0.0), largest < math.inf
    if plan.library == "torch":
        from isentropic._attention import triton

        if triton.has_finite_rows(plan):
            return triton.finite_rows(x)
    is_finite = xp.isfinite(x)
    return xp.where(is_finite, x, 0.0), xp.all(is_finite, axis=-1)


def are_known_finite(plan: Any, query: Any, key: Any, value: Any) -> bool:
    """Whether all numbers are known to be finite. False if the values cannot be read."""
    if not plan.is_readable:  # also if they are `Rows`
        return False
    xp = plan.xp
    arrays = (query, key) if value is None else (query, key, value)
    if plan.library == "jax":  # inside a JAX trace no result can be read
        return all(is_known_true(xp, xp.all(xp.isfinite(x))) for x in arrays)
    # One sum is faster than a test of each number. The sum of finite numbers may overflow.
    return math.isfinite(_checksum(plan, *arrays)) or all(bool(xp.all(xp.isfinite(x))) for x in arrays)


def _checksum(plan: Any, *arrays: Any) -> float:
    """A number that tells whether the numbers in readable arrays of NumPy or PyTorch are finite.

    It is finite only if all of them are finite, and NaN if any of them is NaN. It is a sum of squares
    where possible, because BLAS computes such a sum fastest.
    """
    # `vdot` and sums of Python's floats never warn, where `dot` and sums of NumPy's do.
    are_tensors, total = plan.library == "torch", 0.0
    for x in arrays:
        is_contiguous = x.is_contiguous() if are_tensors else x.flags.c_contiguous
        if x.dtype != plan.compute or not is_contiguous:
            total += x.sum().item()
        else:
            # `force`: the tensor may need a gradient, or have a sign that is not in memory yet.
            numbers = x.numpy(force=True) if are_tensors else x
            total += float(np.vdot(numbers, numbers))
    return total
