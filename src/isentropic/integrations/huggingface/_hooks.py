"""Laws on attention modules that compute their attention themselves, by hooks.

A hook on the attention module counts the keys that each query sees. A hook on one of its children then
applies the law, as the `Family` of the module says.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from isentropic._attention.distribution import AttentionDistribution
from isentropic._attention.functions import scale_queries
from isentropic._checks import value_error
from isentropic._entropy import entropy
from isentropic.integrations.huggingface._layer_law import law_of
from isentropic.integrations.huggingface._modules import Family, family_of, n_heads, positions_from_1
from isentropic.laws._law import Law

_Arguments: TypeAlias = Mapping[str, Any]  # of the forward method of an attention module

_HOOKED = "_isentropic_hooked"  # an attribute of attention modules that have hooks
# An attribute of the child: the law and n for its next call, in each thread that runs the model.
_PENDING = "_isentropic_pending"
# Arguments with the hidden states from which keys are computed.
_KEY_SOURCES = (
    "key_value_states", "encoder_hidden_states", "cross_attention_states", "hidden_kv", "context",
    "key", "kv",
)  # fmt: skip
_CACHES = {"past_key_values", "layer_past", "layer_state", "cache"}


def hooks(modules: Iterable[Any]) -> contextlib.ExitStack:
    """Let laws act on those of the modules that compute their attention themselves, until closed."""
    with contextlib.ExitStack() as stack:
        for module in modules:
            family = family_of(module)
            if family is None or hasattr(module, _HOOKED):
                continue
            setattr(module, _HOOKED, True)
            stack.callback(delattr, module, _HOOKED)
            attributes = module.get_submodule(family.child).__dict__
            attributes.setdefault(_PENDING, {})
            stack.callback(attributes.pop, _PENDING, None)
            for handle in _hook(family, module):
                stack.callback(handle.remove)
        return stack.pop_all()


def _hook(family: Family, module: Any) -> Iterator[Any]:
    before = partial(_before, family, argument_names(module))
    yield module.register_forward_pre_hook(before, with_kwargs=True)
    yield module.register_forward_hook(partial(_check_law_was_applied, family), always_call=True)
    child = module.get_submodule(family.child)
    if family.query is None:
        yield child.register_forward_pre_hook(_scale_logits)
    else:
        features, query = family.query(module, n_heads(module) or 1)
        yield child.register_forward_hook(partial(_scale_query, features, query))


def argument_names(module: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(type(module).forward).parameters)[1:]


def _thread() -> int:
    # The compiler cannot trace `get_ident`.
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


def _pending(child: Any) -> tuple[Law, Any] | None:
    """The law and n for the call of a child, which are pending no longer."""
    laws: dict[int, tuple[Law, Any]] = getattr(child, _PENDING, {})
    # Of the hooks that give and take a law one may be compiled and the other not, after a break of the
    # graph. Compiled code cannot tell threads, so a model with such breaks can run in one thread only.
    if torch.compiler.is_compiling():
        return laws.popitem()[1] if laws else None
    return laws.pop(_thread(), None) or laws.pop(0, None)


def _before(family: Family, names: tuple[str, ...], module: Any, args: Any, kwargs: Any) -> None:
    _pending(module.get_submodule(family.child))  # of a pass that was interrupted
    law, count = law_of(module)
    if law is not None:
        _store_law(family, module, dict(zip(names, args, strict=False)) | kwargs, law, count)


def _check_law_was_applied(family: Family, module: Any, args: Any, output: Any) -> None:
    # After an error the output is None.
    if _pending(module.get_submodule(family.child)) is not None and output is not None:
        must = "have the modules that it had when `use` was called (call it again)"
        raise value_error("model", must, f"another `{family.child}`")


def check_law_can_act(family: Family | None, module: Any, arguments: _Arguments) -> None:
    """Refuse a module of a family whose law would be lost, from its attributes and arguments."""
    name = "" if family is None else family.unless
    if name and (getattr(module, name, None) or arguments.get(name) is not None):
        must = f"not have `{name}` while it has a law"
        raise value_error("model", must, type(module).__name__)


def _store_law(family: Family, module: Any, arguments: _Arguments, law: Law, count: str) -> None:
    """Store the law and n on the child, where its hook reads them."""
    check_law_can_act(family, module, arguments)
    n: Any
    if count == "positions":
        states = next(iter(arguments.values()))
        n = positions_from_1(states[:, None], arguments.get("position_ids"))
    else:
        visible = visible_keys(family, module, arguments)
        n = None if visible is None else visible.sum(-1)
        if n is None and family.query is not None:
            n = _n_keys(module, arguments)
    child = module.get_submodule(family.child)
    if not hasattr(child, _PENDING):  # it is another one, or another model has closed its hooks
        setattr(child, _PENDING, {})
    getattr(child, _PENDING)[_thread()] = law, n


def _n_keys(module: Any, arguments: _Arguments) -> int:
    """The number of keys, for attention without a mask."""
    if (states := key_source(arguments)) is not None:
        return int(states.shape[1])
    return int(next(iter(arguments.values())).shape[1]) + cached_length(module, arguments)


def key_source(arguments: _Arguments) -> Any:
    """The states of which the keys of cross-attention are made; None in self-attention."""
    states = next(iter(arguments.values()), None)
    sources = (arguments.get(name) for name in _KEY_SOURCES)
    return next((x for x in sources if x is not None and x is not states), None)


def cached_length(module: Any, arguments: _Arguments) -> int:
    """The number of keys in the cache of self-attention, before the call."""
    for name in _CACHES & arguments.keys():
        if arguments[name] is not None:
            layer = getattr(module, "layer_idx", None) or getattr(module, "layer_id", None) or 0
            return int(arguments[name].get_seq_length(layer))
    return 0


def visible_keys(family: Family, module: Any, arguments: _Arguments) -> Any:
    """The mask (B, 1, L, S), in which axes may be 1, that is True where a key is visible; or None."""
    is_cross = family.cross_mask and key_source(arguments) is not None
    mask = arguments.get(family.cross_mask if is_cross else family.mask)
    # In Falcon the heads differ, because their biases are in the mask.
    visible = None if mask is None else _as_visible(mask, family.marks_hidden)[:, :1]
    if family.buffer:
        length = next(iter(arguments.values())).shape[1]
        n_keys = _n_keys(module, arguments) if visible is None else visible.shape[-1]
        buffer = getattr(module, family.buffer)[..., n_keys - length : n_keys, :n_keys].bool()
        visible = buffer if visible is None else visible & buffer
    return visible


def _as_visible(mask: Any, marks_hidden: bool) -> Any:
    if isinstance(mask, tuple):
        # The attention inputs of Funnel: positions, types, mask, and another mask.
        mask = mask[2].bool()
    if mask.is_floating_point() and mask.ndim != 3:
        return mask > torch.finfo(mask.dtype).min / 2
    visible = ~mask.bool() if marks_hidden and not mask.is_floating_point() else mask.bool()
    if mask.ndim == 2:  # of keys
        return visible[:, None, None]
    return visible[:, None] if mask.ndim == 3 else visible


def _scale_query(features: tuple[int, ...], index: Any, child: Any, args: Any, output: Any) -> Any:
    """Multiply the query among the features of a projection by the law."""
    if (pending := _pending(child)) is None:
        return output
    law, n = pending
    result = output.unflatten(-1, features).clone()
    query = result[index].flatten(2, -2).transpose(1, 2)
    query = scale_queries(query, n, law=law).transpose(1, 2)
    result[index] = query.reshape(result[index].shape)
    return result.flatten(-len(features))


def _scale_logits(child: Any, args: Any) -> Any:
    """Multiply the logits by the law: from weights p to p^law / Σ p^law."""
    if (pending := _pending(child)) is None:
        return args
    law, n = pending
    weights, *others = args
    p = weights.float() if weights.dtype.itemsize < 4 else weights
    # The logarithm of 0 has no gradient.
    is_zero = p <= 0
    logits = p.masked_fill(is_zero, 1).log()
    logits = scale_queries(logits, p.shape[-1] if n is None else n, law=law)
    return torch.softmax(logits.masked_fill(is_zero, -math.inf), -1).to(weights.dtype), *others


def run_with_laws(
    module: Any, args: Any, kwargs: Any, laws: Iterable[Law], count: str
) -> tuple[list[Any], Any, int]:
    """The entropies (B, H, L) of the weights that a module forms with each law, by further runs of it.

    Also returns `visible_keys` and the number of keys.
    """
    family = family_of(module)
    assert family is not None
    arguments = dict(zip(argument_names(module), args, strict=False)) | kwargs
    arguments |= dict.fromkeys(_CACHES & arguments.keys())  # which the first run has filled
    weights: Any = None
    entropies = []
    for law in laws:
        _store_law(family, module, arguments, law, count)
        weights = None
        try:
            with _Weights() as run:
                module.forward(**arguments)
            weights = run.weights
        finally:
            _check_law_was_applied(family, module, (), weights)
        entropies.append(entropy(weights.float()).reshape(-1, n_heads(module) or 1, weights.shape[-2]))
    visible = visible_keys(family, module, arguments)
    return entropies, visible, weights.shape[-1]


class _Weights(TorchFunctionMode):
    """Keeps the attention weights: those of the last softmax, or of PyTorch's attention."""

    weights: Any = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if getattr(function, "__name__", "") == "softmax":
            self.weights = result
        elif function is scaled_dot_product_attention:
            self.weights = _weights(*args, **kwargs)
        return result


def _weights(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, **options: Any
) -> Any:
    is_bias = attn_mask is not None and attn_mask.is_floating_point()
    mask = {"bias" if is_bias else "mask": attn_mask}
    return AttentionDistribution(query, key, law=None, **mask, **options).weights()
