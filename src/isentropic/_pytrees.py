"""Registration of classes as pytree nodes of JAX and PyTorch.

A class to register has two methods. ``_flatten`` returns the children, as pairs of a name and a value,
and the auxiliary data, which can be hashed and compared. The class method ``_unflatten`` makes an
object from them.

This module imports neither library, and no library announces its import. So a family of classes is
registered when one of its members is made and the library has been imported.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

# Children, with keys or without, and the auxiliary data.
Flat = tuple[list[Any], Any]


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


def register_nodes(kind: type, family: type) -> None:
    """Register a class and its `family` as pytree nodes in each imported library, once."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.compiler.is_compiling():
        return
    for library, register in _REGISTER.items():
        registered = _REGISTERED[library]
        if kind in registered or sys.modules.get(library) is None:
            continue
        for member in _subclasses(family):
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
