"""Warnings about models that already scale their attention logits by a rule of their own."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from isentropic.laws import Law, ModelRule, from_config


def warn_of_rules(modules: Sequence[Any], laws: Sequence[Law | None], *, stacklevel: int = 2) -> None:
    """Warn if a model has rules of its own in attention modules that get a law.

    `stacklevel` is as for `warnings.warn` in the calling function.
    """
    read: dict[int, dict[str, tuple[int, ...] | None]] = {}  # of each configuration
    messages: dict[str, None] = {}  # each once, in their order
    for module, law in zip(modules, laws, strict=True):
        config = getattr(module, "config", None)
        if law is None or config is None:
            continue
        if id(config) not in read:
            read[id(config)] = _messages(config)
        layer = getattr(module, "layer_idx", None)
        for message, layers in read[id(config)].items():
            if layers is None or layer is None or layer in layers:
                messages[message] = None
    for message in messages:
        warnings.warn(message, UserWarning, stacklevel=stacklevel + 1)


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
