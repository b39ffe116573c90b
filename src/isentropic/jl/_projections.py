"""Random linear maps that keep distances: the draws of Johnson–Lindenstrauss maps.

How maps are applied is in `_maps`.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from isentropic._checks import check_real, counts, value_error
from isentropic._namespace import Array, accumulator, common_device, namespace
from isentropic.jl._draws import (
    draw_matrix,
    generator_of,
    place_draw,
    random_orthonormal,
    random_signs,
    takes_rng,
)
from isentropic.jl._hadamard import hadamard_order
from isentropic.jl._maps import CountSketch, DenseProjection, HadamardProjection

if TYPE_CHECKING:
    import numpy as np

    from isentropic.jl._draws import Draw


@takes_rng
def gaussian_projection(
    n_features: int, n_components: int, *, rng: Any = None, like: Array | None = None
) -> DenseProjection:
    """The Gaussian random map ``f(x) = R x/√k`` with independent standard normal entries.

    Squared norms are kept on average, and for every x their relative error is that of
    :math:`χ^2_k/k`, so ``min_dim(method="exact")`` is its guarantee.

    Parameters
    ----------
    n_features : int ≥ 1
        The dimension d of the vectors.
    n_components : int ≥ 1
        The dimension k of their images.
    rng : None, int, numpy.random.Generator
        The source of the draw, as for ``numpy.random.default_rng``. Not the seed that the data were
        drawn with: the map must not depend on them.
    like : array of floats, optional
        Its library, device and dtype are those of the map; NumPy and float64 by default.

    Returns
    -------
    DenseProjection

    Raises
    ------
    TypeError
        For sizes that are not integers, an `rng` of another kind, or a `like` that is not an array of
        floats.
    ValueError
        For sizes out of range.

    Notes
    -----
    ``Var ‖f(v)‖² = 2/k`` for a unit vector, ``Var ⟨f(u), f(v)⟩ = (1 + ⟨u, v⟩²)/k`` for two.

    References
    ----------
    Johnson & Lindenstrauss 1984; Dasgupta & Gupta 2003, Random Struct. Alg. 22.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic.jl import gaussian_projection, min_dim
    >>> x = np.random.default_rng(1).normal(size=(20, 10_000))
    >>> f = gaussian_projection(10_000, min_dim(20, eps=0.2), rng=0)
    >>> y = f(x)
    >>> y.shape, bool(abs((y**2).sum(-1) / (x**2).sum(-1) - 1).max() < 0.2)
    ((20, 854), True)
    """
    n_features, n_components = counts(n_features=n_features, n_components=n_components)
    weights = draw_matrix(rng, n_features, n_components, like, lambda g, size: g.standard_normal(size))
    return dense_map(weights, n_components**-0.5)


@takes_rng
def rademacher_projection(
    n_features: int, n_components: int, *, rng: Any = None, like: Array | None = None
) -> DenseProjection:
    """The random map ``f(x) = R x/√k`` with independent entries ±1.

    ``min_dim(method="achlioptas")`` is its guarantee.

    Parameters
    ----------
    n_features, n_components, rng, like
        As for `gaussian_projection`.

    Returns
    -------
    DenseProjection

    Raises
    ------
    TypeError
        For sizes that are not integers, an `rng` of another kind, or a `like` that is not an array of
        floats.
    ValueError
        For sizes out of range.

    Notes
    -----
    ``Var ‖f(v)‖² = (2 − 2Σv⁴)/k`` for a unit vector v: a single feature keeps its length exactly.

    References
    ----------
    Achlioptas 2003, J. Comput. Syst. Sci. 66.

    Examples
    --------
    >>> from isentropic.jl import rademacher_projection
    >>> rademacher_projection(4, 2, rng=0).weights
    array([[ 1., -1., -1., -1.],
           [-1., -1.,  1., -1.]])
    """
    n_features, n_components = counts(n_features=n_features, n_components=n_components)
    weights = draw_matrix(rng, n_features, n_components, like, random_signs)
    return dense_map(weights, n_components**-0.5)


@takes_rng
def sparse_projection(
    n_features: int,
    n_components: int,
    *,
    density: float = 1 / 3,
    rng: Any = None,
    like: Array | None = None,
) -> DenseProjection:
    """The random map ``f(x) = √(s/k) R x`` with entries 0 but for one in s, which is ±1.

    Stored dense: at the density 1/s = 1/3 sparse matrices are several times slower.
    ``min_dim(method="achlioptas")`` is the guarantee for densities of at least 1/3.

    Parameters
    ----------
    n_features, n_components, rng, like
        As for `gaussian_projection`.
    density : float in (0, 1]
        The share 1/s of entries that are not 0.

    Returns
    -------
    DenseProjection

    Raises
    ------
    TypeError
        For sizes that are not integers, an `rng` of another kind, or a `like` that is not an array of
        floats.
    ValueError
        For sizes out of range, or a `density` outside of (0, 1].

    Warns
    -----
    UserWarning
        For a density below 1/3: vectors with few large entries lose their lengths. At the density
        1/√d, with d = 10⁴ and 1000 points of one entry each, 24 % of the squared distances are off by
        more than half at the dimension of the lemma, and 5 % of the points become 0.

    Notes
    -----
    ``Var ‖f(v)‖² = (2 + (s − 3) Σv⁴)/k`` for a unit vector v.

    References
    ----------
    Achlioptas 2003, J. Comput. Syst. Sci. 66; Li, Hastie & Church 2006, KDD.

    Examples
    --------
    >>> from isentropic.jl import sparse_projection
    >>> sparse_projection(6, 2, rng=0).weights
    array([[ 0.,  0.,  1.,  1.,  0., -1.],
           [ 0.,  0.,  0., -1.,  0.,  1.]])
    """
    n_features, n_components = counts(n_features=n_features, n_components=n_components)
    draw = sparse_entries(density)
    weights = draw_matrix(rng, n_features, n_components, like, draw)
    return dense_map(weights, sparse_scale(n_components, density))


@takes_rng
def orthogonal_projection(
    n_features: int, n_components: int, *, rng: Any = None, like: Array | None = None
) -> DenseProjection:
    """The projection onto a uniformly random subspace, scaled by ``√(d/k)``.

    Its rows are orthonormal but for the scale; for k ≥ d its columns are, and it is an isometry.
    ``min_dim(method="haar")`` is its guarantee. The draw takes O(d k²) operations for k ≤ d.

    Parameters
    ----------
    n_features, n_components, rng, like
        As for `gaussian_projection`.

    Returns
    -------
    DenseProjection

    Raises
    ------
    TypeError
        For sizes that are not integers, an `rng` of another kind, or a `like` that is not an array of
        floats.
    ValueError
        For sizes out of range.

    Notes
    -----
    ``‖f(v)‖² = (d/k) Beta(k/2, (d − k)/2)`` in distribution, of variance
    ``2 (d − k)/(k (d + 2))``, for a unit vector v.

    References
    ----------
    Dasgupta & Gupta 2003, Random Struct. Alg. 22; Mezzadri 2007, Notices AMS 54.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic.jl import orthogonal_projection
    >>> f = orthogonal_projection(300, 30, rng=0)
    >>> bool(np.allclose(f.weights @ f.weights.T, np.eye(30)))
    True
    """
    n_features, n_components = counts(n_features=n_features, n_components=n_components)
    generator = generator_of(rng)
    short, long = sorted((n_components, n_features))
    weights = random_orthonormal(generator, short, long)
    weights = weights if n_components <= n_features else weights.T
    return dense_map(place_draw(weights, like), max(n_features / n_components, 1.0) ** 0.5)


@takes_rng
def hadamard_projection(
    n_features: int,
    n_components: int,
    *,
    rounds: int = 1,
    rng: Any = None,
    like: Array | None = None,
) -> HadamardProjection:
    """Fast Johnson–Lindenstrauss: ``f(x) = √(D/k) P H S x``, in O(d log d) and with O(d) memory.

    S flips random signs, H is an orthogonal Hadamard matrix, P keeps k of its coordinates at random:
    the subsampled randomized Hadamard transform. Squared norms are kept on average.

    Parameters
    ----------
    n_features, n_components, rng, like
        As for `gaussian_projection`.
    rounds : int ≥ 1
        How often signs and transform are applied. Two rounds cost twice the time, and take the
        structure out of vectors that one round leaves concentrated.

    Returns
    -------
    HadamardProjection

    Raises
    ------
    TypeError
        For sizes that are not integers, an `rng` of another kind, or a `like` that is not an array of
        floats.
    ValueError
        For sizes out of range.

    Notes
    -----
    H is of order D = d where there is a Hadamard matrix made of Paley's and Sylvester's (d = m·2^j with
    m = 1, 12, 20, 28, 36, 44, 60, such as 384, 640, 768, 896, 5120), and f with k = D is an isometry.
    For other d it is of the next such order, at most 18 % above for d > 16, and the vectors are
    padded with zeros; the sample is of all D coordinates, so nothing is lost by truncation. For
    k > d the order is at least k.

    So f with k = d is a rotation, whose inverse is its adjoint, for d = 64, 80, 768, 896, 4096 or
    28672, and is none for d = 104, 1000, 4864, 11008, 13696 or 29568. There one round has, as a rule,
    no inverse: the first 20 matrices for d = 104 are all singular. Ask for
    `HadamardProjection.has_orthogonal_rows`. `orthogonal_projection` is a rotation for every d, in
    O(d²) operations.

    **The dimension that suffices for Gaussian maps is a heuristic here**, and no theorem: verify it
    on the data, by `distortion`. One round maps a difference of 8 equal entries on a subgroup (such
    as features 0, 512, …, 3584 of 4096) to few distinct values, and at k = 316 its length fails by
    half with probability 3e-5 where the χ² tail says 2e-8. Two rounds mend those cases. What is
    proven asks for more dimensions by logarithmic factors.

    References
    ----------
    Ailon & Chazelle 2009, SIAM J. Comput. 39 (with another P); Tropp 2011, arXiv 1011.1595; Krahmer &
    Ward 2011, arXiv 1009.0744. Hadamard matrices: Paley 1933.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic.jl import hadamard_projection
    >>> f = hadamard_projection(1000, 200, rng=0)
    >>> y = f(np.eye(1000))  # single features keep their lengths exactly
    >>> bool(np.allclose((y**2).sum(-1), 1))
    True
    """
    import numpy as np

    n_features, n_components = counts(n_features=n_features, n_components=n_components)
    (rounds,) = counts(rounds=rounds)
    base, doublings = hadamard_order(max(n_features, n_components))
    size = base << doublings
    generator = generator_of(rng)
    signs = [random_signs(generator, (n_features if i == 0 else size,)) for i in range(rounds)]
    rows = np.sort(generator.choice(size, n_components, replace=False))
    return HadamardProjection(
        tuple(place_draw(part, like) for part in signs), place_draw(rows, like, integer=True)
    )


@takes_rng
def count_sketch(
    n_features: int,
    n_components: int,
    *,
    nonzeros: int = 1,
    rng: Any = None,
    like: Array | None = None,
) -> CountSketch:
    """The count sketch: each feature is added, with a random sign, to `nonzeros` of the components.

    Takes O(d) operations, whatever k is. Squared norms are kept on average. With one nonzero per
    feature vectors of few entries collide; with more this is the sparse Johnson–Lindenstrauss map.

    Parameters
    ----------
    n_features, n_components, rng, like
        As for `gaussian_projection`.
    nonzeros : int ≥ 1
        How many components s each feature goes to, one in each of s blocks; divides n_components.

    Returns
    -------
    CountSketch

    Raises
    ------
    TypeError
        For sizes that are not integers, an `rng` of another kind, or a `like` that is not an array of
        floats.
    ValueError
        For sizes out of range, among them `nonzeros` above `n_components`.

    Notes
    -----
    Features are dealt to the components of a block in equal numbers, after a random permutation, and
    not independently. So two of them share one with a probability p ≤ s/k, and the variance
    ``Var ‖f(v)‖² = (2p/s) (1 − Σv⁴)`` of a unit vector is at most that of the independent draw.
    Otherwise nothing is proven of the draw by dealing.

    References
    ----------
    Charikar, Chen & Farach-Colton 2002; Clarkson & Woodruff 2013, arXiv 1207.6365; Kane & Nelson
    2014, J. ACM 61.

    Examples
    --------
    >>> from isentropic.jl import count_sketch
    >>> count_sketch(6, 2, rng=0).matrix()
    array([[ 1.,  0.,  0., -1.,  0., -1.],
           [ 0., -1., -1.,  0., -1.,  0.]])
    """
    import numpy as np

    n_features, n_components = counts(n_features=n_features, n_components=n_components)
    (nonzeros,) = counts(nonzeros=nonzeros)
    if n_components % nonzeros:
        raise value_error("nonzeros", f"divide `n_components` ({n_components})", nonzeros)
    generator = generator_of(rng)
    block = n_components // nonzeros
    depth = -(-n_features // block)
    signs = random_signs(generator, (nonzeros, n_features))
    components = np.empty((nonzeros, n_features), np.int64)
    features = np.full((nonzeros, depth * block), nonzeros * n_features)
    for i in range(nonzeros):
        dealt = generator.permutation(n_features)
        components[i, dealt] = i * block + np.arange(n_features) % block
        features[i, :n_features] = i * n_features + dealt
    features = features.reshape(nonzeros, depth, block).swapaxes(1, 2).reshape(n_components, depth)
    return CountSketch(
        place_draw(signs, like),
        place_draw(components, like, integer=True),
        place_draw(features, like, integer=True),
    )


def sparse_entries(density: float) -> Draw:
    """How the entries 0 and ±1 of a sparse map are drawn."""
    check_real("density", density, above=0)
    density = float(density)
    if density > 1:
        raise value_error("density", "be at most 1", density)
    if density < 1 / 3:
        warnings.warn(
            f"A density of {density:.3g}, below 1/3, loses the lengths of vectors with few large "
            f"entries, and no guarantee of min_dim covers it; hadamard_projection is fast on all.",
            stacklevel=4,  # the caller of a function that takes_rng
        )

    def draw(generator: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
        u = generator.random(size)
        return 1.0 * (u < density / 2) - 1.0 * (u >= 1 - density / 2)

    return draw


def sparse_scale(n_components: int, density: float) -> float:
    """What the entries of a sparse map are multiplied by."""
    return (n_components * float(density)) ** -0.5


def dense_map(weights: Array, scale: float) -> DenseProjection:
    """The map of a matrix and a number."""
    xp = namespace(weights=weights)
    dtype, place = accumulator(xp, weights.dtype), common_device(weights=weights)
    return DenseProjection(weights, xp.asarray(float(scale), dtype=dtype, device=place))
