"""The short doors to attention, and laws for the kernels of others."""

from __future__ import annotations

import inspect
from typing import TypeVar

from isentropic._attention.distribution import (
    AttentionDistribution,
    entropy_for,
    in_one_node,
    output_for,
    quietly_named,
    state_for,
)
from isentropic._attention.plan import Arguments, array_or_none, factor, given_lengths
from isentropic._attention.state import AttentionState
from isentropic._checks import check_axis, check_floating, check_ndim, value_error
from isentropic._namespace import (
    Array,
    ArrayT,
    Sliced,
    accumulator,
    common_device,
    namespace,
    present,
)
from isentropic._numerics import lift
from isentropic._rows import Coded
from isentropic.laws._law import DEFAULT_LAW, Constant, Law, check_law
from isentropic.masks import Mask

_F = TypeVar("_F")


def _with_options(function: _F) -> _F:
    """Put the text of the options of `AttentionDistribution` into the docstring of a function."""
    if function.__doc__ is not None and AttentionDistribution.__doc__ is not None:
        text, of_class = map(inspect.cleandoc, (function.__doc__, AttentionDistribution.__doc__))
        # The short doors have the options of the class and no text of their own, which could differ.
        options = of_class[of_class.index("mask : ") : of_class.index("\nRaises")]
        names, _, rest = text.partition("    As in `AttentionDistribution`.")
        # The line that names the options makes way for their text.
        start = names.rindex("\nmask, bias")
        function.__doc__ = f"{text[:start]}\n{options.rstrip()}{rest}"
    return function


@_with_options
@in_one_node(Array)
def attention(
    query: ArrayT,
    key: ArrayT | Coded,
    value: ArrayT | Coded,
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
    mask, bias, is_causal, scale, law, n_keys, softcap, sinks, enable_gqa, implementation
        As in `AttentionDistribution`.

    Returns
    -------
    array (..., L, Ev)
        The output, in the dtype to which the inputs promote. Half precision is accumulated in float32.
        The output of a query that sees no key is 0, with a sink or without.

    Raises
    ------
    TypeError, ValueError
        As in `AttentionDistribution`.

    Notes
    -----
    The output is ``softmax(law(n) · scale · QKᵀ) V``, computed tile by tile. The memory is O(L), not
    O(L·S), also for gradients. The exception is `torch.compile` on a GPU, which forms masks other than
    the causal one for PyTorch's own kernel. n counts the keys that a query sees.

    Keys and values that a query does not see have no effect on its output, even if they are NaN or
    infinite.

    References
    ----------
    Su 2021, https://spaces.ac.cn/archives/8823; Vaswani et al. 2017; for the tiles, Rabe & Staats
    2021 (arXiv 2112.05682) and Dao et al. 2022 (arXiv 2205.14135).

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import attention, laws
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 8, 128, 64))
    >>> attention(q, k, v, is_causal=True, law=laws.LogLength(512)).shape
    (8, 128, 64)
    """
    return output_for(Arguments(
        query, key, value, mask, bias, law, n_keys, sinks, is_causal, scale, softcap, enable_gqa,
        implementation,
    ))  # fmt: skip


@_with_options
@in_one_node(AttentionState)
def attention_state(
    query: Sliced[ArrayT],
    key: Array | Coded,
    value: Array | Coded | None = None,
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
) -> AttentionState[ArrayT]:
    """Output, log-normalizer and entropy of attention in one pass, as a state that can be merged.

    Parameters
    ----------
    query : array (..., L, E)
    key : array (..., S, E)
    value : array (..., S, Ev), optional
        The values. Without them the state has no output.
    mask, bias, is_causal, scale, law, n_keys, softcap, sinks, enable_gqa, implementation
        As in `AttentionDistribution`.

    Returns
    -------
    AttentionState
        Its arrays are float32, or float64 for float64 inputs. States of key blocks that are to be
        merged need the total number of keys as `n_keys`, and only one of them may have the sinks.

    Raises
    ------
    TypeError, ValueError
        As in `AttentionDistribution`.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import attention_state
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 128, 64))
    >>> state = attention_state(q, k, v)
    >>> state.output().shape, state.entropy().shape
    ((128, 64), (128,))
    """
    return state_for(Arguments(
        query, key, value, mask, bias, law, n_keys, sinks, is_causal, scale, softcap, enable_gqa,
        implementation,
    ))  # fmt: skip


@_with_options
@in_one_node(Array)
def attention_entropy(
    query: Sliced[ArrayT],
    key: Array | Coded,
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
) -> ArrayT:
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
    mask, bias, is_causal, scale, law, n_keys, softcap, sinks, enable_gqa, implementation
        As in `AttentionDistribution`.

    Returns
    -------
    array (..., L)
        The entropies in nats. Rényi's lie in [0, log n], normalized ones in [0, 1]. The entropy of a
        query that sees no key is 0. The dtype is float32, or float64 for float64 inputs.

    Raises
    ------
    TypeError, ValueError
        As in `AttentionDistribution`, and if `order` is negative or NaN.

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
    return entropy_for(
        Arguments(
            query, key, None, mask, bias, law, n_keys, sinks, is_causal, scale, softcap, enable_gqa,
            implementation,
        ),
        order,
        family,
        normalized,
    )  # fmt: skip


@quietly_named
def scale_queries(
    query: ArrayT, n_keys: int | Array, *, law: Law | None = DEFAULT_LAW, head_axis: int | None = None
) -> ArrayT:
    """Queries multiplied by ``law(n)``, to use a law with any attention kernel.

    Parameters
    ----------
    query : array (..., L, E)
        Or an array with the heads at another axis, which `head_axis` gives.
    n_keys : int or array broadcastable to (..., L)
        The number of keys that each query sees. It broadcasts to `query` without its last axis. For
        queries (..., L, H, E), one number for each token has the shape (L, 1).
    law : Law or None
        Its array parameters fit the query with the heads at axis −3, as in `attention`. None returns
        the queries as they are.
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
    check_law(law, optional=True)
    law = Constant(1) if law is None else law
    arrays = {"query": query} | present(n_keys=array_or_none(n_keys))
    xp = namespace(("law", law.arrays), **arrays)
    device = common_device(("law", law.arrays), **arrays)
    check_floating(xp, query=query)
    check_ndim(2 if head_axis is None else 3, query=query)

    # The factor times the query is rounded once, at the end.
    dtype, shape = accumulator(xp, query.dtype), query.shape[:-1]
    n = given_lengths(xp, device, dtype, n_keys, shape)
    if head_axis is not None:
        order = _heads_before_tokens(head_axis, len(shape))
        # A law has its numbers for heads before the axis of the tokens.
        factors = factor(xp, law, xp.permute_dims(n, order), tuple(shape[i] for i in order))
        # The inverse of a permutation sorts its places.
        back = sorted(range(len(shape)), key=order.__getitem__)
        factors = xp.permute_dims(lift(factors, query.ndim), (*back, len(shape)))
    else:
        _check_heads_are_known(law, n, shape)
        try:
            factors = factor(xp, law, n, shape)
        except ValueError as error:
            # Without arrays in the law, or without an axis for heads, another axis would not help.
            if len(shape) < 2 or not law.arrays:
                raise
            # The likely reason is a query whose tokens come before its heads.
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
    # The axes of `query` are one more, with that of the features.
    head = int(head_axis) % (ndim + 1)
    if head == ndim:
        raise value_error("head_axis", "not be the last axis, which is that of the features", head_axis)
    order = [i for i in range(ndim) if i != head]
    return [*order[:-1], head, order[-1]]
