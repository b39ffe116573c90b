"""Logarithms of the tails of χ² and Beta distributions, on the host in float64.

The union bound needs tail probabilities far below the smallest float, so this module computes their
logarithms. Write the variable as the bound times e^{στ}, with σ = 1 for the upper tail and σ = −1 for
the lower one. Then each tail is the density at the bound times ∫₀^∞ e^{h(τ)} dτ, where h is concave,
h(0) = 0 and h'(0) < 0. The integrand is smooth, so a fixed quadrature computes it to double precision,
at the same cost for 1 and for 10¹² degrees of freedom.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from isentropic._numerics import expm1_beyond

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

_NODES = 96
_CUTOFF = 45.0  # the integral stops at h = −45: e^{−45} is below double precision
# Beyond this τ, h is below −_CUTOFF, because its slope is at most −½ there. e^{500} does not overflow.
_LARGEST_TAU = 500.0


def log_chi2_tail(dof: ArrayLike, excess: ArrayLike) -> np.ndarray:
    """Log-probability of χ² above ``dof · (1 + excess)`` for excess > 0, and below it otherwise."""
    a, e = np.broadcast_arrays(np.asarray(dof) / 2, np.asarray(excess, np.float64))
    empty = e <= -1
    e = np.where(empty, -0.5, e)
    side = np.sign(e)

    def h(t: np.ndarray) -> np.ndarray:
        step = side[..., None] * t
        return -a[..., None] * (expm1_beyond(np, step) + e[..., None] * np.expm1(step))

    density = a * _log1p_minus_x(e) + 0.5 * np.log(a / (2 * math.pi)) - _stirling_error(a)
    return np.where(empty, -math.inf, density + _log_integral(h))


def log_beta_tail(a: ArrayLike, b: ArrayLike, excess: ArrayLike) -> np.ndarray:
    """Log-probability of Beta(a, b) above its mean times ``1 + excess`` for excess > 0, else below."""
    a, b, e = np.broadcast_arrays(*(np.asarray(v, np.float64) for v in (a, b, excess)))
    empty = (e <= -1) | (a * e >= b)  # beyond 0 or 1
    e = np.where(empty, -0.5, e)
    side, total = np.sign(e), a + b
    x = a / total * (1 + e)

    def h(t: np.ndarray) -> np.ndarray:
        step = side[..., None] * t
        y = x[..., None] * np.expm1(step)
        linear = expm1_beyond(np, step) + e[..., None] * np.expm1(step)
        near = -a[..., None] * linear - total[..., None] * _log1p_minus_x(y)
        far = a[..., None] * step - total[..., None] * np.log1p(y)
        return np.where(np.abs(step) < 0.5, near, far)  # `near` cancels for large steps

    density = (
        a * _log1p_minus_x(e)
        + b * _log1p_minus_x(-e * a / b)
        + 0.5 * np.log(a / total * b / (2 * math.pi))
        + _stirling_error(total)
        - _stirling_error(a)
        - _stirling_error(b)
    )
    return np.where(empty, -math.inf, density + _log_integral(h))


def binomial_interval(successes: int, trials: int, confidence: float) -> tuple[float, float]:
    """The Clopper–Pearson confidence interval for the probability of success."""
    log_level = math.log((1 - confidence) / 2)

    def limit(a: float, b: float, side: int) -> float:
        # The probability beyond (1 + side · e) × mean decreases with e, so bisection finds the level.
        inner, outer = 0.0, 1.0 if side < 0 else b / a
        for _ in range(60):
            middle = (inner + outer) / 2
            if middle > 0 and float(log_beta_tail(a, b, side * middle)) < log_level:
                outer = middle
            else:
                inner = middle
        return a / (a + b) * (1 + side * outer)

    low = 0.0 if successes == 0 else limit(successes, trials - successes + 1, -1)
    high = 1.0 if successes == trials else limit(successes + 1, trials - successes, 1)
    return low, high


def _log_integral(h: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Logarithm of ∫₀^∞ e^{h(τ)} dτ. `h` takes and returns arrays (..., nodes)."""
    # Find the τ at which h reaches −_CUTOFF, to within 10 %: first by powers of 64, then by bisection.
    end = np.full(h(np.ones(1)).shape, 1e-18)
    # 64¹² times the first end is more than the largest τ.
    for _ in range(12):
        end = np.where(h(end) > -_CUTOFF, np.minimum(64 * end, _LARGEST_TAU), end)
    start = end / 64
    for _ in range(6):
        middle = np.sqrt(start * end)
        short = h(middle) > -_CUTOFF
        start, end = np.where(short, middle, start), np.where(short, end, middle)

    nodes, weights = _quadrature()
    integral = np.sum(weights * np.exp(h(end * (nodes + 1) / 2)), axis=-1)
    return np.log(integral * end[..., 0] / 2)


@functools.cache
def _quadrature() -> tuple[np.ndarray, np.ndarray]:
    return np.polynomial.legendre.leggauss(_NODES)


def _log1p_minus_x(x: np.ndarray) -> np.ndarray:
    """``log(1 + x) − x``, without cancellation for small x."""
    small = np.abs(x) < 0.1
    z = np.where(small, x, 0.0)
    series = np.zeros_like(z)
    # At 0.1 the first term that is left out is 1e-18 of the result.
    for k in range(18, 1, -1):
        series = 1 / k - z * series
    far = np.where(small, 1.0, x)
    return np.where(small, -z * z * series, np.log1p(far) - far)


def _stirling_error(a: np.ndarray) -> np.ndarray:
    """The error of Stirling's formula: log Γ(a) − (a − ½) log a + a − ½ log 2π."""
    error = np.zeros_like(a)
    for _ in range(8):  # the recurrence raises a to where the asymptotic series is accurate
        error += (a + 0.5) * np.log1p(1 / a) - 1
        a = a + 1
    r = 1 / (a * a)
    return error + (1 / 12 - r * (1 / 360 - r * (1 / 1260 - r * (1 / 1680 - r / 1188)))) / a
