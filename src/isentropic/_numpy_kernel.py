"""The tile pass for NumPy, in which exp is the only elementwise pass over a tile.

The exponents are relative to a bound of each row, b = ‖q‖ · max‖k‖ ≥ max q·k, instead of its
maximum. Its subtraction is done by the product itself, as one more column: −b on the queries and 1
on the keys. So is the sum over a row, by a column of 1 on the values. What is left of a tile is
product, exp, product. Rows whose sum comes out too small to be exact relative to the bound are done
again relative to their maximum, which takes one more product.

The blocks of rows of all batch elements go over threads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from isentropic._loops import Block, keep_freed_memory, take
from isentropic._state import AttentionState
from isentropic._threads import run
from isentropic._tiles import Problem
from isentropic.masks import Mask

# A tile that stays in the second-level cache of a core, with its operands.
_ROWS, _COLUMNS = 256, 512
# Numbers in the augmented keys and values that are made at once.
_PREPARED = 2**22
# A sum relative to the bound is exact from here on: less is lost in it by underflow (single weights
# below 1e-38 in float32) than by rounding, for up to 10^10 keys.
_SMALLEST = 1e-20
# What the subtraction of the bound may add to an exponent.
_ERROR = 1e-3

Index = tuple[int, ...]


def numpy_output(problem: Problem) -> Any:
    """The attention output, (..., L, Ev)."""
    return _Pass(problem, divide=True).state().weighted_value


def numpy_state(problem: Problem, *, maximum: bool = True) -> AttentionState:
    """The state with the moment of order 1, as columns; without `maximum` relative to a bound of it."""
    return _Pass(problem, maximum=maximum, score=True).state()


@dataclass(eq=False, repr=False)
class _Keys:
    """Keys and values of one batch element, with their columns of ones."""

    keys: Any  # (S, E + 1)
    values: Any  # (S, Ev + 1), only the ones where there are no values
    bound: Any  # of the norms of the keys
    is_loose: bool = False


class _Sums(NamedTuple):
    """Over the keys, with exponents x of each row."""

    largest: Any  # x, where the maximum is asked for
    normalizer: Any  # Σ eˣ
    value: Any  # Σ eˣ v
    moment: Any  # Σ eˣ x, where the score is asked for


@dataclass(eq=False, repr=False)
class _Pass:
    problem: Problem
    maximum: bool = False
    score: bool = False
    divide: bool = False  # the values by the normalizer

    def state(self) -> AttentionState:
        import numpy as np

        keep_freed_memory()
        problem = self.problem
        shape, dtype = (*problem.batch, problem.n_queries), problem.compute
        n_values = 0 if problem.value is None else problem.value.shape[-1]
        result = AttentionState(
            np.empty((*shape, 1), dtype),
            np.empty((*shape, 1), dtype),
            np.empty((*shape, n_values), problem.dtype if self.divide else dtype),
            np.empty((*shape, 1), dtype) if self.score else None,
        )
        width = problem.n_keys * (problem.query.shape[-1] + n_values + 2)
        together = max(1, _PREPARED // width)
        elements = list(np.ndindex(*problem.batch))
        rows = [(i, min(_ROWS, shape[-1] - i)) for i in range(0, shape[-1], _ROWS)]
        prepared: dict[Any, _Keys] = {}
        for i in range(0, len(elements), together):
            part = elements[i : i + together]
            # Elements that share keys and values (broadcast, or grouped heads) share the copy.
            wanted = {self.own(index): index for index in part}
            prepared = {own: prepared[own] for own in wanted if own in prepared}

            def prepare(own: Any, prepared: Any = prepared, wanted: Any = wanted) -> None:
                prepared[own] = self.prepare(wanted[own])

            run(prepare, [own for own in wanted if own not in prepared])

            def block(item: tuple[Index, Block], prepared: dict[Any, _Keys] = prepared) -> None:
                index, (start, size) = item
                fields = self.block(index, (start, size), prepared[self.own(index)])
                for whole, field in zip(result, fields, strict=True):
                    if whole is not None:
                        whole[index][start : start + size] = field

            run(block, [(index, r) for index in part for r in rows])
        return result if problem.value is not None else result._replace(weighted_value=None)

    def own(self, index: Index) -> Any:
        """Which keys and values the queries of a batch element meet."""
        problem = self.problem
        arrays = [problem.key] if problem.value is None else [problem.key, problem.value]
        whose = tuple(_element_of(x, problem.batch, index) for x in arrays)
        return whose if problem.poison is None else index

    def prepare(self, index: Index) -> _Keys:
        import numpy as np

        problem = self.problem
        key = problem.key[_element_of(problem.key, problem.batch, index)]
        keys = np.empty((key.shape[0], key.shape[1] + 1), problem.compute)
        keys[:, :-1] = key
        keys[:, -1] = 1.0
        bound = _norms(keys[:, :-1]).max()
        if problem.poison is not None:
            keys[:, -1] += _broadcast(problem, problem.poison[1])[index][0]
        n_values = 0 if problem.value is None else problem.value.shape[-1]
        values = np.empty((key.shape[0], n_values + 1), keys.dtype)
        if problem.value is not None:
            values[:, :-1] = problem.value[_element_of(problem.value, problem.batch, index)]
        values[:, -1] = 1.0
        return _Keys(keys, values, bound)

    def block(self, index: Index, rows: Block, keys: _Keys) -> AttentionState:
        """The state of a block of rows of one batch element."""
        import numpy as np

        problem, (start, size) = self.problem, rows
        mask = None if problem.mask is None else problem.mask.element(problem.batch, index)
        query = self.scaled_rows(index, rows)
        poison: Any = 0.0
        if problem.poison is not None:
            poison = _broadcast(problem, problem.poison[0])[index][start : start + size, 0]
        q = np.empty((size, query.shape[-1] + 1), query.dtype)
        q[:, :-1] = query

        bound = _norms(query) * keys.bound
        # Large ones cannot be subtracted in the product without an error in the exponents.
        is_loose = keys.is_loose or not np.max(bound) * np.finfo(q.dtype).eps < _ERROR
        if not is_loose:
            q[:, -1] = poison - bound
            sums = self.sums(size, self.tiles(mask, rows, q, keys.keys), keys.values)
            if np.all(sums.normalizer >= _SMALLEST):
                return self.state_of(sums, bound)
        q[:, -1] = poison
        maximum = np.full(size, -math.inf, q.dtype)
        for _, s in self.tiles(mask, rows, q, keys.keys):
            np.maximum(maximum, np.max(s, axis=-1), out=maximum)
        is_empty = maximum <= np.finfo(q.dtype).min
        if not is_loose:
            keys.is_loose = bool(np.any(~is_empty & ~(sums.normalizer >= _SMALLEST)))
        maximum[is_empty] = 0.0

        def exponents() -> Iterator[tuple[Block, Any]]:
            for columns, s in self.tiles(mask, rows, q, keys.keys):
                yield columns, np.subtract(s, maximum[:, None], out=s)

        return self.state_of(self.sums(size, exponents(), keys.values), maximum)

    def scaled_rows(self, index: Index, rows: Block) -> Any:
        problem, (start, size) = self.problem, rows
        query = _broadcast(problem, problem.query)[index][start : start + size]
        query = query.astype(problem.compute, copy=False)
        if isinstance(problem.multiplier, float):
            return query * problem.multiplier
        return query * _broadcast(problem, take(problem.multiplier, rows, -2))[index]

    def tiles(self, mask: Mask | None, rows: Block, q: Any, keys: Any) -> Iterator[tuple[Block, Any]]:
        """The key blocks that some query sees, and ``q @ keys`` where it does, else the lowest number.

        That is not −∞, whose product with its weight 0 is NaN.
        """
        import numpy as np

        frame = self.problem.frame
        first, end = (0, frame.n_keys) if mask is None else mask.reach(frame, rows)
        core = (0, frame.n_keys) if mask is None else mask.core(frame, rows)
        first, end = max(first, 0), min(end, frame.n_keys)
        buffer = np.empty(rows[1] * _COLUMNS, q.dtype)
        for start in range(first, end, _COLUMNS):
            columns = (start, min(_COLUMNS, end - start))
            visible = None
            if mask is not None and not (core[0] <= start and start + columns[1] <= core[1]):
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
        buffer = np.empty(size * _COLUMNS, dtype) if self.score else None
        for (start, width), s in tiles:
            if self.maximum:
                np.maximum(largest, np.max(s, axis=-1), out=largest)
            p = s if buffer is None else buffer[: size * width].reshape(size, width)
            np.exp(s, out=p)
            if buffer is not None:
                # Where keys are infinite an exponent can be −∞.
                moment += np.vecdot(p, np.maximum(s, np.finfo(dtype).min, out=s))
            total += np.matmul(p, values[start : start + width], out=part)
        return _Sums(largest, total[:, -1], total[:, :-1], moment)

    def state_of(self, sums: _Sums, reference: Any) -> AttentionState:
        """The state, as columns, from sums relative to the `reference`."""
        import numpy as np

        largest, normalizer, value, moment = sums
        is_empty = normalizer == 0
        value[is_empty] = 0.0  # also where a value is infinite
        if self.divide:
            value /= np.where(is_empty, 1.0, normalizer)[:, None]
        if self.maximum:
            largest[is_empty] = 0.0
            factor = np.exp(-largest)
            moment = np.minimum(factor * (moment - largest * normalizer), 0.0)
            value *= factor[:, None]
            normalizer = factor * normalizer
            reference = np.where(np.isposinf(reference), reference, reference + largest)
            reference[is_empty] = -math.inf
        elif self.score:
            # Relative to the log-normalizer the moment is minus the entropy, which is not below 0.
            total = np.where(is_empty, 1.0, normalizer)
            moment = np.minimum(moment / total - np.log(total), 0.0)
            value /= total[:, None]
            reference = reference + np.log(total)
            normalizer = np.where(is_empty, normalizer, 1.0)
        return AttentionState(reference[:, None], normalizer[:, None], value, moment[:, None])


def _norms(x: Any) -> Any:
    """The lengths of rows."""
    import numpy as np

    return np.sqrt(np.vecdot(x, x))


def _broadcast(problem: Problem, x: Any) -> Any:
    """`x` (..., rows, columns) with the batch and head axes of all arguments, as a view."""
    import numpy as np

    return np.broadcast_to(x, (*problem.batch, *x.shape[-2:]))


def _element_of(x: Any, batch: Index, index: Index) -> Index:
    """Where in the batch axes of `x`, which broadcast or are grouped heads, an element is."""
    shape = x.shape[:-2]
    pairs = zip(shape, batch[len(batch) - len(shape) :], index[len(batch) - len(shape) :], strict=True)
    return tuple(i * own // whole for own, whole, i in pairs)
