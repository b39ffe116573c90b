"""Attention whose entropy does not depend on the context length, for every array library.

The package computes attention whose scale follows the number of keys, exact attention entropy without
the L×S matrix, and Johnson–Lindenstrauss projections. It runs on NumPy, CuPy, PyTorch, JAX and other
libraries of the Python array API standard.
"""

import importlib
from typing import TYPE_CHECKING, Any

from isentropic import laws, masks
from isentropic._attention.distribution import AttentionDistribution
from isentropic._attention.functions import (
    attention,
    attention_entropy,
    attention_state,
    scale_queries,
)
from isentropic._attention.state import AttentionState, merge_states
from isentropic._entropy import (
    cross_entropy,
    entropy,
    entropy_from_logits,
    entropy_penalty,
    kl_divergence,
)

if TYPE_CHECKING:
    from isentropic import drift, integrations, jl, layers, plots, theory
    from isentropic._factors import factor_for_entropy
else:  # a type checker that sees `__getattr__` accepts every attribute name
    # Modules that attention does not need are imported on first use.
    def __getattr__(name: str) -> Any:
        if name in ("drift", "integrations", "jl", "layers", "plots", "theory"):
            return importlib.import_module(f"{__name__}.{name}")
        if name == "factor_for_entropy":
            return importlib.import_module(f"{__name__}._factors").factor_for_entropy
        message = f"module {__name__!r} has no attribute {name!r}"
        if not name.startswith("_"):  # Python asks for such names itself
            for part in ("laws", "masks", "jl", "layers", "theory", "drift"):
                if name in importlib.import_module(f"{__name__}.{part}").__all__:
                    message += f": it is `{__name__}.{part}.{name}`"
        raise AttributeError(message)


def __dir__() -> list[str]:
    return __all__


__version__ = "0.1.0.dev0"

__all__ = [
    "AttentionDistribution",
    "AttentionState",
    "attention",
    "attention_entropy",
    "attention_state",
    "cross_entropy",
    "drift",
    "entropy",
    "entropy_from_logits",
    "entropy_penalty",
    "factor_for_entropy",
    "integrations",
    "jl",
    "kl_divergence",
    "laws",
    "layers",
    "masks",
    "merge_states",
    "plots",
    "scale_queries",
    "theory",
]
