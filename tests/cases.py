"""One call of every public function: what the tests of common properties run over.

A case is a function of a dictionary of arrays, made from `inputs`.
"""

from __future__ import annotations

import ast

import numpy as np
from law_cases import RANGES

import isentropic as it
from isentropic import laws, masks, theory
from isentropic.jl import _maps
from isentropic.jl._quantizers import QuantizedVectors, UnbiasedQuantizer
from isentropic.layers._linear_attention import PositiveFeatures


def inputs(dtype="float32", n=7):
    """NumPy arrays by name. Queries and keys have n rows, of 4 heads in a batch of 2."""
    rng = np.random.default_rng(7)

    def normal(*shape):
        return rng.normal(size=shape).astype(dtype)

    p = rng.dirichlet(np.ones(n), size=(2, n)).astype(dtype)
    p[0, 0] = np.eye(n)[0]  # one-hot
    visible = rng.random((2, 1, n, n)) < 0.6
    visible[1, 0, 2] = False  # a query that sees nothing
    dense = it.jl.sparse_projection(16, 5, rng=1)
    hadamard = it.jl.hadamard_projection(16, 5, rounds=2, rng=2)
    sketch = it.jl.count_sketch(16, 6, nonzeros=2, rng=3)
    rotation = it.jl.rotation(16, blocks=2, independent=True, rng=5)
    quantizer = it.jl.quantizer(16, 4, kind="unbiased", rng=6)
    return {
        "q": normal(2, 4, n, 8),
        "k": normal(2, 4, n, 8),
        "v": normal(2, 4, n, 6),
        "k2": normal(2, 2, n, 8),
        "v2": normal(2, 2, n, 6),
        "x": normal(2, n, 16),
        "w": normal(4, 16, 16),
        "wa": normal(8, 5),
        "va": normal(5),
        "bias": normal(1, 4, n, n),
        "slope": np.abs(normal(4)) + np.asarray(0.1, dtype),
        "visible": visible,
        "lengths": np.asarray([[n - 3], [n]]),
        "starts": np.asarray([0, 3, n]),
        "ids": np.repeat(np.arange(n), 2)[:n],
        "n_keys": np.arange(1, n + 1),
        "p": p,
        "target": normal(2, 4, n),
        "weights": dense.weights.astype(dtype),
        "weights_scale": dense.scale.astype(dtype),
        "signs1": hadamard.signs[0].astype(dtype),
        "signs2": hadamard.signs[1].astype(dtype),
        "rows": hadamard.rows,
        "sketch_signs": sketch.signs.astype(dtype),
        "components": sketch.components,
        "features": sketch.features,
        "rotation_signs": rotation.signs[0].astype(dtype),
        "rotation_factor": rotation.factors[0].astype(dtype),
        "quantizer_signs": np.stack(quantizer.map.signs).astype(dtype),
        "quantizer_factor": quantizer.map.factors[0].astype(dtype),
        "codes": rng.integers(0, 256, (2, n, 8)).astype(np.uint8),
        "quantizer_values": quantizer.values.astype(dtype),
        "omega": it.layers.positive_features(8, 12, rng=4).weights.astype(dtype),
    }


def _lengths_of(a):
    return a["q"].shape[-2], a["k"].shape[-2]


def dense(a):
    return _maps.DenseProjection(a["weights"], a["weights_scale"])


def hadamard(a, rounds=2):
    return _maps.HadamardProjection((a["signs1"], a["signs2"])[:rounds], a["rows"])


def sketch(a):
    return _maps.CountSketch(a["sketch_signs"], a["components"], a["features"])


def rotation(a):
    return _maps.Rotation((a["rotation_signs"],), (a["rotation_factor"],))


def quantizer(a):
    signs = tuple(a["quantizer_signs"][i, ...] for i in range(a["quantizer_signs"].shape[0]))
    return UnbiasedQuantizer(_maps.Rotation(signs, (a["quantizer_factor"],)), a["quantizer_values"])


CASES = {
    "attention": lambda a: it.attention(a["q"], a["k"], a["v"]),
    "attention-causal": lambda a: it.attention(a["q"], a["k"], a["v"], is_causal=True),
    "attention-standard": lambda a: it.attention(a["q"], a["k"], a["v"], law=None),
    "attention-mask": lambda a: it.attention(a["q"], a["k"], a["v"], mask=a["visible"]),
    "attention-all": lambda a: it.attention(
        a["q"], a["k2"], a["v2"], enable_gqa=True, softcap=3.0, bias=a["bias"], is_causal=True,
        mask=(masks.window(4) | masks.segments(a["ids"])) & masks.padding(a["lengths"], side="left"),
        law=laws.AffineLog(a["slope"], 0.5), scale=0.3,
    ),
    "attention-packed": lambda a: it.attention(
        a["q"], a["k"], a["v"], mask=masks.packed(a["starts"]), is_causal=True
    ),
    "attention-sinks": lambda a: it.attention(
        a["q"], a["k2"], a["v2"], enable_gqa=True, is_causal=True, sinks=a["slope"]
    ),
    "attention-n_keys": lambda a: it.attention(a["q"], a["k"], a["v"], n_keys=a["n_keys"]),
    "attention_state": lambda a: it.attention_state(a["q"], a["k"], a["v"], mask=a["visible"]),
    "attention_state-parts": lambda a: (
        lambda s: (s.output(), s.log_normalizer(), s.entropy())
    )(it.attention_state(a["q"], a["k"], a["v"])),
    "attention_state-sinks": lambda a: it.attention_state(
        a["q"], a["k"], a["v"], mask=a["visible"], softcap=3.0, sinks=a["slope"]
    ),
    "AttentionState-from_output": lambda a: (
        lambda s: (s.output(), s.log_normalizer(base=2), s.entropy())
    )(it.AttentionState.from_output(a["v"], a["target"], entropy=a["target"], base=2)
      + it.attention_state(a["q"], a["k"], a["v"])),
    "attention_entropy": lambda a: it.attention_entropy(a["q"], a["k"], is_causal=True),
    "attention_entropy-0.5": lambda a: it.attention_entropy(
        a["q"], a["k"], order=0.5, mask=a["visible"], normalized=True
    ),
    "attention_entropy-tsallis": lambda a: it.attention_entropy(
        a["q"], a["k"], order=1.1, family="tsallis", normalized=True
    ),
    "AttentionDistribution.weights": lambda a: it.AttentionDistribution(a["q"], a["k"], mask=a["visible"]).weights(),
    "attention_entropy-sinks": lambda a: it.attention_entropy(
        a["q"], a["k"], order=2, normalized=True, sinks=a["slope"], mask=a["visible"]
    ),
    "AttentionDistribution.weights-sinks": lambda a: it.AttentionDistribution(a["q"], a["k"], sinks=a["slope"]).weights(),
    "AttentionDistribution.information": lambda a: it.AttentionDistribution(a["q"], a["k"], mask=a["visible"]).information(),
    "AttentionDistribution.information-sinks": lambda a: it.AttentionDistribution(
        a["q"], a["k"], mask=a["visible"], sinks=a["slope"]
    ).information(),
    "AttentionDistribution.kl_divergence": lambda a: it.AttentionDistribution(
        a["q"], a["k"], mask=a["visible"]
    ).kl_divergence(it.AttentionDistribution(a["q"], a["k2"], enable_gqa=True, softcap=3.0, bias=a["bias"])),
    "AttentionDistribution.kl_divergence-heads": lambda a: it.AttentionDistribution(
        a["q"], a["k"], mask=a["visible"]
    ).kl_divergence(it.AttentionDistribution(a["v"][:, :1, ...], a["v2"][:, :1, ...]), over_heads=True),
    "AttentionDistribution.js_divergence": lambda a: it.AttentionDistribution(
        a["q"], a["k"], mask=a["visible"], sinks=a["slope"]
    ).js_divergence(it.AttentionDistribution(a["k"], a["q"], is_causal=True)),
    "AttentionDistribution.cross_entropy": lambda a: it.AttentionDistribution(
        a["q"], a["k"], is_causal=True
    ).cross_entropy(it.AttentionDistribution(a["v"], a["v"], law=None, is_causal=True)),
    "AttentionDistribution.statistics": lambda a: it.AttentionDistribution(
        a["q"], a["k2"], mask=a["visible"], enable_gqa=True
    ).statistics(),
    "AttentionDistribution.statistics-all": lambda a: it.AttentionDistribution(
        a["q"], a["k"], is_causal=True, softcap=3.0, bias=a["bias"], sinks=a["slope"],
        law=laws.AffineLog(a["slope"], 0.5)).statistics(),
    "AttentionDistribution.received": lambda a: it.AttentionDistribution(
        a["q"], a["k2"], mask=a["visible"], enable_gqa=True
    ).received(),
    "AttentionDistribution.received-sinks": lambda a: it.AttentionDistribution(
        a["q"], a["k"], is_causal=True, sinks=a["slope"]
    ).received(),
    "scale_queries": lambda a: it.scale_queries(a["q"], a["n_keys"]),
    "multi_head_attention": lambda a: it.layers.multi_head_attention(
        a["x"], a["x"], a["x"], a["w"][0, ...], a["w"][1, ...], a["w"][2, ...], a["w"][3, ...],
        num_heads=4, is_causal=True,
    ),
    "additive_attention": lambda a: it.layers.additive_attention(
        a["q"], a["k"], a["v"], a["wa"], a["wa"], a["va"], mask=a["visible"]
    ),
    "merge_states": lambda a: it.merge_states(
        it.attention_state(a["q"], a["k"], a["v"], n_keys=2 * _lengths_of(a)[1]),
        it.attention_state(a["q"], a["v"][..., :1] * a["k"], a["v"], n_keys=2 * _lengths_of(a)[1]),
    ),
    "rotary": lambda a: it.layers.rotary(a["q"], a["n_keys"]),
    "rotary-interleaved": lambda a: it.layers.rotary(a["q"], interleaved=True, base=500.0),
    "entropy": lambda a: it.entropy(a["p"]),
    "entropy-2": lambda a: it.entropy(a["p"], order=2, axis=0),
    "entropy_from_logits": lambda a: it.entropy_from_logits(
        a["bias"], order=0.9, mask=a["visible"][:1, ...], axis=-2
    ),
    "cross_entropy": lambda a: it.cross_entropy(a["p"], a["p"][1:, ...] + 0.1),
    "kl_divergence": lambda a: it.kl_divergence(a["p"], a["p"][1:, ...] + 0.1),
    "entropy_penalty": lambda a: it.entropy_penalty(a["target"], 1.5),
    "PowerLog": lambda a: laws.scaled(laws.PowerLog(0.1, a["slope"], 1.5), 2.0)(a["target"] * a["target"]),
    "DenseProjection": lambda a: dense(a)(a["x"]),
    "DenseProjection-axis": lambda a: dense(a)(a["w"], axis=1),
    "DenseProjection-adjoint": lambda a: dense(a).adjoint(a["x"][:, :5, :], axis=1),
    "DenseProjection-matrix": lambda a: dense(a).matrix(),
    "HadamardProjection": lambda a: hadamard(a, 1)(a["x"]),
    "HadamardProjection-axis": lambda a: hadamard(a)(a["w"], axis=1),
    "HadamardProjection-adjoint": lambda a: hadamard(a).adjoint(a["x"][:, :5, :], axis=1),
    "HadamardProjection-matrix": lambda a: hadamard(a).matrix(),
    "CountSketch": lambda a: sketch(a)(a["x"]),
    "CountSketch-axis": lambda a: sketch(a)(a["w"], axis=1),
    "CountSketch-adjoint": lambda a: sketch(a).adjoint(a["x"][:, :6, :], axis=1),
    "CountSketch-matrix": lambda a: sketch(a).matrix(),
    "Rotation": lambda a: rotation(a)(a["x"]),
    "Rotation-adjoint": lambda a: rotation(a).adjoint(a["w"], axis=1),
    "Rotation-matrix": lambda a: rotation(a).matrix(),
    "Rotation-fold_into": lambda a: rotation(a).fold_into(a["w"], side="output"),
    "hadamard_transform": lambda a: it.jl.hadamard_transform(a["x"]),
    "hadamard_transform-axis": lambda a: it.jl.hadamard_transform(a["q"], axis=1, norm="backward"),
    "linear_attention-features": lambda a: PositiveFeatures(a["omega"])(a["q"] * 0.3),
    "linear_attention-features-variance": lambda a: PositiveFeatures(
        a["omega"], a["weights_scale"]
    )(a["q"] * 0.3),
    "linear_attention-variance": lambda a: it.layers.linear_attention(
        a["q"], a["k"], a["v"], PositiveFeatures(a["omega"], a["weights_scale"]),
        is_causal=True, scale=0.2,
    ),
    "linear_attention_error-variance": lambda a: it.layers.linear_attention_error(
        a["q"], a["k"], PositiveFeatures(a["omega"], a["weights_scale"]), scale=0.1
    ),
    "linear_attention": lambda a: it.layers.linear_attention(
        a["q"], a["k"], a["v"], PositiveFeatures(a["omega"]), n_keys=a["n_keys"]
    ),
    "linear_attention-causal": lambda a: it.layers.linear_attention(
        a["q"], a["k"], a["v"], PositiveFeatures(a["omega"]), is_causal=True, scale=0.2,
        law=laws.AffineLog(a["slope"], 0.5),
    ),
    "linear_attention_error": lambda a: it.layers.linear_attention_error(
        a["q"], a["k"], PositiveFeatures(a["omega"]), is_causal=True, scale=0.1
    ),
    "factor_for_entropy": lambda a: it.factor_for_entropy(a["bias"], 0.7, axis=-2, mask=a["visible"][:1, ...]),
    "factor_for_entropy-target": lambda a: it.factor_for_entropy(a["bias"], a["target"][:1, ...] * 0.1 + 1.0),
    "AttentionDistribution.factor_for_entropy": lambda a: it.AttentionDistribution(
        a["q"], a["k2"], mask=a["visible"], is_causal=True, enable_gqa=True
    , law=None).factor_for_entropy(a["target"] * 0.1 + 1.0),
    "needle_entropy": lambda a: theory.needle_entropy(a["n_keys"], 1, a["target"] * 0.1 + 2.0),
    "Mask": lambda a: (
        masks.causal() & masks.segments(a["ids"]) & masks.padding(a["lengths"])
    ).visible_count(*_lengths_of(a), like=a["q"]),
}  # fmt: skip


def _lengths(a):
    return a["target"] * a["target"] * 10.0 + 2.0


def _positive(a):
    return a["target"] * a["target"] + 0.75


def _few(a):
    """Few numbers, for what takes a quadrature for each."""
    return _positive(a)[0, 0, :2]


def _sizes(a):
    return a["slope"] * 0.0 + 50.0


def _calls_of_laws():
    """The call of each law that `law_cases` makes of an array."""

    def call_of(make):
        return lambda a: make(a["slope"] + 2.0)(_lengths(a))

    calls = {type(make(np.ones(1) + 1)).__name__: call_of(make) for make, *_ in reversed(RANGES)}
    return {
        # Laws that only presets make are in their row.
        name if name in laws.__all__ else f"preset-{name}": call
        for name, call in calls.items()
        if name not in CASES
    }


def _samples(a):
    return [(a["q"][..., :4, :], a["k"][..., :4, :]), (a["q"], a["k"])]


# Calls of the other functions, whose values have tests of their own. They are only tried: see
# `capabilities`.
TRIED = {
    "AttentionState": lambda a: it.AttentionState(
        a["target"], _positive(a), a["v"], a["target"] * 0.1
    ).entropy(),
    "AttentionDistribution.output": lambda a: it.AttentionDistribution(
        a["q"], a["k2"], mask=a["visible"], enable_gqa=True
    ).output(a["v2"]),
    "AttentionDistribution.state": lambda a: it.AttentionDistribution(
        a["q"], a["k"], bias=a["bias"], sinks=a["slope"], law=laws.AffineLog(a["slope"], 0.5)
    ).state(a["v"]),
    "AttentionDistribution.entropy": lambda a: it.AttentionDistribution(
        a["q"], a["k"], is_causal=True, n_keys=a["n_keys"]
    ).entropy(order=2, family="tsallis", normalized=True),
    "AttentionDistribution.backends": lambda a: it.AttentionDistribution(a["q"], a["k"], mask=a["visible"]).backends(a["v"]),
    "calibrate": lambda a: it.drift.calibrate(_samples(a), reference_length=5).law.arrays,
    "entropy_drift": lambda a: it.drift.entropy_drift(_samples(a)),
    **_calls_of_laws(),
    "Knots": lambda a: laws.Knots((2, 4, 8, 16), a["slope"])(_lengths(a)),
    "per_query": lambda a: laws.AffineLog(laws.per_query(a["target"]), 0.5)(_lengths(a)),
    "shifted": lambda a: laws.shifted(laws.AffineLog(a["slope"]), 1)(_lengths(a)),
    "preset": lambda a: laws.preset("ssmax", slope=a["slope"])(_lengths(a)),
    "from_dict": lambda a: laws.from_dict(
        {"law": "AffineLog", "slope": [0.25, 0.5]}, like=a["x"]
    ).arrays,
    "causal": lambda a: masks.causal(a["n_keys"][2]).visible_count(*_lengths_of(a), like=a["q"]),
    "window": lambda a: masks.window(2, offset=a["n_keys"][2]).visible_count(*_lengths_of(a), like=a["q"]),
    "padding": lambda a: masks.padding(a["lengths"]).visible_count(*_lengths_of(a), like=a["q"]),
    "segments": lambda a: masks.segments(a["ids"]).visible_count(*_lengths_of(a), like=a["q"]),
    "packed": lambda a: masks.packed(a["starts"]).visible_count(*_lengths_of(a), like=a["q"]),
    "qk_clip": lambda a: it.layers.qk_clip(
        it.AttentionDistribution(a["q"], a["k2"], enable_gqa=True, is_causal=True, sinks=a["slope"]), 0.5
    ),
    "qk_clip-array": lambda a: it.layers.qk_clip(a["slope"] * 2, 1.0, n_key_heads=2),
    "positive_features": lambda a: it.layers.positive_features(8, 5, rng=0, like=a["q"]),
    "count_sketch": lambda a: it.jl.count_sketch(16, 5, rng=0, like=a["x"]),
    "gaussian_projection": lambda a: it.jl.gaussian_projection(16, 5, rng=0, like=a["x"]),
    "hadamard_projection": lambda a: it.jl.hadamard_projection(16, 5, rng=0, like=a["x"]),
    "orthogonal_projection": lambda a: it.jl.orthogonal_projection(16, 5, rng=0, like=a["x"]),
    "rotation": lambda a: it.jl.rotation(16, rng=0, like=a["x"]),
    "quantizer": lambda a: it.jl.quantizer(16, 2, rng=0, like=a["x"]),
    "Quantizer": lambda a: quantizer(a).inner(
        a["w"][:2, ...], QuantizedVectors(a["codes"], a["x"][..., 0], quantizer(a))
    ),
    "sparse_projection": lambda a: it.jl.sparse_projection(16, 5, rng=0, like=a["x"]),
    "sparse_projection-signs": lambda a: it.jl.sparse_projection(16, 5, density=1, rng=0, like=a["x"]),
    "distortion": lambda a: it.jl.distortion(a["x"][0, ...], a["x"][0, :, :5]).distance,
    "min_dim": lambda a: it.jl.min_dim(_sizes(a), eps=0.3),
    "failure_probability": lambda a: it.jl.failure_probability(_sizes(a), 200, eps=0.3),
    "eps": lambda a: it.jl.eps(_sizes(a), 2000),
    "lower_bound": lambda a: it.jl.lower_bound(_sizes(a), eps=0.3),
    "entropy_criterion_dim": lambda a: theory.entropy_criterion_dim(_sizes(a)),
    "matched_key_dim": lambda a: theory.matched_key_dim(_sizes(a), 64),
    "gaussian_entropy": lambda a: theory.gaussian_entropy(50, _few(a)),
    "gaussian_entropy-2": lambda a: theory.gaussian_entropy(50, _few(a), order=2),
    "frozen_entropy": lambda a: theory.frozen_entropy(_positive(a)),
    "sphere_entropy": lambda a: theory.sphere_entropy(50, 8, _few(a)),
    "sphere_entropy-2": lambda a: theory.sphere_entropy(50, 8, _few(a), order=2),
    "needle_entropy-2": lambda a: theory.needle_entropy(a["n_keys"], 1, _positive(a), order=2),
    "needle_weight": lambda a: theory.needle_weight(a["n_keys"], 1, _positive(a)),
    "tied_entropy": lambda a: theory.tied_entropy(a["n_keys"] + 1, 8, _positive(a)),
    "invariant_factor": lambda a: theory.invariant_factor(
        50, _few(a), model="needle", n_relevant=1, gap=3.0
    ),
}  # fmt: skip

# Calls that are refused somewhere, where others of the same function are not.
REFUSED = {
    "invariant_factor-gaussian": lambda a: theory.invariant_factor(50, _few(a)),
}


# Arrays of these names have no gradient.
DISCRETE = {
    "codes", "visible", "lengths", "starts", "ids", "n_keys", "rows", "components", "features",
}  # fmt: skip

# Arrays of these names are parts of maps, and stay in memory where the data are lazy.
PARTS = {
    "weights", "weights_scale", "signs1", "signs2", "rows", "sketch_signs", "components", "features",
    "omega", "rotation_signs", "rotation_factor", "quantizer_signs", "quantizer_factor", "quantizer_values",
}  # fmt: skip


def results_of_methods(p, v):
    """What the methods of a distribution return, as a list of arrays."""
    state = p.state(v)
    results = [p.output(v), state.output(), state.entropy(), p.factor_for_entropy(1.0), *p.statistics()]
    return [*results, p.entropy(), p.received(), p.information(), p.weights()]


class _Recorder(dict):
    def __init__(self, arrays):
        super().__init__(arrays)
        self.read = set()

    def __getitem__(self, key):
        self.read.add(key)
        return super().__getitem__(key)


def names_read(case):
    """The names of the arrays that a case uses."""
    recorder = _Recorder(inputs())
    case(recorder)
    return recorder.read


def leaves(result):
    """The arrays of a result, which is an array or a (named) tuple of arrays."""
    return list(result) if isinstance(result, tuple) else [result]


def definitions(path):
    """The dotted names of the functions and classes of a file."""

    def of(node, prefix):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                name = prefix + child.name
                yield name
                yield from of(child, f"{name}.")

    return set(of(ast.parse(path.read_text(encoding="utf-8")), ""))
