"""The factor on the logits that gives the softmax a target entropy, row by row.

With scores s, the entropy H(λ) of softmax(λs) falls from log n at λ = 0 to the logarithm of the
number of ties at the maximum, at the rate dH/d log λ = −Var(λs), the variance under softmax(λs). The
solver is Newton's method in u = log λ for the equation log D/H = log D*/H*, where D = log n − H is the
deficit. Near λ = 0 D grows like λ², and for large λ H falls exponentially, so that the equation is
close to linear at both ends. Each step stays between bounds. The lower bound follows from D ≤ λ² R²/8
for scores of range R, as the variance is at most R²/4.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

from isentropic._attention.backends import map_logits, state_of
from isentropic._attention.plan import Arguments, prepare, without_numpy_if_traced
from isentropic._checks import check_broadcastable, check_floating, check_real, is_array
from isentropic._entropy import entropy_of_moments, entropy_of_rows, rows_of_logits
from isentropic._loops import compiled, is_differentiable, is_differentiated, iterate, without_gradient
from isentropic._namespace import (
    Array,
    ArrayT,
    Sliced,
    common_device,
    largest_number,
    namespace,
    present,
)
from isentropic._numerics import (
    clip,
    divide_or_zero,
    lift,
    log_or,
    quiet_node,
    replace_infinite_minimum,
)
from isentropic._products import row_products

# Enough for float64 and every case of the tests; most rows converge in 6 to 9 steps.
_MAX_STEPS = 28
# The highest factor times the smallest distance from the maximum. A weight of e⁻²⁰⁰ is negligible.
_MAX_EXPONENT = 200.0
# Scores whose distance from the maximum exceeds the smallest distance by more than this factor are
# ignored.
_MAX_DISTANCE_RATIO = 1e25


@quiet_node
def factor_for_entropy(
    logits: Sliced[ArrayT], target: float | Array, *, axis: int = -1, mask: Array | None = None
) -> ArrayT:
    """The factor λ ≥ 0 for which ``softmax(λ · logits)`` has the entropy `target`.

    Parameters
    ----------
    logits : array of floats
        Logits of −∞ have probability 0 at every factor and are ignored. So are logits whose distance
        from the maximum is more than 10²⁵ times the smallest such distance.
    target : float or array
        The entropy to reach, in nats; broadcastable to `logits` without `axis`.
    axis : int
        The axis of the distribution.
    mask : boolean array, optional
        Broadcastable to `logits`. Logits under False are ignored.

    Returns
    -------
    array
        The factors (dimensionless), with the shape of `logits` without `axis` and the dtype of
        `logits`. Half precision is computed in float32. Where no factor reaches the target, the result
        is an end of the range of the factors:

        - 0 where the target is log n or more, where n is the number of logits that are not ignored;
        - 200 divided by the distance from the maximum to the next logit, where the target is at most
          the logarithm of the number of ties at the maximum. With this factor all weight is at the
          maximum;
        - 1 where the factor makes no difference, as all logits are equal or all are ignored.

        NaN where a logit that is not ignored is NaN or +∞, or where the target is NaN.

    Raises
    ------
    TypeError
        If `logits` is not a floating-point array, if `mask` is not a boolean array, or if they are
        arrays of different libraries.
    ValueError
        If shapes do not broadcast, or if arrays are on different devices.

    Notes
    -----
    The solver is a safeguarded Newton's method with a bounded number of steps. The entropy falls with
    λ at the rate ``dH/d log λ = −Var(λ · logits)``, the variance under the softmax. The first and
    second derivatives are those of the implicit function, and 0 where no factor reaches the target.

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
        factor, slope = compiled(xp, _solve, without_gradient(xp, s), without_gradient(xp, targets))
        if is_differentiable(xp, s, targets):
            hidden = s == -math.inf

            def entropy_at(factor: Array) -> Array:
                # A factor of 0 times −∞ would be NaN, and so would its derivative.
                scaled = xp.where(hidden, s, xp.where(hidden, 0.0, s) * factor)
                return entropy_of_rows(xp, scaled, 1.0, "renyi")[..., None]

            factor = _with_gradient(xp, factor, slope, entropy_at, targets)
    return _rounded(xp, factor, logits.dtype)


def factor_of_attention(arguments: Arguments, target: float | Array) -> Any:
    """The factor on the logits of a call, which has neither bias, soft cap nor sinks."""
    plan, operands = prepare(arguments)
    if is_array(target):
        namespace(query=arguments.query, target=target)
        common_device(query=arguments.query, target=target)
    xp, shape = plan.xp, (*plan.batch, plan.n_queries)
    targets = _targets(xp, target, shape, plan.compute, plan.device)
    if 0 in (*shape, plan.n_keys):
        return xp.ones_like(plan.zeros((plan.n_queries,)))

    query, key = (without_gradient(xp, x) for x in (operands.query, operands.key))
    constant = operands._replace(query=query, key=key)
    factor, slope = map_logits(plan, constant, _solve, without_gradient(xp, targets))
    mask_arrays = () if operands.mask is None else operands.mask.arrays
    if is_differentiable(xp, operands.query, operands.key, *mask_arrays, targets):
        # The factor depends on the targets too.
        plan = plan.replaced(is_differentiated=plan.is_differentiated or is_differentiated(xp, targets))

        def entropy_at(factor: Array) -> Array:
            scaled = operands._replace(multiplier=factor * operands.multiplier)
            # A traced target gives a traced factor, with which NumPy cannot compute.
            state = state_of(without_numpy_if_traced(plan, scaled), scaled, None)
            return entropy_of_moments(xp, state.normalizer, state.weighted_score, 1.0, "renyi")

        factor = _with_gradient(xp, factor, slope, entropy_at, targets)
    return _rounded(xp, factor, plan.dtype)


def _targets(xp: ModuleType, target: Any, shape: tuple[int, ...], dtype: Any, device: Any) -> Array:
    """The target entropies as columns, (..., 1)."""
    if not is_array(target):
        check_real("target", target)
        return xp.full((1,) * (len(shape) + 1), float(target), dtype=dtype, device=device)
    check_floating(xp, target=target)
    check_broadcastable("target", target.shape, shape)
    return lift(xp.astype(target, dtype)[..., None], len(shape) + 1)


def _solve(xp: ModuleType, s: Array, targets: Array) -> tuple[Array, Array]:
    """The factor for each row of scores, and the variance −dH/d log λ there (0 where saturated)."""
    eps, tiny = float(xp.finfo(s.dtype).eps), float(xp.finfo(s.dtype).smallest_normal)
    x, unit, spread, spread_variance, log_n = _relative_scores(xp, s, targets)
    deficit = log_n - targets
    is_below = deficit > 0
    deficit = xp.where(is_below, deficit, 1.0)
    highest = xp.zeros_like(deficit) + math.log(_MAX_EXPONENT)
    at_highest, _ = _entropy_and_variance(xp, x, highest)
    is_inside = is_below & (spread > 0) & (at_highest < targets)
    log_spread = log_or(xp, spread, 0.0)
    # No variance exceeds spread²/4, so the deficit is at most λ² spread²/8.
    lowest = xp.where(is_inside, xp.log(deficit * 8.0) / 2 - log_spread, highest)
    # For small λ the deficit is λ²/2 times the variance of the scores.
    start = xp.log(deficit * 2.0 / clip(xp, spread_variance, min=eps)) / 2 - log_spread
    start = xp.minimum(xp.maximum(start, lowest), highest)
    goal = xp.log(deficit) - xp.log(clip(xp, targets, min=tiny))

    def step(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        u, low, high, _ = carry
        h, variance = _entropy_and_variance(xp, x, u)
        is_above = h > targets
        low, high = xp.where(is_above, u, low), xp.where(is_above, high, u)
        d, h = clip(xp, log_n - h, min=eps / 8), clip(xp, h, min=tiny)
        # The derivative of log d − log h with respect to log λ, of which −dH/d log λ is the variance.
        slope = variance * (1 / d + 1 / h)
        slope = xp.where(slope > 1e-30, slope, 0.0)  # a smaller slope would make the step overflow
        newton = divide_or_zero(xp, goal - xp.log(d) + xp.log(h), slope)
        new = u + newton
        # At the solution a step may leave the bounds by rounding alone.
        is_valid = (slope > 0) & (((new > low) & (new < high)) | (xp.abs(newton) < 1e3 * eps))
        new = xp.where(is_valid, new, (low + high) / 2)
        return new, low, high, new - u

    carry = (start, lowest, highest, xp.zeros_like(start))
    u, *_ = iterate(xp, step, carry, _MAX_STEPS, lambda c: xp.all(~(xp.abs(c[3]) > 1e3 * eps)))
    h, variance = _entropy_and_variance(xp, x, u)
    # The scores were halved, and divided by the unit.
    factor = xp.exp(xp.where(is_inside, u, highest)) / (unit * 2)
    factor = xp.where(is_below, factor, 0.0)
    # Equal scores have the same entropy at every factor.
    factor = xp.where(spread == 0, 1.0, factor)
    is_number = (h == h) & (targets == targets)
    return xp.where(is_number, factor, math.nan), xp.where(is_inside, variance, 0.0)


def _relative_scores(xp: ModuleType, s: Array, targets: Array) -> tuple[Array, ...]:
    """Scores x ≤ 0 relative to their maximum, unit, spread −min x, variance of x/spread, and log n.

    The unit is half of the smallest distance from the maximum. A score that is hidden or ignored has an
    x so low that its weight is 0. n is the number of the others.
    """
    dtype = xp.finfo(s.dtype)
    hidden = s == -math.inf
    top = replace_infinite_minimum(xp, xp.max(s, axis=-1, keepdims=True))
    x = xp.where(hidden, top, s) / 2 - top / 2  # halves, whose difference does not overflow
    # No dtype covers both the scores that are nearest to the maximum and the farthest ones. Either the
    # target is above the entropy of the nearest scores, and they can count as equal to the maximum; or
    # only they have weight.
    is_near = (s != -math.inf) & (-x <= -xp.min(x, axis=-1, keepdims=True) * (1 / _MAX_DISTANCE_RATIO))
    n_near = xp.sum(xp.astype(is_near, s.dtype), axis=-1, keepdims=True)
    is_above_near = targets >= log_or(xp, n_near, 0.0) * (1 - 4 * float(dtype.eps))
    x = xp.where(is_near & is_above_near, 0.0, x)
    gap = xp.min(xp.where(x < 0, -x, math.inf), axis=-1, keepdims=True)
    # In units of the gap, only the maximum has weight at the factor 200.
    unit = clip(xp, xp.where(gap < math.inf, gap, 1.0), min=2 * _MAX_EXPONENT / float(dtype.max))
    hidden = hidden | (x * (1 / _MAX_DISTANCE_RATIO) < -unit)
    x = xp.where(hidden, 0.0, x) / unit
    spread = -xp.min(x, axis=-1, keepdims=True)
    n = x.shape[-1] - xp.sum(xp.astype(hidden, s.dtype), axis=-1, keepdims=True)
    share = divide_or_zero(xp, x, spread)
    first, second = (xp.sum(y, axis=-1, keepdims=True) for y in (share, share * share))
    x = xp.where(hidden, -_MAX_DISTANCE_RATIO * 1e11, x)
    return x, unit, spread, _variance(xp, first, second, n), log_or(xp, n, 0.0)


def _entropy_and_variance(xp: ModuleType, x: Array, u: Array) -> tuple[Array, Array]:
    """The entropy of softmax(eᵘ x), and the variance of eᵘ x under it."""
    y = xp.exp(u) * x  # at least −2·10³⁸, which is finite in float32, and whose weight is 0
    weight = xp.exp(y)
    z, weighted = xp.sum(weight, axis=-1, keepdims=True), weight * y
    first, second = (row_products(xp, w, y)[..., None] for w in (weight, weighted))
    return log_or(xp, z, 0.0) - divide_or_zero(xp, first, z), _variance(xp, first, second, z)


def _rounded(xp: ModuleType, factor: Array, dtype: Any) -> Any:
    """The factor without its last axis, in a dtype that may have a smaller range."""
    return xp.astype(clip(xp, factor, max=largest_number(xp, dtype)), dtype)[..., 0]


def _variance(xp: ModuleType, first: Array, second: Array, z: Array) -> Array:
    """The variance from the sums of weights z, of weighted scores, and of weighted squared scores."""
    mean = divide_or_zero(xp, first, z)
    return clip(xp, divide_or_zero(xp, second, z) - mean * mean, min=0.0)


def _with_gradient(
    xp: ModuleType, factor: Array, slope: Array, entropy_at: Callable[[Array], Array], targets: Array
) -> Array:
    """The factor, with the first two derivatives of the solution of H = target.

    The derivatives are those of two more steps of Newton's method with a constant slope. The steps do
    not change the value. The first step adds the first derivative of the solution, and the second step
    adds the second derivative.
    """
    for _ in range(2):
        difference = entropy_at(factor) - targets
        step = divide_or_zero(xp, xp.where(slope > 0, difference, 0.0), slope)
        factor = factor + factor * (step - without_gradient(xp, step))
    return factor
