"""Factors for the projections of queries and keys that bound the largest logit."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, NamedTuple

from isentropic._attention.backends import state_of
from isentropic._attention.distribution import AttentionDistribution, quietly_named
from isentropic._attention.plan import prepare
from isentropic._checks import check_count, check_floating, check_ndim, check_real, value_error
from isentropic._loops import without_gradient
from isentropic._namespace import (
    A_co,
    ArrayT,
    Generic,
    Sliced,
    accumulator,
    equal_by_value,
    namespace,
)
from isentropic._numerics import divide_or_zero


@equal_by_value
class QKClip(NamedTuple, Generic[A_co]):
    """Factors at most 1 for the heads of queries (..., H) and of keys (..., G)."""

    query: A_co
    key: A_co


@quietly_named
def qk_clip(
    logits: AttentionDistribution[ArrayT] | Sliced[ArrayT],
    threshold: float,
    *,
    n_key_heads: int | None = None,
) -> QKClip[ArrayT]:
    """The factors of QK-Clip, after which no logit exceeds a threshold.

    An optimizer that lets logits grow, such as Muon, multiplies the projections of queries and keys by
    these factors after a step.

    Parameters
    ----------
    logits : AttentionDistribution, or array of floats (..., H)
        A distribution with queries (..., H, L, E), of which one pass finds the largest logit of each
        head over all queries, keys and batch elements. Or these largest logits.
    threshold : float > 0
        The largest logit to keep, τ.
    n_key_heads : int, optional
        G, the number of key heads, which divides H. A distribution knows it. The default for an array
        is H.

    Returns
    -------
    QKClip
        A NamedTuple of ``query`` (..., H) and ``key`` (..., G), in float32, or float64 for float64
        inputs. For a distribution they have no axes ``...``. They have no gradient.

    Raises
    ------
    TypeError
        If `logits` is neither, or if `threshold` is not a number.
    ValueError
        If `threshold` is not above 0, if `n_key_heads` does not divide H, if a distribution has no axis
        of heads, or if it has a bias or a soft cap, as its logits are not proportional to the factors.

    Notes
    -----
    A head with the largest logit s > τ needs its logits multiplied by ``γ = τ/s``, and another one by
    1. The keys of a group of heads get the root of the largest γ among these heads. The queries of each
    head get what is then missing. So with as many key heads as query heads, both get ``√γ``. Scale,
    law and mask count: they belong to the logits. A sink does not.

    Only large positive logits are clipped, as in the reference.

    References
    ----------
    Kimi Team 2025 (arXiv 2507.20534), for MuonClip.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import AttentionDistribution, layers
    >>> q, k = np.random.default_rng(0).normal(size=(2, 4, 100, 16))
    >>> factors = layers.qk_clip(AttentionDistribution(q, k, law=None), 3.0)
    >>> clipped = q * factors.query[:, None, None], k * factors.key[:, None, None]
    >>> maximum = AttentionDistribution(*clipped, law=None).statistics().maximum
    >>> np.round(maximum.max(axis=-1), 6)
    array([3., 3., 3., 3.])

    Two key heads, each for two query heads:

    >>> layers.qk_clip(np.asarray([100.0, 50.0, 400.0, 400.0]), 100.0, n_key_heads=2)
    QKClip(query=array([1. , 1. , 0.5, 0.5]), key=array([1. , 0.5]))
    """
    check_real("threshold", threshold, above=0)
    if isinstance(logits, AttentionDistribution):
        xp, largest, groups = _largest_of(logits)
        if n_key_heads is not None and n_key_heads != groups:
            must = f"be None or {groups}, as in the distribution"
            raise value_error("n_key_heads", must, n_key_heads)
    else:
        xp = namespace(logits=logits)
        check_floating(xp, logits=logits)
        check_ndim(1, logits=logits)
        largest = xp.astype(logits, accumulator(xp, logits.dtype))
        groups = largest.shape[-1] if n_key_heads is None else n_key_heads
    check_count("n_key_heads", groups, least=1)
    *batch, heads = largest.shape
    if heads % groups:
        raise value_error("n_key_heads", f"divide the number of heads, {heads}", groups)
    largest = without_gradient(xp, largest)
    is_large = largest > threshold
    factor = xp.where(is_large, float(threshold) / xp.where(is_large, largest, 1.0), 1.0)
    factor = xp.where(largest == largest, factor, largest)  # NaN stays, as it must be seen
    of_groups = xp.reshape(factor, (*batch, groups, heads // groups))
    key = xp.sqrt(xp.max(of_groups, axis=-1, keepdims=True))
    # A factor of 0, for infinite logits, is that of the keys alone.
    return QKClip(xp.reshape(divide_or_zero(xp, of_groups, key), (*batch, heads)), key[..., 0])


def _largest_of(distribution: AttentionDistribution) -> tuple[ModuleType, Any, int]:
    """The largest logit of each head, and the number of key heads."""
    for name in ("bias", "softcap"):
        if (x := getattr(distribution, name)) is not None:
            must = f"have no {name}, with which the logits do not follow the factors"
            raise value_error("logits", must, type(x).__name__)
    arguments = distribution.replaced(sinks=None)._arguments()
    plan, operands = prepare(arguments)
    if not plan.batch:
        raise value_error("logits", "have an axis of heads, -3", tuple(distribution.query.shape))
    xp, heads, groups = plan.xp, plan.batch[-1], operands.key.shape[-3]
    if 0 in (*plan.batch, plan.n_queries):  # there is no logit
        return xp, xp.full((heads,), -math.inf, dtype=plan.compute, device=plan.device), groups
    state = state_of(plan, operands, arguments.implementation, relative_to_maximum=True)
    largest = xp.reshape(state.maximum, (-1, heads, plan.n_queries))
    return xp, xp.max(xp.max(largest, axis=-1), axis=0), groups
