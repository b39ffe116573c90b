"""Conversion of laws to and from dictionaries of plain values, for JSON and YAML."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

import numpy as np

from isentropic._checks import check_choice, check_floating, is_array, type_error, value_error
from isentropic._namespace import Array, from_numpy, namespace, to_numpy
from isentropic.laws import _formulas  # noqa: F401 - its laws are subclasses of `Law`
from isentropic.laws._law import Law, PerQuery, check_numbers

# The laws of this package, by their names in dictionaries.
_KINDS = {x.__name__: x for x in Law.__subclasses__() if x.__module__.startswith(f"{__package__}.")}
# Parameters that are sequences of numbers or arrays.
_SEQUENCES = ("lengths", "factors")
# Dictionaries may come from untrusted sources, and deep nesting would end in a RecursionError.
_MAX_DEPTH = 32


def to_dict(law: Law) -> dict[str, Any]:
    """`Law.to_dict`."""
    if isinstance(law, PerQuery):
        raise _per_query_error("law")
    if type(law) not in _KINDS.values():
        raise type_error("law", "be a law that isentropic.laws defines", type(law).__name__)
    data: dict[str, Any] = {"law": type(law).__name__}
    for name, x in law._named_values().items():
        if isinstance(x, PerQuery) and name != "law":
            raise _per_query_error(name)
        if isinstance(x, Law):
            data["of"] = to_dict(x)
        elif is_array(x):
            numbers = to_numpy(x)
            check_numbers(name, numbers)
            is_sequence = name in _SEQUENCES and x.ndim == 1
            data[name] = {"array": numbers.tolist()} if is_sequence else numbers.tolist()
        else:
            data[name] = [_plain(y) for y in x] if isinstance(x, tuple) else _plain(x)
    return data


def from_dict(data: dict[str, Any], *, like: Array | None = None) -> Law:
    """The law that a dictionary made by `Law.to_dict` describes.

    Nothing in the dictionary is executed or imported. It can only name laws of this module.

    Parameters
    ----------
    data : dict
        A dictionary as `Law.to_dict` returns it. Parameters that have a default may be omitted.
    like : array, optional
        An array whose library, device and dtype the arrays in the law get. By default they are NumPy
        arrays of float64.

    Returns
    -------
    Law

    Raises
    ------
    TypeError, ValueError
        If the name is unknown, or if a parameter is missing, unknown or invalid. The message names it.

    Examples
    --------
    >>> from isentropic import laws
    >>> laws.from_dict({"law": "AffineLog", "slope": [0.25, 0.5]})(1).shape
    (2,)
    """
    if like is None:
        return _from_dict(data, depth=0)
    check_floating(namespace(like=like), like=like)
    # The law is made with NumPy arrays first, as the numbers are checked on the host.
    return _from_dict(data, depth=0)._with_arrays(lambda x: from_numpy(x, like))


def _from_dict(data: Any, depth: int) -> Law:
    if not isinstance(data, dict):
        raise type_error("data", "be a dictionary that describes a law", type(data).__name__)
    if depth > _MAX_DEPTH:
        raise value_error("data", f"be nested at most {_MAX_DEPTH} deep", "more")
    if "law" not in data:
        raise value_error("data", "name a law under 'law'", f"the keys {_listed(data)}")
    check_choice("law", data["law"], sorted(_KINDS))
    kind = _KINDS[data["law"]]
    # In dictionaries `law` names the class, so the field of this name is `of` there.
    given = {"law" if key == "of" else key: x for key, x in data.items() if key != "law"}
    known = {field.name: field.default is MISSING for field in fields(kind)}
    required = {name for name, is_required in known.items() if is_required}
    if not required <= given.keys() <= known.keys():
        names = ["of" if name == "law" else name for name in known]
        must = f"have the parameters of {data['law']!r} ({', '.join(names)})"
        raise value_error("data", must, _listed(data.keys() - {"law"}))
    return kind(**{name: _argument(name, x, depth) for name, x in given.items()})


def _argument(name: str, x: Any, depth: int) -> Any:
    if name == "law":
        return _from_dict(x, depth + 1)
    if name in _SEQUENCES:
        if isinstance(x, dict) and x.keys() == {"array"} and isinstance(x["array"], list):
            return _array(name, x["array"])
        if isinstance(x, list) and not any(isinstance(y, list) for y in x):
            return x
    return _array(name, x) if isinstance(x, list) else x


def _per_query_error(name: str) -> TypeError:
    return type_error(name, "not depend on the query, to be saved", "a `per_query` parameter")


def _plain(x: Any) -> int | float | None:
    return x if x is None or isinstance(x, int) else float(x)


def _listed(keys: Any) -> str:
    return ", ".join(sorted(map(str, keys))) or "none"


def _array(name: str, numbers: list[Any]) -> Any:
    """Nested lists of numbers as an array."""
    try:
        array = np.asarray(numbers)
    except ValueError:  # ragged, or deeper than NumPy's arrays
        raise value_error(name, "be nested lists of equal lengths", "different lengths") from None
    if array.dtype.kind not in "fiu":
        raise type_error(name, "be lists of real numbers", f"{array.dtype} values")
    return array.astype(np.float64)
