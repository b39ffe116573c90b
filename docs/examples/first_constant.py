"""FIRST with the control that was missing: does the law help more than one constant, as well chosen?

    python first_constant.py            # half an hour on two free cores
    python first_constant.py --quick    # half a minute: only shows that everything runs

The task and the model are those of `first.py`: a model that was trained with 64 tokens looks for the
first bit of strings of 2048. There 84 of 400 models guess, and 6 guess with the law log n/log 64 at
test time. Here the same weights are also tested with one constant c at all lengths.

- O: the standard scale.
- O + log: max(1, log n/log 64).
- O × c, O + log × c: the same, times the constant of `CONSTANTS` that has the least loss on held-out
  strings of 64 and 128 tokens, in the mean of both. The accuracy does not tell constants apart there.

Every run of a seed is kept when it is finished. Start the command again to go on where it was
interrupted.

What decides
------------
This section was written before the experiment was run. The results of `first.py` were known, and no
constant but 1 had been tried. All 200 seeds are new, and each has its own held-out and test strings.

The quantity is the accuracy in percent at n = 2048. The smallest effect that matters is 3 points. The
differences between two arms are paired: one difference per seed. There are two registered comparisons:
"O + log × c" against "O × c" (does the length matter, if both have a constant that is chosen alike?),
which is the primary one, and "O + log" against "O × c". The t intervals of their means have 97.5 %
confidence each, so that both hold together with 95 %. Above 3 points, the arm helps. Within ±3 points,
it has no effect of that size. Below −3 points, it harms. Otherwise it is not decided. All else is
exploratory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import experiment
import first
import matplotlib.pyplot as plt
import torch
from effects import DILUTION, Effect
from experiment import Claim, Decision, answered, decide, table
from matplotlib.figure import Figure
from torch import Tensor, nn

import isentropic as it
from isentropic import laws

NAME = "first_constant"
ARMS = ("O", "O + log", "O × c", "O + log × c")
CONSTANTS = tuple(2 ** (i / 2) for i in range(-2, 9))  # 1/2 to 16
FIRST_SEED = 20_000

# What decides
SMALLEST = 3.0  # points of accuracy
SEEDS = 200
REGISTERED = (("O + log × c", "O × c"), ("O + log", "O × c"))
CONFIDENCE = 1 - 0.05 / len(REGISTERED)


class Settings(NamedTuple):
    """The size of an experiment."""

    steps: int
    longest: int
    strings: int  # in a test; twice as many for each choice


FULL = Settings(first.STEPS, 2048, 256)
QUICK = Settings(50, 256, 32)


@dataclass(frozen=True)
class Job(experiment.Job):
    seed: int
    settings: Settings
    path: Path

    def name(self) -> str:
        return f"{self.seed}"

    def identity(self) -> dict[str, Any]:
        return {"name": self.name(), **self.settings._asdict(), "constants": CONSTANTS}


def logits_of(
    model: first.Reader, count: int, n: int, seed: int, law: laws.Law | None, c: float
) -> tuple[Tensor, Tensor]:
    """The logits of the model for strings of a seed, and the answers."""
    tokens, answers = first.strings(count, n, torch.Generator().manual_seed(10**4 * seed + n))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return it.attention(c * q, k, v, law=law)

    parts = tokens.split(max(1, 2**15 // n))
    return torch.cat([model(part, attend) for part in parts]), answers


def best_constant(job: Job, model: first.Reader, law: laws.Law | None) -> float:
    """The one with the least loss at the trained length and at twice that, on held-out strings."""

    def loss(c: float) -> float:
        count, seed = 2 * job.settings.strings, job.seed + 10**5
        lengths = (first.TRAINED, 2 * first.TRAINED)
        found = (logits_of(model, count, n, seed, law, c) for n in lengths)
        return sum(nn.functional.cross_entropy(*x).item() for x in found)

    return min(CONSTANTS, key=loss)


@torch.no_grad()
def work(job: Job) -> None:
    """Train and test, and write the accuracy and the constant of each arm."""
    size = job.settings
    with torch.enable_grad():
        model = first.train([None] * first.LAYERS, job.seed)
    found = {}
    for arm, law in {"O": None, "O + log": laws.LogLength(first.TRAINED, minimum=1)}.items():
        for name, c in ((arm, 1.0), (f"{arm} × c", best_constant(job, model, law))):
            accuracy = first.percent_right(
                *logits_of(model, size.strings, size.longest, job.seed, law, c)
            )
            found[name] = {"accuracy": accuracy, "constant": c}
    job.write(found)
    experiment.advance(size.steps)


def run(seeds: int, settings: Settings, path: Path) -> dict[str, Any]:
    jobs = [Job(FIRST_SEED + seed, settings, path) for seed in range(seeds)]
    experiment.finish_jobs(work, jobs, first.STEPS + settings.steps)
    found = [job.result() or {} for job in jobs]
    return {
        "length": settings.longest,
        "seeds": seeds,
        "arms": {arm: [x[arm] for x in found] for arm in ARMS},
    }


# -------------------------------------------------------------------------------------- results


def accuracies(results: dict[str, Any], arm: str) -> list[float]:
    return [x["accuracy"] for x in results["arms"][arm]]


def guesses(results: dict[str, Any], arm: str) -> int:
    """The number of models that guess."""
    return sum(x < first.GUESSES for x in accuracies(results, arm))


def decision(results: dict[str, Any], arm: str, other: str, confidence: float = 0.95) -> Decision:
    pairs = zip(*(accuracies(results, x) for x in (arm, other)), strict=True)
    return decide([a - b for a, b in pairs], SMALLEST, confidence)


def effects(results: dict[str, Any]) -> list[Effect]:
    """The registered comparisons."""
    task = f"find the first bit, trained with {first.TRAINED}, n = {results['length']}"
    return [
        Effect(
            DILUTION, task, arm, other, decision(results, arm, other, CONFIDENCE), SMALLEST, "points",
            leads=(arm, other) == REGISTERED[0],
        )
        for arm, other in REGISTERED
    ]  # fmt: skip


def claims(results: dict[str, Any]) -> list[Claim]:
    found = decision(results, *REGISTERED[0], CONFIDENCE)
    guess = ", ".join(f"{guesses(results, arm)} with {arm}" for arm in ARMS)
    return [
        Claim(
            "posts 9588 and 8823",
            "A factor log n improves extrapolation to longer contexts.",
            f"FIRST, n = {results['length']}: {found.interval()} points of accuracy where the law and "
            f"the standard scale have a constant that is as well chosen. Of {results['seeds']} models "
            f"guess: {guess}.",
            answered(found),
        )
    ]


def report(results: dict[str, Any]) -> str:
    rows = [
        [
            arm,
            f"{fmean(accuracies(results, arm)):.1f}",
            guesses(results, arm),
            f"{median(x['constant'] for x in results['arms'][arm]):.3g}",
        ]
        for arm in ARMS
    ]
    registered = [
        [f"{arm} against {other}", found.interval(), found.verdict]
        for arm, other in REGISTERED
        for found in [decision(results, arm, other, CONFIDENCE)]
    ]
    seeds = results["seeds"]
    head = [f"n = {results['length']}", "accuracy in %", f"of {seeds} models guess", "median of c"]
    interval = f"points [{100 * CONFIDENCE:g} % interval]"
    return f"{table(['registered', interval, 'verdict'], registered)}\n\n{table(head, rows)}\n"


def picture(results: dict[str, Any]) -> Figure:
    """Plot the accuracy of each seed, and the mean with its interval, for each arm."""
    figure, ax = plt.subplots(figsize=(6, 2.8), layout="constrained")
    for at, arm in enumerate(reversed(ARMS)):
        found = accuracies(results, arm)
        places = [at + 0.3 * (i / len(found) - 0.5) for i in range(len(found))]
        ax.plot(found, places, ".", color="gray", alpha=0.4, markersize=3)
        mean = decide(found, 0)
        ax.errorbar(mean.mean, at, xerr=mean.high - mean.mean, fmt="o", color="C0")
    ax.set_yticks(range(len(ARMS)), map(experiment.spelled, reversed(ARMS)))
    label = "gray: each model; blue: the mean and its 95 % interval"
    ax.set_xlabel(f"accuracy in % at n = {results['length']}\n({label})")
    return figure


def main(arguments: list[str] | None = None) -> None:
    experiment.main_of_arms(NAME, __doc__, SEEDS, (FULL, QUICK), run, report, picture, arguments)


if __name__ == "__main__":
    main()
