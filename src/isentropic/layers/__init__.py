"""Layers around attention: heads, additive scores, random features, rotary positions, QK-Clip."""

from isentropic.layers._additive import additive_attention
from isentropic.layers._linear_attention import (
    linear_attention,
    linear_attention_error,
    positive_features,
)
from isentropic.layers._multi_head import multi_head_attention
from isentropic.layers._qk_clip import qk_clip
from isentropic.layers._rotary import rotary

__all__ = [
    "additive_attention",
    "linear_attention",
    "linear_attention_error",
    "multi_head_attention",
    "positive_features",
    "qk_clip",
    "rotary",
]
