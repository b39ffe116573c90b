"""What the experiment with keys that are alike has found: tables, effects, claims and the picture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import experiment
import matplotlib.pyplot as plt
from effects import NOTHING, Effect
from experiment import Claim, Decision, decide, plot_means, slope, spread, table, verdict
from matplotlib.figure import Figure
from recall import ARMS, EARLY, EARLY_TASK, KEY_NOISE, SMALLEST, STEPS, TRAINED


def values(results: dict, task: str, arm: str, what: str, at: int = -1) -> list[float]:
    """The values of all seeds at one of the lengths."""
    return [found[what][at] for found in results["tasks"][task][arm]]


def means(results: dict, task: str, arm: str, what: str) -> list[float]:
    """The means over the seeds at each length."""
    lengths = range(len(results["lengths"]))
    return [statistics.fmean(values(results, task, arm, what, i)) for i in lengths]


def beats(results: dict, task: str, arm: str, other: str = "O") -> int:
    """The number of seeds in which an arm has less loss than another at the largest n."""
    pairs = zip(*(values(results, task, name, "loss") for name in (arm, other)), strict=True)
    return sum(a < b for a, b in pairs)


def decision(results: dict, task: str, arm: str) -> Decision:
    """Whether an arm has less loss than O at the largest n, in its logarithm."""
    pairs = zip(*(values(results, task, name, "loss") for name in ("O", arm)), strict=True)
    return decide([math.log(a / b) for a, b in pairs], math.log(SMALLEST))


def times(found: Decision) -> str:
    """The factor on the loss, with its interval."""
    mean, low, high = (math.exp(-x) for x in (found.mean, found.high, found.low))
    return f"{mean:.2f} [{low:.2f}, {high:.2f}]"


def decisions_table(results: dict) -> str:
    arms = ("O + law", "O + calibrated", "O + held")
    found = {task: [decision(results, task, arm) for arm in arms] for task in results["tasks"]}
    return table(
        [f"loss at n = {results['lengths'][-1]}, times that of O", *arms],
        [[task, *map(times, row)] for task, row in found.items()],
    )


def changes(results: dict, task: str, what: str) -> list[float]:
    """The changes that the law makes to the means over the seeds, at each length."""
    pairs = zip(*(means(results, task, arm, what) for arm in ("O + law", "O")), strict=True)
    return [a - b for a, b in pairs]


def arms_table(results: dict, task: str) -> str:
    """Losses at all lengths, with their spread at the last; entropies and accuracies at both ends."""
    *lengths, last = results["lengths"]
    is_recall = "accuracy" in results["tasks"][task]["O"][0]
    ends = [("entropy", ".2f", "nats")] + [("accuracy", ".1f", "%")] * is_recall
    form = ".3f" if is_recall else ".4f"
    head = [f"{task}, n =", *lengths, last, "seeds below O"]
    head += [f"{unit} at {n}" for _, _, unit in ends for n in (lengths[0], last)]
    rows = []
    for arm in ARMS:
        row = [arm, *(f"{x:{form}}" for x in means(results, task, arm, "loss")[:-1])]
        row += [spread(values(results, task, arm, "loss"), form), beats(results, task, arm)]
        for what, digits, _ in ends:
            row += [f"{means(results, task, arm, what)[at]:{digits}}" for at in (0, -1)]
        rows.append(row)
    return table(head, rows)


def factors_table(results: dict) -> str:
    tasks, lengths = results["tasks"], results["lengths"]
    rows = []
    for task in tasks:
        best = [values(results, task, "O + best", "factor", at) for at in range(len(lengths))]
        rows.append([f"{task}: best", *(spread(x, ".2f") for x in best)])
    laws = [(f"{task}: calibrated", task, "O + calibrated") for task in tasks]
    for name, *arm in [*laws, ("law", next(iter(tasks)), "O + law")]:
        rows.append([name, *(f"{x:.2f}" for x in means(results, *arm, "factor"))])
    return table(["factor, n =", *lengths], rows)


def theory_table(results: dict) -> str:
    lengths = results["lengths"]
    rows = []
    for noise, scales in results["theory"]:
        rows.append([noise, *(f"{x:.2f}" for x in scales), f"{slope(lengths, scales):.2f}"])
    return table(["noise of the keys, n =", *lengths, "per log n"], rows)


def report(results: dict[str, Any]) -> str:
    first, last, seeds = results["lengths"][0], results["lengths"][-1], results["seeds"]
    trained, ideal = (values(results, "recall", arm, "loss", 0) for arm in ("O", "ideal"))
    excess = [100 * (a / b - 1) for a, b in zip(trained, ideal, strict=True)]
    best = [x for found in results["tasks"]["recall"]["O + best"] for x in found["factor"]]
    bayes = means(results, "recall", "ideal", "entropy")
    early = means(results, EARLY_TASK, "O + best", "factor")
    gains = [-x for x in changes(results, EARLY_TASK, "loss")]
    points = [changes(results, task, "accuracy") for task in ("recall", EARLY_TASK)]
    factors = [means(results, task, "O + best", "factor")[-1] for task in KEY_NOISE]
    with_law, held = ([beats(results, x, arm) for x in KEY_NOISE] for arm in ("O + law", "O + held"))
    tables = "\n\n".join(arms_table(results, task) for task in results["tasks"])
    return f"""\
The loss is the log loss in `recall` and the squared error in `average`. Losses are means of
{seeds} seeds. The columns in nats are the mean entropy:

{tables}

The ratios are paired over the seeds, with 95 % intervals. An effect matters from a factor of
{SMALLEST:g}. They have no verdicts, because this was fixed after the run:

{decisions_table(results)}

{factors_table(results)}

**Recall.** At n = {first} the loss differs from that of Bayes' rule by at most
{max(map(abs, excess)):.1f} %, so the layer is fully trained. The best factor is {min(best):.2f} to
{max(best):.2f} over all seeds and lengths. The entropy of Bayes' rule rises from {bayes[0]:.2f} to
{bayes[-1]:.2f} nats. At n = {last} the law is better than O in
{beats(results, "recall", "O + law")} of {seeds} seeds. It changes the mean accuracy at a length by
{min(points[0]):+.1f} to {max(points[0]):+.1f} points. A factor hardly changes which label gets the most
weight; it changes how sure the layer is of it.

If training stops after {EARLY} of {STEPS} steps, the logits are too small at every length: the best
factor is {early[0]:.2f} already at n = {first}, and {early[-1]:.2f} at n = {last}. There the law is
better in {beats(results, EARLY_TASK, "O + law")} seeds. Its mean gain at a length is up to
{max(gains):.2f} nats and {max(points[1]):.1f} points. It makes up for missing training, not for length.

**Average.** At n = {last} the best factor is {factors[0]:.2f} for clear groups and {factors[1]:.2f} for
blurred groups. The law is better than O in {with_law[0]} of {seeds} seeds for clear groups, and in
{with_law[1]} for blurred groups. Holding the entropy is better than O in {held[0]} and {held[1]} seeds:
it gives up the benefit of more keys.

The scale λ with the least error in `average`, predicted by a formula for many keys with weight:

{theory_table(results)}

Without noise of the keys this scale is log n plus a constant. That is a law like Su's, but for another
reason: the weight of the other groups, e^−λ, has to fall like the variance, 1/n. The entropy still
rises like log n. With noise λ grows more slowly. For blurred groups the formula is not valid
yet at these n. Its variance comes from rare keys very near to the direction of their group, and so few
keys do not include such keys.
"""


def effects(results: dict[str, Any]) -> list[Effect]:
    last = results["lengths"][-1]
    return [
        Effect(
            NOTHING, f"{task}, trained with {TRAINED}, n = {last}",
            arm.removeprefix("O + ").replace("law", "log n at test"), "none",
            decision(results, task, arm), math.log(SMALLEST), "in the log of the loss",
            "the criterion was fixed after the run", "+.2f", leads=arm == "O + law",
        )
        for task, arm in (
            ("recall", "O + law"), ("average, blurred", "O + law"), ("average, clear", "O + law"),
            ("average, clear", "O + held"),
        )
    ]  # fmt: skip


def claims(results: dict[str, Any]) -> list[Claim]:
    lengths = results["lengths"]
    tasks = [task for task in results["tasks"] if task != EARLY_TASK]
    last = lengths[-1]

    def losses(task: str, *arms: str) -> str:
        return ", ".join(f"{means(results, task, arm, 'loss')[-1]:.3g} with {arm}" for arm in arms)

    def rises(task: str, arm: str) -> float:
        return slope(lengths, means(results, task, arm, "entropy"))

    def rise(task: str, *arms: str) -> str:
        return ", ".join(f"{rises(task, arm):.2f} with {arm}" for arm in arms)

    def each(say: Callable[[str], str], of: list[str] = tasks) -> str:
        return "; ".join(f"{task}: {say(task)}" for task in of) + "."

    held, groups = ("O + calibrated", "O + held"), list(KEY_NOISE)
    law = means(results, tasks[0], "O + law", "factor")[-1]
    return [
        Claim(
            "post 9588, a comment",
            "Where new keys are like the old ones (on a graph), the law makes results worse.",
            f"No graph. Loss at n = {last}: {each(lambda x: losses(x, 'O', 'O + law'))}",
            "exploratory",
        ),
        Claim(
            "post 9588, the reply to it",
            "With keys that are alike, of which many are averaged, no scaling by log n may be better.",
            f"Best factor at n = {last}, where the law has {law:.2f}: "
            + each(lambda x: f"{means(results, x, 'O + best', 'factor')[-1]:.2f}", groups),
            "exploratory",
        ),
        Claim(
            "post 8823",
            "For lengths beyond those of training the entropy should not depend on n.",
            f"Loss at n = {last}: {each(lambda x: losses(x, 'O', *held))}",
            "exploratory",
        ),
        Claim(
            "post 9588",
            "Whatever n is, attention should be on the few keys that matter.",
            f"dH/d log n: {each(lambda x: rise(x, 'ideal'))}",
            verdict(all(rises(task, "ideal") < 0.1 for task in tasks)),
        ),
        Claim(
            "post 9588",
            "With more keys the attention spreads, and a factor that grows with n gathers it again.",
            f"dH/d log n: {each(lambda x: rise(x, 'O', 'O + law'))}",
            verdict(all(rises(task, "O") > rises(task, "O + law") > 0 for task in tasks)),
        ),
    ]


def picture(results: dict[str, Any]) -> Figure:
    """Plot losses against n (top), and the factors of laws and the best factors (bottom).

    Bands are 95 % intervals of the means over seeds.
    """
    lengths, tasks = results["lengths"], results["tasks"]
    figure, axes = plt.subplots(2, len(tasks), figsize=(10, 6.4), sharex=True, layout="constrained")
    for (above, below), task in zip(axes.T, tasks, strict=True):
        for i, arm in enumerate(ARMS):
            style: dict[str, Any] = {"color": f"C{i}", "label": experiment.spelled(arm)}
            if arm == "ideal":
                style |= {"color": "k", "linestyle": "--", "marker": ""}
            for ax, what in ((above, "loss"), (below, "factor")):
                if what in tasks[task][arm][0]:
                    samples = [values(results, task, arm, what, j) for j in range(len(lengths))]
                    plot_means(ax, lengths, samples, **style)
        for found in tasks[task]["O + best"]:
            below.plot(lengths, found["factor"], "C4.", alpha=0.4)
        above.set_title(task, fontsize=10)
        above.set_yscale("linear" if "accuracy" in tasks[task]["O"][0] else "log")
        experiment.length_axis(below, lengths[::2], "keys")
        below.set_yscale("log", base=2)
        below.set_yticks((ticks := (1, 1.5, 2, 3, 4, 6, 8)), [f"{x:g}" for x in ticks])
        below.set_ylim(0.8, 9)
    axes[0, 0].set_ylabel("loss (band: 95 % interval)")
    axes[1, 0].set_ylabel("factor on the scale")
    axes[0, 0].legend(fontsize=8, loc="upper left")
    return figure
