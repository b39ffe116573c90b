"""Attention whose scale follows a law of the number of visible keys. Layer 3.

Shapes: ``...`` batch and head axes (broadcast), L queries, S keys, E head size, Ev value size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from types import ModuleType
from typing import Any

from isentropic._checks import (
    check_broadcastable,
    check_choice,
    check_floating,
    check_ndim,
    check_order,
    check_real,
    common_shape,
    type_error,
    value_error,
)
from isentropic._entropy import FAMILIES, convert_family, entropy, entropy_of_moments, partition
from isentropic._loops import Block, fold, map_blocks, take, traces_lengths
from isentropic._namespace import Array, accumulator, device, namespace
from isentropic._numerics import divide_or_zero
from isentropic._state import AttentionState, as_rows, empty_state, merge_columns, tile_state
from isentropic.laws import Law, LogLength
from isentropic.masks import Frame, Mask, as_mask, causal

_ROWS, _COLUMNS = 256, 1024
_DEFAULT_LAW = LogLength(512)


def attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Array | Mask | None = None,
    bias: Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    law: Law | None = _DEFAULT_LAW,
    n_keys: int | Array | None = None,
    softcap: float | None = None,
    enable_gqa: bool = False,
    implementation: str | None = None,
) -> Array:
    """Scaled dot-product attention whose scale follows a law of the number of visible keys.

    With ``law=None`` equivalent to `torch.nn.functional.scaled_dot_product_attention` (whose causal
    mask is aligned differently where L ≠ S).

    Parameters
    ----------
    query : array (..., L, E)
    key : array (..., S, E)
    value : array (..., S, Ev)
        Floating-point arrays of one library and device; the axes ``...`` broadcast.
    mask : boolean array or Mask, optional
        Which keys each query sees: True = attend, broadcastable to (..., L, S); or a mask of
        `isentropic.masks`, which never becomes an L×S array.
    bias : array, optional
        Added to the logits; broadcastable to (..., L, S). −∞ hides a key from the softmax, but only
        a `mask` hides it from the count n.
    is_causal : bool
        Also apply ``masks.causal()``, aligned bottom-right: the last query sees every key. ::

            L = 2, S = 4     keys 0 1 2 3
            query 0               ■ ■ ■ ·
            query 1               ■ ■ ■ ■

    scale : float, optional
        The scale at which the law is 1; ``1/√E`` by default.
    law : Law or None, default ``LogLength(512)``
        Factor on the scale as a function of n; None for the standard attention.
    n_keys : int or array broadcastable to (..., L), optional
        The n of the law, instead of the number of keys that each query sees.
    softcap : float > 0, optional
        c in ``c · tanh(logit / c)``, applied before the bias.
    enable_gqa : bool
        Grouped heads: axis −3 of `key` and `value` divides that of `query`.
    implementation : {None, "generic", "native"}
        Which code computes it: None chooses, "native" raises where no kernel of the library means
        the same. At present every call is generic.

    Returns
    -------
    array (..., L, Ev)
        In the dtype to which the inputs promote; half precision is accumulated in float32. A query
        that sees no key gives 0.

    Raises
    ------
    TypeError
        For arrays that are no floats, a mask that is neither boolean nor a Mask, mixed libraries.
    ValueError
        For shapes that do not fit, mixed devices, or values out of range.

    Notes
    -----
    ``softmax(law(n) · scale · QKᵀ) V``, taken tile by tile: memory is O(L), not O(L·S) (under
    ``torch.compile`` one tile covers everything). n is counted per query from mask, causality and
    window together, so that decoding with a cache equals prefill and padding does not count.

    Keys and values that a query does not see have no effect on it, even where they hold NaN or
    infinities; where it does see such a key or value, and there is a mask, all of its output is NaN.

    References
    ----------
    Su 2021, https://spaces.ac.cn/archives/8823; Vaswani et al. 2017; for the tiles, Rabe & Staats
    2021 (arXiv 2112.05682) and Dao et al. 2022 (arXiv 2205.14135).

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import attention
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.normal(size=(3, 8, 128, 64))
    >>> attention(q, k, v, is_causal=True).shape
    (8, 128, 64)
    """
    problem = _problem(
        query, key, value, mask=mask, bias=bias, is_causal=is_causal, scale=scale, law=law,
        n_keys=n_keys, softcap=softcap, enable_gqa=enable_gqa, implementation=implementation,
    )  # fmt: skip

    return problem.xp.astype(as_rows(problem.state(order=None)).output(), problem.dtype)


def attention_state(
    query: Array,
    key: Array,
    value: Array | None = None,
    *,
    mask: Array | Mask | None = None,
    bias: Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    law: Law | None = _DEFAULT_LAW,
    n_keys: int | Array | None = None,
    softcap: float | None = None,
    enable_gqa: bool = False,
    implementation: str | None = None,
    block_size: int | None = None,
) -> AttentionState:
    """Output, log-normalizer and entropy of attention in one pass, in a form that can be merged.

    Parameters
    ----------
    query : array (..., L, E)
    key : array (..., S, E)
    value : array (..., S, Ev), optional
        Without values the state has no output.
    mask, bias, is_causal, scale, law, n_keys, softcap, enable_gqa, implementation
        As in `attention`. States of key blocks that are to be merged need the total as `n_keys`.
    block_size : int, optional
        How many keys a tile holds.

    Returns
    -------
    AttentionState
        Of float32, or float64 where the inputs are.

    Raises
    ------
    TypeError, ValueError
        As in `attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import attention_state
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.normal(size=(3, 128, 64))
    >>> state = attention_state(q, k, v)
    >>> state.output().shape, state.entropy().shape
    ((128, 64), (128,))
    """
    problem = _problem(
        query, key, value, mask=mask, bias=bias, is_causal=is_causal, scale=scale, law=law,
        n_keys=n_keys, softcap=softcap, enable_gqa=enable_gqa, implementation=implementation,
        block_size=block_size,
    )  # fmt: skip

    return as_rows(problem.state(order=1.0))


def attention_entropy(
    query: Array,
    key: Array,
    *,
    order: float = 1.0,
    family: str = "renyi",
    normalized: bool = False,
    mask: Array | Mask | None = None,
    bias: Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    law: Law | None = _DEFAULT_LAW,
    n_keys: int | Array | None = None,
    softcap: float | None = None,
    enable_gqa: bool = False,
    implementation: str | None = None,
) -> Array:
    """Entropy of the attention weights of each query, without forming them.

    Parameters
    ----------
    query : array (..., L, E)
    key : array (..., S, E)
    order : float in [0, ∞], default 1
        0 the logarithm of the number of keys of positive weight, 1 Shannon, 2 collision, ∞
        min-entropy. A Python number.
    family : {"renyi", "tsallis"}
        Rényi ``log Σp^α/(1 − α)`` or Tsallis ``(1 − Σp^α)/(α − 1)``; at order 1 both are Shannon's.
    normalized : bool
        Divide by the entropy of the uniform distribution over the n keys of the law (log n for
        Rényi's); 0 where n ≤ 1.
    mask, bias, is_causal, scale, law, n_keys, softcap, enable_gqa, implementation
        As in `attention`.

    Returns
    -------
    array (..., L)
        Nats, in [0, log n] for Rényi's, or in [0, 1] where normalized. 0 for a query that sees no key.

    Raises
    ------
    TypeError, ValueError
        As in `attention`; also for a negative or NaN order.

    Notes
    -----
    Exact, from sums over keys relative to the maximum: see `entropy_from_logits` for the formula.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import attention_entropy
    >>> attention_entropy(np.zeros((1, 4)), np.zeros((8, 4)), normalized=True)
    array([1.])
    """
    check_order(order)
    check_choice("family", family, FAMILIES)
    problem = _problem(
        query, key, None, mask=mask, bias=bias, is_causal=is_causal, scale=scale, law=law,
        n_keys=n_keys, softcap=softcap, enable_gqa=enable_gqa, implementation=implementation,
    )  # fmt: skip
    xp, order = problem.xp, float(order)

    state = problem.state(order)
    assert state.weighted_score is not None
    h = entropy_of_moments(xp, state.normalizer, state.weighted_score, order, family)[..., 0]
    if normalized:
        n = _lengths(problem.frame, problem.query.dtype, problem.mask, n_keys, problem.batch)
        log_n = xp.log(xp.clip(n, min=1.0))
        h = divide_or_zero(xp, h, convert_family(xp, log_n, order, family))
    return xp.astype(h, problem.dtype)


def attention_weights(
    query: Array,
    key: Array,
    *,
    mask: Array | Mask | None = None,
    bias: Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    law: Law | None = _DEFAULT_LAW,
    n_keys: int | Array | None = None,
    softcap: float | None = None,
    enable_gqa: bool = False,
    implementation: str | None = None,
) -> Array:
    """The attention weights as an L×S array: for looking at.

    Parameters
    ----------
    query : array (..., L, E)
    key : array (..., S, E)
    mask, bias, is_causal, scale, law, n_keys, softcap, enable_gqa, implementation
        As in `attention`.

    Returns
    -------
    array (..., L, S)
        Rows sum to 1; 0 for a query that sees no key.

    Raises
    ------
    TypeError, ValueError
        As in `attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import attention_weights
    >>> attention_weights(np.zeros((2, 4)), np.zeros((2, 4)), is_causal=True)
    array([[1. , 0. ],
           [0.5, 0.5]])
    """
    problem = _problem(
        query, key, None, mask=mask, bias=bias, is_causal=is_causal, scale=scale, law=law,
        n_keys=n_keys, softcap=softcap, enable_gqa=enable_gqa, implementation=implementation,
    )  # fmt: skip
    xp = problem.xp

    if problem.n_keys == 0:
        return problem.zeros((problem.n_queries, 0))
    logits = problem.logits((0, problem.n_queries), (0, problem.n_keys))
    _, weight, normalizer, _ = partition(xp, logits, None)
    return xp.astype(divide_or_zero(xp, weight, normalizer), problem.dtype)


def attention_information(
    query: Array,
    key: Array,
    *,
    mask: Array | Mask | None = None,
    bias: Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    law: Law | None = _DEFAULT_LAW,
    n_keys: int | Array | None = None,
    softcap: float | None = None,
    enable_gqa: bool = False,
    implementation: str | None = None,
) -> Array:
    """How much the choice of the query tells about the key attended to: I(Q;K).

    Parameters
    ----------
    query : array (..., L, E)
    key : array (..., S, E)
    mask, bias, is_causal, scale, law, n_keys, softcap, enable_gqa, implementation
        As in `attention`.

    Returns
    -------
    array (...)
        Nats, in [0, log min(L, S)]: 0 where all queries attend alike. Queries that see no key are
        left out.

    Raises
    ------
    TypeError, ValueError
        As in `attention`.

    Notes
    -----
    ``H(mean of the rows) − mean of H(row)``, the Jensen–Shannon information of the rows of the
    attention matrix, that is, the mutual information for a query drawn uniformly. Two passes over
    the tiles; the weights are not formed.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import attention_information
    >>> far_apart = 100 * np.eye(4)
    >>> bool(np.isclose(attention_information(far_apart, far_apart), np.log(4)))
    True
    """
    problem = _problem(
        query, key, None, mask=mask, bias=bias, is_causal=is_causal, scale=scale, law=law,
        n_keys=n_keys, softcap=softcap, enable_gqa=enable_gqa, implementation=implementation,
    )  # fmt: skip
    xp = problem.xp
    if problem.n_keys == 0 or problem.n_queries == 0:
        return problem.zeros(())

    state = as_rows(problem.state(order=1.0))
    sees = xp.astype(state.normalizer > 0, state.normalizer.dtype)
    n_seeing = xp.sum(sees, axis=-1, keepdims=True)
    mean_entropy = divide_or_zero(xp, xp.sum(state.entropy(), axis=-1, keepdims=True), n_seeing)
    entropy_of_mean = entropy(problem.column_sums(state))[..., None]
    information = xp.clip(entropy_of_mean - mean_entropy, min=0.0)
    return xp.astype(information[..., 0], problem.dtype)


def scale_queries(query: Array, n_keys: int | Array, *, law: Law = _DEFAULT_LAW) -> Array:
    """Queries multiplied by ``law(n)``: brings a law to any attention kernel.

    Parameters
    ----------
    query : array (..., L, E)
    n_keys : int or array broadcastable to (..., L)
        How many keys each query sees.
    law : Law

    Returns
    -------
    array (..., L, E)
        In the dtype of `query`.

    Raises
    ------
    TypeError, ValueError
        For queries that are no floats, other libraries or devices, shapes that do not broadcast.

    Notes
    -----
    ``softmax((law(n) q) · k / √E)`` is the attention of the law. Where the kernel adds a bias, a
    sink or a soft cap it makes a difference that the queries are scaled, and not the logits: this is
    the order that `attention` has too.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import scale_queries, laws
    >>> scale_queries(np.ones((1, 2)), 256, law=laws.LogLength(16))
    array([[2., 2.]])
    """
    if not isinstance(law, Law):
        raise type_error("law", "be a law of isentropic.laws", type(law).__name__)
    n_array = _array_or_none(n_keys)
    xp = namespace(query=query, n_keys=n_array, law=law.arrays)
    place = device(query=query, n_keys=n_array, law=law.arrays)
    check_floating(xp, query=query)
    check_ndim(2, query=query)

    dtype = accumulator(xp, query.dtype)
    n = _given_lengths(xp, place, dtype, n_keys, query.shape[:-1])
    return xp.astype(xp.astype(query, dtype) * _factor(xp, law, n, query.shape[:-1]), query.dtype)


def multi_head_attention(
    query: Array,
    key: Array,
    value: Array,
    w_q: Array,
    w_k: Array,
    w_v: Array,
    w_o: Array,
    *,
    num_heads: int,
    b_q: Array | None = None,
    b_k: Array | None = None,
    b_v: Array | None = None,
    b_o: Array | None = None,
    mask: Array | Mask | None = None,
    bias: Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    law: Law | None = _DEFAULT_LAW,
    n_keys: int | Array | None = None,
    softcap: float | None = None,
    enable_gqa: bool = False,
    implementation: str | None = None,
) -> Array:
    """Attention in `num_heads` subspaces: project, attend in each head, join, project.

    Parameters
    ----------
    query : array (..., L, D)
    key : array (..., S, Dk)
    value : array (..., S, Dv)
    w_q : array (D, num_heads · E)
    w_k : array (Dk, G · E)
    w_v : array (Dv, G · Ev)
    w_o : array (num_heads · Ev, Do)
        Projections, multiplied from the right. G = `num_heads`, or with `enable_gqa` a divisor of it.
    num_heads : int ≥ 1
    b_q, b_k, b_v, b_o : arrays, optional
        Added after each projection; as long as its result.
    mask, bias, is_causal, scale, law, n_keys, softcap, enable_gqa, implementation
        As in `attention`, where the heads are the last of the axes ``...``: a mask per sequence has
        the shape (B, 1, L, S), an `n_keys` per sequence (B, 1, L), a law per head parameters (H,).

    Returns
    -------
    array (..., L, Do)

    Raises
    ------
    TypeError, ValueError
        As in `attention`; also where the widths of the projections do not divide into the heads.

    References
    ----------
    Vaswani et al. 2017, arXiv 1706.03762.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import multi_head_attention
    >>> rng = np.random.default_rng(0)
    >>> x, w = rng.normal(size=(10, 16)), rng.normal(size=(4, 16, 16))
    >>> multi_head_attention(x, x, x, *w, num_heads=2).shape
    (10, 16)
    """
    inputs = {"query": query, "key": key, "value": value}
    weights = {"w_q": w_q, "w_k": w_k, "w_v": w_v, "w_o": w_o}
    shifts = {"b_q": b_q, "b_k": b_k, "b_v": b_v, "b_o": b_o}
    xp = namespace(**inputs, **weights, **shifts)
    device(**inputs, **weights, **shifts)
    check_floating(xp, **inputs, **weights, **shifts)
    check_ndim(2, **inputs, **weights)
    _check_count("num_heads", num_heads)
    widths = (query.shape[-1], key.shape[-1], value.shape[-1])
    for (name, w), width in zip(weights.items(), widths, strict=False):
        if w.ndim != 2 or w.shape[0] != width:
            raise value_error(name, f"have the shape ({width}, ...)", w.shape)
    head_dim = _divided("w_q", w_q.shape[-1], num_heads)
    groups = _divided("w_k", w_k.shape[-1], head_dim) if enable_gqa else num_heads
    value_dim = _divided("w_v", w_v.shape[-1], groups)
    if w_k.shape[-1] != groups * head_dim:
        must = f"have a last dimension of {groups * head_dim}, as `w_q` has per head"
        raise value_error("w_k", must, w_k.shape[-1])
    if w_o.ndim != 2 or w_o.shape[0] != num_heads * value_dim:
        raise value_error("w_o", f"have the shape ({num_heads * value_dim}, ...)", w_o.shape)
    for (name, b), w in zip(shifts.items(), weights.values(), strict=True):
        if b is not None and b.shape != (w.shape[-1],):
            raise value_error(name, f"have the shape ({w.shape[-1]},)", b.shape)

    heads = []
    sizes = ((num_heads, head_dim), (groups, head_dim), (groups, value_dim))
    projections = zip(inputs.values(), (w_q, w_k, w_v), (b_q, b_k, b_v), sizes, strict=True)
    for x, w, b, size in projections:
        projected = _project(xp, x, w, b)
        heads.append(xp.moveaxis(xp.reshape(projected, (*x.shape[:-1], *size)), -2, -3))
    out = attention(
        *heads, mask=mask, bias=bias, is_causal=is_causal, scale=scale, law=law, n_keys=n_keys,
        softcap=softcap, enable_gqa=enable_gqa, implementation=implementation,
    )  # fmt: skip
    joined = xp.moveaxis(out, -3, -2)
    joined = xp.reshape(joined, (*joined.shape[:-2], num_heads * value_dim))
    return _project(xp, joined, w_o, b_o)


def additive_attention(
    query: Array,
    key: Array,
    value: Array,
    w_q: Array,
    w_k: Array,
    v: Array,
    *,
    mask: Array | Mask | None = None,
) -> Array:
    """Attention by a small network instead of a product: ``vᵀ tanh(q W_q + k W_k)``.

    Parameters
    ----------
    query : array (..., L, Eq)
    key : array (..., S, Ek)
    value : array (..., S, Ev)
    w_q : array (Eq, A)
    w_k : array (Ek, A)
    v : array (A,)
    mask : boolean array or Mask, optional
        As in `attention`.

    Returns
    -------
    array (..., L, Ev)
        0 for a query that sees no key.

    Raises
    ------
    TypeError, ValueError
        As in `attention`.

    Notes
    -----
    Needs O(L·S·A) time and a tile of it in memory. There is no scale, hence no law.

    References
    ----------
    Bahdanau, Cho & Bengio 2015, arXiv 1409.0473.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import additive_attention
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.normal(size=(3, 5, 4))
    >>> additive_attention(q, k, v, *rng.normal(size=(2, 4, 8)), np.ones(8)).shape
    (5, 4)
    """
    weights = {"w_q": w_q, "w_k": w_k, "v": v}
    xp = namespace(query=query, **weights)
    device(query=query, **weights)
    check_floating(xp, **weights)
    for name, x, w in (("w_q", query, w_q), ("w_k", key, w_k)):
        if w.ndim != 2 or w.shape[0] != x.shape[-1]:
            raise value_error(name, f"have the shape ({x.shape[-1]}, A)", w.shape)
    hidden = w_q.shape[-1]
    if w_k.shape[-1] != hidden:
        raise value_error("w_k", f"have the last dimension of `w_q`, {hidden}", w_k.shape[-1])
    if v.shape != (hidden,):
        raise value_error("v", f"have the shape ({hidden},)", v.shape)
    # A tile of scores has A numbers per query and key.
    block_size = None if traces_lengths(xp) else max(_COLUMNS // max(hidden, 1), 1)
    problem = _problem(
        query, key, value, mask=mask, scale=1.0, block_size=block_size, head_dims_match=False
    )

    dtype = problem.query.dtype
    queries = problem.query @ xp.astype(w_q, dtype)
    keys = xp.astype(problem.key, dtype) @ xp.astype(w_k, dtype)
    v = xp.astype(v, dtype)

    def score(rows: Block, columns: Block) -> Array:
        q = take(queries, rows, -2)[..., :, None, :]
        k = take(keys, columns, -2)[..., None, :, :]
        return xp.sum(xp.tanh(q + k) * v, axis=-1)

    state = problem.state(order=None, score=score)
    return xp.astype(as_rows(state).output(), problem.dtype)


@dataclass(frozen=True)
class _Problem:
    """Checked arguments of one call, and the pass over its tiles."""

    frame: Frame
    dtype: Any  # of the result
    query: Array  # scaled, in the dtype to compute in
    key: Array
    value: Array | None
    mask: Mask | None
    bias: Array | None
    softcap: float | None
    poison: tuple[Array, Array] | None
    batch: tuple[int, ...]
    block_size: int | None

    @property
    def xp(self) -> ModuleType:
        return self.frame.xp

    @property
    def n_queries(self) -> int:
        return self.frame.n_queries

    @property
    def n_keys(self) -> int:
        return self.frame.n_keys

    def zeros(self, shape: tuple[int, ...]) -> Array:
        """What is returned where there is nothing to attend to."""
        return self.xp.zeros((*self.batch, *shape), dtype=self.dtype, device=self.frame.device)

    def score(self, rows: Block, columns: Block) -> Array:
        xp = self.xp
        keys = xp.astype(take(self.key, columns, -2), self.query.dtype)
        return _grouped_matmul(xp, take(self.query, rows, -2), xp.matrix_transpose(keys))

    def logits(
        self, rows: Block, columns: Block, score: Callable[[Block, Block], Array] | None = None
    ) -> Array:
        """The logits of one tile, −∞ where a key is hidden."""
        xp = self.xp
        s = (score or self.score)(rows, columns)
        if self.softcap is not None:
            s = xp.tanh(s / self.softcap) * self.softcap
        if self.bias is not None:
            s = s + xp.astype(take(take(self.bias, rows, -2), columns, -1), s.dtype)
        if self.mask is None:
            return s
        if self.poison is not None:
            of_queries, of_keys = self.poison
            s = s + take(of_queries, rows, -2) + take(of_keys, columns, -1)
        return xp.where(self.mask.block(self.frame, rows, columns), s, -math.inf)

    def state(
        self, order: float | None, score: Callable[[Block, Block], Array] | None = None
    ) -> AttentionState:
        """The state over all keys, its fields kept as columns (..., L, 1)."""
        xp, dtype = self.xp, self.query.dtype
        n_values = None if self.value is None else self.value.shape[-1]
        shape = (*self.batch, self.n_queries)
        if self.n_keys == 0:
            return empty_state(xp, shape, n_values, order, dtype=dtype, device=self.frame.device)
        row_size, column_size = self.tile_shape

        def tile(rows: Block, columns: Block) -> AttentionState:
            def weigh(weight: Array) -> Array:
                assert self.value is not None
                values = xp.astype(take(self.value, columns, -2), dtype)
                return _grouped_matmul(xp, weight, values)

            s = self.logits(rows, columns, score)
            return tile_state(xp, s, None if self.value is None else weigh, order)

        def over_keys(rows: Block) -> AttentionState:
            return fold(
                xp,
                lambda columns: tile(rows, columns),
                lambda a, b: merge_columns(xp, a, b, order),
                self.n_keys,
                column_size,
            )

        fields = map_blocks(xp, over_keys, self.n_queries, row_size)
        whole: list[Any] = [
            None if x is None else xp.broadcast_to(x, (*shape, x.shape[-1])) for x in fields
        ]
        return AttentionState(*whole)

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

        return map_blocks(xp, over_queries, self.n_keys, column_size)[0][..., 0]

    @property
    def tile_shape(self) -> tuple[int, int]:
        if self.frame.whole and self.block_size is None:
            return self.n_queries, self.n_keys
        return _ROWS, self.block_size or _COLUMNS


def _problem(
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
    head_dims_match: bool = True,
) -> _Problem:
    """Check all arguments, then scale the queries."""
    arrays = {"query": query, "key": key} | ({} if value is None else {"value": value})
    xp = namespace(**arrays)
    check_floating(xp, **arrays, bias=bias)
    check_ndim(3 if enable_gqa else 2, **arrays)
    if head_dims_match and key.shape[-1] != query.shape[-1]:
        must = "have the last dimension of `query`"
        raise value_error("key", must, f"{query.shape[-1]} and {key.shape[-1]}")
    if value is not None and value.shape[-2] != key.shape[-2]:
        must = "have as many rows as `key`"
        raise value_error("value", must, f"{key.shape[-2]} and {value.shape[-2]}")
    batch = _batch_shape(xp, arrays, enable_gqa)
    n_queries, total = query.shape[-2], key.shape[-2]

    visible = None if mask is None else as_mask(mask)
    if is_causal:
        visible = causal() if visible is None else visible & causal()
    held: dict[str, Any] = {"bias": bias, "n_keys": _array_or_none(n_keys)}
    held["mask"] = None if visible is None else visible.arrays
    if law is not None and not isinstance(law, Law):
        raise type_error("law", "be a law of isentropic.laws or None", type(law).__name__)
    held["law"] = None if law is None else law.arrays
    namespace(**arrays, **held)
    place = device(**arrays, **held)
    if visible is not None:
        visible.check(batch, n_queries, total)
    if bias is not None:
        check_broadcastable("bias", bias.shape, (*batch, n_queries, total))
        bias = bias[(None,) * (2 - bias.ndim) + (...,)]
    for name, x in (("scale", scale), ("softcap", softcap)):
        if x is not None:
            check_real(name, x, above=0 if name == "softcap" else -math.inf)
    check_choice("implementation", implementation, (None, "generic", "native"))
    if implementation == "native":
        must = "be None or 'generic', since no native kernel computes this"
        raise value_error("implementation", must, "'native'")
    if block_size is not None:
        _check_count("block_size", block_size)

    dtype = xp.result_type(*arrays.values())
    compute = accumulator(xp, dtype)
    poison = None
    if visible is not None:
        query, key, value, poison = _shield(xp, compute, place, query, key, value)
    frame = Frame(xp, place, n_queries, total, whole=traces_lengths(xp))
    factor: Any = 1 / math.sqrt(max(query.shape[-1], 1)) if scale is None else float(scale)
    if law is not None or n_keys is not None:
        n = _lengths(frame, compute, visible, n_keys, batch)
    if law is not None:
        factor = _factor(xp, law, n, (*batch, n_queries)) * factor
    return _Problem(
        frame, dtype, xp.astype(query, compute) * factor, key, value, visible, bias,
        None if softcap is None else float(softcap), poison, batch, block_size,
    )  # fmt: skip


def _batch_shape(xp: ModuleType, arrays: dict[str, Array], enable_gqa: bool) -> tuple[int, ...]:
    """The shape of the axes ``...``, with the heads of the query where they are grouped."""
    shapes = {name: x.shape[:-2] for name, x in arrays.items()}
    if enable_gqa:
        heads = shapes["query"][-1]
        groups = shapes["key"][-1]
        if groups == 0 or heads % groups:
            must = f"have a number of heads (axis -3) that divides the {heads} of `query`"
            raise value_error("key", must, groups)
        if "value" in shapes and shapes["value"][-1] != groups:
            must = f"have the {groups} heads (axis -3) of `key`"
            raise value_error("value", must, shapes["value"][-1])
        shapes = {name: (*shape[:-1], heads) for name, shape in shapes.items()}
    return common_shape(xp, **shapes)


def _shield(
    xp: ModuleType, dtype: Any, device: Any, query: Array, key: Array, value: Array | None
) -> tuple[Array, Array, Array | None, tuple[Array, Array]]:
    """Arrays with 0 for NaN and ∞, and what to add to the logits to make up for it.

    A hidden key has weight 0, but 0 · NaN is NaN in the products, forward and backward. So rows that
    are not finite leave the products, and put NaN on the logits of those who see them instead.
    """
    nan = xp.full((1,), math.nan, dtype=dtype, device=device)
    zero = xp.zeros((1,), dtype=dtype, device=device)
    finite_query, finite_key = xp.isfinite(query), xp.isfinite(key)
    sound_keys = xp.all(finite_key, axis=-1)
    if value is not None:
        finite_value = xp.isfinite(value)
        sound_keys = sound_keys & xp.all(finite_value, axis=-1)
        value = xp.where(finite_value, value, 0.0)

    of_queries = xp.where(xp.all(finite_query, axis=-1, keepdims=True), zero, nan)
    of_keys = xp.where(sound_keys, zero, nan)[..., None, :]
    if of_keys.ndim > 2 and query.ndim > 2 and query.shape[-3] > of_keys.shape[-3] > 1:
        of_keys = xp.repeat(of_keys, query.shape[-3] // of_keys.shape[-3], axis=-3)
    query, key = xp.where(finite_query, query, 0.0), xp.where(finite_key, key, 0.0)
    return query, key, value, (of_queries, of_keys)


def _grouped_matmul(xp: ModuleType, a: Array, b: Array) -> Array:
    """``a @ b`` where axis −3 of `b` may divide that of `a`: neighbouring heads share one product."""
    if a.ndim < 3 or b.ndim < 3 or not a.shape[-3] > b.shape[-3] > 1:
        return a @ b
    *batch, heads, rows, inner = a.shape
    groups = b.shape[-3]
    out = xp.reshape(a, (*batch, groups, heads // groups * rows, inner)) @ b
    return xp.reshape(out, (*out.shape[:-3], heads, rows, b.shape[-1]))


def _array_or_none(n_keys: Any) -> Array | None:
    # `int` comes first: under torch.compile a symbolic integer answers that question alone.
    if isinstance(n_keys, (int, Integral)) or not hasattr(n_keys, "ndim"):
        return None
    return n_keys


def _lengths(frame: Frame, dtype: Any, mask: Mask | None, n_keys: Any, batch: tuple[int, ...]) -> Array:
    """How many keys each query sees, as floats broadcastable to (..., L)."""
    if n_keys is None and mask is not None:
        return frame.xp.astype(mask.count(frame), dtype)
    n = frame.n_keys if n_keys is None else n_keys
    return _given_lengths(frame.xp, frame.device, dtype, n, (*batch, frame.n_queries))


def _given_lengths(
    xp: ModuleType, device: Any, dtype: Any, n_keys: Any, shape: tuple[int, ...]
) -> Array:
    """`n_keys` as floats broadcastable to `shape`, with an axis for the queries."""
    if _array_or_none(n_keys) is None:
        if isinstance(n_keys, bool) or not isinstance(n_keys, (int, Integral)):
            raise type_error("n_keys", "be an integer or an array", type(n_keys).__name__)
        if n_keys < 0:
            raise value_error("n_keys", "be at least 0", n_keys)
        return xp.full((1,), n_keys, dtype=dtype, device=device)
    if not xp.isdtype(n_keys.dtype, ("integral", "real floating")):
        raise type_error("n_keys", "have an integer or floating-point dtype", n_keys.dtype)
    check_broadcastable("n_keys", n_keys.shape, shape)
    n = xp.astype(n_keys, dtype)
    return n[None] if n.ndim == 0 else n


def _factor(xp: ModuleType, law: Law, n: Array, shape: tuple[int, ...]) -> Array:
    """``law(n)`` with a last axis for the features."""
    factor = xp.astype(law(n), n.dtype)
    check_broadcastable("law", factor.shape, shape)
    return factor[..., None]


def _check_count(name: str, x: Any) -> None:
    if isinstance(x, bool) or not isinstance(x, int):
        raise type_error(name, "be an integer", type(x).__name__)
    if x < 1:
        raise value_error(name, "be at least 1", x)


def _divided(name: str, width: int, parts: int) -> int:
    if parts == 0 or width % parts:
        raise value_error(name, f"have a last dimension divisible by {parts}", width)
    return width // parts


def _project(xp: ModuleType, x: Array, w: Array, b: Array | None) -> Array:
    dtype = xp.result_type(x, w)
    y = xp.astype(x, dtype) @ xp.astype(w, dtype)
    return y if b is None else y + b
