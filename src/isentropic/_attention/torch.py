"""The backends for PyTorch: its own kernel for outputs, and gradients without L×S arrays."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

from isentropic._attention.generic import (
    AttentionState,
    Tiles,
    add_bias_and_mask,
    causal_nan,
    output_of_columns,
    reach,
    tile_shape,
)
from isentropic._attention.plan import Operands, Plan, four_axes, sum_of
from isentropic._entropy import shift_moment
from isentropic._loops import BLOCKS, Block, blocks, map_blocks, take
from isentropic._namespace import Array

_TRANSFORMED = "some array is within a transformation of torch.func, or has a forward-mode derivative"


def why_not_sdpa(plan: Plan, order: float | None, is_named: bool) -> str | None:
    """The reason why PyTorch's own kernel does not compute a call, or None."""
    if plan.library != "torch":
        return "the arrays are not PyTorch's"
    if order is not None:
        return "it computes outputs only"
    if plan.softcap is not None:
        return "it has no soft cap"
    if plan.is_bias_differentiated:
        return "it would form the gradient of the bias as an L×S array"
    if plan.frame.is_compiling:
        return None
    # The kernel does not support forward-mode derivatives and transformations of torch.func.
    if plan.is_transformed:
        return _TRANSFORMED
    if plan.head_dim == 0 or plan.n_values == 0:
        return "queries or values have no features"
    if plan.device.type == "cpu" or plan.has_bias or plan.has_mask:
        return None
    # PyTorch's "math" kernel forms the weights and is not better than the generic pass.
    return "PyTorch would form the weights" if _would_form_weights(plan) else None


def _would_form_weights(plan: Plan) -> bool:
    """Whether PyTorch would choose its "math" kernel for tensors like those of the call."""
    import torch

    width = max(plan.head_dim, plan.n_values or 0)
    kind = {"dtype": plan.dtype, "device": plan.device, "requires_grad": plan.is_differentiated}
    batch = (math.prod(plan.batch[:-1]), plan.batch[-1] if plan.batch else 1)
    query = torch.empty((*batch, plan.n_queries, width), **kind)
    if type(query) is not torch.Tensor:  # a fake tensor: PyTorch cannot choose a kernel for it
        return False
    key = torch.empty((*batch, plan.n_keys, width), **kind)
    return bool(torch._fused_sdp_choice(query, key, key, None, 0.0, False, scale=1.0) == 0)


def sdpa_output(plan: Plan, operands: Operands) -> Array:
    """The attention output (..., L, Ev) by PyTorch's own kernel."""
    import torch

    xp, mask = plan.xp, operands.mask
    query, key, value, scale = _torch_arrays(plan, operands)
    is_grouped = query.shape[1] != key.shape[1]
    # `is_grouped` itself may be symbolic under torch.compile, and the kernel needs a bool.
    kind: dict[str, Any] = {"scale": scale, "enable_gqa": True if is_grouped else False}  # noqa: SIM210

    def attend(q: Any, k: Any, v: Any, mask: Any = None, is_causal: bool = False) -> Any:
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return sdpa(q, k, v, mask, is_causal=is_causal, **kind)

    # The CPU kernel treats a row of NaN logits like one that sees no key.
    if mask is None and operands.bias is None:
        out = _with_nan(plan, attend(query, key, value), query, key)
    elif operands.bias is None and plan.is_plain_causal:
        out = attend(query, key, value, is_causal=True)
        if operands.nonfinite is not None:
            out = out + four_axes(plan, causal_nan(plan, operands))
    else:
        zero = xp.zeros((), dtype=plan.compute, device=plan.device)

        def attend_rows(rows: Block) -> tuple[Array]:
            # Keys that no query of the block sees are left out.
            columns = reach(plan, mask, rows)
            added = add_bias_and_mask(plan, operands, zero, rows, columns)
            added = four_axes(plan, xp.astype(added, value.dtype))
            q, k, v = (take(x, b, -2) for x, b in ((query, rows), (key, columns), (value, columns)))
            out = attend(q, k, v, added)
            if mask is None:
                out = _with_nan(plan, out, q, k)
            elif operands.nonfinite is not None:
                out = xp.where(xp.any(xp.isnan(added), axis=-1, keepdims=True), math.nan, out)
            return (out,)

        (out,) = map_blocks(xp, attend_rows, plan.n_queries, _rows_of_masks(plan, operands))
    if len(plan.batch) == 1:
        out = out[0]
    elif len(plan.batch) != 2:
        out = xp.reshape(out, (*plan.batch, *out.shape[-2:]))
    return out if out.shape[-1] == plan.n_values else out[..., : plan.n_values]


def _torch_arrays(plan: Plan, operands: Operands) -> tuple[Any, Any, Any, float]:
    """Queries, keys and values (batch, heads, rows, width) of one dtype, and the scale."""
    import torch

    xp, query, scale = plan.xp, operands.query, operands.multiplier
    if not isinstance(scale, float):
        query, scale = xp.astype(query, plan.compute, copy=False) * scale, 1.0
    width = max(plan.head_dim, plan.n_values or 0)
    # On a GPU the fused kernels are made for half precision.
    dtype = plan.compute if plan.device.type == "cpu" else plan.dtype
    arrays = []
    for array in (query, operands.key, operands.values):
        x: Any = array if array.dtype == dtype else xp.astype(array, dtype)
        x = four_axes(plan, x, expand=True)
        # The kernel needs equal widths and contiguous rows. Padding by zeros does not change products.
        if x.shape[-1] < width:
            x = torch.nn.functional.pad(x, (0, width - x.shape[-1]))
        arrays.append(x if x.is_contiguous() or x.stride(-1) == 1 else x.contiguous())
    q, k, v = arrays
    return q, k, v, scale


def _with_nan(plan: Plan, out: Any, query: Any, key: Any) -> Any:
    """The output with NaN for queries that are NaN, and for all queries if some key is NaN."""
    import numpy as np

    xp = plan.xp
    if plan.device.type != "cpu":
        return out
    # The kernel gives 0 to a row that has no other logits than NaN. Any other NaN reaches its output.
    if plan.is_readable and np.count_nonzero(out.detach().numpy()[..., 0]) == math.prod(out.shape[:-1]):
        return out
    if plan.is_readable and not math.isnan(sum_of(plan, query, key)):
        return out
    key_is_nan = xp.isnan(xp.sum(key, axis=(-2, -1), keepdims=True))
    if key_is_nan.shape[1] != query.shape[1]:
        key_is_nan = xp.repeat(key_is_nan, query.shape[1] // key_is_nan.shape[1], axis=1)
    is_nan = xp.isnan(xp.sum(query, axis=-1, keepdims=True)) | key_is_nan
    return xp.where(is_nan, math.nan, out)


def _rows_of_masks(plan: Plan, operands: Operands) -> int:
    if plan.frame.is_compiling:
        return plan.n_queries
    is_same_for_all = operands.bias is None and (operands.mask is None or not operands.mask.arrays)
    elements = 1 if is_same_for_all else max(1, math.prod(plan.batch))
    return max(16, BLOCKS.sdpa_mask_logits // (elements * plan.n_keys))


def why_not_tiles(plan: Plan, order: float | None, is_named: bool) -> str | None:
    """The reason why the pass with recomputed tiles does not compute a call, or None."""
    if plan.library != "torch":
        return "the arrays are not PyTorch's"
    if plan.frame.is_compiling:
        return "torch.compile traces the call"
    if not plan.is_differentiated:
        return "no gradient is needed"
    rows, columns = tile_shape(plan)
    if plan.n_queries <= rows and plan.n_keys <= columns:
        return "there is a single tile, which PyTorch differentiates by itself"
    if plan.is_transformed:
        return _TRANSFORMED
    return None


def tiles_output(plan: Plan, operands: Operands) -> Array:
    """The attention output (..., L, Ev). Its gradient computes the tiles again."""
    return output_of_columns(plan.xp, _state(plan, operands, None))


def tiles_state(
    plan: Plan, operands: Operands, order: float, relative_to_maximum: bool
) -> AttentionState:
    """The state in columns. Its gradient computes the tiles again instead of storing them."""
    return _state(plan, operands, order)


def _state(plan: Plan, operands: Operands, order: float | None) -> AttentionState:
    tiles = Tiles.of(plan, operands)
    all_inputs = dict(
        zip(_INPUTS, (tiles.query, operands.key, operands.value, operands.bias), strict=True)
    )
    inputs = {name: x for name, x in all_inputs.items() if x is not None}
    # PyTorch saves the inputs. The object that it stores beside them must not hold them too, as that
    # would keep their autograd graph alive.
    tiles_without_inputs = _with(tiles, dict.fromkeys(_INPUTS))
    fields = iter(_recomputed().apply(tiles_without_inputs, order, tuple(inputs), *inputs.values()))
    return AttentionState(
        next(fields),
        next(fields),
        None if operands.value is None else next(fields),
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
            if torch.is_grad_enabled():  # for a second derivative PyTorch must record all tiles
                fields = [x for x in tiles.state(order) if x is not None]
                grads = torch.autograd.grad(
                    fields, inputs, upstream, create_graph=True, allow_unused=True
                )
            else:
                grads = _gradients(tiles, order, names, fields, upstream)
            return None, None, None, *grads

    return Recomputed


def _with(tiles: Tiles, arrays: Any) -> Tiles:
    """The tiles with other input arrays."""
    changes = dict(arrays)
    query = changes.pop("query", tiles.query)
    return replace(tiles, query=query, operands=tiles.operands._replace(**changes))


def _input(tiles: Tiles, name: str) -> Any:
    return tiles.query if name == "query" else getattr(tiles.operands, name)


def _gradients(
    tiles: Tiles, order: float | None, names: tuple[str, ...], fields: Any, upstream: Any
) -> list[Any]:
    """The gradients of the inputs from those of the fields of the state, tile by tile."""
    import torch

    plan, xp = tiles.plan, tiles.plan.xp
    row_size, column_size = tile_shape(plan)
    totals = [torch.zeros_like(_input(tiles, name), dtype=plan.compute) for name in names]
    for rows in blocks(0, plan.n_queries, row_size):
        field_grads = [take(x, rows, -2) for x in upstream]
        state = [take(x, rows, -2) for x in fields]
        maximum = state[0]
        maximum_grad = _gradient_of_maximum(tiles, order, state, field_grads)
        is_done = xp.zeros_like(maximum, dtype=xp.bool)
        first, size = reach(plan, tiles.operands.mask, rows)
        for columns in blocks(first, first + size, column_size):
            blocks_of: dict[str, tuple[Block, Block | None]] = {
                "query": (rows, None), "key": (columns, None), "value": (columns, None),
                "bias": (rows, columns),
            }  # fmt: skip
            parts = [_tile_of(_input(tiles, n), *blocks_of[n]).detach().requires_grad_() for n in names]
            with torch.enable_grad():
                # `parts` are single blocks, which `take` returns unchanged.
                tile = _with(tiles, zip(names, parts, strict=True))
                logits = tile.logits(rows, columns)
                outputs = [xp.max(logits, axis=-1, keepdims=True)]
                outputs += [
                    x for x in tile.tile_state(logits, columns, order, maximum)[1:] if x is not None
                ]
                outputs = [x.expand((*plan.batch, *x.shape[-2:])) for x in outputs]
            # If several tiles contain the maximum, the first one takes its gradient.
            is_here = (outputs[0].detach() == maximum) & ~is_done
            is_done = is_done | is_here
            output_grads = [xp.where(is_here, maximum_grad, 0.0), *field_grads[1:]]
            grads = torch.autograd.grad(outputs, parts, output_grads, allow_unused=True)
            for name, total, grad in zip(names, totals, grads, strict=True):
                if grad is not None:
                    _tile_of(total, *blocks_of[name]).add_(grad)
    return [total.to(_input(tiles, name).dtype) for name, total in zip(names, totals, strict=True)]


def _tile_of(x: Any, rows: Block, columns: Block | None) -> Any:
    part = take(x, rows, -2)
    return part if columns is None else take(part, columns, -1)


def _gradient_of_maximum(tiles: Tiles, order: float | None, state: Any, upstream: Any) -> Any:
    """The gradient with respect to the maximum, to which all sums of the state are relative."""
    import torch

    shift = torch.zeros_like(state[0], requires_grad=True)
    with torch.enable_grad():
        factor = torch.exp(-shift)
        shifted = [state[0] + shift, factor * state[1]]
        if tiles.operands.value is not None:
            shifted.append(factor * state[2])
        if order is not None:
            shifted.append(shift_moment(tiles.plan.xp, state[-1], state[1], -shift, order))
    return torch.autograd.grad(shifted, shift, upstream)[0]
