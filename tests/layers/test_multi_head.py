"""`multi_head_attention` agrees with its definition and PyTorch's, and refuses other shapes."""

import numpy as np
import oracles
import pytest

import isentropic as it

try:
    import torch
except ModuleNotFoundError:
    torch = None

B, L, S = 2, 7, 11


def heads(z, n):
    return z.reshape(*z.shape[:-1], n, -1).swapaxes(-2, -3)


class TestValues:
    def test_multi_head(self, backend, rng):
        x, y = rng.normal(size=(B, L, 12)), rng.normal(size=(B, S, 10))
        shapes = ((12, 16), (10, 8), (10, 6), (12, 9))
        w = [rng.normal(size=s) for s in shapes]
        b = [rng.normal(size=s[1]) for s in shapes]
        q, k, v = heads(x @ w[0] + b[0], 4), heads(y @ w[1] + b[1], 2), heads(y @ w[2] + b[2], 2)
        out = oracles.attention(q, k, v, factor=oracles.log_length(S)).output
        expected = out.swapaxes(-2, -3).reshape(B, L, 12) @ w[3] + b[3]
        f = backend.array
        got = it.layers.multi_head_attention(
            f(x, "float32"), f(y, "float32"), f(y, "float32"), *[f(z, "float32") for z in w],
            **dict(zip(("b_q", "b_k", "b_v", "b_o"), [f(z, "float32") for z in b], strict=True)),
            num_heads=4, enable_gqa=True,
        )  # fmt: skip
        backend.assert_close(got, expected, rtol=1e-3, atol=1e-4)


class TestSinks:
    def test_multi_head(self, backend, rng):
        x = rng.normal(size=(B, L, 8))
        w = [rng.normal(size=(8, 8)) for _ in range(4)]
        sinks = backend.array(rng.normal(size=4), "float32")
        arrays = (backend.array(y, "float32") for y in (x, x, x, *w))
        got = it.layers.multi_head_attention(*arrays, num_heads=4, sinks=sinks)
        assert got.shape == (B, L, 8)
        q, k, v = (backend.array(heads(x @ y, 4), "float32") for y in w[:3])
        joined = backend.numpy(it.attention(q, k, v, sinks=sinks)).swapaxes(-2, -3).reshape(B, L, 8)
        np.testing.assert_allclose(backend.numpy(got), joined @ w[3], rtol=1e-4, atol=1e-5)


class TestAgainstTorch:
    """The standard attention (law=None) is that of PyTorch."""

    __test__ = torch is not None

    @pytest.fixture(autouse=True)
    def _only_once(self, request):
        if request.config.getoption("--backend") not in (None, "torch"):
            pytest.skip("belongs to the backend torch")

    def test_multi_head_attention(self):
        module = torch.nn.MultiheadAttention(12, 3, batch_first=True)
        torch.nn.init.normal_(module.in_proj_bias)
        torch.nn.init.normal_(module.out_proj.bias)
        x = torch.randn(2, 5, 12)
        expected, _ = module(x, x, x)
        w_q, w_k, w_v = module.in_proj_weight.chunk(3)
        b_q, b_k, b_v = module.in_proj_bias.chunk(3)
        got = it.layers.multi_head_attention(
            x, x, x, w_q.T, w_k.T, w_v.T, module.out_proj.weight.T, num_heads=3, law=None,
            b_q=b_q, b_k=b_k, b_v=b_v, b_o=module.out_proj.bias,
        )  # fmt: skip
        torch.testing.assert_close(got, expected)


class TestErrors:
    """Each message names the argument, says what it must be and what came."""

    @pytest.fixture
    def a(self, backend):
        return lambda *shape, dtype="float32": backend.array(np.ones(shape), dtype)

    def test_multi_head(self, a):
        x, w = a(3, 8), a(8, 8)
        call = it.layers.multi_head_attention
        with pytest.raises(ValueError, match="`w_q` must have a last dimension divisible by 3, got 8"):
            call(x, x, x, w, w, w, w, num_heads=3)
        with pytest.raises(ValueError, match=r"`w_k` must have the shape \(8, ...\), got \(7, 8\)"):
            call(x, x, x, w, a(7, 8), w, w, num_heads=2)
        with pytest.raises(ValueError, match=r"`w_k` must have a last dimension of 8"):
            call(x, x, x, w, a(8, 4), w, w, num_heads=2)
        with pytest.raises(ValueError, match=r"`w_o` must have the shape \(8, ...\), got \(6, 8\)"):
            call(x, x, x, w, w, w, a(6, 8), num_heads=2)
        with pytest.raises(ValueError, match=r"`b_v` must have the shape \(8,\), got \(4,\)"):
            call(x, x, x, w, w, w, w, num_heads=2, b_v=a(4))
        with pytest.raises(ValueError, match="`num_heads` must be at least 1, got 0"):
            call(x, x, x, w, w, w, w, num_heads=0)
