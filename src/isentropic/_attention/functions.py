"""Attention whose scale follows a law of the number of visible keys.

Shapes: ``...`` batch and head axes (broadcast), L queries, S keys, E head size, Ev value size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from isentropic._attention.backends import (
    entropy_of,
    output_of,
    reasons,
    spread_of,
    state_in_rows,
    state_of,
)
from isentropic._attention.generic import Tiles, weights_of_logits, with_sinks
from isentropic._attention.plan import (
    Arguments,
    array_or_none,
    factor,
    given_lengths,
    lengths_of_law,
    prepare,
    visible_lengths,
)
from isentropic._attention.state import AttentionState, as_rows
from isentropic._attention.statistics import AttentionStatistics, statistics_of_spread
from isentropic._checks import (
    check_axis,
    check_choice,
    check_flag,
    check_floating,
    check_given,
    check_ndim,
    check_order,
    value_error,
)
from isentropic._entropy import (
    FAMILIES,
    convert_family,
    entropy,
    normalized_entropy,
    partition,
)
from isentropic._namespace import Array, ArrayT, accumulator, common_device, namespace, present
from isentropic._numerics import align, clip, divide_or_zero, lift, quietly
from isentropic._ops import Ops
from isentropic.laws._law import DEFAULT_LAW, Constant, Law, check_law
from isentropic.masks import Mask

# Argument names of PyTorch, JAX and transformers, and what they are here; None: no equivalent.
NAMES = {
    "attn_mask": "mask", "attention_mask": "mask", "key_padding_mask": "mask", "attn_bias": "bias",
    "scaling": "scale", "causal": "is_causal", "logits_soft_cap": "softcap", "dropout_p": None,
    "dropout": None, "key_value_seq_lengths": "mask=masks.padding(lengths)",
    "s_aux": "sinks", "learnable_sink": "sinks", "softmax_scale": "scale", "alibi_slopes": "bias",
    "window_size": "mask=masks.window(left, right)",
    "local_window_size": "mask=masks.window(left, right)",
}  # fmt: skip
_P = ParamSpec("_P")
_R = TypeVar("_R")


def quietly_named(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function that has the arguments of attention by `quietly`."""
    return quietly(function, NAMES)


def _in_one_node(result: Any) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorate such a function so that its calls are single nodes in the graphs of torch.compile."""
    return functools.partial(quietly, names=NAMES, node_of=result)


@_in_one_node(Array)
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
    sinks: Array | None = None,
    enable_gqa: bool = False,
    implementation: str | None = None,
) -> ArrayT:
    """Scaled dot-product attention whose scale follows a law of the number of visible keys.

    With ``law=None`` it is equivalent to `torch.nn.functional.scaled_dot_product_attention`, except
    that the causal mask is aligned differently for L ≠ S.

    Parameters
    ----------
    query : array (..., L, E)
    key : array (..., S, E)
    value : array (..., S, Ev)
        Floating-point arrays of one library and device; the axes ``...`` broadcast. Heads are among
        them: the layout is (B, H, L, E). Arrays (B, L, H, E), as FlashAttention and JAX have them,
        raise no error. In them the heads of a token attend to each other. Swap the axes −3 and −2.
    mask : boolean array or Mask, optional
        The keys that each query sees: a boolean array broadcastable to (..., L, S), where True means
        attend, or a mask of `isentropic.masks`, which never becomes an L×S array.
    bias : array, optional
        Added to the logits; broadcastable to (..., L, S). A bias of −∞ removes a key from the softmax,
        but not from the count n. Only a `mask` does both.
    is_causal : bool
        Also apply ``masks.causal()``. It is aligned bottom-right: the last query sees every key. ::

            L = 2, S = 4     keys 0 1 2 3
            query 0               ■ ■ ■ ·
            query 1               ■ ■ ■ ■

    scale : float, optional
        The scale of the logits where the law is 1; ``1/√E`` by default.
    law : Law or None, default ``LogLength(512)``
        The factor on the scale as a function of n. None is standard attention.
    n_keys : int or array broadcastable to (..., L), optional
        The n of the law. The default is the number of keys that each query sees.
    softcap : float > 0, optional
        c in ``c · tanh(logit / c)``, applied before the bias.
    sinks : array broadcastable to (...), optional
        A logit for each head, of shape (H,) for a query (..., H, L, E). It takes weight but has no
        value. The scale, the law and the soft cap do not change it, and n does not count it. −∞ has the
        same effect as no sink.
    enable_gqa : bool
        Grouped heads: axis −3 of `key` and `value` divides that of `query`.
    implementation : str, optional
        The backend that computes the call. None chooses the fastest one that can. "generic" is the pass
        over tiles that is the same for all libraries. `attention_backends` describes the others. A
        backend that cannot compute the call is an error.

    Returns
    -------
    array (..., L, Ev)
        The output, in the dtype to which the inputs promote. Half precision is accumulated in float32.
        The output of a query that sees no key is 0, with a sink or without.

    Raises
    ------
    TypeError
        If an array is not of floats, if `mask` is neither a boolean array nor a Mask, or if the arrays
        belong to different libraries.
    ValueError
        If shapes do not fit, if the arrays are on different devices, or if a value is out of range.

    Notes
    -----
    The output is ``softmax(law(n) · scale · QKᵀ) V``, computed tile by tile. The memory is O(L), not
    O(L·S), also for gradients. The exception is `torch.compile` on a GPU, which forms masks other than
    the causal one for PyTorch's own kernel. n counts the keys that a query sees under `mask` and
    `is_causal` together. So decoding with a cache equals prefill, and padding does not count.

    With a sink σ the weight of key j is ``e^{s_j} / (e^σ + Σ e^{s_i})``. Sinks of 0 give "softmax plus
    one". Their gradients are computed too.

    Keys and values that a query does not see have no effect on its output, even if they are NaN or
    infinite. If there is a mask and the query sees such a key or value, all of its output is NaN. On a
    GPU a visible key that is infinite may have the weight 0 instead.
    Logits beyond the range of the dtype make the output NaN, without a warning. It may be 0 instead if
    all logits of a query are −∞.

    References
    ----------
    Su 2021, https://spaces.ac.cn/archives/8823; Vaswani et al. 2017; for the tiles, Rabe & Staats
    2021 (arXiv 2112.05682) and Dao et al. 2022 (arXiv 2205.14135); for sinks, Xiao et al. 2023 (arXiv
    2309.17453).

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
        query, key, value, mask, bias, law, n_keys, sinks, is_causal, scale, softcap, enable_gqa,
        implementation,
    ))  # fmt: skip

    out: Any = output_of(plan, operands, implementation)
    return out if out.dtype == plan.dtype else plan.xp.astype(out, plan.dtype)


@_in_one_node(AttentionState)
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
    sinks: Array | None = None,
    enable_gqa: bool = False,
    implementation: str | None = None,
    block_size: int | None = None,
) -> AttentionState:
    """Output, log-normalizer and entropy of attention in one pass, as a state that can be merged.

    Parameters
    ----------
    query : array (..., L, E)
    key : array (..., S, E)
    value : array (..., S, Ev), optional
        The values. Without them the state has no output.
    mask, bias, is_causal, scale, law, n_keys, softcap, sinks, enable_gqa,
    implementation
        As in `attention`. States of key blocks that are to be merged need the total number of keys as
        `n_keys`, and only one of them may have the sinks.
    block_size : int, optional
        The number of keys of a tile.

    Returns
    -------
    AttentionState
        Its arrays are float32, or float64 for float64 inputs.

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
        query, key, value, mask, bias, law, n_keys, sinks, is_causal, scale, softcap, enable_gqa,
        implementation, block_size,
    ))  # fmt: skip

    n_seen, n = None, None
    if law is not None and not isinstance(law, Constant):
        shape = (*plan.batch, plan.n_queries)
        if n_keys is None and not plan.has_mask:
            n_seen = n = plan.xp.full(shape, plan.n_keys, dtype=plan.compute, device=plan.device)
        else:
            n_seen = n = plan.xp.broadcast_to(lengths_of_law(plan, operands, n_keys), shape)
        if n_keys is not None:
            n_seen = plan.xp.broadcast_to(visible_lengths(plan, operands.mask), shape)
    fields = state_in_rows(plan, operands, implementation)[:4]
    return AttentionState(*fields, n_seen, n)


@_in_one_node(Array)
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
    sinks: Array | None = None,
    enable_gqa: bool = False,
    implementation: str | None = None,
) -> Any:
    """Entropy of the attention weights of each query, without forming them.

    Parameters
    ----------
    query : array (..., L, E)
    key : array (..., S, E)
    order : float in [0, ∞], default 1
        The order α, a Python number. 0 is the logarithm of the number of keys with positive weight, 1
        is Shannon's entropy, 2 the collision entropy, ∞ the min-entropy.
    family : {"renyi", "tsallis"}
        Rényi ``log Σp^α/(1 − α)`` or Tsallis ``(1 − Σp^α)/(α − 1)``; at order 1 both equal Shannon's.
    normalized : bool
        Divide by the entropy of the uniform distribution over n keys (log n for Rényi's). n is that of
        the law, or the number of keys that the query sees if it is larger. The result is 0 where n ≤ 1.
        A sink counts as one more key here.
    mask, bias, is_causal, scale, law, n_keys, softcap, sinks, enable_gqa,
    implementation
        As in `attention`.

    Returns
    -------
    array (..., L)
        The entropies in nats. Rényi's lie in [0, log n], normalized ones in [0, 1]. The entropy of a
        query that sees no key is 0. The dtype is float32, or float64 for float64 inputs.

    Raises
    ------
    TypeError, ValueError
        As in `attention`, and if `order` is negative or NaN.

    Notes
    -----
    The entropy is exact. It is computed from sums over keys relative to the maximum; see
    `entropy_from_logits` for the formula. With sinks it is the entropy of the distribution over the
    keys and the sink.

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
        query, key, None, mask, bias, law, n_keys, sinks, is_causal, scale, softcap, enable_gqa,
        implementation,
    ))  # fmt: skip
    xp, order = plan.xp, float(order)

    renyi = entropy_of(plan, operands, implementation, order)
    if not normalized:
        return convert_family(xp, renyi, order, family)
    n = lengths_of_law(plan, operands, n_keys)
    # A query may see more keys than the law is told. Its entropy then exceeds the logarithm of that n.
    if n_keys is not None:
        n = xp.maximum(*align(n, visible_lengths(plan, operands.mask)))
    n = n + (0.0 if sinks is None else 1.0)
    return normalized_entropy(xp, renyi, xp.log(clip(xp, n, min=1.0)), order, family)


@_in_one_node(Array)
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
    sinks: Array | None = None,
    enable_gqa: bool = False,
) -> ArrayT:
    """The attention weights as an L×S array, for inspection.

    Parameters
    ----------
    query : array (..., L, E)
    key : array (..., S, E)
    mask, bias, is_causal, scale, law, n_keys, softcap, sinks, enable_gqa
        As in `attention`.

    Returns
    -------
    array (..., L, S)
        The weights, in [0, 1], in the dtype to which the inputs promote. Rows sum to 1, or with sinks
        to 1 minus the weight of the sink. The row of a query that sees no key is 0.

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
        query, key, None, mask, bias, law, n_keys, sinks, is_causal, scale, softcap, enable_gqa,
    ))  # fmt: skip
    xp = plan.xp

    if plan.n_keys == 0:
        return plan.zeros((plan.n_queries, 0))
    logits = Tiles.of(plan, operands).logits((0, plan.n_queries), (0, plan.n_keys))
    # A sink is one more key, whose column is dropped after the softmax.
    if operands.sinks is not None:
        shape = (*plan.batch, plan.n_queries, 1)
        logits = xp.concat((logits, xp.broadcast_to(operands.sinks, shape)), axis=-1)
    ops = Ops(xp)
    _, weight, normalizer, _ = partition(ops, logits, None, ops.row_max(logits))
    weight = divide_or_zero(xp, weight, normalizer)[..., : plan.n_keys]
    return xp.astype(weight, plan.dtype)


@_in_one_node(AttentionStatistics)
def attention_statistics(
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
    sinks: Array | None = None,
    enable_gqa: bool = False,
) -> AttentionStatistics:
    """Entropy, and mean, variance and maximum of the logits, of each query in one pass.

    Parameters
    ----------
    query : array (..., L, E)
    key : array (..., S, E)
    mask, bias, is_causal, scale, law, n_keys, softcap, sinks, enable_gqa
        As in `attention`.

    Returns
    -------
    AttentionStatistics
        A NamedTuple of arrays (..., L) in float32, or float64 for float64 inputs, with the logits s and
        the weights p = softmax(s):

        - ``entropy``: ``−Σ p log p`` in nats, in [0, log n];
        - ``maximum``: the largest logit;
        - ``log_normalizer``: ``log Σ eˢ``;
        - ``mean``: ``Σ p s``, the log-normalizer minus the entropy;
        - ``variance``: ``Σ p (s − mean)²``, at least 0.

        For a query that sees neither a key nor a sink, `maximum` and `log_normalizer` are −∞, and the
        other fields are 0.

    Raises
    ------
    TypeError, ValueError
        As in `attention`.

    Notes
    -----
    The logits are the final ones, after law, soft cap and bias. A sink is the logit of one more key.
    Without soft cap, bias and sinks the variance is ``−dH/d log λ``, where λ is a factor on the scale.
    This is the rate at which the entropy falls if the scale grows. With a soft cap, a bias or sinks the
    identity does not hold, because λ changes the logits in another way.

    The memory is O(L). The variance is summed relative to the mean of each tile, so large logits do not
    cost digits. Gradients in PyTorch, and `torch.compile`, store the logits.

    References
    ----------
    Chan, Golub & LeVeque 1979 for the variance of a union.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import attention_entropy, attention_statistics
    >>> q, k = np.random.default_rng(0).normal(size=(2, 100, 16))
    >>> statistics = attention_statistics(q, k)
    >>> h0, h1 = (attention_entropy(np.exp(u) * q, k) for u in (-1e-4, 1e-4))
    >>> np.allclose(statistics.variance, (h0 - h1) / 2e-4)
    True
    """
    plan, operands = prepare(Arguments(
        query, key, None, mask, bias, law, n_keys, sinks, is_causal, scale, softcap, enable_gqa,
    ))  # fmt: skip
    return statistics_of_spread(plan.xp, spread_of(plan, operands))


@_in_one_node(Array)
def attention_received(
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
    sinks: Array | None = None,
    enable_gqa: bool = False,
    implementation: str | None = None,
) -> Any:
    """The attention weight that each key gets, summed over the queries.

    Parameters
    ----------
    query : array (..., L, E)
    key : array (..., S, E)
    mask, bias, is_causal, scale, law, n_keys, softcap, sinks, enable_gqa,
    implementation
        As in `attention`.

    Returns
    -------
    array (..., S)
        The sums, in [0, L]. Grouped heads have one for each query head. The dtype is float32, or
        float64 for float64 inputs.

    Raises
    ------
    TypeError, ValueError
        As in `attention`.

    Notes
    -----
    The result equals the sum of `attention_weights` over the queries, but the weights are never in
    memory. The sum of the result over the keys is the number of queries that see a key, minus the
    weight of the sinks. To get mean weights, divide the result by the number of queries that see a key.
    Caches that keep the keys with the largest shares divide the result for each key by the number of
    queries that see this key.

    The computation takes two passes over the tiles. Gradients in PyTorch, and `torch.compile`, store
    the weights.

    References
    ----------
    Zhang et al. 2023 (arXiv 2306.14048), who call the keys with the largest sums heavy hitters.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import attention_received
    >>> attention_received(np.zeros((2, 4)), np.zeros((2, 4)), is_causal=True)
    array([1.5, 0.5])
    """
    plan, operands = prepare(Arguments(
        query, key, None, mask, bias, law, n_keys, sinks, is_causal, scale, softcap, enable_gqa,
        implementation,
    ))  # fmt: skip
    if plan.n_keys == 0 or plan.n_queries == 0:
        return plan.zeros((plan.n_keys,), plan.compute)
    state = state_of(plan, operands, implementation, relative_to_maximum=True)
    return Tiles.of(plan, operands).column_sums(state)


@_in_one_node(Array)
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
    sinks: Array | None = None,
    enable_gqa: bool = False,
    implementation: str | None = None,
) -> Any:
    """The mutual information I(Q;K) of the query and the key that it attends to.

    Parameters
    ----------
    query : array (..., L, E)
    key : array (..., S, E)
    mask, bias, is_causal, scale, law, n_keys, softcap, sinks, enable_gqa,
    implementation
        As in `attention`.

    Returns
    -------
    array (...)
        The information in nats, in [0, log min(L, S)]; 0 if all queries have the same weights. Queries
        that see no key are ignored. A sink counts as one more key. The dtype is float32, or float64 for
        float64 inputs.

    Raises
    ------
    TypeError, ValueError
        As in `attention`.

    Notes
    -----
    The formula is ``H(mean of the rows) − mean of H(row)``, the Jensen–Shannon divergence of the rows
    of the attention matrix. It equals the mutual information if the query is drawn uniformly. The
    computation takes two passes over the tiles and does not materialize the weights.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import attention_information
    >>> far_apart = 100 * np.eye(4)
    >>> bool(np.isclose(attention_information(far_apart, far_apart), np.log(4)))
    True
    """
    plan, operands = prepare(Arguments(
        query, key, None, mask, bias, law, n_keys, sinks, is_causal, scale, softcap, enable_gqa,
        implementation,
    ))  # fmt: skip
    xp = plan.xp
    if plan.n_keys == 0 or plan.n_queries == 0:
        return plan.zeros((), plan.compute)

    of_keys = operands._replace(sinks=None)
    columns = state_of(plan, of_keys, implementation, relative_to_maximum=True)
    # Only keys count here: a query that sees a sink alone is ignored.
    sees = xp.astype(columns.normalizer > 0, columns.normalizer.dtype)
    columns = with_sinks(plan, operands, columns, 1.0)
    received = [Tiles.of(plan, operands).column_sums(columns)]
    if operands.sinks is not None:
        by_sinks = weights_of_logits(xp, operands.sinks, columns.maximum, columns.normalizer)
        received.append(xp.sum(by_sinks * sees, axis=-2))
    state = as_rows(columns)
    n_seeing = xp.sum(sees[..., 0], axis=-1, keepdims=True)
    mean_entropy = divide_or_zero(xp, xp.sum(state.entropy(), axis=-1, keepdims=True), n_seeing)
    entropy_of_mean = entropy(xp.concat(received, axis=-1))[..., None]
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
    sinks: Array | None = None,
    enable_gqa: bool = False,
    implementation: str | None = None,
    block_size: int | None = None,
) -> dict[str, str]:
    """The backend that computes a call, and why the others do not. Nothing is computed.

    Parameters
    ----------
    query : array (..., L, E)
    key : array (..., S, E)
    value : array (..., S, Ev), optional
    order : float in [0, ∞], optional
        Report on `attention_entropy` of this order; the report for order 1 also holds for
        `attention_state`. The default is to report on `attention` if there are values, and otherwise
        on order 1. `attention` with sinks computes a state of order 1.
    mask, bias, is_causal, scale, law, n_keys, softcap, sinks, enable_gqa,
    implementation
        As in `attention`.
    block_size : int, optional
        As in `attention_state`.

    Returns
    -------
    dict of str
        An entry for each backend, in the order in which they are tried: ``"runs"`` for the one that
        computes the call, and for the others the reason why they do not. If `implementation` names a
        backend that cannot compute the call, no entry is ``"runs"``, and the call would be an error.

    Raises
    ------
    TypeError, ValueError
        As in `attention` for arguments that do not fit, and if `order` is negative or NaN.

    Notes
    -----
    The backends are:

    - *sdpa*: `torch.nn.functional.scaled_dot_product_attention`.
    - *numpy_tiles*: a pass for arrays in the memory of the host.
    - *jax_nn*: `jax.nn.dot_product_attention`.
    - *triton*: the kernels of this library for PyTorch, CuPy and JAX on a GPU, where a self-test has
      passed.
    - *torch_tiles*: the pass over tiles with operations in place. Its gradient recomputes the tiles.
    - *jax_tiles*: the same tiles for JAX on a CPU, one head at a time.
    - *generic*: the pass over tiles that is the same for all libraries.

    `attention_weights` always takes the generic pass. So does the second pass of `attention_received`
    and `attention_information`. `attention_statistics` takes it too, unless *triton* is able to compute
    the call and it needs no gradient. `factor_for_attention_entropy` takes the tiles of NumPy for large
    calls in the memory of the host, and otherwise the generic pass.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import attention_backends
    >>> x = np.zeros((8, 1024, 64), "float32")
    >>> attention_backends(x, x, x)["numpy_tiles"]
    'runs'
    >>> attention_backends(x, x, x, softcap=30.0)["jax_nn"]
    "the arrays are not JAX's"
    """
    if order is not None:
        check_order(order)
    plan, _ = prepare(Arguments(
        query, key, value, mask, bias, law, n_keys, sinks, is_causal, scale, softcap, enable_gqa,
        implementation, block_size,
    ))  # fmt: skip
    # With sinks `attention` computes a state.
    reported_order = 1.0 if order is None and (value is None or sinks is not None) else order
    report: dict[str, str] = {}
    for name, why in reasons(plan, implementation, reported_order).items():
        is_taken = "runs" in report.values()
        report[name] = why or ("another backend comes first" if is_taken else "runs")
    return report


@quietly_named
def scale_queries(
    query: ArrayT, n_keys: int | Array, *, law: Law = DEFAULT_LAW, head_axis: int | None = None
) -> ArrayT:
    """Queries multiplied by ``law(n)``, to use a law with any attention kernel.

    Parameters
    ----------
    query : array (..., L, E)
        Or an array with the heads at another axis, which `head_axis` gives.
    n_keys : int or array broadcastable to (..., L)
        The number of keys that each query sees. It broadcasts to `query` without its last axis. For
        queries (..., L, H, E), one number for each token has the shape (L, 1).
    law : Law
        Its array parameters fit the query with the heads at axis −3, as in `attention`.
    head_axis : int, optional
        The axis of the heads in `query`: −3 for (..., H, L, E), which is the default, −2 for
        (..., L, H, E). Laws without arrays do not need it.

    Returns
    -------
    array (..., L, E)
        The scaled queries, in the shape and dtype of `query`.

    Raises
    ------
    TypeError, ValueError
        If `query` is not an array of floats, if shapes do not broadcast, or if the arrays belong to
        different libraries or devices.
    ValueError
        If `head_axis` is not an axis of `query` before the last one. If it is not given, although the
        law has as many numbers as there are heads and tokens, and `n_keys` has one number along axis
        −2 and several along axis −3.

    Notes
    -----
    ``softmax((law(n) q) · k / √E)`` is the attention of the law. Scaling the queries differs from
    scaling the final logits if the kernel has a bias, a sink or a soft cap: these come after the law,
    as they do in `attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import scale_queries, laws
    >>> scale_queries(np.ones((1, 2)), 256, law=laws.LogLength(16))
    array([[2., 2.]])
    >>> tokens_first = np.ones((5, 2, 1))  # 2 heads
    >>> law = laws.AffineLog(np.asarray([0.0, 1.0]), 1.0)
    >>> scale_queries(tokens_first, 1, law=law, head_axis=-2).shape
    (5, 2, 1)
    """
    check_law(law)
    arrays = {"query": query} | present(n_keys=array_or_none(n_keys))
    xp = namespace(("law", law.arrays), **arrays)
    device = common_device(("law", law.arrays), **arrays)
    check_floating(xp, query=query)
    check_ndim(2 if head_axis is None else 3, query=query)

    dtype, shape = accumulator(xp, query.dtype), query.shape[:-1]
    n = given_lengths(xp, device, dtype, n_keys, shape)
    if head_axis is not None:
        order = _heads_before_tokens(head_axis, len(shape))
        factors = factor(xp, law, xp.permute_dims(n, order), tuple(shape[i] for i in order))
        back = sorted(range(len(shape)), key=order.__getitem__)
        factors = xp.permute_dims(lift(factors, query.ndim), (*back, len(shape)))
    else:
        _check_heads_are_known(law, n, shape)
        try:
            factors = factor(xp, law, n, shape)
        except ValueError as error:
            if len(shape) < 2 or not law.arrays:
                raise
            hint = "pass `head_axis=-2` for a query (..., tokens, heads, E)"
            raise ValueError(f"{str(error).removesuffix('.')}: {hint}.") from None
    return xp.astype(xp.astype(query, dtype) * factors, query.dtype)


def _check_heads_are_known(law: Law, n: Array, shape: tuple[int, ...]) -> None:
    """Refuse lengths (tokens, 1) for as many heads, whose parameters would be those of the tokens."""
    if len(shape) < 2 or n.shape[-1] != 1 or n.shape[-2] == 1 or shape[-1] != shape[-2]:
        return
    if law.has_numbers_for_heads(shape[-1]):
        must = "be given where the parameters of the law fit axes -3 and -2 of `query`: "
        must += "-3 for (..., heads, tokens, E), -2 for (..., tokens, heads, E)"
        raise value_error("head_axis", must, None)


def _heads_before_tokens(head_axis: int, ndim: int) -> list[int]:
    """The order of all axes but E that brings that of the heads to the last place but one."""
    check_axis(head_axis, ndim + 1, "head_axis")
    head = int(head_axis) % (ndim + 1)
    if head == ndim:
        raise value_error("head_axis", "not be the last axis, which is that of the features", head_axis)
    order = [i for i in range(ndim) if i != head]
    return [*order[:-1], head, order[-1]]
