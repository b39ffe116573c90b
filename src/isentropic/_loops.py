"""The one loop over tiles. Layer 0.

What is eager runs a Python loop. Under a JAX transformation it is ``lax.scan`` over key blocks
inside ``lax.map`` over query blocks, so that the compiled program does not grow with the number of
tiles, and each block is computed again in the backward pass instead of being kept. Under
``torch.compile`` one block covers everything, so that one graph serves all lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from types import ModuleType
from typing import Any, cast

from isentropic._namespace import Array, is_jax, is_numpy, is_torch

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
    head = function((0, first))

    if _is_traced(xp, head) and length - first > block_size:
        import jax

        @jax.checkpoint
        def rest(start: Any) -> tuple[Any, ...]:
            return function((start, block_size))

        # Without a ragged block nothing is left to join: the head, unused, is not computed.
        ragged = first < block_size
        stacked = jax.lax.map(rest, xp.arange(first if ragged else 0, length, block_size))
        tail = tuple(None if x is None else _unstack(xp, x) for x in stacked)
        return _join(xp, [head, tail]) if ragged else tail

    blocks = [(start, block_size) for start in range(first, length, block_size)]
    if not is_numpy(xp):
        return _join(xp, [head, *(function(block) for block in blocks)])
    results = tuple(
        None if x is None else xp.empty((*x.shape[:-2], length, x.shape[-1]), dtype=x.dtype)
        for x in head
    )
    for (start, size), parts in chain([((0, first), head)], ((b, function(b)) for b in blocks)):
        for result, part in zip(results, parts, strict=True):
            if result is not None:
                result[..., start : start + size, :] = part
    return results


def scan_blocks(
    xp: ModuleType,
    step: Callable[[Any, Block], tuple[Any, Array]],
    carry: Any,
    length: int,
    block_size: int,
) -> Array:
    """The outputs of ``carry, output = step(carry, block)`` over the blocks of an axis of length > 0.

    They are joined along axis −2. The carry keeps its shapes from the first step on.
    """
    first = min(length, length % block_size or block_size)
    carry, output = step(carry, (0, first))
    outputs = [output]

    if _is_traced(xp, output) and length - first > block_size:
        import jax

        @jax.checkpoint
        def rest(carry: Any, start: Any) -> tuple[Any, Any]:
            return step(carry, (start, block_size))

        _, stacked = jax.lax.scan(rest, carry, xp.arange(first, length, block_size))
        return xp.concat((output, _unstack(xp, stacked)), axis=-2)

    for start in range(first, length, block_size):
        carry, output = step(carry, (start, block_size))
        outputs.append(output)
    return outputs[0] if len(outputs) == 1 else xp.concat(outputs, axis=-2)


# Elements of a block that stays in the processor's cache with what is made of it.
_CACHED = 2**18


def map_rows(
    xp: ModuleType, function: Callable[[Array], Array], x: Array, row_size: int | None = None
) -> Array:
    """A `function` of the rows of a matrix, in blocks of rows where that is faster.

    It is with NumPy and with JAX on a processor: what several passes over the whole matrix would
    carry through the memory stays in the cache. `row_size` counts what `function` makes of a row.
    """
    rows = x.shape[-2]
    block = max(1, _CACHED // max(1, row_size or x.shape[-1])) if _pays_in_blocks(xp, x) else rows
    return map_blocks(xp, lambda b: (function(take(x, b, -2)),), rows, block)[0]


def map_chunks(x: Any, function: Callable[[Any], Any], axis: int, size: int) -> Any:
    """A `function` of a Dask array that works along `axis` and leaves it with `size` entries.

    Lazy, and chunk by chunk; an axis that is spread over several chunks is gathered first.
    """
    if x.numblocks[axis] > 1:
        # Smaller chunks along the other axes make up for it, where their sizes are known.
        other = "auto" if all(n == n for n in x.shape) else None
        x = x.rechunk({i: -1 if i == axis else other for i in range(x.ndim)})
    chunks = (*x.chunks[:axis], (size,), *x.chunks[axis + 1 :])
    return x.map_blocks(function, chunks=chunks, dtype=x.dtype, meta=x._meta)


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


def _pays_in_blocks(xp: ModuleType, x: Array) -> bool:
    if not _is_traced(xp, x):
        return is_numpy(xp)
    import jax

    return jax.default_backend() == "cpu"


def _join(xp: ModuleType, parts: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    columns = zip(*parts, strict=True)
    return tuple(None if xs[0] is None else xp.concat(xs, axis=-2) for xs in columns)


def _unstack(xp: ModuleType, x: Array) -> Array:
    """(blocks, ..., rows, columns) → (..., blocks · rows, columns)."""
    blocks, *batch, rows, columns = x.shape
    return xp.reshape(xp.moveaxis(x, 0, -3), (*batch, blocks * rows, columns))
