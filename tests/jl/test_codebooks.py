"""The best codebooks: closed forms, published figures, and what makes a codebook the best."""

import math

import numpy as np
import pytest
from scipy import integrate

from isentropic.jl._codebooks import codebook
from isentropic.jl._quantizers import BITS

# The signal-to-noise ratios of the best quantizers of a normal number, in dB (Jayant & Noll 1984).
OF_NORMAL = {1: 4.40, 2: 9.30, 3: 14.62, 4: 20.22}


@pytest.mark.host
class TestCodebook:
    @pytest.mark.parametrize("bits", OF_NORMAL)
    def test_in_many_dimensions_it_is_that_of_normal_numbers(self, bits):
        ratio = -10 * math.log10(codebook(10**6, bits).error)
        assert ratio == pytest.approx(OF_NORMAL[bits], abs=0.0051)

    def test_in_few_dimensions_it_has_closed_forms(self):
        assert codebook(1, 3).error == 0
        np.testing.assert_allclose(np.abs(codebook(1, 1).values), 1)
        assert codebook(2, 1).error == pytest.approx(1 - 8 / math.pi**2, rel=1e-12)
        for bits in BITS:  # in three dimensions a coordinate is uniform (Archimedes)
            assert codebook(3, bits).error == pytest.approx(4.0**-bits, rel=1e-9)

    @pytest.mark.parametrize("d", [4, 7, 64, 80, 1536])
    @pytest.mark.parametrize("bits", [1, 2, 3, 4])
    def test_is_the_best_one(self, d, bits):
        """Each value is the mean of its cell, by another quadrature in another variable."""
        book = codebook(d, bits)

        def density(t):
            return math.exp((d - 3) / 2 * math.log1p(-t * t / d)) if t * t < d else 0.0

        ends = [0.0, *book.thresholds[book.thresholds > 1e-12], min(math.sqrt(d), 12.0)]
        values = book.values[book.values > 0]
        np.testing.assert_allclose(book.values, -book.values[::-1], atol=1e-14)
        np.testing.assert_allclose((values[1:] + values[:-1]) / 2, ends[1:-1], rtol=1e-12)
        total = error = 0.0
        for value, low, high in zip(values, ends[:-1], ends[1:], strict=True):
            mass, moment, missed = (
                integrate.quad(lambda t, g=g: g(t) * density(t), low, high, epsabs=1e-13)[0]
                for g in (lambda t: 1.0, lambda t: t, lambda t, v=value: (t - v) ** 2)
            )
            assert moment / mass == pytest.approx(value, rel=1e-7)
            total, error = total + mass, error + missed
        assert error / total == pytest.approx(book.error, rel=1e-7)

    @pytest.mark.parametrize("d", [2, 3, 5, 48, 4096])
    def test_of_eight_bits(self, d):
        book = codebook(d, 8)
        assert (np.diff(book.values) > 0).all()
        assert np.abs(book.values).max() < min(math.sqrt(d), 6)
        # With many values the error is (∫ f^{1/3})³/12n² (Bennett 1948; Panter & Dite 1951).
        t, step = np.linspace(-min(math.sqrt(d), 12), min(math.sqrt(d), 12), 400_001, retstep=True)
        log = (d - 3) / 2 * np.log1p(-np.minimum(t * t / d, 1 - 1e-12))
        f = np.exp(log) / (np.exp(log).sum() * step)
        if d > 3:
            rate = ((f ** (1 / 3)).sum() * step) ** 3 / 12 / 256**2
            assert book.error == pytest.approx(rate, rel=0.02)
