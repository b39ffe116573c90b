"""Attention whose scores come from a small network."""

from __future__ import annotations

from isentropic._attention.distribution import quietly_named
from isentropic._attention.generic import Tiles, add_bias_and_mask
from isentropic._attention.plan import Arguments, finite, prepare
from isentropic._attention.tile import output_of_columns
from isentropic._checks import check_floating, check_ndim, value_error
from isentropic._loops import Block, take
from isentropic._namespace import Array, ArrayT, common_device, namespace
from isentropic._numerics import lift
from isentropic._products import product
from isentropic.masks import Mask


@quietly_named
def additive_attention(
    query: ArrayT,
    key: ArrayT,
    value: ArrayT,
    w_q: ArrayT,
    w_k: ArrayT,
    v: ArrayT,
    *,
    mask: Array | Mask | None = None,
) -> ArrayT:
    """Attention with the scores ``vᵀ tanh(q W_q + k W_k)`` of a small network.

    Parameters
    ----------
    query : array (..., L, Eq)
    key : array (..., S, Ek)
    value : array (..., S, Ev)
    w_q : array (Eq, A)
    w_k : array (Ek, A)
    v : array (A,)
    mask : boolean array or Mask, optional
        As in `attention`.

    Returns
    -------
    array (..., L, Ev)
        The output, in the dtype to which query, key and value promote. 0 for a query that sees no key.

    Raises
    ------
    TypeError, ValueError
        As in `attention`, and if the shapes of `w_q`, `w_k` and `v` do not fit.

    Notes
    -----
    The time is O(L·S·A). The memory holds a tile of these L·S·A numbers. There is no scale, so there is
    no law.

    References
    ----------
    Bahdanau, Cho & Bengio 2015, arXiv 1409.0473.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic.layers import additive_attention
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.normal(size=(3, 5, 4))
    >>> additive_attention(q, k, v, *rng.normal(size=(2, 4, 8)), np.ones(8)).shape
    (5, 4)
    """
    weights = {"w_q": w_q, "w_k": w_k, "v": v}
    arrays = {"query": query, "key": key, "value": value}
    xp = namespace(**arrays, **weights)
    common_device(**arrays, **weights)
    check_floating(xp, **weights)
    check_ndim(2, **arrays)
    for name, x, w in (("w_q", query, w_q), ("w_k", key, w_k)):
        if w.ndim != 2 or w.shape[0] != x.shape[-1]:
            raise value_error(name, f"have the shape ({x.shape[-1]}, A)", w.shape)
    hidden = w_q.shape[-1]
    if w_k.shape[-1] != hidden:
        raise value_error("w_k", f"have the last dimension of `w_q`, {hidden}", w_k.shape[-1])
    if v.shape != (hidden,):
        raise value_error("v", f"have the shape ({hidden},)", v.shape)
    # The widths of queries and keys may differ, as only their projections have to match.
    plan, operands = prepare(Arguments(query, key, value, mask, scale=1.0, is_dot_product=False))
    # Before the projections: `add_bias_and_mask` gives the NaN of these rows to queries that see them.
    operands = finite(plan, operands)

    dtype = plan.compute
    queries = product(xp, xp.astype(operands.query, dtype), xp.astype(w_q, dtype))
    keys = product(xp, xp.astype(operands.key, dtype), xp.astype(w_k, dtype))
    v = xp.astype(v, dtype)

    def logits(rows: Block, columns: Block) -> Array:
        q = take(queries, rows, -2)[..., :, None, :]
        k = take(keys, columns, -2)[..., None, :, :]
        scores = xp.sum(xp.tanh(q + k) * lift(v, q.ndim), axis=-1)
        return add_bias_and_mask(plan, operands, scores, rows, columns)

    state = Tiles.of(plan, operands).state(None, logits, numbers_per_logit=hidden)
    return xp.astype(output_of_columns(xp, state), plan.dtype)
