"""What a query sees in a call of an attention function by transformers.

transformers makes other masks for each kind of implementation. This is the one place that reads them:
for the implementation "isentropic", for the n of laws in the others, and for what listens to calls.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_mask
from transformers import AttentionMaskInterface
from transformers.masking_utils import (
    eager_mask,
    flash_attention_mask,
    flex_attention_mask,
    sdpa_mask,
)

from isentropic._checks import value_error
from isentropic._loops import Block
from isentropic._namespace import Array
from isentropic.integrations._observe import Call, visible_counts
from isentropic.integrations.huggingface._layer_law import law_of
from isentropic.integrations.huggingface._modules import positions_from_1
from isentropic.masks import Frame, Mask, causal, packed, window

NAME = "isentropic"  # the name of our implementation
# Arguments with which sparse attention chooses the keys.
SPARSE = ("indices", "block_indices")
# Arguments with which some models ask for attention that the mask and the logits do not determine.
_UNSUPPORTED = ("cache", *SPARSE, "sinks")
# FlashAttention needs all of them.
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def call_of(
    name: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> Call:
    """A call of an implementation by transformers, in the arguments of `isentropic.attention`."""
    for refused in _UNSUPPORTED:
        if kwargs.get(refused) is not None:
            must = "be None: isentropic does not support it (the attention implementation 'eager' may)"
            raise value_error(refused, must, type(kwargs[refused]).__name__)
    bias = position_bias
    if isinstance(mask, torch.Tensor) and mask.is_floating_point():
        bias = mask if bias is None else bias + mask
    law, count = law_of(module)
    options: dict[str, Any] = {
        "mask": _visible(name, module, query, key, mask, kwargs), "bias": bias, "scale": scaling,
        "softcap": softcap, "enable_gqa": True,
    }  # fmt: skip
    if law is not None and count == "positions":
        options["n_keys"] = positions_from_1(query, kwargs.get("position_ids"))
    return Call(query, key, law, options, s_aux)


def with_tokens(call: Call) -> Call:
    """The call with what it says of padding and of the first keys, for statistics."""
    visible, n_queries, n_keys = call.options["mask"], call.query.shape[2], call.key.shape[2]
    if isinstance(visible, _Within):
        counted = visible.number[:, :, 0] >= 0 if n_queries == n_keys else None
        return call._replace(counted=counted, is_first=visible.is_first())
    if isinstance(visible, _InBlocks):
        visible = visible.block(None, (0, n_queries), (0, n_keys))
        call = call._replace(options=call.options | {"mask": visible})
    if not isinstance(visible, torch.Tensor):
        return call
    visible = visible.expand(*visible.shape[:2], n_queries, n_keys)
    return call._replace(counted=is_token(visible), is_first=_first_keys(visible[:, 0]))


def is_token(visible: torch.Tensor) -> torch.Tensor | None:
    """Whether queries are tokens, not padding, by a mask (B, 1, L, S): (B, 1, L).

    In self-attention, a query that does not see its own position is padding. Otherwise it is unknown.
    """
    is_self_attention = visible.shape[-1] == visible.shape[-2]
    return visible.diagonal(dim1=-2, dim2=-1) if is_self_attention else None


def _first_keys(visible: torch.Tensor) -> torch.Tensor:
    """Whether a key is the first of its sequence, by a mask (B, L, S): (B, S)."""
    n_queries, n_keys = visible.shape[1:]
    positions = torch.arange(n_keys, device=visible.device)
    if n_queries != n_keys:
        return positions == visible.any(1).to(torch.uint8).argmax(-1)[:, None]
    # There may be several sequences in a row. Their first token sees no key before its own.
    first_seen = visible.to(torch.uint8).argmax(-1)
    return (first_seen == positions) & visible.diagonal(dim1=-2, dim2=-1)


def counted_keys(name: str, module: Any, query: Any, key: Any, mask: Any, kwargs: Any) -> Any:
    """The number of keys that each query sees, broadcastable to (B, H, L)."""
    for sparse in SPARSE:
        if kwargs.get(sparse) is not None:
            raise unknown_count(f"the argument `{sparse}` of sparse attention")
    if mask_function(name) is None:
        raise unknown_count("masks of an unknown kind")
    visible = _visible(name, module, query, key, mask, kwargs)
    if not isinstance(visible, torch.Tensor):
        return visible_counts(query, key, visible)
    if visible.ndim != 4:
        raise unknown_count(f"a mask of shape {tuple(visible.shape)}")
    return visible.sum(-1)  # With a paged cache, the mask has more keys than `key`.


def _visible(
    name: str, module: Any, query: Any, key: Any, mask: Any, kwargs: dict[str, Any]
) -> Mask | torch.Tensor | None:
    """The keys that queries see, which depends on the masks that transformers makes; None for all.

    A tensor is (B, H or 1, L, S), and True where a key is visible.
    """
    makes = mask_function(name)
    if makes is flash_attention_mask:
        return _within(module, query, key, mask, kwargs)
    if isinstance(mask, BlockMask):
        return _InBlocks(mask)
    if isinstance(mask, torch.Tensor):
        # A floating-point mask, as for "eager", has the lowest number of its dtype at hidden keys.
        return mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else mask
    if makes is None:
        raise unknown_count("masks of an unknown kind")
    if mask is not None or makes is not sdpa_mask:  # the others are given all masks
        return mask
    is_causal = kwargs.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if name == NAME and all(kwargs.get(x) is not None for x in _PACKED) and len(query) == 1:
        sequences = packed(kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"])
        window_size = kwargs.get("sliding_window")
        near = window(None if window_size is None else window_size - 1, 0 if is_causal else None)
        return sequences & near
    # Transformers omits the mask in two cases: for a single query, which sees all keys, and for a cache
    # that was empty before. In the second case queries and keys start at the same position, and the
    # empty slots of a static cache come after them. So the causal mask has the offset 0.
    return causal(offset=0) if query.shape[2] > 1 and is_causal else None


def mask_function(name: str) -> Any:
    """What makes the masks for an implementation; None if it is unknown."""
    # A paged cache makes the same masks itself.
    function = AttentionMaskInterface().get(name.removeprefix("paged|"))
    known = (eager_mask, sdpa_mask, flash_attention_mask, flex_attention_mask)
    return function if function in known else None


def unknown_count(what: str) -> ValueError:
    must = "be 'positions' where the number of keys that a query sees is not known from the mask"
    return value_error("count", must, f"'keys' with {what}")


class _Within(Mask):
    """FlashAttention: a query sees the keys whose numbers in the row are from `first` to `last`.

    FlashAttention removes padding, whose number here is negative, and aligns the last query with the
    last key of its sequence.
    """

    number: torch.Tensor  # (B, 1, 1, S)
    start: torch.Tensor  # (B, 1, L, 1), the number of the first key of the sequence
    first: torch.Tensor  # (B, 1, L, 1)
    last: torch.Tensor  # (B, 1, L, 1)

    def count(self, frame: Frame) -> Array:
        return torch.clamp(self.last - self.first + 1, min=0)[..., 0]

    def check(self, batch: tuple[int, ...] | None, n_queries: int, n_keys: int) -> None:
        """Nothing: the fields are made for the call."""

    def block(self, frame: Frame, rows: Block, columns: Block) -> Array:
        first, last = (x.narrow(2, *rows) for x in (self.first, self.last))
        number = self.number.narrow(3, *columns)
        return (first <= number) & (number <= last)

    def is_first(self) -> torch.Tensor:
        """Whether a key is the first of a sequence, (B, S)."""
        number = self.number[:, 0]
        return ((number == self.start[:, 0]) & (number >= 0)).any(1)


def _within(module: Any, query: Any, key: Any, mask: Any, kwargs: dict[str, Any]) -> _Within:
    # For each query its position in its sequence, the number of keys there, and where they start.
    index = torch.arange(query.shape[2], device=query.device)[None]
    number, start = torch.arange(key.shape[2], device=query.device)[None], torch.zeros_like(index)
    offset, positions = key.shape[2] - query.shape[2], kwargs.get("position_ids")
    position, length = index + offset, torch.full_like(index, key.shape[2])
    if mask is not None:
        if mask.ndim != 2:
            raise unknown_count(f"a mask of shape {tuple(mask.shape)}")
        seen = mask.long().cumsum(-1)
        number = torch.where(mask.bool(), seen - 1, -1)
        position = seen[:, -query.shape[2] :] - 1
        length = seen[:, -1:].expand_as(position)
    elif all(kwargs.get(name) is not None for name in _PACKED):
        position, length, start = _within_packed(module, query, kwargs)
    elif positions is not None and len(query) == 1 and positions.shape[-1] > 1:
        # Sequences without padding in one row start at the smallest position. They have no cache.
        row = positions.reshape(-1)
        sequence = (row == row.min()).cumsum(0)
        start, end = (torch.searchsorted(sequence, sequence, right=x)[None] for x in (False, True))
        position, length = position - start, end - start + offset
    first, last = torch.zeros_like(position), length - 1
    if (window := kwargs.get("sliding_window")) is not None:
        first = torch.clamp(position - (window - 1), min=0)
        last = torch.minimum(last, position + (window - 1))
    is_causal = kwargs.get("is_causal")
    if module.is_causal if is_causal is None else is_causal:
        last = position
    rows = (x[:, None, :, None] for x in (start, start + first, start + last))
    return _Within(number[:, None, None], *rows)


def _within_packed(
    module: Any, query: Any, kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ends_q, ends_k = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]
    if isinstance(ends_k, dict):  # of the layers of a paged cache
        ends_k = ends_k[kwargs["cache"].layer_to_allocator[module.layer_idx].layer_type]
    token = torch.arange(len(query) * query.shape[2], device=query.device, dtype=ends_q.dtype)
    sequence = torch.searchsorted(ends_q, token, right=True) - 1
    # Tokens behind the last sequence fill up fixed sizes.
    sequence = torch.clamp(sequence, max=len(ends_q) - 2)
    length = torch.diff(ends_k)[sequence]
    position = token - ends_q[sequence] + length - torch.diff(ends_q)[sequence]
    position, length, start = (x.reshape(len(query), -1) for x in (position, length, ends_k[sequence]))
    return position, length, start


class _InBlocks(Mask):
    """Flex attention, whose mask is a function and the blocks where to call it."""

    mask: Any

    def count(self, frame: Frame) -> Array:
        if not hasattr(self.mask, "_isentropic_counts"):  # the first of the layers that share the mask
            n_queries, n_keys = self.mask.shape[-2:]
            lengths = frame.replaced(n_queries=n_queries, n_keys=n_keys)
            self.mask._isentropic_counts = super().count(lengths)
        return self.mask._isentropic_counts

    def block(self, frame: Frame | None, rows: Block, columns: Block) -> Array:
        (height, width), blocks = self.mask.BLOCK_SIZE, self.mask.to_dense().bool()

        def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
            i, j = i + rows[0], j + columns[0]
            return blocks[b, h, i // height, j // width] & self.mask.mask_mod(b, h, i, j)

        return create_mask(visible, *self.mask.shape[:2], rows[1], columns[1], str(blocks.device))
