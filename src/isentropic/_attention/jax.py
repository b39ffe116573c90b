"""The backends for JAX: its own kernel for outputs, and a pass over one head at a time for CPUs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from isentropic._attention.generic import Tiles, interval_nan
from isentropic._attention.plan import Operands, Plan, four_axes
from isentropic._attention.tile import Sums, absorb, empty_state, moved, output_of_columns
from isentropic._entropy import INFINITE_ORDER
from isentropic._loops import BLOCKS, Block, is_gpu, take
from isentropic._namespace import Array, is_symbolic
from isentropic._numerics import lift
from isentropic._ops import Ops
from isentropic._products import matmul_precision, row_products
from isentropic.masks import Mask


def unsupported_reason(plan: Plan, order: float | None, is_named: bool) -> str | None:
    """The reason why ``jax.nn.dot_product_attention`` does not compute a call, or None."""
    if plan.library != "jax":
        return "the arrays are not JAX's"
    if order is not None:
        return "it computes outputs only"
    if plan.softcap is not None or plan.has_bias:
        return "it has no soft cap, and would materialize the L×S bias"
    if plan.dtype == plan.xp.float64:
        return "it has no float64"
    if plan.has_mask and not plan.is_plain_causal:
        return "it has no masks but the causal one"
    width = plan.head_dim
    if width == 0 or plan.n_values != width:
        return "keys and values have different widths, or the width is 0"
    if is_named:
        return None
    import jax

    if jax.default_backend() != "gpu" or not _fits_cudnn(plan):
        return "it is faster only by cuDNN, which needs a GPU, half precision and heads of 8, 16, … 128"
    return None


def _fits_cudnn(plan: Plan) -> bool:
    is_half = plan.dtype in (plan.xp.float16, plan.xp.bfloat16)
    return is_half and plan.head_dim % 8 == 0 and plan.head_dim <= 128


def output(plan: Plan, operands: Operands) -> Array:
    """The attention output, (..., L, Ev)."""
    import jax

    xp, query, scale = plan.xp, operands.query, operands.multiplier
    if not isinstance(scale, float) or scale <= 0:  # which kernels may not expect
        query, scale = Tiles.of(plan, operands).query, 1.0
    arrays = [
        # JAX has the axis of the heads after that of the length.
        xp.swapaxes(four_axes(plan, xp.astype(x, plan.dtype), expand=True), 1, 2)
        for x in (query, operands.key, operands.values)
    ]
    kernel = "cudnn" if jax.default_backend() == "gpu" and _fits_cudnn(plan) else "xla"
    # A mask that comes here is the plain causal one, of as many queries as keys.
    with jax.default_matmul_precision(matmul_precision()):
        out = jax.nn.dot_product_attention(
            *arrays, scale=scale, is_causal=plan.has_mask, implementation=kernel
        )
    out = xp.swapaxes(out, 1, 2)
    out = xp.reshape(out, (*plan.batch, *out.shape[-2:]))
    return (
        out if operands.nonfinite is None else out + xp.astype(interval_nan(plan, operands), out.dtype)
    )


def heads_unsupported_reason(plan: Plan, order: float | None, is_named: bool) -> str | None:
    """The reason why the pass over one head at a time does not compute a call, or None."""
    if plan.library != "jax":
        return "the arrays are not JAX's"
    if plan.frame.is_compiling or any(map(is_symbolic, plan.batch)):
        return "some size is symbolic"
    if plan.n_queries == 0 or 0 in plan.batch:
        return "there are no queries"
    if is_named:
        return None
    if is_gpu(plan.xp, plan.device):
        return "one head at a time leaves a GPU idle"
    if min(plan.n_queries, plan.n_keys) < BLOCKS.jax_min_length:
        return "there are too few queries or keys for it to be faster"
    return None


def heads_output(plan: Plan, operands: Operands) -> Array:
    """The attention output (..., L, Ev), one head at a time."""
    return output_of_columns(plan.xp, _state(plan, operands, None, with_largest=False))


def heads_state(plan: Plan, operands: Operands, order: float, relative_to_maximum: bool) -> Sums:
    """The state in columns, one head at a time."""
    # The entropy of infinite order is relative to the maximum too.
    with_largest = relative_to_maximum or order >= INFINITE_ORDER
    return _state(plan, operands, order, with_largest=with_largest)


class _Ops(Ops):
    """The standard, without a derivative of the maximum: JAX does not differentiate the first pass."""

    def row_max(self, s: Any) -> Any:
        return self.xp.max(s, axis=-1, keepdims=True)


# Named arrays with the batch and head axes ``...``.
_Arrays = dict[str, Any]
# Those that have an axis of queries, −2. The others have one of keys, and the bias has both.
_OF_ROWS = ("query", "query_nan", "bias", "maximum")


def _state(plan: Plan, operands: Operands, order: float | None, *, with_largest: bool) -> Sums:
    """The state in columns. Its derivative takes a second pass over the tiles.

    The sums of the second pass are relative to the maximum that the first pass found. The second pass
    needs no other result of the first one, and is linear in the tangents. So JAX can transpose it,
    which gives the five products per tile of flash attention, and can differentiate it again.

    Outputs, and entropies of finite orders, do not depend on the number that the sums are relative to.
    For them the maximum counts as a constant. With `with_largest`, the first pass also finds the key of
    the largest logit of each query, and the maximum is differentiated as this logit.
    """
    import jax
    import numpy as np

    def heads(arrays: _Arrays, mask_arrays: tuple[Array, ...]) -> _Heads:
        mask = operands.mask
        return _Heads(
            plan, arrays, mask if mask is None else mask.with_arrays(iter(mask_arrays)), order
        )

    @jax.custom_jvp
    def state_and_keys(*call: Any) -> tuple[Sums, Any]:
        return heads(*call).state(with_largest)

    @state_and_keys.defjvp
    def derivative(call: Any, tangents: Any) -> Any:
        state, keys = state_and_keys(*call)
        maximum = {"maximum": state.maximum}
        _, tangent = jax.jvp(lambda a, m: heads(a | maximum, m).sums(), call, tangents)
        if not with_largest:
            return (state, None), (tangent, None)
        _, shift = jax.jvp(
            lambda a, m: heads(a | {"largest": keys}, m).logits_of_largest(), call, tangents
        )
        # Where a query sees no key, the index of the largest logit means nothing.
        shift = plan.xp.where(state.maximum == -math.inf, 0.0, shift)
        zero = plan.xp.zeros_like(shift)
        _, shift_tangent = jax.jvp(partial(_shifted, plan, state, order), (zero,), (shift,))
        tangent = jax.tree.map(lambda a, b: a + b, tangent, shift_tangent)
        # Tangents of integers have this dtype in JAX.
        return (state, keys), (tangent, np.zeros(keys.shape, jax.dtypes.float0))

    mask_arrays = () if operands.mask is None else operands.mask.arrays
    return state_and_keys(_arrays_of(plan, operands), mask_arrays)[0]


def _arrays_of(plan: Plan, operands: Operands) -> _Arrays:
    """The arrays of a call in the dtype of the computation."""
    xp = plan.xp
    query_nan, key_nan = (None, None) if operands.nonfinite is None else operands.nonfinite
    arrays = {
        "query": Tiles.of(plan, operands).query,
        "key": operands.key,
        "value": operands.value,
        "bias": operands.bias,
        "query_nan": query_nan,
        "key_nan": key_nan,
    }
    return {
        name: lift(xp.astype(x, plan.compute), plan.ndim) for name, x in arrays.items() if x is not None
    }


def _shifted(plan: Plan, state: Sums, order: float | None, shift: Array) -> Sums:
    """The same state relative to a maximum that is higher by `shift`."""
    return moved(_Ops(plan.xp), state, state.maximum + shift, order)


@dataclass(frozen=True, eq=False, repr=False)
class _Heads:
    """The passes over the tiles of all heads, or those over one head, whose arrays have two axes."""

    plan: Plan
    arrays: _Arrays
    mask: Mask | None
    order: float | None

    def state(self, with_largest: bool) -> tuple[Sums, Any]:
        """The state, and for each query the key of the largest logit."""
        xp, order, ops = self.plan.xp, self.order, _Ops(self.plan.xp)

        def with_tile(total: Any, tiles: Tiles, logits: Array, columns: Block, _: _Arrays) -> Any:
            state, keys = total
            new = absorb(ops, state, logits, tiles.values(columns), order)
            if not with_largest:
                return new, None
            here = xp.where(logits == new.maximum, xp.arange(columns[1]) + columns[0], 0)
            # Of equal logits in different tiles the first one stays.
            is_higher = new.maximum > state.maximum
            return new, xp.where(is_higher, xp.max(here, axis=-1, keepdims=True), keys)

        def empty(n_rows: int) -> Any:
            keys = xp.zeros((n_rows, 1), dtype=int) if with_largest else None
            return self._empty(n_rows), keys

        return self._over_heads(lambda head: head._over_tiles(with_tile, empty))

    def sums(self) -> Sums:
        """The state whose sums are relative to the given `maximum`."""
        ops = _Ops(self.plan.xp)

        def with_tile(sums: Sums, tiles: Tiles, logits: Array, columns: Block, arrays: _Arrays) -> Any:
            # The maximum does not change, so the loop does not carry it.
            state = sums._replace(maximum=arrays["maximum"])
            state = absorb(ops, state, logits, tiles.values(columns), self.order, "given")
            return state._replace(maximum=None)

        def empty(n_rows: int) -> Any:
            return self._empty(n_rows)._replace(maximum=None)

        sums = self._over_heads(lambda head: head._over_tiles(with_tile, empty))
        return sums._replace(maximum=self.arrays["maximum"])

    def logits_of_largest(self) -> Array:
        """The logit of the key that is `largest`, for each query."""
        xp, softcap = self.plan.xp, self.plan.softcap

        def logits_of_head(head: _Heads) -> Array:
            query, key, keys = (head.arrays[name] for name in ("query", "key", "largest"))
            s = row_products(xp, query, key[keys[:, 0]])[:, None]
            if softcap is not None:  # the queries are divided by it
                s = xp.tanh(s) * softcap
            if "bias" in head.arrays:
                shape = (self.plan.n_queries, self.plan.n_keys)
                bias = xp.broadcast_to(head.arrays["bias"], shape)
                s = s + xp.take_along_axis(bias, keys, axis=-1)
            return s

        return self._over_heads(logits_of_head)

    def _over_heads(self, function: Callable[[_Heads], Any]) -> Any:
        """``function(head)`` for each batch element and head, joined along their axes."""
        import jax

        xp, plan = self.plan.xp, self.plan
        # `_arrays_of` has already made the arrays those of the computation.
        plan_of_head = plan.replaced(batch=(), dtype=plan.compute)
        shape, arrays = _with_groups(xp, plan.batch, self.arrays)

        def apply_to_head(index: tuple[Any, ...], arrays: _Arrays) -> Any:
            mask = self.mask
            if mask is not None and plan.batch:
                if len(shape) > len(plan.batch):
                    # A mask has one axis for all heads.
                    index = (*index[:-2], index[-2] * shape[-1] + index[-1])
                mask = mask.element(plan.batch, index)
            return function(_Heads(plan_of_head, arrays, mask, self.order))

        result = _over_axes(xp, apply_to_head, shape, arrays)
        return jax.tree.map(lambda x: xp.reshape(x, (*plan.batch, *x.shape[len(shape) :])), result)

    def _over_tiles(
        self,
        with_tile: Callable[[Any, Tiles, Array, Block, _Arrays], Any],
        empty: Callable[[int], Any],
    ) -> Any:
        """The last ``total = with_tile(total, tiles, logits, columns, arrays)`` over the tiles."""
        plan, mask = self.plan, self.mask

        def apply_to_rows(rows: Block, arrays: _Arrays) -> Any:
            def step(total: Any, columns: Block, of_columns: _Arrays) -> Any:
                of_tile = arrays | of_columns
                tiles = _tiles(plan, of_tile, mask)
                return with_tile(total, tiles, tiles.logits(rows, columns), columns, of_tile)

            reach = None if mask is None else mask.reach(plan.frame, rows)
            bias = {name: x for name, x in arrays.items() if name == "bias"}
            blocks = shared.joined(_Blocks.of(plan.xp, bias, -1, plan.n_keys, column_size))
            return _fold(plan.xp, step, empty(rows[1]), blocks, reach)

        row_size, column_size = BLOCKS.jax_rows, BLOCKS.jax_columns
        if mask is not None:
            row_size, column_size = (min(x, BLOCKS.jax_masked) for x in (row_size, column_size))
        of_rows = {name: x for name, x in self.arrays.items() if name in _OF_ROWS}
        of_columns = {name: x for name, x in self.arrays.items() if name not in _OF_ROWS}
        # The keys and values are split once for all rows, and transposed. So XLA need not transpose
        # tiles of weights for their gradients, which would take three times as long.
        for name in of_columns.keys() & {"key", "value"}:
            of_columns[name] = plan.xp.matrix_transpose(of_columns[name])
        shared = _Blocks.of(plan.xp, of_columns, -1, plan.n_keys, column_size)
        row_blocks = _Blocks.of(plan.xp, of_rows, -2, plan.n_queries, row_size)
        return _map(plan.xp, apply_to_rows, row_blocks)

    def _empty(self, n_rows: int) -> Sums:
        """The state of no keys. As `jax.shard_map` requires, it varies with all arrays."""
        xp, dtype = self.plan.xp, self.plan.compute
        arrays = [*self.arrays.values(), *(() if self.mask is None else self.mask.arrays)]
        zero = sum(xp.zeros_like(x, shape=(1, 1), dtype=dtype) for x in arrays)
        state = empty_state(xp, (n_rows,), self.plan.n_values, self.order, dtype=dtype)
        return state.map(lambda x: x + zero)


def _tiles(plan: Plan, arrays: _Arrays, mask: Mask | None) -> Tiles:
    """The generic pass over one tile, with its own arrays."""
    key, value = plan.xp.matrix_transpose(arrays["key"]), arrays.get("value")
    value = None if value is None else plan.xp.matrix_transpose(value)
    nonfinite = (arrays["query_nan"], arrays["key_nan"]) if "key_nan" in arrays else None
    query, bias = arrays["query"], arrays.get("bias")
    return Tiles(plan, Operands(query, key, value, bias, mask, 1.0, None, nonfinite), query)


def _with_groups(xp: Any, batch: tuple[int, ...], arrays: _Arrays) -> tuple[tuple[int, ...], _Arrays]:
    """Give grouped heads two axes: one for the groups, and one for the heads of a group."""
    # The loop over the groups then takes their keys and values once, without a copy for each head.
    groups = arrays["key"].shape[-3] if batch else 1
    if not batch or groups in (1, batch[-1]):
        return batch, arrays

    def split(x: Any) -> Any:
        heads = x.shape[-3]
        two = (groups, heads // groups) if heads > 1 else (1, 1)
        return xp.reshape(x, (*x.shape[:-3], *two, *x.shape[-2:]))

    shape = (*batch[:-1], groups, batch[-1] // groups)
    return shape, {name: split(x) for name, x in arrays.items()}


def _over_axes(
    xp: Any,
    function: Callable[[tuple[Any, ...], _Arrays], Any],
    shape: tuple[int, ...],
    arrays: _Arrays,
    index: tuple[Any, ...] = (),
) -> Any:
    """``function(index, arrays of the element)`` over the first axes, one after another."""
    import jax

    if not shape:
        return function(index, arrays)
    # Not `vmap`: XLA would compute the tiles of all heads at once, which leave the cache.
    size, *rest = shape
    mapped = {name: x for name, x in arrays.items() if x.shape[0] == size}
    same = {name: x[0] for name, x in arrays.items() if name not in mapped}

    def at(i: Any, parts: _Arrays) -> Any:
        return _over_axes(xp, function, tuple(rest), same | parts, (*index, i))

    if size == 1:  # a loop over one element would be one more thing to compile
        only = at(xp.asarray(0), {name: x[0] for name, x in mapped.items()})
        return jax.tree.map(lambda x: x[None], only)
    return jax.lax.map(lambda item: at(*item), (xp.arange(size), mapped))


@dataclass(frozen=True, eq=False, repr=False)
class _Blocks:
    """Arrays that are split into blocks of one axis, of which a first one may be ragged.

    A loop takes the blocks from stacked arrays. Slices at a traced position would have gradients of the
    size of the whole array.
    """

    length: int
    size: int
    ragged: int  # the size of the first block; 0 if the others cover the axis
    first: _Arrays
    stacked: _Arrays  # with the other blocks along a new first axis
    same: _Arrays  # those that are not split

    @classmethod
    def of(cls, xp: Any, arrays: _Arrays, axis: int, length: int, size: int) -> _Blocks:
        """The blocks along an axis, of which an array that broadcasts has one entry."""
        ragged = length % size
        same = {name: x for name, x in arrays.items() if x.shape[axis] == 1}
        first, stacked = {}, {}
        for name in arrays.keys() - same.keys():
            first[name] = take(arrays[name], (0, ragged), axis)
            x = take(arrays[name], (ragged, length - ragged), axis)
            place = axis % 2  # arrays of one head have two axes
            x = xp.reshape(x, (*x.shape[:place], -1, size, *x.shape[place + 1 :]))
            stacked[name] = xp.moveaxis(x, place, 0)
        return cls(length, size, ragged, first, stacked, same)

    def starts(self, xp: Any) -> Any:
        return xp.arange(self.ragged, self.length, self.size)

    def joined(self, other: _Blocks) -> _Blocks:
        """The blocks of the arrays of both."""
        parts = ((self.first, other.first), (self.stacked, other.stacked), (self.same, other.same))
        return _Blocks(self.length, self.size, self.ragged, *(a | b for a, b in parts))


def _map(xp: Any, function: Callable[[Block, _Arrays], Any], blocks: _Blocks) -> Any:
    """``function(rows, arrays of the rows)`` over blocks of rows, joined along axis −2."""
    import jax

    def apply_to_block(item: tuple[Any, _Arrays]) -> Any:
        return function((item[0], blocks.size), blocks.same | item[1])

    parts = []
    if blocks.ragged:
        parts.append(function((0, blocks.ragged), blocks.same | blocks.first))
    if blocks.ragged < blocks.length:
        others = jax.lax.map(apply_to_block, (blocks.starts(xp), blocks.stacked))
        parts.append(jax.tree.map(lambda x: xp.reshape(x, (-1, x.shape[-1])), others))
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *xs: xp.concat(xs, axis=-2), *parts)


def _fold(
    xp: Any,
    step: Callable[[Any, Block, _Arrays], Any],
    empty: Any,
    blocks: _Blocks,
    reach: tuple[Any, Any] | None,
) -> Any:
    """The last ``total = step(total, columns, their arrays)`` over the blocks of keys in `reach`.

    A reverse derivative computes the tiles again instead of storing them.
    """
    import jax

    # Within a scan XLA cannot merge the recomputed operations with the original ones, so nothing has to
    # prevent common subexpression elimination.
    @partial(jax.checkpoint, prevent_cse=False, static_argnums=3)
    def scan_step(total: Any, start: Any, arrays: _Arrays, size: int) -> Any:
        def stepped(total: Any) -> Any:
            return step(total, (start, size), blocks.same | arrays)

        if reach is None:
            return stepped(total)
        # A branch of XLA is taken or not, where `where` would compute the tile in any case.
        overlaps = (start < reach[1]) & (start + size > reach[0])
        return jax.lax.cond(overlaps, stepped, lambda total: total, total)

    total = scan_step(empty, 0, blocks.first, blocks.ragged) if blocks.ragged else empty
    if blocks.ragged == blocks.length:
        return total
    items = (blocks.starts(xp), blocks.stacked)
    return jax.lax.scan(lambda total, x: (scan_step(total, *x, blocks.size), None), total, items)[0]
