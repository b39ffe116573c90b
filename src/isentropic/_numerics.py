"""Elementary functions made safe where they are singular, in value and in gradient.

The argument of a singular function is guarded, not its result: the gradient of
``where(z > 0, log(z), 0)`` is NaN at z = 0, that of ``log(where(z > 0, z, 1))`` is 0.
"""

from __future__ import annotations

import contextvars
import functools
import math
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType, ModuleType
from typing import Any, ParamSpec, TypeVar

from isentropic._checks import refuse_names
from isentropic._namespace import Array, is_jax, is_numpy, is_torch

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def quietly(
    function: Callable[_Parameters, _Result], names: Mapping[str, str | None] = MappingProxyType({})
) -> Callable[_Parameters, _Result]:
    """The function without NumPy's warnings and errors of floating point, whatever its caller has set.

    That small weights underflow is meant, and that results beyond the dtype are NaN is documented. The
    call has a context of its own, so that nothing is left to put back, also at an interrupt.
    An unknown argument that is among the `names` of other libraries is named as here.
    """

    @functools.wraps(function)
    def quiet(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        torch = sys.modules.get("torch")
        try:
            if torch is not None and torch.compiler.is_compiling():  # which knows no contexts
                return function(*args, **kwargs)
            import numpy as np

            context = contextvars.copy_context()
            context.run(np.seterr, all="ignore")
            return context.run(function, *args, **kwargs)
        except TypeError:  # where Python refuses an unknown name: it costs other calls nothing
            refuse_names(function.__name__, kwargs, names)
            raise

    return quiet


def log_or(xp: ModuleType, z: Array, default: float) -> Array:
    """``log z``, and `default` where z = 0. Negative z gives NaN."""
    empty = z == 0
    return xp.where(empty, default, xp.log(xp.where(empty, 1.0, z)))


def divide_or_zero(xp: ModuleType, a: Array, z: Array) -> Any:
    """``a / z``, and 0 where z = 0."""
    empty = z == 0
    return xp.where(empty, 0.0, a / xp.where(empty, 1.0, z))


def root_or_zero(xp: ModuleType, z: Array) -> Array:
    """``√z``, and 0 where z ≤ 0, which rounding may have made of 0."""
    empty = z <= 0  # type: ignore[operator]
    return xp.where(empty, 0.0, xp.sqrt(xp.where(empty, 1.0, z)))


def lift(x: Any, ndim: int) -> Any:
    """`x` with axes of length 1 in front, so that it has `ndim`.

    Ranks are made equal before arrays broadcast: JAX can be told to refuse the rest
    (``jax_numpy_rank_promotion``).
    """
    return x if x.ndim >= ndim else x[(None,) * (ndim - x.ndim) + (...,)]


def align(*arrays: Any) -> tuple[Any, ...]:
    """The arrays with as many axes as the one that has most."""
    ndim = max(x.ndim for x in arrays)
    return tuple(lift(x, ndim) for x in arrays)


def clip(xp: ModuleType, x: Array, *, min: float | None = None, max: float | None = None) -> Any:  # noqa: A002
    """``xp.clip``, also with bounds that are symbolic, as numbers under torch.compile may be."""
    # array_api_compat's asks bounds whether they are NaN: of no symbol, and for 20 µs.
    if is_torch(xp):
        return xp.clamp(x, min, max)
    if is_numpy(xp) and x.ndim > 0:  # of others it would make scalars
        x = x if min is None else xp.maximum(x, min)
        return x if max is None else xp.minimum(x, max)
    return xp.clip(x, min=min, max=max)


def expm1_beyond(xp: ModuleType, x: Array) -> Any:
    """``eˣ − 1 − x`` ≥ 0, to all digits where x is small too."""
    small = xp.abs(x) < 0.5
    z = xp.where(small, x, 0.0)
    series: Any = 1.0
    for k in range(16, 2, -1):
        series = z / k * series + 1.0
    far = xp.where(small, 1.0, x)
    return xp.where(small, z * z / 2 * series, xp.expm1(far) - far)


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
