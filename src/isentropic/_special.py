"""Special functions of the theory. Attention does not import them: their tables are made at import."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from isentropic._namespace import Array, common_device
from isentropic._numerics import align, lift
from isentropic._products import product

# Arguments and orders are raised by this number, so that asymptotic series are accurate to 1e-12.
_SHIFT = 16
_DEBYE_TERMS = 10


def log_gamma_step(xp: ModuleType, x: Array) -> Array:
    """``log Γ(x + ½) − log Γ(x)`` for x > 0."""
    # In powers of 1/(x − ¼) the asymptotic series has no odd terms.
    z = x + (_SHIFT - 0.25)
    r = 1 / (z * z)
    series = xp.log(z) / 2 + r * (1 / 64 - r * (5 / 2048 - r * 61 / 49152))
    below = sum(align(x[..., None], xp.arange(_SHIFT, dtype=x.dtype, device=common_device(x=x))))
    # Each step down divides the ratio of gamma functions by (x + j + ½)/(x + j).
    return series - xp.sum(xp.log1p(0.5 / below), axis=-1)


def digamma_gap(xp: ModuleType, m: Array) -> Array:
    """``ψ(1) − ψ(1 − m)`` for m in [0, 1)."""
    x = _SHIFT + 1.0
    y: Any = x - m
    # The difference of the series r/12 − r²/120 + r³/252 − r⁴/240 at r = a and b, divided by a − b.
    a, b = 1 / (y * y), 1 / (x * x)
    series = 1 / 12 - (a + b) / 120 + (a * a + a * b + b * b) / 252 - (a + b) * (a * a + b * b) / 240
    tail = m * (x + y) * a * b * series + m / (2 * x * y) - xp.log1p(-m / x)
    j = lift(xp.arange(1, _SHIFT + 1, dtype=m.dtype, device=common_device(m=m)), m.ndim + 1)
    return tail + m * xp.sum(1 / ((j - m[..., None]) * j), axis=-1)


def von_mises_fisher(xp: ModuleType, d: Array, kappa: Array) -> tuple[Array, ...]:
    """(log M, A, KL, κ(1 − A)) of the density ∝ e^{κ cos θ} on the unit sphere, κ ≥ 0, d ≥ 2.

    M is the mean of e^{κ cos θ} over the unit sphere in d dimensions. A is the mean of cos θ under the
    density. KL is the divergence from the uniform density, κA − log M. All follow from I_ν(κ) and
    I_{ν+1}(κ) with ν = d/2 − 1. Debye's expansion, uniform in κ, gives them at an order that is higher
    by `_SHIFT`, and the recurrence leads down to ν. No terms cancel for any κ, so that the relative
    accuracy is that of the dtype.
    """
    nu: Any = d / 2 + (_SHIFT - 1.0)
    z = kappa / nu
    w = xp.hypot(xp.ones_like(z), z)
    p, half = 1 / w, z * (z / (1 + w)) / 2
    slope, rise = _debye(xp, nu, p)
    bend, rise = p * slope + 0.5, 2 * half * p * rise
    squared = (z * p) * (z * p)  # 1 − p²
    ratio = z / (1 + w) - z * p * (p / nu * bend)
    gap = kappa * (1 + 1 / (w + z)) / (1 + w) + squared * bend  # κ (1 − ratio)
    log_mgf = nu * (2 * half - xp.log1p(half)) - xp.log1p(2 * half) / 2 - rise
    divergence = nu * xp.log1p(half) + xp.log1p(2 * half) / 2 - squared * bend + rise

    for j in range(_SHIFT - 1, -1, -1):
        b: Any = d + 2.0 * j
        x = kappa * ratio / b
        lower_ratio, lower_gap = kappa / b / (1 + x), kappa * ((b - gap) / b / (1 + x))
        change = xp.where(kappa > b, gap - lower_gap, kappa * (lower_ratio - ratio))
        divergence = divergence + change - xp.log1p(x)
        log_mgf = log_mgf + xp.log1p(x)
        ratio, gap = lower_ratio, lower_gap
    return log_mgf, ratio, divergence, gap


def _debye(xp: ModuleType, nu: Array, p: Array) -> tuple[Array, Array]:
    """Σ D'_k(p)/νᵏ and Σ (D_k(1) − D_k(p))/νᵏ/(1 − p), from k = 1 on; see `_debye_polynomials`."""
    device = common_device(p=p)
    slopes, rises = (xp.asarray(c, dtype=p.dtype, device=device) for c in _DEBYE)
    exponents = xp.arange(slopes.shape[0], dtype=p.dtype, device=device)
    powers = p[..., None] ** lift(exponents, p.ndim + 1)
    exponents = -xp.arange(1, _DEBYE_TERMS + 1, dtype=p.dtype, device=device)
    orders = nu[..., None] ** lift(exponents, nu.ndim + 1)
    slope, rise = (xp.sum(product(xp, powers, c) * orders, axis=-1) for c in (slopes, rises))
    return slope, rise


def _debye_polynomials() -> tuple[Any, Any]:
    """Coefficients of D'_k and of (D_k(1) − D_k(p))/(1 − p), a column for each k.

    ``exp Σ D_k(p)/νᵏ`` is the series of Debye's expansion of I_ν(νz) with p = 1/√(1 + z²)
    (DLMF 10.41). The recurrence of its own polynomials there becomes, for the slopes G = D',

        G_{k+1} = ½ [p²(1 − p²) G_k]' + ½ p²(1 − p²) Σ_{i+j=k} G_i G_j,     G_1 = (1 − 5p²)/8.
    """
    degrees = np.arange(3.0 * _DEBYE_TERMS + 1)

    def times(a: Any, b: Any) -> Any:
        return np.convolve(a, b)[: len(degrees)]

    slopes = np.zeros((_DEBYE_TERMS, len(degrees)))
    slopes[0, :3], weight = (1 / 8, 0, -5 / 8), (0, 0, 1 / 2, 0, -1 / 2)
    for k in range(1, _DEBYE_TERMS):
        slopes[k, :-1] = (degrees * times(weight, slopes[k - 1]))[1:]
        for i in range(k - 1):
            slopes[k] += times(weight, times(slopes[i], slopes[k - 2 - i]))
    # (1 − pⁱ)/(1 − p) = 1 + p + ... + p^{i−1}
    rises = np.cumsum((slopes / (degrees + 1))[:, ::-1], axis=1)[:, ::-1]
    return slopes.T.tolist(), rises.T.tolist()


_DEBYE = _debye_polynomials()
