"""Elementary functions made safe where they are singular, in value and in gradient. Layer 0.

The argument of a singular function is guarded, not its result: the gradient of
``where(z > 0, log(z), 0)`` is NaN at z = 0, that of ``log(where(z > 0, z, 1))`` is 0.
"""

from __future__ import annotations

import math
from types import ModuleType

from isentropic._namespace import Array, is_jax


def log_or(xp: ModuleType, z: Array, default: float) -> Array:
    """``log z``, and `default` where z = 0. Negative z gives NaN."""
    empty = z == 0
    return xp.where(empty, default, xp.log(xp.where(empty, 1.0, z)))


def divide_or_zero(xp: ModuleType, a: Array, z: Array) -> Array:
    """``a / z``, and 0 where z = 0."""
    empty = z == 0
    return xp.where(empty, 0.0, a / xp.where(empty, 1.0, z))


def root_or_zero(xp: ModuleType, z: Array) -> Array:
    """``√z``, and 0 where z ≤ 0, which rounding may have made of 0."""
    empty = z <= 0  # type: ignore[operator]
    return xp.where(empty, 0.0, xp.sqrt(xp.where(empty, 1.0, z)))


def last_axis(xp: ModuleType, x: Array, axis: int) -> Array:
    """`x` with an axis moved to the end."""
    # Not `moveaxis`: PyTorch has no batching rule for array_api_compat's.
    axis = int(axis) % x.ndim
    order = [i for i in range(x.ndim) if i != axis]
    return xp.permute_dims(x, (*order, axis))


def replace_infinite_minimum(xp: ModuleType, m: Array) -> Array:
    """`m` with 0 for −∞, so that ``x − m`` is never ∞ − ∞. NaN stays."""
    return xp.where(m == -math.inf, 0.0, m)


def product(xp: ModuleType, a: Array, b: Array) -> Array:
    """``a @ b`` to the full precision of the dtype: JAX would round float32 on a GPU to TF32."""
    return xp.matmul(a, b, precision="highest") if is_jax(xp) else xp.matmul(a, b)
