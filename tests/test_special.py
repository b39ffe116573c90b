"""The functions of the von Mises–Fisher distribution: against mpmath, closed forms and limits."""

import math

import mpmath
import numpy as np
import pytest
from vmf import von_mises_fisher

pytestmark = pytest.mark.host


def vmf_of_bessel(d, kappa):
    d, kappa = mpmath.mpf(d), mpmath.mpf(kappa)
    bessel = mpmath.besseli(d / 2 - 1, kappa)
    cosine = mpmath.besseli(d / 2, kappa) / bessel
    log_mgf = mpmath.loggamma(d / 2) + (d / 2 - 1) * mpmath.log(2 / kappa) + mpmath.log(bessel)
    return log_mgf, cosine, kappa * cosine - log_mgf


def vmf_of_integrals(d, kappa):
    """For large d, where the angle's density is narrow."""
    d, kappa = mpmath.mpf(d), mpmath.mpf(kappa)

    def integral(kappa, moment):
        x = 2 * kappa / (d - 2 + mpmath.sqrt((d - 2) ** 2 + 4 * kappa**2))
        mode, far = mpmath.acos(x), 14 / mpmath.sqrt(kappa * x + (d - 2))

        def f(theta):
            exponent = kappa * (mpmath.cos(theta) - x) + (d - 2) * mpmath.log(
                mpmath.sin(theta) / mpmath.sin(mode)
            )
            return mpmath.exp(exponent) * mpmath.cos(theta) ** moment

        value = mpmath.quad(f, mpmath.linspace(mode - far, mode + far, 5))
        return value, kappa * x + (d - 2) * mpmath.log(mpmath.sin(mode))

    (one, at_one), (first, _), (zero, at_zero) = integral(kappa, 0), integral(kappa, 1), integral(0, 0)
    log_mgf, cosine = mpmath.log(one / zero) + at_one - at_zero, first / one
    return log_mgf, cosine, kappa * cosine - log_mgf


class TestVonMisesFisher:
    @pytest.mark.parametrize("d", [2, 2.5, 3, 4, 7, 12, 33, 64, 333, 1000])
    def test_against_bessel_functions(self, d, rng):
        kappas = [*10.0 ** np.arange(-6, 8), *10 ** rng.uniform(-6, 7, 10)]
        with mpmath.workdps(60):
            expected = [vmf_of_bessel(d, kappa) for kappa in kappas]
        found, last = von_mises_fisher(d, kappas), von_mises_fisher(d, kappas[-1])
        for got, column, one in zip(found, zip(*expected, strict=True), last, strict=True):
            np.testing.assert_allclose(got, np.asarray(column, float), rtol=5e-13)
            assert one == got[-1]

    @pytest.mark.parametrize("d", [10**4, 123_456, 10**6])
    def test_against_integrals(self, d):
        kappas = 10.0 ** np.asarray([-6, -2, 0.5, 2.5, 4, 5.2, 6, 7])
        with mpmath.workdps(40):
            expected = [vmf_of_integrals(d, kappa) for kappa in kappas]
        for got, column in zip(von_mises_fisher(d, kappas), zip(*expected, strict=True), strict=True):
            np.testing.assert_allclose(got, np.asarray(column, float), rtol=5e-13)

    def test_three_dimensions(self):
        kappa = np.geomspace(0.1, 600, 40)
        np.testing.assert_allclose(
            von_mises_fisher(3, kappa).log_mgf, np.log(np.sinh(kappa) / kappa), rtol=1e-12
        )
        np.testing.assert_allclose(
            von_mises_fisher(3, kappa).mean_cosine, 1 / np.tanh(kappa) - 1 / kappa, rtol=1e-12
        )

    def test_limits_of_the_concentration(self):
        for d in (2, 3, 64, 1e6):
            assert von_mises_fisher(d, 0) == (0.0, 0.0, 0.0)
            for kappa in (1e-150, 1e-6):
                assert von_mises_fisher(d, kappa).log_mgf == pytest.approx(
                    kappa**2 / (2 * d), rel=1e-11
                )
                assert von_mises_fisher(d, kappa).mean_cosine == pytest.approx(kappa / d, rel=1e-11)
                assert von_mises_fisher(d, kappa).divergence == pytest.approx(
                    kappa**2 / (2 * d), rel=1e-11
                )
        # In two dimensions, log I₀ ~ κ − ½ log 2πκ.
        for kappa in (1e12, 1e300):
            expected = (math.log(2 * math.pi * kappa) - 1) / 2
            assert von_mises_fisher(2, kappa).divergence == pytest.approx(expected, rel=1e-11)
            assert von_mises_fisher(2, kappa).mean_cosine == pytest.approx(1 - 0.5 / kappa, rel=1e-15)
