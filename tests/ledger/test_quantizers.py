"""Papers on quantizers: what a random rotation, or the signs of a random projection, gives."""

import functools
import math

import numpy as np
import pytest
from scipy import special
from scipy.stats import norm

import isentropic as it
from ledger import claim

pytestmark = pytest.mark.host

BITS = (1, 2, 3, 4)
MANY = 2**17  # dimensions, where a coordinate is nearly normal


def units(rng, *shape):
    x = rng.normal(size=shape)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def decoded(x, bits, kind, seed):
    f = it.jl.quantizer(x.shape[-1], bits, kind=kind, rng=seed, **sizes(x, kind))
    return f.decode(f.encode(x))


def sizes(x, kind):
    return {"n_components": x.shape[-1]} if kind == "sign" else {}


def two_stages(x, bits, seed):
    """TurboQuant's quantizer for inner products: the last bit is the sign of a projection of the rest."""
    first = decoded(x, bits - 1, "mse", seed) if bits > 1 else np.zeros_like(x)
    return first + decoded(x - first, 1, "sign", seed + 1)


@claim(
    "quantizers-signs",
    says=r"$\sqrt{π/2}\,\|k\|\,⟨Sq, \operatorname{sign}(Sk)⟩/m$ with a Gaussian $S ∈ ℝ^{m×d}$ is an unbiased "
    r"estimate of $⟨q, k⟩$, and its variance is at most $(π/2)\|q\|^2\|k\|^2/m$. (QJL, "
    "[2406.03482](https://arxiv.org/abs/2406.03482))",
    verdict="holds",
    correct=r"This is the part of a Johnson–Lindenstrauss map in these quantizers. The variance is "
    r"$((π/2)\|q\|^2\|k\|^2 - ⟨q, k⟩^2)/m$.",
    function="isentropic.jl.quantizer",
)
def test_signs_of_a_projection(rng):
    d, m, draws = 24, 32, 3000
    q, k = rng.normal(size=(2, d))
    k += 0.7 * q
    found = np.empty(draws)
    for seed in range(draws):
        f = it.jl.quantizer(d, 1, kind="sign", n_components=m, rng=seed)
        found[seed] = f.inner(q[None], f.encode(k[None]))[0, 0]
    variance = (math.pi / 2 * (q @ q) * (k @ k) - (q @ k) ** 2) / m
    assert abs(found.mean() - q @ k) < 4 * math.sqrt(variance / draws)
    squares = (found - q @ k) ** 2
    assert abs(squares.mean() - variance) < 4 * squares.std() / math.sqrt(draws)


@functools.cache
def squared_errors():
    errors = [it.jl.quantizer(MANY, b, rng=0).expected_error().squared for b in (*BITS, 8)]
    bound = math.sqrt(3) * math.pi / 2
    return {
        "errors": errors[:-1],
        "constants": [x * 4**b for b, x in zip((*BITS, 8), errors, strict=True)],
        "bound": bound,
    }


@claim(
    "quantizers-squared",
    says=r"The squared error of unit vectors, rotated and then quantized by one optimal codebook, is at most "
    r"$(\sqrt3\,π/2)\,4^{-b}$, and about 0.36, 0.117, 0.03, 0.009 at 1 to 4 bits. (TurboQuant, "
    "[2504.19874](https://arxiv.org/abs/2504.19874), theorem 1)",
    verdict="holds",
    correct="@{errors:.4f} for many dimensions; times $4^b$: @{constants:.2f} at 1, 2, 3, 4 and 8 bits. "
    "The bound is @{bound:.2f} there, which is the limit for many bits.",
    numbers=squared_errors,
    function="isentropic.jl.quantizer",
)
def test_squared_errors(rng):
    numbers = squared_errors()
    stated = (0.36, 0.117, 0.03, 0.009)
    for bits, x, places in zip(BITS, numbers["errors"], (2, 3, 2, 3), strict=True):
        assert 0 <= x - stated[bits - 1] < 10.0**-places
        x_hat = decoded(vectors := units(rng, 2000, 256), bits, "mse", bits)
        expected = it.jl.quantizer(256, bits, rng=0).expected_error().squared
        assert abs(((vectors - x_hat) ** 2).sum(-1).mean() / expected - 1) < 0.02
    constants = numbers["constants"]
    assert max(constants) < numbers["bound"]
    assert constants == sorted(constants)


@functools.cache
def variances():
    errors = squared_errors()["errors"]
    staged = [math.pi / 2 * x for x in (1.0, *errors[:-1])]
    unbiased = [x / (1 - x) for x in errors]
    ratio = [a / b for a, b in zip(staged, unbiased, strict=True)]
    return {"staged": staged, "unbiased": unbiased, "ratio": [min(ratio), max(ratio)]}


@claim(
    "quantizers-inner",
    says=r"With the last bit for the signs of a projection of the rest, $d\operatorname{Var}⟨q, \hat x⟩$ is about "
    "1.57, 0.56, 0.18, 0.047 at 1 to 4 bits, for unit vectors. (TurboQuant, theorem 2)",
    verdict="does not hold",
    correct="By the formula of the theorem it is π/2 times the squared error at a bit less: @{staged:.3f}. "
    "With one codebook and a scale for each vector, unbiased too, it is @{unbiased:.3f} at the same bits, "
    "less by a factor between @{ratio:.1f}.",
    numbers=variances,
    function="isentropic.jl.quantizer",
)
def test_variances(rng):
    d, numbers = 256, variances()
    x = units(rng, 2000, d)
    q = units(rng, 400, d)
    for bits in BITS:
        for kind, expected in (("staged", numbers["staged"]), ("unbiased", numbers["unbiased"])):
            x_hat = two_stages(x, bits, 7) if kind == "staged" else decoded(x, bits, "unbiased", 7)
            assert abs(d * np.mean((q @ (x_hat - x).T) ** 2) / expected[bits - 1] - 1) < 0.05
    assert numbers["staged"][3] > 1.1 * 0.047
    f = it.jl.quantizer(d, 4, kind="unbiased", rng=0)
    assert abs(d * f.expected_error().inner ** 2 / numbers["unbiased"][3] - 1) < 0.02


@claim(
    "quantizers-drive",
    says=r"One bit, rotated, with an unbiased scale: the squared error is $π/2 - 1$ for many dimensions. (DRIVE, "
    "[2105.08339](https://arxiv.org/abs/2105.08339))",
    verdict="holds",
    function="isentropic.jl.quantizer",
)
def test_one_unbiased_bit(rng):
    f = it.jl.quantizer(MANY, 1, kind="unbiased", rng=0)
    assert abs(f.expected_error().squared - (math.pi / 2 - 1)) < 1e-5
    x = units(rng, 2000, 512)
    assert abs(((decoded(x, 1, "unbiased", 1) - x) ** 2).sum(-1).mean() - (math.pi / 2 - 1)) < 0.01


@functools.cache
def cosines():
    d = np.asarray([100.0, 1e6])
    mean = np.sqrt(d / math.pi) * np.exp(special.gammaln(d / 2) - special.gammaln((d + 1) / 2))
    return {"cosines": mean.tolist()}


@claim(
    "quantizers-cosine",
    says="The cosine of a vector and of its signs after a rotation is between 0.798 and 0.800 in the mean, for "
    "100 to 10⁶ dimensions. (RaBitQ, [2405.12497](https://arxiv.org/abs/2405.12497))",
    verdict="holds",
    correct=r"$\sqrt{d/π}\;Γ(d/2)/Γ((d+1)/2)$ = @{cosines:.4f}.",
    numbers=cosines,
    function="isentropic.jl.quantizer",
)
def test_cosine_of_signs(rng):
    low, high = cosines()["cosines"][::-1]
    assert 0.7975 < low < high < 0.8005
    x = units(rng, 4000, 100)
    x_hat = decoded(x, 1, "mse", 3)
    found = (x * x_hat).sum(-1) / np.linalg.norm(x_hat, axis=-1)
    assert abs(found.mean() - high) < 4 * found.std() / math.sqrt(len(x))
    # An optimal codebook of one bit has this cosine as its length.
    assert abs(1 - it.jl.quantizer(100, 1, rng=0).expected_error().squared - high**2) < 1e-6


@functools.cache
def outside():
    return {"outside": 200 * norm.sf(1.9), "below": 100 * norm.sf(1.9)}


@claim(
    "quantizers-bound",
    says=r"$|⟨q, \hat x⟩ - ⟨q, x⟩| ≤ ε_0\,\|q\|\,\|x\|\sqrt{(1-c^2)/c^2}/\sqrt{d-1}$ with $ε_0 = 1.9$, where c is the cosine "
    "of the vector and its code, holds with nearly perfect confidence. (The manual of RaBitQ's library)",
    verdict="does not hold",
    correct="The right side is 1.9 standard deviations of the error. So @{outside:.1f} % of products miss by more, and "
    "@{below:.1f} % are too small by more, which is what loses a neighbor.",
    numbers=outside,
    function="isentropic.jl.quantizer",
)
def test_bound_of_errors(rng):
    d = 384
    x, q = units(rng, 1000, d), units(rng, 1000, d)
    f = it.jl.quantizer(d, 2, kind="unbiased", rng=5)
    codes = f.encode(x)
    x_hat = f.decode(codes)
    c = (x * x_hat).sum(-1) / np.linalg.norm(x_hat, axis=-1)
    bound = 1.9 * np.sqrt((1 - c**2) / c**2 / (d - 1))
    error = (f.inner(q, codes) - q @ x.T) / bound
    numbers = outside()
    assert abs(100 * np.mean(np.abs(error) > 1) - numbers["outside"]) < 0.3
    assert abs(100 * np.mean(error < -1) - numbers["below"]) < 0.3


@functools.cache
def divergences():
    rng = np.random.default_rng(11)
    d = 128
    q, k = rng.normal(size=(64, d)), rng.normal(size=(1024, d))
    ratios = []
    for bits in BITS[1:]:
        exact, one, staged = (
            it.AttentionDistribution(q, keys, law=None).weights()
            for keys in (k, decoded(k, bits, "mse", 0), two_stages(k, bits, 0))
        )
        ratios.append(it.kl_divergence(exact, staged).mean() / it.kl_divergence(exact, one).mean())
    return {"ratios": ratios}


@claim(
    "quantizers-keys",
    says="Signs for the rest of keys inflate the variance of inner products by π/2. So the divergence of the "
    "attention weights is larger than with a codebook alone: 2.25 times at 4 bits, in that paper's setting. "
    "([2605.08114](https://arxiv.org/abs/2605.08114))",
    verdict="holds",
    correct="The signs also take a bit of the codebook. For normal queries and keys of 128 features, the divergence "
    "is @{ratios:.1f} times that of a codebook with the same bits, at 2, 3 and 4 bits.",
    numbers=divergences,
    function="isentropic.jl.quantizer",
)
def test_signs_on_keys():
    ratios = divergences()["ratios"]
    assert min(ratios) > 2.25
    squared = [it.jl.quantizer(128, b, rng=0).expected_error().squared for b in BITS]
    for bits, ratio in zip(BITS[1:], ratios, strict=True):
        assert ratio > math.pi / 2
        assert ratio < 1.5 * math.pi / 2 * squared[bits - 2] / squared[bits - 1]
