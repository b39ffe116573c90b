"""The distribution as an object: its methods agree with the functions, and it is a value.

Its values are tested against definitions in `test_functions`.
"""

import copy
import math
import pickle

import numpy as np
import oracles
import pytest

import isentropic as it
from isentropic import laws, masks

B, H, L, S, E, EV = 2, 4, 7, 11, 8, 5


def _data(rng, dtype="float32", n_keys=S, groups=H):
    sizes = (H, L, E), (groups, n_keys, E), (groups, n_keys, EV)
    return [rng.normal(size=(B, *size)).astype(dtype) for size in sizes]


class TestObject:
    def test_methods_are_the_functions(self, backend, rng):
        q, k, v = (backend.array(x) for x in _data(rng))
        mask = backend.array(rng.random((B, 1, L, S)) < 0.7)
        options = {"mask": mask, "law": laws.LogLength(8), "softcap": 3.0}
        p = it.AttentionDistribution(q, k, **options)
        assert p.output(v).dtype == v.dtype
        backend.assert_close(p.output(v), backend.numpy(it.attention(q, k, v, **options)), rtol=0)
        h = it.attention_entropy(q, k, order=2, family="tsallis", normalized=True, **options)
        of_object = p.entropy(order=2, family="tsallis", normalized=True)
        backend.assert_close(of_object, backend.numpy(h), rtol=0)
        assert p.state(v) == it.attention_state(q, k, v, **options)
        assert p.state().weighted_value is None

    def test_is_a_value(self, backend, rng):
        q, k, _ = (backend.array(x) for x in _data(rng))
        p = it.AttentionDistribution(q, k, is_causal=True, law=laws.LogLength(8))
        assert p.query is q
        assert p.is_causal is True
        assert p == it.AttentionDistribution(q + 0, k, is_causal=True, law=laws.LogLength(8))
        assert p != it.AttentionDistribution(q, k, law=laws.LogLength(8))
        assert p != it.AttentionDistribution(q, k + 1, is_causal=True, law=laws.LogLength(8))
        assert copy.copy(p) == p
        assert repr(p) == (
            f"AttentionDistribution(query=<array ({B}, {H}, {L}, {E})>, key=<array ({B}, {H}, {S}, {E})>, "
            "is_causal=True, law=LogLength(base=8, minimum=None))"
        )
        assert repr(it.AttentionDistribution(q, k, law=None)).endswith("law=None)")
        with pytest.raises(AttributeError, match="cannot assign to field 'scale'"):
            p.scale = 2.0
        with pytest.raises(TypeError, match="unhashable: AttentionDistribution with arrays"):
            hash(p)

    @pytest.mark.host
    def test_pickled(self, rng):
        q, k, _ = _data(rng)
        p = it.AttentionDistribution(q, k, mask=masks.window(3))
        assert pickle.loads(pickle.dumps(p)) == p
        assert copy.deepcopy(p) == p

    def test_is_checked_when_it_is_made(self, backend, rng):
        q, k, v = (backend.array(x) for x in _data(rng))
        for _ in range(2):  # what has passed before is not checked again
            it.AttentionDistribution(q, k)
            with pytest.raises(
                ValueError, match="`key` must have the last dimension of `query`, 8, got 5"
            ):
                it.AttentionDistribution(q, v)
            with pytest.raises(TypeError, match="`is_causal` must be True or False"):
                it.AttentionDistribution(q, k, is_causal=1)
        with pytest.raises(
            TypeError, match=r"AttentionDistribution\(\) has no argument `attn_mask`: .*`mask`"
        ):
            it.AttentionDistribution(q, k, attn_mask=None)
        with pytest.raises(TypeError, match="`value` must be an array, got NoneType"):
            it.AttentionDistribution(q, k).output(None)
        with pytest.raises(ValueError, match="`value` must have as many rows as `key`, 11, got 7"):
            it.AttentionDistribution(q, k).state(q)

    def test_a_law_that_fits_no_query_is_refused_at_each_call(self, backend, rng):
        q, k, v = (backend.array(x) for x in _data(rng))
        p = it.AttentionDistribution(q, k, law=laws.AffineLog(backend.array(np.ones(3)), 1.0))
        for _ in range(2):
            with pytest.raises(ValueError, match="`law` must"):
                p.output(v)
            with pytest.raises(ValueError, match="`law` must"):
                p.entropy()

    @pytest.mark.parametrize("name", ["bias", "softcap", "sinks"])
    def test_factor_is_refused_where_the_entropy_may_rise_with_it(self, backend, rng, name):
        q, k, _ = (backend.array(x) for x in _data(rng))
        option = {"bias": q[..., :1], "softcap": 3.0, "sinks": q[0, :, 0, 0]}[name]
        p = it.AttentionDistribution(q, k, **{name: option})
        with pytest.raises(ValueError, match=f"`{name}` must be None for a distribution with a target"):
            p.factor_for_entropy(1.0)

    def test_factor_is_that_on_the_logits_of_the_law(self, backend, rng):
        q, k, _ = (backend.array(x) for x in _data(rng))
        options = {"law": laws.LogLength(4), "is_causal": True}
        factor = it.AttentionDistribution(q, k, **options).factor_for_entropy(1.2)
        h = it.attention_entropy(q * factor[..., None], k, **options)
        backend.assert_close(h, np.full((B, H, L), 1.2), rtol=2e-5)


class TestStatistics:
    @pytest.mark.float64
    def test_variance_is_the_slope_of_the_entropy(self, backend, rng):
        if not backend.float64:
            pytest.skip("no float64 here")
        q, k, _ = (backend.array(x) for x in _data(rng, "float64"))
        options = {"mask": masks.window(5), "law": laws.LogLength(4)}
        statistics = it.AttentionDistribution(q, k, **options).statistics()
        behind, ahead = (it.attention_entropy(q * math.exp(u), k, **options) for u in (-1e-4, 1e-4))
        backend.assert_close(statistics.variance, (behind - ahead) / 2e-4, rtol=1e-5, atol=1e-8)
        backend.assert_close(
            statistics.mean, statistics.log_normalizer - statistics.entropy, rtol=1e-9, atol=1e-10
        )

    @pytest.mark.usefixtures("tiny_tiles")
    @pytest.mark.parametrize("offset", [0.0, 1e4, -1e6])
    def test_large_logits_lose_no_digits(self, backend, offset):
        # Logits that are exact in float32, in several tiles, with a small spread: E[s²] − E[s]² would be
        # lost from an offset of 1e4 on.
        s = offset + np.asarray([0.0, 0.5, -0.5, 0.25, 0.0, 0.0, -0.25, 0.5, 0.5, 0.0])
        q = backend.array(np.zeros((1, 1)), "float32")
        k = backend.array(np.zeros((10, 1)), "float32")
        statistics = it.AttentionDistribution(q, k, bias=backend.array(s[None], "float32")).statistics()
        exact = oracles.attention(np.zeros((1, 1)), np.zeros((10, 1)), bias=s)
        backend.assert_close(statistics.variance, exact.variance, rtol=1e-5)
        backend.assert_close(statistics.entropy, exact.entropy(), rtol=1e-6)
        backend.assert_close(statistics.mean, exact.mean, rtol=1e-6)

    @pytest.mark.usefixtures("tiny_tiles")
    @pytest.mark.parametrize("gap", [30.0, 1e3, 1e10, 1e25, 1e38])
    def test_logits_far_below(self, backend, gap):
        # They lie in other tiles than the largest ones, before and after them.
        s = np.asarray([-gap] * 5 + [0.0, 1.0] + [-gap] * 5)
        q, k = (backend.array(np.zeros((n, 1)), "float32") for n in (1, 12))
        statistics = it.AttentionDistribution(q, k, bias=backend.array(s[None], "float32")).statistics()
        exact = oracles.attention(np.zeros((1, 1)), np.zeros((12, 1)), bias=s)
        assert np.isfinite(backend.numpy(statistics.variance)).all()
        backend.assert_close(statistics.variance, exact.variance, rtol=1e-5)

    def test_one_key(self, backend, rng):
        q, k, _ = (backend.array(x) for x in _data(rng, "float32", n_keys=1))
        statistics = it.AttentionDistribution(q, k).statistics()
        backend.assert_close(statistics.variance, np.zeros((B, H, L)))
        backend.assert_close(statistics.mean, statistics.maximum)
        backend.assert_close(statistics.log_normalizer, statistics.maximum)

    def test_equal_by_value(self, backend, rng):
        q, k, _ = (backend.array(x) for x in _data(rng, "float32"))
        assert (
            it.AttentionDistribution(q, k).statistics() == it.AttentionDistribution(q, k).statistics()
        )
        assert (
            it.AttentionDistribution(q, k).statistics()
            != it.AttentionDistribution(q, k, scale=2.0).statistics()
        )

    def test_variance_of_keys_far_below_the_mean(self, backend):
        """One key at 0 and 39 999 at −40: these have a weight of 4e-18 each, and all of the variance."""
        s = np.where(np.arange(40_000) == 0, 0.0, -40.0)
        q, k = backend.array(np.ones((1, 1)), "float32"), backend.array(s[:, None], "float32")
        variance = it.AttentionDistribution(q, k, scale=1.0, law=None).statistics().variance
        rest = 39_999 * np.exp(-40.0)
        expected = 1600 * rest / (1 + rest) ** 2
        np.testing.assert_allclose(backend.numpy(variance), expected, rtol=1e-4)


class TestReceived:
    def test_sums_to_the_number_of_queries_that_see_a_key(self, backend, rng):
        q, k, _ = (backend.array(x) for x in _data(rng, "float32", n_keys=4))
        received = it.AttentionDistribution(
            q, k, is_causal=True
        ).received()  # 3 of 7 queries see no key
        total = backend.xp.sum(received, axis=-1)
        backend.assert_close(total, np.full((B, H), 4.0), rtol=1e-5)
        off = it.AttentionDistribution(q, k, sinks=backend.array(np.full(H, 1e3), "float32")).received()
        backend.assert_close(off, np.zeros((B, H, 4)))

    def test_grouped_heads_have_one_for_each_query_head(self, backend, rng):
        q, k, _ = (backend.array(x) for x in _data(rng, "float32", groups=2))
        received = it.AttentionDistribution(q, k, enable_gqa=True).received()
        expected = it.AttentionDistribution(q, k, enable_gqa=True).weights()
        assert received.shape == (B, H, S)
        backend.assert_close(received, backend.xp.sum(expected, axis=-2), rtol=1e-5)

    @pytest.mark.usefixtures("tiny_tiles")
    def test_nan_reaches_the_keys_that_its_query_sees(self, backend, rng):
        q, k, _ = _data(rng, "float32", n_keys=L)
        expected = it.AttentionDistribution(q, k, is_causal=True).received()
        q[:, :, 3] = np.nan
        received = it.AttentionDistribution(
            backend.array(q), backend.array(k), is_causal=True
        ).received()
        received = backend.numpy(received)
        assert np.isnan(received[..., :4]).all()
        np.testing.assert_allclose(received[..., 4:], expected[..., 4:], rtol=1e-4)

    def test_large_logits(self, backend):
        # Relative to a log-normalizer of 1e4 a weight would lose half of the digits of float32.
        s = 1e4 + np.asarray([[0.0, 0.5, 1.0], [2.0, 1.0, 0.0]])
        q, k = (backend.array(np.zeros((n, 1)), "float32") for n in (2, 3))
        received = it.AttentionDistribution(q, k, bias=backend.array(s, "float32")).received()
        backend.assert_close(received, oracles.softmax(s).sum(0), rtol=1e-6)
