"""Positive random features of the softmax kernel, and attention with them in linear time.

For standard normal ω, E[exp(ω·x − ‖x‖²/2) exp(ω·y − ‖y‖²/2)] = exp(x·y). The average over m features
replaces attention by two attentions that never materialize an L×S array: with keys y and queries x,

    Σ_j e^{x·y_j} v_j ≈ e^{−‖x‖²/2}/m · Σ_r e^{ω_r·x} Σ_j e^{ω_r·y_j − ‖y_j‖²/2} v_j,

First the features attend to the keys, with the bias −‖y‖²/2. Then the queries attend to the features,
with the log-normalizers of the first attention as bias. Both are the stable pass over tiles. So nothing
overflows, no maximum over later keys violates causality, and exp needs no additive constant, which
would bias the estimate.

Importance sampling draws the directions from a wider normal distribution, of the variance s, and
multiplies each term by the ratio of the densities, e^{ℓ_r} = s^{d/2} e^{−(1 − 1/s)‖ω_r‖²/2}. The mean
stays, and the variance falls. The ℓ_r are one more bias of the second attention.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from isentropic._attention.generic import Tiles
from isentropic._attention.plan import Arguments, Plan, array_or_none, factor, prepare, visible_lengths
from isentropic._attention.tile import Sums, absorb, log_normalizer, merge_columns, output_of_columns
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
    A_co,
    Array,
    ArrayT,
    Generic,
    LikeT,
    Sliced,
    accumulator,
    common_device,
    equal_by_value,
    namespace,
    namespace_with_drawn,
    present,
)
from isentropic._numerics import align, clip, lift, log_or, quietly
from isentropic._ops import Ops
from isentropic._products import product
from isentropic.jl._draws import (
    convert_draw,
    draw_matrix,
    generator_of,
    random_normals,
    random_orthonormal,
    takes_rng,
)
from isentropic.laws._law import DEFAULT_LAW, Law, check_law
from isentropic.masks import causal


@equal_by_value
class PositiveFeatures(NamedTuple, Generic[A_co]):
    """The result of `positive_features`, whose documentation describes it."""

    weights: A_co
    variance: A_co | None = None

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
        """The features ``√r exp(ω·x − ‖x‖²/2)/√m``, (..., d) → (..., m). They may overflow for large x.

        r is the ratio of the standard normal density to the one of the directions, at ω.

        Raises
        ------
        TypeError
            If `x` is not a floating-point array of the library of the features.
        ValueError
            If the last axis of `x` does not have d entries, or if `x` is on another device.
        """
        xp = namespace_with_drawn(("features", tuple(present(**self._asdict()).values())), x=x)
        check_floating(xp, x=x)
        check_ndim(1, x=x)
        if x.shape[-1] != self.n_features:
            raise value_error("x", f"have a last dimension of {self.n_features}", x.shape[-1])
        dtype = accumulator(xp, x.dtype)
        y = xp.astype(x, dtype, copy=False)
        weights, log_ratio = _directions(xp, self, dtype)
        if x.ndim == 1:
            log_ratio = log_ratio[..., 0, :]
        score = product(xp, y, xp.matrix_transpose(weights))
        score, log_ratio, norm = align(score, log_ratio, _norm_term(xp, y))
        # The kernel is a product of two features, so each of them has the root of the ratio.
        phi = xp.exp(score + log_ratio / 2 + norm) * self.n_components**-0.5
        return xp.astype(phi, x.dtype, copy=False)


@equal_by_value
class LinearAttentionError(NamedTuple, Generic[A_co]):
    """The result of `linear_attention_error`, whose documentation describes it."""

    measured: A_co
    predicted: A_co


@takes_rng
def positive_features(
    n_features: int,
    n_components: int,
    *,
    squared_norm: float = 0.0,
    orthogonal: bool = True,
    rng: Any = None,
    like: Sliced[LikeT] | None = None,
) -> PositiveFeatures[LikeT]:
    r"""Positive random features φ with E[φ(x)·φ(y)] = exp(x·y): FAVOR+, or FAVOR++ with `squared_norm`.

    Parameters
    ----------
    n_features : int ≥ 1
        The dimension d of queries and keys.
    n_components : int ≥ 1
        The number m of features.
    squared_norm : float ≥ 0
        The typical ‖x + y‖² of the pairs whose kernel is estimated. The directions are drawn such that
        the variance of the estimate is least there. The estimate is unbiased with any number. With 0
        the directions are standard normal, as in FAVOR+.
    orthogonal : bool
        Make the directions orthogonal within blocks of d, with the lengths of normal vectors. The
        estimate is unbiased, as with independent directions, and has less variance.
    rng, like
        As for `isentropic.jl.gaussian_projection`.

    Returns
    -------
    PositiveFeatures
        A function φ: an array (..., d) gives the features (..., m), which may overflow for large x.
        It is a named tuple of two arrays:

        - ``weights``, the directions ω, (m, d). ``phi._replace(weights=...)`` with an array (H, m, d)
          gives each head directions of its own.
        - ``variance``, that of the normal entries of the directions, () or one for each head, in
          float32 or better. None stands for 1.

    Raises
    ------
    TypeError
        If a size is not an integer, if `squared_norm` is not a number, if `rng` has another type, or if
        `like` is not an array of floats.
    ValueError
        If a size or `squared_norm` is out of range.

    Notes
    -----
    With standard normal directions the features are ``φ(x) = m^{−1/2} exp(ω·x − ‖x‖²/2)``. Without the
    norm term φ(x)·φ(y) would estimate :math:`e^{\|x+y\|^2/2}`. With directions of the variance s the
    features have one more factor, the root of the ratio of the densities,
    :math:`s^{d/4} e^{-(1 - 1/s)\|\omega\|^2/4}`. For independent directions the relative variance of
    the estimate is

    .. math:: \frac1m\left[\left(\frac{s^2}{2s-1}\right)^{d/2} e^{\|x+y\|^2/(2s-1)} - 1\right],

    for s = 1 :math:`(e^{\|x+y\|^2} - 1)/m`. It is least at s = (1 + t)/2, where
    :math:`2t = 1 + 2r + \sqrt{(1+2r)^2 + 8r}` and r is ‖x + y‖²/d. That is the s used, with
    `squared_norm` for ‖x + y‖².

    With s = 1 the required m grows **exponentially** with the squared norms. With the best s it does so
    while ‖x + y‖² is below d, and like the power d/2 of ‖x + y‖² above d. In both cases it does not
    depend on the number of keys: it is not true that m = O(log n) features suffice.
    `linear_attention_error` reports the measured and the predicted error.

    For attention x and y are queries and keys times the root of the scale, so ‖x + y‖² is
    ``scale · ‖q + k‖²`` where the law is 1. Its mean over all pairs is the mean of ‖x‖², plus that of
    ‖y‖², plus twice the product of the mean x and the mean y.

    References
    ----------
    Choromanski et al. 2021, "Rethinking attention with Performers", arXiv 2009.14794; Likhosherstov et
    al. 2022, "Chefs' random tables", arXiv 2205.15317.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic.layers import linear_attention_error, positive_features
    >>> phi = positive_features(4, 100_000, rng=0)
    >>> x, y = np.asarray([0.5, 0, 0, 0]), np.asarray([0.3, 0.4, 0, 0])
    >>> bool(abs(phi(x) @ phi(y) - np.exp(x @ y)) < 0.01)
    True

    >>> phi = positive_features(16, 64, rng=0)
    >>> q, k = np.random.default_rng(0).normal(size=(2, 100, 16))  # ‖q + k‖² is 32 on average
    >>> wide = positive_features(16, 64, squared_norm=32 / 16**0.5, rng=0)
    >>> errors = [linear_attention_error(q, k, f, law=None).predicted.mean() for f in (phi, wide)]
    >>> bool(errors[1] < errors[0] / 3)
    True
    """
    n_features, n_components = counts(n_features=n_features, n_components=n_components)
    check_flag(orthogonal=orthogonal)
    check_real("squared_norm", squared_norm, least=0)
    variance = _best_variance(float(squared_norm) / n_features)
    draw = _orthogonal_directions if orthogonal else _independent_directions
    weights: Any = draw(rng, n_features, n_components, math.sqrt(variance), like)
    if squared_norm == 0:
        return PositiveFeatures(weights)
    xp = namespace(weights=weights)
    dtype, device = accumulator(xp, weights.dtype), common_device(weights=weights)
    return PositiveFeatures(weights, xp.asarray(variance, dtype=dtype, device=device))


def _best_variance(ratio: float) -> float:
    """The variance s of the directions' entries with the least second moment; `ratio` is ‖x + y‖²/d.

    With t = 2s − 1 the logarithm of the second moment is d log((1 + t)/2) − (d/2) log t + ‖x + y‖²/t.
    Its derivative is 0 where t² − (1 + 2r) t − 2r = 0.
    """
    b = 1 + 2 * ratio
    # `hypot` does not overflow where b² would.
    t = (b + math.hypot(b, math.sqrt(8 * ratio))) / 2
    return (1 + t) / 2


def _independent_directions(
    rng: Any, n_features: int, n_components: int, deviation: float, like: Array | None
) -> Array:
    def draw(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return deviation * random_normals(generator, shape)

    return draw_matrix(rng, n_features, n_components, like, draw)


def _orthogonal_directions(
    rng: Any, n_features: int, n_components: int, deviation: float, like: Array | None
) -> Array:
    generator = generator_of(rng)
    blocks = []
    for _ in range(-(-n_components // n_features)):
        normals = random_normals(generator, (n_features, n_features))
        lengths = deviation * np.linalg.norm(normals, axis=1, keepdims=True)
        # Each direction is distributed like a normal vector, which keeps the estimate unbiased.
        blocks.append(lengths * random_orthonormal(generator, n_features, n_features))
    directions: Array = convert_draw(np.concatenate(blocks)[:n_components], like)
    return directions


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

    The result converges to `attention` of the same arguments as the number m of features grows.

    Parameters
    ----------
    query : array (..., L, E)
    key : array (..., S, E)
    value : array (..., S, Ev)
        Floating-point arrays of one library and device; the axes ``...`` broadcast.
    features : PositiveFeatures
        Features for vectors of E numbers. Draw them once, outside of transformations.
    is_causal : bool
        Apply the causal mask of `attention`: the last query sees every key.
    scale : float > 0, optional
        The scale of the logits where the law is 1; ``1/√E`` by default.
    law : Law or None
        The factor on the scale as a function of n. None is standard attention.
    n_keys : int or array broadcastable to (..., L), optional
        The n of the law. The default is the number of keys that each query sees.

    Returns
    -------
    array (..., L, Ev)
        The estimate, in the dtype to which the inputs promote. 0 for a query that sees no key.

    Raises
    ------
    TypeError, ValueError
        As in `attention`, and if the features have another library, device or dimension.

    Notes
    -----
    The error grows with the norms; see `positive_features`. Let y be the keys times the root of the
    scale, and x the queries times the root of the scale and the law. The error is large where
    ‖x + y‖² exceeds log m. For heads with few features, the argument `squared_norm` of
    `positive_features` reduces it. `linear_attention_error` measures it. The computation takes
    O((L + S) m (E + Ev)) operations. Causality adds O(L m) for each of the keys in a chunk of 128.

    If ‖x + y‖² is far above log m and E is large, the plain mean of the values is nearer to attention
    than the estimate. Other implementations add a constant to φ, which draws the result towards this
    mean.

    References
    ----------
    Katharopoulos et al. 2020, arXiv 2006.16236; Choromanski et al. 2021, arXiv 2009.14794.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import attention
    >>> from isentropic.layers import linear_attention, positive_features
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 50, 4)) * 0.7
    >>> out = linear_attention(q, k, v, positive_features(4, 4000, rng=1), is_causal=True)
    >>> bool(abs(out - attention(q, k, v, is_causal=True)).max() < 0.05)
    True
    """
    check_given(value=value)
    plan, queries, keys, directions = _plan_of_features(
        query, key, value, features, is_causal, scale, law, n_keys
    )
    xp, n_queries, total = plan.xp, plan.n_queries, plan.n_keys
    value = xp.astype(value, plan.compute, copy=False)
    bias = xp.matrix_transpose(_norm_term(xp, keys))
    paired = min(n_queries, total)
    if not is_causal or paired == 0:
        sums = _attend(directions.weights, keys, value, bias)
        out = output_of_columns(xp, _attend_features(queries, directions, sums))
        return xp.astype(out, plan.dtype, copy=False)

    # If S > L, all queries see the first S − L keys. If L > S, the first L − S queries see no key.
    # The remaining queries and keys form pairs.
    before, n_blind = total - paired, n_queries - paired
    sums = _attend(
        directions.weights, keys[..., :before, :], value[..., :before, :], bias[..., :before]
    )

    ops = Ops(xp)

    def step(sums: Sums, rows: Block) -> tuple[Sums, Array]:
        start, size = rows
        x, columns = take(queries[..., n_blind:, :], rows, -2), (start + before, size)
        y, v, b = take(keys, columns, -2), take(value, columns, -2), take(bias, columns, -1)
        seen = merge_columns(
            ops, _attend_features(x, directions, sums), _attend_chunk(xp, x, y, v, b, directions), None
        )
        # After the queries of the chunk, which see only a part of its keys.
        sums = merge_columns(ops, sums, _attend(directions.weights, y, v, b), None)
        return sums, output_of_columns(xp, seen)

    # One chunk covers all pairs if lengths may be symbolic.
    chunk = paired if is_compiling(xp, paired) else BLOCKS.chunk
    out = scan_blocks(xp, step, sums, paired, chunk)
    if n_blind:
        shape = (*out.shape[:-2], n_blind, out.shape[-1])
        nothing = xp.zeros(shape, dtype=out.dtype, device=plan.device)
        out = xp.concat((nothing, out), axis=-2)
    return xp.astype(out, plan.dtype, copy=False)


@quietly
def linear_attention_error(
    query: Sliced[ArrayT],
    key: Array,
    features: PositiveFeatures,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    law: Law | None = DEFAULT_LAW,
    n_keys: int | Array | None = None,
) -> LinearAttentionError[ArrayT]:
    r"""The error of the kernel that `linear_attention` estimates, measured and predicted.

    Parameters
    ----------
    query, key, features, is_causal, scale, law, n_keys
        As for `linear_attention`.

    Returns
    -------
    LinearAttentionError
        A named tuple of two arrays (..., L) in float32 or better, both root mean squares over the
        visible keys, and 0 for a query that sees no key:

        - ``measured``, of the relative error of the given features, estimate/exact − 1.
        - ``predicted``, of its standard deviation, whose square is the relative variance that
          `positive_features` states. For orthogonal features it is an upper bound.

    Raises
    ------
    TypeError, ValueError
        As in `linear_attention`.

    Notes
    -----
    The computation takes O(L S m) operations, a block of queries at a time. The estimates have a heavy
    upper tail where ‖x + y‖² exceeds log m. There the measured error is mostly below the predicted one,
    and far above it for rare draws. The estimates are then useless, and the measured error is close
    to 1.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic.layers import linear_attention_error, positive_features
    >>> q, k = np.random.default_rng(0).normal(size=(2, 100, 8)) * 0.5
    >>> error = linear_attention_error(q, k, positive_features(8, 1000, rng=0))
    >>> bool(error.measured.mean() < error.predicted.mean() < 0.1)
    True
    """
    plan, x, y, directions = _plan_of_features(
        query, key, None, features, is_causal, scale, law, n_keys
    )
    xp, m = plan.xp, features.n_components
    if plan.n_keys == 0:
        zeros = xp.zeros((*plan.batch, plan.n_queries), dtype=x.dtype, device=plan.device)
        return LinearAttentionError(zeros, zeros)
    norms = _norm_term(xp, y)

    def errors(rows: Block) -> tuple[Array, Array]:
        z = take(x, rows, -2)
        exact = product(xp, z, xp.matrix_transpose(y))
        estimate = _log_kernel(xp, z, y, norms, directions) + _norm_term(xp, z) - math.log(m)
        # ‖x + y‖² = 2 (x·y + ‖x‖²/2 + ‖y‖²/2), and `_norm_term` is −‖·‖²/2.
        square = 2 * (exact - _norm_term(xp, z) - xp.matrix_transpose(norms))
        moment = _log_second_moment(xp, clip(xp, square, min=0.0), features)
        # `expm1` keeps the digits of small errors.
        log_error = 2 * log_or(xp, xp.abs(xp.expm1(estimate - exact)), -math.inf)
        visible = None
        if is_causal:
            visible = causal().block(plan.frame, rows, (0, plan.n_keys))
        # This is log(e^moment − 1) without e^moment, which may overflow.
        log_variance = moment + log_or(xp, -xp.expm1(-moment), -math.inf) - math.log(m)
        return _root_mean_exp(xp, log_error, visible), _root_mean_exp(xp, log_variance, visible)

    measured, predicted = map_blocks(xp, errors, plan.n_queries, BLOCKS.chunk)
    return LinearAttentionError(measured[..., 0], predicted[..., 0])


def _plan_of_features(
    query: Array, key: Array, value: Array | None, features: PositiveFeatures,
    is_causal: bool, scale: float | None, law: Law | None, n_keys: int | Array | None,
) -> tuple[Plan, Array, Array, _Directions]:  # fmt: skip
    """Return the plan, queries and keys whose products are the logits, and the directions."""
    if not isinstance(features, PositiveFeatures):
        raise type_error("features", "be PositiveFeatures", type(features).__name__)
    check_flag(is_causal=is_causal)
    check_law(law, optional=True)
    if scale is not None:
        check_real("scale", scale, above=0)
    namespace(query=query, key=key, **present(value=value))  # which refuses quantized vectors
    # Scale and law follow below, because the norms of queries and keys count here, too.
    plan, operands = prepare(Arguments(query, key, value, scale=1.0))
    namespace_with_drawn(("features", tuple(present(**features._asdict()).values())), query=query)
    law_group = ("law", () if law is None else law.arrays)
    call_arrays = {"query": query} | present(n_keys=array_or_none(n_keys))
    xp = namespace(law_group, **call_arrays)
    common_device(law_group, **call_arrays)
    check_floating(xp, features=features.weights)
    check_ndim(2, features=features.weights)
    if features.n_features != query.shape[-1]:
        must = f"be for vectors of the last dimension of `query`, {query.shape[-1]}"
        raise value_error("features", must, features.n_features)

    x, dtype = xp.astype(operands.query, plan.compute, copy=False), plan.compute
    # Queries and keys get the root of the scale each, as the error grows with both norms.
    root = (1 / math.sqrt(max(query.shape[-1], 1)) if scale is None else float(scale)) ** 0.5
    x, y = x * root, xp.astype(operands.key, dtype, copy=False) * root
    # Without a law this still checks `n_keys`.
    if law is not None or n_keys is not None:
        mask = causal() if is_causal else None
        n = visible_lengths(plan, mask, n_keys)
    if law is not None:
        x = x * factor(xp, law, n, (*plan.batch, plan.n_queries))
    return plan, x, y, _directions(xp, features, dtype)


class _Directions(NamedTuple):
    """What a computation needs of `PositiveFeatures`, in its dtype."""

    weights: Array  # (..., m, E)
    log_ratio: Array  # the ℓ_r of importance sampling, (..., 1, m)


def _directions(xp: ModuleType, features: PositiveFeatures, dtype: Any) -> _Directions:
    weights = xp.astype(features.weights, dtype, copy=False)
    if features.variance is None:
        zeros = xp.zeros((1, weights.shape[-2]), dtype=dtype, device=common_device(weights=weights))
        return _Directions(weights, zeros)
    s = _variance_of_heads(xp, features, dtype)
    square = xp.matrix_transpose(xp.sum(weights * weights, axis=-1, keepdims=True))
    log_ratio = (weights.shape[-1] * xp.log(s) - (s - 1) / s * square) / 2
    return _Directions(weights, log_ratio)


def _variance_of_heads(xp: ModuleType, features: PositiveFeatures, dtype: Any) -> Array:
    """The variance of the directions' entries, (..., 1, 1) with the rank of the directions."""
    variance, weights = features.variance, features.weights
    assert variance is not None
    if tuple(variance.shape) not in ((), tuple(weights.shape[:-2])):
        raise value_error("features", "have one variance, or one for each head", variance.shape)
    return lift(xp.astype(variance, dtype, copy=False)[..., None, None], weights.ndim)


def _log_second_moment(xp: ModuleType, square: Array, features: PositiveFeatures) -> Array:
    """Log of E[estimate²]/exact² for a single feature, where ‖x + y‖² is `square`."""
    if features.variance is None:
        return square
    square, s = align(square, _variance_of_heads(xp, features, square.dtype))
    # s²/(2s − 1) = 1/(1 − (1 − 1/s)²), without cancellation near s = 1.
    return square / (2 * s - 1) - features.n_features / 2 * xp.log1p(-(((s - 1) / s) ** 2))


def _norm_term(xp: ModuleType, x: Array) -> Array:
    """−‖x‖²/2, (..., L, 1)."""
    return xp.sum(x * x, axis=-1, keepdims=True) * -0.5


def _attend(queries: Array, keys: Array, value: Array, bias: Array) -> Sums:
    """The state in columns of plain attention with the logits ``queries · keys + bias``."""
    return Tiles.of(*prepare(Arguments(queries, keys, value, bias=bias, scale=1.0))).state(None)


def _attend_features(queries: Array, directions: _Directions, sums: Sums) -> Sums:
    """The state of the queries over all keys that `sums`, the state of the features, contains."""
    xp = namespace(queries=queries)
    bias, log_ratio = align(xp.matrix_transpose(log_normalizer(xp, sums)), directions.log_ratio)
    return _attend(queries, directions.weights, output_of_columns(xp, sums), bias + log_ratio)


def _attend_chunk(
    xp: ModuleType, x: Array, y: Array, value: Array, bias: Array, directions: _Directions
) -> Sums:
    """The state of the queries of a chunk over the keys of the same chunk, with the causal mask."""
    # A later key has weight 0, but 0 · NaN is NaN in the products. So nonfinite numbers are replaced by
    # 0 there, and NaN is added to the logits of the queries that see the key.
    finite = (xp.isfinite(y), xp.isfinite(value))
    key_is_finite, value_is_finite = align(*(xp.all(x, axis=-1) for x in finite))
    is_finite = key_is_finite & value_is_finite
    y, value = xp.where(finite[0], y, 0.0), xp.where(finite[1], value, 0.0)
    # A key that is not finite has no finite norm either.
    bias = xp.where(xp.isfinite(bias), bias, 0.0)
    zero = xp.zeros((), dtype=x.dtype, device=common_device(x=x))
    key_nan = xp.where(is_finite, zero, math.nan)[..., None, :]

    s = _log_kernel(xp, x, y, xp.matrix_transpose(bias), directions) + key_nan
    index = xp.arange(x.shape[-2], device=common_device(x=x))
    s = xp.where(lift(index[:, None] >= index[None, :], s.ndim), s, -math.inf)
    return absorb(Ops(xp), None, s, value, None)


def _log_kernel(xp: ModuleType, x: Array, y: Array, bias: Array, directions: _Directions) -> Array:
    """Log Σ_r exp(ω_r·x + ω_r·y + ℓ_r + bias), (..., L, S), without overflow."""
    weights = xp.matrix_transpose(directions.weights)
    a, log_ratio = align(product(xp, x, weights), directions.log_ratio)
    a, b = a + log_ratio, product(xp, y, weights) + bias
    # Each factor has a maximum of its own, so that the sum over the features is a product of matrices.
    x_max, y_max = xp.max(a, axis=-1, keepdims=True), xp.max(b, axis=-1, keepdims=True)
    kernel = product(xp, xp.exp(a - x_max), xp.matrix_transpose(xp.exp(b - y_max)))
    # The sum may underflow to 0 where the largest terms of both factors are at different features.
    return log_or(xp, kernel, -math.inf) + x_max + xp.matrix_transpose(y_max)


def _root_mean_exp(xp: ModuleType, x: Array, visible: Array | None) -> Array:
    """√ of the mean of eˣ over the visible entries of the last axis, (..., 1)."""
    if visible is not None:
        x = xp.where(lift(visible, x.ndim), x, -math.inf)
    state = absorb(Ops(xp), None, x, None, None)
    ones = xp.ones_like(x) if visible is None else lift(xp.astype(visible, x.dtype), x.ndim)
    # A query that sees no key has the mean 0, not 0/0.
    count = clip(xp, xp.sum(ones, axis=-1, keepdims=True), min=1)
    log_root = (log_normalizer(xp, state) - xp.log(count)) / 2
    largest = 0.999 * math.log(float(xp.finfo(x.dtype).max))
    return xp.where(log_root > largest, math.inf, xp.exp(clip(xp, log_root, max=largest)))
