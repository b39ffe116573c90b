"""Entropies against the definition, SciPy and high precision."""

import math

import mpmath
import numpy as np
import oracles
import pytest
import scipy.special
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

import isentropic as it
from isentropic._entropy import normalized_entropy

ORDERS = [0, 0.5, 0.76, 0.9, 1, 1.1, 1.25, 2, 5, math.inf]


def _divergence(p, q, relative=True):
    """Σ p log(p/q), or −Σ p log q, of two rows of weights by the definition, to 60 digits."""
    with mpmath.workdps(60):
        p, q = ([mpmath.mpf(float(x)) if isinstance(x, np.floating) else x for x in w] for w in (p, q))
        p, q = ([x / sum(w) for x in w] for w in (p, q))
        return sum(a * mpmath.log(a / b if relative else 1 / b) for a, b in zip(p, q, strict=True) if a)


def _gradients(backend, function, *arrays):
    """Of the sum of a function's results."""
    if backend.library == "torch":
        leaves = [x.clone().requires_grad_() for x in arrays]
        function(*leaves).sum().backward()
        return [x.grad for x in leaves]
    if backend.library == "jax":
        import jax

        which = tuple(range(len(arrays)))
        return jax.jit(jax.grad(lambda *a: function(*a).sum(), argnums=which))(*arrays)
    pytest.skip("has no gradients")


def _close(backend):
    return {"rtol": 1e-11, "atol": 1e-13} if backend.float64 else {"rtol": 2e-5, "atol": 2e-6}


@pytest.fixture
def p(rng):
    p = rng.dirichlet(np.full(9, 0.3), size=(3, 4))
    p[0, 0] = np.eye(9)[2]
    p[0, 1] = 1 / 9
    p[0, 2] = np.where(np.arange(9) < 4, 0.25, 0.0)
    return p


class TestEntropy:
    @pytest.mark.float64
    @pytest.mark.parametrize("order", ORDERS)
    @pytest.mark.parametrize("family", ["renyi", "tsallis"])
    def test_against_definition(self, backend, p, order, family):
        p = p.astype(backend.dtypes[-1])
        expected = oracles.entropy(p / p.sum(-1, keepdims=True, dtype=float), order, family)
        got = it.entropy(backend.array(p), order=order, family=family)
        backend.assert_close(got, expected, **_close(backend))
        logits = backend.array(np.log(np.where(p > 0, p, 1)) + np.where(p > 0, 0, -np.inf) + 3.0)
        got = it.entropy_from_logits(logits, order=order, family=family)
        backend.assert_close(got, expected, **_close(backend))

    @pytest.mark.parametrize("axis", [0, 1, -1])
    def test_against_scipy(self, backend, rng, axis):
        p = rng.random((4, 5, 6))
        got = it.entropy(backend.array(p), axis=axis)
        backend.assert_close(got, scipy.stats.entropy(p, axis=axis), rtol=1e-5)
        got = it.entropy_from_logits(backend.array(p), axis=axis)
        backend.assert_close(
            got, scipy.stats.entropy(scipy.special.softmax(p, axis), axis=axis), rtol=1e-5
        )

    @pytest.mark.float64
    @pytest.mark.parametrize("order", [0.5, 0.999999, 1, 1.000001, 3, 1e6, 1e12])
    def test_against_high_precision(self, backend, order):
        if not backend.float64:
            pytest.skip("double precision is tested")
        logits = [0.0, -1.0, -30.0, 2.5, 2.4999]
        with mpmath.workdps(50):
            e = [mpmath.exp(mpmath.mpf(s)) for s in logits]
            p = [x / sum(e) for x in e]
            if order == 1:
                expected = -sum(x * mpmath.log(x) for x in p)
            else:
                expected = mpmath.log(sum(x ** mpmath.mpf(order) for x in p)) / (1 - mpmath.mpf(order))
            expected = float(expected)
        got = it.entropy_from_logits(backend.array(logits), order=order)
        backend.assert_close(got, np.asarray(expected), rtol=1e-13)

    @pytest.mark.parametrize("t", [0.0, 1e-300, 1e-20, 1e-19, -1e-12, 1e-6, -1e-3])
    def test_continuous_at_order_one(self, backend, rng, t):
        # dH/dα at α = 1 is −Var(log p)/2.
        s = rng.normal(size=50)
        p = oracles.softmax(s)
        shannon = oracles.entropy(p)
        slope = -((p * np.log(p) ** 2).sum() - shannon**2) / 2
        got = it.entropy_from_logits(backend.array(s), order=1 + t)
        backend.assert_close(got, np.asarray(shannon + slope * t), rtol=1e-6, atol=t * t)

    def test_offset_costs_no_digits(self, backend, rng):
        s = rng.normal(size=300).astype("float32")
        s = np.round(s * 256) / 256  # exact in float32 also at the offset
        got = it.entropy_from_logits(backend.array(s + np.float32(1e4), "float32"))
        expected = oracles.entropy(oracles.softmax(s.astype(float)))
        backend.assert_close(got, np.asarray(expected), rtol=1e-6)

    def test_half_precision(self, backend):
        if backend.half is None:
            pytest.skip("no half precision here")
        n = 2**17
        got = it.entropy_from_logits(backend.array(np.full(n, 3.0), backend.half))
        backend.assert_close(got, np.asarray(math.log(n), "float32"), rtol=1e-6)
        got = it.entropy(backend.array(np.ones(n), backend.half))
        backend.assert_close(got, np.asarray(math.log(n), "float32"), rtol=1e-6)

    def test_half_precision_has_entropies_of_float32(self, backend, rng):
        # Rounded to half precision they would have three digits: too few to see them move in training.
        if backend.half is None:
            pytest.skip("no half precision here")
        dtypes = [d for d in (backend.half, "bfloat16") if hasattr(backend.xp, d)]
        for dtype in dtypes:
            p, q = (
                backend.xp.astype(backend.array(x), getattr(backend.xp, dtype))
                for x in rng.dirichlet(np.ones(32), size=(2, 64))
            )
            a, b = (
                backend.numpy(backend.xp.astype(x, backend.xp.float32)).astype(float) for x in (p, q)
            )
            h, divergence = scipy.stats.entropy(a, axis=-1), scipy.stats.entropy(a, b, axis=-1)
            for got, expected in (
                (it.entropy(p), h),
                (it.entropy_from_logits(p), scipy.stats.entropy(oracles.softmax(a), axis=-1)),
                (it.cross_entropy(p, q), h + divergence),
                (it.kl_divergence(p, q), divergence),
                (it.entropy_penalty(p, 0.1), ((a - 0.1) ** 2).mean()),
            ):
                assert got.dtype == backend.xp.float32
                np.testing.assert_allclose(backend.numpy(got), expected, rtol=5e-6)

    @pytest.mark.parametrize("order", ORDERS)
    @pytest.mark.parametrize("lowest", [-1e4, np.finfo("float32").min])
    def test_low_numbers(self, backend, order, lowest):
        # Down to finfo.min, with which others mark what is hidden: nothing overflows on the way.
        s = backend.array([[0.0, 1.0, lowest, lowest]], "float32")
        if order == 0:
            expected = math.log(4)  # they are finite, so they count
        else:
            expected = oracles.entropy(oracles.softmax(np.array([0.0, 1.0])), order)
        backend.assert_close(it.entropy_from_logits(s, order=order), np.full(1, expected), rtol=1e-5)

    def test_mask(self, backend, rng):
        s, mask = (
            rng.normal(size=(3, 5)),
            np.array([[True, True, False, True, False], [False] * 5, [True] * 5]),
        )
        got = it.entropy_from_logits(backend.array(s), mask=backend.array(mask))
        expected = oracles.entropy(oracles.softmax(np.where(mask, s, -np.inf)))
        backend.assert_close(got, expected, rtol=1e-5)

    def test_zero_size(self, backend):
        for order in (0, 1, 2):
            got = it.entropy(backend.array(np.zeros((2, 0)), "float32"), order=order)
            backend.assert_close(got, np.zeros(2))
            got = it.entropy_from_logits(backend.array(np.zeros((0, 3)), "float32"), order=order)
            backend.assert_close(got, np.zeros(0))
            nothing = backend.array(np.zeros(0), "float32")
            assert type(it.entropy(nothing, order=order)) is type(nothing)

    def test_not_normalized_input(self, backend):
        got = it.entropy(backend.array([[2.0, 2.0], [0.0, 0.0]], "float32"))
        backend.assert_close(got, np.array([math.log(2), 0.0]), rtol=1e-6)

    @pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
    def test_negative_is_nan(self, backend):
        got = it.entropy(backend.array([-0.5, 1.5], "float32"))
        assert np.isnan(backend.numpy(got))

    def test_one_nan_stays_in_its_row(self, backend):
        got = backend.numpy(
            it.entropy_from_logits(backend.array([[0.0, np.nan], [0.0, 0.0]], "float32"))
        )
        assert np.isnan(got[0])
        assert got[1] == pytest.approx(math.log(2))

    @given(
        s=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=30),
        orders=st.tuples(st.floats(0, 20), st.floats(0, 20)).map(sorted),
    )
    def test_monotone_in_the_order_and_bounded(self, s, orders):
        s = np.asarray(s)
        low, high = (float(it.entropy_from_logits(s, order=order)) for order in orders)
        assert high <= low + 1e-9
        assert high >= -1e-12
        assert low <= math.log(len(s)) + 1e-12


@pytest.mark.parametrize("order", [0.98, 0.996, 1.004, 1.02, 1.2])
def test_orders_near_1_keep_the_digits_of_float32(backend, rng, order):
    s = 3 * rng.normal(size=(4, 2000)).astype("float32")
    p = oracles.softmax(s.astype("float64"))
    expected = np.log((p**order).sum(-1)) / (1 - order)
    close = {"rtol": 0, "atol": 2e-6}
    backend.assert_close(it.entropy_from_logits(backend.array(s), order=order), expected, **close)
    q, k = backend.array(np.ones((1, 1)), "float32"), backend.array(s[0][:, None])
    h = it.attention_entropy(q, k, scale=1.0, law=None, order=order)
    backend.assert_close(h, expected[:1], **close)


class TestNormalizedEntropy:
    @pytest.mark.parametrize(
        "order", [0, 0.5, 1 - 1e-9, 1, 1 + 1e-9, 1.1, 3, 1e3, 1e15, 1e16, 1e30, 1e300, math.inf]
    )
    @pytest.mark.float64
    @pytest.mark.parametrize("family", ["renyi", "tsallis"])
    def test_against_high_precision(self, backend, order, family):
        # log n is 0, or Rényi's entropy is from 0 to all of it.
        log_n = [0.0, 3.0, 3.0, 3.0, 3.0, 3.0, 40.0, 1e-3]
        h = [0.0, 0.0, 1e-6, 0.5, 2.0, 3.0, 39.0, 5e-4]
        expected = []
        with mpmath.workdps(400):
            t = mpmath.mpf(min(order, 1e300)) - 1
            for x, n in zip(h, log_n, strict=True):
                x, n = mpmath.mpf(x), mpmath.mpf(n)
                if n == 0:
                    expected.append(0.0)
                elif family == "renyi" or t == 0:
                    expected.append(float(x / n))
                else:
                    expected.append(float((1 - mpmath.exp(-t * x)) / (1 - mpmath.exp(-t * n))))
        for dtype in backend.dtypes:
            arrays = backend.array(np.asarray(h, dtype)), backend.array(np.asarray(log_n, dtype))
            got = normalized_entropy(backend.xp, *arrays, float(order), family)
            np.testing.assert_allclose(backend.numpy(got), expected, rtol=20 * np.finfo(dtype).eps)

    @pytest.mark.parametrize("order", ORDERS)
    def test_nan_stays(self, backend, order):
        for family in ("renyi", "tsallis"):
            arrays = backend.array([np.nan, 0.5], "float32"), backend.array([1.0, 1.0], "float32")
            got = backend.numpy(normalized_entropy(backend.xp, *arrays, float(order), family))
            np.testing.assert_array_equal(np.isnan(got), [True, False])

    @pytest.mark.parametrize("order", ORDERS)
    def test_gradients_at_the_ends(self, backend, order):
        h, log_n = backend.array([0.0, 0.0, 1.0, 2.0]), backend.array([0.0, 2.0, 2.0, 2.0])

        def normalized(h):
            return normalized_entropy(backend.xp, h, log_n, float(order), "tsallis")

        (gradient,) = _gradients(backend, normalized, h)
        assert np.isfinite(backend.numpy(gradient)).all()


class TestDivergences:
    def test_against_scipy(self, backend, rng):
        p, q = rng.random((3, 6)), rng.random((3, 6))
        p[0, 0] = q[0, 0] = p[1, 2] = 0.0
        a, b = backend.array(p), backend.array(q)
        kl = scipy.stats.entropy(p, q, axis=-1)
        backend.assert_close(it.kl_divergence(a, b), kl, rtol=1e-4)
        cross = kl + scipy.stats.entropy(p, axis=-1)
        backend.assert_close(it.cross_entropy(a, b), cross, rtol=1e-5)
        backend.assert_close(
            it.kl_divergence(a[0, ...], b), scipy.stats.entropy(p[:1], q, axis=-1), rtol=1e-4
        )
        backend.assert_close(
            it.kl_divergence(a, b, axis=0), scipy.stats.entropy(p, q, axis=0), rtol=1e-4
        )

    def test_broadcasting(self, backend, rng):
        p, q = rng.random((4, 4)), rng.random(4)
        a, b = backend.array(p), backend.array(q)
        for axis in (0, 1):
            expected = scipy.stats.entropy(p, np.broadcast_to(q, p.shape), axis=axis)
            backend.assert_close(it.kl_divergence(a, b, axis=axis), expected, rtol=1e-4)
        # One weight for all: the uniform distribution.
        expected = math.log(4) - scipy.stats.entropy(p, axis=-1)
        backend.assert_close(it.kl_divergence(a, b[:1]), expected, rtol=1e-4)

    def test_infinite(self, backend):
        p, q = backend.array([0.5, 0.5], "float32"), backend.array([1.0, 0.0], "float32")
        for function in (it.kl_divergence, it.cross_entropy):
            backend.assert_close(function(p, q), np.asarray(np.inf))
            assert np.isfinite(backend.numpy(function(q, p)))

    def test_empty(self, backend):
        p, q = backend.array([0.0, 0.0], "float32"), backend.array([1.0, 0.0], "float32")
        backend.assert_close(it.kl_divergence(p, q), np.zeros(()))
        backend.assert_close(it.cross_entropy(p, q), np.zeros(()))
        none = backend.array(np.zeros((3, 0)), "float32")
        for function in (it.kl_divergence, it.cross_entropy):
            backend.assert_close(function(none, none), np.zeros(3))
            assert function(none, none, axis=0).shape == (0,)

    def test_of_itself(self, backend, p):
        x = backend.array(p)
        backend.assert_close(it.kl_divergence(x, x), np.zeros((3, 4)), rtol=0, atol=0)
        backend.assert_close(it.cross_entropy(x, x), it.entropy(x), rtol=1e-5)

    @pytest.mark.float64
    def test_close_distributions(self, backend, rng):
        # log p − log q, summed as it is, has errors of 1e-7 in float32, where the result may be 1e-13.
        distance = np.repeat([1e-6, 1e-4, 1e-2, 0.3, 3.0], 10)[:, None]
        for dtype in backend.dtypes:
            p = rng.dirichlet(np.ones(20), size=50).astype(dtype)
            q = (p * np.exp(distance * rng.normal(size=p.shape))).astype(dtype)
            got = backend.numpy(it.kl_divergence(backend.array(p), backend.array(q)))
            expected = [float(_divergence(*rows)) for rows in zip(p, q, strict=True)]
            np.testing.assert_allclose(got, expected, rtol=60 * np.finfo(dtype).eps)

    def test_close_distributions_of_different_totals(self, backend, rng):
        for dtype in backend.dtypes:
            p = rng.dirichlet(np.ones(20), size=50).astype(dtype)
            q = (p * np.exp(1e-2 * rng.normal(size=p.shape))).astype(dtype)
            for total in (2.0**-30, 2.0**-14, 2.0**14, 2.0**30):
                got = backend.numpy(it.kl_divergence(backend.array(p), backend.array(q * total)))
                expected = backend.numpy(it.kl_divergence(backend.array(p), backend.array(q)))
                # Weights below 2⁻³² are rounded when they are rescaled, and those of p and q differ by 1 %.
                np.testing.assert_allclose(got, expected, rtol=200 * np.finfo(dtype).eps)

    def test_divergence_is_never_negative(self, backend, rng):
        for dtype in backend.dtypes:
            p = rng.dirichlet(np.full(5, 0.2), size=4000).astype(dtype)
            distance = 10 ** rng.uniform(-8, 1, size=(4000, 1))
            q = (p * np.exp(distance * rng.normal(size=p.shape))).astype(dtype)
            got = backend.numpy(it.kl_divergence(backend.array(p), backend.array(q)))
            assert (got >= 0).all()
            assert ((got > 0) == (p != q).any(-1)).all()

    @pytest.mark.float64
    @pytest.mark.parametrize("function", [it.kl_divergence, it.cross_entropy])
    def test_size_of_the_weights(self, backend, function):
        for dtype in backend.dtypes:
            largest, least = np.finfo(dtype).max, np.finfo(dtype).tiny
            # XLA takes subnormal numbers for 0, and CuPy those of float32.
            if backend.library != "jax" and (backend.library, dtype) != ("cupy", "float32"):
                least = np.finfo(dtype).smallest_subnormal
            pairs = [
                ([largest, largest, 0], [1, 3, 0]),
                ([1, 3, 0], [largest, largest, 0]),
                ([largest, largest, largest / 2], [largest, least, largest / 3]),
                ([least, 3 * least, 0], [1, 3, 0]),
                ([least, 3 * least, 0], [2 * least, least, 0]),
                ([1, 3, 0], [2 * least, least, 0]),
                ([1, least, 0], [1, largest, 0]),
                ([1, 0, 0], [least, largest, 1]),
            ]
            p, q = np.asarray(pairs, dtype).swapaxes(0, 1)
            relative = function is it.kl_divergence
            expected = [float(_divergence(*rows, relative)) for rows in zip(p, q, strict=True)]
            got = backend.numpy(function(backend.array(p), backend.array(q)))
            eps = np.finfo(dtype).eps
            np.testing.assert_allclose(got, expected, rtol=20 * eps, atol=eps)

    def test_sums_of_many_weights_are_accurate_along_each_axis(self, backend):
        if backend.library == "strict":
            pytest.skip("it adds as NumPy does, but is not known to")
        n = 100_000
        p, q = np.full((3, n), 0.7), np.full((3, n), 0.3)
        q[:, ::2] = 0.1
        expected = np.log(0.2 * n) - (np.log(0.1) + np.log(0.3)) / 2
        for axis in (0, 1):
            weights = (backend.array(np.moveaxis(x, 1, axis).copy(), "float32") for x in (p, q))
            value = it.cross_entropy(*weights, axis=axis)
            backend.assert_close(value, np.full(3, expected), rtol=1e-5)

    def test_sums_of_many_weights_do_not_overflow(self, backend, rng):
        p, q = rng.dirichlet(np.ones(500), size=2).astype("float32") * np.float32(1e36)
        for function, relative in ((it.kl_divergence, True), (it.cross_entropy, False)):
            got = backend.numpy(function(backend.array(p * 3000), backend.array(q * 3000)))
            np.testing.assert_allclose(got, float(_divergence(p, q, relative)), rtol=1e-5)

    @pytest.mark.float64
    @pytest.mark.parametrize("order", ORDERS)
    def test_size_of_the_weights_of_an_entropy(self, backend, order):
        for dtype in backend.dtypes:
            info, p = np.finfo(dtype), [[1.0, 3.0], [1.0, 1.0], [2.0, 1.0]]
            scale = np.asarray([info.max / 4, info.max, info.tiny], dtype)
            got = it.entropy(backend.array(np.asarray(p, dtype) * scale[:, None]), order=order)
            p = np.asarray(p) / np.sum(p, axis=-1, keepdims=True)
            # The logarithm of the largest float is 88 or 709.
            tolerance = 1000 * info.eps
            backend.assert_close(got, oracles.entropy(p, order), rtol=tolerance, atol=tolerance)

    def test_what_is_no_weight_gives_nan(self, backend):
        bad = [[x, 1.0] for x in (-1.0, np.nan, np.inf)] + [[1.0, -np.inf], [0.5, 0.5]]
        expected = [True] * 4 + [False]
        wrong = backend.array(bad, "float32")
        right, nothing = (backend.array(np.full((5, 2), x), "float32") for x in (0.5, 0.0))
        for order in ORDERS:
            got = backend.numpy(it.entropy(wrong, order=order))
            np.testing.assert_array_equal(np.isnan(got), expected)
        for function in (it.kl_divergence, it.cross_entropy):
            for pair in ((wrong, right), (right, wrong), (nothing, wrong)):
                got = backend.numpy(function(*pair))
                np.testing.assert_array_equal(np.isnan(got), expected)

    @pytest.mark.parametrize("function", [it.kl_divergence, it.cross_entropy])
    def test_gradients(self, backend, rng, function):
        relative, step = function is it.kl_divergence, mpmath.mpf("1e-20")
        distance = np.asarray([[1e-4], [0.3], [3.0]])
        for dtype in backend.dtypes:
            p = rng.dirichlet(np.ones(6), size=3).astype(dtype)
            q = (1.7 * p * np.exp(distance * rng.normal(size=p.shape))).astype(dtype)
            expected = np.empty((2, 3, 6))
            for i, row, j in np.ndindex(expected.shape):
                with mpmath.workdps(60):
                    ends = []
                    for sign in (1, -1):
                        pair = [[mpmath.mpf(float(x)) for x in w[row]] for w in (p, q)]
                        pair[i][j] += sign * step
                        ends.append(_divergence(*pair, relative))
                    expected[i, row, j] = (ends[0] - ends[1]) / (2 * step)
            got = _gradients(backend, function, backend.array(p), backend.array(q))
            got = [backend.numpy(gradient) for gradient in got]
            eps = np.finfo(dtype).eps
            np.testing.assert_allclose(got, expected, rtol=200 * eps, atol=20 * eps)

    def test_gradients_at_zeros(self, backend):
        p, q = backend.array([0.0, 0.5, 0.5, 0.0]), backend.array([0.5, 0.25, 0.25, 0.0])
        by_p, by_q = (backend.numpy(g) for g in _gradients(backend, it.kl_divergence, p, q))
        # Where p = 0 the derivative with respect to p is −∞, for q it is 1/Σq.
        np.testing.assert_allclose(by_p, [0, 0, 0, 0], atol=1e-6)
        np.testing.assert_allclose(by_q, [1, -1, -1, 1], rtol=1e-5)
        rows = backend.xp.stack([p, q, 0 * p])
        pairs = backend.xp.tile(rows, (3, 1)), backend.xp.repeat(rows, 3, axis=0)
        for function in (it.kl_divergence, it.cross_entropy):
            for gradient in _gradients(backend, function, *pairs):
                assert np.isfinite(backend.numpy(gradient)).all()


class TestPenalty:
    def test_value(self, backend, rng):
        h, target = rng.random((3, 4)), rng.random(4)
        got = it.entropy_penalty(backend.array(h), backend.array(target), weight=2.0)
        backend.assert_close(got, np.asarray(2 * ((h - target) ** 2).mean()), rtol=1e-5)
        got = it.entropy_penalty(backend.array(h), 1)
        backend.assert_close(got, np.asarray(((h - 1) ** 2).mean()), rtol=1e-5)

    def test_of_nothing_is_zero(self, backend):
        got = it.entropy_penalty(backend.array(np.zeros((0, 3)), "float32"), 1.0)
        backend.assert_close(got, np.zeros(()))

    def test_numpy_numbers(self, backend):
        h = backend.array(np.ones(3), "float32")
        for target in (np.int64(2), np.float32(2), np.float64(2)):
            backend.assert_close(it.entropy_penalty(h, target), np.ones(()))


class TestErrors:
    def test_order_beyond_floats(self, backend):
        with pytest.raises(ValueError, match=r"`order` must be within the range of a float"):
            it.entropy(backend.array([1.0], "float32"), order=10**400)

    def test_kinds_of_choices(self, backend):
        with pytest.raises(ValueError, match=r"`family` must be 'renyi' or 'tsallis', got"):
            it.entropy(backend.array([1.0], "float32"), family=np.array([1, 2]))

    def test_arguments(self, backend):
        x = backend.array(np.ones((2, 3)), "float32")
        for function in (it.entropy, it.entropy_from_logits):
            with pytest.raises(ValueError, match=r"`order` must be at least 0, got -1"):
                function(x, order=-1)
            with pytest.raises(ValueError, match=r"`order` must be at least 0, got nan"):
                function(x, order=math.nan)
            with pytest.raises(TypeError, match=r"`order` must be a real number, got bool"):
                function(x, order=True)
            with pytest.raises(ValueError, match=r"`axis` must be in \[-2, 2\), got 2"):
                function(x, axis=2)
            with pytest.raises(TypeError, match=r"`axis` must be an integer, got float"):
                function(x, axis=1.0)
            with pytest.raises(TypeError, match=r"must have a real floating-point dtype, got"):
                function(backend.array([1, 2]))
            with pytest.raises(ValueError, match=r"`family` must be 'renyi' or 'tsallis', got 'x'"):
                function(x, family="x")
        with pytest.raises(TypeError, match=r"`mask` must be boolean"):
            it.entropy_from_logits(x, mask=x)
        with pytest.raises(ValueError, match=r"`mask` must have a shape broadcastable to \(2, 3\)"):
            it.entropy_from_logits(x, mask=backend.array(np.ones((4, 3), bool)))
        with pytest.raises(ValueError, match=r"`q` must broadcast with \(2, 3\)"):
            it.kl_divergence(x, backend.array(np.ones((2, 4)), "float32"))
        with pytest.raises(ValueError, match=r"`weight` must be at least 0, got -1"):
            it.entropy_penalty(x, 1.0, weight=-1)
        with pytest.raises(ValueError, match=r"`target` must have a shape broadcastable to \(2, 3\)"):
            it.entropy_penalty(x, backend.array(np.ones(4), "float32"))
        with pytest.raises(TypeError, match=r"`target` must be a real number, got str"):
            it.entropy_penalty(x, "1")


def test_an_array_without_axes_has_no_entropy(backend):
    with pytest.raises(ValueError, match="`axis` must be an axis of the array, got -1 for a 0-d array"):
        it.entropy(backend.array(1.0))
