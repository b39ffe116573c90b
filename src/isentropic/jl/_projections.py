"""Functions that draw Johnson–Lindenstrauss maps and rotations. `_maps` has their types."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from isentropic._checks import check_choice, check_flag, check_real, counts, value_error
from isentropic._namespace import LikeT, Sliced, accumulator, common_device, namespace
from isentropic.jl._draws import (
    convert_draw,
    draw_matrix,
    generator_of,
    random_normals,
    random_orthonormal,
    random_permutation,
    random_signs,
    random_uniforms,
    takes_rng,
)
from isentropic.jl._flat import factor_orders, flat_matrix
from isentropic.jl._hadamard import hadamard_order
from isentropic.jl._maps import CountSketch, DenseProjection, HadamardProjection, Rotation

if TYPE_CHECKING:
    from isentropic.jl._draws import Draw


@takes_rng
def gaussian_projection(
    n_features: int, n_components: int, *, rng: Any = None, like: Sliced[LikeT] | None = None
) -> DenseProjection[LikeT]:
    """The Gaussian random map ``f(x) = R x/√k``, where R has independent standard normal entries.

    For every x, ``‖f(x)‖²/‖x‖²`` has the distribution of :math:`χ^2_k/k`, with the mean 1. The
    guarantee is ``min_dim(method="exact")``.

    Parameters
    ----------
    n_features : int ≥ 1
        The dimension d of the vectors.
    n_components : int ≥ 1
        The dimension k of their images.
    rng : None, int, numpy.random.Generator
        The source of random numbers, as for `numpy.random.default_rng`. The map of a seed stays the
        same in all versions of NumPy. Do not use the seed that the data were drawn with, because the
        map must be independent of the data.
    like : array of floats, optional
        The map gets the library, device and dtype of this array; by default NumPy and float64.

    Returns
    -------
    DenseProjection
        A map f, with ``f(x, axis=-1)``, ``f.adjoint(y, axis=-1)``, ``f.matrix()``, ``f.n_features``,
        ``f.n_components``, and its arrays ``f.weights`` (k, d) and ``f.scale`` ().

    Raises
    ------
    TypeError
        For sizes that are not integers, an `rng` of another kind, or a `like` that is not an array of
        floats.
    ValueError
        For sizes out of range.

    Notes
    -----
    ``Var ‖f(v)‖² = 2/k`` for a unit vector v, and ``Var ⟨f(u), f(v)⟩ = (1 + ⟨u, v⟩²)/k`` for unit
    vectors u and v.

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
    weights = draw_matrix(rng, n_features, n_components, like, random_normals)
    return dense_map(weights, n_components**-0.5)


@takes_rng
def sparse_projection(
    n_features: int,
    n_components: int,
    *,
    density: float = 1 / 3,
    rng: Any = None,
    like: Sliced[LikeT] | None = None,
) -> DenseProjection[LikeT]:
    """The random map ``f(x) = √(s/k) R x``, where entries of R are ±1 with probability 1/s, else 0.

    With ``density=1`` the entries are random signs: this is the Rademacher map. The guarantee for
    densities of at least 1/3 is ``min_dim(method="achlioptas")``. The matrix is stored dense, because
    at the density 1/3 sparse matrices are several times slower.

    Parameters
    ----------
    n_features, n_components, rng, like
        As for `gaussian_projection`.
    density : float in (0, 1]
        The expected share 1/s of nonzero entries.

    Returns
    -------
    DenseProjection
        As for `gaussian_projection`.

    Raises
    ------
    TypeError
        As for `gaussian_projection`.
    ValueError
        For sizes out of range, or a `density` outside of (0, 1].

    Warns
    -----
    UserWarning
        For a density below 1/3, because the map distorts vectors with few large entries: "Very sparse
        maps" in the documentation has an example.

    Notes
    -----
    ``Var ‖f(v)‖² = (2 + (s − 3) Σv⁴)/k`` for a unit vector v. So with s = 1 a vector with a single
    nonzero feature keeps its length exactly.

    References
    ----------
    Achlioptas 2003, J. Comput. Syst. Sci. 66; Li, Hastie & Church 2006, KDD.

    Examples
    --------
    >>> from isentropic.jl import sparse_projection
    >>> sparse_projection(6, 2, rng=0).weights
    array([[ 0.,  0.,  1.,  1.,  0., -1.],
           [ 0.,  0.,  0., -1.,  0.,  1.]])
    >>> sparse_projection(4, 2, density=1, rng=0).weights
    array([[-1., -1., -1., -1.],
           [-1.,  1., -1.,  1.]])
    """
    n_features, n_components = counts(n_features=n_features, n_components=n_components)
    draw = sparse_entries(density)
    weights = draw_matrix(rng, n_features, n_components, like, draw)
    return dense_map(weights, sparse_scale(n_components, density))


@takes_rng
def orthogonal_projection(
    n_features: int, n_components: int, *, rng: Any = None, like: Sliced[LikeT] | None = None
) -> DenseProjection[LikeT]:
    """The projection onto a uniformly random subspace, scaled by ``√(d/k)``.

    For k ≤ d the rows of `weights` are orthonormal. For k ≥ d the columns are orthonormal, the scale
    is 1, and the map is an isometry. Its guarantee is ``min_dim(method="haar")``. The draw takes
    O(d k²) operations for k ≤ d.

    Parameters
    ----------
    n_features, n_components, rng, like
        As for `gaussian_projection`.

    Returns
    -------
    DenseProjection
        As for `gaussian_projection`.

    Raises
    ------
    TypeError, ValueError
        As for `gaussian_projection`.

    Notes
    -----
    For a unit vector v, ``‖f(v)‖²`` has the distribution of ``(d/k) Beta(k/2, (d − k)/2)``, whose
    variance is ``2 (d − k)/(k (d + 2))``.

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
    # There are no more orthonormal rows than columns.
    short, long = sorted((n_components, n_features))
    weights = random_orthonormal(generator, short, long)
    weights = weights if n_components <= n_features else weights.T
    return dense_map(convert_draw(weights, like), max(n_features / n_components, 1.0) ** 0.5)


@takes_rng
def hadamard_projection(
    n_features: int,
    n_components: int,
    *,
    rounds: int = 1,
    rng: Any = None,
    like: Sliced[LikeT] | None = None,
) -> HadamardProjection[LikeT]:
    """Fast Johnson–Lindenstrauss: ``f(x) = √(D/k) P H S x``, in O(d log d) time and O(d) memory.

    S flips signs at random, H is an orthogonal Hadamard matrix of order D, and P keeps k random
    coordinates. This is the subsampled randomized Hadamard transform. It preserves squared norms on
    average.

    Parameters
    ----------
    n_features, n_components, rng, like
        As for `gaussian_projection`.
    rounds : int ≥ 1
        How often S and H are applied. Two rounds take twice the time, and spread vectors that one
        round leaves concentrated in few coordinates.

    Returns
    -------
    HadamardProjection
        A map as for `gaussian_projection`, with the arrays ``f.signs``, one for each round, and
        ``f.rows``. ``f.has_orthogonal_rows`` tells whether d is an order D.

    Raises
    ------
    TypeError, ValueError
        As for `gaussian_projection`.

    Notes
    -----
    The order D is the smallest order ≥ max(d, k) of a Kronecker product of Paley's and Sylvester's
    matrices. These orders are m·2^j with m = 1, 12, 20, 28, 36, 44, 60. If d is not such an order,
    vectors are padded with zeros; for d > 16 and k ≤ d, D is at most 18 % above d. P samples from all D
    coordinates, so padding loses nothing. With k = D the map is an isometry.

    With k = d the map is a rotation, whose inverse is its adjoint, for d = 64, 80, 768, 896, 4096 or
    28672. It usually has no inverse for d = 104, 1000, 4864, 11008, 13696 or 29568: the first 20
    matrices for d = 104 are all singular. `rotation` draws a rotation for every d.

    **The dimension that suffices for Gaussian maps is a heuristic here**, not a theorem: the proven
    bounds require more dimensions by logarithmic factors. Verify it on the data with `distortion`. "The
    fast map" in the documentation has vectors for which one round fails, and two rounds do not.

    References
    ----------
    Ailon & Chazelle 2009, SIAM J. Comput. 39 (with a sparse Gaussian P); Tropp 2011, arXiv 1011.1595;
    Krahmer & Ward 2011, arXiv 1009.0744. Hadamard matrices: Paley 1933.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic.jl import hadamard_projection
    >>> f = hadamard_projection(1000, 200, rng=0)
    >>> y = f(np.eye(1000))  # vectors with a single nonzero feature keep their lengths exactly
    >>> bool(np.allclose((y**2).sum(-1), 1))
    True
    """
    n_features, n_components = counts(n_features=n_features, n_components=n_components)
    (rounds,) = counts(rounds=rounds)
    size = hadamard_order(max(n_features, n_components)).size
    generator = generator_of(rng)
    # The first signs come before the padding.
    signs = [random_signs(generator, (n_features if i == 0 else size,)) for i in range(rounds)]
    # In ascending order, because the adjoint searches them.
    rows = np.sort(random_permutation(generator, size)[:n_components])
    return HadamardProjection(
        tuple(convert_draw(part, like) for part in signs), convert_draw(rows, like, is_index=True)
    )


@takes_rng
def count_sketch(
    n_features: int,
    n_components: int,
    *,
    nonzeros: int = 1,
    rng: Any = None,
    like: Sliced[LikeT] | None = None,
) -> CountSketch[LikeT]:
    """The count sketch: each feature is added, with random signs, to `nonzeros` of the components.

    Applying it takes O(d) operations for any k. It preserves squared norms on average. With
    ``nonzeros=1``, the features of a vector with few nonzero entries may collide. With more nonzeros
    this is the sparse Johnson–Lindenstrauss map.

    Parameters
    ----------
    n_features, n_components, rng, like
        As for `gaussian_projection`.
    nonzeros : int ≥ 1
        The number s of components that each feature is added to, one in each of s blocks. It must
        divide `n_components`.

    Returns
    -------
    CountSketch
        A map as for `gaussian_projection`, with the arrays ``f.signs`` and ``f.components``, (s, d),
        and ``f.features``, the features that each component sums.

    Raises
    ------
    TypeError
        As for `gaussian_projection`.
    ValueError
        For sizes out of range, and for `nonzeros` that does not divide `n_components`.

    Notes
    -----
    Features are not assigned to components independently. In each block, a random permutation deals
    them to the components in equal numbers. So two features share a component with a probability
    p ≤ s/k, and for a unit vector v the variance ``Var ‖f(v)‖² = (2p/s) (1 − Σv⁴)`` is at most that of
    independent assignment. Nothing else is proven about this draw.

    References
    ----------
    Charikar, Chen & Farach-Colton 2002; Clarkson & Woodruff 2013, arXiv 1207.6365; Kane & Nelson
    2014, J. ACM 61.

    Examples
    --------
    >>> from isentropic.jl import count_sketch
    >>> count_sketch(6, 2, rng=0).matrix()
    array([[-1.,  0., -1., -1.,  0.,  0.],
           [ 0., -1.,  0.,  0., -1.,  1.]])
    """
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
        dealt = random_permutation(generator, n_features)
        components[i, dealt] = i * block + np.arange(n_features) % block
        features[i, :n_features] = i * n_features + dealt
    # Component j of a block has the features that were dealt at the places j, j + block, ….
    features = features.reshape(nonzeros, depth, block).swapaxes(1, 2).reshape(n_components, depth)
    indices = (convert_draw(x, like, is_index=True) for x in (components, features))
    return CountSketch(convert_draw(signs, like), *indices)


@takes_rng
def rotation(
    n_features: int,
    *,
    kind: str = "hadamard",
    blocks: int = 1,
    independent: bool = False,
    rng: Any = None,
    like: Sliced[LikeT] | None = None,
) -> Rotation[LikeT]:
    """A random orthogonal map of any size, whose inverse is its adjoint.

    It keeps norms and inner products, and spreads a large entry of a vector over all entries, so that
    vectors are quantized with smaller errors.

    Parameters
    ----------
    n_features, rng, like
        As for `gaussian_projection`.
    kind : {"hadamard", "haar"}
        ``"hadamard"``: random signs, then a product of small flat matrices, in O(d) memory and about
        O(d log d) operations. ``"haar"``: uniformly distributed over all orthogonal matrices, drawn in
        O(size³) and applied in O(d · size) operations, for blocks of this size.
    blocks : int ≥ 1
        The number of blocks of consecutive features, which must divide `n_features`. Each block is
        rotated by itself. If an axis holds attention heads side by side, pass the number of heads.
    independent : bool
        Whether the blocks have independent signs. By default they all have the same rotation. With
        ``kind="haar"`` they always have the same.

    Returns
    -------
    Rotation
        A map as for `gaussian_projection`, with the tuples of arrays ``f.signs`` and ``f.factors``.
        ``f.fold_into(weight, side=...)`` gives the weight of a layer whose input or output is rotated.

    Raises
    ------
    TypeError
        As for `gaussian_projection`, and for a flag that is not True or False.
    ValueError
        For sizes out of range, an unknown kind, blocks that do not divide `n_features`, and independent
        blocks of the kind "haar".

    Notes
    -----
    ``R = (F₁ ⊗ F₂ ⊗ …) S``, where S flips signs at random. How evenly R spreads a vector with a single
    nonzero entry is its flatness, √d times the largest absolute entry of R; 1 is the least possible.
    The factors are, in the order of preference:

    - Hadamard matrices of Sylvester and Paley, with the flatness 1, for many widths of current models,
      such as 64, 80, 96, 104, 112, 576, 768, 896, 3584, 4096, 4864, 5120, 14336 and 29568;
    - conference matrices of order q + 1: 1.01 for 1000 and 18944;
    - Jacobsthal's matrix with a multiple of the matrix of ones, and the discrete Hartley transform, for
      odd orders: 1.12 for 11008, 1.08 for 13696, 1.04 for 577, 1.53 for 1023. The largest flatness of
      all d up to 1024 is 1.89, that of 945.

    Factors have orders up to 128, or up to 1024 if d cannot be split into such factors: a prime such as
    d = 577 is one dense product. A size with a prime factor above 1024, such as 151936, takes two
    rounds with a Hadamard matrix of a smaller order D. The second round includes the features that the
    first one left out. Then the entries of R are distributed like normal numbers, and the flatness is
    about √(2 log d²). So it is for the kind "haar".

    The signs have the same bits on every machine. The matrices of the kind "haar", and of the Hartley
    transform, are equal up to rounding.

    References
    ----------
    Ashkboos et al. 2024, QuaRot, arXiv 2404.00456; Liu et al. 2024, SpinQuant, arXiv 2405.16406.
    Hadamard matrices and Jacobsthal's matrix: Paley 1933, J. Math. Phys. 12.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic.jl import rotation
    >>> f = rotation(1000, rng=0)
    >>> spike = np.zeros(1000)
    >>> spike[3] = 1
    >>> y = f(spike)
    >>> round(float(abs(y).max() * 1000**0.5), 2), bool(np.allclose(f.adjoint(y), spike))
    (1.01, True)

    """
    n_features, blocks = counts(n_features=n_features, blocks=blocks)
    check_choice("kind", kind, ("hadamard", "haar"))
    check_flag(independent=independent)
    if n_features % blocks:
        raise value_error("blocks", f"divide `n_features` ({n_features})", blocks)
    if independent and kind == "haar":
        raise value_error("independent", "be False for the kind 'haar'", independent)
    size = n_features // blocks
    generator = generator_of(rng)
    if kind == "haar":
        # Signs would not change this distribution.
        signs = [np.ones((1, size))]
        factors = [random_orthonormal(generator, size, size)]
    else:
        orders = factor_orders(size)
        rounds = 1 if math.prod(orders) == size else 2
        signs = [random_signs(generator, (blocks if independent else 1, size)) for _ in range(rounds)]
        factors = [flat_matrix(order) for order in orders]
    return Rotation(
        # Each block has signs of its own in the map, even if they are equal.
        tuple(convert_draw(np.repeat(part, blocks // part.shape[0], axis=0), like) for part in signs),
        # In half precision the factors would not be orthogonal.
        tuple(convert_draw(factor, like, is_wide=True) for factor in factors),
    )


def sparse_entries(density: float) -> Draw:
    """The function that draws the entries 0 and ±1 of a sparse map."""
    check_real("density", density, above=0)
    density = float(density)
    if density > 1:
        raise value_error("density", "be at most 1", density)
    if density == 1:
        return random_signs  # which takes a bit for each, not a word
    if density < 1 / 3:
        warnings.warn(
            f"A density of {density:.3g}, below 1/3, distorts the lengths of vectors with few large "
            f"entries, and no method of min_dim covers it. For a fast map, use hadamard_projection.",
            stacklevel=4,  # the caller of a function decorated by takes_rng
        )

    def draw(generator: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
        u = random_uniforms(generator, size)
        # Both ends of (0, 1) are equally likely, so one number decides on the entry and on its sign.
        return 1.0 * (u < density / 2) - 1.0 * (u >= 1 - density / 2)

    return draw


def sparse_scale(n_components: int, density: float) -> float:
    """The factor on the entries 0 and ±1 of a sparse map."""
    return (n_components * float(density)) ** -0.5


def dense_map(weights: Any, scale: float) -> DenseProjection:
    """The map ``scale · weights x``; the scale becomes an array like `weights`."""
    xp = namespace(weights=weights)
    dtype, device = accumulator(xp, weights.dtype), common_device(weights=weights)
    return DenseProjection(weights, xp.asarray(float(scale), dtype=dtype, device=device))
