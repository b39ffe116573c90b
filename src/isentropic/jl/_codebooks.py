"""The best scalar codebooks for one coordinate of a random direction (Lloyd 1982; Max 1960).

A coordinate t of a random vector of length √d in d dimensions has a density ∝ (1 − t²/d)^((d − 3)/2) on
(−√d, √d). With t = √d sin φ the density of φ is ∝ cos^{d−2} φ, which is smooth for every d ≥ 2. A
codebook has a reconstruction c for each cell between two thresholds. Its mean squared error is least if
each c is the mean of its cell, and each threshold the midpoint of two c.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

_NODES = 96  # of Gauss and Legendre, in each cell
# Beyond this many standard deviations the density is below 1e-31 of its maximum.
_FARTHEST = 12.0
_GRID = 4096  # cells of equal width, for the first guess
_STEPS = 60  # most codebooks take five


class Codebook(NamedTuple):
    """Reconstructions of numbers of variance 1, and what they are expected to miss."""

    values: np.ndarray  # (2^bits,), ascending, v and −v
    thresholds: np.ndarray  # (2^bits − 1,), the midpoints
    error: float  # E (t − v)²


@functools.lru_cache(maxsize=256)
def codebook(d: int, bits: int) -> Codebook:
    """The codebook with the least mean squared error, for d ≥ 1 and 1 ≤ bits ≤ 8."""
    if d == 1:  # a random direction is ±1
        upper, error = np.linspace(1.0, 2.0, 2 ** (bits - 1)), 0.0
    else:
        upper, error = _upper_half(d, 2 ** (bits - 1))
    values = np.concatenate((-upper[::-1], upper))
    return Codebook(values, (values[1:] + values[:-1]) / 2, error)


def _upper_half(d: int, n: int) -> tuple[np.ndarray, float]:
    """The n positive values, and the error of the whole codebook."""
    c = _first_guess(d, n)
    for _ in range(_STEPS):
        ends = _ends(d, c)
        mass, moment, density = _cells(d, ends)
        # Newton's method for c − m(c) = 0, where m are the means of the cells. An end moves half as far
        # as a value beside it. The first end and the last one stay.
        means = moment / mass
        lower, upper = density[:-1] * (means - ends[:-1]), density[1:] * (ends[1:] - means)
        lower[0] = upper[-1] = 0.0
        lower, upper = lower / (2 * mass), upper / (2 * mass)
        slope = np.diag(1 - lower - upper) - np.diag(upper[:-1], 1) - np.diag(lower[1:], -1)
        step = np.linalg.solve(slope, c - means)
        # No value may leave the middle of its cell.
        c = c - step * min(1.0, np.min((c - ends[:-1]) / 2 / np.maximum(np.abs(step), 1e-300)))
        if np.max(np.abs(step)) < 1e-12:
            break
    mass, moment, _ = _cells(d, _ends(d, c))
    return c, float(1 - 2 * np.sum(c * (2 * moment - c * mass)))


def _ends(d: int, c: np.ndarray) -> np.ndarray:
    return np.concatenate(([0.0], (c[1:] + c[:-1]) / 2, [math.sqrt(d)]))


def _cells(d: int, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Probability and first moment of each cell of t ≥ 0, and the density at all ends."""
    root = math.sqrt(d)
    last = min(1.0, _FARTHEST / root)
    angle = np.arcsin(np.minimum(ends / root, last))
    log_constant = math.lgamma(d / 2) - math.lgamma((d - 1) / 2) - math.log(math.pi) / 2  # of φ
    x, w = np.polynomial.legendre.leggauss(_NODES)
    half = np.diff(angle)[:, None] / 2
    nodes = angle[:-1, None] + half * (1 + x)
    density = np.exp(log_constant + (d - 2) * np.log(np.cos(nodes)))
    mass = np.sum(half * w * density, axis=1)
    moment = np.sum(half * w * density * np.sin(nodes), axis=1) * root
    cosine = np.maximum(np.cos(angle), 1e-300)
    # dt = √d cos φ dφ. That at the last end, which does not move, is not used.
    of_t = np.exp(log_constant + (d - 3) * np.log(cosine)) / root
    return mass, moment, of_t


def _first_guess(d: int, n: int) -> np.ndarray:
    """Values of the density ∝ f^{1/3}, which is the best one for many values (Bennett 1948)."""
    root = math.sqrt(d)
    t = (np.arange(_GRID) + 0.5) * (min(root, _FARTHEST) / _GRID)
    weight = np.exp((d - 3) / 6 * np.log1p(-t * t / d))
    total = np.cumsum(weight)
    return np.interp((np.arange(n) + 0.5) / n, total / total[-1], t)
