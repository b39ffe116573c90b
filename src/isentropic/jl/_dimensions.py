"""How many dimensions the Johnson–Lindenstrauss lemma asks for.

The lemma: a random linear map f from d to k dimensions keeps, with probability at least 1 − δ, all
squared distances of n points within (1 ± ε):

    (1 − ε) ‖x − y‖² ≤ ‖f(x) − f(y)‖² ≤ (1 + ε) ‖x − y‖².

Every method bounds the failure probability by a union over the pairs of points, and differs in what
it takes for one pair. These are numbers about sizes: they are computed on the host, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

from isentropic._checks import check_choice, check_real, type_error, value_error
from isentropic.jl._tails import log_beta_tail, log_chi2_tail

if TYPE_CHECKING:
    import numpy as np

METHODS = ("exact", "haar", "dasgupta-gupta", "achlioptas", "chernoff")

# log δ = count(log n, log(n − 1)) − k · rate(ε), for the methods with a closed form.
_CLOSED: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], Any]]] = {
    "dasgupta-gupta": (lambda n, less: n + less, lambda e: e**2 / 4 - e**3 / 6),
    "achlioptas": (lambda n, less: 2 * n, lambda e: e**2 / 4 - e**3 / 6),
    "chernoff": (lambda n, less: math.log(2) + 2 * n, lambda e: e**2 / 16),
}


def min_dim(
    n_samples: Any,
    *,
    eps: Any = 0.1,
    delta: Any = 0.01,
    method: str = "exact",
    n_features: Any = None,
) -> Any:
    r"""The least dimension in which all distances of n points are kept within (1 ± eps).

    With probability at least ``1 − delta`` over the draw of the map, every squared distance changes
    by a factor in [1 − eps, 1 + eps].

    Parameters
    ----------
    n_samples : number or array of numbers ≥ 2
        How many points.
    eps : number or array in (0, 1)
        The distortion of *squared* distances.
    delta : number or array in (0, 1)
        The probability with which any distance may fail.
    method : {"exact", "haar", "dasgupta-gupta", "achlioptas", "chernoff"}
        - ``"exact"``: for `gaussian_projection`, from the χ² distribution itself; only the union
          over the pairs is a bound, and it is nearly tight.
        - ``"haar"``: for `orthogonal_projection`, from the Beta distribution; at most `n_features`.
        - ``"dasgupta-gupta"``: a closed form for both; 10–40 % above the exact values for 10³ to 10⁶
          points, eps up to 0.5 and delta 0.01, and more for few points.
        - ``"achlioptas"``: the closed form that is proven for `rademacher_projection` and
          `sparse_projection` of density 1/3.
        - ``"chernoff"``: ``(16/ε²) log(2n²/δ)``, valid and there 3.5 to 5 times too large.

        For `hadamard_projection` no such number is proven; take that of ``"exact"`` as a start and
        verify it with `distortion` (see there for where it fails).
    n_features : number or array ≥ 1, optional
        The dimension d of the points; only ``"haar"`` needs and uses it.

    Returns
    -------
    int, or array of int64
        Of the broadcast shape of the arguments, which are numbers or NumPy arrays.

    Raises
    ------
    TypeError
        For arguments that are not real numbers.
    ValueError
        For arguments out of range, an unknown method, or ``"haar"`` without `n_features`.

    Notes
    -----
    With :math:`\binom n2` pairs, ``"exact"`` is the smallest k with

    .. math:: \binom n2 \left(P[\chi^2_k > (1+ε)k] + P[\chi^2_k < (1-ε)k]\right) \le δ,

    and ``"haar"`` the same with :math:`\frac dk\,\mathrm{Beta}(\frac k2, \frac{d-k}2)` in place of
    :math:`χ^2_k/k`. Rounding may move the last integer for eps below 1e-4.

    scikit-learn's ``johnson_lindenstrauss_min_dim`` is the Achlioptas form at δ = 1, rounded down: its
    proof gives a success probability of 1/n only.

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
    import numpy as np

    check_choice("method", method, METHODS)
    (n, e, level, *d), scalar = _broadcast(
        n_samples=n_samples, eps=eps, delta=delta, **_features(method, n_features)
    )
    log_delta = np.log(level)
    closed = method if method in _CLOSED else "dasgupta-gupta"
    count, rate = _CLOSED[closed]
    with np.errstate(divide="ignore", over="ignore"):  # where the square of eps underflows
        k = np.ceil((count(np.log(n), np.log(n - 1)) - log_delta) / rate(e))
    if np.any(k > 2.0**53):
        raise value_error("eps", "be large enough for a dimension below 2**53", eps)
    if closed == method:
        return _result(np.maximum(k, 1).astype(np.int64), scalar)

    # That closed form holds for both exact methods: the answer is not above it.
    low, high = np.zeros_like(k), np.maximum(np.minimum(k, *d) if d else k, 1)
    while np.any(high - low > 1):
        middle = np.maximum(np.floor((low + high) / 2), 1)
        enough = _log_failure(method, n, middle, e, *d) <= log_delta
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return _result(high.astype(np.int64), scalar)


def failure_probability(
    n_samples: Any, n_components: Any, *, eps: Any, method: str = "exact", n_features: Any = None
) -> Any:
    """A bound on the probability that k dimensions fail to keep all distances within (1 ± eps).

    The inverse of `min_dim` in its `delta`.

    Parameters
    ----------
    n_samples : number or array of numbers ≥ 2
        How many points.
    n_components : number or array of numbers ≥ 1
        The dimension k of the map.
    eps : number or array in (0, 1)
        The distortion of squared distances.
    method : {"exact", "haar", "dasgupta-gupta", "achlioptas", "chernoff"}
        As for `min_dim`.
    n_features : number or array ≥ 1, optional
        The dimension of the points, for ``"haar"``.

    Returns
    -------
    float in [0, 1], or array of float64
        0 where the bound is below the smallest float.

    Raises
    ------
    TypeError
        For arguments that are not real numbers.
    ValueError
        For arguments out of range, an unknown method, or ``"haar"`` without `n_features`.

    Examples
    --------
    >>> from isentropic.jl import failure_probability
    >>> round(failure_probability(10_000, 2206, eps=0.2), 5)
    0.00998
    """
    import numpy as np

    check_choice("method", method, METHODS)
    (n, k, e, *d), scalar = _broadcast(
        n_samples=n_samples, n_components=n_components, eps=eps, **_features(method, n_features)
    )
    _check_components(n_components, k, *d)
    return _result(np.exp(np.minimum(_log_failure(method, n, k, e, *d), 0.0)), scalar)


def eps(
    n_samples: Any,
    n_components: Any,
    *,
    delta: Any = 0.01,
    method: str = "exact",
    n_features: Any = None,
) -> Any:
    """The distortion eps of squared distances that k dimensions buy.

    The inverse of `min_dim` in its `eps`.

    Parameters
    ----------
    n_samples : number or array of numbers ≥ 2
        How many points.
    n_components : number or array of numbers ≥ 1
        The dimension k of the map.
    delta : number or array in (0, 1)
        The probability with which any distance may fail.
    method : {"exact", "haar", "dasgupta-gupta", "achlioptas", "chernoff"}
        As for `min_dim`.
    n_features : number or array ≥ 1, optional
        The dimension of the points, for ``"haar"``.

    Returns
    -------
    float, or array of float64
        In [0, 1), and ∞ where k is too small for any eps below 1.

    Raises
    ------
    TypeError
        For arguments that are not real numbers.
    ValueError
        For arguments out of range, an unknown method, or ``"haar"`` without `n_features`.

    Examples
    --------
    >>> from isentropic.jl import eps
    >>> round(eps(10_000, 2206), 4)
    0.2
    """
    import numpy as np

    check_choice("method", method, METHODS)
    (n, k, level, *d), scalar = _broadcast(
        n_samples=n_samples, n_components=n_components, delta=delta, **_features(method, n_features)
    )
    _check_components(n_components, k, *d)
    log_delta = np.log(level)
    low, high = np.zeros_like(k), np.ones_like(k)
    reachable = _log_failure(method, n, k, high, *d) <= log_delta
    for _ in range(60):
        middle = (low + high) / 2
        enough = _log_failure(method, n, k, middle, *d) <= log_delta
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return _result(np.where(reachable, high, math.inf), scalar)


def lower_bound(n_samples: Any, *, eps: Any = 0.1) -> Any:
    """The growth of the dimension that *any* map needs, up to a constant: ``log(eps² n)/eps²``.

    No map, random or not, linear or not, embeds every set of n points of n dimensions with the
    distortion eps into fewer than a constant times this. The theorem does not give the constant, so
    compare ratios, not values: it says that no map does better than random ones but by a constant.

    Parameters
    ----------
    n_samples : number or array of numbers ≥ 2
        How many points.
    eps : number or array in (0, 1)
        The distortion; the theorem asks for eps above ``log(n)^0.5001/√n``.

    Returns
    -------
    float, or array of float64
        At least 0.

    Raises
    ------
    TypeError
        For arguments that are not real numbers.
    ValueError
        For arguments out of range.

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
    import numpy as np

    (n, e), scalar = _broadcast(n_samples=n_samples, eps=eps)
    growth = np.maximum(2 * np.log(e) + np.log(n), 0.0)
    # Where the square of eps underflows, the growth is 0.
    return _result(growth / np.where(growth > 0, e**2, 1.0), scalar)


def entropy_criterion_dim(n: Any, *, coefficient: float = 8.33) -> Any:
    """Su's entropy criterion for the size of an embedding or an attention head: ``8.33 log n``.

    A rule of thumb for how many dimensions give n things enough room to be told apart by inner
    products in a skip-gram model; with the coefficient 8 in its first form. It is **no guarantee
    about distances**: at k = 48, n = 300 thousands of pairs are off by more than 30 %. For that see
    `isentropic.jl.min_dim`.

    Parameters
    ----------
    n : number or array of numbers ≥ 1
        The vocabulary, or the length of the context.
    coefficient : float > 0
        8.33 or 8.

    Returns
    -------
    int, or array of int64
        Rounded up.

    Raises
    ------
    TypeError
        For arguments that are not real numbers.
    ValueError
        For arguments out of range, or a result of 2**53 or more.

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
    import numpy as np

    check_real("coefficient", coefficient, above=0)
    (values,), scalar = _broadcast(n=n)
    k = np.ceil(float(coefficient) * np.log(values))
    if np.any(k > 2.0**53):
        raise value_error("coefficient", "be small enough for a dimension below 2**53", coefficient)
    return _result(k.astype(np.int64), scalar)


def matched_key_dim(n: Any, head_dim: float, *, base: float = 512) -> Any:
    """The head size that would match n keys if `head_dim` matches `base` keys: ``d log n / log base``.

    The Johnson–Lindenstrauss reading of the log n law: if the head size should grow with log n, and
    it is fixed, then the sum over its features has too few terms, and the factor
    ``matched_key_dim(n, d)/d``, which is ``LogLength(base)(n)``, makes up for it. An analogy, and no
    theorem.

    Parameters
    ----------
    n : number or array of numbers ≥ 1
        The number of keys.
    head_dim : float > 0
        The head size d.
    base : float > 1
        The number of keys for which d is right.

    Returns
    -------
    float, or array of float64

    Raises
    ------
    TypeError
        For arguments that are not real numbers.
    ValueError
        For arguments out of range.

    References
    ----------
    Su Jianlin 2023, https://spaces.ac.cn/archives/9588.

    Examples
    --------
    >>> from isentropic.theory import matched_key_dim
    >>> round(matched_key_dim(8192, 64), 1)
    92.4
    """
    import numpy as np

    check_real("head_dim", head_dim, above=0)
    check_real("base", base, above=1)
    (values,), scalar = _broadcast(n=n)
    return _result(head_dim * np.log(values) / math.log(base), scalar)


def _log_failure(method: str, n: Any, k: Any, eps: Any, d: Any = None) -> Any:
    """The logarithm of the bound on the failure probability; may be above 0."""
    import numpy as np

    log_n, log_less = np.log(n), np.log(n - 1)
    if method in _CLOSED:
        count, rate = _CLOSED[method]
        return count(log_n, log_less) - k * rate(eps)
    pairs = log_n + log_less - math.log(2)
    if method == "exact":
        return pairs + np.logaddexp(log_chi2_tail(k, eps), log_chi2_tail(k, -eps))
    complete = k >= d  # every dimension is kept, and nothing fails
    rest = np.where(complete, 1.0, d - k)
    tails = np.logaddexp(log_beta_tail(k / 2, rest / 2, eps), log_beta_tail(k / 2, rest / 2, -eps))
    return np.where(complete, -math.inf, pairs + tails)


def _is_size(x: Any) -> Any:
    # Beyond 2**53 not all whole numbers are floats.
    return (x >= 1) & (x % 1 == 0) & (x <= 2.0**53)


_RANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "n_samples": (lambda x: (x >= 2) & (x % 1 == 0), "be at least 2, and whole"),
    "n_components": (_is_size, "be at least 1, whole, and at most 2**53"),
    "n_features": (_is_size, "be at least 1, whole, and at most 2**53"),
    "n": (lambda x: x >= 1, "be at least 1"),
    "eps": (lambda x: (x > 0) & (x < 1), "be in (0, 1)"),
    "delta": (lambda x: (x > 0) & (x < 1), "be in (0, 1)"),
}


def _features(method: str, n_features: Any) -> dict[str, Any]:
    """The argument `n_features` where the method needs it."""
    if method != "haar":
        return {}
    if n_features is None:
        raise value_error("n_features", "be given for the method 'haar'", None)
    return {"n_features": n_features}


def _broadcast(**named: Any) -> tuple[Sequence[np.ndarray], bool]:
    """The arguments as float64 arrays of one shape, and whether all were plain numbers."""
    import numpy as np

    arrays, scalars = [], []
    for name, x in named.items():
        values, scalar = _host(name, x)
        valid, must = _RANGES[name]
        if not np.all(valid(values)):
            raise value_error(name, must, x)
        arrays.append(values)
        scalars.append(scalar)
    try:
        return np.broadcast_arrays(*arrays), all(scalars)
    except ValueError:
        shapes = ", ".join(str(x.shape) for x in arrays)
        raise ValueError(f"{_listing(named)} must broadcast together, got {shapes}.") from None


def _listing(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _check_components(n_components: Any, k: np.ndarray, d: np.ndarray | None = None) -> None:
    if d is not None and (k > d).any():
        raise value_error("n_components", "be at most `n_features`", n_components)


def _host(name: str, x: Any) -> tuple[np.ndarray, bool]:
    """Numbers as a float64 array of NumPy, and whether it was one number."""
    import numpy as np

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
        if not np.isdtype(values.dtype, ("integral", "real floating")):
            raise type_error(name, must, f"dtype {values.dtype}")
        values = values.astype(np.float64)
    else:
        raise type_error(name, must, type(x).__name__)
    if not np.all(np.isfinite(values)):
        raise value_error(name, "be finite", x)
    return values, scalar


def _result(values: np.ndarray, scalar: bool) -> Any:
    return values.item() if scalar else values
