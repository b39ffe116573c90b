"""Immutable values with arrays in them, which are pytree nodes of JAX and PyTorch.

This module imports neither library, and no library announces its import. So all classes are
registered when one of their objects is made and the library has been imported.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from numbers import Number
from typing import Any, ClassVar, Self

from isentropic._checks import is_array, type_error
from isentropic._namespace import Array, imported_torch, leaves_of, same_arrays

# Children, with keys or without, and the auxiliary data.
Flat = tuple[list[Any], Any]


class Node:
    """A value whose children are the arrays, nodes and tuples of arrays in its fields.

    Other fields are its structure.

    Two nodes are equal if they have the same class and equal fields. Arrays are equal if their shapes
    and values are, whatever their library, device or dtype.
    """

    # `_children`: the names of the children of an unflattened tree, whose leaves may be any objects.
    # `_signature`: kept for nodes without arrays. Arrays can change their device and flags.
    __slots__ = ("_children", "_signature")
    _argument: ClassVar[str]  # the name that arguments of this kind have, for errors

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # A class that becomes a dataclass keeps them. Those that a dataclass generates fail for arrays.
        for name in ("__eq__", "__hash__"):
            if name not in vars(cls):
                setattr(cls, name, getattr(cls, name))

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        _register_nodes(cls)
        return super().__new__(cls)

    def _named_values(self) -> dict[str, Any]:
        """The fields by name."""
        return vars(self)

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays in the fields, also in those of nodes in them."""
        arrays: list[Array] = []
        for x in self._named_values().values():
            if isinstance(x, Node):
                arrays += x.arrays
            elif isinstance(x, tuple):
                arrays += filter(is_array, leaves_of(x))
            elif x is not None and is_array(x):
                arrays.append(x)
        return tuple(arrays)

    def signature(self, array_signature: Callable[[Any], Any]) -> tuple[Any, ...]:
        """The properties of the node, except for the values of its arrays."""
        cached = getattr(self, "_signature", None)
        if cached is not None:
            return cached
        items = self._named_values().items()
        parts = ((name, type(x), _signature(x, array_signature)) for name, x in items)
        signature = (type(self), *parts)
        if not self.arrays:
            object.__setattr__(self, "_signature", signature)
        return signature

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        a, b = self._named_values(), other._named_values()
        return a.keys() == b.keys() and all(_is_same(a[x], b[x], self._argument) for x in a)

    def __hash__(self) -> int:
        values = self._named_values().values()
        # The hash of a tensor is its identity, not its value.
        if any(is_array(x) or _has_arrays(x) for x in values):
            raise TypeError(f"unhashable: {type(self).__name__} with arrays")
        return hash((type(self), *values))

    def __fx_create_arg__(self, tracer: Any) -> Any:
        """The node of a graph of `torch.fx` that makes this value."""
        fields = {name: tracer.create_arg(x) for name, x in self._named_values().items()}
        return tracer.create_node("call_function", type(self), (), fields)

    def __getstate__(self) -> dict[str, Any]:
        # Without the slots, which a copy could not set, as it is immutable.
        return dict(self._named_values())

    def _flatten(self) -> tuple[list[tuple[str, Any]], Any]:
        """The children with their names, and the auxiliary data, which can be hashed and compared."""
        values = self._named_values()
        names = getattr(self, "_children", None)
        if names is None:
            names = tuple(name for name, x in values.items() if _is_child(x))
        numbers = tuple((name, None if name in names else x) for name, x in values.items())
        return [(name, values[name]) for name in names], (names, numbers)

    @classmethod
    def _unflatten(cls, aux: Any, children: Iterable[Any]) -> Self:
        # Without checks, as the leaves of a tree may also be tracers, booleans, axes or None.
        node = object.__new__(cls)
        names, values = aux
        for name, x in (dict(values) | dict(zip(names, children, strict=True))).items():
            object.__setattr__(node, name, x)
        object.__setattr__(node, "_children", names)
        return node


def _is_child(x: Any) -> bool:
    return isinstance(x, Node) or is_array(x) or _has_arrays(x)


def _has_arrays(x: Any) -> bool:
    return isinstance(x, tuple) and any(map(is_array, leaves_of(x)))


def _signature(x: Any, array_signature: Callable[[Any], Any]) -> Any:
    if isinstance(x, Node):
        return x.signature(array_signature)
    if is_array(x):
        return array_signature(x)
    if isinstance(x, tuple):
        return tuple(_signature(part, array_signature) for part in x)
    # Other objects may change. A list has no hash, so that no plan is kept for them.
    return x if x is None or isinstance(x, (Number, str, bytes)) else [x]


def _is_same(a: Any, b: Any, argument: str) -> bool:
    if a is b:  # also for tracers, whose values cannot be read
        return True
    if not (is_array(a) and is_array(b)):
        return not (is_array(a) or is_array(b)) and a == b
    if tuple(a.shape) != tuple(b.shape):  # the shapes of tracers can be read
        return False
    try:
        return same_arrays(a, b)
    except (AttributeError, BufferError, RuntimeError, TypeError):  # libraries raise different errors
        must = "have arrays that can be read, to be compared"
        raise type_error(argument, must, type(a).__name__) from None


def _register_in_jax(kind: Any) -> None:
    from jax.tree_util import GetAttrKey, register_pytree_with_keys

    register_pytree_with_keys(kind, _flatten_with_keys(GetAttrKey), kind._unflatten, _flatten)


def _register_in_torch(kind: Any) -> None:
    from torch.utils._pytree import GetAttrKey, register_pytree_node

    def unflatten(children: Iterable[Any], aux: Any) -> Any:
        return kind._unflatten(aux, children)

    register_pytree_node(kind, _flatten, unflatten, flatten_with_keys_fn=_flatten_with_keys(GetAttrKey))


_REGISTER = {"jax": _register_in_jax, "torch": _register_in_torch}
_REGISTERED: dict[str, set[type]] = {library: set() for library in _REGISTER}


def _register_nodes(kind: type) -> None:
    """Register all classes of nodes in each imported library, unless it has `kind` already."""
    torch = imported_torch()
    if torch is not None and torch.compiler.is_compiling():
        return
    for library, register in _REGISTER.items():
        registered = _REGISTERED[library]
        if kind in registered or sys.modules.get(library) is None:
            continue
        for member in _subclasses(Node):
            if member not in registered:
                with contextlib.suppress(ValueError):  # already registered by a user or another thread
                    register(member)
                registered.add(member)


def _flatten(node: Any) -> Flat:
    children, aux = node._flatten()
    return [x for _, x in children], aux


def _flatten_with_keys(key: Callable[[str], Any]) -> Callable[[Any], Flat]:
    def flatten(node: Any) -> Flat:
        children, aux = node._flatten()
        return [(key(name), x) for name, x in children], aux

    return flatten


def _subclasses(family: Any) -> Iterator[type]:
    for member in family.__subclasses__():
        yield member
        yield from _subclasses(member)
