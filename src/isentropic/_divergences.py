"""Divergences of two softmax distributions, from their logits.

With the log-probabilities a = log p and b = log q of the same keys, and u = b − a,

    cross entropy = −Σ p b,      KL(p‖q) = Σ p (eᵘ − 1 − u).

The terms of the divergence add q − p to the usual −p u, whose sum is 0. So no term is negative, and the
divergence of close distributions is as accurate as their logits. With the mean m = (p + q)/2 and
l = log(m/p) = log(1 + (eᵘ − 1)/2), the Jensen–Shannon divergence is

    ½ KL(p‖m) + ½ KL(q‖m) = ½ Σ p (eᵘ (u − l) − l),

whose terms are of the order of u², too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from isentropic._entropy import LARGE_LOG_RATIO
from isentropic._namespace import Array
from isentropic._numerics import clip, log_or
from isentropic._ops import LOWEST_SCORE, InPlaceOps, Ops

LOG_2 = math.log(2)


class LogShares(NamedTuple):
    """Log-probabilities along the last axis, −∞ without weight; and whether a row has no weight."""

    logs: Any
    is_empty: Any


def log_shares(xp: ModuleType, s: Array) -> LogShares:
    """Of the softmax of logits."""
    ops = Ops(xp)
    x, weight = ops.exp(s, ops.row_max(s), None)
    total = ops.row_sum(weight)
    return LogShares(x - log_or(xp, total, 0.0), total == 0)


def mean_over_heads(xp: ModuleType, p: LogShares) -> LogShares:
    """The mean over axis −3, which is kept, of the heads that have weight."""
    seeing = xp.sum(xp.astype(xp.logical_not(p.is_empty), p.logs.dtype), axis=-3, keepdims=True)
    share = xp.sum(xp.exp(p.logs), axis=-3, keepdims=True) / clip(xp, seeing, min=1.0)
    return LogShares(log_or(xp, share, -math.inf), seeing == 0)


def cross_entropy(xp: ModuleType, p: LogShares, q: LogShares) -> Array:
    """−Σ p log q, (..., 1); ∞ where q has no weight at some p > 0, and 0 where p has no weight."""
    share = xp.exp(p.logs)
    # An infinite factor would make the derivative NaN.
    is_lost = q.logs == -math.inf
    terms = share * -xp.where(is_lost, 0.0, q.logs)
    return _total(xp, p, xp.where(is_lost & (share > 0), math.inf, terms))


def kl_divergence(xp: ModuleType, p: LogShares, q: LogShares) -> Array:
    """Σ p log(p/q), (..., 1), with the same limits."""
    share, other, u, is_large, is_alone, is_lost = _ratios(xp, p, q)
    terms = share * (xp.expm1(u) - u)
    terms = xp.where(is_large, other - share * (1 + _log_ratio(xp, p, q)), terms)
    terms = xp.where(is_alone, other, terms)
    return _total(xp, p, xp.where(is_lost & (share > 0), math.inf, terms))


def js_divergence(xp: ModuleType, p: LogShares, q: LogShares) -> Array:
    """(KL(p‖m) + KL(q‖m))/2, (..., 1): log 2 where only one has weight, and 0 where none has."""
    share, other, u, is_large, is_alone, is_lost = _ratios(xp, p, q)
    terms = share * _js_terms(xp, xp.expm1(u), u)
    at_most = other * LOG_2 - share * (1 + _log_ratio(xp, p, q) - LOG_2)
    terms = xp.where(is_alone, other * LOG_2, xp.where(is_large, at_most, terms))
    total = xp.sum(xp.where(is_lost, share * LOG_2, terms), axis=-1, keepdims=True) / 2
    total = clip(xp, total, min=0.0, max=LOG_2)  # which rounding may leave
    total = xp.where(p.is_empty != q.is_empty, LOG_2, total)
    return xp.where(p.is_empty & q.is_empty, 0.0, total)


def _js_terms(xp: ModuleType, growth: Array, u: Array) -> Array:
    """Twice the terms of JS divided by p, from eᵘ − 1 and u."""
    log_mean = xp.log1p(growth / 2)
    return (growth + 1) * (u - log_mean) - log_mean


def _log_ratio(xp: ModuleType, p: LogShares, q: LogShares) -> Array:
    """Log q − log p, and finite where one of them has no weight."""
    return xp.where(q.logs == -math.inf, 0.0, q.logs) - xp.where(p.logs == -math.inf, 0.0, p.logs)


def _ratios(xp: ModuleType, p: LogShares, q: LogShares) -> tuple[Any, ...]:
    """P, q, u, and where u is too large, p has no weight, or q has none. There u is 0."""
    is_alone, is_lost = p.logs == -math.inf, q.logs == -math.inf
    u = _log_ratio(xp, p, q)
    is_large = (u > LARGE_LOG_RATIO) & xp.logical_not(is_alone)
    u = xp.where(is_alone | is_lost | is_large, 0.0, u)
    return xp.exp(p.logs), xp.exp(q.logs), u, is_large, is_alone, is_lost


def _total(xp: ModuleType, p: LogShares, terms: Array) -> Array:
    return xp.where(p.is_empty, 0.0, xp.sum(terms, axis=-1, keepdims=True))


DIVERGENCES: dict[str, Callable[[ModuleType, LogShares, LogShares], Array]] = {
    "kl_divergence": kl_divergence,
    "js_divergence": js_divergence,
    "cross_entropy": cross_entropy,
}


@functools.cache
def of_logits(name: str, over_heads: bool = False) -> Callable[[ModuleType, Array, Array], Array]:
    """The divergence of the softmax of s from that of t, as a function of both, (..., S) to (..., 1).

    It is the same object in every call, so JAX traces it once. `over_heads` takes the
    mean over the heads of the first.
    """

    def function(xp: ModuleType, s: Array, t: Array) -> Array:
        p, q = log_shares(xp, s), log_shares(xp, t)
        return DIVERGENCES[name](xp, mean_over_heads(xp, p) if over_heads else p, q)

    return function


def ordinary(xp: Any, name: str, s: Any, t: Any) -> Any:
    """The same in NumPy in few passes, in place; None where it would not be accurate.

    Keys that both sides hide have logits of `LOWEST_SCORE`, or less.
    """
    ops = InPlaceOps(xp)
    tops = ops.row_max(s), ops.row_max(t)
    if not min(x.min() for x in tops) > LOWEST_SCORE / 2:
        return None  # a query sees nothing
    s, t = (xp.subtract(x, top, out=x) for x, top in zip((s, t), tops, strict=True))
    weight, other = xp.exp(s), xp.exp(t)
    z, other_z = ops.row_sum(weight), ops.row_sum(other)
    u = xp.subtract(t, s, out=other)
    if not u.min() > LOWEST_SCORE / 2:
        return None  # q hides a key that p sees
    if name == "cross_entropy":
        return xp.log(other_z) - ops.row_dot(weight, t) / z
    u += xp.log(z) - xp.log(other_z)
    if not u.max() <= LARGE_LOG_RATIO:
        return None
    growth = xp.expm1(u, out=t)
    if name == "kl_divergence":
        return ops.row_dot(weight, xp.subtract(growth, u, out=s)) / z
    return clip(xp, ops.row_dot(weight, _js_terms(xp, growth, u)) / (2 * z), min=0.0, max=LOG_2)
