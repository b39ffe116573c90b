"""The mean entropy of attention: the derivation in archives/8823 and its annotation, and what was measured.

β is the factor on scores of unit variance, κ = λd the factor on cosines.
"""

import functools
import math

import numpy as np
import pytest
from scipy import integrate, optimize, special
from vmf import von_mises_fisher

import isentropic as it
from isentropic import laws, theory
from ledger import claim

pytestmark = pytest.mark.host

POWERS = [2**i for i in range(6, 14)]


def gaussian_logits(n, beta, rows=300):
    return beta * np.random.default_rng(110).normal(size=(rows, n))


def cosines(n, d, rows):
    """Of uniform directions in d dimensions with a fixed one."""
    return 2 * np.random.default_rng(111).beta((d - 1) / 2, (d - 1) / 2, size=(rows, n)) - 1


def mean_and_error(x):
    return float(x.mean()), float(x.std() / math.sqrt(x.size))


def log_normalizer(logits):
    m = logits.max(-1, keepdims=True)
    return m[..., 0] + np.log(np.exp(logits - m).sum(-1))


def expected_log_normalizer(n, beta):
    """E log Σ e^{βs} = ∫ (e^{−t} − L(t)ⁿ) dt/t with L(t) = E exp(−t e^{βs}), s normal, over u = log t."""
    s, u = np.linspace(-10, 10, 401), np.linspace(-60, 12, 1441)
    density = np.exp(-s * s / 2)
    laplace = np.exp(-np.exp(np.minimum(u[:, None] + beta * s, 300.0))) @ density / density.sum()
    return np.trapezoid(np.exp(-np.exp(u)) - laplace**n, u)


def cosine_integral(kappa, d, power):
    """The logarithm of ∫ e^{κs}(1 − s²)^power ds over (−1, 1)."""
    peak = optimize.minimize_scalar(
        lambda s: -kappa * s - power * math.log1p(-s * s), bounds=(-0.999, 0.999)
    ).x
    height = kappa * peak + power * math.log1p(-peak * peak)
    area = integrate.quad(
        lambda s: math.exp(kappa * s + power * math.log1p(-s * s) - height),
        -1,
        1,
        points=[peak],
        limit=200,
    )[0]
    return height + math.log(area)


@functools.cache
def at_initialization(n, law=None, d=64):
    """Mean entropy for queries and keys of d independent standard normal features, at 1/√d times a law.

    Given the query the scores are normal, with the variance ‖q‖²/d: the mean over χ².
    """
    half_square, weights = special.roots_genlaguerre(24, d / 2 - 1)
    factor = 1.0 if law is None else law(n)
    entropies = theory.gaussian_entropy(n, factor * np.sqrt(2 * half_square / d))
    return float(weights @ entropies / weights.sum())


def draw_at_initialization(n, draws=16, queries=25):
    """Independent draws of queries and keys, so that the spread over the draws is that of their means."""
    rng = np.random.default_rng(11)
    for _ in range(draws):
        yield tuple(rng.normal(size=(m, 64)).astype("float32") for m in (queries, n))


def stationary(kappa, d):
    return (-(d - 3) + math.sqrt((d - 3) ** 2 + 4 * kappa**2)) / (2 * kappa)


@claim(
    "8823-3.1",
    says="At a fixed scale the entropy grows with n.",
    verdict="holds with a condition",
    correct="This holds on average over keys of one kind. A single key with a large score lowers the entropy.",
    function="isentropic.theory.gaussian_entropy",
)
def test_entropy_grows_with_n():
    for beta in (0.5, 1.0, 3.0, 6.0):
        h = [theory.gaussian_entropy(n, beta) for n in (16, 64, 256, 1024)]
        assert (np.diff(h) > 0.01).all()
    before = it.entropy_from_logits(np.zeros(10))
    assert it.entropy_from_logits(np.asarray([0.0] * 10 + [9.0])) < before - 2


@claim(
    "8823-17",
    says=r"$E\log Z_i = E\log\sum_k e^{λs_{ik}}$ for independent scores.",
    verdict="definition",
    correct=r"Exact at any n: $\int_0^\infty(e^{-t}-L(t)^n)\,dt/t$ with $L(t) = E\exp(-te^{λs})$; and $EH = (1-β\,\partial_β)E\log Z$.",
    function="isentropic.theory.gaussian_entropy",
)
def test_exact_mean():
    step = 1e-3
    for n, beta in ((64, 1.0), (64, 4.0), (1000, 2.0)):
        logits = gaussian_logits(n, beta, rows=3000)
        mean, error = mean_and_error(log_normalizer(logits))
        exact, up, down = (expected_log_normalizer(n, b) for b in (beta, beta + step, beta - step))
        assert abs(mean - exact) < 4 * error
        entropy = exact - beta * (up - down) / (2 * step)
        assert theory.gaussian_entropy(n, beta) == pytest.approx(entropy, abs=1e-3)
        mean, error = mean_and_error(it.entropy_from_logits(logits))
        assert abs(mean - entropy) < 4 * error


@claim(
    "8823-18",
    says=r"$\log\sum_k e^{λs_k} = \log n + \log\left(\frac1n\sum_k e^{λs_k}\right)$.",
    verdict="holds",
    function="isentropic.attention_state",
)
def test_mean_of_exponentials():
    q, k = np.random.default_rng(112).normal(size=(2, 50, 4))
    e = np.exp(q @ k.T / 2)
    log_z = it.attention_state(q, k, law=None).log_normalizer()
    np.testing.assert_allclose(log_z, math.log(50) + np.log(e.mean(-1)), rtol=1e-12)


@claim(
    "8823-19",
    says=r"$\frac1n\sum_k e^{λs_k} \to E\,e^{λs}$.",
    verdict="holds with a condition",
    correct=r"λ is fixed and n → ∞. For Gaussian scores it needs $λσ < \sqrt{2\log n}$; beyond that the sum is that of its few largest terms, far "
    "below its expectation.",
)
@claim(
    "8823-post-7",
    says=r"$\sum_j e^{λq_i\cdot k_j} \approx n\,E_j\,e^{λq_i\cdot k_j}$.",
    verdict="holds with a condition",
    correct=r"$λσ < \sqrt{2\log n}$ for Gaussian scores; relative standard deviation $\sqrt{(e^{λ^2σ^2}-1)/n}$.",
)
@claim(
    "8823-20",
    says=r"$E\log Z_i \approx \log n + \log E\,e^{λs}$.",
    verdict="holds with a condition",
    correct=r"$λσ < \sqrt{2\log n}$ for Gaussian scores; first correction $-(e^{λ^2σ^2}-1)/(2n)$.",
)
@claim(
    "8823-post-8",
    says=r"$\mathcal H_i \approx \log n + \log E\,e^{λs} - λ\,E[e^{λs}s]/E\,e^{λs}$.",
    verdict="holds with a condition",
    correct=r"$λσ < \sqrt{2\log n}$ for Gaussian scores, where it is $\log n - λ^2σ^2/2$. Beyond that the formula is negative, and the entropy "
    r"tends, slowly, to $ψ(1) - ψ(1 - \sqrt{2\log n}/(λσ))$ from below.",
    function="isentropic.theory.gaussian_entropy",
)
def test_law_of_large_numbers():
    n, rows = 4096, 400
    for beta in (0.5, 1.0):
        logits = gaussian_logits(n, beta, rows)
        ratio = np.exp(logits).mean(-1) / math.exp(beta**2 / 2)
        spread = math.sqrt(math.expm1(beta**2) / n)
        assert ratio.std() == pytest.approx(spread, rel=0.2)
        assert abs(ratio - 1).max() < 6 * spread
        log_z, error = mean_and_error(log_normalizer(logits))
        assert abs(log_z - math.log(n) - beta**2 / 2 + math.expm1(beta**2) / (2 * n)) < 4 * error
        h, error = mean_and_error(it.entropy_from_logits(logits))
        annealed = theory.gaussian_entropy(n, beta, method="annealed")
        assert annealed == pytest.approx(math.log(n) - beta**2 / 2)
        assert abs(h - annealed) < 4 * error + 1e-3

    # Frozen: β = 6 is above √(2 log n) = 4.08.
    logits = gaussian_logits(n, 6.0, rows)
    assert np.median(np.exp(logits).mean(-1)) < math.exp(18) / 50
    h, error = mean_and_error(it.entropy_from_logits(logits))
    assert math.log(n) - 18 < -9
    assert abs(h - theory.gaussian_entropy(n, 6.0)) < 4 * error
    # The limit is far away, and comes nearer with n.
    limit = theory.frozen_entropy(1.5)
    below = [
        limit - theory.gaussian_entropy(m, 1.5 * math.sqrt(2 * math.log(m))) for m in (64, 10**4, 10**9)
    ]
    assert 1.5 > below[0] > below[1] + 0.2 > below[2] + 0.4 > 0.4


@claim(
    "8823-21",
    says=r"$\bar s_i \approx E[s] + cσ$ with c = O(1).",
    verdict="does not hold",
    correct=r"For Gaussian scores c = λσ, up to $\sqrt{2\log n}$: $\bar s_i \approx μ + λσ^2$.",
    function="isentropic.theory.gaussian_entropy",
)
@claim(
    "8823-22",
    says=r"$H_i \approx \log n + \log E\,e^{λs} - λ(E[s] + cσ)$ with constant c.",
    verdict="does not hold",
    correct=r"With c = λσ it is $\log n - λ^2σ^2/2$.",
    function="isentropic.theory.gaussian_entropy",
)
@claim(
    "8823-23",
    says=r"$E\,e^{λs} = \exp(λμ + λ^2σ^2/2)$ for $s \sim \mathcal N(μ,σ^2)$.",
    verdict="holds",
)
@claim(
    "8823-24",
    says=r"$H_i \approx \log n + λ^2σ^2/2 - λcσ$.",
    verdict="does not hold",
    correct=r"$H_i \approx \log n - λ^2σ^2/2$: the quadratic term is negative. First correction $\frac{(2β^2-1)e^{β^2}+1}{2n}$, β = λσ.",
    function="isentropic.theory.gaussian_entropy",
)
def test_gaussian_scores():
    n, rows, mu, sigma = 8192, 200, 0.7, 2.0
    s = mu + sigma * np.random.default_rng(113).normal(size=(rows, n))
    measured = {}
    for lam in (0.25, 0.5, 1.0):
        e = np.exp(lam * s)
        expected = math.exp(lam * mu + lam**2 * sigma**2 / 2)
        assert abs(e.mean() - expected) < 4 * e.std() / math.sqrt(e.size)
        mean_score, error = mean_and_error((e * s).sum(-1) / e.sum(-1))
        assert abs(mean_score - mu - lam * sigma**2) < 4 * error + 0.01 * lam * sigma**2
        beta = lam * sigma
        h, error = mean_and_error(it.entropy_from_logits(lam * s))
        correction = ((2 * beta**2 - 1) * math.exp(beta**2) + 1) / (2 * n)
        assert theory.gaussian_entropy(n, beta, method="first-order") == pytest.approx(
            math.log(n) - beta**2 / 2 + correction
        )
        assert abs(h - theory.gaussian_entropy(n, beta)) < 4 * error
        assert abs(h - (math.log(n) - beta**2 / 2 + correction)) < 4 * error + 0.01
        measured[beta] = h
    # The c that fits at β = 1 is wrong for half and twice of it.
    c = math.log(n) + 1 / 2 - measured[1.0]
    for beta in (0.5, 2.0):
        assert abs(math.log(n) + beta**2 / 2 - c * beta - measured[beta]) > 0.2


@claim(
    "8823-25",
    says=r"$E\,e^{λs} = \int e^{λs}p(s)\,ds$ with $p(s) \propto (1-s^2)^{(d-2)/2}$ for unit vectors.",
    verdict="does not hold",
    correct="The exponent is (d − 3)/2.",
    function="isentropic._special.von_mises_fisher",
)
@claim(
    "8823-31",
    says=r"$I(λ) = \int_{-1}^1 e^{λd\cosθ}\sin^{d-2}θ\,dθ$.",
    verdict="does not hold",
    correct=r"θ runs from 0 to π.",
    function="isentropic._special.von_mises_fisher",
)
@claim(
    "8823-32",
    says=r"$I(λ) = \int_{-1}^1 e^{λds}(1-s^2)^{(d-3)/2}\,ds$.",
    verdict="holds",
    correct=r"$I(λ)/I(0) = Γ(\frac d2)(\frac2κ)^{d/2-1}I_{d/2-1}(κ)$, κ = λd.",
    function="isentropic._special.von_mises_fisher",
)
def test_density_of_the_cosine():
    rows = 200_000
    for d in (3, 8, 64):
        g = np.random.default_rng(114).normal(size=(rows, d)) if d < 64 else None
        s = cosines(rows, d, 1)[0] if g is None else g[:, 0] / np.linalg.norm(g, axis=-1)
        kappa = 2 * math.sqrt(d)
        e = np.exp(kappa * s)
        right, wrong = (
            cosine_integral(kappa, d, power) - cosine_integral(0.0, d, power)
            for power in ((d - 3) / 2, (d - 2) / 2)
        )
        assert von_mises_fisher(d, kappa).log_mgf == pytest.approx(right, rel=1e-6)
        error = 4 * e.std() / e.mean() / math.sqrt(rows)
        assert abs(math.log(e.mean()) - right) < 2 * error
        assert right - wrong > 0.02
        if d == 8:
            assert right - wrong > 4 * error
        angles = [
            integrate.quad(
                lambda t, kappa=kappa, d=d: math.exp(kappa * math.cos(t)) * math.sin(t) ** (d - 2),
                *ends,
            )[0]
            for ends in ((0, math.pi), (-1, 1))
        ]
        assert math.log(angles[0]) == pytest.approx(cosine_integral(kappa, d, (d - 3) / 2), rel=1e-6)
        assert abs(angles[1] / angles[0] - 1) > 0.09


@claim(
    "8823-26",
    says=r"Laplace: $\int e^{λf(s)}g(s)\,ds \approx e^{λf(s^*)}g(s^*)\sqrt{2π/(λ|f''(s^*)|)}$.",
    verdict="holds with a condition",
    correct=r"$s^*$ is inside with $f''(s^*) < 0$, and λ → ∞. Not for f(s) = s, whose second derivative is 0.",
)
def test_laplace():
    errors = []
    for lam in (10, 40, 160):
        area = integrate.quad(
            lambda s, lam=lam: math.exp(lam * (math.cos(s) - 1)) / (1 + s * s), -3, 3, points=[0]
        )[0]
        errors.append(abs(area / math.sqrt(2 * math.pi / lam) - 1))
    assert errors[0] < 0.2
    assert errors[2] < errors[1] / 3 < errors[0] / 9


@claim(
    "8823-27",
    says=r"$\log E\,e^{λs} \approx c_1λ - c_2\log d$ on the unit sphere.",
    verdict="does not hold",
    correct=r"$\lnΓ(\frac d2) + (\frac d2-1)\ln\frac2λ + \ln I_{d/2-1}(λ)$: $λ^2/(2d)$ for small λ, $λ - \frac{d-1}2\logλ + \dots$ for large.",
    function="isentropic._special.von_mises_fisher",
)
def test_log_mgf_is_not_affine():
    for d in (16, 64, 256):
        assert von_mises_fisher(d, 0.01 * d).log_mgf == pytest.approx(0.0001 * d / 2, rel=0.01)
        values = [von_mises_fisher(d, d * x).log_mgf / d for x in (0.1, 1.0, 1.9, 2.8)]
        # An affine function has no second differences.
        assert values[0] - 2 * values[1] + values[2] > 0.2
        slopes = [
            von_mises_fisher(d, k + 1).log_mgf - von_mises_fisher(d, k).log_mgf
            for k in (50.0 * d, 100.0 * d)
        ]
        np.testing.assert_allclose(
            slopes, [1 - (d - 1) / (2 * k) for k in (50.0 * d, 100.0 * d)], atol=1e-3
        )


@claim(
    "8823-29",
    says=r"To hold the entropy takes $λ(n) \propto \log n$.",
    verdict="holds with a condition",
    correct=r"For focused attention: relevant keys that stand out by a gap Δ are held by $λΔ \approx \log n + \log\log n + \text{const}$. Independent Gaussian "
    r"scores need a factor that grows like $\sqrt{\log n}$ in the end: $\sqrt{2\log n}/x$ with $ψ(1)-ψ(1-x) = H$.",
    function="isentropic.theory.needle_entropy",
)
def test_which_law_holds_the_entropy():
    n = np.asarray([2**8, 2**12, 2**16, 2**20])
    gap = 5.0

    def needle(m):
        return optimize.brentq(lambda f: theory.needle_entropy(m, 8, gap * f) - 2.3, 0.8, 10)

    factors = np.asarray([needle(int(m)) for m in n])
    slopes = np.diff(factors) / np.diff(np.log(n))
    # λΔ = log n + log log n + const: proportional to log n but for a correction that falls.
    np.testing.assert_allclose(slopes * gap, 1, atol=0.15)
    assert (np.diff(slopes) < 0).all()
    rest = gap * factors - np.log(n) - np.log(np.log(n))
    assert np.ptp(rest) < 0.15

    target = 4.0
    betas = np.asarray(
        [optimize.brentq(lambda b, m=m: theory.gaussian_entropy(int(m), b) - target, 0.1, 8) for m in n]
    )
    # Above the annealed √(2 (log n − H)), below the limit √(2 log n)/x with ψ(1) − ψ(1 − x) = H.
    x = 1 / optimize.brentq(lambda r: theory.frozen_entropy(r) - target, 1.01, 3)
    assert (betas > np.sqrt(2 * (np.log(n) - target))).all()
    assert (betas < np.sqrt(2 * np.log(n)) / x).all()
    # Not affine in log n: the slope falls.
    slopes = np.diff(betas) / np.diff(np.log(n))
    assert slopes[-1] < 0.8 * slopes[0]
    # What each law does to each: the needle at 512 with log n, and with √log n.
    held, spread = (
        np.ptp([theory.needle_entropy(int(m), 8, 7.5 * law(int(m))) for m in n])
        for law in (laws.LogLength(512), laws.SqrtLogLength(512))
    )
    assert held < 0.2 < 1 < spread


@claim(
    "8823-30",
    says=r"$H_i \approx \log n + \frac{κ^2(\log n)^2σ^2}2 - κcσ\log n$; the first and last term cancel.",
    verdict="does not hold",
    correct=r"$H_i \approx \log n - κ^2σ^2(\log n)^2/2$. Nothing cancels but at one n.",
    function="isentropic.theory.gaussian_entropy",
)
def test_gaussian_scores_under_the_law():
    law = laws.LogLength(512)  # κσ = 1/log 512
    measured = {}
    for n in (512, 8192):
        measured[n], error = mean_and_error(it.entropy_from_logits(gaussian_logits(n, law(n))))
        annealed = theory.gaussian_entropy(n, law(n), method="annealed")
        assert annealed == pytest.approx(math.log(n) - law(n) ** 2 / 2)
        assert abs(measured[n] - annealed) < 4 * error + 0.01
    c = math.log(512) + 1 / 2 - measured[512]
    written = math.log(8192) + law(8192) ** 2 / 2 - c * law(8192)
    assert written - measured[8192] > 0.5


@functools.cache
def sphere_under_the_law():
    n, d = 8192, 64
    kappa = 5 * math.log(n)
    formula = math.log(n) - von_mises_fisher(d, kappa).divergence
    return {"formula": formula, "entropy": theory.sphere_entropy(n, d, kappa)}


@claim(
    "8823-post-9",
    says=r"$\mathcal H_i \approx \log n + \log E_θ e^{λd\cosθ} - λd\,\frac{E_θ[e^{λd\cosθ}\cosθ]}{E_θ e^{λd\cosθ}}$ for keys on a sphere.",
    verdict="holds with a condition",
    correct=r"While it is well above 0: $\log n - KL$ with the divergence of the von Mises–Fisher from the uniform distribution. At d = 64 and $κ = 5\log n$, "
    "where the law does hold the entropy, the formula gives @{formula:.2f} at n = 8192 and the entropy is @{entropy:.2f}.",
    numbers=sphere_under_the_law,
    function="isentropic.theory.sphere_entropy",
)
def test_sphere():
    n, d = 1024, 64
    for kappa in (4.0, 8.0, 16.0):
        h, error = mean_and_error(it.entropy_from_logits(kappa * cosines(n, d, 300)))
        log_mgf = von_mises_fisher(d, kappa).log_mgf
        cosine = von_mises_fisher(d, kappa).mean_cosine
        predicted = math.log(n) + log_mgf - kappa * cosine
        assert theory.sphere_entropy(n, d, kappa, method="annealed") == pytest.approx(predicted)
        assert abs(h - theory.sphere_entropy(n, d, kappa)) < 4 * error
        assert von_mises_fisher(d, kappa).divergence == pytest.approx(kappa * cosine - log_mgf)
        step = 1e-4
        slope = (
            von_mises_fisher(d, kappa + step).log_mgf - von_mises_fisher(d, kappa - step).log_mgf
        ) / (2 * step)
        assert cosine == pytest.approx(slope, rel=1e-5)
        assert abs(h - predicted) < 4 * error + 0.06 * (kappa > 10)
    numbers = sphere_under_the_law()
    kappa = 5 * math.log(8192)
    log_mgf, cosine = von_mises_fisher(d, kappa).log_mgf, von_mises_fisher(d, kappa).mean_cosine
    assert numbers["formula"] == pytest.approx(math.log(8192) + log_mgf - kappa * cosine)
    assert numbers["formula"] < 0
    h, error = mean_and_error(it.entropy_from_logits(kappa * cosines(8192, d, 60)))
    assert abs(h - numbers["entropy"]) < 4 * error


def rate_of_many(lam):
    """KL/κ at κ = λd, d → ∞."""
    s = (math.sqrt(1 + 4 * lam**2) - 1) / (2 * lam)
    return -math.log1p(-s * s) / (2 * lam)


def log_mgf_of_many(lam):
    """Log E e^{κ cos θ}/κ at κ = λd, d → ∞; the mean cosine is the stationary point."""
    return (math.sqrt(1 + 4 * lam**2) - 1) / (2 * lam) - rate_of_many(lam)


@functools.cache
def golden():
    limit = rate_of_many(1.0)
    ends = [optimize.brentq(lambda x: rate_of_many(x) / limit - 0.95, *e) for e in ((0.1, 1), (2, 9))]
    return {
        "limit": limit,
        "ends": ends,
        "usual": von_mises_fisher(64, 8.0).divergence,
        "cosine": (math.sqrt(5) - 1) / 2,
        "exponent": log_mgf_of_many(1.0),
        "where": optimize.brentq(lambda x: log_mgf_of_many(x) - 0.76, 1, 99),
    }


@claim(
    "8823-post-10",
    says=r"$\mathcal H_i \approx \log n - 0.24λd + O(1)$.",
    verdict="holds with a condition",
    correct=r"λ near 1: $KL/κ \to \frac12\lnφ = @{limit:.4f}$ at κ = λd = d → ∞ (φ the golden ratio), within 5 % for λ between @{ends:.3f}. At the usual "
    r"$λ = 1/\sqrt d$, d = 64, the deficit is @{usual:.2f}, not 1.92.",
    numbers=golden,
    function="isentropic._special.von_mises_fisher",
)
def test_the_constant_0_24():
    numbers, d = golden(), 10**6
    assert numbers["limit"] == pytest.approx(math.log((1 + math.sqrt(5)) / 2) / 2)

    def rate(lam):
        return von_mises_fisher(d, lam * d).divergence / (lam * d)

    assert rate(1.0) == pytest.approx(numbers["limit"], rel=1e-5)
    for lam in (0.125, 0.78, 1.0, 2.3, 5.0):
        assert rate(lam) == pytest.approx(rate_of_many(lam), rel=1e-4)
    low, high = numbers["ends"]
    apart = [abs(rate(lam) / numbers["limit"] - 1) for lam in np.linspace(low, high, 50)]
    assert max(apart) == pytest.approx(0.05, rel=1e-3)
    assert all(abs(rate(lam) / numbers["limit"] - 1) > 0.05 for lam in (0.999 * low, 1.001 * high))
    assert numbers["usual"] == pytest.approx(
        8 * von_mises_fisher(64, 8).mean_cosine - von_mises_fisher(64, 8).log_mgf
    )


@claim(
    "8823-33",
    says=r"$h(s) = λds + \frac{d-3}2\log(1-s^2)$ has $h'(s) = λd - \frac{(d-3)s}{1-s^2}$.",
    verdict="holds",
)
@claim(
    "8823-34",
    says=r"$s^* = \frac{λd}{(d-3)+λd} \approx 1 - \frac{d-3}{λd}$.",
    verdict="does not hold",
    correct=r"$s^* = \frac{-(d-3)+\sqrt{(d-3)^2+4κ^2}}{2κ} \approx 1 - \frac{d-3}{2κ}$, κ = λd.",
    function="isentropic._special.von_mises_fisher",
)
@claim(
    "8823-35",
    says=r"$h''(s^*) = -\frac{(d-3)(1+s^{*2})}{(1-s^{*2})^2} \approx -\frac{(λd)^2}{2(d-3)}$.",
    verdict="does not hold",
    correct=r"The equality holds. The limit is $-2(λd)^2/(d-3)$.",
)
@claim(
    "8823-36",
    says=r"$I(λ) \approx e^{h(s^*)}\sqrt{2π/|h''|} = e^{λd-0.24λd}\sqrt{2π(d-3)/(λd)^2}$.",
    verdict="does not hold",
    correct=r"Laplace's formula holds, at the $s^*$ above. At κ = d its exponent is @{exponent:.3f}d for large d, not 0.76d; it is 0.76κ near κ = @{where:.2f}d alone.",
    numbers=golden,
    function="isentropic._special.von_mises_fisher",
)
@claim(
    "8823-37",
    says=r"$\log I(λ) \approx 0.76λd - \log(λd) + O(1)$.",
    verdict="does not hold",
    correct=r"$\log I(λ)/I(0)$ is $\ln E\,e^{κ\cosθ}$, @{exponent:.3f}d at κ = d, for large d.",
    numbers=golden,
    function="isentropic._special.von_mises_fisher",
)
def test_stationary_point():
    numbers = golden()
    many = 10**6
    assert von_mises_fisher(many, many).log_mgf / many == pytest.approx(numbers["exponent"], abs=1e-5)
    kappa = numbers["where"] * many
    assert von_mises_fisher(many, kappa).log_mgf / kappa == pytest.approx(0.76, abs=1e-5)
    for d, lam in ((64, 0.125), (64, 1.0), (1000, 1.0), (64, 50.0)):
        kappa = lam * d

        def h(s, kappa=kappa, d=d):
            return kappa * s + (d - 3) / 2 * math.log1p(-s * s)

        s, step = stationary(kappa, d), 1e-6
        gradient = kappa - (d - 3) * s / (1 - s * s)
        assert abs(gradient) < 1e-6 * kappa
        other = 0.8 * s
        numeric = (h(other + step) - h(other - step)) / (2 * step)
        assert numeric == pytest.approx(kappa - (d - 3) * other / (1 - other**2), rel=1e-4)
        written = kappa / (d - 3 + kappa)
        assert abs(kappa - (d - 3) * written / (1 - written**2)) > 0.02 * kappa or lam < 0.5
        curvature = -(d - 3) * (1 + s * s) / (1 - s * s) ** 2
        assert curvature == pytest.approx(
            (h(s + 1e-4 * (1 - s)) - 2 * h(s) + h(s - 1e-4 * (1 - s))) / (1e-4 * (1 - s)) ** 2, rel=0.01
        )
        laplace = h(s) + math.log(2 * math.pi / -curvature) / 2
        exact = cosine_integral(kappa, d, (d - 3) / 2)
        assert abs(laplace - exact) < 0.05
        if lam == 1.0:
            written = 0.76 * kappa + math.log(2 * math.pi * (d - 3)) / 2 - math.log(kappa)
            assert written - exact > 0.3 * d
            assert von_mises_fisher(d, kappa).log_mgf / d == pytest.approx(
                numbers["exponent"], abs=0.01
            )
            assert von_mises_fisher(d, kappa).mean_cosine == pytest.approx(s, abs=0.02)
            assert abs(0.76 * kappa - math.log(kappa) - exact) > 0.3 * d
        if lam == 50.0:
            assert s == pytest.approx(1 - (d - 3) / (2 * kappa), abs=1e-3)
            assert curvature == pytest.approx(-2 * kappa**2 / (d - 3), rel=0.05)
            assert curvature < 3 * (-(kappa**2) / (2 * (d - 3)))


@functools.cache
def at_the_standard_scale():
    n, d = [64, 128, 256, 512, 1024], 64
    return {
        "deficit": von_mises_fisher(d, 8.0).divergence,
        "many": [theory.sphere_entropy(m, d, 8.0, method="annealed") for m in n],
        "exact": [theory.sphere_entropy(m, d, 8.0) for m in n],
    }


@claim(
    "8823-38",
    says=r"$H_i \approx \log n - 0.24λd - \log(λd)$, from $\bar s \approx 1$.",
    verdict="does not hold",
    correct=r"$\log n - KL$, without the logarithm; at κ = d, for large d, it is $\log n - @{limit:.4f}d$, from $\bar s = @{cosine:.3f}$ and $\log I = @{exponent:.3f}κ$.",
    numbers=golden,
    function="isentropic.theory.sphere_entropy",
)
@claim(
    "8823-60",
    says=r"At $λ = 1/\sqrt{64}$, “measured”: $\bar H \approx \log n - 1.92$; 2.24, 2.93, …, 5.01 for n = 64 … 1024.",
    verdict="does not hold",
    correct=r"$\log n - @{deficit:.3f}$ for many keys: @{many:.2f}. Exactly @{exact:.2f}. (The table is computed, not measured.)",
    numbers=at_the_standard_scale,
    function="isentropic.theory.sphere_entropy",
)
def test_standard_scale():
    numbers, n, d = at_the_standard_scale(), [64, 128, 256, 512, 1024], 64
    assert numbers["deficit"] == pytest.approx(
        8 * von_mises_fisher(d, 8).mean_cosine - von_mises_fisher(d, 8).log_mgf
    )
    np.testing.assert_allclose(numbers["many"], np.log(n) - numbers["deficit"])
    for m, exact in zip(n, numbers["exact"], strict=True):
        h, error = mean_and_error(it.entropy_from_logits(8.0 * cosines(m, d, 2000)))
        assert exact == theory.sphere_entropy(m, d, 8.0)
        assert abs(h - exact) < 4 * error
        assert exact > math.log(m) - 1.92 + 1.3
        assert exact > math.log(m) - 0.24 * 8 - math.log(8) + 3
    many = 10**6
    assert von_mises_fisher(many, many).mean_cosine == pytest.approx(golden()["cosine"], abs=1e-5)
    assert von_mises_fisher(many, many).log_mgf / many == pytest.approx(golden()["exponent"], abs=1e-5)
    assert von_mises_fisher(many, many).divergence / many == pytest.approx(golden()["limit"], abs=1e-5)


@functools.cache
def random_initialization():
    n, law = [64, 512, 8192], laws.LogLength(512)
    return {
        "standard": [at_initialization(m) for m in n],
        "law": [at_initialization(m, law) for m in n],
    }


@claim(
    "8823-7.2",
    says="With the law the entropy stays near 2.24 for all n.",
    verdict="does not hold",
    correct="At random initialization (d = 64) it is @{law:.2f} for n = 64, 512 and 8192: not held. It is held where attention is focused (29).",
    numbers=random_initialization,
    function="isentropic.attention_entropy",
)
def test_random_initialization():
    numbers = random_initialization()
    for i, n in enumerate((64, 512, 8192)):
        for name, law in (("standard", None), ("law", laws.LogLength(512))):
            h = [it.attention_entropy(q, k, law=law).mean() for q, k in draw_at_initialization(n)]
            h, error = mean_and_error(np.asarray(h))
            assert error < 0.02
            assert abs(h - numbers[name][i]) < 4 * error
    assert min(numbers["law"]) > 2.24 + 1.5
    assert np.ptp(numbers["law"]) > 4


@functools.cache
def bases():
    return {f"base_{base}": at_initialization(8192, laws.LogLength(base)) for base in (64, 512)}


@claim(
    "9588-post-base",
    says="The base 512 may be used for any training length; it hardly matters.",
    verdict="holds with a condition",
    correct="Another base multiplies the factor by the same number at every n. So weights that are trained for one base have equals for every other. Whether training finds them is "
    "another question: in [one experiment](experiments-claims.md) the base changed the accuracy by several points. On a fixed model the base is the "
    "strength of the law: at random initialization and n = 8192 the entropy is @{base_512:.2f} with the base 512 and @{base_64:.2f} with 64.",
    numbers=bases,
    function="isentropic.laws.LogLength",
)
def test_base():
    for base in (64, 512):
        law = laws.LogLength(base)
        h = [it.attention_entropy(q, k, law=law).mean() for q, k in draw_at_initialization(8192)]
        h, error = mean_and_error(np.asarray(h))
        assert error < 0.04
        assert abs(h - bases()[f"base_{base}"]) < 4 * error
    rng = np.random.default_rng(115)
    q, k = (rng.normal(size=(m, 64)).astype("float32") for m in (400, 8192))
    # Queries trained for one base, times the ratio of the logarithms, are queries for the other.
    ratio = math.log(64) / math.log(512)
    for n in (2, 100, 3000):
        np.testing.assert_allclose(
            it.attention_entropy(q * np.float32(ratio), k[:n], law=laws.LogLength(64)),
            it.attention_entropy(q, k[:n], law=laws.LogLength(512)),
            rtol=1e-4,
        )


def entropies_on_the_sphere(kappa, d=64):
    law = laws.AffineLog(kappa / math.sqrt(d))
    # The factor is on 1/√d, and q·k = d·cos.
    return [theory.sphere_entropy(n, d, law(n) * math.sqrt(d)) for n in POWERS]


@functools.cache
def on_the_sphere():
    written, usual = entropies_on_the_sphere(1 / 0.24), 8 / math.log(512)
    standard = entropies_on_the_sphere(usual)
    return {
        "low": min(written),
        "high": max(written),
        "range": np.ptp(written),
        "focused": max(np.ptp(entropies_on_the_sphere(kappa)) for kappa in np.linspace(5, 6.5, 7)),
        "usual": usual,
        "growth": standard[-1] - standard[0],
    }


@claim(
    "8823-39",
    says=r"To cancel $\log n$: $0.24λd \approx \log n$.",
    verdict="does not hold",
    correct="That would make the entropy 0, by a formula that does not hold there. At d = 64 the entropy is @{low:.2f} to @{high:.2f} for n from 64 to 8192.",
    numbers=on_the_sphere,
    function="isentropic.theory.sphere_entropy",
)
@claim(
    "8823-40",
    says=r"$λ = \frac{\log n}{0.24d}$.",
    verdict="holds with a condition",
    correct=r"It holds as a law of the form $κ\log n/d$, but not for its constant: see 11 of the post. At d = 64 it holds the entropy within @{range:.2f} for n from 64 to 8192.",
    numbers=on_the_sphere,
    function="isentropic.laws.AffineLog",
)
@claim(
    "8823-post-11",
    says=r"$λ = κ\log n/d$ holds the entropy.",
    verdict="holds with a condition",
    correct=r"κ must be large enough that attention is focused: at d = 64 the entropy stays within @{focused:.2f} for n from 64 to 8192 with κ from 5 to 6½. With "
    r"$κ = \sqrt d/\log512 = @{usual:.2f}$, the standard scale at 512, it grows by @{growth:.2f}.",
    numbers=on_the_sphere,
    function="isentropic.laws.AffineLog",
)
def test_laws_on_the_sphere():
    d, numbers, found = 64, on_the_sphere(), {}
    for kappa in (1 / 0.24, 5.0, numbers["usual"]):
        law = laws.AffineLog(kappa / math.sqrt(d))
        for n in POWERS[::7]:
            strength = kappa * math.log(n)
            assert law(n) * math.sqrt(d) == pytest.approx(strength)
            found[kappa, n] = theory.sphere_entropy(n, d, strength)
            measured, error = mean_and_error(it.entropy_from_logits(strength * cosines(n, d, 300)))
            assert abs(measured - found[kappa, n]) < 4 * error
    written, usual = ([found[kappa, n] for n in POWERS[::7]] for kappa in (1 / 0.24, numbers["usual"]))
    assert [min(written), max(written), np.ptp(written)] == pytest.approx(
        [numbers[name] for name in ("low", "high", "range")]
    )
    assert np.ptp(usual) == pytest.approx(numbers["growth"])
    assert numbers["focused"] < numbers["range"] / 2


@functools.cache
def where_the_constants_agree():
    return {
        "d": round((math.log(512) / 0.24) ** 2),
        "factor": laws.AffineLog(1 / 0.24 / 8)(512) / laws.LogLength(512)(512),
    }


@claim(
    "8823-41",
    says=r"$\frac{\log n}{0.24d} = \frac{\log512}{0.24d}\cdot\frac{\log n}{\log512} = λ_0\frac{\log n}{\log512}$ with $λ_0 = 1/\sqrt d$.",
    verdict="does not hold",
    correct=r"The last equality needs $\sqrt d = \log512/0.24$: d = @{d} alone. For d = 64 the two sides differ by the factor @{factor:.2f}.",
    numbers=where_the_constants_agree,
    function="isentropic.laws.AffineLog",
)
def test_normalization():
    numbers = where_the_constants_agree()
    assert numbers["d"] == pytest.approx((math.log(512) / 0.24) ** 2, abs=0.5)
    for n in (64, 512, 8192):
        expected = laws.LogLength(512)(n)
        assert laws.AffineLog(1 / 0.24 / math.sqrt(numbers["d"]))(n) == pytest.approx(
            expected, rel=1e-3
        )
        assert laws.AffineLog(1 / 0.24 / 8)(n) == pytest.approx(numbers["factor"] * expected)


def slopes(factor):
    """The slopes dH/d log n for Gaussian scores, between 0.95 n and 1.05 n."""
    found = []
    for n in (512, 4096, 32768):
        ends = round(1.05 * n), round(0.95 * n)
        h = [theory.gaussian_entropy(m, factor(m)) for m in ends]
        found.append((h[0] - h[1]) / math.log(ends[0] / ends[1]))
    return found


@functools.cache
def slopes_by_factor():
    law, ends = laws.LogLength(512), (16, 10**15)
    return {
        "law": slopes(law),
        "standard": slopes(lambda n: 1.0),
        "ends": [theory.gaussian_entropy(n, law(n)) for n in ends],
    }


@claim(
    "8823-49",
    says=r"With the law $|\partial H_i/\partial n| = O(1/n)$: the derivative tends to 0.",
    verdict="holds",
    correct=r"It says nothing about invariance: $\partial\log n/\partial n = 1/n$, so the standard scale satisfies it too, and so does an entropy that grows like $\log n$. For Gaussian "
    r"scores and the base 512, $dH/d\log n$ is @{law:.2f} at n = 512, 4096 and 32 768, where the standard scale has @{standard:.2f}. The entropy is @{ends:.1f} nats at n = 16 and $10^{15}$.",
    numbers=slopes_by_factor,
    function="isentropic.theory.gaussian_entropy",
)
def test_slope():
    law, step = laws.LogLength(512), 1e-3
    # n · |∂H/∂n| is bounded for the law, for the standard scale, and for others. None of them holds H.
    n = np.geomspace(16, 1e15, 200)
    for factor in (law(n), np.ones(200), np.full(200, 3.0), np.sqrt(law(n))):
        h = theory.gaussian_entropy(n, factor)
        assert np.abs(np.diff(h) / np.diff(np.log(n))).max() < 1 + 1e-9
        assert np.ptp(h) > 10
    # Beyond that: the limit log n − β²/2 up to β = √(2 log n), which is log n = 2 log² 512, and then
    # the frozen one, which falls.
    log_n = np.linspace(1, 2 * math.log(512) ** 2)
    assert np.abs(np.gradient(log_n - (log_n / math.log(512)) ** 2 / 2, log_n)).max() <= 1
    log_n = np.geomspace(2.5 * math.log(512) ** 2, 1e6, 300)
    frozen = theory.frozen_entropy(log_n / math.log(512) / np.sqrt(2 * log_n))
    assert np.abs(np.gradient(frozen, log_n)).max() < 1
    start, end = slopes_by_factor()["ends"]
    assert end > start + 15
    found = slopes_by_factor()["law"], slopes_by_factor()["standard"]
    for n, slope, standard in zip((512, 4096, 32768), *found, strict=True):
        h = [theory.gaussian_entropy(x, law(x)) for x in (n * math.exp(step), n * math.exp(-step))]
        assert slope == pytest.approx((h[0] - h[1]) / (2 * step), abs=1e-3)
        assert slope == pytest.approx(1 - law(n) ** 2 / math.log(n), abs=0.02)  # of log n − β²/2
        assert standard == pytest.approx(1, abs=0.005)
        up, down = (
            mean_and_error(it.entropy_from_logits(gaussian_logits(m, law(m)))) for m in (n, n // 2)
        )
        measured = (up[0] - down[0]) / math.log(2)
        assert abs(measured - slope) < 4 * math.hypot(up[1], down[1]) / math.log(2) + 0.05


def mean_collision(n, beta):
    """E Σ p² = n ∫₀^∞ t E[e^{2x − te^x}] (E e^{−te^x})ⁿ⁻¹ dt for logits x of the deviation β, u = log t."""
    s, u = np.linspace(-10, 10, 801), np.linspace(-60, 12, 1441)
    density = np.exp(-s * s / 2)
    density /= density.sum()
    x = u[:, None] + beta * s
    small = np.exp(-np.exp(np.minimum(x, 300.0)))
    squares = (np.exp(2 * np.minimum(x, 300.0)) * small) @ density
    return n * np.trapezoid(squares * (small @ density) ** (n - 1), u)


@functools.cache
def without_a_base():
    law, n = laws.preset("chiang-cholak"), [20, 512, 8192]
    return {
        "entropy": [theory.gaussian_entropy(m, law(m)) for m in n],
        "mobility": [1 - mean_collision(m, law(m)) for m in n],
    }


@claim(
    "8823-post-12",
    says=r"Chiang & Cholak's $\frac{\log n}{\sqrt d}$ (no base): too large for large n, so that gradients vanish.",
    verdict="holds with a condition",
    correct=r"For scores of unit variance the weights are frozen on a few keys from $n = e^2$ on. At n = 20, 512 and 8192 the entropy is @{entropy:.2f}, and the gradient, of the order "
    r"$1 - \sum p^2$, falls slowly: @{mobility:.2f}.",
    numbers=without_a_base,
    function="isentropic.laws.preset",
)
def test_no_base():
    law = laws.preset("chiang-cholak")
    assert law(7) < math.sqrt(2 * math.log(7))
    assert law(8) > math.sqrt(2 * math.log(8))
    for n, entropy, mobility in zip((20, 512, 8192), *without_a_base().values(), strict=True):
        logits = gaussian_logits(n, law(n), rows=800)
        h, error = mean_and_error(it.entropy_from_logits(logits))
        assert abs(h - entropy) < 4 * error
        collision, error = mean_and_error(np.exp(-it.entropy_from_logits(logits, order=2)))
        assert abs(1 - collision - mobility) < 4 * error
        assert error < 0.02
    unit = float(it.entropy_from_logits(gaussian_logits(8192, 1.0, rows=20)).mean())
    assert unit > 8.4


@functools.cache
def focused_and_random():
    n, law, gap = [512, 1024, 2048, 4096], laws.LogLength(512), 7.5
    return {
        "gap": gap,
        "standard": [theory.needle_entropy(m, 8, gap) for m in n],
        "law": [theory.needle_entropy(m, 8, gap * law(m)) for m in n],
        "initial": [at_initialization(m) for m in n],
        "initial_law": [at_initialization(m, law) for m in n],
    }


@claim(
    "9588-8.3",
    says="“Mean entropy” for n = 512 … 4096: standard softmax 2.34, 3.05, 3.76, 4.47; with the law 2.34, 2.41, 2.48, 2.55.",
    verdict="does not hold",
    correct="No model of the scores here gives these numbers, and no experiment is described. Only in kind is it like focused attention: with 8 keys at the gap @{gap} the standard scale "
    "gives @{standard:.2f}, and the law @{law:.2f}. At random initialization: @{initial:.2f}, and @{initial_law:.2f}.",
    numbers=focused_and_random,
    function="isentropic.theory.needle_entropy",
)
def test_reported_entropies():
    n, numbers, law = (512, 1024, 2048, 4096), focused_and_random(), laws.LogLength(512)
    for m, standard, held in zip(n, numbers["standard"], numbers["law"], strict=True):
        logits = np.where(np.arange(m) < 8, numbers["gap"], 0.0)
        assert standard == pytest.approx(float(it.entropy_from_logits(logits)))
        assert held == pytest.approx(float(it.entropy_from_logits(law(m) * logits)))
    assert np.ptp(numbers["law"]) < 0.04
    # Models with 2.34 nats at n = 512: none has both columns, to within far more than their rounding.
    claimed = np.asarray([[2.34, 3.05, 3.76, 4.47], [2.34, 2.41, 2.48, 2.55]])
    lengths = np.asarray(n, dtype=float)
    candidates = [
        ("gaussian", {}, theory.gaussian_entropy, (), 1.0),
        *(("sphere", {"d": d}, theory.sphere_entropy, (d,), d**0.5) for d in (3, 4, 8, 16, 64)),
        *(("tied", {"d": d}, theory.tied_entropy, (d,), 1.0) for d in (8, 16, 64, 256)),
        *(
            ("needle", {"n_relevant": k, "gap": 1.0}, theory.needle_entropy, (k,), 1.0)
            for k in range(1, 11)
        ),
    ]
    for model, parameters, entropy, arguments, unit in candidates:
        strength = unit * theory.invariant_factor(512, 2.34, model=model, **parameters)
        found = [entropy(lengths, *arguments, strength * x) for x in (1.0, law(lengths))]
        assert np.abs(np.asarray(found) - claimed)[:, 0].max() < 0.005
        assert np.abs(np.asarray(found) - claimed).max() > 0.3
    for m, standard, held in zip(n, numbers["initial"], numbers["initial_law"], strict=True):
        for expected, own in ((standard, None), (held, law)):
            h = [it.attention_entropy(q, k, law=own).mean() for q, k in draw_at_initialization(m)]
            h, error = mean_and_error(np.asarray(h))
            assert abs(h - expected) < 4 * error
