"""What is measured of attention functions, among them engines with seeded faults."""

import numpy as np
import oracles
import pytest

import isentropic as it
from isentropic import laws, masks
from isentropic.laws import realized_factor

LAW = laws.LogLength(48, minimum=1)  # 1 up to 48 keys, log n / log 48 beyond
LENGTHS = [2, 3, 16, 47, 48, 49, 50, 96, 300]
EXPECTED = LAW(np.asarray(LENGTHS, float))[:, None]


class TestAttention:
    def test_our_own(self, backend, rng):
        like = backend.array(np.zeros(1), "float32")
        slope = backend.array(rng.uniform(0.1, 1, size=4), "float32")
        law = laws.AffineLog(slope, 0.5)
        sinks = backend.array(rng.normal(size=4), "float32")

        def attend(q, k, v):
            return it.attention(q, k, v, law=law, is_causal=True, sinks=sinks, enable_gqa=True)

        options = {"n_heads": 4, "n_key_heads": 2, "head_dim": 16, "like": like}
        for n_queries in (1, 2):
            got = realized_factor(attend, [2, 37, 200], n_queries=n_queries, **options)
            expected = backend.numpy(slope) * np.log([[2], [37], [200]]) + 0.5
            np.testing.assert_allclose(got, expected, rtol=5e-6)

    @pytest.mark.host
    def test_windows_count(self):
        def attend(q, k, v):
            return it.attention(q, k, v, law=LAW, mask=masks.causal() & masks.window(95), scale=0.3)

        got = realized_factor(attend, LENGTHS, scale=0.3, n_queries=2)
        np.testing.assert_allclose(got, LAW(np.minimum(LENGTHS, 96.0))[:, None], rtol=1e-5)

    @pytest.mark.host
    @pytest.mark.parametrize("factor", [0.01, 0.3, 1.0, 4.0, 10.0])
    def test_factors_from_far_below_to_far_above_1(self, factor):
        def attend(q, k, v):
            return it.attention(q, k, v, law=laws.Constant(factor))

        np.testing.assert_allclose(realized_factor(attend, [2, 999]), factor, rtol=1e-3, atol=2e-5)

    @pytest.mark.host
    def test_half_precision(self):
        torch = pytest.importorskip("torch")
        for dtype, accuracy in ((torch.float16, 1e-3), (torch.bfloat16, 1e-2)):
            like = torch.empty(0, dtype=dtype)
            got = realized_factor(lambda *x: it.attention(*x, law=LAW), LENGTHS, like=like)
            np.testing.assert_allclose(got, EXPECTED, rtol=2 * accuracy)

    @pytest.mark.host
    def test_a_query_that_sees_one_kind_of_keys(self):
        def attend(q, k, v):
            return it.attention(q, k, v, mask=masks.window(0))

        assert np.isnan(realized_factor(attend, [8])).all()

    @pytest.mark.host
    def test_errors(self):
        def attend(q, k, v):
            return v

        with pytest.raises(TypeError, match="`attend` must be callable, got int"):
            realized_factor(3, [4])
        with pytest.raises(ValueError, match="`n_keys` must be at least 2, got 1"):
            realized_factor(attend, [1])
        with pytest.raises(ValueError, match="`n_keys` must be at least 5, got 4"):
            realized_factor(attend, [4], n_queries=5)
        with pytest.raises(ValueError, match="`n_key_heads` must divide `n_heads`, 4, got 3"):
            realized_factor(attend, [4], n_heads=4, n_key_heads=3)
        with pytest.raises(
            ValueError, match=r"`attend` must return an array \(2, 1, 1, 64\), got \(2, 1,"
        ):
            realized_factor(attend, [4])
        assert realized_factor(attend, [], n_heads=3).shape == (0, 3)
        with pytest.raises(TypeError, match="`n_keys` must be an iterable of integers, got int"):
            realized_factor(attend, 64)
        with pytest.raises(TypeError, match="`like` must have a real floating-point dtype"):
            realized_factor(attend, [4], like=np.zeros(1, int))
        with pytest.raises(TypeError, match="`attend` must return an array, got NoneType"):
            realized_factor(lambda *x: None, [4])


class Engine:
    """Attention as engines compute it: of a padded cache, in chunks of queries, with a law by position."""

    def factor(self, n, n_slots, chunk, layer):
        return np.maximum(np.log(n) / np.log(48), 1.0)

    def scaled(self, query, key, factor):
        return query * factor[:, None], key

    def __call__(self, query, key, value, layer=0, chunk=32, page=64):
        n, n_queries = key.shape[-2], query.shape[-2]
        n_slots = -(-n // page) * page
        key, value = (
            np.concatenate((x, np.full((*x.shape[:-2], n_slots - n, x.shape[-1]), 7.0)), axis=-2)
            for x in (key, value)
        )
        outputs = []
        for start in range(0, n_queries, chunk):
            rows = np.arange(start, min(start + chunk, n_queries))
            position = rows + n - n_queries
            factor = self.factor(position + 1.0, n_slots, len(rows), layer)
            q, k = self.scaled(query[..., rows, :], key, factor)
            visible = np.arange(n_slots) <= position[:, None]
            outputs.append(oracles.attention(q, k, value, visible=visible).output)
        return np.concatenate(outputs, axis=-2)


def fault(**methods):
    return type("Faulty", (Engine,), methods)()


def clipped(n, base=48):
    return np.maximum(np.log(n) / np.log(base), 1.0)


FAULTS = {
    "off by one": fault(factor=lambda self, n, *_: clipped(n - 1)),
    "padding counts": fault(factor=lambda self, n, n_slots, *_: clipped(0 * n + n_slots)),
    "the rule is dropped": fault(factor=lambda self, n, *_: 1.0 + 0 * n),
    "squared": fault(factor=lambda self, n, *_: clipped(n) ** 2),
    "a binary logarithm": fault(factor=lambda self, n, *_: np.maximum(np.log2(n) / np.log(48), 1)),
    "on the keys too": fault(scaled=lambda self, q, k, factor: (q * factor[:, None], k * factor[-1])),
    "the wrong side of the threshold": fault(
        factor=lambda self, n, *_: np.minimum(np.log(n) / np.log(48), 1.0)
    ),
    "logarithms in float16": fault(
        factor=lambda self, n, *_: np.maximum(
            np.log(n.astype(np.float16)) / np.log(np.float16(48)), np.float16(1)
        ).astype(np.float64)
    ),
    "by chunk": fault(factor=lambda self, n, n_slots, chunk, _: clipped(0 * n + max(chunk, 2))),
    "some layers only": fault(
        factor=lambda self, n, n_slots, chunk, layer: clipped(n) if layer % 4 == 3 else 1 + 0 * n
    ),
}


def is_right(engine):
    """Whether all layers of an engine apply the law, in decoding and in a prefill of several chunks."""
    found = [
        realized_factor(lambda q, k, v, i=layer: engine(q, k, v, layer=i), lengths, n_queries=n_queries)
        for layer in range(2)
        for n_queries, lengths in ((1, LENGTHS), (40, [x for x in LENGTHS if x >= 40]))
    ]
    expected = [EXPECTED, EXPECTED[LENGTHS.index(47) :]] * 2
    return all(np.allclose(a, b, rtol=1e-5) for a, b in zip(found, expected, strict=True))


@pytest.mark.host
class TestEngines:
    def test_a_right_one(self):
        assert is_right(Engine())

    @pytest.mark.parametrize("name", FAULTS)
    def test_faults_are_found(self, name):
        assert not is_right(FAULTS[name])
