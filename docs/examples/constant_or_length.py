"""Constant or length: does a law of the length help more than one constant that is as well chosen?

    python constant_or_length.py            # two hours on two free cores
    python constant_or_length.py --quick    # two minutes: only shows that everything runs

Where sharper attention is better, a law that grows with the length n helps, and so does one large
constant. A constant that is learned where the model is trained is no control: nothing pushes it up
there. So here each arm is multiplied by the one constant c that is best on held-out data with n0 and
2 n0 keys, and c is used at all lengths. Every arm gets the same choice: O and each law. n0 is the
longest length in training.

There are four tasks. Their models have no positions.

- one head, two heads: half of the questions ask for the largest of a part of a set, and the others for
  an average, which sharper attention answers worse (`two_questions.py`). n0 = 16, tested to n = 256.
- max: Max Retrieval, as in `max_retrieval.py`. One head reads a set. n0 = 16, tested to n = 1024.
- recall: causal recall, as in `recall_causal.py`. n0 = 64, tested to n = 1024.

Arms that are trained (see `max_retrieval.py`): O; constant (learned); log: log n/log n0; slope:
a log n; power: (n/n0)^a; query alone: a learned function of the query; query: of the query and log n.
Arms on the weights of O: O + log: max(1, log n/log n0); held: for each head and length the factor with
which the mean entropy of other data is that at n0. Beside each arm but "held", "arm × c" is the arm
with c.

Every run of a task, an arm and a seed is kept when it is finished. Start the command again to go on
where it was interrupted.

What decides
------------
This section was written before the experiment was run. Only O had been trained on the new task, with
two seeds that are not used here, to see that it learns, and how long that takes. With both, constants
above 1 lowered the accuracy of averages and raised that of the largest, by as much or more. Of other
arms there, only results of `--quick` had been seen, with 50 steps and two seeds. The results of
`max_retrieval.py`, `recall_causal.py` and `one_constant.py` were known. So all 24 seeds here are new:
weights, training data, held-out data and test data.

The quantity is the accuracy in percent at the greatest n. For the two questions it is the mean over
both. The smallest effect that matters is 3 points. The differences between two arms are paired: one
difference per seed. There are ten registered comparisons:

- in each task, "log × c" against "O × c": does the length matter, if both are chosen alike?
- in each task, "log" against "O × c": does a law that nobody tunes replace a constant that is tuned?
- in the two tasks of two questions, "query × c" against "query alone × c": does the length matter to a
  law that knows the question?

The t intervals of their means have 99.5 % confidence each, so that all ten hold together with 95 %.
Above 3 points, the arm helps. Within ±3 points, it has no effect of that size. Below −3 points, it
harms. Otherwise it is not decided. The first comparison of the task "one head" is the primary one. All
other differences, at other lengths and between other arms, are exploratory: they have 95 % intervals
and no verdict.

Added later
-----------
The arm "O × best" was added when all other results were known. It has the weights of O, and the
constant that is best on the test data themselves at the greatest n. So it is an upper bound for what
one constant can do there, and no method.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import experiment
import matplotlib.pyplot as plt
import torch
from dilution_tasks import HELD_OUT, TASKS, TEST_DATA, Rule, Settings, generator_of
from effects import BOTH_ENDS, DILUTION, Effect
from experiment import Claim, Decision, answered, decide, table
from matplotlib.figure import Figure

from isentropic import laws

NAME = "constant_or_length"
TRAINED = ("O", "constant", "log", "slope", "power", "query alone", "query")
AT_TEST = ("O + log", "held")  # on the weights of O
TIMES = " × c"
TUNED = ("O", "O + log", *TRAINED[1:])  # the arms that are also multiplied by a constant
HINDSIGHT = "O × best"
ARMS = ("O", HINDSIGHT, *AT_TEST, *TRAINED[1:], *(arm + TIMES for arm in TUNED))
CONSTANTS = tuple(2 ** (i / 2) for i in range(-2, 11))  # 1/2 to 32
NAMES = {
    "one head": "largest or average, one head",
    "two heads": "largest or average, two heads",
    "max": "Max Retrieval",
    "recall": "causal recall",
}
FIRST_SEED = 1000
TEST = 600  # The choices and tests of an arm take about as long as so many steps of training.

# What decides
SMALLEST = 3.0  # points of accuracy
SEEDS = 24
REGISTERED = [
    *((task, "log" + TIMES, "O" + TIMES) for task in ("one head", "two heads", "max", "recall")),
    *((task, "log", "O" + TIMES) for task in ("one head", "two heads", "max", "recall")),
    *((task, "query" + TIMES, "query alone" + TIMES) for task in ("one head", "two heads")),
]
CONFIDENCE = 1 - 0.05 / len(REGISTERED)


FULL = Settings((2000, 600), 1024, 2048, 2**15)
QUICK = Settings((50, 10), 128, 256, 2**12)


# ---------------------------------------------------------------------------------------- tests


@torch.no_grad()
def best_constant(task: Any, model: Any, rule: Rule, seed: int, settings: Settings) -> float:
    """The constant with the highest accuracy on held-out data with n0 and 2 n0 keys, both as much."""
    large = settings._replace(sets=4 * settings.sets, tokens=4 * settings.tokens)
    samples = [
        task.sample(n, large, generator_of(seed, n, HELD_OUT)) for n in (task.trained, 2 * task.trained)
    ]

    def accuracy(c: float) -> float:
        return sum(task.right(model, x, c, rule).double().mean().item() for x in samples)

    return max(CONSTANTS, key=accuracy)


@torch.no_grad()
def test(task: Any, model: Any, rules: dict[str, tuple[float, dict[int, Rule]]], job: Job) -> dict:
    """The accuracies in percent of arms at each length. An arm is a constant, and a rule by length."""
    found: dict[str, dict[str, list]] = {arm: {"constant": c} for arm, (c, _) in rules.items()}
    for n in task.lengths(job.settings):
        sample = task.sample(n, job.settings, generator_of(job.seed, n, TEST_DATA))
        for arm, (c, rule) in rules.items():
            right = 100 * task.right(model, sample, c, rule[n]).double()
            kinds = {"accuracy": right}
            if job.task in ("one head", "two heads"):
                kinds |= {"largest": right[0::2], "average": right[1::2]}
            for what, x in kinds.items():
                found[arm].setdefault(what, []).append(x.mean().item())
    return found


# ----------------------------------------------------------------------------------------- runs


@dataclass(frozen=True)
class Job(experiment.Job):
    """An arm to be trained on a task with a seed. That of O has the arms at test time too."""

    task: str
    arm: str
    seed: int
    settings: Settings
    path: Path

    def name(self) -> str:
        return f"{self.task}, {self.arm}, {self.seed}"

    def identity(self) -> dict[str, Any]:
        return {"name": self.name(), **self.settings._asdict(), "constants": CONSTANTS}


def work(job: Job) -> None:
    """Train and test, and write the results."""
    task = TASKS[job.task]
    model = task.train("O" if job.arm == HINDSIGHT else job.arm, job.seed, job.settings)
    lengths = task.lengths(job.settings)
    if job.arm == HINDSIGHT:
        arms = {f"{c}": (c, dict.fromkeys(lengths)) for c in CONSTANTS}
        found = test(task, model, arms, job).values()
        job.write({HINDSIGHT: max(found, key=lambda x: x["accuracy"][-1])})
        experiment.advance(TEST)
        return
    rules: dict[str, dict[int, Rule]] = {job.arm: dict.fromkeys(lengths)}
    if job.arm == "O":
        law = [laws.LogLength(task.trained, minimum=1)] * task.layers
        rules["O + log"] = dict.fromkeys(lengths, law)
        with torch.no_grad():
            rules["held"] = task.held(model, lengths, job.settings, job.seed)
    arms = {arm: (1.0, rule) for arm, rule in rules.items()}
    for arm in rules.keys() - {"held"}:
        rule = rules[arm][task.trained]
        arms[arm + TIMES] = (best_constant(task, model, rule, job.seed, job.settings), rules[arm])
    job.write(test(task, model, arms, job))
    experiment.advance(TEST)


def run(seeds: int, settings: Settings, path: Path) -> dict[str, Any]:
    jobs = [
        Job(task, arm, FIRST_SEED + seed, settings, path)
        for seed in range(seeds)
        for task in TASKS
        for arm in (*TRAINED, HINDSIGHT)
    ]
    for task in TASKS:  # the bar counts the steps of training, so a task at a time
        of_task = [job for job in jobs if job.task == task]
        experiment.finish_jobs(work, of_task, TASKS[task].steps(settings) + TEST)
    found: dict[str, dict[str, list]] = {task: {arm: [] for arm in ARMS} for task in TASKS}
    for job in jobs:
        for arm, of_seed in (job.result() or {}).items():
            found[job.task][arm].append(of_seed)
    lengths = {name: task.lengths(settings) for name, task in TASKS.items()}
    return {"lengths": lengths, "seeds": seeds, "tasks": found}


# -------------------------------------------------------------------------------------- results


def values(results: dict[str, Any], task: str, arm: str, what: str = "accuracy", at: int = -1) -> list:
    """What all seeds have found at one of the lengths, the last one if `at` is not given."""
    return [found[what][at] for found in results["tasks"][task][arm]]


def decision(
    results: dict[str, Any], task: str, arm: str, other: str, confidence: float = 0.95, at: int = -1
) -> Decision:
    """The differences of two arms at one of the lengths, the last one if `at` is not given."""
    pairs = zip(*(values(results, task, x, at=at) for x in (arm, other)), strict=True)
    return decide([a - b for a, b in pairs], SMALLEST, confidence)


def effects(results: dict[str, Any]) -> list[Effect]:
    """The registered comparisons."""
    fails = {"one head": BOTH_ENDS, "two heads": BOTH_ENDS}
    return [
        Effect(
            fails.get(task, DILUTION), described(results, task), arm, other,
            decision(results, task, arm, other, CONFIDENCE), SMALLEST, "points",
            leads=TIMES in arm and task != "two heads",
        )
        for task, arm, other in sorted(REGISTERED, key=lambda one: list(TASKS).index(one[0]))
    ]  # fmt: skip


def described(results: dict[str, Any], task: str) -> str:
    last = results["lengths"][task][-1]
    return f"{NAMES[task]}, trained with {TASKS[task].trained}, n = {last}"


def claims(results: dict[str, Any]) -> list[Claim]:
    found = []
    for task in TASKS:
        registered = decision(results, task, "log" + TIMES, "O" + TIMES, CONFIDENCE)
        plain, held = (decision(results, task, *x) for x in (("log", "O"), ("held", "O" + TIMES)))
        where = f"{described(results, task)}, points of accuracy"
        found += [
            Claim(
                "posts 9588 and 8823",
                "A factor log n improves extrapolation to longer contexts.",
                f"{where}: {registered.interval()} where the law and the standard scale have a "
                f"constant that is as well chosen; {plain.interval()} without constants.",
                answered(registered),
            ),
            Claim(
                "post 8823",
                "For lengths beyond those of training the entropy should not depend on n.",
                f"{where}: a held mean entropy {held.interval()} against the standard scale with a "
                f"well-chosen constant.",
                "exploratory",
            ),
        ]
    return found


def report(results: dict[str, Any]) -> str:
    registered = [
        [task, f"{arm} against {other}", found.interval(), found.verdict]
        for task, arm, other in REGISTERED
        for found in [decision(results, task, arm, other, CONFIDENCE)]
    ]
    head = ["task", "arms", f"points [{100 * CONFIDENCE:g} % interval]", "verdict"]
    return f"""\
{table(head, registered)}

{means(results)}

c is the median over {results["seeds"]} seeds.
"""


def means(results: dict[str, Any]) -> str:
    """The mean accuracies at the greatest length, and c, for each arm and task."""
    tasks = results["tasks"]
    head = ["accuracy in % (c), n =", *(f"{x}: {results['lengths'][x][-1]}" for x in tasks)]
    rows = [
        [
            arm,
            *(
                f"{fmean(values(results, task, arm)):.1f}"
                + (f" ({median(x['constant'] for x in found[arm]):.3g})" if is_chosen(arm) else "")
                for task, found in tasks.items()
            ),
        ]
        for arm in ARMS
    ]
    return table(head, rows)


def is_chosen(arm: str) -> bool:
    """Whether the arm has a constant that was chosen."""
    return arm.endswith(TIMES) or arm == HINDSIGHT


def picture(results: dict[str, Any]) -> Figure:
    """Plot each arm against O × c at the last length: a dot and its interval, a panel for each task."""
    arms = [arm for arm in ARMS if arm != "O" + TIMES]
    figure, axes = plt.subplots(1, len(TASKS), figsize=(11, 4.8), sharey=True, layout="constrained")
    for ax, task in zip(axes, results["tasks"], strict=True):
        for at, arm in enumerate(reversed(arms)):
            found = decision(results, task, arm, "O" + TIMES)
            color = "C3" if is_chosen(arm) else "C0"
            ax.errorbar(found.mean, at, xerr=found.high - found.mean, fmt="o", color=color)
        ax.axvline(0, color="gray", lw=0.8)
        ax.set_title(f"{task}, n = {results['lengths'][task][-1]}", fontsize=10)
    axes[0].set_yticks(range(len(arms)), map(experiment.spelled, reversed(arms)))
    figure.supxlabel("points of accuracy above standard × c (bar: 95 % interval)")
    return figure


def main(arguments: list[str] | None = None) -> None:
    experiment.main_of_arms(NAME, __doc__, SEEDS, (FULL, QUICK), run, report, picture, arguments)


if __name__ == "__main__":
    main()
