"""Quantizers of vectors: a random map, one codebook for all coordinates, packed codes and a scale.

The bytes of codes and scales are the same in every library and on every machine. So `encode` computes
in integers (`_exact`): a row is scaled by a power of two and rounded, so that its norm has about 20
bits. Signs and Hadamard matrices with entries ±1 then give exact sums in float32, in any order. After
each round, numbers are scaled by a power of two and rounded again. What this adds to the error is about
1e-6 of the squared norm for up to 8192 features, and 6e-4 for 131 072, which are the most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from isentropic._checks import (
    check_choice,
    check_floating,
    check_ndim,
    common_shape,
    counts,
    is_integer,
    type_error,
    value_error,
)
from isentropic._loops import Block, map_blocks, take, without_gradient
from isentropic._namespace import (
    A_co,
    Array,
    ArrayT,
    Generic,
    LikeT,
    Sliced,
    accumulator,
    equal_by_value,
    imported_torch,
    is_torch,
    leaves_of,
    namespace,
    namespace_with_drawn,
)
from isentropic._numerics import quietly
from isentropic._products import product
from isentropic._pytrees import Node
from isentropic._rows import Coded, Rows
from isentropic.jl._codebooks import codebook
from isentropic.jl._draws import (
    convert_draw,
    draw_matrix,
    generator_of,
    random_normals,
    random_signs,
    takes_rng,
)
from isentropic.jl._exact import Exponents, exact_sum, pack, reciprocal, root_of_squares, unpack
from isentropic.jl._flat import flat_matrix, hadamard_orders
from isentropic.jl._kronecker import apply_kronecker
from isentropic.jl._maps import DenseProjection, Rotation

KINDS = ("mse", "unbiased", "sign")
BITS = (1, 2, 3, 4, 8)
_MOST_FEATURES = 2**17  # more would overflow the sums of int32
# With fewer rounds, vectors with a single nonzero entry all have the same error.
_ROUNDS = 4
_GRID = 12  # log₂ of the reciprocal of the grid of reconstructions, which are integers on it
_SMALLEST = 2.0**-100  # rows whose entries are all smaller count as zero
_SIGN_GRID = 8  # as `_GRID`, for the entries of the map of signs
_INNER_NUMBERS = 2**20  # reconstructed coordinates of a block of `inner`
_BLOCK_NUMBERS = 2**16  # of the rows of a block, so that all intermediates fit in a processor's cache


class ExpectedError(NamedTuple):
    """What a quantizer is expected to miss.

    Attributes
    ----------
    squared : float
        The mean of ``‖x − x̂‖²/‖x‖²`` over random maps.
    inner : float
        The standard deviation of ``⟨q, x̂⟩`` for orthogonal unit vectors q and x. The formula is that of
        large d. It is too large by about 1/d: for 16 features by up to 8 %.
    """

    squared: float
    inner: float


class _QuantizerArrays(NamedTuple, Generic[A_co]):
    map: Any
    values: A_co


@equal_by_value
class Quantizer(_QuantizerArrays[A_co]):
    """Quantizes vectors: a random map f, then one codebook for all coordinates of ``f(x)``.

    Made by `quantizer`, whose notes have the formulas. It is an immutable tuple of arrays, and so a
    pytree in JAX and PyTorch. Two quantizers are equal if their arrays are.

    Attributes
    ----------
    map : Rotation or DenseProjection
        The map f.
    values : array (2^bits,)
        The codebook, in units of the root mean square of ``f(x)``.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(<{self.n_features} features, {self.bits} bits>)"

    @property
    def n_features(self) -> int:
        """The dimension d of the vectors."""
        return self.map.n_features

    @property
    def bits(self) -> int:
        """The number of bits of a code."""
        return self.values.shape[0].bit_length() - 1

    @quietly
    def encode(self, x: Array) -> QuantizedVectors[A_co]:
        """Quantize vectors.

        Parameters
        ----------
        x : array (..., d) of floats
            It is rounded to float32 first. Gradients do not pass.

        Returns
        -------
        QuantizedVectors
            Of the shape (...). A vector whose entries are all below 2⁻¹⁰⁰ ≈ 8e-31 is decoded to zeros.
            A vector with a NaN or an infinity (in float32) is decoded to NaN.

        Raises
        ------
        TypeError
            If `x` is not a floating-point array of the library of the quantizer.
        ValueError
            If the last axis does not have d entries, or if `x` is on another device.
        """
        xp = self._namespace(x=x)
        check_floating(xp, x=x)
        d = self.n_features
        if x.ndim < 1 or x.shape[-1] != d:
            raise value_error("x", f"have {d} entries along its last axis", tuple(x.shape))
        lead, n_codes = x.shape[:-1], self.map.n_components
        rows = xp.reshape(without_gradient(xp, x), (math.prod(lead), d))
        encode = self._encoder(xp)
        size = max(1, _BLOCK_NUMBERS // max(d, n_codes))

        def block(part: Block) -> tuple[Array, Array]:
            codes, scales = encode(xp.astype(take(rows, part, -2), xp.float32, copy=False))
            return pack(xp, codes, self.bits), scales

        codes, scales = map_blocks(xp, block, rows.shape[0], size, in_threads=True)
        return QuantizedVectors(
            xp.reshape(codes, (*lead, codes.shape[-1])), xp.reshape(scales, lead), self
        )

    @quietly
    def decode(self, vectors: QuantizedVectors) -> A_co:
        """The reconstructions x̂ (..., d), in float32 as the scales. Gradients pass to the scales.

        Raises
        ------
        TypeError, ValueError
            If `vectors` do not fit the quantizer: their bytes, library or device.
        """
        xp = self._check_vectors(vectors)
        return self.map.adjoint(self._coordinates(xp, vectors.codes, vectors.scales))

    @quietly
    def inner(self, query: Sliced[ArrayT], vectors: QuantizedVectors) -> ArrayT:
        """The inner products ⟨q, x̂⟩ of queries (..., L, d) and quantized vectors (..., S), (..., L, S).

        The queries are mapped once. Vectors are looked up in blocks, and never all at once. That takes
        most of the time for few queries. So many queries at a time are faster than one after the other.

        Raises
        ------
        TypeError, ValueError
            As for `encode` and `decode`; also for axes ``...`` that do not broadcast, a single query
            (d,), and a single vector ().
        """
        xp = self._check_vectors(vectors)
        self._namespace(query=query)
        check_floating(xp, query=query)
        check_ndim(2, query=query)
        check_ndim(1, vectors=vectors.scales)
        common_shape(" in its batch axes", query=query.shape[:-2], vectors=vectors.scales.shape[:-1])
        mapped = self.map(xp.astype(query, accumulator(xp, query.dtype), copy=False))
        n_keys = vectors.scales.shape[-1]
        size = max(
            1, _INNER_NUMBERS // max(1, self.map.n_components * math.prod(vectors.scales.shape[:-1]))
        )

        def block(part: Block) -> tuple[Array]:
            y = self._coordinates(xp, take(vectors.codes, part, -2), take(vectors.scales, part, -1))
            y, q = (xp.astype(z, mapped.dtype, copy=False) for z in (y, mapped))
            return (product(xp, y, xp.matrix_transpose(q)),)

        (scores,) = map_blocks(xp, block, n_keys, size)
        return xp.astype(xp.matrix_transpose(scores), query.dtype, copy=False)

    def expected_error(self) -> ExpectedError:
        """What the quantizer is expected to miss, over random maps.

        Examples
        --------
        >>> from isentropic import jl
        >>> [round(jl.quantizer(128, bits, rng=0).expected_error().squared, 4) for bits in (1, 2, 3, 4)]
        [0.3609, 0.116, 0.034, 0.0093]
        """
        d = self.n_features
        squared = codebook(d, self.bits).error
        return ExpectedError(squared, math.sqrt(squared * (1 - squared) / max(d - 1, 1)))

    def _namespace(self, **arrays: Array) -> ModuleType:
        return namespace_with_drawn(("quantizer", tuple(leaves_of(self))), **arrays)

    def _check_vectors(self, vectors: QuantizedVectors) -> ModuleType:
        if not isinstance(vectors, QuantizedVectors):
            raise type_error("vectors", "be what `encode` returns", type(vectors).__name__)
        xp = self._namespace(codes=vectors.codes, scales=vectors.scales)
        size = -(-self.map.n_components * self.bits // 8)
        if vectors.codes.shape != (*vectors.scales.shape, size):
            must = f"have codes of {size} bytes and a scale for each vector"
            raise value_error("vectors", must, (vectors.codes.shape, vectors.scales.shape))
        return xp

    def _coordinates(self, xp: ModuleType, codes: Array, scales: Array) -> Array:
        """The reconstruction of ``f(x)``, (..., k)."""
        n_codes = self.map.n_components
        numbers = unpack(xp, xp.reshape(codes, (-1, codes.shape[-1])), self.bits, n_codes)
        values = xp.astype(self.values, scales.dtype, copy=False)
        found = xp.take(values, xp.reshape(numbers, (-1,)), axis=0)
        return xp.reshape(found, (*scales.shape, n_codes)) * scales[..., None]

    def _encoder(self, xp: ModuleType) -> Callable[[Array], tuple[Array, Array]]:
        """The function from rows (n, d) to codes (n, k) and scales (n, 1)."""
        d, order = self.n_features, self.map._order
        rotate, gain = self._rotation_of_integers(xp)
        norm_bits = min(20, math.floor(23.9 - math.log2(order) / 2))
        values = xp.astype(self.values, xp.float32, copy=False)
        thresholds = (values[1:] + values[:-1]) * 0.5

        def encode(rows: Array) -> tuple[Array, Array]:
            u, unit = _integers(xp, rows, norm_bits)
            norm, power, inverse_power = root_of_squares(xp, u)
            y = rotate(u)
            inverse = reciprocal(xp, norm) * inverse_power
            z = y * (inverse * float(np.float32(math.sqrt(d) / gain * 2.0**-29)))
            codes = xp.reshape(xp.searchsorted(thresholds, xp.reshape(z, (-1,))), z.shape)
            codes = xp.astype(codes, xp.int32)
            scales = (norm * float(np.float32(d**-0.5))) * power
            return codes, unit(self._corrected(xp, scales, z, codes))

        return encode

    def _corrected(self, xp: ModuleType, scales: Array, z: Array, codes: Array) -> Array:
        return scales

    def _rotation_of_integers(self, xp: ModuleType) -> tuple[Callable[[Array], Array], float]:
        """`map` times a factor, on rows of integers whose norm is so small that all sums are exact."""
        signs = [xp.astype(x[0, :], xp.float32, copy=False) for x in self.map.signs]
        dtype = _exact_dtype(xp)
        factors = [xp.astype(x, dtype, copy=False) for x in self.map.factors]
        # ±1 in place of ±1/√m
        factors = [xp.round(x * math.sqrt(x.shape[0])) for x in factors]
        order, d = self.map._order, self.n_features
        # A product multiplies the norm by √order. The powers of two bring it back: after each round it
        # is above half of the first one and, but for rounding, not above it.
        growth = math.log2(order) / 2
        rounds = range(len(signs))
        shifts = [math.ceil(growth * (i + 1)) - math.ceil(growth * i) for i in rounds]

        def rotate(u: Array) -> Array:
            for sign, shift in zip(signs, shifts, strict=True):
                u = u * sign[None, :]
                y = apply_kronecker(xp, factors, xp.astype(u[:, :order], dtype, copy=False), 1)
                y = xp.round(xp.astype(y, xp.float32, copy=False) * 2.0**-shift)
                if order < d:  # the next round begins with the coordinates that this one left out
                    gain = float(np.float32(2.0 ** (growth - shift)))
                    y = xp.concat((xp.round(u[:, order:] * gain), y), axis=1)
                u = y
            return u

        return rotate, 2.0 ** (growth * len(signs) - sum(shifts))


@equal_by_value
class UnbiasedQuantizer(Quantizer[A_co]):
    """A `Quantizer` whose scale makes ⟨q, x̂⟩ unbiased over random maps."""

    __slots__ = ()

    def expected_error(self) -> ExpectedError:
        d = self.n_features
        error = codebook(d, self.bits).error
        squared = error / (1 - error)
        return ExpectedError(squared, math.sqrt(squared / max(d - 1, 1)))

    def _corrected(self, xp: ModuleType, scales: Array, z: Array, codes: Array) -> Array:
        """The scale ‖x‖²/⟨f(x), v⟩, which is √d ‖x‖/⟨z, v⟩ with z = √d f(x)/‖x‖."""
        d = self.n_features
        bits = max(2, min(12, 24 - math.ceil(math.log2(d))))  # so that the sums fit in int32
        numbers = xp.round(xp.astype(self.values, xp.float32, copy=False) * 2.0**_GRID)
        high = xp.round(numbers * 2.0**-6)
        parts = (high, numbers - high * 2.0**6)
        whole = xp.astype(xp.round(z * 2.0**bits), xp.int32)
        index = xp.reshape(codes, (-1,))
        upper, lower = (
            exact_sum(xp, whole * xp.reshape(xp.take(xp.astype(x, xp.int32), index, axis=0), z.shape))
            for x in parts
        )
        total = xp.astype(upper, xp.float32) * 2.0**6 + xp.astype(lower, xp.float32)
        total = xp.where(total > 0, total, 1.0)  # of zeros
        of_total = Exponents(xp, total)
        leading = xp.round(total * of_total.power(lambda j: 14 - j))
        inverse = reciprocal(xp, leading) * of_total.power(lambda j: 14 - j)
        return (scales * inverse) * float(np.float32(d * 2.0 ** (bits + _GRID - 29)))


@equal_by_value
class SignQuantizer(Quantizer[A_co]):
    """A `Quantizer` that keeps the signs of Gaussian projections (QJL). ⟨q, x̂⟩ is unbiased."""

    __slots__ = ()

    def expected_error(self) -> ExpectedError:
        k, d = self.map.n_components, self.n_features
        # x̂ = √(π/2)/k Σ sign(⟨s, x⟩) s has the variance (π/2 − 1)/k along x, and π/2/k in each of the
        # d − 1 directions across it.
        return ExpectedError((math.pi / 2 * d - 1) / k, math.sqrt(math.pi / 2 / k))

    def _encoder(self, xp: ModuleType) -> Callable[[Array], tuple[Array, Array]]:
        d, k = self.n_features, self.map.n_components
        weights = xp.astype(self.map.weights, xp.float32, copy=False)
        entries = xp.matrix_transpose(xp.round(weights * 2.0**_SIGN_GRID))
        dtype = _exact_dtype(xp)
        entries = xp.astype(entries, dtype, copy=False)
        # A row of the map has a norm of about √d 2⁸, and at most 8 √d + 100 times 2⁸.
        norm_bits = math.floor(23.9 - _SIGN_GRID - math.log2(math.sqrt(d) + 12))

        def encode(rows: Array) -> tuple[Array, Array]:
            u, unit = _integers(xp, rows, 20)
            norm, power, _ = root_of_squares(xp, u)
            u = xp.round(u * 2.0 ** (norm_bits - 20))
            y = product(xp, xp.astype(u, dtype, copy=False), entries)
            codes = xp.astype(y >= 0, xp.int32)
            return codes, unit((norm * float(np.float32(math.sqrt(math.pi / 2) / k))) * power)

        return encode


@dataclass(frozen=True, eq=False, repr=False)
class QuantizedVectors(Node, Coded[A_co]):
    """Vectors (..., d) as packed codes, as `Quantizer.encode` makes them.

    They are indexed as an array (...) of vectors: ``vectors[:10]`` are the first ten, and
    ``len(vectors)`` is the length of the first axis. They are a pytree in JAX and PyTorch.

    Attributes
    ----------
    codes : array (..., bytes) of uint8
        The codes of the coordinates of the mapped vectors, the first code in the lowest bits.
    scales : array (...) of float32
        What the reconstructions are multiplied by.
    quantizer : Quantizer
        The quantizer that decodes them.

    Examples
    --------
    Codes and scales can be stored. The quantizer of the same seed decodes them:

    >>> import numpy as np
    >>> from isentropic import jl
    >>> vectors = jl.quantizer(8, 4, rng=0).encode(np.ones((3, 8)))
    >>> jl.QuantizedVectors(vectors.codes, vectors.scales, jl.quantizer(8, 4, rng=0)) == vectors
    True
    >>> vectors[1:]
    QuantizedVectors(<(2,) of 8 features, 4 bits>)
    """

    codes: A_co
    scales: A_co
    quantizer: Quantizer[A_co]
    _argument = "vectors"
    _how_to_convert = ": decode it, `vectors.quantizer.decode(vectors)`"  # in errors

    def __getitem__(self, index: Any) -> QuantizedVectors[A_co]:
        parts = index if isinstance(index, tuple) else (index,)
        parts = parts if any(x is ... for x in parts) else (*parts, ...)
        # The last axis of the codes is that of their bytes.
        return replace(self, codes=self.codes[(*parts, slice(None))], scales=self.scales[parts])

    def __post_init__(self) -> None:
        if not isinstance(self.quantizer, Quantizer):
            raise type_error("quantizer", "be a quantizer", type(self.quantizer).__name__)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape (..., d) of the vectors."""
        return (*self.scales.shape, self.n_features)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        must = "be decoded first, `quantizer.decode(vectors)`, or kept as `codes` and `scales`"
        raise type_error("vectors", must, "a conversion to an array")

    def __len__(self) -> int:
        if self.scales.ndim < 1:
            raise TypeError("len() of a single vector, which has no axis but that of its features")
        return self.scales.shape[0]

    def __iter__(self) -> Iterator[QuantizedVectors[A_co]]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        shape, f = tuple(self.scales.shape), self.quantizer
        return f"QuantizedVectors(<{shape} of {f.n_features} features, {f.bits} bits>)"

    @property
    def n_features(self) -> int:
        return self.quantizer.n_features

    def rows(self) -> Rows:
        self.quantizer._check_vectors(self)
        return _CodedRows(self)

    def mapped(self, query: Array) -> Any:
        xp = self.quantizer._namespace(query=query)
        check_floating(xp, query=query)
        return self.quantizer.map(xp.astype(query, accumulator(xp, query.dtype), copy=False))

    def unmapped(self, y: Array) -> Any:
        return self.quantizer.map.adjoint(y)


class _CodedRows(Rows):
    """The reconstructions of f(x) of quantized vectors x."""

    def __init__(self, vectors: QuantizedVectors) -> None:
        self.vectors = vectors
        self.shape = (*vectors.scales.shape, vectors.quantizer.map.n_components)
        self.dtype = vectors.scales.dtype
        self.arrays = vectors.arrays

    def __getitem__(self, index: Any) -> _CodedRows:
        return _CodedRows(self.vectors[index])

    def block(self, block: Block) -> Array:
        codes, scales = self.vectors.codes, self.vectors.scales
        xp = namespace(codes=codes)
        rows = take(codes, block, -2), take(scales, block, -1)
        return self.vectors.quantizer._coordinates(xp, *rows)

    def without_gradient(self) -> _CodedRows:
        xp = namespace(scales=self.vectors.scales)
        return _CodedRows(replace(self.vectors, scales=without_gradient(xp, self.vectors.scales)))

    def finite(self) -> tuple[_CodedRows, Array]:
        xp = namespace(scales=self.vectors.scales)
        is_finite = xp.isfinite(self.vectors.scales)
        scales = xp.where(is_finite, self.vectors.scales, 0.0)
        return _CodedRows(replace(self.vectors, scales=scales)), is_finite


@takes_rng
def quantizer(
    n_features: int,
    bits: int = 4,
    *,
    kind: str = "mse",
    n_components: int | None = None,
    rng: Any = None,
    like: Sliced[LikeT] | None = None,
) -> Quantizer[LikeT]:
    r"""A quantizer of vectors: a random rotation, then the best scalar codebook for every coordinate.

    After a random rotation, the coordinates of any vector have nearly the same distribution. So one
    codebook fits all vectors, and nothing is learned from the data. The codes of a seed have the same
    bytes in every library and on every machine.

    Parameters
    ----------
    n_features : int from 1 to 131072
        The dimension d of the vectors.
    bits : {1, 2, 3, 4, 8}
        The bits of a coordinate. A vector takes ⌈d · bits/8⌉ bytes, and 4 for its scale.
    kind : {"mse", "unbiased", "sign"}
        - ``"mse"``: the least squared error. ⟨q, x̂⟩ is too small by the factor 1 − D, where D is the
          expected squared error.
        - ``"unbiased"``: another scale, with which ⟨q, x̂⟩ is right in the mean over random rotations.
          The squared error is D/(1 − D).
        - ``"sign"``: only the signs of `n_components` Gaussian projections, for ``bits=1``. ⟨q, x̂⟩ is
          right in the mean too, with more variance than that of ``"unbiased"``.
    n_components : int ≥ 1, optional
        The number of signs, for ``kind="sign"`` alone. The default is d.
    rng : None, int, numpy.random.Generator
        As for `gaussian_projection`.
    like : array of floats, optional
        The quantizer gets the library and device of this array; by default those of NumPy.

    Returns
    -------
    Quantizer
        It has ``encode(x)``, ``decode(vectors)``, ``inner(query, vectors)`` and ``expected_error()``,
        and the attributes ``map``, ``values``, ``n_features`` and ``bits``.

    Raises
    ------
    TypeError
        As for `gaussian_projection`.
    ValueError
        For sizes out of range, an unknown kind, and bits or `n_components` that the kind does not have.

    Notes
    -----
    With R a rotation, c(·) the nearest of the reconstructions v, and t = √d R x/‖x‖,

    .. math:: \hat x = s R^T c(t), \qquad s_{mse} = \frac{‖x‖}{\sqrt d}, \qquad
        s_{unbiased} = \frac{‖x‖ \sqrt d}{⟨t, c(t)⟩}.

    The codebook is that of Lloyd (1982) and Max (1960) for the density of a coordinate of a random
    direction, ∝ (1 − t²/d)^((d−3)/2), computed for each d. Its error D is 0.3609, 0.1160, 0.0340 and
    0.0093 for d = 128 and 1 to 4 bits. No quantizer of that many bits can have an error below
    4^(−bits), the distortion-rate bound of a Gaussian.

    R is four rounds of random signs and a Hadamard matrix. If d is no order of one here, each round
    rotates as many coordinates as the next smaller order has, and the next round starts with the
    others. A single vector may miss more or less than D, the more so the smaller d is.

    With S a Gaussian matrix of k rows, ``"sign"`` is :math:`\hat x = \frac{‖x‖}{k} \sqrt{π/2}\, S^T
    \operatorname{sign}(S x)`. The variance of ⟨q, x̂⟩ is then at most π/(2k) for unit vectors.

    To bytes: vectors are rounded to float32, scaled by powers of two and rounded to integers whose norm
    has up to 20 bits. All sums are those of integers, which are exact. So codes do not depend on the
    order of sums or on fused operations. Norms are rounded to 15 bits.

    References
    ----------
    Vargaftik et al. 2021, DRIVE, arXiv 2105.08339 and 2022, EDEN, arXiv 2108.08842; Gao & Long 2024,
    RaBitQ, arXiv 2405.12497; Zandieh et al. 2024, QJL, arXiv 2406.03482 and 2025, TurboQuant, arXiv
    2504.19874.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import jl
    >>> keys = np.random.default_rng(1).normal(size=(1000, 128)).astype(np.float32)
    >>> f = jl.quantizer(128, bits=4, rng=0)
    >>> vectors = f.encode(keys)
    >>> vectors.codes.shape, vectors.codes.dtype, vectors.scales.shape
    ((1000, 64), dtype('uint8'), (1000,))
    >>> error = ((keys - f.decode(vectors)) ** 2).sum(-1) / (keys**2).sum(-1)
    >>> round(float(error.mean()), 4), round(f.expected_error().squared, 4)
    (0.0093, 0.0093)
    >>> f.inner(keys[:5], vectors).shape
    (5, 1000)
    """
    n_features = counts(n_features=n_features)[0]
    if n_features > _MOST_FEATURES:
        must = f"be at most {_MOST_FEATURES} (quantize parts of the vectors)"
        raise value_error("n_features", must, n_features)
    check_choice("kind", kind, KINDS)
    if not is_integer(bits):
        raise type_error("bits", "be an integer", type(bits).__name__)
    if bits not in (BITS if kind != "sign" else (1,)):
        allowed = "1, 2, 3, 4 or 8" if kind != "sign" else "1 for the kind 'sign'"
        raise value_error("bits", f"be {allowed}", bits)
    if n_components is not None and kind != "sign":
        raise value_error("n_components", "be left out for other kinds than 'sign'", n_components)
    generator = generator_of(rng)
    if kind == "sign":
        k = n_features if n_components is None else counts(n_components=n_components)[0]

        def entries(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
            return np.round(random_normals(generator, shape) * 2.0**_SIGN_GRID) * 2.0**-_SIGN_GRID

        weights = draw_matrix(generator, n_features, k, like, entries)
        one = convert_draw(np.ones(()), like, is_wide=True)
        values = convert_draw(np.asarray([-1.0, 1.0]), like, is_wide=True)
        return SignQuantizer(DenseProjection(weights, one), values)
    signs = [random_signs(generator, (1, n_features)) for _ in range(_ROUNDS)]
    factors = [flat_matrix(order) for order in hadamard_orders(n_features)]
    rotation = Rotation(
        tuple(convert_draw(x, like) for x in signs),
        tuple(convert_draw(x, like, is_wide=True) for x in factors),
    )
    values = np.round(codebook(n_features, int(bits)).values * 2.0**_GRID) * 2.0**-_GRID
    made = UnbiasedQuantizer if kind == "unbiased" else Quantizer
    return made(rotation, convert_draw(values, like, is_wide=True))


def _exact_dtype(xp: ModuleType) -> Any:
    """The dtype of products of integers below 2²⁴.

    PyTorch rounds the operands of float32 to fewer bits (TF32, bfloat16) where the user lets it.
    """
    if not is_torch(xp):
        return xp.float32
    torch = imported_torch()
    # A graph cannot ask for the setting, and outlives it.
    is_kept = not torch.compiler.is_compiling() and torch.get_float32_matmul_precision() == "highest"
    return xp.float32 if is_kept else xp.float64


def _integers(xp: ModuleType, rows: Array, bits: int) -> tuple[Array, Callable[[Array], Array]]:
    """Rows of float32, times a power of two and rounded, so that their norms are at most 2^bits.

    Also returns the function that takes such powers off a column of scales, and sets the scales of rows
    that are zero or not finite.
    """
    d = rows.shape[-1]
    is_finite = xp.isfinite(rows)
    rows = xp.where(is_finite, rows, 0.0)
    top = xp.max(xp.abs(rows), axis=-1, keepdims=True)
    is_small = top < _SMALLEST
    of_top = Exponents(xp, xp.where(is_small, 1.0, top))
    x = xp.where(is_small, 0.0, of_top.scaled(rows, -1))  # below 2
    # A first estimate of the norm, from fewer bits, and with room for their rounding.
    coarse = min(7, (27 - math.ceil(math.log2(d))) // 2)
    w = xp.round(x * 2.0**coarse)
    bound = 2 * exact_sum(xp, w * w) + d
    of_bound = Exponents(xp, xp.astype(bound, xp.float32))
    shrink = of_bound.power(lambda j: -(j // 2 + 1))
    u = xp.round(x * (2.0 ** (coarse + bits)) * shrink)
    is_number = xp.all(is_finite, axis=-1, keepdims=True)

    def unit(scales: Array) -> Array:
        scales = of_top.scaled(
            scales * of_bound.power(lambda j: j // 2 + 1) * 2.0 ** -(coarse + bits), 1
        )
        return xp.where(is_number, xp.where(is_small, 0.0, scales), math.nan)

    return u, unit
