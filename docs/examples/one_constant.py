"""One constant at all lengths: a control that `max_retrieval.py` lacks.

    python one_constant.py            # five minutes on two free cores
    python one_constant.py --quick    # half a minute: only shows that everything runs

In Max Retrieval the answer is an argmax, so sharper attention may always be better. The arm "constant"
of `max_retrieval.py` is learned with at most 16 items, where nothing pushes it up. Here the weights of
O are tested with constants that nobody trained: each of `CONSTANTS`, the same at all lengths.

This is exploratory. It was written when all results of `max_retrieval.py` were known, and those of
these constants for five seeds. So there is no verdict. All constants are shown, but which of them is
best was seen on the test sets. Seeds, training and test sets are those of `max_retrieval.py`, and its
trained arms are read from its results. O is trained again, because no weights are kept.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import experiment
import matplotlib.pyplot as plt
import max_retrieval
from compared_arms import finish
from experiment import Decision, decide, length_axis, plot_means, spread, table
from matplotlib.figure import Figure
from max_retrieval import FULL, LONGEST, QUICK, SEEDS, Job, Settings, values
from trained_laws import constant_name

from isentropic import laws

NAME = "one_constant"
CONSTANTS = (1.0, 2.0, 4.0, 8.0, 16.0)
ARMS = ("O + log", *map(constant_name, CONSTANTS))
TRAINED = ("log", "slope", "query")  # arms of `max_retrieval.py` that each constant is compared with


def rules() -> dict[str, max_retrieval.Rule]:
    """The rules that are tested on the weights of O."""
    constants = {constant_name(x): laws.Constant(x) for x in CONSTANTS}
    named = {"O + log": laws.LogLength(LONGEST), **constants}
    return {arm: partial(lambda law, heads, n: law, law) for arm, law in named.items()}


def work(job: Job) -> None:
    """Train O, test it with each constant, and write the results."""
    model = max_retrieval.train("O", job.seed, job.settings.steps)
    job.write(max_retrieval.test(model, rules(), job.seed, job.settings))


def run(seeds: int, settings: Settings, path: Path) -> dict[str, Any]:
    jobs = [Job(NAME, seed, settings, path) for seed in range(seeds)]
    finish(work, jobs, max_retrieval.steps(settings))
    found = [job.result() or {} for job in jobs]
    return {
        "lengths": list(settings.lengths),
        "decided": list(settings.decided),
        "seeds": seeds,
        "arms": {arm: [one[arm] for one in found] for arm in ARMS},
    }


# -------------------------------------------------------------------------------------- results


def against(results: dict[str, Any], constant: float, arm: str) -> Decision:
    """The differences of a constant and a trained arm of `max_retrieval.py` at the primary length."""
    n, trained = results["decided"][0], experiment.load(max_retrieval.NAME)
    of_constant = values(results, constant_name(constant), "accuracy", n)
    of_arm = values(trained, arm, "accuracy", n)[: len(of_constant)]
    pairs = zip(of_constant, of_arm, strict=True)
    return decide([a - b for a, b in pairs], max_retrieval.SMALLEST)


def report(results: dict[str, Any]) -> str:
    lengths = results["lengths"]
    means = [
        [arm, *(spread(values(results, arm, "accuracy", n)) for n in lengths)]
        for arm in results["arms"]
    ]
    differences = [
        [f"× {x:g}", *(against(results, x, arm).interval() for arm in TRAINED)] for x in CONSTANTS
    ]
    head = [
        f"O with one constant at all n, n = {results['decided'][0]}",
        *(f"against {x}" for x in TRAINED),
    ]
    return f"""\
{table(["accuracy in %, n =", *lengths], means)}

{table(head, differences)}

The differences are paired over {results["seeds"]} seeds, in points of accuracy, with 95 % intervals.
They are exploratory: this control was added when the results of all other arms were known.
"""


def picture(results: dict[str, Any]) -> Figure:
    """Plot the mean accuracies with each constant, and those of the law log n in training."""
    lengths, trained = results["lengths"], experiment.load(max_retrieval.NAME)
    figure, ax = plt.subplots(figsize=(6, 4.2), layout="constrained")
    for arm in results["arms"]:
        samples = [values(results, arm, "accuracy", n) for n in lengths]
        plot_means(ax, lengths, samples, linestyle="--", label=arm)
    samples = [values(trained, "log", "accuracy", n)[: results["seeds"]] for n in lengths]
    plot_means(ax, lengths, samples, color="black", label="trained with log")
    length_axis(ax, lengths, "items")
    ax.set_ylabel("accuracy in % (band: 95 % interval of the mean)")
    ax.legend(fontsize=8)
    return figure


def main(arguments: list[str] | None = None) -> None:
    experiment.main_of_arms(NAME, __doc__, SEEDS, (FULL, QUICK), run, report, picture, arguments)


if __name__ == "__main__":
    main()
