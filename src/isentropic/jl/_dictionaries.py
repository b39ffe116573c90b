"""Maps as dictionaries of plain values, and back. They hold arrays, as not every map has a seed."""

from __future__ import annotations

import base64
import math
from typing import TYPE_CHECKING, Any, get_args

from isentropic._checks import check_choice, is_integer, type_error, value_error
from isentropic._namespace import Array, to_numpy
from isentropic.jl._draws import place_draw, place_wide
from isentropic.jl._maps import HadamardProjection, Projection, Rotation

if TYPE_CHECKING:
    import numpy as np

_KINDS = {kind.__name__: kind for kind in get_args(Projection)}
# Fields that are tuples of arrays.
_TUPLES: dict[Any, tuple[str, ...]] = {
    HadamardProjection: ("signs",),
    Rotation: ("signs", "factors"),
}
_WIDE = ("scale", "factors")  # fields that are in float32 or better
_DTYPES = {"float": "<f8", "integer": "<i4"}


def to_dict(projection: Projection) -> dict[str, Any]:
    """A map as a dictionary of plain values, for JSON and YAML.

    Parameters
    ----------
    projection : DenseProjection, HadamardProjection, CountSketch or Rotation
        Its arrays must be readable (not traced).

    Returns
    -------
    dict
        ``"map"`` is the name of the class, and its arrays follow. An array of shape ``"shape"`` is
        stored in base64. Under ``"signs"`` are the signs of numbers that are all ±``"size"``, one bit
        each, the lowest bit of a byte first, and 1 for a minus. Under ``"float"`` and ``"integer"`` are
        numbers of 64 and 32 bits, the lowest byte first. `from_dict` makes an equal map from the
        dictionary.

    Raises
    ------
    TypeError
        If `projection` is not a map of this module.

    Examples
    --------
    >>> from isentropic import jl
    >>> data = jl.to_dict(jl.hadamard_projection(16, 2, rng=0))
    >>> data["map"], data["signs"]
    ('HadamardProjection', [{'shape': [16], 'size': 1.0, 'signs': 'X4I='}])
    """
    if type(projection) not in _KINDS.values():
        raise type_error("projection", "be a map of isentropic.jl", type(projection).__name__)
    data: dict[str, Any] = {"map": type(projection).__name__}
    fields: dict[str, Any] = projection._asdict()
    for name, x in fields.items():
        data[name] = [_stored(part) for part in x] if isinstance(x, tuple) else _stored(x)
    return data


def from_dict(data: dict[str, Any], *, like: Array | None = None) -> Projection:
    """The map that a dictionary made by `to_dict` describes.

    Nothing in the dictionary is executed or imported.

    Parameters
    ----------
    data : dict
        A dictionary as `to_dict` returns it.
    like : array of floats, optional
        The map gets the library, device and dtype of this array; by default NumPy and float64.

    Returns
    -------
    DenseProjection, HadamardProjection, CountSketch or Rotation

    Raises
    ------
    TypeError, ValueError
        If the class is unknown, or if an array is missing, unknown or malformed.

    Examples
    --------
    >>> from isentropic import jl
    >>> f = jl.rotation(12, rng=0)
    >>> jl.from_dict(jl.to_dict(f)) == f
    True
    """
    if not isinstance(data, dict):
        raise type_error("data", "be a dictionary that describes a map", type(data).__name__)
    check_choice("map", data.get("map"), tuple(_KINDS))
    kind: Any = _KINDS[data["map"]]
    if data.keys() != {"map", *kind._fields}:
        must = f"have the arrays of {data['map']!r} ({', '.join(kind._fields)})"
        raise value_error("data", must, ", ".join(sorted(map(str, data.keys() - {"map"}))))
    projection: Projection = kind(*(_field(kind, name, data[name], like) for name in kind._fields))
    projection._check()
    return projection


def _field(kind: Any, name: str, data: Any, like: Array | None) -> Any:
    if name in _TUPLES.get(kind, ()):
        if not isinstance(data, list):
            raise type_error(name, "be a list of arrays", type(data).__name__)
        return tuple(_array(name, x, like) for x in data)
    return _array(name, data, like)


def _array(name: str, data: Any, like: Array | None) -> Any:
    values = _restored(name, data)
    if values.dtype.kind == "i":
        return place_draw(values, like, integer=True)
    return (place_wide if name in _WIDE else place_draw)(values, like)


def _stored(x: Array) -> dict[str, Any]:
    import numpy as np

    values = to_numpy(x)
    shape = {"shape": list(values.shape)}
    if values.dtype.kind != "f":
        return shape | {"integer": _text(values.astype("<i4"))}
    values = values.astype("<f8")
    size = float(abs(values.flat[0])) if values.size else 0.0
    if values.ndim and size and (abs(values) == size).all():
        bits = np.packbits(values.reshape(-1) < 0, bitorder="little")
        return shape | {"size": size, "signs": _text(bits)}
    return shape | {"float": _text(values)}


def _restored(name: str, data: Any) -> np.ndarray:
    import numpy as np

    try:
        shape = [int(n) for n in data["shape"] if is_integer(n) and n >= 0]
        count = math.prod(shape)
        if len(shape) != len(data["shape"]):
            raise ValueError
        if "signs" in data:
            bits = np.frombuffer(base64.b64decode(data["signs"], validate=True), "uint8")
            if bits.size != -(-count // 8):
                raise ValueError
            signs = 1.0 - 2.0 * np.unpackbits(bits, count=count, bitorder="little")
            return (signs * float(data["size"])).reshape(shape)
        kind = "float" if "float" in data else "integer"
        values = np.frombuffer(base64.b64decode(data[kind], validate=True), _DTYPES[kind])
        return values.astype(_DTYPES[kind].replace("<", "=")).reshape(shape)
    except (KeyError, TypeError, ValueError):
        raise value_error(name, "be arrays as `to_dict` stores them", type(data).__name__) from None


def _text(values: np.ndarray) -> str:
    return base64.b64encode(values.tobytes()).decode()
