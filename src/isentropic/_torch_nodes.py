"""Calls as single nodes of the graph that torch.compile makes.

Dynamo, the first part of torch.compile, interprets all Python code that it meets, and guards all that
the code reads: for one call of attention hundreds of functions and of guards. So it gets a call as one
node, which it does not look into. What follows Dynamo traces the operations inside.

This module imports PyTorch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from isentropic._namespace import Array
from isentropic._pytrees import Node

# A node of a graph takes arrays, numbers and strings. So the arguments of a call become leaves, which
# are arrays and numbers, and a structure, which tells how to put the leaves together: the class of a
# mask, a law or a tuple with the names and the structures of its parts; _LEAF; or None and a constant.
_LEAF = "leaf"
# The function of a call, the names of its arguments and their structure, by the name of its node.
_calls: dict[str, Any] = {}
_names: dict[Any, str] = {}
_numbers = itertools.count()
# What the last tracing of a node has found: the fields of the result that are not None, or an error.
_outcomes: dict[str, tuple[tuple[str, ...], str | None, str]] = {}


def call(function: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``function(*args, **kwargs)`` as a node, if its arguments have a structure. Dynamo traces this.

    The function returns an array, or a NamedTuple of arrays and None. `result` is Array or its class.
    """
    # An exported program cannot hold a function of Python.
    if torch.compiler.is_exporting() or not all(map(_has_structure, (*args, *kwargs.values()))):
        return function(*args, **kwargs)
    leaves: list[Any] = []
    structure = _structure((args, tuple(kwargs.values())), leaves)
    name = _noted(function, tuple(kwargs), structure)
    # Dynamo makes a new graph if this changes, as it is an argument.
    is_in_forward_mode = torch.autograd.forward_ad._current_level >= 0
    arrays = _node(name, is_in_forward_mode, *leaves)
    fields, error, message = _outcome(name)
    if error is not None:  # which Dynamo would hide, if the node raised it
        raise (TypeError if error == "TypeError" else ValueError)(message)
    if result is Array:
        return arrays[0]
    found = dict(zip(fields, arrays, strict=True))
    return result(**{name: found.get(name) for name in result._fields})


@torch.compiler.allow_in_graph
def _node(name: str, is_in_forward_mode: bool, *leaves: Any) -> tuple[torch.Tensor, ...]:
    function, names, structure = _calls[name]
    args, values = _restored(structure, iter(leaves))
    try:
        result = function(*args, **dict(zip(names, values, strict=True)))
    except (TypeError, ValueError) as error:
        if not torch.compiler.is_compiling():
            raise
        _outcomes[name] = (), type(error).__name__, str(error)
        return (torch.empty(0),)
    parts = result if isinstance(result, tuple) else (result,)
    names = getattr(result, "_fields", ("",))
    fields = tuple(field for field, x in zip(names, parts, strict=True) if x is not None)
    _outcomes[name] = fields, None, ""
    return tuple(x for x in parts if x is not None)


@torch.compiler.assume_constant_result
def _noted(function: Any, names: tuple[str, ...], structure: Any) -> str:
    """The name of the node. Calls that differ in arrays and numbers alone have the same name."""
    key = (function, names, structure)
    name = _names.setdefault(key, str(next(_numbers)))
    _calls[name] = key
    return name


@torch.compiler.assume_constant_result
def _outcome(name: str) -> Any:
    return _outcomes[name]


def _has_structure(x: Any) -> bool:
    """Whether an argument consists of arrays, numbers and strings, as most masks and laws do."""
    if isinstance(x, Node):
        return all(map(_has_structure, x._named_values().values()))
    if isinstance(x, tuple):
        return type(x) is tuple and all(map(_has_structure, x))
    return x is None or isinstance(x, torch.Tensor) or type(x) in (int, float, bool, str)


def _structure(x: Any, leaves: list[Any]) -> Any:
    """The structure of an argument, whose leaves are appended."""
    if isinstance(x, Node):
        values = x._named_values()
        return type(x), tuple(values), tuple([_structure(value, leaves) for value in values.values()])
    if isinstance(x, tuple):
        return tuple, (), tuple([_structure(part, leaves) for part in x])
    if x is None or type(x) in (bool, str):
        return None, (), x
    leaves.append(x)
    return _LEAF, (), None


def _restored(structure: Any, leaves: Iterator[Any]) -> Any:
    """The argument that has this structure and these leaves."""
    kind, names, parts = structure
    if kind is None:
        return parts
    if kind == _LEAF:
        return next(leaves)
    values = [_restored(part, leaves) for part in parts]
    if kind is tuple:
        return tuple(values)
    node = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(node, name, value)
    return node
