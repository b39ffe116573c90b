"""Annotated derivation of archives/9588, sections 6 and 7: entropy and information of projections."""

import math

import numpy as np
import pytest
from scipy.stats import multivariate_normal

import isentropic as it
from ledger import claim

pytestmark = pytest.mark.host

GAUSSIAN = math.log(2 * math.pi * math.e) / 2  # per dimension of unit variance


def logdet(a):
    return np.linalg.slogdet(a)[1]


@claim(
    "9588-59",
    says=r"The uniform distribution in d dimensions has $H = \frac d2\log(2πe) + \frac12\log|Σ|$.",
    verdict="does not hold",
    correct="That is the entropy of the normal distribution, the largest for the covariance Σ. The entropy of a uniform distribution is the logarithm of the volume.",
)
@claim(
    "9588-60",
    says=r"At Σ = I, $H = \frac d2\log(2πe)$, in proportion to d.",
    verdict="holds with a condition",
    correct=r"This holds for the normal distribution. For a cube of unit covariance it is $d\log\sqrt{12}$, also in proportion to d.",
)
def test_differential_entropy():
    a = np.random.default_rng(100).normal(size=(3, 3))
    sigma = a @ a.T
    normal = multivariate_normal(np.zeros(3), sigma).entropy()
    assert normal == pytest.approx(3 * GAUSSIAN + logdet(sigma) / 2)
    for d in (1, 5):
        assert multivariate_normal(np.zeros(d), np.eye(d)).entropy() == pytest.approx(d * GAUSSIAN)
        cube = d * math.log(math.sqrt(12))  # the side of unit variance
        assert cube < d * GAUSSIAN - 0.17 * d


@claim(
    "9588-61",
    says=r"$|H(f(X)) - H(X)| \le O(εd)$.",
    verdict="does not hold",
    correct=r"The two are entropies in k and in d dimensions. For a normal X with Σ = I the difference is $\frac12\log|RR^\top/k| - \frac{d-k}2\log(2πe)$, "
    r"which is of the order d for every ε.",
    function="isentropic.jl.gaussian_projection",
)
def test_entropy_of_a_projection():
    ratios = []
    for d, eps in ((2000, 0.5), (3000, 0.3)):
        k = it.jl.min_dim(30, eps=eps)
        r = it.jl.gaussian_projection(d, k, rng=101).matrix()
        change = logdet(r @ r.T) / 2 - (d - k) * GAUSSIAN
        # The definition, with the covariance of f(X).
        image = multivariate_normal(np.zeros(k), r @ r.T).entropy()
        assert change == pytest.approx(image - d * GAUSSIAN, rel=1e-9)
        ratios.append(abs(change) / (eps * d))
    assert ratios[0] > 1.5
    assert ratios[1] > 1.5 * ratios[0]  # no constant times ε d


@claim(
    "9588-70",
    says=r"$I(X;Y) = H(Y) - H(Y|X) = H(Y)$, since Y = f(X).",
    verdict="holds with a condition",
    correct="X must be discrete. For a continuous X the information is infinite, and H(Y|X) is −∞, not 0.",
    function="isentropic.entropy",
)
@claim(
    "9588-71",
    says=r"$I(X;Y) \le H(X)$.",
    verdict="holds with a condition",
    correct="X must be discrete. A differential entropy may be negative, and is not a bound.",
    function="isentropic.entropy",
)
@claim(
    "9588-72",
    says=r"$I(X;Y) \ge (1-δ)H(X)$ with δ = O(ε), because distances are kept.",
    verdict="does not hold",
    correct="It has nothing to do with ε. For a discrete X a Gaussian map to one dimension keeps all of the information, since it is injective on the points. For a continuous X at a finite resolution, k of d dimensions keep about the share k/d.",
    function="isentropic.jl.gaussian_projection",
)
def test_information_of_a_projection():
    rng = np.random.default_rng(102)
    p = rng.dirichlet(np.ones(50))
    x = rng.normal(size=(50, 20))
    y = it.jl.gaussian_projection(20, 1, rng=103)(x)
    assert len(np.unique(y)) == 50  # so Y has the probabilities of X
    joint = np.diag(p)
    information = it.entropy(p) + it.entropy(joint.sum(0)) - it.entropy(joint.ravel())
    assert information == pytest.approx(it.entropy(p), rel=1e-12)
    merged = np.asarray([p[:25].sum(), p[25:].sum()])  # a map that is not injective
    assert it.entropy(merged) < it.entropy(p) - 1

    # Normal X, with noise of variance s on both sides.
    d, k = 400, it.jl.min_dim(10, eps=0.5)
    assert k < d / 2
    r = it.jl.gaussian_projection(d, k, rng=104).matrix()
    shares = []
    for s in (1e-2, 1e-6, 1e-12):
        whole = d / 2 * math.log1p(1 / s)
        kept = logdet(np.eye(k) + r @ r.T / s) / 2
        shares.append(kept / whole)
        assert whole == pytest.approx(-d / 2 * math.log(s), rel=0.01)  # without bound
    assert all(share < 0.6 for share in shares)
    assert shares[-1] == pytest.approx(k / d, abs=0.02)


@claim(
    "9588-73",
    says=r"$\mathcal I(θ) = E[\partial_θ\log p\,(\partial_θ\log p)^\top]$.",
    verdict="definition",
    correct=r"$Σ^{-1}$ for the mean of a normal distribution.",
)
@claim(
    "9588-74",
    says=r"$\mathcal I_Y(θ) = R^\top\mathcal I_X(θ)R$.",
    verdict="does not hold",
    correct=r"The shapes do not match: R is k × d. For the mean of a normal X, $\mathcal I_Y = R^\top(RΣR^\top)^{-1}R$.",
    function="isentropic.jl.gaussian_projection",
)
@claim(
    "9588-75",
    says=r"$(1-ε)λ_i(\mathcal I_X) \le λ_i(\mathcal I_Y) \le (1+ε)λ_i(\mathcal I_X)$.",
    verdict="does not hold",
    correct=r"$\mathcal I_Y$ has rank k, so d − k of its eigenvalues are 0. For Σ = I the others are 1.",
    function="isentropic.jl.gaussian_projection",
)
def test_fisher_information():
    rng = np.random.default_rng(105)
    d, k, draws = 12, 5, 100_000
    r = it.jl.gaussian_projection(d, k, rng=106).matrix()
    information = r.T @ np.linalg.inv(r @ r.T) @ r
    with pytest.raises(ValueError, match="mismatch"):
        r.T @ np.eye(d) @ r
    # The score of Y = RX, X normal with mean θ, is Rᵀ(RRᵀ)⁻¹(Y − Rθ).
    x = rng.normal(size=(draws, d))
    score = x @ r.T @ np.linalg.inv(r @ r.T) @ r
    error = 4 / math.sqrt(draws)
    assert abs(score.T @ score / draws - information).max() < 2 * error
    assert abs(x.T @ x / draws - np.eye(d)).max() < 2 * error
    values = np.sort(np.linalg.eigvalsh(information))
    np.testing.assert_allclose(values, [0] * (d - k) + [1] * k, atol=1e-10)
