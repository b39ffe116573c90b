"""Masks: which keys a query sees, without an L×S array.

A mask is a small immutable value. ``&`` and ``|`` combine masks with masks and with boolean arrays,
and ``~`` is the complement: ``~masks.window(0)`` hides each query's own position. Write the mask
first, because the arrays of some libraries do not accept a mask on the right of an operator:

>>> from isentropic import masks
>>> import numpy as np
>>> sliding = masks.causal() & masks.window(2)
>>> sliding.visible_count(5, 5)
array([1, 2, 3, 3, 3])

Positions: query i of L has the position ``i + offset`` among the keys 0 … S − 1. The default offset,
``S − L``, aligns the ends: the last query has the position of the last key, as in decoding with a
cache.

Arrays in a mask (offsets, lengths, ids) have the batch and head axes ``...`` of the attention. For a
query of shape (B, H, L, E), an array with one length per sequence has the shape (B, 1).
"""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple, cast, overload

import numpy as np

from isentropic._checks import (
    check_broadcastable,
    check_choice,
    check_count,
    check_ndim,
    described_dtype,
    is_array,
    is_integer,
    plain_integer,
    type_error,
    value_error,
)
from isentropic._loops import (
    BLOCKS,
    Block,
    fold,
    is_known_true,
    is_readable,
    larger,
    map_blocks,
    smaller,
    take,
)
from isentropic._namespace import (
    Array,
    ArrayT,
    Sliced,
    common_device,
    default_dtype,
    is_symbolic,
    is_torch,
    isdtype,
    namespace,
    present,
)
from isentropic._numerics import align, clip, lift, quietly
from isentropic._pytrees import Node
from isentropic._records import Record

__all__ = ["Mask", "causal", "packed", "padding", "segments", "window"]

# All kinds of masks, by the words of a description.
_KINDS: dict[str, type[Mask]] = {}
# More than any number of keys. The sum of offset, window and position stays within int32.
_MAX_POSITION = 2**29
# Larger integers have the effect of this one, which fits in int64.
_MAX_INTEGER = 2**62
_Interval = tuple[Array, Array]
Span = tuple[Any, Any]


class Mask(Node, Record, ABC):
    """The keys, of S, that each of L queries sees. The functions of this module make masks.

    A mask of your own is a subclass with annotated fields, which becomes a frozen dataclass, and with
    one method, ``block(self, frame, rows, columns)``. It returns the boolean array of a tile,
    broadcastable to (..., rows, columns), with functions of ``frame.xp``. ``frame.positions(rows)`` are
    the indices of the queries of the tile, ``frame.positions(columns)`` those of its keys, and
    ``frame.n_queries`` and ``frame.n_keys`` are L and S. Arrays in fields have the batch and head axes.

    In JAX and PyTorch a mask is a *pytree*. It is equal and hashable as `isentropic.laws.Law` says.
    Its leaves are its arrays. Masks without arrays can be static arguments. A mask has no truth value:
    ``bool(mask)`` raises a `TypeError`.

    Examples
    --------
    >>> from isentropic import masks
    >>> mask = masks.causal() & masks.padding(3)
    >>> isinstance(mask, masks.Mask), mask.visible_count(5, 5)
    (True, array([1, 2, 3, 3, 3]))
    >>> others = mask & ~masks.window(0)  # no query sees its own position
    >>> others.visible_count(5, 5)
    array([0, 1, 2, 3, 3])

    Every second key before the query:

    >>> class Strided(masks.Mask):
    ...     step: int
    ...     def block(self, frame, rows, columns):
    ...         query = frame.positions(rows)[:, None] + (frame.n_keys - frame.n_queries)
    ...         return (query - frame.positions(columns)[None, :]) % self.step == 0
    >>> (masks.causal() & Strided(2)).visible_count(5, 5)
    array([1, 1, 2, 2, 3])
    """

    _argument = "mask"
    _word = ""  # of the class, in descriptions
    _own_axes = 0  # of its arrays, after the batch and head axes
    _reads_numbers = False  # whether the arrays of an element are ints, where they have no axes
    __array_ufunc__ = None  # `array & mask` of a NumPy array then calls `Mask.__rand__`

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not cls.__module__.startswith("isentropic."):
            # It checks the arguments. Our own classes are made by functions that check them.
            dataclass(frozen=True, eq=False, repr=False)(cls)
            # Those of `Record` remain, and the class may be made a dataclass again.
            del cls.__setattr__, cls.__delattr__
            cls._fields = tuple(field.name for field in fields(cast(Any, cls)))
            if taken := next((name for name in cls._fields if hasattr(Mask, name)), None):
                must = "have another name, as masks have an attribute of this name"
                raise type_error(f"{cls.__qualname__}.{taken}", must, "a field")
        # With the module, as a mask of a user may have the name of one of ours.
        cls._word = f"{cls.__module__}.{cls.__qualname__}"
        if cls._word in _KINDS:  # a function may make several classes of one name
            cls._word += f"#{len(_KINDS)}"
        _KINDS[cls._word] = cls

    def __repr__(self) -> str:
        return _call(type(self).__name__, **vars(self))

    @property
    def is_shift_invariant(self) -> bool:
        """Whether the mask depends on the difference of the positions of query and key alone."""
        return False

    def counts(self, frame: Frame) -> range | None:
        """`visible_count` if numbers alone determine it and it grows by 1 from query to query."""
        return None

    def check(self, batch: tuple[int, ...] | None, n_queries: int, n_keys: int) -> None:
        """Refuse arrays that do not fit attention of the shape ``batch + (n_queries, n_keys)``.

        A `batch` of None stands for any shape.
        """
        for name, x in vars(self).items():
            if isinstance(x, Mask):
                x.check(batch, n_queries, n_keys)
            elif x is not None and is_array(x):
                _check_per_sequence(name, x.shape, batch)

    @abstractmethod
    def block(self, frame: Frame, rows: Block, columns: Block) -> Array:
        """The boolean array of one tile, broadcastable to (..., rows, columns)."""

    @property
    def is_contiguous(self) -> bool:
        """Whether the visible keys of each query have no gaps between them."""
        return False

    def interval(self, frame: Frame, rows: Block) -> _Interval | None:
        """The range (first, end) of visible keys of each row, (..., rows); None if it may have gaps.

        Neither end decreases from row to row.
        """
        return None

    def reach(self, frame: Frame, rows: Block) -> Span:
        """A range (first, end) outside of which no row of the block sees a key.

        It depends on numbers in the mask, not on arrays, and may extend beyond the keys. Under JAX it
        is traced if the block is.
        """
        return 0, frame.n_keys

    def fully_visible(self, frame: Frame, rows: Block) -> Span:
        """A range (first, end) of keys that every row of the block sees. Like `reach` otherwise."""
        return 0, 0

    def with_arrays(self, arrays: Iterator[Array]) -> Mask:
        """The mask with other arrays, which are taken in the order of `arrays`."""
        return self._changed(lambda mask: mask.with_arrays(arrays), lambda x: next(arrays))

    def element(self, batch: tuple[int, ...], index: tuple[Any, ...]) -> Mask:
        """The mask of one element of the batch and head axes.

        Its parameters are integers or NumPy arrays. If the index consists of arrays, they are arrays of
        the library of the index.
        """
        return self._changed(
            lambda mask: mask.element(batch, index),
            lambda x: _element(x, batch, index, self._own_axes, self._reads_numbers),
        )

    def _changed(self, of_mask: Callable[[Mask], Mask], of_array: Callable[[Any], Any]) -> Mask:
        """The mask with other masks and arrays in its fields."""
        changes = {
            name: of_mask(x) if isinstance(x, Mask) else of_array(x) if is_array(x) else x
            for name, x in vars(self).items()
        }
        return self.replaced(**changes)

    @overload
    def visible_count(self, n_queries: int, n_keys: int, *, like: np.ndarray) -> np.ndarray: ...
    @overload
    def visible_count(self, n_queries: int, n_keys: int, *, like: Sliced[ArrayT]) -> ArrayT: ...
    @overload
    def visible_count(self, n_queries: int, n_keys: int, *, like: None = None) -> Any: ...
    @quietly
    def visible_count(self, n_queries: int, n_keys: int, *, like: Array | None = None) -> Any:
        """The number of keys that each query sees.

        Parameters
        ----------
        n_queries, n_keys : int
            L and S.
        like : array, optional
            An array whose library and device the result gets. The default is the library of the arrays
            in the mask, or NumPy if there are none.

        Returns
        -------
        array of integers, broadcastable to (..., L)
            Counts from 0 to S.

        Raises
        ------
        TypeError
            If a size is not an integer, or if `like` is of another library than the arrays of the mask.
        ValueError
            If a size is negative or beyond the integers of the library, or if an array of the mask does
            not fit the sizes.

        Examples
        --------
        >>> from isentropic import masks
        >>> masks.causal().visible_count(2, 5)
        array([4, 5])
        """
        if like is None:
            like = self.arrays[0] if self.arrays else np.empty(0)
        return self.count(self._frame(n_queries, n_keys, like))

    def _frame(self, n_queries: int, n_keys: int, like: Array) -> Frame:
        """The frame of given numbers, which are checked."""
        check_count("n_queries", n_queries, least=0)
        check_count("n_keys", n_keys, least=0)
        self.check(None, n_queries, n_keys)
        group = ("mask", self.arrays)
        xp, device = namespace(group, like=like), common_device(group, like=like)
        is_symbol = is_symbolic(n_queries) or is_symbolic(n_keys)
        frame = Frame(xp, device, n_queries, n_keys, is_compiling=is_symbol)
        for name, x in (("n_queries", n_queries), ("n_keys", n_keys)):
            # Positions have the default integers of the library, which are of 32 bits in JAX.
            if not is_symbol and x > xp.iinfo(frame.index_dtype).max:
                raise value_error(name, f"be within the range of {frame.index_dtype}", x)
        return frame

    @quietly
    def rows(self, rows: Iterable[int], n_queries: int, n_keys: int, *, like: Array) -> Array:
        """The boolean array (..., K, S) of K queries, in the library and on the device of `like`.

        Raises
        ------
        ValueError
            If a row is not in [0, L).
        """
        frame = self._frame(n_queries, n_keys, like)
        blocks = []
        for row in map(int, rows):
            if not 0 <= row < n_queries:
                raise value_error("rows", f"be in [0, {n_queries})", row)
            # The rows may be far apart, so each is a block of its own.
            x = self.block(frame, (row, 1), (0, n_keys))
            blocks.append(frame.xp.broadcast_to(x, (*x.shape[:-2], 1, n_keys)))
        if not blocks:
            return frame.xp.zeros((0, n_keys), dtype=frame.xp.bool, device=frame.device)
        return frame.xp.concat(blocks, axis=-2)

    def count(self, frame: Frame) -> Array:
        """`visible_count` for a given library and device. Takes O(L) memory."""
        xp, n_queries, n_keys = frame.xp, frame.n_queries, frame.n_keys
        interval = self.interval(frame, (0, n_queries))
        if interval is not None:
            first, end = interval
            # An interval may reach beyond the keys, and end before it begins.
            visible = clip(xp, end, max=n_keys) - clip(xp, first, min=0)
            return clip(xp, visible, min=0)
        # `fold` is for axes of a length above 0.
        if n_queries == 0 or n_keys == 0:
            return xp.zeros((n_queries,), dtype=frame.index_dtype, device=frame.device)

        block_size = n_keys if frame.is_compiling else BLOCKS.count_tile
        row_size = n_queries if frame.is_compiling else BLOCKS.count_tile

        def count_rows(rows: Block) -> tuple[Array]:
            def with_tile(count: Array | None, columns: Block) -> Array:
                seen = self.block(frame, rows, columns)
                # A tile may have axes of length 1, which a sum would count once.
                seen = xp.broadcast_to(seen, (*seen.shape[:-2], rows[1], columns[1]))
                # The array API does not sum booleans.
                here = xp.sum(xp.astype(seen, frame.index_dtype), axis=-1, keepdims=True)
                return here if count is None else count + here

            return (fold(xp, with_tile, n_keys, block_size),)

        (counts,) = map_blocks(xp, count_rows, n_queries, row_size)
        # They are columns, because `map_blocks` joins blocks of rows along axis −2.
        return counts[..., 0]

    def __bool__(self) -> bool:
        raise TypeError(
            "A mask is neither true nor false: combine masks by & and |, not `and` and `or`."
        )

    def __invert__(self) -> Mask:
        return _Not(self)

    def __and__(self, other: Mask | Array) -> Mask:
        return _and(self, as_mask(other))

    def __or__(self, other: Mask | Array) -> Mask:
        return _Or(self, as_mask(other))

    __rand__ = __and__
    __ror__ = __or__


class Frame(Record):
    """The library, the device and the numbers of queries and keys for which a mask is evaluated.

    If `is_compiling`, lengths may be symbolic, and one block covers all queries and keys.
    """

    xp: ModuleType
    device: Any
    n_queries: int
    n_keys: int
    is_compiling: bool = False

    @property
    def index_dtype(self) -> Any:
        return default_dtype(self.xp, "integral", self.device)

    def positions(self, block: Block) -> Array:
        start, size = block
        return self.xp.arange(size, dtype=self.index_dtype, device=self.device) + start

    def limited(self, shift: int) -> int:
        """A shift of positions that sees the same keys, and whose sum with a position fits in int32."""
        # From a position in 0 … L − 1, these shifts lead before the first key, and past the last one.
        return max(-self.n_queries, min(shift, self.n_keys))

    def index(self, x: Any) -> Any:
        """Integers per batch and head, (...), with a new last axis for the queries.

        They are at most `_MAX_POSITION`, so that sums with positions do not overflow.
        """
        xp, lowest, highest = self.xp, -_MAX_POSITION, _MAX_POSITION
        if is_torch(xp):  # which does not clip unsigned integers
            is_wrapped = xp.uint64 == x.dtype
            x = xp.astype(x, self.index_dtype)
            # Numbers beyond int64 become negative in it, although they mean positions past every key.
            x = xp.where(x < 0, highest, x) if is_wrapped else x
        else:
            bounds = xp.iinfo(x.dtype)
            # The bounds of `clip` have to be numbers of the dtype: int8 has no 2²⁹.
            lowest, highest = max(bounds.min, lowest), min(bounds.max, highest)
        return xp.astype(clip(xp, x, min=lowest, max=highest), self.index_dtype)[..., None]


def causal(offset: int | Array | None = None) -> Mask:
    """A query sees the keys up to its own position.

    ::

        L = 3, S = 5, offset = S − L = 2          L = S = 3

                 keys 0 1 2 3 4                    keys 0 1 2
        query 0       ■ ■ ■ · ·            query 0      ■ · ·
        query 1       ■ ■ ■ ■ ·            query 1      ■ ■ ·
        query 2       ■ ■ ■ ■ ■            query 2      ■ ■ ■

    Parameters
    ----------
    offset : int or array of int over the batch and head axes, optional
        The position of query 0 among the keys. With the default, S − L, the last query sees every key.
        0 is the top-left alignment of `torch.nn.functional.scaled_dot_product_attention`.

    Returns
    -------
    Mask

    Raises
    ------
    TypeError, ValueError
        If `offset` is not an integer or an array of integers.

    Examples
    --------
    >>> from isentropic import masks
    >>> masks.causal(offset=0).visible_count(3, 5)
    array([1, 2, 3])
    """
    return _Band(None, 0, _integers("offset", offset, optional=True))


def window(left: int | None, right: int | None = 0, *, offset: int | Array | None = None) -> Mask:
    """A query at position p sees the keys from p − left to p + right.

    ::

        left = 1, right = 0, L = S = 4

                 keys 0 1 2 3
        query 0       ■ · · ·
        query 1       ■ ■ · ·
        query 2       · ■ ■ ·
        query 3       · · ■ ■

    Parameters
    ----------
    left, right : int ≥ 0 or None
        The number of keys that a query sees before and after its own position. None is no bound.
    offset : int or array of int over the batch and head axes, optional
        The position of query 0 among the keys; S − L by default.

    Returns
    -------
    Mask

    Raises
    ------
    TypeError, ValueError
        If `left` or `right` is not an integer of at least 0, and as in `causal` for `offset`.

    Examples
    --------
    >>> from isentropic import masks
    >>> masks.window(1, 1).visible_count(4, 4)
    array([2, 3, 3, 2])
    """
    for name, x in (("left", left), ("right", right)):
        if x is not None:
            check_count(name, x, least=0)
    left, right = (None if x is None else min(plain_integer(x), _MAX_INTEGER) for x in (left, right))
    return _Band(left, right, _integers("offset", offset, optional=True))


def padding(lengths: int | Array, *, side: str = "right") -> Mask:
    """A query sees only the first (or the last) `lengths` keys: the rest is padding.

    Parameters
    ----------
    lengths : int or array of int over the batch and head axes
        The number of keys that are not padding, at least 0. Numbers above S count as S.
    side : {"right", "left"}
        The side on which the padding is.

    Returns
    -------
    Mask

    Raises
    ------
    TypeError
        If `lengths` is not an integer or an array of integers.
    ValueError
        If a length is negative and can be read, or if `side` is unknown.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import masks
    >>> masks.padding(np.array([2, 4])).visible_count(1, 4)
    array([[2],
           [4]])
    """
    check_choice("side", side, ("right", "left"))
    return _Padding(_integers("lengths", lengths), side)


def segments(ids: Array, query_ids: Array | None = None) -> Mask:
    """A query sees the keys of its own segment, for several sequences packed into one.

    Parameters
    ----------
    ids : array of int (..., S)
        The segment of each key; segments need not be contiguous.
    query_ids : array of int (..., L), optional
        The segment of each query. By default the queries are the last L of the S positions.

    Returns
    -------
    Mask

    Raises
    ------
    TypeError
        If an argument is not an array of integers.
    ValueError
        If an array is 0-d.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import masks
    >>> packed = masks.causal() & masks.segments(np.array([0, 0, 0, 1, 1]))
    >>> packed.visible_count(5, 5)
    array([1, 2, 3, 1, 2])
    """
    given = {"ids": ids} | present(query_ids=query_ids)
    for name, x in given.items():
        if not isdtype(namespace(**{name: x}), x.dtype, "integral"):
            raise type_error(name, "have an integer dtype", described_dtype(x.dtype))
    check_ndim(1, **given)
    return _Segments(ids, query_ids)


def packed(
    cu_seqlens: Array | Sequence[int], cu_seqlens_k: Array | Sequence[int] | None = None
) -> Mask:
    """A query sees the keys of its own sequence, for sequences side by side on the axis of tokens.

    ::

        cu_seqlens = [0, 2, 5], and causal

                 keys 0 1 2 3 4
        query 0       ■ · · · ·
        query 1       ■ ■ · · ·
        query 2       · · ■ · ·
        query 3       · · ■ ■ ·
        query 4       · · ■ ■ ■

    Parameters
    ----------
    cu_seqlens : array of int (B + 1,), or a sequence of ints
        Where the sequences begin, and where the last one ends: the cumulative lengths, from 0 to L, as
        FlashAttention and ``torch.nn.attention.varlen`` take them. A sequence may be empty. All batch
        elements and heads share them.
    cu_seqlens_k : array of int (B + 1,), or a sequence of ints, optional
        Those of the keys, from 0 to S. The default is that of the queries.

    Returns
    -------
    Mask
        ``&`` joins it with other masks. `causal` and `window` then have the positions of each sequence:
        its last query has the position of its last key. Those with an `offset` of their own keep the
        positions of the whole axis, and so do those beside a union with `packed` or its complement. Of
        two such masks the first one gives the positions.

    Raises
    ------
    TypeError
        If an argument is not of integers.
    ValueError
        If the numbers can be read and do not begin with 0, or fall, or if there are more sequences of
        keys than of queries, or fewer. When the mask is used, also if they do not end at L and at S.

    Notes
    -----
    A pass skips the tiles between sequences where it can read the numbers: in ints and in arrays in the
    host's memory. A sequence of ints is part of a compiled function of JAX, which then skips them too.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import masks
    >>> mask = masks.packed(np.array([0, 2, 5])) & masks.causal()
    >>> mask.visible_count(5, 5)
    array([1, 2, 1, 2, 3])

    Two sequences of which a cache has 3 and 4 keys, with 1 and 2 new queries:

    >>> (masks.packed([0, 1, 3], [0, 3, 7]) & masks.causal()).visible_count(3, 7)
    array([3, 3, 4])
    """
    starts = _starts("cu_seqlens", cu_seqlens)
    key_starts = None if cu_seqlens_k is None else _starts("cu_seqlens_k", cu_seqlens_k)
    if key_starts is not None and _size(starts) != _size(key_starts):
        must = f"have {_size(starts)} numbers, as `cu_seqlens` has"
        raise value_error("cu_seqlens_k", must, _size(key_starts))
    ends = (_last(starts), None if key_starts is None else _last(key_starts))
    return _Packed(starts, key_starts, *ends, None, None)


def _starts(name: str, x: Any) -> Any:
    """Check cumulative lengths, and return an array, or a tuple of Python's ints."""
    if isinstance(x, (list, tuple, range)):
        if not all(map(is_integer, x)):
            raise type_error(name, "be an array of integers, or a sequence of ints", x)
        x = tuple(map(plain_integer, x))
    elif not (is_array(x) and isdtype(namespace(**{name: x}), x.dtype, "integral")):
        kind = described_dtype(x.dtype) if is_array(x) else type(x).__name__
        raise type_error(name, "be an array of integers, or a sequence of ints", kind)
    elif x.ndim != 1:
        raise value_error(name, "have one axis", tuple(x.shape))
    if _size(x) < 1:
        raise value_error(name, "have at least one number, 0", x)
    numbers = numbers_of(x)
    if numbers is not None and (numbers[0] != 0 or any(a > b for a, b in pairwise(numbers))):
        raise value_error(name, "begin with 0 and not fall", list(numbers))
    return x


def _size(x: Any) -> int:
    return len(x) if isinstance(x, tuple) else x.shape[0]


def numbers_of(x: Any) -> Sequence[int] | None:
    """Python's integers, if they can be read without waiting for a device; else None."""
    if isinstance(x, tuple):
        return x
    # NumPy's arrays are what a pass in the host's memory makes of those of a mask.
    if not isinstance(x, np.ndarray) and not is_readable(namespace(x=x), x):
        return None
    return np.asarray(x).tolist()


def _last(x: Any) -> int | None:
    numbers = numbers_of(x)
    return None if numbers is None else numbers[-1]


def as_mask(x: Any, name: str = "mask") -> Mask:
    """`x` itself, or the mask of a boolean array."""
    if isinstance(x, Mask):
        return x
    if not is_array(x):
        must = "be a boolean array or a mask of isentropic.masks, such as masks.causal()"
        raise type_error(name, must, getattr(x, "__name__", type(x).__name__))
    xp = namespace(**{name: x})
    if not isdtype(xp, x.dtype, "bool"):
        must = "be boolean (True = attend; numbers to add to the logits are a `bias`) or a Mask"
        raise type_error(name, must, described_dtype(x.dtype))
    return _Dense(x)


def is_causal_alone(mask: Mask, n_queries: int, n_keys: int) -> bool:
    """Whether the mask is the plain causal one for as many queries as keys."""
    if not isinstance(mask, _Band) or mask.left is not None or mask.right != 0:
        return False
    # Only then the two alignments are the same. Kernels of libraries align top-left.
    return n_queries == n_keys and not mask.arrays and mask.offset in (None, 0)


def is_packed_alone(mask: Mask) -> bool:
    """Whether the mask is that of `packed`, alone or with the same bounds within each sequence."""
    return isinstance(mask, _Packed)


class _Contiguous(Mask):
    """A mask that is fully described by its interval."""

    @property
    def is_contiguous(self) -> bool:
        return True

    def block(self, frame: Frame, rows: Block, columns: Block) -> Array:
        first, end = self.interval(frame, rows)  # type: ignore[misc]
        keys = frame.positions(columns)
        first, end = first[..., None], end[..., None]
        return (lift(keys, first.ndim) >= first) & (lift(keys, end.ndim) < end)


class _Band(_Contiguous):
    """The mask of `causal` and `window`: `left` keys before the query to `right` keys after it."""

    left: int | None
    right: int | None
    offset: int | Array | None
    _reads_numbers = True

    def __repr__(self) -> str:
        is_causal = self.left is None and self.right == 0
        sides = () if is_causal else (self.left, self.right)
        return _call("causal" if is_causal else "window", *sides, offset=self.offset)

    @property
    def is_shift_invariant(self) -> bool:
        return not self.arrays

    def reach(self, frame: Frame, rows: Block) -> Span:
        # Neither end decreases, so the first row has the first key, and the last row the last one.
        return self._between(frame, rows, 0, rows[1] - 1, super().reach(frame, rows))

    def fully_visible(self, frame: Frame, rows: Block) -> Span:
        # The last row begins last, and the first row ends first.
        return self._between(frame, rows, rows[1] - 1, 0, super().fully_visible(frame, rows))

    def _between(self, frame: Frame, rows: Block, left_row: int, right_row: int, unknown: Span) -> Span:
        """The range from the first key of one row to the end of another; `unknown` if arrays decide."""
        if self.arrays:
            return unknown
        first_shift, end_shift = self._shifts(frame)
        # Where a block is traced, `rows[0]` is. So nothing here compares it.
        first = 0 if self.left is None else rows[0] + (left_row + first_shift)
        end = frame.n_keys if self.right is None else rows[0] + (right_row + end_shift)
        return first, end

    def _shifts(self, frame: Frame) -> tuple[int, int]:
        """The first key that query 0 sees, and the end of its keys, without regard to the ends."""
        offset: Any = frame.n_keys - frame.n_queries if self.offset is None else self.offset
        first, end = offset - (self.left or 0), offset + (self.right or 0) + 1
        numbers: tuple[Any, ...] = (self.left, self.right, self.offset)
        # Lengths may be symbolic. So they are compared only if a number requires it.
        if max([abs(x or 0) for x in numbers]) <= _MAX_POSITION:
            return first, end
        return frame.limited(first), frame.limited(end)

    def counts(self, frame: Frame) -> range | None:
        if self.arrays or frame.is_compiling or self.left is not None or self.right is None:
            return None
        _, first = self._shifts(frame)
        last = first + frame.n_queries - 1
        # Where the keys end, counts stay at 0 or at S.
        return range(first, last + 1) if first >= 0 and last <= frame.n_keys else None

    def interval(self, frame: Frame, rows: Block) -> _Interval:
        position = frame.positions(rows)
        if self.arrays:
            position = sum(align(position, frame.index(self.offset)))
            # `index` keeps offsets within ±2²⁹. So a window of more than 2³⁰ shows no further key.
            left, right = (min(x or 0, 2 * _MAX_POSITION) for x in (self.left, self.right))
            first_shift, end_shift = -left, right + 1
        else:
            first_shift, end_shift = self._shifts(frame)
        # Both ends get the axes of `position`, to which an array of offsets adds batch axes.
        first = position * 0 if self.left is None else position + first_shift
        end = position * 0 + frame.n_keys if self.right is None else position + end_shift
        return first, end


class _Padding(_Contiguous):
    """The mask of `padding`."""

    lengths: int | Array
    side: str
    _reads_numbers = True

    def __repr__(self) -> str:
        return _call("padding", self.lengths, side=self.side)

    def reach(self, frame: Frame, rows: Block) -> Span:
        if not isinstance(self.lengths, int):
            return super().reach(frame, rows)
        lengths = self._limited(frame)
        if self.side == "left":
            return frame.n_keys - lengths, frame.n_keys
        return 0, lengths

    def _limited(self, frame: Frame) -> int:
        assert isinstance(self.lengths, int)
        return self.lengths if self.lengths <= _MAX_POSITION else min(self.lengths, frame.n_keys)

    def fully_visible(self, frame: Frame, rows: Block) -> Span:
        return super().fully_visible(frame, rows) if self.arrays else self.reach(frame, rows)

    def interval(self, frame: Frame, rows: Block) -> _Interval:
        zero: Any = frame.positions(rows) * 0
        if self.arrays:
            zero, lengths = align(zero, frame.index(self.lengths))
        else:
            lengths = self._limited(frame)
        lengths = zero + lengths
        if self.side == "left":
            return frame.n_keys - lengths, zero + frame.n_keys
        return zero, lengths


class _Segments(Mask):
    """The mask of `segments`."""

    ids: Array
    query_ids: Array | None
    _own_axes = 1

    def __repr__(self) -> str:
        return _call("segments", self.ids, query_ids=self.query_ids)

    def check(self, batch: tuple[int, ...] | None, n_queries: int, n_keys: int) -> None:
        for name, n, item in (("ids", n_keys, "key"), ("query_ids", n_queries, "query")):
            x = getattr(self, name)
            if x is not None and x.shape[-1] != n:
                raise value_error(name, f"have a last dimension of {n}, one per {item}", x.shape)
            if x is not None:
                _check_per_sequence(name, x.shape, batch, n)
        # The first queries would be at positions before the first id.
        if self.query_ids is None and n_queries > n_keys:
            must = f"be given where there are more queries ({n_queries}) than keys ({n_keys})"
            raise value_error("query_ids", must, None)

    def block(self, frame: Frame, rows: Block, columns: Block) -> Array:
        queries = self.query_ids
        if queries is None:
            queries = self.ids[..., frame.n_keys - frame.n_queries :]
        row_ids, column_ids = take(queries, rows, -1), take(self.ids, columns, -1)
        row_ids, column_ids = align(row_ids[..., None], column_ids[..., None, :])
        return row_ids == column_ids


class _Packed(_Contiguous):
    """The mask of `packed`, with the bounds of a `_Band` within each sequence."""

    cu_seqlens: Array | tuple[int, ...]
    cu_seqlens_k: Array | tuple[int, ...] | None
    n_queries: int | None  # the last of the numbers, if they could be read
    n_keys: int | None
    left: int | None
    right: int | None
    _own_axes = 1

    def __repr__(self) -> str:
        both = (self.cu_seqlens, *(() if self.cu_seqlens_k is None else (self.cu_seqlens_k,)))
        text = _call("packed", *both)
        if self.left is None and self.right is None:
            return text
        return f"{text} & {_Band(self.left, self.right, None)}"

    @property
    def starts(self) -> tuple[Any, Any]:
        of_keys = self.cu_seqlens_k
        return self.cu_seqlens, self.cu_seqlens if of_keys is None else of_keys

    def check(self, batch: tuple[int, ...] | None, n_queries: int, n_keys: int) -> None:
        of_keys = self.n_queries if self.cu_seqlens_k is None else self.n_keys
        name = "cu_seqlens" if self.cu_seqlens_k is None else "cu_seqlens_k"
        pairs = (("cu_seqlens", "queries", self.n_queries, n_queries), (name, "keys", of_keys, n_keys))
        for argument, what, last, n in pairs:
            if last is not None and not is_symbolic(n) and last != n:
                must = f"end at the number of {what}, {n} (`masks.segments` takes ids of tokens)"
                raise value_error(argument, must, last)

    def within(self, band: _Band) -> _Packed:
        """With the bounds of a band, too."""
        left, right = (
            a if b is None else b if a is None else min(a, b)
            for a, b in ((self.left, band.left), (self.right, band.right))
        )
        return self.replaced(left=left, right=right)

    def interval(self, frame: Frame, rows: Block) -> _Interval:
        xp = frame.xp
        starts, key_starts = (
            xp.asarray(x, dtype=frame.index_dtype, device=frame.device)
            if isinstance(x, tuple)
            else xp.astype(x, frame.index_dtype, copy=False)
            for x in self.starts
        )
        # Plus the first start, which is 0. So with a batch axis of `torch.vmap` it is an array of its
        # own, as `searchsorted` of PyTorch wants it.
        position = frame.positions(rows) + starts[0]
        last = starts.shape[-1] - 2
        # Of sequences that begin at the same position, all but the last one are empty.
        index = xp.searchsorted(starts, position, side="right") - 1
        index = clip(xp, xp.astype(index, frame.index_dtype), min=0, max=max(last, 0))
        following = index + min(last + 1, 1)
        first, end = (
            xp.take(key_starts, index, axis=0),
            xp.take(key_starts, following, axis=0),
        )
        position = position + (end - xp.take(starts, following, axis=0))
        return _bounded(xp, self, position, first, end)

    def _interval_of(self, row: int) -> tuple[int, int] | None:
        """The interval of a row as numbers, if they can be read."""
        starts, key_starts = map(numbers_of, self.starts)
        if starts is None or key_starts is None or len(starts) < 2:
            return None
        index = min(max(bisect_right(starts, row) - 1, 0), len(starts) - 2)
        first, end = key_starts[index : index + 2]
        first, end = _bounded(None, self, row + end - starts[index + 1], first, end)
        return first, end

    def reach(self, frame: Frame, rows: Block) -> Span:
        # Neither end decreases, so the first row has the first key, and the last row the last one.
        return self._between(rows, 0, rows[1] - 1, super().reach(frame, rows))

    def fully_visible(self, frame: Frame, rows: Block) -> Span:
        return self._between(rows, rows[1] - 1, 0, super().fully_visible(frame, rows))

    def _between(self, rows: Block, left_row: int, right_row: int, unknown: Span) -> Span:
        if not isinstance(rows[0], int):
            return unknown
        left, right = (self._interval_of(rows[0] + row) for row in (left_row, right_row))
        return unknown if left is None or right is None else (left[0], right[1])


def _bounded(xp: Any, mask: _Packed, position: Any, first: Any, end: Any) -> tuple[Any, Any]:
    """The part from first to end that is near the position. Neither end leaves the part."""
    least, most = (min, max) if xp is None else (xp.minimum, xp.maximum)
    left, right = (None if x is None else min(x, _MAX_POSITION) for x in (mask.left, mask.right))
    low = first if left is None else least(most(first, position - left), end)
    return low, end if right is None else most(least(end, position + (right + 1)), first)


class _Dense(Mask):
    """The mask of a boolean array."""

    visible: Array
    _own_axes = 2

    def __repr__(self) -> str:
        return _shown(self.visible)

    def check(self, batch: tuple[int, ...] | None, n_queries: int, n_keys: int) -> None:
        _check_fits("mask", self.visible.shape, batch, n_queries, n_keys)

    def block(self, frame: Frame, rows: Block, columns: Block) -> Array:
        x = self.visible
        # A mask may have fewer axes, such as (S,). `take` leaves axes of length 1, which broadcast.
        return take(take(lift(x, 2), rows, -2), columns, -1)


class _Pair(Mask):
    """A combination of two masks."""

    first: Mask
    second: Mask

    @property
    def is_shift_invariant(self) -> bool:
        return self.first.is_shift_invariant and self.second.is_shift_invariant

    def _blocks(self, *tile: Any) -> tuple[Array, ...]:
        return align(self.first.block(*tile), self.second.block(*tile))


class _And(_Pair):
    def __repr__(self) -> str:
        return f"{self.first} & {self.second}"

    def block(self, frame: Frame, rows: Block, columns: Block) -> Array:
        a, b = self._blocks(frame, rows, columns)
        return a & b

    def count(self, frame: Frame) -> Array:
        for mask, other in ((self.first, self.second), (self.second, self.first)):
            if isinstance(other, _Not):  # of intervals, both terms take O(L) time
                seen, hidden = align(mask.count(frame), (mask & other.hidden).count(frame))
                return seen - hidden
        return super().count(frame)

    @property
    def is_contiguous(self) -> bool:
        return self.first.is_contiguous and self.second.is_contiguous

    def interval(self, frame: Frame, rows: Block) -> _Interval | None:
        a, b = self.first.interval(frame, rows), self.second.interval(frame, rows)
        if a is None or b is None:
            return None
        return frame.xp.maximum(*align(a[0], b[0])), frame.xp.minimum(*align(a[1], b[1]))

    def reach(self, frame: Frame, rows: Block) -> Span:
        return self._intersection(frame, *(x.reach(frame, rows) for x in (self.first, self.second)))

    def fully_visible(self, frame: Frame, rows: Block) -> Span:
        parts = (self.first, self.second)
        return self._intersection(frame, *(x.fully_visible(frame, rows) for x in parts))

    def _intersection(self, frame: Frame, a: Span, b: Span) -> Span:
        return larger(frame.xp, a[0], b[0]), smaller(frame.xp, a[1], b[1])


class _Or(_Pair):
    def __repr__(self) -> str:
        return f"({self.first} | {self.second})"

    def block(self, frame: Frame, rows: Block, columns: Block) -> Array:
        a, b = self._blocks(frame, rows, columns)
        return a | b

    def reach(self, frame: Frame, rows: Block) -> Span:
        a, b = self.first.reach(frame, rows), self.second.reach(frame, rows)
        # Between the keys of both there may be a gap, so this is a bound, and there is no `interval`.
        return smaller(frame.xp, a[0], b[0]), larger(frame.xp, a[1], b[1])


class _Not(Mask):
    """The complement: the keys of `hidden` are hidden, and all others are seen."""

    hidden: Mask

    def __repr__(self) -> str:
        # `~` binds more tightly than `&`. A union has parentheses of its own.
        return f"~({self.hidden})" if isinstance(self.hidden, _And) else f"~{self.hidden}"

    def __invert__(self) -> Mask:
        return self.hidden

    @property
    def is_shift_invariant(self) -> bool:
        return self.hidden.is_shift_invariant

    def block(self, frame: Frame, rows: Block, columns: Block) -> Array:
        return frame.xp.logical_not(self.hidden.block(frame, rows, columns))

    def count(self, frame: Frame) -> Array:
        return frame.n_keys - self.hidden.count(frame)


def _and(a: Mask, b: Mask) -> Mask:
    """Both masks. Beside packed sequences, bands have the positions of each sequence."""
    for mask, others in ((a, b), (b, a)):
        sequences = _sequences_of(mask)
        if sequences is None:
            continue
        if mask is sequences and isinstance(others, _Band) and others.offset is None:
            return sequences.within(others)
        return _And(mask, _in_sequences(others, sequences))
    return _And(a, b)


def _sequences_of(mask: Mask) -> _Packed | None:
    """The packed sequences of a mask, outside of which it hides all keys."""
    if isinstance(mask, _And):
        first = _sequences_of(mask.first)
        return _sequences_of(mask.second) if first is None else first
    return mask if isinstance(mask, _Packed) else None


def _in_sequences(mask: Mask, sequences: _Packed) -> Mask:
    """The mask with the positions of each sequence, for use where all other keys are hidden."""
    if isinstance(mask, _Band) and mask.offset is None:
        return sequences.replaced(left=mask.left, right=mask.right)
    return mask._changed(lambda x: _in_sequences(x, sequences), lambda x: x)


class Description(NamedTuple):
    """A mask in prefix notation, a word on each line, with placeholders for integers and arrays."""

    words: str
    numbers: list[int]
    arrays: list[Array]


def describe(mask: Mask | None) -> Description:
    """The description of a mask, or of no mask, from which `from_description` makes it again."""
    numbers: list[int] = []
    arrays: list[Array] = []

    def words(x: Any) -> list[str]:
        if isinstance(x, (Mask, tuple)):
            parts = [getattr(x, name) for name in x._fields] if isinstance(x, Mask) else x
            head = [x._word] if isinstance(x, Mask) else ["tuple", str(len(x))]
            return [*head, *(word for part in parts for word in words(part))]
        if x is None or isinstance(x, (str, float, bool)):
            return [f"float {float(x)!r}" if isinstance(x, float) else f"constant {x!r}"]
        is_number = not is_array(x)
        # Apart, because an operator of PyTorch has parameters for lists of one type each.
        (numbers if is_number else arrays).append(x)
        return ["number" if is_number else "array"]

    return Description("\n".join(words(mask)), numbers, arrays)


def from_description(description: Description) -> Mask | None:
    """The mask of a description."""
    words, numbers = iter(description.words.split("\n")), iter(description.numbers)
    arrays = iter(description.arrays)

    def part() -> Any:
        word = next(words)
        kind, _, rest = word.partition(" ")
        if kind == "float":  # which may be infinite, so no literal
            return float(rest)
        if kind == "constant":
            return ast.literal_eval(rest)
        if word == "tuple":
            return tuple(part() for _ in range(int(next(words))))
        if word in ("number", "array"):
            return next(numbers) if word == "number" else next(arrays)
        mask = _KINDS[word]
        return mask(**{name: part() for name in mask._fields})

    return part()


def _call(name: str, /, *arguments: Any, **options: Any) -> str:
    """The call that makes a mask, as text for its `repr`."""
    given = [f"{key}={_shown(x)}" for key, x in options.items() if x is not None]
    return f"{name}({', '.join([*map(_shown, arguments), *given])})"


def _shown(x: Any) -> str:
    return f"<array {tuple(x.shape)}>" if is_array(x) else repr(x)


def _element(
    x: Any, batch: tuple[int, ...], index: tuple[Any, ...], n_last: int, is_number: bool
) -> Any:
    """One batch element of an array that has `n_last` further axes, of NumPy or an int.

    If the index consists of arrays, it is an array of their library.
    """
    on_host = all(isinstance(i, int) for i in index)
    x = lift(np.asarray(x) if on_host else x, len(batch) + n_last)
    # Axes of length 1 broadcast. The index has no entries for the last axes, where `zip` ends.
    part = x[tuple(i if size > 1 else 0 for i, size in zip(index, x.shape, strict=False))]
    return int(part) if is_number and on_host else part


def _check_fits(name: str, shape: tuple[int, ...], batch: tuple[int, ...] | None, *last: int) -> None:
    leading = shape[: max(len(shape) - len(last), 0)]
    check_broadcastable(name, shape, (*(leading if batch is None else batch), *last))


def _check_per_sequence(
    name: str, shape: tuple[int, ...], batch: tuple[int, ...] | None, *last: int
) -> None:
    """Refuse arrays that do not fit, or that lack batch axes.

    An array of shape (B,) would broadcast to the heads, where one number per sequence may be meant.
    """
    _check_fits(name, shape, batch, *last)
    if batch is not None and 0 < len(shape) - len(last) < len(batch):
        one = ", ".join(["B", *["1"] * (len(batch) - 1), *map(str, last)])
        must = f"have an axis for each batch and head axis; one per sequence has the shape ({one})"
        raise value_error(name, must, shape)


def _integers(name: str, x: Any, *, optional: bool = False) -> Any:
    """Check and return an int or an array of an integer dtype, or None if `optional`."""
    if x is None and optional:
        return None
    is_length = name == "lengths"
    if is_integer(x):
        if is_length:
            check_count(name, x, least=0)
        return max(-_MAX_INTEGER, min(plain_integer(x), _MAX_INTEGER))
    if not hasattr(x, "dtype") or not isdtype(namespace(**{name: x}), x.dtype, "integral"):
        got = described_dtype(x.dtype) if hasattr(x, "dtype") else type(x).__name__
        # A padding mask of other libraries is the likely reason, and it needs no `padding` here.
        if is_length and "bool" in str(got):
            got = f"{got}: an array that is True for the keys to attend to is itself a `mask`"
        raise type_error(name, "be an integer or an array of an integer dtype", got)
    xp = namespace(**{name: x})
    is_signed = isdtype(xp, x.dtype, "signed integer")
    if is_length and is_signed and is_readable(xp, x) and is_known_true(xp, xp.any(x < 0)):
        raise value_error(name, "be at least 0", "an array with negative numbers")
    return x
