"""Mean and variance of the logits of each query, as sums over tiles."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, NamedTuple

from isentropic._attention.state import as_rows
from isentropic._attention.tile import Sums, merge_columns, output_of_columns, shift_of
from isentropic._entropy import partition
from isentropic._namespace import A_co, Array, Generic, equal_by_value
from isentropic._numerics import clip, divide_or_zero, replace_infinite_minimum
from isentropic._ops import Ops

# Deviations from a mean are clipped here. Logits that are this far apart do not both have weight, and
# the square of this number does not overflow in float32.
_MAX_DEVIATION = 1e15

# Here the `weighted_value` of a state is Σ eˣ (x − mean)². If two means agree,
# these sums are simply added.


def spread_of_logits(xp: ModuleType, s: Array) -> Sums:
    """The state of logits (..., L, S), with their squared deviations from the mean as the value."""
    ops = Ops(xp)
    maximum, weight, normalizer, score = partition(ops, s, 1.0, ops.row_max(s))
    assert score is not None
    x = xp.where(s == -math.inf, 0.0, s - replace_infinite_minimum(xp, maximum))
    deviation = clip(xp, x - divide_or_zero(xp, score, normalizer), min=-_MAX_DEVIATION)
    squares = xp.sum(weight * deviation * deviation, axis=-1, keepdims=True)
    return Sums(maximum, normalizer, squares, score)


def merge_spreads(xp: ModuleType, a: Sums | None, b: Sums) -> Sums:
    """The merged state; a state of None is that of no keys.

    The sum of squares of the union is that of both states plus a term for the distance of their means.
    """
    if a is None:
        return b
    merged = merge_columns(Ops(xp), a, b, 1.0)
    means, masses = [], []  # relative to the maximum of the union
    for state in (a, b):
        shift = shift_of(xp, state.maximum, merged.maximum)
        means.append(shift + divide_or_zero(xp, state.weighted_score, state.normalizer))
        masses.append(xp.exp(shift) * state.normalizer)
    gap = clip(xp, means[0] - means[1], min=-_MAX_DEVIATION, max=_MAX_DEVIATION)
    between = divide_or_zero(xp, masses[0] * masses[1], merged.normalizer) * gap * gap
    return merged._replace(weighted_value=merged.weighted_value + between)


def spread_with_sinks(xp: ModuleType, state: Sums, sinks: Any) -> Sums:
    """The state with the logits of sinks (..., 1, 1), if there are any."""
    return state if sinks is None else merge_spreads(xp, state, spread_of_logits(xp, sinks))


@equal_by_value
class AttentionStatistics(NamedTuple, Generic[A_co]):
    """Statistics of the attention of each query, (..., L). See `AttentionDistribution.statistics`."""

    entropy: A_co
    maximum: A_co
    log_normalizer: A_co
    mean: A_co
    variance: A_co


def statistics_of_spread(xp: ModuleType, state: Sums) -> AttentionStatistics:
    """The statistics from a state in columns whose value is that of `spread_of_logits`."""
    rows = as_rows(state)
    mean = divide_or_zero(xp, rows.weighted_score, rows.normalizer)
    return AttentionStatistics(
        rows.entropy(),
        rows.maximum,
        rows.log_normalizer(),
        replace_infinite_minimum(xp, rows.maximum) + mean,
        output_of_columns(xp, state)[..., 0],
    )
