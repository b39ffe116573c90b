"""The attention modules of a model."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from isentropic._checks import type_error, value_error


def attention_modules(model: Any) -> dict[str, Any]:
    """By name, the modules whose `forward` looks up its attention in the AttentionInterface."""
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "set_attn_implementation"):
        raise type_error("model", "be a model of transformers", type(model).__name__)

    def uses_interface(module: torch.nn.Module) -> bool:
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names

    modules = {name: module for name, module in model.named_modules() if uses_interface(module)}
    if not modules:
        must = "be a model whose attention goes through the AttentionInterface of transformers"
        raise value_error("model", must, type(model).__name__)
    return modules


def n_heads(module: Any) -> int | None:
    for owner, name in (
        (module, "num_heads"), (module, "num_attention_heads"), (module, "n_heads"),
        (getattr(module, "config", None), "num_attention_heads"),
    ):  # fmt: skip
        if isinstance(n := getattr(owner, name, None), int):
            return n
    return None
