"""Maps as dictionaries of plain values, and back.

A dictionary holds the arrays of a map instead of its seed, because not every map has a seed.
"""

from __future__ import annotations

import base64
import math
from typing import TYPE_CHECKING, Any, get_args

from isentropic._checks import check_choice, check_real, is_integer, type_error, value_error
from isentropic._namespace import Array, to_numpy
from isentropic.jl._draws import convert_draw, convert_wide
from isentropic.jl._maps import (
    CountSketch,
    DenseProjection,
    HadamardProjection,
    Projection,
    Rotation,
)

if TYPE_CHECKING:
    import numpy as np

_KINDS = {kind.__name__: kind for kind in get_args(Projection)}
# Fields that are tuples of arrays.
_TUPLES: dict[Any, tuple[str, ...]] = {
    HadamardProjection: ("signs",),
    Rotation: ("signs", "factors"),
}
_WIDE = ("scale", "factors")  # fields that are in float32 or better
_INTEGERS = ("rows", "components", "features")  # fields of integers
_DTYPES = {"float": "<f8", "integer": "<i4"}
# The keys of stored arrays, by their kind.
_KEYS = {kind: {"shape", kind} for kind in _DTYPES} | {"signs": {"shape", "size", "signs"}}


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
        If the class is unknown, or if an array is missing, unknown or malformed, or has numbers that a
        map cannot have: signs other than ±1, indices out of range, NaN.

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
    host: Any = kind(*(_field(kind, name, data[name]) for name in kind._fields))
    host._check()
    _check_values(host)
    projection: Projection = kind(*(_converted(name, x, like) for name, x in host._asdict().items()))
    return projection


def _field(kind: Any, name: str, data: Any) -> Any:
    if name in _TUPLES.get(kind, ()):
        if not isinstance(data, list):
            raise type_error(name, "be a list of arrays", type(data).__name__)
        return tuple(_restored(name, x) for x in data)
    return _restored(name, data)


def _converted(name: str, x: Any, like: Array | None) -> Any:
    if isinstance(x, tuple):
        return tuple(_converted(name, part, like) for part in x)
    if name in _INTEGERS:
        return convert_draw(x, like, integer=True)
    return (convert_wide if name in _WIDE else convert_draw)(x, like)


def _check_values(projection: Any) -> None:
    """Refuse signs other than ±1, and indices that would read outside of arrays, or wrong entries."""
    import numpy as np

    if not isinstance(projection, DenseProjection):
        signs = projection.signs
        if not all(
            (abs(part) == 1).all() for part in (signs if isinstance(signs, tuple) else (signs,))
        ):
            raise value_error("signs", "be ±1", "other numbers")
    if isinstance(projection, HadamardProjection):
        rows: Any = projection.rows
        size = projection._size
        if rows[0] < 0 or rows[-1] >= size or (np.diff(rows) <= 0).any():
            raise value_error("rows", f"ascend and lie in [0, {size})", "rows that do not")
    if isinstance(projection, CountSketch):
        components: Any = projection.components
        features: Any = projection.features
        row = np.nonzero(features != components.size)[0]  # the others are padding
        used = features[features != components.size]
        in_order = np.array_equal(np.sort(used), np.arange(components.size))
        if not in_order or (components.reshape(-1)[used] != row).any():
            raise value_error("features", "be the inverse of `components`", "other indices")


def _stored(x: Array) -> dict[str, Any]:
    import numpy as np

    values = to_numpy(x)
    shape = {"shape": list(values.shape)}
    if values.dtype.kind != "f":
        return shape | {"integer": _to_base64(values.astype("<i4"))}
    values = values.astype("<f8")
    size = float(abs(values.flat[0])) if values.size else 0.0
    if values.ndim and size and (abs(values) == size).all():
        bits = np.packbits(values.reshape(-1) < 0, bitorder="little")
        return shape | {"size": size, "signs": _to_base64(bits)}
    return shape | {"float": _to_base64(values)}


def _restored(name: str, data: Any) -> np.ndarray:
    """The array that `_stored` described. It must not be empty, and its numbers must be finite."""
    import numpy as np

    kinds = ("integer",) if name in _INTEGERS else ("float", "signs")
    must = "be arrays as `to_dict` stores them"
    if not isinstance(data, dict):
        raise value_error(name, must, type(data).__name__)
    kind = next((kind for kind in kinds if data.keys() == _KEYS[kind]), None)
    if kind is None:
        raise value_error(name, must, f"the keys {', '.join(sorted(map(str, data))) or 'none'}")
    shape = data["shape"]
    if not isinstance(shape, list) or not all(is_integer(n) and n > 0 for n in shape):
        raise value_error(name, f"{must}, with a shape of positive integers", repr(shape)[:40])
    if kind == "signs":
        check_real("size", data["size"], above=0)
    try:
        content = base64.b64decode(data[kind], validate=True)
        if kind == "signs":
            count = math.prod(shape)
            if len(content) != -(-count // 8):
                raise ValueError
            bits = np.unpackbits(np.frombuffer(content, "uint8"), count=count, bitorder="little")
            values = (1.0 - 2.0 * bits) * float(data["size"])
        else:
            values = np.frombuffer(content, _DTYPES[kind]).astype(_DTYPES[kind].replace("<", "="))
        values = values.reshape(shape)
    except (OverflowError, TypeError, ValueError):
        raise value_error(name, f"{must}, in base64", "malformed data") from None
    if not np.isfinite(values).all():
        raise value_error(name, "be finite", "NaN or infinity")
    return values


def _to_base64(values: np.ndarray) -> str:
    return base64.b64encode(values.tobytes()).decode()
