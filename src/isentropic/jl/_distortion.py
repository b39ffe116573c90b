"""Measure how well an embedding preserves distances, norms, inner products and angles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from isentropic._checks import check_floating, check_real, counts, value_error
from isentropic._loops import BLOCKS, Block, fold, is_differentiable, is_readable, map_blocks, take
from isentropic._namespace import (
    A_co,
    Array,
    ArrayT,
    Generic,
    Sliced,
    accumulator,
    common_device,
    from_numpy,
    is_numpy,
    is_symbolic,
    namespace,
    promoted,
    to_numpy,
)
from isentropic._numerics import clip, divide_or_zero, quietly, root_or_zero
from isentropic._products import row_products
from isentropic._row_maps import in_host_memory
from isentropic.jl import _dimensions
from isentropic.jl._draws import generator_of, takes_rng
from isentropic.jl._maps import Projection
from isentropic.jl._quantizers import Quantizer
from isentropic.jl._tails import binomial_interval

# The default for how many pairs are compared: up to 724 points, these are all pairs.
_DEFAULT_PAIRS = 2**18

# A Gram matrix may have so many times more entries than pairs are compared.
_GRAM_ENTRIES = 8

_QUANTILES = (0.0, 0.01, 0.5, 0.99, 1.0)
_SHOWN_EPS = (0.05, 0.1, 0.2, 0.5)


class FailureRate(NamedTuple):
    """The share of pairs whose squared distance is off by more than eps.

    Attributes
    ----------
    rate : float
        The share among the pairs that were compared.
    low, high : float
        The Clopper–Pearson interval for the share among all pairs. If all pairs were compared, both
        are equal to `rate`.
    """

    rate: float
    low: float
    high: float


@dataclass(frozen=True, eq=False, repr=False)
class DistortionReport(Generic[A_co]):
    """The errors of an embedding. `distortion` returns it, and its `repr` is a table.

    Attributes
    ----------
    distance : array (pairs,)
        Relative errors ``‖y_i − y_j‖²/‖x_i − x_j‖² − 1`` of squared distances. The eps of the
        Johnson–Lindenstrauss lemma bounds their magnitude.
    norm : array (n_points,)
        Relative errors of squared norms.
    inner_product : array (pairs,)
        Errors of inner products, ``(⟨y_i, y_j⟩ − ⟨x_i, x_j⟩)/(‖x_i‖ ‖x_j‖)``.
    angle : array (pairs,)
        Errors of the angles between x_i and x_j, in radians.
    n_points, n_features, n_components : int
        The number of points, and the dimensions of the points and of their images.
    n_pairs : int
        The number of all pairs, of which ``distance.shape[0]`` were compared.

    Notes
    -----
    For a Gaussian map to k dimensions the standard deviations are √(2/k) for squared distances and
    norms, √((1 + cos²)/k) for inner products, and about sin(angle)/√k for angles.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic.jl import distortion
    >>> x = np.eye(3)
    >>> report = distortion(x, x[:, :2])  # without the last feature
    >>> report.norm, report.worst
    (array([ 0.,  0., -1.]), 0.5)
    """

    distance: A_co
    norm: A_co
    inner_product: A_co
    angle: A_co
    n_points: int
    n_features: int
    n_components: int
    n_pairs: int

    @property
    def worst(self) -> float:
        """The largest relative error of a squared distance, in magnitude."""
        return float(abs(to_numpy(self.distance)).max())

    def failure_rate(self, eps: float, *, confidence: float = 0.95) -> FailureRate:
        """The share of pairs whose squared distance is off by more than `eps`.

        It is that of this map and these points. The δ of the lemma is the probability, over draws of
        the map, that *any* pair is off.

        Parameters
        ----------
        eps : float > 0
            The distortion that is allowed.
        confidence : float in [0.5, 1)
            The confidence level of the interval, if the pairs are a sample.

        Returns
        -------
        FailureRate

        Raises
        ------
        TypeError, ValueError
            For numbers that are not real, or out of range.

        Examples
        --------
        >>> import numpy as np
        >>> from isentropic.jl import distortion
        >>> x = np.eye(3)
        >>> distortion(x, x[:, :2]).failure_rate(0.6)  # no pair is off by more than half
        FailureRate(rate=0.0, low=0.0, high=0.0)
        """
        check_real("eps", eps, above=0)
        check_real("confidence", confidence, least=0.5)
        if confidence >= 1:
            raise value_error("confidence", "be below 1", confidence)
        errors = abs(to_numpy(self.distance))
        compared = errors.shape[0]
        failures = compared - int((errors <= eps).sum())  # NaN counts as a failure
        rate = failures / compared
        if compared == self.n_pairs:
            return FailureRate(rate, rate, rate)
        return FailureRate(rate, *binomial_interval(failures, compared, confidence))

    def __repr__(self) -> str:
        compared = self.distance.shape[0]
        sample = "all" if compared == self.n_pairs else f"{compared} of"
        heads = ("mean", "sd", "min", "1 %", "50 %", "99 %", "max")
        rows = {
            "squared distance": self.distance,
            "squared norm": self.norm,
            "inner product": self.inner_product,
            "angle (rad)": self.angle,
        }
        lines = [
            f"Distortion of {self.n_points} points, {self.n_features} → {self.n_components} "
            f"dimensions, {sample} {self.n_pairs} pairs",
            f"{'error of':<18}" + "".join(f"{head:>9}" for head in heads),
        ]
        for name, errors in rows.items():
            lines.append(f"{name:<18}" + "".join(f"{v:>9.4f}" for v in _summary(errors)))
        lines.append("squared distances off by more than")
        for eps in _SHOWN_EPS:
            rate, low, high = self.failure_rate(eps)
            interval = "" if low == high else f"  [{100 * low:.3g}, {100 * high:.3g}] % at 95 %"
            lines.append(f"{eps:>8}: {100 * rate:.3g} %{interval}")
        if self.n_components < self.n_features:  # for others, such as quantizers, it says nothing
            eps = _dimensions.eps(max(self.n_points, 2), self.n_components, delta=0.01)
            guarantee = f"within {eps:.3g}" if eps < 1 else "within no eps below 1"
            lines.append(
                f"A Gaussian map to {self.n_components} dimensions keeps them all {guarantee} "
                "with probability 99 %."
            )
        return "\n".join(lines)


@takes_rng
@quietly
def distortion(
    x: Sliced[ArrayT], y: Array | Quantizer | Projection, *, pairs: int | None = None, rng: Any = None
) -> DistortionReport[ArrayT]:
    """Compare points with their images: distances, norms, inner products and angles of pairs.

    Parameters
    ----------
    x : array (n, d)
        The points, n ≥ 2.
    y : array (n, k), map or Quantizer
        Their images, in the order of `x`, or what makes them.
    pairs : int ≥ 1, optional
        How many pairs to compare; 262 144 by default. If there are more, a random sample of this size
        is compared, without repetition; otherwise all pairs are.
    rng : None, int, numpy.random.Generator
        The source of random numbers for the sample.

    Returns
    -------
    DistortionReport
        Its arrays have the library and device of `x`, and are in float32 or better.

    Raises
    ------
    TypeError, ValueError
        For arrays that are not floating-point, not matrices, or that differ in their numbers of rows,
        libraries or devices.

    Notes
    -----
    Distances of close points do not lose digits: they are computed from differences. On a CPU, and if
    no gradient is recorded, NumPy computes other distances from inner products in float64, which is
    much faster. Temporary arrays hold a few million numbers, or a few for each pair.

    The error of the distance between two equal points with equal images is 0, and that of an inner
    product with a point at the origin. The angle with a zero vector is taken as 0.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic.jl import distortion, gaussian_projection
    >>> x = np.random.default_rng(0).normal(size=(100, 2000))
    >>> distortion(x, gaussian_projection(2000, 500, rng=1)(x))
    Distortion of 100 points, 2000 → 500 dimensions, all 4950 pairs
    error of               mean       sd      min      1 %     50 %     99 %      max
    squared distance     0.0081   0.0664  -0.2331  -0.1440   0.0066   0.1626   0.2336
    squared norm         0.0074   0.0680  -0.1839  -0.1595   0.0088   0.1563   0.1592
    inner product       -0.0007   0.0453  -0.1683  -0.1069  -0.0006   0.1065   0.1762
    angle (rad)          0.0007   0.0450  -0.1830  -0.1055   0.0006   0.1058   0.1631
    squared distances off by more than
        0.05: 45.1 %
         0.1: 13.8 %
         0.2: 0.364 %
         0.5: 0 %
    A Gaussian map to 500 dimensions keeps them all within 0.319 with probability 99 %.
    """
    images = _images(x, y)
    xp, device = _check_points(x, images)
    n, d = x.shape
    (pairs,) = counts(pairs=_DEFAULT_PAIRS if pairs is None else pairs)
    n_pairs = n * (n - 1) // 2
    pair: Any = _sample_pairs(n_pairs, min(pairs, n_pairs), rng)
    dtype = accumulator(xp, promoted(xp, x, images))
    if all(is_readable(xp, points) for points in (x, images)) and not is_differentiable(xp, x, images):
        errors = [from_numpy(e, x, dtype) for e in _errors_on_host(xp, x, images, pair, dtype)]
    else:
        # JAX has no int64 by default.
        pair = tuple(xp.asarray(index.astype("int32"), device=device) for index in pair)
        errors = _errors(xp, x, images, pair, dtype, 1.0)
    distance, norm, inner_product, angle = errors
    k = images.shape[1]
    return DistortionReport(
        distance, norm, inner_product, angle, n, n_features=d, n_components=k, n_pairs=n_pairs
    )


@quietly
def _errors_on_host(xp: Any, x: Array, y: Array, pair: Any, dtype: Any) -> list[Array]:
    """`_errors`, computed by NumPy in float64."""
    import array_api_compat.numpy as np

    # The products are as accurate as the dtype of the result requires.
    precision = float(np.finfo(np.float64).eps) / float(xp.finfo(dtype).eps)
    x, y = (in_host_memory(xp, points) for points in (x, y))
    return _errors(np, x, y, pair, np.float64, precision)


def _images(x: Any, y: Any) -> Any:
    if isinstance(y, Quantizer):
        return y.decode(y.encode(x))
    return y(x) if isinstance(y, Projection) else y


def _errors(xp: ModuleType, x: Array, y: Array, pair: Any, dtype: Any, precision: float) -> list[Array]:
    """The four arrays of a `DistortionReport`, computed in `dtype`."""
    unit = _power_of_two_above(xp, xp.astype(xp.max(xp.abs(x)), dtype))
    # Images have the unit of the points, so that ratios of both need no correction.
    norm_x, norm_y = (_square_norms(xp, points, unit) for points in (x, y))
    square_x, *units_x, inner_x = _pair_products(xp, x, unit, pair, norm_x, precision)
    square_y, *units_y, inner_y = _pair_products(xp, y, unit, pair, norm_y, precision)
    a, b = (root_or_zero(xp, xp.take(norm_x, index)) for index in pair)
    return [
        _relative_error(xp, square_y, square_x),
        _relative_error(xp, norm_y, norm_x),
        divide_or_zero(xp, inner_y - inner_x, a * b),
        _angle(xp, *units_y) - _angle(xp, *units_x),
    ]


def _check_points(x: Array, y: Array) -> tuple[ModuleType, Any]:
    """Check the points and their images, and return their library and device."""
    xp = namespace(x=x, y=y)
    device = common_device(x=x, y=y)
    check_floating(xp, x=x, y=y)
    for name, array in (("x", x), ("y", y)):
        if array.ndim != 2:
            raise value_error(name, "have 2 dimensions", array.ndim)
        if array.shape[1] < 1:
            raise value_error(name, "have at least 1 column", array.shape[1])
    n = x.shape[0]
    if is_symbolic(n):
        raise value_error("x", "have a known number of rows, whose pairs are chosen on the host", n)
    if n < 2:
        raise value_error("x", "have at least 2 rows", n)
    if y.shape[0] != n:
        raise value_error("y", f"have as many rows as `x` ({n})", y.shape[0])
    return xp, device


def _square_norms(xp: ModuleType, points: Array, unit: Array) -> Array:
    """The squared norms of points, in a unit of length, (n,)."""

    def squares(rows: Block) -> tuple[Array]:
        part = xp.astype(take(points, rows, -2), unit.dtype) / unit
        return (xp.sum(part * part, axis=-1, keepdims=True),)

    n, d = points.shape
    return map_blocks(xp, squares, n, max(1, BLOCKS.pairs // max(1, d)))[0][:, 0]


def _pair_products(
    xp: ModuleType, points: Array, unit: Array, pair: Any, norms: Array, precision: float
) -> tuple[Array, ...]:
    """Four numbers for each pair a, b of points, which are measured in the given unit of length.

    The numbers are ‖a − b‖², ‖a/‖a‖ − b/‖b‖‖², ‖a/‖a‖ + b/‖b‖‖² and ⟨a, b⟩. `norms` has all ‖a‖². NumPy
    computes the numbers from inner products, and from differences where inner products cancel.

    With the unit roundoff u, a sum of d products has an error of at most about d·u‖a‖‖b‖. For
    c = |cos(a, b)|, ‖a − b‖² is at least (1 − c)(‖a‖² + ‖b‖²), and the squares of unit vectors are at
    least 2(1 − c). So the relative errors of all three squares are at most 4(d + 4)u/(1 − c), which is
    64(d + 4)u for c ≤ 15/16. If the roundoff of the result is u/`precision` > u, then c may be larger,
    up to where the bound is that roundoff. Equal points have c = 1, so their distance is computed from
    differences, and is exactly 0.
    """
    if not is_numpy(xp):
        return _from_differences(xp, points, unit, pair, norms)
    d = points.shape[1]
    inner = _inner_products(xp, points, unit, pair)
    a, b = (xp.take(norms, index) for index in pair)
    cosine: Any = inner / (xp.sqrt(a) * xp.sqrt(b))
    numbers: Any = (a + b - 2 * inner, 2 - 2 * cosine, 2 + 2 * cosine, inner)
    # Squares that underflow are not accurate either, and a zero vector has no angle.
    is_accurate = xp.minimum(a, b) > d * xp.finfo(norms.dtype).smallest_normal
    is_accurate &= 1 - abs(cosine) >= min(1 / 16, 4 * (d + 4) * precision)  # False for NaN
    # The number of these pairs depends on values, which a traced call does not know.
    (others,) = xp.nonzero(~is_accurate)
    if others.size:
        those = [index[others] for index in pair]
        exact = _from_differences(xp, points, unit, those, norms)
        for number, part in zip(numbers, exact, strict=True):
            number[others] = part
    return numbers


def _inner_products(xp: ModuleType, points: Array, unit: Array, pair: Any) -> Any:
    """The inner products of pairs of points."""
    n, d = points.shape
    # The Gram matrix has all pairs. For a small sample its own products are cheaper.
    if n**2 > _GRAM_ENTRIES * pair[0].size:

        def products(block: Block) -> tuple[Array]:
            a, b = (
                xp.astype(xp.take(points, take(index, block, -1), axis=0), unit.dtype) / unit
                for index in pair
            )
            return (row_products(xp, a, b)[:, None],)

        size = max(1, BLOCKS.numpy_pairs // d)
        return map_blocks(xp, products, pair[0].size, size, in_threads=True)[0][:, 0]

    def with_products(total: Any, block: Block) -> Any:
        part = xp.astype(take(points, block, -1), unit.dtype) / unit
        return part @ part.T if total is None else total + part @ part.T

    # Over blocks of features, so that only a part of the points is in float64 at once.
    return fold(xp, with_products, d, max(1, BLOCKS.pairs // n))[pair]


def _from_differences(
    xp: ModuleType, points: Array, unit: Array, pair: Any, norms: Array
) -> tuple[Array, ...]:
    """The numbers of `_pair_products`, from sums over the features."""

    def sums(block: Block) -> tuple[Array, ...]:
        rows = [take(index, block, -1) for index in pair]
        a, b = (xp.astype(xp.take(points, row, axis=0), unit.dtype) / unit for row in rows)
        unit_a, unit_b = (
            divide_or_zero(xp, part, root_or_zero(xp, xp.take(norms, row))[:, None])
            for part, row in zip((a, b), rows, strict=True)
        )
        differences = (a - b, unit_a - unit_b, unit_a + unit_b)
        factors = (*((part, part) for part in differences), (a, b))
        return tuple(row_products(xp, *both)[:, None] for both in factors)

    numbers = BLOCKS.numpy_pairs if is_numpy(xp) else BLOCKS.pairs
    size = max(1, numbers // points.shape[1])
    found = map_blocks(xp, sums, pair[0].shape[0], size, in_threads=True)
    return tuple(part[:, 0] for part in found)


def _sample_pairs(n_pairs: int, size: int, rng: Any) -> tuple[np.ndarray, np.ndarray]:
    """The indices i > j of `size` different pairs of points, in any order."""
    if size == n_pairs:
        index = np.arange(n_pairs)
    else:
        # The order of pairs does not matter, and a shuffle would take time.
        index = generator_of(rng).choice(n_pairs, size, replace=False, shuffle=False)
    return _pair_of(index)


def _pair_of(index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The pairs i > j whose index i(i − 1)/2 + j is given."""
    i = ((1 + np.sqrt(1 + 8.0 * index)) / 2).astype(np.int64)
    i -= i * (i - 1) // 2 > index  # the square root may be rounded up, or down
    i += i * (i + 1) // 2 <= index
    return i, index - i * (i - 1) // 2


def _power_of_two_above(xp: Any, largest: Array) -> Any:
    """A unit near the largest number, so that squares neither underflow nor overflow.

    All errors are relative, so they do not depend on the unit.
    """
    limit = math.log2(float(xp.finfo(largest.dtype).max)) - 2
    is_known = (largest > 0) & (largest < math.inf)
    exponent = xp.ceil(xp.log2(xp.where(is_known, largest, 1.0)))
    # Division by a power of two is exact.
    return 2.0 ** clip(xp, exponent[None, None], min=-limit, max=limit)


def _relative_error(xp: Any, actual: Array, exact: Array) -> Array:
    is_zero = exact == 0
    error = actual / xp.where(is_zero, 1.0, exact) - 1.0
    error = xp.where(is_zero & (actual != 0), math.inf, error)
    return xp.where(is_zero & (actual == 0), 0.0, error)


def _angle(xp: Any, square_difference: Array, square_sum: Array) -> Array:
    """The angle between unit vectors u, v from ‖u − v‖² and ‖u + v‖² (Kahan); 0 for a zero vector."""
    has_zero = square_difference + square_sum < 3  # 4 for unit vectors, at most 2 with a zero vector
    square_sum = xp.where(has_zero, 1.0, square_sum)
    angle = 2 * xp.atan2(root_or_zero(xp, square_difference), root_or_zero(xp, square_sum))
    return xp.where(has_zero, 0.0, angle)


def _summary(errors: Array) -> list[float]:
    """The mean, the standard deviation and the quantiles `_QUANTILES`; NaN and ∞ are possible."""
    values = to_numpy(errors)
    moments = [math.nan, math.nan]
    if np.isfinite(values).all():
        moments = [values.mean(dtype=np.float64), values.std(dtype=np.float64)]
    # The last one is the maximum: `np.quantile` would subtract two infinities.
    quantiles = np.quantile(values, _QUANTILES[:-1], method="nearest")
    return [float(v) for v in (*moments, *quantiles, values.max())]
