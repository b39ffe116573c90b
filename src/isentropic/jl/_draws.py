"""Random draws: made once on the host in float64, then converted to the library, dtype and device.

So the same seed gives the same numbers in every library and dtype, and on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from isentropic._checks import check_floating, is_integer, type_error, value_error, with_name_hints
from isentropic._namespace import Array, accumulator, from_numpy, is_dask, namespace

if TYPE_CHECKING:
    import numpy as np

    Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]

# Functions that draw also accept the names that other libraries give to `rng`: `random_state` in
# scikit-learn, `seed` in SciPy and `generator` in PyTorch.
takes_rng = with_name_hints(seed="rng", random_state="rng", generator="rng")

# How many numbers are drawn at a time. In blocks, a float64 draw that is stored in a narrower dtype
# does not need twice the memory.
_BLOCK_SIZE = 2**18


def generator_of(rng: Any) -> np.random.Generator:
    """`rng` if it is a generator, otherwise a new generator with that seed."""
    import numpy as np

    try:
        return np.random.default_rng(rng)
    except (TypeError, ValueError):
        must = "be None, an integer of at least 0, or a numpy.random.Generator"
        got = rng if is_integer(rng) else type(rng).__name__
        raise (value_error if is_integer(rng) else type_error)("rng", must, got) from None


def draw_matrix(rng: Any, columns: int, rows: int, like: Array | None, draw: Draw) -> Array:
    """A matrix (rows, columns) of independent entries, from ``draw(generator, shape)``."""
    import numpy as np

    values = np.empty((rows, columns), _host_dtype(like))
    start = 0
    for part in draw_rows(rng, columns, rows, draw):
        values[start : start + part.shape[0]] = part
        start += part.shape[0]
    return place_draw(values, like)


def draw_rows(rng: Any, columns: int, rows: int, draw: Draw) -> Iterator[np.ndarray]:
    """The rows of the matrix of `draw_matrix`, in blocks, on the host and in float64."""
    generator = generator_of(rng)
    block_rows = max(1, _BLOCK_SIZE // columns)
    for start in range(0, rows, block_rows):
        yield draw(generator, (min(block_rows, rows - start), columns))


def random_signs(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Independent signs ±1 with equal probabilities, in float64."""
    return 1.0 - 2.0 * generator.integers(0, 2, size=shape, dtype="int8")


def random_orthonormal(generator: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """A matrix (rows, columns) with orthonormal rows, uniformly distributed (Mezzadri 2007)."""
    import numpy as np

    q, r = np.linalg.qr(generator.standard_normal((columns, rows)))
    # QR is unique only with a positive diagonal of r. Without these signs the draw is not uniform.
    return (q * np.where(np.diagonal(r) < 0, -1.0, 1.0)).T


def place_draw(values: np.ndarray, like: Array | None, *, integer: bool = False) -> Any:
    """`values` in the library, on the device and in the dtype of `like`; integers become int32."""
    if like is None:
        return values
    like = _block_sample(like)
    xp = namespace(like=like)
    check_floating(xp, like=like)
    return from_numpy(values, like, xp.int32 if integer else None)


def _host_dtype(like: Array | None) -> str:
    if like is None:
        return "float64"
    like = _block_sample(like)
    xp = namespace(like=like)
    check_floating(xp, like=like)
    return "float64" if accumulator(xp, like.dtype) == xp.float64 else "float32"


def _block_sample(like: Array) -> Array:
    """`like`, or for a Dask array an empty array of the type of its blocks."""
    return like._meta if is_dask(like) else like  # type: ignore[attr-defined]
