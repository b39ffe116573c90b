"""The function that draws rotations. `_maps` has their type, and `_flat` has their factors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from isentropic._checks import check_choice, check_flag, counts, value_error
from isentropic._namespace import Array
from isentropic.jl._draws import (
    convert_draw,
    convert_wide,
    generator_of,
    random_orthonormal,
    random_signs,
    takes_rng,
)
from isentropic.jl._flat import factor_orders, flat_matrix
from isentropic.jl._maps import Rotation


@takes_rng
def rotation(
    n_features: int,
    *,
    kind: str = "hadamard",
    blocks: int = 1,
    independent: bool = False,
    rng: Any = None,
    like: Array | None = None,
) -> Rotation:
    """A random orthogonal map of any size, whose inverse is its adjoint.

    A rotation spreads a large entry of a vector over all entries, so that vectors are quantized with
    smaller errors. It keeps norms and inner products.

    Parameters
    ----------
    n_features : int ≥ 1
        The dimension d of the vectors.
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
    rng : None, int, numpy.random.Generator
        The source of random numbers, as for `numpy.random.default_rng`. The map of a seed stays the
        same in all versions of NumPy.
    like : array of floats, optional
        The map gets the library, device and dtype of this array; by default NumPy and float64.

    Returns
    -------
    Rotation

    Raises
    ------
    TypeError
        For sizes that are not integers, a flag that is not True or False, an `rng` of another kind, or
        a `like` that is not an array of floats.
    ValueError
        For sizes out of range, an unknown kind, blocks that do not divide `n_features`, and independent
        blocks of the kind "haar".

    Notes
    -----
    ``R = (F₁ ⊗ F₂ ⊗ …) S``, where S flips signs at random. How evenly R spreads a vector with a single
    nonzero entry is its flatness, √d times the largest absolute entry of R. For a Hadamard matrix it is
    1, the least possible. The factors are, in the order of preference:

    - Hadamard matrices of Sylvester and Paley, with which the flatness is exactly 1. They exist for
      many widths of current models: 64, 80, 96, 104, 112, 128, 576, 768, 896, 3584, 4096, 4864, 5120,
      6912, 8960, 9728, 13824, 14336, 17408, 25600, 27648, 28672, 29568 and others;
    - conference matrices of order q + 1: 1.01 for 1000 and 18944;
    - Jacobsthal's matrix with a multiple of the matrix of ones, and the discrete Hartley transform, for
      odd orders: 1.12 for 11008 and 22016, 1.08 for 13696, 1.04 for 577, 1.53 for 1023. The largest
      flatness of all d up to 1024 is 1.89, that of 945.

    Factors have orders up to 128. If d cannot be split into such factors, they have orders up to 1024:
    a prime such as d = 577 is one dense product. A size with a prime factor above 1024, such as 151936,
    takes two rounds with a Hadamard matrix of a smaller order D. The second round includes the features
    that the first one left out. Then the entries of R are distributed like normal numbers, and the
    flatness is about √(2 log d²).

    The flatness of the kind "haar" is about √(2 log d²) too: its entries are nearly normal.

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

    The heads of a projection, side by side:

    >>> f = rotation(32 * 128, blocks=32, rng=0)
    >>> f(np.ones((5, 32 * 128))).shape
    (5, 4096)
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
        signs = [np.ones((1, size))]
        factors = [random_orthonormal(generator, size, size)]
    else:
        orders = factor_orders(size)
        rounds = 1 if math.prod(orders) == size else 2
        signs = [random_signs(generator, (blocks if independent else 1, size)) for _ in range(rounds)]
        factors = [flat_matrix(order) for order in orders]
    return Rotation(
        tuple(convert_draw(np.repeat(part, blocks // part.shape[0], axis=0), like) for part in signs),
        tuple(convert_wide(factor, like) for factor in factors),
    )
