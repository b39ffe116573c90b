"""Annotated derivation of archives/8823, sections 1, 2, 5 and 6: entropies and information."""

import heapq
import math

import numpy as np
import pytest

import isentropic as it
from ledger import claim

pytestmark = pytest.mark.host


def distributions(n=8, count=200):
    p = np.random.default_rng(80).dirichlet(np.full(n, 0.5), size=count)
    return np.concatenate((p, np.eye(n), np.full((1, n), 1 / n)))


def plain_entropy(p):
    return -(p * np.log(np.where(p > 0, p, 1))).sum(-1)


@claim(
    "8823-1",
    says=r"$H(p) = -\sum_i p_i\log p_i$, with 0 log 0 = 0.",
    verdict="definition",
    function="isentropic.entropy",
)
@claim(
    "8823-2",
    says=r"$H(p) \ge 0$, with equality for a single outcome alone.",
    verdict="holds",
    function="isentropic.entropy",
)
@claim(
    "8823-3",
    says=r"$H(p) \le \log n$, with equality for the uniform distribution alone.",
    verdict="holds",
    function="isentropic.entropy",
)
@claim(
    "8823-4",
    says=r"$H(u) - H(p) = \log n + \sum_i p_i\log p_i$ for the uniform u.",
    verdict="holds",
    function="isentropic.entropy",
)
@claim(
    "8823-5",
    says=r"$\sum_i p_i\log p_i \le \sum_i p_i\log u_i = -\log n$.",
    verdict="does not hold",
    correct=r"Gibbs' inequality has the other direction: $\sum_i p_i\log p_i \ge \sum_i p_i\log u_i$. With the sign as written, 3 does not follow.",
    function="isentropic.kl_divergence",
)
def test_entropy_and_its_bounds():
    p = distributions()
    h, log_n = it.entropy(p), math.log(8)
    np.testing.assert_allclose(h, plain_entropy(p), atol=1e-13)
    assert (h >= -1e-15).all()
    assert (h <= log_n + 1e-15).all()
    assert h[-1] == pytest.approx(log_n)
    assert (h[-9:-1] == 0).all()
    inside = (p.max(-1) < 0.999) & (p.max(-1) > 0.2)
    assert ((h[inside] > 0) & (h[inside] < log_n - 1e-3)).all()
    np.testing.assert_allclose(h[-1] - h, log_n - plain_entropy(p), atol=1e-13)
    divergence = it.kl_divergence(p, np.full_like(p, 1 / 8))
    np.testing.assert_allclose(divergence, log_n - h, atol=1e-13)
    assert (-plain_entropy(p) >= -log_n - 1e-12).all()
    assert (-plain_entropy(p)[inside] > -log_n + 1e-3).all()


@claim(
    "8823-6",
    says=r"$H(X,Y) = H(X)+H(Y)$ for independent X, Y.",
    verdict="holds",
    function="isentropic.entropy",
)
@claim(
    "8823-7",
    says=r"$H(λp+(1-λ)q) \ge λH(p)+(1-λ)H(q)$.",
    verdict="holds",
    function="isentropic.entropy",
)
def test_additive_and_concave():
    p, q = distributions(6)[:-1:2], distributions(6)[1::2]
    joint = (p[:, :, None] * q[:, None, :]).reshape(len(p), -1)
    np.testing.assert_allclose(it.entropy(joint), it.entropy(p) + it.entropy(q), atol=1e-12)
    for share in (0.1, 0.5, 0.8):
        mixed = it.entropy(share * p + (1 - share) * q)
        assert (mixed >= share * it.entropy(p) + (1 - share) * it.entropy(q) - 1e-13).all()


@claim(
    "8823-8",
    says=r"Rényi: $H_α = \frac1{1-α}\log\sum_i p_i^α$.",
    verdict="definition",
    function="isentropic.entropy",
)
@claim(
    "8823-1.3",
    says=r"$H_1$ is Shannon's, $H_0 = \log n$, $H_2 = -\log\sum p_i^2$, $H_\infty = -\log\max p_i$.",
    verdict="holds with a condition",
    correct=r"$H_0$ is the logarithm of the number of $p_i > 0$, which is $\log n$ where none is 0. The others hold.",
    function="isentropic.entropy",
)
@claim(
    "8823-9",
    says=r"$H_α \ge H_β$ for α < β.",
    verdict="holds",
    correct="Not strictly: all are equal for the uniform distribution.",
    function="isentropic.entropy",
)
@claim(
    "8823-63",
    says=r"$H_2 = -\log\sum_j a_{ij}^2$.",
    verdict="definition",
    function="isentropic.entropy",
)
@claim(
    "8823-64",
    says=r"Tsallis: $S_q = \frac1{q-1}\left(1-\sum_j a_{ij}^q\right)$.",
    verdict="definition",
    correct="Shannon's in the limit q → 1.",
    function="isentropic.entropy",
)
def test_families():
    p = distributions()
    orders = [0, 0.3, 0.9, 1 - 1e-9, 1, 1.5, 2, 5, math.inf]
    h = np.stack([it.entropy(p, order=order) for order in orders])
    for i in (1, 2, 5, 6, 7):
        sums = np.where(p > 0, p, 0) ** orders[i]
        np.testing.assert_allclose(h[i], np.log(sums.sum(-1)) / (1 - orders[i]), atol=1e-12)
        tsallis = it.entropy(p, order=orders[i], family="tsallis")
        np.testing.assert_allclose(tsallis, (1 - sums.sum(-1)) / (orders[i] - 1), atol=1e-12)
    np.testing.assert_allclose(h[3], h[4], atol=1e-7)
    np.testing.assert_allclose(h[4], plain_entropy(p), atol=1e-13)
    np.testing.assert_allclose(h[6], -np.log((p**2).sum(-1)), atol=1e-12)
    np.testing.assert_allclose(h[8], -np.log(p.max(-1)), atol=1e-13)
    np.testing.assert_allclose(h[0], np.log((p > 0).sum(-1)), atol=1e-13)
    assert it.entropy(np.asarray([0.5, 0.5, 0.0]), order=0) == pytest.approx(math.log(2))  # not log 3
    assert (np.diff(h, axis=0) <= 1e-9).all()
    assert abs(np.diff(h[:, -1])).max() < 1e-9
    near = it.entropy(p, order=1 + 1e-7, family="tsallis")
    np.testing.assert_allclose(near, plain_entropy(p), atol=1e-5)


@claim(
    "8823-11",
    says=r"$H_i = -\sum_j a_{ij}\log a_{ij}$.",
    verdict="definition",
    function="isentropic.attention_entropy",
)
@claim(
    "8823-post-3",
    says=r"$\mathcal H_i = -\sum_j a_{ij}\log a_{ij}$.",
    verdict="definition",
    function="isentropic.attention_entropy",
)
@claim(
    "8823-13",
    says=r"$H_i = \log Z_i - λ\sum_j a_{ij}s_{ij}$.",
    verdict="holds",
    correct="The function subtracts the maximum from both terms. As written, digits cancel where scores have a large common offset.",
    function="isentropic.attention_entropy",
)
@claim(
    "8823-14",
    says=r"$\bar s_i = \sum_j a_{ij}s_{ij}$.",
    verdict="definition",
    correct=r"It is $q_i\cdot\mathrm{Attn}(q_i, K, K)$: a second attention with the keys as values.",
    function="isentropic.attention",
)
@claim(
    "8823-15",
    says=r"$H_i = \log Z_i - λ\bar s_i$.",
    verdict="holds",
    function="isentropic.attention_entropy",
)
@claim(
    "8823-post-6",
    says=r"$\mathcal H_i = \log\sum_j e^{λq_i\cdot k_j} - \frac{\sum_j e^{λq_i\cdot k_j}λq_i\cdot k_j}{\sum_j e^{λq_i\cdot k_j}}$.",
    verdict="holds",
    function="isentropic.attention_entropy",
)
def test_entropy_of_attention():
    rng = np.random.default_rng(81)
    q, k = rng.normal(size=(5, 8)), rng.normal(size=(30, 8))
    scale = 0.7
    s = q @ k.T
    a = it.AttentionDistribution(q, k, scale=scale, law=None).weights()
    h = it.attention_entropy(q, k, scale=scale, law=None)
    np.testing.assert_allclose(h, plain_entropy(a), rtol=1e-12)
    log_z = np.log(np.exp(scale * s).sum(-1))
    mean_score = (a * s).sum(-1)
    np.testing.assert_allclose(h, log_z - scale * mean_score, rtol=1e-12)
    np.testing.assert_allclose(
        mean_score, (q * it.attention(q, k, k, scale=scale, law=None)).sum(-1), rtol=1e-12
    )
    # In float32 at an offset of 10 000.
    offset = rng.normal(size=(50, 2000)).astype("float32") + np.float32(1e4)
    exact = it.entropy_from_logits(offset.astype("float64"))
    w = np.exp(offset - offset.max(-1, keepdims=True))
    log_z = offset.max(-1) + np.log(w.sum(-1))
    cancelled = log_z - (w / w.sum(-1, keepdims=True) * offset).sum(-1)
    assert abs(it.entropy_from_logits(offset) - exact).max() < 1e-5
    assert abs(cancelled - exact).max() > 2e-4


@claim(
    "8823-2.3",
    says=r"$H_i \in [0, \log n]$: 0 for one key with all the weight, $\log n$ for equal weights.",
    verdict="holds",
    function="isentropic.attention_entropy",
)
def test_range_of_attention_entropy():
    rng = np.random.default_rng(82)
    q, k = rng.normal(size=(50, 8)) * 3, rng.normal(size=(20, 8)) * 3
    h = it.attention_entropy(q, k, law=None)
    assert ((h >= 0) & (h <= math.log(20))).all()
    assert it.attention_entropy(0 * q, k)[0] == pytest.approx(math.log(20))
    assert it.attention_entropy(1e6 * q, k).max() < 1e-6


@claim(
    "8823-52",
    says=r"Shannon: the mean length of a code $L \ge H(p)$.",
    verdict="holds with a condition",
    correct=r"Both sides must have the same unit: for binary codes $L \ge H/\ln 2$.",
    function="isentropic.entropy",
)
@claim(
    "8823-53",
    says=r"To embed n points takes $d \ge H/\log 2 \approx \log n$ dimensions, in agreement with the lemma.",
    verdict="does not hold",
    correct=r"$H/\ln 2 = \log_2 n$ is a number of bits, not of dimensions: n different points fit on a line.",
    function="isentropic.entropy",
)
def test_codes_are_no_dimensions():
    for p in distributions(8, 20)[:20]:
        heap = [(w, 0.0) for w in p]  # Huffman: the mean length is the sum of the merged weights
        heapq.heapify(heap)
        length = 0.0
        while len(heap) > 1:
            (a, _), (b, _) = heapq.heappop(heap), heapq.heappop(heap)
            length += a + b
            heapq.heappush(heap, (a + b, 0.0))
        bits = float(it.entropy(p)) / math.log(2)
        assert bits <= length + 1e-12
        assert length < bits + 1
    n = 512
    h = float(it.entropy(np.full(n, 1 / n)))
    assert h / math.log(2) == pytest.approx(9)
    assert abs(h / math.log(2) - math.log(n)) > 2.7
    points = np.arange(n)[:, None]  # one dimension
    assert len(np.unique(points, axis=0)) == n


@claim(
    "8823-54",
    says=r"$I(Q;K) = H(K) - H(K|Q)$.",
    verdict="holds",
    correct="For a query drawn uniformly: H(mean of the rows) − mean H(row), the Jensen–Shannon information of the rows.",
    function="isentropic.AttentionDistribution.information",
)
@claim(
    "8823-55",
    says=r"$H(K|Q) = E_Q[H_i]$.",
    verdict="definition",
    function="isentropic.AttentionDistribution.information",
)
@claim(
    "8823-6.1",
    says=r"With the entropy held, $I(Q;K) \approx \log n - \text{const}$.",
    verdict="holds with a condition",
    correct=r"This needs a mean of the rows that is uniform. In general $I \le \log n - E[H_i]$.",
    function="isentropic.AttentionDistribution.information",
)
def test_information():
    rng = np.random.default_rng(83)
    q, k = rng.normal(size=(12, 8)) * 2, rng.normal(size=(9, 8)) * 2
    a = it.AttentionDistribution(q, k).weights()
    joint = a / 12
    double_sum = (joint * np.log(joint / (joint.sum(0) / 12))).sum()
    information = it.AttentionDistribution(q, k).information()
    assert information == pytest.approx(double_sum, rel=1e-10)
    mean_entropy = it.attention_entropy(q, k).mean()
    assert information == pytest.approx(plain_entropy(a.mean(0)) - mean_entropy, rel=1e-10)
    assert information < math.log(9) - mean_entropy - 0.05
    # Keys on a circle: all are attended to alike on average.
    for n in (64, 256):
        angle = 2 * math.pi * np.arange(n) / n
        x = np.stack((np.cos(angle), np.sin(angle)), axis=-1) * 5
        expected = math.log(n) - it.attention_entropy(x, x).mean()
        assert it.AttentionDistribution(x, x).information() == pytest.approx(expected, rel=1e-10)


@claim(
    "8823-58",
    says=r"$D_{KL}(a^*\|a) = \sum_j a^*_j\log\frac{a^*_j}{a_j} = H(a^*,a) - H(a^*)$.",
    verdict="holds",
    function="isentropic.kl_divergence",
)
@claim(
    "8823-59",
    says=r"$H(a^*,a) = -\sum_j a^*_j\log a_j$.",
    verdict="definition",
    function="isentropic.cross_entropy",
)
def test_divergence():
    p, q = np.random.default_rng(84).dirichlet(np.ones(7), size=(2, 50))
    np.testing.assert_allclose(it.cross_entropy(p, q), -(p * np.log(q)).sum(-1), rtol=1e-12)
    expected = (p * np.log(p / q)).sum(-1)
    np.testing.assert_allclose(it.kl_divergence(p, q), expected, rtol=1e-10)
    np.testing.assert_allclose(it.cross_entropy(p, q) - it.entropy(p), expected, rtol=1e-10)


@claim(
    "8823-65",
    says=r"Soft constraint: $L = L_{\text{task}} + β|H_i - H_{\text{target}}|^2$.",
    verdict="definition",
    correct="The mean over the rows.",
    function="isentropic.entropy_penalty",
)
def test_penalty():
    h = np.asarray([[1.0, 2.5], [3.0, 2.0]])
    assert it.entropy_penalty(h, 2.0, weight=0.3) == pytest.approx(0.3 * (1 + 0.25 + 1 + 0) / 4)
