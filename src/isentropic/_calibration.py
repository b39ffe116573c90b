"""Laws through the factors that hold the entropies of heads, in NumPy.

In shapes, G is the number of lengths, and a head is one of the last axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from isentropic.laws._formulas import Knots

# The penalty, in nats, on doubling a factor. It keeps the factor near 1 for heads whose entropy hardly
# depends on it.
_PENALTY = 0.02
# The tolerance, in nats: a length whose entropy misses the target by more is not used in the fit.
_TOLERANCE = 0.05
# The steps of the interpolation between two factors.
_STEPS = 100
# The shapes p among which `Held.shape` chooses: 0 is a power of n, 1 is affine in log n, 2 its root.
_SHAPES = (0, 1 / 4, 1 / 2, 3 / 4, 1, 5 / 4, 3 / 2, 2)
# The misfit of log factors that counts as much as a shape that differs from 1 by 1.
_MISFIT = 0.01
# The range of the shapes for which factors are extrapolated.
EXTREME_SHAPES = (0, 1, 2)
# Lengths nearer to the reference than this, in log n, do not tell the slope: it would be the error of a
# factor, divided by a small number.
_NEAR = 0.05
# The law is curved up to the longest length of the fit, times 2 to this power.
_OCTAVES = 6


def holding_factors(
    factors: Sequence[float], entropy: np.ndarray, target: np.ndarray, current: np.ndarray | float = 1.0
) -> np.ndarray:
    """The factors (G, heads) at which entropies (factors, G, heads) reach their target (heads,).

    They are NaN where no factor reaches it. If an entropy hardly depends on the factor, the factor
    stays near 1. The `factors` are equidistant in their logarithms, and multiply the `current` ones.
    """
    log_factor, h = _interpolated(np.log(factors), entropy)
    log_factor = log_factor[:, None, None] + np.log(current)
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


class Held:
    """The factors that hold the entropies of the heads of one layer, and the curves through them.

    `lengths` and `weight` are (G,). `factor` (G, heads) is NaN where no factor holds the entropy.
    """

    def __init__(
        self, lengths: np.ndarray, factor: np.ndarray, weight: np.ndarray, reference: float
    ) -> None:
        self.lengths, self.factor, self.reference = lengths, factor, reference
        self.smallest = np.fmin.reduce(factor, axis=0, initial=1.0)
        self.x = np.log(lengths / reference)[:, None]
        # Curves follow the factors from the reference on: short lengths tell little about long ones, as
        # the entropy is near log n there. A head that has none above it uses all its lengths.
        weights = np.where(np.isnan(factor), 0.0, weight[:, None])
        above, is_far = np.where(self.x > -1e-6, weights, 0.0), np.abs(self.x) > _NEAR
        self.weights = np.where((is_far & (above > 0)).any(axis=0), above, weights)
        self.slope_weights = np.where(is_far, self.weights, 0.0)
        self.fitted = np.where(self.weights > 0, factor, 1.0)

    def slope(self, shape: Any) -> np.ndarray:
        """The slopes (heads,) of curves through 1 at the reference, by weighted least squares."""
        is_power = shape == 0
        p = np.where(is_power, 1.0, shape)
        y = np.where(is_power, np.log(self.fitted), (self.fitted**p - 1) / p)
        moment = (self.slope_weights * self.x**2).sum(axis=0)
        # If no length determines the slope, it is 0.
        return (self.slope_weights * self.x * y).sum(axis=0) / np.where(moment > 0, moment, np.inf)

    def shape(self) -> np.ndarray:
        """The shape (heads,) that fits best; 1 unless the factors say otherwise."""
        cost = []
        for shape in _SHAPES:
            error = np.log(curve(self.x, self.slope(shape), shape) / self.fitted)
            misfit = (self.weights * error**2).sum(axis=0) / np.maximum(self.weights.sum(axis=0), 1e-9)
            cost.append(misfit / _MISFIT**2 + (shape - 1) ** 2)
        return np.asarray(_SHAPES)[np.argmin(cost, axis=0)]

    def at(self, lengths: Any, shape: Any = None) -> np.ndarray:
        """The factors (lengths, heads) of the curves of a shape, never below the smallest of the fit.

        By default the shape is that of each head.
        """
        shape = self.shape() if shape is None else shape
        x = np.log(np.asarray(lengths) / self.reference)[:, None]
        return np.maximum(curve(x, self.slope(shape), shape), self.smallest)

    def law(self) -> Knots:
        """The law through the factors. It is 1 at the reference, and curved beyond the last length."""
        beyond = self.lengths[-1] * 2.0 ** np.arange(1, _OCTAVES + 1)
        lengths = np.union1d(self.lengths, (self.reference, *beyond))
        factors = np.full((len(lengths), self.factor.shape[1]), np.nan)
        factors[np.isin(lengths, self.lengths)] = self.factor
        factors[lengths == self.reference] = 1.0
        # Below the reference, lengths without a factor are short: the entropy is out of reach there.
        x, known = np.log(lengths), ~np.isnan(factors)
        below = [np.interp(x, x[some], f[some]) for f, some in zip(factors.T, known.T, strict=True)]
        is_below = (lengths < self.reference)[:, None]
        guess = np.where(is_below, np.stack(below, axis=1), self.at(lengths))
        factors = np.where(known, factors, guess)
        factors = np.concatenate((factors[:1], factors))  # constant below the first length
        minimum = float(self.smallest.min())  # for the line beyond the last knot
        return Knots((1.0, *lengths.tolist()), np.ascontiguousarray(factors.T), minimum)


def curve(x: Any, slope: Any, shape: Any) -> np.ndarray:
    """``(1 + p · slope · x)^(1/p)`` of the shape p, which is ``exp(slope · x)`` at p = 0.

    It is the inverse of the transformation of Box and Cox; see `drift.calibrate`.
    """
    is_power = shape == 0
    p = np.where(is_power, 1.0, shape)
    return np.where(is_power, np.exp(slope * x), np.maximum(1 + p * slope * x, 1e-9) ** (1 / p))
