"""Elementary functions made safe where they are singular, in value and in gradient. Layer 0.

The argument of a singular function is guarded, not its result: the gradient of
``where(z > 0, log(z), 0)`` is NaN at z = 0, that of ``log(where(z > 0, z, 1))`` is 0.
"""

from __future__ import annotations

import math
from types import ModuleType

from isentropic._namespace import Array


def log_or(xp: ModuleType, z: Array, default: float) -> Array:
    """``log z``, and `default` where z = 0. Negative z gives NaN."""
    empty = z == 0
    return xp.where(empty, default, xp.log(xp.where(empty, 1.0, z)))


def divide_or_zero(xp: ModuleType, a: Array, z: Array) -> Array:
    """``a / z``, and 0 where z = 0."""
    empty = z == 0
    return xp.where(empty, 0.0, a / xp.where(empty, 1.0, z))


def replace_infinite_minimum(xp: ModuleType, m: Array) -> Array:
    """`m` with 0 for −∞, so that ``x − m`` is never ∞ − ∞. NaN stays."""
    return xp.where(m == -math.inf, 0.0, m)
