"""Constant-entropy attention for every array library.

Attention whose entropy does not depend on the context length, and exact attention entropy without
the L×S matrix, for NumPy, CuPy, PyTorch, JAX and other libraries of the Python array API standard.
"""

from isentropic import laws, masks
from isentropic._attention import (
    additive_attention,
    attention,
    attention_entropy,
    attention_information,
    attention_state,
    attention_weights,
    multi_head_attention,
    scale_queries,
)
from isentropic._entropy import (
    cross_entropy,
    entropy,
    entropy_from_logits,
    entropy_penalty,
    kl_divergence,
)
from isentropic._rotary import rotary
from isentropic._state import AttentionState, merge
from isentropic.laws import LogLength

__version__ = "0.1.0.dev0"

__all__ = [
    "AttentionState",
    "LogLength",
    "additive_attention",
    "attention",
    "attention_entropy",
    "attention_information",
    "attention_state",
    "attention_weights",
    "cross_entropy",
    "entropy",
    "entropy_from_logits",
    "entropy_penalty",
    "kl_divergence",
    "laws",
    "masks",
    "merge",
    "multi_head_attention",
    "rotary",
    "scale_queries",
]
