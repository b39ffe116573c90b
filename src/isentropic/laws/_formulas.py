"""The formulas of the laws, except for the constant and log n, which are in `_law.py`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any, ClassVar

from isentropic._checks import check_real, is_array, plain_float, type_error, value_error
from isentropic._loops import is_known_true, is_readable
from isentropic._namespace import Array, namespace, to_numpy
from isentropic._numerics import clip, root_or_zero
from isentropic.laws._law import (
    Law,
    Parameter,
    at_least,
    check_law,
    check_parameter,
    log_length,
    log_of,
    over_queries,
)


@dataclass(frozen=True, eq=False, repr=False)
class SqrtLogLength(Law):
    """``√(ln n / ln base)``: keeps the entropy of Gaussian scores constant as n → ∞.

    Parameters
    ----------
    base : float > 1, or array
        The length at which the factor is 1.
    minimum : float or array, optional
        The smallest factor.

    References
    ----------
    Jin et al. 2023, arXiv 2306.08645, for diffusion models at other resolutions than in training.

    Examples
    --------
    >>> from isentropic import laws
    >>> laws.SqrtLogLength(16)(16**4)
    2.0
    """

    base: Parameter = 512
    minimum: Parameter | None = None
    _above: ClassVar[dict[str, float]] = {"base": 1, "minimum": -math.inf}

    def evaluate(self, xp: ModuleType, n: Array) -> Array:
        base = log_of(xp, over_queries(xp, self.base, n))
        root = xp.sqrt(base) if is_array(base) else math.sqrt(base)
        # The derivative of a plain root is infinite at n = 1.
        factor = root_or_zero(xp, log_length(xp, n)) / root
        return at_least(xp, factor, self.minimum, n)


@dataclass(frozen=True, eq=False, repr=False)
class AffineLog(Law):
    """``slope · ln n + intercept``: the form of SSMax, of Chiang–Cholak and of calibrated heads.

    Su's scale ``κ ln n / d`` is the slope ``κ/√d``, as factors multiply the scale ``1/√d``.

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
    _above: ClassVar[dict[str, float]] = dict.fromkeys(("slope", "intercept", "minimum"), -math.inf)

    def evaluate(self, xp: ModuleType, n: Array) -> Array:
        factor = log_length(xp, n) * over_queries(xp, self.slope, n)
        factor = factor + over_queries(xp, self.intercept, n)
        return at_least(xp, factor, self.minimum, n)


@dataclass(frozen=True, eq=False, repr=False)
class PowerLog(Law):
    """``offset + coefficient · (ln n)^exponent``, where n ≤ 2 counts as 2.

    The lower bound keeps the power finite at every exponent. The factor for n = 1 has no effect,
    because a single key has all the weight.

    Parameters
    ----------
    offset, coefficient, exponent : float or array

    References
    ----------
    Vasylenko et al. 2025, arXiv 2506.16640. There coefficient and exponent depend on the query.

    Examples
    --------
    >>> from isentropic import laws
    >>> round(laws.PowerLog(1.0, 0.5, 2.0)(100), 3)
    11.604
    """

    offset: Parameter
    coefficient: Parameter
    exponent: Parameter
    _above: ClassVar[dict[str, float]] = dict.fromkeys(("offset", "coefficient", "exponent"), -math.inf)

    def evaluate(self, xp: ModuleType, n: Array) -> Array:
        power = log_length(xp, n, least=2.0) ** over_queries(xp, self.exponent, n)
        return over_queries(xp, self.offset, n) + power * over_queries(xp, self.coefficient, n)


@dataclass(frozen=True, eq=False, repr=False)
class StepLog(Law):
    """``1 + coefficient · ln(1 + ⌊n / period⌋)``: the preset "llama-4", which grows in steps."""

    coefficient: Parameter
    period: Parameter
    _above: ClassVar[dict[str, float]] = {"coefficient": -math.inf, "period": 0}

    def evaluate(self, xp: ModuleType, n: Array) -> Array:
        steps = xp.floor(n / over_queries(xp, self.period, n))
        # Below a length of 0, which `shifted` may give, the step is −1 and its log1p is −∞.
        return xp.log1p(clip(xp, steps, min=0.0)) * over_queries(xp, self.coefficient, n) + 1.0


@dataclass(frozen=True, eq=False, repr=False)
class Power(Law):
    """``(n / base)^exponent``: keeps the entropy constant for keys on a sphere of few dimensions.

    Parameters
    ----------
    exponent : float or array
    base : float > 0, or array
        The length at which the factor is 1.
    minimum : float or array, optional
        The smallest factor. With 1, the factor is 1 for all lengths up to `base`.

    Notes
    -----
    Among n keys that are uniform on the unit sphere in d dimensions, the distance to the nearest key
    decreases like ``n^(−1/(d−1))``, and the gaps between the highest scores decrease like its square.
    So the factor that keeps the entropy constant grows like ``n^(2/(d−1))``.
    `isentropic.theory.invariant_factor` computes it.

    ``laws.shifted(laws.Power(exponent, period), period)`` is ``(1 + n / period)^exponent``.

    References
    ----------
    Bruno, Chen, Lin, Polyanskiy & Rigollet 2026, arXiv 2605.08505.

    Examples
    --------
    >>> from isentropic import laws
    >>> laws.Power(0.5, base=100)(400), laws.Power(0.5, base=100, minimum=1)(25)
    (2.0, 1.0)
    """

    exponent: Parameter
    base: Parameter = 512
    minimum: Parameter | None = None
    _above: ClassVar[dict[str, float]] = {"exponent": -math.inf, "base": 0, "minimum": -math.inf}

    def evaluate(self, xp: ModuleType, n: Array) -> Array:
        # A query that sees no key has the length 0, whose negative powers are infinite.
        growth = clip(xp, n, min=1.0) / over_queries(xp, self.base, n)
        factor = growth ** over_queries(xp, self.exponent, n)
        return at_least(xp, factor, self.minimum, n)


@dataclass(frozen=True, eq=False, repr=False)
class InfoScale(Law):
    """``√((1 − n^(−2/d)) / (1 − base^(−2/d)))`` with the head size d: the preset "infoscale"."""

    base: Parameter
    head_dim: float
    _above: ClassVar[dict[str, float]] = {"base": 1}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_real("head_dim", self.head_dim, above=0)

    def evaluate(self, xp: ModuleType, n: Array) -> Array:
        rate = -2.0 / float(self.head_dim)
        # `expm1` keeps the digits for large heads, where the exponent is close to 0.
        root = root_or_zero(xp, -xp.expm1(log_length(xp, n) * rate))
        base = log_of(xp, over_queries(xp, self.base, n))
        if is_array(base):
            return root / xp.sqrt(-xp.expm1(base * rate))
        return root / math.sqrt(-math.expm1(base * rate))


@dataclass(frozen=True, eq=False, repr=False)
class Knots(Law):
    """Interpolation between given factors at given lengths, linear in ln n.

    Parameters
    ----------
    lengths : sequence of K ≥ 2 numbers ≥ 1, increasing
        The lengths n_1, …, n_K of the knots.
    factors : sequence of K numbers, or array (..., K)
        The factors f_1, …, f_K at these lengths. An array has one row per head and can be learned.
    minimum : float, optional
        The smallest factor.

    Warns
    -----
    UserWarning
        If a number of keys is above the last length, and the last two factors differ. Values that
        cannot be read, on a GPU or within a transformation, give no warning.

    See Also
    --------
    isentropic.theory.invariant_factor : factors to interpolate.
    isentropic.AttentionDistribution.factor_for_entropy : factors to interpolate.

    Notes
    -----
    Between two knots the factor is

        f(n) = f_i + (f_{i+1} − f_i) · ln(n / n_i) / ln(n_{i+1} / n_i),

    and exactly f_i at n_i. Below the first and above the last knot, the line through the two outermost
    knots is extended. So two knots make the `AffineLog` through them. `numpy.interp` would keep the
    outermost factor constant instead, and the entropy would grow again above the last knot. Repeat a
    factor to keep it constant: ``Knots((512, 4096, 4097), (1.0, 1.4, 1.4))`` is 1.4 from 4096 on.

    The factors that keep the entropy constant are smooth functions of ln n. With knots at every
    doubling of the length, the error of the interpolation is at most ``(ln 2)²/8 ≈ 0.06`` times their
    second derivative with respect to ln n.

    Examples
    --------
    >>> from isentropic import laws
    >>> law = laws.Knots([64, 512, 4096], [1.0, 1.5, 1.75])
    >>> [round(law(n), 3) for n in (64, 512, 1448, 4096)]
    [1.0, 1.5, 1.625, 1.75]
    """

    lengths: Sequence[float]
    factors: Sequence[float] | Array
    minimum: float | None = None

    def __post_init__(self) -> None:
        lengths = _numbers("lengths", self.lengths, "be a sequence of numbers", least=1)
        if len(lengths) < 2:
            must = "have at least 2 numbers (one factor for all lengths is `laws.Constant`)"
            raise value_error("lengths", must, len(lengths))
        if not all(float(a) < float(b) for a, b in pairwise(lengths)):
            raise value_error("lengths", "increase", f"({', '.join(map(str, lengths))})")
        # A tuple is hashable and does not change, unlike a list.
        object.__setattr__(self, "lengths", lengths)
        if is_array(self.factors):
            check_parameter("factors", self.factors)
            shape = tuple(self.factors.shape)  # type: ignore[union-attr]
            if shape[-1:] != (len(lengths),):
                must = f"have the shape (..., {len(lengths)}), with one factor for each length"
                raise value_error("factors", must, shape)
        else:
            must = "be a sequence of numbers or an array"
            factors = _numbers("factors", self.factors, must)
            if len(factors) != len(lengths):
                must = f"have {len(lengths)} numbers, one for each length"
                raise value_error("factors", must, len(factors))
            object.__setattr__(self, "factors", factors)
        if self.minimum is not None:
            check_real("minimum", self.minimum)

    def evaluate(self, xp: ModuleType, n: Array) -> Array:
        lengths, last = [float(x) for x in self.lengths], len(self.lengths) - 1
        self._warn_beyond(xp, n)
        factors = [over_queries(xp, self._factor(i), n) for i in range(last + 1)]
        # Other laws have this bound in `log_length`.
        n = xp.where(n < 1.0, 1.0, n)
        result: Any = None
        for i, length in enumerate(lengths):
            # The line from knot i upwards. Above the last knot it has the slope of the last segment.
            left = min(i, last - 1)
            # log1p is positive also if the ratio of the lengths rounds to 1.
            width = math.log1p((lengths[left + 1] - lengths[left]) / lengths[left])
            rise = factors[left + 1] - factors[left]
            # ln(n / length) is exactly 0 at the knot, so that the factor there is exact.
            line = factors[i] + xp.log(n / length) * (1 / width) * rise
            result = line if result is None else xp.where(n < length, result, line)
        return at_least(xp, result, self.minimum, n)

    def _warn_beyond(self, xp: ModuleType, n: Array) -> None:
        """Warn if the factor is extrapolated, but not if it is a constant there."""
        if not (is_readable(xp, n) and is_known_true(xp, xp.any(n > float(self.lengths[-1])))):
            return
        before, last = self._factor(-2), self._factor(-1)
        level: Any = before == last
        if is_array(level):
            level = not is_readable(xp, level) or bool(xp.all(level))
        if not level:
            # Without the number of keys: Python shows each text once, and a cache grows by each token.
            warnings.warn(
                f"A query sees more keys than the last of the `lengths` of `laws.Knots`, "
                f"{self.lengths[-1]:g}: the line through the last two factors is extended.",
                UserWarning,
                stacklevel=2,
            )

    def _factor(self, i: int) -> Any:
        return self.factors[..., i] if is_array(self.factors) else self.factors[i]  # type: ignore[call-overload]

    def _named_shapes(self) -> list[tuple[str, tuple[int, ...], bool]]:
        # The last axis of `factors` is that of the knots, which the factor does not have.
        return [(name, shape[:-1], False) for name, shape, _ in super()._named_shapes()]


@dataclass(frozen=True, eq=False, repr=False)
class scaled(Law):  # noqa: N801 - in lower case, as it is called like a function of laws
    """``factor · law(n)``. A temperature τ is the factor 1/τ.

    Parameters
    ----------
    law : Law
    factor : float or array

    Examples
    --------
    >>> from isentropic import laws
    >>> laws.scaled(laws.LogLength(16), 0.5)(256)
    1.0
    """

    law: Law
    factor: Parameter

    def __post_init__(self) -> None:
        check_law(self.law)
        check_parameter("factor", self.factor)

    def evaluate(self, xp: ModuleType, n: Array) -> Array:
        return self.law.evaluate(xp, n) * over_queries(xp, self.factor, n)


@dataclass(frozen=True, eq=False, repr=False)
class shifted(Law):  # noqa: N801 - in lower case, as it is called like a function of laws
    """``law(n + shift)``, for rules that count one key more or less.

    Parameters
    ----------
    law : Law
    shift : float

    Examples
    --------
    >>> from isentropic import laws
    >>> laws.shifted(laws.LogLength(16), -1)(17)
    1.0
    """

    law: Law
    shift: float

    def __post_init__(self) -> None:
        check_law(self.law)
        check_real("shift", self.shift)

    def evaluate(self, xp: ModuleType, n: Array) -> Array:
        return self.law.evaluate(xp, n + plain_float(self.shift))


def _numbers(name: str, x: Any, must: str, *, least: float = -math.inf) -> tuple[float, ...]:
    """Check and return the finite numbers of a sequence or of an array on the host."""
    if is_array(x):
        xp = namespace(**{name: x})
        if not is_readable(xp, x):
            raise type_error(name, f"{must} that can be read", type(x).__name__)
        x = to_numpy(x).tolist()
    # A string is iterable, but of no numbers.
    if isinstance(x, str) or not isinstance(x, Iterable):
        raise type_error(name, must, type(x).__name__)
    numbers = tuple(x)
    for number in numbers:
        check_real(name, number, least=least)
    return numbers
