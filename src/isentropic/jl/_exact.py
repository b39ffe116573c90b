"""Arithmetic that gives the same bits in every library and on every machine.

Sums of float32 are rounded in an order that each library chooses. Here numbers are integers, in float32
below 2²⁴ or in int32, whose sums are exact in any order. Single operations of IEEE 754 on floats, which
round in one way, and products with powers of two, which do not round, come between them.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from isentropic._namespace import Array, common_device

_LOWEST, _HIGHEST = -126, 127  # the exponents of normal numbers in float32
EXACT = 24  # integers up to 2 to this power are exact in float32


class Exponents:
    """The exponents j of positive float32 numbers, 2^j ≤ x < 2^{j+1}, and powers of two of them."""

    def __init__(self, xp: ModuleType, x: Array) -> None:
        self.xp, self.device = xp, common_device(x=x)
        table = self._array(2.0 ** np.arange(_LOWEST, _HIGHEST + 1))
        found = xp.searchsorted(table, xp.reshape(x, (-1,)), side="right") - 1
        self._index = xp.where(found < 0, 0, found)

    def power(self, exponent: Any) -> Array:
        """``2^exponent(j)`` as a column, where `exponent` takes NumPy's array of all j."""
        exponents = np.clip(exponent(np.arange(_LOWEST, _HIGHEST + 1)), _LOWEST, _HIGHEST)
        table = 2.0 ** exponents.astype(np.float64)
        return self.xp.take(self._array(table), self._index, axis=0)[:, None]

    def _array(self, table: np.ndarray) -> Array:
        return self.xp.asarray(table.astype(np.float32), dtype=self.xp.float32, device=self.device)

    def scaled(self, x: Array, sign: int) -> Array:
        """``x · 2^{sign · j}``. Two factors, as one of them may be beyond the range of float32."""
        return x * self.power(lambda j: sign * (j // 2)) * self.power(lambda j: sign * (j - j // 2))


def exact_sum(xp: ModuleType, x: Array) -> Array:
    """The sums of rows of integers, which are below 2³¹, as a column of int32."""
    return xp.sum(xp.astype(x, xp.int32), axis=-1, keepdims=True, dtype=xp.int32)


def root_of_squares(xp: ModuleType, u: Array) -> tuple[Array, Array, Array]:
    """The norm of each row of integers below 2²⁰, as an integer of 15 bits times a power of two.

    Returns both, and the inverse of the power: columns of float32. The norm is rounded to nearest.
    """
    # u = 256 a + b. The three sums fit in int32 for up to 2¹⁷ numbers.
    a = xp.round(u * 2.0**-8)
    b = u - a * 2.0**8
    parts = (exact_sum(xp, x) for x in (a * a, a * b, b * b))
    high, middle, low = (xp.astype(x, xp.float32) for x in parts)
    square = (high * 2.0**16 + middle * 2.0**9) + low
    of_square = Exponents(xp, square)
    # An even power of two brings the square between 2²⁸ and 2³⁰.
    size = square * of_square.power(lambda j: -2 * ((j - 28) // 2))
    target = xp.astype(size, xp.int32)
    guess = xp.astype(xp.round(xp.sqrt(size)), xp.int32)
    root = _nearest(xp, guess, lambda t: t * t - t < target)
    return (
        xp.astype(root, xp.float32),
        of_square.power(lambda j: (j - 28) // 2),
        of_square.power(lambda j: -((j - 28) // 2)),
    )


def reciprocal(xp: ModuleType, x: Array) -> Array:
    """The integer that is nearest to 2²⁹/x for integers x from 2¹⁴ to 2¹⁵, in float32."""
    divisor = xp.astype(x, xp.int32)
    guess = xp.astype(xp.round(xp.full_like(x, 2.0**29) / x), xp.int32)
    return xp.astype(_nearest(xp, guess, lambda w: (2 * w - 1) * divisor < 2**30), xp.float32)


def _nearest(xp: ModuleType, guess: Array, is_at_most: Any) -> Array:
    """The largest integer for which a condition holds, given one that misses it by 2 or less.

    Square roots and quotients are rounded differently by some GPUs. The condition is exact.
    """
    found = guess - 2
    for step in (-1, 0, 1, 2):
        found = found + xp.astype(is_at_most(guess + step), xp.int32)
    return found


def pack(xp: ModuleType, codes: Array, bits: int) -> Array:
    """Codes (rows, n) as bytes (rows, ⌈n · bits / 8⌉), the first code in the lowest bits."""
    rows, n = codes.shape
    count, n_bytes = _group(bits)
    padded = -(-n // count) * count
    if padded > n:
        zeros = xp.zeros((rows, padded - n), dtype=xp.int32, device=common_device(codes=codes))
        codes = xp.concat((codes, zeros), axis=1)
    groups = xp.reshape(codes, (rows, padded // count, count))
    word = groups[..., 0]
    for i in range(1, count):
        word = word + groups[..., i] * 2 ** (bits * i)
    parts = [xp.astype((word >> (8 * i)) & 255, xp.uint8) for i in range(n_bytes)]
    packed = xp.reshape(xp.stack(parts, axis=-1), (rows, padded // count * n_bytes))
    return packed[:, : -(-n * bits // 8)]


def unpack(xp: ModuleType, packed: Array, bits: int, n: int) -> Array:
    """The codes (rows, n) in int32 of which `pack` makes the bytes."""
    rows, size = packed.shape
    count, n_bytes = _group(bits)
    words = -(-n // count)
    if words * n_bytes > size:
        zeros = xp.zeros(
            (rows, words * n_bytes - size), dtype=xp.uint8, device=common_device(packed=packed)
        )
        packed = xp.concat((packed, zeros), axis=1)
    parts = xp.astype(xp.reshape(packed, (rows, words, n_bytes)), xp.int32)
    word = parts[..., 0]
    for i in range(1, n_bytes):
        word = word + parts[..., i] * 2 ** (8 * i)
    codes = xp.stack([(word >> (bits * i)) & (2**bits - 1) for i in range(count)], axis=-1)
    return xp.reshape(codes, (rows, words * count))[:, :n]


def _group(bits: int) -> tuple[int, int]:
    """How many codes fill how many bytes."""
    return (8, 3) if bits == 3 else (8 // bits, 1)
