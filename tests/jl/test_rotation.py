"""Rotations: orthogonal for every size, flat, the same everywhere; blocks, and weights of layers."""

import copy
import math
import pickle

import numpy as np
import pytest

import isentropic as it
from isentropic.jl import _flat

# The sizes of heads, hidden states and multilayer perceptrons of models, and their flatness.
MODEL_SIZES = dict.fromkeys(
    [
        64, 80, 96, 104, 112, 128, 192, 576, 768, 896, 1536, 2048, 3072, 3584, 4096, 4864, 5120, 6912,
        7168, 8192, 8960, 9728, 12288, 13824, 14336, 17408, 25600, 27648, 28672, 29568,
    ],
    1.0,
) | {1000: 1.011, 11008: 1.119, 13696: 1.083, 18944: 1.007, 22016: 1.119}  # fmt: skip
ODD_SIZES = {
    1: 1.0, 2: 1.0, 3: 1.155, 5: 1.397, 7: 1.18, 31: 1.133, 97: 1.102, 577: 1.042, 1023: 1.533,
}  # fmt: skip
SIZES = MODEL_SIZES | ODD_SIZES
TWO_ROUNDS = (1031, 50257)  # prime factors above 1024


def spikes(d, rng, count=3):
    x = np.zeros((count, d))
    x[range(count), rng.integers(0, d, count)] = 1
    x[-1] = np.eye(1, d, d - 1)
    return x


@pytest.mark.host
class TestEverySize:
    @pytest.mark.parametrize("d", [*SIZES, *TWO_ROUNDS])
    def test_inverse_in_float32(self, d, rng):
        f = it.jl.rotation(d, rng=1, like=np.zeros(0, "float32"))
        assert (f.n_features, f.n_components) == (d, d)
        x = rng.normal(size=(3, d)).astype("float32")
        norm = np.linalg.norm(x, axis=1)
        for there, back in ((f, f.adjoint), (f.adjoint, f)):
            y = there(x)
            np.testing.assert_allclose(np.linalg.norm(y, axis=1), norm, rtol=1e-6)
            assert (np.linalg.norm(back(y) - x, axis=1) <= 2e-6 * norm).all()

    @pytest.mark.parametrize("d", SIZES)
    def test_flatness(self, d, rng):
        f = it.jl.rotation(d, rng=1)
        largest = np.abs(f(spikes(d, rng))).max() * d**0.5
        assert largest <= SIZES[d] + 1e-9
        product = math.prod(np.abs(m).max() * m.shape[0] ** 0.5 for m in f.factors)
        assert product <= SIZES[d] + 1e-9
        if SIZES[d] > 1:
            assert product > SIZES[d] - 1.1e-3  # what the documentation says is not too pessimistic

    @pytest.mark.parametrize("d", TWO_ROUNDS)
    def test_flatness_of_two_rounds(self, d, rng):
        y = it.jl.rotation(d, rng=1)(spikes(d, rng, 20)) * d**0.5
        # Of 20·d normal numbers the largest is about the first of these numbers.
        bound = (2 * math.log(20 * d)) ** 0.5
        assert 0.7 * bound < np.abs(y).max() < 1.2 * bound
        # The last feature takes the second round only.
        order = math.prod(_flat.factor_orders(d))
        np.testing.assert_allclose(np.abs(y[-1, d - order :]), (d / order) ** 0.5)
        np.testing.assert_array_equal(y[-1, : d - order], 0)

    @pytest.mark.parametrize("d", [*range(1, 61), 104, 128, 192, 343, 577, 1031])
    def test_matrix_is_orthogonal(self, d, rng):
        self.check_matrix(it.jl.rotation(d, rng=3), d, rng)

    @pytest.mark.parametrize("d", [1, 2, 3, 64, 97])
    def test_haar_matrix_is_orthogonal(self, d, rng):
        self.check_matrix(it.jl.rotation(d, kind="haar", rng=3), d, rng)

    def check_matrix(self, f, d, rng):
        m = f.matrix()
        np.testing.assert_allclose(m @ m.T, np.eye(d), atol=1e-12)
        x = rng.normal(size=(2, d, 3))
        np.testing.assert_allclose(f(x, axis=1), m @ x, atol=1e-12)
        np.testing.assert_allclose(f.adjoint(x, axis=-2), m.T @ x, atol=1e-12)

    def test_haar_is_spread_like_normal_numbers(self):
        d = 300
        m = it.jl.rotation(d, kind="haar", rng=0).matrix()
        bound = (2 * math.log(d * d)) ** 0.5
        assert 0.8 * bound < np.abs(m).max() * d**0.5 < 1.2 * bound

    def test_haar_is_uniform(self):
        matrices = np.stack([it.jl.rotation(3, kind="haar", rng=s).matrix() for s in range(2000)])
        assert (np.abs(matrices.mean(axis=0)) < 5 / (3 * 2000) ** 0.5).all()
        # Half of them keep the orientation.
        assert abs((np.linalg.det(matrices) > 0).mean() - 0.5) < 0.05


@pytest.mark.parametrize("options", [{}, {"blocks": 3}, {"kind": "haar"}])
def test_arrays_without_entries(backend, options):
    f = it.jl.rotation(12, rng=1, like=backend.array(np.zeros(1)), **options)
    for shape, axis in (((0, 12), 1), ((12, 0), 0), ((2, 12, 0), 1)):
        x = backend.array(np.zeros(shape))
        assert tuple(f(x, axis=axis).shape) == tuple(f.adjoint(x, axis=axis).shape) == shape


@pytest.mark.host
class TestFlatMatrices:
    def test_memory_of_the_caches(self):
        """However many sizes a process draws, matrices of up to 1024² numbers take 200 MB at most."""
        caches = [x.cache_info() for x in vars(_flat).values() if hasattr(x, "cache_info")]
        assert len(caches) >= 4
        of_matrices = (_flat.flat_matrix, _flat._elementary)
        assert sum(x.cache_info().maxsize for x in of_matrices) * 8 * 1024**2 < 200e6
        assert all(x.maxsize <= 4096 for x in caches)

    @pytest.mark.parametrize("n", range(1, 129))
    def test_orthogonal(self, n):
        m = _flat.flat_matrix(n)
        assert m.shape == (n, n)
        np.testing.assert_allclose(m @ m.T, np.eye(n), atol=1e-13)
        flatness = np.abs(m).max() * n**0.5
        np.testing.assert_allclose(math.log(flatness), _flat._split(n).log_flatness, atol=1e-8)
        assert flatness < 2**0.5

    def test_hadamard_orders(self):
        # Orders of Paley's construction for primes and squares of primes, and of products of them: all
        # multiples of 4 up to 128 but these, which need other fields or constructions.
        others = {n for n in range(4, 129, 4) if _flat._split(n).log_flatness > 0}
        assert others == {92, 116}

    def test_orders_multiply_to_the_size(self):
        for n in (*range(1, 200), 343, 625, 945, 1009):
            assert math.prod(_flat.factor_orders(n)) == n

    @pytest.mark.parametrize("n", [1031, 2062, 50257])
    def test_a_smaller_order_for_large_primes(self, n):
        order = math.prod(_flat.factor_orders(n))
        assert n / 2 <= order < n
        assert sum(_flat._split(m).log_flatness for m in _flat.factor_orders(n)) == 0


class TestEveryLibrary:
    @pytest.mark.every_mode
    @pytest.mark.parametrize(("d", "blocks"), [(1000, 1), (24, 1), (36, 3), (2062, 2)])
    def test_against_numpy(self, backend, d, blocks, rng, tiny_tiles):
        exact = it.jl.rotation(d, blocks=blocks, independent=True, rng=2)
        like = backend.array(np.zeros(0, "float32"))
        f = it.jl.rotation(d, blocks=blocks, independent=True, rng=2, like=like)
        for ours, theirs in zip(f.signs, exact.signs, strict=True):
            np.testing.assert_array_equal(backend.numpy(ours), theirs)
        for ours, theirs in zip(f.factors, exact.factors, strict=True):
            np.testing.assert_array_equal(backend.numpy(ours), theirs.astype("float32"))
        x = rng.normal(size=(2, d, 2)).astype("float32")
        close = {"rtol": 1e-4, "atol": 1e-5}
        backend.assert_close(f(backend.array(x), axis=1), exact(x, axis=1), **close)
        backend.assert_close(f.adjoint(backend.array(x), axis=1), exact.adjoint(x, axis=1), **close)
        y = f(backend.array(x[..., 0]))
        backend.assert_close(y, exact(x[..., 0]), **close)
        backend.assert_close(f.adjoint(y), x[..., 0], **close)
        assert f(backend.array(x[:0]), axis=1).shape == (0, d, 2)

    def test_half_precision_keeps_the_factors(self, backend, rng):
        if backend.half is None:
            pytest.skip("no half precision here")
        f = it.jl.rotation(107, rng=2, like=backend.array(np.zeros(0, backend.half)))
        assert f.factors[0].dtype == backend.xp.float32
        x = backend.array(rng.normal(size=(2, 107)).astype("float32"))
        backend.assert_close(f.adjoint(f(x)), x, rtol=1e-5, atol=1e-5)

    def test_errors(self, backend):
        x = backend.array(np.zeros((3, 8), "float32"))
        f = it.jl.rotation(8, rng=1, like=x)
        with pytest.raises(ValueError, match=r"`x` must have 8 entries along axis 1, got \(3, 7\)"):
            f(x[:, :7])
        with pytest.raises(ValueError, match=r"`weight` must have 8 entries along axis 0"):
            f.fold_into(x, side="output")
        with pytest.raises(ValueError, match="`side` must be 'input' or 'output', got 'left'"):
            f.fold_into(x, side="left")
        with pytest.raises(ValueError, match=r"`signs\[1\]` must have the shape \(1, 8\)"):
            f._replace(signs=(*f.signs, x))(x)
        with pytest.raises(ValueError, match=r"`factors\[0\]` must have the shape \(3, 3\)"):
            f._replace(factors=(x,))(x)
        with pytest.raises(ValueError, match="`factors` must have a product of the order 8 or less"):
            f._replace(factors=f.factors * 2)(x)
        with pytest.raises(ValueError, match="`signs` must hold an array for each round"):
            f._replace(signs=())(x)
        with pytest.raises(TypeError, match="`factors` must be a tuple of arrays"):
            f._replace(factors=x)(x)


@pytest.mark.host
class TestBlocks:
    @pytest.mark.parametrize("kind", ["hadamard", "haar"])
    def test_the_same_rotation_for_each_head(self, kind, rng):
        f = it.jl.rotation(4 * 12, kind=kind, blocks=4, rng=1)
        head = it.jl.rotation(12, kind=kind, rng=1)
        x = rng.normal(size=(5, 4, 12))
        np.testing.assert_allclose(f(x.reshape(5, 48)), head(x).reshape(5, 48), atol=1e-13)
        np.testing.assert_allclose(f.adjoint(f(x.reshape(5, 48))), x.reshape(5, 48), atol=1e-13)

    def test_independent(self):
        f = it.jl.rotation(3 * 64, blocks=3, independent=True, rng=1)
        m = f.matrix().reshape(3, 64, 3, 64)
        np.testing.assert_allclose(np.abs(m).max(axis=(1, 3)), np.eye(3) / 8, atol=1e-15)
        assert not np.array_equal(m[0, :, 0], m[1, :, 1])
        np.testing.assert_allclose(f.matrix() @ f.matrix().T, np.eye(192), atol=1e-12)

    def test_errors(self):
        with pytest.raises(ValueError, match=r"`blocks` must divide `n_features` \(10\), got 3"):
            it.jl.rotation(10, blocks=3)
        with pytest.raises(ValueError, match="`independent` must be False for the kind 'haar'"):
            it.jl.rotation(10, blocks=2, kind="haar", independent=True)
        with pytest.raises(TypeError, match="`independent` must be True or False"):
            it.jl.rotation(10, independent="no")
        with pytest.raises(ValueError, match="`kind` must be 'hadamard' or 'haar'"):
            it.jl.rotation(10, kind="hadamar")
        with pytest.raises(ValueError, match="`n_features` must be at least 1"):
            it.jl.rotation(0)


class TestLayers:
    def test_logits_of_a_net_stay(self, backend, rng):
        hidden, width = 12, 20
        w1, w2 = rng.normal(size=(width, hidden)), rng.normal(size=(7, width))
        bias, x = rng.normal(size=width), rng.normal(size=(5, hidden))
        w1, w2, bias, x = (backend.array(a.astype("float32")) for a in (w1, w2, bias, x))
        f, g = (it.jl.rotation(d, rng=d, like=x) for d in (hidden, width))
        n = backend.numpy  # JAX would round the products to TF32 on a GPU
        expected = (n(x) @ n(w1).T + n(bias)) @ n(w2).T
        w1 = g.fold_into(f.fold_into(w1, side="input"), side="output")
        got = (n(f(x)) @ n(w1).T + n(g(bias))) @ n(g.fold_into(w2, side="input")).T
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)

    @pytest.mark.host
    def test_values_and_output_of_heads(self, rng):
        # Values are rotated head by head; the next layer takes them from all heads.
        heads, size = 4, 16
        v, o = rng.normal(size=(2, heads * size, heads * size))
        weights = rng.dirichlet(np.ones(6), size=(heads, 5))
        x = rng.normal(size=(6, heads * size))

        def attend(v, o):
            values = (x @ v.T).reshape(6, heads, size)
            return np.einsum("hls,shd->lhd", weights, values).reshape(5, heads * size) @ o.T

        f = it.jl.rotation(heads * size, blocks=heads, independent=True, rng=0)
        got = attend(f.fold_into(v, side="output"), f.fold_into(o, side="input"))
        np.testing.assert_allclose(got, attend(v, o), atol=1e-10)


class TestCompilers:
    SIZES = ((12, 1), (1000, 1), (24, 2), (1031, 1))

    @pytest.mark.parametrize(("d", "blocks"), SIZES)
    def test_torch(self, backend, d, blocks, rng):
        if backend.name != "torch":
            pytest.skip("PyTorch alone")
        import torch

        x = torch.tensor(rng.normal(size=(2, d)), requires_grad=True)
        f = it.jl.rotation(d, blocks=blocks, rng=0, like=x)
        w = torch.tensor(rng.normal(size=(2, d)))
        (gradient,) = torch.autograd.grad((f(x) * w).sum(), x)
        torch.testing.assert_close(gradient, f.adjoint(w))
        if d < 1000:
            call = torch.compile(lambda f, x: f(x), backend="aot_eager", fullgraph=True)
            torch.testing.assert_close(call(f, x), f(x))
            (compiled,) = torch.autograd.grad((call(f, x) * w).sum(), x)
            torch.testing.assert_close(compiled, gradient)

    @pytest.mark.parametrize(("d", "blocks"), SIZES)
    def test_jax(self, backend, d, blocks, rng):
        if backend.name != "jax":
            pytest.skip("JAX alone")
        import jax

        x, w = (backend.array(a) for a in rng.normal(size=(2, 2, d)))
        f = it.jl.rotation(d, blocks=blocks, rng=0, like=x)
        gradient = jax.jit(jax.grad(lambda x, f: (f(x) * w).sum()))(x, f)
        backend.assert_close(gradient, f.adjoint(w), rtol=1e-4, atol=1e-5)


MAPS = {
    "gaussian": lambda like: it.jl.gaussian_projection(20, 6, rng=1, like=like),
    "rademacher": lambda like: it.jl.sparse_projection(20, 6, density=1, rng=1, like=like),
    "hadamard": lambda like: it.jl.hadamard_projection(20, 6, rounds=2, rng=1, like=like),
    "sketch": lambda like: it.jl.count_sketch(20, 6, nonzeros=2, rng=1, like=like),
    "rotation": lambda like: it.jl.rotation(30, blocks=3, independent=True, rng=1, like=like),
    "rotation-1": lambda like: it.jl.rotation(1, rng=1, like=like),
    "rotation-two-rounds": lambda like: it.jl.rotation(1031, rng=1, like=like),
    "haar": lambda like: it.jl.rotation(30, kind="haar", rng=1, like=like),
}


@pytest.mark.parametrize("name", MAPS)
def test_copies(backend, name):
    if backend.library == "strict":
        pytest.skip("its arrays cannot be pickled")
    f = MAPS[name](backend.array(np.zeros(0, "float32")))
    for again in (pickle.loads(pickle.dumps(f)), copy.deepcopy(f)):
        assert type(again) is type(f)
        assert again == f
        x = backend.array(np.eye(1, f.n_features, dtype="float32"))
        backend.assert_close(again(x), f(x), rtol=0)
