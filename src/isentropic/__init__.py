"""Attention that keeps its entropy as the context grows, for every array library.

Attention whose scale follows the number of keys, exact attention entropy without the L×S matrix, and
Johnson–Lindenstrauss projections, for NumPy, CuPy, PyTorch, JAX and other libraries of the Python
array API standard.
"""

from isentropic import laws, masks, theory
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
from isentropic._bounds import (
    entropy_criterion_dim,
    jl_distortion,
    jl_failure_probability,
    jl_lower_bound,
    jl_min_dim,
    matched_key_dim,
)
from isentropic._distortion import DistortionReport, FailureRate, distortion
from isentropic._drift import DriftReport, calibrate, entropy_drift
from isentropic._entropy import (
    cross_entropy,
    entropy,
    entropy_from_logits,
    entropy_penalty,
    kl_divergence,
)
from isentropic._features import (
    LinearAttentionError,
    PositiveFeatures,
    linear_attention,
    linear_attention_error,
    positive_features,
)
from isentropic._hadamard import hadamard_transform
from isentropic._invariance import match_attention_entropy, match_entropy
from isentropic._maps import CountSketch, DenseProjection, HadamardProjection
from isentropic._projections import (
    count_sketch,
    gaussian_projection,
    hadamard_projection,
    orthogonal_projection,
    rademacher_projection,
    sparse_projection,
)
from isentropic._rotary import rotary
from isentropic._state import AttentionState, merge
from isentropic.laws import LogLength

__version__ = "0.1.0.dev0"

__all__ = [
    "AttentionState",
    "CountSketch",
    "DenseProjection",
    "DistortionReport",
    "DriftReport",
    "FailureRate",
    "HadamardProjection",
    "LinearAttentionError",
    "LogLength",
    "PositiveFeatures",
    "additive_attention",
    "attention",
    "attention_entropy",
    "attention_information",
    "attention_state",
    "attention_weights",
    "calibrate",
    "count_sketch",
    "cross_entropy",
    "distortion",
    "entropy",
    "entropy_criterion_dim",
    "entropy_drift",
    "entropy_from_logits",
    "entropy_penalty",
    "gaussian_projection",
    "hadamard_projection",
    "hadamard_transform",
    "jl_distortion",
    "jl_failure_probability",
    "jl_lower_bound",
    "jl_min_dim",
    "kl_divergence",
    "laws",
    "linear_attention",
    "linear_attention_error",
    "masks",
    "match_attention_entropy",
    "match_entropy",
    "matched_key_dim",
    "merge",
    "multi_head_attention",
    "orthogonal_projection",
    "positive_features",
    "rademacher_projection",
    "rotary",
    "scale_queries",
    "sparse_projection",
    "theory",
]
