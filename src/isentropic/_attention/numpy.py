"""The tile pass for NumPy: two products and an exponential per tile, with few elementwise passes.

A block of rows starts with exponents relative to 0, which needs no subtraction. If a sum over the first
tile is too small or too large to be accurate, the block starts again. Then the exponents of each row
are relative to the largest logit of the first tile in which the row sees a key.
If sums are still inaccurate, or become inaccurate in a later tile, the block is computed once more,
with exponents relative to the maximum of the tiles so far.

With a bias the second way is left out, and for entropies of orders other than 1 only the last is used.

Threads compute the blocks of rows of all batch elements, or parts of the keys if there are few rows.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple, TypeVar, cast

from isentropic._attention.generic import reach, with_batch_axes
from isentropic._attention.plan import Operands, Plan, numpy_dtype
from isentropic._attention.state import AttentionState, as_rows
from isentropic._attention.tile import Sums, merge_columns, output_of_columns
from isentropic._entropy import (
    INFINITE_ORDER,
    LOWEST_SCORE,
    entropy_of_moments,
    is_far_from_1,
    partition,
    shift_moment,
    terms_of_moment,
)
from isentropic._loops import BLOCKS, Block, blocks, jax_array, keep_freed_memory, take
from isentropic._namespace import Array
from isentropic._numerics import divide_or_zero, grouped_matmul, quietly
from isentropic._ops import Ops
from isentropic._threads import n_threads, run

# Sums relative to a constant are accurate between these limits: for up to 10^8 keys they lose less to
# weights that count as 0 (those below 1e-31 in float32) than to rounding, and sums of values below
# 10^20 do not overflow.
_MIN_SUM, _MAX_SUM = 1e-16, 1e17
# If the first tile, or a bias, has exponents below −20 nats, others may be so low that eˣ underflows.
_WIDE_EXPONENT = 20.0
# Calls with fewer logits do not look for low exponents. The search takes longer than slow products.
_MIN_CHECKED = 2**13
# If all logits are computed at once and none is above this, in nats, nothing is subtracted from them.
# Their exponentials are then at most 2e17, of which float32 can add 10^21.
_MAX_EXPONENT = 40.0
# Dividing the queries by the unit of the exponents adds rounding errors. An exponent may change by at
# most this much.
_MAX_EXPONENT_ERROR = 1e-3

Index = tuple[int, ...]
# Rows of a tile, and which of its keys each of them sees. All other rows see all keys.
_Hidden = list[tuple[slice, Any]]
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _quietly_on_tensors(function: _Function) -> _Function:
    """Decorate by `quietly` for tensors. The calls with other arrays are quiet already."""
    quiet = quietly(function)

    @functools.wraps(function)
    def chosen(plan: Plan, *args: Any) -> Any:
        return (quiet if plan.library == "torch" else function)(plan, *args)

    return cast(_Function, chosen)


def why_not(plan: Plan, order: float | None, is_named: bool) -> str | None:
    """The reason why the NumPy pass does not compute a call, or None."""
    if plan.block_size is not None:
        return "it does not support `block_size`"
    if not is_named and plan.frame.is_compiling:
        return "torch.compile traces the call"
    if not plan.are_all_readable or plan.is_differentiated:
        return "some array is on another device, traced or differentiated"
    if _is_small(plan):
        if plan.has_bias or plan.softcap is not None:
            return "for so few logits it supports no bias and no soft cap"
        return None
    if not is_named and not _is_large(plan):
        return "each head has too few logits for it to be faster"
    return None


def _is_small(plan: Plan) -> bool:
    """Whether there are so few logits that they are computed at once, without tiles."""
    return plan.n_queries * plan.n_keys * math.prod(plan.batch) <= BLOCKS.numpy_untiled_logits


def _is_large(plan: Plan) -> bool:
    """Whether the call is so large that threads and a loop over batch elements save time."""
    size = plan.n_queries * plan.n_keys
    return (
        size >= BLOCKS.numpy_min_head_logits and size * math.prod(plan.batch) >= BLOCKS.numpy_min_logits
    )


def takes_tiles(plan: Plan) -> bool:
    """Whether the pass can read a call, and is faster than the generic pass."""
    return plan.are_all_readable and plan.block_size is None and _is_large(plan)


def takes_mask(plan: Plan) -> bool:
    """Whether the pass computes a masked output of PyTorch tensors faster than PyTorch's own kernel.

    The kernel adds an array to the logits. The pass hides keys only in tiles where some are hidden.
    """
    if not plan.has_mask or plan.is_plain_causal or plan.has_bias or plan.is_differentiated:
        return False
    n_logits = plan.n_queries * plan.n_keys * math.prod(plan.batch)
    return takes_tiles(plan) and n_logits >= BLOCKS.numpy_masked_logits


@_quietly_on_tensors
def output(plan: Plan, operands: Operands) -> Array:
    """The attention output, (..., L, Ev)."""
    if _is_small(plan):
        return _to_library(plan, _output_at_once(plan, operands))
    return _to_library(plan, _Pass(*_as_numpy(plan, operands)).state().weighted_value)


@_quietly_on_tensors
def state(plan: Plan, operands: Operands, order: float, relative_to_maximum: bool) -> Sums:
    """The state in columns, with the moment of an order.

    Unless `relative_to_maximum`, the sums of large calls are relative to any reference.
    """
    return _state_to_library(plan, _numpy_state(plan, operands, order, relative_to_maximum))


@_quietly_on_tensors
def state_in_rows(plan: Plan, operands: Operands) -> AttentionState:
    """The state of order 1 relative to the maximum, in rows."""
    # PyTorch takes 1 µs to make a row of a column, and NumPy 0.1 µs.
    state = as_rows(_numpy_state(plan, operands, 1.0, True))
    return AttentionState(*(_to_library(plan, x) for x in state))


@_quietly_on_tensors
def entropy(plan: Plan, operands: Operands, order: float) -> Array:
    """Rényi's entropies, (..., L)."""
    import numpy as np

    fields = _numpy_state(plan, operands, order, False)
    z, moment = fields.normalizer[..., 0], fields.weighted_score[..., 0]
    if order == 1 and np.count_nonzero(z) == z.size:
        return _to_library(plan, np.log(z) - moment / z)
    return _to_library(plan, entropy_of_moments(cast(Any, np), z, moment, order, "renyi"))


@_quietly_on_tensors
def map_logits(
    plan: Plan, operands: Operands, function: Callable[..., tuple[Any, Any]], column: Array
) -> tuple[Array, Array]:
    """The two results (..., L, 1) of a function of all logits of each query and of a column.

    The column is broadcastable to (..., L, 1). ``function(xp, logits, column)`` returns both for some
    rows of one batch element, without keys that are hidden from all of these rows.
    """
    import numpy as np

    keep_freed_memory()
    full_pass, column = _Pass(*_as_numpy(plan, operands)), _numpy_view(plan, column)
    rows = blocks(0, plan.n_queries, max(1, BLOCKS.cache_numbers // plan.n_keys))
    results = [np.empty((*plan.batch, plan.n_queries, 1), full_pass.plan.compute) for _ in range(2)]

    def compute(task: tuple[Index, Block]) -> None:
        index, (start, size) = task
        item = full_pass.item(index, (start, size), (0, plan.n_keys))
        found = function(full_pass.plan.xp, full_pass.logits(item), full_pass.part_of(column, item))
        for result, x in zip(results, found, strict=True):
            result[index][start : start + size] = x

    run(compute, [(index, r) for index in np.ndindex(*plan.batch) for r in rows])
    return _to_library(plan, results[0]), _to_library(plan, results[1])


def _numpy_state(plan: Plan, operands: Operands, order: float, relative_to_maximum: bool) -> Sums:
    if _is_small(plan):
        return _state_at_once(plan, operands, order)
    return _Pass(*_as_numpy(plan, operands), order, relative_to_maximum).state()


def _logits_at_once(plan: Plan, operands: Operands) -> Any:
    """Return all logits, −∞ where a key is hidden, and the values."""
    import numpy as np

    views = (operands.query, operands.key, operands.value, operands.multiplier)
    query, key, value, multiplier = (_numpy_view(plan, x) for x in views)
    s = grouped_matmul(np, query * multiplier, key.swapaxes(-1, -2))
    if operands.nonfinite is not None:
        query_nan, key_nan = operands.nonfinite
        s = s + (np.asarray(query_nan) + np.asarray(key_nan))
    if plan.is_plain_causal:
        positions = np.arange(plan.n_keys)
        np.copyto(s, -math.inf, where=positions > positions[:, None])
    elif operands.mask is not None:
        everything = (0, plan.n_queries), (0, plan.n_keys)
        visible = np.asarray(operands.mask.block(plan.frame, *everything))
        s = np.where(visible, s, -math.inf)
    return s, value


def _output_at_once(plan: Plan, operands: Operands) -> Any:
    import numpy as np

    s, value = _logits_at_once(plan, operands)
    # The maxima of rows take as long as a product. They are needed only if sums without a reference
    # might overflow, or be too small to be accurate, or 0 in a row that sees no key.
    if np.maximum.reduce(s, axis=None, initial=-math.inf) <= _MAX_EXPONENT:
        weight = _exp_at_once(s)
        normalizer = np.add.reduce(weight, axis=-1, keepdims=True)
        if np.minimum.reduce(normalizer, axis=None, initial=math.inf) >= _MIN_SUM:
            return _sum_over_keys(np.divide(weight, normalizer, out=weight), value)
    # The weights of a row that sees no key are e^{−∞} = 0.
    maximum = np.maximum.reduce(s, axis=-1, keepdims=True, initial=np.finfo(s.dtype).min)
    weight = _exp_at_once(np.subtract(s, maximum, out=s), s)
    normalizer = np.add.reduce(weight, axis=-1, keepdims=True)
    if np.count_nonzero(normalizer) == normalizer.size:
        return _sum_over_keys(np.divide(weight, normalizer, out=weight), value)
    return divide_or_zero(np, _sum_over_keys(weight, value), normalizer)


def _state_at_once(plan: Plan, operands: Operands, order: float) -> Sums:
    import numpy as np

    s, value = _logits_at_once(plan, operands)
    if order == 1:
        maximum, weight, normalizer, moment = _shannon_partition(s)
    else:
        maximum, weight, normalizer, moment = partition(Ops(np), s, order)
    weighted = None if value is None else _sum_over_keys(weight, value)
    shape = (*plan.batch, plan.n_queries)
    fields: tuple[Any, ...] = (maximum, normalizer, weighted, moment)
    return Sums(*(with_batch_axes(np, x, shape) for x in fields))


def _sum_over_keys(weight: Any, value: Any) -> Any:
    """``weight @ value``; over many keys it is a sum of sums over blocks of keys.

    The BLAS adds the products one by one. In a single sum of 200 000 equal products in float32 the
    rounding errors are 1e-3.
    """
    import numpy as np

    *axes, n_keys = weight.shape
    size = BLOCKS.numpy_columns
    n_blocks = n_keys // size
    if n_blocks < 2:
        return grouped_matmul(np, weight, value)
    end = n_blocks * size
    ndim = weight.ndim
    # The axis of the blocks comes first, before those of the batch.
    w = weight[..., :end].reshape(*axes, n_blocks, size).transpose(ndim - 1, *range(ndim - 1), ndim)
    v = value[..., :end, :].reshape(*value.shape[:-2], n_blocks, size, value.shape[-1])
    v = v.transpose(ndim - 2, *range(ndim - 2), ndim - 1, ndim)
    total = np.add.reduce(grouped_matmul(np, w, v), axis=0)
    if end < n_keys:
        total += grouped_matmul(np, weight[..., end:], value[..., end:, :])
    return total


def _shannon_partition(s: Any) -> tuple[Any, Any, Any, Any]:
    """`partition` for the order 1, in the memory of the logits."""
    import numpy as np

    maximum, lowest = np.maximum.reduce(s, axis=-1, keepdims=True), np.finfo(s.dtype).min
    x = np.subtract(s, np.maximum(maximum, lowest), out=s)
    np.maximum(x, lowest, out=x)  # −∞ times its weight, 0, is NaN
    weight = _exp_at_once(x)
    normalizer = np.add.reduce(weight, axis=-1, keepdims=True)
    return maximum, weight, normalizer, np.vecdot(weight, x)[..., None]


def _as_numpy(plan: Plan, operands: Operands) -> tuple[Plan, Operands]:
    """The same call with NumPy arrays. They share memory if the dtype is that of the computation."""
    if plan.library == "numpy":
        return plan, operands
    np: Any = importlib.import_module("array_api_compat.numpy")
    dtype = numpy_dtype(plan.xp, plan.compute)

    def view(x: Any) -> Any:
        return _numpy_view(plan, x)

    query, key, value, bias, mask, multiplier, _, nonfinite = operands[:8]
    rows = None if nonfinite is None else (view(nonfinite[0]), view(nonfinite[1]))
    views = (view(query), view(key), view(value), view(bias), mask, view(multiplier), None, rows)
    where: dict[str, Any] = {"xp": np, "device": "cpu"}
    frame = plan.frame.replaced(**where)
    numpy_plan = plan.replaced(frame=frame, **where, library="numpy", dtype=dtype, compute=dtype)
    return numpy_plan, Operands(*views)


def _numpy_view(plan: Plan, x: Any) -> Any:
    """An operand as a NumPy array. It shares memory if the dtype is that of the computation."""
    import numpy as np

    if x is None or isinstance(x, float):
        return x
    if plan.library == "torch":
        # `force`: the tensor may need a gradient, or have a sign that is not in memory yet.
        return (x if x.dtype == plan.compute else x.to(plan.compute)).numpy(force=True)
    return np.asarray(x, dtype=numpy_dtype(plan.xp, plan.compute))


def _to_library(plan: Plan, x: Any) -> Any:
    """A NumPy result as an array of the library of the call."""
    xp: Any = plan.xp
    if x is None or plan.library == "numpy":
        return x
    if plan.library == "torch":
        return xp.from_numpy(x if x.flags.writeable else x.copy())
    return jax_array(x, plan.device)


def _state_to_library(plan: Plan, state: Sums) -> Sums:
    return Sums(*(_to_library(plan, x) for x in state))


@dataclass(frozen=True, eq=False, repr=False)
class _Item:
    """A block of rows of one batch element, and the part of the keys over which sums are taken."""

    index: Index
    rows: Block
    part: Block
    mask: Any


class _Part(NamedTuple):
    """Some rows of an item, a range outside of which none sees a key, and one of keys that all see."""

    rows: Block
    reach: tuple[int, int]
    fully_visible: tuple[int, int]


class _Sums:
    """Sums over keys for each row, with exponents x relative to a reference."""

    def __init__(self, rows: int, values: Any, dtype: Any, drops_small: bool | None) -> None:
        import numpy as np

        self.values = values  # (S, Ev), or None
        self.normalizer = np.zeros(rows, dtype)  # Σ eˣ
        self.moment: Any = np.zeros(rows, dtype)  # that of the order, which is Σ eˣ x for order 1
        self.value: Any = None  # Σ eˣ v
        self.part: Any = None  # memory for the product of a tile
        if values is not None:
            self.value = np.zeros((rows, values.shape[-1]), dtype)
            self.part = np.empty_like(self.value)
        self.ones = self.buffer = np.ones(0, dtype)
        self.drops_small = drops_small

    def weights(self, x: Any, exp: Any, unit: float, order: float | None) -> Any:
        """``eˣ`` for the exponents of a tile, in the memory of `x` if there is no order.

        If the exponents are far apart in the first tile, small weights count as 0 in all tiles. Then
        the exponents of a moment of order 1 are raised in place, so that their products with these
        weights are 0.
        """
        if self.drops_small is None:
            self.drops_small = _are_wide(x, unit)
        out = x if order is None else self.buffer_like(x)
        if not self.drops_small:
            return exp(x, out=out)
        return _large_weights(x, exp, x if order == 1 else out, out)

    def buffer_like(self, tile: Any) -> Any:
        """An array like a tile, the same memory for every tile."""
        import numpy as np

        if self.buffer.size < tile.size:
            self.buffer = np.empty(tile.size, tile.dtype)
        return self.buffer[: tile.size].reshape(tile.shape)

    def add(self, rows: slice, columns: Block, weight: Any) -> None:
        """Add the weights eˣ of a tile, except for the moment."""
        import numpy as np

        start, size = columns
        self.normalizer[rows] += self.row_sums(weight)
        if self.value is not None:
            values = self.values[start : start + size]
            self.value[rows] += np.matmul(weight, values, out=self.part[: len(weight)])

    def add_moment(self, rows: slice, x: Any, weight: Any, order: float) -> None:
        """Add the moment of a tile with exponents x ≤ 0, which may be overwritten."""
        import numpy as np

        if order == 1:
            moment = np.vecdot(weight, np.maximum(x, LOWEST_SCORE, out=x))
        elif order == 2:
            moment = np.vecdot(weight, weight)
        elif order >= INFINITE_ORDER:
            moment = self.row_sums(weight)
        elif order > 0 and is_far_from_1(order):
            moment = self.row_sums(np.exp(np.multiply(x, order, out=x), out=x))
        else:
            moment = np.sum(terms_of_moment(np, x, weight, order) * (x > -math.inf), axis=-1)
        self.moment[rows] += moment

    def row_sums(self, tile: Any) -> Any:
        import numpy as np

        size = tile.shape[-1]
        if self.ones.size < size:
            self.ones = np.ones(size, tile.dtype)
        return tile @ self.ones[:size]  # half the time of `np.sum`

    def are_accurate(self, is_empty: Any) -> bool:
        """Whether all sums are in the accurate range. Rows that have seen no key are ignored."""
        import numpy as np

        z = self.normalizer
        # The rows that have seen no key are looked at only if there may be one.
        if not (np.minimum.reduce(z) >= _MIN_SUM and np.maximum.reduce(z) <= _MAX_SUM):
            are_within = (is_empty & (z == 0)) | ((z >= _MIN_SUM) & (z <= _MAX_SUM))
            if not np.all(are_within):
                return False
        return bool(np.all(np.isfinite(self.moment)))

    def shift(self, rows: slice, shift: Any, order: float | None) -> None:
        """Update the sums of rows for exponents that change by `shift`."""
        import numpy as np

        normalizer = self.normalizer[rows]
        if order is not None:
            self.moment[rows] = shift_moment(np, self.moment[rows], normalizer, shift, order)
        factor = np.exp(shift)
        normalizer *= factor
        if self.value is not None:
            self.value[rows] *= factor[:, None]


@dataclass(eq=False, repr=False)
class _Pass:
    plan: Plan
    operands: Operands
    order: float | None = None  # of the moment; None without a moment
    relative_to_maximum: bool = False

    def __post_init__(self) -> None:
        key, value = (_in_rows(x, self.plan.compute) for x in (self.operands.key, self.operands.value))
        self.operands = self.operands._replace(key=key, value=value)
        operands = self.operands
        # The constants to which sums can be relative, in the order in which they are tried: 0 (False),
        # and the largest logit of the first tile (True). With a bias only 0 is tried: the bias may fall
        # with the distance of a key, and then the first tile says little about the others.
        self.constants: tuple[bool, ...] = ()
        if operands.nonfinite is None and self.order in (None, 1.0):
            self.constants = (False,) if operands.bias is not None else (False, True)
        # The mask of an item has numbers in place of the arrays that differ from item to item, so it
        # may be shift-invariant by itself. Only that of the whole call tells whether items share tiles.
        mask = operands.mask
        self.has_common_tiles = mask is not None and mask.is_shift_invariant
        self.visible_tiles: dict[Any, Any] = {}

    def state(self) -> Sums:
        """The state in columns. Without an order the weighted values are divided by the normalizer."""
        import numpy as np

        keep_freed_memory()
        plan = self.plan
        elements = list(np.ndindex(*plan.batch))
        # Under a causal mask the last rows take longest. So they come first.
        rows = blocks(0, plan.n_queries, self.row_size(len(elements)))[::-1]
        parts = self.parts(len(elements) * len(rows))
        states = [self.empty_state() for _ in parts]

        def compute(task: tuple[Index, Block, int]) -> None:
            index, (start, size), i = task
            fields = self.block(self.item(index, (start, size), parts[i]))
            for array, field in zip(states[i], fields, strict=True):
                if array is not None:
                    array[index][start : start + size] = field

        run(compute, [(index, r, i) for index in elements for r in rows for i in range(len(parts))])
        if len(states) == 1:
            return states[0]
        merged = reduce(lambda a, b: merge_columns(Ops(np), a, b, self.order), states)
        if self.order is None:
            return merged._replace(weighted_value=output_of_columns(np, merged))
        return merged

    def item(self, index: Index, rows: Block, part: Block) -> _Item:
        mask: Any = self.operands.mask
        element_mask = None if mask is None else mask.element(self.plan.batch, index)
        return _Item(index, rows, part, element_mask)

    def row_size(self, n_elements: int) -> int:
        """The number of queries of a block: fewer if there would be too few blocks for the threads."""
        size = BLOCKS.numpy_large_rows if self.has_large_blocks() else BLOCKS.numpy_rows
        while (
            size >= BLOCKS.numpy_rows and n_elements * -(-self.plan.n_queries // size) < 2 * n_threads()
        ):
            size = max(size // 2, 1)
        return size

    def has_large_blocks(self) -> bool:
        """Whether large blocks of queries save time: not if they share few keys, as under a window."""
        mask, frame = self.operands.mask, self.plan.frame
        if not _has_fast_exponential():
            return False
        if mask is None:
            return True
        rows = blocks(0, self.plan.n_queries, BLOCKS.numpy_large_rows)[-1]
        first, end = mask.fully_visible(frame, rows)
        return bool(mask.reach(frame, rows)[0] >= first < end)

    def parts(self, n_items: int) -> list[Block]:
        """The keys, in several parts if there are fewer blocks of rows than threads."""
        n_keys = self.plan.n_keys
        n = min(-(-n_threads() // n_items), n_keys // BLOCKS.numpy_min_part)
        return blocks(0, n_keys, -(-n_keys // n)) if n > 1 else [(0, n_keys)]

    def empty_state(self) -> Sums:
        import numpy as np

        plan, value = self.plan, self.operands.value
        shape, dtype = (*plan.batch, plan.n_queries), plan.compute
        value_dtype = plan.dtype if self.order is None else dtype
        return Sums(
            np.empty((*shape, 1), dtype),
            np.empty((*shape, 1), dtype),
            None if value is None else np.empty((*shape, value.shape[-1]), value_dtype),
            None if self.order is None else np.empty((*shape, 1), dtype),
        )

    def block(self, item: _Item) -> Sums:
        """The state of an item."""
        for from_first_tile in self.constants:
            state = self.relative_to_constant(item, from_first_tile=from_first_tile)
            if state is not None:
                return state
        return self.relative_to_largest(item)

    def part_of(self, x: Any, item: _Item) -> Any:
        """The rows of an item in `x` (..., L, columns)."""
        return take(x[_element_of(x, self.plan.batch, item.index)], item.rows, -2)

    def scaled_rows(self, item: _Item, unit: float) -> Any:
        """The queries whose products with the keys are the logits, divided by a unit."""
        import numpy as np

        query, multiplier = self.part_of(self.operands.query, item), self.operands.multiplier
        if not isinstance(multiplier, float):
            multiplier = self.part_of(multiplier, item)
        return np.multiply(query, multiplier / unit, dtype=self.plan.compute)

    def relative_to_constant(self, item: _Item, *, from_first_tile: bool) -> Sums | None:
        """The state from sums relative to one constant per row; None if it fails in the first tile.

        The constant is 0, or the largest logit of the first tile in which the row sees a key. If it
        fails only in a later tile, another constant would hardly be better. Then the result is the
        state from sums relative to the largest logit so far.
        """
        import numpy as np

        exp, unit = _exponential()
        softcap = self.plan.softcap
        query = self.scaled_rows(item, unit if softcap is None else softcap)
        n_rows, dtype = item.rows[1], query.dtype
        # Relative to the largest number, the weights of a row that has seen no key yet are 0.
        reference = np.full(n_rows, np.finfo(dtype).max if from_first_tile else 0.0, dtype)
        is_unseen, are_some_unseen, is_first = np.full(n_rows, True), True, True
        sums, peak = self.new_sums(item), np.zeros(n_rows, dtype)
        lowest = math.log(_MIN_SUM / self.plan.n_keys) / unit
        for rows, columns, hidden, s in self.tiles(item, query):
            if softcap is not None:
                np.multiply(np.tanh(s, out=s), softcap / unit, out=s)
            self.add_bias(item, rows, columns, s, unit)
            if is_first and sums.drops_small and np.min(_row_maxima(s)) < lowest:
                return None
            if from_first_tile:
                if are_some_unseen:
                    maximum = _row_maxima(_hide(s.copy(), hidden) if hidden else s)
                    is_new = is_unseen[rows] & (maximum > -math.inf)
                    np.copyto(reference[rows], maximum, where=is_new)
                np.subtract(s, reference[rows, None], out=s)
            if are_some_unseen:
                are_blind = np.full(len(s), False)
                for part, visible in hidden:
                    are_blind[part] = ~np.any(visible, axis=-1)
                is_unseen[rows] &= are_blind
                are_some_unseen = bool(is_unseen.any())
            p = sums.weights(s, exp, unit, self.order)
            for part, visible in hidden:
                np.multiply(p[part], visible, out=p[part])
            sums.add(rows, columns, p)
            if self.order is not None:
                sums.moment[rows] += np.vecdot(p, s)
            if self.relative_to_maximum:
                np.maximum(peak[rows], _row_maxima_of_weights(p), out=peak[rows])
            # Where logits are far apart, sums are likely to overflow in some later tile.
            if (is_first or sums.drops_small) and not sums.are_accurate(is_unseen):
                return None if is_first else self.relative_to_largest(item)
            is_first = False
        reference = np.where(is_unseen, 0.0, reference * unit)
        is_exact = np.max(np.abs(reference)) * np.finfo(dtype).eps < _MAX_EXPONENT_ERROR
        if not is_exact or not sums.are_accurate(is_unseen):
            return self.relative_to_largest(item)
        sums.moment *= unit
        return self.state_of(sums, reference, peak if self.relative_to_maximum else sums.normalizer)

    def relative_to_largest(self, item: _Item) -> Sums:
        """The state from sums relative to the maximum so far, for logits of every kind."""
        import numpy as np

        softcap, order = self.plan.softcap, self.order
        sums = self.new_sums(item)
        query = self.scaled_rows(item, 1.0 if softcap is None else softcap)
        maximum = np.full(item.rows[1], -math.inf, query.dtype)
        for rows, columns, hidden, s in self.tiles(item, query):
            if softcap is not None:
                np.multiply(np.tanh(s, out=s), softcap, out=s)
            self.add_bias(item, rows, columns, s)
            _hide(s, hidden)
            previous = maximum[rows].copy()
            np.maximum(previous, _row_maxima(s), out=maximum[rows])
            # The weights of a row that has seen no key are e^{−∞} = 0.
            reference = np.maximum(maximum[rows], np.finfo(s.dtype).min)
            sums.shift(rows, np.where(previous == -math.inf, 0.0, previous - reference), order)
            np.subtract(s, reference[:, None], out=s)
            p = sums.weights(s, np.exp, 1.0, order)
            sums.add(rows, columns, p)
            if order is not None:
                sums.add_moment(rows, s, p, order)
        return self.state_of(sums, maximum, sums.normalizer if order is None else None)

    def state_of(self, sums: _Sums, reference: Any, factor: Any) -> Sums:
        """The state in columns, for sums relative to `reference`.

        If there is a `factor`, the sums are divided by it, which makes them relative to
        ``reference + log(factor)``.
        """
        import numpy as np

        normalizer, value, moment = sums.normalizer, sums.value, sums.moment
        is_empty = (normalizer == 0) | (reference == -math.inf)
        if is_empty.any():
            normalizer[is_empty] = moment[is_empty] = 0.0
            reference[is_empty] = -math.inf
            if value is not None:
                value[is_empty] = 0.0  # 0 · ∞ of an infinite value is NaN
            factor = None if factor is None else np.where(is_empty, 1.0, factor)
        if factor is not None:
            log_factor = np.log(factor)
            moment = (moment - log_factor * normalizer) / factor
            normalizer = normalizer / factor
            reference = reference + log_factor
            if value is not None:
                value /= factor[:, None]
        if self.order == 1:
            moment = np.minimum(moment, 0.0)
        fields = (reference[:, None], normalizer[:, None], value)
        return Sums(*fields, None if self.order is None else moment[:, None])

    def logits(self, item: _Item) -> Any:
        """The logits of all keys that some query of an item sees, −∞ where one is hidden."""
        import numpy as np

        columns = reach(self.plan, item.mask, item.rows)
        keys = self.operands.key[_element_of(self.operands.key, self.plan.batch, item.index)]
        some: Any = take(keys, columns, -2)
        s = np.matmul(self.scaled_rows(item, 1.0), some.T)
        self.add_bias(item, slice(None), columns, s)
        if item.mask is not None:
            _hide(s, [(slice(None), item.mask.block(self.plan.frame, item.rows, columns))])
        return s

    def tiles(self, item: _Item, q: Any) -> Iterator[tuple[slice, Block, _Hidden, Any]]:
        """Yield tiles: some rows of the item, a key block, what is hidden, and the products of both.

        `q` are the queries of the item.
        """
        import numpy as np

        frame, mask, n_rows = self.plan.frame, item.mask, item.rows[1]
        first, end = item.part[0], sum(item.part)
        parts: list[_Part] = []
        if mask is not None:
            blocks_of_rows = blocks(item.rows[0], sum(item.rows), BLOCKS.numpy_rows)
            parts = [
                _Part(x, mask.reach(frame, x), mask.fully_visible(frame, x)) for x in blocks_of_rows
            ]
            first = max(first, min(part.reach[0] for part in parts))
            end = min(end, max(part.reach[1] for part in parts))
        column_size = BLOCKS.numpy_columns * max(1, BLOCKS.numpy_rows // n_rows)
        keys = self.operands.key[_element_of(self.operands.key, self.plan.batch, item.index)]
        buffer = np.empty(n_rows * column_size, q.dtype)
        key_blocks = [(i, min(column_size, end - i)) for i in range(first, end, column_size)]
        if len(parts) > 1 and key_blocks:
            # Under a causal mask these blocks end where the keys end that a part sees. The shorter one
            # comes last, because the first tile shows how far apart the exponents are.
            shorter, *others = blocks(first, end, column_size)
            key_blocks = [*others, shorter]
        for columns in key_blocks:
            rows, hidden = self.rows_and_hidden(item, parts, columns)
            size = rows.stop - rows.start
            if size == 0:
                continue
            s = buffer[: size * columns[1]].reshape(size, columns[1])
            np.matmul(q[rows], keys[columns[0] : sum(columns)].T, out=s)
            yield rows, columns, hidden, s

    def rows_and_hidden(self, item: _Item, parts: list[_Part], columns: Block) -> tuple[slice, _Hidden]:
        """The rows from the first to the last part that sees a key, and what they do not see."""
        import numpy as np

        if item.mask is None:
            return slice(0, item.rows[1]), []
        start, end = columns[0], sum(columns)
        found = []
        for part in parts:
            visible = None
            if not (part.fully_visible[0] <= start and end <= part.fully_visible[1]):
                visible = np.zeros((1, 1), bool)
                if part.reach[0] < end and start < part.reach[1]:
                    visible = self.visible(item.mask, part.rows, columns)
                if visible.all():  # as in most tiles of a causal mask that is an array
                    visible = None
            first = part.rows[0] - item.rows[0]
            found.append((slice(first, first + part.rows[1]), visible))
        seeing = [i for i, (_, visible) in enumerate(found) if visible is None or visible.any()]
        if not seeing:
            return slice(0, 0), []
        found = found[seeing[0] : seeing[-1] + 1]
        rows = slice(found[0][0].start, found[-1][0].stop)
        hidden = [
            (slice(part.start - rows.start, part.stop - rows.start), visible)
            for part, visible in found
            if visible is not None
        ]
        return rows, hidden

    def visible(self, mask: Any, rows: Block, columns: Block) -> Any:
        frame = self.plan.frame
        if not self.has_common_tiles:
            return mask.block(frame, rows, columns)
        tile_key = (rows[0] - columns[0], rows[1], columns[1])
        if tile_key not in self.visible_tiles:
            self.visible_tiles[tile_key] = mask.block(frame, rows, columns)
        return self.visible_tiles[tile_key]

    def add_bias(self, item: _Item, rows: slice, columns: Block, s: Any, unit: float = 1.0) -> None:
        """Add the bias to the logits of a tile, and NaN for nonfinite rows of queries and keys.

        The logits are in units of so many nats.
        """
        import numpy as np

        bias, nonfinite = self.operands.bias, self.operands.nonfinite
        if bias is None and nonfinite is None:
            return
        for x in (bias, *(() if nonfinite is None else nonfinite)):
            if x is not None:
                part: Any = self.part_of(x, item)
                part = take(part[rows] if part.shape[0] > 1 else part, columns, -1)
                part = part.astype(s.dtype, copy=False)
                np.add(s, part if unit == 1.0 else part / unit, out=s)

    def new_sums(self, item: _Item) -> _Sums:
        value = self.operands.value
        if value is not None:
            value = value[_element_of(value, self.plan.batch, item.index)]
        bias = self.operands.bias
        has_wide_bias = bias is not None and _are_wide(self.part_of(bias, item))
        # Without one, the first tile decides.
        return _Sums(item.rows[1], value, self.plan.compute, drops_small=has_wide_bias or None)


@functools.cache
def _has_fast_exponential() -> bool:
    """Whether NumPy has SIMD code for 2ˣ, which is faster than that for eˣ. It has with AVX-512."""
    from numpy.lib.introspect import opt_func_info

    targets = opt_func_info("^exp2$").get("exp2", {}).get("ff", {"current": "baseline"})
    return "baseline" not in targets["current"]


def _exponential() -> tuple[Any, float]:
    """The faster one of 2ˣ and eˣ in NumPy, and the unit of its exponents in nats."""
    import numpy as np

    return (np.exp2, math.log(2)) if _has_fast_exponential() else (np.exp, 1.0)


def _are_wide(x: Any, unit: float = 1.0) -> bool:
    """Whether some exponents are so low that others may have weights too small to be normal numbers."""
    import numpy as np

    return bool(np.minimum.reduce(x, axis=None, initial=0.0) < -_WIDE_EXPONENT / unit)


def _large_weights(x: Any, exp: Any, memory: Any = None, out: Any = None) -> Any:
    """``eˣ`` minus a number, 1e-31 in float32, and 0 where ``eˣ`` is below that.

    Products with numbers that are not normal (below 1e-38) take 100 times as long on some processors,
    and so does `exp` where it returns them. The raised exponents are written into `memory`, if given.
    """
    import numpy as np

    exponent, least = _least_weight(exp, x.dtype)
    weight = exp(np.maximum(x, exponent, out=memory), out=out)
    return np.subtract(weight, least, out=weight)


@functools.cache
def _least_weight(exp: Any, dtype: Any) -> tuple[Any, Any]:
    """An exponent and its weight, whose differences with larger weights are normal numbers."""
    import numpy as np

    info, log = np.finfo(dtype), np.log if exp is np.exp else np.log2
    exponent = np.ceil(log(info.tiny / info.eps)).astype(dtype)
    return exponent, exp(np.full(1, exponent))[0]


def _exp_at_once(x: Any, out: Any = None) -> Any:
    """``eˣ`` for all logits of a call."""
    import numpy as np

    if x.size >= _MIN_CHECKED and _are_wide(x):
        return _large_weights(x, np.exp, out, out)
    return np.exp(x, out=out)


def _hide(s: Any, hidden: _Hidden) -> Any:
    """Set logits to −∞ where keys are hidden, and return them."""
    import numpy as np

    # `fmin` of a number and NaN is the number. For irregular masks `copyto` takes four times as long.
    ceilings = np.asarray([-math.inf, math.nan], s.dtype)
    for part, visible in hidden:
        np.fmin(s[part], np.take(ceilings, visible.view(np.uint8), mode="clip"), out=s[part])
    return s


def _row_maxima(x: Any) -> Any:
    import numpy as np

    # `argmax` takes half the time of `max`, and finds NaN too.
    return x[np.arange(x.shape[0]), np.argmax(x, axis=-1)]


def _row_maxima_of_weights(p: Any) -> Any:
    """The row maxima of numbers that are at least 0 and not NaN."""
    import numpy as np

    # Such numbers have the order of their bits. In the pass, `max` of 32-bit integers takes a third
    # less time than `argmax`.
    bits = p.view(f"i{p.itemsize}")
    return np.maximum.reduce(bits, axis=-1).view(p.dtype)


def _in_rows(x: Any, dtype: Any) -> Any:
    """`x` in a dtype, with rows that are contiguous in memory, as the BLAS needs them."""
    import numpy as np

    if x is None:
        return None
    x = np.asarray(x, dtype=dtype)
    is_in_rows = x.strides[-1] == x.itemsize and x.strides[-2] >= x.shape[-1] * x.itemsize
    return x if is_in_rows else np.ascontiguousarray(x)


def _element_of(x: Any, batch: Index, index: Index) -> Index:
    """The index of a batch element in `x`, whose batch axes may broadcast or be grouped heads."""
    shape = x.shape[:-2]
    pairs = zip(shape, batch[len(batch) - len(shape) :], index[len(batch) - len(shape) :], strict=True)
    return tuple(i * size // full_size for size, full_size, i in pairs)
