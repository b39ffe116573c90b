"""Laws in the attention functions that transformers looks up, and what a call of one of them sees.

transformers decides by the name of an implementation which arguments, caches and masks it gets. So an
implementation keeps its name, and the lookup returns a function that multiplies the queries by the law
first. For modules without a law it does the same as the original. "isentropic" is an implementation of
its own, and takes laws itself.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from isentropic._attention.distribution import AttentionDistribution
from isentropic._attention.functions import attention
from isentropic._checks import type_error, value_error
from isentropic._namespace import namespace
from isentropic._products import grouped_matmul
from isentropic.integrations._observe import announce, listeners
from isentropic.integrations.huggingface._calls import NAME, call_of, counted_keys, with_tokens
from isentropic.integrations.huggingface._layer_law import LAW, law_of
from isentropic.integrations.huggingface._modules import (
    family_of,
    is_over_tokens,
    positions_from_1,
    uses_interface,
)
from isentropic.laws._law import Law

_WITH_LAW: dict[tuple[Any, str], Callable[..., Any]] = {}


def extend_interface() -> None:
    """Register "isentropic", and let the functions that transformers looks up apply laws.

    Calling this again has no effect.
    """
    AttentionInterface.register(NAME, attend)
    # Models do not make masks for an implementation without a mask function.
    AttentionMaskInterface.register(NAME, sdpa_mask)
    get_item, get_interface = AttentionInterface.__getitem__, AttentionInterface.get_interface
    if hasattr(get_interface, "takes_laws"):
        return

    @functools.wraps(get_item)
    def get_item_with_law(self: Any, name: str) -> Any:
        return with_law(get_item(self, name), name)

    @functools.wraps(get_interface)
    def get_interface_with_law(self: Any, attn_implementation: str, default: Any) -> Any:
        # The functions that the lookup finds apply laws already. The default, "eager", does not.
        function = with_law(get_interface(self, attn_implementation, default), "eager")
        # A call is announced with the query as it is before the law multiplies it.
        return functools.partial(_announced, function, attn_implementation) if listeners else function

    get_interface_with_law.takes_laws = True  # type: ignore[attr-defined]
    AttentionInterface.__getitem__ = get_item_with_law
    AttentionInterface.get_interface = get_interface_with_law


def with_law(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function of an implementation, which gets scaled queries from modules that have a law."""
    if hasattr(function, "takes_laws"):
        return function
    # The same object for every lookup: otherwise torch.compile would compile again.
    if (known := _WITH_LAW.get((function, name))) is not None:
        return known

    @functools.wraps(function)
    def attend_with_law(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        law, count = law_of(module)
        if law is not None:
            if count == "positions":
                n = positions_from_1(query, kwargs.get("position_ids"))
            else:
                n = counted_keys(name, module, query, key, attention_mask, kwargs)
            query = _scaled(query, n, law)
        return function(module, query, key, value, attention_mask, *args, **kwargs)

    attend_with_law.takes_laws = True  # type: ignore[attr-defined]
    if not torch.compiler.is_compiling():
        _WITH_LAW[function, name] = attend_with_law
    return attend_with_law


def _announced(
    function: Any, name: str, module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any
) -> Any:
    """Announce a call of an implementation, and compute it."""
    own = getattr(getattr(module, "config", None), "_attn_implementation", None)
    # An implementation that calls another one is announced once, with the queries of the model.
    if own in (name, None) and is_over_tokens(module):
        announce(module, lambda: with_tokens(call_of(name, module, query, key, *args, **kwargs)))
    return function(module, query, key, value, *args, **kwargs)


def _scaled(query: torch.Tensor, n: torch.Tensor, law: Law) -> torch.Tensor:
    """As `scale_queries`, without its checks, which take as long as attention of a single query."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    # A padding query may see nothing. An infinite factor would make the keys of the next layer NaN.
    n = torch.clamp(n.to(dtype), min=1)
    factor = law.evaluate_unchecked(namespace(query=query), n)
    return (query.to(dtype) * factor[..., None]).to(query.dtype)


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
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The output (B, L, H, Ev), and the weights or None, with the signature that transformers calls.

    The query is (B, H, L, E). The key and the value have grouped heads.
    """
    # Modules on which no law can act never have one.
    if not hasattr(module, LAW) and not torch.compiler.is_compiling() and uses_interface(module):
        _warn_of_no_laws(type(module).__name__)
    call = call_of(NAME, module, query, key, attention_mask, scaling=scaling, **kwargs)
    options = call.options | {"law": call.law, "sinks": call.sink}
    is_dropping = dropout > 0 and module.training
    # PyTorch's attention, which drops weights, has neither soft caps nor sinks nor packed sequences.
    is_packed = attention_mask is None and kwargs.get("cu_seq_lens_q") is not None
    needs_weights = is_packed or call.sink is not None or options["softcap"] is not None
    needs_weights = is_dropping and needs_weights
    weights = None
    if needs_weights or kwargs.get("output_attentions"):
        weights = AttentionDistribution(query, key, **options).weights()
    if weights is not None and (is_dropping or weights.requires_grad):
        # The output is made of them, so that they have the gradient of what is made of the output.
        weights = torch.dropout(weights, dropout, module.training)
        out = grouped_matmul(namespace(value=value), weights, value)
    elif is_dropping:
        # Attention of isentropic drops no weights. "sdpa" gets the same masks, and applies the law.
        sdpa = AttentionInterface()["sdpa"]
        return sdpa(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    else:
        out = attention(query, key, value, **options)
    return out.transpose(1, 2).contiguous(), weights


attend.takes_laws = True  # type: ignore[attr-defined]


def set_base(model: Any, base: str) -> None:
    """Let a model compute its attention by `base`, where it has an implementation to choose."""
    if not isinstance(base, str):
        raise type_error("base", "be the name of an attention implementation", type(base).__name__)
    known = AttentionInterface()
    if base != "eager" and base not in known and "/" not in base:
        must = f"be 'eager', the name of a kernel of the Hub, or one of {', '.join(map(repr, known))}"
        raise value_error("base", must, repr(base))
    owners: dict[Any, Any] = {}  # the innermost model around each module
    for part in model.modules():
        if isinstance(part, PreTrainedModel):  # outer before inner
            owners |= dict.fromkeys(part.modules(), part)
    configs = [owner.config for module, owner in owners.items() if family_of(module) is not None]
    kept = [(config, config._attn_implementation) for config in configs]
    if any(map(uses_interface, owners)):
        model.set_attn_implementation(base)
    for config, implementation in kept:
        # Modules with hooks expect their own masks. The property would also set inner configurations.
        config._attn_implementation_internal = implementation
