"""What experiments share that train arms with the laws of `trained_laws`, and compare them over seeds.

A job trains an arm with a seed. That of the arm O is also tested with laws that it did not have then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import experiment
import matplotlib.pyplot as plt
from experiment import Claim, Decision, Verdict, length_axis, plot_means, spread, table
from trained_laws import modules

TRAINED = tuple(modules(base=2, width=1))
# The learned laws that are also tested on the weights of O. Divided by its factor at the trained
# length, "slope" is "log", and the others need their own weights.
TRANSFERRED = ("affine", "power")
AT_TEST = (
    "O + log",
    *(f"O + {arm}" for arm in TRANSFERRED),
    "O + held",
    "O + held mean",
    "O + best constant",
)
ARMS = (*TRAINED, *AT_TEST)
QUESTIONS = {
    "Does a law in training beat a learned constant?": [
        (arm, "constant") for arm in ("log", "slope", "affine", "power", "query")
    ],
    "Does the held entropy beat the log law, both at test time?": [
        ("O + held", "O + log"),
        ("O + held mean", "O + log"),
    ],
    "Does a learned affine law beat the log law?": [("slope", "log"), ("affine", "log")],
    "Does a law in training beat the same law at test time only?": [
        ("log", "O + log"),
        ("slope", "O + log"),
        ("affine", "O + affine"),
        ("power", "O + power"),
    ],
    "Does the length help a law of the query?": [("query", "query alone")],
    "Does an entropy that is held in training beat a learned constant, or the law log n?": [
        ("held", "constant"),
        ("held", "log"),
    ],
}


# ----------------------------------------------------------------------------------------- runs


class Job:
    """The methods of a dataclass with the fields `arm` and `path`: where its results are kept."""

    arm: str
    path: Path

    def name(self) -> str:
        raise NotImplementedError

    def identity(self) -> dict[str, Any]:
        """What the result depends on. One with another identity is of another experiment."""
        raise NotImplementedError

    def result(self) -> dict[str, dict] | None:
        """The results by arm if the job is finished."""
        return experiment.stored(self.path, self.name(), self.identity())

    def write(self, arms: dict[str, dict]) -> None:
        experiment.store(self.path, self.name(), self.identity(), arms)

    def learned(self) -> dict[str, dict]:
        """What the jobs of the arms have found whose laws are tested on the weights of this one."""
        return {arm: (replace(self, arm=arm).result() or {})[arm] for arm in TRANSFERRED}


def finish(work: Callable[[Any], None], jobs: Iterable[Job], steps: int) -> None:
    """Run those of the jobs that are not finished. Each advances the progress bar by `steps`."""
    left = [job for job in jobs if job.result() is None]
    experiment.run(work, left, len(left) * steps)


def finish_all(work: Callable[[Any], None], jobs: Sequence[Job], steps: int) -> None:
    """The same with O last: laws that others have learned are tested on its weights."""
    finish(work, [job for job in jobs if job.arm != "O"], steps)
    finish(work, [job for job in jobs if job.arm == "O"], steps)


# -------------------------------------------------------------------------------------- results


def questions(
    asked: dict[str, list[tuple[str, str]]], head: str, decide: dict[str, Callable[..., Decision]]
) -> str:
    """The questions with a table of decisions each, of which `decide` has the columns."""
    titles = [head, *(cell for title in decide for cell in (title, "verdict"))]
    parts = []
    for question, pairs in asked.items():
        rows = []
        for arm, other in pairs:
            found = [of(arm, other) for of in decide.values()]
            cells = [cell for x in found for cell in (x.interval(), str(x))]
            rows.append([f"{arm} against {other}", *cells])
        parts.append(f"{question}\n\n{table(titles, rows)}")
    return "\n\n".join(parts)


def means_table(
    title: str, columns: Sequence[int], values: Callable[[str, int], list[float]], form: str
) -> str:
    """The means of all arms. `values` has those of the seeds for an arm in a column."""
    rows = [[arm, *(spread(values(arm, x), form) for x in columns)] for arm in ARMS]
    return table([title, *columns], rows)


def claims(found: Callable[[str, str], tuple[str, Verdict]]) -> list[Claim]:
    """What the documents claim. `found` is the result and the verdict for an arm against another."""
    return [
        Claim(
            "posts 9588 and 8823",
            "A factor log n improves extrapolation to longer contexts.",
            *found("log", "constant"),
        ),
        Claim(
            "post 8823",
            "For lengths beyond those of training the entropy should not depend on n.",
            *found("O + held mean", "O + log"),
        ),
    ]


def plot_arms(
    ax: Any, arms: Iterable[str], lengths: Sequence[int], samples: Callable[[str], list], label: str
) -> None:
    """Plot the means of arms against the length. `samples` has those of an arm at each length."""
    colors = dict(zip(ARMS, plt.get_cmap("tab20").colors, strict=False))
    for arm in arms:
        style = "--" if arm in AT_TEST else "-"
        plot_means(ax, lengths, samples(arm), linestyle=style, color=colors[arm], label=arm)
    length_axis(ax, lengths, label)
