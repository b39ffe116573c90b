"""The distribution of each query over the keys, and all that is computed from it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from isentropic._attention.backends import (
    entropy_of,
    output_of,
    reasons,
    spread_of,
    state_of,
)
from isentropic._attention.generic import Tiles, weights_of_logits, with_sinks
from isentropic._attention.plan import Arguments, check, lengths_of_law, prepare, visible_lengths
from isentropic._attention.state import AttentionState, as_rows
from isentropic._attention.statistics import AttentionStatistics, statistics_of_spread
from isentropic._checks import (
    check_choice,
    check_flag,
    check_given,
    check_order,
    is_array,
    refuse_names,
    type_error,
    value_error,
)
from isentropic._entropy import FAMILIES, convert_family, entropy, normalized_entropy, partition
from isentropic._namespace import A_co, Array, ArrayT, Generic, Sliced, imported_torch
from isentropic._numerics import align, clip, divide_or_zero, quietly
from isentropic._ops import Ops
from isentropic._pytrees import Node
from isentropic._records import Record
from isentropic._rows import Coded
from isentropic.laws._law import DEFAULT_LAW, Constant, Law
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


def in_one_node(result: Any) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorate such a function so that its calls are single nodes in the graphs of torch.compile."""
    return functools.partial(quietly, names=NAMES, node_of=result)


def _constructor(init: Callable[_P, None]) -> Callable[_P, None]:
    """Decorate the constructor, which has the arguments of attention but computes nothing."""

    @functools.wraps(init)
    def made(*args: _P.args, **kwargs: _P.kwargs) -> None:
        # Dynamo cannot read the defaults of the method of a new object.
        kwargs.setdefault("law", DEFAULT_LAW)
        try:
            init(*args, **kwargs)
        except TypeError:
            # Python's own message would not say what an argument of another library is called here.
            refuse_names("AttentionDistribution", kwargs, NAMES)
            raise

    return made


class AttentionDistribution(Node, Record, Generic[A_co]):
    """The distribution of each query over the keys, ``softmax(law(n) · scale · QKᵀ)``.

    Its methods compute what attention computes from this distribution. Their memory is O(L), not
    O(L·S), also for gradients, except where they say otherwise. Making the object checks the arguments
    and computes nothing.

    Parameters
    ----------
    query : array (..., L, E)
    key : array (..., S, E)
        Floating-point arrays of one library and device; the axes ``...`` broadcast. Heads are among
        them: the layout is (B, H, L, E). Arrays (B, L, H, E), as FlashAttention and JAX have them,
        raise no error. In them the heads of a token attend to each other. Swap the axes −3 and −2. Keys
        and values may also be the quantized vectors of `jl.quantizer`, of which a tile at a time is
        looked up.
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
        The n of the law. The default is the number of keys that each query sees, under `mask` and
        `is_causal` together. So decoding with a cache equals prefill, and padding does not count.
    softcap : float > 0, optional
        c in ``c · tanh(logit / c)``, applied before the bias.
    sinks : array broadcastable to (...), optional
        A logit σ for each head, of shape (H,) for a query (..., H, L, E). The weight of key j is then
        ``e^{s_j} / (e^σ + Σ e^{s_i})``: a sink takes weight but has no value. The scale, the law and
        the soft cap do not change it, and n does not count it. Sinks of 0 give "softmax plus one"; −∞
        has the same effect as no sink.
    enable_gqa : bool
        Grouped heads: axis −3 of `key` and of values divides that of `query`.
    implementation : str, optional
        The backend that computes the output, the state and the entropy. None chooses the fastest one
        that can; `backends` describes them. A backend that cannot compute a call is an error.

    Raises
    ------
    TypeError
        If an array is not of floats, if `mask` is neither a boolean array nor a Mask, or if the arrays
        belong to different libraries.
    ValueError
        If shapes do not fit, if the arrays are on different devices, or if a value is out of range.
        Inside `torch.compile` and `torch.fx` the methods raise these errors.

    Notes
    -----
    The object is immutable, and a *pytree* in JAX and PyTorch, whose leaves are its arrays. So it can
    be an argument of `jax.jit`, `jax.vmap` and functions of ``torch.func``. The arguments are its
    attributes. Two distributions are equal if all their arguments are, arrays by value.

    A key that a query does not see has no effect on it, even if it is NaN or infinite. If there is a
    mask and the query sees such a key, its results are NaN. On a GPU a visible key that is infinite may
    have the weight 0 instead. Logits beyond the range of the dtype give NaN, without a warning. The
    weights may be 0 instead if all logits of a query are −∞.

    References
    ----------
    Su 2021, https://spaces.ac.cn/archives/8823, for the law; Vaswani et al. 2017; Xiao et al. 2023
    (arXiv 2309.17453) for sinks.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import AttentionDistribution, laws
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 8, 128, 64))
    >>> p = AttentionDistribution(q, k, is_causal=True, law=laws.LogLength(128))
    >>> p.output(v).shape, p.entropy().shape, p.weights().shape
    ((8, 128, 64), (8, 128), (8, 128, 128))
    """

    _argument = "distribution"

    query: A_co
    key: Array | Coded
    mask: Array | Mask | None
    bias: Array | None
    is_causal: bool
    scale: float | None
    law: Law | None
    n_keys: int | Array | None
    softcap: float | None
    sinks: Array | None
    enable_gqa: bool
    implementation: str | None

    @_constructor
    def __init__(
        self,
        query: Sliced[A_co],
        key: Array | Coded,
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
    ) -> None:
        super().__init__(
            query, key, mask, bias, is_causal, scale, law, n_keys, softcap, sinks, enable_gqa,
            implementation,
        )  # fmt: skip
        torch = imported_torch()
        # Inside a trace of PyTorch the checks would be traced twice, here and in a method.
        if torch is None or not (torch.compiler.is_compiling() or isinstance(query, torch.fx.Proxy)):
            check(self._arguments())

    def __repr__(self) -> str:
        given = (
            f"{name}=<array {tuple(x.shape)}>" if is_array(x) else f"{name}={x!r}"
            for name, x in vars(self).items()
            if name == "law" or (x is not None and x is not False)  # no law is not the default
        )  # fmt: skip
        return f"AttentionDistribution({', '.join(given)})"

    def _arguments(self, value: Array | Coded | None = None) -> Arguments:
        return Arguments(
            self.query, self.key, value, self.mask, self.bias, self.law, self.n_keys, self.sinks,
            self.is_causal, self.scale, self.softcap, self.enable_gqa, self.implementation,
        )  # fmt: skip

    @in_one_node(Array)
    def output(self, value: Sliced[ArrayT] | Coded[ArrayT]) -> ArrayT:
        """The attention output ``Σ p v``, as `attention` computes it.

        Parameters
        ----------
        value : array (..., S, Ev)

        Returns
        -------
        array (..., L, Ev)
            In the dtype to which the inputs promote; 0 for a query that sees no key.
        """
        return output_for(self._arguments(value))

    @in_one_node(AttentionState)
    def state(self, value: Array | Coded | None = None) -> AttentionState[A_co]:
        """Output, log-normalizer and entropy in one pass, as `attention_state` computes them.

        Parameters
        ----------
        value : array (..., S, Ev), optional
            Without values the state has no output.

        Returns
        -------
        AttentionState
            In float32, or float64 for float64 inputs.
        """
        return state_for(self._arguments(value))

    @in_one_node(Array)
    def entropy(self, *, order: float = 1.0, family: str = "renyi", normalized: bool = False) -> A_co:
        """The entropy of the weights of each query, as `attention_entropy` computes it.

        Parameters
        ----------
        order : float in [0, ∞], default 1
        family : {"renyi", "tsallis"}
        normalized : bool
            Divide by the entropy of the uniform distribution over n keys.

        Returns
        -------
        array (..., L)
            In nats, in float32, or float64 for float64 inputs; 0 for a query that sees no key.
        """
        return entropy_for(self._arguments(), order, family, normalized)

    @in_one_node(AttentionStatistics)
    def statistics(self) -> AttentionStatistics[A_co]:
        """Entropy, and mean, variance and maximum of the logits, of each query in one pass.

        Returns
        -------
        AttentionStatistics
            A NamedTuple of arrays (..., L) in float32, or float64 for float64 inputs, with the logits s
            and the weights p = softmax(s):

            - ``entropy``: ``−Σ p log p`` in nats, in [0, log n];
            - ``maximum``: the largest logit;
            - ``log_normalizer``: ``log Σ eˢ``;
            - ``mean``: ``Σ p s``, the log-normalizer minus the entropy;
            - ``variance``: ``Σ p (s − mean)²``, at least 0.

            For a query that sees neither a key nor a sink, `maximum` and `log_normalizer` are −∞, and
            the other fields are 0.

        Notes
        -----
        The logits are the final ones, after law, soft cap and bias. A sink is the logit of one more
        key. Without soft cap, bias and sinks the variance is ``−dH/d log λ``, where λ is a factor on
        the scale: the rate at which the entropy falls if the scale grows. With them the identity does
        not hold, because λ changes the logits in another way.

        The variance is summed relative to the mean of each tile (Chan, Golub & LeVeque 1979), so large
        logits do not cost digits. Gradients in PyTorch, and `torch.compile`, store the logits.

        Examples
        --------
        >>> import numpy as np
        >>> from isentropic import AttentionDistribution, attention_entropy
        >>> q, k = np.random.default_rng(0).normal(size=(2, 100, 16))
        >>> variance = AttentionDistribution(q, k).statistics().variance
        >>> h0, h1 = (attention_entropy(np.exp(u) * q, k) for u in (-1e-4, 1e-4))
        >>> np.allclose(variance, (h0 - h1) / 2e-4)
        True
        """
        plan, operands = prepare(self._arguments())
        return statistics_of_spread(plan.xp, spread_of(plan, operands))

    @in_one_node(Array)
    def weights(self) -> A_co:
        """The weights as an L×S array, for inspection.

        Returns
        -------
        array (..., L, S)
            In [0, 1], in the dtype to which the inputs promote. Rows sum to 1, or with sinks to 1 minus
            the weight of the sink. The row of a query that sees no key is 0.

        Examples
        --------
        >>> import numpy as np
        >>> from isentropic import AttentionDistribution
        >>> AttentionDistribution(np.zeros((2, 4)), np.zeros((2, 4)), is_causal=True).weights()
        array([[1. , 0. ],
               [0.5, 0.5]])
        """
        plan, operands = prepare(self._arguments())
        xp = plan.xp
        if plan.n_keys == 0:
            return plan.zeros((plan.n_queries, 0))
        # One tile of all logits, as the weights take as much memory anyway.
        logits = Tiles.of(plan, operands).logits((0, plan.n_queries), (0, plan.n_keys))
        # A sink is one more key, whose column is dropped after the softmax.
        if operands.sinks is not None:
            shape = (*plan.batch, plan.n_queries, 1)
            logits = xp.concat((logits, xp.broadcast_to(operands.sinks, shape)), axis=-1)
        ops = Ops(xp)
        _, weight, normalizer, _ = partition(ops, logits, None, ops.row_max(logits))
        weight = divide_or_zero(xp, weight, normalizer)[..., : plan.n_keys]
        return xp.astype(weight, plan.dtype)

    @in_one_node(Array)
    def received(self) -> A_co:
        """The weight that each key gets, summed over the queries.

        Returns
        -------
        array (..., S)
            The sums, in [0, L]. Grouped heads have one for each query head. The dtype is float32, or
            float64 for float64 inputs.

        Notes
        -----
        The sum of the result over the keys is the number of queries that see a key, minus the weight of
        the sinks. To get mean weights, divide by the number of queries that see a key. Caches that keep
        the keys with the largest shares (the heavy hitters of Zhang et al. 2023, arXiv 2306.14048)
        divide the result for each key by the number of queries that see this key.

        The computation takes two passes over the tiles. Gradients in PyTorch, and `torch.compile`,
        store the weights.

        Examples
        --------
        >>> import numpy as np
        >>> from isentropic import AttentionDistribution
        >>> AttentionDistribution(np.zeros((2, 4)), np.zeros((2, 4)), is_causal=True).received()
        array([1.5, 0.5])
        """
        plan, operands = prepare(self._arguments())
        if plan.n_keys == 0 or plan.n_queries == 0:
            return plan.zeros((plan.n_keys,), plan.compute)
        # Relative to another number the exponents of the second pass might overflow.
        columns = state_of(plan, operands, self.implementation, relative_to_maximum=True)
        return Tiles.of(plan, operands).column_sums(columns)

    @in_one_node(Array)
    def information(self) -> A_co:
        """The mutual information I(Q;K) of the query and the key that it attends to.

        Returns
        -------
        array (...)
            The information in nats, in [0, log min(L, S)]; 0 if all queries have the same weights.
            Queries that see no key are ignored. A sink counts as one more key. The dtype is float32, or
            float64 for float64 inputs.

        Notes
        -----
        The formula is ``H(mean of the rows) − mean of H(row)``, the Jensen–Shannon divergence of the
        rows of the attention matrix. It equals the mutual information if the query is drawn uniformly.
        The computation takes two passes over the tiles, and its gradients are those of `received`.

        Examples
        --------
        >>> import numpy as np
        >>> from isentropic import AttentionDistribution
        >>> far_apart = 100 * np.eye(4)
        >>> information = AttentionDistribution(far_apart, far_apart).information()
        >>> bool(np.isclose(information, np.log(4)))
        True
        """
        plan, operands = prepare(self._arguments())
        xp = plan.xp
        if plan.n_keys == 0 or plan.n_queries == 0:
            return plan.zeros((), plan.compute)
        of_keys = operands._replace(sinks=None)
        columns = state_of(plan, of_keys, self.implementation, relative_to_maximum=True)
        # Only keys count here: a query that sees a sink alone is ignored.
        sees = xp.astype(columns.normalizer > 0, columns.normalizer.dtype)
        columns = with_sinks(plan, operands, columns, 1.0)
        received = [Tiles.of(plan, operands).column_sums(columns)]
        if operands.sinks is not None:
            by_sinks = weights_of_logits(xp, operands.sinks, columns.maximum, columns.normalizer)
            received.append(xp.sum(by_sinks * sees, axis=-2))
        entropies = as_rows(columns).entropy()
        n_seeing = xp.sum(sees[..., 0], axis=-1, keepdims=True)
        mean_entropy = divide_or_zero(xp, xp.sum(entropies, axis=-1, keepdims=True), n_seeing)
        # `entropy` divides by the sum, so the sums over queries need not become means first.
        entropy_of_mean = entropy(xp.concat(received, axis=-1))[..., None]
        # The difference may round to less than 0.
        return clip(xp, entropy_of_mean - mean_entropy, min=0.0)[..., 0]

    @in_one_node(Array)
    def factor_for_entropy(self, target: float | Array) -> A_co:
        """The factor on the logits for which the weights of each query have the entropy `target`.

        A law approximates this factor as a function of n. Here it is exact, for each query. It is
        equivalent to `isentropic.factor_for_entropy` of the logits, but the logits of all queries are
        never in memory at once.

        Parameters
        ----------
        target : float or array broadcastable to (..., L)
            The entropy to reach, in nats.

        Returns
        -------
        array (..., L)
            Factors ≥ 0 (dimensionless). Multiply the queries by them. See
            `isentropic.factor_for_entropy` for targets that no factor reaches, and for derivatives.

        Raises
        ------
        TypeError, ValueError
            If `target` does not broadcast, or belongs to another library or device.
        ValueError
            If there is a bias, a soft cap or a sink. With them the entropy may rise with the factor,
            and then there may be no solution, or several.

        Notes
        -----
        The solver holds the logits of one block of queries against all keys. A block covers all heads,
        or a single one. It has about as many logits as a tile, but at least one query of each head that
        it covers.

        Examples
        --------
        >>> import numpy as np
        >>> from isentropic import AttentionDistribution, attention_entropy
        >>> q, k = np.random.default_rng(0).normal(size=(2, 100, 16))
        >>> factor = AttentionDistribution(q, k).factor_for_entropy(2.0)
        >>> np.round(attention_entropy(factor[:, None] * q, k)[:3], 6)
        array([2., 2., 2.])
        """
        from isentropic._factors import factor_of_attention

        given = {"bias": self.bias, "softcap": self.softcap, "sinks": self.sinks}
        for name, x in given.items():
            if x is not None:
                kind = type(x).__name__
                raise value_error(name, "be None for a distribution with a target entropy", kind)
        return factor_of_attention(self._arguments(), target)

    @in_one_node(Array)
    def kl_divergence(self, other: AttentionDistribution, *, over_heads: bool = False) -> A_co:
        """The Kullback–Leibler divergence ``Σ p log(p/q)`` of each query from another distribution.

        Parameters
        ----------
        other : AttentionDistribution
            q: the same numbers of queries and keys, and axes ``...`` that broadcast with these. Its
            queries and keys may have another size E, and all else may differ: mask, law, sinks, bias.
        over_heads : bool
            Compare the mean over the heads (axis −3) of p with q. Heads that see no key do not count.
            `other` then has as many axes, and the result has one head, or those of `other`.

        Returns
        -------
        array (..., L)
            In nats, in [0, ∞]; ∞ where p has a weight on a key on which q has none, and 0 for a query
            of p that sees neither a key nor a sink. A sink counts as one more key. The dtype is
            float32, or float64 for float64 inputs.

        Raises
        ------
        TypeError
            If `other` is not an AttentionDistribution, or has arrays of another library.
        ValueError
            If numbers of queries or of keys differ, or axes do not broadcast; or if there are no heads.

        Notes
        -----
        The formula is ``Σ p (eᵘ − 1 − u)`` with ``u = log q − log p``, whose terms are not negative. So
        the divergence of close distributions is as accurate as their logits.

        Some queries at a time have the logits of all keys, about as many as a tile, but at least one
        query of all heads. Gradients compute them again; in ``torch.func`` they are stored.

        On a GPU, under `torch.compile`, and for large calls in JAX's transformations or with gradients
        in PyTorch, KL and cross entropy are computed from two states of attention, with the keys of q
        as values. That needs distributions of the same axes ``...`` over the same keys, by masks with
        the same arrays, a p without sinks, and a q without bias, soft cap and quantized keys. The
        result is then exact to the rounding of entropies: a few 1e-7 times the largest logit in
        float32.

        Examples
        --------
        >>> import numpy as np
        >>> from isentropic import AttentionDistribution
        >>> q, k = np.random.default_rng(0).normal(size=(2, 100, 16))
        >>> p = AttentionDistribution(q, k, is_causal=True)
        >>> rounded = AttentionDistribution(q, np.round(k), is_causal=True)
        >>> round(float(p.kl_divergence(rounded).mean()), 3)
        0.014
        """
        return _divergence("kl_divergence", self, other, over_heads)

    @in_one_node(Array)
    def js_divergence(self, other: AttentionDistribution, *, over_heads: bool = False) -> A_co:
        """The Jensen–Shannon divergence of each query from another distribution.

        Parameters
        ----------
        other, over_heads
            As in `kl_divergence`.

        Returns
        -------
        array (..., L)
            ``½ Σ p log(p/m) + ½ Σ q log(q/m)`` with ``m = (p + q)/2``, in nats, in [0, log 2]; log 2
            where only one of the two sees a key or a sink, and 0 where none does. The dtype is as in
            `kl_divergence`.

        Raises
        ------
        TypeError, ValueError
            As in `kl_divergence`.

        Examples
        --------
        >>> import numpy as np
        >>> from isentropic import AttentionDistribution
        >>> x = 100 * np.eye(3)
        >>> p, q = AttentionDistribution(x, x), AttentionDistribution(x, np.roll(x, 1, axis=0))
        >>> np.allclose(p.js_divergence(q), np.log(2))
        True
        """
        return _divergence("js_divergence", self, other, over_heads)

    @in_one_node(Array)
    def cross_entropy(self, other: AttentionDistribution, *, over_heads: bool = False) -> A_co:
        """The cross entropy ``−Σ p log q`` of each query with another distribution.

        Parameters
        ----------
        other, over_heads
            As in `kl_divergence`.

        Returns
        -------
        array (..., L)
            In nats, in [0, ∞], with the limits and the dtype of `kl_divergence`, which is the cross
            entropy minus the entropy of p.

        Raises
        ------
        TypeError, ValueError
            As in `kl_divergence`.

        Examples
        --------
        >>> import numpy as np
        >>> from isentropic import AttentionDistribution
        >>> q, k = np.random.default_rng(0).normal(size=(2, 100, 16))
        >>> p = AttentionDistribution(q, k)
        >>> np.allclose(p.cross_entropy(p), p.entropy())
        True
        """
        return _divergence("cross_entropy", self, other, over_heads)

    @quietly_named
    def backends(
        self, value: Array | Coded | None = None, *, order: float | None = None
    ) -> dict[str, str]:
        """The backend that computes a call, and why the others do not. Nothing is computed.

        Parameters
        ----------
        value : array (..., S, Ev), optional
        order : float in [0, ∞], optional
            Report on `entropy` of this order; the report for order 1 also holds for `state`. The
            default is to report on `output` if there are values, and otherwise on order 1. An output
            with sinks is computed from a state of order 1.

        Returns
        -------
        dict of str
            An entry for each backend, in the order in which they are tried: ``"runs"`` for the one that
            computes the call, and for the others the reason why they do not. If `implementation` names
            a backend that cannot compute the call, no entry is ``"runs"``, and the call would be an
            error.

        Raises
        ------
        TypeError, ValueError
            If `value` does not fit, and if `order` is negative or NaN.

        Notes
        -----
        The backends are:

        - *varlen*: ``torch.nn.attention.varlen.varlen_attn``, for `packed` masks on a GPU.
        - *sdpa*: `torch.nn.functional.scaled_dot_product_attention`.
        - *numpy_tiles*: a pass for arrays in the memory of the host.
        - *jax_nn*: `jax.nn.dot_product_attention`.
        - *triton*: the kernels of this library for PyTorch, CuPy and JAX on a GPU, where a self-test
          has passed.
        - *torch_tiles*: the pass over tiles with operations in place. Its gradient recomputes the
          tiles.
        - *jax_tiles*: the same tiles for JAX on a CPU, one head at a time.
        - *generic*: the pass over tiles that is the same for all libraries.

        `weights` always takes the generic pass. So does the second pass of `received` and
        `information`. `statistics` takes it too, unless *triton* is able to compute the call and it
        needs no gradient. `factor_for_entropy` takes the tiles of NumPy for large calls in the memory
        of the host, and otherwise the generic pass.

        Examples
        --------
        >>> import numpy as np
        >>> from isentropic import AttentionDistribution
        >>> x = np.zeros((8, 1024, 64), "float32")
        >>> AttentionDistribution(x, x).backends(x)["numpy_tiles"]
        'runs'
        >>> AttentionDistribution(x, x, softcap=30.0).backends(x)["jax_nn"]
        "the arrays are not JAX's"
        """
        if order is not None:
            check_order(order)
        plan, _ = prepare(self._arguments(value))
        # A sink has no value, so an output with sinks is merged from a state.
        is_state = value is None or self.sinks is not None
        reported_order = 1.0 if order is None and is_state else order
        report: dict[str, str] = {}
        for name, why in reasons(plan, self.implementation, reported_order).items():
            is_taken = "runs" in report.values()
            report[name] = why or ("another backend comes first" if is_taken else "runs")
        return report


def _divergence(name: str, p: AttentionDistribution, q: Any, over_heads: bool) -> Any:
    from isentropic._attention import divergences

    if not isinstance(q, AttentionDistribution):
        raise type_error("other", "be an AttentionDistribution", type(q).__name__)
    check_flag(over_heads=over_heads)
    return divergences.divergence(name, p._arguments(), q._arguments(), over_heads)


def output_for(arguments: Arguments) -> Any:
    """The attention output of a call."""
    if arguments.value is None:
        check_given(value=None)
    plan, operands = prepare(arguments)
    out: Any = output_of(plan, operands, arguments.implementation)
    if isinstance(arguments.value, Coded):
        out = arguments.value.unmapped(out)
    return out if out.dtype == plan.dtype else plan.xp.astype(out, plan.dtype)


def state_for(arguments: Arguments) -> AttentionState:
    """The state of a call."""
    plan, operands = prepare(arguments)
    law, n_keys = arguments.law, arguments.n_keys
    n_seen, n = None, None
    # `merge_states` compares these counts. A constant factor is the same for any n.
    if law is not None and not isinstance(law, Constant):
        shape = (*plan.batch, plan.n_queries)
        if n_keys is None and not plan.has_mask:
            n_seen = n = plan.xp.full(shape, plan.n_keys, dtype=plan.compute, device=plan.device)
        else:
            n_seen = n = plan.xp.broadcast_to(lengths_of_law(plan, operands, n_keys), shape)
        if n_keys is not None:
            # A given number of keys is that of all blocks together.
            n_seen = plan.xp.broadcast_to(visible_lengths(plan, operands.mask), shape)
    state = as_rows(state_of(plan, operands, arguments.implementation, relative_to_maximum=True))
    if isinstance(arguments.value, Coded):
        state = state._replace(weighted_value=arguments.value.unmapped(cast(Any, state.weighted_value)))
    return state._replace(n_seen=n_seen, n_keys=n)


def entropy_for(arguments: Arguments, order: float, family: str, normalized: bool) -> Any:
    """The entropies of a call."""
    check_order(order)
    check_choice("family", family, FAMILIES)
    check_flag(normalized=normalized)
    plan, operands = prepare(arguments)
    xp, order = plan.xp, float(order)
    renyi = entropy_of(plan, operands, arguments.implementation, order)
    if not normalized:
        return convert_family(xp, renyi, order, family)
    n = lengths_of_law(plan, operands, arguments.n_keys)
    # A query may see more keys than the law is told. Its entropy then exceeds the logarithm of that n.
    if arguments.n_keys is not None:
        n = xp.maximum(*align(n, visible_lengths(plan, operands.mask)))
    n = n + (0.0 if arguments.sinks is None else 1.0)
    return normalized_entropy(xp, renyi, xp.log(clip(xp, n, min=1.0)), order, family)
