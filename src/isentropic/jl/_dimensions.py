"""How many dimensions the Johnson–Lindenstrauss lemma requires.

The lemma: a random linear map f from d to k dimensions preserves, with probability at least 1 − δ,
all squared distances between n points up to a factor 1 ± ε:

    (1 − ε) ‖x − y‖² ≤ ‖f(x) − f(y)‖² ≤ (1 + ε) ‖x − y‖².

Every method bounds the failure probability by a union bound over the pairs of points. The methods
differ in the tail probability of a single pair. All functions take sizes, not data: they compute on
the host, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import numpy as np

from isentropic._checks import check_choice, check_real, type_error, value_error
from isentropic._namespace import isdtype
from isentropic.jl._tails import log_beta_tail, log_chi2_tail

METHODS = ("exact", "haar", "dasgupta-gupta", "achlioptas", "chernoff")

# log δ = log_count(a, b) − k · rate(ε) with a = log n and b = log(n − 1), for the methods with a
# closed form.
_CLOSED_FORMS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], Any]]] = {
    "dasgupta-gupta": (lambda a, b: a + b, lambda e: e**2 / 4 - e**3 / 6),
    "achlioptas": (lambda a, b: 2 * a, lambda e: e**2 / 4 - e**3 / 6),
    "chernoff": (lambda a, b: math.log(2) + 2 * a, lambda e: e**2 / 16),
}


def min_dim(
    n_samples: Any,
    *,
    eps: Any = 0.1,
    delta: Any = 0.01,
    method: str = "exact",
    n_features: Any = None,
) -> Any:
    r"""The smallest dimension that preserves all distances between n points within (1 ± eps).

    With probability at least ``1 − delta`` over the draw of the map, every squared distance changes
    by a factor in [1 − eps, 1 + eps].

    Parameters
    ----------
    n_samples : number or array of numbers ≥ 2
        The number of points.
    eps : number or array in (0, 1)
        The distortion of *squared* distances.
    delta : number or array in (0, 1)
        The probability that at least one distance fails.
    method : {"exact", "haar", "dasgupta-gupta", "achlioptas", "chernoff"}
        - ``"exact"``: for `gaussian_projection`, from the tails of the χ² distribution. Only the
          union over the pairs is a bound, and it is nearly tight.
        - ``"haar"``: for `orthogonal_projection`, from the tails of the Beta distribution. The result
          is at most `n_features`.
        - ``"dasgupta-gupta"``: a closed form for both maps. It is 10–40 % above the exact values for
          10³ to 10⁶ points, eps up to 0.5 and delta 0.01, and further above for fewer points.
        - ``"achlioptas"``: the closed form that is proven for `sparse_projection` with the densities 1
          and 1/3.
        - ``"chernoff"``: ``(16/ε²) log(2n²/δ)``. It is valid, but 3.5 to 5 times too large for the
          same points, eps and delta.

        No such bound is proven for `hadamard_projection`, whose notes say where ``"exact"`` fails.
    n_features : number or array ≥ 1, optional
        The dimension d of the points. Only ``"haar"`` uses it, and requires it.

    Returns
    -------
    int, or array of int64
        An array has the broadcast shape of the arguments.

    Raises
    ------
    TypeError, ValueError
        For arguments that are not real numbers, or out of range, an unknown method, or ``"haar"``
        without `n_features`.

    Notes
    -----
    With :math:`\binom n2` pairs, ``"exact"`` is the smallest k with

    .. math:: \binom n2 \left(P[\chi^2_k > (1+ε)k] + P[\chi^2_k < (1-ε)k]\right) \le δ,

    and ``"haar"`` is the same with :math:`\frac dk\,\mathrm{Beta}(\frac k2, \frac{d-k}2)` in place of
    :math:`χ^2_k/k`. For eps below 1e-4, rounding may change the result by one.

    References
    ----------
    Johnson & Lindenstrauss 1984; Dasgupta & Gupta 2003, Random Struct. Alg. 22; Achlioptas 2003,
    J. Comput. Syst. Sci. 66; Rojo & Nguyen 2010, arXiv 1005.1440.

    Examples
    --------
    >>> from isentropic.jl import min_dim
    >>> min_dim(10_000, eps=0.2)
    2206
    >>> min_dim(10_000, eps=[0.1, 0.2, 0.5], method="dasgupta-gupta")
    array([9869, 2657,  553])
    >>> min_dim(10_000, eps=0.1, method="haar", n_features=1000)
    930
    """
    named = {"n_samples": n_samples, "eps": eps, "delta": delta}
    (n, e, level, *d), scalar = _arguments(method, n_features, **named)
    log_delta = np.log(level)
    closed_form = method if method in _CLOSED_FORMS else "dasgupta-gupta"
    log_count, rate = _CLOSED_FORMS[closed_form]
    with np.errstate(divide="ignore", over="ignore"):  # the square of eps may underflow
        k = np.ceil((log_count(np.log(n), np.log(n - 1)) - log_delta) / rate(e))
    if closed_form != method and d:
        k = np.minimum(k, *d)
    if np.any(k > 2.0**53):
        raise value_error("eps", "be large enough for a dimension below 2**53", eps)
    if closed_form == method:
        return _result(np.maximum(k, 1).astype(np.int64), scalar)

    # Dasgupta and Gupta's bound is proven for both exact methods, so it bounds the result from above.
    low, high = np.zeros_like(k), np.maximum(k, 1)
    while np.any(high - low > 1):
        middle = np.maximum(np.floor((low + high) / 2), 1)
        enough = _log_failure_bound(method, n, middle, e, *d) <= log_delta
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return _result(high.astype(np.int64), scalar)


def failure_probability(
    n_samples: Any, n_components: Any, *, eps: Any, method: str = "exact", n_features: Any = None
) -> Any:
    """An upper bound on the probability that a map to k dimensions distorts any distance by over eps.

    This is the inverse of `min_dim` as a function of `delta`.

    Parameters
    ----------
    n_components : number or array of numbers ≥ 1
        The dimension k of the map.
    n_samples, eps, method, n_features
        As for `min_dim`.

    Returns
    -------
    float in [0, 1], or array of float64
        It is 0 where the bound is below the smallest float.

    Raises
    ------
    TypeError, ValueError
        As for `min_dim`.

    Examples
    --------
    >>> from isentropic.jl import failure_probability
    >>> round(failure_probability(10_000, 2206, eps=0.2), 5)
    0.00998
    """
    named = {"n_samples": n_samples, "n_components": n_components, "eps": eps}
    (n, k, e, *d), scalar = _arguments(method, n_features, **named)
    return _result(np.exp(np.minimum(_log_failure_bound(method, n, k, e, *d), 0.0)), scalar)


def eps(
    n_samples: Any,
    n_components: Any,
    *,
    delta: Any = 0.01,
    method: str = "exact",
    n_features: Any = None,
) -> Any:
    """The distortion eps of squared distances that k dimensions guarantee.

    This is the inverse of `min_dim` as a function of `eps`.

    Parameters
    ----------
    n_components : number or array of numbers ≥ 1
        The dimension k of the map.
    n_samples, delta, method, n_features
        As for `min_dim`.

    Returns
    -------
    float, or array of float64
        In [0, 1), or ∞ where k is too small for any eps below 1.

    Raises
    ------
    TypeError, ValueError
        As for `min_dim`.

    Examples
    --------
    >>> from isentropic.jl import eps
    >>> round(eps(10_000, 2206), 4)
    0.2
    """
    named = {"n_samples": n_samples, "n_components": n_components, "delta": delta}
    (n, k, level, *d), scalar = _arguments(method, n_features, **named)
    log_delta = np.log(level)
    low, high = np.zeros_like(k), np.ones_like(k)
    reachable = _log_failure_bound(method, n, k, high, *d) <= log_delta
    # So many halvings exceed the precision of float64.
    for _ in range(60):
        middle = (low + high) / 2
        enough = _log_failure_bound(method, n, k, middle, *d) <= log_delta
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    # The upper end of the interval always satisfies the bound.
    return _result(np.where(reachable, high, math.inf), scalar)


def lower_bound(n_samples: Any, *, eps: Any = 0.1) -> Any:
    """The dimension that *any* map needs, up to a constant factor: ``log(eps² n)/eps²``.

    The map may be random or not, linear or not. If it embeds every set of n points in n dimensions with
    the distortion eps, its image has at least a constant times this many dimensions. The theorem does
    not give the constant, so compare ratios, not values. It says that random maps are optimal up to it.

    Parameters
    ----------
    n_samples : number or array of numbers ≥ 2
        The number of points.
    eps : number or array in (0, 1)
        The distortion. The theorem requires eps above ``log(n)^0.5001/√n``.

    Returns
    -------
    float, or array of float64
        At least 0.

    Raises
    ------
    TypeError, ValueError
        For arguments that are not real numbers, or out of range.

    References
    ----------
    Larsen & Nelson 2017, "Optimality of the Johnson–Lindenstrauss lemma", FOCS, arXiv 1609.02094.

    Examples
    --------
    >>> from isentropic.jl import lower_bound, min_dim
    >>> n = [10**4, 10**8]
    >>> (min_dim(n, eps=0.2) / lower_bound(n, eps=0.2)).round(1)
    array([14.7, 11.2])
    """
    (n, e), scalar = _broadcast(n_samples=n_samples, eps=eps)
    growth = np.maximum(2 * np.log(e) + np.log(n), 0.0)
    # eps² underflows only where the growth is 0, so the denominator 1 avoids 0/0 there.
    return _result(growth / np.where(growth > 0, e**2, 1.0), scalar)


def entropy_criterion_dim(n: Any, *, coefficient: float = 8.33) -> Any:
    """Su's entropy criterion for the size of an embedding or an attention head: ``8.33 log n``.

    A rule of thumb for how many dimensions a skip-gram model needs to tell n items apart by their
    inner products. It does **not guarantee distances**: at k = 48 and n = 300, thousands of pairs are
    off by more than 30 %. For a guarantee see `isentropic.jl.min_dim`.

    Parameters
    ----------
    n : number or array of numbers ≥ 1
        The size of the vocabulary, or the length of the context.
    coefficient : float > 0
        8.33, or 8 as in its first version.

    Returns
    -------
    int, or array of int64
        Rounded up.

    Raises
    ------
    TypeError, ValueError
        For arguments that are not real numbers, or out of range, or a result of 2**53 or more.

    Notes
    -----
    The logarithm is natural: 8 log 100 000 = 92.1, 8.33 log 512 = 52.0, 8.33 log 1024 = 57.7.

    References
    ----------
    Su Jianlin 2020, https://spaces.ac.cn/archives/7695, and 2021, archives/8711.

    Examples
    --------
    >>> from isentropic.theory import entropy_criterion_dim
    >>> entropy_criterion_dim(512), entropy_criterion_dim(100_000, coefficient=8)
    (52, 93)
    """
    check_real("coefficient", coefficient, above=0)
    (values,), scalar = _broadcast(n=n)
    k = np.ceil(float(coefficient) * np.log(values))
    if np.any(k > 2.0**53):
        raise value_error("coefficient", "be small enough for a dimension below 2**53", coefficient)
    return _result(k.astype(np.int64), scalar)


def matched_key_dim(n: Any, head_dim: float, *, base: float = 512) -> Any:
    """The head size that would match n keys if `head_dim` matches `base` keys: ``d log n / log base``.

    This is the Johnson–Lindenstrauss reading of the log n law: an analogy, not a theorem. If the head
    size should grow with log n but is fixed, the sum over its features has too few terms. The factor
    ``matched_key_dim(n, d)/d``, which is ``LogLength(base)(n)``, compensates for it.

    Parameters
    ----------
    n : number or array of numbers ≥ 1
        The number of keys.
    head_dim : float > 0
        The head size d.
    base : float > 1
        The number of keys that d matches.

    Returns
    -------
    float, or array of float64

    Raises
    ------
    TypeError, ValueError
        For arguments that are not real numbers, or out of range.

    References
    ----------
    Su Jianlin 2023, https://spaces.ac.cn/archives/9588.

    Examples
    --------
    >>> from isentropic.theory import matched_key_dim
    >>> round(matched_key_dim(8192, 64), 1)
    92.4
    """
    check_real("head_dim", head_dim, above=0)
    check_real("base", base, above=1)
    (values,), scalar = _broadcast(n=n)
    return _result(head_dim * np.log(values) / math.log(base), scalar)


def _log_failure_bound(method: str, n: Any, k: Any, eps: Any, d: Any = None) -> Any:
    """The logarithm of the bound on the failure probability; may be above 0."""
    log_n, log_n_minus_1 = np.log(n), np.log(n - 1)
    if method in _CLOSED_FORMS:
        log_count, rate = _CLOSED_FORMS[method]
        return log_count(log_n, log_n_minus_1) - k * rate(eps)
    log_pairs = log_n + log_n_minus_1 - math.log(2)
    if method == "exact":
        # A union bound, over all pairs and over both signs of an error.
        return log_pairs + np.logaddexp(log_chi2_tail(k, eps), log_chi2_tail(k, -eps))
    complete = k >= d  # the map keeps every dimension, so no distance changes
    # The 1 stands in, as the tail needs a positive parameter.
    rest = np.where(complete, 1.0, d - k)
    tails = np.logaddexp(log_beta_tail(k / 2, rest / 2, eps), log_beta_tail(k / 2, rest / 2, -eps))
    return np.where(complete, -math.inf, log_pairs + tails)


# Above 2**53 not every integer is a float64.
_SIZE = (lambda x: (x >= 1) & (x % 1 == 0) & (x <= 2.0**53), "be at least 1, whole, and at most 2**53")
_SHARE = (lambda x: (x > 0) & (x < 1), "be in (0, 1)")
_RANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "n_samples": (lambda x: (x >= 2) & (x % 1 == 0), "be at least 2, and whole"),
    "n_components": _SIZE,
    "n_features": _SIZE,
    "n": (lambda x: x >= 1, "be at least 1"),
    "eps": _SHARE,
    "delta": _SHARE,
}


def _arguments(method: str, n_features: Any, **named: Any) -> tuple[Sequence[np.ndarray], bool]:
    """`_broadcast` of the arguments, with `n_features` at the end if the method needs it."""
    check_choice("method", method, METHODS)
    if method != "haar":
        return _broadcast(**named)
    if n_features is None:
        raise value_error("n_features", "be given for the method 'haar'", None)
    arrays, scalar = _broadcast(**named, n_features=n_features)
    if "n_components" in named and np.any(arrays[1] > arrays[-1]):
        raise value_error("n_components", "be at most `n_features`", named["n_components"])
    return arrays, scalar


def _broadcast(**named: Any) -> tuple[Sequence[np.ndarray], bool]:
    """The arguments as float64 arrays of one shape, and whether all were plain numbers."""
    arrays, scalars = [], []
    for name, x in named.items():
        values, scalar = _to_float64(name, x)
        valid, must = _RANGES[name]
        if not np.all(valid(values)):
            raise value_error(name, must, x)
        arrays.append(values)
        scalars.append(scalar)
    try:
        return np.broadcast_arrays(*arrays), all(scalars)
    except ValueError:
        names, shapes = (
            ", ".join(f"`{name}`" for name in named),
            ", ".join(str(x.shape) for x in arrays),
        )
        raise ValueError(f"{names} must broadcast together, got {shapes}.") from None


def _to_float64(name: str, x: Any) -> tuple[np.ndarray, bool]:
    """`x` as a float64 NumPy array, and whether it was a plain number."""
    must = "be a number, or a list or NumPy array of numbers"
    if isinstance(x, Real) and not isinstance(x, bool):
        try:
            values, scalar = np.asarray(float(x)), True
        except OverflowError:
            raise value_error(name, "be within the range of a float", x) from None
    elif isinstance(x, (np.ndarray, list, tuple)):
        try:
            values, scalar = np.asarray(x), False
        except ValueError:
            raise type_error(name, must, "rows of different lengths") from None
        if not isdtype(np, values.dtype, ("integral", "real floating")):
            raise type_error(name, must, f"dtype {values.dtype}")
        values = values.astype(np.float64)
    else:
        raise type_error(name, must, type(x).__name__)
    if not np.all(np.isfinite(values)):
        raise value_error(name, "be finite", x)
    return values, scalar


def _result(values: np.ndarray, scalar: bool) -> Any:
    return values.item() if scalar else values
