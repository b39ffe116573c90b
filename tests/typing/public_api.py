"""What mypy makes of calls of the public API: types that a user sees, and mistakes that it finds.

It is checked and not run. An `ignore` that ignores nothing is an error, so each mistake is a test too.
"""

from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import isentropic as it
from isentropic import drift, laws, masks
from isentropic._namespace import Array
from isentropic.jl._distortion import FailureRate


def calls(x: np.ndarray, ids: np.ndarray) -> None:
    # What comes back is of the type that went in, if it has as many dimensions.
    assert_type(it.attention(x, x, x, is_causal=True), np.ndarray)
    assert_type(it.attention(x, x, x, mask=x > 0, law=None, scale=0.1, n_keys=ids), np.ndarray)
    packed = masks.causal() & masks.window(8) | masks.segments(ids)
    assert_type(it.attention(x, x, x, mask=packed), np.ndarray)
    assert_type(it.attention_entropy(x, x, order=2.0, family="tsallis"), np.ndarray)
    assert_type(
        it.layers.linear_attention(x, x, x, it.layers.positive_features(8, 64, like=x)), np.ndarray
    )
    assert_type(it.layers.rotary(it.jl.hadamard_transform(x)), np.ndarray)
    assert_type(masks.causal() & (x > 0), masks.Mask)
    masks.padding(ids).visible_count(4, 4, like=x).max()

    state = it.merge_states(it.attention_state(x, x, x), it.attention_state(x, x))
    assert_type(state, it.AttentionState[np.ndarray])
    state.output().sum()

    assert_type(laws.preset("su"), laws.Law)
    assert_type(it.laws.LogLength(512), laws.LogLength)
    assert_type(laws.scaled(it.laws.LogLength(), x), laws.scaled)
    assert_type(laws.scaled(laws.AffineLog(x, laws.per_query(x)), laws.per_query(x)), laws.scaled)
    assert_type(laws.Knots([64, 512], [1.0, 1.5]), laws.Knots)
    assert_type(laws.Knots((64, 512.0), x, minimum=1), laws.Knots)
    law = drift.calibrate([(x, x)], reference_length=128).law
    assert_type(law, laws.Law)
    assert_type(drift.entropy_drift([(x, x)]).slope, np.ndarray)
    drift.entropy_drift([(x, x, masks.causal())])
    drift.entropy_drift(np.zeros((2, 4, n, 8)) for n in (16, 64))

    projection = it.jl.hadamard_projection(100, 10, rng=0, like=x)
    assert_type(projection(x), np.ndarray)
    assert_type(projection.n_components, int)
    assert_type(it.jl.rotation(100, rng=0).fold_into(x, side="input"), np.ndarray)
    assert_type(it.jl.distortion(x, projection(x)).failure_rate(0.1), FailureRate)
    assert_type(it.jl.min_dim(100), Any)  # an int, or an array of them


def results(x: np.ndarray) -> None:
    """What comes back goes in again, into NumPy, and into arithmetic."""
    out = it.attention(x, x, x)
    it.attention_entropy(out, out)
    np.testing.assert_array_equal(out, out)
    assert_type(2 * out, np.ndarray)
    out.sum()


def several_types(y: NDArray[np.float32], z: NDArray[np.float64]) -> None:
    assert_type(it.attention(y, y, y), NDArray[np.float32])
    assert_type(it.attention(y, z, y), Array)
    (rows,) = it.entropy(np.ones((2, 3))).shape  # NumPy's types count dimensions
    assert rows == 2


def mistakes(x: np.ndarray) -> None:
    it.attention(x, x)  # type: ignore[call-arg]
    it.attention(x, x, x, None)  # type: ignore[call-arg]
    it.attention([1.0], x, x)  # type: ignore[type-var]
    it.attention(x, x, x, mask="causal")  # type: ignore[arg-type]
    it.attention(x, x, x, law="log")  # type: ignore[arg-type]
    it.attention(x, x, x, law=laws.LogLength)  # type: ignore[arg-type]
    it.attention(x, x, x, causal=True)  # type: ignore[call-arg]
    it.merge_states(x)  # type: ignore[arg-type]
    it.jl.hadamard_projection("100", 10)  # type: ignore[arg-type]
    it.jl.hadamard_projection(100, 10, seed=0)  # type: ignore[call-arg]
    masks.window("8")  # type: ignore[arg-type]
