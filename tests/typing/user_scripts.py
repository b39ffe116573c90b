"""What a strict type checker tells users of NumPy, and of another library: the types of their results.

It is checked and not run. `Tensor` stands for an array of PyTorch or JAX, which need not be installed.
"""

from typing import assert_type

import numpy as np
from numpy.typing import NDArray

import isentropic as it
from isentropic import AttentionDistribution, drift, jl, laws, layers, masks
from isentropic._attention.state import AttentionState
from isentropic._attention.statistics import AttentionStatistics
from isentropic._namespace import Array
from isentropic.drift import CalibrationReport, DriftReport
from isentropic.integrations.torch import Observation, observe

Floats = NDArray[np.float32]


class Tensor(Array):
    def __getitem__(self, key: object, /) -> "Tensor":
        raise NotImplementedError


def numpy_attention(q: Floats, k: Floats, v: Floats) -> Floats:
    entropy = it.attention_entropy(q, k, law=None, normalized=True)
    assert_type(entropy, Floats)
    print(float(entropy.mean()), np.round(entropy, 3), entropy[0, :5])
    assert_type(it.entropy(q), Floats)
    assert_type(it.entropy_from_logits(q), Floats)
    assert_type(it.kl_divergence(q, k), Floats)
    assert_type(it.cross_entropy(q, k), Floats)
    assert_type(it.entropy_penalty(entropy, 2.0), Floats)
    assert_type(it.factor_for_entropy(q, 2.0), Floats)
    state = it.attention_state(q, k, v) + it.AttentionState.from_output(q, entropy)
    assert_type(state, AttentionState[Floats])
    assert_type(it.merge_states([state, state]).log_normalizer(base=2), Floats)
    # A result may have fewer axes than NumPy's type of the argument.
    assert_type(it.attention_entropy(np.ones((2, 3)), k), NDArray[np.float64])
    return it.attention(q, k, v, is_causal=True, law=laws.LogLength(512))


def distributions(q: Floats, k: Floats, v: Floats) -> AttentionDistribution[Floats]:
    p = AttentionDistribution(q, k, is_causal=True)
    coded = AttentionDistribution(q, jl.quantizer(64, rng=0).encode(k))
    assert_type(p.output(v), Floats)
    assert_type(p.entropy(), Floats)
    assert_type(p.weights(), Floats)
    assert_type(p.received(), Floats)
    assert_type(p.information(), Floats)
    assert_type(p.factor_for_entropy(2.0), Floats)
    assert_type(p.kl_divergence(coded, over_heads=True), Floats)
    assert_type(p.state(v).output(), Floats)
    assert_type(p.statistics(), AttentionStatistics[Floats])
    assert_type(p.statistics().variance, Floats)
    assert_type(coded.output(jl.quantizer(64, rng=1).encode(v)), np.ndarray)
    assert_type(layers.qk_clip(p, 100.0).query, Floats)
    return p


def other_library(q: Tensor, k: Tensor, teacher: AttentionDistribution) -> Tensor:
    student = AttentionDistribution(q, k, mask=masks.causal())
    assert_type(student.kl_divergence(teacher), Tensor)
    assert_type(it.attention_state(q, k, k).output(), Tensor)
    assert_type(masks.window(8).visible_count(4, 4, like=q), Tensor)
    assert_type(laws.AffineLog(q)(k), Tensor)
    assert_type(jl.gaussian_projection(9, 4, like=q).matrix(), Tensor)
    f = jl.quantizer(64, like=q)
    assert_type(f.decode(f.encode(k)), Tensor)
    return it.attention(q, k, k, mask=masks.segments(q) & masks.causal())


def laws_and_reports(x: Floats, lengths: NDArray[np.int64]) -> laws.Law:
    assert_type(laws.from_dict(laws.LogLength(16).to_dict()), laws.Law)
    assert_type(laws.LogLength(16)(lengths), np.ndarray)  # of floats
    report = drift.entropy_drift([(x, x, masks.causal())], law=laws.preset("su"))
    assert_type(report, DriftReport)
    assert_type(report.at(128), np.ndarray)
    calibrated = drift.calibrate([x], reference_length=128)
    assert_type(calibrated, CalibrationReport)
    return calibrated.law


def projections_and_quantizers(x: Floats) -> Floats:
    f = jl.hadamard_projection(100, jl.min_dim(500, eps=0.2), rng=1, like=x)
    assert_type(f.matrix(), Floats)
    assert_type(f.adjoint(f(x)), Floats)
    assert_type(jl.rotation(100, rng=0).matrix(), np.ndarray)
    report = jl.distortion(x, f(x))
    assert_type(report.inner_product, Floats)
    g = jl.quantizer(128, kind="unbiased", rng=0)
    vectors = g.encode(x)
    assert_type(vectors.quantizer.inner(x, vectors), Floats)
    assert_type(g.decode(vectors), np.ndarray)  # of float32, whatever went in
    assert_type(vectors.codes, np.ndarray)
    return it.attention(x, vectors, vectors)


def training(model: object) -> list[Observation]:
    history: list[Observation] = []
    with observe(model, then=history.append):
        pass
    assert_type(history[-1].entropy, np.ndarray)
    return history
