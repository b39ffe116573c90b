"""The pass over tiles with PyTorch, and its gradients, on any device.

The fields of a state are sums over keys j of functions of x_j = s_j − m, with the logits s and their
maximum m:

    z = Σ p_j,    W = Σ p_j v_j,    w = Σ f(x_j),    p_j = e^{x_j},

with the terms f of the moment (see `isentropic._entropy`). Given the gradients g_z, g_W and g_w of a
loss with respect to the sums, the gradient with respect to the logits is

    ds_j = p_j (g_z + g_W · v_j) + g_w f′(x_j).

The largest logit gets g_m − Σ ds_j in addition. The other gradients are

    dV = Pᵀ g_W,    dQ = dS K,    dK = dSᵀ Q.

The backward pass computes the logits of each tile again. It takes five products for a tile, or three
without values (Dao et al. 2022, arXiv 2205.14135). Both passes have the same tiles, and compute the
logits of a tile in the same way. So the weights of the backward pass are those of which the forward
pass took the sums, also where the rounding errors of large logits change them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, cast

from isentropic._attention.generic import Tiles, added_logits, tile_shape
from isentropic._attention.plan import Plan
from isentropic._attention.schedule import reach
from isentropic._attention.tile import Sums, empty_state
from isentropic._entropy import shift_moment, slope_of_moment, terms_of_moment
from isentropic._loops import (
    BLOCKS,
    Block,
    blocks,
    is_known_true,
    keep_freed_memory,
    take,
    without_autocast,
)
from isentropic._numerics import lift, replace_infinite_minimum

_LOG2_E = 1 / math.log(2)
# Products of a weight of 10^−37 with a key and a value of at most this size make no difference to a
# gradient. A bias of at most this size hides no key.
_ORDINARY = 1e10
# The arrays with a gradient.
INPUTS = ("query", "key", "value", "bias")


@without_autocast
def forward(tiles: Tiles, order: float | None) -> Sums:
    """The state in columns, relative to the maximum."""
    keep_freed_memory()
    plan, shape = tiles.plan, (*tiles.plan.batch, tiles.plan.n_queries)
    if 0 in (*shape, plan.n_keys):
        kind = {"dtype": plan.compute, "device": plan.device}
        return empty_state(plan.xp, shape, plan.n_values, order, **kind)
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
        work.add_rows(rows, _state_of_rows(state, rows), _state_of_rows(upstream, rows))
    return {name: work.gradient(name, tiles) for name in wanted}


def state_of_fields(fields: Any, has_value: bool, order: float | None) -> Sums:
    """The state of the fields that there are: maximum, normalizer, values and moment."""
    rest = iter(fields)
    maximum, normalizer = next(rest), next(rest)
    value = next(rest) if has_value else None
    return Sums(maximum, normalizer, value, None if order is None else next(rest))


def _state_of_rows(state: Sums, rows: Block) -> Sums:
    return Sums(*(None if x is None else _rows_of(x, rows) for x in state))


def _fill_hidden(s: Any, visible: Any) -> Any:
    """Set contiguous logits to −∞ in place where a key is not visible.

    PyTorch vectorizes operations on bits, but not `masked_fill_`, which takes up to 20 times as long.
    """
    bits, minus_infinity = _bits(s), -(2**52) if s.element_size() == 8 else -(2**23)
    hidden = (~visible).to(bits.dtype)
    bits.bitwise_and_(hidden - 1).bitwise_or_(hidden * minus_infinity)
    return s


def _zero_hidden(x: Any, visible: Any) -> None:
    """Set a contiguous array to 0 in place where a key is not visible, even where it is NaN."""
    bits = _bits(x)
    bits.bitwise_and_(-visible.to(bits.dtype))


def _bits(x: Any) -> Any:
    """Contiguous floats as integers with the same bits, in the same memory."""
    import torch

    return x.view(torch.int64 if x.dtype == torch.float64 else torch.int32)


def _exp(x: Any, out: Any = None) -> Any:
    """``eˣ``. Where it underflows, PyTorch's `exp` takes up to 70 times as long, and `exp2` up to 8."""
    import torch

    return torch.mul(x, _LOG2_E, out=out).exp2_()


def _view(memory: Any, shape: Any) -> Any:
    """An array of a shape at the start of the memory."""
    return memory[: math.prod(shape)].view(shape)


def _lowest_normal(x: Any) -> float:
    """A number from which on `exp` does not underflow, with a weight below 10^−37 in float32."""
    import torch

    return math.log(2 * torch.finfo(x.dtype).tiny)


def _lowest(x: Any, order: float | None) -> float:
    """An exponent so low that it adds nothing to the sums or to the moment.

    Products with exponents that are clipped there do not overflow.
    """
    import torch

    info = torch.finfo(x.dtype)
    return (math.log(info.tiny * info.eps) - 1) / min(max(order or 1.0, 1e-30), 1.0)


def _terms(xp: Any, x: Any, p: Any, order: float) -> Any:
    """The terms of the moment of a tile. The exponents x may be overwritten."""
    if order == 1:
        return x.mul_(p)
    if order == 2:
        return xp.mul(p, p, out=x)
    return xp.where(x == -math.inf, 0.0, terms_of_moment(xp, x, p, order))


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
    for derivative, gradient in zip((z, weighted_value, slope), upstream[1:4], strict=True):
        if derivative is not None and gradient is not None:
            product = derivative * gradient
            excess = excess - product.sum(-1, keepdim=True)
            magnitude = magnitude + product.abs().sum(-1, keepdim=True)
    # Up to rounding errors.
    rounding = ((plan.n_values or 0) + 16) * xp.finfo(z.dtype).eps
    if is_known_true(xp, (xp.abs(excess) <= rounding * magnitude).all()):
        return None
    return xp.where(maximum == -math.inf, 0.0, excess)


class _Rows(NamedTuple):
    """Arrays (groups, heads of a group · rows, width) for a block of queries.

    A NaN in a row makes all its products NaN, also those with keys that it does not see. So if there
    may be one, the products are set to 0 for hidden keys, and `query` and `value_grad` to 0 in its row.
    """

    may_be_nan: bool
    query: Any
    raw_query: Any  # with its NaN
    reference: Any
    normalizer_grad: Any
    value_grad: Any
    moment_grad: Any
    excess: Any


class _Columns(NamedTuple):
    """Arrays (groups, keys, width) for a block of keys."""

    block: Block
    key: Any
    value: Any
    # The sums of the wanted gradients of keys and values. They are contiguous: PyTorch adds products to
    # contiguous arrays in one call of the BLAS, and to slices in one for each batch element.
    totals: dict[str, Any]

    @classmethod
    def blocks_of(cls, key: Any, value: Any, size: int, wanted: Collection[str]) -> list[_Columns]:
        columns = []
        for block in blocks(0, key.shape[-2], size):
            parts = {"key": _rows_of(key, block)}
            if value is not None:
                parts["value"] = _rows_of(value, block)
            totals = {name: x.new_zeros(x.shape) for name, x in parts.items() if name in wanted}
            columns.append(cls(block, parts["key"], parts.get("value"), totals))
        return columns

    def within(self, first: int, end: int) -> _Columns:
        """The part of the block in a range of keys, as views."""
        start, size = self.block
        first, end = max(first, start), min(end, start + size)
        part = (first - start, max(end - first, 0))
        key, value, *totals = (
            None if x is None else _rows_of(x, part)
            for x in (self.key, self.value, *self.totals.values())
        )
        return _Columns((first, part[1]), key, value, dict(zip(self.totals, totals, strict=True)))


@dataclass(frozen=True)
class _Pass:
    """The arrays of a pass over the tiles. Query heads with the same keys and values are a group."""

    tiles: Tiles  # with a query for each batch element
    order: float | None
    wanted: Collection[str]  # the inputs whose gradients are wanted
    columns: list[_Columns]
    are_ordinary: bool  # whether keys, values and biases are known to be at most `_ORDINARY` in size
    # Memory for arrays of the size of a tile. The system clears the pages of new arrays, which is slow.
    memory: dict[str, Any]

    @classmethod
    def of(cls, tiles: Tiles, order: float | None, wanted: Collection[str] = ()) -> Self:
        plan, operands = tiles.plan, tiles.operands
        query: Any = tiles.query
        query = query.expand(*plan.batch, *query.shape[-2:])
        key, value = (
            None if x is None else x.to(plan.compute).reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
            for x in _with_groups(plan, operands.key, operands.value)
        )
        are_ordinary = all(x is None or _is_ordinary(plan, x) for x in (key, value, operands.bias))
        row_size, column_size = _tile_shape(plan)
        columns = _Columns.blocks_of(key, value, column_size, wanted)
        size = math.prod(plan.batch) * min(row_size, plan.n_queries) * min(column_size, plan.n_keys)
        names = ("logits", "weights", *(() if plan.softcap is None else ("tanh",)))
        memory = {name: query.new_empty(size) for name in names}
        return cls(tiles.replaced(query=query), order, wanted, columns, are_ordinary, memory)

    def grouped(self, x: Any) -> Any:
        """`x` (..., rows, width) as (groups, heads of a group · rows, width)."""
        groups = self.columns[0].key.shape[0]
        heads = math.prod(self.tiles.plan.batch) // groups
        return x.reshape(groups, heads * x.shape[-2], x.shape[-1])

    def columns_of(self, rows: Block) -> list[_Columns]:
        """The blocks of keys that a block of queries may see."""
        first, size = reach(self.tiles.plan.frame, self.tiles.operands.mask, rows)
        parts = [x.within(first, first + size) for x in self.columns]
        return [x for x in parts if x.block[1]]

    def logits_and_tanh(self, rows: Block, columns: _Columns, query: Any) -> tuple[Any, Any]:
        """The logits of a tile, and tanh(products / soft cap); None without a soft cap.

        Both results are in memory that the next tile overwrites.
        """
        import torch

        plan, tanh = self.tiles.plan, None
        shape = (*query.shape[:2], columns.block[1])
        s = torch.bmm(query, columns.key.mT, out=_view(self.memory["logits"], shape))
        if plan.softcap is not None:
            tanh = torch.tanh(s, out=_view(self.memory["tanh"], shape))
            torch.mul(tanh, plan.softcap, out=s)
        s = s.view(*plan.batch, rows[1], columns.block[1])
        return self.grouped(self.add_bias_and_hide(s, rows, columns.block)), tanh

    def add_bias_and_hide(self, s: Any, rows: Block, columns: Block) -> Any:
        """The logits of a tile for its products, after the soft cap, in place."""
        added = added_logits(self.tiles.plan, self.tiles.operands, rows, columns)
        if added is not None:
            s.add_(added)
        visible = self.visible(rows, columns)
        return s if visible is None else _fill_hidden(s, visible)

    def are_all_visible(self, rows: Block, columns: Block) -> bool:
        """Whether the mask hides no key of a tile."""
        mask = self.tiles.operands.mask
        if mask is None:
            return True
        first, end = mask.fully_visible(self.tiles.plan.frame, rows)
        return bool(first <= columns[0] and sum(columns) <= end)

    def visible(self, rows: Block, columns: Block) -> Any:
        """The keys of a tile that each query sees; None if the mask hides none."""
        mask = self.tiles.operands.mask
        if mask is None or self.are_all_visible(rows, columns):
            return None
        return lift(mask.block(self.tiles.plan.frame, rows, columns), self.tiles.plan.ndim)

    def weights(self, x: Any, rows: Block, columns: Block, *, has_moment: bool) -> Any:
        """``eˣ``. Exponents so low that they make no difference are raised in place.

        Exponents above 0 become 0. There are some if another pass has computed the maximum, with other
        rounding errors.
        """
        import torch

        memory = _view(self.memory["weights"], x.shape)
        # Raised exponents would change the weight of hidden keys, which is 0. They would also change
        # moments of orders below 1, which contain small powers of the weights.
        are_visible = self.are_all_visible(rows, columns)
        if not (are_visible and self.are_ordinary) or (self.order is not None and self.order < 1):
            p = _exp(x.clamp_(_lowest(x, self.order) if has_moment else None, 0.0), memory)
            # Some processors take 100 times as long for products with numbers that are not normal.
            info = torch.finfo(p.dtype)
            return torch.threshold_(p, info.tiny / info.eps, 0.0)
        return torch.exp(x.clamp_(_lowest_normal(x), 0.0), out=memory)  # faster, as it never underflows


@dataclass(frozen=True)
class _Forward(_Pass):
    @functools.cached_property
    def state(self) -> Sums:
        """The state of all queries, which `add_rows` fills."""
        plan, query = self.tiles.plan, cast(Any, self.tiles.query)
        widths = (1, 1, plan.n_values, None if self.order is None else 1)
        shape = query.shape[:-1]
        return Sums(*(None if n is None else query.new_empty((*shape, n)) for n in widths))

    def add_rows(self, rows: Block) -> None:
        """Compute the state of a block of queries."""
        query, state = self.grouped(_rows_of(self.tiles.query, rows)), self.state_of_nothing(rows)
        for columns in self.columns_of(rows):
            state = self.with_tile(state, rows, columns, query)
        # The weights of keys whose logits are all −∞ may be the lowest ones in place of 0.
        is_empty = state.maximum == -math.inf
        for x in state[1:]:
            if x is not None:
                x.masked_fill_(is_empty, 0.0)
        for total, part in zip(_state_of_rows(self.state, rows), state, strict=True):
            if total is not None:
                total.copy_(part.view(total.shape))

    def state_of_nothing(self, rows: Block) -> Sums:
        """The state without keys, of a block of queries."""
        parts = (None if x is None else self.grouped(x) for x in _state_of_rows(self.state, rows))
        state = Sums(*(None if x is None else x.new_zeros(x.shape) for x in parts))
        return state._replace(maximum=state.maximum - math.inf)

    def with_tile(self, state: Sums, rows: Block, columns: _Columns, query: Any) -> Sums:
        """The state with the keys of a tile. Its sums of values are changed in place."""
        xp, order = self.tiles.plan.xp, self.order
        logits, _ = self.logits_and_tanh(rows, columns, query)
        maximum = xp.maximum(state.maximum, logits.amax(-1, keepdim=True))
        reference = replace_infinite_minimum(xp, maximum)
        # A state of no keys needs no shift.
        shift = xp.where(state.maximum == -math.inf, 0.0, state.maximum - reference)
        x, factor, moment = logits.sub_(reference), shift.exp(), None
        p = self.weights(x, rows, columns.block, has_moment=order == 1)
        normalizer = p.sum(-1, keepdim=True).addcmul_(state.normalizer, factor)
        if state.weighted_value is not None:
            state.weighted_value.mul_(factor).baddbmm_(p, columns.value)
        if order is not None:
            moment = shift_moment(xp, state.weighted_score, state.normalizer, shift, order)
            moment = moment + _terms(xp, x, p, order).sum(-1, keepdim=True)
        return Sums(maximum, normalizer, state.weighted_value, moment)


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
        is_number = state.maximum == state.maximum
        may_be_nan = not is_known_true(plan.xp, is_number.all())

        def cleaned(x: Any) -> Any:
            return x.where(is_number, 0.0) if may_be_nan and x is not None else x

        arrays = (
            cleaned(_rows_of(self.tiles.query, rows)),
            _rows_of(self.tiles.query, rows),
            replace_infinite_minimum(plan.xp, state.maximum),
            _or_zero(upstream.normalizer, state.normalizer),
            cleaned(upstream.weighted_value),
            upstream.weighted_score,
            _excess_at_maximum(plan, state, upstream, self.order),
        )
        return _Rows(may_be_nan, *(None if x is None else self.grouped(x) for x in arrays))

    def add_rows(self, rows: Block, state: Sums, upstream: Sums) -> None:
        """Add the gradients of a block of queries to the totals."""
        import torch

        row = self.rows_of(rows, state, upstream)
        parts = self.columns_of(rows)
        largest = None if row.excess is None else self.index_of_maximum(rows, row, parts)
        query_grad = torch.zeros_like(row.query)
        for columns in parts:
            gradient = self.tile_gradient(rows, columns, row, largest)
            query_grad.baddbmm_(gradient, columns.key)
            if "key" in columns.totals:
                columns.totals["key"].baddbmm_(gradient.mT, row.query)
        if "query" in self.totals:
            part = _rows_of(self.totals["query"], rows)
            part.copy_(query_grad.view(part.shape))

    def index_of_maximum(self, rows: Block, row: _Rows, parts: list[_Columns]) -> Any:
        """The key of the largest logit of each query."""
        best, index = row.reference - math.inf, 0
        for columns in parts:
            logits, _ = self.logits_and_tanh(rows, columns, row.raw_query)
            top, position = logits.max(-1, keepdim=True)
            index = self.tiles.plan.xp.where(top > best, position + columns.block[0], index)
            best = best.maximum(top)
        return index

    def tile_gradient(self, rows: Block, columns: _Columns, row: _Rows, largest: Any) -> Any:
        """The gradient of the products of a tile. Those of its values and bias join the totals."""
        plan = self.tiles.plan
        logits, tanh = self.logits_and_tanh(rows, columns, row.raw_query)
        x = logits.sub_(row.reference)
        p = self.weights(x, rows, columns.block, has_moment=row.moment_grad is not None)
        visible = self.visible(rows, columns.block) if row.may_be_nan else None
        shape = (*plan.batch, rows[1], columns.block[1])
        if visible is not None:
            visible = self.grouped(visible.expand(shape))
            _zero_hidden(p, visible)
        if row.value_grad is not None and "value" in columns.totals:
            columns.totals["value"].baddbmm_(p.mT, row.value_grad)
        gradient = self.logit_gradient(x, p, columns, row)
        if visible is not None:
            _zero_hidden(gradient, visible)
        if largest is not None:
            _add_at(largest - columns.block[0], row.excess, gradient)
        if "bias" in self.totals:
            part: Any = take(_rows_of(self.totals["bias"], rows), columns.block, -1)
            part.add_(gradient.view(shape).sum_to_size(part.shape))
        if tanh is None:
            return gradient
        # That of the products of queries which are divided by the soft cap.
        return _times_slope_of_cap(gradient, tanh).mul_(plan.softcap)

    def logit_gradient(self, x: Any, p: Any, columns: _Columns, row: _Rows) -> Any:
        """The gradient of the logits of a tile except for the excess at the maximum.

        The exponents x may be overwritten.
        """
        gradient, moment_grad = row.normalizer_grad, row.moment_grad
        if self.order == 1 and moment_grad is not None:  # f′(x) = p (1 + x)
            # Half the time of `addcmul`, which PyTorch does not vectorize for arguments that broadcast.
            gradient = x.mul_(moment_grad).add_(gradient + moment_grad)
        elif moment_grad is None:
            gradient = x.copy_(gradient)
        else:
            gradient = gradient.expand(x.shape).clone()
        if row.value_grad is not None:
            gradient.baddbmm_(row.value_grad, columns.value.mT)
        gradient.mul_(p)
        if moment_grad is None or self.order in (None, 1):
            return gradient
        terms = _terms(self.tiles.plan.xp, x, p, self.order)
        return gradient.addcmul_(moment_grad, slope_of_moment(p, terms, self.order))

    def gradient(self, name: str, tiles: Tiles) -> Any:
        """The total in the shape and dtype of the input."""
        import torch

        plan, x = self.tiles.plan, _input(tiles, name)
        if name in self.totals:
            total = self.totals[name]
        else:
            total = torch.cat([columns.totals[name] for columns in self.columns], dim=-2)
        if name in ("key", "value") and plan.batch:
            heads = total.shape[0] // math.prod(plan.batch[:-1])
            total = total.view(*plan.batch[:-1], heads, *x.shape[-2:])
        return total.view(total.shape[-plan.ndim :]).sum_to_size(x.shape).to(x.dtype)


def _tile_shape(plan: Plan) -> tuple[int, int]:
    """The numbers of queries and of keys of a tile: more than elsewhere, as it has fewer arrays."""
    rows, columns = tile_shape(plan)
    if plan.has_mask and plan.device.type == "cpu":
        # The fewer queries a block has, the more keys are hidden from all of them.
        return min(2 * rows, BLOCKS.torch_masked_rows), columns if plan.block_size else 2 * columns
    return 2 * rows, columns


def _is_ordinary(plan: Plan, x: Any) -> bool:
    """Whether all numbers are known to be at most `_ORDINARY` in size."""
    if not x.numel():
        return True
    least, greatest = x.aminmax()
    return is_known_true(plan.xp, (least > -_ORDINARY) & (greatest < _ORDINARY))


def _input(tiles: Tiles, name: str) -> Any:
    return tiles.query if name == "query" else getattr(tiles.operands, name)


def _with_groups(plan: Plan, *arrays: Any) -> list[Any]:
    """Keys and values with all batch axes, where several heads may still share the same ones."""
    if not plan.batch:
        return list(arrays)
    heads = max(x.shape[-3] for x in arrays if x is not None)
    return [None if x is None else x.expand(*plan.batch[:-1], heads, *x.shape[-2:]) for x in arrays]


def _rows_of(x: Any, block: Block) -> Any:
    return take(x, block, -2)


def _times_slope_of_cap(x: Any, tanh: Any) -> Any:
    """`x` times 1 − tanh², in place; `x` without a soft cap."""
    import torch

    return x if tanh is None else torch.ops.aten.tanh_backward.grad_input(x, tanh, grad_input=x)


def _add_at(index: Any, x: Any, total: Any) -> None:
    """Add `x` (..., rows, 1) to entries of `total` (..., rows, columns), if their index exists."""
    size = total.shape[-1]
    x = x.where((index >= 0) & (index < size), 0.0)
    total.scatter_add_(-1, index.clamp(0, size - 1), x)
