"""Draws: on the host, once, in float64, and then moved.

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

# For functions that draw: what scikit-learn, SciPy and PyTorch call the source.
takes_rng = with_name_hints(seed="rng", random_state="rng", generator="rng")

# Numbers drawn at a time: what is drawn in float64 and stored in less does not double the memory.
_DRAWN = 2**18


def generator_of(rng: Any) -> np.random.Generator:
    """The generator that `rng` is, or a new one from that seed."""
    import numpy as np

    try:
        return np.random.default_rng(rng)
    except (TypeError, ValueError):
        must = "be None, an integer of at least 0, or a numpy.random.Generator"
        got = rng if is_integer(rng) else type(rng).__name__
        raise (value_error if is_integer(rng) else type_error)("rng", must, got) from None


def draw_matrix(rng: Any, columns: int, rows: int, like: Array | None, draw: Draw) -> Array:
    """A matrix (rows, columns) of independent entries that `draw` gives for a generator and a shape."""
    import numpy as np

    values = np.empty((rows, columns), _host_dtype(like))
    start = 0
    for part in draw_rows(rng, columns, rows, draw):
        values[start : start + part.shape[0]] = part
        start += part.shape[0]
    return place_draw(values, like)


def draw_rows(rng: Any, columns: int, rows: int, draw: Draw) -> Iterator[np.ndarray]:
    """The rows of that matrix, on the host and in float64, some at a time."""
    generator = generator_of(rng)
    some = max(1, _DRAWN // columns)
    for start in range(0, rows, some):
        yield draw(generator, (min(some, rows - start), columns))


def random_signs(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Independent ±1 of equal probability."""
    return 1.0 - 2.0 * generator.integers(0, 2, size=shape, dtype="int8")


def random_orthonormal(generator: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """A matrix (rows, columns) of orthonormal rows, uniform among all of them (Mezzadri 2007)."""
    import numpy as np

    q, r = np.linalg.qr(generator.standard_normal((columns, rows)))
    # QR is unique with a positive diagonal; without these signs the draw would not be uniform.
    return (q * np.where(np.diagonal(r) < 0, -1.0, 1.0)).T


def place_draw(values: np.ndarray, like: Array | None, *, integer: bool = False) -> Any:
    """Host numbers as an array of the library, device and (but for integers) dtype of `like`."""
    if like is None:
        return values
    like = _in_memory(like)
    xp = namespace(like=like)
    check_floating(xp, like=like)
    return from_numpy(values, like, xp.int32 if integer else None)


def _host_dtype(like: Array | None) -> str:
    if like is None:
        return "float64"
    like = _in_memory(like)
    xp = namespace(like=like)
    check_floating(xp, like=like)
    return "float64" if accumulator(xp, like.dtype) == xp.float64 else "float32"


def _in_memory(like: Array) -> Array:
    """What the blocks of a Dask array are like."""
    return like._meta if is_dask(like) else like  # type: ignore[attr-defined]
