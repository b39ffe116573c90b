"""The tutorial on attention, by its sections."""

import math
import tracemalloc

import numpy as np
import pytest

import isentropic as it
from isentropic import masks
from ledger import claim

pytestmark = pytest.mark.host


def draw(*shape, seed=60):
    return np.random.default_rng(seed).normal(size=shape)


def softmax(s):
    with np.errstate(invalid="ignore"):
        w = np.exp(s - s.max(-1, keepdims=True))
    return w / w.sum(-1, keepdims=True)


@claim(
    "tutorial-2.2.1",
    says=r"$S = QK^\top$.",
    verdict="definition",
    function="isentropic.AttentionDistribution.weights",
)
@claim(
    "tutorial-2.2.3",
    says=r"$α_{ij} = \exp(S_{ij}/\sqrt{d_k})/\sum_k \exp(S_{ik}/\sqrt{d_k})$; rows sum to 1.",
    verdict="definition",
    correct="With `law=None`.",
    function="isentropic.AttentionDistribution.weights",
)
@claim(
    "8823-12",
    says=r"$a_{ij} = e^{λs_{ij}}/Z_i$, $Z_i = \sum_k e^{λs_{ik}}$.",
    verdict="definition",
    function="isentropic.AttentionDistribution.weights",
)
@claim(
    "8823-10",
    says=r"$a_{ij} = \exp(s_{ij}/τ)/\sum_k\exp(s_{ik}/τ)$, $s_{ij} = q_i\cdot k_j$, usually $τ = \sqrt d$.",
    verdict="definition",
    correct="`scale` is 1/τ.",
    function="isentropic.AttentionDistribution.weights",
)
def test_weights():
    q, k = draw(5, 16), draw(7, 16, seed=61)
    weights = it.AttentionDistribution(q, k, law=None).weights()
    e = np.exp(q @ k.T / 4)
    np.testing.assert_allclose(weights, e / e.sum(-1, keepdims=True), rtol=1e-12)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-12)
    other = it.AttentionDistribution(q, k, scale=1 / 3, law=None).weights()
    np.testing.assert_allclose(other, softmax(q @ k.T / 3), rtol=1e-12)


@claim(
    "tutorial-2.2.2",
    says=r"Features of mean 0 and variance 1: $\mathrm{Var}(q\cdot k) = d_k$, and 1 after division by $\sqrt{d_k}$. Without it the softmax "
    "saturates.",
    verdict="holds",
    function="isentropic.AttentionDistribution.weights",
)
@claim(
    "8823-43",
    says=r"Independent entries of mean 0 and variance 1: $E[q\cdot k] = 0$, $\mathrm{Var}[q\cdot k] = d$.",
    verdict="holds",
    function="isentropic.AttentionDistribution.weights",
)
def test_variance_of_scores():
    d, n = 64, 100_000
    rng = np.random.default_rng(62)
    for sample in (rng.normal, lambda size: rng.choice([-1.0, 1.0], size=size)):
        s = np.zeros(n)
        for _ in range(d):
            s += sample(size=n) * sample(size=n)
        assert abs(s.mean()) < 4 * math.sqrt(d / n)
        assert s.var() == pytest.approx(d, rel=4 * math.sqrt(2.2 / n))
        assert (s / math.sqrt(d)).var() == pytest.approx(1, rel=4 * math.sqrt(2.2 / n))
    # Not divided, nearly all weight is on one key.
    q, k = draw(50, 512), draw(100, 512, seed=63)
    assert it.attention_entropy(q, k, scale=1.0, law=None).mean() < 0.3
    assert it.attention_entropy(q, k, law=None).mean() > 4
    # That division is the default scale.
    q, k = draw(3, d), draw(4, d, seed=63)
    np.testing.assert_allclose(
        it.AttentionDistribution(q, k, law=None).weights(), softmax(q @ k.T / math.sqrt(d)), rtol=1e-12
    )


@claim(
    "tutorial-2.2.4",
    says=r"$\text{output}_i = \sum_j α_{ij}V_j$.",
    verdict="definition",
    function="isentropic.attention",
)
@claim(
    "tutorial-3.1",
    says=r"$\mathrm{Attn}(Q,K,V) = \mathrm{softmax}(QK^\top/\sqrt{d_k})\,V$.",
    verdict="definition",
    correct="With `law=None`.",
    function="isentropic.attention",
)
@claim(
    "tutorial-3.2",
    says=r"$Q: n\times d_k$, $K: m\times d_k$, $V: m\times d_v$ give $n \times d_v$.",
    verdict="holds",
    function="isentropic.attention",
)
@claim(
    "8823-post-1",
    says=r"$\mathrm{Attn}(Q,K,V) = \mathrm{softmax}(QK^\top/\sqrt d)\,V$.",
    verdict="definition",
    correct="With `law=None`: “Attention-O”.",
    function="isentropic.attention",
)
@claim(
    "8823-post-2",
    says=r"$o_i = \sum_j a_{ij}v_j$, $a_{ij} = e^{λq_i\cdot k_j}/\sum_j e^{λq_i\cdot k_j}$.",
    verdict="definition",
    correct="`scale` is λ.",
    function="isentropic.attention",
)
@claim(
    "8823-42",
    says=r"$\mathrm{Attn}(Q,K,V) = \mathrm{softmax}(QK^\top/\sqrt d)\,V$.",
    verdict="definition",
    correct="With `law=None`.",
    function="isentropic.attention",
)
def test_output():
    q, k, v = draw(5, 16), draw(7, 16, seed=61), draw(7, 3, seed=64)
    out = it.attention(q, k, v, law=None)
    assert out.shape == (5, 3)
    np.testing.assert_allclose(out, softmax(q @ k.T / 4) @ v, atol=1e-13)
    np.testing.assert_allclose(
        it.attention(q, k, v, scale=0.1, law=None), softmax(q @ k.T / 10) @ v, atol=1e-13
    )


@claim(
    "tutorial-3.3",
    says=r"Self-attention is the case Q = K = V: $\mathrm{softmax}(XX^\top/\sqrt{d_k})X$.",
    verdict="holds with a condition",
    correct="Without projections. In general Q, K and V are three projections of one X.",
    function="isentropic.layers.multi_head_attention",
)
def test_self_attention():
    x, one = draw(6, 8), np.eye(8)
    plain = softmax(x @ x.T / math.sqrt(8)) @ x
    same = it.layers.multi_head_attention(x, x, x, one, one, one, one, num_heads=1, law=None)
    np.testing.assert_allclose(same, plain, atol=1e-13)
    w_q, w_k, w_v = draw(3, 8, 8, seed=65)
    projected = it.layers.multi_head_attention(x, x, x, w_q, w_k, w_v, one, num_heads=1, law=None)
    expected = softmax(x @ w_q @ (x @ w_k).T / math.sqrt(8)) @ (x @ w_v)
    np.testing.assert_allclose(projected, expected, atol=1e-12)
    assert abs(projected - plain).max() > 0.5


@claim(
    "tutorial-4.1",
    says=r"Invariance: $\mathrm{Attn}(PQ, PK, PV) = P\,\mathrm{Attn}(Q,K,V)$.",
    verdict="holds",
    correct="The equation holds; its name is equivariance. The output is invariant under a joint permutation of keys and values.",
    function="isentropic.attention",
)
def test_permutations():
    q, k, v = draw(3, 9, 4)
    p = np.random.default_rng(66).permutation(9)
    out = it.attention(q, k, v, law=None)
    np.testing.assert_allclose(out, softmax(q @ k.T / 2) @ v, atol=1e-13)
    np.testing.assert_allclose(it.attention(q[p], k[p], v[p], law=None), out[p], atol=1e-13)
    assert abs(out[p] - out).max() > 0.1
    np.testing.assert_allclose(it.attention(q, k[p], v[p], law=None), out, atol=1e-13)


@claim(
    "tutorial-4.2",
    says=r"“Linear complexity”: time $O(nmd_k + nmd_v)$, memory $O(nm)$.",
    verdict="does not hold",
    correct="The cost is as stated, which is quadratic for n = m, not linear. Memory need not be quadratic: in tiles it is O(n).",
    function="isentropic.attention",
)
def test_memory_is_not_quadratic_and_work_is():
    n, d = 4096, 16
    q, k, v = draw(3, n, d).astype("float32")
    # Every pair of a query and a key has a weight of its own: twice the length, four times the products.
    pairs = [np.count_nonzero(it.AttentionDistribution(q[:m], k[:m]).weights()) for m in (200, 400)]
    assert pairs[1] == 4 * pairs[0]
    tracemalloc.start()
    it.attention(q, k, v, implementation="generic")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < n * n * 4 / 2


@claim(
    "tutorial-4.3",
    says=r"$\partial L/\partial V_j = \sum_i α_{ij}\,\partial L/\partial\text{output}_i$.",
    verdict="holds",
    function="isentropic.attention",
)
def test_gradient_of_values():
    q, k, v = draw(3, 6, 4)
    upstream = draw(6, 4, seed=67)  # ∂L/∂output for L = Σ upstream · output, which is linear in V
    expected = it.AttentionDistribution(q, k).weights().T @ upstream
    gradient = np.empty_like(v)
    for index in np.ndindex(v.shape):
        one = np.zeros_like(v)
        one[index] = 1
        gradient[index] = (upstream * (it.attention(q, k, v + one) - it.attention(q, k, v))).sum()
    np.testing.assert_allclose(gradient, expected, atol=1e-12)


@claim(
    "tutorial-5.1",
    says=r"$S'_{ij} = -\infty$ where key j is padding, else $S_{ij}$.",
    verdict="holds with a condition",
    correct="The query must see some key. For a query that sees none the formula is 0/0; here its output and entropy are 0. Padding does "
    "not count in the n of a law.",
    function="isentropic.masks.padding",
)
def test_padding():
    q, k, v = draw(3, 3, 5, 4)
    lengths = np.asarray([5, 2, 0])
    hidden = np.arange(5) >= lengths[:, None, None]
    with np.errstate(invalid="ignore"):
        formula = softmax(np.where(hidden, -np.inf, q @ k.swapaxes(-1, -2) / 2)) @ v
    mask = masks.padding(lengths)
    out = it.attention(q, k, v, mask=mask, law=None)
    np.testing.assert_allclose(out[:2], formula[:2], atol=1e-13)
    assert np.isnan(formula[2]).all()
    assert (out[2] == 0).all()
    assert (it.attention_entropy(q, k, mask=mask)[2] == 0).all()
    # With the law: as if the padding were not there.
    alone = it.attention(q[1], k[1, :2], v[1, :2])
    np.testing.assert_allclose(it.attention(q, k, v, mask=mask)[1], alone, atol=1e-13)


@claim(
    "tutorial-5.2",
    says=r"Causal mask: 1 if $j \le i$, else 0.",
    verdict="holds with a condition",
    correct="This is for as many queries as keys. With a cache of S > L keys, $j \\le i + S - L$: the last query sees every key.",
    function="isentropic.masks.causal",
)
def test_causal():
    q, k, v = draw(3, 6, 4)
    i, j = np.arange(6)[:, None], np.arange(6)
    full = it.attention(q, k, v, mask=masks.causal())
    np.testing.assert_allclose(full, it.attention(q, k, v, mask=j <= i), atol=1e-13)
    last = it.attention(q[4:], k, v, mask=masks.causal())
    np.testing.assert_allclose(last, full[4:], atol=1e-13)
    as_written = it.attention(q[4:], k, v, mask=j <= np.arange(2)[:, None])
    assert abs(as_written - full[4:]).max() > 0.1


@claim(
    "tutorial-6.1",
    says="The output is a weighted mean in the space of the values.",
    verdict="holds",
    function="isentropic.attention",
)
def test_output_is_a_mean():
    q, k, v = draw(3, 50, 4)
    out = it.attention(q * 3, k * 3, v)
    assert (out <= v.max(0)).all()
    assert (out >= v.min(0)).all()
    np.testing.assert_allclose(it.attention(q, k, np.ones((50, 1))), 1, rtol=1e-13)


@claim(
    "tutorial-6.2",
    says=r"The similarity is the cosine: $\frac{q\cdot k}{\|q\|\|k\|}\cdot\|q\|\|k\|/\sqrt{d_k}$.",
    verdict="does not hold",
    correct=r"The norms cancel. What remains is $q\cdot k/\sqrt{d_k}$, which grows with them. For the cosine, q and k must be normalized.",
    function="isentropic.AttentionDistribution.weights",
)
def test_similarity_is_no_cosine():
    q, k = draw(3, 8), draw(5, 8, seed=68)
    norms = np.linalg.norm(q, axis=-1)[:, None] * np.linalg.norm(k, axis=-1)
    cosine = q @ k.T / norms
    np.testing.assert_allclose(cosine * norms / math.sqrt(8), q @ k.T / math.sqrt(8), rtol=1e-12)
    unit_q, unit_k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    weights = it.AttentionDistribution(q, k, law=None).weights()
    by_cosine = it.AttentionDistribution(unit_q, unit_k, scale=1.0, law=None).weights()
    np.testing.assert_allclose(by_cosine, softmax(cosine), rtol=1e-12)
    # Longer keys change the weights, and not the cosines.
    assert abs(it.AttentionDistribution(q, 3 * k, law=None).weights() - weights).max() > 0.1
    assert abs(weights - by_cosine).max() > 0.01


@claim(
    "tutorial-7.1",
    says=r"Additive attention: $e_{ij} = v^\top\tanh(W_qQ_i + W_kK_j)$.",
    verdict="definition",
    function="isentropic.layers.additive_attention",
)
@claim(
    "tutorial-7.1.1",
    says=r"Product attention has $O(d_k)$ parameters, additive $O(d_k^2)$.",
    verdict="does not hold",
    correct=r"The product has no parameters. Additive attention has $2d_kA + A$ with A hidden units, as many as the projections of q and k "
    "before a product.",
    function="isentropic.layers.additive_attention",
)
def test_additive():
    q, k, values = draw(3, 5, 4)
    w_q, w_k = draw(2, 4, 8, seed=69)
    v = draw(8, seed=70)
    scores = np.tanh((q @ w_q)[:, None] + (k @ w_k)[None]) @ v
    out = it.layers.additive_attention(q, k, values, w_q, w_k, v)
    np.testing.assert_allclose(out, softmax(scores) @ values, atol=1e-13)
    assert w_q.size + w_k.size + v.size == 2 * 4 * 8 + 8
    # The product takes no parameter beside its inputs.
    np.testing.assert_allclose(
        it.attention(q, k, values, law=None), softmax(q @ k.T / 2) @ values, atol=1e-13
    )


@claim(
    "tutorial-7.2",
    says=r"$\mathrm{head}_i = \mathrm{Attn}(QW_i^Q, KW_i^K, VW_i^V)$, joined and multiplied by $W^O$.",
    verdict="definition",
    function="isentropic.layers.multi_head_attention",
)
def test_heads():
    q, k, v = draw(3, 5, 8)
    w_q, w_k, w_v, w_o = draw(4, 8, 8, seed=71)
    heads = []
    for i in range(2):
        part = slice(4 * i, 4 * i + 4)
        a, b, c = q @ w_q[:, part], k @ w_k[:, part], v @ w_v[:, part]
        heads.append(softmax(a @ b.T / 2) @ c)
    out = it.layers.multi_head_attention(q, k, v, w_q, w_k, w_v, w_o, num_heads=2, law=None)
    np.testing.assert_allclose(out, np.concatenate(heads, -1) @ w_o, atol=1e-12)


@claim(
    "tutorial-8.1",
    says="Use a stable softmax.",
    verdict="holds",
    correct="If the maximum is subtracted, nothing overflows, and a common offset of the logits costs no digits.",
    function="isentropic.attention_entropy",
)
def test_stable():
    q, k = draw(4, 8), draw(100, 8, seed=72)
    bias = np.full((1, 100), 1e4)
    with np.errstate(over="ignore", invalid="ignore"):
        naive = np.exp(q @ k.T + bias)
        assert np.isnan(naive / naive.sum(-1, keepdims=True)).all()
    h = it.attention_entropy(q, k)
    np.testing.assert_allclose(it.attention_entropy(q, k, bias=bias), h, rtol=1e-10)
    p = softmax(math.log(100) / math.log(512) * q @ k.T / math.sqrt(8))
    np.testing.assert_allclose(h, -(p * np.log(p)).sum(-1), rtol=1e-10)
