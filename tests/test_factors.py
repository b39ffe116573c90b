"""The factor that gives the entropy a wanted value: against SciPy's root finder, edges, derivatives."""

import math

import numpy as np
import oracles
import pytest
import scipy.optimize
from hypothesis import given
from hypothesis import strategies as st

import isentropic as it
from isentropic import masks


def _close(backend):
    return {"rtol": 1e-9} if backend.float64 else {"rtol": 3e-4}


def _root(logits, target):
    """The factor by bisection of a plain formula."""
    s = np.asarray(logits, float)

    def excess(u):
        return oracles.entropy(oracles.softmax(math.exp(u) * s)) - target

    return math.exp(scipy.optimize.brentq(excess, -25, 25, xtol=1e-13, rtol=1e-14))


def _shapes_of_scores(n):
    """Rows of logits as heads have them, and worse."""
    rng = np.random.default_rng(3)
    gap = rng.normal(size=n)
    gap[0] = gap[1:].max() + 1e-3  # nearly a tie at the top
    return {
        "normal": rng.normal(size=n) * 3 + 100,
        "narrow": rng.normal(size=n) * 1e-3,
        "needle": np.where(np.arange(n) < 1, 7.5, 0.0),
        "heavy": rng.standard_cauchy(size=n),
        "exponential": rng.exponential(size=n),
        "uniform": rng.uniform(size=n),
        "gap": gap,
        "two scales": rng.normal(size=n) * 0.01 + np.where(np.arange(n) < n // 4, 1.0, 0.0),
        "decades": -(10.0 ** np.linspace(-3, 3, n)),
        "additive mask": np.where(np.arange(n) < n - 3, rng.normal(size=n), -1e9),
    }


class TestMatchEntropy:
    @pytest.mark.float64
    @pytest.mark.parametrize("share", [0.02, 0.3, 0.7, 0.98])
    @pytest.mark.parametrize("n", [16, 700])
    def test_against_bisection(self, backend, n, share):
        scores = np.stack(list(_shapes_of_scores(n).values())).astype(backend.dtypes[-1])
        target = share * math.log(n)
        got = it.factor_for_entropy(backend.array(scores), target)
        expected = np.asarray([_root(row, target) for row in scores])
        backend.assert_close(got, expected, **_close(backend))

    @pytest.mark.host
    @given(
        st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=40),
        st.floats(0.01, 0.99),
    )
    def test_entropy_is_met(self, logits, share):
        s = np.asarray(logits)
        ties = np.log((s.max() - s < 1e-9 * max(s.max() - s.min(), 1e-300)).sum())
        if s.max() == s.min():
            assert it.factor_for_entropy(s, share) == 1
            return
        if s.max() - np.max(s[s < s.max()]) < 1e-290:
            return  # the factor overflows
        target = ties + share * (math.log(s.size) - ties)
        factor = it.factor_for_entropy(s, target)
        centered = (s - s.max()) * factor  # a large common offset would lose digits
        assert oracles.entropy(oracles.softmax(centered)) == pytest.approx(target, abs=1e-8)

    def test_differences_of_very_different_sizes(self, backend):
        """Two scores that are nearly equal, and one that is far: entropies above log 2 and below."""
        scores = backend.array([[0.0, 1e-28, -1.0]] * 3, "float32")
        target = backend.array([0.9, math.log(3) - 1e-3, 0.5], "float32")
        factor = backend.numpy(it.factor_for_entropy(scores, target)).astype(float)
        for row in (0, 1):
            p = oracles.softmax(np.asarray([0.0, 0.0, -1.0]) * factor[row])
            assert oracles.entropy(p) == pytest.approx(float(backend.numpy(target)[row]), abs=1e-5)
        assert oracles.entropy(oracles.softmax(np.asarray([0.0, 1e-28]) * factor[2])) == pytest.approx(
            0.5, abs=1e-5
        )

    @pytest.mark.float64
    def test_steps_suffice(self, backend):
        """The last step of every row is one of rounding."""
        n = 4096
        scores = np.stack(list(_shapes_of_scores(n).values())).astype(backend.dtypes[-1])
        targets = np.linspace(0.01, 0.99, 25) * math.log(n)
        logits = backend.array(np.broadcast_to(scores[:, None], (len(scores), 25, n)))
        factor = backend.numpy(
            it.factor_for_entropy(logits, backend.array(targets, backend.dtypes[-1]))
        )
        centered = (scores - scores.max(axis=-1, keepdims=True)).astype(float)[:, None]
        got = oracles.entropy(oracles.softmax(centered * factor[..., None].astype(float)))
        tolerance = 1e-10 if backend.float64 else 1e-4
        np.testing.assert_allclose(got, np.broadcast_to(targets, got.shape), atol=tolerance)

    def test_saturation(self, backend):
        inf = math.inf
        rows = [[1.0, 2, 3], [2, 2, 1], [1, 1, 1], [-inf, 5, -inf], [-inf] * 3, [-inf, 2, 1]]
        logits = backend.array(rows, "float32")

        def factors(target):
            return backend.numpy(it.factor_for_entropy(logits, target))

        np.testing.assert_array_equal(factors(1.2), [0, 0, 1, 1, 1, 0])
        low = factors(0.5)
        np.testing.assert_array_equal(low[2:5], 1)
        assert low[0] == pytest.approx(_root([1, 2, 3], 0.5), rel=1e-4)
        assert low[5] == pytest.approx(_root([2, 1], 0.5), rel=1e-4)
        # Two ties hold the entropy at log 2 at least; the others are 1 below.
        assert low[1] == pytest.approx(200, rel=1e-6)
        for target in (0.0, -1.0):
            high = factors(target)
            np.testing.assert_allclose(high[[0, 1, 5]], 200, rtol=1e-6)
            weights = oracles.softmax(high[0] * np.asarray(rows[0]))
            np.testing.assert_allclose(weights, [0, 0, 1], atol=1e-80)

    def test_lowest_numbers_as_masks(self, backend, rng):
        """The lowest number of the dtype hides as −∞ does."""
        s = rng.normal(size=20).astype("float32")
        masked = np.concatenate((s, np.full(5, np.finfo("float32").min))).astype("float32")
        got = it.factor_for_entropy(backend.array(masked), 1.5)
        backend.assert_close(got, np.asarray(_root(s, 1.5)), rtol=3e-4)

    def test_largest_factor_is_finite(self, backend):
        dtype = backend.half or "float32"
        got = backend.numpy(
            it.factor_for_entropy(backend.array([0.0, 1e-7, 1.0, 1.0 + 1e-3], dtype), 0.0)
        )
        assert np.isfinite(got)
        assert got > 1e4

    def test_not_a_number(self, backend):
        logits = backend.array([[1.0, math.nan, 3.0], [1.0, 2.0, 3.0]], "float32")
        got = backend.numpy(it.factor_for_entropy(logits, 0.5))
        assert np.isnan(got[0])
        assert got[1] > 0
        mask = backend.array([[True, False, True]])
        assert backend.numpy(it.factor_for_entropy(logits, 0.5, mask=mask))[0] > 0
        target = backend.array([0.5, math.nan], "float32")
        assert np.isnan(backend.numpy(it.factor_for_entropy(logits, target))[1])

    def test_axis_mask_and_targets(self, backend, rng):
        s = rng.normal(size=(3, 8, 2)).astype("float32")
        mask = rng.random((8, 1)) < 0.7
        target = np.asarray([[0.5], [1.0], [1.2]], "float32")
        got = it.factor_for_entropy(
            backend.array(s), backend.array(target), axis=1, mask=backend.array(mask)
        )
        expected = [[_root(s[i, mask[:, 0], j], target[i, 0]) for j in range(2)] for i in range(3)]
        backend.assert_close(got, np.asarray(expected), rtol=3e-4)

    def test_empty(self, backend):
        assert it.factor_for_entropy(backend.array(np.ones((0, 4))), 1.0).shape == (0,)
        backend.assert_close(it.factor_for_entropy(backend.array(np.ones((2, 0))), 1.0), np.ones(2))

    def test_half_precision(self, backend, rng):
        if backend.half is None:
            pytest.skip("has no half precision")
        s = backend.array(rng.normal(size=(4, 3000)), backend.half)
        factor = it.factor_for_entropy(s, 5.0)
        assert factor.dtype == s.dtype
        got = it.entropy_from_logits(backend.xp.astype(s * factor[:, None], backend.xp.float32))
        np.testing.assert_allclose(backend.numpy(got), 5.0, atol=0.02)

    def test_errors(self, backend):
        logits = backend.array(np.ones((2, 3)))
        with pytest.raises(TypeError, match="`logits` must have a real floating-point dtype"):
            it.factor_for_entropy(backend.array([1, 2]), 0.5)
        with pytest.raises(ValueError, match="`target` must have a shape broadcastable to"):
            it.factor_for_entropy(logits, backend.array(np.ones(3)))
        with pytest.raises(TypeError, match="`target` must be a real number, got str"):
            it.factor_for_entropy(logits, "1")
        with pytest.raises(ValueError, match="`target` must be finite, got nan"):
            it.factor_for_entropy(logits, math.nan)
        with pytest.raises(TypeError, match="`mask` must be boolean"):
            it.factor_for_entropy(logits, 0.5, mask=logits)


class TestMatchAttentionEntropy:
    @pytest.mark.parametrize(
        "options",
        [{}, {"is_causal": True}, {"mask": masks.window(5) & masks.causal()}, {"scale": 1.3}],
        ids=["full", "causal", "window", "scale"],
    )
    @pytest.mark.float64
    def test_equals_that_of_the_logits(self, backend, rng, options, tiny_tiles):
        q, k = rng.normal(size=(2, 2, 3, 11, 8)).astype(backend.dtypes[-1])
        k = np.concatenate((k, k + 1), axis=-2)
        target = rng.uniform(0.3, 2.5, size=(3, 11)).astype(backend.dtypes[-1])
        args = [backend.array(x) for x in (q, k, target)]
        p = it.AttentionDistribution(*args[:2], law=None, **options)
        got = p.factor_for_entropy(args[2])
        visible = np.ones((11, 22), bool)
        offset = np.arange(22) - np.arange(11)[:, None] - 11
        if "is_causal" in options:
            visible = offset <= 0
        if "mask" in options:
            visible = (offset <= 0) & (offset >= -5)
        logits = oracles.attention(q, k, visible=visible, scale=options.get("scale")).logits
        expected = it.factor_for_entropy(logits, target.astype(float))
        backend.assert_close(got, expected, **_close(backend))

    def test_grouped_heads_and_large_calls(self, backend, rng):
        q, k = rng.normal(size=(4, 150, 8)), rng.normal(size=(2, 600, 8))
        args = [backend.array(x.astype("float32")) for x in (q, k)]
        factor = it.AttentionDistribution(*args, law=None, enable_gqa=True).factor_for_entropy(3.0)
        scaled = args[0] * factor[..., None]
        h = it.attention_entropy(scaled, args[1], law=None, enable_gqa=True)
        np.testing.assert_allclose(backend.numpy(h), 3.0, atol=2e-5)

    @pytest.mark.parametrize("kind", ["none", "causal", "array", "lengths", "window"])
    def test_one_head_at_a_time(self, backend, rng, set_blocks, kind):
        """On a CPU, NumPy computes large calls one head at a time."""
        q = rng.normal(size=(2, 4, 7, 8)).astype("float32")
        k = rng.normal(size=(2, 2, 13, 8)).astype("float32")
        visible = rng.random((2, 1, 7, 13)) < 0.6
        visible[0, 0, 3] = False
        visible[..., 5] = False
        lengths = backend.array(np.asarray([[13], [4]]))
        mask = {
            "none": None,
            "causal": masks.causal(),
            "array": backend.array(visible),
            "lengths": masks.padding(lengths),
            "window": masks.window(3) & masks.causal(),
        }[kind]
        if kind == "array":
            k[:, :, 5] = math.nan  # hidden
            q[1, 2, 4] = math.inf
        target = rng.uniform(0.9, 1.5, size=(4, 1)).astype("float32")
        args = [backend.array(x) for x in (q, k, target)]
        p = it.AttentionDistribution(*args[:2], mask=mask, law=None, enable_gqa=True)
        expected = p.factor_for_entropy(args[2])
        set_blocks(numpy_min_head_logits=0, numpy_min_logits=0, cache_numbers=30)
        got = p.factor_for_entropy(args[2])
        assert type(got) is type(expected)
        backend.assert_close(got, backend.numpy(expected), rtol=5e-5)
        if kind == "array":
            found = backend.numpy(got)
            assert np.isnan(found[1, 2, 4]) == visible[1, 0, 4].any()
            assert np.isfinite(np.delete(found.reshape(-1, 7), 6, axis=0)).all()

    def test_edges(self, backend):
        one = backend.array(np.ones((1, 4), "float32"))
        # A query that sees one key, or none, has no entropy to change.
        backend.assert_close(
            it.AttentionDistribution(one, one, law=None).factor_for_entropy(1.0), np.ones(1)
        )
        hidden = backend.array([[False]])
        backend.assert_close(
            it.AttentionDistribution(one, one, mask=hidden, law=None).factor_for_entropy(1.0),
            np.ones(1),
        )
        backend.assert_close(
            it.AttentionDistribution(one, one[:0, ...], law=None).factor_for_entropy(1.0), np.ones(1)
        )
        assert it.AttentionDistribution(one[:0, ...], one, law=None).factor_for_entropy(1.0).shape == (
            0,
        )

    def test_what_is_hidden_has_no_effect(self, backend, rng):
        q, k = rng.normal(size=(2, 6, 4)).astype("float32")
        poisoned = k.copy()
        poisoned[5] = math.nan
        mask = backend.array(np.arange(6) < 5)[None, :]
        got = it.AttentionDistribution(
            backend.array(q), backend.array(poisoned), mask=mask, law=None
        ).factor_for_entropy(1.0)
        expected = it.AttentionDistribution(
            backend.array(q), backend.array(k[:5]), law=None
        ).factor_for_entropy(1.0)
        backend.assert_close(got, backend.numpy(expected), rtol=1e-6)

    def test_errors(self, backend):
        q = backend.array(np.ones((3, 4), "float32"))
        with pytest.raises(ValueError, match="`key` must have the last dimension of `query`"):
            it.AttentionDistribution(
                q, backend.array(np.ones((3, 5), "float32")), law=None
            ).factor_for_entropy(1.0)
        with pytest.raises(ValueError, match="`target` must have a shape broadcastable to"):
            it.AttentionDistribution(q, q, law=None).factor_for_entropy(
                backend.array(np.ones(2, "float32"))
            )


class TestDerivatives:
    """The derivative of log λ is −1/Var(λs) for the target, by the implicit function."""

    def test_for_the_target(self, backend, rng):
        if backend.library not in ("torch", "jax"):
            pytest.skip("has no derivatives")
        s = rng.normal(size=12).astype("float32")
        factor = _root(s, 1.5)
        p = oracles.softmax(factor * s.astype(float))
        x = factor * s.astype(float)
        expected = -factor / (p @ x**2 - (p @ x) ** 2)
        if backend.library == "torch":
            target = backend.xp.asarray(1.5, dtype=backend.xp.float32, device=backend.device)
            target.requires_grad_()
            it.factor_for_entropy(backend.array(s), target).backward()
            got = float(target.grad)
        else:
            import jax

            got = float(jax.grad(lambda t: it.factor_for_entropy(backend.array(s), t))(1.5))
        assert got == pytest.approx(expected, rel=1e-3)

    def test_second_for_the_target(self, backend, rng):
        if backend.library not in ("torch", "jax"):
            pytest.skip("has no derivatives")
        s, step = rng.normal(size=12).astype("float32"), 1e-3
        behind, here, ahead = (_root(s, 1.5 + d) for d in (-step, 0.0, step))
        if backend.library == "torch":
            target = backend.xp.asarray(1.5, dtype=backend.xp.float32, device=backend.device)
            factor = it.factor_for_entropy(backend.array(s), target.requires_grad_())
            (slope,) = backend.xp.autograd.grad(factor, target, create_graph=True)
            slope.backward()
            got = float(target.grad)
        else:
            import jax

            got = float(jax.grad(jax.grad(lambda t: it.factor_for_entropy(backend.array(s), t)))(1.5))
        assert got == pytest.approx((ahead - 2 * here + behind) / step**2, rel=1e-2)


def test_the_factor_of_one_row_is_an_array(backend):
    logits = backend.array([1.0, 2.0, 3.0], "float32")
    assert type(it.factor_for_entropy(logits, 0.5)) is type(logits)
