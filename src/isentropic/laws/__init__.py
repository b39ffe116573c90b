"""Laws: how the scale of the logits depends on the number n of keys that a query sees.

A law is a small immutable value that maps n to a dimensionless factor. The factor multiplies the scale
of the attention (``1/√E`` by default). All logarithms are natural, and are computed in float32 or
better. n ≤ 1 counts as 1, so that ln n is never negative.

Parameters are numbers or arrays (learnable, per head). Array parameters have the batch and head axes:
for n of shape (..., L) a parameter of shape (H,) gives a factor of shape (H, L). A parameter that
depends on the query also has an axis for the queries, and is wrapped in `per_query`.

>>> from isentropic import laws
>>> laws.LogLength(512)(512)
1.0
>>> round(laws.LogLength(512)(8192), 3)
1.444
"""

import importlib
from typing import TYPE_CHECKING, Any

from isentropic.laws._law import Constant, Law, LogLength, per_query

if TYPE_CHECKING:
    from isentropic.laws._configurations import from_config
    from isentropic.laws._dictionaries import from_dict
    from isentropic.laws._formulas import (
        AffineLog,
        Knots,
        Power,
        PowerLog,
        SqrtLogLength,
        scaled,
        shifted,
    )
    from isentropic.laws._presets import preset
    from isentropic.laws._realized import realized_factor
else:  # a type checker that sees `__getattr__` accepts every attribute name
    # Attention does not need these names. They are imported on first use.
    _MODULES = {
        "from_config": "_configurations", "from_dict": "_dictionaries", "preset": "_presets",
        "realized_factor": "_realized",
    }  # fmt: skip

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(f"{__name__}.{_MODULES.get(name, '_formulas')}")
        return getattr(module, name)


def __dir__() -> list[str]:
    return __all__


__all__ = [
    "AffineLog",
    "Constant",
    "Knots",
    "Law",
    "LogLength",
    "Power",
    "PowerLog",
    "SqrtLogLength",
    "from_config",
    "from_dict",
    "per_query",
    "preset",
    "realized_factor",
    "scaled",
    "shifted",
]
