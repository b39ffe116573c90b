r"""Theory: the mean entropy of attention under models of its scores, in closed form or by quadrature.

All entropies are in nats. They are those of the softmax over the n keys of one query, averaged over
the model. The inverse temperature of a model is in units of its scores: β = factor · scale · (standard
deviation of q·k), or κ = factor · scale · ‖q‖ ‖k‖ for directions on a sphere.

Arguments are numbers or arrays, which broadcast. If all are numbers, the result is a float, computed
in float64. Otherwise it is an array of the same library and device, in the promoted floating dtype of
the arrays, or in the default dtype if all of them are integers. It is computed in float64 if the
library and the device have it, and in float32 otherwise, as in JAX without x64.

Arguments that are neither real numbers nor arrays of them raise a TypeError, and shapes that do not
broadcast a ValueError. The functions never inspect the values in arrays, so they trace under `jax.jit`.
A number out of range raises a ValueError; an array entry out of range gives NaN.

Means over independent scores are exact for any n, up to the error of a quadrature: 1e-9 for Gaussian
scores and 1e-8 on the sphere. In float32 it is 1e-4 for Gaussian scores and β up to 10⁵, and the larger
of 1e-4 and 3e-8 d on the sphere. With :math:`L(t) = E\,e^{-te^{βs}}`,

.. math:: E \log Z = \int_0^\infty \left(e^{-t} - L(t)^n\right) \frac{dt}{t},
    \qquad E H = (1 - β\,∂_β)\, E \log Z.

The derivative is taken under the integral and combined with the integrand, so that no digits cancel.

The entropy of ``order=2`` is that of Tsallis, 1 − Σp². The sensitivity of the softmax to its logits l,
the sum of the magnitudes in its Jacobian, is twice as large: :math:`Σ_{ij} |∂p_i/∂l_j| = 2 (1 - Σp^2)`.
That to the scores is the factor times larger still. For the attention of given arrays the entropy is
``attention_entropy(query, key, order=2, family="tsallis")``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from isentropic._checks import (
    check_choice,
    check_numeric,
    check_real,
    common_shape,
    is_array,
    is_real,
    type_error,
    value_error,
)
from isentropic._loops import scan_blocks
from isentropic._namespace import common_device, default_dtype, isdtype, namespace, promoted
from isentropic._numerics import clip, divide_or_zero, lift, log_or, quietly
from isentropic._quadrature import LOWEST_STRENGTH, gaussian_scores, mean_over_scores, sphere_scores
from isentropic._special import digamma_gap, von_mises_fisher
from isentropic.jl._dimensions import entropy_criterion_dim, matched_key_dim

__all__ = [
    "entropy_criterion_dim",
    "frozen_entropy",
    "gaussian_entropy",
    "invariant_factor",
    "matched_key_dim",
    "needle_entropy",
    "needle_weight",
    "sphere_entropy",
    "tied_entropy",
]

# The least value of each argument, and the greatest for which the quadrature is verified. The formulas
# have no greatest value.
_RANGES = {
    "n": (1, 1e15),
    "d": (2, 1e6),
    "beta": (0, 1e7),
    "kappa": (0, 1e7),
    "factor": (0, math.inf),
    "beta_over_critical": (0, math.inf),
    "n_relevant": (1, math.inf),
}
# If the exponent of the first-order correction is above this, the series diverges: the result is ∞.
_LARGEST_EXPONENT = 50.0


@quietly
def gaussian_entropy(n: Any, beta: Any, *, method: str = "exact", order: int = 1) -> Any:
    r"""Mean entropy of ``softmax(beta · s)`` over n independent standard normal scores s.

    Parameters
    ----------
    n : number or array ≥ 1
        The number of keys; at most 10¹⁵ for ``"exact"``.
    beta : number or array ≥ 0
        Inverse temperature times the standard deviation of the scores; at most 10⁷ for ``"exact"``.
    method : {"exact", "annealed", "first-order"}
        - ``"exact"``: for any n, by quadrature.
        - ``"annealed"``: ``log n − β²/2``, the limit of many keys for ``β < √(2 log n)``. For larger β
          this formula is negative, and wrong: the limit is ``frozen_entropy(β/√(2 log n))``.
        - ``"first-order"``: the annealed entropy plus the correction of order 1/n,
          ``((2β² − 1) e^{β²} + 1)/(2n)``. The series is asymptotic, and useful for ``β² ≪ log n``.
    order : {1, 2}
        2 is the entropy of Tsallis, for ``"exact"`` alone.

    Returns
    -------
    float or array
        ``"exact"`` is in [0, log n], or in [0, 1 − 1/n] for the order 2.
        See `theory` for types and errors.

    Notes
    -----
    This model is the random energy model, and it converges slowly to the limit of `frozen_entropy`. By
    integration by parts :math:`β\,E(1 - Σp^2) = E\,Σp_i s_i`. It increases with β to the mean of the
    largest score.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import theory
    >>> theory.gaussian_entropy(np.asarray([64, 512, 4096]), 1.0).round(3)
    array([3.685, 5.742, 7.818])
    >>> round(theory.gaussian_entropy(4096, 1.0, method="annealed"), 4)
    7.8178
    >>> [round(2 * beta * theory.gaussian_entropy(512, beta, order=2), 3) for beta in (1.0, 8.0, 64.0)]
    [1.99, 5.977, 6.087]
    """
    check_choice("method", method, ("exact", "annealed", "first-order"))
    is_exact = _check_order(order, method)
    xp, (n, beta), finish = _checked_arrays(is_exact, n=n, beta=beta)
    if is_exact:
        return finish(mean_over_scores(xp, n, beta, scores=gaussian_scores, order=order))
    annealed = xp.log(n) - beta * beta / 2
    if method == "annealed":
        return finish(annealed)
    # Beyond 10⁴ the result is ∞ anyway, and the square might overflow.
    square = clip(xp, beta, max=1e4) ** 2
    # In one exponent, because e^{β²} alone would overflow sooner.
    exponent = square - xp.log(n) - math.log(2)
    diverges = exponent > _LARGEST_EXPONENT
    correction = (2 * square - 1) * xp.exp(xp.where(diverges, 0.0, exponent)) + 1 / (2 * n)
    return finish(annealed + xp.where(diverges, math.inf, correction))


@quietly
def frozen_entropy(beta_over_critical: Any) -> Any:
    """Mean entropy of the frozen phase, ``ψ(1) − ψ(1 − β_c/β)``, as n → ∞.

    In this phase a few keys have almost all the weight, by the Poisson–Dirichlet law with the parameter
    ``β_c/β``, and the entropy no longer grows with n.

    Parameters
    ----------
    beta_over_critical : number or array ≥ 0
        β/β_c, with ``β_c = √(2 log n)`` for n Gaussian scores.

    Returns
    -------
    float or array
        Nats, above 0, decreasing with β. It is ∞ for β ≤ β_c, where the entropy grows with n.
        See `theory` for types and errors.

    References
    ----------
    Derrida 1981, Phys. Rev. B 24, 2613; Pitman & Yor 1997, Ann. Probab. 25, 855.

    Examples
    --------
    >>> from isentropic import theory
    >>> round(theory.frozen_entropy(2.0), 6)  # 2 log 2
    1.386294
    """
    xp, (ratio,), finish = _checked_arrays(False, beta_over_critical=beta_over_critical)
    frozen = ratio > 1
    return finish(xp.where(frozen, digamma_gap(xp, 1 / xp.where(frozen, ratio, 2.0)), math.inf))


@quietly
def sphere_entropy(n: Any, d: Any, kappa: Any, *, method: str = "exact", order: int = 1) -> Any:
    r"""Mean entropy of ``softmax(kappa · cos θ)`` over n independent directions on a sphere.

    Parameters
    ----------
    n : number or array ≥ 1
        The number of keys; at most 10¹⁵ for ``"exact"``.
    d : number or array ≥ 2
        The dimension of the space, which is the head size; at most 10⁶ for ``"exact"``.
    kappa : number or array ≥ 0
        The scale of attention times ‖q‖ ‖k‖; at most 10⁷ for ``"exact"``. At the standard scale 1/√d
        and with norms √d, it is √d.
    method : {"exact", "annealed"}
        - ``"exact"``: for any n, by quadrature.
        - ``"annealed"``: ``log n − KL``, the limit of many keys. It is accurate only where it is well
          above 0; for large κ it is negative.
    order : {1, 2}
        2 is the entropy of Tsallis, for ``"exact"`` alone.

    Returns
    -------
    float or array
        ``"exact"`` is in [0, log n], or in [0, 1 − 1/n] for the order 2.
        See `theory` for types and errors.

    Notes
    -----
    KL is the divergence of the von Mises–Fisher distribution from the uniform one,

    .. math:: κ A - \log M, \quad A = I_{d/2}(κ) / I_{d/2-1}(κ), \quad
        \log M = \log Γ(d/2) + (d/2 - 1) \log(2/κ) + \log I_{d/2-1}(κ).

    For small κ it is ``κ²/(2d)``. For large d at a fixed λ = κ/d it is ``−(d/2) log(1 − s²)`` with
    ``s = (√(1 + 4λ²) − 1)/(2λ)``. At κ = d the latter is κ times ½ log of the golden ratio, 0.2406 κ.

    References
    ----------
    Mardia & Jupp 2000, Directional Statistics, 9.3. The figure 0.24: Su 2021,
    https://spaces.ac.cn/archives/8823.

    Examples
    --------
    >>> from isentropic import theory
    >>> round(theory.sphere_entropy(64, 64, 8.0), 3)
    3.692
    >>> round(theory.sphere_entropy(64, 64, 8.0, method="annealed"), 3)  # log 64 − 0.489
    3.67
    """
    check_choice("method", method, ("exact", "annealed"))
    is_exact = _check_order(order, method)
    xp, (n, d, kappa), finish = _checked_arrays(is_exact, n=n, d=d, kappa=kappa)
    if is_exact:
        return finish(mean_over_scores(xp, n, d, kappa, scores=sphere_scores, order=order))
    return finish(xp.log(n) - von_mises_fisher(xp, d, kappa)[2])


@quietly
def needle_entropy(n: Any, n_relevant: Any, gap: Any, *, order: int = 1) -> Any:
    """Entropy of attention if some keys are relevant: their logits exceed the others by `gap`.

    Parameters
    ----------
    n, n_relevant : numbers or arrays, ≥ 1 and in [1, n]
        The number of keys, and of those with the logit `gap`. The others have the logit 0.
    gap : number or array
        In nats. For attention with a law, multiply it by the factor of the law.
    order : {1, 2}
        2 is the entropy of Tsallis.

    Returns
    -------
    float or array
        In [0, log n], and for a gap ≥ 0 in [log n_relevant, log n]; for the order 2 in [0, 1 − 1/n].
        The formulas are exact. See `theory` for types and errors.

    Notes
    -----
    With r = (n − k) e^{−Δ}/k for k relevant keys at the gap Δ,
    ``H = log k + log(1 + r) + Δ r/(1 + r)``.

    Examples
    --------
    >>> from isentropic import theory
    >>> [round(theory.needle_entropy(n, 8, 7.5), 2) for n in (64, 8192)]
    [2.11, 5.24]
    """
    _check_order(order)
    xp, arguments, finish = _checked_arrays(False, n=n, n_relevant=n_relevant, gap=gap)
    shannon, tsallis, _ = _needles(xp, *arguments)
    return finish(shannon if order == 1 else tsallis)


@quietly
def needle_weight(n: Any, n_relevant: Any, gap: Any) -> Any:
    """The weight in [0, 1] that the relevant keys of `needle_entropy` have together.

    Parameters
    ----------
    n, n_relevant, gap : numbers or arrays
        As in `needle_entropy`.

    Returns
    -------
    float or array
        See `theory` for types and errors.

    Notes
    -----
    With r as in `needle_entropy` it is ``1/(1 + r)``. For a law ``γ log n`` the gap is γ log n times
    the gap Δ at the factor 1, and r is ``(n − k) n^{−γΔ}/k``. So there is a critical coefficient
    ``γ_c = 1/Δ``. Below it the weight tends to 0 as n grows, above it to 1, and at it to k/(k + 1). For
    ``laws.LogLength(base)``, where γ is 1/log base, the critical gap is log base. Where each token is
    its own relevant key, and all tokens have the cosine ρ with each other, the gap is 1 − ρ.

    References
    ----------
    Chen, Lin, Polyanskiy & Rigollet 2025, arXiv 2510.05554.

    Examples
    --------
    >>> from isentropic import laws, theory
    >>> law = laws.LogLength(512)
    >>> [round(theory.needle_weight(n, 8, 7.5 * law(n)), 3) for n in (64, 8192)]
    [0.955, 0.98]
    >>> [round(theory.needle_weight(n, 8, 7.5), 3) for n in (64, 8192)]  # a constant factor
    [0.996, 0.639]
    """
    xp, arguments, finish = _checked_arrays(False, n=n, n_relevant=n_relevant, gap=gap)
    return finish(_needles(xp, *arguments)[2])


@quietly
def tied_entropy(n: Any, d: Any, factor: Any) -> Any:
    """Mean entropy of attention with queries equal to keys, of norm √d and uniform directions.

    Every query has its own key, with the logit ``factor · √d``, among n − 1 others. The others are
    treated in the annealed approximation.

    Parameters
    ----------
    n, d : numbers or arrays, ≥ 1 and ≥ 2
        The number of keys, including the query's own, and the head size.
    factor : number or array ≥ 0
        The factor on the standard scale 1/√d.

    Returns
    -------
    float or array
        In [0, log n]. See `theory` for types and errors.

    Notes
    -----
    Let κ = factor · √d, and M and KL as in `sphere_entropy`. The weight of the other keys, relative to
    that of the query's own key, is ``r = (n − 1) M e^{−κ}``, and

        H = h(p) + p (log(n − 1) − KL),    p = r/(1 + r),

    where h is the binary entropy. For d ≫ κ, with c the factor, this becomes
    ``r = (n − 1) e^{c²/2 − c√d}`` and KL = c²/2.

    The approximation is accurate for n ≫ e^{KL} and for r ≪ 1. Between these regimes the result is too
    large: in simulations with n = 16 to 512 by up to 0.09 nats for d ≤ 4, 0.03 for d = 8, 0.013 for
    d = 16 and 0.003 for d = 64.

    Examples
    --------
    >>> from isentropic import theory
    >>> [round(theory.tied_entropy(n, 64, 1.0), 2) for n in (64, 8192)]
    [0.27, 7.45]
    """
    xp, (n, d, factor), finish = _checked_arrays(False, n=n, d=d, factor=factor)
    return finish(_tied(xp, n, d, factor * xp.sqrt(d)))


@quietly
def invariant_factor(
    n: Any,
    target: Any,
    *,
    model: str = "gaussian",
    std: Any = None,
    d: Any = None,
    n_relevant: Any = None,
    gap: Any = None,
) -> Any:
    """The factor on the standard scale at which the mean entropy of a model with n keys is `target`.

    As a function of n it is the law that keeps the entropy of the model exactly constant.

    Parameters
    ----------
    n : number or array ≥ 1
        The number of keys.
    target : number or array
        The mean entropy, in nats.
    model : {"gaussian", "sphere", "needle", "tied"}
        - ``"gaussian"``: `gaussian_entropy` at β = factor · `std`.
        - ``"sphere"``: `sphere_entropy` in `d` dimensions at κ = factor · √d.
        - ``"needle"``: `needle_entropy` with `n_relevant` keys at the gap factor · `gap`.
        - ``"tied"``: `tied_entropy` with the head size `d`.
    std, d, n_relevant, gap : numbers or arrays, > 0, ≥ 2, ≥ 1 and > 0
        The parameters of the model, which requires them; those of others must be left out. By default
        `std` is 1.

    Returns
    -------
    float or array
        In [0, ∞]. The factor is 0 if the target is log n or more. It is ∞ if no factor reaches the
        target, because the target is at most 0, or at most log `n_relevant` for ``"needle"``. For
        ``"gaussian"`` and ``"sphere"`` it is also ∞ if the target requires a β or κ above 10⁷ (8·10⁴ in
        float32). In two or three dimensions the entropy decreases only with log κ, so that limit may
        apply to targets of several nats. For a target within 1e-5 of log n, the factor has five correct
        digits.

    Raises
    ------
    TypeError, ValueError
        As all functions of this module; also for a parameter too many or too few.

    Notes
    -----
    Chandrupatla's method finds the root in a fixed number of steps. One entropy takes about 1 ms for
    ``"gaussian"`` and 3 ms for ``"sphere"``, and one factor fifteen times as long.

    As n grows, the factor grows like log n for ``"needle"``, like √log n for ``"gaussian"``, and like
    ``n^{2/(d−1)}`` for ``"sphere"`` and ``"tied"``. With S the surface of the unit sphere, and for
    targets H of several nats, the limit for ``"sphere"`` is ``κ = 2πe (n e^{−H}/S)^{2/(d−1)}``.

    References
    ----------
    Chandrupatla 1997, Adv. Eng. Softw. 28, 145. The power of n: Bruno, Chen, Lin, Polyanskiy & Rigollet
    2026, arXiv 2605.08505; a rule for any scores: Hayase & Karakida 2026, arXiv 2605.12697.

    Examples
    --------
    >>> from isentropic import theory
    >>> round(theory.invariant_factor(4096, 3.0), 2)
    3.98
    >>> factors = [theory.invariant_factor(n, 2.3, model="needle", n_relevant=8, gap=7.5)
    ...     for n in (64, 512, 4096)]
    >>> [round(x, 2) for x in factors]  # nearly linear in log n
    [0.7, 1.04, 1.35]
    """
    check_choice("model", model, tuple(_MODELS))
    names, entropy, highest, steps = _MODELS[model]
    own = _own_parameters(model, {"std": std, "d": d, "n_relevant": n_relevant, "gap": gap})
    is_exact = model in ("gaussian", "sphere")
    xp, (n, target, *parameters), finish = _checked_arrays(is_exact, n=n, target=target, **own)
    # The entries become one row, because `_root` joins its steps along the axis before.
    shape = n.shape
    n, target, *parameters = (xp.reshape(x, (1, -1)) for x in (n, target, *parameters))
    # On a sphere the strength is κ = factor · √d.
    unit = xp.sqrt(parameters[0]) if names == ("d",) else parameters.pop()
    log_n = xp.log(n)
    lowest = xp.log(parameters[0]) if model == "needle" else xp.zeros_like(n)
    # The entropy may round beyond its bounds, whose logits are infinite.
    tiny = float(xp.finfo(n.dtype).smallest_normal)
    # Above this, rounding spoils the entropy.
    highest = min(highest, 0.01 / float(xp.finfo(n.dtype).eps))

    # The logit of the entropy between its bounds is nearly linear in the logarithm of the strength.
    def transformed(h: Any) -> Any:
        return xp.log(clip(xp, log_n - h, min=tiny)) - xp.log(clip(xp, h - lowest, min=tiny))

    transformed_target = transformed(target)

    def surplus(log_strength: Any) -> Any:
        log_strength, *others = xp.broadcast_arrays(log_strength, n, *parameters)
        return transformed(entropy(xp, *others, xp.exp(log_strength))) - transformed_target

    low, high = (xp.full_like(n, math.log(x)) for x in (LOWEST_STRENGTH, highest))
    ends = surplus(xp.concat((low, high), axis=0))
    first, last = ends[:1, :], ends[1:, :]
    factor = xp.exp(_root(xp, surplus, low, high, first, last, steps))
    factor = factor / xp.where(unit > 0, unit, 1.0)
    factor = xp.where((last <= 0) | (target <= lowest), math.inf, factor)
    factor = xp.where((first >= 0) | (target >= log_n), 0.0, factor)
    return finish(xp.reshape(xp.where(unit > 0, factor, math.nan), shape))


def _check_order(order: Any, method: str = "exact") -> bool:
    """Whether the method is exact, as it must be for the order 2."""
    if not is_real(order) or order not in (1, 2):
        raise value_error("order", "be 1 or 2", order)
    if order == 2 and method != "exact":
        raise value_error("order", f"be 1 for the method {method!r}", order)
    return method == "exact"


def _needles(xp: ModuleType, n: Any, relevant: Any, gap: Any) -> tuple[Any, Any, Any]:
    """The entropies of the orders 1 and 2, and the weight that the needles have together."""
    log_others = log_or(xp, clip(xp, n - relevant, min=0.0), 0.0)
    # Log r. −1e30 stands for −∞, which would give NaN in branches that are not taken.
    z = xp.where(n > relevant, log_others - xp.log(relevant) - gap, -1e30)
    (log_rest, rest), (log_sum, weight) = _log1p_exp(xp, z), _log1p_exp(xp, -z)
    # One formula, in terms of the smaller share of the weight.
    needles_heavier = xp.log(relevant) + log_rest + gap * rest
    others_heavier = log_others + log_sum - gap * weight
    others = clip(xp, n - relevant, min=1.0)
    # weight · (1 − weight/relevant) + rest · (1 − rest/others), of terms that are each ≥ 0
    tsallis = weight * (relevant - 1 + rest) / relevant + rest * (others - 1 + weight) / others
    return xp.where(z > 0, others_heavier, needles_heavier), tsallis, weight


def _tied(xp: ModuleType, n: Any, d: Any, kappa: Any) -> Any:
    _, _, divergence, gap = von_mises_fisher(xp, d, kappa)
    # log M − κ = −gap − divergence with the gap κ(1 − A): the difference itself would cancel.
    log_rest, share = _log1p_exp(xp, log_or(xp, n - 1, -1e30) - gap - divergence)
    # This equals h(p) + p (log(n − 1) − KL).
    return log_rest + share * gap


def _log1p_exp(xp: ModuleType, z: Any) -> tuple[Any, Any]:
    """``log(1 + eᶻ)`` and its derivative, with finite derivatives of every order for any z."""
    positive = z > 0
    e = xp.exp(xp.where(positive, -z, z))
    return xp.where(positive, z, 0.0) + xp.log1p(e), xp.where(positive, 1.0, e) / (1 + e)


# For each model: its parameters, the entropy of n, the parameters and the strength (β, κ or gap), the
# highest strength, and how many steps the root takes. `std` and `gap` are the strength at the factor 1.
_MODELS: dict[str, tuple[tuple[str, ...], Callable[..., Any], float, int]] = {
    "gaussian": (("std",), partial(mean_over_scores, scores=gaussian_scores), 1e7, 12),
    "sphere": (("d",), partial(mean_over_scores, scores=sphere_scores), 1e7, 12),
    "needle": (("n_relevant", "gap"), lambda xp, *x: _needles(xp, *x)[0], 1e3, 60),
    "tied": (("d",), _tied, 1e30, 60),
}


def _own_parameters(model: str, given: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a model; those of other models must be None."""
    names = _MODELS[model][0]
    for name, x in given.items():
        if name not in names and x is not None:
            raise type_error(name, f"be left out for the model {model!r}", type(x).__name__)
    parameters = {name: 1.0 if name == "std" and given[name] is None else given[name] for name in names}
    for name, x in parameters.items():
        if x is None:
            raise value_error(name, f"be given for the model {model!r}", None)
        if name in ("std", "gap") and not is_array(x):
            check_real(name, x, above=0)
    return parameters


def _root(
    xp: ModuleType, function: Callable[[Any], Any], a: Any, b: Any, fa: Any, fb: Any, steps: int
) -> Any:
    """The root (1, m) of a function between a and b, where its values fa, fb have opposite signs."""

    def step(state: Any, _: Any) -> tuple[Any, Any]:
        a, b, fa, fb, t = state
        x = a + t * (b - a)
        fx = function(x)
        same_sign = (fx > 0) == (fa > 0)
        c, fc = xp.where(same_sign, a, b), xp.where(same_sign, fa, fb)
        b, fb = xp.where(same_sign, b, a), xp.where(same_sign, fb, fa)
        a, fa = x, fx
        # If the inverse quadratic interpolation through the three points is monotone, use it.
        # Otherwise halve the interval.
        xi, phi = divide_or_zero(xp, a - b, c - b), divide_or_zero(xp, fa - fb, fc - fb)
        is_monotone = (phi * phi < xi) & ((1 - phi) * (1 - phi) < 1 - xi)
        t = divide_or_zero(xp, fa, fb - fa) * divide_or_zero(xp, fc, fb - fc)
        t = t + divide_or_zero(xp, c - a, b - a) * (
            divide_or_zero(xp, fa, fc - fa) * divide_or_zero(xp, fb, fc - fb)
        )
        t = xp.where(is_monotone, clip(xp, t, min=0.0, max=1.0), 0.5)
        return (a, b, fa, fb, t), xp.where(xp.abs(fa) < xp.abs(fb), a, b)

    start = (a, b, fa, fb, xp.full_like(a, 0.5))
    return scan_blocks(xp, step, start, steps, 1)[-1:, :]


def _checked_arrays(
    is_exact: bool, **arguments: Any
) -> tuple[ModuleType, list[Any], Callable[[Any], Any]]:
    """The namespace, the arguments as arrays of one shape, and `finish`.

    Array entries out of range are replaced by values in range. ``finish(result)`` puts NaN in their
    place, and converts the result to its dtype, or to a float.
    """
    arrays = {name: x for name, x in arguments.items() if is_array(x)}
    given = arrays or {"": np.zeros(())}
    xp, device = namespace(**given), common_device(**given)
    check_numeric(xp, **given)
    floating = [x.dtype for x in given.values() if isdtype(xp, x.dtype, "real floating")]
    dtype = promoted(xp, *floating) if floating else default_dtype(xp, "real floating", device)
    shape = common_shape(**{name: x.shape for name, x in given.items()})

    float64 = "float64" in xp.__array_namespace_info__().dtypes(device=device, kind="real floating")
    working = xp.float64 if float64 else xp.float32
    valid: Any = True
    values = {}
    for name, x in arguments.items():
        least, most = _RANGES.get(name, (-math.inf, math.inf))
        most = most if is_exact else math.inf
        if name in arrays:
            x = lift(xp.astype(x, working), len(shape))
        else:
            if isinstance(x, (list, tuple)):
                raise type_error(name, "be a real number or an array", type(x).__name__)
            check_real(name, x, least=least)
            if x > most:
                raise value_error(name, f"be at most {most:g}", x)
            x = xp.full((), float(x), dtype=working, device=device)
        in_range = (x >= least) & (x <= most) & (xp.abs(x) < math.inf)
        valid = in_range & valid
        values[name] = xp.where(in_range, x, max(least, 1.0))
    if "n_relevant" in arguments:  # too many needles are an error of numbers, and give NaN in arrays
        n, relevant = arguments["n"], arguments["n_relevant"]
        if not is_array(n) and not is_array(relevant) and relevant > n:
            raise value_error("n_relevant", "be at most `n`", f"{relevant} and {n}")
        valid = valid & (values["n_relevant"] <= values["n"])

    def finish(result: Any) -> Any:
        result = xp.where(valid, result, math.nan)
        return xp.astype(result, dtype) if arrays else float(result)

    return xp, list(xp.broadcast_arrays(*values.values())), finish
