"""Checks of arguments, all with one message: what it must be, and what came. Layer 0."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from types import ModuleType
from typing import Any

# More than any memory holds; NumPy answers with an OverflowError where it is far more.
_TOO_MANY = 2**48


def value_error(name: str, must: str, got: Any) -> ValueError:
    if isinstance(got, tuple):
        got = tuple(got)  # PyTorch's shapes print as torch.Size([...])
    return ValueError(f"`{name}` must {must}, got {_printed(got)}.")


def type_error(name: str, must: str, got: Any) -> TypeError:
    return TypeError(f"`{name}` must {must}, got {got}.")


def _printed(x: Any, form: Callable[[Any], str] = str) -> str:
    try:
        return form(x)
    except ValueError:
        return "an integer of more digits than Python prints"


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


def check_real(name: str, x: Any, *, above: float = -math.inf, least: float = -math.inf) -> None:
    """Refuse what is no finite Python number with ``x > above`` and ``x >= least``."""
    if isinstance(x, bool) or not isinstance(x, Real):
        raise type_error(name, "be a real number", type(x).__name__)
    try:
        x = float(x)
    except OverflowError:
        raise value_error(name, "be within the range of a float", x) from None
    if not (above < x < math.inf and x >= least):
        bounds = [f"above {above}"] * (above > -math.inf) + [f"at least {least}"] * (least > -math.inf)
        raise value_error(name, " ".join(["be", " and ".join(bounds) or "finite"]), x)


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
    # `int` comes first: under torch.compile a symbolic integer answers that question alone.
    return isinstance(x, (int, Integral)) and not isinstance(x, bool)


def plain_integer(x: Any) -> int:
    """An integer of NumPy as Python's; a symbolic one stays as it is."""
    return x if isinstance(x, int) else int(x)


def check_given(**arrays: Any) -> None:
    """Refuse None, which other functions take for these arguments."""
    for name, x in arrays.items():
        if x is None:
            raise type_error(name, "be an array", "NoneType")


def check_count(name: str, x: Any, *, least: int = 1) -> None:
    """Refuse what is no integer of at least `least`."""
    if not is_integer(x):
        raise type_error(name, "be an integer", type(x).__name__)
    if x < least:
        raise value_error(name, f"be at least {least}", x)


def counts(**values: Any) -> tuple[int, ...]:
    """Integers of at least 1, NumPy's among them, as Python's, whose products cannot overflow."""
    for name, x in values.items():
        check_count(name, x)
        if x >= _TOO_MANY:
            raise value_error(name, "be below 2**48", x)
    return tuple(plain_integer(x) for x in values.values())


def check_choice(name: str, x: Any, choices: Sequence[Any]) -> None:
    if not isinstance(x, (str, type(None))) or x not in choices:
        options = " or ".join(repr(choice) for choice in choices)
        raise value_error(name, f"be {options}", _printed(x, repr))


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


def common_shape(xp: ModuleType, **shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape to which the named shapes broadcast."""
    common: tuple[int, ...] = next(iter(shapes.values()))
    for name, shape in shapes.items():
        if shape == common:
            continue
        try:
            common = xp.broadcast_shapes(common, shape)
        except (ValueError, RuntimeError):  # RuntimeError from torch
            raise value_error(
                name, f"broadcast with {tuple(common)} in its batch axes", shape
            ) from None
    return common


def check_broadcastable(name: str, shape: tuple[int, ...], target: tuple[int, ...]) -> None:
    """Refuse a shape that does not broadcast to `target` without enlarging it."""
    if len(shape) <= len(target) and all(
        have == 1 or have == want for have, want in zip(reversed(shape), reversed(target), strict=False)
    ):
        return
    raise value_error(name, f"have a shape broadcastable to {tuple(target)}", shape)
