"""The backends for PyTorch: its own kernel for outputs, and gradients without L×S arrays."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from isentropic._attention import triton
from isentropic._attention.generic import Tiles, add_bias_and_mask, interval_nan, tile_shape
from isentropic._attention.numpy import takes_mask
from isentropic._attention.plan import Operands, Plan, finite, four_axes
from isentropic._attention.schedule import reach
from isentropic._attention.tile import Sums, output_of_columns
from isentropic._attention.torch_facts import (
    TRANSFORMED,
    is_recorded,
    recorded_gradients,
    wants_gradient,
)
from isentropic._attention.torch_gradients import INPUTS, backward, forward
from isentropic._loops import BLOCKS, Block, is_exporting, map_blocks, take, without_autocast
from isentropic._namespace import Array


def sdpa_unsupported_reason(plan: Plan, order: float | None, is_named: bool) -> str | None:
    """The reason why PyTorch's own kernel does not compute a call, or None."""
    if plan.library != "torch":
        return "the arrays are not PyTorch's"
    if order is not None:
        return "it computes outputs only"
    if plan.softcap is not None:
        return "it has no soft cap"
    # The tiles add it up in the shape of the bias, which may broadcast.
    if plan.facts.is_bias_differentiated:
        return "it would materialize the L×S gradient of the bias"
    is_masked = plan.has_mask and not plan.is_plain_causal
    if plan.frame.is_compiling:
        inside = _transformations()
        if inside not in ((), ("Grad",)):
            return TRANSFORMED
        if not is_masked:
            return None
        if is_exporting():
            return "other runtimes return NaN for queries that see no key"
        # On a GPU the operator runs the Triton kernels, which take intervals.
        is_taken = plan.has_interval_mask and not plan.has_bias and not inside
        is_taken = plan.device.type == "cpu" or (is_taken and _has_kernels(plan.device))
        return "it would materialize the L×S mask" if is_taken else None
    # The kernel does not support forward-mode derivatives and transformations of torch.func.
    if plan.facts.is_transformed:
        return TRANSFORMED
    if plan.head_dim == 0 or plan.n_values == 0:
        return "queries or values have no features"
    if not is_named and takes_mask(plan) and _kernel_dtype(plan) == plan.compute:
        return "the NumPy pass is faster under a mask"
    if not is_named and _keeps_masks(plan):
        return "PyTorch would keep the L×S mask for the gradient"
    if not is_named and is_masked and not plan.has_bias and triton.takes(plan, None):
        return "the Triton kernels skip what the mask hides"
    if plan.device.type == "cpu" or plan.has_bias or plan.has_mask:
        return None
    # PyTorch's "math" kernel materializes the weights and is not better than the generic pass.
    return "PyTorch would materialize the weights" if _would_materialize_weights(plan) else None


def _kernel_dtype(plan: Plan) -> Any:
    """The dtype of queries, keys and values in the kernel, which adds up in float32 at least."""
    if plan.device.type != "cpu":
        return plan.dtype
    # The kernel is not faster in float16. A bias would be rounded, and so would what gradients need.
    is_exact = plan.is_differentiated or plan.has_bias or plan.dtype != plan.xp.bfloat16
    return plan.compute if is_exact else plan.dtype


def _keeps_masks(plan: Plan) -> bool:
    """Whether PyTorch on a CPU would keep more than a block of the bias or mask; tiles are as fast."""
    materializes_mask = plan.has_bias or (plan.has_mask and not plan.is_plain_causal)
    is_large = plan.n_queries * plan.n_keys > BLOCKS.sdpa_mask_logits
    return plan.is_differentiated and materializes_mask and is_large and plan.device.type == "cpu"


def _transformations() -> tuple[str, ...]:
    """The transformations around a call in a graph: Vmap, Grad and Jvp of torch.func; forward mode."""
    import torch

    from isentropic._attention import torch_operator

    names = torch_operator.transformations()
    # Read in the graph, which is made anew if the level changes.
    return names if torch.autograd.forward_ad._current_level < 0 else (*names, "forward mode")


def _has_kernels(device: Any) -> bool:
    """Whether the Triton kernels may run on a device, while torch.compile traces a call."""
    from isentropic._attention import torch_operator

    return torch_operator.has_kernels(str(device))


def _would_materialize_weights(plan: Plan) -> bool:
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
    is_masked = operands.bias is not None or (plan.has_mask and not plan.is_plain_causal)
    if is_masked:
        return with_batch(plan, _masked_output(plan, finite(plan, operands)))
    operands = repairable(plan, operands)
    query, key, value, scale = kernel_arrays(plan, operands, _kernel_dtype(plan))
    out = _sdpa(plan, query, key, value, scale, is_causal=plan.has_mask)
    return with_batch(plan, with_nonfinite(plan, operands, _with_nan(plan, out, query, key, scale)))


def repairable(plan: Plan, operands: Operands) -> Operands:
    """The operands as they are, if `with_nonfinite` can repair the output; else finite ones."""
    return operands if operands.is_raw and triton.can_repair(plan) else finite(plan, operands)


def with_nonfinite(plan: Plan, operands: Operands, out: Any) -> Any:
    """The output of a kernel (batch, heads, L, width), NaN where a query sees what is not finite."""
    if operands.is_raw:
        triton.repair(plan, operands, out)
    if plan.has_mask and operands.nonfinite is not None:
        out = out + four_axes(plan, plan.xp.astype(interval_nan(plan, operands), out.dtype))
    return out


def with_batch(plan: Plan, out: Any) -> Array:
    """The output of a kernel with the batch axes of the call, and without added features."""
    if len(plan.batch) == 1:
        out = out[0]
    elif len(plan.batch) != 2:
        out = plan.xp.reshape(out, (*plan.batch, *out.shape[-2:]))
    return out if out.shape[-1] == plan.n_values else out[..., : plan.n_values]


@without_autocast
def _sdpa(
    plan: Plan, query: Any, key: Any, value: Any, scale: float, mask: Any = None, *, is_causal: bool
) -> Any:
    # Whether heads are grouped may be symbolic under torch.compile, and the kernel needs a bool.
    is_grouped = True if query.shape[1] != key.shape[1] else False  # noqa: SIM210
    return plan.xp.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=is_grouped
    )


def _masked_output(plan: Plan, operands: Operands) -> Any:
    """The output (batch, heads, L, width) under a bias, or under a mask that is not just causal."""
    xp, mask = plan.xp, operands.mask
    query, key, value, scale = kernel_arrays(plan, operands, _kernel_dtype(plan))
    zero = xp.zeros((), dtype=plan.compute, device=plan.device)

    def attend_rows(rows: Block) -> tuple[Array]:
        # Keys that no query of the block sees are left out.
        columns = reach(plan.frame, mask, rows)
        added: Any = add_bias_and_mask(plan, operands, zero, rows, columns)
        # All queries of the block may see all its keys.
        added = four_axes(plan, xp.astype(added, value.dtype)) if added.ndim else None
        q, k, v = (take(x, b, -2) for x, b in ((query, rows), (key, columns), (value, columns)))
        out = _sdpa(plan, q, k, v, scale, added, is_causal=False)
        if mask is None:
            out = _with_nan(plan, out, q, k, scale)
        elif operands.nonfinite is not None:
            out = xp.where(xp.any(xp.isnan(added), axis=-1, keepdims=True), math.nan, out)
        return (out,)

    # The kernel needs the mask as an array, so it gets that of a block of queries at a time.
    (out,) = map_blocks(xp, attend_rows, plan.n_queries, _rows_of_masks(plan, operands))
    return out


def kernel_arrays(
    plan: Plan, operands: Operands, dtype: Any, multiple: int = 1
) -> tuple[Any, Any, Any, float]:
    """Queries, keys and values (batch, heads, rows, width) of a dtype, and the scale.

    The width is a multiple of `multiple`.
    """
    q, scale = operands.query, operands.multiplier
    # The kernel multiplies the logits of hidden keys, −∞, by its scale. So that must be positive.
    if not isinstance(scale, float) or scale <= 0:
        q, scale = _scaled(plan, q, scale), 1.0
    xp: Any = plan.xp
    arrays: Any = (q, operands.key, operands.values)
    arrays = [x if x.dtype == dtype else xp.astype(x, dtype) for x in arrays]
    arrays = [four_axes(plan, x, expand=True) for x in arrays]
    width = -(-max(plan.head_dim, plan.n_values or 0) // multiple) * multiple
    if not plan.head_dim == plan.n_values == width:  # they have to be equal, and products ignore zeros
        arrays = [xp.nn.functional.pad(x, (0, width - x.shape[-1])) for x in arrays]
    # It needs contiguous rows, too.
    q, k, v = [x if x.stride(-1) == 1 else x.contiguous() for x in arrays]
    return q, k, v, scale


def _scaled(plan: Plan, query: Any, scale: Any) -> Any:
    """The query times the scale, which the compute dtype holds."""
    if query.dtype == plan.compute:
        return query * scale
    is_plain = not (plan.is_differentiated or plan.facts.is_transformed or plan.frame.is_compiling)
    if is_plain and query.dtype == _kernel_dtype(plan) and not isinstance(scale, float):
        # PyTorch multiplies in the wider dtype, and rounds in the same pass over the memory.
        return plan.xp.mul(query, scale, out=query.new_empty(0))
    return plan.xp.astype(query, plan.compute) * scale


def _with_nan(plan: Plan, out: Any, query: Any, key: Any, scale: float) -> Any:
    """The output with NaN for queries whose logits the kernel on a CPU lost.

    If a query sees few keys, and all its logits are NaN or −∞, the kernel takes it for one that sees no
    key, and returns 0. Any other NaN reaches its output.
    """
    xp = plan.xp
    if plan.device.type != "cpu":
        return out
    if plan.is_readable:
        # It may be bfloat16, which NumPy does not have.
        numbers = out if out.dtype == plan.compute else out.to(plan.compute)
        first = numbers.numpy(force=True)[..., 0]
        if np.count_nonzero(first) == first.size:
            return out
    # No product of the query with a key is larger in size, before and after the scale. Maxima do not
    # overflow as sums do, and the compiler makes the same code of them for all lengths.
    largest = xp.max(xp.abs(key), axis=(-2, -1), keepdims=True)
    if largest.shape[1] != query.shape[1]:
        largest = xp.repeat(largest, query.shape[1] // largest.shape[1], axis=1)
    largest = xp.max(xp.abs(query), axis=-1, keepdims=True) * largest * query.shape[-1] * (1 + scale)
    is_lost = ~xp.isfinite(largest) & xp.all(out == 0, axis=-1, keepdims=True)
    return xp.where(is_lost, math.nan, out)


def _rows_of_masks(plan: Plan, operands: Operands) -> int:
    if plan.frame.is_compiling:
        return plan.n_queries
    is_same_for_all = operands.bias is None and (operands.mask is None or not operands.mask.arrays)
    elements = 1 if is_same_for_all else max(1, math.prod(plan.batch))
    return max(16, BLOCKS.sdpa_mask_logits // (elements * plan.n_keys))


def tiles_unsupported_reason(plan: Plan, order: float | None, is_named: bool) -> str | None:
    """The reason why the pass with recomputed tiles does not compute a call, or None."""
    if plan.library != "torch":
        return "the arrays are not PyTorch's"
    if plan.frame.is_compiling:
        if is_exporting():
            return "other programs do not have the operators of this package"
        # PyTorch does not differentiate operators inside torch.func.grad or jvp.
        return None if set(_transformations()) <= {"Vmap"} else TRANSFORMED
    if not plan.is_differentiated:
        return "no gradient is needed"
    rows, columns = tile_shape(plan)
    if plan.n_queries <= rows and plan.n_keys <= columns:
        return "there is a single tile, which PyTorch differentiates by itself"
    if plan.facts.is_transformed:
        return TRANSFORMED
    # The pass writes into plain tensors, for which the operations of such a class mean nothing.
    is_foreign = plan.facts.has_other_operations
    return "the class of some tensor has operations of its own" if is_foreign else None


def tiles_output(plan: Plan, operands: Operands) -> Array:
    """The attention output (..., L, Ev). Its gradient computes the tiles again."""
    return output_of_columns(plan.xp, _state(plan, operands, None))


def tiles_state(plan: Plan, operands: Operands, order: float, relative_to_maximum: bool) -> Sums:
    """The state in columns. Its gradient computes the tiles again instead of storing them."""
    return _state(plan, operands, order)


def _state(plan: Plan, operands: Operands, order: float | None) -> Sums:
    if plan.frame.is_compiling:
        from isentropic._attention import torch_operator

        return torch_operator.state(plan, operands, order)
    tiles = Tiles.of(plan, operands)
    inputs = (tiles.query, *tiles.operands[1:4])
    # PyTorch saves the inputs. The object that it stores beside them must not hold them too, as that
    # would keep their autograd graph alive.
    return Sums(*_recomputed().apply(_with_inputs(tiles, [None] * 4), order, *inputs))


@functools.cache
def _recomputed() -> Any:
    import torch

    class Recomputed(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, tiles: Tiles, order: float | None, *inputs: Any) -> Any:
            state = forward(_with_inputs(tiles, inputs), order)
            ctx.tiles, ctx.order = tiles, order
            ctx.save_for_backward(*inputs, *state)
            ctx.set_materialize_grads(False)
            return tuple(state)

        @staticmethod
        def backward(ctx: Any, *upstream: Any) -> Any:
            saved = ctx.saved_tensors  # read once, as a checkpoint computes them for one reading
            inputs, state, order = saved[:4], Sums(*saved[4:]), ctx.order
            tiles = _with_inputs(ctx.tiles, inputs)
            if is_recorded(upstream):
                # By the generic pass, which stores all tiles, unlike the first derivative.
                return None, None, *recorded_gradients(lambda: tiles.state(order), inputs, upstream)
            wanted = [name for name, x in zip(INPUTS, inputs, strict=True) if wants_gradient(x)]
            gradients = backward(tiles, order, state, Sums(*upstream), wanted)
            return None, None, *map(gradients.get, INPUTS)

    return Recomputed


def _with_inputs(tiles: Tiles, inputs: Sequence[Any]) -> Tiles:
    """The tiles with other `INPUTS`, of which the query is the scaled one."""
    operands = tiles.operands._replace(**dict(zip(INPUTS, inputs, strict=True)))
    return tiles.replaced(query=inputs[0], operands=operands)
