"""Calls as single nodes of the graph that torch.compile makes.

Dynamo, the first part of torch.compile, interprets all Python code that it meets, and guards all that
the code reads: for one call of attention hundreds of functions and of guards. So it gets a call as one
node, which it does not look into. What follows Dynamo traces the operations inside. Dynamo then takes
0.26 s in place of 2.1 s for eight causal calls, and all of a compilation with inductor 8.7 s in place
of 10.7 s (Intel Xeon 6.207, 2 cores, PyTorch 2.13).

A node has the name of an entry in a table of this process. So its graph cannot go to another process.

This module imports PyTorch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from isentropic import _torch_products
from isentropic._loops import is_exporting
from isentropic._namespace import Array
from isentropic._pytrees import Node

# The arguments of a call become leaves and a structure. Leaves are arrays and numbers, which may be
# symbolic. The structure tells how to put them together: (class, names of fields, structures) for a
# tuple, a mask or a law, (_LEAF, (), None), or (_CONSTANT, (), constant).
_LEAF, _CONSTANT = "leaf", "constant"


# Before 2.13 Dynamo fails on parts of the code. There calls run outside of its graphs.
_DYNAMO_READS_US = torch.__version__ >= (2, 13)


class _Call(NamedTuple):
    function: Any
    names: tuple[str, ...]  # of the keyword arguments
    structure: Any


class _Outcome(NamedTuple):
    """What the tracing of a node has found: the fields of the result that are not None, or an error."""

    fields: tuple[str, ...]
    error: str | None
    message: str


# By the names of nodes. Each tracing of a call makes a node of its own.
_calls: dict[str, _Call] = {}
_outcomes: dict[str, _Outcome] = {}
_numbers = itertools.count()


def call(function: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``function(*args, **kwargs)`` as a node, if its arguments have a structure. Dynamo traces this.

    The function returns an array, or a NamedTuple of arrays and None. `result` is Array or its class.
    """
    if not _DYNAMO_READS_US:
        return outside(function, args, kwargs)
    # An exported program cannot hold a function of Python.
    if is_exporting() or not all(map(_has_structure, (*args, *kwargs.values()))):
        return function(*args, **kwargs)
    leaves: list[Any] = []
    structure = _structure((args, tuple(kwargs.values())), leaves)
    node = _noted(function, tuple(kwargs), structure)
    # Dynamo makes a new graph if this changes, as it is an argument.
    is_in_forward_mode = torch.autograd.forward_ad._current_level >= 0
    arrays = _node(node, is_in_forward_mode, *leaves)
    fields, error, message = _outcome(node)
    if error is not None:  # which Dynamo would hide, if the node raised it
        raise (TypeError if error == "TypeError" else ValueError)(message)
    if result is Array:
        return arrays[0]
    found = dict(zip(fields, arrays, strict=True))
    return result(**{field: found.get(field) for field in result._fields})


@torch.compiler.disable
def outside(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


@torch.compiler.allow_in_graph
def _node(name: str, is_in_forward_mode: bool, *leaves: Any) -> tuple[torch.Tensor, ...]:
    """The arrays of the result that are not None. The second argument only serves as a guard."""
    function, names, structure = _calls[name]
    args, values = _restored(structure, iter(leaves))
    try:
        result = function(*args, **dict(zip(names, values, strict=True)))
    except (TypeError, ValueError) as error:
        # Dynamo runs each node once when it makes the graph.
        outcome = _outcomes.setdefault(name, _Outcome((), type(error).__name__, str(error)))
        if outcome.error is None:
            raise
        return (torch.empty(0),)  # which nothing uses
    parts = result if isinstance(result, tuple) else (result,)
    fields = getattr(result, "_fields", ("",))
    present = [(field, x) for field, x in zip(fields, parts, strict=True) if x is not None]
    _outcomes.setdefault(name, _Outcome(tuple([field for field, _ in present]), None, ""))
    return tuple([x for _, x in present])


# A product under autocast, whose derivatives Dynamo cannot trace.
product = torch.compiler.allow_in_graph(_torch_products.product)


# The results of these two are constants for the graph that is being made: a node gets its name and its
# outcome once.
@torch.compiler.assume_constant_result
def _noted(function: Any, names: tuple[str, ...], structure: Any) -> str:
    """The name of a new node."""
    name = str(next(_numbers))
    _calls[name] = _Call(function, names, structure)
    return name


@torch.compiler.assume_constant_result
def _outcome(name: str) -> tuple[Any, ...]:
    return tuple(_outcomes[name])


def _has_structure(x: Any) -> bool:
    """Whether an argument consists of arrays, numbers, strings, and masks and laws of this package.

    A law of somebody else may ask for the type of a number, which is another one for symbolic numbers.
    """
    if isinstance(x, Node):
        is_ours = type(x).__module__.partition(".")[0] == "isentropic"
        return is_ours and all(map(_has_structure, x._named_values().values()))
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
    if type(x) is bool:  # which may be symbolic
        return _CONSTANT, (), True if x else False  # noqa: SIM210
    if x is None or type(x) is str:
        return _CONSTANT, (), x
    leaves.append(x)
    return _LEAF, (), None


def _restored(structure: Any, leaves: Iterator[Any]) -> Any:
    """The argument that has this structure and these leaves."""
    kind, fields, parts = structure
    if kind == _LEAF:
        return next(leaves)
    if kind == _CONSTANT:
        return parts
    values = [_restored(part, leaves) for part in parts]
    if kind is tuple:
        return tuple(values)
    node = object.__new__(kind)
    for field, value in zip(fields, values, strict=True):
        object.__setattr__(node, field, value)
    return node
