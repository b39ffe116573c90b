"""Layers around attention: heads, additive scores, random features and rotary positions."""

from isentropic.layers._additive import additive_attention
from isentropic.layers._linear_attention import (
    linear_attention,
    linear_attention_error,
    positive_features,
)
from isentropic.layers._multi_head import multi_head_attention
from isentropic.layers._rotary import rotary

__all__ = [
    "additive_attention",
    "linear_attention",
    "linear_attention_error",
    "multi_head_attention",
    "positive_features",
    "rotary",
]
