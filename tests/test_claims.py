"""Claims of the documentation beside those of the ledger (tests/ledger)."""

import math

import numpy as np
import pytest

import isentropic as it
from isentropic import laws, theory

pytestmark = pytest.mark.host


def _needle_entropy(n, law, relevant=8, gap=7.5):
    logits = np.where(np.arange(n) < relevant, gap, 0.0) * (1.0 if law is None else law(n))
    return float(it.entropy_from_logits(logits))


class TestFocusedAttention:
    def test_is_held_by_the_law_and_not_at_the_standard_scale(self):
        # Where the gap is above log n₀.
        law = laws.LogLength(512)
        for gap, held in ((7.5, True), (0.9 * math.log(512), False)):
            growth = _needle_entropy(2**20, law, gap=gap) - _needle_entropy(512, law, gap=gap)
            assert (growth < 0.1) == held
            for n in (64, 8192):
                expected = theory.needle_entropy(n, 8, gap * law(n))
                assert _needle_entropy(n, law, gap=gap) == pytest.approx(expected)
        assert _needle_entropy(8192, None) > _needle_entropy(64, None) + 3


class TestNeedlesAmongGaussianScores:
    """why-log-n.md: from which n on other keys exceed the needles, and take their weight."""

    @pytest.mark.parametrize("gap", [3.0, 4.0, 5.0])
    def test_the_largest_exceeds_them(self, gap):
        n = math.sqrt(2 * math.pi) * gap * math.exp(gap**2 / 2)
        exceeding = n * math.erfc(gap / math.sqrt(2)) / 2  # the expected number, for σ = 1
        assert 0.9 < exceeding < 1

    def test_many_needles_keep_their_weight_for_longer(self):
        gap, relevant, rng = 3.0, 64, np.random.default_rng(0)
        factors = np.linspace(0.5, 3, 26) * gap

        def weights(n):
            """The mean weight of the needles at each factor."""
            found = []
            for _ in range(100):
                top = np.exp(factors[:, None] * (rng.normal(size=n) - gap)).sum(-1)
                found.append(relevant / (relevant + top))
            return np.mean(found, axis=0)

        last = relevant * math.exp(gap**2 / 2)
        best = weights(round(last / 3))  # where the largest score exceeds the needles already
        assert best[np.argmin(abs(factors - gap))] > 0.7 > best[-1]
        assert 0.45 < weights(round(last)).max() < 0.65
        assert weights(round(10 * last)).max() < 0.15
