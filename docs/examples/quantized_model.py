"""What do quantized keys and values cost a language model, by bits and by quantizer?

    python quantized_model.py    # some minutes

SmolLM2-135M-Instruct on the first 1025 tokens of four texts. In each layer, all keys (after the rotary
positions) and values are quantized and restored before the attention. By quantizer and bits:

- the loss: mean over tokens of −log p, minus that of the exact model, in nats;
- the divergence: KL of the exact attention weights from those with quantized keys, in nats, where the
  queries are those of the exact model; mean over the last 128 queries, heads and layers;
- the bytes of a token in a head, with the scales, relative to bfloat16.

Then the same loss with a cache of `huggingface.quantized_cache`, whose last tokens stay exact: the text
is read in parts of `PART` tokens, as `generate` reads a long prompt; and the bytes of that cache after
all tokens, relative to those of an exact cache in bfloat16.

"integers, per token": one scale for each token of a head. "integers, keys per channel": one scale for
each channel of 64 consecutive tokens, as in KIVI (Liu et al. 2024, arXiv 2402.02750), and values per
token. "mse" and "unbiased": `jl.quantizer`. "mse and signs": the quantizer of TurboQuant for inner
products (arXiv 2504.19874), which spends the last bit on the signs of a projection of the rest.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import experiment
import matplotlib.pyplot as plt
import pretrained
import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm
from transformers.cache_utils import Cache, DynamicCache

import isentropic as it
from isentropic.integrations import huggingface

NAME = "quantized_model"
LENGTH = 1024
TEXTS = ("topics 0", "docstrings networkx", "source argparse", "source tarfile")
BITS = (2, 3, 4)
QUERIES = 128  # at the end of a text, for divergences
GROUP = 64  # tokens that share the scale of a channel
RECENT = 64  # exact tokens at the end of a cache
PART = 32  # tokens of a forward pass with a cache
OURS = ("mse", "unbiased")
SIGNS = "mse and signs"
KINDS = ("integers, per token", "integers, keys per channel", *OURS, SIGNS)


def integers(x: Tensor, bits: int) -> Tensor:
    """Integers of some bits, and one scale for each row."""
    most = 2 ** (bits - 1)
    step = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / max(most - 1, 1)
    return (x / step).round().clamp(-most, most - 1) * step


def per_channel(x: Tensor, bits: int) -> Tensor:
    return torch.cat([integers(part.mT, bits).mT for part in x.split(GROUP, dim=-2)], dim=-2)


def schemes(size: int, bits: int) -> dict[str, tuple[Callable, Callable]]:
    """How keys and values are quantized and restored."""

    def ours(kind: str, seed: int) -> Callable[[Tensor], Tensor]:
        f = it.jl.quantizer(size, bits, kind=kind, rng=seed, like=torch.empty(0))
        return lambda x: f.decode(f.encode(x))

    def with_signs(seed: int) -> Callable[[Tensor], Tensor]:
        codebook = it.jl.quantizer(size, bits - 1, rng=seed, like=torch.empty(0))
        signs = it.jl.quantizer(
            size, 1, kind="sign", n_components=size, rng=seed + 2, like=torch.empty(0)
        )

        def restore(x: Tensor) -> Tensor:
            first = codebook.decode(codebook.encode(x))
            return first + signs.decode(signs.encode(x - first))

        return restore

    per_token = (lambda x: integers(x, bits),) * 2
    channels = (lambda x: per_channel(x, bits), per_token[1])
    rotated = ((ours(x, 0), ours(x, 1)) for x in OURS)
    return dict(
        zip(KINDS, (per_token, channels, *rotated, (with_signs(0), with_signs(1))), strict=True)
    )


def bytes_of(kind: str, size: int, bits: int) -> float:
    """Of a key and a value, with scales in 16 bits, or in 32 bits for `jl.quantizer`."""
    scale = {SIGNS: 8, **dict.fromkeys(OURS, 4)}.get(kind, 2)
    return 2 * (size * bits / 8 + scale)


@torch.no_grad()
def with_cache(model: Any, ids: Tensor, cache: Cache) -> float:
    """The mean loss of the tokens, read in parts."""
    parts = (ids[start : start + PART + 1] for start in range(0, len(ids) - 1, PART))
    return torch.cat([pretrained.losses(model, part, cache) for part in parts]).mean().item()


def bytes_of_cache(cache: Cache) -> int:
    """With what is exact in 16 bits."""
    exact = sum(x.numel() * 2 for layer in cache.layers for x in (layer.keys, layer.values))
    older = [x for layer in cache.layers for x in getattr(layer, "older", ())]
    return exact + sum(x.codes.nbytes + x.scales.nbytes for x in older)


@torch.no_grad()
def measure(model: Any, ids: Tensor) -> dict[str, Any]:
    size = model.config.head_dim

    def loss(of_keys: Callable, of_values: Callable) -> float:
        def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
            key, value = of_keys(key), of_values(value)
            out = it.attention(query, key, value, law=None, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2), None

        with pretrained.attention(model, attend):
            states = model.model(ids[None, :-1], use_cache=False).last_hidden_state[0]
        return pretrained.losses_of(model, states, ids[1:]).mean().item()

    kept: list[tuple[Tensor, Tensor]] = []

    def keep(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
        kept.append((query, key))
        out = it.attention(query, key, value, law=None, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2), None

    with pretrained.attention(model, keep):
        states = model.model(ids[None, :-1], use_cache=False).last_hidden_state[0]
    exact = pretrained.losses_of(model, states, ids[1:]).mean().item()
    found: dict[str, Any] = {"exact": exact}
    for bits in BITS:
        for name, (of_keys, of_values) in schemes(size, bits).items():
            divergence = [_divergence(query, key, of_keys(key)) for query, key in kept]
            found[f"{name} {bits}"] = {
                "loss": loss(of_keys, of_values) - exact,
                "divergence": sum(divergence) / len(divergence),
            }
            experiment.advance()
    exact_cache = DynamicCache(config=model.config)
    exact = with_cache(model, ids, exact_cache)
    for bits, kind in itertools.product(BITS, OURS):
        cache = huggingface.quantized_cache(model, bits, kind=kind, recent=RECENT)
        found[f"cache, {kind} {bits}"] = {
            "loss": with_cache(model, ids, cache) - exact,
            "share": bytes_of_cache(cache) / bytes_of_cache(exact_cache),
        }
        experiment.advance()
    return found


def _divergence(query: Tensor, key: Tensor, other: Tensor) -> float:
    query = query[:, :, -QUERIES:]
    p, q = (
        it.AttentionDistribution(query, x, law=None, is_causal=True, enable_gqa=True)
        for x in (key, other)
    )
    return p.kl_divergence(q).mean().item()


def report(results: dict[str, Any]) -> str:
    """A table in Markdown."""
    rows = []
    for bits in BITS:
        for name in KINDS:
            found = [x[f"{name} {bits}"] for x in results["texts"].values()]
            losses, divergences = ([x[what] for x in found] for what in ("loss", "divergence"))
            size = bytes_of(name, results["head_dim"], bits) / (4 * results["head_dim"])
            rows.append([
                str(bits), name, f"{100 * size:.0f} %", f"{sum(losses) / len(losses):+.3f}",
                f"{min(losses):+.3f} to {max(losses):+.3f}",
                f"{sum(divergences) / len(divergences):.4f}",
            ])  # fmt: skip
    for bits, kind in itertools.product(BITS, OURS):
        found = [x[f"cache, {kind} {bits}"] for x in results["texts"].values()]
        losses, shares = ([x[what] for x in found] for what in ("loss", "share"))
        rows.append([
            str(bits), f"{kind}, the last {RECENT} tokens exact", f"{100 * max(shares):.0f} %",
            f"{sum(losses) / len(losses):+.3f}", f"{min(losses):+.3f} to {max(losses):+.3f}", "",
        ])  # fmt: skip
    head = ["bits", "quantizer", "bytes", "loss, nats", "lowest and highest text", "divergence, nats"]
    return experiment.table(head, rows)


def picture(results: dict[str, Any]) -> Figure:
    """Plot the loss by bits, for each quantizer: the mean, and a small dot for each text."""
    figure, axis = plt.subplots(figsize=(6.4, 4), layout="constrained")
    cached = f"cache, {OURS[0]}"
    for i, name in enumerate((*KINDS, cached)):
        found = [[x[f"{name} {bits}"]["loss"] for x in results["texts"].values()] for bits in BITS]
        places = [bits + 0.1 * (i - 2.5) for bits in BITS]
        label = f"{OURS[0]}, the last {RECENT} tokens exact" if name == cached else name
        axis.plot(places, [sum(x) / len(x) for x in found], "o", color=f"C{i}", label=label)
        for place, losses in zip(places, found, strict=True):
            axis.plot([place] * len(losses), losses, ".-", color=f"C{i}", alpha=0.5, ms=4, lw=1)
    axis.set_yscale("log")
    axis.set_yticks(ticks := [0.01, 0.03, 0.1, 0.3, 1, 3], [str(x) for x in ticks])
    axis.minorticks_off()
    axis.set_xticks(BITS, [f"{bits} bits" for bits in BITS])
    axis.set_ylabel("loss above that of exact keys and values, nats")
    axis.legend(frameon=False, fontsize=9)
    return figure


def main(arguments: list[str] | None = None) -> None:
    options = pretrained.model_parser(NAME, __doc__).parse_args(arguments)
    model, tokenizer = pretrained.load(options.cache / "model")
    texts = [pretrained.read(name, tokenizer, LENGTH) for name in TEXTS]
    results = {"head_dim": model.config.head_dim, "digests": {x.name: x.digest for x in texts}}
    results["texts"] = {x.name: measure(model, x.ids) for x in tqdm(texts, unit=" texts")}
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"{NAME}.json"
    path.write_text(json.dumps(experiment.rounded(results), indent=1) + "\n")
    picture(results).savefig(options.output / f"{NAME}.png", dpi=120)
    print(report(results))


if __name__ == "__main__":
    main()
