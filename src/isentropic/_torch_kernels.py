"""Attention of PyTorch's tensors: its own kernel for outputs, and gradients without L×S."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

from isentropic._entropy import shift_moment
from isentropic._loops import Block, blocks, is_readable, is_transformed, map_blocks, take
from isentropic._namespace import Array
from isentropic._state import AttentionState
from isentropic._tiles import Problem, Tiles

# Logits of a block where the kernel needs its mask as an array.
_MASK_SIZE = 2**22


def why_not_sdpa(problem: Problem) -> str | None:
    """Why PyTorch's own kernel does not compute the output of a problem."""
    import torch

    if problem.softcap is not None:
        return "it has no soft cap"
    if problem.bias is not None and is_differentiated(problem.bias):
        return "it would form the gradient of the bias as an L×S array"
    if torch.compiler.is_compiling():
        return None
    # Forward-mode derivatives and the transformations of torch.func need the generic operations.
    if any(is_transformed(x) for x in problem.arrays):
        return "some array is within a transformation of torch.func, or has a forward-mode derivative"
    if problem.query.shape[-1] == 0 or problem.values.shape[-1] == 0:
        return "queries or values have no features"
    if problem.frame.device.type == "cpu" or problem.bias is not None or problem.mask is not None:
        return None
    # Of PyTorch's kernels, the one that forms the weights is not better than the generic pass. About
    # tensors without data it cannot be asked.
    query, key, value, scale = _torch_arrays(problem)
    if type(query) is not torch.Tensor:
        return None
    if torch._fused_sdp_choice(query, key, value, None, 0.0, False, scale=scale) == 0:
        return "PyTorch would form the weights"
    return None


def is_differentiated(x: Any) -> bool:
    import torch

    return torch.is_grad_enabled() and x.requires_grad


def torch_output(problem: Problem) -> Array:
    from torch.nn.functional import scaled_dot_product_attention

    xp, mask = problem.xp, problem.mask
    query, key, value, scale = _torch_arrays(problem)
    is_grouped = query.shape[1] != key.shape[1]
    # Not the comparison itself, which under torch.compile is symbolic.
    kind: dict[str, Any] = {"scale": scale, "enable_gqa": True if is_grouped else False}  # noqa: SIM210

    def attend(q: Any, k: Any, v: Any, mask: Any = None, is_causal: bool = False) -> Any:
        return scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, **kind)

    # The kernel for the CPU takes a row of NaN logits for one that sees no key.
    if mask is None and problem.bias is None:
        out = _with_nan(problem, attend(query, key, value), query, key)
    elif problem.bias is None and problem.is_plain_causal:
        out = attend(query, key, value, is_causal=True)
        if problem.poison is not None:
            out = out + problem.four_axes(problem.causal_poison)
    else:

        def of_rows(rows: Block) -> tuple[Array]:
            # Keys out of reach of the whole block do not take part.
            columns = problem.reach(rows)
            added = problem.four_axes(xp.astype(problem.added(rows, columns), value.dtype))
            q, k, v = (take(x, b, -2) for x, b in ((query, rows), (key, columns), (value, columns)))
            out = attend(q, k, v, added)
            if problem.mask is None:
                out = _with_nan(problem, out, q, k)
            elif problem.poison is not None:
                out = xp.where(xp.any(xp.isnan(added), axis=-1, keepdims=True), math.nan, out)
            return (out,)

        (out,) = map_blocks(xp, of_rows, problem.n_queries, _rows_of_masks(problem))
    out = xp.reshape(out, (*problem.batch, *out.shape[-2:]))
    return out[..., : problem.values.shape[-1]]


def _torch_arrays(problem: Problem) -> tuple[Any, Any, Any, float]:
    """Queries, keys and values (batch, heads, rows, width) of one dtype, and the scale."""
    from torch.nn.functional import pad

    xp, query, scale = problem.xp, problem.query, problem.multiplier
    if not isinstance(scale, float):
        query, scale = problem.tiles().query, 1.0
    value = problem.values
    width = max(query.shape[-1], value.shape[-1])
    # On a GPU half precision is what the kernels are for.
    dtype = problem.compute if problem.frame.device.type == "cpu" else problem.dtype
    arrays = []
    for array in (query, problem.key, value):
        x: Any = problem.four_axes(xp.astype(array, dtype, copy=False), whole=True)
        # Zeros add nothing to a product of widths that differ. The rows have to be contiguous.
        x = pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x
        arrays.append(x if x.stride(-1) == 1 else x.contiguous())
    q, k, v = arrays
    return q, k, v, scale


def _with_nan(problem: Problem, out: Any, query: Any, key: Any) -> Any:
    """NaN where the queries, or any of the keys, are NaN."""
    xp = problem.xp
    if problem.frame.device.type != "cpu":
        return out
    if is_readable(xp, query):
        total = query.sum() + key.sum()
        if total == total:
            return out
    of_keys = xp.isnan(xp.sum(key, axis=(-2, -1), keepdims=True))
    if of_keys.shape[1] != query.shape[1]:
        of_keys = xp.repeat(of_keys, query.shape[1] // of_keys.shape[1], axis=1)
    is_nan = xp.isnan(xp.sum(query, axis=-1, keepdims=True)) | of_keys
    return xp.where(is_nan, math.nan, out)


def _rows_of_masks(problem: Problem) -> int:
    if problem.frame.whole:
        return problem.n_queries
    alike = problem.bias is None and (problem.mask is None or not problem.mask.arrays)
    elements = 1 if alike else max(1, math.prod(problem.batch))
    return max(16, _MASK_SIZE // (elements * problem.n_keys))


def why_not_tiles(problem: Problem) -> str | None:
    """Why the pass that takes the tiles again for gradients does not compute a problem."""
    if problem.frame.whole:
        return "torch.compile traces the call"
    if not any(is_differentiated(x) for x in problem.arrays):
        return "no gradient is asked for"
    rows, columns = problem.tile_shape
    if problem.n_queries <= rows and problem.n_keys <= columns:
        return "there is a single tile, which PyTorch differentiates by itself"
    if any(is_transformed(x) for x in problem.arrays):
        return "some array is within a transformation of torch.func, or has a forward-mode derivative"
    return None


def torch_state(problem: Problem, order: float | None) -> AttentionState:
    """The state, in columns, whose gradient takes the tiles again instead of keeping them."""
    tiles = problem.tiles()
    inputs = {name: x for name in _INPUTS if (x := getattr(tiles, name)) is not None}
    others = _with(tiles, dict.fromkeys(_INPUTS))
    fields = iter(_recomputed().apply(others, order, tuple(inputs), *inputs.values()))
    return AttentionState(
        next(fields),
        next(fields),
        None if problem.value is None else next(fields),
        None if order is None else next(fields),
    )


_INPUTS = ("query", "key", "value", "bias")


@functools.cache
def _recomputed() -> Any:
    import torch

    class Recomputed(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, tiles: Tiles, order: Any, names: tuple[str, ...], *inputs: Any) -> Any:
            state = _with(tiles, zip(names, inputs, strict=True)).state(order)
            fields = [x for x in state if x is not None]
            ctx.save_for_backward(*inputs, *fields)
            ctx.call = tiles, order, names
            return tuple(fields)

        @staticmethod
        def backward(ctx: Any, *upstream: Any) -> Any:
            tiles, order, names = ctx.call
            inputs, fields = ctx.saved_tensors[: len(names)], ctx.saved_tensors[len(names) :]
            tiles = _with(tiles, zip(names, inputs, strict=True))
            if torch.is_grad_enabled():  # a derivative of this gradient is wanted: keep all
                fields = [x for x in tiles.state(order) if x is not None]
                grads = torch.autograd.grad(
                    fields, inputs, upstream, create_graph=True, allow_unused=True
                )
            else:
                grads = _gradients(tiles, order, names, fields, upstream)
            return None, None, None, *grads

    return Recomputed


def _with(tiles: Tiles, arrays: Any) -> Tiles:
    changes: dict[str, Any] = dict(arrays)
    return replace(tiles, **changes)


def _gradients(
    tiles: Tiles, order: float | None, names: tuple[str, ...], fields: Any, upstream: Any
) -> list[Any]:
    """Of the inputs, from those of the fields of the state: tile by tile."""
    import torch

    xp = tiles.xp
    row_size, column_size = tiles.tile_shape
    totals = [torch.zeros_like(getattr(tiles, name), dtype=tiles.compute) for name in names]
    for rows in blocks(0, tiles.n_queries, row_size):
        of_fields = [take(x, rows, -2) for x in upstream]
        state = [take(x, rows, -2) for x in fields]
        maximum = state[0]
        of_maximum = _gradient_of_maximum(tiles, order, state, of_fields)
        is_done = xp.zeros_like(maximum, dtype=xp.bool)
        first, size = tiles.reach(rows)
        for columns in blocks(first, first + size, column_size):
            where: dict[str, tuple[Block, Block | None]] = {
                "query": (rows, None), "key": (columns, None), "value": (columns, None),
                "bias": (rows, columns),
            }  # fmt: skip
            parts = [_cut(getattr(tiles, n), *where[n]).detach().requires_grad_() for n in names]
            with torch.enable_grad():
                # Blocks that are all there: `take` leaves them as they are.
                tile = _with(tiles, zip(names, parts, strict=True))
                logits = tile.logits(rows, columns)
                outputs = [xp.max(logits, axis=-1, keepdims=True)]
                outputs += [
                    x for x in tile.tile_state(logits, columns, order, maximum)[1:] if x is not None
                ]
                outputs = [x.expand((*tiles.batch, *x.shape[-2:])) for x in outputs]
            # Of several equal maxima the first tile's take the gradient.
            is_here = (outputs[0].detach() == maximum) & ~is_done
            is_done = is_done | is_here
            given = [xp.where(is_here, of_maximum, 0.0), *of_fields[1:]]
            grads = torch.autograd.grad(outputs, parts, given, allow_unused=True)
            for name, total, grad in zip(names, totals, grads, strict=True):
                if grad is not None:
                    _cut(total, *where[name]).add_(grad)
    return [total.to(getattr(tiles, name).dtype) for name, total in zip(names, totals, strict=True)]


def _cut(x: Any, rows: Block, columns: Block | None) -> Any:
    part = take(x, rows, -2)
    return part if columns is None else take(part, columns, -1)


def _gradient_of_maximum(problem: Problem, order: float | None, state: Any, upstream: Any) -> Any:
    """The gradient by the maximum, to which all sums of the state are relative."""
    import torch

    shift = torch.zeros_like(state[0], requires_grad=True)
    with torch.enable_grad():
        factor = torch.exp(-shift)
        shifted = [state[0] + shift, factor * state[1]]
        if problem.value is not None:
            shifted.append(factor * state[2])
        if order is not None:
            shifted.append(shift_moment(problem.xp, state[-1], state[1], -shift, order))
    return torch.autograd.grad(shifted, shift, upstream)[0]
