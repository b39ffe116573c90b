"""The attention implementation "isentropic" of transformers."""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any, TypeAlias

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from isentropic._attention.distribution import AttentionDistribution
from isentropic._attention.functions import attention, scale_queries
from isentropic._checks import type_error, value_error
from isentropic._namespace import namespace
from isentropic._products import grouped_matmul
from isentropic.integrations._observe import visible_counts
from isentropic.laws._law import Law
from isentropic.masks import Mask, causal

LawAndCount: TypeAlias = tuple[Law | None, str]  # a law, and what its n counts

NAME = "isentropic"
LAW = "isentropic_law"  # the attribute of an attention module that holds a LayerLaw, or None
# Arguments with which some models ask for attention that the mask and the logits do not determine.
_UNSUPPORTED = ("cache", "indices", "block_indices", "sinks")


def register(name: str = NAME) -> None:
    """Register ``attn_implementation="isentropic"`` with transformers.

    It computes the same attention as "eager" and "sdpa", until `use` applies laws to a model. Importing
    this module registers it under its own name.

    Parameters
    ----------
    name : str
        The name of the implementation. Registering it again has no effect.

    Raises
    ------
    ValueError
        If transformers already has another implementation of this name.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from isentropic.integrations import huggingface
    >>> huggingface.register()
    >>> size = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    >>> config = LlamaConfig(**size, num_hidden_layers=1, attn_implementation="isentropic")
    >>> LlamaForCausalLM(config).config._attn_implementation
    'isentropic'
    """
    if not isinstance(name, str):
        raise type_error("name", "be a string", type(name).__name__)
    known = AttentionInterface()
    if name == "eager" or known.get(name, attend) is not attend:
        raise value_error("name", "not be that of another implementation of transformers", repr(name))
    AttentionInterface.register(name, attend)
    # Models do not make masks for an implementation without a mask function.
    AttentionMaskInterface.register(name, sdpa_mask)


def law_of(module: torch.nn.Module) -> LawAndCount:
    """The law of an attention module, with the present values of its parameters."""
    held = getattr(module, LAW, None)
    return (None, "keys") if held is None else (held(), held.count)


def set_law(module: torch.nn.Module, law: torch.nn.Module | None) -> None:
    """Give an attention module a LayerLaw, or None for standard attention."""
    # Where a module had this name before, None would stay among its modules: loading a state dict would
    # then ignore the tensors of a law.
    module._modules.pop(LAW, None)
    setattr(module, LAW, law)


@functools.cache  # once
def _warn_of_no_laws(kind: str) -> None:
    warnings.warn(
        f"{kind} computes standard attention with {NAME!r}, because its model has no laws. "
        "Apply them by `huggingface.use(model, laws)`, where None stands for standard attention.",
        stacklevel=4,
    )


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The output (B, L, H, Ev), and the weights or None, with the signature that transformers calls.

    The query is (B, H, L, E). The key and the value have grouped heads.
    """
    if not hasattr(module, LAW) and not torch.compiler.is_compiling():
        _warn_of_no_laws(type(module).__name__)
    law, options = law_and_options(
        module, query, attention_mask, scaling, is_causal, softcap, position_bias, kwargs
    )
    weights = None
    is_dropping = dropout > 0 and module.training
    if kwargs.get("output_attentions"):
        weights = AttentionDistribution(query, key, law=law, sinks=s_aux, **options).weights()
    if weights is not None and (is_dropping or weights.requires_grad):
        # The output is made of them, so that they have the gradient of what is made of the output.
        weights = torch.dropout(weights, dropout, module.training)
        out = grouped_matmul(namespace(value=value), weights, value)
    elif is_dropping:
        out = _attend_with_dropout(query, key, value, s_aux, law, options, dropout)
    else:
        out = attention(query, key, value, law=law, sinks=s_aux, **options)
    return out.transpose(1, 2).contiguous(), weights


attend.takes_laws = True  # type: ignore[attr-defined]


def law_and_options(
    module: torch.nn.Module,
    query: torch.Tensor,
    attention_mask: Mask | torch.Tensor | None,
    scaling: float | None,
    is_causal: bool | None,
    softcap: float | None,
    position_bias: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> tuple[Law | None, dict[str, Any]]:
    """The law of a call by transformers, and the other arguments of `attention`."""
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            must = "be None: isentropic does not support it (the attention implementation 'eager' may)"
            raise value_error(name, must, type(kwargs[name]).__name__)
    mask, bias = visibility_mask(module, query, attention_mask, is_causal), position_bias
    if isinstance(attention_mask, torch.Tensor) and attention_mask.is_floating_point():
        bias = attention_mask if bias is None else bias + attention_mask
    law, count = law_of(module)
    options: dict[str, Any] = {
        "mask": mask, "bias": bias, "scale": scaling, "softcap": softcap, "enable_gqa": True,
    }  # fmt: skip
    if law is not None and count == "positions":
        options["n_keys"] = positions_from_1(query, kwargs.get("position_ids"))
    return law, options


def visibility_mask(
    module: torch.nn.Module,
    query: torch.Tensor,
    mask: Mask | torch.Tensor | None,
    is_causal: bool | None,
) -> Mask | torch.Tensor | None:
    """The mask that is True where a key is visible, or None if all keys are."""
    if mask is not None:
        # A floating-point mask, as for "eager", has the lowest number of its dtype at hidden keys.
        if isinstance(mask, torch.Tensor) and mask.is_floating_point():
            return mask > torch.finfo(mask.dtype).min / 2
        return mask
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    # Transformers omits the mask in two cases: for a single query, which sees all keys, and for a cache
    # that was empty before. In the second case queries and keys start at the same position, and the
    # empty slots of a static cache come after them. So the causal mask has the offset 0.
    return causal(offset=0) if query.shape[2] > 1 and is_causal else None


def positions_from_1(query: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
    """The positions of the queries, counted from 1, broadcastable to (B, H, L)."""
    if positions is None or positions.ndim != 2 or positions.shape[1] != query.shape[2]:
        must = "be 'keys' if a model passes no `position_ids` (batch, queries) to its attention"
        raise value_error("count", must, "'positions'")
    return positions[:, None] + 1


def _attend_with_dropout(
    query: Any, key: Any, value: Any, sink: Any, law: Law | None, options: Any, dropout: float
) -> Any:
    """The output by PyTorch's kernel. Attention of isentropic does not drop weights."""
    if sink is not None or options["softcap"] is not None:
        must = (
            "be 0 while a model with soft caps or sinks is trained (set it in its configuration, or "
            "use `base='eager'`)"
        )
        raise value_error("dropout", must, dropout)
    if law is not None:
        n = options["n_keys"] if "n_keys" in options else visible_counts(query, key, options["mask"])
        query = scale_queries(query, n, law=law)
    mask, bias = options["mask"], options["bias"]
    if isinstance(mask, Mask):
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    if bias is not None:
        mask = bias if mask is None else torch.where(mask, bias, -math.inf)
    return scaled_dot_product_attention(
        query, key, value, mask, dropout_p=dropout, scale=options["scale"], enable_gqa=True
    )
