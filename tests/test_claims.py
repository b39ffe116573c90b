"""The numbers in docs/explanation/what-holds.md that are not in the ledger of claims too (tests/ledger)."""

import math

import numpy as np
import pytest

import isentropic as it
from isentropic import laws

pytestmark = pytest.mark.host


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
