"""Random features: unbiased, of the predicted variance; and attention through them."""

import numpy as np
import pytest

import isentropic as it
from isentropic import laws


def estimate(q, k, v, w, *, is_causal, law, scale=None):
    """Linear attention by its definition, with the features formed."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    n_queries, total = q.shape[-2], k.shape[-2]
    visible = np.ones((n_queries, total), bool)
    if is_causal:
        visible = np.tril(visible, total - n_queries)
    factor = np.asarray([0.0 if n == 0 or law is None else law(int(n)) for n in visible.sum(-1)])
    factor = np.ones(n_queries) if law is None else factor
    x, y = q * scale**0.5 * factor[:, None], k * scale**0.5

    def phi(z):
        return np.exp(z @ w.T - (z**2).sum(-1, keepdims=True) / 2) / len(w) ** 0.5

    a = np.where(visible, phi(x) @ phi(y).swapaxes(-1, -2), 0.0)
    total = a.sum(-1, keepdims=True)
    return np.where(total == 0, 0.0, a @ v / np.where(total == 0, 1.0, total))


class TestFeatures:
    @pytest.mark.host
    @pytest.mark.parametrize("orthogonal", [True, False])
    def test_unbiased_and_of_the_predicted_variance(self, orthogonal):
        rng = np.random.default_rng(1)
        x, y = rng.normal(size=(2, 6)) * 0.35
        m, draws = 8, 8000
        products = np.empty(draws)
        for seed in range(draws):
            phi = it.layers.positive_features(6, m, orthogonal=orthogonal, rng=seed)
            products[seed] = phi(x) @ phi(y) / np.exp(x @ y)
        assert abs(products.mean() - 1) < 4.5 * products.std() / draws**0.5
        predicted = np.expm1(((x + y) ** 2).sum()) / m
        if orthogonal:
            assert products.var() < predicted
        else:
            np.testing.assert_allclose(products.var(), predicted, rtol=0.15)

    @pytest.mark.host
    def test_without_the_norm_term_it_is_another_kernel(self):
        # Equation 58 of the document lacks it: the mean is e^{‖x + y‖²/2}.
        rng = np.random.default_rng(1)
        x, y = rng.normal(size=(2, 6)) * 0.35
        w = it.layers.positive_features(6, 400_000, rng=0).weights
        got = np.mean(np.exp(w @ x) * np.exp(w @ y))
        np.testing.assert_allclose(got, np.exp(((x + y) ** 2).sum() / 2), rtol=0.02)
        assert abs(got / np.exp(x @ y) - 1) > 0.2

    @pytest.mark.host
    def test_orthogonal_blocks(self):
        w = it.layers.positive_features(16, 40, rng=0).weights
        for start in (0, 16, 32):
            block = w[start : start + 16]
            gram = block @ block.T
            np.testing.assert_allclose(gram - np.diag(np.diagonal(gram)), 0, atol=1e-10)
        lengths = np.concatenate(
            [(it.layers.positive_features(16, 16, rng=s).weights ** 2).sum(axis=1) for s in range(300)]
        )
        np.testing.assert_allclose(lengths.mean(), 16, rtol=0.02)
        np.testing.assert_allclose(lengths.var(), 32, rtol=0.1)

    def test_same_draw_everywhere(self, backend):
        for orthogonal in (True, False):
            exact = it.layers.positive_features(8, 20, rng=3, orthogonal=orthogonal).weights
            like = backend.array(np.zeros(1, "float32"))
            got = it.layers.positive_features(8, 20, rng=3, orthogonal=orthogonal, like=like).weights
            np.testing.assert_array_equal(backend.numpy(got), exact.astype("float32"))

    def test_equality_is_by_value(self, backend):
        like = backend.array(np.zeros(1, "float32"))
        phi, again, other = (it.layers.positive_features(8, 20, rng=i, like=like) for i in (3, 3, 4))
        assert phi == again
        assert phi != other
        x = backend.array(np.ones((3, 8), "float32"))
        error, same, longer = (it.layers.linear_attention_error(y, y, phi) for y in (x, x, 2 * x))
        assert error == same
        assert error != longer
        for unhashable in (phi, error):
            with pytest.raises(TypeError, match="unhashable: "):
                hash(unhashable)

    def test_errors(self, backend):
        phi = it.layers.positive_features(8, 20, rng=3, like=backend.array(np.zeros(1)))
        assert (phi.n_features, phi.n_components) == (8, 20)
        with pytest.raises(ValueError, match="`x` must have a last dimension of 8, got 7"):
            phi(backend.array(np.zeros((3, 7))))
        with pytest.raises(TypeError, match="`x` must have a real floating-point dtype"):
            phi(backend.array(np.zeros((3, 8), np.int32)))
        with pytest.raises(ValueError, match="`n_components` must be at least 1"):
            it.layers.positive_features(8, 0)


class TestLinearAttention:
    @pytest.mark.parametrize(("n_queries", "n_keys"), [(8, 8), (3, 10), (10, 3), (0, 4)])
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_against_the_definition(self, backend, n_queries, n_keys, is_causal, rng, tiny_tiles):
        law = laws.LogLength(16) if n_queries > n_keys or is_causal else None
        q = rng.normal(size=(2, 3, n_queries, 4))
        k = rng.normal(size=(2, 1, n_keys, 4))
        v = rng.normal(size=(3, n_keys, 5))
        w = it.layers.positive_features(4, 9, rng=1).weights
        expected = estimate(q, k, v, w, is_causal=is_causal, law=law, scale=0.4)
        got = it.layers.linear_attention(
            *map(backend.array, (q, k, v)), it.layers.PositiveFeatures(backend.array(w)),
            is_causal=is_causal, law=law, scale=0.4,
        )  # fmt: skip
        backend.assert_close(got, expected, rtol=1e-4, atol=1e-5)

    def test_tends_to_attention(self, backend, rng):
        q, k, v = (backend.array(x) for x in rng.normal(size=(3, 20, 4)) * 0.6)
        for is_causal in (False, True):
            exact = backend.numpy(it.attention(q, k, v, is_causal=is_causal))
            errors = []
            for m in (20, 1000):  # the error falls like 1/√m
                phi = it.layers.positive_features(4, m, rng=0, like=q)
                got = backend.numpy(it.layers.linear_attention(q, k, v, phi, is_causal=is_causal))
                errors.append(np.abs(got - exact).mean())
            assert errors[1] < 0.02
            assert errors[1] < errors[0] / 3

    def test_no_overflow_and_no_leak_through_causality(self, backend, rng):
        # Norms whose features overflow float32 by far; and a huge last key, which only shifts may leak.
        q, k, v = rng.normal(size=(3, 30, 4)).astype("float32")
        phi = it.layers.positive_features(4, 20, rng=0, like=backend.array(q))
        big = it.layers.linear_attention(*map(backend.array, (20 * q, 20 * k, v)), phi, is_causal=True)
        assert np.isfinite(backend.numpy(big)).all()
        calm = it.layers.linear_attention(*map(backend.array, (q, k, v)), phi, is_causal=True)
        k[-1] *= 1e4
        wild = it.layers.linear_attention(*map(backend.array, (q, k, v)), phi, is_causal=True)
        np.testing.assert_array_equal(backend.numpy(calm)[:-1], backend.numpy(wild)[:-1])

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    @pytest.mark.parametrize("which", [1, 2])
    def test_later_keys_that_are_not_finite_do_not_leak(self, backend, bad, which, rng):
        arrays = list(rng.normal(size=(3, 10, 4)).astype("float32"))
        phi = it.layers.positive_features(4, 20, rng=0, like=backend.array(arrays[0]))
        clean = it.layers.linear_attention(*map(backend.array, arrays), phi, is_causal=True)
        arrays[which] = arrays[which].copy()
        arrays[which][6, 1] = bad
        with np.errstate(invalid="ignore"):
            dirty = it.layers.linear_attention(*map(backend.array, arrays), phi, is_causal=True)
        clean, dirty = backend.numpy(clean), backend.numpy(dirty)
        np.testing.assert_allclose(dirty[:6], clean[:6], rtol=1e-5, atol=1e-6)
        assert not np.isfinite(dirty[6:]).all(axis=-1).any()

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    @pytest.mark.parametrize("which", [1, 2])
    def test_nor_do_they_leak_into_gradients_of_earlier_queries(self, backend, bad, which, rng):
        arrays = list(rng.normal(size=(3, 10, 4)).astype("float32"))
        phi = it.layers.positive_features(4, 20, rng=0, like=backend.array(arrays[0]))

        def loss(*qkv):
            return (it.layers.linear_attention(*qkv, phi, is_causal=True)[:6] ** 2).sum()

        def of_query():
            own = [backend.array(x) for x in arrays]
            if backend.library == "jax":
                import jax

                return jax.grad(loss)(*own)
            own[0].requires_grad_()
            loss(*own).backward()
            return own[0].grad

        if backend.library not in ("torch", "jax"):
            pytest.skip("no gradients here")
        clean = backend.numpy(of_query())
        arrays[which][6, 1] = bad
        dirty = backend.numpy(of_query())
        np.testing.assert_allclose(dirty[:6], clean[:6], rtol=1e-4, atol=1e-5)
        assert np.abs(clean[:6]).max() > 0.01

    @pytest.mark.host
    def test_with_the_standard_of_2024(self, rng):
        xp = pytest.importorskip("array_api_strict")
        q, k, v = rng.normal(size=(3, 2, 9, 4))
        phi = it.layers.positive_features(4, 20, rng=0)
        with xp.ArrayAPIStrictFlags(api_version="2024.12"):
            arrays = [xp.asarray(x) for x in (q, k, v, phi.weights)]
            got = it.layers.linear_attention(
                *arrays[:3], it.layers.PositiveFeatures(arrays[3]), is_causal=True
            )
        expected = it.layers.linear_attention(q, k, v, phi, is_causal=True)
        np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-12)

    @pytest.mark.host
    def test_memory_is_linear(self, rng):
        import tracemalloc

        n = 8192
        q, k, v = rng.normal(size=(3, n, 16)).astype("float32") * 0.3
        phi = it.layers.positive_features(16, 32, rng=0, like=q)
        for is_causal in (False, True):
            tracemalloc.start()
            try:
                it.layers.linear_attention(q, k, v, phi, is_causal=is_causal)
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert peak < n * n * 4 / 8

    def test_errors(self, backend, rng):
        q, k, v = (backend.array(x) for x in rng.normal(size=(3, 5, 4)))
        phi = it.layers.positive_features(4, 9, rng=1, like=q)
        with pytest.raises(TypeError, match="`features` must be PositiveFeatures"):
            it.layers.linear_attention(q, k, v, phi.weights)
        with pytest.raises(ValueError, match="`features` must be for vectors of the last dimension"):
            it.layers.linear_attention(q, k, v, it.layers.positive_features(5, 9, rng=1, like=q))
        with pytest.raises(ValueError, match="`scale` must be above 0"):
            it.layers.linear_attention(q, k, v, phi, scale=-1.0)
        with pytest.raises(TypeError, match="`law` must be a law"):
            it.layers.linear_attention(q, k, v, phi, law=2.0)
        with pytest.raises(ValueError, match="`key` must have the last dimension of `query`"):
            it.layers.linear_attention(q, k[:, :3], v, phi)
        if backend.library != "numpy":
            drawn = it.layers.positive_features(4, 9, rng=1)
            with pytest.raises(TypeError, match="draw the features with `like=query`"):
                it.layers.linear_attention(q, k, v, drawn)
            with pytest.raises(TypeError, match="draw the features with `like=x`"):
                drawn(q)


class TestError:
    def test_measured_and_predicted(self, backend, rng, tiny_tiles):
        q, k = rng.normal(size=(2, 2, 7, 4)) * 0.6
        phi = it.layers.positive_features(4, 12, rng=1)
        x, y = q * 0.5**0.5, k * 0.5**0.5
        error = phi(x) @ phi(y).swapaxes(-1, -2) / np.exp(x @ y.swapaxes(-1, -2)) - 1
        variance = np.expm1(((x[..., None, :] + y[..., None, :, :]) ** 2).sum(-1)) / 12
        visible = np.tril(np.ones((7, 7)))
        for is_causal, mask in ((False, np.ones((7, 7))), (True, visible)):
            got = it.layers.linear_attention_error(
                backend.array(q), backend.array(k), it.layers.PositiveFeatures(backend.array(phi.weights)),
                is_causal=is_causal, law=None, scale=0.5,
            )  # fmt: skip
            for ours, theirs in ((got.measured, error**2), (got.predicted, variance)):
                expected = np.sqrt((theirs * mask).sum(-1) / mask.sum(-1))
                backend.assert_close(ours, expected, rtol=1e-3, atol=1e-5)

    @pytest.mark.host
    def test_features_needed_grow_with_the_norms_and_not_with_log_n(self, rng):
        # m = O(log n), equation 57 of the document, is false.
        def predicted(n, norm, m):
            q, k = rng.normal(size=(2, n, 16)) * norm
            phi = it.layers.positive_features(16, m, rng=0)
            return float(np.median(it.layers.linear_attention_error(q, k, phi, law=None).predicted))

        assert predicted(2000, 0.5, 64) == pytest.approx(predicted(50, 0.5, 64), rel=0.2)
        assert predicted(200, 2.0, 10**4) > 100 * predicted(200, 0.5, 64)

    def test_extremes(self, backend):
        # Opposite vectors, whose sum rounds to less than nothing; and errors beyond all floats.
        x = np.random.default_rng(0).normal(size=(50, 8)).astype("float32")
        phi = it.layers.positive_features(8, 9, rng=1, like=backend.array(x))
        error = it.layers.linear_attention_error(backend.array(x), backend.array(-x), phi, law=None)
        assert np.isfinite(backend.numpy(error.predicted)).all()
        big = backend.array(40 * x)
        error = it.layers.linear_attention_error(big, big, phi, law=None)
        assert np.isinf(backend.numpy(error.predicted)).all()
        assert not np.isnan(backend.numpy(error.measured)).any()

    def test_no_keys(self, backend):
        q, k = backend.array(np.ones((3, 4))), backend.array(np.ones((0, 4)))
        phi = it.layers.positive_features(4, 9, rng=1, like=q)
        error = it.layers.linear_attention_error(q, k, phi)
        assert error.measured.shape == error.predicted.shape == (3,)
        assert it.layers.linear_attention(q, k, k, phi).shape == (3, 4)
