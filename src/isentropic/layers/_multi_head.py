"""Multi-head attention, with its projections."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

from isentropic._attention.distribution import quietly_named
from isentropic._attention.functions import attention
from isentropic._checks import (
    check_count,
    check_flag,
    check_floating,
    check_ndim,
    plain_integer,
    value_error,
)
from isentropic._namespace import Array, ArrayT, common_device, namespace, present, promoted
from isentropic._numerics import lift
from isentropic._products import product
from isentropic.laws._law import DEFAULT_LAW, Law
from isentropic.masks import Mask


@quietly_named
def multi_head_attention(
    query: ArrayT,
    key: ArrayT,
    value: ArrayT,
    w_q: ArrayT,
    w_k: ArrayT,
    w_v: ArrayT,
    w_o: ArrayT,
    *,
    num_heads: int,
    b_q: Array | None = None,
    b_k: Array | None = None,
    b_v: Array | None = None,
    b_o: Array | None = None,
    mask: Array | Mask | None = None,
    bias: Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    law: Law | None = DEFAULT_LAW,
    n_keys: int | Array | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    enable_gqa: bool = False,
    implementation: str | None = None,
) -> ArrayT:
    """Multi-head attention: project, attend in each head, concatenate the heads, project.

    Parameters
    ----------
    query : array (..., L, D)
    key : array (..., S, Dk)
    value : array (..., S, Dv)
    w_q : array (D, num_heads · E)
    w_k : array (Dk, G · E)
    w_v : array (Dv, G · Ev)
    w_o : array (num_heads · Ev, Do)
        Projections, multiplied from the right. G is `num_heads`, or with `enable_gqa` a divisor of it.
    num_heads : int ≥ 1
        The number of heads H.
    b_q, b_k, b_v, b_o : arrays, optional
        Biases of the projections, of the length of their results.
    mask, bias, is_causal, scale, law, n_keys, softcap, sinks, enable_gqa,
    implementation
        As in `attention`. The heads are the last of the axes ``...``: a mask per sequence has the shape
        (B, 1, L, S), an `n_keys` per sequence (B, 1, L), and sinks and the parameters of a law per head
        (H,).

    Returns
    -------
    array (..., L, Do)
        The projected outputs of the heads.

    Raises
    ------
    TypeError, ValueError
        As in `attention`, and if the widths of the projections are not divisible by the heads.

    References
    ----------
    Vaswani et al. 2017, arXiv 1706.03762.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic.layers import multi_head_attention
    >>> rng = np.random.default_rng(0)
    >>> x, w = rng.normal(size=(10, 16)), rng.normal(size=(4, 16, 16))
    >>> multi_head_attention(x, x, x, *w, num_heads=2).shape
    (10, 16)
    """
    inputs = {"query": query, "key": key, "value": value}
    weights = {"w_q": w_q, "w_k": w_k, "w_v": w_v, "w_o": w_o}
    biases = present(b_q=b_q, b_k=b_k, b_v=b_v, b_o=b_o)
    xp = namespace(**inputs, **weights, **biases)
    common_device(**inputs, **weights, **biases)
    check_floating(xp, **inputs, **weights, **biases)
    check_ndim(2, **inputs, **weights)
    check_count("num_heads", num_heads)
    check_flag(is_causal=is_causal, enable_gqa=enable_gqa)
    num_heads = plain_integer(num_heads)
    widths = (query.shape[-1], key.shape[-1], value.shape[-1])
    # `w_o` is left out here. Its height follows from the number of heads and the width of values.
    for (name, w), width in zip(weights.items(), widths, strict=False):
        if w.ndim != 2 or w.shape[0] != width:
            raise value_error(name, f"have the shape ({width}, ...)", w.shape)
    head_dim = _divided("w_q", w_q.shape[-1], num_heads)
    # The number of groups is no argument: the heads of keys are as wide as those of queries.
    groups = _divided("w_k", w_k.shape[-1], head_dim) if enable_gqa else num_heads
    value_dim = _divided("w_v", w_v.shape[-1], groups)
    if w_k.shape[-1] != groups * head_dim:
        must = f"have a last dimension of {groups * head_dim}, like that of `w_q`"
        raise value_error("w_k", must, w_k.shape[-1])
    if w_o.ndim != 2 or w_o.shape[0] != num_heads * value_dim:
        raise value_error("w_o", f"have the shape ({num_heads * value_dim}, ...)", w_o.shape)
    for name, b in biases.items():
        width = weights[name.replace("b", "w")].shape[-1]
        if b.shape != (width,):
            raise value_error(name, f"have the shape ({width},)", b.shape)

    heads = []
    sizes = ((num_heads, head_dim), (groups, head_dim), (groups, value_dim))
    projections = zip(inputs.values(), (w_q, w_k, w_v), (b_q, b_k, b_v), sizes, strict=True)
    for x, w, b, size in projections:
        # Without a mask every row is seen, and a NaN in it belongs into the gradients.
        y = _project(xp, x, w, b, masked=mask is not None or is_causal)
        heads.append(_swap_heads(xp, xp.reshape(y, (*x.shape[:-1], *size))))
    out = attention(
        *heads, mask=mask, bias=bias, is_causal=is_causal, scale=scale, law=law, n_keys=n_keys,
        softcap=softcap, sinks=sinks, enable_gqa=enable_gqa, implementation=implementation,
    )  # fmt: skip
    joined = _swap_heads(xp, out)
    joined = xp.reshape(joined, (*joined.shape[:-2], num_heads * value_dim))
    return _project(xp, joined, w_o, b_o)


def _divided(name: str, width: int, parts: int) -> int:
    if parts == 0 or width % parts:
        raise value_error(name, f"have a last dimension divisible by {parts}", width)
    return width // parts


def _project(xp: ModuleType, x: Array, w: Array, b: Array | None, *, masked: bool = False) -> Any:
    """``x w + b``. If `masked`, nonfinite rows do not affect the gradient of w: they may be hidden."""
    dtype = promoted(xp, x, w)
    x = xp.astype(x, dtype)
    finite = xp.isfinite(x) if masked else None
    y = product(xp, x if finite is None else xp.where(finite, x, 0.0), xp.astype(w, dtype))
    if finite is not None:
        # The row is NaN again for the queries that see it.
        y = xp.where(xp.all(finite, axis=-1, keepdims=True), y, math.nan)
    y = xp.astype(y, dtype, copy=False)  # NumPy's products of bfloat16 are float32
    return y if b is None else y + lift(b, y.ndim)


def _swap_heads(xp: ModuleType, x: Array) -> Array:
    """(..., L, H, E) ↔ (..., H, L, E)."""
    n = x.ndim
    return xp.permute_dims(x, (*range(n - 3), n - 2, n - 3, n - 1))
