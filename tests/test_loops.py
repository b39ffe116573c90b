import numpy as np
import pytest

from isentropic import _loops


class TestLoops:
    @pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 11])
    def test_every_index_once_and_in_order(self, length):
        seen = _loops.fold(np, lambda seen, block: [*(seen or []), block], length, 4)
        covered = [i for start, size in seen for i in range(start, start + size)]
        assert covered == list(range(length))
        assert all(size <= 4 for _, size in seen)

        x = np.arange(length, dtype=float)[:, None]
        (y, nothing) = _loops.map_blocks(np, lambda b: (_loops.take(x, b, -2), None), length, 4)
        np.testing.assert_array_equal(y, x)
        assert nothing is None

    def test_take(self, rng):
        x = rng.normal(size=(2, 6, 5))
        np.testing.assert_array_equal(_loops.take(x, (2, 3), -2), x[:, 2:5])
        np.testing.assert_array_equal(_loops.take(x, (1, 2), -1), x[..., 1:3])
        assert _loops.take(x, (0, 6), -2) is x
        broadcast = x[:, :1]
        assert _loops.take(broadcast, (3, 2), -2) is broadcast

    @pytest.mark.parametrize("length", [1, 3, 4, 8, 11])
    def test_scan_carries_through_the_blocks(self, backend, length, rng):
        xp = backend.xp
        x = backend.array(rng.normal(size=(2, length, 3)).astype("float32"))

        def step(carry, block):
            rows = _loops.take(x, block, -2)
            return carry + xp.sum(rows, axis=-2, keepdims=True), rows + carry

        def scan(x):
            return _loops.scan_blocks(xp, step, 0.0 * x[:, :1, :], length, 4)

        blocks = [length % 4 or 4] + [4] * ((length - 1) // 4)
        host, carry, expected = backend.numpy(x), 0.0, []
        for stop, size in zip(np.cumsum(blocks), blocks, strict=True):
            rows = host[:, stop - size : stop]
            expected.append(rows + carry)
            carry = carry + rows.sum(axis=1, keepdims=True)
        expected = np.concatenate(expected, axis=1)
        backend.assert_close(scan(x), expected, rtol=1e-5, atol=1e-5)
        if backend.library == "jax":
            import jax

            got = jax.jit(lambda y: _loops.scan_blocks(
                xp,
                lambda c, b: (c + xp.sum(_loops.take(y, b, -2), axis=-2, keepdims=True), _loops.take(y, b, -2) + c),
                0.0 * y[:, :1, :], length, 4,
            ))(x)  # fmt: skip
            backend.assert_close(got, expected, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("rows", [0, 1, 7, 8, 20])
    def test_rows_in_blocks(self, backend, rows, rng, tiny_tiles):
        x = backend.array(rng.normal(size=(rows, 10)).astype("float32"))  # four rows to a block
        expected = 2 * backend.numpy(x)[:, :3]

        def function(rows, out):
            return 2 * rows[:, :3]

        backend.assert_close(_loops.map_rows(backend.xp, function, x, width=3, row_size=10), expected)
        if backend.library == "jax":
            import jax

            got = jax.jit(lambda x: _loops.map_rows(backend.xp, function, x, width=3, row_size=10))(x)
            backend.assert_close(got, expected)
