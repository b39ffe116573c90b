"""What a law is, what its parameters may be, and the laws that every import needs, constant and log n.

A parameter of each query is a constant law too.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Real
from types import ModuleType
from typing import Any, ClassVar, TypeAlias, overload

import numpy as np

from isentropic._checks import (
    bounds_message,
    check_floating,
    check_ndim,
    check_numeric,
    check_real,
    common_shape,
    is_array,
    is_real,
    plain_float,
    type_error,
    value_error,
)
from isentropic._loops import is_readable
from isentropic._namespace import (
    Array,
    ArrayT,
    Sliced,
    accumulator,
    common_device,
    default_dtype,
    is_numpy,
    isdtype,
    namespace,
    to_numpy,
)
from isentropic._numerics import clip, lift, quietly
from isentropic._pytrees import Node

Parameter: TypeAlias = "float | Array | PerQuery"


@dataclass(frozen=True, eq=False, repr=False)
class Law(Node, ABC):
    """A function from the number of visible keys to a factor on the scale.

    Call a law with an integer (the result is a float) or with an array of lengths.

    When it is made, a law refuses parameters that are not numbers or arrays of floats by a `TypeError`,
    and those that are not finite or out of range by a `ValueError`. It checks arrays too if their
    values can be read: in the memory of the host, and outside of transformations.

    In JAX and PyTorch a law is a *pytree*. Its leaves are the arrays; the numbers belong to its
    structure. So a law can be an argument of `jax.jit`, `jax.grad`, `jax.vmap` and functions of
    ``torch.func``. The gradient with respect to a law is a law whose arrays are the gradients.
    A law that was made before JAX or PyTorch was imported is a pytree of that library as soon as
    another law or mask has been made.

    Two laws are equal if they have the same class and equal parameters. Two arrays are equal if their
    shapes and values are equal, whatever their library, device or dtype. An array never equals a
    number, and NaN equals nothing. Comparing arrays whose values cannot be read, as within
    `jax.jit`, raises a `TypeError`. Laws of numbers are hashable; laws with arrays are not.

    To define a law, make a subclass that is a frozen dataclass and defines `evaluate`. It must not
    define ``__slots__``, which raises a `TypeError`. Its fields are the parameters: numbers, laws, or
    arrays of shape () or (H,). `scaled` multiplies a law by a factor
    that may depend on the query.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import laws
    >>> law = laws.LogLength(16)
    >>> isinstance(law, laws.Law), law(256), law(np.asarray([16, 256]))
    (True, 2.0, array([1., 2.]))
    >>> laws.AffineLog(np.asarray([0.0, 0.5]), 1.0)(np.asarray([1])).shape  # two heads
    (2, 1)

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Saturating(laws.Law):
    ...     half: float
    ...
    ...     def evaluate(self, xp, n):
    ...         return 2 * n / (n + self.half)
    >>> Saturating(512)(512)
    1.0
    """

    __slots__ = ()
    _argument = "law"
    _cached_properties: ClassVar[frozenset[str]] = frozenset()
    # The parameters that are checked when a law is made, and what each must exceed.
    _above: ClassVar[dict[str, float]] = {}

    def __post_init__(self) -> None:
        for name, above in self._above.items():
            x = getattr(self, name)
            # Laws whose `minimum` is None have none.
            if x is not None or name != "minimum":
                check_parameter(name, x, above=above)

    @overload
    def __call__(self, n: np.ndarray) -> np.ndarray: ...  # integers give floats
    @overload
    def __call__(self, n: Sliced[ArrayT]) -> ArrayT: ...
    @overload
    def __call__(self, n: Any) -> Any: ...
    @quietly
    def __call__(self, n: Any) -> Any:
        """The factor for n visible keys.

        Parameters
        ----------
        n : number, or array (..., L) of integers or floats
            Numbers of keys. All below 1 count as 1.

        Returns
        -------
        float or array
            The factor (dimensionless): a float for a number and a law without arrays. Otherwise an
            array that has the shape of `n`, broadcast against the parameters. It has the dtype to which
            those of the parameters, float32 and that of `n` promote. Integers count as the default
            floating dtype of the library.

        Raises
        ------
        TypeError
            If `n` is neither a number nor an array of numbers, or is of another library than the
            parameters.
        ValueError
            If shapes do not broadcast, or `n` is on another device than the parameters.
        """
        parameters = self.arrays
        if is_array(n):
            xp, device = namespace(("law", parameters), n=n), common_device(("law", parameters), n=n)
            check_numeric(xp, n=n)
            floating = isdtype(xp, n.dtype, "real floating")
            dtype = n.dtype if floating else default_dtype(xp, "real floating", device)
            n = self._aligned(xp.astype(n, _compute_dtype(xp, dtype, parameters)))
            factor = self.evaluate(xp, n)
            if n.ndim == 0 and is_numpy(xp):
                # NumPy's operations turn 0-d arrays into scalars.
                factor = xp.asarray(factor, device=device)
            if not is_array(factor):
                raise type_error("law", "evaluate to an array", type(factor).__name__)
            return factor

        # `True` is an integer of Python, but not a number of keys.
        if isinstance(n, bool) or not isinstance(n, (int, float, Real)):
            raise type_error("n", "be a number or an array", type(n).__name__)
        try:
            n = float(n)
        except OverflowError:
            raise value_error("n", "be within the range of a float", n) from None
        if parameters:
            xp, device = namespace(("law", parameters)), common_device(("law", parameters))
            dtype = _compute_dtype(xp, parameters[0].dtype, parameters)
            return self.evaluate(xp, self._aligned(xp.full((), n, dtype=dtype, device=device)))
        # A scalar of NumPy has the dtype that formulas ask for.
        return float(self.evaluate(np, np.float64(n)))  # type: ignore[arg-type]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__slots__" in vars(cls):
            raise TypeError(
                f"The law {cls.__name__} must not define __slots__: its parameters are in its __dict__."
            )
        cls._cached_properties = frozenset(
            name
            for base in cls.__mro__
            for name, x in vars(base).items()
            if isinstance(x, functools.cached_property)
        )

    def __repr__(self) -> str:
        # As dataclasses have it. One function for all laws makes the import faster.
        fields = (f"{name}={x!r}" for name, x in self._named_values().items())
        return f"{type(self).__name__}({', '.join(fields)})"

    def _named_values(self) -> dict[str, Any]:
        """The parameters by name. Cached properties, which are in the `__dict__` too, are left out."""
        if not self._cached_properties:
            return vars(self)
        return {name: x for name, x in vars(self).items() if name not in self._cached_properties}

    def to_dict(self) -> dict[str, Any]:
        """The law as a dictionary of plain values, for JSON and YAML.

        Its arrays must be readable (not traced) and finite.

        Returns
        -------
        dict
            ``"law"`` is the name of the class. The parameters follow; the law that `scaled` and
            `shifted` change is under ``"of"``. Arrays become nested lists. A one-dimensional array of
            `Knots` becomes ``{"array": [...]}``, as a plain list stands for a sequence of numbers
            there. `from_dict` makes an equal law from the dictionary, except that 0-d arrays become
            numbers.

        Raises
        ------
        TypeError
            If the class is not one of this package, or if a parameter is made by `per_query`, which
            belongs to the queries of one call.
        ValueError
            If an array is not finite.

        Examples
        --------
        >>> from isentropic import laws
        >>> laws.AffineLog(0.5).to_dict()
        {'law': 'AffineLog', 'slope': 0.5, 'intercept': 0.0, 'minimum': None}
        """
        from isentropic.laws._dictionaries import to_dict

        return to_dict(self)

    def evaluate_unchecked(self, xp: ModuleType, n: Array) -> Array:
        """``law(n)`` in the dtype of `n`, without checks, for lengths (..., L) that fit the law."""
        # A kept signature tells that there are no arrays, without a search for them.
        dtype, has_no_arrays = n.dtype, getattr(self, "_signature", None) is not None
        if not has_no_arrays and (parameters := self.arrays):
            dtype = _compute_dtype(xp, dtype, parameters)
        # A copy, as `evaluate` may compute in place.
        return xp.astype(self.evaluate(xp, xp.astype(n, dtype)), n.dtype, copy=False)

    def _with_arrays(self, change: Callable[[Array], Array]) -> Law:
        changes: dict[str, Any] = {}
        for name, x in self._named_values().items():
            if isinstance(x, Law):
                changes[name] = x._with_arrays(change)
            elif is_array(x):
                changes[name] = change(x)
        return replace(self, **changes)

    def _aligned(self, n: Array) -> Array:
        """The lengths with as many axes as the factor. Refuses shapes that do not broadcast."""
        shapes = self._named_shapes()
        if n.ndim == 0 and any(has_query_axis for _, _, has_query_axis in shapes):
            n = n[None]  # one length for all queries
        last, common = (1,) if n.ndim else (), n.shape
        for name, shape, has_query_axis in shapes:
            # A 0-d parameter needs no axis for the queries.
            full_shape = shape if has_query_axis or not shape else (*shape, *last)
            # One parameter at a time, so that the error names the one that does not fit.
            common = common_shape(**{"n": common, name: full_shape})
        return lift(n, len(common)) if n.ndim else n

    def _named_shapes(self) -> list[tuple[str, tuple[int, ...], bool]]:
        """The name and the shape of each array parameter, and whether its last axis is L."""
        shapes: list[tuple[str, tuple[int, ...], bool]] = []
        for name, x in self._named_values().items():
            if isinstance(x, PerQuery):
                # Under `vmap` over the queries the value is 0-d.
                shapes.append((name, tuple(x.value.shape), x.value.ndim > 0))
            elif isinstance(x, Law):
                shapes += x._named_shapes()
            elif x is not None and is_array(x):
                shapes.append((name, tuple(x.shape), False))
        return shapes

    def has_numbers_for_heads(self, count: int) -> bool:
        """Whether some parameter has one number for each of so many heads."""
        axes = [
            shape[:-1] if has_query_axis else shape for _, shape, has_query_axis in self._named_shapes()
        ]
        return any(shape[-1] == count for shape in axes if shape)

    @abstractmethod
    def evaluate(self, xp: ModuleType, n: Array) -> Array:
        """The factor for an array of lengths.

        Parameters
        ----------
        xp : module
            The array namespace of `n`. It is NumPy if the law is called with a number.
        n : array (..., L)
            Lengths as floats; 0 for a query that sees no key.

        Returns
        -------
        array broadcastable to (..., L)
            The factors, in the dtype of `n`.
        """


@dataclass(frozen=True, eq=False, repr=False)
class Constant(Law):
    """The factor does not depend on n. ``Constant(1)`` is standard attention.

    Examples
    --------
    >>> from isentropic import laws
    >>> laws.Constant(2.0)(1000)
    2.0
    """

    value: Parameter
    _above: ClassVar[dict[str, float]] = {"value": -math.inf}

    def evaluate(self, xp: ModuleType, n: Array) -> Array:
        return xp.ones_like(n) * over_queries(xp, self.value, n)


@dataclass(frozen=True, eq=False, repr=False)
class PerQuery(Constant):
    """The parameter that `per_query` makes. As a law it is a constant for each query."""

    value: Array

    def __post_init__(self) -> None:
        if not is_array(self.value):
            raise type_error("value", "be an array", type(self.value).__name__)
        super().__post_init__()
        check_ndim(1, value=self.value)

    def __repr__(self) -> str:
        return f"per_query({self.value!r})"

    def evaluate(self, xp: ModuleType, n: Array) -> Array:
        return xp.ones_like(n) * over_queries(xp, self, n)

    def _named_shapes(self) -> list[tuple[str, tuple[int, ...], bool]]:
        return [("value", tuple(self.value.shape), self.value.ndim > 0)]


def per_query(value: Array) -> PerQuery:
    """A parameter of a law with one number for each query, such as a function of the query.

    A plain array parameter has the batch and head axes, ``...``, and each of its numbers applies to all
    L queries. An array that is wrapped by this function also has the axis of the queries. So a law can
    depend on n and on the query.

    Parameters
    ----------
    value : array (..., L)
        The axes ``...`` and L are those of the queries (..., L, E), up to broadcasting. With grouped
        heads, the heads are those of the queries.

    Returns
    -------
    PerQuery
        A parameter that all laws but `Knots` accept in place of an array, as in
        ``AffineLog(slope, per_query(x))``, ``Constant(per_query(x))`` and
        ``scaled(law, per_query(x))``. In JAX and PyTorch it is a pytree whose leaf is the array.

    Raises
    ------
    TypeError
        If `value` is not an array of floats.
    ValueError
        If `value` is 0-d or has numbers that are not finite.

    Notes
    -----
    A law with such a parameter belongs to the queries of one call, so make it for each call.
    `Law.to_dict` refuses it. Its factors have the shape (..., L), also if it is called with a number.

    With h a learned function of each query, (..., L), the factors of these papers are:

    - *ASEntmax*, ``δ + β (ln(n + 1))^γ`` with β = softplus(h₁) and γ = 2 tanh(h₂):
      ``shifted(PowerLog(δ, per_query(β), per_query(γ)), 1)``. The paper computes weights by α-entmax,
      this library by a softmax.
    - *Selective Self-Attention*, ``1 + tanh(h) + σ(α) ln n``:
      ``AffineLog(σ(α), per_query(1 + tanh(h)))``. The paper scales the values in the same way.
    - *QASSMax*, ``g(ln n) · (1 + tanh(h))`` with a learned g for each head:
      ``scaled(Constant(g(ln N)), per_query(1 + tanh(h)))``, where N is the number of all keys, as in
      the paper. To compute g for the number of keys that each query sees, use a subclass of `Law` in
      place of `Constant`. A variant in the paper has one factor per feature, (..., L, E): multiply the
      query by these factors.

    References
    ----------
    Vasylenko et al. 2025, arXiv 2506.16640. Zhang et al. 2024, arXiv 2411.12892. Qu et al. 2026,
    arXiv 2602.11139.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import attention_entropy, laws
    >>> query, key = np.random.default_rng(0).normal(size=(2, 4, 100, 16))  # 4 heads
    >>> gate = np.tanh(query @ np.full(16, 0.1))
    >>> gate.shape
    (4, 100)
    >>> law = laws.AffineLog(0.2, laws.per_query(1 + gate))
    >>> law(np.arange(1, 101)).shape, attention_entropy(query, key, law=law).shape
    ((4, 100), (4, 100))
    """
    return PerQuery(value)


@dataclass(frozen=True, eq=False, repr=False)
class LogLength(Law):
    """``ln n / ln base``: Su's law, which keeps the entropy of focused attention nearly constant.

    Parameters
    ----------
    base : float > 1, or array
        The length at which the factor is 1.
    minimum : float or array, optional
        The smallest factor. With 1, the factor is 1 for all lengths up to `base`.

    References
    ----------
    Su 2021, https://spaces.ac.cn/archives/8823.

    Examples
    --------
    >>> from isentropic import laws
    >>> laws.LogLength(16)(256), laws.LogLength(16, minimum=1)(4)
    (2.0, 1.0)
    """

    base: Parameter = 512
    minimum: Parameter | None = None
    _above: ClassVar[dict[str, float]] = {"base": 1, "minimum": -math.inf}

    def evaluate(self, xp: ModuleType, n: Array) -> Array:
        factor = log_length(xp, n) / log_of(xp, over_queries(xp, self.base, n))
        return at_least(xp, factor, self.minimum, n)


def _compute_dtype(xp: ModuleType, dtype: Any, parameters: tuple[Array, ...]) -> Any:
    """Float32, or float64 if the lengths or a parameter are float64."""
    # Not by promotion, which JAX can be set to refuse.
    dtypes = [accumulator(xp, x) for x in (dtype, *(x.dtype for x in parameters))]
    return xp.float64 if xp.float64 in dtypes else xp.float32


def over_queries(xp: ModuleType, x: Any, n: Array) -> Any:
    """A parameter with axes that broadcast against the lengths ``(..., L)``, in their dtype."""
    if isinstance(x, (int, float)):
        return plain_float(x)  # a NumPy float64 would promote float32 lengths
    if isinstance(x, PerQuery):
        return lift(xp.astype(x.value, n.dtype), n.ndim)
    if not is_array(x):
        return plain_float(x)
    x = xp.astype(x, n.dtype)
    # The new last axis is that of the queries, to which a plain parameter applies alike.
    return lift(x[..., None], n.ndim) if x.ndim > 0 and n.ndim > 0 else x


def log_length(xp: ModuleType, n: Array, least: float = 1.0) -> Array:
    return xp.log(xp.where(n < least, least, n))


def log_of(xp: ModuleType, x: Any) -> Any:
    """The logarithm of a parameter. `over_queries` has already converted half precision."""
    return xp.log(x) if is_array(x) else math.log(x)


def at_least(xp: ModuleType, factor: Array, minimum: Parameter | None, n: Array) -> Array:
    if minimum is None:
        return factor
    least: Any = over_queries(xp, minimum, n)
    return xp.maximum(factor, least) if is_array(least) else clip(xp, factor, min=least)


def check_parameter(name: str, x: Any, *, above: float = -math.inf) -> None:
    if isinstance(x, PerQuery):
        check_parameter(name, x.value, above=above)
    elif is_array(x):
        xp = namespace(**{name: x})
        check_floating(xp, **{name: x})
        if is_readable(xp, x):
            check_numbers(name, to_numpy(x), above)
    elif isinstance(x, bool) or is_real(x):
        check_real(name, x, above=above)
    else:
        raise type_error(name, "be a real number or an array of them", type(x).__name__)


def check_numbers(name: str, numbers: Any, above: float = -math.inf) -> None:
    """Apply the checks of `check_real` to a NumPy array."""
    # If any number is NaN, so is the minimum.
    if numbers.size == 0 or (numbers.min() > above and numbers.max() < math.inf):
        return
    index = tuple(np.argwhere(~((numbers > above) & (numbers < math.inf)))[0].tolist())
    where = f" at {index}" if index else ""
    raise value_error(name, bounds_message(above), f"{numbers[index]}{where}")


def check_law(law: Any, *, optional: bool = False) -> None:
    """Refuse everything but a law, and None unless `optional` (None is standard attention)."""
    if not isinstance(law, Law) and not (optional and law is None):
        must = "be a law of isentropic.laws" + " or None" * optional
        got = type(law).__name__
        if isinstance(law, str):
            must += " (`laws.preset` has those with a name)"
        elif is_real(law):
            must += " (a factor is `laws.Constant(...)`)"
        elif isinstance(law, type) and issubclass(law, Law):
            got = f"the class {law.__name__}; call it: `{law.__name__}(...)`"
        # By name, because its class is in a module that needs PyTorch.
        elif any(kind.__name__ == "LawModule" for kind in type(law).__mro__):
            got += "; call it: `law()`"
        elif callable(law):
            got += " (a function is not a law: subclass `laws.Law`)"
        raise type_error("law", must, got)
    if law is not None:
        _check_fields(law)


def _check_fields(law: Law) -> None:
    """Refuse parameters outside of fields, which copies, pytree leaves and cached plans would miss."""
    kind, values = type(law), law._named_values()
    if others := values.keys() - kind.__dataclass_fields__.keys():
        must = "keep its parameters in the fields of a frozen dataclass: decorate its class by"
        got = f"{kind.__name__} with the attribute {min(others)!r}"
        raise type_error("law", f"{must} `@dataclass(frozen=True)`", got)
    for name, x in values.items():
        if isinstance(x, Law):
            _check_fields(x)
        elif isinstance(x, (tuple, list, dict)) and _holds_arrays(x):
            must = "have each array and each law in a field of its own"
            raise type_error("law", must, f"{kind.__name__} with the {type(x).__name__} `{name}`")


def _holds_arrays(x: Any) -> bool:
    """Whether there is an array or a law in a container."""
    if isinstance(x, (tuple, list, dict)):
        return any(map(_holds_arrays, x.values() if isinstance(x, dict) else x))
    return isinstance(x, Law) or is_array(x)


# The default law of attention.
DEFAULT_LAW = LogLength(512)
