"""What is around the Triton kernels: the calls that they compute, and numbers per query.

They return the output Σ p v with the maximum, the normalizer and the moment of order 1 of each query.
Numbers per query are arrays (batch, heads, L, 1).
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

from isentropic._attention.generic import interval_nan
from isentropic._attention.plan import Operands, Plan, four_axes
from isentropic._attention.tile import Sums
from isentropic._namespace import Array
from isentropic._numerics import lift

_MAX_WIDTH = 256  # a block of wider heads does not fit in the registers


def unsupported_reason(plan: Plan, order: float | None) -> str | None:
    """The reason why the kernels cannot compute a call, or None."""
    xp = plan.xp
    if order not in (None, 1.0):
        return "it computes only Shannon's entropy"
    if plan.softcap is not None or plan.has_bias:
        return "it has no bias and no soft cap"
    if not plan.has_interval_mask:
        return "a query may see keys with gaps between them"
    if plan.dtype not in (xp.float32, xp.float16, xp.bfloat16):
        return "it has no float64"
    if not 0 < plan.head_dim <= _MAX_WIDTH or plan.n_values == 0 or (plan.n_values or 0) > _MAX_WIDTH:
        return f"queries or values do not have 1 to {_MAX_WIDTH} features"
    return "there are no queries" if 0 in (*plan.batch, plan.n_queries) else None


def with_four_axes(plan: Plan, x: Array | None) -> Any:
    """Query, key or value as an array (batch, heads, rows, width) of the dtype of the result."""
    if x is None:
        return None
    return four_axes(plan, plan.xp.astype(x, plan.dtype, copy=False), expand=True)


def factor(plan: Plan, operands: Operands) -> Array:
    """The factor on each query."""
    x: Any = operands.multiplier
    if isinstance(x, float):
        x = plan.xp.full((1,) * plan.ndim, x, dtype=plan.compute, device=plan.device)
    return _per_query(plan, plan.xp.astype(x, plan.compute, copy=False))


def interval(plan: Plan, operands: Operands) -> tuple[Array, Array] | None:
    """The first key that each query sees, and the end of those that it sees; None without a mask."""
    if operands.mask is None:
        return None
    ends: Any = operands.mask.interval(plan.frame, (0, plan.n_queries))
    columns = (lift(plan.xp.astype(x, plan.xp.int32), plan.ndim - 1)[..., None] for x in ends)
    first, end = (_per_query(plan, x) for x in columns)
    return first, end


def _per_query(plan: Plan, x: Array) -> Array:
    return plan.xp.broadcast_to(four_axes(plan, x), (*_batch_and_heads(plan), plan.n_queries, 1))


def _batch_and_heads(plan: Plan) -> tuple[int, int]:
    return math.prod(plan.batch[:-1]), plan.batch[-1] if plan.batch else 1


def finished_output(plan: Plan, operands: Operands, out: Array) -> Array:
    """The attention output (..., L, Ev)."""
    return _with_batch(plan, out) + _nan_of_rows(plan, operands, out.dtype)


def finished_state(
    plan: Plan, operands: Operands, out: Any, maximum: Array, normalizer: Array, moment: Array
) -> Sums:
    """The state in columns. `out` is None without values."""
    nan = _nan_of_rows(plan, operands, plan.compute)
    columns = [_with_batch(plan, x) + nan for x in (maximum, normalizer, moment)]
    value = None if out is None else _with_batch(plan, out) * columns[1]
    return Sums(columns[0], columns[1], value, columns[2])


def _with_batch(plan: Plan, x: Any) -> Any:
    return plan.xp.reshape(x, (*plan.batch, *x.shape[-2:]))


def _nan_of_rows(plan: Plan, operands: Operands, dtype: Any) -> Any:
    if operands.nonfinite is None:
        return 0.0
    return plan.xp.astype(interval_nan(plan, operands), dtype)


def gradient_terms(
    xp: ModuleType, out: Any, normalizer: Any, moment: Any, upstream: Any
) -> tuple[Any, Any, Any]:
    """(constant, slope, rest), from which the gradient of a logit follows.

    A logit of weight p and centered score x has the gradient p · (g·v + constant + slope · x), where g
    is the gradient of the output. The key that has the maximum gets `rest` in addition. Without a
    moment, slope and rest are None. `upstream` holds the gradients of output, maximum, normalizer and
    moment.
    """
    out_grad, maximum_grad, normalizer_grad, moment_grad = upstream
    constant: Any = xp.zeros_like(normalizer)
    if out is not None:
        products = xp.astype(out_grad, xp.float32) * xp.astype(out, xp.float32)
        constant = -xp.sum(products, axis=-1, keepdims=True)
    if moment is None:
        return constant, None, None
    slope = moment_grad * normalizer
    # The sums are relative to the maximum, which is the logit of one of the keys. So this key gets the
    # gradient of the maximum as well.
    rest = maximum_grad - normalizer_grad * normalizer - moment_grad * (moment + normalizer)
    return constant + normalizer_grad * normalizer + slope, slope, rest
