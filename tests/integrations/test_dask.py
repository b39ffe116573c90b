"""Dask arrays: lazy, block by block, the same numbers; and an array larger than a worker's memory."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest

import isentropic as it

da = pytest.importorskip("dask.array")

MAPS = [
    it.jl.gaussian_projection(60, 8, rng=0),
    it.jl.hadamard_projection(60, 8, rounds=2, rng=0),
    it.jl.count_sketch(60, 8, nonzeros=2, rng=0),
]


@pytest.mark.parametrize("f", MAPS, ids=lambda f: type(f).__name__)
@pytest.mark.parametrize("chunks", [(7, 60), (7, 13), (20, 20)])
class TestProjections:
    def test_same_as_in_memory(self, f, chunks, rng):
        x = rng.normal(size=(20, 60)).astype("float32")
        lazy = f(da.from_array(x, chunks=chunks))
        assert isinstance(lazy, da.Array)
        assert lazy.shape == (20, 8)
        assert lazy.dtype == np.float32
        y = lazy.compute(scheduler="synchronous")
        np.testing.assert_allclose(y, f(x), rtol=1e-5, atol=1e-6)
        back = f.adjoint(f(da.from_array(x.T, chunks=chunks[::-1]), axis=0), axis=0)
        assert back.shape == (60, 20)
        got = back.compute(scheduler="synchronous")
        np.testing.assert_allclose(got, f.adjoint(f(x)).T, rtol=1e-4, atol=1e-5)

    def test_nothing_is_computed_before_it_is_asked_for(self, f, chunks):
        def fail(block):
            raise AssertionError("computed")

        x = da.zeros((20, 60), chunks=chunks).map_blocks(fail, dtype=float, meta=np.zeros((0, 0)))
        lazy = f(x)
        assert lazy.numblocks[1] == 1
        with pytest.raises(AssertionError, match="computed"):
            lazy.compute(scheduler="synchronous")


def test_rows_stay_in_their_chunks():
    x = da.zeros((100, 60), chunks=(10, 60))
    assert MAPS[0](x).chunks == ((10,) * 10, (8,))


def test_hadamard_transform(rng):
    x = rng.normal(size=(12, 64))
    lazy = it.jl.hadamard_transform(da.from_array(x, chunks=(5, 16)), norm="backward")
    assert isinstance(lazy, da.Array)
    np.testing.assert_allclose(
        lazy.compute(scheduler="synchronous"), it.jl.hadamard_transform(x, norm="backward"), atol=1e-10
    )


def test_like_a_dask_array():
    f = it.jl.gaussian_projection(60, 8, rng=0, like=da.zeros(3, dtype="float32"))
    assert isinstance(f.weights, np.ndarray)
    assert f.weights.dtype == np.float32


def test_errors():
    with pytest.raises(ValueError, match="`x` must have 60 entries along axis 1"):
        MAPS[0](da.zeros((20, 61)))
    with pytest.raises(TypeError, match="`x` must have a real floating-point dtype"):
        MAPS[0](da.zeros((20, 60), dtype="int32"))
    with pytest.raises(TypeError, match="`x` must be an array in memory, got a Dask array"):
        it.jl.distortion(da.zeros((20, 60)), da.zeros((20, 60)))
    # At once, and not when it is computed.
    with pytest.raises(ValueError, match="`x` must have a power of two of entries along axis 1, got 6"):
        it.jl.hadamard_transform(da.zeros((3, 6)))
    with pytest.raises(TypeError, match="`x` must have a real floating-point dtype"):
        it.jl.hadamard_transform(da.zeros((3, 8), dtype="int32"))


@pytest.mark.parametrize("chunks", [(7, 60), (7, 13)])
def test_unknown_numbers_of_rows(chunks, rng):
    x = rng.normal(size=(20, 60))
    lazy = da.from_array(x, chunks=chunks)
    some = lazy[lazy[:, 0] > 0]
    np.testing.assert_allclose(
        MAPS[1](some).compute(scheduler="synchronous"), MAPS[1](x[x[:, 0] > 0]), atol=1e-10
    )
    with pytest.raises(ValueError, match="`x` must have 60 entries along axis 0"):
        MAPS[1](some, axis=0)
    with pytest.raises(ValueError, match="`x` must have a power of two"):
        it.jl.hadamard_transform(some, axis=0)


@pytest.mark.nightly
def test_larger_than_the_memory_of_a_worker(tmp_path):
    # 1.2 GB through two workers of 0.5 GB each: the process that holds all of it would be killed.
    code = """
        import numpy as np, dask, dask.array as da
        from dask.distributed import Client, LocalCluster
        import isentropic as it

        def block(block_info=None):
            (start, stop), _ = block_info[None]["array-location"]
            return np.random.default_rng(start).random((stop - start, 8192), "float32")

        if __name__ == "__main__":
            n, limit = 36_000, 500_000_000
            x = da.map_blocks(block, chunks=((1000,) * (n // 1000), (8192,)), dtype="float32",
                              meta=np.zeros((0, 0), "float32"))
            assert x.nbytes > 2 * limit
            f = it.jl.hadamard_projection(8192, 64, rng=0, like=np.zeros(1, "float32"))
            dask.config.set({"distributed.worker.memory.terminate": 0.95})
            with LocalCluster(n_workers=2, threads_per_worker=1, memory_limit=limit,
                              dashboard_address=None) as cluster, Client(cluster):
                y = f(x).compute()
            assert y.shape == (n, 64)
            for start in (0, 17_000, n - 1000):
                rows = np.random.default_rng(start).random((1000, 8192), "float32")
                np.testing.assert_allclose(y[start : start + 1000], f(rows), rtol=1e-4, atol=1e-4)
            print("done")
    """
    pytest.importorskip("distributed")
    script = tmp_path / "cluster.py"  # a file, which the workers can import
    script.write_text(textwrap.dedent(code))
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert result.stdout.strip() == "done", result.stderr
