"""What the texts leave open: limits, questions and wishes of the derivation, and readers' comments."""

import functools
import math

import numpy as np
import pytest
from scipy import special

import isentropic as it
from isentropic import jl, laws, masks, theory
from ledger import claim
from ledger.test_mean_entropy import at_initialization, mean_and_error

pytestmark = pytest.mark.host


def growth_under_the_law():
    """dH/d log n from 512 to 8192 independent scores."""
    law = laws.LogLength(512)
    h = [theory.gaussian_entropy(n, law(n)) for n in (512, 8192)]
    return {"growth": (h[1] - h[0]) / math.log(16)}


@claim(
    "8823-7.3",
    says="That experiments do not show an entropy that stays the same comes from scores that depend on each other, small n, training and "
    "positions.",
    verdict="does not hold",
    correct="The entropy does not stay the same even without these: for independent Gaussian scores of unit variance, with the law, it grows by "
    "@{growth:.2f} nats per unit of log n from n = 512 to 8192.",
    numbers=growth_under_the_law,
    function="isentropic.theory.gaussian_entropy",
)
def test_independent_scores_are_not_held_either():
    rng, law = np.random.default_rng(120), laws.LogLength(512)
    h = []
    for n in (512, 8192):
        measured = it.entropy_from_logits(law(n) * rng.normal(size=(100, n)))
        mean, error = mean_and_error(measured)
        assert abs(mean - theory.gaussian_entropy(n, law(n))) < 4 * error
        h.append(mean)
    growth = growth_under_the_law()["growth"]
    assert (h[1] - h[0]) / math.log(16) == pytest.approx(growth, abs=0.02)
    assert growth > 0.5


def bases():
    n = 8192
    return {
        "short": at_initialization(n, laws.LogLength(64)),
        "long": at_initialization(n, laws.LogLength(512)),
        "standard": at_initialization(n),
    }


@claim(
    "8823-9.2",
    says="A small base (64) is enough for short sequences, such as patches of an image; long ones need 512 or more.",
    verdict="holds with a condition",
    correct="This holds for models that are trained with it. The base is the length at which the factor is 1, not the length of use: on weights trained with "
    "the standard scale it has to be the length of their training, because attention is flatter below it and sharper above it than in their training. At random initialization 8192 keys have @{standard:.2f} nats with the standard scale, @{long:.2f} with the base 512, @{short:.2f} with 64.",
    numbers=bases,
    function="isentropic.laws.LogLength",
)
def test_the_base_is_where_the_factor_is_one():
    q, k = np.random.default_rng(121).normal(size=(2, 200, 16))
    for base in (64, 200, 512):
        law = laws.LogLength(base)
        assert law(base) == 1
        difference = it.attention_entropy(q, k, law=law) - it.attention_entropy(q, k, law=None)
        assert np.allclose(difference, 0, atol=1e-12) == (base == 200)
        assert (np.sign(difference) == np.sign(base - 200)).all() or base == 200
    numbers = bases()
    assert numbers["short"] < numbers["long"] - 1 < numbers["standard"] - 1.4


@claim(
    "8823-10.1.1",
    says="Scores are in fact not independent.",
    verdict="holds",
    correct="If every key occurs m times, the entropy is larger by log m, and the n of the law is not the n of a model with independent scores. `AttentionDistribution.factor_for_entropy` takes the scores as they are.",
    function="isentropic.AttentionDistribution.factor_for_entropy",
)
def test_copies_of_keys():
    q, k = 2 * np.random.default_rng(122).normal(size=(2, 30, 8))
    once = it.attention_entropy(q, k, law=None)
    copies = np.repeat(k, 4, axis=0)
    np.testing.assert_allclose(
        it.attention_entropy(q, copies, law=None), once + math.log(4), rtol=1e-12
    )
    law = laws.LogLength(30)
    held = it.attention_entropy(q, copies, law=law) - math.log(4)
    assert (held < once).all()
    assert held.mean() < once.mean() - 0.1
    factor = it.AttentionDistribution(q, copies, law=None).factor_for_entropy(2.5)
    h = it.attention_entropy(q * factor[:, None], copies, law=None)
    np.testing.assert_allclose(h, 2.5, atol=1e-9)


def errors_of_the_limit():
    """Of log n − β²/2, for β = 2."""
    lengths = (16, 64, 512, 8192)
    annealed = [theory.gaussian_entropy(n, 2.0, method="annealed") for n in lengths]
    exact = [theory.gaussian_entropy(n, 2.0) for n in lengths]
    return {"error": [a - h for a, h in zip(annealed, exact, strict=True)]}


@claim(
    "8823-10.1.2",
    says="The derivation is for large n, and inaccurate for small n.",
    verdict="holds",
    correct="For Gaussian scores with λσ = 2 the limit $\\log n - λ^2σ^2/2$ has errors of @{error:.2f} nats for n = 16, 64, 512 and 8192. The exact mean, at any n, is in 17.",
    numbers=errors_of_the_limit,
    function="isentropic.theory.gaussian_entropy",
)
@claim(
    "8823-10.3.4",
    says="An analysis that is not asymptotic is still missing.",
    verdict="holds with a condition",
    correct="It is missing for scores that depend on each other, as in a trained model. For independent scores of one distribution there is one, an integral (17): exact at any n, "
    "here for Gaussian scores and for cosines on a sphere.",
    function="isentropic.theory.gaussian_entropy",
)
def test_small_n():
    errors = np.abs(errors_of_the_limit()["error"])
    assert (np.diff(errors) < 0).all()
    assert errors[0] > 0.2
    assert errors[-1] < 0.02
    rng = np.random.default_rng(123)
    for n in (2, 16, 64):
        mean, error = mean_and_error(it.entropy_from_logits(2 * rng.normal(size=(20_000, n))))
        assert abs(mean - theory.gaussian_entropy(n, 2.0)) < 4 * error
        cosines = 2 * rng.beta(1.5, 1.5, size=(20_000, n)) - 1  # in four dimensions
        mean, error = mean_and_error(it.entropy_from_logits(4 * cosines))
        assert abs(mean - theory.sphere_entropy(n, 4, 4.0)) < 4 * error
        # Equal scores have the same distribution, but are not independent.
        together = it.entropy_from_logits(np.repeat(2 * rng.normal(size=(20, 1)), n, axis=1))
        assert abs(together - theory.gaussian_entropy(n, 2.0)).min() > 0.1


@claim(
    "8823-10.1.3",
    says="Training changes the distribution of the scores, which the analysis takes as fixed.",
    verdict="holds",
    correct="The entropy depends on the factor and on the standard deviation of the scores only through their product. So a law holds the entropy over n, and not over "
    "training; a factor that is solved for holds it over both.",
    function="isentropic.factor_for_entropy",
)
@claim(
    "8823-10.2.2",
    says="The factor could adapt during training.",
    verdict="holds",
    correct="A factor that is solved for adapts, and has gradients. The parameters of a law may adapt too. Whether a model is better for it is another question: in [one task](experiments-small-models.md#constant-or-length) "
    "models that learned a law were better than with a constant that was learned at the trained lengths, but one greater constant, which nobody trained, is as good; and models that "
    "were trained with entropies that are held were worse than those with the law log n.",
    function="isentropic.factor_for_entropy",
)
def test_scores_that_grow_in_training():
    scores = np.random.default_rng(124).normal(size=(20, 300))
    law, h = laws.LogLength(512), []
    for std in (1.0, 2.0, 4.0):
        entropy = it.entropy_from_logits(std * law(300) * scores)
        mean, error = mean_and_error(entropy)
        assert abs(mean - theory.gaussian_entropy(300, std * law(300))) < 4 * error
        h.append(entropy)
        factor = it.factor_for_entropy(std * scores, 3.0)
        np.testing.assert_allclose(factor * std, it.factor_for_entropy(scores, 3.0), rtol=1e-8)
        held = it.entropy_from_logits(factor[:, None] * std * scores)
        np.testing.assert_allclose(held, 3.0, atol=1e-9)
    assert (h[0] > h[1] + 0.5).all()
    assert (h[1] > h[2] + 0.5).all()


def growth_of_factors():
    """Of the factor that holds an entropy, from 2^20 to 2^28 keys."""
    ends = np.asarray([2.0**20, 2.0**28])

    def growth(target, **model):
        factor = theory.invariant_factor(ends, target, **model)
        return float(factor[1] / factor[0])

    return {
        "needles": growth(2.3, model="needle", n_relevant=8, gap=7.5),
        "gaussian": growth(2.0),
        "sphere": growth(2.0, model="sphere", d=4),
        "logarithm": math.log(ends[1]) / math.log(ends[0]),
    }


@claim(
    "8823-10.2.1",
    says="There may be a better function of n than log n.",
    verdict="holds",
    correct="The right one depends on how many keys come near the largest score. From 2²⁰ to 2²⁸ keys the factor that holds the entropy grows @{needles:.2f}-fold "
    "for 8 keys at a fixed gap above the others (log n itself: @{logarithm:.2f}), @{gaussian:.2f}-fold for Gaussian scores ($\\sqrt{\\log n}$ in the limit), @{sphere:.1f}-fold on a sphere in "
    r"4 dimensions ($n^{2/(d-1)}$), and for exponential scores not at all.",
    numbers=growth_of_factors,
    function="isentropic.theory.invariant_factor",
)
def test_the_function_of_n_depends_on_the_largest_scores():
    growth = growth_of_factors()
    logarithm = growth["logarithm"]
    assert logarithm == pytest.approx(28 / 20)
    assert growth["needles"] == pytest.approx(logarithm, rel=0.05)
    assert abs(growth["gaussian"] - math.sqrt(logarithm)) < 0.5 * abs(growth["gaussian"] - logarithm)
    assert growth["sphere"] == pytest.approx(2 ** (8 * 2 / 3), rel=0.02)
    assert theory.invariant_factor(2.0**20, 2.0) > 0
    # The spacings at the top of exponential scores do not depend on n.
    rng = np.random.default_rng(125)
    for n in (300, 10_000):
        mean, error = mean_and_error(it.entropy_from_logits(3 * rng.exponential(size=(400, n))))
        assert abs(mean - theory.frozen_entropy(3.0)) < 4 * error + 0.01


def sensitivity_at_held_entropies():
    """Shares of the largest sensitivity to Gaussian scores, for n = 64, 4096 and 2^18."""
    lengths = np.asarray([64, 4096, 2**18])

    def share(factor):
        top = 1e6 * theory.gaussian_entropy(lengths, 1e6, order=2)
        return (100 * factor * theory.gaussian_entropy(lengths, factor, order=2) / top).tolist()

    return {
        "held": share(theory.invariant_factor(lengths, 2.0)),
        "standard": share(np.ones(3)),
    }


@claim(
    "8823-10.1.4",
    says="The derivation aims at the entropy only, and not at gradients.",
    verdict="holds",
    correct="The two are different numbers: $\\sum_{ij}|\\partial p_i/\\partial s_j| = 2(1-\\sum p^2)$ is that of the Rényi entropy of order 2, times the factor. See 10.2.4.",
    function="isentropic.attention_entropy",
)
@claim(
    "8823-10.2.4",
    says="One theory could cover invariant entropy and the maximal gradient.",
    verdict="holds with a condition",
    correct=r"With respect to the scores the gradient is $2λ(1-\sum p^2)$. For Gaussian scores its mean has no maximum in λ: it rises up to $λσ \approx \sqrt{2\log n}$, where "
    "few keys begin to have all the weight, and stays. A held entropy lies beyond that: at 2 nats the gradient is @{held:.0f} % of its largest value for "
    "n = 64, 4096 and 262 144, at λσ = 1 it is @{standard:.0f} %. So there the two agree. For a single key that stands out the gradient is largest just before the key has "
    r"the weight, at 1/$\sqrt{2\log n}$ of it, where the entropy grows with log n. There the two do not agree.",
    numbers=sensitivity_at_held_entropies,
    function="isentropic.theory.gaussian_entropy",
)
def test_entropy_and_gradient():
    rng = np.random.default_rng(126)
    q, k = rng.normal(size=(2, 12, 8))
    p = it.AttentionDistribution(q, k, law=None).weights()
    jacobian = p[:, :, None] * (np.eye(12) - p[:, None, :])
    of_order_2 = -2 * np.expm1(-it.attention_entropy(q, k, order=2, law=None))
    np.testing.assert_allclose(np.abs(jacobian).sum((-2, -1)), of_order_2, rtol=1e-12)

    shares = sensitivity_at_held_entropies()
    assert min(shares["held"]) > 80
    assert (np.diff(shares["held"]) > 0).all()
    assert (np.diff(shares["standard"]) < 0).all()
    beta = np.geomspace(0.1, 1e4, 30)
    assert (np.diff(beta * theory.gaussian_entropy(4096, beta, order=2)) > -1e-8).all()
    scores = rng.normal(size=(2000, 64))
    measured = 5 * 2 * it.entropy_from_logits(5 * scores, order=2, family="tsallis")
    mean, error = mean_and_error(measured)
    assert abs(mean - 10 * theory.gaussian_entropy(64, 5.0, order=2)) < 4 * error

    gap = np.linspace(0.01, 60, 60_000)
    entropies = []
    for n in (1e3, 1e6, 1e12):
        best = gap[np.argmax(gap * theory.needle_entropy(n, 1, gap, order=2))]
        weight = theory.needle_weight(n, 1, best)
        assert weight * math.sqrt(2 * math.log(n)) == pytest.approx(1.15, abs=0.1)
        entropies.append(theory.needle_entropy(n, 1, best) / math.log(n))
    assert 0.6 < entropies[0] < entropies[1] < entropies[2]


@claim(
    "8823-10.3.1",
    says="The entropy that each layer should have could be learned.",
    verdict="holds",
    correct=r"It can be computed: the factor for an entropy $H^*$ has the derivative $dλ/dH^* = -λ/\mathrm{Var}_p(λs)$, so that $H^*$ can be a parameter of a layer. This does not show that a model gains by it.",
    function="isentropic.AttentionDistribution.factor_for_entropy",
)
def test_a_target_has_a_derivative():
    q, k = np.random.default_rng(127).normal(size=(2, 30, 8))
    step = 1e-4
    up, factor, down = (
        it.AttentionDistribution(q, k, law=None).factor_for_entropy(2.5 + h) for h in (step, 0, -step)
    )
    s = factor[:, None] * (q @ k.T) / math.sqrt(8)
    p = special.softmax(s, axis=-1)
    variance = (p * s**2).sum(-1) - (p * s).sum(-1) ** 2
    np.testing.assert_allclose((up - down) / (2 * step), -factor / variance, rtol=1e-5)


@claim(
    "8823-10.3.3",
    says="It extends to attention between images and texts.",
    verdict="holds with a condition",
    correct="n is the number of keys, which belong to the other modality. The number of queries does not matter.",
    function="isentropic.attention",
)
def test_attention_between_modalities():
    rng = np.random.default_rng(128)
    words, (patches, values) = rng.normal(size=(7, 16)), rng.normal(size=(2, 196, 16))
    weights = special.softmax(laws.LogLength(512)(196) * words @ patches.T / 4, axis=-1)
    np.testing.assert_allclose(it.attention(words, patches, values), weights @ values, atol=1e-12)


@claim(
    "8823-11.3",
    says="Only the scale changes, in a few lines; it is verified on several tasks.",
    verdict="holds with a condition",
    correct="It is one factor for each query, in front of any attention. It has to count the keys that the query sees. The lines of the text do not (9.1). The text reports one task.",
    function="isentropic.scale_queries",
)
def test_a_factor_for_each_query():
    q, k, v = np.random.default_rng(129).normal(size=(3, 50, 16))
    mask = masks.causal() & masks.window(20)
    scaled = it.scale_queries(q, mask.visible_count(50, 50))
    expected = it.attention(q, k, v, mask=mask)
    np.testing.assert_allclose(it.attention(scaled, k, v, mask=mask, law=None), expected, atol=1e-12)


@functools.cache
def shares_of_a_table():
    """What is lost of a table of 3000 vectors in 256 dimensions if it goes through 64, and what JL asks for."""
    rng = np.random.default_rng(130)
    few = rng.normal(size=(3000, 48)) @ rng.normal(size=(48, 256)) + 0.1 * rng.normal(size=(3000, 256))
    losses = []
    for table in (few, rng.normal(size=(3000, 256))):
        squared = np.linalg.svd(table, compute_uv=False) ** 2
        losses.append(float(100 * squared[64:].sum() / squared.sum()))
    k = jl.min_dim(3000, eps=0.2, delta=0.01)
    return {"few": losses[0], "all": losses[1], "k": k}


@claim(
    "9588-post-factorized",
    says="ALBERT shows that a table of embeddings of low rank loses almost nothing.",
    verdict="holds with a condition",
    correct="That is about trained models. A product of a table with 64 columns and a matrix loses what the singular values beyond the 64th hold: @{few:.2f} % of "
    "the square sum for 3000 vectors near a space of 48 dimensions, @{all:.0f} % for 3000 vectors without a structure in 256. It has nothing to do with log n: distances within "
    "20 % take a random map to @{k} dimensions, more than there are.",
    numbers=shares_of_a_table,
    function="isentropic.jl.min_dim",
)
def test_factorized_tables():
    shares = shares_of_a_table()
    assert shares["few"] < 0.1
    assert shares["all"] == pytest.approx(100 * (1 - 64 / 256), rel=0.3)
    assert shares["k"] == jl.min_dim(3000, eps=0.2, delta=0.01) > 256
    # No product of rank 64 does better than that of the singular vectors (Eckart and Young).
    rng = np.random.default_rng(131)
    table = rng.normal(size=(300, 40))
    left, values, right = np.linalg.svd(table, full_matrices=False)
    best = ((table - (left[:, :10] * values[:10]) @ right[:10]) ** 2).sum()
    assert best == pytest.approx((values[10:] ** 2).sum(), rel=1e-12)
    some = rng.normal(size=(40, 10))
    fitted = table @ some @ np.linalg.lstsq(table @ some, table, rcond=None)[0]
    assert ((table - fitted) ** 2).sum() > best


def entmax(scores, alpha):
    """The p that maximizes p·s + H(p)/α for Tsallis' entropy H of order α > 1 (Peters et al. 2019).

    p = [(α − 1) s − τ]₊^(1/(α−1)), with the τ at which the sum is 1. For α = 2 it is sparsemax (Martins
    and Astudillo 2016). For α → 1 it is the softmax.
    """
    s = (alpha - 1) * scores
    high = s.max(-1, keepdims=True)
    low = high - 1  # where the largest weight alone is 1
    for _ in range(60):
        middle = (low + high) / 2
        is_low = (np.maximum(s - middle, 0) ** (1 / (alpha - 1))).sum(-1, keepdims=True) > 1
        low, high = np.where(is_low, middle, low), np.where(is_low, high, middle)
    p = np.maximum(s - high, 0) ** (1 / (alpha - 1))
    return p / p.sum(-1, keepdims=True)


@functools.cache
def entropies_of_entmax():
    """Mean Shannon entropies for n = 512 and 32768, at the scale 1/√d and norms √d, and their errors."""
    rng, found = np.random.default_rng(132), {}
    for d, rows, most in ((64, 12_000, 128), (3, 1200, 2048)):
        for n in (512, 32_768):
            # Only the largest cosines have a weight: the quantiles of the least of n uniform numbers.
            sums = rng.exponential(size=(rows, min(most, n))).cumsum(axis=1)
            uniform = sums / (sums[:, -1:] + rng.gamma(n + 1 - sums.shape[1], size=(rows, 1)))
            cosine = 1 - 2 * special.betaincinv((d - 1) / 2, (d - 1) / 2, uniform)
            for alpha, name in ((2, "sparsemax"), (1.5, "entmax")):
                p = entmax(math.sqrt(d) * cosine, alpha)
                assert (p[:, -1] == 0).all()
                mean, error = mean_and_error(it.entropy(p))
                found.setdefault(f"{name}_{d}", []).append(float(mean))
                found.setdefault("errors", []).append(float(error))
    return found


@claim(
    "9588-post-sparse",
    says="The aim is not an attention map of low rank but a sparse one, whose sparsity does not change with n; sparsemax gives a sparse one.",
    verdict="holds with a condition",
    correct="A map that is sparse can have full rank. Sparsemax does this without a law where few scores come near the largest: for k keys that stand out by at least 1/k the "
    "entropy is log k for every n. On a sphere the number of keys with a weight grows like $n^{2/(d+1)}$: the mean entropy is "
    "@{sparsemax_64:.1f} nats for n = 512 and 32 768 in 64 dimensions, and @{sparsemax_3:.1f} in three. "
    "α-entmax lies between softmax (α = 1) and sparsemax (α = 2). There the number of keys grows like $n^{2/((\\alpha-1)(d-1)+2)}$, and for α = 3/2 the "
    "entropies are @{entmax_64:.1f} and @{entmax_3:.1f} nats. So it needs a factor that grows, as ASEntmax has one.",
    numbers=entropies_of_entmax,
    function="isentropic.entropy",
)
def test_sparse_maps():
    for n in (16, 4096):
        p = entmax(np.where(np.arange(n) < 8, 1 / 7, 0.0), 2)
        assert it.entropy(p) == pytest.approx(math.log(8), rel=1e-12)
        assert it.entropy(p, order=0) == pytest.approx(math.log(8), rel=1e-12)
    measured = entropies_of_entmax()
    # The printed digits are certain.
    assert max(measured["errors"]) < 0.005
    for name in ("sparsemax_64", "sparsemax_3", "entmax_64", "entmax_3"):
        assert all(abs(h - round(h, 1)) < 0.05 - 1.5 * max(measured["errors"]) for h in measured[name])
    cosine = 2 * np.random.default_rng(137).beta(31.5, 31.5, size=(400, 512)) - 1
    mean, error = mean_and_error(it.entropy(entmax(8 * cosine, 1.5)))
    assert abs(mean - measured["entmax_64"][0]) < 4 * error
    assert measured["sparsemax_64"][1] - measured["sparsemax_64"][0] < 0.5
    for alpha, name in ((2, "sparsemax"), (1.5, "entmax")):
        growth = (measured[f"{name}_3"][1] - measured[f"{name}_3"][0]) / math.log(64)
        assert growth == pytest.approx(2 / (2 * (alpha - 1) + 2), abs=0.05)
    # It maximizes p·s + H(p)/α, where H is Tsallis' entropy of its order; near α = 1 it is the softmax.
    s, others = np.random.default_rng(135).normal(size=9), np.random.default_rng(136)
    for alpha in (1.5, 2.0):
        p = entmax(2 * s, alpha)

        def value(p, alpha=alpha):
            return p @ (2 * s) + it.entropy(p, order=alpha, family="tsallis") / alpha

        for q in others.dirichlet(np.ones(9), size=50):
            assert value(p) >= value(0.9 * p + 0.1 * q)
    softmax = np.exp(s) / np.exp(s).sum()
    np.testing.assert_allclose(entmax(s, 1.0001), softmax, rtol=1e-3)
    # Softmax at the same scale spreads as the context does.
    spread = [theory.sphere_entropy(n, 64, 8.0) for n in (512, 32_768)]
    assert (spread[1] - spread[0]) / math.log(64) > 0.98

    x = np.random.default_rng(133).normal(size=(40, 8))
    weights = it.AttentionDistribution(
        30 * x / np.linalg.norm(x, axis=-1, keepdims=True), x, law=None
    ).weights()
    assert np.linalg.matrix_rank(weights) > 8
    assert it.attention_entropy(30 * x, x, law=None).mean() < 0.3


@claim(
    "9588-post-oneself",
    says="In self-attention more keys dilute the weight of the query's own position, a window of size 1. A mask could hide it.",
    verdict="holds with a condition",
    correct="This holds where a query's own key stands out, as with queries equal to keys. `~masks.window(0)` hides it without an L×S array, and n is then the number of the other keys. None of these stands out, so there is nothing for the law to hold.",
    function="isentropic.theory.tied_entropy",
)
def test_hiding_oneself():
    rng, d = np.random.default_rng(134), 16
    own, others = [], ~masks.window(0)
    for n in (32, 512):
        x = rng.normal(size=(n, d))
        x *= math.sqrt(d) / np.linalg.norm(x, axis=-1, keepdims=True)
        np.testing.assert_array_equal(others.visible_count(n, n), n - 1)
        p = it.AttentionDistribution(x, x, law=None).weights()
        own.append(np.diagonal(p).mean())
        h = it.attention_entropy(x, x, law=None)
        assert h.mean() == pytest.approx(theory.tied_entropy(n, d, 1.0), abs=0.1)
        hidden = it.attention_entropy(x, x, mask=others, law=None)
        assert hidden.mean() == pytest.approx(theory.sphere_entropy(n - 1, d, math.sqrt(d)), abs=0.05)
        dense = it.attention_entropy(x, x, mask=~np.eye(n, dtype=bool), law=None)
        np.testing.assert_allclose(hidden, dense, rtol=1e-12)
    assert own[0] > 4 * own[1]
