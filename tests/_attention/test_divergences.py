"""Divergences of two attention distributions, against the textbook formulas."""

import itertools
import math
import tracemalloc

import numpy as np
import oracles
import pytest

import isentropic as it
from isentropic import laws, masks

B, H, G, L, S = 2, 4, 2, 13, 29
METHODS = ("kl_divergence", "js_divergence", "cross_entropy")
DATA = np.random.default_rng(5)
Q, K = DATA.normal(size=(B, H, L, 8)), DATA.normal(size=(B, H, S, 8))
NEAR = K + 0.1 * DATA.normal(size=K.shape)
NARROW = {"query": DATA.normal(size=(B, H, L, 5)), "key": DATA.normal(size=(B, G, S, 5))}
SINKS, BIAS = DATA.normal(size=H), DATA.normal(size=(H, L, S))
SEEN = DATA.random((B, 1, L, S)) < 0.6
SEEN[1, 0, 2] = False  # a query that sees nothing
LENGTHS = np.asarray([[S - 6], [S]])
CAUSAL = oracles.causal(L, S)

# The options of a distribution, with "keys" for arrays, and the arguments of the oracle.
SIDES = {
    "plain": (
        {"query": Q, "key": K, "law": None},
        {},
    ),
    "near": (
        {"query": Q, "key": NEAR, "law": None},
        {},
    ),
    "law": (
        {"query": Q, "key": K, "law": laws.LogLength(16), "is_causal": True},
        {"visible": CAUSAL, "factor": oracles.log_length(CAUSAL.sum(-1), 16)},
    ),
    "capped": (
        {**NARROW, "law": None, "softcap": 2.0, "scale": 1.0, "enable_gqa": True},
        {"softcap": 2.0, "scale": 1.0},
    ),
    "biased": (
        {"query": Q, "key": K, "law": None, "bias": BIAS},
        {"bias": BIAS},
    ),
    "window": (
        {"query": Q, "key": NEAR, "law": None, "mask": masks.window(5, 0)},
        {"visible": oracles.band(L, S, 5, 0)},
    ),
    "array": (
        {"query": Q, "key": NEAR, "law": None, "mask": SEEN},
        {"visible": SEEN},
    ),
    "padded": (
        {"query": Q, "key": K, "law": None, "mask": LENGTHS},
        {"visible": (np.arange(S) < LENGTHS)[:, None, None, :]},
    ),
    "sinks": (
        {"query": Q, "key": K, "law": None, "sinks": SINKS},
        {"sinks": SINKS},
    ),
}


def distribution(backend, name, dtype="float32"):
    def of(key, x):
        if key == "mask" and x is LENGTHS:
            return masks.padding(backend.array(x))
        if not isinstance(x, np.ndarray):
            return x
        return backend.array(x) if x.dtype == bool else backend.array(x, dtype)

    return it.AttentionDistribution(**{key: of(key, x) for key, x in SIDES[name][0].items()})


def weights(name):
    """In float64, with a column for a sink."""
    options, arguments = SIDES[name]
    p = oracles.attention(options["query"], options["key"], **arguments).weights
    return p if p.shape[-1] > S else np.concatenate((p, np.zeros((*p.shape[:-1], 1))), axis=-1)


def mean_over_heads(p):
    n_seeing = (p > 0).any(-1, keepdims=True).sum(-3, keepdims=True)
    return p.sum(-3, keepdims=True) / np.maximum(n_seeing, 1)


def dense(name, p, q):
    """The textbook formulas."""
    p, q = np.broadcast_arrays(p, q)

    def mean_log(x, y):
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(x > 0, x * np.log(y), 0.0).sum(-1)

    if name == "cross_entropy":
        return -mean_log(p, q)
    if name == "kl_divergence":
        return mean_log(p, p) - mean_log(p, q)
    m = (p + q) / 2
    found = (mean_log(p, p) - mean_log(p, m) + mean_log(q, q) - mean_log(q, m)) / 2
    return np.where((p > 0).any(-1) != (q > 0).any(-1), math.log(2), found)


@pytest.mark.parametrize("pair", list(itertools.product(SIDES, SIDES)), ids="-".join)
class TestValues:
    def test_against_the_formulas(self, backend, pair, tiny_tiles):
        p, q = (distribution(backend, name) for name in pair)
        for method in METHODS:
            got = getattr(p, method)(q)
            expected = dense(method, *map(weights, pair))
            backend.assert_close(got, expected, rtol=2e-5, atol=2e-6)

    def test_over_heads(self, backend, pair, tiny_tiles):
        p, q = (distribution(backend, name) for name in pair)
        exact = mean_over_heads(weights(pair[0])), weights(pair[1])
        for method in METHODS:
            got = getattr(p, method)(q, over_heads=True)
            backend.assert_close(got, dense(method, *exact), rtol=2e-5, atol=2e-6)

    @pytest.mark.host
    def test_by_tiles_of_numpy(self, pair, tiles, set_blocks):
        """Also with another dtype on one side, and rows in threads."""
        set_blocks(cache_numbers=4 * S)
        backend = type("B", (), {"array": staticmethod(lambda x, dtype=None: np.asarray(x, dtype))})
        p, q = distribution(backend, pair[0], "float64"), distribution(backend, pair[1], "float32")
        for method in METHODS:
            got = getattr(p, method)(q)
            assert got.dtype == np.float64
            np.testing.assert_allclose(got, dense(method, *map(weights, pair)), rtol=2e-5, atol=2e-6)


class TestProperties:
    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    def test_close_distributions(self, backend, rng, dtype, tiny_tiles):
        """The divergence is that of the logits' differences, far below rounding errors of entropies."""
        if dtype not in backend.dtypes:
            pytest.skip("no float64 here")
        q, k = rng.normal(size=(2, 4, 64, 16))
        step = 1e-3 if dtype == "float32" else 1e-7
        change = step * rng.normal(size=k.shape)
        p, other = (
            it.AttentionDistribution(backend.array(q, dtype), backend.array(x, dtype), law=None)
            for x in (k, k + change)
        )
        # To second order it is half the variance of the differences, and a quarter of that from the mean.
        weight = oracles.attention(q, k).weights
        u = np.einsum("hle,hse->hls", q, change) / 4
        variance = (weight * u**2).sum(-1) - (weight * u).sum(-1) ** 2
        for method, share in (("kl_divergence", 2), ("js_divergence", 8)):
            got = backend.numpy(getattr(p, method)(other))
            np.testing.assert_allclose(got, variance / share, rtol=0.02)
            assert np.all(backend.numpy(getattr(p, method)(p)) == 0)

    def test_far_apart(self, backend):
        """Logits of 10⁴: probabilities are 0 in the dtype, and the divergences are finite."""
        x = np.asarray([[0.0, 1e4, 2e4]])
        p, q = (
            it.AttentionDistribution(
                backend.array(np.ones((1, 1)), "float32"), backend.array(y.T, "float32"), scale=1.0,
                law=None,
            )
            for y in (x, x[:, ::-1])
        )  # fmt: skip
        backend.assert_close(p.kl_divergence(q), np.asarray([2e4]), rtol=1e-6)
        backend.assert_close(p.cross_entropy(q), np.asarray([2e4]), rtol=1e-6)
        backend.assert_close(p.js_divergence(q), np.asarray([math.log(2)]), rtol=1e-6)

    def test_not_a_number(self, backend):
        x = np.ones((2, 3, 4), np.float32)
        bad = x.copy()
        bad[0, 1, 2] = math.nan
        p, q = (it.AttentionDistribution(backend.array(x), backend.array(y)) for y in (x, bad))
        for a, b in ((p, q), (q, p)):
            for method in METHODS:
                got = backend.numpy(getattr(a, method)(b))
                assert np.isnan(got[0]).all()
                assert not np.isnan(got[1]).any()

    def test_without_keys_or_queries(self, backend):
        empty, x = (
            backend.array(np.ones((2, 0, 4), "float32")),
            backend.array(np.ones((2, 3, 4), "float32")),
        )
        for q, k in ((x, empty), (empty, x)):
            p = it.AttentionDistribution(q, k)
            for method in METHODS:
                got = backend.numpy(getattr(p, method)(p))
                assert got.shape == (2, q.shape[-2])
                assert np.all(got == 0)

    def test_sinks_alone(self, backend):
        """Without keys a sink has all the weight."""
        q, k = (
            backend.array(np.ones((3, 5, 4)), "float32"),
            backend.array(np.ones((3, 0, 4)), "float32"),
        )
        with_sinks = it.AttentionDistribution(q, k, sinks=backend.array(np.zeros(3), "float32"))
        without = it.AttentionDistribution(q, k)
        pairs = {
            "kl_divergence": (0.0, math.inf, 0.0),
            "js_divergence": (0.0, math.log(2), math.log(2)),
            "cross_entropy": (0.0, math.inf, 0.0),
        }
        for method, expected in pairs.items():
            for (a, b), x in zip(
                ((with_sinks, with_sinks), (with_sinks, without), (without, with_sinks)),
                expected,
                strict=True,
            ):
                backend.assert_close(getattr(a, method)(b), np.full((3, 5), x), rtol=1e-6)

    @pytest.mark.host
    def test_rounding_leaves_no_bound(self):
        for seed in range(30):
            rng = np.random.default_rng(seed)
            q, k = (
                rng.normal(size=(2, 20, 4)).astype(np.float32),
                rng.normal(size=(2, 30, 4)).astype(np.float32),
            )
            p, other = (
                it.AttentionDistribution(q, k, mask=x) for x in (masks.causal(), ~masks.causal())
            )
            assert p.js_divergence(other).max() <= np.float32(math.log(2))
            for over_heads in (False, True):
                assert p.js_divergence(p, over_heads=over_heads).min() >= 0

    def test_rounding_of_states(self, only):
        """Where entropies and log-normalizers are subtracted, the results are not negative either."""
        torch = only("torch")
        q, k = torch.randn(1, 1500, 8) * 100, torch.randn(1, 1500, 8, requires_grad=True)
        p = it.AttentionDistribution(q, k)
        assert p.cross_entropy(p).min() >= 0
        assert p.kl_divergence(p).min() >= 0
        assert p.kl_divergence(p).max() < 1e-6 * 100 * 30

    def test_without_batch_elements(self, backend):
        x = backend.array(np.ones((0, 3, 4), "float32"))
        p = it.AttentionDistribution(x, x)
        assert all(getattr(p, method)(p).shape == (0, 3) for method in METHODS)

    def test_broadcast(self, backend, rng):
        """One query against several heads of another distribution, whose keys have another size."""
        a, b = rng.normal(size=(5, 4)), rng.normal(size=(3, 2, 5, 6))
        p, q = (it.AttentionDistribution(*[backend.array(x, "float32")] * 2, law=None) for x in (a, b))
        expected = dense(
            "kl_divergence", oracles.attention(a, a).weights, oracles.attention(b, b).weights
        )
        backend.assert_close(p.kl_divergence(q), expected, rtol=2e-5)

    def test_quantized_keys(self, backend, rng):
        q, k = (backend.array(rng.normal(size=(2, 20, 16)), "float32") for _ in range(2))
        f = it.jl.quantizer(16, 4, rng=0, like=k)
        codes = f.encode(k)
        exact = it.AttentionDistribution(q, k, is_causal=True)
        got, expected = (
            backend.numpy(exact.kl_divergence(it.AttentionDistribution(q, x, is_causal=True)))
            for x in (codes, f.decode(codes))
        )
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-7)
        assert 1e-4 < got[:, 1:].mean() < 0.02


@pytest.mark.host
class TestErrors:
    def test_sides(self, rng):
        x = rng.normal(size=(2, 5, 4))
        p = it.AttentionDistribution(x, x)
        with pytest.raises(TypeError, match="`other` must be an AttentionDistribution, got ndarray"):
            p.kl_divergence(x)
        with pytest.raises(ValueError, match="`other` must have the 5 queries of this distribution"):
            p.kl_divergence(it.AttentionDistribution(x[:, :3], x))
        with pytest.raises(ValueError, match="`other` must have the 5 keys of this distribution"):
            p.js_divergence(it.AttentionDistribution(x, x[:, :3]))
        with pytest.raises(ValueError, match="broadcast"):
            p.cross_entropy(it.AttentionDistribution(x[[0, 0, 0]], x[[0, 0, 0]]))
        with pytest.raises(TypeError, match="`over_heads` must be"):
            p.kl_divergence(p, over_heads=1)

    def test_over_heads(self, rng):
        x = rng.normal(size=(2, 5, 4))
        p, single = it.AttentionDistribution(x, x), it.AttentionDistribution(x[0], x[0])
        with pytest.raises(ValueError, match="`other` must have 3 axes, as this distribution has"):
            p.kl_divergence(single, over_heads=True)
        with pytest.raises(ValueError, match="`over_heads` must be False for a query without"):
            single.kl_divergence(single, over_heads=True)

    def test_libraries(self, rng):
        torch = pytest.importorskip("torch")
        x = rng.normal(size=(2, 5, 4))
        p = it.AttentionDistribution(x, x)
        q = it.AttentionDistribution(*[torch.from_numpy(x)] * 2)
        with pytest.raises(TypeError, match="`other` must be an array of the library of `query`"):
            p.kl_divergence(q)


PAIRS = [("plain", "near"), ("law", "capped"), ("array", "biased"), ("sinks", "sinks")]


@pytest.mark.parametrize("over_heads", [False, True])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
class TestGradients:
    """Those of the dense formula, of weights that the library computes, in float64."""

    def test_torch(self, only, pair, method, over_heads, tiny_tiles):
        torch = only("torch")
        found = []
        for is_dense in (False, True):
            leaves = []

            def array(x, dtype=None, leaves=leaves):
                leaves.append(torch.tensor(np.asarray(x, dtype)))
                return leaves[-1].requires_grad_(leaves[-1].is_floating_point())

            backend = type("B", (), {"array": staticmethod(array)})
            p, q = (distribution(backend, name, "float64") for name in pair)
            got = (
                dense_in(torch, method, p, q, over_heads)
                if is_dense
                else getattr(p, method)(q, over_heads=over_heads)
            )
            upstream = torch.linspace(0.5, 2.0, got.numel(), dtype=got.dtype).reshape(got.shape)
            gradients = torch.autograd.grad(got, [x for x in leaves if x.requires_grad], upstream)
            found.append((got, *gradients))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)

    def test_jax(self, only, pair, method, over_heads, tiny_tiles):
        jax = only("jax")
        from jax_x64 import enable_x64

        with enable_x64(True):
            self.check_jax(jax, pair, method, over_heads)

    def check_jax(self, jax, pair, method, over_heads):
        array = staticmethod(lambda x, dtype=None: jax.numpy.asarray(np.asarray(x, dtype)))
        sides = tuple(distribution(type("B", (), {"array": array}), name, "float64") for name in pair)

        def ours(sides):
            return getattr(sides[0], method)(sides[1], over_heads=over_heads)

        def formula(sides):
            return dense_in(jax.numpy, method, *sides, over_heads)

        results = []
        for function in (ours, formula):
            value, pull = jax.vjp(jax.jit(function), sides)
            upstream = jax.numpy.linspace(0.5, 2.0, value.size).reshape(value.shape)
            floats = [x for x in jax.tree.leaves(pull(upstream)) if x.dtype == np.float64]
            results.append([value, *floats])
        for a, b in zip(*results, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-10)


def dense_in(xp, method, p, q, over_heads):
    """The formula of one distribution and another, whose weights are all positive or both 0."""

    def all_weights(x):
        weight = x.weights()
        return (
            xp.concatenate((weight, 1 - weight.sum(-1)[..., None]), -1)
            if x.sinks is not None
            else weight
        )

    a, b = all_weights(p), all_weights(q)
    if over_heads:
        sees = (a > 0).any(-1)[..., None]
        a = a.sum(-3)[..., None, :, :] / xp.clip(sees.sum(-3), 1, None)[..., None, :, :]

    def mean_log(x, y):
        return (x * xp.log(xp.where((x > 0) & (y > 0), y, 1.0))).sum(-1)

    if method == "cross_entropy":
        return -mean_log(a, b)
    if method == "kl_divergence":
        return mean_log(a, a) - mean_log(a, b)
    m = (a + b) / 2
    found = (mean_log(a, a) - mean_log(a, m) + mean_log(b, b) - mean_log(b, m)) / 2
    return xp.where((a > 0).any(-1) | ~(b > 0).any(-1), found, math.log(2))


class TestMemory:
    @pytest.mark.host
    def test_numpy(self, rng):
        x = rng.normal(size=(2, 3000, 16)).astype(np.float32)
        p, q = (it.AttentionDistribution(x, y, is_causal=True) for y in (x, x + 0.1))
        p.kl_divergence(q)
        tracemalloc.start()
        p.kl_divergence(q)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2 * 3000 * 3000 * 4 / 4  # a quarter of one array of weights

    def test_torch_gradient(self, only):
        """Nothing of the size of the weights is stored for the backward pass."""
        torch = only("torch")
        x = torch.randn(2, 3000, 8, requires_grad=True)
        stored = []
        p, q = (it.AttentionDistribution(x, y) for y in (x, x + 0.1))
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: stored.append(t.numel()) or t, lambda t: t
        ):
            total = p.kl_divergence(q).sum()
        assert sum(stored) < 3000 * 3000 / 4
        total.backward()
        assert torch.isfinite(x.grad).all()

    def test_jax_gradient(self, only):
        jax = only("jax")
        sizes = []

        def loss(x):
            return (
                it.AttentionDistribution(x, x).kl_divergence(it.AttentionDistribution(2 * x, x)).sum()
            )

        for n in (2000, 4000):
            x = jax.ShapeDtypeStruct((1, n, 8), "float32")
            analysis = jax.jit(jax.grad(loss)).lower(x).compile().memory_analysis()
            sizes.append(analysis.temp_size_in_bytes)
        assert sizes[1] < 2.2 * sizes[0]
