"""Immutable objects with named fields."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any, ClassVar, Self, dataclass_transform


@dataclass_transform(frozen_default=True, eq_default=False)
class Record:
    """An object whose fields, those that its class annotates, do not change. Equality is identity.

    A frozen dataclass does the same. But the code that it generates takes 0.3 to 1.4 ms per class,
    whenever the package is imported.
    """

    _fields: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._fields = (*cls._fields, *cls.__annotations__)

    def __init__(self, *values: Any, **named: Any) -> None:
        # The other fields are named, or have their defaults in the class.
        self.__dict__.update(zip(self._fields, values, strict=False), **named)

    def __setattr__(self, name: str, value: Any) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def replaced(self, **changes: Any) -> Self:
        """A record with other values of some fields."""
        return type(self)(**{name: getattr(self, name) for name in self._fields} | changes)
