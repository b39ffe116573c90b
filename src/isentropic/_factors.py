"""The factor that gives the entropy a wanted value, row by row.

With scores s, H(λ) the entropy of softmax(λs) falls from log n at λ = 0 to the logarithm of the
number of ties at the maximum, at the rate

    dH/d log λ = −Var(λs),

the variance under softmax(λs) itself. The solver is Newton's method in u = log λ for the equation
log D/H = log D*/H*, where D = log n − H is the deficit: D grows like λ² near 0 and H falls
exponentially at the other end, so that the equation is close to a line at both. Each step stays
between bounds: D ≤ λ² R²/8 for scores of range R (as the variance is at most R²/4) gives a lower one.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import ModuleType
from typing import Any

from isentropic._attention.backends import state_of
from isentropic._attention.generic import Tiles, reach, tile_shape
from isentropic._attention.plan import Arguments, prepare
from isentropic._checks import (
    check_broadcastable,
    check_floating,
    check_real,
    is_array,
)
from isentropic._entropy import entropy_of_moments, partition, rows_of_logits
from isentropic._loops import (
    Block,
    is_differentiable,
    is_readable,
    iterate,
    map_blocks,
    take,
    without_gradient,
)
from isentropic._namespace import Array, common_device, namespace, present
from isentropic._numerics import clip, divide_or_zero, lift, log_or, quietly, replace_infinite_minimum
from isentropic.masks import Mask

# Enough for float64 and every case of the tests; most rows settle in 6 to 9 steps.
_MAX_STEPS = 28
# The highest factor, times the smallest distance from the maximum: e⁻²⁰⁰ does not count.
_MAX_EXPONENT = 200.0
# Scores that are farther from the maximum than this many times the smallest distance are hidden.
_MAX_DISTANCE_RATIO = 1e25


@quietly
def factor_for_entropy(
    logits: Array, target: float | Array, *, axis: int = -1, mask: Array | None = None
) -> Any:
    """The factor λ ≥ 0 with which ``softmax(λ · logits)`` has the entropy `target`.

    Parameters
    ----------
    logits : array of floats
        Logits of −∞ have probability 0 at every factor and take no part; nor do those whose distance
        from the maximum is more than 10²⁵ times the smallest.
    target : float or array
        The entropy to reach, in nats; broadcastable to `logits` without `axis`.
    axis : int
        The axis of the distribution.
    mask : boolean array, optional
        Broadcastable to `logits`; True takes part.

    Returns
    -------
    array
        The factors, in the shape of `logits` without `axis` and their dtype (half precision is
        computed in float32). Targets that no factor reaches give the end of the range of the factors:

        - 0 where the target is log n or more, n being how many logits take part;
        - at the other end, where the target is not above the logarithm of the number of ties at the
          maximum, 200 over the distance from the maximum to the next logit, where nothing but the
          maximum has a weight;
        - 1 where the factor makes no difference: all logits are equal, or none takes part.

        NaN where a logit that takes part is NaN or +∞, or an entry of the target is NaN.

    Raises
    ------
    TypeError
        For logits that are not of floats, a mask that is not a boolean array, another library.
    ValueError
        For shapes that do not broadcast, or another device.

    Notes
    -----
    Newton's method, safeguarded, with a fixed number of steps; the entropy falls with λ at the rate
    ``dH/d log λ = −Var(λ · logits)``, the variance under the softmax. First derivatives are those of
    the implicit function, 0 where the target is out of reach; second derivatives are not meant.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import entropy_from_logits, factor_for_entropy
    >>> logits = np.asarray([0.0, 1.0, 2.0, 4.0])
    >>> factor = factor_for_entropy(logits, 1.0)
    >>> round(float(factor), 4), round(float(entropy_from_logits(factor * logits)), 4)
    (0.6055, 1.0)
    """
    arrays = {"logits": logits} | present(mask=mask, target=target if is_array(target) else None)
    xp, device = namespace(**arrays), common_device(**arrays)
    s = rows_of_logits(xp, logits, axis, mask)
    targets = _targets(xp, target, s.shape[:-1], s.dtype, device)
    if s.shape[-1] == 0:
        factor = xp.ones_like(xp.sum(s, axis=-1, keepdims=True))
    else:
        factor, slope = _solve(xp, without_gradient(xp, s), without_gradient(xp, targets))
        if is_differentiable(xp, s, targets):
            hidden = s == -math.inf
            scaled = xp.where(hidden, s, xp.where(hidden, 0.0, s) * factor)
            _, _, normalizer, moment = partition(xp, scaled, 1.0)
            factor = _with_gradient(xp, factor, slope, (normalizer, moment), targets)
    return _rounded(xp, factor, logits.dtype)


@quietly
def factor_for_attention_entropy(
    query: Array,
    key: Array,
    target: float | Array,
    *,
    mask: Array | Mask | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """The factor on the scale with which each query's attention has the entropy `target`.

    What a law approximates as a function of n, exactly and for each query. Equivalent to
    `factor_for_entropy` of the logits ``scale · q·k``, without forming them for all queries at once.

    Parameters
    ----------
    query : array (..., L, E)
    key : array (..., S, E)
    target : float or array broadcastable to (..., L)
        The entropy to reach, in nats.
    mask, is_causal, scale, enable_gqa
        As in `attention`. There is no bias and no soft cap: with them the entropy need not fall as
        the factor grows, and there may be no solution or several.

    Returns
    -------
    array (..., L)
        ≥ 0; see `factor_for_entropy` for targets that no factor reaches. Multiply the queries by it.

    Raises
    ------
    TypeError, ValueError
        As in `attention`, and for a target that does not broadcast.

    Notes
    -----
    The logits of a block of queries are kept during the solution: of one query of each head against
    all keys at least, else of about as many as a tile has. Derivatives as in `factor_for_entropy`.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import attention_entropy, factor_for_attention_entropy
    >>> q, k = np.random.default_rng(0).normal(size=(2, 100, 16))
    >>> factor = factor_for_attention_entropy(q, k, 2.0)
    >>> np.round(attention_entropy(factor[:, None] * q, k, law=None)[:3], 6)
    array([2., 2., 2.])
    """
    plan, operands = prepare(
        Arguments(query, key, None, mask, None, is_causal, scale, enable_gqa=enable_gqa)
    )
    if is_array(target):
        namespace(query=query, target=target)
        common_device(query=query, target=target)
    xp, shape = plan.xp, (*plan.batch, plan.n_queries)
    targets = _targets(xp, target, shape, plan.compute, plan.device)
    if 0 in (*shape, plan.n_keys):
        return xp.ones_like(plan.zeros((plan.n_queries,)))

    query, key = (without_gradient(xp, x) for x in (operands.query, operands.key))
    tiles = Tiles.of(plan, operands._replace(query=query, key=key))
    constant_targets = without_gradient(xp, targets)
    row_size, column_size = tile_shape(plan)
    rows_at_once = max(1, row_size * min(column_size, plan.n_keys) // plan.n_keys)

    def solve_rows(rows: Block) -> tuple[Array, Array]:
        return _solve(
            xp, tiles.logits(rows, reach(plan, operands.mask, rows)), take(constant_targets, rows, -2)
        )

    factor, slope = map_blocks(xp, solve_rows, plan.n_queries, rows_at_once, in_threads=True)
    mask_arrays = () if operands.mask is None else operands.mask.arrays
    if is_differentiable(xp, operands.query, operands.key, *mask_arrays, targets):
        scaled_operands = operands._replace(multiplier=factor * operands.multiplier)
        # A target that is traced makes a factor that is.
        scaled_plan = replace(plan, is_on_host=plan.is_on_host and is_readable(xp, factor))
        state = state_of(scaled_plan, scaled_operands, None)
        factor = _with_gradient(xp, factor, slope, (state.normalizer, state.weighted_score), targets)
    return _rounded(xp, factor, plan.dtype)


def _targets(xp: ModuleType, target: Any, shape: tuple[int, ...], dtype: Any, device: Any) -> Array:
    """The target as columns, (..., 1)."""
    if not is_array(target):
        check_real("target", target)
        return xp.full((1,) * (len(shape) + 1), float(target), dtype=dtype, device=device)
    check_floating(xp, target=target)
    check_broadcastable("target", target.shape, shape)
    return lift(xp.astype(target, dtype)[..., None], len(shape) + 1)


def _solve(xp: ModuleType, s: Array, targets: Array) -> tuple[Array, Array]:
    """The factor for each row of scores, and the variance −dH/d log λ there (0 where saturated)."""
    dtype = xp.finfo(s.dtype)
    eps, tiny, largest = float(dtype.eps), float(dtype.smallest_normal), float(dtype.max)
    hidden = s == -math.inf
    top = replace_infinite_minimum(xp, xp.max(s, axis=-1, keepdims=True))
    x = xp.where(hidden, top, s) / 2 - top / 2  # halves, whose difference does not overflow
    # Either the entropy is above that of the scores nearest to the maximum, which then are equal to it,
    # or they alone have a weight. No dtype has the range for both.
    is_near = ~hidden & (-x <= -xp.min(x, axis=-1, keepdims=True) * (1 / _MAX_DISTANCE_RATIO))
    n_near = xp.sum(xp.astype(is_near, s.dtype), axis=-1, keepdims=True)
    is_above_near = targets >= log_or(xp, n_near, 0.0) * (1 - 4 * eps)
    x = xp.where(is_near & is_above_near, 0.0, x)
    gap = xp.min(xp.where(x < 0, -x, math.inf), axis=-1, keepdims=True)
    # The unit is the smallest distance from the maximum: at 200 over it nothing else has a weight.
    unit = clip(xp, xp.where(gap < math.inf, gap, 1.0), min=2 * _MAX_EXPONENT / largest)
    hidden = hidden | (x * (1 / _MAX_DISTANCE_RATIO) < -unit)
    x = xp.where(hidden, 0.0, x) / unit
    spread = -xp.min(x, axis=-1, keepdims=True)
    n = x.shape[-1] - xp.sum(xp.astype(hidden, s.dtype), axis=-1, keepdims=True)
    log_n = log_or(xp, n, 0.0)
    share = divide_or_zero(xp, x, spread)
    first, second = (xp.sum(y, axis=-1, keepdims=True) for y in (share, share * share))
    score_variance = _variance(xp, first, second, n)
    x = xp.where(hidden, -_MAX_DISTANCE_RATIO * 1e11, x)

    def entropy_and_variance(u: Array) -> tuple[Array, Array]:
        y = clip(xp, xp.exp(u) * x, min=-1e4)  # of no weight there, and no square overflows
        weight = xp.exp(y)
        weighted = weight * y
        z, first, second = (xp.sum(w, axis=-1, keepdims=True) for w in (weight, weighted, weighted * y))
        return log_or(xp, z, 0.0) - divide_or_zero(xp, first, z), _variance(xp, first, second, z)

    deficit = log_n - targets
    is_below = deficit > 0
    deficit = xp.where(is_below, deficit, 1.0)
    highest = xp.zeros_like(deficit) + math.log(_MAX_EXPONENT)
    at_highest, _ = entropy_and_variance(highest)
    is_inside = is_below & (spread > 0) & (at_highest < targets)
    log_spread = log_or(xp, spread, 0.0)
    lowest = xp.where(is_inside, xp.log(deficit * 8.0) / 2 - log_spread, highest)
    # As the deficit begins, with λ²/2 times the variance of the scores themselves.
    start = xp.log(deficit * 2.0 / clip(xp, score_variance, min=eps)) / 2 - log_spread
    start = xp.minimum(xp.maximum(start, lowest), highest)
    goal = xp.log(deficit) - xp.log(clip(xp, targets, min=tiny))

    def step(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        u, low, high, _ = carry
        h, variance = entropy_and_variance(u)
        is_above = h > targets
        low, high = xp.where(is_above, u, low), xp.where(is_above, high, u)
        d, h = clip(xp, log_n - h, min=eps / 8), clip(xp, h, min=tiny)
        slope = variance * (1 / d + 1 / h)
        slope = xp.where(slope > 1e-30, slope, 0.0)  # or the step overflows
        newton = divide_or_zero(xp, goal - xp.log(d) + xp.log(h), slope)
        new = u + newton
        # At the solution rounding takes a step out of the bounds which it has made itself.
        is_valid = (slope > 0) & (((new > low) & (new < high)) | (xp.abs(newton) < 1e3 * eps))
        new = xp.where(is_valid, new, (low + high) / 2)
        return new, low, high, new - u

    carry = (start, lowest, highest, xp.zeros_like(start))
    u, *_ = iterate(xp, step, carry, _MAX_STEPS, lambda c: xp.all(~(xp.abs(c[3]) > 1e3 * eps)))
    h, variance = entropy_and_variance(u)
    factor = xp.exp(xp.where(is_inside, u, highest)) / (unit * 2)
    factor = xp.where(is_below, factor, 0.0)
    factor = xp.where(spread == 0, 1.0, factor)
    is_number = (h == h) & (targets == targets)
    return xp.where(is_number, factor, math.nan), xp.where(is_inside, variance, 0.0)


def _rounded(xp: ModuleType, factor: Array, dtype: Any) -> Any:
    """Without the last axis, in a dtype that may have a smaller range."""
    return xp.astype(clip(xp, factor[..., 0], max=float(xp.finfo(dtype).max)), dtype)


def _variance(xp: ModuleType, first: Array, second: Array, z: Array) -> Array:
    """From sums of weights z, of weighted scores, and of weighted squares."""
    mean = divide_or_zero(xp, first, z)
    return clip(xp, divide_or_zero(xp, second, z) - mean * mean, min=0.0)


def _with_gradient(
    xp: ModuleType, factor: Array, slope: Array, state: tuple[Array, Any], targets: Array
) -> Array:
    """The factor, with the derivatives of the solution of H = wanted.

    They are those of one more step of Newton's method in which all but H and the target is constant.
    """
    h = entropy_of_moments(xp, *state, 1.0, "renyi")
    step = divide_or_zero(xp, xp.where(slope > 0, h - targets, 0.0), slope)
    return factor + factor * (step - without_gradient(xp, step))
