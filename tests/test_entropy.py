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

ORDERS = [0, 0.5, 0.76, 0.9, 1, 1.1, 1.25, 2, 5, math.inf]


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

    @pytest.mark.parametrize("order", [0.5, 0.999999, 1, 1.000001, 3])
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
        assert got.dtype == backend.array(0.0, backend.half).dtype
        backend.assert_close(got, np.asarray(math.log(n)), rtol=1e-3)
        got = it.entropy(backend.array(np.ones(n), backend.half))
        backend.assert_close(got, np.asarray(math.log(n)), rtol=1e-3)

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

    def test_of_itself(self, backend, p):
        x = backend.array(p)
        backend.assert_close(it.kl_divergence(x, x), np.zeros((3, 4)), atol=1e-7)
        backend.assert_close(it.cross_entropy(x, x), it.entropy(x), rtol=1e-5)


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
