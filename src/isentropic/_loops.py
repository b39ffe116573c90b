"""The loop over tiles, for every library.

Eager calls run a Python loop. Under a JAX transformation the loop is ``lax.scan`` over key blocks
inside ``lax.map`` over query blocks. So the size of the compiled program does not depend on the number
of tiles, and the backward pass computes each block again instead of storing it. Under
``torch.compile``, and where ``jax.export`` has a symbol for a length, one block covers everything, so
that one graph serves all lengths.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import numpy as np

from isentropic._namespace import (
    Array,
    common_device,
    imported_torch,
    is_cupy,
    is_jax,
    is_numpy,
    is_symbolic,
    is_torch,
)
from isentropic._rows import Rows
from isentropic._threads import run

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps")


class BlockSizes:
    """How much is computed at a time. Results depend on these sizes only by rounding."""

    columns: int = 512  # keys of a tile
    tile: int = 2**20  # logits of a tile over all batch and head axes; bounds the memory of a call
    rows: int = 16  # the fewest queries of a tile; products of fewer rows are slow
    count_tile: int = 1024  # queries and keys of a tile whose visible keys are counted
    cache_numbers: int = 2**18  # numbers that fit in a processor's cache, intermediates included
    jax_cache_numbers: int = 2**15  # likewise for JAX, which makes more intermediates
    chunk: int = 128  # queries and keys of a chunk of causal linear attention
    pairs: int = 2**19  # numbers in the vectors whose distances are compared
    numpy_pairs: int = 2**15  # likewise for NumPy, so that all intermediates fit in a cache
    sdpa_mask_logits: int = 2**22  # logits of a block whose mask PyTorch's kernel gets as an array
    torch_masked_rows: int = 256  # the most queries of a tile under a mask, with gradients
    numpy_rows: int = 512  # a tile of 1 MB: threads rarely wait, and it still fits in a core's cache
    # Fast operations are short, and after each one a thread may wait for Python's lock. With so many
    # rows they are longer, and there are fewer of them.
    numpy_large_rows: int = 2048
    numpy_columns: int = 512
    numpy_min_part: int = 2**12  # the fewest keys of a part, if threads share the keys
    # Calls with fewer logits are not faster with threads and one batch element at a time.
    numpy_min_head_logits: int = 2**17
    numpy_min_logits: int = 2**20  # of all heads
    numpy_masked_logits: int = 2**25  # from here on most outputs under masks are faster than by PyTorch
    jax_rows: int = 1024  # a tile of one head on a CPU: large, as XLA splits each operation
    jax_columns: int = 1024
    jax_masked: int = 512  # the most of both under a mask: of smaller tiles more are skipped
    jax_min_length: int = 256  # with fewer queries or keys all heads at once are faster
    numpy_untiled_logits: int = 2**18  # calls with at most this many logits are faster without tiles
    sparse_numbers: int = 2**22  # entries of a sparse matrix that are made dense at a time


# The tests make them small, so that every pass has several blocks, with ragged ends.
BLOCKS = BlockSizes()

# A block is (start, size). The size is a Python integer; under JAX the start may be traced.
Block = tuple[Any, int]


def blocks(first: int, end: int, size: int) -> list[Block]:
    """Split a part of an axis into blocks. Only the first one may be shorter than `size`."""
    second = min(first + ((end - first) % size or size), end)
    return [(first, second - first), *((start, size) for start in range(second, end, size))]


def fold(
    xp: ModuleType,
    step: Callable[[Any, Block], Any],
    length: int,
    block_size: int,
    reach: tuple[Any, Any] | None = None,
) -> Any:
    """The last ``total = step(total, block)`` over the blocks of an axis of `length` > 0.

    The first total is None. Blocks outside of the `reach` (first, end) may be skipped. At least one
    block is computed.
    """
    first, end = (0, length) if reach is None else reach
    if isinstance(first, int) and isinstance(end, int):
        (first, end), reach = clip_reach((first, end), length), None
    else:
        first, end, reach = 0, length, (first, end)
    if is_symbolic(length) or end - first <= block_size:
        return step(None, (first, end - first))
    head, *tail = blocks(first, end, block_size)
    total = step(None, head)

    if _is_traced(xp, total) and len(tail) > 1:
        import jax

        @jax.checkpoint
        def scan_step(carry: Any, start: Any) -> tuple[Any, None]:
            def stepped() -> Any:
                return step(carry, (start, block_size))

            if reach is None:
                return stepped(), None
            overlaps = (start < reach[1]) & (start + block_size > reach[0])
            return jax.lax.cond(overlaps, stepped, lambda: carry), None

        return jax.lax.scan(scan_step, total, xp.arange(sum(head), end, block_size))[0]

    for block in tail:
        total = step(total, block)
    return total


def clip_reach(reach: tuple[int, int], length: int) -> tuple[int, int]:
    """Clip a part (first, end) to an axis of `length` > 0. At least one entry remains."""
    end = max(1, min(reach[1], length))
    return max(0, min(reach[0], end - 1)), end


def map_blocks(
    xp: ModuleType,
    function: Callable[[Block], tuple[Any, ...]],
    length: int,
    block_size: int,
    *,
    in_threads: bool = False,
) -> tuple[Any, ...]:
    """``function(block)`` over the blocks of an axis, joined along axis −2 of each result.

    With NumPy and `in_threads` the blocks run in threads. That helps functions that are not limited by
    memory bandwidth.
    """
    if is_symbolic(length) or length <= block_size:
        return function((0, length))
    parts = blocks(0, length, block_size)
    if is_numpy(xp):
        return _map_into_result(xp, function, parts, in_threads)
    head, first = function(parts[0]), parts[0][1]

    if _is_traced(xp, head) and len(parts) > 2:
        import jax

        @jax.checkpoint
        def rest(start: Any) -> tuple[Any, ...]:
            return function((start, block_size))

        # Without a ragged block `lax.map` covers all blocks. XLA drops the unused head.
        ragged = first < block_size
        stacked = jax.lax.map(rest, xp.arange(first if ragged else 0, length, block_size))
        tail = tuple(None if x is None else _unstack(xp, x) for x in stacked)
        return _join(xp, [head, tail]) if ragged else tail

    return _join(xp, [head, *(function(block) for block in parts[1:])])


def recomputed(xp: ModuleType, function: Callable[[Block], Any]) -> Callable[[Block], Any]:
    """A function of a block that PyTorch computes again for a gradient, instead of storing it.

    The loops of JAX do that by themselves.
    """
    if not is_torch(xp) or is_compiling(xp) or is_watched(imported_torch()):
        return function  # transformations have no way to do that
    checkpoint = importlib.import_module("torch.utils.checkpoint").checkpoint
    return functools.partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)


def _map_into_result(
    xp: ModuleType,
    function: Callable[[Block], tuple[Any, ...]],
    blocks: list[Block],
    in_threads: bool,
) -> tuple[Any, ...]:
    """`map_blocks` for NumPy: each block is written into the result as soon as it is computed."""
    import threading

    keep_freed_memory()
    results: list[tuple[Any, ...]] = []
    lock = threading.Lock()
    length = sum(blocks[-1])

    def write(block: Block) -> None:
        parts = function(block)
        with lock:
            # Only a computed block tells the shapes of the results.
            if not results:
                shapes = [None if x is None else (*x.shape[:-2], length, x.shape[-1]) for x in parts]
                pairs = zip(shapes, parts, strict=True)
                results.append(tuple(s and xp.empty(s, dtype=x.dtype) for s, x in pairs))
        for result, part in zip(results[0], parts, strict=True):
            if result is not None:
                result[..., block[0] : sum(block), :] = part

    if in_threads:
        run(write, blocks)
    else:
        for block in blocks:
            write(block)
    return results[0]


@functools.cache
def keep_freed_memory() -> None:
    """Let the arrays of a block reuse the memory of those of the previous block.

    glibc returns freed memory of the size of a block to the system, and fresh pages cost more than the
    work on them. After a larger array has been freed, glibc keeps memory of this size.
    """
    np.empty(2**24, dtype=np.uint8)


def scan_blocks(
    xp: ModuleType,
    step: Callable[[Any, Block], tuple[Any, Array]],
    carry: Any,
    length: int,
    block_size: int,
) -> Array:
    """The outputs of ``carry, output = step(carry, block)`` over the blocks of an axis of length > 0.

    The outputs are joined along axis −2. The first step may change the shapes of the carry; later
    steps must keep them.
    """
    if is_symbolic(length):
        return step(carry, (0, length))[1]
    # The ragged block comes first, so that all blocks of a scan have one size.
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


def iterate(
    xp: ModuleType,
    step: Callable[[Any], Any],
    carry: Any,
    count: int,
    is_settled: Callable[[Any], Array],
) -> Any:
    """Apply ``carry = step(carry)`` `count` times, or until `is_settled` if its value can be read.

    The carry is a tuple of arrays whose shapes and dtypes do not change.
    """
    if _is_traced(xp, carry):
        import jax

        return jax.lax.fori_loop(0, count, lambda _, carry: step(carry), carry)
    for _ in range(count):
        carry = step(carry)
        if is_readable(xp, carry[0]) and bool(is_settled(carry)):
            break
    return carry


def without_gradient(xp: ModuleType, x: Any) -> Any:
    """`x` as a constant for differentiation."""
    if isinstance(x, Rows):
        return x.without_gradient()
    if is_torch(xp):
        return x.detach()
    if is_jax(xp):
        import jax

        return jax.lax.stop_gradient(x)
    return x


def without_autocast(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Decorate a function of PyTorch's tensors by autocast switched off.

    Autocast rounds the operands of products to half precision. Functions that compute products in other
    ways than `_products.product` need this.
    """

    @functools.wraps(function)
    def exact(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        device = autocast_device()
        if device is None:
            return function(*args, **kwargs)
        with imported_torch().autocast(device, enabled=False):
            return exact(*args, **kwargs)

    return exact


def autocast_device() -> str | None:
    """A kind of devices for which PyTorch's autocast is switched on, or None."""
    torch = imported_torch()
    if not torch._C._is_any_autocast_enabled():
        return None
    return next((kind for kind in _AUTOCAST_DEVICES if torch.is_autocast_enabled(kind)), None)


def largest(xp: ModuleType, x: Array) -> Array:
    """The largest number of the last axis, which is kept. It is differentiable."""
    return _largest_in_jax()(x) if is_jax(xp) else xp.max(x, axis=-1, keepdims=True)


@functools.cache
def _largest_in_jax() -> Any:
    """`largest`, whose derivative is that at the position of one of the largest numbers.

    JAX divides the derivative by the number of entries that equal the maximum. XLA may compute the same
    entry twice with other roundings. Then no entry equals the maximum, and the derivative is NaN.
    """
    import jax

    xp = jax.numpy

    @jax.custom_jvp
    def row_maximum(x: Any) -> Any:
        return xp.max(x, axis=-1, keepdims=True)

    @row_maximum.defjvp
    def derivative(primals: Any, tangents: Any) -> Any:
        (x,), (tangent,) = primals, tangents
        position = xp.argmax(x, axis=-1, keepdims=True)
        return row_maximum(x), xp.take_along_axis(tangent, position, axis=-1)

    return row_maximum


def compiled(xp: ModuleType, function: Callable[..., Any], *arrays: Array) -> Any:
    """``function(xp, *arrays)``, which JAX compiles as one program.

    Outside of `jax.jit` it would compile each operation by itself, which takes longer.
    """
    return _jitted(function)(*arrays) if is_jax(xp) else function(xp, *arrays)


@functools.cache
def _jitted(function: Callable[..., Any]) -> Any:
    import jax

    return jax.jit(functools.partial(function, jax.numpy))


def map_rows(
    xp: ModuleType,
    function: Callable[[Array, Array | None], Array],
    x: Array,
    *,
    width: int,
    row_size: int,
    out: Any = None,
) -> Array:
    """``function(x, None)``, which maps each row of a matrix, in blocks of rows if that is faster.

    It is faster with NumPy and with JAX on a CPU: the intermediates of a block stay in the cache. The
    result has rows of the size `width`, and the dtype of `x`. `row_size` is the number of intermediates
    that the function makes of a row. ``function(rows, out)`` may write the result into `out`, which is
    None except with NumPy, and return it. That saves a copy. The caller may give NumPy an array `out`
    for the whole result.
    """
    if is_symbolic(row_size) or not _blocks_are_faster(xp, x):
        return function(x, None)
    rows = x.shape[0]
    numbers = BLOCKS.jax_cache_numbers if is_jax(xp) else BLOCKS.cache_numbers
    block = max(1, numbers // max(1, row_size))
    if not is_numpy(xp):
        return map_blocks(xp, lambda b: (function(take(x, b, -2), None),), rows, block)[0]
    if rows <= block and out is None:
        return function(x, None)

    keep_freed_memory()
    result = xp.empty((rows, width), dtype=x.dtype, device=common_device(x=x)) if out is None else out

    def write(block: Block) -> None:
        wanted = take(result, block, -2)
        part = function(take(x, block, -2), wanted)
        if part is not wanted:
            wanted[...] = part

    run(write, blocks(0, rows, block))
    return result


def map_chunks(x: Any, function: Callable[[Any], Any], axis: int, size: int) -> Any:
    """Apply a `function` that works along `axis` to a Dask array. `axis` then has `size` entries.

    The result is lazy and is computed chunk by chunk. An axis that is split into several chunks is
    gathered first.
    """
    if x.numblocks[axis] > 1:
        # Smaller chunks along the other axes keep the size of a chunk, if the sizes are known.
        other = "auto" if all(n == n for n in x.shape) else None
        x = x.rechunk({i: -1 if i == axis else other for i in range(x.ndim)})
    chunks = (*x.chunks[:axis], (size,), *x.chunks[axis + 1 :])
    return x.map_blocks(function, chunks=chunks, dtype=x.dtype, meta=x._meta)


def take(x: Any, block: Block, axis: int) -> Any:
    """The `block` of `x` along `axis` (negative), or `x` if the block covers it or it broadcasts."""
    start, size = block
    if isinstance(x, Rows):
        return x.block(block)
    if x.shape[axis] in (1, size):
        return x
    if isinstance(start, int):
        return x[(..., slice(start, start + size)) + (slice(None),) * (-axis - 1)]

    import jax

    return jax.lax.dynamic_slice_in_dim(x, start, size, axis=axis)


def smaller(xp: ModuleType, a: Any, b: Any) -> Any:
    """The smaller of two numbers, which may be traced."""
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else xp.minimum(a, b)


def larger(xp: ModuleType, a: Any, b: Any) -> Any:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else xp.maximum(a, b)


def is_compiling(xp: ModuleType, *sizes: Any) -> bool:
    """Whether a graph of the call is made for several lengths. Then no loop may depend on them.

    torch.compile makes one. So do other tracers of PyTorch, and JAX, if one of the `sizes` is symbolic.
    """
    if is_jax(xp):
        return any(map(is_symbolic, sizes))
    if not is_torch(xp):
        return False
    import torch

    return torch.compiler.is_compiling() or any(isinstance(n, torch.SymInt) for n in sizes)


def is_exporting() -> bool:
    """Whether PyTorch exports the call. Before 2.7 it does not tell."""
    compiler = imported_torch().compiler
    return hasattr(compiler, "is_exporting") and compiler.is_exporting()


def is_readable(xp: ModuleType, x: Any) -> bool:
    """Whether the values of `x` can be read: they are in the host's memory and are not traced."""
    if is_numpy(xp):
        return True
    if is_torch(xp):
        return is_plain(xp, x) and x.device.type == "cpu"
    return is_jax(xp) and is_plain(xp, x) and _is_on_one(x, "cpu")


def is_plain(xp: ModuleType, *arrays: Any) -> bool:
    """Whether arrays are the library's own, with values, and nothing traces or transforms them."""
    if not is_torch(xp):
        return not _is_traced(xp, arrays)
    import torch

    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False  # a mode is one of tracing, fake tensors, or counting
    if not all(type(x) in (torch.Tensor, torch.nn.Parameter) for x in arrays):
        return False
    if any(torch._C._functorch.is_legacy_batchedtensor(x) for x in arrays):
        return False  # batched gradients of torch.autograd
    return not (_within_transformation(torch) and any(is_transformed(xp, x) for x in arrays))


def _is_on_one(x: Any, platform: str) -> bool:
    """Whether a JAX array is on a single device, of this platform."""
    return len(x.devices()) == 1 and next(iter(x.devices())).platform == platform


def runs_kernels(xp: ModuleType, x: Any) -> bool:
    """Whether Triton kernels can be launched for `x`: it is on a GPU, and Triton is installed.

    JAX cannot divide such a call between devices.
    """
    if is_torch(xp):
        return x.device.type == "cuda" and is_installed("triton") and is_plain(xp, x)
    if is_jax(xp):
        import jax

        if jax.default_backend() != "gpu" or not is_installed("jax_triton"):
            return False
        return jax.device_count() == 1 if _is_traced(xp, x) else _is_on_one(x, "gpu")
    return is_cupy(xp) and is_installed("triton")


@functools.cache
def is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def outside_of_traces(xp: ModuleType) -> contextlib.AbstractContextManager[Any]:
    """A context in which JAX computes operations on concrete arrays at once, also within a trace."""
    if is_jax(xp):
        import jax

        context = contextlib.ExitStack()
        context.enter_context(jax.ensure_compile_time_eval())
        context.enter_context(jax.transfer_guard("allow"))
        return context
    return contextlib.nullcontext()


def is_known_true(xp: ModuleType, condition: Any) -> bool:
    """Whether a 0-d condition is known to be true: its value can be read, and it is true.

    `is_readable` must be asked about the condition itself. Inside a JAX trace every operation is
    traced, including operations on arrays that can be read.
    """
    return is_readable(xp, condition) and bool(condition)


def is_transformed(xp: ModuleType, x: Any) -> bool:
    """Whether torch.func transforms a tensor, or it has a forward-mode derivative."""
    if not is_torch(xp):
        return False
    import torch

    if torch.compiler.is_compiling() or not _within_transformation(torch):
        return False
    within = torch._C._functorch.maybe_current_level() is not None
    return within or torch.autograd.forward_ad.unpack_dual(x).tangent is not None


def _within_transformation(torch: Any) -> bool:
    """Whether the call runs inside a transformation of torch.func or a forward-mode level."""
    level = torch._C._functorch.maybe_current_level()
    return level is not None or torch.autograd.forward_ad._current_level >= 0


def is_watched(torch: Any) -> bool:
    """Whether PyTorch transforms the call, or a mode of PyTorch sees its operations."""
    return torch._C._len_torch_dispatch_stack() > 0 or _within_transformation(torch)


def is_differentiated(xp: ModuleType, x: Any) -> bool:
    """Whether PyTorch records the operations on `x` for a gradient."""
    if not is_torch(xp):
        return False
    import torch

    return torch.is_grad_enabled() and x.requires_grad


def is_differentiable(xp: ModuleType, *arrays: Any) -> bool:
    """Whether a derivative with respect to the arrays, or to those in pytrees, may be taken."""
    arrays = tuple(part for x in arrays for part in getattr(x, "arrays", (x,)))
    if is_torch(xp):
        import torch

        if torch.compiler.is_compiling():
            return True
        return any(is_differentiated(xp, x) or is_transformed(xp, x) for x in arrays)
    return _is_traced(xp, arrays)


def jax_array(x: Any, device: Any) -> Any:
    """A NumPy array as a JAX array, which takes over its memory if the address is divisible by 64."""
    import jax

    # Explicit, so that `jax.transfer_guard` allows it. `asarray` takes up to five times as long.
    return jax.device_put(x, device, may_alias=True)


def is_gpu(xp: ModuleType, device: Any) -> bool:
    """Whether `device` is a GPU or another accelerator. It is None inside a JAX trace."""
    if is_jax(xp):
        import jax

        return jax.default_backend() != "cpu"
    return is_cupy(xp) or (is_torch(xp) and device.type != "cpu")


def logits_of_a_tile(xp: ModuleType, device: Any) -> int:
    """The number of logits of a tile, over all batch and head axes."""
    if is_numpy(xp):  # each thread holds several arrays of the size of a tile
        return BLOCKS.tile // 4
    if is_gpu(xp, device):  # small tiles leave a GPU idle
        return BLOCKS.tile * 32
    if is_torch(xp):  # a tile and what is computed from it then stay in the cache
        return BLOCKS.tile // 2
    return BLOCKS.tile


def _is_traced(xp: ModuleType, result: Any) -> bool:
    if not is_jax(xp):
        return False
    import jax

    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(result))


def _blocks_are_faster(xp: ModuleType, x: Array) -> bool:
    return not is_gpu(xp, None) if _is_traced(xp, x) else is_numpy(xp)


def _join(xp: ModuleType, parts: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    columns = zip(*parts, strict=True)
    return tuple(None if xs[0] is None else xp.concat(xs, axis=-2) for xs in columns)


def _unstack(xp: ModuleType, x: Array) -> Array:
    """(blocks, ..., rows, columns) → (..., blocks · rows, columns)."""
    blocks, *batch, rows, columns = x.shape
    return xp.reshape(xp.moveaxis(x, 0, -3), (*batch, blocks * rows, columns))
