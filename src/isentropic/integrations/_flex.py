"""Block masks for PyTorch's `flex_attention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from isentropic._checks import counts, value_error, with_name_hints
from isentropic._loops import Block
from isentropic._namespace import Array, common_device, namespace
from isentropic.masks import (
    Frame,
    Mask,
    _And,
    _Band,
    _Not,
    _Or,
    _Packed,
    _Padding,
    _Segments,
    as_mask,
)

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# Whether a query sees a key: a function of the indices of sequence, head, query and key.
MaskMod = Callable[[Any, Any, Any, Any], Any]


@with_name_hints(
    mask_mod="mask", B=None, H=None, Q_LEN="n_queries", KV_LEN="n_keys", BLOCK_SIZE="block_size"
)
def to_block_mask(
    mask: Mask | Array, n_queries: int, n_keys: int, *, device: Any = None, block_size: int = 128
) -> BlockMask:
    """The block mask of a mask, for `torch.nn.attention.flex_attention`.

    Parameters
    ----------
    mask : Mask or boolean tensor
        A mask of `isentropic.masks`, or a tensor broadcastable to (B, H, L, S), True = attend. The
        arrays of a mask are tensors.
    n_queries, n_keys : int
        L and S. The default offset of `causal` and `window`, and the side of `padding`, depend on them.
    device : torch.device, optional
        By default that of the tensors in the mask. If it has none, the accelerator of the machine or
        else the CPU, as in PyTorch.
    block_size : int
        The number of queries and of keys in a block.

    Returns
    -------
    torch.nn.attention.flex_attention.BlockMask
        It has the batch and head axes of the tensors in the mask, of length 1 where these do not
        differ. Its ``mask_mod`` is the mask as a function, for `and_masks` and `or_masks` of PyTorch.

    Raises
    ------
    TypeError
        If `mask` is neither of these, or has arrays that are not tensors, or if a number is not an
        integer.
    ValueError
        If the arrays of the mask do not fit, or if a number is less than 1.

    Notes
    -----
    It equals what PyTorch's ``create_block_mask`` makes of the ``mask_mod``. That forms the whole mask,
    (B, H, L, S), if it is not compiled. Here one row of blocks is formed at a time.

    Examples
    --------
    >>> import torch
    >>> from torch.nn.attention.flex_attention import flex_attention
    >>> import isentropic as it
    >>> from isentropic.integrations.torch import to_block_mask
    >>> query, key, value = torch.randn(3, 2, 4, 128, 16)
    >>> mask = it.masks.causal() & it.masks.padding(torch.tensor([[100], [128]]))
    >>> compiled = torch.compile(flex_attention, backend="eager")  # in production without `backend`
    >>> out = compiled(query, key, value, block_mask=to_block_mask(mask, 128, 128))
    >>> torch.testing.assert_close(out, it.attention(query, key, value, mask=mask, law=None))
    """
    from torch.nn.attention.flex_attention import BlockMask

    (block_size,) = counts(block_size=block_size)
    mask = as_mask(mask)
    frame, batch = _checked(mask, n_queries, n_keys, device)
    seen = torch.stack(
        [
            _seen_per_block(mask, frame, (start, min(block_size, n_queries - start)), batch, block_size)
            for start in range(0, n_queries, block_size)
        ],
        dim=-2,
    )
    # A ragged block at the end is never full, as in PyTorch.
    is_full = seen == block_size**2
    return BlockMask.from_kv_blocks(
        *_ordered((seen > 0) & ~is_full), *_ordered(is_full),
        BLOCK_SIZE=block_size, mask_mod=_mask_mod(mask, frame), seq_lengths=(n_queries, n_keys),
    )  # fmt: skip


def _checked(
    mask: Mask, n_queries: int, n_keys: int, device: Any = None
) -> tuple[Frame, tuple[int, ...]]:
    """Check the mask. Return what it is evaluated for, and the lengths of its batch and head axes."""
    n_queries, n_keys = counts(n_queries=n_queries, n_keys=n_keys)
    group = ("mask", mask.arrays)
    # A mask of numbers has no library, and one of another library is refused.
    xp = namespace(group, tensor=torch.empty(0))
    if device is None and mask.arrays:
        device = common_device(group)
    tensor = torch.empty(0, device=device or torch.accelerator.current_accelerator() or "cpu")
    frame = Frame(xp, common_device(group, device=tensor), n_queries, n_keys)
    mask.check(None, n_queries, n_keys)
    try:
        # One element tells to which batch axes all arrays of the mask broadcast.
        axes = mask.block(frame, (0, 1), (0, 1)).shape[:-2]
    except RuntimeError:
        shapes = ", ".join(str(tuple(x.shape)) for x in mask.arrays)
        raise value_error("mask", "have arrays that broadcast with each other", shapes) from None
    if len(axes) > 2:
        raise value_error("mask", "have at most a batch and a head axis before L and S", axes)
    batch = (1,) * (2 - len(axes)) + tuple(axes)
    mask.check(batch, n_queries, n_keys)
    return frame, batch


def _seen_per_block(
    mask: Mask, frame: Frame, rows: Block, batch: tuple[int, ...], block_size: int
) -> Any:
    """The number of visible pairs in each block of some rows, (B, H, number of blocks)."""
    seen: Any = mask.block(frame, rows, (0, frame.n_keys))
    seen = pad(seen.expand(*batch, rows[1], frame.n_keys), (0, -frame.n_keys % block_size))
    return seen.unflatten(-1, (-1, block_size)).sum((-3, -1), dtype=torch.int32)


def _ordered(blocks: Any) -> tuple[Any, Any]:
    """The number of True blocks in each row, and the indices of all blocks, those of the True first."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1).int(), order.int()


# The functions below close over nothing but numbers, tensors, and functions of the same kind. PyTorch
# lifts these out of the closures, so it does not compile again when the tensors change.


def _mask_mod(mask: Mask, frame: Frame) -> MaskMod:
    from torch.nn.attention.flex_attention import and_masks, or_masks

    shift = frame.n_keys - frame.n_queries
    match mask:
        case _And():
            return and_masks(_mask_mod(mask.first, frame), _mask_mod(mask.second, frame))
        case _Or():
            return or_masks(_mask_mod(mask.first, frame), _mask_mod(mask.second, frame))
        case _Not():
            hidden = _mask_mod(mask.hidden, frame)
            return lambda b, h, q_idx, kv_idx: ~hidden(b, h, q_idx, kv_idx)
        case _Band():
            return _band(mask, shift)
        case _Padding():
            return _padding(mask, frame.n_keys)
        case _Segments():
            return _segments(mask, shift)
        case _Packed():
            first, end = mask.interval(frame, (0, frame.n_queries))
            return lambda b, h, q_idx, kv_idx: (kv_idx >= first[q_idx]) & (kv_idx < end[q_idx])
    # A boolean array, or a mask of the user's own, of which one is made.
    visible = mask.block(frame, (0, frame.n_queries), (0, frame.n_keys))
    element = _elements(visible)
    return lambda b, h, q_idx, kv_idx: element(b, h, q_idx, kv_idx)


def _band(mask: _Band, shift: int) -> MaskMod:
    from torch.nn.attention.flex_attention import and_masks

    left, right = mask.left, mask.right
    offset = _elements(shift if mask.offset is None else mask.offset)
    bounds = []
    if left is not None:
        bounds.append(lambda b, h, q_idx, kv_idx: kv_idx >= q_idx + offset(b, h) - left)
    if right is not None:
        bounds.append(lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + offset(b, h) + right)
    # Without bounds it is the mask that shows all keys.
    return and_masks(*bounds)


def _padding(mask: _Padding, n_keys: int) -> MaskMod:
    lengths = _elements(mask.lengths)
    if mask.side == "left":
        return lambda b, h, q_idx, kv_idx: kv_idx + lengths(b, h) >= n_keys
    return lambda b, h, q_idx, kv_idx: kv_idx < lengths(b, h)


def _segments(mask: _Segments, shift: int) -> MaskMod:
    ids = _elements(mask.ids)
    if mask.query_ids is None:
        return lambda b, h, q_idx, kv_idx: ids(b, h, q_idx + shift) == ids(b, h, kv_idx)
    query_ids = _elements(mask.query_ids)
    return lambda b, h, q_idx, kv_idx: query_ids(b, h, q_idx) == ids(b, h, kv_idx)


def _elements(x: Any) -> Callable[..., Any]:
    """A function from indices of the broadcast axes to an element of `x`, or to the number `x`."""
    if isinstance(x, int) or all(size == 1 for size in x.shape):
        number = x if isinstance(x, int) else x.reshape(())
        return lambda *indices: number
    # Counted from the end, since leading axes may be missing.
    axes = tuple(axis - x.ndim for axis, size in enumerate(x.shape) if size > 1)
    squeezed = x.squeeze()
    return lambda *indices: squeezed[tuple(indices[axis] for axis in axes)]
