"""The tile pass for NumPy: two products and an exponential per tile, with few elementwise passes.

A block of rows starts with exponents relative to 0, which needs no subtraction. If a sum over the first
tile is too small or too large to be accurate, the block starts again. Then the exponents of each row
are relative to the largest logit of the first tile in which the row sees a key.
If sums are still inaccurate, or become inaccurate in a later tile, the block is computed once more,
with exponents relative to the maximum of the tiles so far.

With a bias the second way is left out, and for entropies of orders other than 1 only the last is used.

Threads compute the blocks of rows of all batch elements, or parts of the keys if there are few rows.

Few logits are computed at once, without tiles: Python would take longer than the arithmetic. So are
parts of the batch axes, in threads, if there are many heads of few logits.
"""

from __future__ import annotations

import functools
import importlib
import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, TypeVar, cast

import numpy as np

from isentropic._attention import schedule
from isentropic._attention.generic import Tiles, added_logits, with_batch_axes
from isentropic._attention.numpy_ops import TileOps, WholeOps, are_wide, has_fast_exponential, hide
from isentropic._attention.plan import Operands, Plan, numpy_dtype
from isentropic._attention.schedule import Hidden
from isentropic._attention.tile import (
    Sums,
    absorb,
    empty_state,
    logits,
    merge_columns,
    output_of_columns,
)
from isentropic._divergences import of_logits, ordinary
from isentropic._entropy import entropy_of_moments
from isentropic._loops import BLOCKS, Block, blocks, jax_array, keep_freed_memory, take
from isentropic._namespace import Array
from isentropic._numerics import quietly
from isentropic._ops import LOWEST_SCORE, Ops
from isentropic._threads import n_threads, run
from isentropic.masks import Mask

# Sums relative to a constant are accurate between these limits: for up to 10^8 keys they lose less to
# weights that count as 0 (those below 1e-31 in float32) than to rounding, and sums of values below
# 10^20 do not overflow.
_MIN_SUM, _MAX_SUM = 1e-16, 1e17
# If all logits are computed at once and none is above this, in nats, nothing is subtracted from them.
# Their exponentials are then at most 2e17, of which float32 can add 10^21.
_MAX_EXPONENT = 40.0
# Dividing the queries by the unit of the exponents adds rounding errors. An exponent may change by at
# most this much.
_MAX_EXPONENT_ERROR = 1e-3

_WHOLE = WholeOps()

Index = tuple[int, ...]
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _quietly_on_tensors(function: _Function) -> _Function:
    """Decorate by `quietly` for tensors. The calls with other arrays are quiet already."""
    quiet = quietly(function)

    @functools.wraps(function)
    def chosen(plan: Plan, *args: Any) -> Any:
        return (quiet if plan.library == "torch" else function)(plan, *args)

    return cast(_Function, chosen)


def unsupported_reason(plan: Plan, order: float | None, is_named: bool) -> str | None:
    """The reason why the NumPy pass does not compute a call, or None."""
    if not is_named and plan.frame.is_compiling:
        return "torch.compile traces the call"
    if not plan.are_all_readable or plan.is_differentiated:
        return "some array is on another device, traced or differentiated"
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


def _parts_of_batch(plan: Plan, operands: Operands) -> list[tuple[slice, ...]]:
    """Parts of the batch axes whose logits are computed at once; none if one head has too many.

    A mask with arrays cannot be divided so. Those of other libraries become NumPy's by `_Pass` alone.
    """
    if plan.library != "numpy" and operands.mask is not None and operands.mask.arrays:
        return []
    # The last axes come first: their heads are neighbours in memory, and groups stay together.
    axis, inner = len(plan.batch) - 1, plan.n_queries * plan.n_keys
    while axis > 0 and inner * plan.batch[axis] <= BLOCKS.numpy_untiled_logits:
        inner *= plan.batch[axis]
        axis -= 1
    size = BLOCKS.numpy_untiled_logits // max(inner, 1)
    if axis < 0 or size == 0:
        return []
    outer = [tuple(slice(i, i + 1) for i in index) for index in np.ndindex(*plan.batch[:axis])]
    parts = [slice(start, start + n) for start, n in blocks(0, plan.batch[axis], size)]
    return [(*index, part) for index in outer for part in parts]


def takes_tiles(plan: Plan) -> bool:
    """Whether the pass can read a call, and is faster than the generic pass."""
    return plan.are_all_readable and _is_large(plan)


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
        sums = _sums_at_once(plan, operands, None)
        if sums.maximum is None:  # each sum is large
            out = np.divide(sums.weighted_value, sums.normalizer, out=sums.weighted_value)
        else:
            out = output_of_columns(cast(Any, np), sums)
        return out if plan.library == "numpy" else _to_library(plan, out)
    if not _is_large(plan) and (parts := _parts_of_batch(plan, operands)):
        sums = _sums_of_parts(plan, operands, None, False, parts)
        return _to_library(plan, output_of_columns(cast(Any, np), sums))
    # Without an order the pass divides the values by the normalizer while a block is in the cache.
    return _to_library(plan, _Pass(*_as_numpy(plan, operands)).state().weighted_value)


@_quietly_on_tensors
def state(plan: Plan, operands: Operands, order: float, relative_to_maximum: bool) -> Sums:
    """The state in columns, with the moment of an order.

    Unless `relative_to_maximum`, the sums of large calls are relative to any reference.
    """
    return _numpy_state(plan, operands, order, relative_to_maximum).map(partial(_to_library, plan))


@_quietly_on_tensors
def entropy(plan: Plan, operands: Operands, order: float) -> Array:
    """Rényi's entropies, (..., L)."""
    fields = _numpy_state(plan, operands, order, False)
    z, moment = fields.normalizer[..., 0], fields.weighted_score[..., 0]
    if order == 1 and np.count_nonzero(z) == z.size:
        return _to_library(plan, np.maximum(np.log(z) - moment / z, 0))
    return _to_library(plan, entropy_of_moments(cast(Any, np), z, moment, order, "renyi"))


@_quietly_on_tensors
def map_logits(
    plan: Plan, operands: Operands, function: Callable[..., tuple[Any, Any]], column: Array
) -> tuple[Array, Array]:
    """As `Tiles.map_logits`, for some rows of one batch element at a time."""
    keep_freed_memory()
    full_pass, column = _Pass(*_as_numpy(plan, operands)), _numpy_view(plan, column)
    numpy = cast(Any, full_pass.plan.xp)
    rows = blocks(0, plan.n_queries, max(1, BLOCKS.cache_numbers // plan.n_keys))
    results = [np.empty((*plan.batch, plan.n_queries, 1), full_pass.plan.compute) for _ in range(2)]

    def compute(task: tuple[Index, Block]) -> None:
        index, block = task
        item = full_pass.item(index, block, (0, plan.n_keys))
        part = take(_element_of(column, plan.batch, index), block, -2)
        found = function(numpy, full_pass.all_logits(item), part)
        for result, x in zip(results, found, strict=True):
            take(result[index], block, -2)[...] = x

    run(compute, [(index, r) for index in np.ndindex(*plan.batch) for r in rows])
    return _to_library(plan, results[0]), _to_library(plan, results[1])


def takes_pair(plan: Plan, operands: Operands) -> bool:
    """Whether `divergence` can read a call, and is faster than the generic pass."""
    is_able = not (plan.is_differentiated or plan.has_rows or operands.sinks is not None)
    return is_able and takes_tiles(plan)


@_quietly_on_tensors
def divergence(
    plan: Plan, operands: Operands, other: tuple[Plan, Operands], batch: Index, name: str
) -> Array:
    """The divergence of each query from another call, (..., L).

    The calls have the same numbers of queries and of keys, and their axes ``...`` broadcast to `batch`.
    """
    keep_freed_memory()
    sides = [_Pass(*_as_numpy(*side)) for side in ((plan, operands), other)]
    numpy = cast(Any, sides[0].plan.xp)
    result = np.empty((*batch, plan.n_queries), np.result_type(*(x.plan.compute for x in sides)))
    # Under a causal mask the last rows take longest. So they come first.
    rows = blocks(0, plan.n_queries, max(1, BLOCKS.cache_numbers // plan.n_keys))[::-1]

    def compute(task: tuple[Index, Block]) -> None:
        index, block = task
        items = [x.item(_index_of(x.plan.batch, index), block, (0, plan.n_keys)) for x in sides]
        masks = [(x.plan.frame, item.operands.mask) for x, item in zip(sides, items, strict=True)]
        columns = schedule.reach_of_all(masks, block)

        def of_both(lowest: float) -> list[Any]:
            return [x.all_logits(item, columns, lowest) for x, item in zip(sides, items, strict=True)]

        found = ordinary(numpy, name, *of_both(LOWEST_SCORE))
        if found is None:  # the logits were overwritten
            found = of_logits(name)(numpy, *of_both(-math.inf))
        result[index][block[0] : sum(block)] = found[:, 0]

    run(compute, [(index, r) for index in np.ndindex(*batch) for r in rows])
    return _to_library(plan, result)


def _index_of(batch: Index, index: Index) -> Index:
    """The place in axes that broadcast to those of `index`."""
    places = zip(batch, index[len(index) - len(batch) :], strict=True)
    return tuple(0 if size == 1 else i for size, i in places)


def _numpy_state(plan: Plan, operands: Operands, order: float, relative_to_maximum: bool) -> Sums:
    if _is_small(plan):
        state = _sums_at_once(plan, operands, order, relative_to_maximum)
        if state.maximum is None:
            state = state._replace(maximum=np.zeros_like(state.normalizer))
        shape = (*plan.batch, plan.n_queries)
        return state.map(lambda x: with_batch_axes(cast(Any, np), x, shape))
    if not _is_large(plan) and (parts := _parts_of_batch(plan, operands)):
        return _sums_of_parts(plan, operands, order, relative_to_maximum, parts)
    return _Pass(*_as_numpy(plan, operands), order, relative_to_maximum).state()


def _logits_at_once(plan: Plan, operands: Operands) -> Any:
    """Return all logits, −∞ where a key is hidden, and the values."""
    query, key, value, added, _, multiplier, *_ = operands
    visible, softcap, dtypes = None, plan.softcap, {query.dtype, key.dtype}
    for x in (value, added):
        if x is not None:
            dtypes.add(x.dtype)
    if plan.library != "numpy" or dtypes != {plan.compute}:
        query, key, value, added = (_numpy_view(plan, x) for x in (query, key, value, added))
        multiplier = _numpy_view(plan, multiplier)
    if operands.nonfinite is not None:
        query_nan, key_nan = operands.nonfinite
        # There may be a nonfinite row, so the sum has the size of the logits only in rare calls.
        nan = np.asarray(query_nan) + np.asarray(key_nan)
        added = nan if added is None else added + nan
    if softcap is not None:
        multiplier = multiplier / softcap
    if plan.is_plain_causal:
        positions = np.arange(plan.n_keys)
        visible = positions <= positions[:, None]
    elif operands.mask is not None:
        everything = (0, plan.n_queries), (0, plan.n_keys)
        visible = np.asarray(operands.mask.block(plan.frame, *everything))
    return logits(_WHOLE, query * multiplier, key, softcap, added, visible)[0], value


def _sums_at_once(
    plan: Plan, operands: Operands, order: float | None, relative_to_maximum: bool = False
) -> Sums:
    """The sums over all keys; the maximum is None if they are relative to 0."""
    keep_freed_memory()
    s, value = _logits_at_once(plan, operands)
    # The maxima of rows take as long as a product. They are needed only if sums without a reference
    # might overflow, or be too small to be accurate, or 0 in a row that sees no key.
    is_any_fine = not relative_to_maximum and order in (None, 1)
    if is_any_fine and np.maximum.reduce(s, axis=None, initial=-math.inf) <= _MAX_EXPONENT:
        sums = absorb(_WHOLE, None, s, value, order, "given")
        least = np.minimum.reduce(sums.normalizer, axis=None, initial=math.inf)
        out = sums.weighted_value
        if least >= _MIN_SUM and (out is None or math.isfinite(np.add.reduce(out, axis=None))):
            return sums
        s, value = _logits_at_once(plan, operands)  # rarely; the others were overwritten
    return absorb(_WHOLE, None, s, value, order)


def _empty_state(plan: Plan, shape: Index, order: float | None) -> Sums:
    return empty_state(cast(Any, np), shape, plan.n_values, order, dtype=plan.compute)


def _sums_of_parts(
    plan: Plan,
    operands: Operands,
    order: float | None,
    relative_to_maximum: bool,
    parts: list[tuple[slice, ...]],
) -> Sums:
    """The sums over all keys, in parts of the batch axes, which threads compute each at once."""
    plan, operands = _as_numpy(plan, operands)
    tasks = [(part, _operands_of_part(plan, operands, part)) for part in parts]
    if any(x is None for _, x in tasks):  # some arrays cannot be divided so
        return Tiles.of(plan, operands).state(order)
    total = _empty_state(plan, (*plan.batch, plan.n_queries), order)

    def compute(task: tuple[tuple[slice, ...], Any]) -> None:
        part, of_part = task
        sums = _sums_at_once(plan, of_part, order, relative_to_maximum)
        for x, field in zip(total, sums, strict=True):
            if x is not None:
                x[part] = 0.0 if field is None else field  # the reference may be 0

    run(compute, tasks)
    return total


def _operands_of_part(plan: Plan, operands: Operands, part: tuple[slice, ...]) -> Operands | None:
    """The operands of a part of the batch axes, or None if some array cannot be divided so."""
    if operands.mask is not None and operands.mask.arrays:
        return None
    slices = [*part, *(slice(0, n) for n in plan.batch[len(part) :])]

    def of_part(x: Any) -> Any:
        index, missing = [], len(slices) - x.ndim + 2
        for size, full, s in zip(x.shape[:-2], plan.batch[missing:], slices[missing:], strict=True):
            heads = full // size  # of a group
            if size > 1 and (s.start % heads or s.stop % heads):
                raise IndexError
            index.append(slice(s.start // heads, s.stop // heads) if size > 1 else slice(None))
        return x[tuple(index)]

    try:
        return _mapped(operands, of_part)
    except IndexError:
        return None


def _mapped(operands: Operands, function: Callable[[Any], Any]) -> Operands:
    """The operands with ``function(array)`` in place of each array that the pass reads."""

    def of(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(of, x))
        return x if x is None or isinstance(x, float) else function(x)

    names = ("query", "key", "value", "bias", "multiplier", "nonfinite")
    return operands._replace(**{name: of(getattr(operands, name)) for name in names})


def _as_numpy(plan: Plan, operands: Operands) -> tuple[Plan, Operands]:
    """The same call with NumPy arrays. They share memory if the dtype is that of the computation."""
    if plan.library == "numpy":
        return plan, operands
    np: Any = importlib.import_module("array_api_compat.numpy")
    dtype = numpy_dtype(plan.xp, plan.compute)
    frame = plan.frame.replaced(xp=np, device="cpu")
    numpy_plan = plan.replaced(frame=frame, library="numpy", dtype=dtype, compute=dtype)
    return numpy_plan, _mapped(operands, partial(_numpy_view, plan))


def _numpy_view(plan: Plan, x: Any) -> Any:
    """An operand as a NumPy array. It shares memory if the dtype is that of the computation."""
    if x is None or isinstance(x, float):
        return x
    if plan.library == "torch":
        # `force`: the tensor may need a gradient, or have a sign that is not in memory yet.
        return (x if x.dtype == plan.compute else x.to(plan.compute)).numpy(force=True)
    return np.asarray(x, dtype=plan.compute)


def _to_library(plan: Plan, x: Any) -> Any:
    """A NumPy result as an array of the library of the call."""
    xp: Any = plan.xp
    if plan.library == "numpy":
        return x
    if plan.library == "torch":
        # PyTorch warns of memory that cannot be written.
        return xp.from_numpy(x if x.flags.writeable else x.copy())
    return jax_array(x, plan.device)


@dataclass(frozen=True, eq=False, repr=False)
class Task:
    """A block of rows of one batch element, and the part of the keys over which sums are taken."""

    operands: Operands  # of the batch element
    rows: Block
    part: Block


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
        # The references of sums, in the order in which they are tried. "first" is not tried with a
        # bias, which may fall with the distance of a key. Then the first tile says little about others.
        self.policies: tuple[str, ...] = ("largest",)
        if operands.nonfinite is None and self.order in (None, 1.0):
            self.policies = ("given", *(() if operands.bias is not None else ("first",)), "largest")
        # The mask of a task has numbers in place of the arrays that differ from task to task, so it
        # may be shift-invariant by itself. Only that of the whole call tells whether tasks share tiles.
        mask = operands.mask
        self.has_common_tiles = mask is not None and mask.is_shift_invariant
        self.visible_tiles: dict[Any, Any] = {}

    def state(self) -> Sums:
        """The state in columns. Without an order the weighted values are divided by the normalizer."""
        keep_freed_memory()
        plan = self.plan
        elements = list(np.ndindex(*plan.batch))
        # Under a causal mask the last rows take longest. So they come first.
        rows = blocks(0, plan.n_queries, self.row_size(len(elements)))[::-1]
        parts = self.parts(len(elements) * len(rows))
        shape = (*plan.batch, plan.n_queries)
        states = [_empty_state(plan, shape, self.order) for _ in parts]

        def compute(task: tuple[Index, Block, int]) -> None:
            index, block, i = task
            item = self.item(index, block, parts[i])
            tried = (self.relative_to(policy, item) for policy in self.policies)
            accurate = next(sums for sums in tried if sums is not None)
            for array, field in zip(states[i], accurate, strict=True):
                if array is not None:
                    take(array[index], block, -2)[...] = field

        run(compute, [(index, r, i) for index in elements for r in rows for i in range(len(parts))])
        if len(states) == 1:
            return states[0]
        merged = reduce(lambda a, b: merge_columns(Ops(np), a, b, self.order), states)
        if self.order is None:
            return merged._replace(weighted_value=output_of_columns(np, merged))
        return merged

    def item(self, index: Index, rows: Block, part: Block) -> Task:
        batch, mask = self.plan.batch, self.operands.mask
        operands = _mapped(self.operands, lambda x: _element_of(x, batch, index))
        if mask is not None:
            operands = operands._replace(mask=mask.element(batch, index))
        return Task(operands, rows, part)

    def row_size(self, n_elements: int) -> int:
        """The number of queries of a block: fewer if there would be too few blocks for the threads."""
        size = BLOCKS.numpy_large_rows if self.has_large_blocks() else BLOCKS.numpy_rows
        # Two blocks for each thread, as the blocks under a mask take different times.
        while (
            size >= BLOCKS.numpy_rows and n_elements * -(-self.plan.n_queries // size) < 2 * n_threads()
        ):
            size = max(size // 2, 1)
        return size

    def has_large_blocks(self) -> bool:
        """Whether large blocks of queries save time: not if they share few keys, as under a window."""
        mask, frame = self.operands.mask, self.plan.frame
        if not has_fast_exponential():
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

    def scaled_rows(self, item: Task, unit: float) -> Any:
        """The queries whose products with the keys are the logits, divided by a unit."""
        multiplier: Any = item.operands.multiplier
        if not isinstance(multiplier, float):
            multiplier = take(multiplier, item.rows, -2)
        query = take(item.operands.query, item.rows, -2)
        return np.multiply(query, multiplier / unit, dtype=self.plan.compute)

    def relative_to(self, policy: str, item: Task) -> Sums | None:
        """The state of an item by a policy of the reference; None if sums of the first tile are bad.

        "given" stands for 0. If sums become inaccurate only in a later tile, another constant would
        hardly be better. Then the result is the state by the policy "largest".
        """
        plan, is_moving, (_, key, value, bias, *_) = self.plan, policy == "largest", item.operands
        ops = TileOps(
            is_moving=is_moving,
            # Without a wide bias, the first tile decides.
            are_wide=(bias is not None and are_wide(take(bias, item.rows, -2))) or None,
            has_peaks=self.relative_to_maximum and not is_moving,
        )
        unit, softcap = ops.unit, plan.softcap
        query = self.scaled_rows(item, unit if softcap is None else softcap)
        cap = None if softcap is None else softcap / unit
        sums = _empty_state(plan, item.rows[1:], self.order)
        if policy == "given":
            sums = sums._replace(maximum=None)
        peak, is_unseen = np.zeros_like(sums.normalizer), np.full(sums.normalizer.shape, True)
        is_first = are_some_unseen = True
        for rows, columns, hidden in self.tiles(item):
            # No variable holds what is added, so that the next tile gets its memory.
            added = partial(self.added, item, rows, columns, unit)
            k = take(key, columns, -2)
            s, _ = logits(ops, query[rows], k, cap, added(), hidden or None)
            v = None if value is None else take(value, columns, -2)
            state = sums.map(operator.itemgetter(rows))
            for old, x in zip(state, absorb(ops, state, s, v, self.order, policy), strict=True):
                if x is not old:
                    old[...] = x
            if is_moving:
                continue
            if ops.peaks is not None:
                np.maximum(peak[rows], ops.peaks, out=peak[rows])
            if are_some_unseen:
                sees_none = np.full((len(s), 1), False)
                for part, visible in hidden:
                    sees_none[part] = ~np.any(visible, axis=-1, keepdims=True)
                is_unseen[rows] &= sees_none
                are_some_unseen = bool(is_unseen.any())
            # Where logits are far apart, sums are likely to overflow in some later tile.
            if (is_first or ops.are_wide) and not _are_accurate(sums, is_unseen):
                return None if is_first else self.relative_to("largest", item)
            is_first = False
        if is_moving:
            return self.state_of(sums, sums.normalizer if self.order is None else None)
        reference = 0.0 if sums.maximum is None else sums.maximum * unit
        reference = np.where(is_unseen, 0.0, reference).astype(plan.compute, copy=False)
        is_exact = np.max(np.abs(reference)) * np.finfo(plan.compute).eps < _MAX_EXPONENT_ERROR
        if not is_exact or not _are_accurate(sums, is_unseen):
            return self.relative_to("largest", item)
        if sums.weighted_score is not None:
            np.multiply(sums.weighted_score, unit, out=sums.weighted_score)
        # The largest weight is e^(maximum − reference), which gives the maximum without a pass for it.
        factor = peak if self.relative_to_maximum else sums.normalizer
        return self.state_of(sums._replace(maximum=reference), factor)

    def state_of(self, sums: Sums, factor: Any) -> Sums:
        """The state of sums, which may be overwritten.

        If there is a `factor`, the sums are divided by it, and are relative to a reference that is
        higher by its logarithm.
        """
        reference, normalizer, value, moment = sums
        is_empty = (normalizer == 0) | (reference == -math.inf)
        if is_empty.any():
            normalizer[is_empty] = 0.0
            reference[is_empty] = -math.inf
            if moment is not None:
                moment[is_empty] = 0.0
            if value is not None:
                value[is_empty[:, 0]] = 0.0  # 0 · ∞ of an infinite value is NaN
            factor = None if factor is None else np.where(is_empty, 1.0, factor)
        if factor is not None:
            log_factor = np.log(factor)
            if moment is not None:
                moment = (moment - log_factor * normalizer) / factor
            normalizer = normalizer / factor
            reference = reference + log_factor
            if value is not None:
                value /= factor
        # Rounding may bring the moment above 0, and then the entropy of a single key below 0.
        moment = np.minimum(moment, 0.0) if self.order == 1 else moment
        return Sums(reference, normalizer, value, moment)

    def all_logits(self, item: Task, columns: Block | None = None, lowest: float = -math.inf) -> Any:
        """The logits of some keys, `lowest` where one is hidden; by default of all that are seen."""
        ops, mask = TileOps(is_moving=True, are_wide=None, has_peaks=False), item.operands.mask
        frame, cap = self.plan.frame, self.plan.softcap
        if columns is None:
            columns = schedule.reach(frame, mask, item.rows)
        key = take(item.operands.key, columns, -2)
        added = added_logits(self.plan, item.operands, item.rows, columns)
        s, _ = logits(ops, self.scaled_rows(item, 1.0 if cap is None else cap), key, cap, added)
        for first, size in schedule.partly_visible(frame, mask, item.rows, columns):
            visible = cast(Mask, mask).block(frame, item.rows, (first, size))
            part = s[:, first - columns[0] : first - columns[0] + size]
            hide(part, [(slice(None), visible)], lowest)
        return s

    def tiles(self, item: Task) -> Iterator[tuple[slice, Block, Hidden]]:
        """Yield tiles: some rows of the item, a block of keys, and what is hidden."""
        # A tile of fewer rows has room for more columns.
        column_size = BLOCKS.numpy_columns * max(1, BLOCKS.numpy_rows // item.rows[1])
        sizes, mask = (BLOCKS.numpy_rows, column_size), item.operands.mask
        visible = partial(self.visible, mask)
        return schedule.tiles(self.plan.frame, mask, item.rows, item.part, sizes, visible)

    def visible(self, mask: Any, rows: Block, columns: Block) -> Any:
        frame = self.plan.frame
        if not self.has_common_tiles:
            return mask.block(frame, rows, columns)
        # Tiles on the same diagonal hide the same keys.
        tile_key = (rows[0] - columns[0], rows[1], columns[1])
        if tile_key not in self.visible_tiles:
            self.visible_tiles[tile_key] = mask.block(frame, rows, columns)
        return self.visible_tiles[tile_key]

    def added(self, item: Task, rows: slice, columns: Block, unit: float) -> Any:
        """What is added to the products of a tile, in units of so many nats; None if nothing is."""
        block = (item.rows[0] + rows.start, rows.stop - rows.start)
        added = added_logits(self.plan, item.operands, block, columns)
        return added if added is None or unit == 1.0 else added / unit


def _are_accurate(sums: Sums, is_empty: Any) -> bool:
    """Whether all sums are in the accurate range. Rows that have seen no key are ignored."""
    z, moment = sums.normalizer, sums.weighted_score
    # The rows that have seen no key are looked at only if there may be one.
    least, most = np.minimum.reduce(z, axis=None), np.maximum.reduce(z, axis=None)
    if not (least >= _MIN_SUM and most <= _MAX_SUM):
        are_within = (is_empty & (z == 0)) | ((z >= _MIN_SUM) & (z <= _MAX_SUM))
        if not np.all(are_within):
            return False
    # A sum is finite if all numbers are. If it overflows, they are computed with care.
    values = sums.weighted_value
    return (moment is None or bool(np.all(np.isfinite(moment)))) and (
        values is None or math.isfinite(np.add.reduce(values, axis=None))
    )


def _in_rows(x: Any, dtype: Any) -> Any:
    """`x` in a dtype, with rows that are contiguous in memory, as the BLAS needs them."""
    if x is None:
        return None
    x = np.asarray(x, dtype=dtype)
    is_in_rows = x.strides[-1] == x.itemsize and x.strides[-2] >= x.shape[-1] * x.itemsize
    return x if is_in_rows else np.ascontiguousarray(x)


def _element_of(x: Any, batch: Index, index: Index) -> Any:
    """A batch element of `x`, whose batch axes may broadcast or be grouped heads."""
    shape = x.shape[:-2]
    # i · size // full_size is 0 in an axis of length 1, and the number of the group of a head.
    pairs = zip(shape, batch[len(batch) - len(shape) :], index[len(batch) - len(shape) :], strict=True)
    return x[tuple(i * size // full_size for size, full_size, i in pairs)]
