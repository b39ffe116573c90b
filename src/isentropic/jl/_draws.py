"""Random draws: made once on the host in float64, then converted to the library, dtype and device.

The same seed therefore gives the same numbers in every library and dtype, and on every device.

NumPy promises that the raw words of a bit generator stay the same forever, but not how a
`numpy.random.Generator` makes distributions of them (NEP 19). So this module makes the distributions
itself, from raw words of 64 bits. It uses only additions, products, divisions and square roots, one at
a time. IEEE 754 defines how these are rounded, so a draw has the same bits on every machine. An integer
seed is that of the bit generator PCG64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from isentropic._checks import check_floating, is_integer, type_error, value_error, with_name_hints
from isentropic._namespace import Array, accumulator, from_numpy, is_dask, namespace

if TYPE_CHECKING:
    Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]

# Functions that draw also accept the names that other libraries give to `rng`: `random_state` in
# scikit-learn, `seed` in SciPy and `generator` in PyTorch.
takes_rng = with_name_hints(seed="rng", random_state="rng", generator="rng")

_LOG_2 = 0.6931471805599453
_HALF_PI = 1.5707963267948966

# How many numbers are drawn at a time. In blocks, a float64 draw that is stored in a narrower dtype
# does not need twice the memory.
_BLOCK_SIZE = 2**18


def generator_of(rng: Any) -> np.random.Generator:
    """`rng` if it is a generator, otherwise a new generator of PCG64 with that seed."""
    try:
        # The bit generator of `default_rng` may change in later versions of NumPy.
        sources = (np.random.Generator, np.random.BitGenerator, np.random.RandomState)
        if isinstance(rng, bool):
            raise TypeError
        return np.random.default_rng(rng if isinstance(rng, sources) else np.random.PCG64(rng))
    except (TypeError, ValueError):
        must = "be None, an integer of at least 0, or a numpy.random.Generator"
        got = rng if is_integer(rng) else type(rng).__name__
        raise (value_error if is_integer(rng) else type_error)("rng", must, got) from None


def draw_matrix(rng: Any, columns: int, rows: int, like: Array | None, draw: Draw) -> Array:
    """A matrix (rows, columns) of independent entries, from ``draw(generator, shape)``."""
    dtype = "float64"
    if like is not None:
        xp, like = _library_of(like)
        dtype = "float64" if accumulator(xp, like.dtype) == xp.float64 else "float32"
    values = np.empty((rows, columns), dtype)
    start = 0
    for part in draw_rows(rng, columns, rows, draw):
        values[start : start + part.shape[0]] = part
        start += part.shape[0]
    return convert_draw(values, like)


def draw_rows(rng: Any, columns: int, rows: int, draw: Draw) -> Iterator[np.ndarray]:
    """The rows of the matrix of `draw_matrix`, in blocks, on the host and in float64."""
    generator = generator_of(rng)
    block_rows = max(1, _BLOCK_SIZE // columns)
    for start in range(0, rows, block_rows):
        yield draw(generator, (min(block_rows, rows - start), columns))


def random_words(generator: np.random.Generator, count: int) -> np.ndarray:
    """The next raw words of 64 bits of the generator's bit generator."""
    if isinstance(generator.bit_generator, np.random.MT19937):  # its words have 32 bits
        halves = generator.bit_generator.random_raw(2 * count)
        return halves[::2] << np.uint64(32) | halves[1::2]
    return generator.bit_generator.random_raw(count)


def random_signs(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Independent signs ±1 with equal probabilities: the bits of the words, the lowest first."""
    count = math.prod(shape)
    # In the same order of bytes on every machine.
    words = random_words(generator, -(-count // 64)).astype("<u8")
    bits = np.unpackbits(words.view("uint8"), count=count, bitorder="little")
    return (1.0 - 2.0 * bits).reshape(shape)


def random_uniforms(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Independent uniform numbers in (0, 1): the highest 52 bits of a word each."""
    return _uniforms(random_words(generator, math.prod(shape))).reshape(shape)


def random_normals(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Independent standard normal numbers (Box & Muller 1958): the polar coordinates of a pair.

    The radius takes the highest bits of a word. The angle takes those of another word, whose two lowest
    bits are the signs.
    """
    count = math.prod(shape)
    pairs = -(-count // 2)
    radius = np.sqrt(-2.0 * _log(_uniforms(random_words(generator, pairs))))
    words = random_words(generator, pairs)
    signs = [1.0 - 2.0 * (words >> np.uint64(i) & np.uint64(1)) for i in (0, 1)]
    points = _cos_sin(_HALF_PI * _uniforms(words))
    halves = [radius * (sign * point) for sign, point in zip(signs, points, strict=True)]
    return np.concatenate(halves)[:count].reshape(shape)


def random_permutation(generator: np.random.Generator, n: int) -> np.ndarray:
    """A uniformly random permutation: the order that sorts n words. Two words are hardly ever equal."""
    return np.argsort(random_words(generator, n), kind="stable")


def _uniforms(words: np.ndarray) -> np.ndarray:
    # The half keeps out 0, whose logarithm the normal numbers would take.
    return ((words >> np.uint64(12)) + 0.5) * 2.0**-52


def _log(x: np.ndarray) -> np.ndarray:
    """The natural logarithm, by its series: libraries round theirs in different ways."""
    mantissa, exponent = np.frexp(x)
    is_low = mantissa < 0.5**0.5
    mantissa = np.where(is_low, 2.0 * mantissa, mantissa)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    # With a mantissa from √½ to √2, s² is at most 0.03, and 12 terms are exact to float64.
    series = _polynomial([1 / (2 * i + 1) for i in range(12)], s * s)
    return (exponent - is_low) * _LOG_2 + 2.0 * s * series


def _cos_sin(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine of angles in [0, π/2], by their series."""
    # At π/2 the first term that is left out is below 1e-19.
    cosine, sine = ([(-1) ** i / math.factorial(2 * i + j) for i in range(12)] for j in (0, 1))
    return _polynomial(cosine, x * x), x * _polynomial(sine, x * x)


def _polynomial(coefficients: list[float], x: np.ndarray) -> np.ndarray:
    """``Σ coefficients[i] x^i``, by Horner's rule."""
    total = x * coefficients[-1]
    for coefficient in coefficients[-2:0:-1]:
        total = (total + coefficient) * x
    return total + coefficients[0]


def random_orthonormal(generator: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """A matrix (rows, columns) with orthonormal rows, uniformly distributed (Mezzadri 2007)."""
    q, r = np.linalg.qr(random_normals(generator, (columns, rows)))
    # QR is unique only with a positive diagonal of r. Without these signs the draw is not uniform.
    return (q * np.where(np.diagonal(r) < 0, -1.0, 1.0)).T


def convert_draw(
    values: np.ndarray, like: Array | None, *, is_index: bool = False, is_wide: bool = False
) -> Any:
    """`values` in the library, on the device and in the dtype of `like`.

    Indices become int32, and wide numbers float32 or better.
    """
    if like is None:
        return values
    xp, like = _library_of(like)
    dtype = xp.int32 if is_index else accumulator(xp, like.dtype) if is_wide else None
    return from_numpy(values, like, dtype)


def _library_of(like: Array) -> tuple[ModuleType, Array]:
    """The library of `like`, and `like`; for a Dask array an empty array of the type of its blocks."""
    like = like._meta if is_dask(like) else like  # type: ignore[attr-defined]
    xp = namespace(like=like)
    check_floating(xp, like=like)
    return xp, like
