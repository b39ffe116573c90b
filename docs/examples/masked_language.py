"""Masked language models with rotary positions: what fails in contexts longer than those of training?

    python masked_language.py

This is the experiment of Su 2021 (archives/8823) on a small scale, with bytes of the sources of
Python's standard library. 15 % of the bytes are masked. Models are trained at n = 64 and tested at up
to 1024. The same bytes are masked at every length, so only the context grows.

- O: the standard scale 1/√d.
- O + law: the same weights, with the scale log n/(log 64 · √d) at test time. Training has a single
  length, at which the law is constant, so this is also the model trained with the law of base 64.
- O + calibrated: the same weights, with a law per head that `drift.calibrate` fits on texts of 64
  to 256 bytes.
- O, ReRoPE, and O + law, ReRoPE: the same weights, with relative positions clamped to ±48 (Su 2023,
  archives/9708). No position is outside the range of training, but the attention is spread over the
  same number of keys. This separates the two causes.
- E: trained and tested with the law of base 512.

- E, ReRoPE, and O + calibrated, ReRoPE: the same with clamped positions. The calibrated laws stay as
  they were fitted.

"Constant" always answers the most common byte, and its loss is that of the byte frequencies in the
training text.

What decides
------------
This section was written when the results of all arms but the last two were known. The quantity is the
gain in accuracy, as the mean over the lengths from 128 to 1024, in points. There are 5 seeds. The
differences between two arms are paired: one per seed. The smallest effect that matters is 1 point, and
their 95 % t interval decides (`experiment.decide`). The pairs are in `PAIRS`. A published gain is
reproduced if this interval is within 1 point of it.
"""

from __future__ import annotations

import functools
import math
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

import experiment
import numpy as np
import torch
from torch import Tensor, nn
from transformer import Attend, Encoder, Laws, calibrate, descend

import isentropic as it

NAME = "masked_language"
TRAINED = 64
LENGTHS = (64, 128, 256, 512, 1024)
CALIBRATED = (64, 128, 256)
CLAMP = 48
MASK = 256  # the token after the bytes
MASKED = 0.15
BLOCKS = 64  # test texts of the greatest length
SAMPLES = 8  # texts per length for the calibration
TOGETHER = 8192  # bytes in a test batch; entropies are measured on the first batch
OF_O = ("O", "O + law", "O + calibrated", "O, ReRoPE", "O + law, ReRoPE", "O + calibrated, ReRoPE")
OF_E = ("E", "E, ReRoPE")
# What decides
SMALLEST = 1.0  # points of accuracy, as the mean over the lengths beyond that of training
PAIRS = (
    ("O + law", "O"),
    ("O + calibrated", "O + law"),
    ("E", "O"),
    ("E", "O + law"),
    ("O, ReRoPE", "O"),
    ("O + law, ReRoPE", "O, ReRoPE"),
    ("O + calibrated, ReRoPE", "O + law, ReRoPE"),
    ("E, ReRoPE", "O + law, ReRoPE"),
)
PUBLISHED = {  # RoFormer-small on Chinese text, derivation of 8823, §7.1: accuracy in %
    "O": (43.27, 36.53, 23.02, 15.12, 11.54),
    "E": (43.11, 41.17, 34.04, 20.15, 13.58),
}


class Size(NamedTuple):
    width: int
    layers: int
    heads: int
    steps: int
    batch: int
    rate: float


SIZES = {
    "tiny": Size(16, 2, 2, 20, 4, 1e-3),
    "small": Size(128, 3, 4, 700, 32, 1e-3),
    "roformer-small": Size(384, 6, 6, 30_000, 256, 5e-4),  # for a GPU
}


class Model(nn.Module):
    """A model from bytes to logits of bytes, with tied embeddings. Only the attention has positions."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(MASK + 1, size.width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.encoder = Encoder(size.width, size.layers, size.heads)
        self.bias = nn.Parameter(torch.zeros(MASK))

    def forward(self, tokens: Tensor, attend: Attend) -> Tensor:
        x = self.encoder(self.tokens(tokens), attend)
        return x @ self.tokens.weight[:MASK].T + self.bias


def rotary_attention(laws: Laws, entropies: list[Tensor] | None = None) -> Attend:
    """Attention between rotated queries and keys. Entropies are appended to the list, if given."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = it.layers.rotary(q), it.layers.rotary(k)
        if entropies is not None:
            entropies.append(it.attention_entropy(q, k, law=laws[layer]))
        return it.attention(q, k, v, law=laws[layer])

    return attend


def clamped_attention(laws: Laws, entropies: list[Tensor] | None = None) -> Attend:
    """Rotary attention with relative positions clamped to ±CLAMP."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = clamped_logits(q, k)
        law = laws[layer]
        if law is not None:
            logits = logits * law(torch.full((1,), float(k.shape[-2])))[..., None]
        if entropies is not None:
            entropies.append(it.entropy_from_logits(logits))
        return torch.softmax(logits, dim=-1) @ v

    return attend


def clamped_logits(q: Tensor, k: Tensor) -> Tensor:
    """Logits ⟨q, k⟩/√d (..., L, S) with relative positions clamped to ±CLAMP."""
    n = k.shape[-2]
    position = torch.arange(n, device=q.device)
    apart = position[:, None] - position
    far = torch.full((n,), float(CLAMP), device=q.device)
    logits = torch.where(
        apart.abs() <= CLAMP,
        it.layers.rotary(q) @ it.layers.rotary(k).mT,
        torch.where(apart > 0, it.layers.rotary(q, far) @ k.mT, it.layers.rotary(q, -far) @ k.mT),
    )
    return logits / math.sqrt(q.shape[-1])


def sources() -> tuple[list[Path], list[Path]]:
    """Modules of the standard library: every eighth for tests, the others for training."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return [p for i, p in enumerate(paths) if i % 8], paths[::8]


@functools.cache
def corpus() -> tuple[Tensor, Tensor]:
    """The bytes of the sources, for training and for tests."""
    return tuple(
        torch.from_numpy(
            np.frombuffer(b"".join(p.read_bytes() for p in part), np.uint8).astype(np.int64)
        )
        for part in sources()
    )


def pieces(text: Tensor, count: int, n: int, generator: torch.Generator) -> Tensor:
    """`count` texts of n bytes from random positions."""
    start = torch.randint(len(text) - n, (count, 1), generator=generator)
    return text[start + torch.arange(n)]


def train(laws: Laws, size: Size, seed: int, device: str) -> Model:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Model(size).to(device)
    text, _ = corpus()

    def loss() -> Tensor:
        tokens = pieces(text, size.batch, TRAINED, generator)
        hidden = torch.rand(tokens.shape, generator=generator) < MASKED
        tokens, hidden = tokens.to(device), hidden.to(device)
        logits = model(tokens.masked_fill(hidden, MASK), rotary_attention(laws))
        return nn.functional.cross_entropy(logits[hidden], tokens[hidden])

    descend(model, loss, size.steps, size.rate, least=0.1, weight_decay=0.01)
    return model.eval()


def held_out() -> tuple[Tensor, Tensor]:
    """Test texts that were not used for training, and a mask of the bytes to predict."""
    _, text = corpus()
    generator = torch.Generator().manual_seed(0)
    blocks = pieces(text, BLOCKS, max(LENGTHS), generator)
    return blocks, torch.rand(blocks.shape, generator=generator) < MASKED


@torch.no_grad()
def evaluate(model: Model, attention: Any, laws: Laws, device: str) -> dict[str, list]:
    """The accuracy in % and the loss per length, and the entropy per length and layer."""
    blocks, masked = held_out()
    result: dict[str, list] = {"accuracy": [], "loss": [], "entropy": []}
    for n in LENGTHS:
        right, loss = 0, 0.0
        tokens, hidden = blocks.reshape(-1, n), masked.reshape(-1, n)
        for part, mask in zip(tokens.split(TOGETHER // n), hidden.split(TOGETHER // n), strict=True):
            part, mask = part.to(device), mask.to(device)
            logits = model(part.masked_fill(mask, MASK), attention(laws))[mask]
            right += (logits.argmax(-1) == part[mask]).sum().item()
            loss += nn.functional.cross_entropy(logits, part[mask], reduction="sum").item()
            experiment.advance()
        entropies: list[Tensor] = []
        part, mask = tokens[: TOGETHER // n].to(device), hidden[: TOGETHER // n].to(device)
        model(part.masked_fill(mask, MASK), attention(laws, entropies))
        result["accuracy"].append(100 * right / masked.sum().item())
        result["loss"].append(loss / masked.sum().item())
        result["entropy"].append([h.mean().item() for h in entropies])
    return result


def work(job: tuple[str, Size, int, str]) -> dict[str, dict]:
    """The results of all arms that use one trained model."""
    kind, size, seed, device = job
    if kind == "E":
        laws = [it.laws.LogLength(512)] * size.layers
        model = train(laws, size, seed, device)
        attentions = zip(OF_E, (rotary_attention, clamped_attention), strict=True)
        return {name: evaluate(model, attention, laws, device) for name, attention in attentions}
    standard = [None] * size.layers
    law = [it.laws.LogLength(TRAINED)] * size.layers
    model = train(standard, size, seed, device)

    def forward(attend: Attend) -> None:
        generator = torch.Generator().manual_seed(seed)
        for n in CALIBRATED:
            tokens = pieces(corpus()[0], SAMPLES, n, generator)
            hidden = torch.rand(tokens.shape, generator=generator) < MASKED
            model(tokens.masked_fill(hidden, MASK).to(device), attend)

    def rotated(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return it.layers.rotary(q), it.layers.rotary(k)

    with torch.no_grad():
        calibrated = calibrate(forward, size.layers, TRAINED, prepare=rotated)
    arms = {
        "O": (rotary_attention, standard),
        "O + law": (rotary_attention, law),
        "O + calibrated": (rotary_attention, calibrated),
        "O, ReRoPE": (clamped_attention, standard),
        "O + law, ReRoPE": (clamped_attention, law),
        "O + calibrated, ReRoPE": (clamped_attention, calibrated),
    }
    return {name: evaluate(model, *arm, device) for name, arm in arms.items()}


def constant() -> dict[str, float]:
    """The test scores of a model that knows only the frequencies of the bytes."""
    counts = torch.bincount(corpus()[0], minlength=MASK).double() + 1
    blocks, masked = held_out()
    answers = blocks[masked]
    return {
        "accuracy": 100 * (answers == counts.argmax()).double().mean().item(),
        "loss": -(counts / counts.sum()).log()[answers].mean().item(),
    }


def run(size: str, seeds: int, device: str) -> dict[str, Any]:
    jobs = [(kind, SIZES[size], seed, device) for seed in range(seeds) for kind in ("O", "E")]
    tests = len(LENGTHS) * BLOCKS * max(LENGTHS) // TOGETHER
    arms = {"O": len(OF_O), "E": len(OF_E)}
    steps = sum(SIZES[size].steps + arms[kind] * tests for kind, *_ in jobs)
    found = experiment.run(work, jobs, steps, workers=1 if device != "cpu" else None)
    results: dict[str, list] = {}
    for part in found:
        for name, result in part.items():
            results.setdefault(name, []).append(result)
    return {
        "size": size,
        **SIZES[size]._asdict(),
        "lengths": list(LENGTHS),
        "seeds": seeds,
        "predictions": int(held_out()[1].sum()),
        "constant": constant(),
        "arms": results,
    }


def main(arguments: list[str] | None = None) -> None:
    import masked_language_results

    parser = experiment.parser(NAME, __doc__, seeds=5)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--device", default="cpu", help="of PyTorch (cpu)")
    options = parser.parse_args(arguments)
    results = run(options.size, options.seeds, options.device)
    experiment.finish(
        NAME, results, masked_language_results.report, masked_language_results.picture, options.output
    )


if __name__ == "__main__":
    main()
