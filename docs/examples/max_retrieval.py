"""Max Retrieval: does a law of the length help where dilution is what fails, more than a constant does?

    python max_retrieval.py            # half an hour on two free cores
    python max_retrieval.py --quick    # half a minute: only shows that everything runs

This is the task of Veličković et al. (2024, arXiv 2410.01104). The input is a set of items. Each has
a priority and one of 10 classes. The answer is the class of the item with the highest priority. There
are no positions. One head of attention, whose query is made from a random number, reads the set.
Models are trained with 5 to 16 items, and tested with up to 4096.

Every run of an arm and a seed is kept when it is finished. Start the command again to go on where it
was interrupted.

Arms that are trained:

- O: the standard scale.
- constant: a learned constant factor. A control: whatever it gains is not due to the length. (But it
  is learned with at most 16 items. `one_constant.py` tests greater constants.)
- log: log n/log 16.
- slope: a · log n with learned a (SSMax, Nakanishi 2025, arXiv 2501.19399).
- affine: a · log n + b with learned a and b (SSMax with its intercept).
- power: (n/16)^a with learned a.
- query alone: a learned function of the query, and not of the length. A control for the next arm.
- query: δ + β · log(n + 1)^γ with learned δ, and with β and γ that depend on the query (the form of
  ASEntmax, Vasylenko et al. 2025, arXiv 2506.16640, but with a softmax).
- held: for each query the factor at which its entropy is p · log n, with a learned p from 0 to 1, and
  p · log 16 beyond n = 16. So the model is trained with entropies that are given, and that do not
  depend on the length where it is tested.

The laws of the length start with the factor 1 at n = 16, and with the slope of log there (query:
nearly). The two controls start with the factor 1, and "held" with p = 1/2. All arms of a seed start
with the same weights, and see the same sets in training and in the test. The query contains nothing of
the items, so a function of it is a learned temperature with more numbers.

Arms at test time, on the weights of O:

- O + log: the factor log n/log 16.
- O + affine, O + power: the laws that these arms have learned with the same seed, divided by their
  factors at n = 16. (For slope, this is O + log.)
- O + held: for each set the factor at which the entropy is O's mean entropy at n = 16. This also
  makes the entropies of all sets equal, which changes results at n = 16 already.
- O + held mean: for each n one factor, with which the mean entropy of other sets is that of n = 16.
- O + best constant: the factor, of 11 from 1 to 32, that is best on the test data themselves at each
  n. So it is an upper bound for what a constant can do there, and no method.

What decides
------------
This section was written before the experiment was run. Smaller runs had been seen, and O, affine and
power of full size with one other seed.

The quantity is the accuracy in percent at n = 1024; that at n = 256 is reported too. The smallest
effect that matters is 3 points. There are 24 seeds. The differences between two arms are paired: one
difference per seed. Their 95 % t interval decides (`experiment.decide`). Above 3 points, the arm
helps. Within ±3 points, it has no effect of that size. Below −3 points, it harms. Otherwise it is not
decided, and the number of seeds that would decide is stated. The questions are in `QUESTIONS`, and
each pair in them is decided alone: the intervals are not widened for their number. Nothing else is
concluded. In particular, the accuracy at n = 4096 and the learned numbers are reported without a
verdict.

The arm "held" was added when the results of all others were known. Its question and this paragraph were
written before it was trained, but for one seed that is not used here, of which the accuracy at n = 16
had been seen. It has the same seeds, and the same rule decides it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import compared_arms
import experiment
import matplotlib.pyplot as plt
import torch
from compared_arms import ARMS, AT_TEST, QUESTIONS, finish_all, plot_arms, questions
from experiment import Claim, Decision, Verdict, answered, decide
from matplotlib.figure import Figure
from torch import Tensor, nn
from trained_laws import constant_name, held, modules, with_best_constant

import isentropic as it
from isentropic import laws

NAME = "max_retrieval"
SHORTEST, LONGEST = 5, 16  # numbers of items in training
WIDTH, CLASSES = 32, 10
BATCH, RATE = 128, 3e-3
CONSTANTS = tuple(2 ** (i / 2) for i in range(11))  # 1 to 32, for O + best constant
CALIBRATION = 2**19  # items of each length for the held entropies
FACTORS = (0.1, 1000.0)  # the range of the search for the factor of O + held mean
TOGETHER = 2**16  # items in one pass of the test
PASS = 8  # A pass of the test takes about as long as so many steps of training.

# What decides
SMALLEST = 3.0  # points of accuracy
SEEDS = 24


class Settings(NamedTuple):
    """The size of an experiment."""

    steps: int
    lengths: tuple[int, ...]
    decided: tuple[int, ...]  # the lengths of the verdicts, the primary one first
    sets: int  # in the test of each length
    items: int  # the most that these sets have together


FULL = Settings(2000, (16, 64, 256, 1024, 4096), (1024, 256), 2048, 2**21)
QUICK = Settings(200, (16, 64, 256), (256, 64), 256, 2**16)


# ----------------------------------------------------------------------------------------- task


class Sample(NamedTuple):
    """Sets of n items: priorities and classes (count, n), answers (count,), and numbers (count, 1)."""

    priority: Tensor
    kind: Tensor
    answer: Tensor
    number: Tensor


def draw(count: int, n: int, generator: torch.Generator) -> Sample:
    priority = torch.rand(count, n, generator=generator)
    kind = torch.randint(CLASSES, (count, n), generator=generator)
    answer = kind.gather(1, priority.argmax(dim=1, keepdim=True))[:, 0]
    return Sample(priority, kind, answer, torch.rand(count, 1, generator=generator))


def test_sets(seed: int, n: int, settings: Settings) -> Iterator[Sample]:
    """The sets of n items that all arms of a seed are tested with, in parts."""
    generator = torch.Generator().manual_seed(10**6 * (seed + 1) + n)
    for count in parts(n, settings):
        yield draw(count, n, generator)


def parts(n: int, settings: Settings) -> list[int]:
    """The numbers of sets in each pass of the test."""
    left, most = min(settings.sets, max(1, settings.items // n)), max(1, TOGETHER // n)
    return [min(most, left - start) for start in range(0, left, most)]


# ----------------------------------------------------------------------------------------- laws

TRAINED = modules(LONGEST, WIDTH)

# ---------------------------------------------------------------------------------------- model


class Heads(NamedTuple):
    """What attention reads: (count, 1, 1 or n, WIDTH). `hidden` is what the query is made from."""

    hidden: Tensor
    query: Tensor
    key: Tensor
    value: Tensor


class Retriever(nn.Module):
    """A model that reads a set with one head of attention."""

    def __init__(self, arm: str) -> None:
        super().__init__()
        self.items = perceptron(1 + CLASSES)
        self.number = perceptron(1)
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key_value = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.answer = nn.Sequential(perceptron(WIDTH), nn.GELU(), nn.Linear(WIDTH, CLASSES))
        self.law = TRAINED[arm]()  # last, so that the other weights of all arms start alike

    def heads(self, sample: Sample) -> Heads:
        one_hot = nn.functional.one_hot(sample.kind, CLASSES)
        items = self.items(torch.cat((sample.priority[..., None], one_hot), dim=-1))
        key, value = self.key_value(items)[:, None].chunk(2, dim=-1)
        hidden = self.number(sample.number)[:, None, None]
        return Heads(hidden, self.query(hidden), key, value)

    def rule(self, heads: Heads) -> laws.Law | None:
        return self.law(heads.hidden, heads.query, heads.key)

    def forward(self, sample: Sample) -> Tensor:
        """The logits of the classes (count, CLASSES), with the law of the arm."""
        heads = self.heads(sample)
        return self.logits(heads, self.rule(heads))

    def logits(self, heads: Heads, law: laws.Law | None) -> Tensor:
        return self.answer(it.attention(heads.query, heads.key, heads.value, law=law)[:, 0, 0])


def perceptron(inputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def train(arm: str, seed: int, steps: int) -> Retriever:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Retriever(arm)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        n = torch.randint(SHORTEST, LONGEST + 1, (), generator=generator)
        sample = draw(BATCH, int(n), generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(sample), sample.answer).backward()
        optimizer.step()
        schedule.step()
        experiment.advance()
    return model


# ----------------------------------------------------------------------------------------- test

Rule = Callable[[Heads, int], laws.Law | None]  # the law for sets of n items


def measure(model: Retriever, heads: Heads, law: laws.Law | None, answer: Tensor) -> dict[str, Tensor]:
    """Of each set: 100 where the answer is right, the entropy of the attention, and the factor."""
    state = it.attention_state(heads.query, heads.key, heads.value, law=law)
    right = model.answer(state.output()[:, 0, 0]).argmax(-1) == answer
    factor = 1.0 if law is None else law(heads.key.shape[-2])
    return {
        "accuracy": 100 * right.double(),
        "entropy": state.entropy().flatten().double(),
        "factor": torch.as_tensor(factor).double().expand(len(answer), 1, 1).flatten(),
    }


@torch.no_grad()
def test(
    model: Retriever, rules: dict[str, Rule], seed: int, settings: Settings
) -> dict[str, dict[str, list[float]]]:
    """The mean accuracy and entropy, and the median factor, for each rule at each length."""
    result: dict[str, dict[str, list[float]]] = {arm: {} for arm in rules}
    for n in settings.lengths:
        found: dict[str, list[dict[str, Tensor]]] = {arm: [] for arm in rules}
        for sample in test_sets(seed, n, settings):
            heads = model.heads(sample)
            for arm, rule in rules.items():
                found[arm].append(measure(model, heads, rule(heads, n), sample.answer))
            experiment.advance(PASS)
        for arm, of_parts in found.items():
            for what in of_parts[0]:
                of_sets = torch.cat([part[what] for part in of_parts])
                # Sets whose highest priorities are nearly equal need huge factors to hold an entropy.
                middle = of_sets.median() if what == "factor" else of_sets.mean()
                result[arm].setdefault(what, []).append(middle.item())
    return result


def rules_at_test(model: Retriever, seed: int, settings: Settings, learned: dict[str, dict]) -> dict:
    """The rules that are tested on the weights of O. `learned` has the results of other arms."""
    target = mean_entropy(calibration_heads(model, seed, LONGEST))
    rules: dict[str, Rule] = {"O": lambda heads, n: None}
    rules["O + log"] = lambda heads, n: laws.LogLength(LONGEST)
    for arm, result in learned.items():
        factors = dict(zip(settings.lengths, result["factor"], strict=True))
        rules[f"O + {arm}"] = partial(transferred, factors)
    of_mean = {n: factor_of_mean(calibration_heads(model, seed, n), target) for n in settings.lengths}
    rules["O + held"] = lambda heads, n: held(heads.query, heads.key, target, is_causal=False)
    rules["O + held mean"] = lambda heads, n: laws.Constant(of_mean[n])
    for x in CONSTANTS:
        rules[constant_name(x)] = partial(lambda x, heads, n: laws.Constant(x), x)
    return rules


@torch.no_grad()
def calibration_heads(model: Retriever, seed: int, n: int) -> Heads:
    """What attention reads of sets that are not in the test."""
    generator = torch.Generator().manual_seed(10**9 + 10**6 * seed + n)
    return model.heads(draw(CALIBRATION // n, n, generator))


def transferred(factors: dict[int, float], heads: Heads, n: int) -> laws.Law:
    return laws.Constant(factors[n] / factors[LONGEST])


@torch.no_grad()
def mean_entropy(heads: Heads, factor: float = 1.0) -> float:
    return it.attention_entropy(factor * heads.query, heads.key, law=None).mean().item()


@torch.no_grad()
def factor_of_mean(heads: Heads, target: float) -> float:
    """The factor at which the mean entropy of all sets is `target`, by bisection of its logarithm."""
    low, high = map(math.log, FACTORS)
    while high - low > 1e-3:
        middle = (low + high) / 2
        if mean_entropy(heads, math.exp(middle)) > target:
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)


# ----------------------------------------------------------------------------------------- runs


@dataclass(frozen=True)
class Job(compared_arms.Job):
    """An arm to be trained with a seed. That of O has the arms at test time too."""

    arm: str
    seed: int
    settings: Settings
    path: Path

    def name(self) -> str:
        return f"{self.arm} {self.seed}"

    def identity(self) -> dict[str, Any]:
        return {
            "arm": self.arm,
            "seed": self.seed,
            **self.settings._asdict(),
            "model": [WIDTH, CLASSES, BATCH, RATE, SHORTEST, LONGEST],
            "test": [CALIBRATION, *FACTORS, *CONSTANTS],
        }


def work(job: Job) -> None:
    """Train and test, and write the results."""
    model = train(job.arm, job.seed, job.settings.steps)
    if job.arm == "O":
        rules = rules_at_test(model, job.seed, job.settings, job.learned())
        job.write(with_best_constant(test(model, rules, job.seed, job.settings), CONSTANTS))
    else:
        rules = {job.arm: lambda heads, n: model.rule(heads)}
        job.write(test(model, rules, job.seed, job.settings))


def steps(settings: Settings) -> int:
    """The steps of a job: those of its training, and of the passes of its test."""
    return settings.steps + PASS * sum(len(parts(n, settings)) for n in settings.lengths)


def run(seeds: int, settings: Settings, path: Path) -> dict[str, Any]:
    jobs = [Job(arm, seed, settings, path) for seed in range(seeds) for arm in TRAINED]
    finish_all(work, jobs, steps(settings))
    arms: dict[str, list] = {arm: [] for arm in ARMS}
    for job in jobs:
        for arm, found in (job.result() or {}).items():
            arms[arm].append(found)
    return {
        "lengths": list(settings.lengths),
        "decided": list(settings.decided),
        "seeds": seeds,
        "arms": arms,
    }


# -------------------------------------------------------------------------------------- results


def values(results: dict[str, Any], arm: str, what: str, n: int) -> list[float]:
    """The values of all seeds at one of the lengths."""
    at = results["lengths"].index(n)
    return [found[what][at] for found in results["arms"][arm]]


def decision(results: dict[str, Any], arm: str, other: str, n: int) -> Decision:
    """Whether an arm has a higher accuracy than another."""
    pairs = zip(*(values(results, x, "accuracy", n) for x in (arm, other)), strict=True)
    return decide([a - b for a, b in pairs], SMALLEST)


def means_table(results: dict[str, Any], what: str, form: str, title: str) -> str:
    def of_seeds(arm: str, n: int) -> list[float]:
        return values(results, arm, what, n)

    return compared_arms.means_table(f"{title}, n =", results["lengths"], of_seeds, form)


def report(results: dict[str, Any]) -> str:
    accuracy = means_table(results, "accuracy", ".1f", "accuracy in %")
    factor = means_table(results, "factor", ".2f", "median factor")
    entropy = means_table(results, "entropy", ".2f", "entropy in nats")
    decisions = {f"n = {n}": partial(decision, results, n=n) for n in results["decided"]}
    return f"""\
{accuracy}

The differences are paired over {results["seeds"]} seeds. An effect matters from {SMALLEST:g} points.
The accuracy at n = {results["decided"][0]} decides. Each row is decided alone.

{questions(QUESTIONS, "arm against other, points [95 % interval]", decisions)}

"O + best constant" was chosen by the accuracy on the test data themselves.

{factor}

{entropy}
"""


def answer(results: dict[str, Any]) -> str:
    n = results["decided"][0]

    def against(arm: str, other: str) -> str:
        found = decision(results, arm, other, n)
        return f"{found.interval()} points of accuracy ({found})"

    return (
        f"Find the largest of {n} numbers, trained with at most {LONGEST}: the law log n in training "
        f"brings {against('log', 'constant')} more than a learned constant. On the weights of standard "
        f"attention, a factor that holds the mean entropy brings {against('O + held mean', 'O + log')} "
        f"more than the law log n at test time. To train with entropies that are held brings "
        f"{against('held', 'log')} against training with the law. None of this shows that the length "
        f"matters: {one_constant()}"
    )


def one_constant() -> str:
    """What the control of `one_constant.py` has found, at the primary length of this experiment."""
    n, constant, control = FULL.decided[0], 8, experiment.load("one_constant")
    reached = fmean(values(control, constant_name(constant), "accuracy", n))
    trained = fmean(values(experiment.load(NAME), "log", "accuracy", n))
    return (
        f"one constant that nobody trained, × {constant} at all lengths, reaches {reached:.1f} % on "
        f"the weights of standard attention, and the law in training {trained:.1f} %. (This control "
        f"was added when all other results were known. It is exploratory.)"
    )


def claims(results: dict[str, Any]) -> list[Claim]:
    n = results["decided"][0]

    def found(arm: str, other: str) -> tuple[str, Verdict]:
        x = decision(results, arm, other, n)
        points = f"{arm} against {other}, points of accuracy: {x.interval()}"
        control = "One untrained constant at all lengths does as well as the first (a later control)."
        return f"Max Retrieval, trained with up to {LONGEST}, n = {n}, {points}. {control}", answered(x)

    return compared_arms.claims(found)


def picture(results: dict[str, Any]) -> Figure:
    """Plot the mean accuracies of trained arms and of those at test time, and the factors."""
    lengths = results["lengths"]
    figure, axes = plt.subplots(1, 3, figsize=(10, 4.8), layout="constrained")
    panels = [("accuracy", tuple(TRAINED)), ("accuracy", ("O", *AT_TEST)), ("factor", ARMS)]
    for ax, (what, arms) in zip(axes, panels, strict=True):

        def samples(arm: str, what: str = what) -> list[list[float]]:
            return [values(results, arm, what, n) for n in lengths]

        plot_arms(ax, arms, lengths, samples, "items")
        name = "accuracy in %" if what == "accuracy" else "factor on the scale"
        ax.set_ylabel(f"{name} (band: 95 % interval of the mean)")
    for ax, title in zip(axes[:2], ("trained", "the weights of O, at test time"), strict=True):
        ax.set_title(title, fontsize=10)
        ax.legend(fontsize=8)
    axes[2].set_yscale("log", base=2)
    return figure


def main(arguments: list[str] | None = None) -> None:
    experiment.main_of_arms(NAME, __doc__, SEEDS, (FULL, QUICK), run, report, picture, arguments)


if __name__ == "__main__":
    main()
