"""The kernel of Hadamard matrices in Triton's interpreter, against matrices in float64."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import interpreted
import numpy as np
import pytest
import scipy.linalg

import isentropic as it
from isentropic import _row_maps, _triton_launch
from isentropic.jl import _hadamard, _rounds

pytest.importorskip("triton", reason="triton is not installed")

# What is compiled: a map, a dimension, a dtype, and a GPU or the stand-in for CuPy.
FEW = [
    "transform-4096-float32-sm_80",
    "projection-768-float16-sm_90",
    "rotation+adjoint-1000-float32-gfx942",
    "projection+adjoint-768-float16-cupy",
    "transform-65536-float32-cupy",
]
SIZES = {
    "transform": (2, 64, 256, 4096, 8192, 16384, 65536, 2**20),
    "projection": (60, 768, 1000, 3584, 7600, 8192, 11008),
    "rotation": (100, 256, 768, 1000, 2328, 4096, 4864, 8192, 11008, 14336, 65536),
}
ALL = [
    f"{name}{part}-{n}-{dtype}-{target}"
    for name, sizes in SIZES.items()
    for n in sizes
    for part in ("", "+adjoint", "+trail")
    for dtype in ("float32", "float16")
    for target in ("sm_80", "sm_90", "sm_100", "gfx942", "cupy")
]
NAMES = sorted({*FEW, *ALL}) if os.environ.get("ISENTROPIC_ALL_KERNELS") else FEW
# Bytes of shared memory that a block of threads can have: on the smallest GPUs, and on AMD's.
SHARED = {"gfx942": 64 * 1024}
LEAST_SHARED = 99 * 1024
SPILLED = 128  # bytes that a thread may keep elsewhere than in registers

# Dimensions and components of Fast JL: padded or not, Paley's matrices with few and many doublings.
PROJECTIONS = [(11, 3), (60, 60), (40, 17), (100, 30), (384, 384), (700, 11), (3000, 50)]
# Dimensions and blocks of rotations: one dense factor, two, three, odd ones, and several blocks.
ROTATIONS = [(5, 1), (64, 1), (97, 1), (1000, 1), (3 * 128, 3), (36, 3), (8192, 1)]


@pytest.fixture
def launches(backend, monkeypatch):
    """The launches of the kernel, which the interpreter carries out for the arrays of the backend."""
    if backend.library not in ("torch", "jax") or os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("for PyTorch and JAX, and for the interpreter")
    found = []
    runs = {"torch": _triton_launch.launch_on_torch, "jax": interpreted.on_jax}

    def run(call):
        if call.kernel.__name__ == "kronecker_kernel":
            found.append(call)
        return runs[backend.library](call)

    def runs_kernels(xp, x):
        return xp is backend.xp and (backend.library == "jax" or _row_maps.is_plain(xp, x))

    monkeypatch.setattr(_triton_launch, f"launch_on_{backend.library}", run)
    monkeypatch.setattr(_row_maps, "runs_kernels", runs_kernels)
    for device in {backend.device, None if backend.library == "jax" else backend.device}:
        assert _hadamard._self_test_failure(backend.xp, device) is None
    found.clear()
    return found


@pytest.fixture
def torch(backend):
    return pytest.importorskip("torch") if backend.name == "torch" else pytest.skip("for PyTorch")


@pytest.fixture
def jax(backend):
    return pytest.importorskip("jax") if backend.name == "jax" else pytest.skip("for JAX")


def _projection(backend, d, k, rounds=1):
    """A map for the backend, and its matrix in float64."""
    matrix = it.jl.hadamard_projection(d, k, rounds=rounds, rng=0).matrix()
    like = backend.array(np.zeros(1, np.float32))
    return it.jl.hadamard_projection(d, k, rounds=rounds, rng=0, like=like), matrix


def _rotation(backend, d, blocks=1, **options):
    like = backend.array(np.zeros(1, np.float32))
    matrix = it.jl.rotation(d, blocks=blocks, rng=0, **options).matrix()
    return it.jl.rotation(d, blocks=blocks, rng=0, like=like, **options), matrix


def _assert_close(actual, expected, tolerance=1e-6):
    error = np.abs(np.asarray(actual, dtype=np.float64) - expected).max(initial=0.0)
    assert error <= tolerance * np.abs(expected).max(initial=1e-30)


class TestValues:
    @pytest.mark.parametrize("bits", range(1, 14))
    @pytest.mark.parametrize("dtype", ["float32", "float16"])
    def test_transform(self, backend, launches, bits, dtype, rng):
        x = rng.normal(size=(5, 2**bits)).astype(dtype)
        y = it.jl.hadamard_transform(backend.array(x))
        assert len(launches) == 1
        assert launches[0].grid * launches[0].constants["BATCH"] >= 5
        expected = it.jl.hadamard_transform(x.astype(float))
        assert y.dtype == backend.array(x).dtype
        _assert_close(backend.numpy(y), expected, 1e-6 if dtype == "float32" else 1e-3)

    def test_half_precision_is_rounded_once(self, backend, launches, rng):
        x = rng.normal(size=(3, 512)).astype("float16")
        expected = it.jl.hadamard_transform(backend.array(x.astype("float32")))
        got = backend.numpy(it.jl.hadamard_transform(backend.array(x)))
        np.testing.assert_array_equal(got, backend.numpy(expected).astype("float16"))

    def test_integers_are_exact(self, backend, launches, rng):
        x = rng.integers(-50, 50, size=(4, 256)).astype("float32")
        got = it.jl.hadamard_transform(backend.array(x), norm="backward")
        np.testing.assert_array_equal(backend.numpy(got), x @ scipy.linalg.hadamard(256))

    @pytest.mark.parametrize("rounds", [1, 2])
    @pytest.mark.parametrize(("d", "k"), PROJECTIONS)
    def test_projection(self, backend, launches, d, k, rounds, rng):
        f, matrix = _projection(backend, d, k, rounds)
        x, y = rng.normal(size=(3, d)).astype("float32"), rng.normal(size=(3, k)).astype("float32")
        _assert_close(backend.numpy(f(backend.array(x))), x @ matrix.T)
        _assert_close(backend.numpy(f.adjoint(backend.array(y))), y @ matrix)
        assert len(launches) == 2 * rounds

    @pytest.mark.parametrize(("d", "blocks"), ROTATIONS)
    def test_rotation(self, backend, launches, d, blocks, rng):
        exact = it.jl.rotation(d, blocks=blocks, rng=0)
        f = it.jl.rotation(d, blocks=blocks, rng=0, like=backend.array(np.zeros(1, np.float32)))
        x = rng.normal(size=(3, d)).astype("float32")
        _assert_close(backend.numpy(f(backend.array(x))), exact(x.astype(float)))
        _assert_close(backend.numpy(f.adjoint(backend.array(x))), exact.adjoint(x.astype(float)))
        assert len(launches) == 2

    def test_blocks_of_their_own_and_dense_rotations(self, backend, launches, rng):
        for options in ({"independent": True}, {"kind": "haar"}):
            f, matrix = _rotation(backend, 48, 3, **options)
            x = rng.normal(size=(7, 48)).astype("float32")
            _assert_close(backend.numpy(f(backend.array(x))), x @ matrix.T)
        assert len(launches) == 2

    @pytest.mark.parametrize("axis", [0, 1, 2])
    def test_axis(self, backend, launches, axis, rng):
        x = rng.normal(size=(64, 16, 32)).astype("float32")
        n = x.shape[axis]
        expected = np.moveaxis(np.moveaxis(x, axis, -1) @ scipy.linalg.hadamard(n) * n**-0.5, -1, axis)
        _assert_close(backend.numpy(it.jl.hadamard_transform(backend.array(x), axis=axis)), expected)
        f, matrix = _projection(backend, 16, 5)
        expected = np.einsum("kd,adc->akc", matrix, x)
        _assert_close(backend.numpy(f(backend.array(x), axis=1)), expected)
        assert len(launches) == 2

    @pytest.mark.parametrize("name", ["transform", "projection", "adjoint", "rotation", "trail"])
    def test_several_passes(self, backend, launches, name, rng, monkeypatch):
        """Long vectors take a pass for some of the factors, and another for the others."""
        monkeypatch.setattr(_rounds, "_MAX_SIZES", {0: 64, 64: 64, 128: 128})
        monkeypatch.setattr(_rounds, "_MIN_COLUMNS", 2)
        for cached in ("passes_of", "_calls"):
            monkeypatch.setattr(_rounds, cached, getattr(_rounds, cached).__wrapped__)
        if name == "transform":
            f, matrix = it.jl.hadamard_transform, scipy.linalg.hadamard(2048) * 2048**-0.5
        elif name == "rotation":
            f, matrix = _rotation(backend, 1000)
        else:
            projection, matrix = _projection(backend, 1500, 200)
            f = projection.adjoint if name == "adjoint" else projection
            matrix = matrix.T if name == "adjoint" else matrix
        x = rng.normal(size=(3, matrix.shape[1])).astype("float32")
        if name == "trail":
            y = backend.numpy(f(backend.array(x.T), axis=0)).T
        else:
            y = backend.numpy(f(backend.array(x)))
        _assert_close(y, x @ matrix.T)
        assert len(launches) >= 2


class TestUnusualInput:
    def test_not_contiguous(self, backend, launches, rng):
        x = rng.normal(size=(6, 512)).astype("float32")
        expected = x[::2, 1::2] @ scipy.linalg.hadamard(256) / 16
        _assert_close(backend.numpy(it.jl.hadamard_transform(backend.array(x)[::2, 1::2])), expected)
        assert launches

    def test_without_entries(self, backend, launches):
        f, _ = _projection(backend, 40, 17)
        assert f(backend.array(np.zeros((0, 40), np.float32))).shape == (0, 17)
        assert it.jl.hadamard_transform(backend.array(np.zeros((4, 0), np.float32)), axis=0).shape == (
            4,
            0,
        )
        assert not launches

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_nonfinite_numbers_stay_in_their_rows(self, backend, launches, bad, rng):
        x = rng.normal(size=(6, 192)).astype("float32")
        x[2, 5] = bad
        for f, matrix in (_projection(backend, 192, 40), _rotation(backend, 192)):
            y = backend.numpy(f(backend.array(x)))
            assert not np.isfinite(y[2]).any()
            rows = [0, 1, 3, 4, 5]
            _assert_close(y[rows], x[rows] @ matrix.T)
        y = backend.numpy(it.jl.hadamard_transform(backend.array(x[:, :128])))
        # A single infinity becomes one of the sign of the matrix, as in the definition.
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(y[2], bad * scipy.linalg.hadamard(128)[5])

    def test_other_dtypes_and_large_factors_take_the_other_way(self, backend, launches, rng):
        f, matrix = _rotation(backend, 577)  # a dense factor of this order
        x = rng.normal(size=(2, 577)).astype("float32")
        _assert_close(backend.numpy(f(backend.array(x))), x @ matrix.T, 1e-5)
        if backend.float64:
            it.jl.hadamard_transform(backend.array(np.ones((2, 64))))
        assert not launches

    def test_a_kernel_that_fails_is_not_used(self, backend, launches, monkeypatch, rng):
        def run(call):
            raise RuntimeError("no compiler")

        monkeypatch.setattr(_triton_launch, f"launch_on_{backend.library}", run)
        _triton_launch._failures.clear()
        x = rng.normal(size=(3, 128)).astype("float32")
        try:
            with pytest.warns(UserWarning, match="RuntimeError: no compiler"):
                y = it.jl.hadamard_transform(backend.array(x))
            _assert_close(backend.numpy(y), x @ scipy.linalg.hadamard(128) * 128**-0.5)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                it.jl.hadamard_transform(backend.array(x))
        finally:
            _triton_launch._failures.clear()

    def test_wrong_results_of_the_kernel_are_noticed(self, backend, launches, monkeypatch):
        name = f"launch_on_{backend.library}"
        right = getattr(_triton_launch, name)

        def run(call):
            factor = 1.01 if call.kernel.__name__ == "kronecker_kernel" else 1
            return [x * factor for x in right(call)]

        monkeypatch.setattr(_triton_launch, name, run)
        _triton_launch._failures.clear()
        with pytest.warns(UserWarning, match="their results are off by"):
            assert _hadamard._self_test_failure(backend.xp, backend.device)
        _triton_launch._failures.clear()


MAPS = {
    "transform": lambda backend: (it.jl.hadamard_transform, scipy.linalg.hadamard(128) * 128**-0.5),
    "projection": lambda backend: _projection(backend, 100, 30, rounds=2),
    "rotation": lambda backend: _rotation(backend, 144, 3),
}


@pytest.mark.parametrize("name", MAPS)
class TestGradients:
    def test_torch(self, backend, launches, torch, name, rng):
        f, matrix = MAPS[name](backend)
        x = torch.from_numpy(rng.normal(size=(7, matrix.shape[1])).astype("float32")).requires_grad_()
        y = torch.from_numpy(rng.normal(size=(7, matrix.shape[0])).astype("float32")).requires_grad_()
        (grad,) = torch.autograd.grad(f(x), x, y, create_graph=True)
        _assert_close(grad.detach(), y.detach().numpy() @ matrix)
        (second,) = torch.autograd.grad(grad, y, x.detach())
        _assert_close(second, x.detach().numpy() @ matrix.T)
        assert len(launches) >= 3

    @pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
    def test_transformations_of_torch(self, backend, launches, torch, name, rng):
        f, matrix = MAPS[name](backend)
        x = torch.from_numpy(rng.normal(size=(3, 2, matrix.shape[1])).astype("float32"))
        expected = x.numpy() @ matrix.T
        _assert_close(torch.vmap(f)(x), expected)
        image, tangent = torch.func.jvp(f, (x,), (x,))
        _assert_close(image, expected)
        _assert_close(tangent, expected)
        _assert_close(torch.func.jacrev(f)(x[0, 0]), matrix)
        _assert_close(torch.autograd.functional.jacobian(f, x[0, 0], vectorize=True), matrix)
        _assert_close(torch.compile(f, backend="eager", fullgraph=True)(x), expected)

    def test_jax(self, backend, launches, jax, name, rng):
        f, matrix = MAPS[name](backend)
        x = backend.array(rng.normal(size=(3, 2, matrix.shape[1])).astype("float32"))
        y = backend.array(rng.normal(size=(3, 2, matrix.shape[0])).astype("float32"))
        expected = np.asarray(x) @ matrix.T

        def loss(x, y):
            return jax.numpy.sum(f(x) * y)

        for transformed in (lambda x: f(x), jax.jit(lambda x: f(x)), jax.vmap(lambda x: f(x))):
            launches.clear()
            _assert_close(transformed(x), expected)
            assert launches
        _assert_close(jax.jit(jax.vmap(jax.vmap(lambda x: f(x)), in_axes=1, out_axes=1))(x), expected)
        image, tangent = jax.jvp(lambda x: f(x), (x,), (2 * x,))
        _assert_close(image, expected)
        _assert_close(tangent, 2 * expected)
        grad = jax.jit(jax.grad(loss))
        _assert_close(grad(x, y), np.asarray(y) @ matrix)
        # The gradient is linear in y, with the map itself as its derivative.
        _assert_close(jax.grad(lambda y: jax.numpy.sum(grad(x, y) * x))(y), expected)
        _assert_close(jax.jacrev(lambda x: f(x))(x[0, 0]), matrix)


class TestArraysOfTheMap:
    def test_their_gradients(self, backend, launches, torch, rng):
        f, _ = _projection(backend, 200, 24)
        signs = f.signs[0].clone().requires_grad_()
        x = torch.from_numpy(rng.normal(size=(5, 200)).astype("float32"))
        f._replace(signs=(signs,))(x).sum().backward()
        assert not launches
        # f(x) is linear in the signs.
        np.testing.assert_allclose((signs.grad * f.signs[0]).sum(), f(x).sum(), rtol=1e-4)

    def test_modified_in_place_before_the_backward_pass(self, backend, launches, torch):
        f, _ = _projection(backend, 200, 24)
        y = f(torch.ones(3, 200, requires_grad=True))
        f.signs[0].neg_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    def test_the_self_test_runs_within_a_trace(self, backend, launches, jax):
        _triton_launch._failures.clear()
        f, _ = _projection(backend, 48, 48)
        x = backend.array(np.eye(48, dtype=np.float32))
        y = jax.jit(lambda x: f.adjoint(f(x)))(x)
        _assert_close(backend.numpy(y), np.eye(48))
        assert len(_triton_launch._failures) == 1
        assert len(launches) == 3

    def test_maps_that_jax_traces(self, backend, launches, jax, rng):
        f, matrix = _projection(backend, 200, 24)
        x = backend.array(rng.normal(size=(5, 200)).astype("float32"))
        _assert_close(jax.jit(lambda f, x: f(x))(f, x), np.asarray(x) @ matrix.T)
        assert not launches


@pytest.fixture(scope="module")
def compiled(request):
    """What came out of each of `NAMES`, from a process that does not interpret kernels."""
    if request.config.getoption("--backend") not in (None, "torch"):
        pytest.skip("belongs to the backend torch")
    program = Path(__file__).parents[1] / "hadamard_ahead_of_time.py"
    result = subprocess.run(
        [sys.executable, program, *NAMES],
        env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    lines = map(json.loads, result.stdout.splitlines())
    return {line["name"]: line["passes"] for line in lines}


@pytest.mark.parametrize("name", NAMES)
def test_machine_code(compiled, name):
    """The interpreter has none of the rules of the compiler, so the kernel is compiled for GPUs."""
    target = name.rpartition("-")[2]
    assert compiled[name]
    for found in compiled[name]:
        assert "error" not in found, found["error"]
        if target == "cupy":  # where the stand-in has checked the arguments
            assert found["launches"] >= 3
            continue
        assert found["spilled"] <= SPILLED, found
        assert found["shared"] <= SHARED.get(target, LEAST_SHARED), found
        assert found["products"] or not name.startswith("rotation")


def test_launches_by_jax(request):
    """JAX lowers maps and their gradients for a GPU, with the kernels compiled."""
    if request.config.getoption("--backend") not in (None, "torch"):
        pytest.skip("belongs to the backend torch")
    pytest.importorskip("jax_triton", reason="jax-triton is not installed")
    pytest.importorskip("jax_cuda12_plugin", reason="the plugin of JAX for CUDA is not installed")
    program = Path(__file__).parents[1] / "hadamard_lowered_for_cuda.py"
    result = subprocess.run(
        [sys.executable, program],
        env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    # Fast JL has a call for the places of the kept coordinates too, and long vectors take two passes.
    of_values = {"transform": 1, "long": 2, "projection": 1, "rotation": 1}
    for found in map(json.loads, result.stdout.splitlines()):
        name, kind = found["name"].split("-")
        passes = of_values[name] * (2 if kind == "gradient" else 1)
        assert found["calls"] == passes + (name == "projection"), found
