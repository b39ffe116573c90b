"""The pass over tiles with PyTorch, and its gradients, on any device.

The formulas are those of `isentropic._attention.tile`, computed in place. Given the gradients dS of the
logits and the gradients g_W of the sums of values, the other gradients are

    dV = Pᵀ g_W,    dQ = dS K,    dK = dSᵀ Q.

The largest logit gets g_m − Σ dS in addition. The backward pass computes the logits of each tile again.
It takes five products for a tile, or three without values (Dao et al. 2022, arXiv 2205.14135). Both
passes have the same tiles, and compute the logits and the weights of a tile in the same way. So the
weights of the backward pass are those of which the forward pass took the sums, also where the rounding
errors of large logits change them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

from isentropic._attention import tile
from isentropic._attention.generic import Tiles, added_logits, tile_shape
from isentropic._attention.plan import Plan
from isentropic._attention.schedule import reach, visible_keys
from isentropic._attention.tile import Sums
from isentropic._attention.torch_ops import TorchOps
from isentropic._entropy import slope_of_moment
from isentropic._loops import (
    BLOCKS,
    Block,
    blocks,
    is_known_true,
    keep_freed_memory,
    take,
    without_autocast,
)
from isentropic._namespace import present

# Products of a weight of 10^−37 with a key and a value of at most this size make no difference to a
# gradient. A bias of at most this size hides no key.
_ORDINARY = 1e10
# The arrays with a gradient.
INPUTS = ("query", "key", "value", "bias")


@without_autocast
def forward(tiles: Tiles, order: float | None) -> Sums:
    """The state in columns, relative to the maximum."""
    keep_freed_memory()
    plan = tiles.plan
    if 0 in (*plan.batch, plan.n_queries, plan.n_keys):
        return tiles.empty(plan.n_values, order)
    work = _Forward.of(tiles, order)
    for rows in blocks(0, plan.n_queries, _tile_shape(plan)[0]):
        work.add_rows(rows)
    return work.state


@without_autocast
def backward(
    tiles: Tiles,
    order: float | None,
    state: Sums,
    upstream: Sums,
    wanted: Collection[str],
) -> dict[str, Any]:
    """The gradients of the wanted inputs: query, key, value, bias.

    `upstream` holds those of the fields of the state, or None.
    """
    keep_freed_memory()
    plan = tiles.plan
    if 0 in (*plan.batch, plan.n_queries, plan.n_keys):
        return {name: plan.xp.zeros_like(_input(tiles, name)) for name in wanted}
    work = _Backward.of(tiles, order, wanted)
    for rows in blocks(0, plan.n_queries, _tile_shape(plan)[0]):
        part = partial(_rows_of, block=rows)
        work.add_rows(rows, state.map(part), upstream.map(part))
    return {name: work.gradient(name, tiles) for name in wanted}


def _or_zero(gradient: Any, like: Any) -> Any:
    return like.new_zeros(1).expand(like.shape) if gradient is None else gradient


def _excess_at_maximum(plan: Plan, state: Sums, upstream: Sums, order: float | None) -> Any:
    """g_m − Σ ds, which the largest logit gets besides its ds; None if it is known to be 0.

    It is 0 if the loss does not depend on the number that the fields are relative to. Outputs,
    entropies and log-normalizers do not depend on it.
    """
    xp, (maximum, z, weighted_value, moment, *_) = plan.xp, state
    # The derivatives of the sums with respect to a number that is added to all logits.
    slope = None if order is None else slope_of_moment(z, moment, order)
    excess = _or_zero(upstream.maximum, maximum)
    magnitude = xp.abs(excess)
    for derivative, grad in zip((z, weighted_value, slope), upstream[1:4], strict=True):
        if derivative is not None and grad is not None:
            product = derivative * grad
            excess = excess - product.sum(-1, keepdim=True)
            magnitude = magnitude + product.abs().sum(-1, keepdim=True)
    # Up to rounding errors.
    rounding = ((plan.n_values or 0) + 16) * xp.finfo(z.dtype).eps
    if is_known_true(xp, (xp.abs(excess) <= rounding * magnitude).all()):
        return None
    return xp.where(maximum == -math.inf, 0.0, excess)


class _Rows(NamedTuple):
    """The arrays of a block of queries, contiguous, so that those of a group of heads are views.

    A NaN in a row makes all its products NaN, also those with keys that it does not see. So if there
    may be one, the products are set to 0 for hidden keys, and `query` and the gradient of the values to
    0 in its row.
    """

    may_be_nan: bool
    query: Any
    raw_query: Any  # with its NaN
    maximum: Any
    upstream: Sums
    excess: Any


class _Columns(NamedTuple):
    """Arrays (groups, keys, width) for a block of keys."""

    block: Block
    arrays: dict[str, Any]  # the keys, and the values if there are any
    # The sums of the wanted gradients of keys and values. They are contiguous: PyTorch adds products to
    # contiguous arrays in one call of the BLAS, and to slices in one for each batch element.
    totals: dict[str, Any]

    @classmethod
    def of(cls, block: Block, arrays: dict[str, Any], wanted: Collection[str]) -> _Columns:
        parts = {name: _rows_of(x, block) for name, x in arrays.items()}
        totals = {name: x.new_zeros(x.shape) for name, x in parts.items() if name in wanted}
        return cls(block, parts, totals)

    def within(self, first: int, end: int) -> _Columns:
        """The part of the block in a range of keys, as views."""
        start, size = self.block
        first, end = max(first, start), min(end, start + size)
        part = (first - start, max(end - first, 0))
        arrays, totals = ({name: _rows_of(x, part) for name, x in group.items()} for group in self[1:])
        return _Columns((first, part[1]), arrays, totals)


@dataclass(frozen=True)
class _Pass:
    """The arrays of a pass over the tiles. Query heads with the same keys and values are a group."""

    tiles: Tiles  # with a query for each batch element
    order: float | None
    wanted: Collection[str]  # the inputs whose gradients are wanted
    columns: list[_Columns]
    ops: TorchOps

    @classmethod
    def of(cls, tiles: Tiles, order: float | None, wanted: Collection[str] = ()) -> Self:
        plan, operands = tiles.plan, tiles.operands
        query: Any = tiles.query
        query = query.expand(*plan.batch, *query.shape[-2:])
        arrays = {
            name: x.to(plan.compute).reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
            for name, x in _with_groups(plan, present(key=operands.key, value=operands.value)).items()
        }
        every: Any = (*arrays.values(), *present(bias=operands.bias).values())
        are_ordinary = all(_is_ordinary(plan, x) for x in every)
        row_size, column_size = _tile_shape(plan)
        columns = [_Columns.of(x, arrays, wanted) for x in blocks(0, plan.n_keys, column_size)]
        size = math.prod(plan.batch) * min(row_size, plan.n_queries) * min(column_size, plan.n_keys)
        ops = TorchOps(plan.xp, size, are_ordinary=are_ordinary)
        return cls(tiles.replaced(query=query), order, wanted, columns, ops)

    def columns_of(self, rows: Block) -> list[_Columns]:
        """The blocks of keys that a block of queries may see."""
        first, size = reach(self.tiles.plan.frame, self.tiles.operands.mask, rows)
        parts = [x.within(first, first + size) for x in self.columns]
        return [x for x in parts if x.block[1]]

    def logits_and_tanh(self, rows: Block, columns: _Columns, query: Any) -> tuple[Any, Any]:
        """The logits of a tile, and tanh(products / soft cap); None without a soft cap."""
        plan = self.tiles.plan
        added = added_logits(plan, self.tiles.operands, rows, columns.block)
        visible = self.visible(rows, columns.block)
        return tile.logits(self.ops, query, columns.arrays["key"], plan.softcap, added, visible)

    def visible(self, rows: Block, columns: Block) -> Any:
        """The keys of a tile that each query sees; None if the mask hides none."""
        plan = self.tiles.plan
        return visible_keys(plan.frame, self.tiles.operands.mask, rows, columns, plan.ndim)


@dataclass(frozen=True)
class _Forward(_Pass):
    @functools.cached_property
    def state(self) -> Sums:
        """The state of all queries, which `add_rows` fills."""
        return self.tiles.empty(self.tiles.plan.n_values, self.order)

    def add_rows(self, rows: Block) -> None:
        """Compute the state of a block of queries."""
        query, state = _rows_of(self.tiles.query, rows).contiguous(), None
        for columns in self.columns_of(rows):
            s, _ = self.logits_and_tanh(rows, columns, query)
            state = tile.absorb(self.ops, state, s, columns.arrays.get("value"), self.order)
        assert state is not None
        # The weights of keys whose logits are all −∞ may be the lowest ones in place of 0.
        is_empty = state.maximum == -math.inf
        for x in state[1:]:
            if x is not None:
                x.masked_fill_(is_empty, 0.0)
        for total, part in zip(self.state, state, strict=True):
            if total is not None:
                _rows_of(total, rows).copy_(part)


@dataclass(frozen=True)
class _Backward(_Pass):
    @functools.cached_property
    def totals(self) -> dict[str, Any]:
        """The sums of the wanted gradients of queries and biases."""
        inputs = {"query": self.tiles.query, "bias": self.tiles.operands.bias}
        return {
            name: self.tiles.plan.xp.zeros_like(x, dtype=self.tiles.plan.compute)
            for name, x in inputs.items()
            if name in self.wanted
        }

    def rows_of(self, rows: Block, state: Sums, upstream: Sums) -> _Rows:
        """The arrays of a block of queries, for a state and its gradient of these queries."""
        plan = self.tiles.plan
        # A query that sees a NaN has it as its maximum.
        is_number = state.maximum == state.maximum
        may_be_nan = not is_known_true(plan.xp, is_number.all())

        def cleaned(x: Any) -> Any:
            return x.where(is_number, 0.0) if may_be_nan else x

        query, value_grad = _rows_of(self.tiles.query, rows).contiguous(), upstream.weighted_value
        excess = _excess_at_maximum(plan, state, upstream, self.order)
        upstream = upstream._replace(
            normalizer=_or_zero(upstream.normalizer, state.normalizer),
            weighted_value=None if value_grad is None else cleaned(value_grad).contiguous(),
        )
        return _Rows(may_be_nan, cleaned(query), query, state.maximum, upstream, excess)

    def add_rows(self, rows: Block, state: Sums, upstream: Sums) -> None:
        """Add the gradients of a block of queries to the totals."""
        import torch

        row = self.rows_of(rows, state, upstream)
        parts = self.columns_of(rows)
        largest = None if row.excess is None else self.index_of_maximum(rows, row, parts)
        # With rows as the outer loop, the gradient of their queries is complete after the loop over the
        # keys, and those of keys and values grow in place.
        query_grad = torch.zeros_like(row.query)
        for columns in parts:
            ds = self.gradient_of_tile(rows, columns, row, largest)
            query_grad = self.ops.add_weighted(query_grad, ds, columns.arrays["key"])
            if "key" in columns.totals:
                self.ops.add_weighted_rows(columns.totals["key"], ds, row.query)
        if "query" in self.totals:
            _rows_of(self.totals["query"], rows).copy_(query_grad)

    def index_of_maximum(self, rows: Block, row: _Rows, parts: list[_Columns]) -> Any:
        """The key of the largest logit of each query."""
        # By the logits themselves, not by equality with the maximum: another pass may have rounded it.
        best, index = row.maximum - math.inf, 0
        for columns in parts:
            s, _ = self.logits_and_tanh(rows, columns, row.raw_query)
            top, position = s.max(-1, keepdim=True)
            index = self.tiles.plan.xp.where(top > best, position + columns.block[0], index)
            best = best.maximum(top)
        return index

    def gradient_of_tile(self, rows: Block, columns: _Columns, row: _Rows, largest: Any) -> Any:
        """The gradient of the products of a tile. Those of its values and bias join the totals."""
        plan, ops = self.tiles.plan, self.ops
        s, tanh = self.logits_and_tanh(rows, columns, row.raw_query)
        value = columns.arrays.get("value")
        ds, p = tile.gradient(ops, s, row.maximum, value, self.order, row.upstream)
        visible = self.visible(rows, columns.block) if row.may_be_nan else None
        if visible is not None:
            ops.zero_hidden(p, visible)
            ops.zero_hidden(ds, visible)
        if row.upstream.weighted_value is not None and "value" in columns.totals:
            ops.add_weighted_rows(columns.totals["value"], p, row.upstream.weighted_value)
        if largest is not None:
            _add_at(largest - columns.block[0], row.excess, ds)
        if "bias" in self.totals:
            part = take(_rows_of(self.totals["bias"], rows), columns.block, -1)
            part.add_(ds.sum_to_size(part.shape))
        return tile.gradient_of_products(ops, ds, tanh, plan.softcap)

    def gradient(self, name: str, tiles: Tiles) -> Any:
        """The total in the shape and dtype of the input."""
        import torch

        plan, x = self.tiles.plan, _input(tiles, name)
        if name in self.totals:
            total = self.totals[name]
        else:
            total = torch.cat([columns.totals[name] for columns in self.columns], dim=-2)
        # Keys and values were taken by groups, and their heads may broadcast.
        if name in ("key", "value") and plan.batch:
            heads = total.shape[0] // math.prod(plan.batch[:-1])
            total = total.view(*plan.batch[:-1], heads, *x.shape[-2:])
        return total.view(total.shape[-plan.ndim :]).sum_to_size(x.shape).to(x.dtype)


def _tile_shape(plan: Plan) -> tuple[int, int]:
    """The numbers of queries and of keys of a tile: more than elsewhere, as it has fewer arrays."""
    rows, columns = tile_shape(plan)
    if plan.has_mask and plan.device.type == "cpu":
        # The fewer queries a block has, the more keys are hidden from all of them.
        return min(2 * rows, BLOCKS.torch_masked_rows), 2 * columns
    return 2 * rows, columns


def _is_ordinary(plan: Plan, x: Any) -> bool:
    """Whether all numbers are known to be at most `_ORDINARY` in size."""
    if not x.numel():
        return True
    least, greatest = x.aminmax()
    return is_known_true(plan.xp, (least > -_ORDINARY) & (greatest < _ORDINARY))


def _input(tiles: Tiles, name: str) -> Any:
    return tiles.query if name == "query" else getattr(tiles.operands, name)


def _with_groups(plan: Plan, arrays: dict[str, Any]) -> dict[str, Any]:
    """Keys and values with all batch axes, where several heads may still share the same ones."""
    if not plan.batch:
        return arrays
    batch = (*plan.batch[:-1], max(x.shape[-3] for x in arrays.values()))
    return {name: x.expand(*batch, *x.shape[-2:]) for name, x in arrays.items()}


def _rows_of(x: Any, block: Block) -> Any:
    return take(x, block, -2)


def _add_at(index: Any, x: Any, total: Any) -> None:
    """Add `x` (..., rows, 1) to entries of `total` (..., rows, columns), if their index exists."""
    size = total.shape[-1]
    # `scatter_add_` takes an index for each row, so rows with the key in another tile add 0.
    x = x.where((index >= 0) & (index < size), 0.0)
    total.scatter_add_(-1, index.clamp(0, size - 1), x)
