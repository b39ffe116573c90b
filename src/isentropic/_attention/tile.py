"""The program of a tile: each formula of attention, written once.

The state of a query is a reference m and sums over keys with logits s (see `AttentionState`),

    x = s − m,   z = Σ eˣ,   W = Σ eˣ v,   w = Σ f(x),

with the terms f of the moment of an order (see `isentropic._entropy`). Let a loss have the gradients
g_z, g_W and g_w with respect to the sums. Its gradient with respect to the logits, for a reference that
does not depend on them, is

    ds = eˣ (g_z + g_W · v) + g_w f′(x).

The functions compute by a table of operations (see `isentropic._ops`), so they serve every library. The
kernels in other languages restate these formulas.

The reference of a row follows a *policy*:

- ``"largest"``: the largest logit so far. So the sums move when a tile has a larger one.
- ``"first"``: the largest logit of the first tile in which the row sees a key.
- ``"given"``: what the state holds before the first tile: a constant, or the maximum of another pass.

Sums relative to a reference that does not move take fewer operations, but may overflow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from isentropic._entropy import partition, shift_moment, slope_of_moment, visible_terms
from isentropic._namespace import Array
from isentropic._numerics import divide_or_zero, log_or, replace_infinite_minimum
from isentropic._ops import Ops


class Sums(NamedTuple):
    """The sums of a state as columns (..., L, 1). `weighted_score` is the moment of any order."""

    maximum: Any  # m, which is the maximum unless the policy is another; −∞ if no key was seen
    normalizer: Any  # z
    weighted_value: Any  # W, (..., L, Ev), or None
    weighted_score: Any  # w, or None

    def map(self, function: Callable[[Any], Any]) -> Sums:
        """``function`` of each field that is not None."""
        return Sums(*[None if x is None else function(x) for x in self])


def empty_state(
    xp: ModuleType, shape: tuple[int, ...], n_values: int | None, order: float | None, **kind: Any
) -> Sums:
    """The sums over no keys, for queries of the given shape (..., L)."""
    widths = Sums(1, 1, n_values, None if order is None else 1)
    sums = widths.map(lambda width: xp.zeros((*shape, width), **kind))
    return sums._replace(maximum=sums.maximum - math.inf)


def logits(
    ops: Ops, query: Any, key: Any, softcap: float | None = None, added: Any = None, visible: Any = None
) -> tuple[Any, Any]:
    """The logits of a tile, −∞ where a key is hidden; and tanh(s / softcap), None without a soft cap.

    The queries are scaled, and divided by the soft cap. `added` is the bias, plus NaN for rows that are
    not finite. A `visible` of None means that all queries see all keys.
    """
    s, tanh = ops.products(query, key), None
    if softcap is not None:
        s, tanh = ops.cap(s, softcap)
    if added is not None:
        s = ops.add(s, added)
    return s if visible is None else ops.hide(s, visible), tanh


def absorb(
    ops: Ops,
    state: Sums | None,
    s: Any,
    value: Any,
    order: float | None,
    policy: str = "largest",
) -> Sums:
    """The state with the keys of a tile, which have logits `s` and values. None is that of no keys.

    With the policy "given", the state None has the reference 0, and so has one whose maximum is None.
    """
    m = None if state is None else state.maximum
    if policy == "largest":
        m = ops.row_max(s) if state is None else ops.xp.maximum(m, ops.row_max(s))
    # After the first tile there is mostly no row left without a reference, and nothing to select.
    elif policy == "first" and ops.xp.any(m == -math.inf):
        m = ops.xp.where(m == -math.inf, ops.row_max(s), m)
    m, p, z, w = partition(ops, s, order, m)
    if state is None:
        return Sums(m, z, None if value is None else ops.weighted(p, value), w)
    if policy == "largest":
        # The sums so far are relative to the former maximum.
        state = moved(ops, state, m, order)
    return Sums(
        m,
        ops.add(state.normalizer, z),
        None if value is None else ops.add_weighted(state.weighted_value, p, value),
        None if order is None else ops.add(state.weighted_score, w),
    )


def gradient(
    ops: Ops, s: Any, m: Any, value: Any, order: float | None, upstream: Sums
) -> tuple[Any, Any]:
    """The gradient of the logits `s` of a tile, which may be overwritten, and the weights eˣ.

    `upstream` holds the gradients of the sums, relative to the reference `m`. Those of the values and
    of the moment may be None. The gradient of the reference is not part of the result.
    """
    x, p = ops.exp(s, m, order)
    _, z_grad, value_grad, moment_grad = upstream
    rest = None
    if moment_grad is not None and order == 1:  # f′(x) = eˣ (1 + x), so all is a product with eˣ
        ds = ops.add(ops.multiply(x, moment_grad), z_grad + moment_grad)
    else:
        if moment_grad is not None:
            assert order is not None
            # No product with eˣ: below order 1 the other factor would overflow for small weights.
            rest = slope_of_moment(p, visible_terms(ops.xp, x, p, order), order)
            rest = ops.multiply(rest, moment_grad)
        # In the memory of the scores, which nothing needs any more.
        ds = ops.fill(x, z_grad)
    if value_grad is not None:
        ds = ops.add_products(ds, value_grad, value)
    ds = ops.multiply(ds, p)
    return (ds if rest is None else ops.add(ds, rest)), p


def gradient_of_products(ops: Ops, ds: Any, tanh: Any, softcap: float | None) -> Any:
    """The gradient of the products in `logits`, from that of the logits and from tanh."""
    return ds if softcap is None else ops.cap_gradient(ds, tanh, softcap)


def shift_of(xp: ModuleType, old: Any, new: Any) -> Any:
    """The difference of two references. A state of no keys has the reference −∞ and needs no shift."""
    return xp.where(old == -math.inf, 0.0, old - replace_infinite_minimum(xp, new))


def moved(ops: Ops, state: Sums, m: Any, order: float | None) -> Sums:
    """The state in columns with its sums relative to the reference `m`."""
    xp, shift = ops.xp, shift_of(ops.xp, state.maximum, m)
    factor, value, moment = xp.exp(shift), state.weighted_value, state.weighted_score
    if moment is not None:
        assert order is not None
        moment = shift_moment(xp, moment, state.normalizer, shift, order)
    value = None if value is None else ops.multiply(value, factor)
    return Sums(m, state.normalizer * factor, value, moment)


def merge_columns(ops: Ops, a: Sums, b: Sums, order: float | None) -> Sums:
    """The state in columns of the keys of both."""
    m = ops.xp.maximum(a.maximum, b.maximum)
    a, b = moved(ops, a, m, order), moved(ops, b, m, order)
    sums = (None if x is None else x + y for x, y in zip(a[1:4], b[1:4], strict=True))
    return Sums(m, *sums)


def output_of_columns(xp: ModuleType, state: Sums) -> Array:
    """The attention output; 0 for a query that sees no key."""
    assert state.weighted_value is not None
    return divide_or_zero(xp, state.weighted_value, state.normalizer)


def sees_nothing(sums: Any) -> Any:
    """Whether a query has no weight in sums or in a state."""
    return (sums.normalizer == 0) | (sums.maximum == -math.inf)


def log_normalizer(xp: ModuleType, sums: Any) -> Any:
    """Log Σ eˢ of sums or of a state; −∞ for a query that sees no key."""
    finite = replace_infinite_minimum(xp, sums.maximum) + log_or(xp, sums.normalizer, 0.0)
    return xp.where(sees_nothing(sums), -math.inf, finite)
