"""Dimensions of the lemma: against SciPy and mpmath, against one another, and against simulation."""

import functools
import math

import numpy as np
import pytest
from scipy.stats import beta, chi2

import isentropic as it
from isentropic import laws
from isentropic.jl._tails import binomial_interval

pytestmark = pytest.mark.host

METHODS = ["exact", "haar", "dasgupta-gupta", "achlioptas", "chernoff"]


def pair_failure(k, eps):
    return chi2.sf(k * (1 + eps), k) + chi2.cdf(k * (1 - eps), k)


class TestMinDim:
    @pytest.mark.parametrize("n", [2, 3, 50, 10**4, 10**9])
    @pytest.mark.parametrize("eps", [0.05, 0.1, 0.3, 0.9])
    @pytest.mark.parametrize("delta", [0.5, 0.01, 1e-9])
    def test_exact_is_the_smallest(self, n, eps, delta):
        k = it.jl.min_dim(n, eps=eps, delta=delta)
        pairs = n * (n - 1) / 2
        assert pairs * pair_failure(k, eps) <= delta * (1 + 1e-9)
        assert k == 1 or pairs * pair_failure(k - 1, eps) > delta * (1 - 1e-9)

    @pytest.mark.parametrize("d", [10, 300, 5000])
    @pytest.mark.parametrize("eps", [0.1, 0.3, 0.9])
    def test_haar_is_the_smallest(self, d, eps):
        n, delta = 1000, 0.01
        k = it.jl.min_dim(n, eps=eps, delta=delta, method="haar", n_features=d)
        assert 1 <= k <= d

        def failure(k):
            law = beta(k / 2, (d - k) / 2)
            return n * (n - 1) / 2 * (law.sf((1 + eps) * k / d) + law.cdf((1 - eps) * k / d))

        assert k == d or failure(k) <= delta
        assert k == 1 or failure(k - 1) > delta

    def test_as_many_as_there_are(self):
        """No map to all dimensions changes a distance, however small ε is."""
        assert it.jl.min_dim(10, eps=1e-9, method="haar", n_features=1000) == 1000

    def test_no_k_below_is_enough(self):
        # Bisection is right because the failure falls with k.
        k = np.arange(1, 2000)
        for eps in (0.02, 0.3, 0.99):
            exact = it.jl.failure_probability(2, k, eps=eps)
            haar = it.jl.failure_probability(2, k, eps=eps, method="haar", n_features=2000)
            for p in (exact, haar):
                assert (np.diff(p) <= 1e-12).all()

    def test_inner_products(self):
        """What johnson-lindenstrauss.md says of them: 1.42 n points have enough pairs for x ± y."""
        n = np.arange(2, 10_000)
        points = np.ceil(1.42 * n)
        assert (points * (points - 1) / 2 >= n * (n - 1)).all()
        eps, delta = 0.4, 1e-3
        x = np.random.default_rng(0).normal(size=(40, 3000))
        x /= np.linalg.norm(x, axis=-1, keepdims=True)
        k = it.jl.min_dim(math.ceil(1.42 * len(x)), eps=eps, delta=delta)
        for seed in range(5):
            y = it.jl.gaussian_projection(3000, k, rng=seed)(x)
            assert abs(y @ y.T - x @ x.T).max() < eps

    def test_order_of_the_methods(self):
        for n in (1000, 10**6):
            for eps in (0.1, 0.3, 0.5):
                k = {m: it.jl.min_dim(n, eps=eps, method=m, n_features=10**5) for m in METHODS}
                assert k["haar"] <= k["exact"] < k["dasgupta-gupta"] <= k["achlioptas"] < k["chernoff"]
                # The figures of the documentation.
                assert 1.1 < k["dasgupta-gupta"] / k["exact"] < 1.405
                assert 3.5 <= k["chernoff"] / k["exact"] < 5

    def test_closed_forms(self):
        n, eps, delta = 512, 0.2, 0.01
        expected = 16 / eps**2 * math.log(2 * n**2 / delta)  # equation 28 of the document
        assert it.jl.min_dim(n, eps=eps, delta=delta, method="chernoff") == math.ceil(expected)
        expected = math.log(n * (n - 1) / delta) / (eps**2 / 4 - eps**3 / 6)
        assert it.jl.min_dim(n, eps=eps, delta=delta, method="dasgupta-gupta") == math.ceil(expected)
        b = -math.log(delta) / math.log(n)
        expected = (4 + 2 * b) / (eps**2 / 2 - eps**3 / 3) * math.log(n)
        assert it.jl.min_dim(n, eps=eps, delta=delta, method="achlioptas") == math.ceil(expected)

    @pytest.mark.parametrize("n", [2, 3, 5])
    @pytest.mark.parametrize("delta", [0.5, 0.01])
    def test_achlioptas_counts_n_squared(self, n, delta):
        # His theorem 1.1: (4 + 2β)/(ε²/2 − ε³/3) log n dimensions fail with probability n^(−β).
        eps = 0.2
        b = -math.log(delta, n)
        exact = (4 + 2 * b) * math.log(n) / (eps**2 / 2 - eps**3 / 3)
        k = it.jl.min_dim(n, eps=eps, delta=delta, method="achlioptas")
        assert k == math.ceil(exact)
        # The pairs themselves, of which Dasgupta and Gupta count each twice, are fewer.
        assert k > it.jl.min_dim(n, eps=eps, delta=delta, method="dasgupta-gupta")
        failure = it.jl.failure_probability(n, k, eps=eps, method="achlioptas")
        assert math.isclose(failure, n**2 * math.exp(-k * (eps**2 / 4 - eps**3 / 6)))

    def test_against_sklearn(self):
        random_projection = pytest.importorskip("sklearn.random_projection")
        # Dasgupta–Gupta without a probability: its k is that of δ near 1, rounded down.
        for n in (100, 10**5):
            theirs = random_projection.johnson_lindenstrauss_min_dim(n, eps=0.2)
            ours = it.jl.min_dim(n, eps=0.2, delta=1 - 1e-12, method="achlioptas")
            assert theirs in (ours - 1, ours)
        assert it.jl.failure_probability(10**5, theirs, eps=0.2, method="dasgupta-gupta") > 0.99

    def test_extremes(self):
        assert it.jl.min_dim(2, eps=0.1, delta=0.99) == 1
        assert it.jl.min_dim(10**4, eps=0.9, delta=1e-300) > 5000
        assert it.jl.min_dim(10**18, eps=1e-4) > 10**10
        assert it.jl.failure_probability(10**4, 10**5, eps=0.9) == 0
        # Computed with 50 digits by mpmath.
        assert it.jl.min_dim(10**4, eps=1e-6) == 80932925363515
        assert it.jl.min_dim(10**4, eps=1e-5) == 809329253947
        assert it.jl.min_dim(2, eps=1e-5, delta=1e-300) == 27477453042218
        # Up to the largest float below which all whole numbers are floats.
        assert 2**52 < it.jl.min_dim(1000, eps=1e-7, method="dasgupta-gupta") < 2**53
        with pytest.raises(ValueError, match="`eps` must be large enough"):
            it.jl.min_dim(10**4, eps=1e-7, method="dasgupta-gupta")
        # The size of the bound is clear from the tail of a normal variable.
        k = it.jl.min_dim(10**6, eps=1e-6)
        assert math.isclose(k, 2e12 * 7.6**2, rel_tol=0.05)

    def test_arrays(self):
        n = np.asarray([[10], [1000]])
        eps = np.asarray([0.1, 0.2, 0.5])
        k = it.jl.min_dim(n, eps=eps, delta=0.05)
        assert k.dtype == np.int64
        assert k.shape == (2, 3)
        assert k[1, 2] == it.jl.min_dim(1000, eps=0.5, delta=0.05)
        assert type(it.jl.min_dim(np.int64(1000), eps=np.float32(0.5))) is int
        k = it.jl.min_dim(n, eps=eps, method="haar", n_features=[50, 100, 200])
        assert k[1, 0] == it.jl.min_dim(1000, eps=0.1, method="haar", n_features=50)

    @pytest.mark.parametrize("method", METHODS)
    def test_inverses(self, method):
        n, d = 1000, 10**5
        for k in (200, 5000):
            eps = it.jl.eps(n, k, delta=0.05, method=method, n_features=d)
            if eps == math.inf:
                assert it.jl.failure_probability(n, k, eps=1 - 1e-9, method=method, n_features=d) > 0.05
                continue
            p = it.jl.failure_probability(n, k, eps=eps, method=method, n_features=d)
            assert math.isclose(p, 0.05, rel_tol=1e-6)
            again = it.jl.min_dim(n, eps=eps, delta=0.05 * (1 + 1e-9), method=method, n_features=d)
            assert again in (k, k + 1)
        assert it.jl.eps(n, 5, method=method, n_features=d) == math.inf
        assert it.jl.failure_probability(n, 5, eps=0.1, method=method, n_features=d) == 1

    def test_haar_with_all_dimensions_never_fails(self):
        assert it.jl.failure_probability(10**6, 300, eps=1e-3, method="haar", n_features=300) == 0
        assert it.jl.eps(10**6, 300, method="haar", n_features=300) < 1e-15

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({"n_samples": 1}, ValueError, "`n_samples` must be at least 2, and whole, got 1"),
            ({"n_samples": [10, 0]}, ValueError, "`n_samples` must be at least 2"),
            ({"n_samples": math.nan}, ValueError, "`n_samples` must be finite"),
            ({"n_samples": "10"}, TypeError, "`n_samples` must be a number"),
            ({"n_samples": True}, TypeError, "`n_samples` must be a number"),
            ({"n_samples": ["10"]}, TypeError, "`n_samples` must be a number"),
            ({"eps": 0.0}, ValueError, r"`eps` must be in \(0, 1\), got 0.0"),
            ({"eps": 1.0}, ValueError, r"`eps` must be in \(0, 1\)"),
            ({"eps": [0.5, -0.1]}, ValueError, r"`eps` must be in \(0, 1\)"),
            ({"eps": 1e-12}, ValueError, "`eps` must be large enough"),
            ({"delta": 0.0}, ValueError, r"`delta` must be in \(0, 1\)"),
            ({"delta": 1}, ValueError, r"`delta` must be in \(0, 1\)"),
            ({"method": "best"}, ValueError, "`method` must be 'exact' or 'haar'"),
            ({"method": "haar"}, ValueError, "`n_features` must be given"),
            ({"method": "haar", "n_features": 0}, ValueError, "`n_features` must be at least 1"),
            (
                {"method": "haar", "n_features": 2.5, "eps": 0.9},
                ValueError,
                "`n_features` must be .* whole",
            ),
            ({"n_samples": 2.5}, ValueError, "`n_samples` must be at least 2, and whole"),
            ({"n_samples": 10**400}, ValueError, "`n_samples` must be within the range"),
            ({"n_samples": [[1, 2], [3]]}, TypeError, "`n_samples` must be a number"),
            ({"eps": 5e-8}, ValueError, "`eps` must be large enough"),
            ({"eps": [0.1, 0.2], "delta": [0.1] * 3}, ValueError, "`n_samples`, `eps`, `delta` must"),
        ],
    )
    def test_errors(self, arguments, error, message):
        with pytest.raises(error, match=message):
            it.jl.min_dim(**({"n_samples": 10} | arguments))

    def test_errors_of_the_inverses(self):
        with pytest.raises(ValueError, match="`n_components` must be at least 1"):
            it.jl.failure_probability(10, 0, eps=0.1)
        with pytest.raises(ValueError, match="`n_components` must be at most `n_features`"):
            it.jl.eps(10, 11, method="haar", n_features=10)


class TestSimulation:
    """The guarantee over hundreds of draws, on points where the union bound is nearly tight."""

    @pytest.mark.parametrize("kind", ["gaussian", "orthogonal", "rademacher", "sparse"])
    def test_failure_rate_on_a_simplex(self, kind):
        # n points e_1 … e_n: all distances alike, and their pairs nearly independent.
        n, eps, delta, d, draws = 40, 0.5, 0.1, 60, 400
        method = {"gaussian": "exact", "orthogonal": "haar"}.get(kind, "achlioptas")
        draw = {
            "gaussian": it.jl.gaussian_projection,
            "orthogonal": it.jl.orthogonal_projection,
            "rademacher": functools.partial(it.jl.sparse_projection, density=1),
            "sparse": it.jl.sparse_projection,
        }[kind]
        k = it.jl.min_dim(n, eps=eps, delta=delta, method=method, n_features=d)
        x = np.eye(n, d)
        i, j = np.triu_indices(n, 1)
        failures = 0
        for seed in range(draws):
            y = draw(d, min(k, d), rng=seed)(x) if kind == "orthogonal" else draw(d, k, rng=seed)(x)
            square = ((y[i] - y[j]) ** 2).sum(-1) / 2
            failures += bool((abs(square - 1) > eps).any())
        low, high = binomial_interval(failures, draws, 0.999)
        assert low <= delta
        if method == "exact":
            assert high >= delta / 3  # nearly tight

    def test_the_exact_k_cannot_be_much_smaller(self):
        n, eps, delta, draws = 40, 0.5, 0.1, 200
        k = it.jl.min_dim(n, eps=eps, delta=delta) * 2 // 3
        x = np.eye(n)
        i, j = np.triu_indices(n, 1)
        failures = 0
        for seed in range(draws):
            y = it.jl.gaussian_projection(n, k, rng=seed)(x)
            square = ((y[i] - y[j]) ** 2).sum(-1) / 2
            failures += bool((abs(square - 1) > eps).any())
        assert binomial_interval(failures, draws, 0.999)[0] > delta

    def test_the_entropy_criterion_is_no_guarantee(self):
        n, eps = 300, 0.3
        k = it.theory.entropy_criterion_dim(n)
        assert k == 48
        y = it.jl.gaussian_projection(n, k, rng=0)(np.eye(n))
        i, j = np.triu_indices(n, 1)
        bad = abs(((y[i] - y[j]) ** 2).sum(-1) / 2 - 1) > eps
        assert bad.sum() > 2000


class TestOtherDimensions:
    def test_entropy_criterion(self):
        assert it.theory.entropy_criterion_dim(512) == 52
        assert it.theory.entropy_criterion_dim(1024) == 58
        assert it.theory.entropy_criterion_dim(10**5, coefficient=8) == 93
        np.testing.assert_array_equal(it.theory.entropy_criterion_dim([1, 2]), [0, 6])
        with pytest.raises(ValueError, match="`n` must be at least 1"):
            it.theory.entropy_criterion_dim(0)
        with pytest.raises(ValueError, match="`coefficient` must be above 0"):
            it.theory.entropy_criterion_dim(5, coefficient=-1)

    def test_matched_key_dim_is_the_law(self):
        for n in (1, 64, 512, 8192):
            expected = 64 * laws.LogLength(512)(n)
            assert math.isclose(it.theory.matched_key_dim(n, 64), expected, abs_tol=1e-12)
        got = it.theory.matched_key_dim(np.asarray([128, 4096]), 64, base=128)
        np.testing.assert_allclose(got, [64, 64 * 12 / 7])
        with pytest.raises(ValueError, match="`base` must be above 1"):
            it.theory.matched_key_dim(5, 64, base=1)

    def test_lower_bound(self):
        assert math.isclose(it.jl.lower_bound(10**4, eps=0.2), math.log(400) / 0.04)
        assert it.jl.lower_bound(10, eps=0.1) == 0
        # Growth like ours: between n = 10⁴ and 10⁸ both about double.
        ratio = it.jl.min_dim(10**8, eps=0.2) / it.jl.min_dim(10**4, eps=0.2)
        assert 1.5 < ratio < it.jl.lower_bound(10**8, eps=0.2) / it.jl.lower_bound(10**4, eps=0.2)
