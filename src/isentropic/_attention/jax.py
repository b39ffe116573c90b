"""The backend that calls JAX's own kernel."""

from __future__ import annotations

from isentropic._attention.generic import Tiles, causal_nan
from isentropic._attention.plan import Operands, Plan, four_axes
from isentropic._namespace import Array


def why_not(plan: Plan, order: float | None, is_named: bool) -> str | None:
    """The reason why ``jax.nn.dot_product_attention`` does not compute a call, or None."""
    if plan.library != "jax":
        return "the arrays are not JAX's"
    if order is not None:
        return "it computes outputs only"
    if plan.softcap is not None or plan.has_bias:
        return "it has no soft cap, and a bias only as an L×S array"
    if plan.dtype == plan.xp.float64:
        return "it has no float64"
    if plan.has_mask and not plan.is_plain_causal:
        return "it has no masks but the causal one"
    width = plan.head_dim
    if width == 0 or plan.n_values != width:
        return "keys and values have different widths, or the width is 0"
    if is_named:
        return None
    import jax

    half = plan.dtype in (plan.xp.float16, plan.xp.bfloat16)
    if jax.default_backend() != "gpu" or not half or width % 8 or width > 128:
        return "it is faster only by cuDNN: on a GPU, in half precision, with heads of 8, 16, … 128"
    return None


def output(plan: Plan, operands: Operands) -> Array:
    """The attention output, (..., L, Ev)."""
    import jax

    xp, query, scale = plan.xp, operands.query, operands.multiplier
    if not isinstance(scale, float):
        query, scale = Tiles.of(plan, operands).query, 1.0
    arrays = [
        xp.swapaxes(four_axes(plan, xp.astype(x, plan.dtype), expand=True), 1, 2)
        for x in (query, operands.key, operands.values)
    ]
    kernel = "cudnn" if jax.default_backend() == "gpu" else "xla"
    out = jax.nn.dot_product_attention(
        *arrays, scale=scale, is_causal=plan.has_mask, implementation=kernel
    )
    out = xp.swapaxes(out, 1, 2)
    out = xp.reshape(out, (*plan.batch, *out.shape[-2:]))
    return out if operands.nonfinite is None else out + xp.astype(causal_nan(plan, operands), out.dtype)
