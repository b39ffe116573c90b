"""Elementary functions that are safe at their singularities, in value and in gradient.

A guard replaces the argument of a singular function, not its result: the gradient of
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

import numpy as np

from isentropic import _jax_modes
from isentropic._checks import refuse_names
from isentropic._namespace import Array, imported_torch, is_numpy, is_torch
from isentropic._pytrees import Node

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def quietly(
    function: Callable[_Parameters, _Result],
    names: Mapping[str, str | None] = MappingProxyType({}),
    node_of: Any = None,
) -> Callable[_Parameters, _Result]:
    """Switch off NumPy's floating-point warnings and errors in a function, whatever the caller has set.

    Small weights underflow on purpose, and results beyond the dtype are documented to be NaN. The
    function runs in a context of its own, so that the caller's settings stay, even after an interrupt.
    If the first argument is a PyTorch tensor, nothing is switched off: parts that NumPy computes need a
    decorator of their own. Settings of JAX that would refuse single operations are ruled out too; see
    `_jax_modes`. `torch.fx.symbolic_trace` records the call. `names` maps argument names of other
    libraries to the names here. A TypeError for one of them says what it is called here. With
    `node_of`, a call is a single node in the graphs of torch.compile. It is Array, or the class of the
    result, a NamedTuple of arrays.
    """
    silenced: Callable[_Parameters, _Result] | None = None

    @functools.wraps(function)
    def quiet(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        nonlocal silenced
        torch = imported_torch()
        try:
            if node_of is not None and torch is not None and torch.compiler.is_dynamo_compiling():
                from isentropic import _torch_nodes

                return _torch_nodes.call(function, node_of, args, kwargs)
            if torch is not None and (
                (args and isinstance(args[0], torch.Tensor))
                or torch.compiler.is_compiling()  # it cannot trace context variables
            ):
                if (
                    node_of is not None
                    and "torch._dynamo" in sys.modules  # it takes seconds to load
                    and not torch.compiler.is_compiling()
                    and _dynamo_is_old()
                ):
                    from isentropic import _torch_nodes

                    return _torch_nodes.outside(function, args, kwargs)
                return function(*args, **kwargs)
            if silenced is None:
                silenced = np.errstate(all="ignore")(function)
            context = contextvars.copy_context()
            if "jax" in sys.modules and not (args and type(args[0]).__module__ == "numpy"):
                return _jax_modes.call(functools.partial(context.run, silenced), args, kwargs)
            return context.run(silenced, *args, **kwargs)
        except TypeError:  # Python refuses unknown names; calls without them cost nothing extra
            if (tracer := _tracer_of(args, kwargs)) is not None:
                if args and isinstance(args[0], Node):
                    return tracer.create_proxy("call_method", function.__name__, args, kwargs)
                return tracer.create_proxy("call_function", quiet, args, kwargs)
            refuse_names(function.__name__, kwargs, names)
            raise

    return quiet


@functools.cache
def _dynamo_is_old() -> bool:
    """Whether Dynamo fails on the code of a call even where a graph breaks before it."""
    return bool(imported_torch().__version__ < (2, 10))


def _tracer_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tracer of `torch.fx` for which an argument stands in for a tensor; None if none does."""
    torch = imported_torch()
    proxy = () if torch is None else torch.fx.Proxy
    fields = vars(args[0]).values() if args and isinstance(args[0], Node) else ()  # of a method
    return next((x.tracer for x in (*fields, *args, *kwargs.values()) if isinstance(x, proxy)), None)


def quiet_node(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Decorate a function that returns an array by `quietly`, and make its calls single nodes."""
    return quietly(function, node_of=Array)


def log_or(xp: ModuleType, z: Array, default: float) -> Array:
    """``log z``, and `default` where z = 0. Negative z gives NaN."""
    empty = z == 0
    # Libraries differentiate the branch that is not taken, too. So its argument is replaced as well.
    return xp.where(empty, default, xp.log(xp.where(empty, 1.0, z)))


def divide_or_zero(xp: ModuleType, a: Any, z: Array) -> Any:
    """``a / z``, and 0 where z = 0."""
    empty = z == 0
    return xp.where(empty, 0.0, a / xp.where(empty, 1.0, z))


def root_or_zero(xp: ModuleType, z: Array) -> Array:
    """``√z``, and 0 where z ≤ 0, as rounding may have made a small z negative."""
    empty = z <= 0  # type: ignore[operator]
    return xp.where(empty, 0.0, xp.sqrt(xp.where(empty, 1.0, z)))


def lift(x: Any, ndim: int) -> Any:
    """`x` with axes of length 1 in front, so that it has `ndim` axes.

    All arrays that broadcast get the same rank first, as a user may set JAX to refuse other ranks
    (``jax_numpy_rank_promotion``).
    """
    return x if x.ndim >= ndim else x[(None,) * (ndim - x.ndim) + (...,)]


def align(*arrays: Any) -> tuple[Any, ...]:
    """The arrays, lifted to the rank of the one with the most axes."""
    ndim = max(x.ndim for x in arrays)
    return tuple(lift(x, ndim) for x in arrays)


def clip(xp: ModuleType, x: Array, *, min: float | None = None, max: float | None = None) -> Any:  # noqa: A002
    """``xp.clip``, also for bounds that are symbolic, as under torch.compile."""
    # `clip` of array_api_compat tests the bounds for NaN, which takes 20 µs and fails for symbols.
    if is_torch(xp):
        return xp.clamp(x, min, max)
    if is_numpy(xp) and x.ndim > 0:  # for 0-d arrays `maximum` would return scalars
        x = x if min is None else xp.maximum(x, min)
        return x if max is None else xp.minimum(x, max)
    return xp.clip(x, min=min, max=max)


def expm1_beyond(xp: ModuleType, x: Array) -> Any:
    """``eˣ − 1 − x`` ≥ 0, to the accuracy of the dtype also where x is small."""
    small = xp.abs(x) < 0.5
    z = xp.where(small, x, 0.0)
    series: Any = 1.0
    # At ½ the first term that is left out is 2e-19 of the result.
    for k in range(16, 2, -1):
        series = z / k * series + 1.0
    far = xp.where(small, 1.0, x)
    return xp.where(small, z * z / 2 * series, xp.expm1(far) - far)


def replace_infinite_minimum(xp: ModuleType, m: Array) -> Array:
    """`m` with 0 in place of −∞, so that ``x − m`` is never ∞ − ∞. NaN is kept."""
    return xp.where(m == -math.inf, 0.0, m)
