"""Arithmetic of integers: norms, reciprocals, powers of two and packed codes, against exact fractions."""

from fractions import Fraction

import numpy as np
import pytest

from isentropic.jl import _exact
from isentropic.jl._quantizers import BITS


@pytest.mark.host
class TestExact:
    @pytest.mark.parametrize("bits", BITS)
    @pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 24])
    def test_packed(self, bits, n, rng):
        codes = rng.integers(0, 2**bits, (5, n)).astype(np.int32)
        packed = _exact.pack(np, codes, bits)
        assert packed.dtype == np.uint8
        assert packed.shape == (5, -(-n * bits // 8))
        np.testing.assert_array_equal(_exact.unpack(np, packed, bits, n), codes)
        in_bits = (codes[..., None] >> np.arange(bits)) & 1
        expected = np.packbits(in_bits.reshape(5, n * bits).astype(np.uint8), axis=1, bitorder="little")
        np.testing.assert_array_equal(packed, expected)

    def test_norms_are_rounded_to_nearest(self, rng):
        u = np.round(rng.normal(size=(300, 40)) * 2.0 ** rng.integers(2, 14, (300, 1))).astype(
            np.float32
        )
        root, power, inverse = _exact.root_of_squares(np, u)
        np.testing.assert_array_equal(power * inverse, 1)
        assert ((root >= 2**14) & (root <= 2**15)).all()
        for row, t, p in zip(u, root[:, 0], power[:, 0], strict=True):
            square = Fraction(sum(int(x) ** 2 for x in row)) / Fraction(float(p)) ** 2
            low, high = (
                (Fraction(int(t)) - Fraction(1, 2)) ** 2,
                (Fraction(int(t)) + Fraction(1, 2)) ** 2,
            )
            # The square has 24 bits before its root is taken.
            assert low * Fraction(1 - 2**-22) <= square <= high * Fraction(1 + 2**-22)

    def test_reciprocals(self):
        x = np.arange(2**14, 2**15 + 1, dtype=np.float32)[:, None]
        expected = [round(Fraction(2**29, int(t))) for t in x[:, 0]]
        np.testing.assert_array_equal(_exact.reciprocal(np, x)[:, 0], expected)

    def test_exponents(self):
        x = np.float32([[2.0**-126], [2.0**-100], [0.75], [1.0], [1.5], [3.4e38]])
        of_x = _exact.Exponents(np, x)
        np.testing.assert_array_equal(
            of_x.power(lambda j: 0 * j + (j == 127))[:, 0], [1, 1, 1, 1, 1, 2]
        )
        mantissas = of_x.scaled(x, -1)
        assert ((mantissas >= 1) & (mantissas < 2)).all()
        np.testing.assert_array_equal(of_x.scaled(mantissas, 1), x)
