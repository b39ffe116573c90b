"""Annotated derivation of archives/9588, sections 1 and 2: the lemma and its proof."""

import functools
import math

import numpy as np
import pytest
from scipy import integrate
from scipy.stats import chi2

import isentropic as it
from ledger import claim

pytestmark = pytest.mark.host

EPS = np.asarray([0.05, 0.1, 0.3, 0.5, 0.9])
K = np.asarray([1, 10, 100, 1000])[:, None]


def upper_tail(k, eps):
    return chi2.sf(k * (1 + eps), k)


def lower_tail(k, eps):
    return chi2.cdf(k * (1 - eps), k)


def unit_vector():
    v = np.asarray([5.0, 1.0, 1.0, 0.5, -0.5, 0.0])
    return v / np.linalg.norm(v)


def row_products(projection):
    """R_i · v for 400 000 independent rows."""
    v, k = unit_vector(), 400_000
    return projection(v.size, k, rng=20)(v) * math.sqrt(k)


@functools.cache
def constants_of_the_lemma():
    eps = np.asarray([0.05, 0.1, 0.2, 0.5])
    n = np.asarray([1e2, 1e4, 1e8, 1e16])[:, None]
    k = it.jl.min_dim(n, eps=eps, delta=1 / n)
    constant = k * eps**2 / np.log(n)
    share = k / it.jl.min_dim(n, eps=eps, delta=1 / n, method="chernoff")
    return {
        "eps": [eps.min(), eps.max()],
        "constant": [constant.min(), constant.max()],
        "share": [share.min(), share.max()],
    }


@claim(
    "9588-1",
    says=r"A map to $k = O(\log n/ε^2)$ dimensions keeps the distances of any n points.",
    verdict="holds",
    correct=r"$k\,ε^2/\log n$ is between @{constant:.1f} at δ = 1/n for n from 10² to 10¹⁶ and ε between @{eps}.",
    numbers=constants_of_the_lemma,
    function="isentropic.jl.min_dim",
)
@claim(
    "9588-29",
    says=r"At δ = 1/n, $k = O(\log n/ε^2)$.",
    verdict="holds",
    correct=r"With 28, $k = (16/ε^2)(3 \log n + \log 2)$; the exact k of Gaussian maps is between @{share:.2f} of it.",
    numbers=constants_of_the_lemma,
    function="isentropic.jl.min_dim",
)
@claim(
    "8823-50",
    says=r"Keeping the distances of n points takes $d = O(\log n/ε^2)$ dimensions.",
    verdict="holds",
    correct="The lemma, as in 9588-1.",
    function="isentropic.jl.min_dim",
)
def test_dimension_grows_like_log_n():
    eps = np.asarray([0.05, 0.1, 0.2, 0.5])
    n = np.asarray([1e2, 1e4, 1e8, 1e16])[:, None]
    k = it.jl.min_dim(n, eps=eps, delta=1 / n)
    pairs = n * (n - 1) / 2
    assert (pairs * (upper_tail(k, eps) + lower_tail(k, eps)) <= 1 / n * (1 + 1e-9)).all()
    assert (pairs * (upper_tail(k - 1, eps) + lower_tail(k - 1, eps)) > 1 / n * (1 - 1e-9)).all()
    low, high = constants_of_the_lemma()["constant"]
    assert (np.ceil(low * np.log(n) / eps**2 - 1e-6) <= k).all()
    assert (k <= np.ceil(high * np.log(n) / eps**2)).all()
    rough = it.jl.min_dim(n, eps=eps, delta=1 / n, method="chernoff") * eps**2 / np.log(n)
    np.testing.assert_allclose(rough, 16 * (3 + math.log(2) / np.log(n)) + 0 * eps, rtol=0.01)


@claim(
    "9588-2",
    says=r"$(1-ε)\|x_i-x_j\|^2 \le \|f(x_i)-f(x_j)\|^2 \le (1+ε)\|x_i-x_j\|^2$ for all pairs of any n points.",
    verdict="holds with a condition",
    correct="f is drawn at random, independently of the points, and it holds with probability 1 − δ. A "
    "fixed f fails for points that differ by a vector of its kernel.",
    function="isentropic.jl.distortion",
)
@claim(
    "9588-44",
    says=r"$(1-ε)\|x\|^2 \le \|f(x)\|^2 \le (1+ε)\|x\|^2$.",
    verdict="holds with a condition",
    correct="This holds for each x with probability 1 − δ over the draw of f. For k < d no f satisfies it for all x.",
    function="isentropic.jl.distortion",
)
def test_distances_are_kept_unless_the_points_know_the_map():
    n, d, eps = 60, 3000, 0.3
    x = np.random.default_rng(21).normal(size=(n, d))
    f = it.jl.gaussian_projection(d, it.jl.min_dim(n, eps=eps), rng=22)
    report = it.jl.distortion(x, f(x))
    assert report.worst <= eps
    assert abs(report.norm).max() <= eps

    kernel = x[1] - f.adjoint(np.linalg.solve(f.matrix() @ f.matrix().T, f(x[1])))
    assert np.linalg.norm(kernel) > 0.5 * np.linalg.norm(x[1])
    x[1] = x[0] + kernel
    assert it.jl.distortion(x, f(x)).worst == pytest.approx(1)


@claim(
    "9588-3",
    says=r"$f(x) = Rx/\sqrt k$ with a random $R \in \mathbb R^{k\times d}$.",
    verdict="definition",
    function="isentropic.jl.gaussian_projection",
)
@claim(
    "9588-4",
    says=r"$R_{ij} \sim \mathcal N(0, 1)$.",
    verdict="definition",
    function="isentropic.jl.gaussian_projection",
)
@claim(
    "9588-8",
    says=r"$Z = \|Rv\|^2/k = \frac1k \sum_i (R_i \cdot v)^2$.",
    verdict="definition",
    correct=r"$Z = \|f(v)\|^2$.",
    function="isentropic.jl.gaussian_projection",
)
def test_gaussian_map():
    v, k = unit_vector(), 50_000
    f = it.jl.gaussian_projection(v.size, k, rng=23)
    r = f.weights
    np.testing.assert_allclose(f(v), r @ v / math.sqrt(k), rtol=1e-12, atol=1e-15)
    assert (f(v) ** 2).sum() == pytest.approx(((r @ v) ** 2).mean(), rel=1e-12)
    moments = [(r**p).mean() for p in (1, 2, 3, 4)]
    # Standard errors from the moments of orders 2, 4, 6, 8 of the normal distribution.
    errors = np.sqrt(np.asarray([1, 2, 15, 96]) / r.size)
    assert (abs(np.asarray(moments) - (0, 1, 0, 3)) < 4 * errors).all()


@claim(
    "9588-5",
    says=r"$R_{ij} = \pm1$ with probability ½ each.",
    verdict="definition",
    function="isentropic.jl.sparse_projection",
)
@claim(
    "9588-6",
    says=r"$R_{ij} = \pm\sqrt s$ with probability $1/(2s)$ each, else 0; usually s = 3.",
    verdict="definition",
    correct="The density is 1/s. Below a density of 1/3, spiky vectors lose their lengths.",
    function="isentropic.jl.sparse_projection",
)
def test_maps_of_signs():
    k, d = 500, 400
    error = 4 * 0.5 / math.sqrt(k * d)
    signs = it.jl.sparse_projection(d, k, density=1, rng=24).matrix() * math.sqrt(k)
    assert set(np.unique(signs.round(12))) == {-1.0, 1.0}
    assert abs((signs > 0).mean() - 1 / 2) < error
    sparse = it.jl.sparse_projection(d, k, density=1 / 3, rng=25).matrix() * math.sqrt(k)
    np.testing.assert_allclose(np.unique(sparse.round(12)), [-math.sqrt(3), 0, math.sqrt(3)], atol=1e-9)
    assert abs((sparse > 0).mean() - 1 / 6) < error
    assert abs((sparse < 0).mean() - 1 / 6) < error


@claim(
    "9588-7",
    says=r"To prove: $P[\,|\|Rv\|^2 - \|v\|^2| > ε\|v\|^2\,] < δ$.",
    verdict="does not hold",
    correct=r"$\|Rv\|^2/k$ is meant: $P[\,|\|f(v)\|^2 - \|v\|^2| > ε\|v\|^2\,] < δ$.",
    function="isentropic.jl.min_dim",
)
def test_one_pair():
    eps, delta = 0.2, 0.05
    k = it.jl.min_dim(2, eps=eps, delta=delta)
    # With R in the place of f the length is k times too large.
    written = chi2.sf(1 + eps, k) + chi2.cdf(1 - eps, k)
    assert written > 1 - 1e-9
    assert (
        upper_tail(k, eps) + lower_tail(k, eps)
        <= delta
        < upper_tail(k - 1, eps) + lower_tail(k - 1, eps)
    )


@claim(
    "9588-9",
    says=r"$E[R_i \cdot v] = 0$.",
    verdict="holds",
    function="isentropic.jl.gaussian_projection",
)
@claim(
    "9588-10",
    says=r"$E[(R_i \cdot v)^2] = \|v\|^2$.",
    verdict="holds",
    function="isentropic.jl.gaussian_projection",
)
@claim(
    "9588-11",
    says=r"$E[Z] = 1$ for a unit vector.",
    verdict="holds",
    function="isentropic.jl.gaussian_projection",
)
@claim(
    "9588-12",
    says=r"$\mathrm{Var}[(R_i\cdot v)^2] = E[(R_i\cdot v)^4] - E[(R_i\cdot v)^2]^2$.",
    verdict="holds",
    function="isentropic.jl.gaussian_projection",
)
@claim(
    "9588-13",
    says=r"$E[(R_i\cdot v)^4] = 3$.",
    verdict="holds",
    correct=r"For Gaussian entries, as stated; else $3 + (E R^4 - 3)\sum_j v_j^4$.",
    function="isentropic.jl.gaussian_projection",
)
@claim(
    "9588-14",
    says=r"$\mathrm{Var}[(R_i\cdot v)^2] = 2$.",
    verdict="holds",
    correct=r"For Gaussian entries; else $2 + (E R^4 - 3)\sum_j v_j^4$.",
    function="isentropic.jl.gaussian_projection",
)
def test_moments_of_one_row():
    for projection, kurtosis in (
        (it.jl.gaussian_projection, 3.0),
        (functools.partial(it.jl.sparse_projection, density=1), 1.0),
        (lambda d, k, rng: it.jl.sparse_projection(d, k, density=1 / 2, rng=rng), 2.0),
    ):
        x = row_products(projection)
        error = 4 / math.sqrt(x.size)
        fourth = 3 + (kurtosis - 3) * (unit_vector() ** 4).sum()
        assert abs(x.mean()) < error
        assert abs((x**2).mean() - 1) < error * (x**2).std()
        assert abs((x**4).mean() - fourth) < error * (x**4).std()
        assert (x**2).var() == pytest.approx((x**4).mean() - (x**2).mean() ** 2, rel=1e-12)
        assert abs((x**2).var() - (fourth - 1)) < error * (x**4).std()


@claim(
    "9588-15",
    says=r"$\mathrm{Var}[Z] = 2/k$.",
    verdict="holds",
    correct=r"For Gaussian entries; ±1 give $(2 - 2\sum v^4)/k$.",
    function="isentropic.jl.gaussian_projection",
)
def test_variance_of_a_squared_length():
    v, k, draws = unit_vector(), 20, 20_000
    for projection, expected in (
        (it.jl.gaussian_projection, 2 / k),
        (functools.partial(it.jl.sparse_projection, density=1), (2 - 2 * (v**4).sum()) / k),
    ):
        # The rows of one map of many dimensions are those of many maps.
        x = projection(v.size, k * draws, rng=26)(v).reshape(draws, k) * math.sqrt(draws)
        z = (x**2).sum(-1)
        error = np.std((z - 1) ** 2) / math.sqrt(draws)
        assert abs(z.var() - expected) < 4 * error
        assert error < 0.03 * expected


@claim(
    "9588-16",
    says=r"$P[Z \ge 1+ε] \le e^{-tk(1+ε)}\,E\,e^{t\sum X_i}$ for t > 0, $X_i = (R_i\cdot v)^2$.",
    verdict="holds",
    function="isentropic.jl.failure_probability",
)
@claim(
    "9588-17",
    says=r"$E\,e^{t\sum X_i} = \prod_i E\,e^{tX_i}$.",
    verdict="holds",
    function="isentropic.jl.failure_probability",
)
@claim(
    "9588-18",
    says=r"$E\,e^{tX_i} = (1-2t)^{-1/2}$ for t < ½.",
    verdict="holds",
    function="isentropic.jl.failure_probability",
)
@claim(
    "9588-19",
    says=r"$P[Z \ge 1+ε] \le e^{-tk(1+ε)}(1-2t)^{-k/2}$.",
    verdict="holds",
    function="isentropic.jl.failure_probability",
)
def test_chernoff_bound():
    k, eps = 30, 0.3
    tail = upper_tail(k, eps)
    assert it.jl.failure_probability(2, k, eps=eps) == pytest.approx(tail + lower_tail(k, eps))
    for t in (0.01, 0.05, eps / (2 * (1 + eps)), 0.2, 0.4):
        one = integrate.quad(
            lambda x, t=t: 2 * math.exp((t - 0.5) * x * x) / math.sqrt(2 * math.pi), 0, 40
        )[0]
        assert one == pytest.approx((1 - 2 * t) ** -0.5, rel=1e-8)
        together = integrate.quad(
            lambda x, t=t: math.exp(t * x + chi2.logpdf(x, k)), 0, 60 * k, limit=400
        )[0]
        assert together == pytest.approx(one**k, rel=1e-6)
        assert tail <= math.exp(-t * k * (1 + eps)) * together


@claim(
    "9588-20",
    says=r"The best t has $-k(1+ε) + k/(1-2t) = 0$.",
    verdict="holds",
    function="isentropic.jl.failure_probability",
)
@claim(
    "9588-21",
    says=r"$t = ε/(2(1+ε))$.",
    verdict="holds",
    function="isentropic.jl.failure_probability",
)
@claim(
    "9588-22",
    says=r"Putting 21 into 19 gives $P[Z \ge 1+ε] \le \exp(-\frac k4[ε - \log(1+ε)])$.",
    verdict="does not hold",
    correct=r"The substitution gives $\exp(-\frac k2[ε - \log(1+ε)])$. The bound with k/4 is weaker, so it holds too, but it asks for twice the dimensions.",
    function="isentropic.jl.failure_probability",
)
def test_best_exponent():
    best = EPS / (2 * (1 + EPS))
    np.testing.assert_allclose(-(1 + EPS) + 1 / (1 - 2 * best), 0, atol=1e-12)

    def exponent(t):
        return -t * (1 + EPS) - np.log1p(-2 * t) / 2

    for factor in (0.9, 1.1):
        assert (exponent(best * factor) > exponent(best)).all()
    rate = EPS - np.log1p(EPS)
    np.testing.assert_allclose(exponent(best), -rate / 2, rtol=1e-10)
    assert (exponent(best) < -1.9 * rate / 4).all()
    assert (upper_tail(K, EPS) <= np.exp(-K * rate / 2)).all()
    # The exponent k/2 is that of the tail itself: k/4 is wrong by a factor 2 for many dimensions.
    k = 10**5
    assert it.jl.failure_probability(2, k, eps=0.01) == pytest.approx(
        upper_tail(k, 0.01) + lower_tail(k, 0.01)
    )
    slope = -np.log(it.jl.failure_probability(2, k, eps=0.05)) / k
    lower = -0.05 - math.log1p(-0.05)
    assert slope == pytest.approx(min(rate[0], lower) / 2, rel=0.1)


@claim(
    "9588-23",
    says=r"$ε - \log(1+ε) \ge ε^2/(2(1+ε)) \ge ε^2/4$ on (0, 1), so $P[Z \ge 1+ε] \le e^{-kε^2/16}$.",
    verdict="holds",
    function="isentropic.jl.failure_probability",
)
@claim(
    "9588-24",
    says=r"$P[Z \le 1-ε] \le e^{-kε^2/16}$.",
    verdict="holds",
    function="isentropic.jl.failure_probability",
)
@claim(
    "9588-25",
    says=r"$P[|Z-1| > ε] \le 2e^{-kε^2/16}$.",
    verdict="holds",
    correct=r"The bound is weak: $2e^{-k(ε^2/4 - ε^3/6)}$ holds too (Dasgupta & Gupta).",
    function="isentropic.jl.failure_probability",
)
def test_simple_tails():
    fine = np.linspace(1e-3, 1, 500)
    assert (fine - np.log1p(fine) >= fine**2 / (2 * (1 + fine))).all()
    assert (fine**2 / (2 * (1 + fine)) >= fine**2 / 4 * (1 - 1e-12)).all()
    bound = np.exp(-K * EPS**2 / 16)
    assert (upper_tail(K, EPS) <= bound).all()
    assert (lower_tail(K, EPS) <= bound).all()
    both = it.jl.failure_probability(2, K, eps=EPS)
    np.testing.assert_allclose(both, upper_tail(K, EPS) + lower_tail(K, EPS), rtol=1e-9)
    assert (both <= 2 * bound).all()
    assert (both <= 2 * np.exp(-K * (EPS**2 / 4 - EPS**3 / 6))).all()


@functools.cache
def ratios_of_the_union_bound():
    delta = np.asarray([0.1, 0.01, 1e-4])[:, None, None]
    n = np.asarray([1e2, 1e3, 1e4, 1e6, 1e9])[:, None]
    k, exact = (it.jl.min_dim(n, eps=EPS[:-1], delta=delta, method=m) for m in ("chernoff", "exact"))
    ratio = k / exact
    return {
        "ratio": [ratio.min(), ratio.max()],
        "eps": [EPS[0], EPS[-2]],
        "delta": [delta.min(), delta.max()],
    }


@claim(
    "9588-26",
    says=r"$P[\text{any of n points' pairs fails}] \le n^2 \cdot 2e^{-kε^2/16}$.",
    verdict="holds",
    function="isentropic.jl.failure_probability",
)
@claim(
    "9588-27",
    says=r"It is enough that $2n^2 e^{-kε^2/16} \le δ$.",
    verdict="holds",
    function="isentropic.jl.failure_probability",
)
@claim(
    "9588-28",
    says=r"$k \ge \frac{16}{ε^2}\log\frac{2n^2}δ$.",
    verdict="holds",
    correct="The bound is valid. It is between @{ratio:.1f} times the k of the exact tail, for n from 10² to 10⁹, δ between @{delta}, and ε between @{eps}.",
    numbers=ratios_of_the_union_bound,
    function="isentropic.jl.min_dim",
)
def test_union_bound():
    delta = np.asarray([0.1, 0.01, 1e-4])[:, None, None]
    n = np.asarray([1e2, 1e3, 1e4, 1e6, 1e9])[:, None]
    eps = EPS[:-1]
    k = it.jl.min_dim(n, eps=eps, delta=delta, method="chernoff")
    np.testing.assert_array_equal(k, np.ceil(16 / eps**2 * np.log(2 * n**2 / delta)))
    assert (2 * n**2 * np.exp(-k * eps**2 / 16) <= delta).all()
    assert (it.jl.failure_probability(n, k, eps=eps) <= delta).all()
    # The bound of 26 is above that of the exact tails everywhere, where it says something at all.
    rough = it.jl.failure_probability(n, k, eps=eps, method="chernoff")
    np.testing.assert_allclose(rough, 2 * n**2 * np.exp(-k * eps**2 / 16), rtol=1e-9)
    exact = it.jl.min_dim(n, eps=eps, delta=delta)
    pairs = n * (n - 1) / 2
    assert (pairs * (upper_tail(exact, eps) + lower_tail(exact, eps)) <= delta * (1 + 1e-9)).all()
    low, high = ratios_of_the_union_bound()["ratio"]
    assert (k / exact).min() == pytest.approx(low)
    assert (k / exact).max() == pytest.approx(high)
