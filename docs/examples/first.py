"""FIRST: does a Transformer that was trained on short strings find the first bit of long strings?

    python first.py

This is the task of Chiang & Cholak (2022, arXiv 2202.12172). The input is a token CLS and a string of
random bits. The answer is the first bit, which the model outputs at CLS. Every additional bit takes
weight from the one that matters. Models are trained with 64 tokens, and tested with up to 2048:

- O: the standard scale 1/√d.
- O + law: the same weights, with the scale log n/(log 64 · √d) at test time.
- O + calibrated: the same weights, with a law per layer. `isentropic.calibrate` fits it on strings of
  64 to 256 tokens, without their answers, so that the mean entropy of all tokens stays constant.
- O + calibrated at CLS: the same for the entropy of CLS only.
- E: trained and tested with the scale log n/(log 512 · √d).
"""

from __future__ import annotations

import statistics
from typing import Any

import experiment
import matplotlib.pyplot as plt
import torch
from experiment import Claim, slope, spread, table, verdict
from matplotlib.figure import Figure
from torch import Tensor, nn
from transformer import Attend, Encoder, Laws, attention_with, calibrate

import isentropic as it

NAME = "first"
TRAINED = 64
LENGTHS = (64, 128, 256, 512, 1024, 2048)
CALIBRATED = (64, 128, 256)
WIDTH, LAYERS = 16, 2
STEPS, BATCH, RATE = 300, 48, 3e-3
TESTS = 256  # strings per length
MEASURED = 16  # of these strings, for entropies and weights
SAMPLES = 64  # strings per length for the calibration
CLS = 2
ARMS = ("O", "O + law", "O + calibrated", "O + calibrated at CLS", "E")


class Reader(nn.Module):
    """A model that embeds the bits, marks the first one, and reads the answer at CLS."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(3, WIDTH)
        self.first = nn.Parameter(torch.randn(WIDTH))
        self.encoder = Encoder(WIDTH, LAYERS, heads=1)
        self.answer = nn.Linear(WIDTH, 2)

    def forward(self, tokens: Tensor, attend: Any) -> Tensor:
        x = self.tokens(tokens)
        mark = torch.arange(tokens.shape[1], device=tokens.device)[:, None] == 1
        return self.answer(self.encoder(x + mark * self.first, attend)[:, 0])


def strings(count: int, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens (count, n) and answers (count,)."""
    bits = torch.randint(2, (count, n - 1), generator=generator)
    return torch.cat((torch.full((count, 1), CLS), bits), dim=1), bits[:, 0]


def train(laws: Laws, seed: int) -> Reader:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Reader()
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    for _ in range(STEPS):
        tokens, answers = strings(BATCH, TRAINED, generator)
        loss = nn.functional.cross_entropy(model(tokens, attention_with(laws)), answers)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        experiment.advance()
    return model.eval()


@torch.no_grad()
def evaluate(model: Reader, laws: Laws) -> dict[str, list]:
    """Per length: accuracy in %, loss, and per layer the entropy and the weight of the first bit."""
    result: dict[str, list] = {"accuracy": [], "loss": [], "entropy": [], "weight": []}
    for n in LENGTHS:
        tokens, answers = strings(TESTS, n, torch.Generator().manual_seed(10**6 + n))
        batches = tokens.split(max(1, 2**15 // n))
        logits = torch.cat([model(part, attention_with(laws)) for part in batches])
        entropies, weights = [], []

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            entropies.append(it.attention_entropy(q, k, law=laws[i]).mean().item())  # noqa: B023
            of_cls = it.attention_weights(q[..., :1, :], k, law=laws[i])
            weights.append(of_cls[..., 1].mean().item())  # noqa: B023
            return it.attention(q, k, v, law=laws[i])

        model(tokens[:MEASURED], attend)
        result["accuracy"].append(100 * (logits.argmax(-1) == answers).double().mean().item())
        result["loss"].append(nn.functional.cross_entropy(logits, answers).item())
        result["entropy"].append(entropies)
        result["weight"].append(weights)
        experiment.advance(n // 8)
    return result


def work(job: tuple[str, int]) -> dict[str, dict]:
    """The results of all arms that use one trained model."""
    kind, seed = job
    if kind == "E":
        laws = [it.laws.LogLength(512)] * LAYERS
        return {"E": evaluate(train(laws, seed), laws)}
    model = train([None] * LAYERS, seed)

    def forward(attend: Attend) -> None:
        generator = torch.Generator().manual_seed(10_000 + seed)
        for n in CALIBRATED:
            model(strings(SAMPLES, n, generator)[0], attend)

    with torch.no_grad():
        of_all = calibrate(forward, LAYERS, TRAINED)
        of_cls = calibrate(forward, LAYERS, TRAINED, rows=slice(0, 1))
    arms = {
        "O": [None] * LAYERS,
        "O + law": [it.laws.LogLength(TRAINED)] * LAYERS,
        "O + calibrated": of_all,
        "O + calibrated at CLS": of_cls,
    }
    return {name: evaluate(model, laws) for name, laws in arms.items()}


def run(seeds: int) -> dict[str, Any]:
    jobs = [(kind, seed) for seed in range(seeds) for kind in ("O", "E")]
    steps = len(jobs) * STEPS + len(ARMS) * seeds * sum(n // 8 for n in LENGTHS)
    arms: dict[str, list] = {name: [] for name in ARMS}
    for part in experiment.run(work, jobs, steps):
        for name, result in part.items():
            arms[name].append(result)
    return {"lengths": list(LENGTHS), "seeds": seeds, "arms": arms}


def accuracies(results: dict[str, Any], arm: str) -> list[list[float]]:
    """The accuracy in %, per seed and length."""
    return [seed["accuracy"] for seed in results["arms"][arm]]


def guesses(seed: dict[str, list]) -> bool:
    """Whether a seed guesses at the greatest length. Other seeds are nearly always right."""
    return seed["accuracy"][-1] < 75


def at_chance(results: dict[str, Any], arm: str) -> int:
    """The number of seeds that guess."""
    return sum(map(guesses, results["arms"][arm]))


def growth(results: dict[str, Any], arm: str) -> float:
    """The slope dH/d log n of the mean over tokens, layers and seeds."""
    entropy = [
        statistics.fmean(h for seed in results["arms"][arm] for h in seed["entropy"][i])
        for i in range(len(results["lengths"]))
    ]
    return slope(results["lengths"], entropy)


def losses(results: dict[str, Any]) -> list[tuple]:
    """For each seed that guesses with O: the layer that loses the most weight of the first bit at CLS.

    With this weight for O at the smallest and the greatest length, and for the law at the greatest.
    """
    found = []
    for seed, (plain, law) in enumerate(
        zip(results["arms"]["O"], results["arms"]["O + law"], strict=True)
    ):
        if guesses(plain):
            drops = [a - b for a, b in zip(plain["weight"][0], plain["weight"][-1], strict=True)]
            i = drops.index(max(drops))
            found.append((seed, i, plain["weight"][0][i], plain["weight"][-1][i], law["weight"][-1][i]))
    return found


def report(results: dict[str, Any]) -> str:
    lengths, seeds = results["lengths"], results["seeds"]
    means = table(
        ["accuracy in %, mean ± standard deviation", *lengths],
        [
            [arm, *(spread(column, ".1f") for column in zip(*accuracies(results, arm), strict=True))]
            for arm in ARMS
        ],
    )
    each = table(
        [f"n = {lengths[-1]}, accuracy in % by seed", *range(seeds)],
        [[arm, *(f"{seed[-1]:.0f}" for seed in accuracies(results, arm))] for arm in ARMS],
    )
    sums = table(
        [f"of {seeds} seeds", *ARMS],
        [
            [f"guess at n = {lengths[-1]}", *(at_chance(results, arm) for arm in ARMS)],
            ["dH/d log n, mean of all tokens", *(f"{growth(results, arm):.2f}" for arm in ARMS)],
        ],
    )
    lost = table(
        [
            "seed",
            "layer",
            f"O, n = {lengths[0]}",
            f"O, n = {lengths[-1]}",
            f"O + law, n = {lengths[-1]}",
        ],
        (
            [seed, layer + 1, *(f"{x:.2f}" for x in weights)]
            for seed, layer, *weights in losses(results)
        ),
    )
    return f"""\
{means}

A model either finds the bit or guesses, so that a mean hides what happens:

{each}

{sums}

The failing models lose the first bit among the random ones. CLS's weight on it, in the layer where most
is lost:

{lost}

The mean entropy of all tokens is *not* held by the law: most tokens have nothing to look for here, and
their attention is spread whatever the factor. Nor is a calibrated law a surer cure than the plain one:
it holds a mean, of many tokens or of much of the weight of CLS that does not matter, and can let go of
the little that does.
"""


def claims(results: dict[str, Any]) -> list[Claim]:
    plain, law = accuracies(results, "O"), accuracies(results, "O + law")
    gains = [b - a for x, y in zip(plain, law, strict=True) for a, b in zip(x, y, strict=True)]
    last = results["lengths"][-1]
    return [
        Claim(
            "001, 004",
            "A factor log n improves extrapolation to longer contexts.",
            f"FIRST, trained at {TRAINED}, n = {last}: O guesses with {at_chance(results, 'O')} of "
            f"{results['seeds']} seeds, O + law with {at_chance(results, 'O + law')}; over all "
            f"seeds and lengths the law changes the accuracy by {min(gains):+.0f} to {max(gains):+.0f} "
            "points.",
            verdict(
                at_chance(results, "O") > 0 and at_chance(results, "O + law") == 0 and min(gains) >= 0
            ),
        ),
    ]


def picture(results: dict[str, Any]) -> Figure:
    """Plot accuracy against length, with one line per seed."""
    figure, axes = plt.subplots(
        1, len(ARMS), figsize=(3 * len(ARMS), 3.2), sharey=True, layout="constrained"
    )
    for i, (ax, arm) in enumerate(zip(axes, ARMS, strict=True)):
        for seed in accuracies(results, arm):
            ax.plot(results["lengths"], seed, "o-", color=f"C{i}", alpha=0.5, markersize=4)
        ax.axhline(50, color="gray", linewidth=0.8, linestyle=":")
        ax.set_xscale("log", base=2)
        ax.set_xticks(results["lengths"], [str(n) for n in results["lengths"]])
        ax.set_title(arm, fontsize=10)
        ax.set_xlabel("tokens")
    axes[0].set_ylabel("accuracy in %")
    return figure


def main(arguments: list[str] | None = None) -> None:
    options = experiment.parser(NAME, __doc__, seeds=8).parse_args(arguments)
    experiment.finish(NAME, run(options.seeds), report, picture, options.output)


if __name__ == "__main__":
    main()
