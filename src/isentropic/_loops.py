"""The one loop over tiles. Layer 0.

What is eager runs a Python loop. Under a JAX transformation it is ``lax.scan`` over key blocks
inside ``lax.map`` over query blocks, so that the compiled program does not grow with the number of
tiles, and each block is computed again in the backward pass instead of being kept. Under
``torch.compile`` one block covers everything, so that one graph serves all lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

from isentropic._namespace import Array, is_jax, is_torch

# A block is (start, size). The size is a Python integer; under JAX the start may be traced.
Block = tuple[Any, int]


def fold(
    xp: ModuleType,
    tile: Callable[[Block], Any],
    merge: Callable[[Any, Any], Any],
    length: int,
    block_size: int,
) -> Any:
    """``merge`` of ``tile(block)`` over the blocks of an axis of `length` > 0."""
    if length <= block_size:
        return tile((0, length))
    first = length % block_size or block_size
    total = tile((0, first))

    if _is_traced(xp, total) and length - first > block_size:
        import jax

        # One ragged block came first, so all that remain are alike and can be scanned.
        @jax.checkpoint
        def step(carry: Any, start: Any) -> tuple[Any, None]:
            return merge(carry, tile((start, block_size))), None

        return jax.lax.scan(step, total, xp.arange(first, length, block_size))[0]

    for start in range(first, length, block_size):
        total = merge(total, tile((start, block_size)))
    return total


def map_blocks(
    xp: ModuleType, function: Callable[[Block], tuple[Any, ...]], length: int, block_size: int
) -> tuple[Any, ...]:
    """``function(block)`` over the blocks of an axis, joined along axis −2 of each result."""
    if length <= block_size:
        return function((0, length))
    first = length % block_size or block_size
    parts = [function((0, first))]

    if _is_traced(xp, parts[0]) and length - first > block_size:
        import jax

        @jax.checkpoint
        def rest(start: Any) -> tuple[Any, ...]:
            return function((start, block_size))

        stacked = jax.lax.map(rest, xp.arange(first, length, block_size))
        parts.append(tuple(None if x is None else _unstack(xp, x) for x in stacked))
    else:
        parts += [function((start, block_size)) for start in range(first, length, block_size)]

    columns = zip(*parts, strict=True)
    return tuple(None if xs[0] is None else xp.concat(xs, axis=-2) for xs in columns)


def take(x: Array, block: Block, axis: int) -> Array:
    """The `block` of `x` along `axis` (negative); `x` itself where it is all there or broadcasts."""
    start, size = block
    if x.shape[axis] in (1, size):
        return x
    if isinstance(start, int):
        return x[(..., slice(start, start + size)) + (slice(None),) * (-axis - 1)]

    import jax

    return jax.lax.dynamic_slice_in_dim(cast(Any, x), start, size, axis=axis)


def traces_lengths(xp: ModuleType) -> bool:
    """Whether lengths may be symbolic (``torch.compile``), so that no loop may depend on them."""
    if not is_torch(xp):
        return False
    import torch

    return torch.compiler.is_compiling()


def _is_traced(xp: ModuleType, result: Any) -> bool:
    if not is_jax(xp):
        return False
    import jax

    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(result))


def _unstack(xp: ModuleType, x: Array) -> Array:
    """(blocks, ..., rows, columns) → (..., blocks · rows, columns)."""
    blocks, *batch, rows, columns = x.shape
    return xp.reshape(xp.moveaxis(x, 0, -3), (*batch, blocks * rows, columns))
