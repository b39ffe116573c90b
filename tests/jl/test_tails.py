"""Log tails against mpmath with 40 digits, and the binomial interval against SciPy."""

import math

import mpmath
import numpy as np
import pytest
from scipy.stats import binomtest, chi2

from isentropic.jl._tails import binomial_interval, log_beta_tail, log_chi2_tail

pytestmark = pytest.mark.host


@pytest.fixture(autouse=True)
def _digits():
    with mpmath.workdps(40):
        yield


EXCESS = [s * e for e in (1e-3, 0.1, 0.5, 0.9, 0.999) for s in (1, -1)]


@pytest.mark.parametrize("dof", [1, 2, 3, 7, 48, 1000, 10**5])
def test_chi2(dof):
    for e in EXCESS:
        x = mpmath.mpf(dof) / 2 * (1 + mpmath.mpf(e))
        limits = (x, mpmath.inf) if e > 0 else (0, x)
        expected = mpmath.log(mpmath.gammainc(mpmath.mpf(dof) / 2, *limits, regularized=True))
        assert math.isclose(log_chi2_tail(dof, e), expected, rel_tol=1e-12, abs_tol=1e-12)


def test_chi2_of_many_degrees_of_freedom():
    # Where mpmath gives up: the tail tends to that of a normal variable.
    from scipy.special import log_ndtr

    dof = 1e12
    for z in (0.5, 3.0, 8.0):
        e = z * math.sqrt(2 / dof)
        for side in (1, -1):
            np.testing.assert_allclose(log_chi2_tail(dof, side * e), log_ndtr(-z), rtol=1e-4)


def test_chi2_far_beyond_the_smallest_float():
    assert np.isneginf(chi2.logsf(2e4 * 1.5, 2e4))  # what SciPy says
    expected = -1e4 * (0.5 - math.log(1.5))  # Chernoff, up to a logarithm
    assert math.isclose(log_chi2_tail(2e4, 0.5), expected, rel_tol=0.01)
    assert float(log_chi2_tail(1e5, 0.9)) < -10_000
    np.testing.assert_array_equal(log_chi2_tail(5, [-1.0, -2.0]), -np.inf)


@pytest.mark.parametrize(
    ("a", "b"), [(0.5, 0.5), (0.5, 1), (1, 49), (24, 126), (149.5, 0.5), (500, 2000)]
)
def test_beta(a, b):
    for e in EXCESS:
        x = mpmath.mpf(a) / (a + b) * (1 + mpmath.mpf(e))
        if x >= 1:
            assert np.isneginf(log_beta_tail(a, b, e))
            continue
        # The upper tail as a lower one: mpmath cancels otherwise.
        arguments = (b, a, 0, 1 - x) if e > 0 else (a, b, 0, x)
        expected = mpmath.log(mpmath.betainc(*arguments, regularized=True))
        assert math.isclose(log_beta_tail(a, b, e), expected, rel_tol=1e-11, abs_tol=1e-12)


@pytest.mark.parametrize(("successes", "trials"), [(0, 10), (1, 3), (3, 10), (10, 10), (50, 10**5)])
@pytest.mark.parametrize("confidence", [0.9, 0.99])
def test_binomial_interval(successes, trials, confidence):
    expected = binomtest(successes, trials).proportion_ci(confidence)
    got = binomial_interval(successes, trials, confidence)
    np.testing.assert_allclose(got, (expected.low, expected.high), rtol=1e-9)
