"""Attention that keeps its entropy as the context grows, for every array library.

Attention whose scale follows the number of keys, exact attention entropy without the L×S matrix, and
Johnson–Lindenstrauss projections, for NumPy, CuPy, PyTorch, JAX and other libraries of the Python
array API standard.
"""

from isentropic import jl, laws, layers, masks, theory
from isentropic._attention.functions import (
    attention,
    attention_backends,
    attention_entropy,
    attention_information,
    attention_state,
    attention_weights,
    scale_queries,
)
from isentropic._attention.generic import AttentionState, merge_states
from isentropic._drift import DriftReport, calibrate, entropy_drift
from isentropic._entropy import (
    cross_entropy,
    entropy,
    entropy_from_logits,
    entropy_penalty,
    kl_divergence,
)
from isentropic._invariance import match_attention_entropy, match_entropy

__version__ = "0.1.0.dev0"

__all__ = [
    "AttentionState",
    "DriftReport",
    "attention",
    "attention_backends",
    "attention_entropy",
    "attention_information",
    "attention_state",
    "attention_weights",
    "calibrate",
    "cross_entropy",
    "entropy",
    "entropy_drift",
    "entropy_from_logits",
    "entropy_penalty",
    "jl",
    "kl_divergence",
    "laws",
    "layers",
    "masks",
    "match_attention_entropy",
    "match_entropy",
    "merge_states",
    "scale_queries",
    "theory",
]
