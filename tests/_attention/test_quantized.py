"""Attention over quantized keys and values: that over what is decoded, in tiles."""

import math

import numpy as np
import pytest

import isentropic as it
from isentropic import laws, masks

B, H, G, L, S, E, V = 2, 4, 2, 11, 19, 16, 12


@pytest.fixture(params=["mse", "unbiased", "sign"])
def coded(request, backend, rng):
    """Queries, coded keys and values, and these decoded."""
    kind, bits = request.param, 1 if request.param == "sign" else 3
    q, k, v = (
        backend.array(rng.normal(size=shape), "float32")
        for shape in ((B, H, L, E), (B, G, S, E), (B, G, S, V))
    )
    options = {"n_components": 24} if kind == "sign" else {}
    keys = it.jl.quantizer(E, bits, kind=kind, rng=0, like=q, **options)
    values = it.jl.quantizer(V, 4, rng=1, like=q)
    codes = keys.encode(k), values.encode(v)
    return q, *codes, keys.decode(codes[0]), values.decode(codes[1])


OPTIONS = {
    "plain": lambda b, rng: {},
    "all": lambda b, rng: {
        "mask": masks.window(6) & masks.padding(b.array([[S - 4], [S]])),
        "is_causal": True,
        "bias": b.array(rng.normal(size=(H, L, S)), "float32"),
        "sinks": b.array(rng.normal(size=H), "float32"),
        "law": laws.LogLength(16),
        "softcap": 4.0,
    },
    "scale": lambda b, rng: {"law": None, "scale": 0.7},
}


class TestOverCodes:
    @pytest.mark.parametrize("options", OPTIONS)
    def test_equals_attention_over_what_is_decoded(self, backend, coded, options, rng, tiny_tiles):
        q, keys, values, k, v = coded
        options = OPTIONS[options](backend, rng) | {"enable_gqa": True}
        p, expected = (it.AttentionDistribution(q, x, **options) for x in (keys, k))
        results = {
            "output": (p.output(values), expected.output(v)),
            "coded keys": (it.attention(q, keys, v, **options), expected.output(v)),
            "coded values": (it.attention(q, k, values, **options), expected.output(v)),
            "state": (it.attention_state(q, keys, values, **options).output(), expected.output(v)),
            "entropy": (p.entropy(), expected.entropy()),
            "order 2": (p.entropy(order=2), expected.entropy(order=2)),
            "variance": (p.statistics().variance, expected.statistics().variance),
            "weights": (p.weights(), expected.weights()),
            "received": (p.received(), expected.received()),
            "information": (p.information(), expected.information()),
        }
        for name, (got, wanted) in results.items():
            a, b = backend.numpy(got), backend.numpy(wanted)
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5, err_msg=name)
        assert p.backends(values)["generic"] == "runs"

    def test_half_precision(self, backend, coded):
        """Results are those of the same queries in float32, in float32."""
        if backend.half is None:
            pytest.skip("has no half precision")
        q, keys, values, k, v = coded
        dtype = getattr(backend.xp, backend.half)
        half, half_key = (backend.xp.astype(x, dtype) for x in (q, k))
        wide, wide_key = (backend.xp.astype(x, q.dtype) for x in (half, half_key))
        calls = {
            "both": (
                it.attention(half, keys, values, enable_gqa=True),
                it.attention(wide, k, v, enable_gqa=True),
            ),
            "values": (
                it.attention(half, half_key, values, enable_gqa=True),
                it.attention(wide, wide_key, v, enable_gqa=True),
            ),
            "entropy": (
                it.attention_entropy(half, keys, enable_gqa=True),
                it.attention_entropy(wide, k, enable_gqa=True),
            ),
        }
        for got, expected in calls.values():
            assert got.dtype == q.dtype
            np.testing.assert_allclose(
                backend.numpy(got), backend.numpy(expected), rtol=2e-4, atol=2e-5
            )

    def test_divergences_in_blocks(self, backend, rng, set_blocks):
        x = backend.array(rng.normal(size=(40, E)), "float32")
        f = it.jl.quantizer(E, 4, rng=0, like=x)
        codes = f.encode(x)
        p, decoded, q = (it.AttentionDistribution(x, y, law=None) for y in (codes, f.decode(codes), x))
        set_blocks(tile=400)
        for name in ("kl_divergence", "js_divergence", "cross_entropy"):
            for a, b, c, d in ((p, q, decoded, q), (q, p, q, decoded)):
                got, expected = getattr(a, name)(b), getattr(c, name)(d)
                np.testing.assert_allclose(
                    backend.numpy(got), backend.numpy(expected), rtol=1e-3, atol=1e-6
                )

    def test_gradients_under_a_mask(self, backend, coded):
        """Of queries, where the codes have none."""
        if backend.library != "torch":
            pytest.skip("TestTraces has those of JAX")
        import torch

        q, keys, values, k, v = coded
        found = []
        for a, b in ((keys, values), (k, v)):
            leaf = q.detach().requires_grad_()
            it.attention(leaf, a, b, is_causal=True, enable_gqa=True).square().sum().backward()
            found.append(leaf.grad)
        torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)

    def test_factor_for_an_entropy(self, backend, coded):
        q, keys, _, k, _ = coded
        got, expected = (
            it.AttentionDistribution(q, x, enable_gqa=True, law=None).factor_for_entropy(1.5)
            for x in (keys, k)
        )
        np.testing.assert_allclose(backend.numpy(got), backend.numpy(expected), rtol=1e-4)

    def test_hidden_vectors_that_are_not_finite(self, backend, rng):
        x = rng.normal(size=(S, E)).astype(np.float32)
        q, clean = backend.array(x[:5]), x.copy()
        x[3], x[7, 2] = math.nan, math.inf
        f = it.jl.quantizer(E, 4, rng=0, like=q)
        bad, good = f.encode(backend.array(x)), f.encode(backend.array(clean))
        visible = np.ones(S, bool)
        visible[[3, 7]] = False
        mask = backend.array(np.broadcast_to(visible, (5, S)))
        got, expected = (it.attention(q, x, x, mask=mask) for x in (bad, good))
        np.testing.assert_allclose(backend.numpy(got), backend.numpy(expected), atol=1e-6)
        assert np.isnan(backend.numpy(it.attention(q, bad, bad))).all()

    @pytest.mark.host
    def test_memory_does_not_grow_with_what_is_decoded(self, rng):
        """A block of keys is decoded at a time."""
        import tracemalloc

        n = 60_000
        x = rng.normal(size=(n, 64)).astype(np.float32)
        f = it.jl.quantizer(64, 4, rng=0)
        codes, q = f.encode(x), x[:8]
        it.attention(q, codes, codes)
        tracemalloc.start()
        it.attention(q, codes, codes)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < x.nbytes / 4

    @pytest.mark.host
    def test_errors(self, rng):
        x = rng.normal(size=(6, 16)).astype(np.float32)
        codes = it.jl.quantizer(16, 2, rng=0).encode(x)
        with pytest.raises(ValueError, match="`query` must have the 16 features of `key`"):
            it.attention(x[:, :8], codes, x)
        with pytest.raises(
            ValueError, match="`implementation` must be None or 'generic' for this call"
        ):
            it.attention(x, codes, codes, implementation="sdpa")
        with pytest.raises(ValueError, match="`value` must have as many rows as `key`"):
            it.attention(x, codes, x[:4])
        assert "QuantizedVectors(<(6,) of 16 features, 2 bits>)" in repr(
            it.AttentionDistribution(x, codes)
        )


class TestTraces:
    def test_jax(self, rng):
        jax = pytest.importorskip("jax")
        q, x = (jax.numpy.asarray(rng.normal(size=(n, 16)), "float32") for n in (5, 9))
        f = it.jl.quantizer(16, 4, rng=0, like=x)
        codes = f.encode(x)
        expected = it.attention(q, codes, codes, is_causal=True)
        got = jax.jit(lambda q, c: it.attention(q, c, c, is_causal=True))(q, codes)
        np.testing.assert_allclose(got, expected, atol=1e-6)
        p = it.AttentionDistribution(q, codes)
        leaves, tree = jax.tree.flatten(p)
        assert jax.tree.unflatten(tree, leaves) == p
        entropy = jax.jit(lambda p: p.entropy())(p)
        np.testing.assert_allclose(entropy, it.attention_entropy(q, f.decode(codes)), atol=1e-5)
        got = jax.grad(lambda q: it.attention(q, codes, codes).sum())(q)
        decoded = f.decode(codes)
        wanted = jax.grad(lambda q: it.attention(q, decoded, decoded).sum())(q)
        np.testing.assert_allclose(got, wanted, atol=1e-4)

    def test_torch(self, rng):
        torch = pytest.importorskip("torch")
        q, x = (torch.tensor(rng.normal(size=(n, 16)), dtype=torch.float32) for n in (5, 9))
        f = it.jl.quantizer(16, 4, rng=0, like=x)
        codes = f.encode(x)
        decoded = f.decode(codes)
        functions = (
            lambda q, x: it.attention(q, x, x),
            lambda q, x: it.AttentionDistribution(q, x, law=None).factor_for_entropy(1.2),
        )
        for function in functions:
            gradients = []
            for keys in (codes, decoded):
                inputs = q.clone().requires_grad_()
                function(inputs, keys).sum().backward()
                gradients.append(inputs.grad)
            torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)
