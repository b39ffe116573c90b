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
    from isentropic.laws._configurations import ModelRule, from_config
    from isentropic.laws._dictionaries import from_dict, to_dict
    from isentropic.laws._formulas import (
        AffineLog,
        InfoScale,
        Knots,
        Power,
        PowerLog,
        SqrtLogLength,
        StepLog,
        from_kappa,
        scaled,
        shifted,
    )
    from isentropic.laws._presets import preset, presets
else:  # a type checker that sees `__getattr__` accepts every attribute name
    # Modules that attention does not need are imported on first use.
    _LAZY = {
        "AffineLog": "_formulas",
        "InfoScale": "_formulas",
        "Knots": "_formulas",
        "ModelRule": "_configurations",
        "Power": "_formulas",
        "PowerLog": "_formulas",
        "SqrtLogLength": "_formulas",
        "StepLog": "_formulas",
        "from_config": "_configurations",
        "from_dict": "_dictionaries",
        "from_kappa": "_formulas",
        "preset": "_presets",
        "presets": "_presets",
        "scaled": "_formulas",
        "shifted": "_formulas",
        "to_dict": "_dictionaries",
    }

    def __getattr__(name: str) -> Any:
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return __all__


__all__ = [
    "AffineLog",
    "Constant",
    "InfoScale",
    "Knots",
    "Law",
    "LogLength",
    "ModelRule",
    "Power",
    "PowerLog",
    "SqrtLogLength",
    "StepLog",
    "from_config",
    "from_dict",
    "from_kappa",
    "per_query",
    "preset",
    "presets",
    "scaled",
    "shifted",
    "to_dict",
]
