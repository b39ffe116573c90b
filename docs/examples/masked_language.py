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
import matplotlib.pyplot as plt
import numpy as np
import torch
from effects import DILUTION, POSITIONS, Effect
from experiment import (
    Claim,
    Decision,
    decide,
    spread,
    table,
    verdict,
)
from matplotlib.figure import Figure
from torch import Tensor, nn
from transformer import Attend, Encoder, Laws, calibrate

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
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.rate)
    warm = max(1, size.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / warm, max(0.1, 1 - i / size.steps))
    )
    text, _ = corpus()
    for _ in range(size.steps):
        tokens = pieces(text, size.batch, TRAINED, generator)
        hidden = torch.rand(tokens.shape, generator=generator) < MASKED
        tokens, hidden = tokens.to(device), hidden.to(device)
        logits = model(tokens.masked_fill(hidden, MASK), rotary_attention(laws))
        loss = nn.functional.cross_entropy(logits[hidden], tokens[hidden])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        experiment.advance()
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


def seeds_of(results: dict[str, Any], arm: str, what: str) -> list[tuple[float, ...]]:
    """The values of all seeds, per length."""
    return list(zip(*(seed[what] for seed in results["arms"][arm]), strict=True))


def layers_of(results: dict[str, Any], arm: str) -> np.ndarray:
    """Entropies (length, layer), as means over heads and seeds."""
    return np.mean([seed["entropy"] for seed in results["arms"][arm]], axis=0)


def gains(results: dict[str, Any], arm: str, over: str = "O") -> np.ndarray:
    """The difference in accuracy between two arms, in percentage points, (length, seed)."""
    return np.asarray(seeds_of(results, arm, "accuracy")) - seeds_of(results, over, "accuracy")


def area(results: dict[str, Any], arm: str, over: str = "O") -> list[float]:
    """The mean gain over the lengths beyond that of training, in percentage points, by seed."""
    return gains(results, arm, over)[1:].mean(axis=0).tolist()


def decision(results: dict[str, Any], arm: str, over: str = "O") -> Decision:
    return decide(area(results, arm, over), SMALLEST)


def report(results: dict[str, Any]) -> str:
    lengths, arms = results["lengths"], results["arms"]
    accuracy = table(
        ["accuracy in %", *lengths],
        [
            *([arm, *map(spread, seeds_of(results, arm, "accuracy"))] for arm in arms),
            [
                "always the most frequent byte",
                *[f"{results['constant']['accuracy']:.1f}"] * len(lengths),
            ],
            *([f"*Su 2021: {arm}*", *values] for arm, values in PUBLISHED.items()),
        ],
    )
    loss = table(
        ["loss in nats", *lengths],
        [
            *([arm, *(spread(x, ".2f") for x in seeds_of(results, arm, "loss"))] for arm in arms),
            ["the frequencies of bytes", *[f"{results['constant']['loss']:.2f}"] * len(lengths)],
        ],
    )
    entropy = table(
        ["entropy in nats by layer", *lengths],
        [
            [arm, *(" · ".join(f"{h:.2f}" for h in row) for row in layers_of(results, arm))]
            for arm in arms
        ],
    )
    each = table(
        [f"n = {lengths[-1]}, accuracy in % by seed", *range(results["seeds"])],
        [[arm, *(f"{x:.1f}" for x in seeds_of(results, arm, "accuracy")[-1])] for arm in arms],
    )
    decisions = table(
        ["points of accuracy", *lengths[1:], "mean [95 % interval]"],
        [
            [
                f"{arm} against {other}",
                *(f"{x:+.1f}" for x in gains(results, arm, other)[1:].mean(axis=1)),
                decision(results, arm, other).interval(),
            ]
            for arm, other in PAIRS
        ],
    )
    held = np.abs(layers_of(results, "O + calibrated") - layers_of(results, "O + calibrated")[0]).max()
    low = results["constant"]["accuracy"]
    lost = {
        n: [arm for arm in arms if np.mean(seeds_of(results, arm, "accuracy")[i]) < low]
        for i, n in enumerate(lengths)
    }
    arms_of_causes = ("O", "O + law", "O, ReRoPE", "O + law, ReRoPE")
    causes = experiment.diagnosis(results, arms_of_causes, CLAMP, results["predictions"])
    below = "; ".join(f"at n = {n}: {', '.join(found)}" for n, found in lost.items() if found)
    return f"""\
{results["layers"]} layers, d = {results["width"]}, {results["heads"]} heads, {results["steps"]} steps \
of {results["batch"]} × {TRAINED} bytes, {results["seeds"]} seeds, {results["predictions"]} predictions.

{accuracy}

{each}

{loss}

{entropy}

The differences are paired over the seeds. A mean gain matters from {SMALLEST:g} point. They have no
verdicts, because this was fixed when results were known:

{decisions}

What of the rise of the loss is dilution, and what is due to positions? The errors are over seeds:

```text
{causes}
```

The calibrated law holds the entropy of every layer within {held:.2f} nats. Some arms are below the
accuracy of always answering with the most frequent byte ({low:.1f} %), so their differences there mean
little ({below}).
Where positions are clamped, each query still sees as many keys, but the entropy grows less too.
"""


def effects(results: dict[str, Any]) -> list[Effect]:
    n = results["lengths"]
    task = f"masked bytes, trained with {TRAINED}, n = {n[1]} to {n[-1]}"
    return [
        Effect(
            fails, task, arm, other, decision(results, *pair), SMALLEST, "points",
            "the criterion was fixed when results were known",
        )
        for fails, arm, other, pair in (
            (POSITIONS, "log n at test", "none", ("O + law", "O")),
            (POSITIONS, "clamped positions", "none", ("O, ReRoPE", "O")),
            (
                DILUTION, "clamped positions and log n", "clamped positions",
                ("O + law, ReRoPE", "O, ReRoPE"),
            ),
        )
    ]  # fmt: skip


def claims(results: dict[str, Any]) -> list[Claim]:
    lengths = results["lengths"]
    plain = np.asarray(seeds_of(results, "O", "accuracy"))
    fall = plain[0] - plain[-1]
    held, e = gains(results, "O + calibrated"), gains(results, "E")
    clamped = gains(results, "O, ReRoPE")[-1]
    base = gains(results, "E", "O + law").mean(axis=1)
    found = {arm: decision(results, arm) for arm in ("E", "O + law")}
    published = np.subtract(PUBLISHED["E"], PUBLISHED["O"])

    def over(x: np.ndarray) -> str:
        return ", ".join(f"{points:+.1f}" for points in x)

    def at_one(n: int) -> str:
        """The gain of E at one length."""
        points = e[lengths.index(n)].tolist()
        claimed = published[lengths.index(n)]
        return (
            f"Masked bytes: E {decide(points, SMALLEST).interval()} points, published {claimed:+.1f}."
        )

    return [
        Claim(
            "derivation of 8823, §7.1",
            "Accuracy of O falls as the context grows beyond the length of training.",
            f"Masked bytes: {min(fall):.1f} to {max(fall):.1f} points less at n = {lengths[-1]}.",
            "exploratory",
        ),
        Claim(
            "derivation of 8823, §7.1",
            "Beyond the length of training E is more accurate than O.",
            f"Masked bytes, mean gain at n = {lengths[1]} to {lengths[-1]} in points: E "
            f"{found['E'].interval()}, O + law {found['O + law'].interval()}.",
            "exploratory",
        ),
        Claim(
            "derivation of 8823, §7.1",
            f"In the mean of these lengths E gains {published[1:].mean():.1f} points.",
            f"Masked bytes: {found['E'].interval()}.",
            "exploratory",
        ),
        Claim("derivation of 8823, §7.1", "At n = 256 E gains 11 points.", at_one(256), "exploratory"),
        Claim(
            "derivation of 8823, §7.1",
            "At the length of training E costs 0.16 points.",
            at_one(TRAINED),
            "exploratory",
        ),
        Claim(
            "post 9588",
            "The base can be 512 whatever the length of training, with hardly any effect.",
            f"Masked bytes, trained at {TRAINED}: base 512 against base {TRAINED} changes the accuracy "
            f"by {over(base)} points at n = {', '.join(map(str, lengths))}.",
            verdict(np.abs(base).max() < 1),
        ),
        Claim(
            "post 8823",
            "Attention whose entropy is held generalizes to lengths that were not seen.",
            f"Masked bytes, n = {lengths[-1]}: of the points lost the calibrated law, which holds it, "
            f"brings back {min(held[-1]):.1f} to {max(held[-1]):.1f} by seed, clamped positions "
            f"{min(clamped):.1f} to {max(clamped):.1f}.",
            verdict(all(2 * gained > lost for gained, lost in zip(held[-1], fall, strict=True))),
        ),
        Claim(
            "derivation of 8823, §7.1",
            "All this with RoFormer-small (6 layers, d = 384) on Chinese text.",
            "`--size roformer-small --device cuda` trains a model of that size on bytes.",
            "not tested",
        ),
    ]


def picture(results: dict[str, Any]) -> Figure:
    """Plot accuracy and mean entropy against length."""
    lengths = results["lengths"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.8), layout="constrained")
    for i, arm in enumerate(results["arms"]):
        values = np.asarray(seeds_of(results, arm, "accuracy"))
        style = "--" if "ReRoPE" in arm else "-"
        left.plot(lengths, values.mean(axis=1), "o" + style, color=f"C{i}", label=arm)
        left.fill_between(lengths, values.min(axis=1), values.max(axis=1), color=f"C{i}", alpha=0.15)
        entropy = layers_of(results, arm).mean(axis=1)
        right.plot(lengths, entropy, "o" + style, color=f"C{i}")
    for (arm, values), style in zip(PUBLISHED.items(), ("s:", "D:"), strict=True):
        left.plot(LENGTHS, values, style, color="gray", label=f"Su 2021: {arm}", markersize=4)
    left.axhline(results["constant"]["accuracy"], color="k", linewidth=0.8, label="most frequent byte")
    right.plot(lengths, np.log(lengths), color="gray", linewidth=0.8, label="log n")
    for ax in (left, right):
        experiment.length_axis(ax, lengths, "bytes of context")
    left.set_ylabel("accuracy in % (band: all seeds)")
    right.set_ylabel("mean attention entropy in nats")
    figure.legend(fontsize=8, loc="outside lower center", ncols=6)
    return figure


def main(arguments: list[str] | None = None) -> None:
    parser = experiment.parser(NAME, __doc__, seeds=5)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--device", default="cpu", help="of PyTorch (cpu)")
    options = parser.parse_args(arguments)
    results = run(options.size, options.seeds, options.device)
    experiment.finish(NAME, results, report, picture, options.output)


if __name__ == "__main__":
    main()
