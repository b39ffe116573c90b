"""The numbers in docs/explanation/what-holds.md."""

import math

import numpy as np
import pytest

import isentropic as it
from isentropic import laws


def _needle_entropy(n, law, relevant=8, gap=7.5):
    logits = np.where(np.arange(n) < relevant, gap, 0.0) * (1.0 if law is None else law(n))
    return float(it.entropy_from_logits(logits))


class TestFocusedAttention:
    def test_grows_at_the_standard_scale(self):
        assert _needle_entropy(64, None) == pytest.approx(2.11, abs=0.01)
        assert _needle_entropy(8192, None) == pytest.approx(5.24, abs=0.01)

    def test_is_held_by_the_law(self):
        law = laws.LogLength(512)
        h = [_needle_entropy(2**i, law) for i in range(6, 14)]
        assert 2.3 < min(h) < max(h) < 2.4

    def test_needs_a_gap_above_log_base(self):
        law = laws.LogLength(512)
        for gap, held in ((7.5, True), (0.9 * math.log(512), False)):
            growth = _needle_entropy(2**20, law, gap=gap) - _needle_entropy(512, law, gap=gap)
            assert (growth < 0.1) == held


class TestRandomInitialization:
    @pytest.mark.parametrize(
        ("n", "standard", "law"), [(64, 3.68, 3.94), (512, 5.74, 5.74), (8192, 8.52, 7.98)]
    )
    def test_table(self, n, standard, law):
        rng = np.random.default_rng(11)
        q, k = (rng.normal(size=(m, 64)).astype("float32") for m in (400, n))
        h = [it.attention_entropy(q, k, law=x).mean() for x in (None, laws.LogLength(512))]
        # One draw of keys and 400 queries: the standard error is about 0.01.
        np.testing.assert_allclose(h, (standard, law), atol=0.05)

    def test_gaussian_entropy(self):
        n = 8192
        q, k = np.random.default_rng(12).normal(size=(2, n, 64)).astype("float32")
        h = it.attention_entropy(q[:300], k, law=None).mean()
        assert h == pytest.approx(math.log(n) - 1 / 2, abs=0.02)
