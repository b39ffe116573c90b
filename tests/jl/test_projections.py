"""Random maps: what they compute, their moments, where they fail, and the same draw everywhere."""

import functools
import re

import numpy as np
import pytest
import scipy.linalg

import isentropic as it
from isentropic.jl import _maps

MAPS = {
    "gaussian": it.jl.gaussian_projection,
    "rademacher": functools.partial(it.jl.sparse_projection, density=1),
    "sparse": it.jl.sparse_projection,
    "orthogonal": it.jl.orthogonal_projection,
    "hadamard": it.jl.hadamard_projection,
    "hadamard-2": lambda *a, **k: it.jl.hadamard_projection(*a, rounds=2, **k),
    "count_sketch": it.jl.count_sketch,
    "count_sketch-4": lambda *a, **k: it.jl.count_sketch(*a, nonzeros=4, **k),
}
# The first one is padded to 112 = 4 · 28, of which few coordinates are kept.
SIZES = [(100, 4), (24, 8), (50, 12)]


def flat(f):
    for part in f:
        yield from part if isinstance(part, tuple) else (part,)


@pytest.mark.parametrize("name", MAPS)
class TestEveryMap:
    @pytest.mark.every_mode
    @pytest.mark.parametrize(("d", "k"), SIZES)
    def test_is_its_matrix(self, backend, name, d, k, rng, tiny_tiles):
        like = backend.array(np.zeros(0, "float32"))
        f = MAPS[name](d, k, rng=5, like=like)
        assert (f.n_features, f.n_components) == (d, k)
        m = f.matrix()
        assert m.dtype == like.dtype
        m = backend.numpy(m).astype("float64")
        assert m.shape == (k, d)
        x, y = (
            rng.normal(size=(3, d, 2)).astype("float32"),
            rng.normal(size=(3, k, 2)).astype("float32"),
        )
        close = {"rtol": 1e-4, "atol": 1e-4}
        forward = f(backend.array(x), axis=1)
        adjoint = f.adjoint(backend.array(y), axis=-2)
        backend.assert_close(forward, np.einsum("kd,ndt->nkt", m, x), **close)
        backend.assert_close(adjoint, np.einsum("kd,nkt->ndt", m, y), **close)
        backend.assert_close(f(backend.array(x[..., 0])), x[..., 0] @ m.T, **close)
        backend.assert_close(f(backend.array(x[0, :, 0])), m @ x[0, :, 0], **close)
        # The dot test: ⟨f(x), y⟩ = ⟨x, f*(y)⟩.
        left = (backend.numpy(forward) * y).sum(axis=1)
        right = (backend.numpy(adjoint) * x).sum(axis=1)
        np.testing.assert_allclose(left, right, rtol=1e-3, atol=1e-3)
        assert f(backend.array(x[:0]), axis=1).shape == (0, k, 2)
        assert f(backend.array(x[..., :0]), axis=1).shape == (3, k, 0)

    @pytest.mark.host
    @pytest.mark.parametrize(("d", "k"), [(1000, 64), (7, 4), (1, 4), (12, 20), (1, 1), (60, 60)])
    def test_more_sizes(self, name, d, k, rng):
        if k % 4 and name == "count_sketch-4":
            pytest.skip("its nonzeros divide the components")
        f = MAPS[name](d, k, rng=5)
        m, x, y = f.matrix(), rng.normal(size=(5, d)), rng.normal(size=(5, k))
        np.testing.assert_allclose(f(x), x @ m.T, atol=1e-10)
        np.testing.assert_allclose(f.adjoint(y), y @ m, atol=1e-10)

    @pytest.mark.every_mode
    def test_same_draw_everywhere(self, backend, name):
        exact = MAPS[name](60, 12, rng=3)
        for dtype in (*backend.dtypes, *([backend.half] if backend.half else [])):
            like = backend.array(np.zeros(1, dtype))
            f = MAPS[name](60, 12, rng=3, like=like)
            for ours, theirs in zip(flat(f), flat(exact), strict=True):
                assert type(ours) is type(like)
                if backend.xp.isdtype(ours.dtype, "real floating") and ours.ndim:
                    assert ours.dtype == like.dtype
                    theirs = theirs.astype("float32" if dtype != "float64" else dtype).astype(dtype)
                    np.testing.assert_array_equal(backend.numpy(ours), theirs)
                elif ours.ndim:
                    np.testing.assert_array_equal(backend.numpy(ours), theirs)

    @pytest.mark.every_mode
    def test_dtype_is_that_of_the_input(self, backend, name, rng):
        f = MAPS[name](64, 12, rng=3, like=backend.array(np.zeros(1, "float32")))
        x = rng.normal(size=(5, 64))
        exact = MAPS[name](64, 12, rng=3)(x)
        for dtype in (*backend.dtypes, *([backend.half] if backend.half else [])):
            got = f(backend.array(x.astype(dtype)))
            assert got.dtype == backend.array(np.zeros(1, dtype)).dtype
            tolerance = 2e-2 if dtype == "float16" else 1e-5
            backend.assert_close(got, exact, rtol=tolerance, atol=tolerance)

    @pytest.mark.host
    def test_randomness(self, name):
        draw = MAPS[name]
        state = np.random.get_state()[1].copy()  # noqa: NPY002
        a, b, c = draw(30, 8, rng=1), draw(30, 8, rng=np.random.default_rng(1)), draw(30, 8, rng=2)
        assert all(np.array_equal(p, q) for p, q in zip(flat(a), flat(b), strict=True))
        assert not np.array_equal(a.matrix(), c.matrix())
        assert not np.array_equal(draw(30, 8).matrix(), draw(30, 8).matrix())
        generator = np.random.default_rng(1)
        assert not np.array_equal(
            draw(30, 8, rng=generator).matrix(), draw(30, 8, rng=generator).matrix()
        )
        np.testing.assert_array_equal(np.random.get_state()[1], state)  # noqa: NPY002

    @pytest.mark.host
    def test_unbiased_inner_products(self, name, rng):
        u, v = rng.normal(size=(2, 24))
        u, v = u / np.linalg.norm(u), v / np.linalg.norm(v)
        draws, k = 3000, 8
        products, squares = np.empty(draws), np.empty(draws)
        for seed in range(draws):
            m = MAPS[name](24, k, rng=seed).matrix()
            products[seed], squares[seed] = (m @ u) @ (m @ v), (m @ u) @ (m @ u)
        for got, expected in ((products, u @ v), (squares, 1.0)):
            assert abs(got.mean() - expected) < 4.5 * got.std() / draws**0.5

    @pytest.mark.host
    def test_sizes_of_numpy(self, name):
        expected = MAPS[name](100, 12, rng=1).matrix()
        for kind in (np.int8, np.uint8, np.uint64, np.int64):
            np.testing.assert_array_equal(MAPS[name](kind(100), kind(12), rng=1).matrix(), expected)

    def test_equality_is_by_value(self, backend, name):
        like = backend.array(np.zeros(1, "float32"))
        f, again = (MAPS[name](24, 8, rng=1, like=like) for _ in range(2))
        others = [MAPS[name](24, 8, rng=2, like=like), MAPS[name](24, 12, rng=1, like=like)]
        assert f == again
        assert not (f != again)  # noqa: SIM202, an operator of its own
        # Whatever the library.
        assert f == MAPS[name](24, 8, rng=1, like=np.zeros(1, "float32"))
        for other in (*others, tuple(f), None, 3):
            assert f != other
            assert not (f == other)  # noqa: SIM201
        with pytest.raises(TypeError, match=f"unhashable: {type(f).__name__} with arrays"):
            hash(f)

    def test_errors(self, backend, name):
        like = backend.array(np.zeros(1, "float32"))
        f = MAPS[name](24, 8, rng=1, like=like)
        with pytest.raises(ValueError, match=r"`x` must have 24 entries along axis 1, got \(3, 23\)"):
            f(backend.array(np.zeros((3, 23), "float32")))
        with pytest.raises(ValueError, match="`y` must have 8 entries along axis 0"):
            f.adjoint(backend.array(np.zeros((3, 8), "float32")), axis=0)
        with pytest.raises(ValueError, match=r"`axis` must be in \[-1, 1\), got 1"):
            f(backend.array(np.zeros(24, "float32")), axis=1)
        with pytest.raises(TypeError, match="`x` must have a real floating-point dtype"):
            f(backend.array(np.zeros(24, np.int32)))
        with pytest.raises(TypeError, match="`x` must be an array"):
            f([0.0] * 24)
        with pytest.raises(TypeError, match="`like` must have a real floating-point dtype"):
            MAPS[name](24, 8, like=backend.array(np.zeros(1, np.int32)))
        for sizes, error in (((0, 8), ValueError), ((24, 0), ValueError), ((24.0, 8), TypeError)):
            with pytest.raises(error, match=r"`n_(features|components)` must be"):
                MAPS[name](*sizes)
        if backend.library != "numpy":
            drawn = MAPS[name](24, 8, rng=1)
            for call, x in ((f, np.zeros(24)), (drawn, backend.array(np.zeros(24)))):
                with pytest.raises(
                    TypeError,
                    match=r"must be an array of the library of `x` \(\w+\), got \w+: "
                    "draw the projection with `like=x`",
                ):
                    call(x)
            with pytest.raises(TypeError, match="draw the projection with `like=y`"):
                drawn.adjoint(backend.array(np.zeros(8)))
        if backend.name == "strict:device1":
            elsewhere = backend.xp.zeros(24, device=backend.xp.Device("CPU_DEVICE"))
            with pytest.raises(
                ValueError, match=r"be on the device of `x` .*: draw the projection with `like=x`"
            ):
                f(elsewhere)

    def test_shapes_of_arrays_put_together_by_hand(self, backend, name):
        f = MAPS[name](24, 8, rng=1, like=backend.array(np.zeros(1, "float32")))
        x = backend.array(np.zeros((8, 24), "float32"))
        for field, part in zip(f._fields, f, strict=True):
            for i, own in enumerate(part if isinstance(part, tuple) else (part,)):
                longer = own[None, ...]
                where = f"signs[{i}]" if isinstance(part, tuple) else field
                bad = (*part[:i], longer, *part[i + 1 :]) if isinstance(part, tuple) else longer
                wrong = f._replace(**{field: bad})
                for call in (lambda f: f(x), lambda f: f.adjoint(x, axis=0), lambda f: f.matrix()):
                    with pytest.raises(ValueError, match=f"`{re.escape(where)}` must have "):
                        call(wrong)
                if own.ndim > 1:
                    with pytest.raises(ValueError, match="must have"):
                        f._replace(**{field: own[0, ...]})(x)
        for call in (lambda f: f(x), lambda f: f.matrix()):
            with pytest.raises(TypeError, match=r"`projection` must be an array .*got list"):
                call(type(f)(*[[1.0]] * len(f)))


@pytest.mark.host
class TestMoments:
    """Var ‖f(v)‖² over draws, against its formula, for flat, spiky and one-hot v."""

    VECTORS = np.stack(
        [
            np.full(64, 1 / 8),
            np.concatenate([np.full(2, 0.6), np.full(62, np.sqrt(0.28 / 62))]),
            np.eye(64)[5],
        ]
    )

    @pytest.mark.parametrize(
        ("draw", "variance"),
        [
            (it.jl.gaussian_projection, lambda k, fourth: 2 / k),
            (MAPS["rademacher"], lambda k, fourth: (2 - 2 * fourth) / k),
            (it.jl.sparse_projection, lambda k, fourth: 2 / k),  # s = 3
            (
                lambda d, k, rng: it.jl.sparse_projection(d, k, density=0.5, rng=rng),
                lambda k, fourth: (2 - fourth) / k,
            ),
            (it.jl.orthogonal_projection, lambda k, fourth: 2 * (64 - k) / (k * 66)),
            # 16 components of 64 features: two meet with probability 3/63.
            (it.jl.count_sketch, lambda k, fourth: 2 * 3 / 63 * (1 - fourth)),
            (
                lambda d, k, rng: it.jl.count_sketch(d, k, nonzeros=4, rng=rng),
                lambda k, fourth: 2 * (15 / 63) / 4 * (1 - fourth),
            ),
            # The rows are a sample without repetition of z = √D H S v, whose squares have the variance
            # 2 − 2Σv⁴ over the signs, and one mean, 1, for every draw of them.
            (
                it.jl.hadamard_projection,
                lambda k, fourth: (2 - 2 * fourth) / k * (64 - k) / 63,
            ),
        ],
        ids=["gaussian", "rademacher", "sparse", "half", "haar", "sketch", "sketch-4", "hadamard"],
    )  # fmt: skip
    def test_variance(self, draw, variance):
        k, draws = 16, 6000
        samples = [(draw(64, k, rng=seed)(self.VECTORS) ** 2).sum(axis=1) for seed in range(draws)]
        for v, squares in zip(self.VECTORS, np.transpose(samples), strict=True):
            expected = variance(k, (v**4).sum())
            # Standard errors of a variance, with the kurtosis of the sample.
            spread = np.std((squares - squares.mean()) ** 2) / draws**0.5
            assert abs(squares.mean() - 1) < 4.5 * squares.std() / draws**0.5 + 1e-12
            assert abs(squares.var() - expected) < 4.5 * spread + 1e-12

    def test_inner_products_and_angles_of_gaussian_maps(self, rng):
        u, v = rng.normal(size=(2, 50))
        u, v = u / np.linalg.norm(u), v / np.linalg.norm(v)
        k, draws = 200, 4000
        images = [(f(u), f(v)) for f in (it.jl.gaussian_projection(50, k, rng=s) for s in range(draws))]
        products = np.asarray([a @ b for a, b in images])
        cosines = np.asarray([a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in images])
        np.testing.assert_allclose(products.var(), (1 + (u @ v) ** 2) / k, rtol=0.1)
        np.testing.assert_allclose(cosines.std(), (1 - (u @ v) ** 2) / k**0.5, rtol=0.1)


@pytest.mark.host
class TestHaar:
    def test_rows_are_orthonormal(self):
        for d, k in ((30, 30), (30, 7), (7, 30)):
            f = it.jl.orthogonal_projection(d, k, rng=0)
            w = f.weights if k <= d else f.weights.T
            np.testing.assert_allclose(w @ w.T, np.eye(min(d, k)), atol=1e-12)
        np.testing.assert_allclose(f.matrix().T @ f.matrix(), np.eye(7), atol=1e-12)

    def test_uniform(self):
        # The first entry of a uniformly random orthogonal matrix is symmetric about 0; QR alone is not.
        first = np.asarray(
            [it.jl.orthogonal_projection(3, 3, rng=s).weights[0, 0] for s in range(2000)]
        )
        assert abs((first > 0).mean() - 0.5) < 0.05
        assert abs((first**2).mean() - 1 / 3) < 0.03


@pytest.mark.host
class TestSparse:
    def test_density(self):
        w = it.jl.sparse_projection(1000, 300, density=0.4, rng=0).weights
        assert set(np.unique(w)) == {-1.0, 0.0, 1.0}
        assert abs((w == 1).mean() - 0.2) < 0.005
        assert abs((w == -1).mean() - 0.2) < 0.005

    def test_very_sparse_warns_and_fails_on_spikes(self):
        n, d = 1000, 10**4
        k = it.jl.min_dim(n, eps=0.5)
        with pytest.warns(UserWarning, match=r"A density of 0.01, below 1/3") as record:
            f = it.jl.sparse_projection(d, k, density=0.01, rng=0, like=np.zeros(1, "float32"))
        assert record[0].filename == __file__
        x = np.eye(n, dtype="float32")
        y = f.matrix().T[:n]  # the images of n single features
        # The figures of the documentation.
        assert 0.2 < it.jl.distortion(x, y, pairs=10**5, rng=1).failure_rate(0.5).rate < 0.28
        assert 0.03 < (np.abs(y).sum(axis=1) == 0).mean() < 0.07

    @pytest.mark.parametrize("density", [0.0, 1.5, "auto"])
    def test_errors(self, density):
        with pytest.raises((ValueError, TypeError), match="`density` must be"):
            it.jl.sparse_projection(10, 5, density=density)


@pytest.mark.host
class TestHadamard:
    @pytest.mark.parametrize("d", [8, 12, 768, 100, 1000])
    @pytest.mark.parametrize("rounds", [1, 2, 3])
    def test_mixing_is_orthogonal_for_every_size(self, d, rounds):
        order = it.jl._hadamard.hadamard_order(d).size
        m = it.jl.hadamard_projection(d, order, rounds=rounds, rng=0).matrix()  # keeps all coordinates
        np.testing.assert_allclose(m.T @ m, np.eye(d), atol=1e-10)
        f = it.jl.hadamard_projection(d, 5, rounds=rounds, rng=0)
        assert f.has_orthogonal_rows == (order == d)
        if order == d:
            np.testing.assert_allclose(f.matrix() @ f.matrix().T, d / 5 * np.eye(5), atol=1e-10)

    # The sizes of models.
    @pytest.mark.parametrize(
        "d",
        [
            64, 80, 96, 104, 112, 128, 192, 576, 768, 896, 1000, 1536, 2048, 3072, 3584, 4096, 4864,
            5120, 6912, 7168, 8192, 8960, 9728, 11008, 12288, 13696, 13824, 14336, 17408, 18944, 22016,
            25600, 27648, 28672, 29568,
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("rounds", [1, 2])
    def test_is_a_rotation_where_it_says_so(self, d, rounds, rng):
        f = it.jl.hadamard_projection(d, d, rounds=rounds, rng=0)
        x = rng.normal(size=(2, d))
        assert np.allclose(f.adjoint(f(x)), x) == f.has_orthogonal_rows
        assert np.allclose(f(f.adjoint(x)), x) == f.has_orthogonal_rows

    def test_examples_of_rotations_and_others(self):
        # The figures of the documentation.
        for d in (64, 80, 768, 896, 4096, 28672):
            assert it.jl.hadamard_projection(d, d, rng=0).has_orthogonal_rows
        for d in (104, 1000, 4864, 11008, 13696, 29568):
            assert not it.jl.hadamard_projection(d, d, rng=0).has_orthogonal_rows
        matrices = [it.jl.hadamard_projection(104, 104, rng=seed).matrix() for seed in range(20)]
        assert np.linalg.matrix_rank(matrices).max() < 104

    @pytest.mark.parametrize("d", [100, 1000])
    def test_the_sample_is_of_all_coordinates(self, d):
        order = it.jl.hadamard_projection(d, d, rounds=2).signs[1].shape[0]
        assert order > d
        rows = np.concatenate([it.jl.hadamard_projection(d, 50, rng=seed).rows for seed in range(2000)])
        counts = np.bincount(rows, minlength=order)
        assert counts.shape == (order,)
        # Binomial, each: the share of those from d on is theirs.
        expected = rows.shape[0] / order
        assert abs(counts - expected).max() < 5 * expected**0.5
        assert abs(counts[d:].mean() - expected) < 4.5 * (expected / (order - d)) ** 0.5

    def test_definition(self, rng):
        # √(d/k) P H D of the document, with H by SciPy.
        f = it.jl.hadamard_projection(64, 10, rng=0)
        h = scipy.linalg.hadamard(64) / 8
        expected = np.sqrt(64 / 10) * h[f.rows] * f.signs[0]
        np.testing.assert_allclose(f.matrix(), expected, atol=1e-12)
        np.testing.assert_allclose(f(np.eye(64)).T, expected, atol=1e-12)

    # With few coordinates the last factor is applied only where it is needed.
    @pytest.mark.parametrize("k", [1, 2, 3, 9, 100, 700])
    @pytest.mark.parametrize("d", [768, 1000])
    @pytest.mark.parametrize("rounds", [1, 2])
    def test_samples_of_every_size(self, d, k, rounds, rng):
        f, x = it.jl.hadamard_projection(d, k, rounds=rounds, rng=0), rng.normal(size=(2, d, 3))
        np.testing.assert_allclose(f(x, axis=1), f.matrix() @ x, atol=1e-11)
        np.testing.assert_allclose(f(x[..., 0]), x[..., 0] @ f.matrix().T, atol=1e-11)

    def test_adjoint_of_infinite_numbers(self):
        f = it.jl.hadamard_projection(24, 8, rng=5)
        y = np.where(np.eye(8) > 0, np.inf, 0.0)
        np.testing.assert_array_equal(f.adjoint(y), np.sign(f.matrix()) * np.inf)

    def test_one_hot_keeps_its_length(self):
        for d in (64, 768, 100):
            y = it.jl.hadamard_projection(d, 10, rng=0)(np.eye(d))
            np.testing.assert_allclose((y**2).sum(axis=-1), 1)

    @pytest.mark.parametrize("entries", [8, 16])
    def test_worst_cases_of_one_round(self, entries):
        # Equal entries on a subgroup. Where the signs on it are those of a row of the small Hadamard
        # matrix, H S v lives on d/entries of the rows, and the sampled length is hypergeometric.
        from scipy.stats import hypergeom

        def of_pattern(d, k, eps):
            hits = np.arange(k + 1)
            off = np.abs(entries * hits / k - 1) > eps
            return hypergeom(d, d // entries, k).pmf(hits)[off].sum()

        # The figures of the documentation.
        if entries == 8:
            assert of_pattern(4096, 316, 0.5) * 2 * 8 / 2**8 > 2.7e-5
            assert it.jl.failure_probability(2, 316, eps=0.5) < 2.1e-8

        d, k, eps, draws = 1024, 79, 0.5, 3000
        v = np.zeros(d)
        v[:: d // entries] = entries**-0.5
        rates = {}
        for rounds in (1, 2):
            failures = 0
            for seed in range(draws):
                f = it.jl.hadamard_projection(d, k, rounds=rounds, rng=seed)
                f = f._replace(signs=(np.ones(d), *f.signs[1:]))
                failures += abs((f(v) ** 2).sum() - 1) > eps
            rates[rounds] = it.jl._tails.binomial_interval(failures, draws, 0.999)
        low, high = rates[1]
        assert low < of_pattern(d, k, eps) < high
        gaussian = it.jl.failure_probability(2, k, eps=eps)
        assert low > 10 * gaussian
        assert rates[2][0] < gaussian < rates[2][1]  # the second round mends it

    def test_memory(self):
        f = it.jl.hadamard_projection(65536, 512, rng=0, like=np.zeros(1, "float32"))
        assert sum(part.nbytes for part in flat(f)) < 5 * 65536

    def test_errors(self):
        with pytest.raises(ValueError, match="`rounds` must be at least 1"):
            it.jl.hadamard_projection(8, 2, rounds=0)
        rows = np.arange(2)
        with pytest.raises(ValueError, match=r"`signs` must hold an array for each round, got \(\)"):
            _maps.HadamardProjection((), rows).matrix()
        with pytest.raises(TypeError, match="`signs` must be a tuple of arrays, got ndarray"):
            _maps.HadamardProjection(np.ones(8), rows)(np.ones(8))
        with pytest.raises(ValueError, match=r"`signs\[1\]` must have the shape \(12,\), got \(9,\)"):
            _maps.HadamardProjection((np.ones(9), np.ones(9)), rows)(np.ones(9))


@pytest.mark.host
class TestCountSketch:
    @pytest.mark.parametrize(("d", "k", "s"), [(100, 10, 1), (101, 12, 3), (5, 12, 4), (12, 12, 1)])
    def test_matrix_has_the_nonzeros(self, d, k, s):
        m = it.jl.count_sketch(d, k, nonzeros=s, rng=0).matrix()
        np.testing.assert_allclose(np.abs(m).sum(axis=0), s**0.5)
        blocks = (m != 0).reshape(s, k // s, d)
        assert (blocks.sum(axis=1) == 1).all()  # one in each block
        loads = blocks.sum(axis=-1)
        assert (loads.max(axis=1) - loads.min(axis=1) <= 1).all()  # dealt evenly

    def test_errors(self):
        with pytest.raises(ValueError, match=r"`nonzeros` must divide `n_components` \(10\), got 3"):
            it.jl.count_sketch(100, 10, nonzeros=3)
        with pytest.raises(ValueError, match="`nonzeros` must be at least 1"):
            it.jl.count_sketch(100, 10, nonzeros=0)
        f = it.jl.count_sketch(100, 10, rng=0)
        with pytest.raises(
            ValueError, match=r"`components` must have the shape \(1, 100\), got \(10, 10\)"
        ):
            _maps.CountSketch(f.signs, f.features, f.components)(np.ones(100))


@pytest.mark.host
def test_memory_of_float32_draws():
    import tracemalloc

    tracemalloc.start()
    try:
        it.jl.gaussian_projection(20_000, 200, rng=0, like=np.zeros(1, "float32"))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2.7 * 4 * 20_000 * 200  # not the 16 bytes of a draw in float64 beside a copy


@pytest.mark.host
@pytest.mark.parametrize("name", ["seed", "random_state", "generator"])
@pytest.mark.parametrize(
    "function",
    [
        it.jl.gaussian_projection, it.jl.sparse_projection,
        it.jl.orthogonal_projection, it.jl.hadamard_projection, it.jl.count_sketch, it.layers.positive_features,
        it.jl.distortion, it.jl.rotation,
    ],
)  # fmt: skip
def test_the_source_of_a_draw_is_rng(function, name):
    message = rf"{function.__name__}\(\) has no argument `{name}`: here it is `rng`\."
    with pytest.raises(TypeError, match=message):
        function(np.eye(4), np.eye(4), **{name: 0})
    # A mistake of another kind keeps the message that it has.
    with pytest.raises(TypeError, match="unexpected keyword argument 'sed'"):
        function(np.eye(4), np.eye(4), sed=0)
