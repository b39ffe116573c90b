"""How large is the error of four-bit keys and values of a language model, plain and rotated?

    python quantize_cache.py    # a minute

The keys (after the rotary positions) and values of SmolLM2-135M-Instruct on four texts are rounded to
four bits and back. There is one scale for each 64 numbers: those of a token in a head ("per token"), or
those of a channel in 64 consecutive tokens ("per channel", for keys, as in KIVI, Liu et al. 2024, arXiv
2402.02750). A rotated cache is rotated before it is rounded, and back after it.

Quantity: the norm of the error relative to that of the exact array, for keys, values and the output of
attention of the last 64 queries, mean over texts, layers and heads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import experiment
import pretrained
import smollm2_fits
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache

import isentropic as it

NAME = "quantize_cache"
LENGTH = 512
TEXTS = ("topics 0", "docstrings networkx", "source argparse", "source tarfile")
GROUP = 64  # tokens that share the scale of a channel; as many numbers as a token has in a head


def per_token(x: Tensor) -> Tensor:
    """Four bits, and one scale for each token of a head."""
    step = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 7
    return (x / step).round().clamp(-8, 7) * step


def per_channel(x: Tensor) -> Tensor:
    """Four bits, and one scale for each channel of `GROUP` tokens."""
    return torch.cat([per_token(part.mT).mT for part in x.split(GROUP, dim=-2)], dim=-2)


def schemes(size: int) -> dict[str, tuple[Callable, Callable]]:
    """How keys and values are rounded and restored, by name."""
    f = it.jl.rotation(size, rng=0, like=torch.empty(0))

    def rotated(x: Tensor) -> Tensor:
        return f.adjoint(per_token(f(x)))

    return {
        "per token": (per_token, per_token),
        "rotated, per token": (rotated, rotated),
        "keys per channel": (per_channel, per_token),
        "keys per channel, values rotated": (per_channel, rotated),
    }


def errors(query: Tensor, key: Tensor, value: Tensor) -> dict[str, dict[str, float]]:
    """The mean relative errors over heads: queries (1, H, L, E), keys and values (1, G, S, E)."""

    def attend(key: Tensor, value: Tensor) -> Tensor:
        return it.attention(query, key, value, law=None, is_causal=True, enable_gqa=True)

    exact, result = attend(key, value), {}
    for name, (of_keys, of_values) in schemes(key.shape[-1]).items():
        k, v = of_keys(key), of_values(value)
        result[name] = {
            "keys": relative(k, key),
            "values": relative(v, value),
            "output": relative(attend(k, v), exact),
        }
    return result


def relative(got: Tensor, exact: Tensor) -> float:
    return ((got - exact).norm(dim=(-2, -1)) / exact.norm(dim=(-2, -1))).mean().item()


@torch.no_grad()
def measure(model: Any, texts: Sequence[Tensor]) -> dict[str, dict[str, float]]:
    """The mean errors over texts and layers."""
    found = []
    for ids in tqdm(texts, unit=" texts"):
        cache = DynamicCache(config=model.config)
        with smollm2_fits.queries(model) as queries:
            model(ids[None, :-1], cache=cache, use_cache=True)
        for query, layer in zip(queries, cache.layers, strict=True):
            found.append(errors(query, layer.keys, layer.values))
    return {
        name: {what: sum(x[name][what] for x in found) / len(found) for what in of}
        for name, of in found[0].items()
    }


def report(results: dict[str, Any]) -> str:
    """A table in Markdown, with errors in percent."""
    rows = [
        [name, *(f"{100 * found[x]:.1f} %" for x in ("keys", "values", "output"))]
        for name, found in results["errors"].items()
    ]
    return experiment.table(["", "keys", "values", "output of attention"], rows)


def main(arguments: list[str] | None = None) -> None:
    options = pretrained.model_parser(NAME, __doc__).parse_args(arguments)
    model, tokenizer = pretrained.load(options.cache / "model")
    texts = [pretrained.read(name, tokenizer, LENGTH) for name in TEXTS]
    results = {
        "texts": {x.name: x.digest for x in texts},
        "errors": measure(model, [x.ids for x in texts]),
    }
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"{NAME}.json"
    path.write_text(json.dumps(experiment.rounded(results), indent=1) + "\n")
    print(report(results))


if __name__ == "__main__":
    main()
