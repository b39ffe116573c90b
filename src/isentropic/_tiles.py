"""The pass over the tiles of attention, and the checks of its arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from isentropic._checks import (
    check_broadcastable,
    check_choice,
    check_count,
    check_flag,
    check_floating,
    check_ndim,
    check_real,
    common_shape,
    is_array,
    is_integer,
    plain_integer,
    type_error,
    value_error,
)
from isentropic._loops import (
    Block,
    clip_reach,
    fold,
    is_gpu,
    is_readable,
    is_seen,
    map_blocks,
    take,
    traces_lengths,
)
from isentropic._namespace import (
    Array,
    accumulator,
    device,
    is_jax,
    is_numpy,
    namespace,
    present,
    promoted,
)
from isentropic._numerics import lift
from isentropic._state import AttentionState, empty_state, merge_columns, output_of_columns, tile_state
from isentropic.laws._formulas import Law, check_law
from isentropic.masks import Frame, Mask, as_mask, causal, is_causal_alone

# Keys of a tile; and numbers in it, over all batch and head axes, which bounds the memory of a call.
# NumPy's are smaller, which each thread has several of, and those of a GPU larger, which needs much
# work at a time.
COLUMNS = 512
TILE_SIZE = 2**20
# Fewer queries would make slow products.
MIN_ROWS = 16
# What a caller may ask for: a backend by its name, or any but the generic one.
IMPLEMENTATIONS = (None, "generic", "native", "sdpa", "numpy", "jax", "torch")


@dataclass(eq=False, repr=False)
class Problem:
    """The checked arguments of one call. `tiles` gives what computes with them."""

    frame: Frame
    dtype: Any  # of the result
    compute: Any  # the dtype to compute in
    query: Array
    multiplier: float | Array  # of the queries, as (..., L, 1)
    lengths: Array | None  # the n of the law, (..., L), where it is not one number
    key: Array
    value: Array | None
    mask: Mask | None
    bias: Array | None
    softcap: float | None
    poison: tuple[Array, Array] | None  # of queries and keys: see `_shield`
    batch: tuple[int, ...]
    block_size: int | None
    score_width: int | None  # as in `prepare`

    @property
    def xp(self) -> ModuleType:
        return self.frame.xp

    @property
    def n_queries(self) -> int:
        return self.frame.n_queries

    @property
    def n_keys(self) -> int:
        return self.frame.n_keys

    def zeros(self, shape: tuple[int, ...], dtype: Any = None) -> Any:
        """What is returned where there is nothing to attend to."""
        dtype = self.dtype if dtype is None else dtype
        return self.xp.zeros((*self.batch, *shape), dtype=dtype, device=self.frame.device)

    def lengths_of_law(self, n_keys: Any) -> Array:
        """The n of the law where `n_keys` was given to it, (..., L) but for broadcasting."""
        return self.visible_lengths(n_keys) if self.lengths is None else self.lengths

    def visible_lengths(self, n_keys: Any = None) -> Array:
        """How many keys each query sees, or another n that was given, (..., L) but for broadcasting."""
        return visible_lengths(self.frame, self.compute, self.mask, n_keys, self.batch)

    @property
    def values(self) -> Array:
        assert self.value is not None
        return self.value

    @property
    def arrays(self) -> list[Array]:
        """All arrays of the problem that are not made from others."""
        of_mask = () if self.mask is None else self.mask.arrays
        own = (self.query, self.key, self.value, self.bias, self.multiplier)
        return [x for x in (*own, *of_mask) if x is not None and not isinstance(x, float)]

    @property
    def is_plain_causal(self) -> bool:
        mask = self.mask
        return mask is not None and is_causal_alone(mask, self.n_queries, self.n_keys)

    def tiles(self) -> Tiles:
        """The generic pass, with the scale in the queries."""
        query = self.xp.astype(self.query, self.compute, copy=False) * self.multiplier
        return Tiles(**(vars(self) | {"query": query, "multiplier": 1.0}))

    def added(self, rows: Block, columns: Block) -> Array:
        """What is added to the products of a tile: the bias, −∞ where a key is hidden."""
        return self._hidden(self._shift(rows, columns), rows, columns)

    def _hidden(self, s: Array, rows: Block, columns: Block) -> Array:
        """`s`, but −∞ where a key is hidden."""
        if self.mask is None:
            return s
        visible = lift(self.mask.block(self.frame, rows, columns), len(self.batch) + 2)
        return self.xp.where(visible, s, -math.inf)

    def _shift(self, rows: Block, columns: Block) -> Array:
        xp = self.xp
        shift = xp.zeros((), dtype=self.compute, device=self.frame.device)
        if self.bias is not None:
            shift = xp.astype(take(take(self.bias, rows, -2), columns, -1), self.compute)
        if self.poison is not None:
            of_queries, of_keys = self.poison
            shift = shift + (take(of_queries, rows, -2) + take(of_keys, columns, -1))
        return shift

    def reach(self, rows: Block) -> Block:
        """The block of the keys that some query of a block of rows sees; one key at least.

        All keys where the rows are traced.
        """
        if self.mask is None or self.frame.whole or not isinstance(rows[0], int):
            return 0, self.n_keys
        first, end = clip_reach(self.mask.reach(self.frame, rows), self.n_keys)
        return first, end - first

    @property
    def causal_poison(self) -> Array:
        """NaN for queries that see a row that is not finite under plain causality, (..., L, 1)."""
        assert self.poison is not None
        of_queries, of_keys = self.poison
        # Not `cumulative_sum`: torch.compile warns about array_api_compat's.
        return of_queries + self.xp.cumsum(of_keys[..., 0, :], -1)[..., None]

    def four_axes(self, x: Array, *, whole: bool = False) -> Array:
        """`x` (..., rows, columns) as (batch, heads, rows, columns).

        With `whole` no axis is left to broadcast, but grouped heads stay grouped.
        """
        if len(self.batch) == 2 == x.ndim - 2 and (x.shape[:-2] == self.batch or not whole):
            return x
        *own, rows, columns = x.shape
        heads = own[-1] if own else 1
        if whole and self.batch and heads == 1:
            heads = self.batch[-1]
        if len(self.batch) <= 2 and not whole:
            return x[(None,) * (4 - x.ndim) + (...,)]
        x = self.xp.broadcast_to(x, (*self.batch[:-1], heads, rows, columns))
        return self.xp.reshape(x, (math.prod(self.batch[:-1]), heads, rows, columns))

    @property
    def tile_shape(self) -> tuple[int, int]:
        if self.frame.whole and self.block_size is None:
            return self.n_queries, self.n_keys
        width = max(self.score_width or 1, 1)
        size = TILE_SIZE
        if is_numpy(self.xp):
            size = TILE_SIZE // 4
        elif is_gpu(self.xp, self.frame.device):
            size = TILE_SIZE * 32
        columns = plain_integer(self.block_size or max(COLUMNS // width, 1))
        rows = size // max(math.prod(self.batch) * min(columns, self.n_keys) * width, 1)
        return max(rows, MIN_ROWS), columns


class Tiles(Problem):
    """The pass over the tiles of a problem, which is the same for all libraries.

    The queries have the scale in them.
    """

    def score(self, rows: Block, columns: Block) -> Array:
        xp = self.xp
        keys = xp.astype(take(self.key, columns, -2), self.compute, copy=False)
        return _grouped_matmul(xp, take(self.query, rows, -2), xp.matrix_transpose(keys))

    def logits(
        self, rows: Block, columns: Block, score: Callable[[Block, Block], Array] | None = None
    ) -> Array:
        """The logits of one tile, −∞ where a key is hidden."""
        xp = self.xp
        s = (score or self.score)(rows, columns)
        if self.softcap is not None:
            s = xp.tanh(s / self.softcap) * self.softcap
        s = s if self.bias is None and self.poison is None else s + self._shift(rows, columns)
        return self._hidden(s, rows, columns)

    def tile_state(
        self, logits: Array, columns: Block, order: float | None, maximum: Array | None = None
    ) -> AttentionState:
        """The state of a tile's keys, relative to their own maximum or a given one."""

        def weigh(weight: Array) -> Array:
            assert self.value is not None
            values = self.xp.astype(take(self.value, columns, -2), self.compute, copy=False)
            return _grouped_matmul(self.xp, weight, values)

        value = None if self.value is None else weigh
        return tile_state(self.xp, logits, value, order, maximum)

    def state(
        self, order: float | None, score: Callable[[Block, Block], Array] | None = None
    ) -> AttentionState:
        """The state over all keys, its fields kept as columns (..., L, 1)."""
        xp, shape = self.xp, (*self.batch, self.n_queries)
        if self.n_keys == 0:
            n_values = None if self.value is None else self.value.shape[-1]
            kind = {"dtype": self.compute, "device": self.frame.device}
            return empty_state(xp, shape, n_values, order, **kind)
        row_size, column_size = self.tile_shape

        def tile(rows: Block, columns: Block) -> AttentionState:
            return self.tile_state(self.logits(rows, columns, score), columns, order)

        def over_keys(rows: Block) -> AttentionState:
            return fold(
                xp,
                lambda columns: tile(rows, columns),
                lambda a, b: merge_columns(xp, a, b, order),
                self.n_keys,
                column_size,
                None if self.mask is None or self.frame.whole else self.mask.reach(self.frame, rows),
            )

        fields = map_blocks(xp, over_keys, self.n_queries, row_size, in_threads=True)
        return AttentionState(*[_widened(xp, x, shape) for x in fields])

    def output(self, score: Callable[[Block, Block], Array] | None = None) -> Array:
        """The attention output, (..., L, Ev)."""
        return output_of_columns(self.xp, self.state(None, score))

    def column_sums(self, state: AttentionState) -> Array:
        """The sum of the attention weights over the queries, (..., S)."""
        xp = self.xp
        log_normalizer = state.log_normalizer()[..., None]
        row_size, column_size = self.tile_shape

        def over_queries(columns: Block) -> tuple[Array]:
            def tile(rows: Block) -> Array:
                reference = take(log_normalizer, rows, -2)
                s = self.logits(rows, columns)
                hidden = (s == -math.inf) | (reference == -math.inf)
                weight = xp.exp(xp.where(hidden, 0.0, s - xp.where(hidden, 0.0, reference)))
                sums = xp.sum(xp.where(hidden, 0.0, weight), axis=-2)
                return sums[..., None]

            return (fold(xp, tile, lambda a, b: a + b, self.n_queries, row_size),)

        (sums,) = map_blocks(xp, over_queries, self.n_keys, column_size, in_threads=True)
        return sums[..., 0]


def prepare(
    query: Array,
    key: Array,
    value: Array | None,
    *,
    mask: Array | Mask | None = None,
    bias: Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    law: Law | None = None,
    n_keys: int | Array | None = None,
    softcap: float | None = None,
    enable_gqa: bool = False,
    implementation: str | None = None,
    block_size: int | None = None,
    score_width: int | None = None,
) -> Problem:
    """The problem of a call, all of whose arguments are checked.

    `score_width` is how many numbers a score needs on the way, where it is not a product of features.
    """
    check_flag(is_causal=is_causal, enable_gqa=enable_gqa)
    visible = None if mask is None else as_mask(mask)
    if is_causal:
        visible = causal() if visible is None else visible & causal()
    check_law(law, optional=True)
    arrays = {"query": query, "key": key} | present(value=value)
    optional = present(bias=bias, n_keys=array_or_none(n_keys))
    of_law = () if law is None else law.arrays
    groups = (("mask", () if visible is None else visible.arrays), ("law", of_law))
    xp = namespace(*groups, **arrays, **optional)
    place = "cpu" if is_numpy(xp) else device(*groups, **arrays, **optional)

    check_floating(xp, **arrays, **present(bias=bias))
    check_ndim(3 if enable_gqa else 2, **arrays)
    if score_width is None and key.shape[-1] != query.shape[-1]:
        raise value_error(
            "key", f"have the last dimension of `query`, {query.shape[-1]}", key.shape[-1]
        )
    if value is not None and value.shape[-2] != key.shape[-2]:
        raise value_error("value", f"have as many rows as `key`, {key.shape[-2]}", value.shape[-2])
    batch = _batch_shape(arrays, enable_gqa)
    n_queries, total = query.shape[-2], key.shape[-2]
    if visible is not None:
        visible.check(batch, n_queries, total)
    if bias is not None:
        check_broadcastable("bias", bias.shape, (*batch, n_queries, total))
        bias = lift(bias, len(batch) + 2)
    for name, x in (("scale", scale), ("softcap", softcap)):
        if x is not None:
            if name == "scale" and is_array(x):
                kind = f"{type(x).__name__}: an array is a law, `law=laws.Constant(scale)`"
                raise type_error(name, "be a real number", kind)
            check_real(name, x, above=0 if name == "softcap" else -math.inf)
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    if block_size is not None:
        check_count("block_size", block_size)

    dtype = promoted(xp, *arrays.values())
    compute = accumulator(xp, dtype)
    query, key = lift(query, len(batch) + 2), lift(key, len(batch) + 2)
    value = None if value is None else lift(value, len(batch) + 2)
    poison = None
    if visible is not None:
        query, key, value, poison = _shield(xp, compute, place, query, key, value)
    frame = Frame(xp, place, n_queries, total, whole=traces_lengths(xp))
    lengths = None
    multiplier: Any = 1 / math.sqrt(max(query.shape[-1], 1)) if scale is None else float(scale)
    common = common_length(frame, visible, n_keys)
    if common is not None and not of_law:
        multiplier *= 1.0 if law is None else law(common)
    elif law is not None or n_keys is not None:
        lengths = visible_lengths(frame, compute, visible, n_keys, batch)
        if law is not None:
            multiplier = factor(xp, law, lengths, (*batch, n_queries)) * multiplier
    return Problem(
        frame, dtype, compute, query, multiplier, lengths, key, value, visible, bias,
        None if softcap is None else float(softcap), poison, batch, block_size, score_width,
    )  # fmt: skip


def _batch_shape(arrays: dict[str, Array], enable_gqa: bool) -> tuple[int, ...]:
    """The shape of the axes ``...``, with the heads of the query where they are grouped."""
    shapes = {name: x.shape[:-2] for name, x in arrays.items()}
    if enable_gqa:
        heads = shapes["query"][-1]
        groups = shapes["key"][-1]
        if groups == 0 or heads % groups or heads < groups:
            must = f"have a number of heads (axis -3) that divides the {heads} of `query`"
            raise value_error("key", must, groups)
        if "value" in shapes and shapes["value"][-1] != groups:
            must = f"have the {groups} heads (axis -3) of `key`"
            raise value_error("value", must, shapes["value"][-1])
        shapes = {name: (*shape[:-1], heads) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        if _has_fewer_heads(shape, shapes["query"]):
            must = f"have the {shapes['query'][-1]} heads (axis -3) of `query`, or `enable_gqa` be true"
            raise value_error(name, must, shape[-1])
    return common_shape(**shapes)


def _has_fewer_heads(groups: tuple[int, ...], heads: tuple[int, ...]) -> bool:
    """Whether shapes that do not broadcast are those of grouped heads."""
    return bool(groups and heads) and 1 < groups[-1] < heads[-1] and heads[-1] % groups[-1] == 0


def _shield(
    xp: ModuleType, dtype: Any, device: Any, query: Array, key: Array, value: Array | None
) -> tuple[Array, Array, Array | None, tuple[Array, Array] | None]:
    """Arrays with 0 for NaN and ∞, and what to add to the logits to make up for it.

    A hidden key has weight 0, but 0 · NaN is NaN in the products, forward and backward. So rows that
    are not finite leave the products, and put NaN on the logits of those who see them instead.
    """
    if all(x is None or _is_seen_finite(xp, x) for x in (query, key, value)):
        return query, key, value, None
    zero = xp.zeros((1,), dtype=dtype, device=device)
    finite_query, finite_key = xp.isfinite(query), xp.isfinite(key)
    sound_keys = xp.all(finite_key, axis=-1)
    if value is not None:
        finite_value = xp.isfinite(value)
        sound_keys = sound_keys & xp.all(finite_value, axis=-1)
        value = xp.where(finite_value, value, 0.0)

    of_queries = xp.where(xp.all(finite_query, axis=-1, keepdims=True), zero, math.nan)
    of_keys = xp.where(sound_keys, zero, math.nan)[..., None, :]
    if of_keys.ndim > 2 and query.ndim > 2 and query.shape[-3] > of_keys.shape[-3] > 1:
        of_keys = xp.repeat(of_keys, query.shape[-3] // of_keys.shape[-3], axis=-3)
    query, key = xp.where(finite_query, query, 0.0), xp.where(finite_key, key, 0.0)
    return query, key, value, (of_queries, of_keys)


def _is_seen_finite(xp: ModuleType, x: Array) -> bool:
    """Whether it can be read that all of `x` is finite."""
    if not is_readable(xp, x):
        return False
    # A maximum is NaN where a number is, but not in JAX on a processor.
    if is_jax(xp) or math.prod(x.shape) == 0:
        return is_seen(xp, xp.all(xp.isfinite(x)))
    return is_seen(xp, xp.isfinite(xp.min(x)) & xp.isfinite(xp.max(x)))


def _grouped_matmul(xp: ModuleType, a: Array, b: Array) -> Array:
    """``a @ b`` where axis −3 of `b` may divide that of `a`: neighbouring heads share one product."""
    if a.ndim < 3 or b.ndim < 3 or not a.shape[-3] > b.shape[-3] > 1:
        return a @ b
    *batch, heads, rows, inner = a.shape
    groups = b.shape[-3]
    out = xp.reshape(a, (*batch, groups, heads // groups * rows, inner)) @ b
    return xp.reshape(out, (*out.shape[:-3], heads, rows, b.shape[-1]))


def _widened(xp: ModuleType, x: Any, shape: tuple[int, ...]) -> Any:
    """`x` with the batch axes of all arguments; itself where it has them (a view is read-only)."""
    if x is None or x.shape[:-1] == shape:
        return x
    return xp.broadcast_to(x, (*shape, x.shape[-1]))


def array_or_none(n_keys: Any) -> Array | None:
    # Floating scalars of NumPy are arrays too: its reductions give them where others give 0-d arrays.
    return None if is_integer(n_keys) or not hasattr(n_keys, "ndim") else n_keys


def common_length(frame: Frame, mask: Mask | None, n_keys: Any) -> int | None:
    """How many keys each query sees, where that is one number, and not symbolic."""
    if array_or_none(n_keys) is not None or (n_keys is None and mask is not None):
        return None
    n = frame.n_keys if n_keys is None else check_length(n_keys)
    return None if frame.whole else n


def visible_lengths(
    frame: Frame, dtype: Any, mask: Mask | None, n_keys: Any, batch: tuple[int, ...]
) -> Array:
    """How many keys each query sees, as floats broadcastable to (..., L), with as many axes."""
    if n_keys is None and mask is not None:
        return lift(frame.xp.astype(mask.count(frame), dtype), len(batch) + 1)
    n = frame.n_keys if n_keys is None else n_keys
    return given_lengths(frame.xp, frame.device, dtype, n, (*batch, frame.n_queries))


def given_lengths(
    xp: ModuleType, device: Any, dtype: Any, n_keys: Any, shape: tuple[int, ...]
) -> Array:
    """`n_keys` as floats broadcastable to `shape`, with as many axes."""
    if array_or_none(n_keys) is None:
        return xp.full((1,) * len(shape), check_length(n_keys), dtype=dtype, device=device)
    if not xp.isdtype(n_keys.dtype, ("integral", "real floating")):
        raise type_error("n_keys", "have an integer or floating-point dtype", n_keys.dtype)
    check_broadcastable("n_keys", n_keys.shape, shape)
    if is_readable(xp, n_keys) and is_seen(xp, xp.any(~(n_keys >= 0))):
        raise value_error("n_keys", "be at least 0", "an array with numbers that are not")
    return lift(xp.astype(n_keys, dtype), len(shape))


def check_length(n_keys: Any) -> int:
    if not is_integer(n_keys):
        raise type_error("n_keys", "be an integer or an array", type(n_keys).__name__)
    if n_keys < 0:
        raise value_error("n_keys", "be at least 0", n_keys)
    if n_keys >= 2**63:
        raise value_error("n_keys", "be below 2**63", n_keys)
    return plain_integer(n_keys)


def factor(xp: ModuleType, law: Law, n: Array, shape: tuple[int, ...]) -> Array:
    """``law(n)`` with a last axis for the features."""
    of_query = xp.astype(law(n), n.dtype)
    check_broadcastable("law", of_query.shape, shape)
    return of_query[..., None]
