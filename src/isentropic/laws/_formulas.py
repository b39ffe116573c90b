"""The formulas of the laws."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from numbers import Real
from types import ModuleType
from typing import Any, Self

from isentropic._checks import check_real, common_shape, is_array, type_error, value_error, within
from isentropic._loops import is_readable
from isentropic._namespace import (
    Array,
    accumulator,
    default_dtype,
    device,
    namespace,
    same_arrays,
    to_numpy,
)
from isentropic._numerics import clip, lift, root_or_zero
from isentropic._pytrees import register_nodes

Parameter = float | Array


@dataclass(frozen=True, eq=False)
class Law(ABC):
    """A function from the number of visible keys to a factor on the scale.

    Call it with an integer (the result is a float) or with an array of lengths.

    Numbers out of the range of a parameter, or not finite, are refused when the law is made. Those in
    arrays are too where they can be read at once: in the memory of the host, and outside of
    transformations.

    In JAX and PyTorch a law is a tree (a *pytree*). Its leaves are the arrays; the numbers belong to
    its structure. So a law can be an argument of ``jax.jit``, ``jax.grad`` and ``jax.vmap``, of
    functions of ``torch.func``, and a gradient by a law is a law of gradients.

    Two laws are equal if they are of one class and have equal parameters. Arrays are equal if their
    shapes and values are, whatever their library, device or dtype; an array is never equal to a number,
    and NaN to nothing. To compare arrays whose values cannot be read, as within ``jax.jit``, raises a
    `TypeError`. Laws of numbers can be hashed, laws with arrays cannot.

    A law of your own is a subclass, a frozen dataclass, that defines `evaluate`. Fields that are
    arrays, of shape () or (H,), are its parameters.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import laws
    >>> law = laws.LogLength(16)
    >>> isinstance(law, laws.Law), law(256), law(np.asarray([16, 256]))
    (True, 2.0, array([1., 2.]))
    >>> laws.AffineLog(np.asarray([0.0, 0.5]), 1.0)(np.asarray([1])).shape  # two heads
    (2, 1)

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Saturating(laws.Law):
    ...     half: float
    ...
    ...     def evaluate(self, xp, n):
    ...         return 2 * n / (n + self.half)
    >>> Saturating(512)(512)
    1.0
    """

    # The names of the children of what a tree was made into: its leaves may be anything.
    # The signature is kept where there are no arrays, which can change their device and their flags.
    __slots__ = ("_children", "_signature")

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        register_nodes(cls, Law)
        return super().__new__(cls)

    def __call__(self, n: Any) -> Any:
        parameters = self.arrays
        if is_array(n):
            xp, place = namespace(("law", parameters), n=n), device(("law", parameters), n=n)
            if not xp.isdtype(n.dtype, ("integral", "real floating")):
                raise type_error("n", "have an integer or floating-point dtype", n.dtype)
            self._check_shapes(n.shape)
            floating = xp.isdtype(n.dtype, "real floating")
            dtype = n.dtype if floating else default_dtype(xp, "real floating", place)
            n = xp.astype(n, _compute_dtype(xp, dtype, parameters))
            if n.ndim > 0:
                n = lift(n, max([1, *(x.ndim + 1 for x in parameters)]))
            factor = self.evaluate(xp, n)
            if not is_array(factor):
                raise type_error("law", "evaluate to an array", type(factor).__name__)
            return factor

        if isinstance(n, bool) or not isinstance(n, (int, float, Real)):
            raise type_error("n", "be a number or an array", type(n).__name__)
        try:
            n = float(n)
        except OverflowError:
            raise value_error("n", "be within the range of a float", n) from None
        if parameters:
            xp, place = namespace(("law", parameters)), device(("law", parameters))
            self._check_shapes(())
            dtype = _compute_dtype(xp, parameters[0].dtype, parameters)
            return self.evaluate(xp, xp.full((), n, dtype=dtype, device=place))
        import numpy as np

        return float(self.evaluate(np, np.float64(n)))  # type: ignore[arg-type]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__slots__" in vars(cls):
            raise TypeError(
                f"{cls.__name__}, a law, must have no __slots__: its fields are its __dict__."
            )
        # Those that a dataclass would get compare arrays as numbers.
        for method in (Law.__eq__, Law.__hash__):
            if method.__name__ not in vars(cls):
                setattr(cls, method.__name__, method)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        own, others = vars(self), vars(other)
        return own.keys() == others.keys() and all(_is_same(own[name], others[name]) for name in own)

    def __hash__(self) -> int:
        if self.arrays:  # those of PyTorch would give a hash, another one for an equal law
            raise TypeError(f"unhashable: {type(self).__name__} with arrays")
        return hash((type(self), *vars(self).values()))

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))  # what is in slots could not be set again

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The parameters that are arrays."""
        return tuple(x for _, x in self._named_arrays())

    def signature(self, of_array: Callable[[Any], Any]) -> tuple[Any, ...]:
        """All of the law but the contents of its arrays."""
        kept = getattr(self, "_signature", None)
        if kept is not None:
            return kept
        parts = ((name, type(x), _signature(x, of_array)) for name, x in vars(self).items())
        signature = (type(self), *parts)
        if not self.arrays:
            object.__setattr__(self, "_signature", signature)
        return signature

    def at_lengths(self, xp: ModuleType, n: Array) -> Array:
        """``law(n)`` in the dtype of `n`, for lengths (..., L) that the law has been checked with."""
        own, is_kept = n, getattr(self, "_signature", None) is not None
        if not is_kept and (parameters := self.arrays):
            own = xp.astype(n, _compute_dtype(xp, n.dtype, parameters), copy=False)
        return xp.astype(self.evaluate(xp, own), n.dtype, copy=False)

    def _named_arrays(self) -> list[tuple[str, Array]]:
        found = []
        for name, x in vars(self).items():
            if isinstance(x, Law):
                found += x._named_arrays()
            elif x is not None and is_array(x):
                found.append((name, x))
        return found

    def _with_arrays(self, change: Callable[[Array], Array]) -> Law:
        changes: dict[str, Any] = {}
        for name, x in vars(self).items():
            if isinstance(x, Law):
                changes[name] = x._with_arrays(change)
            elif is_array(x):
                changes[name] = change(x)
        return replace(self, **changes)

    def _flatten(self) -> tuple[list[tuple[str, Any]], Any]:
        """Arrays and laws by their names, and all else, for `register_nodes`."""
        values = vars(self)
        names = getattr(self, "_children", None)
        if names is None:
            names = tuple(name for name, x in values.items() if isinstance(x, Law) or is_array(x))
        rest = tuple((name, None if name in names else x) for name, x in values.items())
        return [(name, values[name]) for name in names], (names, rest)

    @classmethod
    def _unflatten(cls, rest: Any, children: Iterable[Any]) -> Self:
        # Past all checks: the leaves of trees may be tracers, booleans of a mask, axes or None.
        law = object.__new__(cls)
        names, values = rest
        for name, x in (dict(values) | dict(zip(names, children, strict=True))).items():
            object.__setattr__(law, name, x)
        object.__setattr__(law, "_children", names)
        return law

    def _check_shapes(self, shape: tuple[int, ...]) -> None:
        """Refuse parameters that do not broadcast with lengths of a shape, or with one another."""
        last = (1,) if shape else ()
        for name, x in self._named_arrays():
            own = (*x.shape, *last) if x.ndim else x.shape
            shape = common_shape(**{"n": shape, name: own})

    @abstractmethod
    def evaluate(self, xp: ModuleType, n: Array) -> Array:
        """The factor for an array of lengths.

        Parameters
        ----------
        xp : module
            The array namespace of `n`; NumPy for a number.
        n : array (..., L)
            Lengths as floats; 0 for a query that sees no key.

        Returns
        -------
        array broadcastable to (..., L), in the dtype of `n`
        """


@dataclass(frozen=True, eq=False)
class Constant(Law):
    """The factor does not depend on n. ``Constant(1)`` is the standard attention.

    Examples
    --------
    >>> from isentropic import laws
    >>> laws.Constant(2.0)(1000)
    2.0
    """

    value: Parameter

    def __post_init__(self) -> None:
        _check_parameter("value", self.value)

    def evaluate(self, xp: ModuleType, n: Array) -> Array:
        return xp.ones_like(n) * _over_queries(xp, self.value, n)


@dataclass(frozen=True, eq=False)
class LogLength(Law):
    """``ln n / ln base``: Su's law, which holds the entropy of focused attention nearly constant.

    Parameters
    ----------
    base : float > 1, or array
        The length at which the factor is 1.
    minimum : float, optional
        The smallest factor. 1 leaves lengths up to `base` as they are.

    References
    ----------
    Su 2021, https://spaces.ac.cn/archives/8823.

    Examples
    --------
    >>> from isentropic import laws
    >>> laws.LogLength(16)(256), laws.LogLength(16, minimum=1)(4)
    (2.0, 1.0)
    """

    base: Parameter = 512
    minimum: float | None = None

    def __post_init__(self) -> None:
        _check_parameter("base", self.base, above=1)
        _check_minimum(self.minimum)

    def evaluate(self, xp: ModuleType, n: Array) -> Array:
        factor = _log_length(xp, n) / _over_queries(xp, _log(xp, self.base, n), n)
        return _at_least(xp, factor, self.minimum)


@dataclass(frozen=True, eq=False)
class SqrtLogLength(Law):
    """``√(ln n / ln base)``: the growth that holds the entropy of Gaussian scores as n → ∞.

    Parameters
    ----------
    base : float > 1, or array
        The length at which the factor is 1.
    minimum : float, optional
        The smallest factor.

    References
    ----------
    Jin et al. 2023, arXiv 2306.08645 (for diffusion models at other resolutions).

    Examples
    --------
    >>> from isentropic import laws
    >>> laws.SqrtLogLength(16)(16**4)
    2.0
    """

    base: Parameter = 512
    minimum: float | None = None

    def __post_init__(self) -> None:
        _check_parameter("base", self.base, above=1)
        _check_minimum(self.minimum)

    def evaluate(self, xp: ModuleType, n: Array) -> Array:
        base = _log(xp, self.base, n)
        root = xp.sqrt(base) if is_array(self.base) else math.sqrt(base)
        factor = root_or_zero(xp, _log_length(xp, n)) / _over_queries(xp, root, n)
        return _at_least(xp, factor, self.minimum)


@dataclass(frozen=True, eq=False)
class AffineLog(Law):
    """``slope · ln n + intercept``: SSMax, Chiang–Cholak (slope 1), heads calibrated one by one.

    Parameters
    ----------
    slope, intercept : float or array
    minimum : float or array, optional
        The smallest factor.

    References
    ----------
    Chiang & Cholak 2022, arXiv 2202.12172. Nakanishi 2025, arXiv 2501.19399.

    Examples
    --------
    >>> from isentropic import laws
    >>> round(laws.AffineLog(0.5, 1.0)(100), 3)
    3.303
    """

    slope: Parameter
    intercept: Parameter = 0.0
    minimum: Parameter | None = None

    def __post_init__(self) -> None:
        _check_parameter("slope", self.slope)
        _check_parameter("intercept", self.intercept)
        if self.minimum is not None:
            _check_parameter("minimum", self.minimum)

    def evaluate(self, xp: ModuleType, n: Array) -> Array:
        factor = _log_length(xp, n) * _over_queries(xp, self.slope, n)
        factor = factor + _over_queries(xp, self.intercept, n)
        if not is_array(self.minimum):
            return _at_least(xp, factor, self.minimum)  # type: ignore[arg-type]
        return xp.maximum(factor, _over_queries(xp, self.minimum, n))


@dataclass(frozen=True, eq=False)
class PowerLog(Law):
    """``offset + coefficient · (ln n)^exponent``, where n ≤ 2 counts as 2.

    So the power is finite at every exponent. What it is for a single key does not matter: that key has
    all the weight.

    Parameters
    ----------
    offset, coefficient, exponent : float or array

    References
    ----------
    Vasylenko et al. 2025, arXiv 2506.16640, with coefficients and exponents that depend on the query.

    Examples
    --------
    >>> from isentropic import laws
    >>> round(laws.PowerLog(1.0, 0.5, 2.0)(100), 3)
    11.604
    """

    offset: Parameter
    coefficient: Parameter
    exponent: Parameter

    def __post_init__(self) -> None:
        _check_parameter("offset", self.offset)
        _check_parameter("coefficient", self.coefficient)
        _check_parameter("exponent", self.exponent)

    def evaluate(self, xp: ModuleType, n: Array) -> Array:
        power = _log_length(xp, n, least=2.0) ** _over_queries(xp, self.exponent, n)
        return _over_queries(xp, self.offset, n) + power * _over_queries(xp, self.coefficient, n)


@dataclass(frozen=True, eq=False)
class StepLog(Law):
    """``1 + coefficient · ln(1 + ⌊n / period⌋)``: 1 up to the period, then rising in steps (Llama 4).

    Parameters
    ----------
    coefficient : float or array
    period : float > 0, or array

    Examples
    --------
    >>> from isentropic import laws
    >>> laws.StepLog(0.1, 8192)(8191)
    1.0
    """

    coefficient: Parameter
    period: Parameter

    def __post_init__(self) -> None:
        _check_parameter("coefficient", self.coefficient)
        _check_parameter("period", self.period, above=0)

    def evaluate(self, xp: ModuleType, n: Array) -> Array:
        steps = xp.floor(n / _over_queries(xp, self.period, n))
        return xp.log1p(clip(xp, steps, min=0.0)) * _over_queries(xp, self.coefficient, n) + 1.0


@dataclass(frozen=True, eq=False)
class Power(Law):
    """``(n / base)^exponent``: the growth that holds the entropy of keys on a sphere of few dimensions.

    Parameters
    ----------
    exponent : float or array
    base : float > 0, or array
        The length at which the factor is 1.
    minimum : float, optional
        The smallest factor. 1 leaves lengths up to `base` as they are.

    Notes
    -----
    Among n keys that are uniform on a sphere of d dimensions, the distance to the nearest falls like
    ``n^(−1/(d−1))``, and the gaps between the highest scores fall like its square. So the factor that
    holds the entropy tends to ``n^(2/(d−1))``; `isentropic.theory.invariant_factor` computes it.

    ``laws.shifted(laws.Power(exponent, period), period)`` is ``(1 + n / period)^exponent``.

    Examples
    --------
    >>> from isentropic import laws
    >>> laws.Power(0.5, base=100)(400), laws.Power(0.5, base=100, minimum=1)(25)
    (2.0, 1.0)
    """

    exponent: Parameter
    base: Parameter = 512
    minimum: float | None = None

    def __post_init__(self) -> None:
        _check_parameter("exponent", self.exponent)
        _check_parameter("base", self.base, above=0)
        _check_minimum(self.minimum)

    def evaluate(self, xp: ModuleType, n: Array) -> Array:
        growth = clip(xp, n, min=1.0) / _over_queries(xp, self.base, n)
        return _at_least(xp, growth ** _over_queries(xp, self.exponent, n), self.minimum)


@dataclass(frozen=True, eq=False)
class InfoScale(Law):
    """``√((1 − n^(−2/d)) / (1 − base^(−2/d)))`` with the head size d.

    Parameters
    ----------
    base : float > 1, or array
        The length at which the factor is 1.
    head_dim : float > 0
        The head size d.

    References
    ----------
    Li et al. 2025, arXiv 2501.08570.

    Examples
    --------
    >>> from isentropic import laws
    >>> laws.InfoScale(512, 64)(512)
    1.0
    """

    base: Parameter
    head_dim: float

    def __post_init__(self) -> None:
        _check_parameter("base", self.base, above=1)
        check_real("head_dim", self.head_dim, above=0)

    def evaluate(self, xp: ModuleType, n: Array) -> Array:
        rate = -2.0 / float(self.head_dim)
        root = root_or_zero(xp, -xp.expm1(_log_length(xp, n) * rate))
        base = _log(xp, self.base, n)
        if is_array(self.base):
            return root / _over_queries(xp, xp.sqrt(-xp.expm1(base * rate)), n)
        return root / math.sqrt(-math.expm1(base * rate))


@dataclass(frozen=True, eq=False)
class Scaled(Law):
    """What `scaled` makes."""

    law: Law
    factor: Parameter

    def __post_init__(self) -> None:
        check_law(self.law)
        _check_parameter("factor", self.factor)

    def __repr__(self) -> str:
        return f"scaled({self.law!r}, {self.factor!r})"

    def evaluate(self, xp: ModuleType, n: Array) -> Array:
        return self.law.evaluate(xp, n) * _over_queries(xp, self.factor, n)


@dataclass(frozen=True, eq=False)
class Shifted(Law):
    """What `shifted` makes."""

    law: Law
    shift: float

    def __post_init__(self) -> None:
        check_law(self.law)
        check_real("shift", self.shift)

    def __repr__(self) -> str:
        return f"shifted({self.law!r}, {self.shift!r})"

    def evaluate(self, xp: ModuleType, n: Array) -> Array:
        return self.law.evaluate(xp, n + float(self.shift))


def scaled(law: Law, factor: Parameter) -> Law:
    """``factor · law(n)``: a temperature τ is the factor 1/τ, a layer's α the factor α.

    Parameters
    ----------
    law : Law
    factor : float or array

    Returns
    -------
    Law

    Raises
    ------
    TypeError
        For a `law` that is not a law, or a `factor` that is not a real number or an array of floats.
    ValueError
        For a `factor` that is not finite.

    Examples
    --------
    >>> from isentropic import laws
    >>> laws.scaled(laws.LogLength(16), 0.5)(256)
    1.0
    """
    return Scaled(law, factor)


def shifted(law: Law, shift: float) -> Law:
    """``law(n + shift)``: for rules that count one key more or less.

    Parameters
    ----------
    law : Law
    shift : float

    Returns
    -------
    Law

    Raises
    ------
    TypeError
        For a `law` that is not a law, or a `shift` that is not a real number.
    ValueError
        For a `shift` that is not finite.

    Examples
    --------
    >>> from isentropic import laws
    >>> laws.shifted(laws.LogLength(16), -1)(17)
    1.0
    """
    return Shifted(law, shift)


def from_kappa(kappa: Parameter, head_dim: int) -> Law:
    """Su's other form of the scale, ``κ ln n / d``, as a factor on the usual ``1/√d``.

    Parameters
    ----------
    kappa : float or array
        ``κ = √d / ln base`` gives ``LogLength(base)``.
    head_dim : int
        The head size d.

    Returns
    -------
    AffineLog
        With slope κ/√d.

    Raises
    ------
    TypeError
        For parameters that are not real numbers, or a `kappa` that is not an array of floats either.
    ValueError
        For a `head_dim` that is not above 0, or a `kappa` that is not finite.

    Examples
    --------
    >>> import math
    >>> from isentropic import laws
    >>> round(laws.from_kappa(8 / math.log(512), head_dim=64)(512), 12)
    1.0
    """
    check_real("head_dim", head_dim, above=0)
    _check_parameter("kappa", kappa)
    return AffineLog(kappa / math.sqrt(head_dim))


def _signature(x: Any, of_array: Callable[[Any], Any]) -> Any:
    if isinstance(x, Law):
        return x.signature(of_array)
    return of_array(x) if is_array(x) else x


def _is_same(a: Any, b: Any) -> bool:
    if a is b:  # tracers too, which cannot be read
        return True
    if not (is_array(a) and is_array(b)):
        return not (is_array(a) or is_array(b)) and a == b
    if tuple(a.shape) != tuple(b.shape):  # which tracers have too
        return False
    try:
        return same_arrays(a, b)
    except (AttributeError, BufferError, RuntimeError, TypeError):  # each library's own
        must = "have arrays that can be read, to be compared"
        raise type_error("law", must, type(a).__name__) from None


def _compute_dtype(xp: ModuleType, dtype: Any, parameters: tuple[Array, ...]) -> Any:
    """Float32, or float64 where the lengths or a parameter are."""
    return accumulator(xp, xp.result_type(dtype, *(x.dtype for x in parameters)))


def _over_queries(xp: ModuleType, x: Any, n: Array) -> Any:
    """A parameter over the axes ``...`` of the lengths ``(..., L)``, in their dtype."""
    if isinstance(x, float) or not is_array(x):
        return float(x)  # a NumPy float64 would promote float32 lengths
    x = xp.astype(x, n.dtype)
    return lift(x[..., None], n.ndim) if x.ndim > 0 and n.ndim > 0 else x


def _log_length(xp: ModuleType, n: Array, least: float = 1.0) -> Array:
    return xp.log(xp.where(n < least, least, n))


def _log(xp: ModuleType, x: Any, n: Array) -> Any:
    """The logarithm of a parameter, not rounded to its dtype where that is half precision."""
    if isinstance(x, (int, float)) or not is_array(x):
        return math.log(x)
    return xp.log(xp.astype(x, n.dtype))


def _at_least(xp: ModuleType, factor: Array, minimum: float | None) -> Array:
    return factor if minimum is None else clip(xp, factor, min=float(minimum))


def _check_parameter(name: str, x: Any, *, above: float = -math.inf) -> None:
    if is_array(x):
        xp = namespace(**{name: x})
        if not xp.isdtype(x.dtype, "real floating"):
            raise type_error(name, "have a real floating-point dtype", x.dtype)
        if 0 in x.shape:
            raise value_error(name, "have numbers in it", f"the shape {tuple(x.shape)}")
        if is_readable(xp, x):
            check_numbers(name, to_numpy(x), above)
    elif isinstance(x, Real):
        check_real(name, x, above=above)
    else:
        raise type_error(name, "be a real number or an array of them", type(x).__name__)


def check_numbers(name: str, numbers: Any, above: float = -math.inf) -> None:
    """Refuse what `check_real` refuses, in an array on the host."""
    # The minimum is NaN where a number is.
    if numbers.min() > above and numbers.max() < math.inf:
        return
    import numpy as np

    place = tuple(np.argwhere(~((numbers > above) & (numbers < math.inf)))[0].tolist())
    where = f" at {place}" if place else ""
    raise value_error(name, within(above), f"{numbers[place]}{where}")


def _check_minimum(minimum: Any) -> None:
    if minimum is not None:
        check_real("minimum", minimum)


def check_law(law: Any, *, optional: bool = False) -> None:
    """Refuse what is not a law, and None unless it is `optional` (the standard attention)."""
    if not isinstance(law, Law) and not (optional and law is None):
        must = "be a law of isentropic.laws" + " or None" * optional
        got = type(law).__name__
        if isinstance(law, str):
            must += " (`laws.preset` has those with a name)"
        elif isinstance(law, type) and issubclass(law, Law):
            got = f"the class {law.__name__}; call it: `{law.__name__}(...)`"
        elif any(kind.__name__ == "LawModule" for kind in type(law).__mro__):
            got += "; call it: `law()`"
        elif callable(law):
            got += " (a function is none: subclass `laws.Law`)"
        raise type_error("law", must, got)


# The law of attention where none is named.
DEFAULT_LAW = LogLength(512)
