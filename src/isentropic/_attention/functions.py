"""Attention whose scale follows a law of the number of visible keys.

Shapes: ``...`` batch and head axes (broadcast), L queries, S keys, E head size, Ev value size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from isentropic._attention.backends import output_of, reasons, state_of
from isentropic._attention.generic import AttentionState, Tiles, as_rows
from isentropic._attention.plan import (
    Arguments,
    array_or_none,
    factor,
    given_lengths,
    lengths_of_law,
    prepare,
    visible_lengths,
)
from isentropic._checks import (
    check_choice,
    check_flag,
    check_floating,
    check_given,
    check_ndim,
    check_order,
)
from isentropic._entropy import (
    FAMILIES,
    convert_family,
    entropy,
    entropy_of_moments,
    normalized_entropy,
    partition,
)
from isentropic._namespace import Array, ArrayT, accumulator, common_device, namespace, present
from isentropic._numerics import clip, divide_or_zero, quietly
from isentropic.laws._formulas import DEFAULT_LAW, Constant, Law, check_law
from isentropic.masks import Mask

# What PyTorch, JAX and transformers call the arguments of attention.
NAMES = {
    "attn_mask": "mask", "attention_mask": "mask", "key_padding_mask": "mask", "attn_bias": "bias",
    "scaling": "scale", "causal": "is_causal", "logits_soft_cap": "softcap", "dropout_p": None,
    "dropout": None,
}  # fmt: skip
_P = ParamSpec("_P")
_R = TypeVar("_R")


def quietly_named(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`quietly`, for functions with the arguments of attention."""
    return quietly(function, NAMES)


@quietly_named
def attention(
    query: ArrayT,
    key: ArrayT,
    value: ArrayT,
    *,
    mask: Array | Mask | None = None,
    bias: Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    law: Law | None = DEFAULT_LAW,
    n_keys: int | Array | None = None,
    softcap: float | None = None,
    enable_gqa: bool = False,
    implementation: str | None = None,
) -> ArrayT:
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
    implementation : {None, "generic", "native", "sdpa", "numpy", "jax", "torch"}
        Which code computes it. None chooses the fastest that can. "generic" is the pass over tiles
        that is the same for all libraries, "native" any other. The rest are names of backends, as in
        `attention_backends`. It is an error where what is asked for cannot compute the call.

    Returns
    -------
    array (..., L, Ev)
        In the dtype to which the inputs promote; half precision is accumulated in float32. A query
        that sees no key gives 0.

    Raises
    ------
    TypeError
        For arrays that are not of floats, a mask that is neither boolean nor a Mask, mixed libraries.
    ValueError
        For shapes that do not fit, mixed devices, or values out of range.

    Notes
    -----
    ``softmax(law(n) · scale · QKᵀ) V``, taken tile by tile: memory is O(L), not O(L·S), also of
    gradients (under ``torch.compile`` only where PyTorch's own kernel computes it). n is counted
    per query from mask, causality and window together, so that decoding with a cache equals prefill
    and padding does not count.

    Keys and values that a query does not see have no effect on it, even where they hold NaN or
    infinities; where it does see such a key or value, and there is a mask, all of its output is NaN.
    Logits beyond the range of the dtype make it NaN, without a warning.

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
    if value is None:
        check_given(value=value)
    plan, operands = prepare(Arguments(
        query, key, value, mask, bias, is_causal, scale, law, n_keys, softcap, enable_gqa,
        implementation,
    ))  # fmt: skip

    return plan.xp.astype(output_of(plan, operands, implementation), plan.dtype, copy=False)


@quietly_named
def attention_state(
    query: Array,
    key: Array,
    value: Array | None = None,
    *,
    mask: Array | Mask | None = None,
    bias: Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    law: Law | None = DEFAULT_LAW,
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
    plan, operands = prepare(Arguments(
        query, key, value, mask, bias, is_causal, scale, law, n_keys, softcap, enable_gqa,
        implementation, block_size,
    ))  # fmt: skip

    n_seen, n = None, None
    if law is not None and not isinstance(law, Constant):
        lengths = lengths_of_law(plan, operands, n_keys)
        seen = lengths if n_keys is None else visible_lengths(plan, operands.mask)
        shape = (*plan.batch, plan.n_queries)
        n_seen, n = (plan.xp.broadcast_to(x, shape) for x in (seen, lengths))
    state = as_rows(state_of(plan, operands, implementation, relative_to_maximum=True))
    return state._replace(n_seen=n_seen, n_keys=n)


@quietly_named
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
    law: Law | None = DEFAULT_LAW,
    n_keys: int | Array | None = None,
    softcap: float | None = None,
    enable_gqa: bool = False,
    implementation: str | None = None,
) -> Any:
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
        Nats, in [0, log n] for Rényi's, or in [0, 1] where normalized; of float32, or float64 where the
        inputs are. 0 for a query that sees no key.

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
    check_flag(normalized=normalized)
    plan, operands = prepare(Arguments(
        query, key, None, mask, bias, is_causal, scale, law, n_keys, softcap, enable_gqa,
        implementation,
    ))  # fmt: skip
    xp, order = plan.xp, float(order)

    state = state_of(plan, operands, implementation, order)
    assert state.weighted_score is not None
    renyi = entropy_of_moments(xp, state.normalizer, state.weighted_score, order, "renyi")[..., 0]
    if not normalized:
        return convert_family(xp, renyi, order, family)
    n = lengths_of_law(plan, operands, n_keys)
    return normalized_entropy(xp, renyi, xp.log(clip(xp, n, min=1.0)), order, family)


@quietly_named
def attention_weights(
    query: ArrayT,
    key: ArrayT,
    *,
    mask: Array | Mask | None = None,
    bias: Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    law: Law | None = DEFAULT_LAW,
    n_keys: int | Array | None = None,
    softcap: float | None = None,
    enable_gqa: bool = False,
) -> ArrayT:
    """The attention weights as an L×S array: for looking at.

    Parameters
    ----------
    query : array (..., L, E)
    key : array (..., S, E)
    mask, bias, is_causal, scale, law, n_keys, softcap, enable_gqa
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
    plan, operands = prepare(Arguments(
        query, key, None, mask, bias, is_causal, scale, law, n_keys, softcap, enable_gqa,
    ))  # fmt: skip
    xp = plan.xp

    if plan.n_keys == 0:
        return plan.zeros((plan.n_queries, 0))
    logits = Tiles.of(plan, operands).logits((0, plan.n_queries), (0, plan.n_keys))
    _, weight, normalizer, _ = partition(xp, logits, None)
    return xp.astype(divide_or_zero(xp, weight, normalizer), plan.dtype)


@quietly_named
def attention_information(
    query: Array,
    key: Array,
    *,
    mask: Array | Mask | None = None,
    bias: Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    law: Law | None = DEFAULT_LAW,
    n_keys: int | Array | None = None,
    softcap: float | None = None,
    enable_gqa: bool = False,
    implementation: str | None = None,
) -> Any:
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
        Nats, in [0, log min(L, S)], of float32, or float64 where the inputs are: 0 where all queries
        attend alike. Queries that see no key do not take part.

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
    plan, operands = prepare(Arguments(
        query, key, None, mask, bias, is_causal, scale, law, n_keys, softcap, enable_gqa,
        implementation,
    ))  # fmt: skip
    xp = plan.xp
    if plan.n_keys == 0 or plan.n_queries == 0:
        return plan.zeros((), plan.compute)

    state = as_rows(state_of(plan, operands, implementation))
    sees = xp.astype(state.normalizer > 0, state.normalizer.dtype)
    n_seeing = xp.sum(sees, axis=-1, keepdims=True)
    mean_entropy = divide_or_zero(xp, xp.sum(state.entropy(), axis=-1, keepdims=True), n_seeing)
    entropy_of_mean = entropy(Tiles.of(plan, operands).column_sums(state))[..., None]
    information = clip(xp, entropy_of_mean - mean_entropy, min=0.0)
    return information[..., 0]


@quietly_named
def attention_backends(
    query: Array,
    key: Array,
    value: Array | None = None,
    *,
    order: float | None = None,
    mask: Array | Mask | None = None,
    bias: Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    law: Law | None = DEFAULT_LAW,
    n_keys: int | Array | None = None,
    softcap: float | None = None,
    enable_gqa: bool = False,
    implementation: str | None = None,
) -> dict[str, str]:
    """Which code computes a call, and why the others do not. Nothing is computed.

    Parameters
    ----------
    query : array (..., L, E)
    key : array (..., S, E)
    value : array (..., S, Ev), optional
    order : float in [0, ∞], optional
        Ask about `attention_entropy` of this order, or for 1 about `attention_state` too. By default
        about `attention` where there are values, and else about the order 1.
    mask, bias, is_causal, scale, law, n_keys, softcap, enable_gqa, implementation
        As in `attention`.

    Returns
    -------
    dict of str
        For each backend, in the order in which they are asked: ``"runs"`` for the one that computes the
        call, or why it does not. The backends are *sdpa*, PyTorch's
        ``scaled_dot_product_attention``; *numpy*, a pass for arrays in the memory of the host; *jax*,
        ``jax.nn.dot_product_attention``; *torch*, the generic pass with gradients that take the tiles
        again; *generic*, the pass over tiles that is the same for all libraries.

    Raises
    ------
    TypeError, ValueError
        As in `attention`; also for a negative or NaN order.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import attention_backends
    >>> x = np.zeros((8, 1024, 64), "float32")
    >>> attention_backends(x, x, x)["numpy"]
    'runs'
    >>> attention_backends(x, x, x, softcap=30.0)["numpy"]
    'it has no bias and no soft cap'
    """
    if order is not None:
        check_order(order)
    plan, _ = prepare(Arguments(
        query, key, value, mask, bias, is_causal, scale, law, n_keys, softcap, enable_gqa,
        implementation,
    ))  # fmt: skip
    asked = 1.0 if order is None and value is None else order
    found: dict[str, str] = {}
    for name, why in reasons(plan, implementation, asked).items():
        is_taken = "runs" in found.values()
        found[name] = why or ("another comes first" if is_taken else "runs")
    return found


@quietly_named
def scale_queries(query: ArrayT, n_keys: int | Array, *, law: Law = DEFAULT_LAW) -> ArrayT:
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
        For queries that are not of floats, other libraries or devices, shapes that do not broadcast.

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
    check_law(law)
    arrays = {"query": query} | present(n_keys=array_or_none(n_keys))
    xp = namespace(("law", law.arrays), **arrays)
    device = common_device(("law", law.arrays), **arrays)
    check_floating(xp, query=query)
    check_ndim(2, query=query)

    dtype = accumulator(xp, query.dtype)
    n = given_lengths(xp, device, dtype, n_keys, query.shape[:-1])
    return xp.astype(xp.astype(query, dtype) * factor(xp, law, n, query.shape[:-1]), query.dtype)
