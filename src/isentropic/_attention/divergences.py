"""Divergences of two attention distributions over the same keys, in blocks of queries.

A block has the logits of all keys, of both distributions, as the divergence needs the probabilities of
both. So there is one pass, whose memory is that of a block. Gradients compute each block again.
"""

from __future__ import annotations

import math
from typing import Any

from isentropic._attention import schedule
from isentropic._attention.backends import state_of
from isentropic._attention.generic import Tiles
from isentropic._attention.plan import Arguments, Operands, Plan, finite, mask_of, prepare
from isentropic._attention.state import AttentionState, as_rows
from isentropic._checks import common_shape, is_array, value_error
from isentropic._divergences import of_logits
from isentropic._loops import (
    Block,
    compiled,
    is_differentiable,
    is_gpu,
    logits_of_a_tile,
    map_blocks,
    recomputed,
)
from isentropic._namespace import Array, common_device, is_symbolic, namespace
from isentropic._numerics import align, clip, lift
from isentropic._rows import Coded
from isentropic.masks import Mask

Side = tuple[Plan, Operands]


def divergence(name: str, p: Arguments, q: Arguments, over_heads: bool) -> Array:
    """A divergence of two calls, (..., L). `over_heads` compares with the mean of the first."""
    sides = prepare(p), prepare(q)
    batch = _check_sides(sides, over_heads)
    (plan, _), (other, _) = sides
    xp = plan.xp
    dtype = xp.result_type(plan.compute, other.compute)
    has_sinks = any(operands.sinks is not None for _, operands in sides)
    if plan.n_queries == 0 or (plan.n_keys == 0 and not has_sinks):
        return xp.zeros((*batch, plan.n_queries), dtype=dtype, device=plan.device)
    function = of_logits(name, over_heads)
    from isentropic._attention import numpy

    if not over_heads and all(numpy.takes_pair(*side) for side in sides):
        left, right = ((x, finite(x, y)) for x, y in sides)
        return numpy.divergence(*left, right, batch, name)
    known = sum(math.prod(n for n in x.batch if not is_symbolic(n)) for x in (plan, other))
    is_compiling = plan.frame.is_compiling or other.frame.is_compiling
    rows_at_once = plan.n_queries
    if not is_compiling:
        rows_at_once = max(1, logits_of_a_tile(xp, plan.device) // max(1, known * plan.n_keys))
    in_states = plan.n_keys > 0 and (is_compiling or is_gpu(xp, plan.device))
    if not is_compiling and rows_at_once < plan.n_queries:
        in_states = in_states or is_differentiable(xp, *(x for y in sides for x in y[1][:2]))
    in_states = in_states and name != "js_divergence" and not over_heads and plan.batch == other.batch
    if in_states and _are_linear(p, q):
        return xp.astype(_from_states(name, p, q, sides[1]), dtype, copy=False)
    tiles = [Tiles.of(*side) for side in sides]

    def of_rows(rows: Block) -> tuple[Array]:
        if plan.n_keys == 0:
            logits = [x.plan.zeros((rows[1], 0), x.plan.compute) for x in tiles]
        else:
            columns = schedule.reach_of_all([(x.plan.frame, x.operands.mask) for x in tiles], rows)
            logits = [x.logits(rows, columns) for x in tiles]
        if has_sinks:
            logits = [_with_sinks(x, s) for x, s in zip(tiles, logits, strict=True)]
        return (compiled(xp, function, *align(*(xp.astype(s, dtype, copy=False) for s in logits))),)

    is_recorded = plan.is_differentiated or other.is_differentiated
    over_rows = recomputed(xp, of_rows) if is_recorded else of_rows
    (column,) = map_blocks(xp, over_rows, plan.n_queries, rows_at_once, in_threads=True)
    return column[..., 0]


def _are_linear(p: Arguments, q: Arguments) -> bool:
    """Whether both see the same keys, and the logits of q are inner products alone."""
    if not (q.softcap is None and q.bias is None and p.sinks is None):
        return False
    if isinstance(q.key, Coded) or p.enable_gqa != q.enable_gqa:
        return False
    if p.enable_gqa and (isinstance(p.key, Coded) or p.key.shape[-3] != q.key.shape[-3]):
        return False
    return _is_same(mask_of(p), mask_of(q))


def _is_same(a: Any, b: Any) -> bool:
    """Whether masks are known to be the same: their arrays are the same objects."""
    if isinstance(a, Mask):
        return type(a) is type(b) and all(map(_is_same, vars(a).values(), vars(b).values()))
    return a is b or (not is_array(a) and not is_array(b) and a == b)


def _from_states(name: str, p: Arguments, q: Arguments, side: Side) -> Array:
    """The divergence by the fast passes of attention, whose gradients take O(L) memory.

    The mean of the logits q · k under p is the inner product of q and the output of p for the values k.
    So the cross entropy is the log-normalizer of q minus that. The result is exact to the rounding of
    entropies and log-normalizers, not of the divergence.
    """
    plan, operands = side
    xp = plan.xp
    state = _state(p._replace(value=q.key))
    output: Any = state.output()
    query = xp.astype(finite(plan, operands).query, output.dtype, copy=False) * operands.multiplier
    mean = xp.sum(query * output, axis=-1)
    log_normalizer = _state(q).log_normalizer()
    sees = state.normalizer > 0
    found = xp.where(sees, log_normalizer, 0.0) - mean
    if name == "kl_divergence":
        found = found - state.entropy()
    return xp.where(sees, clip(xp, found, min=0.0), 0.0)  # rounding may bring it below 0


def _state(arguments: Arguments) -> AttentionState:
    return as_rows(state_of(*prepare(arguments), arguments.implementation))


def _check_sides(sides: tuple[Side, Side], over_heads: bool) -> tuple[int, ...]:
    """Check that both have the same queries and keys. Return the axes ``...`` of the result."""
    (plan, p), (other, q) = sides
    namespace(query=p.query, other=q.query)
    common_device(query=p.query, other=q.query)
    for what, n, m in (
        ("queries", plan.n_queries, other.n_queries),
        ("keys", plan.n_keys, other.n_keys),
    ):
        if n != m:
            raise value_error("other", f"have the {n} {what} of this distribution", f"{m} {what}")
    batch = plan.batch
    if over_heads:
        if not batch:
            raise value_error("over_heads", "be False for a query without an axis of heads", True)
        if len(other.batch) != len(batch):
            must = f"have {plan.ndim} axes, as this distribution has, for a mean over heads"
            raise value_error("other", must, (*other.batch, other.n_queries, other.head_dim))
        batch = (*batch[:-1], 1)
    return common_shape(distribution=batch, other=other.batch)


def _with_sinks(tiles: Tiles, s: Array) -> Array:
    """The logits with that of the sink, which is −∞ where there is none, as the last key."""
    xp, sinks = tiles.plan.xp, tiles.operands.sinks
    shape = (*s.shape[:-1], 1)
    if sinks is None:
        sinks = xp.full(shape, -math.inf, dtype=s.dtype, device=tiles.plan.device)
    return xp.concat((s, xp.broadcast_to(lift(sinks, s.ndim), shape)), axis=-1)
