"""Hadamard matrices and the transform: against SciPy and the definition, on every backend."""

import numpy as np
import pytest
import scipy.linalg

import isentropic as it
from isentropic.jl import _hadamard, _kronecker

NORMS = {"ortho": lambda n: n**-0.5, "backward": lambda n: 1.0, "forward": lambda n: 1 / n}


class TestTransform:
    @pytest.mark.parametrize("n", [1, 2, 64, 4096])
    @pytest.mark.parametrize("norm", NORMS)
    def test_against_scipy(self, backend, n, norm, rng):
        x = rng.normal(size=(3, n))
        expected = x @ scipy.linalg.hadamard(n) * NORMS[norm](n)
        got = it.jl.hadamard_transform(backend.array(x), norm=norm)
        tolerance = 1e-5 * np.abs(expected).max()
        backend.assert_close(
            got, expected.astype(got.dtype.__str__().rpartition(".")[2]), rtol=1e-5, atol=tolerance
        )

    @pytest.mark.parametrize(
        ("shape", "axis"),
        [
            *(((8, 16, 4), axis) for axis in (0, 1, 2, -1, -3)),
            *(((256, 1, 3), axis) for axis in (0, 1)),
            ((2, 128, 3), 1),
            ((5, 1, 1024), -1),
        ],
    )
    def test_axis(self, backend, shape, axis, rng, tiny_tiles):
        x = rng.normal(size=shape)
        n = x.shape[axis]
        expected = np.moveaxis(np.moveaxis(x, axis, -1) @ scipy.linalg.hadamard(n) * n**-0.5, -1, axis)
        backend.assert_close(
            it.jl.hadamard_transform(backend.array(x), axis=axis), expected, rtol=1e-5, atol=1e-5
        )

    def test_twice_is_the_identity(self, backend, rng):
        x = backend.array(rng.normal(size=(5, 1024)).astype("float32"))
        backend.assert_close(
            it.jl.hadamard_transform(it.jl.hadamard_transform(x)), x, rtol=1e-5, atol=2e-6
        )
        back = it.jl.hadamard_transform(it.jl.hadamard_transform(x, norm="backward"), norm="forward")
        backend.assert_close(back, x, rtol=1e-5, atol=2e-6)

    def test_integers_are_exact(self, backend, rng):
        # ±1 and sums of them, with no rounding: the factors hold no other numbers.
        x = rng.integers(-50, 50, size=(4, 256)).astype("float32")
        got = it.jl.hadamard_transform(backend.array(x), norm="backward")
        np.testing.assert_array_equal(backend.numpy(got), x @ scipy.linalg.hadamard(256))

    def test_zero_sizes(self, backend):
        assert it.jl.hadamard_transform(backend.array(np.zeros((0, 8)))).shape == (0, 8)
        assert it.jl.hadamard_transform(backend.array(np.zeros((8, 0))), axis=0).shape == (8, 0)

    def test_errors(self, backend):
        x = backend.array(np.ones((3, 6)))
        with pytest.raises(
            ValueError, match="`x` must have a power of two of entries along axis 1, got 6"
        ):
            it.jl.hadamard_transform(x)
        with pytest.raises(ValueError, match="`x` must have a power of two"):
            it.jl.hadamard_transform(x[:, :0])
        with pytest.raises(ValueError, match=r"`axis` must be in \[-2, 2\), got 2"):
            it.jl.hadamard_transform(x, axis=2)
        with pytest.raises(ValueError, match="`norm` must be 'backward' or 'ortho'"):
            it.jl.hadamard_transform(x, norm="both")
        with pytest.raises(TypeError, match="`x` must have a real floating-point dtype"):
            it.jl.hadamard_transform(backend.array(np.ones(4, np.int64)))
        with pytest.raises(TypeError, match="`x` must be an array"):
            it.jl.hadamard_transform([1.0, 2.0])


@pytest.mark.host
class TestMatrices:
    @pytest.fixture(autouse=True, params=[False, True], ids=["small", "large"])
    def _factors_for_every_blas(self, request, monkeypatch):
        for module in (_hadamard, _kronecker):
            monkeypatch.setattr(module, "copies_small_operands", lambda: request.param)

    @pytest.mark.parametrize("doublings", range(6, 13))
    def test_transform_of_every_length(self, doublings, rng, tiny_tiles):
        x = rng.normal(size=(5, 2**doublings))
        expected = x @ scipy.linalg.hadamard(2**doublings) * 2 ** (-doublings / 2)
        for some in (x, x.T.copy().T):
            np.testing.assert_allclose(it.jl.hadamard_transform(some), expected, atol=1e-12)

    @pytest.mark.parametrize("order", [2, 12, 20, 28, 36, 44, 60, 24, 96, 768, 960, 3072, 3584])
    def test_hadamard_of_many_orders(self, order):
        base_doublings = _hadamard.hadamard_order(order)
        factors = _hadamard.hadamard_factors(
            np, base_doublings, scale=1.0, dtype=np.float64, device=None
        )
        h = _kronecker.apply_kronecker(np, factors, np.eye(order), 1)
        assert h.shape == (order, order)
        np.testing.assert_array_equal(np.abs(h), 1)
        np.testing.assert_array_equal(h @ h.T, order * np.eye(order))

    @pytest.mark.parametrize("order", [96, 112, 160, 768, 3584, 6144, 128, 4096])
    def test_the_matrix_of_an_order_never_changes(self, order):
        wanted = {"scale": 1.0, "dtype": np.float64, "device": None}
        base_doublings = _hadamard.hadamard_order(order)
        matrices = [
            _kronecker.apply_kronecker(np, factors, np.eye(order)[:, : order // 8].T, 1)
            for factors in (
                _hadamard.hadamard_factors(np, base_doublings, **wanted),
                _hadamard._factors(np, _hadamard._factor_orders(base_doublings), 1.0, np.float64, None),
            )
        ]
        np.testing.assert_array_equal(*matrices)

    @pytest.mark.parametrize("order", [256, 640, 768, 1024, 4096])
    def test_factors_for_a_sample_have_the_same_product(self, order):
        wanted = {"scale": 1.0, "dtype": np.float64, "device": None}
        base_doublings, x = _hadamard.hadamard_order(order), np.eye(order)
        whole = _hadamard.hadamard_factors(np, base_doublings, **wanted)
        orders = set()
        for count in (1, 5, order // 32, order // 16):
            last = _hadamard.doublings_to_sample(np, base_doublings, count)
            if last is None:
                continue
            factors = _hadamard.hadamard_factors(np, base_doublings, last=last, **wanted)
            assert factors[-1].shape == (2**last, 2**last)
            orders.add(last)
            np.testing.assert_array_equal(
                _kronecker.apply_kronecker(np, factors, x, 1),
                _kronecker.apply_kronecker(np, whole, x, 1),
            )
        assert orders
        assert _hadamard.doublings_to_sample(np, base_doublings, order) is None

    def test_the_result_is_written_where_the_caller_wants_it(self, rng):
        x, out = rng.normal(size=(5, 4096)), np.empty((5, 4096))
        factors = _hadamard.hadamard_factors(
            np, _hadamard.Order(1, 12), scale=1.0, dtype=np.float64, device=None
        )
        assert _kronecker.apply_kronecker(np, factors, x, 1, out) is out
        np.testing.assert_array_equal(out, _kronecker.apply_kronecker(np, factors, x, 1))

    def test_orders_leave_small_gaps(self):
        for n in range(1, 3000):
            order = _hadamard.hadamard_order(n).size
            assert order >= n
            if n > 16:
                assert order <= 1.18 * n
        for n in (12, 20, 384, 640, 768, 896, 1024, 5120):
            assert _hadamard.hadamard_order(n).size == n


@pytest.mark.host
class TestMemory:
    def test_output_and_one_buffer(self):
        import tracemalloc

        x = np.ones((512, 4096), np.float32)
        it.jl.hadamard_transform(x)  # the first call imports the threads
        tracemalloc.start()
        try:
            it.jl.hadamard_transform(x)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 2.0 * x.nbytes


@pytest.mark.host
@pytest.mark.parametrize("size", [6e4, 1e-44])
@pytest.mark.parametrize("n", [16, 256, 4096])
def test_settings_of_the_caller_do_not_matter(n, size):
    """The sum of 256 numbers of 6e4 is beyond float16, and products with 1e-44 are subnormal."""
    x = np.full((2, n), size, "float16" if size > 1 else "float32")
    with np.errstate(all="ignore"):
        expected = it.jl.hadamard_transform(x)
    with np.errstate(all="raise"):
        np.testing.assert_array_equal(it.jl.hadamard_transform(x), expected)
    assert size < 1 or np.isinf(expected[:, 0]).all()
