"""Checks of arguments, all with one message: what it must be, and what came."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# More than any memory holds; NumPy answers with an OverflowError where it is far more.
_SIZE_LIMIT = 2**48
# How many characters of what is long a message has, of either end.
_SHOWN_CHARACTERS = 20


def value_error(name: str, must: str, got: Any) -> ValueError:
    if isinstance(got, tuple):
        got = tuple(got)  # PyTorch's shapes print as torch.Size([...])
    if isinstance(got, Real):
        got = _shortened(got, str)
    return ValueError(f"`{name}` must {must}, got {got}.")


def type_error(name: str, must: str, got: Any) -> TypeError:
    return TypeError(f"`{name}` must {must}, got {got}.")


def renamed(**names: str | None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Name the argument of a function that other libraries call otherwise; None where there is none.

    Warnings of the function need a `stacklevel` of one more.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except TypeError:  # where Python refuses an unknown name: it costs other calls nothing
                refuse_names(function.__name__, kwargs, names)
                raise

        return call

    return decorate


def refuse_names(function: str, given: Mapping[str, Any], names: Mapping[str, str | None]) -> None:
    """Refuse what other libraries call an argument, by its name here, or None where there is none."""
    for name in given:
        if name in names:
            ours = names[name]
            hint = f": here it is `{ours}`" if ours else ", nor another one for it"
            raise TypeError(f"{function}() has no argument `{name}`{hint}.") from None


def _shortened(x: Any, form: Callable[[Any], str] = repr) -> str:
    try:
        text = form(x)
    except ValueError:
        return "an integer of more digits than Python prints"
    if len(text) <= 2 * _SHOWN_CHARACTERS + 20:
        return text
    return f"{text[:_SHOWN_CHARACTERS]}…{text[-_SHOWN_CHARACTERS:]} ({len(text)} characters)"


@contextlib.contextmanager
def extra_of(module: str) -> Iterator[None]:
    """Imports of what the extra brings that is named as the last part of a module."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing, extra = str(error.name).partition(".")[0], module.rpartition(".")[2]
        message = f"{module} needs {missing}: pip install 'isentropic[{extra}]'"
        raise ModuleNotFoundError(message, name=error.name) from error


def check_floating(xp: ModuleType, **arrays: Any) -> None:
    """Refuse integer, boolean and complex arrays."""
    floating = None
    for name, x in arrays.items():
        if x.dtype == floating:
            continue
        floating = x.dtype
        if not xp.isdtype(floating, "real floating"):
            raise type_error(name, "have a real floating-point dtype", x.dtype)


def check_ndim(minimum: int, **arrays: Any) -> None:
    for name, x in arrays.items():
        if x.ndim < minimum:
            raise value_error(name, f"have at least {minimum} dimensions", x.ndim)


def check_shape(name: str, x: Any, shape: tuple[int | None, ...]) -> None:
    """Refuse arrays of another shape, in which None stands for any size."""
    if len(x.shape) == len(shape) and all(
        want is None or have == want for have, want in zip(x.shape, shape, strict=True)
    ):
        return
    count = f"{len(shape)} dimension{'s' * (len(shape) != 1)}"
    must = f"have {count}" if None in shape or not shape else f"have the shape {tuple(shape)}"
    raise value_error(name, must, tuple(x.shape))


def check_real(name: str, x: Any, *, above: float = -math.inf, least: float = -math.inf) -> None:
    """Refuse what is not a finite Python number with ``x > above`` and ``x >= least``."""
    if isinstance(x, bool) or not isinstance(x, Real):
        raise type_error(name, "be a real number", type(x).__name__)
    try:
        x = float(x)
    except OverflowError:
        raise value_error(name, "be within the range of a float", x) from None
    if not (above < x < math.inf and x >= least):
        raise value_error(name, within(above, least), x)


def within(above: float, least: float = -math.inf) -> str:
    """What numbers between these bounds and infinity must be."""
    bounds = [f"above {above}"] * (above > -math.inf) + [f"at least {least}"] * (least > -math.inf)
    return " ".join(["be", " and ".join(bounds) or "finite"])


def check_order(order: Any) -> None:
    """An entropy order: a real number from 0 to infinity."""
    if isinstance(order, bool) or not isinstance(order, Real):
        raise type_error("order", "be a real number", type(order).__name__)
    try:
        number = float(order)
    except OverflowError:
        raise value_error("order", "be within the range of a float", order) from None
    if not number >= 0:
        raise value_error("order", "be at least 0", order)


def is_array(x: Any) -> bool:
    # Numbers first: under torch.compile a symbolic number answers no other question.
    return not isinstance(x, (int, float, Real)) and hasattr(x, "ndim")


def is_integer(x: Any) -> bool:
    # `int` comes first: under torch.compile a symbolic integer answers that question alone. That of
    # torch.export is of a class of its own.
    return type(x).__name__ == "SymInt" or (isinstance(x, (int, Integral)) and not isinstance(x, bool))


def plain_integer(x: Any) -> int:
    """An integer of NumPy as Python's; a symbolic one stays as it is."""
    return x if isinstance(x, int) or type(x).__name__ == "SymInt" else int(x)


def check_given(**arrays: Any) -> None:
    """Refuse None, which other functions take for these arguments."""
    for name, x in arrays.items():
        if x is None:
            raise type_error(name, "be an array", "NoneType")


def check_count(name: str, x: Any, *, least: int = 1) -> None:
    """Refuse what is not an integer of at least `least`."""
    if not is_integer(x):
        raise type_error(name, "be an integer", type(x).__name__)
    if x < least:
        raise value_error(name, f"be at least {least}", x)


def counts(**values: Any) -> tuple[int, ...]:
    """Integers of at least 1, NumPy's among them, as Python's, whose products cannot overflow."""
    for name, x in values.items():
        check_count(name, x)
        if x >= _SIZE_LIMIT:
            raise value_error(name, "be below 2**48", x)
    return tuple(plain_integer(x) for x in values.values())


def check_choice(name: str, x: Any, choices: Sequence[Any]) -> None:
    if not isinstance(x, (str, type(None))) or x not in choices:
        options = " or ".join(repr(choice) for choice in choices)
        raise value_error(name, f"be {options}", _shortened(x) + _nearest(x, choices))


def _nearest(x: Any, choices: Sequence[Any]) -> str:
    import difflib

    names = [choice for choice in choices if isinstance(choice, str)]
    found = difflib.get_close_matches(x, names, n=1) if isinstance(x, str) else []
    return f" (the nearest is {found[0]!r})" if found else ""


def check_flag(**flags: Any) -> None:
    """Refuse what is neither True nor False: a string "False" would be true."""
    for name, x in flags.items():
        is_numpy = type(x).__module__ == "numpy" and type(x).__name__ in ("bool", "bool_")
        if not isinstance(x, bool) and not is_numpy:
            raise type_error(name, "be True or False", type(x).__name__)


def check_axis(axis: Any, ndim: int) -> None:
    if not is_integer(axis):
        raise type_error("axis", "be an integer", type(axis).__name__)
    if not -ndim <= axis < ndim:
        raise value_error("axis", f"be in [{-ndim}, {ndim})", axis)


def common_shape(**shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape to which the named shapes broadcast."""
    common: tuple[int, ...] = next(iter(shapes.values()))
    for name, shape in shapes.items():
        joined = common if shape == common else _broadcast(common, shape)
        if joined is None:
            raise value_error(name, f"broadcast with {tuple(common)} in its batch axes", shape)
        common = joined
    return common


def _broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape to which two broadcast, if they do; the standard's own is younger than 2024.12."""
    if len(a) < len(b):
        a, b = b, a
    sizes = list(a)
    for i in range(-len(b), 0):
        if sizes[i] == 1:
            sizes[i] = b[i]
        elif b[i] not in (1, sizes[i]):
            return None
    return tuple(sizes)


def check_broadcastable(name: str, shape: tuple[int, ...], target: tuple[int, ...]) -> None:
    """Refuse a shape that does not broadcast to `target` without enlarging it."""
    if len(shape) <= len(target) and all(
        have == 1 or have == want for have, want in zip(reversed(shape), reversed(target), strict=False)
    ):
        return
    raise value_error(name, f"have a shape broadcastable to {tuple(target)}", shape)
