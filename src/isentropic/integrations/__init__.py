"""Integrations with other libraries. Each module needs its library, an extra of this package."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isentropic.integrations import huggingface, jax, sklearn, torch
else:  # a type checker that sees `__getattr__` accepts every attribute name

    def __getattr__(name: str) -> Any:
        if name in __all__:  # imported on first use
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["huggingface", "jax", "sklearn", "torch"]
