import numpy as np
import pytest

from isentropic import _loops


class TestLoops:
    @pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 11])
    def test_every_index_once_and_in_order(self, length):
        seen = _loops.fold(np, lambda block: [block], lambda a, b: a + b, length, 4)
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
