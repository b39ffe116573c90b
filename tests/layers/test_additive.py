"""`additive_attention` agrees with its definition, and refuses other shapes."""

import tracemalloc

import numpy as np
import oracles
import pytest

import isentropic as it

B, H, L, S, E, EV = 2, 4, 7, 11, 8, 5


def _data(rng, dtype):
    shapes = (B, H, L, E), (B, H, S, E), (B, H, S, EV)
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


class TestValues:
    def test_additive(self, backend, rng, tiny_tiles):
        q, k, v = _data(rng, "float32")
        w_q, w_k, w_v = (rng.normal(size=s).astype("float32") for s in ((E, 6), (E, 6), (6,)))
        visible = rng.random((B, H, L, S)) < 0.6
        score = np.tanh((q @ w_q)[..., :, None, :] + (k @ w_k)[..., None, :, :]) @ w_v
        expected = oracles.softmax(np.where(visible, score, -np.inf)) @ v
        arrays = [backend.array(x) for x in (q, k, v, w_q, w_k, w_v)]
        out = it.layers.additive_attention(*arrays, mask=backend.array(visible))
        backend.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_additive_bounds_its_tiles():
    n, hidden = 1024, 64
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, n, 16)).astype("float32")
    w = rng.normal(size=(16, hidden)).astype("float32")
    tracemalloc.start()
    it.layers.additive_attention(q, k, v, w, w, w[0])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < n * n * hidden * 4 / 4


class TestErrors:
    """Each message names the argument, says what it must be and what came."""

    @pytest.fixture
    def a(self, backend):
        return lambda *shape, dtype="float32": backend.array(np.ones(shape), dtype)

    def test_additive(self, a):
        x, w = a(3, 4), a(4, 6)
        with pytest.raises(ValueError, match=r"`w_q` must have the shape \(4, A\), got \(5, 6\)"):
            it.layers.additive_attention(x, x, x, a(5, 6), w, a(6))
        with pytest.raises(ValueError, match=r"`w_k` must have the last dimension of `w_q`, 6, got 5"):
            it.layers.additive_attention(x, x, x, w, a(4, 5), a(6))
        with pytest.raises(ValueError, match=r"`v` must have the shape \(6,\), got \(5,\)"):
            it.layers.additive_attention(x, x, x, w, w, a(5))
