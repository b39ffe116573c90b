"""The attention modules of a model."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import transformers

from isentropic._checks import type_error, value_error
from isentropic.integrations.huggingface._families import (
    REFUSED,
    class_name,
    family_of,
    looks_up_attention,
)

# The newest version of transformers with which the tests ran.
TESTED = (5, 24)


@functools.cache  # once
def warn_of_newer_version() -> None:
    """Warn where transformers is newer than what was tested: its models may compute attention anew."""
    version = transformers.__version__
    if tuple(int(part) for part in version.split(".")[:2]) > TESTED:
        tested = ".".join(map(str, TESTED))
        warnings.warn(
            f"transformers {version} is newer than {tested}, the last version that isentropic was "
            "tested with. Compare the outputs of your model with `huggingface.use(model, None, "
            'base="isentropic")` and without it.',
            stacklevel=4,
        )


def attention_modules(model: Any) -> dict[str, Any]:
    """By name, the modules on whose attention laws can act."""
    warn_of_newer_version()
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "set_attn_implementation"):
        raise type_error("model", "be a model of transformers", type(model).__name__)
    modules = {
        name: module
        for name, module in model.named_modules()
        if uses_interface(module) or family_of(module) is not None
    }
    if not modules:
        must = (
            "be a model whose attention goes through the AttentionInterface of transformers, or of a "
            "family for which isentropic has hooks"
        )
        known = {name: REFUSED[name] for name in map(class_name, model.modules()) if name in REFUSED}
        reasons = (f"{name.partition('.')[2]}: {reason}" for name, reason in known.items())
        raise value_error("model", must, ": ".join((type(model).__name__, *reasons)))
    return modules


def uses_interface(module: Any) -> bool:
    """Whether the module looks up its attention in the AttentionInterface, and laws can act there."""
    kind: Any = type(module)
    return looks_up_attention(kind) and class_name(module) not in REFUSED


def configs_in(config: Any) -> Iterator[Any]:
    """A configuration and those within it, outer before inner."""
    if hasattr(config, "_attn_implementation"):
        yield config
        for key in config.sub_configs:
            yield from configs_in(getattr(config, key, None))


def n_heads(module: Any) -> int | None:
    names = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_attn_heads")
    found = [getattr(module, name, None) for name in names]
    found.append(getattr(getattr(module, "config", None), "num_attention_heads", None))
    return next((n for n in found if isinstance(n, int)), None)


def is_causal(module: Any) -> bool:
    return bool(getattr(module, "is_causal", True))


def layer_device(model: Any, module: torch.nn.Module) -> torch.device:
    """The device of an attention module, which may differ from that of the model."""
    parameter = next(module.parameters(), None)
    return model.device if parameter is None else parameter.device


def positions_from_1(query: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
    """The positions of the queries, counted from 1, broadcastable to (B, H, L)."""
    if positions is None or positions.ndim != 2 or positions.shape[1] != query.shape[2]:
        must = "be 'keys' if a model passes no `position_ids` (batch, queries) to its attention"
        raise value_error("count", must, "'positions'")
    return positions[:, None] + 1


@contextlib.contextmanager
def evaluation(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode. Afterwards each module has its own mode again."""
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
        model.eval()
        yield
