"""Laws on the attention modules of a model."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch

from isentropic._checks import check_choice, is_integer, type_error, value_error
from isentropic.integrations.huggingface._calls import NAME
from isentropic.integrations.huggingface._hooks import check_law_can_act, hooks
from isentropic.integrations.huggingface._interface import set_base
from isentropic.integrations.huggingface._layer_law import (
    COUNTS,
    LAW,
    LawAndCount,
    law_of,
    layer_law,
    set_law,
)
from isentropic.integrations.huggingface._modules import attention_modules, configs_in, family_of
from isentropic.integrations.huggingface._saving import write_entry
from isentropic.laws import from_config
from isentropic.laws._configurations import ModelRule
from isentropic.laws._law import Law

_OfLayer: TypeAlias = Law | LawAndCount | None
Laws: TypeAlias = Law | Sequence[_OfLayer] | Mapping[int | str, _OfLayer] | None

# By model and configuration, the last implementation that was not "isentropic".
_BEFORE: WeakKeyDictionary[Any, dict[int, str | None]] = WeakKeyDictionary()


def use(
    model: Any,
    laws: Laws,
    *,
    count: str = "keys",
    base: str | None = None,
    trainable: bool | str = False,
) -> contextlib.ExitStack:
    """Apply laws to the attention of a model, permanently or for a ``with`` block.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        The model, or a part of one, such as the text model of a multimodal one. It is changed in place.
    laws : Law, None, sequence or mapping
        One law for all attention layers, one law per layer, or a mapping from numbers of layers, their
        names (the keys of `laws_of`), or patterns of names, such as ``"*.language_model.*"``, to laws.
        If several keys match a layer, the last of them counts. Layers that no key matches, and layers
        with None, use standard attention. In a sequence or mapping, a pair of a law and what it counts
        may stand for a law. So the laws of another model, `laws_of`, are such a mapping.

        Array parameters of a law have the shape (H,), one number per head. They become buffers of the
        layer, on its device, in float32, or in float64 for a float64 model. Tensors that require
        gradients are not copied, and must be on that device. They are not parameters of the model, so
        pass them to the optimizer separately, or let the model have its own by `trainable`.
    count : {"keys", "positions"}
        What the n of a law counts: the keys that the query sees, or its position plus one. The table in
        `isentropic.laws.preset` says what the rules of other models count.
    base : str, optional
        The attention implementation that computes the attention: "isentropic", or another one of
        transformers, such as "sdpa", "eager", "flash_attention_2", "flex_attention" or the name of a
        kernel on the Hub, which gets queries that the law has multiplied. The default is "isentropic".
        If all laws are None, it is the implementation that the model had before. (A model that was
        loaded or copied with laws keeps "isentropic".) Attention that does not use the
        AttentionInterface of transformers keeps its implementation.
    trainable : bool or "head"
        Whether the numbers and arrays of the laws become parameters of the model, with names such as
        ``model.layers.0.self_attn.isentropic_law.slope``. With True, a number becomes one parameter per
        layer, (1,), and with "head" one per head, (H,). Those that say where a law acts are never
        trained: ``base``, ``period``, ``shift``, ``minimum``, ``head_dim`` and ``lengths``. Laws that
        have no others can be trained in `isentropic.laws.scaled`.

    Returns
    -------
    contextlib.ExitStack
        Its ``close()``, or the end of its ``with`` block, restores the previous laws and attention
        implementation. Close several of them in reverse order.

    Raises
    ------
    TypeError
        For a `model` that is not a transformers model, and for `laws` that are not laws.
    ValueError
        For a model on whose attention laws cannot act, for layers that it does not have, for parameters
        that do not fit its heads, for `trainable` laws with nothing to train, and for a `base` that
        does not exist. Calling the model also raises it if the base does not support what the model
        passes to its attention, if it passes no positions, with ``count="positions"``, and if a mask
        does not say how many keys a query sees, with a base other than "isentropic".
    ImportError
        For a `base` that is not installed.

    Notes
    -----
    :doc:`/reference/models` lists the models with the ways in which laws act on their attention, and
    :doc:`/how-to/save-and-train-laws` says how laws are saved with the model.

    The n of a query is the number of keys that it sees. Padding, empty slots of a static cache, keys
    outside a sliding window, and sinks are not counted, so decoding with a cache equals prefill. The
    law multiplies the products of queries and keys, before a soft cap and position biases, such as
    those of T5, ALiBi and MPNet. Where positions are products with the query or the key, as in DeBERTa,
    Funnel and SpeechT5, the law multiplies these too.

    Positions are the ``position_ids`` that the model passes to its attention, as most decoders do. The
    positions that ``generate`` makes do not count padding. If a decoder is called without
    ``position_ids``, its positions count the padding on the left too.

    Scaled queries are rounded to their dtype. In some models with hooks, such as DeBERTa, the law f
    acts on the weights p, which become p^f / Σ p^f. In float16, weights below 6e-8 are 0, and the law
    cannot bring them back.

    A warning names a rule by which the model already scales its logits, and says how to switch it off.
    `isentropic.laws.from_config` returns these rules.

    Call `torch.compile` after `use`: a compiled model does not see hooks that are added later. Gradient
    checkpointing computes attention again in the backward pass, so run that within the ``with`` block.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from isentropic import laws
    >>> from isentropic.integrations import huggingface
    >>> size = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    >>> model = LlamaForCausalLM(LlamaConfig(**size, num_hidden_layers=2))
    >>> with huggingface.use(model, laws.LogLength(512, minimum=1)):
    ...     model.config._attn_implementation
    'isentropic'
    >>> model.config._attn_implementation
    'sdpa'
    """
    if not isinstance(trainable, bool):
        check_choice("trainable", trainable, (True, False, "head"))
    layers = per_layer(laws, count, attention_modules(model))
    warn_of_rules([module for module, (law, _) in layers.items() if law is not None])
    if base is None and any(law is not None for law, _ in layers.values()):
        base = NAME
    stack = apply(model, layers, base, trainable)
    if base is None:
        for config, implementation in _implementations(model):
            if implementation == NAME:
                config._attn_implementation = _BEFORE[model].get(id(config), NAME)
    return stack


def laws_of(model: Any) -> dict[str, LawAndCount]:
    """The laws that a model has now.

    Parameters
    ----------
    model : transformers.PreTrainedModel

    Returns
    -------
    dict
        By the names of the attention layers, as in ``model.named_modules()`` and in the order of their
        numbers: the law, with the present values of its parameters, or None for standard attention; and
        what its n counts. Tensors of trained laws are those of the model, not copies. Attention that is
        not in the dictionary stays standard attention.

    Raises
    ------
    TypeError, ValueError
        For models to which `use` cannot apply laws.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from isentropic import laws
    >>> from isentropic.integrations import huggingface
    >>> size = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    >>> model = LlamaForCausalLM(LlamaConfig(**size, num_hidden_layers=2))
    >>> _ = huggingface.use(model, {1: laws.LogLength(512)})
    >>> for name, (law, count) in huggingface.laws_of(model).items():
    ...     print(name, law, count)
    model.layers.0.self_attn None keys
    model.layers.1.self_attn LogLength(base=512, minimum=None) keys
    """
    return {name: law_of(module) for name, module in attention_modules(model).items()}


def per_layer(laws: Laws, count: str, modules: Mapping[str, Any]) -> dict[Any, LawAndCount]:
    """A law, and what its n counts, for each of these modules, which have names."""
    check_choice("count", count, COUNTS)
    names, chosen = list(modules), laws
    if laws is None or isinstance(laws, Law):
        chosen = [laws] * len(names)
    elif isinstance(laws, Mapping):
        by_name = {name: law for key, law in laws.items() for name in _matching(key, names)}
        chosen = [by_name.get(name) for name in names]
    if not isinstance(chosen, Sequence) or isinstance(chosen, str):
        raise _not_laws_error(laws)
    if len(chosen) != len(names):
        must = f"be as many as the model has attention layers, {len(names)}"
        raise value_error("laws", must, len(chosen))
    pairs = [x if isinstance(x, tuple) and len(x) == 2 else (x, count) for x in chosen]
    for _, counted in pairs:
        check_choice("count", counted, COUNTS)
    return dict(zip(modules.values(), pairs, strict=True))


def _matching(key: int | str, names: Sequence[str]) -> list[str]:
    """The names of the layers that a key of a mapping of laws means."""
    if not is_integer(key) and not isinstance(key, str):
        raise type_error("laws", "have the numbers or names of layers as keys", repr(key))
    if isinstance(key, str):
        if found := [name for name in names if name == key or fnmatchcase(name, key)]:
            return found
        closest = ", ".join(map(repr, get_close_matches(key, names, cutoff=0)))
        must = f"have names or patterns of attention layers as keys, such as {closest} (see `laws_of`)"
        raise value_error("laws", must, repr(key))
    if key < 0:
        raise value_error("laws", "have the numbers of layers, from 0, as keys", key)
    if key >= len(names):
        raise value_error("laws", f"name attention layers of the model, 0 to {len(names) - 1}", key)
    return [names[key]]


def _not_laws_error(x: Any) -> TypeError:
    must = "be a law, or a sequence or mapping of laws"
    if isinstance(x, type) and issubclass(x, Law):
        return type_error("laws", must, f"the class {x.__name__}; call it: `{x.__name__}(...)`")
    if isinstance(x, str):
        must += " (`laws.preset` has those with a name)"
    elif isinstance(x, torch.nn.Module):
        must += " (a LawModule gives its law when it is called)"
    return type_error("laws", must, type(x).__name__)


def apply(
    model: Any,
    laws: Mapping[Any, LawAndCount],
    base: str | None = None,
    trainable: bool | str = False,
) -> contextlib.ExitStack:
    """Apply a law, or None, to each module. Without a `base`, the implementation stays as it is."""
    held = {
        module: None if law is None else layer_law(law, count, module, model, f"laws[{i}]", trainable)
        for i, (module, (law, count)) in enumerate(laws.items())
    }
    with contextlib.ExitStack() as stack:
        before = {module: getattr(module, LAW) for module in laws if hasattr(module, LAW)}
        implementations = _implementations(model)

        def restore() -> None:
            for config, implementation in implementations:
                config._attn_implementation = implementation
            for module in laws:
                if module in before:
                    set_law(module, before[module])
                elif hasattr(module, LAW):
                    delattr(module, LAW)
            write_entry(model, {})

        stack.callback(restore)
        others = {id(config): name for config, name in implementations if name != NAME}
        _BEFORE.setdefault(model, {}).update(others)
        if base is not None:
            set_base(model, base)
        for module, law in held.items():
            if law is not None:
                check_law_can_act(family_of(module), module, {})
        stack.enter_context(hooks(held))
        for module, law in held.items():
            set_law(module, law)
        write_entry(model, {})
        return stack.pop_all()


def _implementations(model: Any) -> list[tuple[Any, str | None]]:
    """All configurations in a model, outer before inner, and the attention implementation of each."""
    owners = (getattr(module, "config", None) for module in model.modules())
    configs = {id(config): config for owner in owners for config in configs_in(owner)}
    return [(config, config._attn_implementation) for config in configs.values()]


# ----------------------------------------------------------------------------- rules of the model


def warn_of_rules(modules: Iterable[Any]) -> None:
    """Warn of rules by which a model already scales its logits in attention modules that get a law."""
    layers: dict[int, tuple[Any, set[Any]]] = {}  # the numbers of the modules by configuration
    for module in modules:
        config = getattr(module, "config", None)
        if config is not None:
            _, numbers = layers.setdefault(id(config), (config, set()))
            numbers.add(getattr(module, "layer_idx", None))
    found = [(x, numbers) for config, numbers in layers.values() for x in _messages(config).items()]
    messages = [message for (message, of), numbers in found if of is None or numbers & {None, *of}]
    for message in dict.fromkeys(messages):  # each once
        warnings.warn(message, UserWarning, stacklevel=3)


def _messages(config: Any) -> dict[str, tuple[int, ...] | None]:
    """What to say of a configuration, and in which layers; None stands for all."""
    try:
        rules = from_config(config)
    except (TypeError, ValueError) as error:
        text = (
            "The model may scale its attention logits by a rule of its own, which the law would "
            f"multiply: the configuration cannot be read. {error}"
        )
        return {text: None}
    # `llama_4_scaling` is read by engines, and not by transformers.
    return {
        _message(rule): rule.layers
        for rule in rules
        if not any("llama_4_scaling = " in x for x in rule.off)
    }


def _message(rule: ModelRule) -> str:
    law = "a law whose numbers are weights" if rule.law is None else repr(rule.law)
    counts = "" if rule.counts is None else f", where n counts {rule.counts}"
    advice = "so the logits are scaled twice"
    if rule.law is not None and rule.counts is None:
        advice = (
            "which is right if the law was fitted to this model, or if it is 1 up to the lengths that "
            "the constant is for"
        )
    off = "The configuration of the model cannot switch the rule off."
    if rule.off:
        set_off = "; ".join(rule.off)
        off = f"To switch it off, set `{set_off}` in the configuration before the model is made."
    return (
        f"The model already scales its {rule.scales} by the rule {rule.name!r}: {law}{counts}. "
        f"The law multiplies them too, {advice}. {off}"
    )
