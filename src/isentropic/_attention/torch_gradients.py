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
without values (Dao et al. 2022, arXiv 2205.14135).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

from isentropic._attention import numpy
from isentropic._attention.generic import AttentionState, Tiles, add_bias, reach, tile_shape
from isentropic._attention.plan import Plan
from isentropic._entropy import slope_of_moment, terms_of_moment
from isentropic._loops import Block, blocks, is_known_true, keep_freed_memory, take
from isentropic._namespace import Array
from isentropic._numerics import lift, replace_infinite_minimum

_LOG2_E = 1 / math.log(2)
# Products of a weight of 10^−37 with a key and a value below this make no difference to a gradient.
_ORDINARY = 1e10
# The arrays with a gradient.
INPUTS = ("query", "key", "value", "bias")


def _without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function of tiles, whose products have the dtype of the computation."""

    @functools.wraps(function)
    def wrapped(tiles: Tiles, *args: Any) -> Any:
        import torch

        kind = tiles.plan.device.type
        if not torch.amp.is_autocast_available(kind):
            return function(tiles, *args)
        with torch.autocast(kind, enabled=False):
            return function(tiles, *args)

    return wrapped


@_without_autocast
def forward(tiles: Tiles, order: float | None) -> AttentionState:
    """The state in columns, relative to the maximum."""
    keep_freed_memory()
    if numpy.takes_tiles(tiles.plan):
        operands = tiles.operands._replace(query=tiles.query, multiplier=1.0)
        state = numpy.state_for_gradient(tiles.plan, operands, 1.0 if order is None else order)
        return state._replace(weighted_score=None) if order is None else state
    return _TilesInPlace(tiles.plan, tiles.operands, tiles.query).state(order)


@_without_autocast
def backward(
    tiles: Tiles,
    order: float | None,
    state: AttentionState,
    upstream: AttentionState,
    wanted: Collection[str],
) -> dict[str, Any]:
    """The gradients of the wanted inputs: query, key, value, bias.

    `upstream` holds those of the fields of the state, or None.
    """
    keep_freed_memory()
    plan = tiles.plan
    if 0 in (*plan.batch, plan.n_queries):
        return {name: plan.xp.zeros_like(_input(tiles, name)) for name in wanted}
    work = _Backward.of(tiles, order, wanted)
    columns = (
        work.tiles.query,
        replace_infinite_minimum(plan.xp, state.maximum),
        _or_zero(upstream.normalizer, state.normalizer),
        upstream.weighted_value,
        upstream.weighted_score,
        _excess_at_maximum(plan, state, upstream, order),
    )
    row_size, _ = tile_shape(plan)
    for rows in blocks(0, plan.n_queries, row_size):
        parts = (None if x is None else work.grouped(_rows_of(x, rows)) for x in columns)
        work.add_rows(rows, _Rows(*parts))
    return {name: work.gradient(name, tiles) for name in wanted}


def state_of_fields(fields: Any, has_value: bool, order: float | None) -> AttentionState:
    """The state of the fields that there are: maximum, normalizer, values and moment."""
    rest = iter(fields)
    maximum, normalizer = next(rest), next(rest)
    value = next(rest) if has_value else None
    return AttentionState(maximum, normalizer, value, None if order is None else next(rest))


class _TilesInPlace(Tiles):
    """The generic pass with operations in place, which PyTorch must not record for a gradient."""

    def logits(self, rows: Block, columns: Block) -> Array:
        return self.cap_and_hide(self.products(rows, columns), rows, columns)[0]

    def cap_and_hide(self, s: Any, rows: Block, columns: Block) -> tuple[Any, Any]:
        """The logits for the products of a tile, and their derivative; None if it is 1."""
        softcap, slope = self.plan.softcap, None
        if softcap is not None:
            s.div_(softcap).tanh_()
            slope = 1 - s.square()
            s.mul_(softcap)
        return self._hide(add_bias(self.plan, self.operands, s, rows, columns), rows, columns), slope

    def all_visible(self, rows: Block, columns: Block) -> bool:
        """Whether the mask hides no key of a tile."""
        mask = self.operands.mask
        if mask is None:
            return True
        first, end = mask.fully_visible(self.plan.frame, rows)
        return bool(first <= columns[0] and sum(columns) <= end)

    def _hide(self, s: Any, rows: Block, columns: Block) -> Any:
        """The logits with −∞ for hidden keys."""
        import torch

        plan, mask = self.plan, self.operands.mask
        if mask is None or self.all_visible(rows, columns):
            return s
        visible: Any = lift(mask.block(plan.frame, rows, columns), plan.ndim)
        shape = torch.broadcast_shapes(s.shape, visible.shape)
        return _fill_hidden(s.expand(shape).contiguous(), visible)

    def tile_state(self, logits: Any, columns: Block, order: float | None) -> AttentionState:
        """The state of the keys of a tile. The logits are overwritten."""
        xp = self.plan.xp
        maximum = logits.amax(-1, keepdim=True)
        x = logits.sub_(replace_infinite_minimum(xp, maximum))
        p, moment = _exp(x), None
        if order == 1:
            moment = x.clamp_(min=_lowest(x, order)).mul_(p).sum(-1, keepdim=True)
        elif order is not None:
            terms = terms_of_moment(xp, x, p, order)
            moment = xp.where(x == -math.inf, 0.0, terms).sum(-1, keepdim=True)
        value = None if self.operands.value is None else self.weighted_value(p, columns)
        return AttentionState(maximum, p.sum(-1, keepdim=True), value, moment)


def _fill_hidden(s: Any, visible: Any) -> Any:
    """Set contiguous logits to −∞ in place where a key is not visible.

    PyTorch vectorizes operations on bits, but not `masked_fill_`, which takes up to 20 times as long.
    """
    import torch

    if s.dtype == torch.float64:
        integers, minus_infinity = torch.int64, -(2**52)
    else:
        integers, minus_infinity = torch.int32, -(2**23)
    hidden = (~visible).to(integers)
    s.view(integers).bitwise_and_(hidden - 1).bitwise_or_(hidden * minus_infinity)
    return s


def _exp(x: Any) -> Any:
    """``eˣ``. Where it underflows, PyTorch's `exp` takes up to 70 times as long, and `exp2` up to 8."""
    return (x * _LOG2_E).exp2_()


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


def _or_zero(gradient: Any, like: Any) -> Any:
    return like.new_zeros(1).expand(like.shape) if gradient is None else gradient


def _excess_at_maximum(
    plan: Plan, state: AttentionState, upstream: AttentionState, order: float | None
) -> Any:
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
    """Arrays (groups, heads of a group · rows, width) for a block of queries."""

    query: Any
    reference: Any
    normalizer_grad: Any
    value_grad: Any
    moment_grad: Any
    excess: Any


@dataclass(frozen=True)
class _Backward:
    """The arrays of a backward pass. Query heads with the same keys and values are a group."""

    tiles: _TilesInPlace  # with a query for each batch element
    order: float | None
    key: Any  # (groups, S, E)
    value: Any  # (groups, S, Ev), or None
    are_ordinary: bool  # whether all keys and values are known to be below `_ORDINARY`
    totals: dict[str, Any]  # the sums of the wanted gradients

    @classmethod
    def of(cls, tiles: Tiles, order: float | None, wanted: Collection[str]) -> _Backward:
        plan, operands = tiles.plan, tiles.operands
        query: Any = tiles.query
        query = query.expand(*plan.batch, *query.shape[-2:])
        key, value = (
            None if x is None else x.to(plan.compute).reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
            for x in _with_groups(plan, operands.key, operands.value)
        )
        are_ordinary = all(
            x is None or is_known_true(plan.xp, (abs(x) < _ORDINARY).all()) for x in (key, value)
        )
        arrays = {"query": query, "key": key, "value": value, "bias": operands.bias}
        totals = {name: plan.xp.zeros_like(arrays[name], dtype=plan.compute) for name in wanted}
        tiles_in_place = _TilesInPlace(plan, operands, query)
        return cls(tiles_in_place, order, key, value, are_ordinary, totals)

    def grouped(self, x: Any) -> Any:
        """`x` (..., rows, width) as (groups, heads of a group · rows, width)."""
        groups = self.key.shape[0]
        heads = math.prod(self.tiles.plan.batch) // groups
        return x.reshape(groups, heads * x.shape[-2], x.shape[-1])

    def add_rows(self, rows: Block, row: _Rows) -> None:
        """Add the gradients of a block of queries to the totals."""
        import torch

        plan = self.tiles.plan
        first, size = reach(plan, self.tiles.operands.mask, rows)
        spans = blocks(first, first + size, tile_shape(plan)[1])
        largest = None if row.excess is None else self.index_of_maximum(rows, row, spans)
        query_grad = torch.zeros_like(row.query)
        for columns in spans:
            gradient = self.tile_gradient(rows, columns, row, largest)
            query_grad.baddbmm_(gradient, _rows_of(self.key, columns))
            if "key" in self.totals:
                _rows_of(self.totals["key"], columns).baddbmm_(gradient.mT, row.query)
        if "query" in self.totals:
            part = _rows_of(self.totals["query"], rows)
            part.copy_(query_grad.view(part.shape))

    def index_of_maximum(self, rows: Block, row: _Rows, spans: list[Block]) -> Any:
        """The key of the largest logit of each query."""
        best, index = row.reference - math.inf, 0
        for columns in spans:
            logits, _ = self.logits_and_slope(rows, columns, row)
            top, position = self.grouped(logits).max(-1, keepdim=True)
            index = self.tiles.plan.xp.where(top > best, position + columns[0], index)
            best = best.maximum(top)
        return index

    def logits_and_slope(self, rows: Block, columns: Block, row: _Rows) -> tuple[Any, Any]:
        products = row.query @ _rows_of(self.key, columns).mT
        products = products.view(*self.tiles.plan.batch, rows[1], columns[1])
        return self.tiles.cap_and_hide(products, rows, columns)

    def tile_gradient(self, rows: Block, columns: Block, row: _Rows, largest: Any) -> Any:
        """The gradient of the products of a tile. Those of its values and bias join the totals."""
        logits, slope = self.logits_and_slope(rows, columns, row)
        x = self.grouped(logits).sub_(row.reference)
        p = self.weights(x, rows, columns, has_moment=row.moment_grad is not None)
        if row.value_grad is not None and "value" in self.totals:
            _rows_of(self.totals["value"], columns).baddbmm_(p.mT, row.value_grad)
        gradient = self.logit_gradient(x, p, columns, row)
        if largest is not None:
            _add_at(largest - columns[0], row.excess, gradient)
        if "bias" in self.totals:
            part: Any = take(_rows_of(self.totals["bias"], rows), columns, -1)
            part.add_(gradient.view(logits.shape).sum_to_size(part.shape))
        return gradient if slope is None else gradient.mul_(self.grouped(slope))

    def weights(self, x: Any, rows: Block, columns: Block, *, has_moment: bool) -> Any:
        """``eˣ``. Exponents so low that they make no difference are raised in place."""
        tiles = self.tiles
        # Raised exponents would change the weight of hidden keys, which is 0. They would also change
        # moments of orders below 1, which contain small powers of the weights.
        may_be_hidden = tiles.operands.bias is not None or not tiles.all_visible(rows, columns)
        if may_be_hidden or not self.are_ordinary or (self.order is not None and self.order < 1):
            return _exp(x.clamp_(min=_lowest(x, self.order)) if has_moment else x)
        return x.clamp_(min=_lowest_normal(x)).exp()  # faster, as it never underflows

    def logit_gradient(self, x: Any, p: Any, columns: Block, row: _Rows) -> Any:
        """The gradient of the logits of a tile except for the excess at the maximum."""
        gradient, moment_grad = row.normalizer_grad, row.moment_grad
        if self.order == 1 and moment_grad is not None:  # f′(x) = p (1 + x)
            gradient = (gradient + moment_grad).addcmul(moment_grad, x)
        else:
            # A copy, also for a tile of one key: what follows is in place.
            gradient = x.new_empty(x.shape).copy_(gradient)
        if row.value_grad is not None:
            gradient.baddbmm_(row.value_grad, _rows_of(self.value, columns).mT)
        gradient.mul_(p)
        if moment_grad is None or self.order in (None, 1):
            return gradient
        terms = terms_of_moment(self.tiles.plan.xp, x, p, self.order)
        return gradient.addcmul_(moment_grad, slope_of_moment(p, terms, self.order))

    def gradient(self, name: str, tiles: Tiles) -> Any:
        """The total in the shape and dtype of the input."""
        total, plan = self.totals[name], self.tiles.plan
        x = _input(tiles, name)
        if name in ("key", "value") and plan.batch:
            heads = total.shape[0] // math.prod(plan.batch[:-1])
            total = total.view(*plan.batch[:-1], heads, *x.shape[-2:])
        return total.view(total.shape[-plan.ndim :]).sum_to_size(x.shape).to(x.dtype)


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


def _add_at(index: Any, x: Any, total: Any) -> None:
    """Add `x` (..., rows, 1) to entries of `total` (..., rows, columns), if their index exists."""
    size = total.shape[-1]
    x = x.where((index >= 0) & (index < size), 0.0)
    total.scatter_add_(-1, index.clamp(0, size - 1), x)
