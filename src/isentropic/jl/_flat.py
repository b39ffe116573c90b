"""Flat orthogonal matrices of every order, as Kronecker products of small ones.

The flatness of an orthogonal matrix of order n is √n times its largest absolute entry. It is 1 for
Hadamard matrices, which exist for the orders 1, 2 and multiples of 4 only, and √n for the identity.
The flatness of a Kronecker product is the product of those of its factors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

# The largest order of a factor. The second limit is for sizes that cannot be split within the first.
_LIMITS = (128, 1024)
# The fixed cost of a factor, in multiplications per entry: a factor of order f takes as long as f more.
_FIXED_COST = 128


class Split(NamedTuple):
    """Orders of factors. Of two splits the smaller tuple is better: flatter, and then faster."""

    log_flatness: float
    work: int
    orders: tuple[int, ...]


@functools.lru_cache(maxsize=256)
def factor_orders(n: int) -> tuple[int, ...]:
    """The orders of the factors for vectors of n entries. Their product D is n if that is possible.

    It is impossible only if n has a prime factor above 1024. Then D ≥ n/2 is the largest order below n
    of a Hadamard matrix with small factors.
    """
    for limit in _LIMITS:
        if split := _split(n, limit):
            return split.orders
    return hadamard_orders(n - 1)


def hadamard_orders(n: int) -> tuple[int, ...]:
    """The orders of the factors of the largest Hadamard matrix here whose order D is at most n."""
    splits = (_split(m, _LIMITS[0]) for m in range(n, 0, -1))
    return next(split.orders for split in splits if split and split.log_flatness == 0)


@functools.lru_cache(maxsize=16)  # a matrix takes up to 8 MB
def flat_matrix(n: int) -> np.ndarray:
    """The flattest orthogonal matrix of order n that is known here, in float64."""
    split = _split(n)
    assert split is not None  # 2 and odd orders have elementary matrices
    factors = [_elementary(part) for part in split.orders]
    return functools.reduce(np.kron, factors, np.ones((1, 1)))


@functools.lru_cache(maxsize=4096)
def _split(n: int, limit: int | None = None) -> Split | None:
    """The best split of n into orders of at most `limit`; without a limit, of elementary matrices."""
    if n == 1:
        return Split(0.0, 0, ())
    splits = []
    for order in _divisors(n):
        if limit is None:
            log_flatness, cost = _log_flatness(order), order
        else:
            whole = _split(order) if order <= limit else None
            log_flatness, cost = whole and whole.log_flatness, order + _FIXED_COST
        rest = None if log_flatness is None else _split(n // order, limit)
        if rest and log_flatness is not None:
            orders = (order, *rest.orders)
            # Rounded, so that the choice does not depend on the rounding of a library.
            total = round(math.fsum((rest.log_flatness, log_flatness)), 9) + 0.0
            splits.append(Split(total, rest.work + cost, tuple(sorted(orders)) if limit else orders))
    return min(splits, default=None)


def _divisors(n: int) -> Iterable[int]:
    """The divisors of n that are above 1."""
    small = [i for i in range(1, math.isqrt(n) + 1) if n % i == 0]
    return sorted({*small, *(n // i for i in small)} - {1})


@functools.lru_cache(maxsize=1024)
def _log_flatness(n: int) -> float | None:
    """The logarithm of the flatness of `_elementary(n)`, or None if there is no such matrix."""
    matrix = _elementary(n)
    return None if matrix is None else math.log(abs(matrix).max() * n**0.5)


@functools.lru_cache(maxsize=4)  # a matrix takes up to 8 MB
def _elementary(n: int) -> np.ndarray | None:
    """An orthogonal matrix of order n, flatter than a Kronecker product, or None. Odd n have one."""
    if n % 2:
        matrices = [_hartley(n), *([_flat_jacobsthal(n)] if has_field(n) else [])]
        return min(matrices, key=lambda matrix: abs(matrix).max())
    if n == 2:
        return np.asarray([[1.0, 1.0], [1.0, -1.0]]) * 0.5**0.5
    if n % 4 == 0:
        rows = paley(n)
        return None if rows is None else np.asarray(rows) * n**-0.5
    return np.asarray(conference(n)) * (n - 1) ** -0.5 if has_field(n - 1) else None


def _hartley(n: int) -> np.ndarray:
    """The matrix of the discrete Hartley transform; its flatness is at most √2."""
    i = np.arange(n)
    # The remainder is exact, while large angles would lose digits.
    angle = 2 * math.pi / n * (np.outer(i, i) % n)
    return (np.cos(angle) + np.sin(angle)) * n**-0.5


def _flat_jacobsthal(q: int) -> np.ndarray:
    """An orthogonal matrix made of Jacobsthal's matrix S. Its flatness is about 1 + 1/√q.

    S + a·I + b·J is orthogonal up to its scale, with a = 1 where S is skew-symmetric (q = 3 modulo 4),
    else with a = 0: then its product with its transpose is (q + a²)·I + (q·b² + 2ab − 1)·J.
    """
    a = 1 if q % 4 == 3 else 0
    b = ((a + q) ** 0.5 - a) / q  # the root of q·b² + 2ab − 1
    return (np.asarray(jacobsthal(q)) + a * np.eye(q) + b) * (q + a) ** -0.5


def paley(order: int) -> list[list[float]] | None:
    """Paley's Hadamard matrix of an order divisible by 4, or None if there is none.

    The order is q + 1 for q = 3 modulo 4, or 2(q + 1) for q = 1 modulo 4, where q is a prime or the
    square of a prime.
    """
    if is_prime(order - 1):
        rows = [[1.0] * order] + [[-1.0, *row] for row in jacobsthal(order - 1)]
        for i in range(1, order):
            rows[i][i] = 1.0
        return rows
    q = order // 2 - 1
    if q % 4 != 1 or not has_field(q):
        return None
    # In a conference matrix each entry e = ±1 becomes the block e·[[1, 1], [1, −1]], and each 0 becomes
    # the block [[1, −1], [−1, −1]].
    rows = conference(order // 2)
    upper = [[y for e in row for y in ((e, e) if e else (1.0, -1.0))] for row in rows]
    lower = [[y for e in row for y in ((e, -e) if e else (-1.0, -1.0))] for row in rows]
    return [row for pair in zip(upper, lower, strict=True) for row in pair]


def conference(order: int) -> list[list[float]]:
    """The symmetric matrix C with zeros on the diagonal, else ±1, and C² = q·I.

    The order is q + 1, where q = 1 modulo 4 is a prime or the square of a prime.
    """
    return [[0.0] + [1.0] * (order - 1)] + [[1.0, *row] for row in jacobsthal(order - 1)]


def jacobsthal(q: int) -> list[list[float]]:
    """The matrix whose entry (i, j) tells whether j − i is a square in the field of q elements.

    The entry is 1 for a square, −1 for an element that is not a square, and 0 for i = j. Rows sum to 0.
    The product with the transpose is q·I − J, where J is the matrix of ones.
    """
    p = q if is_prime(q) else math.isqrt(q)
    # The field is that of integers modulo p, or that of a + b√r, where r is not a square.
    # Euler's criterion: i^((p − 1)/2) is 1 modulo p if i is a square.
    r = next(i for i in range(2, 2 * p) if pow(i, p // 2, p) != 1)
    field = [(a, b) for a in range(p) for b in range(q // p)]
    squares = {((a * a + r * b * b) % p, 2 * a * b % p) for a, b in field}
    symbol = {x: 1.0 if x in squares else -1.0 for x in field} | {(0, 0): 0.0}
    return [[symbol[(c - a) % p, (d - b) % p] for c, d in field] for a, b in field]


def has_field(q: int) -> bool:
    """Whether q is an odd prime or the square of one, so that `jacobsthal` has its field."""
    return q % 2 == 1 and (is_prime(q) or (math.isqrt(q) ** 2 == q and is_prime(math.isqrt(q))))


def is_prime(n: int) -> bool:
    return n > 1 and all(n % i for i in range(2, math.isqrt(n) + 1))
