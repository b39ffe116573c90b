"""The factors that bound the largest logit."""

import math

import numpy as np
import oracles
import pytest

import isentropic as it
from isentropic import laws, masks
from isentropic.layers import qk_clip


def clipped(backend, p, factors):
    """The distribution with the queries and the keys of the clipped projections."""
    query, key = (
        x * y[None, :, None, None]
        for x, y in zip((p.query, p.key), (factors.query, factors.key), strict=True)
    )
    return p.replaced(query=query, key=key)


class TestFactors:
    @pytest.mark.parametrize("groups", [1, 2, 6])
    def test_largest_logits_are_at_most_the_threshold(self, backend, rng, groups):
        q, k = rng.normal(size=(2, 6, 9, 8)), rng.normal(size=(2, groups, 9, 8))
        q = q * np.linspace(0.1, 3, 6)[:, None, None]
        p = it.AttentionDistribution(
            backend.array(q, "float32"), backend.array(k, "float32"), enable_gqa=True,
            is_causal=True, law=laws.LogLength(4), sinks=backend.array(np.full(6, 9.0), "float32"),
        )  # fmt: skip
        visible = oracles.causal(9, 9)
        logits = oracles.attention(
            q, k if groups > 1 else np.repeat(k, 6, 1), visible=visible,
            factor=oracles.log_length(visible.sum(-1), 4),
        ).logits  # fmt: skip
        largest = logits.max((0, 2, 3))
        threshold = float(np.median(largest))
        factors = qk_clip(p, threshold)
        assert factors.query.shape == (6,)
        assert factors.key.shape == (groups,)
        product = backend.numpy(factors.query) * np.repeat(backend.numpy(factors.key), 6 // groups)
        np.testing.assert_allclose(product, np.minimum(1, threshold / largest), rtol=1e-5)
        after = clipped(backend, p, factors).replaced(sinks=None).statistics().maximum
        got = backend.numpy(after).max((0, 2))
        np.testing.assert_allclose(got, np.minimum(largest, threshold), rtol=1e-5)
        # No factor is above 1, and the largest of a group is shared evenly.
        assert max(backend.numpy(x).max() for x in factors) <= 1
        if groups == 6:
            np.testing.assert_allclose(
                backend.numpy(factors.query), backend.numpy(factors.key), rtol=1e-6
            )

    def test_arrays(self, backend):
        largest = np.asarray([[1.0, 40.0, 10.0, -5.0], [-math.inf, 10.0, math.nan, 20.0]])
        factors = qk_clip(backend.array(largest, "float32"), 10.0, n_key_heads=2)
        np.testing.assert_allclose(
            backend.numpy(factors.query), [[1, 0.25, 1, 1], [1, 1, np.nan, np.nan]]
        )
        np.testing.assert_allclose(backend.numpy(factors.key), [[1, 1], [1, np.nan]])

    def test_a_head_that_sees_nothing(self, backend, rng):
        x = backend.array(rng.normal(size=(3, 4, 8)) * 100, "float32")
        factors = qk_clip(it.AttentionDistribution(x, x, mask=masks.padding(0)), 1.0)
        assert np.all(backend.numpy(factors.query) == 1)

    def test_without_logits(self, backend):
        x = backend.array(np.ones((3, 4, 8)), "float32")
        for q, k in ((x[:, :0, :], x), (x, x[:, :0, :])):
            factors = qk_clip(it.AttentionDistribution(q, k), 1.0)
            assert np.all(backend.numpy(factors.query) == 1)

    def test_infinite_and_huge_logits(self, backend):
        for largest, threshold in ((math.inf, 1.0), (1e38, 1e-8)):
            factors = qk_clip(backend.array([largest, 1e-9], "float32"), threshold)
            np.testing.assert_allclose(backend.numpy(factors.query), [0, 1])
            np.testing.assert_allclose(backend.numpy(factors.key), [0, 1])

    @pytest.mark.host
    def test_errors(self, rng):
        x = rng.normal(size=(4, 5, 8))
        p = it.AttentionDistribution(x, x)
        with pytest.raises(ValueError, match="`threshold` must be above 0, got 0"):
            qk_clip(p, 0)
        with pytest.raises(TypeError, match="`threshold` must be a real number"):
            qk_clip(p, None)
        with pytest.raises(TypeError, match="`logits` must be an array"):
            qk_clip(3.0, 1.0)
        with pytest.raises(ValueError, match="`n_key_heads` must divide the number of heads, 5, got 2"):
            qk_clip(x[0, :, 0], 1.0, n_key_heads=2)
        with pytest.raises(ValueError, match="`n_key_heads` must be None or 4, as in the distribution"):
            qk_clip(p, 1.0, n_key_heads=2)
        with pytest.raises(ValueError, match="`logits` must have an axis of heads, -3, got"):
            qk_clip(it.AttentionDistribution(x[0], x[0]), 1.0)
        for name, option in (("softcap", 3.0), ("bias", np.zeros(5))):
            with pytest.raises(ValueError, match=f"`logits` must have no {name}, with which"):
                qk_clip(it.AttentionDistribution(x, x, **{name: option}), 1.0)


def test_a_training_run(request):
    """Logits that an optimizer drives up stay bounded after each step, and the task is still learned."""
    if request.config.getoption("--backend") not in (None, "torch"):
        pytest.skip("belongs to the backend torch")
    torch = pytest.importorskip("torch")

    def heads(x, weight, n):
        return (x @ weight).unflatten(-1, (n, -1)).transpose(1, 2)

    def distribution(tokens, wq, wk):
        return it.AttentionDistribution(
            heads(tokens, wq, 4), heads(tokens, wk, 2), enable_gqa=True, law=None
        )

    largest, losses = {}, {}
    for threshold in (None, 8.0):
        torch.manual_seed(0)
        tokens = torch.randn(8, 12, 16) + torch.randn(12, 16)
        target = tokens.roll(1, -2)  # each token copies the one before
        wq, wk, wv = (torch.randn(16, n * size) * 0.3 for n, size in ((4, 8), (2, 8), (2, 16)))
        parameters = [x.requires_grad_() for x in (wq, wk, wv)]
        optimizer = torch.optim.Adam(parameters, lr=0.1)
        largest[threshold], losses[threshold] = [], []
        for _ in range(60):
            out = distribution(tokens, wq, wk).output(heads(tokens, wv, 2)).sum(1)
            loss = ((out - target) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[threshold].append(loss.item())
            with torch.no_grad():
                if threshold is not None:
                    factors = qk_clip(distribution(tokens, wq, wk), threshold)
                    wq.mul_(factors.query.repeat_interleave(8))
                    wk.mul_(factors.key.repeat_interleave(8))
                maximum = distribution(tokens, wq, wk).statistics().maximum
                largest[threshold].append(maximum.max().item())
    assert max(largest[None]) > 16
    assert max(largest[8.0]) < 8.0001
    assert losses[8.0][-1] < 0.7 * losses[8.0][0]
