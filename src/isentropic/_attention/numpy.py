"""The tile pass for NumPy. Its only elementwise operation on a tile is exp.

The exponents of a row are relative to a bound b = ‖q‖ · max‖k‖ ≥ max q·k instead of the maximum. The
product of queries and keys subtracts b by one more column: −b on the queries and 1 on the keys. The
product with the values computes the sums of the rows by a column of 1 on the values. So a tile takes
a product, an exp and a product. A row whose sum relative to the bound is too small to be accurate is
computed again relative to its maximum, which takes one more product.

Threads compute the blocks of rows of all batch elements.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from isentropic._attention.generic import AttentionState, with_batch_axes
from isentropic._attention.plan import Operands, Plan
from isentropic._entropy import entropy_of_moments, partition
from isentropic._loops import BLOCKS, Block, keep_freed_memory, take
from isentropic._namespace import Array, numpy_dtype
from isentropic._numerics import divide_or_zero, grouped_matmul
from isentropic._threads import run
from isentropic.masks import Mask

# A sum relative to the bound is accurate from here on: for up to 10^10 keys it loses less to underflow
# (of weights below 1e-38 in float32) than to rounding.
_MIN_SUM = 1e-20
# The largest rounding error in an exponent from the subtraction of the bound.
_MAX_EXPONENT_ERROR = 1e-3

Index = tuple[int, ...]


def why_not(plan: Plan, order: float | None, is_named: bool) -> str | None:
    """The reason why the NumPy pass does not compute a call, or None."""
    if plan.has_bias or plan.softcap is not None:
        return "it has no bias and no soft cap"
    if plan.block_size is not None:
        return "it chooses the sizes of its tiles"
    if not is_named and plan.frame.is_compiling:
        return "torch.compile traces the call"
    if not plan.is_on_host:
        return "some array is on another device, traced or differentiated"
    if _is_small(plan):
        return None
    if order not in (None, 1.0):
        return "for so many logits it computes only Shannon's entropy"
    if not is_named and not _is_large(plan):
        return "there are too few queries for it to be faster"
    return None


def _is_small(plan: Plan) -> bool:
    """Whether there are so few logits that they are computed at once, without tiles."""
    return plan.n_queries * plan.n_keys * math.prod(plan.batch) <= BLOCKS.numpy_untiled_logits


def _is_large(plan: Plan) -> bool:
    """Whether the call is large enough to repay copies, threads and a loop over batch elements."""
    size = plan.n_queries * plan.n_keys
    return (
        plan.n_queries >= BLOCKS.numpy_min_queries
        and size >= BLOCKS.numpy_min_head_logits
        and size * math.prod(plan.batch) >= BLOCKS.numpy_min_logits
    )


def output(plan: Plan, operands: Operands) -> Array:
    """The attention output, (..., L, Ev)."""
    if _is_small(plan):
        return _to_library(plan, _output_at_once(plan, operands))
    return _to_library(plan, _Pass(*_as_numpy(plan, operands), divide=True).state().weighted_value)


def state(plan: Plan, operands: Operands, order: float, relative_to_maximum: bool) -> AttentionState:
    """The state in columns, with the moment of an order.

    Unless `relative_to_maximum`, the sums of large calls are relative to a bound of the maximum.
    """
    fields = _numpy_state(plan, operands, order, relative_to_maximum)
    return AttentionState(*(_to_library(plan, x) for x in fields))


def entropy(plan: Plan, operands: Operands, order: float) -> Array:
    """Rényi's entropies, (..., L)."""
    import numpy as np

    fields = _numpy_state(plan, operands, order, False)
    z, moment = fields.normalizer[..., 0], fields.weighted_score[..., 0]
    if order == 1 and np.count_nonzero(z) == z.size:
        return _to_library(plan, np.log(z) - moment / z)
    return _to_library(plan, entropy_of_moments(cast(Any, np), z, moment, order, "renyi"))


def _numpy_state(
    plan: Plan, operands: Operands, order: float, relative_to_maximum: bool
) -> AttentionState:
    if _is_small(plan):
        return _state_at_once(plan, operands, order)
    numpy_plan, operands = _as_numpy(plan, operands)
    return _Pass(numpy_plan, operands, relative_to_maximum=relative_to_maximum, score=True).state()


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
    # The weights of a row that sees no key are e^{−∞} = 0.
    maximum = np.maximum.reduce(s, axis=-1, keepdims=True, initial=np.finfo(s.dtype).min)
    np.exp(np.subtract(s, maximum, out=s), out=s)
    normalizer = np.add.reduce(s, axis=-1, keepdims=True)
    if np.count_nonzero(normalizer) == normalizer.size:
        return grouped_matmul(np, np.divide(s, normalizer, out=s), value)
    return divide_or_zero(np, grouped_matmul(np, s, value), normalizer)


def _state_at_once(plan: Plan, operands: Operands, order: float) -> AttentionState:
    import numpy as np

    s, value = _logits_at_once(plan, operands)
    if order == 1:
        maximum, weight, normalizer, moment = _shannon_partition(s)
    else:
        maximum, weight, normalizer, moment = partition(np, s, order)
    weighted = None if value is None else grouped_matmul(np, weight, value)
    shape = (*plan.batch, plan.n_queries)
    fields: tuple[Any, ...] = (maximum, normalizer, weighted, moment)
    return AttentionState(*(with_batch_axes(np, x, shape) for x in fields))


def _shannon_partition(s: Any) -> tuple[Any, Any, Any, Any]:
    """`partition` for the order 1, in the memory of the logits."""
    import numpy as np

    maximum, lowest = np.maximum.reduce(s, axis=-1, keepdims=True), np.finfo(s.dtype).min
    x = np.subtract(s, np.maximum(maximum, lowest), out=s)
    np.maximum(x, lowest, out=x)  # −∞ times its weight, 0, is NaN
    weight = np.exp(x)
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

    query, key, value, _, mask, multiplier, _, nonfinite = operands
    rows = None if nonfinite is None else (view(nonfinite[0]), view(nonfinite[1]))
    views = (view(query), view(key), view(value), None, mask, view(multiplier), None, rows)
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
        x = x.detach() if x.dtype == plan.compute else x.detach().to(plan.compute)
        return x.resolve_neg().numpy()
    return np.asarray(x, dtype=numpy_dtype(plan.xp, plan.compute))


def _to_library(plan: Plan, x: Any) -> Any:
    """A NumPy result as an array of the library of the call."""
    xp: Any = plan.xp
    if x is None or plan.library == "numpy":
        return x
    if plan.library == "torch":
        return xp.from_numpy(x if x.flags.writeable else x.copy())
    return xp.asarray(x, device=plan.device)


@dataclass(eq=False, repr=False)
class _Keys:
    """Copies of the keys and values of one batch element, with a column of ones each."""

    keys: Any  # (S, E + 1)
    values: Any  # (S, Ev + 1); (S, 1) without values
    bound: Any  # the largest norm of the keys
    bound_is_loose: bool = False  # whether sums relative to the bound were too small for some row


class _Sums(NamedTuple):
    """Sums over the keys for each row, with exponents x."""

    largest: Any  # max x, if the state is to be relative to the maximum
    normalizer: Any  # Σ eˣ
    value: Any  # Σ eˣ v
    moment: Any  # Σ eˣ x, if the score is needed


@dataclass(eq=False, repr=False)
class _Pass:
    plan: Plan
    operands: Operands
    relative_to_maximum: bool = False
    score: bool = False  # compute the weighted score
    divide: bool = False  # divide the weighted values by the normalizer

    def state(self) -> AttentionState:
        import numpy as np

        keep_freed_memory()
        plan, operands = self.plan, self.operands
        shape, dtype = (*plan.batch, plan.n_queries), plan.compute
        n_values = 0 if operands.value is None else operands.value.shape[-1]
        result = AttentionState(
            np.empty((*shape, 1), dtype),
            np.empty((*shape, 1), dtype),
            np.empty((*shape, n_values), plan.dtype if self.divide else dtype),
            np.empty((*shape, 1), dtype) if self.score else None,
        )
        width = plan.n_keys * (operands.query.shape[-1] + n_values + 2)
        elements_per_copy = max(1, BLOCKS.numpy_copied_numbers // width)
        elements = list(np.ndindex(*plan.batch))
        row_size = BLOCKS.numpy_rows
        rows = [(i, min(row_size, shape[-1] - i)) for i in range(0, shape[-1], row_size)]
        copies: dict[Any, _Keys] = {}
        for i in range(0, len(elements), elements_per_copy):
            part = elements[i : i + elements_per_copy]
            # Batch elements with the same keys and values (broadcast axes, grouped heads) share a copy.
            index_of = {self.copy_key(index): index for index in part}
            copies = {copy_key: copies[copy_key] for copy_key in index_of if copy_key in copies}

            def copy(copy_key: Any, copies: Any = copies, index_of: Any = index_of) -> None:
                copies[copy_key] = self.copy(index_of[copy_key])

            run(copy, [copy_key for copy_key in index_of if copy_key not in copies])

            def block(item: tuple[Index, Block], copies: dict[Any, _Keys] = copies) -> None:
                index, (start, size) = item
                fields = self.block(index, (start, size), copies[self.copy_key(index)])
                for array, field in zip(result, fields, strict=True):
                    if array is not None:
                        array[index][start : start + size] = field

            run(block, [(index, r) for index in part for r in rows])
        return result if operands.value is not None else result._replace(weighted_value=None)

    def copy_key(self, index: Index) -> Any:
        """A key that is equal for batch elements with the same keys and values."""
        plan, operands = self.plan, self.operands
        arrays = [operands.key] if operands.value is None else [operands.key, operands.value]
        positions = tuple(_element_of(x, plan.batch, index) for x in arrays)
        return positions if operands.nonfinite is None else index

    def copy(self, index: Index) -> _Keys:
        import numpy as np

        plan, operands = self.plan, self.operands
        key = operands.key[_element_of(operands.key, plan.batch, index)]
        keys = np.empty((key.shape[0], key.shape[1] + 1), plan.compute)
        keys[:, :-1] = key
        keys[:, -1] = 1.0
        bound = _norms(keys[:, :-1]).max()
        if operands.nonfinite is not None:
            keys[:, -1] += _broadcast(plan, operands.nonfinite[1])[index][0]
        n_values = 0 if operands.value is None else operands.value.shape[-1]
        values = np.empty((key.shape[0], n_values + 1), keys.dtype)
        if operands.value is not None:
            values[:, :-1] = operands.value[_element_of(operands.value, plan.batch, index)]
        values[:, -1] = 1.0
        return _Keys(keys, values, bound)

    def block(self, index: Index, rows: Block, keys: _Keys) -> AttentionState:
        """The state of a block of rows of one batch element."""
        import numpy as np

        plan, operands, (start, size) = self.plan, self.operands, rows
        mask = None if operands.mask is None else operands.mask.element(plan.batch, index)
        query = self.scaled_rows(index, rows)
        nan_rows: Any = 0.0
        if operands.nonfinite is not None:
            nan_rows = _broadcast(plan, operands.nonfinite[0])[index][start : start + size, 0]
        q = np.empty((size, query.shape[-1] + 1), query.dtype)
        q[:, :-1] = query

        bound = _norms(query) * keys.bound
        # The product cannot subtract a large bound without a large rounding error in the exponents.
        bound_is_loose = (
            keys.bound_is_loose or not np.max(bound) * np.finfo(q.dtype).eps < _MAX_EXPONENT_ERROR
        )
        if not bound_is_loose:
            q[:, -1] = nan_rows - bound
            sums = self.sums(size, self.tiles(mask, rows, q, keys.keys), keys.values)
            if np.all(sums.normalizer >= _MIN_SUM):
                return self.state_of(sums, bound)
        q[:, -1] = nan_rows
        maximum = np.full(size, -math.inf, q.dtype)
        for _, s in self.tiles(mask, rows, q, keys.keys):
            np.maximum(maximum, np.max(s, axis=-1), out=maximum)
        is_empty = maximum <= np.finfo(q.dtype).min
        if not bound_is_loose:
            keys.bound_is_loose = bool(np.any(~is_empty & ~(sums.normalizer >= _MIN_SUM)))
        maximum[is_empty] = 0.0

        def exponents() -> Iterator[tuple[Block, Any]]:
            for columns, s in self.tiles(mask, rows, q, keys.keys):
                yield columns, np.subtract(s, maximum[:, None], out=s)

        return self.state_of(self.sums(size, exponents(), keys.values), maximum)

    def scaled_rows(self, index: Index, rows: Block) -> Any:
        plan, operands, (start, size) = self.plan, self.operands, rows
        query = _broadcast(plan, operands.query)[index][start : start + size]
        query = query.astype(plan.compute, copy=False)
        if isinstance(operands.multiplier, float):
            return query * operands.multiplier
        return query * _broadcast(plan, take(operands.multiplier, rows, -2))[index]

    def tiles(self, mask: Mask | None, rows: Block, q: Any, keys: Any) -> Iterator[tuple[Block, Any]]:
        """Yield the key blocks that some query sees, with ``q @ keys``, the lowest number if hidden.

        The lowest number replaces −∞, whose product with the weight 0 would be NaN.
        """
        import numpy as np

        frame = self.plan.frame
        first, end = (0, frame.n_keys) if mask is None else mask.reach(frame, rows)
        fully_visible = (0, frame.n_keys) if mask is None else mask.fully_visible(frame, rows)
        first, end = max(first, 0), min(end, frame.n_keys)
        column_size = BLOCKS.numpy_columns
        buffer = np.empty(rows[1] * column_size, q.dtype)
        for start in range(first, end, column_size):
            columns = (start, min(column_size, end - start))
            visible = None
            if mask is not None and not (
                fully_visible[0] <= start and start + columns[1] <= fully_visible[1]
            ):
                visible = cast(Any, mask.block(frame, rows, columns))
                if not visible.any():
                    continue
            s = buffer[: rows[1] * columns[1]].reshape(rows[1], columns[1])
            np.matmul(q, keys[start : start + columns[1]].T, out=s)
            if visible is not None:
                np.copyto(s, np.finfo(s.dtype).min, where=~visible)
            yield columns, s

    def sums(self, size: int, tiles: Iterator[tuple[Block, Any]], values: Any) -> _Sums:
        import numpy as np

        dtype = values.dtype
        total = np.zeros((size, values.shape[-1]), dtype)
        part = np.empty_like(total)
        largest = np.full(size, np.finfo(dtype).min, dtype)
        moment = np.zeros(size, dtype)
        buffer = np.empty(size * BLOCKS.numpy_columns, dtype) if self.score else None
        for (start, width), s in tiles:
            if self.relative_to_maximum:
                np.maximum(largest, np.max(s, axis=-1), out=largest)
            p = s if buffer is None else buffer[: size * width].reshape(size, width)
            np.exp(s, out=p)
            if buffer is not None:
                # Infinite keys can make an exponent −∞, whose product with the weight 0 is NaN.
                moment += np.vecdot(p, np.maximum(s, np.finfo(dtype).min, out=s))
            total += np.matmul(p, values[start : start + width], out=part)
        return _Sums(largest, total[:, -1], total[:, :-1], moment)

    def state_of(self, sums: _Sums, reference: Any) -> AttentionState:
        """The state in columns, from sums relative to the `reference`."""
        import numpy as np

        largest, normalizer, value, moment = sums
        is_empty = normalizer == 0
        value[is_empty] = 0.0  # 0 · ∞ of an infinite value is NaN
        if self.divide:
            value /= np.where(is_empty, 1.0, normalizer)[:, None]
        if self.relative_to_maximum:
            largest[is_empty] = 0.0
            factor = np.exp(-largest)
            moment = np.minimum(factor * (moment - largest * normalizer), 0.0)
            value *= factor[:, None]
            normalizer = factor * normalizer
            reference = np.where(np.isposinf(reference), reference, reference + largest)
            reference[is_empty] = -math.inf
        elif self.score:
            # Relative to the log-normalizer the moment is minus the entropy, which is at least 0.
            total = np.where(is_empty, 1.0, normalizer)
            moment = np.minimum(moment / total - np.log(total), 0.0)
            value /= total[:, None]
            reference = reference + np.log(total)
            normalizer = np.where(is_empty, normalizer, 1.0)
        return AttentionState(reference[:, None], normalizer[:, None], value, moment[:, None])


def _norms(x: Any) -> Any:
    """The Euclidean norms of the rows."""
    import numpy as np

    return np.sqrt(np.vecdot(x, x))


def _broadcast(plan: Plan, x: Any) -> Any:
    """A view of `x` (..., rows, columns) with the batch and head axes of all arguments."""
    import numpy as np

    return np.broadcast_to(x, (*plan.batch, *x.shape[-2:]))


def _element_of(x: Any, batch: Index, index: Index) -> Index:
    """The index of a batch element in `x`, whose batch axes may broadcast or be grouped heads."""
    shape = x.shape[:-2]
    pairs = zip(shape, batch[len(batch) - len(shape) :], index[len(batch) - len(shape) :], strict=True)
    return tuple(i * size // full_size for size, full_size, i in pairs)
