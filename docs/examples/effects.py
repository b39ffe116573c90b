"""The effects that the experiments have measured: a table and a picture of all of them.

Each experiment has a function `effects`, which gives those that answer its question.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

import matplotlib.pyplot as plt
from experiment import Decision, spelled, table
from matplotlib.figure import Figure

DILUTION, POSITIONS, NOTHING = "dilution", "positions", "nothing"
BOTH = "positions and dilution"
BOTH_ENDS = "dilution, in half of the questions"
# In the order of the answers on the first screen.
COLORS = {POSITIONS: "C1", DILUTION: "C0", BOTH_ENDS: "C4", BOTH: "C3", NOTHING: "C2"}
NO_BREAK = "\N{NO-BREAK SPACE}"


class Effect(NamedTuple):
    """What an arm changes against another, on a task in which something fails."""

    fails: str  # one of `COLORS`
    task: str
    arm: str
    other: str
    found: Decision
    smallest: float  # the smallest effect that matters
    unit: str
    why: str = ""  # why it has no verdict; empty if it was registered before its run
    form: str = "+.1f"
    leads: bool = False  # whether it is in the table on the first screen

    @property
    def sure(self) -> str:
        return f"exploratory: {self.why}" if self.why else f"registered: **{self.found.verdict}**"


def effects_table(effects: Iterable[Effect]) -> str:
    head = ["what fails", "task", "what was tried", "against", "gain [interval]", "how sure"]
    rows = [
        [x.fails, x.task, spelled(x.arm), spelled(x.other)]
        + [f"{x.found.interval(x.form).replace(' ', NO_BREAK)} {x.unit}", x.sure]
        for x in sorted(effects, key=lambda x: list(COLORS).index(x.fails))
    ]
    return table(head, rows)


def forest(effects: Sequence[Effect]) -> Figure:
    """Plot each effect as a dot with its interval, in units of the smallest effect that matters."""
    rows: list[str | Effect] = []
    for task, of_task in groupby(effects, lambda one: one.task):
        rows += [task, *of_task]
    figure, ax = plt.subplots(figsize=(10, 0.24 * len(rows) + 1.4), layout="constrained")
    for at, row in enumerate(reversed(rows)):
        if isinstance(row, str):
            continue
        mean, low, high = (x / row.smallest for x in row.found[1:])
        color = COLORS[row.fails]
        face = "white" if row.why else color
        interval = [[mean - low], [high - mean]]
        ax.errorbar([mean], [at], xerr=interval, fmt="o", color=color, markerfacecolor=face)
    ax.axvspan(-1, 1, color="gray", alpha=0.2, lw=0)
    ax.axvline(0, color="gray", lw=0.8)
    ax.set_xscale("symlog", linthresh=1, linscale=1)
    ticks = (-30, -10, -3, -1, 0, 1, 3, 10, 30)
    ax.set_xticks(ticks, [f"{x:+d}" if x else "0" for x in ticks])
    names = [x if isinstance(x, str) else f"{x.arm}, against {x.other}" for x in reversed(rows)]
    labels = list(map(spelled, names))
    ax.set_yticks(range(len(labels)), labels, fontsize=8)
    for label, row in zip(ax.get_yticklabels(), reversed(rows), strict=True):
        label.set_fontweight("bold" if isinstance(row, str) else "normal")
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(-0.7, len(labels) - 0.3)
    ax.set_xlabel("gain, in units of the smallest effect that matters (gray: less than that)")
    for name in dict.fromkeys(one.fails for one in effects):
        ax.plot([], [], "o", color=COLORS[name], label=f"what fails: {name}")
    ax.plot([], [], "o", color="gray", markerfacecolor="white", label="exploratory")
    figure.legend(fontsize=8, loc="outside upper center", ncols=3)
    return figure
