"""FIRST: does a Transformer that was trained on short strings find the first bit of long strings?

    python first.py

This is the task of Chiang & Cholak (2022, arXiv 2202.12172). The input is a token CLS and a string of
random bits. The answer is the first bit, which the model outputs at CLS. Every additional bit takes
weight from the one that matters. Models are trained with 64 tokens, and tested with up to 2048:

- O: the standard scale 1/√d.
- O + law: the same weights, with the scale log n/(log 64 · √d) at test time.
- O + calibrated: the same weights, with a law per layer. `drift.calibrate` fits it on strings of
  64 to 256 tokens, without their answers, so that the mean entropy of all tokens stays constant.
- O + calibrated at CLS: the same for the entropy of CLS only.
- E: trained and tested with the scale log n/(log 512 · √d).

What decides
------------
This section was written when 8 of the 30 seeds had been run. The quantity is the accuracy in percent at
n = 2048. The differences between two arms are paired: one per seed. The smallest effect that matters is
3 points, and their 95 % t interval decides (`experiment.decide`). The pairs are in `PAIRS`.

A second look. After 30 seeds "O + law" against O was not decided: +5.2 points, from −0.7 to +11.0, and
207 seeds would decide. So 370 more seeds run these two arms, at n = 2048 alone. All 400 differences
decide, with a confidence of 97.5 %, as this is the second look at them. There is no third look. This
was written before any of the 370 seeds had been run.
"""

from __future__ import annotations

import statistics
from typing import Any

import experiment
import matplotlib.pyplot as plt
import torch
from effects import DILUTION, Effect
from experiment import Claim, Decision, answered, decide, slope, spread, table
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
# What decides
SEEDS = 30
SMALLEST = 3.0  # points of accuracy at the greatest length
GUESSES = 75  # % of right answers below which a model guesses
FURTHER = 370  # more seeds of the first pair
CONFIDENCE = 0.975  # of the first pair, in each of two looks
PAIRS = (
    ("O + law", "O"),
    ("E", "O + law"),
    ("O + calibrated", "O + law"),
    ("O + calibrated at CLS", "O + law"),
)


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


def tested(model: Reader, laws: Laws, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Strings of a length, their answers, and the logits of the model for these."""
    tokens, answers = strings(TESTS, n, torch.Generator().manual_seed(10**6 + n))
    batches = tokens.split(max(1, 2**15 // n))
    return tokens, answers, torch.cat([model(part, attention_with(laws)) for part in batches])


def percent_right(logits: Tensor, answers: Tensor) -> float:
    return 100 * (logits.argmax(-1) == answers).double().mean().item()


@torch.no_grad()
def evaluate(model: Reader, laws: Laws) -> dict[str, list]:
    """Per length: accuracy in %, loss, and per layer the entropy and the weight of the first bit."""
    result: dict[str, list] = {"accuracy": [], "loss": [], "entropy": [], "weight": []}
    for n in LENGTHS:
        tokens, answers, logits = tested(model, laws, n)
        entropies, weights = [], []

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            entropies.append(it.attention_entropy(q, k, law=laws[i]).mean().item())  # noqa: B023
            of_cls = it.AttentionDistribution(q[..., :1, :], k, law=laws[i]).weights()
            weights.append(of_cls[..., 1].mean().item())  # noqa: B023
            return it.attention(q, k, v, law=laws[i])

        model(tokens[:MEASURED], attend)
        result["accuracy"].append(percent_right(logits, answers))
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


@torch.no_grad()
def further(seed: int) -> list[float]:
    """The accuracies in % of the first pair of arms at the greatest length."""
    with torch.enable_grad():
        model = train([None] * LAYERS, seed)
    found = []
    for law in (it.laws.LogLength(TRAINED), None):
        _, answers, logits = tested(model, [law] * LAYERS, LENGTHS[-1])
        found.append(percent_right(logits, answers))
    return found


def run_further(seeds: int, count: int) -> list[list[float]]:
    """`further` for seeds that follow the first ones."""
    return experiment.run(further, range(seeds, seeds + count), count * STEPS)


def run(seeds: int) -> dict[str, Any]:
    jobs = [(kind, seed) for seed in range(seeds) for kind in ("O", "E")]
    steps = len(jobs) * STEPS + len(ARMS) * seeds * sum(n // 8 for n in LENGTHS)
    arms: dict[str, list] = {name: [] for name in ARMS}
    for part in experiment.run(work, jobs, steps):
        for name, result in part.items():
            arms[name].append(result)
    return {"lengths": list(LENGTHS), "seeds": seeds, "guesses": GUESSES, "arms": arms}


def compared(results: dict[str, Any], arm: str, other: str) -> list[tuple[float, float]]:
    """The accuracies in % of two arms at the greatest length, one pair per seed."""
    pairs = [
        (a[-1], b[-1]) for a, b in zip(*(accuracies(results, x) for x in (arm, other)), strict=True)
    ]
    if (arm, other) == PAIRS[0]:
        pairs += [(a, b) for a, b in results["further"]]
    return pairs


def accuracies(results: dict[str, Any], arm: str) -> list[list[float]]:
    """The accuracy in %, per seed and length."""
    return [seed["accuracy"] for seed in results["arms"][arm]]


def guesses(seed: dict[str, list], at: int = -1) -> bool:
    """Whether a seed guesses at a length. Other seeds are nearly always right."""
    return seed["accuracy"][at] < GUESSES


def at_chance(results: dict[str, Any], arm: str, at: int = -1) -> int:
    """The number of seeds that guess."""
    return sum(guesses(seed, at) for seed in results["arms"][arm])


def decision(results: dict[str, Any], arm: str, other: str) -> Decision:
    """Whether an arm has a higher accuracy than another at the greatest length."""
    is_second = (arm, other) == PAIRS[0]
    differences = [a - b for a, b in compared(results, arm, other)]
    return decide(differences, SMALLEST, CONFIDENCE if is_second else 0.95)


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
    failed = table(
        [f"of {seeds} seeds guess, n =", *lengths],
        [[arm, *(at_chance(results, arm, i) for i in range(len(lengths)))] for arm in ARMS],
    )
    decisions = table(
        [f"n = {lengths[-1]}", "seeds", "points [interval]", "verdict"],
        (
            [f"{arm} against {other}", len(compared(results, arm, other)), found.interval(), said]
            for arm, other in PAIRS
            for found in [decision(results, arm, other)]
            for said in [found.verdict if (arm, other) == PAIRS[0] else "(exploratory)"]
        ),
    )
    causes = experiment.diagnosis(results, ("O", "O + law", "O", "O + law"), TRAINED, TESTS)
    grows = table(["", *ARMS], [["dH/d log n", *(f"{growth(results, arm):.2f}" for arm in ARMS)]])
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

A model either finds the bit or guesses. So a mean over seeds hides what happens:

{failed}

The differences in accuracy are paired over the seeds. An effect matters from {SMALLEST:g} points. The
first interval has a confidence of {100 * CONFIDENCE:g} %, because this is the second look at its arms.
The others have 95 %:

{decisions}

The seeds that guess with O lose the first bit among the random ones. CLS's weight on it, in the layer
where most is lost:

{lost}

The mean entropy of all tokens grows like this:

{grows}

What of the rise of the loss is dilution? The errors are over seeds. The model has
no positions but the mark of the first bit, so clamping changes nothing:

```text
{causes}
```

Most tokens have nothing to look for here, so their attention is spread at any factor. A calibrated law
holds a mean entropy. That is the mean over many tokens that do not matter, or over the weights of CLS,
of which few matter. So it can lose the one weight that does.
"""


def effects(results: dict[str, Any]) -> list[Effect]:
    with_law, without = zip(*compared(results, *PAIRS[0]), strict=True)
    failed = [sum(x < GUESSES for x in found) for found in (without, with_law)]
    last = results["lengths"][-1]
    return [
        Effect(
            DILUTION, f"find the first bit, trained with {TRAINED}, n = {last}",
            f"log n at test ({failed[1]} of {len(with_law)} models guess)", f"none ({failed[0]} guess)",
            decision(results, *PAIRS[0]), SMALLEST, "points",
        )
    ]  # fmt: skip


def claims(results: dict[str, Any]) -> list[Claim]:
    found, last = decision(results, "O + law", "O"), results["lengths"][-1]
    with_law, without = zip(*compared(results, *PAIRS[0]), strict=True)
    failed = " and ".join(
        f"{arm} with {sum(x < GUESSES for x in found)}"
        for arm, found in (("O", without), ("O + law", with_law))
    )
    return [
        Claim(
            "posts 9588 and 8823",
            "A factor log n improves extrapolation to longer contexts.",
            f"FIRST, trained at {TRAINED}, n = {last}: the law brings {found.interval()} points of "
            f"accuracy. Of {len(without)} seeds, {failed} guess.",
            answered(found),
        ),
    ]


def picture(results: dict[str, Any]) -> Figure:
    """Plot accuracy against length, with one line per seed."""
    figure, axes = plt.subplots(1, len(ARMS), figsize=(10, 3), sharey=True, layout="constrained")
    for i, (ax, arm) in enumerate(zip(axes, ARMS, strict=True)):
        for seed in accuracies(results, arm):
            ax.plot(results["lengths"], seed, "o-", color=f"C{i}", alpha=0.5, markersize=4)
        ax.axhline(50, color="gray", linewidth=0.8, linestyle=":")
        experiment.length_axis(ax, results["lengths"][::2], "tokens")
        ax.set_title(experiment.spelled(arm), fontsize=8)
    axes[0].set_ylabel("accuracy in % (a line per seed)")
    return figure


def main(arguments: list[str] | None = None) -> None:
    options = experiment.parser(NAME, __doc__, seeds=SEEDS).parse_args(arguments)
    seeds = options.seeds
    more = run_further(seeds, FURTHER * seeds // SEEDS)
    experiment.finish(NAME, run(seeds) | {"further": more}, report, picture, options.output)


if __name__ == "__main__":
    main()
