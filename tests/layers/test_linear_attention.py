"""Random features: unbiased, of the predicted variance; and attention through them."""

import functools

import numpy as np
import pytest

import isentropic as it
from isentropic import laws
from isentropic.layers._linear_attention import PositiveFeatures


def log_ratio(w, s):
    """Log of the density of standard normal directions over that of those with the variance s."""
    d = w.shape[-1]
    return (d * np.log(s) - (1 - 1 / s) * (w**2).sum(-1)) / 2


def log_second_moment(square, d, s):
    """Log of E[estimate²]/exact² for one feature, where ‖x + y‖² is `square`."""
    return d * np.log(s) - d / 2 * np.log(2 * s - 1) + square / (2 * s - 1)


def estimate(q, k, v, w, *, is_causal, law, scale=None, s=1.0):
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
        exponent = z @ w.T - (z**2).sum(-1, keepdims=True) / 2 + log_ratio(w, s) / 2
        return np.exp(exponent) / len(w) ** 0.5

    a = np.where(visible, phi(x) @ phi(y).swapaxes(-1, -2), 0.0)
    total = a.sum(-1, keepdims=True)
    return np.where(total == 0, 0.0, a @ v / np.where(total == 0, 1.0, total))


@functools.cache
def errors_of_estimates(d, square, m=1024):
    """Mean absolute errors of attention among 256 normal queries and keys, ‖x + y‖² on average `square`.

    Of standard normal directions; of directions drawn for `square`; of the plain mean of the values; and of
    the mean of these two.
    """
    errors = []
    for seed in range(5):
        rng = np.random.default_rng(seed)
        q, k = rng.normal(size=(2, 256, d)) * (square / (2 * d**0.5)) ** 0.5
        v = rng.normal(size=(256, d))
        plain, drawn = (
            it.layers.linear_attention(
                q, k, v, it.layers.positive_features(d, m, squared_norm=z, rng=seed), law=None
            )
            for z in (0, square)
        )
        mean, exact = v.mean(axis=0), it.attention(q, k, v, law=None)
        errors.append([np.abs(x - exact).mean() for x in (plain, drawn, mean, (drawn + mean) / 2)])
    return tuple(float(x) for x in np.mean(errors, axis=0))


class TestFeatures:
    @pytest.mark.host
    @pytest.mark.parametrize("squared_norm", [0, 2.5, 10])
    @pytest.mark.parametrize("orthogonal", [True, False])
    def test_unbiased_and_of_the_predicted_variance(self, orthogonal, squared_norm):
        rng = np.random.default_rng(1)
        x, y = rng.normal(size=(2, 6)) * 0.35
        m, draws = 6, 10_000  # draws of one block each
        phi = it.layers.positive_features(
            6, m * draws, orthogonal=orthogonal, squared_norm=squared_norm, rng=0
        )
        products = (phi(x) * phi(y)).reshape(draws, m).sum(axis=-1) * draws / np.exp(x @ y)
        assert abs(products.mean() - 1) < 4.5 * products.std() / draws**0.5
        s = 1.0 if phi.variance is None else phi.variance
        predicted = np.expm1(log_second_moment(((x + y) ** 2).sum(), 6, s)) / m
        if orthogonal:
            assert products.var() < predicted
        else:
            np.testing.assert_allclose(products.var(), predicted, rtol=0.15)

    @pytest.mark.host
    @pytest.mark.parametrize("square", [0.3, 4.0, 30.0])
    def test_the_variance_of_the_directions_is_the_best(self, square):
        # In one dimension the second moment is an integral, and is least at the s that is drawn.
        w, step = np.linspace(-200, 200, 400_001, retstep=True)

        def moment(s):
            log_density = -(w**2) / (2 * s) - np.log(2 * np.pi * s) / 2
            exponent = 2 * (log_ratio(w[:, None], s) + w * square**0.5) - square
            return np.exp(log_density + exponent).sum() * step

        s = it.layers.positive_features(1, 1, squared_norm=square, rng=0).variance
        np.testing.assert_allclose(np.log(moment(s)), log_second_moment(square, 1, s), rtol=1e-9)
        assert all(moment(s) < moment(other) for other in (0.97 * s, 1.03 * s, (1 + s) / 2, 1.0))

    @pytest.mark.host
    @pytest.mark.parametrize("d", [1, 6, 64])
    def test_the_best_variance_in_many_dimensions(self, d):
        for square in (0.01, 2.0, 16.0, 1000.0):
            s = it.layers.positive_features(d, 1, squared_norm=square, rng=0).variance
            for other in (1 + (s - 1) * 0.99, 1 + (s - 1) * 1.01, 1.0):
                assert log_second_moment(square, d, s) < log_second_moment(square, d, other)
        # The rate: exponential below d, a power of the squared norm above it.
        s = it.layers.positive_features(d, 1, squared_norm=1e5 * d, rng=0).variance
        power = d / 2 * np.log(np.e / 2 * 1e5)
        np.testing.assert_allclose(log_second_moment(1e5 * d, d, s), power, rtol=1e-4)

    @pytest.mark.host
    def test_the_plain_estimate_is_the_limit(self):
        plain = it.layers.positive_features(6, 9, rng=0)
        near = it.layers.positive_features(6, 9, squared_norm=1e-12, rng=0)
        assert plain == it.layers.positive_features(6, 9, squared_norm=0, rng=0)
        assert plain.variance is None
        np.testing.assert_allclose(near.weights, plain.weights, rtol=1e-11)
        x = np.random.default_rng(0).normal(size=(3, 6))
        np.testing.assert_allclose(near(x), plain(x), rtol=1e-10)

    def test_one_variance_for_each_head(self, backend, rng):
        x, w = rng.normal(size=(2, 3, 4)), rng.normal(size=(2, 5, 4))
        s = np.asarray([1.5, 0.8])
        phi = PositiveFeatures(backend.array(w), backend.array(s))
        for arrays in ((x, w), (x[0, 0], w)):
            got = phi(backend.array(arrays[0]))
            for i in range(2):
                own = arrays[0][i] if arrays[0].ndim > 1 else arrays[0]
                expected = np.exp(own @ w[i].T - (own**2).sum(-1, keepdims=True) / 2)
                expected = expected * np.exp(log_ratio(w[i], s[i]) / 2) / 5**0.5
                backend.assert_close(got[i, ...], expected, rtol=1e-4)
        wrong = PositiveFeatures(backend.array(w), backend.array(np.ones(3)))
        with pytest.raises(ValueError, match="`features` must have one variance, or one for each head"):
            wrong(backend.array(x))

    @pytest.mark.host
    def test_without_the_norm_term_it_is_another_kernel(self):
        # Equation 58 of the document lacks it: the mean is e^{‖x + y‖²/2}.
        rng = np.random.default_rng(1)
        x, y = rng.normal(size=(2, 6)) * 0.35
        w = it.layers.positive_features(6, 400_000, orthogonal=False, rng=0).weights
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
            wide = it.layers.positive_features(
                8, 20, squared_norm=8, rng=3, orthogonal=orthogonal, like=like
            )
            s = backend.numpy(wide.variance)
            np.testing.assert_allclose(s, (1 + (3 + 17**0.5) / 2) / 2, rtol=1e-6)
            np.testing.assert_allclose(backend.numpy(wide.weights), exact * s**0.5, rtol=1e-6)

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
        with pytest.raises(ValueError, match="`squared_norm` must be at least 0"):
            it.layers.positive_features(8, 2, squared_norm=-1.0)
        with pytest.raises(TypeError, match="`squared_norm` must be a real number"):
            it.layers.positive_features(8, 2, squared_norm="16")


class TestLinearAttention:
    @pytest.mark.parametrize(
        ("n_queries", "n_keys", "s"), [(8, 8, 1.7), (3, 10, 1.7), (10, 3, 1.0), (0, 4, 1.0)]
    )
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_against_the_definition(self, backend, n_queries, n_keys, is_causal, s, rng, tiny_tiles):
        law = laws.LogLength(16) if n_queries > n_keys or is_causal else None
        q = rng.normal(size=(2, 3, n_queries, 4))
        k = rng.normal(size=(2, 1, n_keys, 4))
        v = rng.normal(size=(3, n_keys, 5))
        w = it.layers.positive_features(4, 9, rng=1).weights
        expected = estimate(q, k, v, w, is_causal=is_causal, law=law, scale=0.4, s=s)
        variance = None if s == 1 else backend.array(np.asarray(s))
        got = it.layers.linear_attention(
            *map(backend.array, (q, k, v)), PositiveFeatures(backend.array(w), variance),
            is_causal=is_causal, law=law, scale=0.4,
        )  # fmt: skip
        backend.assert_close(got, expected, rtol=1e-4, atol=1e-5)

    @pytest.mark.host
    def test_directions_drawn_for_the_norms_have_less_error(self):
        # Up to log m = 6.9 by some percent for many features; for few by more, and beyond it.
        for d, square, most in ((64, 1, 0.97), (64, 4, 0.9), (8, 1, 0.8), (8, 4, 0.55), (4, 16, 0.6)):
            plain, drawn, mean, _ = errors_of_estimates(d, square)
            assert drawn < most * plain, (d, square)
            assert drawn < 0.95 * mean, (d, square)

    @pytest.mark.host
    def test_the_plain_mean_is_nearer_far_above_log_m(self):
        plain, drawn, mean, halfway = errors_of_estimates(64, 16)
        assert 2 * mean < min(plain, drawn)
        assert mean < halfway
        # Drawn towards the mean, the estimate gains where both err alike, and loses where it is good.
        _, drawn, mean, halfway = errors_of_estimates(64, 4)
        assert 0.5 * mean < drawn < mean
        assert 0.6 * drawn < halfway < 0.95 * drawn
        _, drawn, mean, halfway = errors_of_estimates(64, 1)
        assert halfway > 1.15 * drawn

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
        phi = it.layers.positive_features(4, 20, squared_norm=8, rng=0, like=backend.array(q))
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
            got = it.layers.linear_attention(*arrays[:3], PositiveFeatures(arrays[3]), is_causal=True)
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

    def test_no_features_of_queries(self, backend):
        q, phi = (backend.array(np.ones((n, 0)), "float32") for n in (3, 9))
        v = backend.array(np.asarray([[1.0], [2.0], [6.0]]), "float32")
        phi = PositiveFeatures(phi)
        out = it.layers.linear_attention(q, q, v, phi)
        backend.assert_close(out, np.full((3, 1), 3.0), rtol=1e-5)
        for error in it.layers.linear_attention_error(q, q, phi):
            backend.assert_close(error, np.zeros(3), atol=1e-6)

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
    @pytest.mark.parametrize("squared_norm", [0, 3])
    def test_measured_and_predicted(self, backend, squared_norm, rng, tiny_tiles):
        q, k = rng.normal(size=(2, 2, 7, 4)) * 0.6
        phi = it.layers.positive_features(4, 12, squared_norm=squared_norm, rng=1)
        s = 1.0 if phi.variance is None else phi.variance
        x, y = q * 0.5**0.5, k * 0.5**0.5
        error = phi(x) @ phi(y).swapaxes(-1, -2) / np.exp(x @ y.swapaxes(-1, -2)) - 1
        square = ((x[..., None, :] + y[..., None, :, :]) ** 2).sum(-1)
        variance = np.expm1(log_second_moment(square, 4, s)) / 12
        visible = np.tril(np.ones((7, 7)))
        like = backend.array(q)
        features = it.layers.positive_features(4, 12, squared_norm=squared_norm, rng=1, like=like)
        for is_causal, mask in ((False, np.ones((7, 7))), (True, visible)):
            got = it.layers.linear_attention_error(
                like, backend.array(k), features, is_causal=is_causal, law=None, scale=0.5
            )
            for ours, theirs in ((got.measured, error**2), (got.predicted, variance)):
                expected = np.sqrt((theirs * mask).sum(-1) / mask.sum(-1))
                backend.assert_close(ours, expected, rtol=1e-3, atol=1e-5)

    @pytest.mark.host
    @pytest.mark.parametrize(("norm", "squared_norm"), [(0.35, 0), (0.7, 4)])
    def test_the_measured_error_is_the_predicted_one_on_average(self, rng, norm, squared_norm):
        q, k = rng.normal(size=(2, 3, 6)) * norm
        errors = []
        for seed in range(1500):
            phi = it.layers.positive_features(
                6, 32, squared_norm=squared_norm, orthogonal=False, rng=seed
            )
            errors.append(it.layers.linear_attention_error(q, k, phi, law=None))
        square = np.asarray([e.measured**2 for e in errors])
        standard_error = square.std(axis=0) / len(square) ** 0.5
        difference = square.mean(axis=0) - errors[0].predicted ** 2
        assert (abs(difference) < 4 * standard_error).all()
        assert (standard_error < 0.15 * errors[0].predicted ** 2).all()

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
