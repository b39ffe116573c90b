"""Laws through the factors that hold the entropies of heads, in NumPy.

In shapes, G is the number of lengths, and a head is one of the last axis.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from isentropic.laws._formulas import AffineLog, Knots, Power
from isentropic.laws._law import Law
from isentropic.theory import gaussian_entropy, sphere_entropy

# The penalty, in nats, on doubling a factor. It keeps the factor near 1 for heads whose entropy hardly
# depends on it.
_PENALTY = 0.02
# The tolerance, in nats: a length whose entropy misses the target by more is not used in the fit.
_TOLERANCE = 0.05
# The steps of the interpolation between two factors.
_STEPS = 100
# The shapes p among which `chosen_shape` chooses: 0 is a power of n, 1 is affine in log n, 2 its root.
_SHAPES = (0, 1 / 4, 1 / 2, 3 / 4, 1, 5 / 4, 3 / 2, 2)
# The misfit of log factors that counts as much as a shape that differs from 1 by 1.
_MISFIT = 0.01
# The error of a log factor. Those of MiniLM-L6, fitted to two sets of 20 texts, differ by this much.
_NOISE = 0.02
# The range of the shapes for which factors are extrapolated.
EXTREME_SHAPES = (0, 1, 2)
# The dimensions of the random keys of "auto", which interpolates between them. In ∞ dimensions scores
# are normal.
_DIMENSIONS = (4.0, 8.0, math.inf)
# The inverse temperatures of their tables: how many, the lowest, and the highest for normal scores and
# for spheres, where the entropy is near 0.
_TEMPERATURES, _LOWEST, _HIGHEST_NORMAL, _HIGHEST = 40, 0.05, 1e3, 2e6
# The factors of more keys than 2 to this power stay the same, as their entropies are not known.
_MOST_OCTAVES = 47
# Lengths nearer to the reference than this, in log n, do not tell the slope: it would be the error of a
# factor, divided by a small number.
_NEAR = 0.05
# The last knot of "auto", in multiples of the longest length of the fit.
_REACH = 64


def holding_factors(
    factors: Sequence[float], entropy: np.ndarray, target: np.ndarray, current: np.ndarray | None
) -> np.ndarray:
    """The factors (G, heads) at which entropies (factors, G, heads) reach their target (heads,).

    They are NaN where no factor reaches it. If an entropy hardly depends on the factor, the factor
    stays near 1. The `factors` are equidistant in their logarithms, and multiply the `current` ones.
    """
    log_factor, h = _interpolated(np.log(factors), entropy)
    log_factor = log_factor[:, None, None]
    if current is not None:
        log_factor = log_factor + np.log(current)
    error = h - target
    cost = error**2 + (_PENALTY / math.log(2) * log_factor) ** 2
    best = np.argmin(cost, axis=0)[None, ...]
    factor = np.exp(np.take_along_axis(np.broadcast_to(log_factor, cost.shape), best, axis=0)[0])
    is_met = np.abs(np.take_along_axis(error, best, axis=0)[0]) < _TOLERANCE
    return np.where(is_met, factor, np.nan)


def _interpolated(u: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Interpolate y (N, ...) at N ≥ 4 equidistant u, by cubic splines without a knot near the ends."""
    slope = _spline_slopes(y)
    t = np.linspace(0, 1, _STEPS, endpoint=False).reshape(-1, *(1,) * y.ndim)
    start, end, rise, fall = y[:-1], y[1:], slope[:-1], slope[1:]
    bend, curve = 3 * (end - start) - 2 * rise - fall, 2 * (start - end) + rise + fall
    between = start + t * (rise + t * (bend + t * curve))
    fine = np.concatenate((np.moveaxis(between, 0, 1).reshape(-1, *y.shape[1:]), y[-1:]))
    steps = np.arange(fine.shape[0]) / _STEPS * (u[1] - u[0])
    return u[0] + steps, fine


def _spline_slopes(y: np.ndarray) -> np.ndarray:
    """The slopes of a cubic spline at its knots 0, 1, …, N − 1, from its values (N, ...)."""
    matrix = 4 * np.eye(len(y)) + np.eye(len(y), k=1) + np.eye(len(y), k=-1)
    right = np.empty_like(y)
    right[1:-1] = 3 * (y[2:] - y[:-2])
    # The third derivative has no jump at the second knot, nor at the last but one.
    matrix[0, :3] = matrix[-1, :-4:-1] = 1, 0, -1
    right[0], right[-1] = 2 * (2 * y[1] - y[0] - y[2]), 2 * (y[-1] + y[-3] - 2 * y[-2])
    slope = np.linalg.solve(matrix, right.reshape(len(y), -1))
    return np.asarray(slope.reshape(y.shape))


class Held(NamedTuple):
    """The factors that hold the entropies of the heads of one layer."""

    lengths: np.ndarray  # (G,)
    factor: np.ndarray  # (G, heads), NaN where no factor holds the entropy
    weight: np.ndarray  # (G,)
    reference: float
    entropy: np.ndarray  # (heads,), which the factors hold

    @property
    def x(self) -> np.ndarray:
        """``log(n/reference)``, (G, 1)."""
        return np.asarray(np.log(self.lengths / self.reference)[:, None])

    @property
    def weights(self) -> np.ndarray:
        """The weights (G, heads), 0 where no factor holds the entropy."""
        return np.where(np.isnan(self.factor), 0.0, self.weight[:, None])

    @property
    def smallest(self) -> np.ndarray:
        """The smallest factor of each head, at most 1."""
        return np.fmin.reduce(self.factor, axis=0, initial=1.0)

    def filled(self) -> np.ndarray:
        """The factors, interpolated where there is none: (G, heads)."""
        result = np.ones_like(self.factor)
        for head, factor in enumerate(self.factor.T):
            if (known := factor == factor).any():
                x = self.x[:, 0]
                result[:, head] = np.interp(x, x[known], factor[known])
        return result


def curve(x: Any, slope: Any, shape: Any) -> np.ndarray:
    """``(1 + p · slope · x)^(1/p)`` of the shape p, which is ``exp(slope · x)`` at p = 0.

    References
    ----------
    Box & Cox 1964, Journal of the Royal Statistical Society B 26, 211–252: its inverse.
    """
    is_power = shape == 0
    p = np.where(is_power, 1.0, shape)
    return np.where(is_power, np.exp(slope * x), np.maximum(1 + p * slope * x, 1e-9) ** (1 / p))


def slope_of(held: Held, weights: np.ndarray, shape: Any) -> np.ndarray:
    """The slopes (heads,) of curves through 1 at the reference, by weighted least squares."""
    factor = np.where(weights > 0, held.factor, 1.0)
    is_power = shape == 0
    p = np.where(is_power, 1.0, shape)
    y = np.where(is_power, np.log(factor), (factor**p - 1) / p)
    weights = _far(held, weights)
    moment = (weights * held.x**2).sum(axis=0)
    # If no length determines the slope, it is 0.
    slope = (weights * held.x * y).sum(axis=0) / np.where(moment > 0, moment, np.inf)
    return np.asarray(slope)


def _far(held: Held, weights: np.ndarray) -> np.ndarray:
    """The weights, 0 for lengths that are too near to the reference to tell the slope."""
    return np.where(np.abs(held.x) > _NEAR, weights, 0.0)


def _weights_above(held: Held) -> np.ndarray:
    """The weights of lengths from the reference on; of all lengths for heads that have none above.

    Short lengths tell little about long ones: the entropy is near log n there.
    """
    weights = held.weights
    above = np.where(held.x > -1e-6, weights, 0.0)
    return np.where(_far(held, above).sum(axis=0) > 0, above, weights)


class _Above(NamedTuple):
    """The factors to which growth is fitted, with the weights of `_weights_above` and `_far`."""

    lengths: list[float]  # (G,)
    weights: np.ndarray  # (G, heads)
    measured: np.ndarray  # (G, heads), the log factors, or 0

    @classmethod
    def of(cls, held: Held) -> _Above:
        weights = _far(held, _weights_above(held))
        used = weights.any(axis=1)
        measured = np.log(np.where(weights > 0, held.factor, 1.0))
        return cls(held.lengths[used].tolist(), weights[used], measured[used])


def chosen_shape(held: Held) -> np.ndarray:
    """The shape (heads,) that fits best from the reference on; 1 unless the factors say otherwise."""
    weights = _weights_above(held)
    factor = np.where(weights > 0, held.factor, 1.0)
    cost = []
    for shape in _SHAPES:
        error = np.log(curve(held.x, slope_of(held, weights, shape), shape) / factor)
        misfit = (weights * error**2).sum(axis=0) / np.maximum(weights.sum(axis=0), 1e-9)
        cost.append(misfit / _MISFIT**2 + (shape - 1) ** 2)
    return np.asarray(_SHAPES)[np.argmin(cost, axis=0)]


def extrapolated(held: Held, lengths: Sequence[float], shape: Any) -> np.ndarray:
    """The factors (lengths, heads) of the curves of a shape, never below the smallest of the fit."""
    x = np.log(np.asarray(lengths) / held.reference)[:, None]
    slope = slope_of(held, _weights_above(held), shape)
    return np.maximum(curve(x, slope, shape), held.smallest)


def expected(held: Held, lengths: Sequence[float]) -> np.ndarray:
    """The factors (lengths, heads) to expect: a mean of two guesses, weighted by their likelihoods.

    One guess is the curve of the shape that fits best, the other the factors of random keys. The mean
    is that of their logarithms.
    """
    above = _Above.of(held)
    both, known = (*above.lengths, *lengths), len(above.lengths)
    curved = np.log(extrapolated(held, both, chosen_shape(held)))
    random, _ = nearest_random_keys(held, both)

    def misfit(guess: np.ndarray) -> np.ndarray:
        error = np.where(above.weights > 0, guess[:known] - above.measured, 0.0)
        return np.asarray((error**2).sum(axis=0)) / (2 * _NOISE**2)

    share = 1 / (1 + np.exp(np.clip(misfit(random) - misfit(curved), -50, 50)))
    mean = share * random + (1 - share) * curved
    return np.maximum(np.exp(mean[known:]), held.smallest)


def nearest_random_keys(held: Held, lengths: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """The random keys that fit best: the logarithms of their factors (lengths, heads), and 1/dimension.

    For keys that are uniform on a sphere, its dimension and the entropy at the reference determine the
    factor at each length. Each head gets the dimension that fits its factors best. If its factors grow
    more slowly than those of normal scores, it gets a power of the factors of normal scores. If they
    grow faster than in the lowest dimension, it gets a power of the factors in that dimension.
    """
    above = _Above.of(held)
    weights, measured, known = above.weights, above.measured, len(above.lengths)
    curves = _curves_of_random_keys(held, (*above.lengths, *lengths))

    def dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.asarray((weights * a * b).sum(axis=0))

    def nearest(start: np.ndarray, end: np.ndarray, low: float, high: float) -> tuple[np.ndarray, Any]:
        """The point ``start + t · (end − start)`` that fits best with t from low to high, and t."""
        along = (end - start)[:known]
        length = dot(along, along)
        t = dot(measured - start[:known], along) / np.where(length > 0, length, np.inf)
        t = np.clip(t, low, high)
        return np.asarray(start + t * (end - start)), t

    inverse = [1 / d for d in _DIMENSIONS]
    origin = np.zeros_like(curves[0])
    below, _ = nearest(origin, curves[-1], -math.inf, 1)
    above_all, _ = nearest(origin, curves[0], 1, math.inf)
    none = np.zeros(measured.shape[1])
    path = [(below, none + inverse[-1]), (above_all, none + inverse[0])]
    pairs = zip(itertools.pairwise(curves), itertools.pairwise(inverse), strict=True)
    for (start, end), (first, last) in pairs:
        point, t = nearest(start, end, 0, 1)
        path.append((point, first + t * (last - first)))
    errors = [point[:known] - measured for point, _ in path]
    best = np.argmin([dot(error, error) for error in errors], axis=0)[None]
    points, dimensions = (np.stack(x) for x in zip(*path, strict=True))
    found = np.take_along_axis(points, best[None], axis=0)[0, known:]
    return found, np.take_along_axis(dimensions, best, axis=0)[0]


def _curves_of_random_keys(held: Held, lengths: Sequence[float]) -> np.ndarray:
    """The logarithms of the factors that hold the entropies: (dimensions, lengths, heads)."""
    target = np.nan_to_num(held.entropy)  # NaN only where there are no factors to compare with
    octaves = np.minimum(np.log2((held.reference, *lengths)), _MOST_OCTAVES).tolist()
    found = []
    for d in _DIMENSIONS:
        table = np.stack([_entropies_between(octave, d) for octave in octaves], axis=1)
        log_beta, table = _interpolated(_log_beta(d), table)
        found.append([np.interp(-target, -entropy, log_beta) for entropy in table.T])
    log_factor = np.asarray(found)
    return log_factor[:, 1:] - log_factor[:, :1]


def _entropies_between(octave: float, d: float) -> np.ndarray:
    """The entropies of `_entropies`, by the cubic polynomial through four whole octaves."""
    first = max(math.floor(octave) - 1, 0)
    t = octave - first
    weights = [math.prod((t - j) / (i - j) for j in range(4) if j != i) for i in range(4)]
    parts = [weight * _entropies(first + i, d) for i, weight in enumerate(weights) if weight]
    return np.asarray(sum(parts))


def _log_beta(d: float) -> np.ndarray:
    """The logarithms of inverse temperatures, in units of the standard deviation of the scores."""
    highest = _HIGHEST_NORMAL if math.isinf(d) else _HIGHEST
    return np.linspace(math.log(_LOWEST), math.log(highest), _TEMPERATURES)


@functools.lru_cache(maxsize=256)
def _entropies(octave: int, d: float) -> np.ndarray:
    """The mean entropies of 2^octave random keys in d dimensions, at each inverse temperature."""
    n, beta = 2.0**octave, np.exp(_log_beta(d))
    return np.asarray(
        gaussian_entropy(n, beta) if math.isinf(d) else sphere_entropy(n, d, beta * math.sqrt(d))
    )


def _affine(held: Held) -> AffineLog:
    slope = slope_of(held, held.weights, 1)
    # At other lengths the factor must not fall below the smallest one at the lengths of the fit.
    line = 1 + slope * np.where(held.weights > 0, held.x, 0)
    minimum = np.maximum(line.min(axis=0), held.smallest)
    return AffineLog(slope, 1 - slope * math.log(held.reference), minimum)


def _power(held: Held) -> Power:
    return Power(slope_of(held, held.weights, 0), held.reference, held.smallest)


def _knots(held: Held) -> Knots:
    return _through(held, held.lengths, held.filled())


def _auto(held: Held) -> Knots:
    below = held.x[:, 0] < -1e-6
    octaves = math.ceil(math.log2(_REACH * held.lengths[-1] / held.reference))
    beyond = held.reference * 2.0 ** np.arange(octaves + 1)
    factors = held.filled()[below], expected(held, beyond.tolist())
    return _through(held, np.concatenate((held.lengths[below], beyond)), np.concatenate(factors))


def _through(held: Held, lengths: np.ndarray, factors: np.ndarray) -> Knots:
    """The law through factors (lengths, heads), constant below the first length."""
    factors = np.concatenate((factors[:1], factors))
    minimum = float(held.smallest.min())  # for the lines beyond the last length
    return Knots((1.0, *lengths.tolist()), np.ascontiguousarray(factors.T), minimum)


FAMILIES: dict[str, Callable[[Held], Law]] = {
    "affine": _affine,
    "power": _power,
    "knots": _knots,
    "auto": _auto,
}
