"""Warnings about models that already scale their attention logits by a rule of their own."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from isentropic.laws import Law, from_config
from isentropic.laws._configurations import ModelRule

_CONSTANTS = {
    "longrope": "LongRoPE's factor on cosine and sine",
    "mscale": "the temperature of `mscale_all_dim`",
    "yarn": "YaRN's factor on cosine and sine",
}


def warn_of_rules(modules: Sequence[Any], laws: Sequence[Law | None], *, stacklevel: int = 2) -> None:
    """Warn if a model has rules of its own in layers that get a law.

    Parameters
    ----------
    modules : sequence of torch.nn.Module
        The attention modules of the model. Their rules are read from their ``config``.
    laws : sequence of Law or None
        The law that each module gets.
    stacklevel : int
        As for `warnings.warn` in the calling function.
    """
    seen = []
    for message in _messages(modules, laws):
        if message not in seen:
            seen.append(message)
            warnings.warn(message, UserWarning, stacklevel=stacklevel + 1)


def _messages(modules: Sequence[Any], laws: Sequence[Law | None]) -> Iterator[str]:
    rules: dict[int, tuple[ModelRule, ...] | str] = {}
    for module, law in zip(modules, laws, strict=True):
        config = getattr(module, "config", None)
        if law is None or config is None:
            continue
        if id(config) not in rules:
            rules[id(config)] = _rules_or_error(config)
        found = rules[id(config)]
        if isinstance(found, str):
            yield found
            continue
        for rule in found:
            read_by_engines = any("llama_4_scaling = " in x for x in rule.off)  # not by transformers
            if _is_for(rule, module) and not read_by_engines:
                yield _message(rule)


def _rules_or_error(config: Any) -> tuple[ModelRule, ...] | str:
    try:
        return from_config(config)
    except (TypeError, ValueError) as error:
        return (
            "The model may scale its attention logits by a rule of its own, which the law would "
            f"multiply: the configuration cannot be read. {error}"
        )


def _is_for(rule: ModelRule, module: Any) -> bool:
    layer = getattr(module, "layer_idx", None)
    return rule.layers is None or layer is None or layer in rule.layers


def _message(rule: ModelRule) -> str:
    if rule.law is not None and rule.counts is None:
        what = _constant_message(rule, rule.law(1))
    else:
        law = "a law whose numbers are weights" if rule.law is None else f"{rule.law!r}"
        what = (
            f"The model already scales its attention logits with the length, by the rule "
            f"{rule.name!r}: {law}, where n counts {rule.counts}. The law multiplies that, so the "
            "logits are scaled twice."
        )
    if not rule.off:
        return f"{what} The configuration of the model cannot switch the rule off."
    off = "; ".join(rule.off)
    return f"{what} To switch it off, set `{off}` in the configuration before the model is made."


def _constant_message(rule: ModelRule, factor: float) -> str:
    part = "the part of its logits that comes from rotated features"
    if rule.scales != "rotated products":
        part = "its logits"
    return (
        f"The model already multiplies {part} by the constant {factor:.4g}, {_CONSTANTS[rule.name]}. "
        "The law multiplies them too. That is right if the law was fitted to this model, or if it is 1 "
        "up to the lengths that the constant is for."
    )
