"""Language models from scratch: does a law of the length help at eight times the trained length?

    python from_scratch.py            # five hours on two free cores
    python from_scratch.py --quick    # two minutes: only shows that everything runs

Causal models of bytes, with four layers of four heads, are trained with contexts of n0 = 128 bytes, and
tested with 128 to 1024. The text is that of the Python packages which are installed here: half code,
half prose (docstrings). Each seed has its own packages for training, for choices and for tests. The
last `PREDICTED` bytes of the test texts are predicted at every length. So only the context grows. Every
run of an arm and a seed is kept when it is finished. Start the command again to go on where it was
interrupted.

Positions: none (NoPE: only the causal mask tells an order), or rotary ones, which are interpolated
beyond n0: position times n0/n (PI, Chen et al. 2023, arXiv 2306.15595).

Arms that are trained. Every layer and head has its own learned numbers:

- O: the standard scale.
- constant: a learned constant factor.
- log: log n/log n0, in training too, where a query sees n = 1 to n0 bytes.
- slope: a · log n with learned a (SSMax, arXiv 2501.19399).
- scale-invariant: the logit of a key at the distance t becomes a(t) · logit + m(t), as in Anson et al.
  2025 (arXiv 2505.17083). There the mean of exp(logit) must fall as 1/(t/τ + 1) for normal logits, and
  the mean of logit · exp(logit) too. With a(0) = 1 and m(0) = 0 this gives
  a(t)² = 1 + 2 log(t/τ + 1) and m(t) = 1 − a(t)². τ = 10.

On the weights of O: O + log, which is max(1, log n/log n0). Beside each arm "arm × c" has its logits
multiplied by one constant at all lengths: that of `CONSTANTS` with the least loss at n0 and 2 n0 on
the packages for choices.

Added last, when all results were known: "log up to n0" is the arm log, whose factor stays 1 beyond n0
at test time, without positions, in four seeds. And the loss of a model that only knows how frequent
each byte is in the training texts.

What decides
------------
This section was written before the experiment was run. Only O had been trained, with one seed that is
not used here, to see that it learns, how long that takes, and that it fails beyond n0; and all arms of
`--quick`, with 20 steps.

The quantity is the loss in nats per byte at n = 1024, as the mean over code and prose. The smallest
effect that matters is 0.02. There are 8 seeds. The differences between two arms are paired: one
difference per seed, that is, per set of packages, weights and order of the training texts. Positive
numbers are gains. There are four registered comparisons: "log" against "constant", and "log × c"
against "constant × c", both without positions and with interpolated ones. "log" against "constant"
without positions is the primary one. The t intervals have 98.75 % confidence each, so that all four
hold together with 95 %. Above 0.02, the arm helps. Within ±0.02, it has no effect of that size. Below
−0.02, it harms. Otherwise it is not decided. All else is exploratory, with 95 % intervals and without a
verdict.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import experiment
import matplotlib.pyplot as plt
import numpy as np
import torch
from effects import BOTH, Effect
from experiment import Claim, Decision, answered, decide, table
from matplotlib.figure import Figure
from package_texts import IN_CHOICES, IN_TESTS, KINDS, batches, pool, split, texts
from torch import Tensor, nn
from trained_laws import modules
from transformer import Encoder, descend, loss_of_next

import isentropic as it
from isentropic import laws

NAME = "from_scratch"
TRAINED = 128  # n0
LAYERS, HEADS = 4, 4
PREDICTED = 64  # bytes at the end of each test text
TAU = 10.0
POSITIONS = ("NoPE", "PI")
ARMS = ("O", "constant", "log", "slope", "scale-invariant")
AT_TEST = "O + log"
ADDED = "log up to n0"
TIMES = " × c"
ALL = tuple(x for arm in ("O", AT_TEST, *ARMS[1:]) for x in (arm, arm + TIMES))
CONSTANTS = tuple(2 ** (i / 4) for i in range(-4, 9))  # 1/2 to 4
FIRST_SEED = 100

# What decides
SMALLEST = 0.02  # nats per byte
SEEDS, ADDED_SEEDS = 8, 4
REGISTERED = [
    (positions, arm + times, "constant" + times)
    for positions in POSITIONS
    for times in ("", TIMES)
    for arm in ("log",)
]
CONFIDENCE = 1 - 0.05 / len(REGISTERED)


class Settings(NamedTuple):
    """The size of an experiment."""

    width: int
    steps: int
    batch: int
    rate: float
    lengths: tuple[int, ...]  # of the tests
    texts: int  # of each kind, for the tests; half as many for choices


FULL = Settings(128, 1000, 32, 2e-3, (128, 256, 512, 1024), 192)
QUICK = Settings(32, 20, 8, 2e-3, (128, 256), 16)


# ---------------------------------------------------------------------------------------- model


class Model(nn.Module):
    """A causal model of bytes, with a law for each layer."""

    def __init__(self, arm: str, size: Settings) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, size.width)
        self.encoder = Encoder(size.width, LAYERS, HEADS)
        self.logits = nn.Linear(size.width, 256)
        # They come last, so that the other weights of all arms start alike.
        self.is_invariant = arm == "scale-invariant"
        law = modules(TRAINED, size.width, HEADS)["O" if self.is_invariant else arm]
        self.laws = nn.ModuleList(law() for _ in range(LAYERS))

    def forward(self, tokens: Tensor, positions: str, law: laws.Law | None = None, c: float = 1.0):
        """The logits (count, n, 256). A law that is given is that of all layers."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if positions == "PI":
                n = q.shape[-2]
                at = torch.arange(n) * min(1.0, TRAINED / n)
                q, k = it.layers.rotary(q, at), it.layers.rotary(k, at)
            if self.is_invariant:
                return invariant_attention(c * q, k, v)
            own = self.laws[layer](None, q, k) if law is None else law
            return it.attention(c * q, k, v, is_causal=True, law=own)

        return self.logits(self.encoder(self.tokens(tokens), attend))


def invariant_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention with the logits a(t) · logit + m(t)."""
    n = q.shape[-2]
    apart = torch.arange(n)[:, None] - torch.arange(n)
    a2 = 1 + 2 * torch.log(apart.clamp(min=0) / TAU + 1)
    logits = a2.sqrt() * (q @ k.mT) / q.shape[-1] ** 0.5 + (1 - a2)
    return torch.softmax(logits.masked_fill(apart < 0, -torch.inf), -1) @ v


def train(positions: str, arm: str, seed: int, size: Settings) -> Model:
    torch.manual_seed(seed)
    model = Model(arm, size)
    generator = torch.Generator().manual_seed(seed)
    source = batches(split(seed).training, size.batch, TRAINED, generator)

    def loss() -> Tensor:
        tokens = next(source)
        return loss_of_next(model(tokens[:, :-1], positions), tokens)

    descend(model, loss, size.steps, size.rate, least=0.05, weight_decay=0.0)
    return model.eval()


@torch.no_grad()
def losses(
    model: Model, positions: str, tokens: Tensor, n: int, law: laws.Law | None, c: float
) -> dict[str, float]:
    """The loss of the last bytes of the texts, which see the n bytes before their last one."""
    found = []
    for part in tokens[:, -n - 1 :].split(max(1, 2**15 // n)):
        logits = model(part[:, :-1], positions, law, c)[:, -PREDICTED:]
        answers = part[:, -PREDICTED:]
        found.append(nn.functional.cross_entropy(logits.mT, answers, reduction="none").mean(-1))
    of_kinds = torch.cat(found).chunk(len(KINDS))
    return {kind: x.double().mean().item() for kind, x in zip(KINDS, of_kinds, strict=True)}


# ----------------------------------------------------------------------------------------- runs


@dataclass(frozen=True)
class Job(experiment.Job):
    """An arm to be trained with positions and a seed. That of O has the arm at test time too."""

    positions: str
    arm: str
    seed: int
    settings: Settings
    path: Path

    def name(self) -> str:
        return f"{self.positions}, {self.arm}, {self.seed}"

    def identity(self) -> dict[str, Any]:
        constants = [TRAINED, LAYERS, HEADS, PREDICTED, TAU, *CONSTANTS, IN_TESTS, IN_CHOICES]
        return {
            "name": self.name(),
            **self.settings._asdict(),
            "constants": constants,
            "pool": sorted(pool()),
        }


def work(job: Job) -> None:
    """Train and test, and write the results."""
    size, parts = job.settings, split(job.seed)
    model = train(job.positions, "log" if job.arm == ADDED else job.arm, job.seed, size)
    tests = texts(parts.tests, size.texts, size.lengths[-1], job.seed)
    choices = texts(parts.choices, size.texts // 2, size.lengths[-1], job.seed)
    arms: dict[str, dict] = {}
    tested: dict[str, laws.Law | None] = {job.arm: None}
    if job.arm == "O":
        tested[AT_TEST] = laws.LogLength(TRAINED, minimum=1)
    if job.arm == ADDED:
        tested[ADDED] = laws.Knots((1, TRAINED, 2**20), (0.0, 1.0, 1.0))
    for arm, law in tested.items():

        def mean(tokens: Tensor, n: int, c: float, law: laws.Law | None = law) -> dict[str, float]:
            return losses(model, job.positions, tokens, n, law, c)

        def chosen(c: float, mean: Any = mean) -> float:
            return sum(sum(mean(choices, n, c).values()) for n in size.lengths[:2])

        best = min(CONSTANTS, key=chosen)
        for name, c in ((arm, 1.0), (arm + TIMES, best)):
            found = [mean(tests, n, c) for n in size.lengths]
            arms[name] = {"constant": c} | {kind: [x[kind] for x in found] for kind in KINDS}
    job.write(arms)
    experiment.advance(size.steps // 4)


def run(seeds: int, settings: Settings, path: Path) -> dict[str, Any]:
    jobs = [
        Job(positions, arm, FIRST_SEED + seed, settings, path)
        for positions in POSITIONS
        for seed in range(seeds)
        for arm in ARMS
    ]
    jobs += [Job("NoPE", ADDED, FIRST_SEED + i, settings, path) for i in range(min(seeds, ADDED_SEEDS))]
    experiment.finish_jobs(work, jobs, settings.steps + settings.steps // 4)
    found: dict[str, dict[str, list]] = {x: {arm: [] for arm in ALL} for x in POSITIONS}
    found["NoPE"] |= {ADDED: [], ADDED + TIMES: []}
    for job in jobs:
        for arm, of_seed in (job.result() or {}).items():
            found[job.positions][arm].append(of_seed)
    splits = [split(FIRST_SEED + seed) for seed in range(seeds)]
    return {
        "lengths": list(settings.lengths),
        "seeds": seeds,
        "tests": [x.tests for x in splits],
        "packages": len(pool()),
        "frequencies": [of_frequencies(FIRST_SEED + seed, settings) for seed in range(seeds)],
        "positions": found,
    }


def of_frequencies(seed: int, size: Settings) -> float:
    """The loss on the tests of the frequencies of the bytes in the training texts."""
    parts = split(seed)
    every = [pool()[x][kind] for x in parts.training for kind in KINDS]
    shares = np.mean([np.bincount(x, minlength=256) / len(x) for x in every], 0) + 1e-6
    loss = np.log(shares.sum() / shares)
    tests = texts(parts.tests, size.texts, size.lengths[-1], seed)
    return float(loss[tests[:, -PREDICTED:].numpy()].mean())


# -------------------------------------------------------------------------------------- results


def values(results: dict[str, Any], positions: str, arm: str, at: int = -1) -> list[float]:
    """The loss of all seeds at one of the lengths, the last one if `at` is not given."""
    return [fmean(x[kind][at] for kind in KINDS) for x in results["positions"][positions][arm]]


def decision(
    results: dict[str, Any],
    positions: str,
    arm: str,
    other: str,
    confidence: float = 0.95,
    at: int = -1,
) -> Decision:
    """How much less the loss of an arm is than that of another."""
    pairs = zip(*(values(results, positions, x, at) for x in (arm, other)), strict=True)
    return decide([b - a for a, b in pairs], SMALLEST, confidence)


def added(results: dict[str, Any]) -> Decision:
    """How much less the loss of "log up to n0" is than that of "log", with the same weights."""
    pairs = zip(*(values(results, "NoPE", x) for x in (ADDED, "log")), strict=False)  # fewer seeds
    return decide([b - a for a, b in pairs], SMALLEST)


def regained(results: dict[str, Any], positions: str, arm: str) -> float:
    """The share in percent of what O loses from n0 to the longest text that an arm regains."""
    found = values(results, positions, arm)
    first, last = (fmean(values(results, positions, "O", at)[: len(found)]) for at in (0, -1))
    return 100 * (last - fmean(found)) / (last - first)


def described(results: dict[str, Any], positions: str) -> str:
    name = {"NoPE": "no positions", "PI": "interpolated positions"}[positions]
    return f"language model, {name}, trained with {TRAINED}, n = {results['lengths'][-1]}"


def effects(results: dict[str, Any]) -> list[Effect]:
    """The registered comparisons."""
    return [
        Effect(
            BOTH, described(results, positions), arm, other,
            decision(results, positions, arm, other, CONFIDENCE), SMALLEST,
            "nats per byte", "", "+.3f",
            leads=arm.endswith(TIMES) or (positions, arm, other) == REGISTERED[0],
        )
        for positions, arm, other in REGISTERED
    ]  # fmt: skip


def claims(results: dict[str, Any]) -> list[Claim]:
    found = []
    for positions in POSITIONS:
        learned, chosen = (
            decision(results, positions, "log" + times, "constant" + times, CONFIDENCE)
            for times in ("", TIMES)
        )
        plain = decision(results, positions, AT_TEST, "O")
        found.append(
            Claim(
                "posts 9588 and 8823",
                "A factor log n improves extrapolation to longer contexts.",
                f"{described(results, positions)}, nats per byte: {learned.interval('+.3f')} against a "
                f"learned constant, {chosen.interval('+.3f')} where both have a constant as well "
                f"chosen; {plain.interval('+.3f')} at test time alone, against the standard scale.",
                answered(learned),
            )
        )
    return found


def report(results: dict[str, Any]) -> str:
    registered = [
        [positions, f"{arm} against {other}", found.interval("+.3f"), found.verdict]
        for positions, arm, other in REGISTERED
        for found in [decision(results, positions, arm, other, CONFIDENCE)]
    ]
    head = ["positions", "arms", f"gain in nats per byte [{100 * CONFIDENCE:g} % interval]", "verdict"]
    tables = [
        table(
            [f"{positions}: loss in nats per byte, n =", *results["lengths"], "regained", "c"],
            [
                [
                    arm,
                    *(
                        f"{fmean(values(results, positions, arm, at)):.3f}"
                        for at in range(len(results["lengths"]))
                    ),
                    f"{regained(results, positions, arm):.0f} %",
                    f"{median(x['constant'] for x in found):.3g}",
                ]
                for arm, found in results["positions"][positions].items()
            ],
        )
        for positions in results["positions"]
    ]
    rest = f"""\
The frequencies of bytes alone have a loss of {fmean(results["frequencies"]):.2f} nats per byte. The
gain of "{ADDED}" over "log" in the same seeds is {added(results).interval("+.3f")} nats per byte.
"""
    return "\n\n".join([table(head, registered), *tables, rest])


def picture(results: dict[str, Any]) -> Figure:
    """Plot the gain of each arm over "constant × c" at the longest text, with its interval."""
    other = "constant" + TIMES
    arms = [arm for arm in ALL if arm != other]
    figure, axes = plt.subplots(1, len(POSITIONS), figsize=(9, 4.2), sharey=True, layout="constrained")
    for ax, positions in zip(axes, results["positions"], strict=True):
        for at, arm in enumerate(reversed(arms)):
            found = decision(results, positions, arm, other)
            color = "C3" if arm.endswith(TIMES) else "C0"
            ax.errorbar(found.mean, at, xerr=found.high - found.mean, fmt="o", color=color)
        ax.axvline(0, color="gray", lw=0.8)
        ax.set_title(f"{positions}, n = {results['lengths'][-1]}", fontsize=10)
    axes[0].set_yticks(range(len(arms)), map(experiment.spelled, reversed(arms)))
    figure.supxlabel(f"gain over {other}, in nats per byte (bar: 95 % interval)")
    return figure


def main(arguments: list[str] | None = None) -> None:
    experiment.main_of_arms(NAME, __doc__, SEEDS, (FULL, QUICK), run, report, picture, arguments)


if __name__ == "__main__":
    main()
