"""Checks of arguments. Every message says what the argument must be and what was passed."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from isentropic._namespace import is_symbolic, isdtype

P = ParamSpec("P")
R = TypeVar("R")

# No memory holds so many numbers. NumPy raises an OverflowError for sizes far above this one.
_SIZE_LIMIT = 2**48
# A message shows this many characters from each end of a long value.
_SHOWN_CHARACTERS = 20


def value_error(name: str, must: str, got: Any) -> ValueError:
    if isinstance(got, tuple):
        got = tuple(got)  # PyTorch's shapes print as torch.Size([...])
    if isinstance(got, Real):
        got = _shortened(got, str)
    return ValueError(f"`{name}` must {must}, got {got}.")


def type_error(name: str, must: str, got: Any) -> TypeError:
    return TypeError(f"`{name}` must {must}, got {got}.")


def with_name_hints(**names: str | None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function whose arguments have other names in other libraries.

    A call that uses a name of another library raises a TypeError that gives the name here. None says
    that the function has no such argument. The decorator adds a stack frame: warnings of the function
    need a `stacklevel` that is higher by one.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except TypeError:  # Python refuses unknown names; calls without them cost nothing extra
                refuse_names(function.__name__, kwargs, names)
                raise

        return call

    return decorate


def refuse_names(function: str, given: Mapping[str, Any], names: Mapping[str, str | None]) -> None:
    """Refuse argument names of other libraries. `names` maps them to the names here, or to None."""
    for name in given:
        if name in names:
            name_here = names[name]
            hint = f": here it is `{name_here}`" if name_here else ", and no equivalent"
            raise TypeError(f"{function}() has no argument `{name}`{hint}.") from None


def _shortened(x: Any, form: Callable[[Any], str] = repr) -> str:
    try:
        text = form(x)
    except ValueError:
        # Python refuses to print more than 4300 digits by default.
        return "an integer of more digits than Python prints"
    if len(text) <= 2 * _SHOWN_CHARACTERS + 20:
        return text
    return f"{text[:_SHOWN_CHARACTERS]}…{text[-_SHOWN_CHARACTERS:]} ({len(text)} characters)"


@contextlib.contextmanager
def requires_extra(module: str) -> Iterator[None]:
    """Guard the imports of an optional module: an ImportError names what to install.

    That are the packages of the extra with the name of the last part of `module`.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing, extra = str(error.name).partition(".")[0], module.rpartition(".")[2]
        packages = " ".join(f"'{package}'" for package in _packages_of(extra)) or missing
        message = f"{module} needs {missing} (the extra {extra!r}): pip install {packages}"
        raise ModuleNotFoundError(message, name=error.name) from error


def _packages_of(extra: str) -> list[str]:
    """The requirements of an extra, as the installed package states them."""
    import importlib.metadata

    try:
        requirements = importlib.metadata.requires("isentropic") or []
    except importlib.metadata.PackageNotFoundError:  # run from a folder
        return []
    parts = [requirement.partition(";") for requirement in requirements]
    # Metadata may have quotes of either kind around the name of the extra.
    return [package.strip() for package, _, marker in parts if f"'{extra}'" in marker.replace('"', "'")]


def check_floating(xp: ModuleType, **arrays: Any) -> None:
    """Refuse integer, boolean and complex arrays."""
    floating = None
    for name, x in arrays.items():
        if floating is not None and x.dtype == floating:  # MLX compares dtypes with dtypes alone
            continue
        floating = x.dtype
        if not isdtype(xp, floating, "real floating"):
            raise type_error(name, "have a real floating-point dtype", described_dtype(floating))


def check_numeric(xp: ModuleType, **arrays: Any) -> None:
    """Refuse boolean and complex arrays."""
    for name, x in arrays.items():
        if not isdtype(xp, x.dtype, ("integral", "real floating")):
            raise type_error(name, "have an integer or floating-point dtype", described_dtype(x.dtype))


def described_dtype(dtype: Any) -> str:
    """A dtype that is refused, and for those of fewer bits than others of their kind what to do."""
    is_narrow = getattr(dtype, "itemsize", 2) == 1 and re.search(r"float|int[1-7]$", str(dtype))
    return f"{dtype}" + ": convert it to a wider dtype" * bool(is_narrow)


def check_ndim(minimum: int, **arrays: Any) -> None:
    for name, x in arrays.items():
        if x.ndim < minimum:
            raise value_error(name, f"have at least {minimum} dimensions", x.ndim)


def check_shape(name: str, x: Any, shape: tuple[int | None, ...]) -> None:
    """Refuse arrays of another shape. None in `shape` stands for any size."""
    if len(x.shape) == len(shape) and all(
        want is None or have == want for have, want in zip(x.shape, shape, strict=True)
    ):
        return
    count = f"{len(shape)} dimension{'s' * (len(shape) != 1)}"
    must = f"have {count}" if None in shape or not shape else f"have the shape {tuple(shape)}"
    raise value_error(name, must, tuple(x.shape))


def check_real(name: str, x: Any, *, above: float = -math.inf, least: float = -math.inf) -> None:
    """Refuse everything but a finite Python number with ``x > above`` and ``x >= least``."""
    if not is_real(x):
        raise type_error(name, "be a real number", type(x).__name__)
    try:
        x = plain_float(x)
    except OverflowError:
        raise value_error(name, "be within the range of a float", x) from None
    if not (above < x < math.inf and x >= least):
        raise value_error(name, "be finite" if x == math.inf else bounds_message(above, least), x)


def bounds_message(above: float, least: float = -math.inf) -> str:
    """The part of a message that states the bounds of a number: "be above 0"."""
    bounds = [f"above {above}"] * (above > -math.inf) + [f"at least {least}"] * (least > -math.inf)
    return " ".join(["be", " and ".join(bounds) or "finite"])


def check_order(order: Any) -> None:
    """Refuse everything but an entropy order: a real number from 0 to infinity."""
    if not is_real(order):
        raise type_error("order", "be a real number", type(order).__name__)
    try:
        number = float(order)
    except OverflowError:
        raise value_error("order", "be within the range of a float", order) from None
    if not number >= 0:
        raise value_error("order", "be at least 0", order)


def is_array(x: Any) -> bool:
    # Numbers come first: torch.compile supports no other test for symbolic numbers.
    return not isinstance(x, (int, float, Real)) and hasattr(x, "ndim")


def is_real(x: Any) -> bool:
    """Whether it is a real number, which may be a symbolic float of PyTorch, but not a bool."""
    return type(x).__name__ == "SymFloat" or (isinstance(x, Real) and not isinstance(x, bool))


def plain_float(x: Any) -> float:
    """A real number as a Python float. PyTorch's symbolic floats are returned unchanged."""
    return x if type(x).__name__ == "SymFloat" else float(x)


def is_integer(x: Any) -> bool:
    # Under torch.compile `isinstance(x, int)` is the one supported test of a symbolic integer.
    # In torch.export, and in nodes of its graphs, symbolic integers have a class of their own.
    return is_symbolic(x) or (isinstance(x, (int, Integral)) and not isinstance(x, bool))


def plain_integer(x: Any) -> int:
    """A NumPy integer as a Python integer. Symbolic integers are returned unchanged."""
    return x if isinstance(x, int) or is_symbolic(x) else int(x)


def check_given(**arrays: Any) -> None:
    """Refuse None for arguments that are optional in related functions."""
    for name, x in arrays.items():
        if x is None:
            raise type_error(name, "be an array", "NoneType")


def check_count(name: str, x: Any, *, least: int = 1) -> None:
    """Refuse everything but an integer of at least `least`."""
    if not is_integer(x):
        raise type_error(name, "be an integer", type(x).__name__)
    if x < least:
        raise value_error(name, f"be at least {least}", x)


def counts(**values: Any) -> tuple[int, ...]:
    """Check that values are integers of at least 1. Return Python integers, which cannot overflow."""
    for name, x in values.items():
        check_count(name, x)
        if x >= _SIZE_LIMIT:
            raise value_error(name, "be below 2**48", x)
    return tuple(plain_integer(x) for x in values.values())


def check_choice(name: str, x: Any, choices: Sequence[Any]) -> None:
    # `in` compares, to which an array would answer with an array.
    if not isinstance(x, (str, type(None))) or x not in choices:
        options = " or ".join(repr(choice) for choice in choices)
        raise value_error(name, f"be {options}", _shortened(x) + _nearest(x, choices))


def _nearest(x: Any, choices: Sequence[Any]) -> str:
    import difflib

    names = [choice for choice in choices if isinstance(choice, str)]
    found = difflib.get_close_matches(x, names, n=1) if isinstance(x, str) else []
    return f" (the nearest is {found[0]!r})" if found else ""


def check_flag(**flags: Any) -> None:
    """Refuse everything but True and False. The string "False", for example, would count as true."""
    for name, x in flags.items():
        is_numpy = type(x).__module__ == "numpy" and type(x).__name__ == "bool"
        if not isinstance(x, bool) and not is_numpy:
            must = "be True or False"
            if "Tracer" in type(x).__name__:  # of JAX
                must += ", not traced: make it a static argument, or close over it"
            raise type_error(name, must, type(x).__name__)


def check_axis(axis: Any, ndim: int, name: str = "axis") -> None:
    if not is_integer(axis):
        raise type_error(name, "be an integer", type(axis).__name__)
    if ndim == 0:
        raise value_error(name, "be an axis of the array", f"{axis} for a 0-d array, which has none")
    if not -ndim <= axis < ndim:
        raise value_error(name, f"be in [{-ndim}, {ndim})", axis)


def common_shape(where: str = "", /, **shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape to which the named shapes broadcast. `where` says which of the axes these are."""
    common: tuple[int, ...] = next(iter(shapes.values()))
    for name, shape in shapes.items():
        joined = common if shape == common else _broadcast(common, shape)
        if joined is None:
            raise value_error(name, f"broadcast with {tuple(common)}{where}", shape)
        common = joined
    return common


def _broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...] | None:
    """The common shape of two shapes, or None. `broadcast_shapes` is newer than standard 2024.12."""
    if len(a) < len(b):
        a, b = b, a
    sizes = list(a)
    for i in range(-len(b), 0):
        if sizes[i] == 1:
            sizes[i] = b[i]
        elif b[i] != 1 and b[i] != sizes[i]:  # not `in`, which torch.compile does not trace for symbols
            return None
    return tuple(sizes)


def check_broadcastable(name: str, shape: tuple[int, ...], target: tuple[int, ...]) -> None:
    """Refuse a shape that does not broadcast to `target` without enlarging it."""
    if _broadcast(shape, target) == tuple(target):
        return
    must, missing = f"have a shape broadcastable to {tuple(target)}", len(target) - len(shape)
    # A likely mistake is an array (B, S) without axes for heads and queries.
    by_batch = (*shape[:1], *(1,) * missing, *shape[1:])
    if shape and missing > 0 and _broadcast(by_batch, target) == tuple(target):
        must += f", such as {by_batch} if its first axis is that of the batch"
    raise value_error(name, must, shape)
