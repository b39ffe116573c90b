"""Linear maps of rows: arrays of PyTorch and JAX through NumPy, against dense matrices in float64."""

import numpy as np
import pytest
import scipy.linalg

import isentropic as it
from isentropic import _row_maps, _threads

N = 256
SYLVESTER = scipy.linalg.hadamard(N) * N**-0.5


def _maps(like):
    """Each map by its function, and its matrix in float64."""
    hadamard = it.jl.hadamard_projection(200, 24, rng=0, rounds=2, like=like)
    sketch = it.jl.count_sketch(200, 24, rng=0, nonzeros=2, like=like)
    return {
        "transform": (it.jl.hadamard_transform, SYLVESTER),
        "hadamard": (hadamard, it.jl.hadamard_projection(200, 24, rng=0, rounds=2).matrix()),
        "sketch": (sketch, it.jl.count_sketch(200, 24, rng=0, nonzeros=2).matrix()),
        "adjoint": (hadamard.adjoint, it.jl.hadamard_projection(200, 24, rng=0, rounds=2).matrix().T),
    }


def _tensors(torch, name, dtype=None):
    f, matrix = _maps(torch.zeros(1, dtype=dtype or torch.float64))[name]
    return f, torch.from_numpy(matrix)


@pytest.fixture
def torch(backend):
    return pytest.importorskip("torch") if backend.name == "torch" else pytest.skip("for PyTorch")


@pytest.mark.parametrize("name", ["transform", "hadamard", "sketch", "adjoint"])
class TestThroughNumPy:
    @pytest.mark.parametrize("axis", [0, 1])
    def test_values_and_gradients(self, torch, name, axis, rng, tiny_tiles):
        f, matrix = _tensors(torch, name)
        x = torch.from_numpy(rng.normal(size=(7, matrix.shape[1]))).requires_grad_()
        y = torch.from_numpy(rng.normal(size=(7, matrix.shape[0]))).requires_grad_()
        image = f(x) if axis else f(x.T, axis=0).T
        assert image.requires_grad
        np.testing.assert_allclose(image.detach(), x.detach() @ matrix.T, atol=1e-12)
        (grad,) = torch.autograd.grad(image, x, y, create_graph=True)
        np.testing.assert_allclose(grad.detach(), y.detach() @ matrix, atol=1e-12)
        # The gradient is linear in y, with the map itself as its derivative.
        (second,) = torch.autograd.grad(grad, y, x.detach())
        np.testing.assert_allclose(second, image.detach(), atol=1e-12)

    def test_is_the_generic_formula(self, torch, name, rng, monkeypatch):
        f, matrix = _tensors(torch, name, torch.float32)
        x = torch.from_numpy(rng.normal(size=(7, matrix.shape[1])).astype("float32"))
        results = []
        for through_numpy in (True, False):
            if not through_numpy:
                monkeypatch.setattr(_row_maps, "_is_for_numpy", lambda *args: False)
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                part = x.detach().to(dtype, copy=True).requires_grad_()
                y = f(part)
                assert y.dtype == dtype
                (y.float() ** 2).sum().backward()
                results += [y.detach().float(), part.grad.float()]
        half = len(results) // 2
        for ours, generic in zip(results[:half], results[half:], strict=True):
            torch.testing.assert_close(ours, generic, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(results[0], results[half], rtol=1e-5, atol=1e-5)

    def test_inputs_of_all_kinds(self, torch, name, rng):
        f, matrix = _tensors(torch, name, torch.float32)
        x = torch.from_numpy(rng.normal(size=(7, 2 * matrix.shape[1])).astype("float32"))
        before, expected = x.clone(), x[:, ::2].double() @ matrix.T
        for part in (x[:, ::2], x[:, ::2].contiguous(), torch.nn.Parameter(x[:, ::2])):
            np.testing.assert_allclose(f(part).detach(), expected, rtol=1e-4, atol=1e-4)
        with torch.inference_mode():
            np.testing.assert_allclose(f(x[:, ::2]), expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(x, before)
        f(x[:, ::2].contiguous()).add_(1.0)  # the result has memory of its own
        assert torch.equal(x, before)

    @pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
    def test_transformations(self, torch, name, rng):
        f, matrix = _tensors(torch, name)
        x = torch.from_numpy(rng.normal(size=(3, 2, matrix.shape[1])))
        expected = x @ matrix.T
        np.testing.assert_allclose(torch.vmap(f)(x), expected, atol=1e-12)
        image, tangent = torch.func.jvp(f, (x,), (x,))
        np.testing.assert_allclose(image, expected, atol=1e-12)
        np.testing.assert_allclose(tangent, expected, atol=1e-12)
        jacobian = torch.func.jacrev(f)(x[0, 0])
        np.testing.assert_allclose(jacobian, matrix, atol=1e-12)
        batched = torch.autograd.functional.jacobian(f, x[0, 0], vectorize=True)
        np.testing.assert_allclose(batched, matrix, atol=1e-12)
        compiled = torch.compile(f, backend="eager", fullgraph=True)
        np.testing.assert_allclose(compiled(x), expected, atol=1e-12)


class TestArraysOfTheMap:
    def test_their_gradients(self, torch, rng):
        f = it.jl.hadamard_projection(200, 24, rng=0, like=torch.zeros(1, dtype=torch.float64))
        signs = f.signs[0].clone().requires_grad_()
        x = torch.from_numpy(rng.normal(size=(5, 200)))
        f._replace(signs=(signs,))(x).sum().backward()
        # f(x) is linear in the signs.
        np.testing.assert_allclose((signs.grad * f.signs[0]).sum(), f(x).sum(), rtol=1e-10)

    def test_modified_in_place_before_the_backward_pass(self, torch):
        f = it.jl.hadamard_projection(200, 24, rng=0, like=torch.zeros(1))
        y = f(torch.ones(3, 200, requires_grad=True))
        f.signs[0].neg_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.host
class TestInNumPy:
    @pytest.mark.parametrize("name", ["transform", "hadamard", "sketch", "adjoint"])
    def test_threads_do_not_change_results(self, name, rng, monkeypatch, tiny_tiles):
        f, matrix = _maps(np.zeros(1, np.float32))[name]
        x = rng.normal(size=(11, matrix.shape[1])).astype("float32")
        x.flags.writeable = False
        monkeypatch.setattr(_threads, "_available", lambda: 4)
        threaded = f(x)
        monkeypatch.setattr(_threads, "_available", lambda: 1)
        np.testing.assert_array_equal(threaded, f(x))
        np.testing.assert_allclose(threaded, x @ matrix.T, rtol=1e-4, atol=1e-5)

    def test_half_precision_is_rounded_once(self, rng, tiny_tiles):
        x = rng.normal(size=(11, 256)).astype("float16")  # one row to a block
        expected = it.jl.hadamard_transform(x.astype("float32")).astype("float16")
        np.testing.assert_array_equal(it.jl.hadamard_transform(x), expected)

    def test_factors_that_calls_share_are_read_only(self):
        from isentropic.jl import _hadamard

        sizes = {"scale": 1.0, "dtype": np.float32, "device": None}
        factors = _hadamard.hadamard_factors(np, _hadamard.Order(1, 8), **sizes)
        assert factors is _hadamard.hadamard_factors(np, _hadamard.Order(1, 8), **sizes)
        assert not any(factor.flags.writeable for factor in factors)


class TestInJAX:
    @pytest.fixture
    def jax(self, backend):
        return pytest.importorskip("jax") if backend.library == "jax" else pytest.skip("for JAX")

    @pytest.mark.every_mode
    @pytest.mark.parametrize("axis", [0, 1])
    @pytest.mark.parametrize("name", ["transform", "hadamard", "sketch", "adjoint", "rotation"])
    def test_compiled_calls_equal_eager_ones(self, backend, jax, name, axis, rng):
        """NumPy computes eager calls. JAX compiles its own formulas."""
        like = backend.array(np.zeros(1, np.float32))
        maps = _maps(like) | {"rotation": (it.jl.rotation(200, rng=0, like=like), np.eye(200))}
        f, matrix = maps[name]
        x = backend.array(rng.normal(size=(5, matrix.shape[1])).astype("float32"))
        x = x if axis else x.T
        got, expected = f(x, axis=axis), jax.jit(lambda x: f(x, axis=axis))(x)
        assert got.dtype == expected.dtype
        backend.assert_close(got, backend.numpy(expected), rtol=1e-4, atol=1e-5)

    def test_half_precision(self, jax, rng):
        f = it.jl.hadamard_projection(200, 24, rng=0, like=jax.numpy.zeros(1, "bfloat16"))
        x = jax.numpy.asarray(rng.normal(size=(5, 200)), dtype="bfloat16")
        got, expected = f(x), jax.jit(lambda x: f(x))(x)
        assert got.dtype == expected.dtype == "bfloat16"
        np.testing.assert_allclose(got.astype(float), expected.astype(float), rtol=1e-2)

    @pytest.mark.every_mode
    @pytest.mark.parametrize("is_committed", [False, True])
    def test_the_device_is_that_of_the_argument(self, jax, is_committed):
        if jax.default_backend() != "cpu":
            pytest.skip("the matrices of the factors are committed to a GPU")
        device = jax.devices("cpu")[-1]
        x = jax.device_put(np.ones((3, 128), np.float32), device if is_committed else None)
        y = it.jl.hadamard_transform(x)
        assert y.devices() == x.devices()
        assert y.committed == is_committed
