"""Means over softmaxes of independent, identically distributed scores, by quadrature.

With n scores s of a density ρ, h(v) = exp(v − e^v) and v = s − y, the function

    L(y) = E exp(−e^{s − y}),        L'(y) = W(y) = ∫ ρ(s) h(s − y) ds

has a power, Lⁿ, that is the distribution function of log Z + G for a Gumbel variable G. This is the
identity E log Z = ∫₀^∞ (e^{−t} − L(t)ⁿ) dt/t in t = e^{−y}. Taking 1 − β ∂_β under the integral,

    E H = −∫ n L(y)ⁿ⁻¹ ∫ ρ(s) (v + γ) h(v) ds dy,

with Euler's constant γ. No large terms cancel in it, as ∫ (v + γ) h(v) dv = 0. In the same way
1/Z² = ∫₀^∞ t e^{−tZ} dt gives

    E Σp² = ∫ n L(y)ⁿ⁻¹ ∫ ρ(s) e^v h(v) ds dy,

and the formula for 1 − Σp² has 1 − e^v in place of e^v, where ∫ (1 − e^v) h(v) dv = 0.

The integral over y uses panels of Gauss–Legendre nodes. The ends of the panels are levels of the odds
η = log((1 − L)/L), which the tail of the scores gives accurately enough. 1 − L is the integral of W
from y upwards, on the same nodes. The integral over s covers the interval in which its integrand is
not negligible, found by bisection.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from isentropic._loops import Block, is_gpu, map_blocks, scan_blocks, take
from isentropic._namespace import Array, common_device
from isentropic._numerics import clip, lift, root_or_zero
from isentropic._products import product
from isentropic._special import log_gamma_step

_PANELS = 24
_PANEL_NODES = 16
_SCORE_NODES = 96
# An integrand is cut off this many nats below its maximum.
_DEPTH = 32.0
# −log Lⁿ at the lowest y, in nats.
_LOWEST = 30.0
# The expected number of scores above the highest y is e^{−27}. The allowance at the lower end covers
# the factors in front of the exponentials of the tails.
_HIGHEST = 27.0
_ALLOWANCE = 4.0
# The longest panel, in nats of η, and in the logarithm of the distance to an end of the range of the
# scores. With these numbers the error of the entropy is below 1e-9.
_NATS = 3.0
_END_NATS = 0.4
# The largest argument of an exponential whose result only has to be large.
_LARGE = 50.0
# The bisection for an interval starts at e^{−23} of its longest possible length.
_LOG_RANGE = 23.0
_EULER_GAMMA = 0.5772156649015329
# Below this β or κ the entropy is log n, to double precision.
LOWEST_STRENGTH = 1e-8


class Scores(NamedTuple):
    """A distribution of scores in two coordinates. Its arrays have the shape (rows, 1, 1).

    The *edge* coordinate u increases with the score, and P[u of a score > u] ≈ e^{−τ(u)}. The
    *position* p decreases as the score increases, and the density is a smooth function of p.
    """

    turn: Array  # the level τ of the maximum of e^s ρ(s); above it y, not u, increases by one per nat
    floor: Array  # the level τ below the mean beyond which the lower end of the scores has no influence
    grade: Array  # the density of panels between `turn` and `floor`, less 1/_NATS
    low: Any  # the lowest and the highest position at which the integrands are not negligible
    high: Any
    edge: Callable[[Any], Any]  # the u ≥ 0 of a level τ
    at_edge: Callable[[Any], tuple[Any, Any]]  # the score at u, and its derivative with respect to u
    drop: Callable[[Any, Any], Any]  # score(p) − score(p + r), without cancellation; score(0) is 0
    log_density: Callable[[Any], Any]
    slopes: Callable[[Any], tuple[Any, Any]]  # of the log-density and of −score with respect to p


def gaussian_scores(xp: ModuleType, n: Any, beta: Any) -> Scores:
    """Normal scores of standard deviation β > 0. u is the score in units of β, and p = −u."""
    return Scores(
        turn=beta * beta / 2,
        floor=xp.full_like(beta, 1e6),  # the scores have no lower end
        grade=xp.zeros_like(beta),
        low=-xp.sqrt(2 * (xp.log(n) + 40.0)) - 5.0,
        high=30.0,
        edge=lambda tau: root_or_zero(xp, 2 * tau),
        at_edge=lambda u: (beta * u, beta + xp.zeros_like(u)),
        drop=lambda p, r: beta * r,
        log_density=lambda p: -p * p / 2 - math.log(2 * math.pi) / 2,
        slopes=lambda p: (-p, beta),
    )


def sphere_scores(xp: ModuleType, n: Any, d: Any, kappa: Any) -> Scores:
    """Scores κ(cos θ − 1) of keys that are uniform on a sphere. cos θ = tanh u, and p = θ."""
    m = d - 1
    log_constant = log_gamma_step(xp, m / 2) - math.log(math.pi) / 2  # of the density of θ
    # 1 − x² = m x/κ at the maximum of e^s ρ(s)
    x = 2 * kappa / (m + xp.sqrt(m * m + 4 * kappa * kappa))
    return Scores(
        turn=clip(xp, -xp.log(m * x / kappa) * m / 2, min=0.0),
        floor=m / 2 * xp.log(clip(xp, 2 * kappa, min=1.0)),
        grade=clip(xp, 1 / (_END_NATS * m) - 1 / _NATS, min=0.0),
        low=0.0,
        high=math.pi,
        # The root has an infinite slope at 0. Gradients must not depend on where the panels end.
        edge=lambda tau: xp.asinh(root_or_zero(xp, xp.expm1(2 * tau / m))),
        at_edge=lambda u: (-2 * kappa / (xp.exp(2 * u) + 1), kappa / xp.cosh(u) ** 2),
        drop=lambda p, r: 2 * kappa * xp.sin(p + r / 2) * xp.sin(r / 2),
        log_density=lambda p: log_constant + (d - 2) * xp.log(clip(xp, xp.sin(p), min=1e-30)),
        slopes=lambda p: ((d - 2) / xp.tan(p), kappa * xp.sin(p)),
    )


def mean_over_scores(
    xp: ModuleType, n: Any, *parameters: Array, scores: Callable[..., Scores], order: int = 1
) -> Any:
    """The mean entropy of the order 1 or 2, for arrays of one shape.

    ``scores(xp, n, *parameters)`` is the distribution. The last parameter is β or κ.
    """
    strength = clip(xp, parameters[-1], min=LOWEST_STRENGTH)
    columns = [xp.reshape(x, (-1, 1)) for x in (n, *parameters[:-1], strength)]
    count = columns[0].shape[0]
    if count == 0:
        return n

    def block(part: Block) -> tuple[Array]:
        n_block, *parameter_blocks = (xp.reshape(take(x, part, -2), (-1, 1, 1)) for x in columns)
        return (_means(xp, order, n_block, scores(xp, n_block, *parameter_blocks)),)

    # Each entry needs arrays of 37 000 numbers. Those of eight entries fit in a processor's cache.
    rows = 1024 if is_gpu(xp, common_device(n=n)) else 8
    (result,) = map_blocks(xp, block, count, rows, in_threads=True)
    mean = clip(xp, xp.reshape(result, n.shape), min=0.0)
    return xp.minimum(mean, xp.log(n) if order == 1 else 1 - 1 / n)


def _means(xp: ModuleType, order: int, n: Any, scores: Scores) -> Any:
    """Means of shape (rows, 1) for n of shape (rows, 1, 1)."""
    nodes, weights, upward = _to_library(xp, n, _panel_quadrature())
    y, speed = _thresholds(xp, n, scores, nodes)
    flat = xp.reshape(y, (y.shape[0], 1, -1))
    w, b = (xp.reshape(x, y.shape) * speed for x in _score_integrals(xp, order, scores, flat))

    # 1 − L is the integral from a node to the end of its panel, plus those over the panels above.
    mass = xp.sum(w * weights, axis=-1, keepdims=True)
    above = xp.sum(mass, axis=-2, keepdims=True) - xp.cumulative_sum(mass, axis=-2)
    upper_tail = clip(xp, product(xp, w, upward) + above, max=1 - float(xp.finfo(n.dtype).eps))
    weight = n * xp.exp((n - 1) * xp.log1p(-upper_tail)) * weights

    # The integral of the density n Lⁿ⁻¹ W is 1. Dividing by it removes part of the quadrature error.
    total_mass = xp.sum(weight * w, axis=(-2, -1))
    return (xp.sum(weight * b, axis=(-2, -1)) / total_mass)[:, None]


def _thresholds(xp: ModuleType, n: Any, scores: Scores, nodes: Array) -> tuple[Any, Any]:
    """The nodes y of all panels, from low to high, and dy/dnode; (rows, panels, nodes)."""
    turn, floor, grade = scores.turn, scores.floor, scores.grade
    dense = grade + 1 / _NATS

    # The levels η between panels are uniform in a coordinate, steeper between `turn` and `floor`.
    first = xp.log(xp.expm1(_LOWEST / n)) + _ALLOWANCE
    last = -xp.log(n) - _HIGHEST
    first, last = (x / _NATS + grade * xp.minimum(xp.maximum(x, -turn), floor) for x in (first, last))
    steps = xp.arange(_PANELS + 1, dtype=n.dtype, device=common_device(n=n))[None, :, None] / _PANELS
    at = first + (last - first) * steps
    eta = xp.minimum(xp.maximum(at / dense, -turn), floor)
    eta = eta + _NATS * (at - eta * dense)

    upper = eta < 0
    tau = xp.minimum(xp.abs(eta), xp.where(upper, turn, floor))
    u = scores.edge(tau)
    u = xp.where(upper, u, -u)
    # Above `turn` y increases by one per nat. Below `floor` it decreases as it would for equal scores.
    above = clip(xp, -eta - turn, min=0.0) - math.log(math.log(2))
    beyond = xp.where(upper, above, -xp.log(xp.log1p(xp.exp(clip(xp, eta, min=0.0)))))
    u, du = u[:, :-1, :], u[:, 1:, :] - u[:, :-1, :]
    beyond, step = beyond[:, :-1, :], beyond[:, 1:, :] - beyond[:, :-1, :]
    score, slope = scores.at_edge(u + du * nodes)
    return score + beyond + step * nodes, slope * du + step


def _score_integrals(xp: ModuleType, order: int, scores: Scores, y: Any) -> tuple[Any, Any]:
    """W and the integral over s for the entropy of an order, at each of the y (rows, 1, nodes)."""

    def excess(p: Any) -> tuple[Any, Any]:
        v = -scores.drop(0.0, p) - y
        return v, xp.exp(clip(xp, v, max=_LARGE))

    def is_rising(p: Any) -> Any:
        density, fall = scores.slopes(p)
        return density > fall * (1 - excess(p)[1])

    def logarithm(p: Any) -> Any:
        v, exponential = excess(p)
        return scores.log_density(p) + v - exponential

    low, high = (x + xp.zeros_like(y) for x in (scores.low, scores.high))
    peak = _bisect(xp, is_rising, low, high, 34)
    end = logarithm(peak) - _DEPTH
    reach = []
    for side, farthest in ((-1.0, peak - low), (1.0, high - peak)):
        far = xp.log(clip(xp, farthest, min=1e-12))

        def is_inside(r: Any, side: float = side) -> Any:
            return logarithm(peak + side * xp.exp(r)) > end

        reach.append(side * xp.exp(_bisect(xp, is_inside, far - _LOG_RANGE, far, 12)))

    nodes, weights = _to_library(xp, y, _score_quadrature())
    length = reach[1] - reach[0]
    r = reach[0] + length * xp.matrix_transpose(nodes)
    # v is computed relative to the peak, so that the differences between nodes are accurate.
    v = -scores.drop(0.0, peak) - y - scores.drop(peak, r)
    exponential = xp.exp(clip(xp, v, max=_LARGE))
    density = xp.exp(scores.log_density(peak + r) + v - exponential)
    density = density * (length * xp.matrix_transpose(weights))
    term = -(v + _EULER_GAMMA) if order == 1 else 1 - exponential  # the factor of h(v)
    return xp.sum(density, axis=-2), xp.sum(density * term, axis=-2)


def _bisect(xp: ModuleType, holds: Callable[[Any], Any], low: Any, high: Any, times: int) -> Any:
    """The point between `low` and `high` up to which a condition holds."""

    def step(limits: Any, _: Block) -> tuple[Any, Any]:
        low, high = limits
        middle = (low + high) / 2
        inside = holds(middle)
        limits = xp.where(inside, middle, low), xp.where(inside, high, middle)
        return limits, limits[1]

    return scan_blocks(xp, step, (low, high), times, 1)[..., -1:, :]


def _to_library(xp: ModuleType, like: Array, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arrays in the library, dtype and device of another, with three axes."""
    device = common_device(like=like)
    return tuple(lift(xp.asarray(x, dtype=like.dtype, device=device), 3) for x in arrays)


@functools.cache
def _panel_quadrature() -> tuple[Any, Any, Any]:
    """Nodes and weights on (0, 1), and the matrix from values at nodes to their integrals up to 1."""
    from numpy.polynomial import legendre

    x, w = legendre.leggauss(_PANEL_NODES)
    degrees = np.arange(_PANEL_NODES)
    series = (degrees + 0.5)[:, None] * legendre.legvander(x, _PANEL_NODES - 1).T * w
    integrals = [legendre.legval(x, legendre.legint(unit, lbnd=1)) for unit in np.eye(_PANEL_NODES)]
    return (x + 1) / 2, w / 2, -(np.stack(integrals, axis=1) @ series).T / 2


@functools.cache
def _score_quadrature() -> tuple[Any, Any]:
    """Nodes and weights on (0, 1), denser at both ends, where the density may behave like a power."""
    x, w = np.polynomial.legendre.leggauss(_SCORE_NODES)
    t = (x + 1) / 2
    return t * t * (3 - 2 * t), 3 * w * t * (1 - t)
