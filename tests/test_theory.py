"""The laws of the mean entropy: against mpmath, plain quadrature, simulation, and their limits."""

import inspect
import math

import mpmath
import numpy as np
import pytest
from scipy import special, stats
from vmf import von_mises_fisher

import isentropic as it
from isentropic import _quadrature, laws, theory

LENGTHS = np.array([64, 128, 256, 512, 1024, 2048, 4096, 8192])


def spread(entropies):
    return np.max(entropies) - np.min(entropies)


def on_sphere(rng, *shape):
    """Directions times √d."""
    x = rng.normal(size=shape)
    return x * math.sqrt(shape[-1]) / np.linalg.norm(x, axis=-1, keepdims=True)


def assert_mean(samples, expected):
    """The mean of independent samples is `expected`, within five standard errors."""
    samples = np.ravel(samples)
    assert abs(samples.mean() - expected) < 5 * samples.std() / math.sqrt(samples.size)


def plain_entropy(n, scores, weights, factor, step=0.2):
    """(1 − β ∂_β) ∫ (e^{−t} − Lⁿ) dt/t with t = e^{−y}, for scores `factor · scores` on a grid."""
    s = factor * scores
    low, high = s.min() - 4, special.logsumexp(s + np.log(weights)) + math.log(n) + 40
    y = np.arange(low, high, step)
    v = np.minimum(s - y[:, None], 100.0)
    with np.errstate(under="ignore", over="ignore"):
        tail = np.minimum(-np.expm1(-np.exp(v)) @ weights, 1.0)
        slope = (-s * np.exp(v - np.exp(v))) @ weights
        with np.errstate(divide="ignore"):
            power = np.exp((n - 1) * np.log1p(-tail))
        integrand = np.exp(-np.exp(-y)) - power * (1 - tail) + n * power * slope
    return integrand.sum() * step


def gaussian_grid(n, beta, step=0.2):
    far = math.sqrt(2 * (math.log(n) + 40))
    s = np.arange(-far, far, min(0.4, step / beta))
    return s, stats.norm.pdf(s) * (s[1] - s[0])


def angle_grid(d, points):
    # For even d the integrand is periodic and smooth: the trapezoidal rule is exact.
    theta = (np.arange(points) + 0.5) * math.pi / points
    weight = np.exp((d - 2) * np.log(np.sin(theta)))
    some = weight > 1e-290
    return np.cos(theta[some]), weight[some] / weight.sum()


@pytest.fixture
def digits():
    with mpmath.workdps(25):
        yield


class TestGaussian:
    @pytest.mark.host
    @pytest.mark.parametrize("beta", [0.1, 1, 5, 20])
    def test_two_keys(self, beta, digits):
        def entropy(x):  # of two keys whose scores differ by √2 βx
            z = mpmath.sqrt(2) * beta * x
            return mpmath.log1p(mpmath.exp(-z)) + z / (1 + mpmath.exp(z))

        expected = 2 * mpmath.quad(lambda x: mpmath.npdf(x) * entropy(x), [0, 0.2, 1, 2, 4, 8, 14])
        assert theory.gaussian_entropy(2, beta) == pytest.approx(float(expected), abs=1e-10)

    @pytest.mark.host
    @pytest.mark.parametrize(("n", "beta"), [(512, 0.7), (10**6, 2.0), (10**12, 3.0)])
    def test_against_mpmath(self, n, beta, digits):
        scores, _ = gaussian_grid(n, beta)
        step = mpmath.mpf(1) / 4
        inner = mpmath.mpf(1) / 3 / max(1, beta)
        s = [inner * i for i in range(int(scores.min() / inner), int(scores.max() / inner) + 1)]
        w = [inner * mpmath.npdf(x) for x in s]
        e = [mpmath.exp(beta * x) for x in s]
        total, low, high = mpmath.mpf(0), -beta * 2 - 4, math.log(n) + beta**2 / 2 + 28
        for i in range(int(low / step), int(high / step)):
            t = mpmath.exp(-step * i)
            tail = slope = mpmath.mpf(0)
            for score, weight, exponential in zip(s, w, e, strict=True):
                v = t * exponential
                if v > 1e-35:
                    q = mpmath.exp(-v) if v < 80 else mpmath.mpf(0)
                    tail += weight * (1 - q)
                    slope -= weight * beta * score * v * q
            power = (1 - tail) ** (n - 1)
            total += mpmath.exp(-t) - power * (1 - tail) + n * power * slope
        assert theory.gaussian_entropy(n, beta) == pytest.approx(float(total * step), abs=2e-9)

    @pytest.mark.host
    @pytest.mark.parametrize("n", [2, 3, 17, 512, 10**6, 10**12])
    def test_against_plain_quadrature(self, n):
        for beta in (0.1, 0.5, 1, 2, 4, 7, 12, 20):
            expected = plain_entropy(n, *gaussian_grid(n, beta), beta)
            assert theory.gaussian_entropy(n, beta) == pytest.approx(expected, abs=1e-9), beta

    @pytest.mark.host
    def test_more_nodes_change_nothing(self, rng, monkeypatch):
        # Over the whole range, the sphere included.
        m = 80
        n = np.concatenate([[1, 2, 2, 3, 64], 10 ** rng.uniform(0, 15, m)])
        d = np.concatenate([[2, 2, 3, 5, 64], 10 ** rng.uniform(math.log10(2), 6, m)])
        kappa = np.concatenate([[3, 4.7, 6, 30, 8], 10 ** rng.uniform(-6, 7, m)])

        def values():
            entropies = theory.gaussian_entropy(n, kappa), theory.sphere_entropy(n, d, kappa)
            sensitivities = (
                theory.gaussian_entropy(n, kappa, order=2),
                theory.sphere_entropy(n, d, kappa, order=2),
            )
            return np.asarray([*entropies, *sensitivities])

        got = values()
        assert (got >= 0).all()
        assert (got[:2] <= np.log(n) + 1e-12).all()
        for name, value in {
            "_PANELS": 40, "_SCORE_NODES": 160, "_DEPTH": 40.0, "_LOWEST": 38.0, "_HIGHEST": 34.0,
            "_ALLOWANCE": 6.0,
        }.items():  # fmt: skip
            monkeypatch.setattr(_quadrature, name, value)
        _quadrature._score_quadrature.cache_clear()
        try:
            better = values()
        finally:
            _quadrature._score_quadrature.cache_clear()
        np.testing.assert_allclose(got[::2], better[::2], rtol=0, atol=1e-9)
        np.testing.assert_allclose(got[1::2], better[1::2], rtol=0, atol=1e-8)

    @pytest.mark.host
    def test_many_keys(self):
        for beta in (0.3, 1.0, 2.0):
            error = [
                theory.gaussian_entropy(n, beta) - theory.gaussian_entropy(n, beta, method="annealed")
                for n in (1e4, 1e6)
            ]
            correction = ((2 * beta**2 - 1) * math.exp(beta**2) + 1) / 2
            assert error[1] * 1e6 == pytest.approx(correction, rel=0.02, abs=1e-4)
        for beta in (0.3, 1.0):
            # The next term is of the order 1/n².
            error = [
                theory.gaussian_entropy(n, beta)
                - theory.gaussian_entropy(n, beta, method="first-order")
                for n in (500, 1000)
            ]
            assert error[0] / error[1] == pytest.approx(4, rel=0.1)
        assert theory.gaussian_entropy(100, 40.0, method="first-order") == math.inf

    @pytest.mark.host
    def test_weak_scores(self):
        # β²/2 times the variance 1 − 1/n of the scores among themselves.
        for n in (1, 2, 100, 10**12):
            for beta in (0, 1e-9, 1e-3):
                expected = math.log(n) - beta**2 / 2 * (1 - 1 / n)
                assert theory.gaussian_entropy(n, beta) == pytest.approx(expected, abs=2e-10)
        assert theory.gaussian_entropy(1, 5.0) == 0.0

    @pytest.mark.host
    def test_strong_scores(self):
        # H → (π²/6) · (density of the gap between the two largest at 0)/β: for two keys 1/√π.
        assert 1e6 * theory.gaussian_entropy(2, 1e6) == pytest.approx(
            math.pi**2 / 6 / math.sqrt(math.pi), rel=1e-5
        )

    @pytest.mark.host
    def test_frozen_phase(self):
        gap = []
        for n in (1e3, 1e6, 1e9, 1e15):
            beta = 2 * math.sqrt(2 * math.log(n))
            gap.append(theory.frozen_entropy(2.0) - theory.gaussian_entropy(n, beta))
        assert 0 < gap[3] < gap[2] < gap[1] < gap[0]

    @pytest.mark.host
    def test_simulation(self, rng):
        for n, beta in ((3, 2.0), (64, 1.0), (512, 4.0)):
            logits = beta * rng.normal(size=(4000, n))
            assert_mean(it.entropy_from_logits(logits), theory.gaussian_entropy(n, beta))

    @pytest.mark.host
    def test_normal_queries_and_keys(self, rng):
        # Given the query, the scores are normal with the standard deviation ‖q‖/√d.
        norm = np.sqrt(stats.chi2.ppf((np.arange(40) + 0.5) / 40, 64) / 64)[:, None]

        def mean(law):
            factor = np.asarray([law(int(n)) for n in LENGTHS])
            return theory.gaussian_entropy(LENGTHS, norm * factor).mean(axis=0)

        tables = {
            laws.Constant(1.0): [3.681, 4.359, 5.054, 5.744, 6.432, 7.128, 7.818, 8.515],
            laws.LogLength(512): [3.942, 4.551, 5.155, 5.744, 6.315, 6.885, 7.431, 7.978],
            laws.LogLength(64): [3.681, 4.189, 4.690, 5.149, 5.573, 5.995, 6.368, 6.729],
        }
        for law, table in tables.items():
            np.testing.assert_allclose(mean(law), table, atol=0.025)  # that of their sampling
        q, k = rng.normal(size=(2000, 1, 64)), rng.normal(size=(2000, 128, 64))
        assert_mean(it.attention_entropy(q, k, law=None), mean(laws.Constant(1.0))[1])

    @pytest.mark.host
    def test_focused_scores_keep_their_entropy_under_the_log_law(self):
        factor = np.log(LENGTHS) / math.log(512)
        for std in (3.0, 3.5, 4.0):
            assert 0.15 < spread(theory.gaussian_entropy(LENGTHS, std * factor)) < 0.4
            assert 2.0 < spread(theory.gaussian_entropy(LENGTHS, std)) < 3.2

    def test_first_order_is_finite_while_floats_are(self):
        for n, beta in ((10, 4.0), (512, 6.0)):
            correction = ((2 * beta**2 - 1) * math.exp(beta**2) + 1) / (2 * n)
            got = theory.gaussian_entropy(n, beta, method="first-order")
            assert got == pytest.approx(math.log(n) - beta**2 / 2 + correction, rel=1e-12)


class TestFrozen:
    @pytest.mark.host
    def test_values(self):
        ratio = np.concatenate([1 + np.geomspace(1e-9, 1, 30), np.geomspace(2, 1e8, 30)])
        with mpmath.workdps(40):
            expected = [mpmath.psi(0, 1) - mpmath.psi(0, 1 - 1 / mpmath.mpf(x)) for x in ratio]
        # 1 − 1/ratio has lost digits near 1.
        error = theory.frozen_entropy(ratio) / np.asarray(expected, float) - 1
        assert abs(error * (1 - 1 / ratio)).max() < 4e-15
        assert theory.frozen_entropy(1) == math.inf
        assert theory.frozen_entropy(0) == math.inf

    @pytest.mark.host
    def test_weights_of_poisson_and_dirichlet(self, rng):
        # Powers of the arrival times of a Poisson process are the weights, up to a factor.
        arrivals = rng.exponential(size=(4000, 3000)).cumsum(axis=-1)
        assert_mean(it.entropy_from_logits(-3.0 * np.log(arrivals)), theory.frozen_entropy(3.0))


class TestSphere:
    @pytest.mark.host
    @pytest.mark.parametrize(
        ("n", "kappa"), [(2, 0.5), (2, 10), (10, 3), (100, 30), (10**6, 8), (10**12, 20)]
    )
    def test_three_dimensions(self, n, kappa, digits):
        # L(t) in closed form, by the exponential integral.
        def integrand(y):
            t = mpmath.exp(-y)
            low, high = t * mpmath.exp(-kappa), t * mpmath.exp(kappa)
            level = (mpmath.e1(low) - mpmath.e1(high)) / (2 * kappa)
            slope = (mpmath.exp(-low) + mpmath.exp(-high)) / 2 - level
            return mpmath.exp(-t) - level**n + n * level ** (n - 1) * slope

        points = mpmath.linspace(-kappa - 4, kappa + math.log(n) + 40, 20)
        expected = float(mpmath.quad(integrand, points))
        assert theory.sphere_entropy(n, 3, kappa) == pytest.approx(expected, abs=1e-9)

    @pytest.mark.host
    @pytest.mark.parametrize("d", [2, 4, 6, 20, 64, 1000])
    def test_against_plain_quadrature(self, d):
        for n in (2, 5, 64, 10**4, 10**12):
            for kappa in (0.1, 1, 4.7, 30, 200):
                expected = plain_entropy(n, *angle_grid(d, 3000), kappa)
                got = theory.sphere_entropy(n, d, kappa)
                assert got == pytest.approx(expected, abs=3e-9), (n, kappa)

    @pytest.mark.host
    def test_large_dimension_is_gaussian(self):
        for n in (2, 100, 1e12):
            for beta in (0.5, 3.0, 20.0):
                difference = [
                    theory.sphere_entropy(n, d, beta * math.sqrt(d)) - theory.gaussian_entropy(n, beta)
                    for d in (5e5, 1e6)
                ]
                assert abs(difference[1]) < 2e-3
                assert difference[0] == pytest.approx(2 * difference[1], rel=0.02, abs=1e-9)

    @pytest.mark.host
    def test_limits(self):
        for d in (2, 3, 64, 1e6):
            for n in (1, 2, 1000):
                assert theory.sphere_entropy(n, d, 0) == pytest.approx(math.log(n), abs=1e-10)
                expected = math.log(n) - 1e-6 / (2 * d) * (1 - 1 / n)
                assert theory.sphere_entropy(n, d, 1e-3) == pytest.approx(expected, abs=2e-10)
            assert theory.sphere_entropy(1, d, 9.0) == 0.0
        for d, kappa in ((2, 1e4), (3, 300.0), (64, 30.0)):
            annealed = theory.sphere_entropy(1e15, d, kappa, method="annealed")
            assert theory.sphere_entropy(1e15, d, kappa) == pytest.approx(annealed, abs=1e-7)
            expected = math.log(1e15) - von_mises_fisher(d, kappa).divergence
            assert annealed == pytest.approx(expected, rel=1e-14)

    @pytest.mark.host
    def test_simulation(self, rng):
        for n, d, scale in ((2, 2, 5.0), (40, 3, 10.0), (64, 64, 1.0), (300, 8, 4.0)):
            q, k = on_sphere(rng, 2000, 1, d), on_sphere(rng, 2000, n, d)
            h = it.attention_entropy(q, k, law=laws.Constant(scale))
            assert_mean(h, theory.sphere_entropy(n, d, scale * math.sqrt(d)))

    @pytest.mark.host
    def test_near_the_normal_queries_and_keys(self):
        table = [3.681, 4.359, 5.054, 5.744, 6.432, 7.128, 7.818, 8.515]
        np.testing.assert_allclose(theory.sphere_entropy(LENGTHS, 64, 8.0), table, atol=0.05)


class TestNeedle:
    @pytest.mark.float64
    def test_is_exact(self, backend):
        n, relevant = [10, 10, 64, 64, 7, 7], [1, 3, 8, 64, 7, 1]
        gap = [2.0, -3.0, 7.5, 4.0, -5.0, 800.0]
        logits = [
            [g] * k + [0.0] * (m - k) + [-np.inf] * (64 - m)
            for m, k, g in zip(n, relevant, gap, strict=True)
        ]
        expected = it.entropy_from_logits(np.asarray(logits))
        got = theory.needle_entropy(backend.array(n), backend.array(relevant), backend.array(gap))
        backend.assert_close(got, expected, rtol=1e-12 if backend.float64 else 1e-5, atol=1e-6)
        numbers = [theory.needle_entropy(*x) for x in zip(n, relevant, gap, strict=True)]
        np.testing.assert_allclose(numbers, expected, rtol=1e-12, atol=1e-15)

    @pytest.mark.host
    def test_entropy_under_the_laws(self):
        standard = theory.needle_entropy(LENGTHS, 8, 7.5)
        assert standard[0] == pytest.approx(2.11, abs=5e-3)
        assert standard[-1] == pytest.approx(5.24, abs=5e-3)
        scaled = theory.needle_entropy(LENGTHS, 8, 7.5 * np.log(LENGTHS) / math.log(512))
        assert scaled.min() == pytest.approx(2.31, abs=5e-3)
        assert scaled.max() == pytest.approx(2.37, abs=6e-3)

    @pytest.mark.host
    def test_when_a_law_holds_the_entropy_of_needles(self):
        """Growth ends at n0 for a gap above log n0 by about 1, where few weights leak."""
        law = laws.LogLength(512)

        def rise(above, n0=512):
            gap = math.log(n0) + above
            low, high = (theory.needle_entropy(n, 8, gap * law(n)) for n in (n0 / 1.01, n0 * 1.01))
            return high - low

        assert rise(0.9) > 0 > rise(1.1)

    @pytest.mark.parametrize("gap", [-1e3, -1e9, -1e16, -1e308])
    def test_needles_below_the_rest(self, gap):
        """Then the others are what is attended to."""
        assert theory.needle_entropy(5, 1, gap) == pytest.approx(math.log(4), rel=1e-14)
        assert theory.needle_entropy(5, 5, gap) == pytest.approx(math.log(5), rel=1e-14)

    @pytest.mark.host
    def test_weight(self):
        for n, relevant, gap in (
            (10, 1, 2.0),
            (10, 3, -3.0),
            (64, 8, 7.5),
            (64, 64, 4.0),
            (7, 1, 800.0),
        ):
            logits = np.where(np.arange(n) < relevant, gap, 0.0)
            expected = special.softmax(logits)[:relevant].sum()
            assert theory.needle_weight(n, relevant, gap) == pytest.approx(expected, rel=1e-13)

    @pytest.mark.host
    @pytest.mark.parametrize("relevant", [1, 5])
    @pytest.mark.parametrize("gap", [0.8, 6.0])
    def test_critical_coefficient(self, relevant, gap):
        n = np.asarray([1e2, 1e4, 1e8, 1e16])

        def weight(coefficient):
            return theory.needle_weight(n, relevant, gap * laws.AffineLog(coefficient, 0.0)(n))

        critical = 1 / gap
        at = relevant / (relevant + 1)
        np.testing.assert_allclose(weight(critical), at, atol=1.01 * relevant / n.min())
        assert weight(critical)[-1] == pytest.approx(at, rel=1e-14)
        below, above = weight(0.8 * critical), weight(1.25 * critical)
        assert (np.diff(below) < 0).all()
        assert (np.diff(above) > 0).all()
        # The odds are k n^(γΔ − 1).
        for ratio, w in ((0.8, below), (1.25, above)):
            slope = np.diff(special.logit(w)) / np.diff(np.log(n))
            np.testing.assert_allclose(slope[1:], ratio - 1, atol=1e-2)

    @pytest.mark.host
    def test_no_coefficient_keeps_a_needle_among_scores_that_spread(self, rng):
        """Beyond n = e^(Δ²/2) the largest of n standard normal scores is above a needle at Δ."""
        gap, factors = 3.0, np.geomspace(0.1, 30, 20)
        best = []
        for n in (20, 2000):
            scores = np.concatenate([np.full((50, 1), gap), rng.normal(size=(50, n))], axis=-1)
            weight = special.softmax(factors[:, None, None] * scores, axis=-1)[..., 0]
            best.append(np.median(weight, axis=-1).max())
        assert math.log(20) < gap**2 / 2 < math.log(2000)
        assert best[0] > 0.9
        assert best[1] < 0.1

    @pytest.mark.host
    def test_most_sensitive_gap(self):
        gap = np.linspace(0.01, 60, 60_000)
        for n in (64, 4096, 1e8, 1e15):
            best = gap[np.argmax(gap * theory.needle_entropy(n, 1, gap, order=2))]
            weight = theory.needle_weight(n, 1, best)
            assert 2 * weight**2 * best == pytest.approx(1 + weight, rel=0.02)
            assert 0.85 < best / math.log(n) < 0.95
        # Two relevant keys are never told apart, and the sensitivity to the scores grows on.
        assert (np.diff(gap * theory.needle_entropy(64, 2, gap, order=2))[gap[1:] > 20] > 0).all()


def tsallis(logits):
    return it.entropy_from_logits(logits, order=2, family="tsallis")


class TestSensitivity:
    @pytest.mark.host
    @pytest.mark.parametrize("n", [2, 17, 512, 10**6, 10**12])
    def test_of_gaussian_scores_follows_from_their_entropies(self, n):
        # The mean score β E(1 − Σp²) is the derivative m of E log Z, and E H = E log Z − β m. So
        # dH/dβ = −β dm/dβ, and the increase of m is that of −H/β, less the integral of H/β².
        x, w = np.polynomial.legendre.leggauss(40)
        for low, high in ((0.5, 1.0), (1.0, 3.0), (3.0, 8.0)):
            ends, beta = np.asarray([low, high]), low + (high - low) * (x + 1) / 2
            h = theory.gaussian_entropy(n, ends)
            integral = (high - low) / 2 * (w * theory.gaussian_entropy(n, beta) / beta**2).sum()
            mean_score = ends * theory.gaussian_entropy(n, ends, order=2)
            assert np.diff(mean_score)[0] == pytest.approx(
                h[0] / low - h[1] / high - integral, abs=1e-8
            )

    @pytest.mark.host
    def test_simulation(self, rng):
        for n, beta in ((2, 1.0), (64, 1.0), (512, 4.0)):
            logits = beta * rng.normal(size=(4000, n))
            assert_mean(tsallis(logits), theory.gaussian_entropy(n, beta, order=2))
        for n, d, scale in ((2, 2, 5.0), (40, 3, 10.0), (64, 64, 1.0)):
            q, k = on_sphere(rng, 2000, 1, d), on_sphere(rng, 2000, n, d)
            got = it.attention_entropy(q, k, order=2, family="tsallis", law=laws.Constant(scale))
            assert_mean(got, theory.sphere_entropy(n, d, scale * math.sqrt(d), order=2))

    @pytest.mark.host
    def test_limits(self):
        for n in (1, 2, 1e3, 1e12):
            for beta in (0, 1e-6):
                expected = pytest.approx(1 - 1 / n, abs=1e-9)
                assert theory.gaussian_entropy(n, beta, order=2) == expected
                assert theory.sphere_entropy(n, 8, beta, order=2) == expected
                assert theory.needle_entropy(n, 1, beta, order=2) == pytest.approx(1 - 1 / n, abs=1e-6)
        # Many dimensions are Gaussian scores, and three with two keys have a gap of density ½ at 0.
        assert theory.sphere_entropy(512, 1e6, 3e3, order=2) == pytest.approx(
            theory.gaussian_entropy(512, 3.0, order=2), abs=1e-4
        )
        assert 1e4 * theory.sphere_entropy(2, 3, 1e4, order=2) == pytest.approx(1, rel=1e-3)
        for n, k, gap in ((10, 3, 2.0), (10, 3, -4.0), (7, 7, 5.0), (50, 1, 30.0)):
            logits = np.where(np.arange(n) < k, gap, 0.0)
            assert theory.needle_entropy(n, k, gap, order=2) == pytest.approx(tsallis(logits), rel=1e-9)
        for entropy in (
            theory.gaussian_entropy,
            lambda n, x, order: theory.needle_entropy(n, 2, x, order=order),
        ):
            for order in (1, 2):
                assert entropy(8, 1.5, order=float(order)) == entropy(8, 1.5, order=order)

    @pytest.mark.host
    def test_to_random_scores_has_no_maximum(self):
        """The factor times it increases to twice the mean of the largest score."""
        beta = np.geomspace(0.01, 1e5, 40)
        for n in (2, 64, 10**6):
            grown = beta * 2 * theory.gaussian_entropy(n, beta, order=2)
            assert np.diff(grown).min() > -1e-8
            s = np.linspace(-9, 9, 20_001)
            top = np.trapezoid(s * n * stats.norm.cdf(s) ** (n - 1) * stats.norm.pdf(s), s)
            assert grown[-1] == pytest.approx(2 * top, rel=1e-4)
            sphere = beta * theory.sphere_entropy(n, 8, beta, order=2)
            assert (np.diff(sphere) > -1e-6 * sphere[1:]).all()

        # That of each row has one: beyond it the row is decided.
        scores = np.random.default_rng(0).normal(size=(30, 64))
        grown = beta * np.stack([tsallis(b * scores) for b in beta], axis=-1)
        assert ((grown.argmax(axis=-1) > 0) & (grown.argmax(axis=-1) < len(beta) - 1)).all()

        # The estimate β(1 − e^{β²}/n), with means in place of sums, has one near √log n.
        n, beta = 4096, np.linspace(0.1, 5, 1000)
        estimate = beta * (1 - np.exp(beta**2) / n)
        assert beta[np.argmax(estimate)] == pytest.approx(math.sqrt(math.log(n)), rel=0.2)

    @pytest.mark.host
    def test_of_many_keys_saturates_where_they_freeze(self):
        # To leading order E(1 − Σp²) is 1 below β_c, and β_c/β above it.
        ratio = np.asarray([0.5, 2.0, 4.0])
        error = []
        for n in (1e4, 1e9, 1e15):
            critical = math.sqrt(2 * math.log(n))
            got = ratio * theory.gaussian_entropy(n, ratio * critical, order=2)
            error.append(np.abs(got - np.minimum(ratio, 1)))
        assert (np.diff(error, axis=0) <= 0).all()
        assert error[-1].max() < 0.05

    @pytest.mark.host
    def test_a_held_entropy_keeps_nearly_all_of_it(self):
        n = np.asarray([64, 512, 4096, 2**18])
        top = 1e6 * theory.gaussian_entropy(n, 1e6, order=2)
        factor = theory.invariant_factor(n, 2.0)
        share = factor * theory.gaussian_entropy(n, factor, order=2) / top
        assert (np.diff(share) > 0).all()
        assert (share > 0.8).all()
        constant = theory.gaussian_entropy(n, 1.0, order=2) / top
        assert (np.diff(constant) < 0).all()
        assert (constant < 0.45).all()


class TestTied:
    @pytest.mark.host
    @pytest.mark.parametrize("n", [1, 2, 1000])
    def test_second_derivative(self, n):
        torch = pytest.importorskip("torch")
        factor = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(theory.tied_entropy(n, 64, factor), factor, create_graph=True)
        (bend,) = torch.autograd.grad(slope, factor)
        step = 1e-4
        h = [theory.tied_entropy(n, 64, 1.5 + x) for x in (-step, 0, step)]
        assert slope.item() == pytest.approx((h[2] - h[0]) / (2 * step), rel=1e-5, abs=1e-12)
        assert bend.item() == pytest.approx((h[0] - 2 * h[1] + h[2]) / step**2, rel=1e-4, abs=1e-12)

    @pytest.mark.host
    def test_strong_scores(self):
        """Against mpmath, where differences of the size of κ would cancel."""
        with mpmath.workdps(50):
            n, kappa = mpmath.mpf(10) ** 12, mpmath.mpf(10) ** 10 * mpmath.sqrt(2)
            i0, i1 = mpmath.besseli(0, kappa), mpmath.besseli(1, kappa)
            r = (n - 1) * i0 * mpmath.exp(-kappa)
            p = r / (1 + r)
            expected = mpmath.log1p(r) + p * kappa * (1 - i1 / i0)
        assert theory.tied_entropy(1e12, 2, 1e10) == pytest.approx(float(expected), rel=1e-12)
        assert theory.tied_entropy(1, 2, 1e308) == 0

    @pytest.mark.host
    def test_simulation(self, rng):
        for n, d, factor in ((64, 64, 1.0), (256, 64, 0.5), (256, 64, 1.1), (64, 8, 2.7)):
            samples = []
            for _ in range(60):
                x = on_sphere(rng, n, d)
                samples.append(it.attention_entropy(x, x, law=laws.Constant(factor)).mean())
            excess = theory.tied_entropy(n, d, factor) - np.mean(samples)
            noise = 5 * np.std(samples) / math.sqrt(60)
            # The bounds of the documentation.
            assert -noise < excess < (0.003 if d == 64 else 0.03) + noise

    @pytest.mark.host
    def test_entropy_under_the_laws(self):
        ends = np.asarray([64, 8192])
        np.testing.assert_allclose(theory.tied_entropy(ends, 64, 1.0), [0.27, 7.45], atol=0.02)
        factor = np.log(ends) / math.log(512)
        np.testing.assert_allclose(theory.tied_entropy(ends, 64, factor), [1.67, 1.91], atol=0.03)

    @pytest.mark.host
    def test_closed_form_for_normal_scores(self):
        # The limit of many dimensions at a given exponent.
        n, d, c = 10**5, 10**6, 0.01
        r = (n - 1) * math.exp(c**2 / 2 - c * math.sqrt(d))
        p = r / (1 + r)
        h = -p * math.log(p) - (1 - p) * math.log(1 - p)
        expected = h + p * (math.log(n - 1) - c**2 / 2)
        assert 1 < expected < 10
        assert theory.tied_entropy(n, d, c) == pytest.approx(expected, rel=1e-8)

    @pytest.mark.host
    def test_limits(self):
        assert theory.tied_entropy(1, 64, 3.0) == 0.0
        for n in (2, 1000):
            assert theory.tied_entropy(n, 64, 0) == pytest.approx(math.log(n), rel=1e-14)
            assert 0 <= theory.tied_entropy(n, 64, 1e4) < 1e-100


MODELS = {
    "gaussian": ({"std": 1.7}, lambda n, f: theory.gaussian_entropy(n, 1.7 * f)),
    "sphere": ({"d": 64}, lambda n, f: theory.sphere_entropy(n, 64, 8 * f)),
    "needle": ({"n_relevant": 3, "gap": 5.0}, lambda n, f: theory.needle_entropy(n, 3, 5.0 * f)),
    "tied": ({"d": 64}, lambda n, f: theory.tied_entropy(n, 64, f)),
}


class TestInvariantFactor:
    @pytest.mark.host
    def test_limits_are_those_of_the_entropies(self):
        with pytest.raises(ValueError, match=r"`n` must be at most 1e\+15"):
            theory.invariant_factor(1e300, 5.0)
        with pytest.raises(ValueError, match=r"`d` must be at most 1e\+06"):
            theory.invariant_factor(100, 2.0, model="sphere", d=1e7)
        with pytest.raises(ValueError, match="`n_relevant` must be at most `n`, got 8 and 5"):
            theory.invariant_factor(5, 1.0, model="needle", n_relevant=8, gap=1.0)
        many = theory.invariant_factor(
            np.asarray([5.0, 9.0]), 2.1, model="needle", n_relevant=8, gap=1.0
        )
        assert np.isnan(many[0])
        assert many[1] > 0

    @pytest.mark.host
    @pytest.mark.parametrize("model", MODELS)
    def test_round_trip(self, model):
        parameters, entropy = MODELS[model]
        n = np.asarray([4.0, 64.0, 8192.0, 1e12])[:, None]
        low = math.log(3) if model == "needle" else 0.0
        target = low + np.asarray([1e-5, 1e-3, 0.1, 0.5, 0.9, 0.999]) * (np.log(n) - low)
        factor = theory.invariant_factor(n, target, model=model, **parameters)
        assert np.isfinite(factor).all()
        assert (np.diff(factor, axis=1) < 0).all()
        np.testing.assert_allclose(entropy(n, factor), target, rtol=0, atol=1e-9)

        one = theory.invariant_factor(8192, 3.0, model=model, **parameters)
        assert type(one) is float
        assert entropy(8192, one) == pytest.approx(3.0, abs=1e-10)

    @pytest.mark.host
    @pytest.mark.parametrize("model", ["gaussian", "sphere"])
    def test_round_trip_in_all_ranges(self, model, rng):
        n = 10 ** rng.uniform(0.4, 12, 60)
        d = 10 ** rng.uniform(math.log10(8), 6, 60)
        share = rng.uniform(0.001, 0.999, 60)
        parameters = {"d": d} if model == "sphere" else {}
        factor = theory.invariant_factor(n, share * np.log(n), model=model, **parameters)
        if model == "sphere":
            got = theory.sphere_entropy(n, d, np.minimum(factor * np.sqrt(d), 1e7))
        else:
            got = theory.gaussian_entropy(n, factor)
        np.testing.assert_allclose(got, share * np.log(n), rtol=0, atol=1e-9)

    @pytest.mark.host
    @pytest.mark.parametrize("model", MODELS)
    def test_out_of_reach(self, model):
        parameters, _ = MODELS[model]
        bottom = math.log(3) if model == "needle" else 0.0
        assert theory.invariant_factor(100, math.log(100), model=model, **parameters) == 0.0
        assert theory.invariant_factor(100, 9.0, model=model, **parameters) == 0.0
        assert theory.invariant_factor(100, bottom, model=model, **parameters) == math.inf
        assert theory.invariant_factor(100, -1.0, model=model, **parameters) == math.inf
        # In two dimensions this would take κ above 10⁷.
        assert theory.invariant_factor(1e6, 5.0, model="sphere", d=2) == math.inf

    @pytest.mark.host
    def test_gaussian_law_for_many_keys(self):
        # β ≈ √(2(log n − H)), while that is well below √(2 log n).
        n = np.asarray([1e6, 1e12])
        factor = theory.invariant_factor(n, 0.9 * np.log(n), std=2.0)
        np.testing.assert_allclose(factor, np.sqrt(0.2 * np.log(n)) / 2, rtol=1e-4)

    @pytest.mark.host
    @pytest.mark.parametrize("d", [3, 4, 5, 8])
    def test_sphere_law_for_many_keys_is_a_power(self, d):
        target = theory.sphere_entropy(512, d, 4 * math.sqrt(d))
        n = 2.0 ** np.asarray([20, 24, 28])
        factor = theory.invariant_factor(n, target, model="sphere", d=d)
        growth = laws.Power(2 / (d - 1), base=n[0])(n)
        apart = np.abs(factor / factor[0] / growth - 1)
        assert apart.max() < (0.02 if d < 8 else 0.06)
        assert abs(factor[2] / factor[1] / growth[1] - 1) < 0.6 * apart[1] + 1e-6  # it comes nearer
        # With many keys in sight their weight is a normal density around the query.
        many = theory.invariant_factor(1e9, 8.0, model="sphere", d=d) * math.sqrt(d)
        surface = 2 * math.pi ** (d / 2) / math.gamma(d / 2)
        limit = 2 * math.pi * math.e * (1e9 * math.exp(-8.0) / surface) ** (2 / (d - 1))
        assert many == pytest.approx(limit, rel=0.02)

    @pytest.mark.host
    def test_grows_as_the_gaps_between_the_largest_scores_shrink(self):
        """Like the hazard rate of the scores where one of n is expected above."""
        n = 2.0 ** np.asarray([10, 20, 40])

        def apart(distribution, **parameters):
            highest = distribution.isf(1 / n)
            rate = distribution.pdf(highest) / distribution.sf(highest)
            factor = theory.invariant_factor(n, 1.0, **parameters)
            return np.abs(factor[1:] / factor[:-1] / (rate[1:] / rate[:-1]) - 1)

        gaussian = apart(stats.norm)
        assert gaussian[1] < gaussian[0] < 0.08
        n = 2.0 ** np.asarray([10, 15, 20])
        for d, close in ((4, 0.01), (8, 0.02), (64, 0.06)):
            sphere = apart(stats.beta((d - 1) / 2, (d - 1) / 2), model="sphere", d=d)
            assert sphere[1] < sphere[0] < close

    @pytest.mark.host
    @pytest.mark.parametrize("d", [3, 8])
    def test_tied_law_for_many_keys_is_a_power(self, d):
        factor = theory.invariant_factor(2.0 ** np.asarray([32, 40]), 1.0, model="tied", d=d)
        assert factor[1] / factor[0] == pytest.approx(2 ** (16 / (d - 1)), rel=2e-3)

    @pytest.mark.host
    def test_log_law_holds_the_needle(self):
        n = np.asarray([64, 512, 4096])
        factor = theory.invariant_factor(n, 2.3, model="needle", n_relevant=8, gap=7.5)
        line = np.diff(factor) / np.diff(np.log(n))
        assert line[1] == pytest.approx(line[0], rel=0.1)


# One call of every function and method, of arrays n and x that broadcast.
CALLS = {
    "gaussian": lambda n, x: theory.gaussian_entropy(n, x),
    "annealed": lambda n, x: theory.gaussian_entropy(n, x, method="annealed"),
    "first-order": lambda n, x: theory.gaussian_entropy(n, x / 4, method="first-order"),
    "frozen_entropy": lambda n, x: theory.frozen_entropy(x),
    "sphere": lambda n, x: theory.sphere_entropy(n, 64, x * 8),
    "sphere-annealed": lambda n, x: theory.sphere_entropy(n, x + 1, x, method="annealed"),
    "needle": lambda n, x: theory.needle_entropy(n, 2, x),
    "needle_weight": lambda n, x: theory.needle_weight(n, 2, x),
    "needle-2": lambda n, x: theory.needle_entropy(n, 2, x, order=2),
    "gaussian-2": lambda n, x: theory.gaussian_entropy(n, x, order=2),
    "sphere-2": lambda n, x: theory.sphere_entropy(n, 64, x * 8, order=2),
    "tied": lambda n, x: theory.tied_entropy(n, 64, x),
    "factor": lambda n, x: theory.invariant_factor(n, 0.5, std=x),
    "factor-needle": lambda n, x: theory.invariant_factor(n, 0.5, model="needle", n_relevant=1, gap=x),
    "factor-tied": lambda n, x: theory.invariant_factor(n, x / 10, model="tied", d=64),
}


def on(backend, call):
    """The call; within a trace on JAX, which takes long over single operations."""
    if backend.library != "jax":
        return call
    import jax

    # Unoptimized programs compile in half the time.
    return jax.jit(call, compiler_options={"xla_backend_optimization_level": 0})


class TestArrays:
    @pytest.mark.every_mode
    @pytest.mark.float64
    @pytest.mark.parametrize("name", CALLS)
    def test_values(self, backend, name):
        n, x = np.asarray([2, 64, 4096]), np.asarray([[1.25], [4.0]])
        expected = CALLS[name](n, x)
        assert expected.dtype == np.float64
        close = {"rtol": 1e-11, "atol": 1e-12} if backend.float64 else {"rtol": 1e-4, "atol": 1e-4}
        got = on(backend, CALLS[name])(backend.array(n), backend.array(x))
        backend.assert_close(got, expected, **close)
        if backend.library == "jax":
            return  # each dtype is a program of its own
        got = on(backend, CALLS[name])(backend.array(n), backend.array(x, "float32"))
        assert got.dtype == backend.xp.float32
        rounded = {"rtol": 2e-7, "atol": 1e-30} if backend.float64 else close
        backend.assert_close(got, expected, **rounded)

    def test_integers_give_the_default_dtype(self, backend):
        from array_api_extra import default_dtype

        got = theory.needle_entropy(backend.array([10, 20]), backend.array([3]), 1)
        assert got.dtype == default_dtype(backend.xp, device=backend.device)

    def test_half_precision(self, backend):
        if backend.half is None:
            pytest.skip("no half precision here")
        got = theory.frozen_entropy(backend.array([1.5, 8.0], backend.half))
        assert got.dtype == getattr(backend.xp, backend.half)
        expected = theory.frozen_entropy(np.asarray([1.5, 8.0]))
        np.testing.assert_allclose(backend.numpy(got), expected, rtol=1e-3)

    def test_entries_out_of_range_give_nan(self, backend):
        inf, nan = math.inf, math.nan
        x = backend.array([-1.0, nan, inf, 2.0])
        for call in (
            lambda x: theory.gaussian_entropy(64, x, method="annealed"),
            lambda x: theory.sphere_entropy(x, 8, 3.0, method="annealed"),
            theory.frozen_entropy,
            lambda x: theory.needle_entropy(64, x, 3.0),
            lambda x: theory.invariant_factor(64, 0.5, model="needle", n_relevant=1, gap=x),
        ):
            got = backend.numpy(on(backend, call)(x))
            assert (np.isnan(got) == [True, True, True, False]).all()
        got = theory.needle_entropy(backend.array([4.0, 4.0]), backend.array([4.0, 5.0]), 1.0)
        assert (np.isnan(backend.numpy(got)) == [False, True]).all()

    @pytest.mark.host
    def test_entries_beyond_the_quadrature_give_nan(self):
        got = theory.gaussian_entropy(
            np.asarray([4.0, 2e15, 4.0, 0.5]), np.asarray([1.0, 1.0, 2e7, 1.0])
        )
        assert (np.isnan(got) == [False, True, True, True]).all()
        got = theory.sphere_entropy(
            4, np.asarray([3.0, 2e6, 3.0, 1.0]), np.asarray([1, 1, 2 * 10**7, 1])
        )
        assert (np.isnan(got) == [False, True, True, True]).all()

    @pytest.mark.host
    def test_numbers_give_floats(self):
        for name, call in CALLS.items():
            got = call(64, 2.5)
            assert type(got) is float, name
            assert got == pytest.approx(call(np.asarray([64.0]), np.asarray([2.5]))[0], rel=1e-14)
            assert type(call(np.int64(64), np.float64(2.5))) is float

    @pytest.mark.host
    def test_many_and_none(self, rng):
        beta = rng.uniform(0.1, 5, (7, 5))
        got = theory.gaussian_entropy(512, beta)
        expected = [[theory.gaussian_entropy(512, float(x)) for x in row] for row in beta]
        np.testing.assert_allclose(got, expected, rtol=1e-13)
        assert theory.gaussian_entropy(512, np.zeros((0, 3))).shape == (0, 3)
        assert theory.invariant_factor(np.zeros((0,)), 1.0).shape == (0,)


class TestErrors:
    @pytest.mark.host
    @pytest.mark.parametrize(
        ("call", "error", "message"),
        [
            (lambda: theory.gaussian_entropy(0, 1.0), ValueError, r"`n` must be at least 1, got 0"),
            (lambda: theory.gaussian_entropy(8, -1), ValueError, r"`beta` must be at least 0, got -1"),
            (lambda: theory.gaussian_entropy(8, math.nan), ValueError, r"`beta` must be at least 0, got nan"),
            (lambda: theory.gaussian_entropy(1e16, 1), ValueError, r"`n` must be at most 1e\+15, got 1e\+16"),
            (lambda: theory.gaussian_entropy(8, 1e8), ValueError, r"`beta` must be at most 1e\+07"),
            (lambda: theory.gaussian_entropy("8", 1), TypeError, r"`n` must be a real number, got str|be a real"),
            (lambda: theory.gaussian_entropy(8, [1.0]), TypeError, r"`beta` must be a real number or an array, got list"),
            (lambda: theory.gaussian_entropy(True, 1), TypeError, r"`n` must be a real number, got bool"),
            (lambda: theory.gaussian_entropy(8, 1, method="x"), ValueError, r"`method` must be 'exact' or "),
            (lambda: theory.gaussian_entropy(8, np.ones(2, bool)), TypeError, r"`beta` must have an integer or"),
            (lambda: theory.gaussian_entropy(8, np.ones(2, complex)), TypeError, r"`beta` must have an integer"),
            (lambda: theory.gaussian_entropy(np.ones(2), np.ones(3)), ValueError, r"`beta` must broadcast"),
            (lambda: theory.sphere_entropy(8, 1, 1.0), ValueError, r"`d` must be at least 2, got 1"),
            (lambda: theory.sphere_entropy(8, 1e7, 1.0), ValueError, r"`d` must be at most 1e\+06"),
            (lambda: theory.sphere_entropy(8, 3, 1.0, method="frozen"), ValueError, r"`method` must be"),
            (lambda: theory.frozen_entropy(-1), ValueError, r"`beta_over_critical` must be at least 0"),
            (lambda: theory.needle_entropy(8, 0, 1.0), ValueError, r"`n_relevant` must be at least 1, got 0"),
            (lambda: theory.needle_entropy(8, 9, 1.0), ValueError, r"`n_relevant` must be at most `n`, got 9 and 8"),
            (lambda: theory.needle_entropy(8, 2, math.inf), ValueError, r"`gap` must be finite, got inf"),
            (lambda: theory.needle_weight(8, 9, 1.0), ValueError, r"`n_relevant` must be at most `n`, got 9 and 8"),
            (lambda: theory.gaussian_entropy(8, 1, order=3), ValueError, r"`order` must be 1 or 2, got 3"),
            (lambda: theory.sphere_entropy(8, 3, 1.0, order=2, method="annealed"), ValueError, r"`order` must be 1 for the method 'annealed', got 2"),
            (lambda: theory.tied_entropy(8, 64, -1), ValueError, r"`factor` must be at least 0, got -1"),
            (lambda: theory.invariant_factor(8, 1, model="x"), ValueError, r"`model` must be 'gaussian' or "),
            (lambda: theory.invariant_factor(8, 1, std=0), ValueError, r"`std` must be above 0, got 0"),
            (lambda: theory.invariant_factor(8, 1, d=64), TypeError, r"`d` must be left out for the model 'gaussian'"),
            (lambda: theory.invariant_factor(8, 1, model="sphere"), ValueError, r"`d` must be given for the model 'sphere'"),
            (lambda: theory.invariant_factor(8, 1, model="tied", d=64, std=1), TypeError, r"`std` must be left out"),
            (lambda: theory.invariant_factor(8, 1, model="needle", gap=1), ValueError, r"`n_relevant` must be given"),
            (lambda: theory.invariant_factor(8, 1, model="needle", n_relevant=1, gap=0), ValueError, r"`gap` must be above 0"),
        ],
    )  # fmt: skip
    def test_messages(self, call, error, message):
        with pytest.raises(error, match=message):
            call()

    def test_mixed_libraries(self, backend):
        if backend.library == "numpy":
            pytest.skip("needs two libraries")
        with pytest.raises(TypeError, match="`beta` must be an array of the library of `n`"):
            theory.gaussian_entropy(backend.array([8.0]), np.ones(1))

    @pytest.mark.host
    def test_all_functions_are_public_and_sorted(self):
        names = [
            name
            for name, x in vars(theory).items()
            if inspect.isfunction(x) and not name.startswith("_") and x.__module__ == theory.__name__
        ]
        of_dimensions = [
            "entropy_criterion_dim",
            "matched_key_dim",
        ]  # defined beside those of the lemma
        assert sorted(names + of_dimensions) == theory.__all__
