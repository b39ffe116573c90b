"""The measured distortion: against plain NumPy over all pairs, on every backend."""

import numpy as np
import pytest
from scipy.spatial.distance import pdist
from scipy.stats import binomtest

import isentropic as it
from isentropic.jl import _distortion


def cosine_angles(x):
    return np.arccos(np.clip(1 - pdist(x, "cosine"), -1, 1))


def from_differences(x, y):
    """The errors of all pairs, from the differences of explicit pairs in longdouble."""
    i, j = np.tril_indices(len(x), -1)  # in our order

    def numbers(points):
        a, b = (points.astype("longdouble")[index] for index in (i, j))
        u, v = (
            part / np.maximum(np.linalg.norm(part, axis=1, keepdims=True), 1e-300) for part in (a, b)
        )
        norms = [np.linalg.norm(part, axis=1) for part in (u + v, u - v, a, b)]
        angle = np.where(norms[2] * norms[3] > 0, 2 * np.arctan2(norms[1], norms[0]), 0)
        return ((a - b) ** 2).sum(axis=1), (a * b).sum(axis=1), angle, norms[2] * norms[3]

    (square_x, inner_x, angle_x, lengths), (square_y, inner_y, angle_y, _) = numbers(x), numbers(y)
    return {
        "distance": square_y / np.where(square_x > 0, square_x, 1) - (square_x > 0),
        "inner_product": (inner_y - inner_x) / np.where(lengths > 0, lengths, 1),
        "angle": angle_y - angle_x,
    }


def upper(n):
    """The pairs in the order of `pdist`, as positions in ours (i > j, by i)."""
    j, i = np.triu_indices(n, 1)
    return i * (i - 1) // 2 + j


class TestValues:
    def test_all_pairs(self, backend, rng, tiny_tiles):
        x = rng.normal(size=(23, 40))
        y = x @ rng.normal(size=(40, 7)) / 7**0.5
        report = it.jl.distortion(backend.array(x), backend.array(y))
        order = upper(23)
        expected = {
            "distance": pdist(y) ** 2 / pdist(x) ** 2 - 1,
            "inner_product": (1 - pdist(y, "cosine")) * np.outer(*[np.linalg.norm(y, axis=1)] * 2)[np.triu_indices(23, 1)]
            / np.outer(*[np.linalg.norm(x, axis=1)] * 2)[np.triu_indices(23, 1)]
            - (1 - pdist(x, "cosine")),
            "angle": cosine_angles(y) - cosine_angles(x),
        }  # fmt: skip
        for name, want in expected.items():
            got = backend.numpy(getattr(report, name))
            np.testing.assert_allclose(got[order], want, rtol=1e-4, atol=1e-5, err_msg=name)
        want = (y**2).sum(axis=1) / (x**2).sum(axis=1) - 1
        np.testing.assert_allclose(backend.numpy(report.norm), want, rtol=1e-4, atol=1e-5)
        assert report.distance.dtype == backend.array(x).dtype
        assert (report.n_points, report.n_features, report.n_components) == (23, 40, 7)
        assert report.n_pairs == 23 * 22 / 2
        assert abs(report.worst - np.abs(expected["distance"]).max()) < 1e-4
        share = (np.abs(expected["distance"]) > 0.3).mean()
        assert report.failure_rate(0.3) == pytest.approx((share, share, share))

    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    def test_explicit_pairs_of_all_angles(self, backend, rng, tiny_tiles, dtype):
        if dtype not in backend.dtypes:
            pytest.skip("no float64 here")
        # Pairs at angles from 1e-7 to π − 1e-7, equal and opposite points, and points at the origin.
        turned = 10.0 ** -np.arange(8)
        a, b = np.linalg.qr(rng.normal(size=(40, 2)))[0].T
        x = np.concatenate(
            (np.outer(np.cos(turned), a) + np.outer(np.sin(turned), b), np.zeros((2, 40)))
        )
        x = np.concatenate((x, -3 * x, x, x + 1e-6 * b)).astype(dtype)
        y = (x @ rng.normal(size=(40, 60))).astype(dtype)
        expected = from_differences(x, y)
        report = it.jl.distortion(backend.array(x), backend.array(y))
        rounding = 100 * np.finfo(dtype).eps
        for name, want in expected.items():
            got = backend.numpy(getattr(report, name))
            np.testing.assert_allclose(got, want, rtol=rounding, atol=rounding, err_msg=name)

    @pytest.mark.host
    @pytest.mark.parametrize("pairs", [None, 300], ids=["all", "a few"])
    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    @pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
    def test_few_pairs_are_subtracted(self, rng, monkeypatch, library, dtype, pairs):
        like = pytest.importorskip({"jax": "jax.numpy"}.get(library, library))
        subtracted = []
        original = _distortion._from_differences

        def recorded(xp, points, unit, pair, norms):
            subtracted.append(len(pair[0]))
            return original(xp, points, unit, pair, norms)

        monkeypatch.setattr(_distortion, "_from_differences", recorded)
        x = rng.normal(size=(60, 200)).astype(dtype)
        x[7] = x[3]
        report = it.jl.distortion(like.asarray(x), like.asarray(x), pairs=pairs, rng=0)
        assert float(report.worst) == 0
        assert max(subtracted, default=0) <= 1
        assert pairs or subtracted == [1, 1]
        if dtype == "float32":  # float64 is wide enough for points that lie close together
            it.jl.distortion(like.asarray(x + 9), like.asarray(x + 9), pairs=pairs, rng=0)
            assert max(subtracted, default=0) <= 1

    def test_sampled_pairs(self, backend, rng):
        x = rng.normal(size=(60, 30))
        y = x[:, :10] * 3**0.5
        whole = backend.numpy(it.jl.distortion(backend.array(x), backend.array(y)).distance)
        sample = it.jl.distortion(backend.array(x), backend.array(y), pairs=300, rng=1)
        got = backend.numpy(sample.distance)
        assert got.shape == (300,)
        assert (np.abs(got[:, None] - whole).min(axis=1) < 1e-5).all()
        again = it.jl.distortion(backend.array(x), backend.array(y), pairs=300, rng=1)
        np.testing.assert_array_equal(got, backend.numpy(again.distance))
        rate = sample.failure_rate(0.5, confidence=0.9)
        failures = int((np.abs(got) > 0.5).sum())
        interval = binomtest(failures, 300).proportion_ci(0.9)
        assert rate == pytest.approx((failures / 300, interval.low, interval.high))
        # More pairs than there are: all.
        assert it.jl.distortion(backend.array(x), backend.array(y), pairs=10**6).distance.shape == (
            1770,
        )

    def test_an_isometry(self, backend, rng):
        x = backend.array(rng.normal(size=(20, 8)).astype("float32"))
        report = it.jl.distortion(x, it.jl.orthogonal_projection(8, 8, rng=0, like=x)(x))
        for errors in (report.distance, report.norm, report.inner_product, report.angle):
            assert np.abs(backend.numpy(errors)).max() < 1e-5

    def test_degenerate_points(self, backend):
        x = backend.array([[0.0, 0.0], [1.0, 1.0], [1.0, 1.0], [2.0, 2.0], [-1.0, -1.0]])
        report = it.jl.distortion(x, x)
        for errors in (report.distance, report.norm, report.inner_product, report.angle):
            np.testing.assert_allclose(backend.numpy(errors), 0, atol=1e-6)
        # A point that a map loses has no angle, which is taken as 0.
        lost = backend.array([[0.0, 0.0], [1.0, 1.0], [0.0, 0.0], [2.0, 2.0], [-1.0, -1.0]])
        assert np.isfinite(backend.numpy(it.jl.distortion(x, lost).angle)).all()
        report = it.jl.distortion(backend.array(np.eye(3)), backend.array(np.eye(3)[:, :2]))
        np.testing.assert_allclose(backend.numpy(report.angle), [0, -np.pi / 2, -np.pi / 2], atol=1e-6)
        # What is off by eps itself is not off by more.
        assert report.failure_rate(0.5) == (0.0, 0.0, 0.0)
        assert report.failure_rate(0.4999).rate == 2 / 3
        # Equal points that the map tells apart.
        y = backend.array([[0.0, 0.0], [1.0, 1.0], [1.0, 2.0], [2.0, 2.0], [-1.0, -1.0]])
        report = it.jl.distortion(x, y)
        assert report.worst == np.inf
        assert "inf" in repr(report)
        assert np.isfinite(backend.numpy(report.angle)).all()

    def test_gradients_at_degenerate_points(self, backend):
        x = np.asarray([[0.0, 0.0], [1.0, 1.0], [1.0, 1.0], [2.0, 2.0], [-1.0, -1.0]])
        names = ("distance", "norm", "inner_product", "angle")
        if backend.library == "jax":
            import jax

            def total(y):
                report = it.jl.distortion(backend.array(x), y)
                return sum(getattr(report, name).sum() for name in names)

            gradient = jax.grad(total)(backend.array(x))
        elif backend.library == "torch":
            y = backend.array(x).requires_grad_()
            report = it.jl.distortion(backend.array(x), y)
            sum(getattr(report, name).sum() for name in names).backward()
            gradient = y.grad
        else:
            pytest.skip("no gradients here")
        assert np.isfinite(backend.numpy(gradient)).all()

    def test_angles_of_nearly_opposite_vectors(self, backend, rng):
        a = rng.normal(size=(20, 64))
        x = np.concatenate((a, -1.3 * a + 1e-3 * rng.normal(size=(20, 64)))).astype("float32")
        turned = it.jl.orthogonal_projection(64, 64, rng=1, like=backend.array(x))(backend.array(x))
        report = it.jl.distortion(backend.array(x), turned)
        assert np.abs(backend.numpy(report.angle)).max() < 1e-5

    @pytest.mark.host
    def test_close_points_keep_their_digits(self, rng):
        # Through inner products the distance of 1e-5 would drown in the rounding of 1e6.
        x = (1000 + 1e-5 * rng.normal(size=(5, 100))).astype("float64")
        report = it.jl.distortion(x, 2 * x)
        np.testing.assert_allclose(report.distance, 3, rtol=1e-6)

    def test_half_precision(self, backend, rng):
        if backend.half is None:
            pytest.skip("no half precision here")
        x = backend.array(rng.normal(size=(10, 3000)).astype("float16") * 10)  # squared norms overflow
        report = it.jl.distortion(x, x)
        assert report.distance.dtype == backend.xp.float32
        # A GPU may add up the norms of the two arguments in different orders.
        assert report.worst <= (1e-6 if backend.is_gpu else 0)

    @pytest.mark.host
    def test_nan_has_failed(self):
        x = np.ones((3, 2)) * np.arange(3)[:, None]
        y = x.copy()
        y[2] = np.nan
        assert it.jl.distortion(x, y).failure_rate(0.1).rate == pytest.approx(2 / 3)

    @pytest.mark.host
    def test_pairs_of_many_points(self):
        n = 10**8
        i, j = _distortion._sample_pairs(n * (n - 1) // 2, 10**5, 0)
        assert (j >= 0).all()
        assert (j < i).all()
        assert (i < n).all()
        assert len(set(zip(i.tolist(), j.tolist(), strict=True))) == 10**5
        np.testing.assert_allclose(i.mean(), n * 2 / 3, rtol=0.01)

    @pytest.mark.host
    def test_sampled_pairs_are_different_ones(self):
        i, j = _distortion._sample_pairs(10 * 9 // 2, 44, 0)
        assert len(set(zip(i.tolist(), j.tolist(), strict=True))) == 44

    @pytest.mark.host
    def test_memory(self, rng):
        import tracemalloc

        x = rng.normal(size=(500, 2000)).astype("float32")
        y = x[:, :50].copy()
        tracemalloc.start()
        try:
            it.jl.distortion(x, y)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 40e6  # n × n × d would be 2 GB


class TestScale:
    """All errors are relative, so they are the same for tiny and for huge points."""

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize("power", [-149, -83, -20, 66, 120])
    def test_does_not_matter(self, backend, rng, power):
        x = rng.normal(size=(20, 30)).astype("float32")
        y = x @ rng.normal(size=(30, 5)).astype("float32")
        if power == -149:  # a number below the normal ones
            x, y, power = np.eye(20, 30, dtype="float32"), 2 * np.eye(20, 5, dtype="float32"), -140
        if power < -126 and backend.library in ("jax", "cupy"):
            pytest.skip("JAX and CuPy take such numbers for 0")
        unit = np.float32(2.0**power)
        expected = it.jl.distortion(backend.array(x), backend.array(y))
        found = it.jl.distortion(backend.array(x * unit), backend.array(y * unit))
        for name in ("distance", "norm", "inner_product", "angle"):
            backend.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-5, atol=1e-5)

    def test_products_that_underflow(self):
        y = np.asarray([[1.0, 0.0], [1.0, 0.0], [1.0, 1.0]])
        x = y * [[1.0], [1e-160], [1e-160]]
        np.testing.assert_allclose(it.jl.distortion(x, y).angle[1:], 0, atol=1e-9)

    def test_points_at_the_origin_and_beyond_numbers(self):
        zeros = np.zeros((3, 4))
        assert it.jl.distortion(zeros, zeros).worst == 0
        assert np.isnan(it.jl.distortion(np.full((3, 4), np.inf), zeros).worst)


class TestReport:
    def test_table(self, backend, rng):
        x = backend.array(rng.normal(size=(50, 64)).astype("float32"))
        text = repr(it.jl.distortion(x, it.jl.hadamard_projection(64, 16, rng=0, like=x)(x)))
        assert "50 points, 64 → 16 dimensions, all 1225 pairs" in text
        for word in (
            "squared distance",
            "squared norm",
            "inner product",
            "angle (rad)",
            "99 %",
            "0.05:",
        ):
            assert word in text
        assert all(len(line) <= 100 for line in text.splitlines())
        sampled = repr(it.jl.distortion(x, x, pairs=100, rng=0))
        assert "100 of 1225 pairs" in sampled
        assert "at 95 %" in sampled

    def test_errors(self, backend):
        x = backend.array(np.ones((4, 3)))
        with pytest.raises(ValueError, match=r"`y` must have as many rows as `x` \(4\), got 2"):
            it.jl.distortion(x, x[:2, :])
        with pytest.raises(ValueError, match="`x` must have 2 dimensions, got 1"):
            it.jl.distortion(x[0, :], x)
        with pytest.raises(ValueError, match="`x` must have at least 2 rows, got 1"):
            it.jl.distortion(x[:1, :], x[:1, :])
        with pytest.raises(ValueError, match="`pairs` must be at least 1"):
            it.jl.distortion(x, x, pairs=0)
        with pytest.raises(TypeError, match="`y` must have a real floating-point dtype"):
            it.jl.distortion(x, backend.array(np.ones((4, 3), np.int32)))
        report = it.jl.distortion(x, x)
        with pytest.raises(ValueError, match="`eps` must be above 0"):
            report.failure_rate(0.0)
        with pytest.raises(ValueError, match="`confidence` must be below 1"):
            report.failure_rate(0.1, confidence=1.0)


@pytest.mark.host
def test_pairs_of_numbers_that_floats_round():
    i = np.asarray([1, 2, 3, 1000, 10**8 - 1, 10**8, 10**9, 2**31 - 1])
    for j in (0 * i, i // 2, i - 1):
        got = _distortion._pair_of(i * (i - 1) // 2 + j)
        np.testing.assert_array_equal(got, (i, j))
