"""Entropies of every order, from logits or from probabilities.

With x = s − max s, z = Σ eˣ and α = 1 + t, the probabilities are p = eˣ/z and the Rényi entropy is

    H_α = log Σ p^α / (1 − α) = log z − (1/t) log E_p[e^{tx}].

One more sum, the *moment*, gives the entropy of any order. Near α = 1 it is the centered score

    w = Σ eˣ (e^{tx} − 1)/t,        H_α = log z − log1p(t w / z) / t,

whose limit t → 0, w = Σ eˣ x and H = log z − w/z, is the Shannon entropy without the cancellation
of log Z − E[s]. Far from α = 1 it is A = Σ e^{αx}, H_α = (α log z − log A)/t. Both moments are sums
over keys relative to a maximum, so both can be accumulated tile by tile (`shift_moment`).
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, NamedTuple

from isentropic._checks import (
    check_axis,
    check_broadcastable,
    check_choice,
    check_floating,
    check_order,
    check_real,
    common_shape,
    is_array,
    type_error,
)
from isentropic._namespace import (
    Array,
    ArrayT,
    Sliced,
    accumulator,
    common_device,
    isdtype,
    measure_dtype,
    namespace,
    present,
    promoted,
)
from isentropic._numerics import clip, divide_or_zero, expm1_beyond, lift, log_or, quiet_node
from isentropic._ops import LOWEST_SCORE, Ops
from isentropic._products import last_axis

FAMILIES = ("renyi", "tsallis")

# The centered form is used within this distance of order 1. Farther away, the form with A is accurate.
_NEAR_ORDER_1 = 0.25
# Orders closer to 1 than this count as 1: the difference is below rounding, and t x would underflow in
# float32.
_SAME_AS_ORDER_1 = 1e-20
# From this order on, entropies equal the min-entropy to double precision, and order · score could
# overflow. So these orders count as infinite.
INFINITE_ORDER = 1e16
# Weights between 1/_SAFE_RANGE and _SAFE_RANGE can be added and divided in float32.
_SAFE_RANGE = 2.0**32
# Log-ratios above this count as large: eˣ dominates x, and is still far from an overflow.
LARGE_LOG_RATIO = 20.0


def partition(ops: Ops, s: Array, order: float | None, m: Any) -> tuple[Any, Any, Any, Any]:
    """Return (m, e^{s − m}, its sum, moment) of the logits along the last axis, which is kept.

    The reference m is usually the maximum; None stands for 0. Logits of −∞ are ignored: a row of
    nothing but −∞ has the maximum −∞, and its sums are 0. The moment is None if `order` is None. The
    logits may be overwritten.
    """
    x, weight = ops.exp(s, m, order)
    normalizer = ops.row_sum(weight)
    if ops.may_lose_nan:
        # XLA's maximum of a row may ignore NaN. The sum does not.
        m = ops.xp.where(normalizer == normalizer, m, normalizer)
    return m, weight, normalizer, None if order is None else _moment(ops, x, weight, order)


def _moment(ops: Ops, x: Any, weight: Any, order: float) -> Any:
    """The sum of the terms of the moment. The scores, as `ops.exp` returns them, may be overwritten."""
    if order == 1:
        return ops.row_dot(x, weight)
    if order == 2:
        return ops.row_dot(weight, weight)
    if order >= INFINITE_ORDER:
        return ops.row_sum(weight)
    if order > 0 and is_far_from_1(order):
        return ops.row_sum(ops.power(x, order))
    return ops.row_sum(visible_terms(ops.xp, x, weight, order))


def _clipped_scores(xp: ModuleType, x: Array, order: float) -> Array:
    """Centered scores clipped from below, where they have no weight, so that no product overflows."""
    return clip(xp, x, min=LOWEST_SCORE / max(order, 1.0))


def _power(xp: ModuleType, x: Array, weight: Array, order: float) -> Array:
    """e^{order · x} for centered scores x ≤ 0 of weight eˣ."""
    return weight if order >= INFINITE_ORDER else xp.exp(_clipped_scores(xp, x, order) * order)


def is_far_from_1(order: float) -> bool:
    """Whether the moment of the order is the sum of the powers e^{order · x} of the weights."""
    return abs(order - 1) >= _NEAR_ORDER_1


def terms_of_moment(xp: ModuleType, x: Array, weight: Array, order: float) -> Array:
    """The terms of the moment for centered scores x ≤ 0 of weight eˣ."""
    t = order - 1
    if is_far_from_1(order):
        return _power(xp, x, weight, order)
    if abs(t) < _SAME_AS_ORDER_1:
        return weight * _clipped_scores(xp, x, order)
    # expm1 is accurate for small t x. For large t x it may overflow while the weight is 0.
    tx = _clipped_scores(xp, x, order) * t
    is_small = xp.abs(tx) < 1
    expm1_term = weight * xp.expm1(xp.where(is_small, tx, 0.0))
    return xp.where(is_small, expm1_term, _power(xp, x, weight, order) - weight) / t


def visible_terms(xp: ModuleType, x: Array, weight: Array, order: float) -> Any:
    """The terms of the moment, also for scores of −∞, whose terms are 0."""
    if order == 2:
        return weight * weight
    return xp.where(x == -math.inf, 0.0, terms_of_moment(xp, x, weight, order))


def slope_of_moment(normalizer: Any, moment: Any, order: float) -> Any:
    """The derivative of the moment with respect to a number that is added to all scores.

    It is linear in normalizer and moment. So weights and terms give the derivatives of the terms.
    """
    slope = moment * (1.0 if order >= INFINITE_ORDER else order)
    return slope if is_far_from_1(order) else slope + normalizer


def shift_moment(xp: ModuleType, moment: Array, normalizer: Array, shift: Array, order: float) -> Array:
    """The moment relative to a new maximum that is higher by −`shift` ≥ 0."""
    weight = xp.exp(shift)
    shifted = _power(xp, shift, weight, order) * moment
    if is_far_from_1(order):
        return shifted
    return shifted + terms_of_moment(xp, shift, weight, order) * normalizer


def entropy_of_moments(
    xp: ModuleType, normalizer: Array, moment: Any, order: float, family: str
) -> Any:
    """The entropy in nats; 0 where the normalizer is 0."""
    t = order - 1
    log_z = log_or(xp, normalizer, 0.0)
    if order >= INFINITE_ORDER:
        # Relative to the maximum the largest probability is 1/z.
        renyi = log_z
    elif abs(t) < _SAME_AS_ORDER_1:
        renyi = log_z - divide_or_zero(xp, moment, normalizer)
    elif is_far_from_1(order):
        # Σ p^α is the moment divided by z^α.
        renyi = log_z * (order / t) - log_or(xp, moment, 0.0) / t
    else:
        # The moment w is Σ eˣ (e^{tx} − 1)/t here, and Σ p^α is z^{−t} (1 + t w/z).
        renyi = log_z - xp.log1p(divide_or_zero(xp, moment, normalizer) * t) / t
    return convert_family(xp, renyi, order, family)


def convert_family(xp: ModuleType, renyi: Array, order: float, family: str) -> Array:
    """The entropy of a family: Rényi's unchanged, or Tsallis' ``(1 − e^{−tH})/t`` of the same order."""
    t = order - 1
    if family == "renyi" or abs(t) < _SAME_AS_ORDER_1:
        return renyi
    if order >= INFINITE_ORDER:
        # The limit is 0. The product keeps NaN.
        return renyi * 0.0
    return -xp.expm1(renyi * -t) / t


def normalized_entropy(xp: ModuleType, renyi: Array, log_n: Array, order: float, family: str) -> Array:
    """The entropy of a family, divided by that of n equal weights; 0 where log n is 0.

    The argument is the Rényi entropy for both families. At large orders the Tsallis entropies of all
    distributions round to the same number, so their ratio must be computed from Rényi's. The ratio of
    Tsallis entropies of order ∞ is 0 for a single weight and 1 otherwise.
    """
    t = order - 1
    if family == "renyi" or abs(t) < _SAME_AS_ORDER_1:
        return divide_or_zero(xp, renyi, log_n)
    if order >= INFINITE_ORDER:
        return xp.where(renyi > 0, 1.0, renyi * 0.0)
    return divide_or_zero(xp, xp.expm1(renyi * -t), xp.expm1(log_n * -t))


@quiet_node
def entropy_from_logits(
    logits: Sliced[ArrayT],
    *,
    order: float = 1.0,
    family: str = "renyi",
    axis: int = -1,
    mask: Array | None = None,
) -> ArrayT:
    """Entropy of ``softmax(logits)`` along an axis.

    Parameters
    ----------
    logits : array of floats
        Logits of −∞ have probability 0 and are ignored at every order. ∞ gives NaN.
    order : float in [0, ∞], default 1
        The order α, a Python number. 0 is the logarithm of the support size, 1 is Shannon's entropy, 2
        the collision entropy, ∞ the min-entropy.
    family : {"renyi", "tsallis"}
        Rényi ``log Σp^α/(1 − α)`` or Tsallis ``(1 − Σp^α)/(α − 1)``; at order 1 both equal Shannon's.
    axis : int
        The axis of the distribution.
    mask : boolean array, optional
        Broadcastable to `logits`. Logits under False are ignored.

    Returns
    -------
    array
        The entropy in nats; Rényi's lies in [0, log n]. It has the shape of `logits` without `axis`
        and the dtype of `logits`, or float32 for half precision. It is 0 where all logits are ignored.

    Raises
    ------
    TypeError
        If `logits` is not a floating-point array, if `mask` is not a boolean array, or if they are
        arrays of different libraries.
    ValueError
        If `order` is negative or NaN, if `mask` does not broadcast, or if it is on another device.

    Notes
    -----
    ``H = log z − (1/z) Σ e^{s−m}(s − m)`` with the maximum m. The scores are centered, so that a large
    common offset of the logits does not reduce the accuracy. Gradients are finite, also for one-hot
    and empty rows.

    References
    ----------
    Rényi 1961; Tsallis 1988.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import entropy_from_logits
    >>> entropy_from_logits(np.asarray([[0.0, 0.0, 0.0, 0.0], [9.0, -np.inf, -np.inf, -np.inf]]))
    array([1.38629436, 0.        ])
    """
    arrays = {"logits": logits} | present(mask=mask)
    xp = namespace(**arrays)
    common_device(**arrays)
    check_order(order)
    check_choice("family", family, FAMILIES)
    s = rows_of_logits(xp, logits, axis, mask)

    return xp.astype(entropy_of_rows(xp, s, float(order), family), measure_dtype(xp, logits.dtype))


def rows_of_logits(xp: ModuleType, logits: Array, axis: int, mask: Array | None) -> Array:
    """Logits with their axis last, −∞ under a mask of False, in the dtype of the computation."""
    check_floating(xp, logits=logits)
    check_axis(axis, logits.ndim)
    s = xp.astype(logits, accumulator(xp, logits.dtype))
    if mask is not None:
        if not isdtype(xp, mask.dtype, "bool"):
            raise type_error("mask", "be boolean (True takes part)", mask.dtype)
        check_broadcastable("mask", mask.shape, logits.shape)
        s = xp.where(lift(mask, s.ndim), s, -math.inf)
    return last_axis(xp, s, axis)


@quiet_node
def entropy(p: Sliced[ArrayT], *, order: float = 1.0, family: str = "renyi", axis: int = -1) -> ArrayT:
    """Entropy of the distribution `p` along an axis.

    `p` is normalized to sum 1. At order 1 it is equivalent to `scipy.stats.entropy`.

    Parameters
    ----------
    p : array of floats ≥ 0
        Probabilities or weights. Negative and infinite values give NaN.
    order, family, axis
        As in `entropy_from_logits`.

    Returns
    -------
    array
        The entropy in nats; Rényi's lies in [0, log n]. It has the shape of `p` without `axis` and the
        dtype of `p`, or float32 for half precision. It is 0 where all weights are 0.

    Raises
    ------
    TypeError
        If `p` is not a floating-point array.
    ValueError
        If `order` is negative or NaN, or if `axis` does not exist.

    Notes
    -----
    The gradient is 0 where p = 0, although the derivative of −p log p is infinite there.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import entropy
    >>> entropy(np.asarray([0.5, 0.25, 0.25]))
    array(1.03972077)
    >>> entropy(np.asarray([0.5, 0.5, 0.0]), order=0)
    array(0.69314718)
    """
    xp = namespace(p=p)
    check_floating(xp, p=p)
    check_order(order)
    check_choice("family", family, FAMILIES)
    check_axis(axis, p.ndim)

    # The distribution p is the softmax of log p.
    s = log_or(xp, _weights(xp, p, axis, p.dtype), -math.inf)

    return xp.astype(entropy_of_rows(xp, s, float(order), family), measure_dtype(xp, p.dtype))


def entropy_of_rows(xp: ModuleType, s: Array, order: float, family: str) -> Array:
    """The entropy of the softmax of logits along the last axis, in nats."""
    if s.shape[-1] == 0:
        # The sum over no keys is a 0 of the right shape.
        return xp.sum(s, axis=-1, keepdims=True)[..., 0]
    ops = Ops(xp)
    _, _, normalizer, moment = partition(ops, s, order, ops.row_max(s))
    assert moment is not None
    return entropy_of_moments(xp, normalizer, moment, order, family)[..., 0]


@quiet_node
def cross_entropy(p: Sliced[ArrayT], q: Array, *, axis: int = -1) -> ArrayT:
    """Cross-entropy ``−Σ p log q`` of two distributions along an axis.

    Parameters
    ----------
    p, q : arrays of floats ≥ 0
        Weights that broadcast; each is normalized to sum 1. Negative and infinite values give NaN.
    axis : int
        The axis of the distributions.

    Returns
    -------
    array
        Nats, in [0, ∞]. It is ∞ if q = 0 at some p > 0, and 0 if all of p is 0. It has the dtype to
        which p and q promote, or float32 for half precision.

    Raises
    ------
    TypeError, ValueError
        If the arrays are not of floats, do not broadcast, or belong to two libraries or devices.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import cross_entropy
    >>> cross_entropy(np.asarray([1.0, 0.0]), np.asarray([0.5, 0.5]))
    array(0.69314718)
    """
    xp, p, q, dtype = _checked_pair(p, q, axis)
    P, Q = _distribution(xp, p), _distribution(xp, q)
    return xp.astype(_expectation(xp, P, Q, P.share * -Q.log_share), dtype)


@quiet_node
def kl_divergence(p: Sliced[ArrayT], q: Array, *, axis: int = -1) -> ArrayT:
    """Kullback–Leibler divergence ``Σ p log(p/q)`` along an axis.

    Equivalent to ``scipy.stats.entropy(p, q)``.

    Parameters
    ----------
    p, q, axis
        As in `cross_entropy`.

    Returns
    -------
    array
        As in `cross_entropy`.

    Raises
    ------
    TypeError, ValueError
        As in `cross_entropy`.

    Notes
    -----
    The divergence is computed as ``Σ p (r − 1 − log r)``, where r = q/p and both are normalized. No
    term is negative, and each is accurate where r is near 1. So the divergence of close distributions
    is accurate too. Where p = 0 the gradient with respect to p is 0, although the
    derivative is infinite there.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import kl_divergence
    >>> kl_divergence(np.asarray([1.0, 0.0]), np.asarray([0.25, 0.75]))
    array(1.38629436)
    """
    xp, p, q, dtype = _checked_pair(p, q, axis)
    P, Q = _distribution(xp, xp.where(p == 0, 0.0, p)), _distribution(xp, q)

    is_near = xp.abs(Q.share - P.share) < P.share / 2
    # The difference of nearly equal shares is mostly rounding error. So weights are subtracted instead,
    # after those of q are multiplied by a power of two, which is exact and brings their total near that
    # of p.
    have_totals = (P.total > 0) & (Q.total > 0)
    ratio = xp.where(have_totals, P.total, 1.0) / xp.where(have_totals, Q.total, 1.0)
    scale = 2.0 ** xp.round(xp.log2(ratio))
    scaled, total = Q.scaled * scale, Q.total * scale
    difference = scaled - P.scaled
    growth = divide_or_zero(xp, xp.sum(difference, axis=-1, keepdims=True), P.total)
    excess = difference / xp.where(is_near, P.scaled, 1.0) - growth
    excess = xp.where(is_near, excess * divide_or_zero(xp, P.total, total), 0.0)  # r − 1
    log_ratio = xp.where(is_near, xp.log1p(excess), Q.log_share - P.log_share)

    is_large = log_ratio > LARGE_LOG_RATIO
    terms = P.share * expm1_beyond(xp, xp.where(is_large, 0.0, log_ratio))
    terms = xp.where(is_large, Q.share - P.share * (log_ratio + 1), terms)
    terms = xp.where(P.weight == 0, Q.share, terms)
    return xp.astype(_expectation(xp, P, Q, terms), dtype)


class _Distribution(NamedTuple):
    """Weights along the last axis. `total` keeps that axis with length 1."""

    weight: Any
    scaled: Any  # divided by a number that keeps their sum from overflow and underflow
    total: Any  # the sum of `scaled`
    share: Any  # the probabilities
    log_share: Any  # accurate also for shares below the smallest float; finite where the weight is 0


def _checked_pair(p: Array, q: Array, axis: int) -> tuple[ModuleType, Any, Any, Any]:
    """Return the namespace, the checked weights with their axis last, and the dtype of the result."""
    xp = namespace(p=p, q=q)
    common_device(p=p, q=q)
    check_floating(xp, p=p, q=q)
    check_axis(axis, len(common_shape(p=p.shape, q=q.shape)))
    dtype = promoted(xp, p, q)
    p, q = (_weights(xp, x, axis, dtype) for x in xp.broadcast_arrays(p, q))
    return xp, p, q, measure_dtype(xp, dtype)


def _weights(xp: ModuleType, x: Array, axis: int, dtype: Any) -> Array:
    """Weights with their axis last, in the dtype of the computation; NaN where negative or infinite."""
    x = last_axis(xp, xp.astype(x, accumulator(xp, dtype)), axis)
    return xp.where((x >= 0) & (x < math.inf), x, math.nan)


def _distribution(xp: ModuleType, weight: Any) -> _Distribution:
    if weight.shape[-1] == 0:
        scale = xp.sum(weight, axis=-1, keepdims=True) + 1.0
    else:
        largest = xp.max(weight, axis=-1, keepdims=True)
        is_ordinary = (largest == 0) | ((largest > 1 / _SAFE_RANGE) & (largest < _SAFE_RANGE))
        # XLA may multiply by the reciprocal, which is subnormal for the largest floats.
        largest_scale = float(xp.finfo(weight.dtype).max) / 16
        scale = xp.where(is_ordinary, 1.0, clip(xp, largest, max=largest_scale))
    scaled = weight / scale
    total = xp.sum(scaled, axis=-1, keepdims=True)
    share = divide_or_zero(xp, scaled, total)
    is_small = share < xp.finfo(share.dtype).smallest_normal
    log_small = log_or(xp, weight, 0.0) - xp.log(scale) - log_or(xp, total, 0.0)
    log_share = xp.where(is_small, log_small, xp.log(xp.where(is_small, 1.0, share)))
    return _Distribution(weight, scaled, total, share, log_share)


def _expectation(xp: ModuleType, P: _Distribution, Q: _Distribution, terms: Array) -> Array:
    """The sum of the terms; ∞ where q = 0 at some p > 0; 0 where all of p is 0."""
    terms = xp.where((P.weight > 0) & (Q.weight == 0), math.inf, terms)
    expectation = xp.sum(terms, axis=-1, keepdims=True)
    # `Q.total * 0.0` instead of 0 keeps NaN in q.
    return xp.where(P.total == 0, Q.total * 0.0, expectation)[..., 0]


@quiet_node
def entropy_penalty(entropy: Sliced[ArrayT], target: float | Array, *, weight: float = 1.0) -> ArrayT:
    """Soft constraint ``weight · mean|H − target|²`` for a training loss.

    Parameters
    ----------
    entropy : array of floats
        Entropies H in nats, as from `attention_entropy`.
    target : float or array
        The target entropy in nats, broadcastable to `entropy`.
    weight : float ≥ 0
        The strength β.

    Returns
    -------
    array
        The penalty in nats², at least 0 and 0-d. It is differentiable, and has the dtype of `entropy`,
        or float32 for half precision.

    Raises
    ------
    TypeError, ValueError
        If arrays are not of floats or do not broadcast, or if `weight` is negative.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import entropy_penalty
    >>> entropy_penalty(np.asarray([2.0, 4.0]), 3.0, weight=0.5)
    array(0.5)
    """
    arrays = {"entropy": entropy} | present(target=target if is_array(target) else None)
    xp = namespace(**arrays)
    common_device(**arrays)
    check_floating(xp, **arrays)
    check_real("weight", weight, least=0)
    if is_array(target):
        check_broadcastable("target", target.shape, entropy.shape)  # type: ignore[union-attr]
    else:
        check_real("target", target)
        target = float(target)  # type: ignore[arg-type]

    h = xp.astype(entropy, accumulator(xp, entropy.dtype))
    deviation = h - (lift(target, h.ndim) if is_array(target) else target)
    squares = xp.reshape(deviation * deviation, (-1,))
    mean = xp.sum(squares, axis=-1, keepdims=True) / max(squares.shape[0], 1)
    penalty = mean * float(weight)
    return xp.astype(penalty[0, ...], measure_dtype(xp, entropy.dtype))
