"""Laws in the attention implementations of transformers: the factor of a law goes into the queries.

An implementation keeps its name, because transformers decides by the name which arguments, caches and
masks an implementation gets. So the lookup of a name returns another function. For modules without a
law it does the same as the original.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch.nn.attention.flex_attention import BlockMask, create_mask
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import (
    eager_mask,
    flash_attention_mask,
    flex_attention_mask,
    sdpa_mask,
)

from isentropic._checks import type_error, value_error
from isentropic._loops import BLOCKS
from isentropic._namespace import namespace
from isentropic.integrations._observe import visible_counts
from isentropic.integrations.huggingface._clamp import clamped
from isentropic.integrations.huggingface._hooks import set_implementation
from isentropic.integrations.huggingface._interface import (
    NAME,
    attend,
    law_of,
    positions_from_1,
    register,
    visibility_mask,
)
from isentropic.integrations.huggingface._modules import uses_interface
from isentropic.integrations.huggingface._observe import announced
from isentropic.laws._law import Law

_Counter: TypeAlias = Callable[[torch.nn.Module, torch.Tensor, torch.Tensor, Any, dict[str, Any]], Any]

_WITH_LAW: dict[tuple[Any, str], Callable[..., Any]] = {}
# Arguments with which sparse attention chooses the keys.
_SPARSE = ("indices", "block_indices")
# FlashAttention needs all of them.
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def set_base(model: Any, base: str) -> None:
    """Let a model compute its attention by `base`, with the laws of its modules."""
    if not isinstance(base, str):
        raise type_error("base", "be the name of an attention implementation", type(base).__name__)
    register()
    known = AttentionInterface()
    if base != "eager" and base not in known and "/" not in base:
        must = f"be 'eager', the name of a kernel of the Hub, or one of {', '.join(map(repr, known))}"
        raise value_error("base", must, repr(base))
    set_implementation(model, base)


def check_base(model: Any, counts: Mapping[Any, str]) -> None:
    """Refuse the present implementation for modules with laws, rather than in the first forward pass.

    `counts` says what the n of the law of each module counts.
    """
    for module, count in counts.items():
        if not uses_interface(module):
            continue
        base = module.config._attn_implementation
        names = needed_arguments(module)
        if AttentionInterface().get(base) is not attend:
            if count == "keys" and _counter(base) is _unknown:
                _unknown(module, None, None, None, {})
            # To "eager" and "sdpa", models of transformers give a mask in place of the indices.
            is_counted = base in ("eager", "sdpa") or count != "keys"
            names = set() if is_counted else names & set(_SPARSE)
        if names:
            owners = [x for x in model.modules() if getattr(x, "config", None) is module.config]
            takes_sdpa = all(getattr(x, "_supports_sdpa", True) for x in owners)
            must = (
                f"be 'eager'{' or ' + repr('sdpa') if takes_sdpa else ''} for "
                f"{type(module).__name__}, whose attention gets `{min(names)}`"
            )
            raise value_error("base", must, repr(base))


def default_base(modules: Iterable[Any]) -> str:
    """The implementation "isentropic", or "eager" where that does not support one of the modules."""
    return "eager" if any(map(needed_arguments, filter(uses_interface, modules))) else NAME


def needed_arguments(module: Any) -> set[str]:
    """The arguments that a module passes to its attention, and that "isentropic" does not support."""
    constants = inspect.unwrap(type(module).forward).__code__.co_consts
    names = {y for x in constants for y in (x if isinstance(x, tuple) else (x,))}
    return names & {"sinks", *_SPARSE}


def extend_interface() -> None:
    """Let the functions that transformers looks up apply laws, clamp positions and announce calls.

    Calling this again has no effect.
    """
    get_item, get_interface = AttentionInterface.__getitem__, AttentionInterface.get_interface
    if hasattr(get_interface, "applies_laws"):
        return

    @functools.wraps(get_item)
    def get_item_with_law(self: Any, name: str) -> Any:
        return with_law(get_item(self, name), name)

    @functools.wraps(get_interface)
    def get_interface_with_law(self: Any, name: str, default: Any) -> Any:
        # The functions that the lookup finds apply laws already. The default, "eager", does not.
        # A call is announced with the query as it is before the law multiplies it.
        function = with_law(get_interface(self, name, default), "eager")
        return announced(clamped(function), name)

    get_interface_with_law.applies_laws = True  # type: ignore[attr-defined]
    AttentionInterface.__getitem__ = get_item_with_law
    AttentionInterface.get_interface = get_interface_with_law


def with_law(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function of an implementation, which gets scaled queries from modules that have a law."""
    if hasattr(function, "takes_laws"):
        return function
    # The same object for every lookup: otherwise torch.compile would compile again.
    if (known := _WITH_LAW.get((function, name))) is not None:
        return known
    count_visible = _counter(name)

    @functools.wraps(function)
    def attend_with_law(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        law, count = law_of(module)
        if law is not None:
            if count == "positions":
                n = positions_from_1(query, kwargs.get("position_ids"))
            else:
                n = count_visible(module, query, key, attention_mask, kwargs)
            query = _scaled(query, n, law)
        return function(module, query, key, value, attention_mask, *args, **kwargs)

    attend_with_law.takes_laws = True  # type: ignore[attr-defined]
    if not torch.compiler.is_compiling():
        _WITH_LAW[function, name] = attend_with_law
    return attend_with_law


def _scaled(query: torch.Tensor, n: torch.Tensor, law: Law) -> torch.Tensor:
    """As `scale_queries`, without its checks, which take as long as attention of a single query."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    # A padding query may see nothing. An infinite factor would make the keys of the next layer NaN.
    n = torch.clamp(n.to(dtype), min=1)
    factor = law.evaluate_unchecked(namespace(query=query), n)
    return (query.to(dtype) * factor[..., None]).to(query.dtype)


def _counter(name: str) -> _Counter:
    """What counts the keys that a query sees, which depends on the masks that transformers makes."""
    # A paged cache makes the same masks itself.
    return _BY_MASKS.get(AttentionMaskInterface().get(name.removeprefix("paged|")), _unknown)


def _by_mask(module: Any, query: Any, key: Any, mask: Any, kwargs: dict[str, Any]) -> Any:
    """The number of keys that each query sees, from the mask; all keys without one."""
    _check_dense(kwargs)
    if mask is None:
        return visible_counts(query, key, None)
    if mask.ndim != 4:
        raise _unknown_count(f"a mask of shape {tuple(mask.shape)}")
    visible: Any = visibility_mask(module, query, mask, None)
    return visible.sum(-1)  # With a paged cache, the mask has more keys than `key`.


def _by_mask_or_causal(module: Any, query: Any, key: Any, mask: Any, kwargs: dict[str, Any]) -> Any:
    """The same, but without a mask a flag says whether attention is causal."""
    if mask is not None:
        return _by_mask(module, query, key, mask, kwargs)
    _check_dense(kwargs)
    causal = visibility_mask(module, query, None, kwargs.get("is_causal"))
    return visible_counts(query, key, causal)


def _by_lengths(module: Any, query: Any, key: Any, mask: Any, kwargs: dict[str, Any]) -> Any:
    """For FlashAttention, which removes padding and aligns the last query with the last key."""
    _check_dense(kwargs)
    position, length = _within_sequences(module, query, key, mask, kwargs)
    window, is_causal = kwargs.get("sliding_window"), kwargs.get("is_causal")
    first, last = torch.zeros_like(position), length - 1
    if window is not None:
        first = torch.clamp(position - (window - 1), min=0)
        last = torch.minimum(last, position + (window - 1))
    if module.is_causal if is_causal is None else is_causal:
        last = position
    return torch.clamp(last - first + 1, min=0)[:, None]


def _within_sequences(
    module: Any, query: Any, key: Any, mask: Any, kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The positions of queries among the keys of their sequences, and how many these are, (B, L)."""
    n_queries = query.shape[2]
    index = torch.arange(n_queries, device=query.device)[None]
    if mask is not None:
        if mask.ndim != 2:
            raise _unknown_count(f"a mask of shape {tuple(mask.shape)}")
        seen = mask.long().cumsum(-1)
        return seen[:, -n_queries:] - 1, seen[:, -1:]
    if all(kwargs.get(name) is not None for name in _PACKED):
        return _within_packed(module, query, kwargs)
    offset = key.shape[2] - n_queries
    positions = kwargs.get("position_ids")
    if positions is None or len(query) > 1 or positions.shape[-1] == 1:
        return index + offset, torch.full_like(index, key.shape[2])
    # Sequences without padding in one row start at the smallest position. They have no cache.
    row = positions.reshape(-1)
    sequence = (row == row.min()).cumsum(0)
    start, end = (torch.searchsorted(sequence, sequence, right=x) for x in (False, True))
    return index - start + offset, (end - start)[None] + offset


def _within_packed(
    module: Any, query: Any, kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    ends_q, ends_k = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]
    if isinstance(ends_k, dict):  # of the layers of a paged cache
        ends_k = ends_k[kwargs["cache"].layer_to_allocator[module.layer_idx].layer_type]
    token = torch.arange(len(query) * query.shape[2], device=query.device, dtype=ends_q.dtype)
    sequence = torch.searchsorted(ends_q, token, right=True) - 1
    # Tokens behind the last sequence fill up fixed sizes.
    sequence = torch.clamp(sequence, max=len(ends_q) - 2)
    length = torch.diff(ends_k)[sequence]
    position = token - ends_q[sequence] + length - torch.diff(ends_q)[sequence]
    return position.reshape(len(query), -1), length.reshape(len(query), -1)


def _by_blocks(module: Any, query: Any, key: Any, mask: Any, kwargs: dict[str, Any]) -> Any:
    """For flex attention, whose mask is a function and the blocks where to call it."""
    if not isinstance(mask, BlockMask):
        return _by_mask(module, query, key, mask, kwargs)
    n = getattr(mask, "_isentropic_counts", None)
    if n is None:  # the first of the layers that share the mask
        n = _visible_in_blocks(mask, query.device)
        mask._isentropic_counts = n
    return n


def _visible_in_blocks(mask: BlockMask, device: torch.device) -> torch.Tensor:
    """The number of keys that each query sees, (B, H or 1, L)."""
    (batch, heads, n_queries, n_keys), (height, width) = mask.shape, mask.BLOCK_SIZE
    blocks = mask.to_dense().bool()
    step = height * max(1, BLOCKS.mask_elements // (batch * heads * height * n_keys))
    counts = []
    for start in range(0, n_queries, step):
        rows = min(step, n_queries - start)

        def visible(b: Any, h: Any, i: Any, j: Any, start: int = start) -> Any:
            shown = blocks[b, h, (i + start) // height, j // width]
            return shown & mask.mask_mod(b, h, i + start, j)

        counts.append(create_mask(visible, batch, heads, rows, n_keys, device).sum(-1))
    return torch.cat(counts, -1)


def _unknown(module: Any, query: Any, key: Any, mask: Any, kwargs: dict[str, Any]) -> Any:
    raise _unknown_count("masks of an unknown kind")


def _check_dense(kwargs: dict[str, Any]) -> None:
    for name in _SPARSE:
        if kwargs.get(name) is not None:
            raise _unknown_count(f"the argument `{name}` of sparse attention")


def _unknown_count(what: str) -> ValueError:
    must = "be 'positions' where the number of keys that a query sees is not known from the mask"
    return value_error("count", must, f"'keys' with {what}")


_BY_MASKS: dict[Any, _Counter] = {
    eager_mask: _by_mask,
    sdpa_mask: _by_mask_or_causal,
    flash_attention_mask: _by_lengths,
    flex_attention_mask: _by_blocks,
}
