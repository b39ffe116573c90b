"""Which tiles a pass computes: the one place that skips what nobody sees.

A mask tells for a block of queries outside of which range none of them sees a key, and which keys all
of them see (`Mask.reach`, `Mask.fully_visible`). It knows that from numbers, not from arrays. In a loop
of JAX the ranges are traced, and the loops of `isentropic._loops` skip by them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from isentropic._loops import Block, blocks, clip_reach
from isentropic._numerics import lift
from isentropic.masks import Frame, Mask

# Rows of a tile, and which of its keys each of them sees. All other rows see all keys.
Hidden = Sequence[tuple[slice, Any]]


def reach(frame: Frame, mask: Mask | None, rows: Block) -> Block:
    """A block of keys that covers all keys that any query of a block of rows sees.

    It has at least one key. It covers all keys if the rows are traced.
    """
    if mask is None or _is_traced(frame, rows):
        return 0, frame.n_keys
    first, end = clip_reach(mask.reach(frame, rows), frame.n_keys)
    return first, end - first


def reach_of_all(sides: Sequence[tuple[Frame, Mask | None]], rows: Block) -> Block:
    """A block of keys that covers those that any query of a block of rows sees in any of the calls."""
    reaches = [reach(frame, mask, rows) for frame, mask in sides]
    first = min(start for start, _ in reaches)
    return first, max(map(sum, reaches)) - first


def partly_visible(frame: Frame, mask: Mask | None, rows: Block, columns: Block) -> list[Block]:
    """The parts of a block of keys that some query of the rows may not see."""
    if mask is None:
        return []
    start, end = columns[0], sum(columns)
    first, last = mask.fully_visible(frame, rows)
    first, last = max(first, start), min(last, end)
    parts = [(start, end)] if first >= last else [(start, first), (last, end)]
    return [(a, b - a) for a, b in parts if a < b]


def is_hidden(frame: Frame, mask: Mask | None, rows: Block, columns: Block) -> bool:
    """Whether it is known that no query of a tile sees a key of it."""
    if mask is None or _is_traced(frame, rows) or _is_traced(frame, columns):
        return False
    first, size = reach(frame, mask, rows)
    return bool(first + size <= columns[0] or sum(columns) <= first)


def visible_keys(frame: Frame, mask: Mask | None, rows: Block, columns: Block, ndim: int) -> Any:
    """Which keys of a tile each query sees, with `ndim` axes; None if all are known to see all."""
    if mask is None:
        return None
    if not (_is_traced(frame, rows) or _is_traced(frame, columns)):
        first, end = mask.fully_visible(frame, rows)
        if first <= columns[0] and sum(columns) <= end:
            return None
    return lift(mask.block(frame, rows, columns), ndim)


def _is_traced(frame: Frame, block: Block) -> bool:
    return frame.is_compiling or not isinstance(block[0], int)


class RowRange(NamedTuple):
    """Some rows, a range outside of which none sees a key, and one of keys that all see."""

    rows: Block
    reach: tuple[int, int]
    fully_visible: tuple[int, int]


def tiles(
    frame: Frame,
    mask: Mask | None,
    rows: Block,
    keys: Block,
    sizes: tuple[int, int],
    visible: Callable[[Block, Block], Any],
) -> Iterator[tuple[slice, Block, Hidden]]:
    """Yield the tiles of a block of queries: some of its rows, a block of keys, and what is hidden.

    `sizes` are those of ranges of rows, of which a tile has those that see some of its keys, and of
    blocks of keys. ``visible(rows, columns)`` are the visible keys of a tile, as NumPy's booleans.
    """
    first, end, ranges = keys[0], sum(keys), []
    if mask is not None:
        parts = blocks(rows[0], sum(rows), sizes[0])
        ranges = [RowRange(x, mask.reach(frame, x), mask.fully_visible(frame, x)) for x in parts]
        first = max(first, min(x.reach[0] for x in ranges))
        end = min(end, max(x.reach[1] for x in ranges))
    columns = [(i, min(sizes[1], end - i)) for i in range(first, end, sizes[1])]
    if len(ranges) > 1 and columns:
        # Under a causal mask these blocks end where the keys end that a range sees. The shorter one
        # comes last, because the first tile shows how far apart the exponents are.
        shorter, *others = blocks(first, end, sizes[1])
        columns = [*others, shorter]
    for block in columns:
        if mask is None:
            yield slice(0, rows[1]), block, ()
            continue
        seeing, hidden = _rows_and_hidden(ranges, block, visible)
        if seeing.start < seeing.stop:
            yield seeing, block, hidden


def _rows_and_hidden(
    ranges: list[RowRange], columns: Block, visible: Callable[[Block, Block], Any]
) -> tuple[slice, Hidden]:
    """The rows from the first to the last range that sees a key, and what they do not see."""
    start, end = columns[0], sum(columns)
    found = []
    for part in ranges:
        seen = None
        if not (part.fully_visible[0] <= start and end <= part.fully_visible[1]):
            # One number stands for a tile of which nothing is seen.
            seen = np.zeros((1, 1), bool)
            if part.reach[0] < end and start < part.reach[1]:
                seen = visible(part.rows, columns)
            if seen.all():  # as in most tiles of a causal mask that is an array
                seen = None
        first = part.rows[0] - ranges[0].rows[0]
        found.append((slice(first, first + part.rows[1]), seen))
    seeing = [i for i, (_, seen) in enumerate(found) if seen is None or seen.any()]
    if not seeing:
        return slice(0, 0), []
    # Rows between two ranges that see keys stay, because the rows of a tile are a slice.
    found = found[seeing[0] : seeing[-1] + 1]
    rows = slice(found[0][0].start, found[-1][0].stop)
    hidden = [
        (slice(part.start - rows.start, part.stop - rows.start), seen)
        for part, seen in found
        if seen is not None
    ]
    return rows, hidden
