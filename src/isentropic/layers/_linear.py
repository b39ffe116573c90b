"""Positive random features of the softmax kernel, and attention in linear time with them.

With ω normal, E[exp(ω·x − ‖x‖²/2) exp(ω·y − ‖y‖²/2)] = exp(x·y). Averaged over m features this turns
attention into two attentions that never form L×S: with y the keys and x the queries,

    Σ_j e^{x·y_j} v_j ≈ e^{−‖x‖²/2}/m · Σ_r e^{ω_r·x} Σ_j e^{ω_r·y_j − ‖y_j‖²/2} v_j,

first the features attend to the keys, with the bias −‖y‖²/2, then the queries attend to the features,
with the log-normalizers of the first as bias. Both are the stable pass over tiles, so that nothing
overflows, no shift of the keys leaks through causality, and no constant added to exp biases it.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, NamedTuple

from isentropic._attention.generic import (
    AttentionState,
    Tiles,
    merge_columns,
    output_of_columns,
    tile_state,
)
from isentropic._attention.plan import (
    Arguments,
    Plan,
    array_or_none,
    factor,
    prepare,
    visible_lengths,
)
from isentropic._checks import (
    check_flag,
    check_floating,
    check_given,
    check_ndim,
    check_real,
    counts,
    type_error,
    value_error,
)
from isentropic._loops import BLOCKS, Block, is_compiling, map_blocks, scan_blocks, take
from isentropic._namespace import (
    Array,
    ArrayT,
    accumulator,
    common_device,
    equal_by_value,
    namespace,
    namespace_with_drawn,
    present,
)
from isentropic._numerics import align, clip, lift, log_or, product, quietly
from isentropic.jl._draws import draw_matrix, generator_of, place_draw, random_orthonormal, takes_rng
from isentropic.laws._formulas import DEFAULT_LAW, Law, check_law
from isentropic.masks import causal

# Queries and keys whose products are formed at a time under causality; and rows of an error.


@equal_by_value
class PositiveFeatures(NamedTuple):
    """Random features φ with E[φ(x)·φ(y)] = exp(x·y), all positive.

    Made by `positive_features`, which says what is known of their error.

    Attributes
    ----------
    weights : array (..., m, d)
        The directions ω; of each head its own, where there are axes before.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic.layers import positive_features
    >>> phi = positive_features(4, 100_000, rng=0)
    >>> x, y = np.asarray([0.5, 0, 0, 0]), np.asarray([0.3, 0.4, 0, 0])
    >>> estimate = phi(x) @ phi(y)
    >>> bool(abs(estimate - np.exp(x @ y)) < 0.01)
    True
    """

    weights: Array

    @property
    def n_features(self) -> int:
        """The dimension d of the vectors."""
        return self.weights.shape[-1]

    @property
    def n_components(self) -> int:
        """The number m of features."""
        return self.weights.shape[-2]

    @quietly
    def __call__(self, x: ArrayT) -> ArrayT:
        """``exp(ω·x − ‖x‖²/2)/√m``, (..., d) → (..., m), which overflows for long x."""
        xp = namespace_with_drawn(("features", (self.weights,)), x=x)
        check_floating(xp, x=x)
        check_ndim(1, x=x)
        if x.shape[-1] != self.n_features:
            raise value_error("x", f"have a last dimension of {self.n_features}", x.shape[-1])
        dtype = accumulator(xp, x.dtype)
        y = xp.astype(x, dtype, copy=False)
        directions = xp.matrix_transpose(xp.astype(self.weights, dtype, copy=False))
        score = product(xp, y, directions)
        phi = xp.exp(score + _norm_term(xp, y)) * self.n_components**-0.5
        return xp.astype(phi, x.dtype, copy=False)


@equal_by_value
class LinearAttentionError(NamedTuple):
    """Relative errors of the kernel exp(x·y) that random features estimate, per query.

    Attributes
    ----------
    measured : array (..., L)
        Root mean square over the keys of estimate/exact − 1, for the given draw of the features.
    predicted : array (..., L)
        The root of its expectation over independent features; an upper bound for orthogonal ones.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic.layers import linear_attention_error, positive_features
    >>> q, k = np.random.default_rng(0).normal(size=(2, 5, 16)) / 4
    >>> error = linear_attention_error(q, k, positive_features(16, 1024, rng=1))
    >>> error.measured.shape, bool((error.predicted < 0.1).all())
    ((5,), True)
    """

    measured: Array
    predicted: Array


@takes_rng
def positive_features(
    n_features: int,
    n_components: int,
    *,
    orthogonal: bool = True,
    rng: Any = None,
    like: Array | None = None,
) -> PositiveFeatures:
    r"""Positive random features of the softmax kernel (FAVOR+).

    Parameters
    ----------
    n_features : int ≥ 1
        The dimension d of queries and keys.
    n_components : int ≥ 1
        The number m of features.
    orthogonal : bool
        Directions orthogonal in blocks of d, of the lengths of normal vectors: as unbiased as
        independent ones, and of less variance.
    rng, like
        As for `isentropic.jl.gaussian_projection`.

    Returns
    -------
    PositiveFeatures

    Raises
    ------
    TypeError
        For sizes that are not integers, an `rng` of another kind, or a `like` that is not an array of
        floats.
    ValueError
        For sizes out of range.

    Notes
    -----
    ``φ(x) = m^{−1/2} exp(ω·x − ‖x‖²/2)``. Without the norm term φ(x)·φ(y) estimates
    :math:`e^{\|x+y\|^2/2}`. The relative variance of the estimate, for independent features, is
    :math:`(e^{\|x+y\|^2} - 1)/m`, so the m that is needed grows **exponentially** with the squared
    norms and not at all with the number of keys; that m = O(log n) features suffice is false.
    `linear_attention_error` reports both.

    References
    ----------
    Choromanski et al. 2021, "Rethinking attention with Performers", arXiv 2009.14794.

    Examples
    --------
    >>> from isentropic.layers import positive_features
    >>> phi = positive_features(16, 64, rng=0)
    >>> phi.n_features, phi.n_components
    (16, 64)
    """
    import numpy as np

    n_features, n_components = counts(n_features=n_features, n_components=n_components)
    check_flag(orthogonal=orthogonal)
    if not orthogonal:
        return PositiveFeatures(
            draw_matrix(rng, n_features, n_components, like, lambda g, shape: g.standard_normal(shape))
        )
    generator = generator_of(rng)
    blocks = []
    for _ in range(-(-n_components // n_features)):
        lengths = np.sqrt(generator.chisquare(n_features, size=(n_features, 1)))
        blocks.append(lengths * random_orthonormal(generator, n_features, n_features))
    return PositiveFeatures(place_draw(np.concatenate(blocks)[:n_components], like))


@quietly
def linear_attention(
    query: ArrayT,
    key: ArrayT,
    value: ArrayT,
    features: PositiveFeatures,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    law: Law | None = DEFAULT_LAW,
    n_keys: int | Array | None = None,
) -> ArrayT:
    """Softmax attention estimated by random features, in time and memory linear in L and S.

    Tends to `attention` of the same arguments as the number m of features grows.

    Parameters
    ----------
    query : array (..., L, E)
    key : array (..., S, E)
    value : array (..., S, Ev)
        Floating-point arrays of one library and device; the axes ``...`` broadcast.
    features : PositiveFeatures
        For vectors of E features. Draw them once, outside of transformations.
    is_causal : bool
        The last query sees every key, as in `attention`.
    scale : float > 0, optional
        ``1/√E`` by default.
    law : Law or None
        How the scale follows the number of visible keys; None is the standard attention.
    n_keys : int or array broadcastable to (..., L), optional
        Numbers of keys for the law, instead of the visible ones.

    Returns
    -------
    array (..., L, Ev)
        In the result dtype of the inputs. 0 for a query that sees nothing.

    Raises
    ------
    TypeError, ValueError
        As `attention`, and for features of another library, device or dimension.

    Notes
    -----
    See `positive_features` for the error, which grows with the norms: with x and y the queries and
    keys times the root of the scale, and queries times the law, it is large where ‖x + y‖² exceeds
    log m. Measure it by `linear_attention_error`. O((L + S) m (E + Ev)) operations; causal ones add
    O(L m) for each of the keys in a chunk of 128.

    References
    ----------
    Katharopoulos et al. 2020, arXiv 2006.16236; Choromanski et al. 2021, arXiv 2009.14794.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import attention
    >>> from isentropic.layers import linear_attention, positive_features
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 50, 4)) * 0.7
    >>> out = linear_attention(q, k, v, positive_features(4, 4000, rng=0), is_causal=True)
    >>> bool(abs(out - attention(q, k, v, is_causal=True)).max() < 0.05)
    True
    """
    check_given(value=value)
    plan, queries, keys, weights = _prepare(
        query, key, value, features, is_causal=is_causal, scale=scale, law=law, n_keys=n_keys
    )
    xp, n_queries, total = plan.xp, plan.n_queries, plan.n_keys
    bias = xp.matrix_transpose(_norm_term(xp, keys))
    paired = min(n_queries, total)
    if not is_causal or paired == 0:
        sums = _attend(weights, keys, value, bias)
        out = output_of_columns(xp, _attend_features(queries, weights, sums))
        return xp.astype(out, plan.dtype, copy=False)

    # The first keys are seen by all queries, or the first queries see no key; the others pair up.
    before, n_blind = total - paired, n_queries - paired
    sums = _attend(weights, keys[..., :before, :], value[..., :before, :], bias[..., :before])

    def step(sums: AttentionState, rows: Block) -> tuple[AttentionState, Array]:
        start, size = rows
        x, columns = take(queries[..., n_blind:, :], rows, -2), (start + before, size)
        y, v, b = take(keys, columns, -2), take(value, columns, -2), take(bias, columns, -1)
        seen = merge_columns(
            xp, _attend_features(x, weights, sums), _attend_chunk(xp, x, y, v, b, weights), None
        )
        return merge_columns(xp, sums, _attend(weights, y, v, b), None), output_of_columns(xp, seen)

    # In one piece where lengths are symbolic.
    chunk = paired if is_compiling(xp) else BLOCKS.chunk
    out = scan_blocks(xp, step, sums, paired, chunk)
    if n_blind:
        nothing = xp.zeros(
            (*out.shape[:-2], n_blind, out.shape[-1]), dtype=out.dtype, device=plan.device
        )
        out = xp.concat((nothing, out), axis=-2)
    return xp.astype(out, plan.dtype, copy=False)


@quietly
def linear_attention_error(
    query: Array,
    key: Array,
    features: PositiveFeatures,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    law: Law | None = DEFAULT_LAW,
    n_keys: int | Array | None = None,
) -> LinearAttentionError:
    r"""How far the kernel of `linear_attention` is from the exact one, measured and predicted.

    Parameters
    ----------
    query, key, features, is_causal, scale, law, n_keys
        As for `linear_attention`.

    Returns
    -------
    LinearAttentionError
        Of two arrays (..., L) in float32 or better: the root mean square over the visible keys of the
        relative error, and of the root of its variance :math:`(e^{\|x+y\|^2} - 1)/m`. 0 for a query
        that sees nothing.

    Raises
    ------
    TypeError, ValueError
        As in `linear_attention`.

    Notes
    -----
    Takes O(L S m) operations, a block of queries at a time. The heavy upper tail of the estimates
    makes the measured error fall below the predicted one, but for rare draws far above, where
    ‖x + y‖² exceeds log m: then the estimates are useless, and the measured error is close to 1.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic.layers import linear_attention_error, positive_features
    >>> q, k = np.random.default_rng(0).normal(size=(2, 100, 8)) * 0.5
    >>> error = linear_attention_error(q, k, positive_features(8, 1000, rng=0))
    >>> bool(error.measured.mean() < error.predicted.mean() < 0.1)
    True
    """
    plan, x, y, weights = _prepare(
        query, key, None, features, is_causal=is_causal, scale=scale, law=law, n_keys=n_keys
    )
    xp, m = plan.xp, weights.shape[-2]
    if plan.n_keys == 0:
        zeros = xp.zeros((*plan.batch, plan.n_queries), dtype=x.dtype, device=plan.device)
        return LinearAttentionError(zeros, zeros)
    norms = _norm_term(xp, y)

    def errors(rows: Block) -> tuple[Array, Array]:
        z = take(x, rows, -2)
        exact = z @ xp.matrix_transpose(y)
        estimate = _log_kernel(xp, z, y, norms, weights) + _norm_term(xp, z) - math.log(m)
        # ‖x + y‖² from the halves of the squared norms.
        square = 2 * (exact - _norm_term(xp, z) - xp.matrix_transpose(norms))
        square = clip(xp, square, min=0.0)
        log_error = 2 * log_or(xp, xp.abs(xp.expm1(estimate - exact)), -math.inf)
        visible = None
        if is_causal:
            visible = causal().block(plan.frame, rows, (0, plan.n_keys))
        log_variance = square + log_or(xp, -xp.expm1(-square), -math.inf) - math.log(m)
        return _root_mean_exp(xp, log_error, visible), _root_mean_exp(xp, log_variance, visible)

    measured, predicted = map_blocks(xp, errors, plan.n_queries, BLOCKS.chunk)
    return LinearAttentionError(measured[..., 0], predicted[..., 0])


def _prepare(
    query: Array,
    key: Array,
    value: Array | None,
    features: PositiveFeatures,
    *,
    is_causal: bool,
    scale: float | None,
    law: Law | None,
    n_keys: int | Array | None,
) -> tuple[Plan, Array, Array, Array]:
    """The checked plan; queries and keys whose products are the logits; and the directions."""
    if not isinstance(features, PositiveFeatures):
        raise type_error("features", "be PositiveFeatures", type(features).__name__)
    check_flag(is_causal=is_causal)
    check_law(law, optional=True)
    if scale is not None:
        check_real("scale", scale, above=0)
    plan, operands = prepare(Arguments(query, key, value, scale=1.0))
    namespace_with_drawn(("features", (features.weights,)), query=query)
    law_group = ("law", () if law is None else law.arrays)
    others = {"query": query} | present(n_keys=array_or_none(n_keys))
    xp = namespace(law_group, **others)
    common_device(law_group, **others)
    check_floating(xp, features=features.weights)
    check_ndim(2, features=features.weights)
    if features.n_features != query.shape[-1]:
        must = f"be for vectors of the last dimension of `query`, {query.shape[-1]}"
        raise value_error("features", must, features.n_features)

    x, dtype = xp.astype(operands.query, plan.compute, copy=False), plan.compute
    # Half of the scale on each side: the error of the features grows with both norms.
    root = (1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)) ** 0.5
    x, y = x * root, xp.astype(operands.key, dtype, copy=False) * root
    if law is not None or n_keys is not None:
        mask = causal() if is_causal else None
        n = visible_lengths(plan, mask, n_keys)
    if law is not None:
        x = x * factor(xp, law, n, (*plan.batch, plan.n_queries))
    return plan, x, y, xp.astype(features.weights, dtype, copy=False)


def _norm_term(xp: ModuleType, x: Array) -> Array:
    """−‖x‖²/2, (..., L, 1)."""
    return xp.sum(x * x, axis=-1, keepdims=True) * -0.5


def _attend(queries: Array, keys: Array, value: Array, bias: Array) -> AttentionState:
    """The state, in columns, of plain attention with the logits ``queries · keys + bias``."""
    return Tiles.of(*prepare(Arguments(queries, keys, value, bias=bias, scale=1.0))).state(None)


def _attend_features(queries: Array, weights: Array, sums: AttentionState) -> AttentionState:
    """The state of queries over all keys whose sums the features hold."""
    xp = namespace(queries=queries)
    return _attend(
        queries, weights, output_of_columns(xp, sums), xp.matrix_transpose(sums.log_normalizer())
    )


def _attend_chunk(
    xp: ModuleType, x: Array, y: Array, value: Array, bias: Array, weights: Array
) -> AttentionState:
    """The state of queries over their own chunk of keys: each sees those up to its own."""
    # A key to come has weight 0, but 0 · NaN is NaN in the products: those who see it get it here.
    value = xp.astype(value, x.dtype, copy=False)
    finite = (xp.isfinite(y), xp.isfinite(value))
    key_is_finite, value_is_finite = align(*(xp.all(x, axis=-1) for x in finite))
    is_finite = key_is_finite & value_is_finite
    y, value = xp.where(finite[0], y, 0.0), xp.where(finite[1], value, 0.0)
    bias = xp.where(xp.isfinite(bias), bias, 0.0)
    key_nan = xp.where(is_finite, xp.zeros((), dtype=x.dtype, device=common_device(x=x)), math.nan)[
        ..., None, :
    ]

    s = _log_kernel(xp, x, y, xp.matrix_transpose(bias), weights) + key_nan
    index = xp.arange(x.shape[-2], device=common_device(x=x))
    s = xp.where(lift(index[:, None] >= index[None, :], s.ndim), s, -math.inf)
    return tile_state(xp, s, lambda weight: weight @ value, None)


def _log_kernel(xp: ModuleType, x: Array, y: Array, bias: Array, weights: Array) -> Array:
    """Log Σ_r exp(ω_r·x + ω_r·y + bias), (..., L, S), without overflow."""
    directions = xp.matrix_transpose(weights)
    a, b = x @ directions, y @ directions + bias
    x_max, y_max = xp.max(a, axis=-1, keepdims=True), xp.max(b, axis=-1, keepdims=True)
    kernel = xp.exp(a - x_max) @ xp.matrix_transpose(xp.exp(b - y_max))
    return log_or(xp, kernel, -math.inf) + x_max + xp.matrix_transpose(y_max)


def _root_mean_exp(xp: ModuleType, x: Array, visible: Array | None) -> Array:
    """√ of the mean of eˣ over the visible entries of the last axis, (..., 1)."""
    if visible is not None:
        x = xp.where(lift(visible, x.ndim), x, -math.inf)
    state = tile_state(xp, x, None, None)
    ones = xp.ones_like(x) if visible is None else lift(xp.astype(visible, x.dtype), x.ndim)
    count = clip(xp, xp.sum(ones, axis=-1, keepdims=True), min=1)
    log_root = (state.log_normalizer() - xp.log(count)) / 2
    largest = 0.999 * math.log(float(xp.finfo(x.dtype).max))
    return xp.where(log_root > largest, math.inf, xp.exp(clip(xp, log_root, max=largest)))
