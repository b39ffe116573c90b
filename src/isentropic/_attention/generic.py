"""The generic pass: tile, logits, weights, state, merge. Every backend must give the same results."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

from isentropic._attention import schedule
from isentropic._attention.plan import Operands, Plan, finite
from isentropic._attention.statistics import (
    merge_spreads,
    spread_of_logits,
    spread_with_sinks,
)
from isentropic._attention.tile import Sums, absorb, empty_state, logits, merge_columns
from isentropic._loops import (
    BLOCKS,
    Block,
    compiled,
    fold,
    logits_of_a_tile,
    map_blocks,
    take,
)
from isentropic._namespace import (
    Array,
    is_symbolic,
)
from isentropic._numerics import divide_or_zero, replace_infinite_minimum
from isentropic._ops import Ops, ops_of
from isentropic._products import sum_of_rows
from isentropic._records import Record


def with_sinks(plan: Plan, operands: Operands, state: Sums, order: float | None) -> Sums:
    """The state in columns with the sinks, each a key whose value is 0."""
    if operands.sinks is None:
        return state
    ops = Ops(plan.xp)  # not in place: the sinks belong to the caller
    sink = absorb(ops, None, operands.sinks, None, order)
    if state.weighted_value is not None:
        sink = sink._replace(weighted_value=plan.xp.zeros_like(sink.normalizer))
    return merge_columns(ops, state, sink, order)


def weights_of_logits(xp: ModuleType, s: Array, maximum: Array, normalizer: Array) -> Any:
    """The weights of keys with logits `s`, given the maximum and normalizer of all keys, in columns."""
    inverse = divide_or_zero(xp, xp.ones_like(normalizer), normalizer)
    weight = xp.exp(s - replace_infinite_minimum(xp, maximum)) * inverse
    return xp.where(s == -math.inf, 0.0, weight)  # also where the query is NaN


class Tiles(Record):
    """The pass over the tiles of a call, the same for all libraries."""

    plan: Plan
    operands: Operands
    query: Array  # scaled, divided by the soft cap, in the dtype of the computation

    @classmethod
    def of(cls, plan: Plan, operands: Operands) -> Tiles:
        operands = finite(plan, operands)
        query = plan.xp.astype(operands.query, plan.compute, copy=False)
        # The soft cap divides the queries, which are fewer numbers than the logits.
        factor = operands.multiplier / (1.0 if plan.softcap is None else plan.softcap)
        return cls(plan, operands, query * factor)

    def state(
        self,
        order: float | None,
        logits: Callable[[Block, Block], Array] | None = None,
        numbers_per_logit: int = 1,
    ) -> Sums:
        """The state over all keys, with its fields as columns (..., L, 1).

        `logits` computes the logits of a tile in place of the method; one logit then takes
        `numbers_per_logit` numbers in memory.
        """
        plan, tile_logits = self.plan, self.logits if logits is None else logits
        if plan.n_keys == 0:  # there is no first tile to start from
            return self.empty(plan.n_values, order)
        ops = ops_of(plan.xp)

        def with_tile(state: Sums | None, rows: Block, columns: Block) -> Sums:
            return absorb(ops, state, tile_logits(rows, columns), self.values(columns), order)

        return self._over_tiles(with_tile, numbers_per_logit)

    def spread(self) -> Sums:
        """The state over all keys and the sinks in columns, with the value of `spread_of_logits`."""
        xp, plan, sinks = self.plan.xp, self.plan, self.operands.sinks

        def with_tile(state: Sums | None, rows: Block, columns: Block) -> Sums:
            return merge_spreads(xp, state, spread_of_logits(xp, self.logits(rows, columns)))

        state = self.empty(1, 1.0) if plan.n_keys == 0 else self._over_tiles(with_tile)
        return spread_with_sinks(xp, state, sinks)

    def map_logits(
        self, function: Callable[..., tuple[Array, Array]], column: Array
    ) -> tuple[Array, Array]:
        """The two results (..., L, 1) of a function of all logits of each query and of a column.

        ``function(xp, logits, column)`` returns both for some rows at a time. The column broadcasts to
        (..., L, 1).
        """
        xp, plan = self.plan.xp, self.plan
        row_size, column_size = tile_shape(plan)
        # A block has all keys of its rows, and so fewer rows than a tile.
        rows_at_once = max(1, row_size * min(column_size, plan.n_keys) // plan.n_keys)

        def over_rows(rows: Block) -> tuple[Array, Array]:
            logits = self.logits(rows, schedule.reach(plan.frame, self.operands.mask, rows))
            return compiled(xp, function, logits, take(column, rows, -2))

        first, second = map_blocks(xp, over_rows, plan.n_queries, rows_at_once, in_threads=True)
        return first, second

    def _over_tiles(
        self,
        with_tile: Callable[[Sums | None, Block, Block], Sums],
        numbers_per_logit: int = 1,
    ) -> Sums:
        """The last ``state = with_tile(state, rows, columns)`` over the keys, for all queries."""
        plan, shape = self.plan, (*self.plan.batch, self.plan.n_queries)
        row_size, column_size = tile_shape(plan, numbers_per_logit)

        def over_keys(rows: Block) -> Sums:
            return fold(
                plan.xp,
                lambda state, columns: with_tile(state, rows, columns),
                plan.n_keys,
                column_size,
                self._reach(rows),
            )

        fields = map_blocks(plan.xp, over_keys, plan.n_queries, row_size, in_threads=True)
        return Sums(*fields).map(lambda x: with_batch_axes(plan.xp, x, shape))

    def empty(self, n_values: int | None, order: float | None) -> Sums:
        """The state of no keys."""
        plan = self.plan
        kind = {"dtype": plan.compute, "device": plan.device}
        state = empty_state(plan.xp, (*plan.batch, plan.n_queries), n_values, order, **kind)
        # PyTorch differentiates only what depends on the queries: here by a sum over no features.
        nothing = plan.xp.sum(self.query[..., :0], axis=-1, keepdims=True)
        return state.map(lambda x: x + nothing)

    def logits(self, rows: Block, columns: Block) -> Array:
        """The logits of one tile, −∞ where a key is hidden."""
        plan, operands = self.plan, self.operands
        query, key = take(self.query, rows, -2), take(operands.key, columns, -2)
        added = added_logits(plan, operands, rows, columns)
        visible = schedule.visible_keys(plan.frame, operands.mask, rows, columns, plan.ndim)
        key = plan.xp.astype(key, plan.compute, copy=False)
        return logits(ops_of(plan.xp), query, key, plan.softcap, added, visible)[0]

    def values(self, columns: Block) -> Any:
        """The values of the keys of a tile, or None."""
        value, plan = self.operands.value, self.plan
        if value is None:
            return None
        return plan.xp.astype(take(value, columns, -2), plan.compute, copy=False)

    def column_sums(self, state: Sums) -> Any:
        """The sum of the attention weights over the queries, (..., S), for the state in columns."""
        xp, plan = self.plan.xp, self.plan
        row_size, column_size = tile_shape(plan)

        def over_queries(columns: Block) -> tuple[Array]:
            def with_tile(total: Array | None, rows: Block) -> Array:
                if schedule.is_hidden(plan.frame, self.operands.mask, rows, columns):
                    return plan.zeros((columns[1], 1), plan.compute) if total is None else total
                sums = (take(x, rows, -2) for x in (state.maximum, state.normalizer))
                weight = weights_of_logits(xp, self.logits(rows, columns), *sums)
                weight = sum_of_rows(xp, weight)[..., None]
                return weight if total is None else total + weight

            return (fold(xp, with_tile, plan.n_queries, row_size),)

        # The keys are the outer loop, so that each sum is complete before the next block begins.
        (sums,) = map_blocks(xp, over_queries, plan.n_keys, column_size, in_threads=True)
        return sums[..., 0]

    def _reach(self, rows: Block) -> Any:
        mask, frame = self.operands.mask, self.plan.frame
        # In a graph a range of numbers would be fixed for the lengths of this call.
        return None if mask is None or frame.is_compiling else mask.reach(frame, rows)


def tile_shape(plan: Plan, numbers_per_logit: int = 1) -> tuple[int, int]:
    """The numbers of queries and of keys of a tile."""
    if plan.frame.is_compiling:
        return plan.n_queries, plan.n_keys
    width, size = max(numbers_per_logit, 1), logits_of_a_tile(plan.xp, plan.device)
    columns = max(BLOCKS.columns // width, 1)
    # A size that is not known yet cannot bound a tile.
    known = math.prod([n for n in plan.batch if not is_symbolic(n)])
    rows = size // max(known * min(columns, plan.n_keys) * width, 1)
    return max(rows, BLOCKS.rows), columns


def add_bias_and_mask(plan: Plan, operands: Operands, s: Any, rows: Block, columns: Block) -> Array:
    """`s` plus the bias of a tile; NaN for nonfinite rows of queries and keys; −∞ for hidden keys."""
    added = added_logits(plan, operands, rows, columns)
    s = s if added is None else s + added
    visible = schedule.visible_keys(plan.frame, operands.mask, rows, columns, plan.ndim)
    return s if visible is None else plan.xp.where(visible, s, -math.inf)


def added_logits(plan: Plan, operands: Operands, rows: Block, columns: Block) -> Any:
    """The bias of a tile, and NaN for nonfinite rows of queries and keys; None if there is neither."""
    added: Any = None
    if operands.bias is not None:
        bias = take(take(operands.bias, rows, -2), columns, -1)
        added = plan.xp.astype(bias, plan.compute, copy=False)
    if operands.nonfinite is not None:
        query_nan, key_nan = operands.nonfinite
        nan = take(query_nan, rows, -2) + take(key_nan, columns, -1)
        added = nan if added is None else added + nan
    return added


def interval_nan(plan: Plan, operands: Operands) -> Array:
    """NaN for queries that see a nonfinite row under a mask of intervals, else 0; (..., L, 1).

    The intervals are the same for all batch elements, as those of `causal` and `packed` are.
    """
    assert operands.nonfinite is not None
    query_nan, key_nan = operands.nonfinite
    if plan.is_plain_causal:
        # Not `cumulative_sum` of array_api_compat, for which torch.compile warns.
        return query_nan + plan.xp.cumsum(key_nan[..., 0, :], -1)[..., None]
    assert operands.mask is not None
    xp = plan.xp
    first, end = operands.mask.interval(plan.frame, (0, plan.n_queries))  # type: ignore[misc]
    counts = xp.cumsum(xp.astype(xp.isnan(key_nan[..., 0, :]), plan.frame.index_dtype), -1)
    counts = xp.concat((xp.zeros_like(counts[..., :1]), counts), axis=-1)
    is_hit = xp.take(counts, end, axis=-1) > xp.take(counts, first, axis=-1)
    query_nan = xp.where((end > first)[..., None], query_nan, xp.zeros_like(query_nan))
    return xp.where(is_hit[..., None], math.nan, query_nan)


def with_batch_axes(xp: ModuleType, x: Any, shape: tuple[int, ...]) -> Any:
    """`x` broadcast to the batch axes of all arguments, or `x` itself, as views are read-only."""
    if x.shape[:-1] == shape:
        return x
    return xp.broadcast_to(x, (*shape, x.shape[-1]))
