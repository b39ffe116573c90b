"""What the experiment with SmolLM2 has found: tables, effects, claims and the picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import matplotlib.pyplot as plt
from effects import BOTH, Effect
from experiment import Claim, Decision, answered, decide, table
from matplotlib.figure import Figure
from pretrained import TRAINED
from smollm2 import (
    ARMS,
    CONSTANT,
    CONSTANTS,
    FULL,
    LIMIT_WITHIN,
    NO_LAW,
    ON_TOP,
    PRIMARY,
    SMALLEST,
    TWO_NUMBERS,
)


def loss(results: dict, arm: str, document: str, beyond: bool) -> float:
    """The mean loss beyond the trained length, or within it."""
    edges, bands = results["edges"], results["arms"][arm][document]["bands"]
    widths = [b - a for a, b in pairwise(edges)]
    chosen = [(w, x) for w, x, a in zip(widths, bands, edges, strict=False) if (a >= TRAINED) == beyond]
    return sum(w * x for w, x in chosen) / sum(w for w, _ in chosen)


def gains(results: dict, arm: str, other: str, beyond: bool = True) -> list[float]:
    """How much less loss an arm has than another, for each document that both have."""
    documents = [x for x in results["arms"][arm] if x in results["arms"][other]]
    return [loss(results, other, x, beyond) - loss(results, arm, x, beyond) for x in documents]


def gains_by_kind(results: dict, arm: str, other: str) -> list[float]:
    """The mean gains of each kind of documents: the first word of their names."""
    both = [x for x in results["arms"][arm] if x in results["arms"][other]]
    found: dict[str, list[float]] = {}
    for name, gain in zip(both, gains(results, arm, other), strict=True):
        found.setdefault(name.partition(" ")[0], []).append(gain)
    return [statistics.fmean(x) for x in found.values()]


def copied(results: dict, arm: str, other: str) -> list[float]:
    found, base = results["arms"][arm], results["arms"][other]
    return [base[x]["copied"] - found[x]["copied"] for x in found if x in base]


def answers(results: dict, arm: str) -> str:
    """What an arm says to the question."""
    if len(results["arms"][arm]) < len(FULL.test):
        return "not run on all documents"
    beyond = decide(gains(results, arm, CONSTANT), SMALLEST)
    if beyond.verdict != "helps":
        return beyond.verdict
    lost = {x: -statistics.fmean(gains(results, arm, x, beyond=False)) for x in (NO_LAW, CONSTANT)}
    if lost[NO_LAW] > LIMIT_WITHIN:
        return f"helps beyond, but loses {lost[NO_LAW]:.3f} within"
    if lost[CONSTANT] > LIMIT_WITHIN:
        return f"yes, but YaRN's constant is better by {lost[CONSTANT]:.3f} within"
    return "yes"


def show(found: Decision) -> str:
    return f"{found.mean:+.4f} ({found.low:+.4f} to {found.high:+.4f})"


def laws_in(results: dict) -> list[str]:
    """The arms that were run on all documents."""
    full = len(results["arms"][NO_LAW])
    return [arm for arm, found in results["arms"].items() if len(found) == full]


def bands_table(results: dict, arms: Sequence[str]) -> str:
    """The means over the documents that the last of the arms has."""
    edges, documents = results["edges"], list(results["arms"][arms[-1]])
    some = f"{len(documents)} documents" if len(documents) > 1 else documents[0]
    head = [f"loss on {some}, n =", *(f"to {b}" for b in edges[1:]), "copied"]
    rows = []
    for arm in arms:
        found = [results["arms"][arm][x] for x in documents]
        columns = [*zip(*(x["bands"] for x in found), strict=True), [x["copied"] for x in found]]
        rows.append([arm, *(f"{statistics.fmean(x):.3f}" for x in columns)])
    return table(head, rows)


def decisions_table(results: dict) -> str:
    rows = []
    for arm in laws_in(results):
        others = (
            CONSTANT,
            NO_LAW,
            *([ON_TOP] if arm in TWO_NUMBERS else []),
        )
        others += (CONSTANTS,) if arm == TWO_NUMBERS[1] and CONSTANTS in laws_in(results) else ()
        against = [other for other in others if other != arm]
        for other in against:
            within = statistics.fmean(gains(results, arm, other, beyond=False))
            beyond, again = (decide(x(results, arm, other), SMALLEST) for x in (gains, copied))
            rows.append([f"{arm}, against {other}", show(beyond), f"{within:+.4f}", show(again)])
    return table(["gain in nats per token", "beyond", "within", "copied"], rows)


def by_kind(results: dict) -> str:
    """The same differences with a kind of documents as the unit, of the arms that the text names."""
    pairs = (
        (PRIMARY, CONSTANT),
        ("calibrated", NO_LAW),
        (CONSTANTS, CONSTANT),
    )
    found = {
        f"{arm} against {other}": gains_by_kind(results, arm, other)
        for arm, other in pairs
        if arm in laws_in(results)
    }
    decisions = {pair: decide(of, SMALLEST) for pair, of in found.items() if len(of) > 1}
    if not decisions:
        return ""
    shown = "; ".join(f"{pair} {x.interval('+.3f')}" for pair, x in decisions.items())
    return f"""
Documents of a kind are alike. With the means of each kind in place of the documents (computed later):
{shown}.
"""


def numbers_table(results: dict) -> str:
    rows = []
    for kind, title in (("slopes", "slope per ln n"), ("constants", "constant")):
        for name, found in results["fits"].items():
            if values := sorted(x for layer in found.get(kind) or () for x in layer):
                cuts = (values[0], statistics.median(values), values[-1])
                rows.append([name, title, *(f"{x:+.3f}" for x in cuts)])
    return table(["numbers", "", "least", "median", "greatest"], rows)


def price_of_positions(results: dict) -> str:
    """What the positions of YaRN cost within the trained length, and what trained constants repair."""
    trained, own = "as trained", TWO_NUMBERS[1]
    if not all(results["arms"].get(arm) for arm in (trained, own, f"{own}, {trained}")):
        return ""
    count = len(results["arms"][trained])
    price, left, adapted = (
        statistics.fmean(gains(results, trained, arm, beyond=False))
        for arm in (NO_LAW, own, f"{own}, {trained}")
    )
    text = (
        f" Within the trained length the model has {price:.3f} nats less with its own positions than "
        f"with those of YaRN × 2, both without a law (mean of {count} documents). That is the price of "
        f'the positions. Of this, "{own}" leaves {left:+.3f} nats. At the model\'s own positions its '
        f"numbers change the loss within the trained length by {adapted:+.3f} nats."
    )
    if -adapted >= price / 4:
        return text
    return (
        f"{text} So the numbers hardly adapt the model to these texts: they repair what the stretched "
        "positions do to the logits."
    )


def report(results: dict[str, Any]) -> str:
    decided = answers(results, PRIMARY) if PRIMARY in laws_in(results) else "not run"
    missing = [arm for arm in ARMS if arm not in results["arms"]]
    not_run = f" Not run, of the arms in the script: {', '.join(missing)}." if missing else ""
    bands = bands_table(results, laws_in(results))
    orientation: dict[tuple[str, ...], list[str]] = {}  # by the documents of the arms
    for arm, of_arm in results["arms"].items():
        if arm not in laws_in(results):
            orientation.setdefault(tuple(of_arm), [NO_LAW]).append(arm)
    bands = "\n\n".join([bands, *(bands_table(results, x) for x in orientation.values())])
    return f"""\
The mean negative log-likelihood per token, in nats, by the number n of keys:

{bands}

Paired differences over {len(results["arms"][NO_LAW])} documents, with 95 % intervals. The smallest
relevant effect is {SMALLEST} nats:

{decisions_table(results)}
{by_kind(results)}
"Copied" is the loss of parts of the text that are given again, of which the beginning is the cue.

Is there a law that is better than YaRN's constant beyond the trained length, and whose loss within it
is at most {LIMIT_WITHIN} nats above that of no law? The arm that decides is {PRIMARY}: {decided}. All
other rows are exploratory.{not_run}{price_of_positions(results)}

{numbers_table(results)}
"""


def effects(results: dict[str, Any]) -> list[Effect]:
    task = f"SmolLM2 with YaRN × 2, trained with {TRAINED}, n = {TRAINED + 1} to {FULL.length}"
    added = "added when results were known"
    arms = (
        (PRIMARY, CONSTANT, gains, "", ""),
        (
            PRIMARY,
            CONSTANT,
            gains_by_kind,
            " (unit: kinds of documents)",
            "this unit came later",
        ),
        ("Su", CONSTANT, gains, "", "not the primary arm"),
        (CONSTANTS, CONSTANT, gains, "", added),
        (CONSTANTS, CONSTANT, gains_by_kind, " (unit: kinds of documents)", added),
        (TWO_NUMBERS[1], CONSTANTS, gains, "", added),
    )
    return [
        Effect(
            BOTH, task, arm.replace("Su", "log n") + unit, other,
            decide(of(results, arm, other), SMALLEST), SMALLEST, "nats per token", why, "+.3f",
            leads=of is gains and arm in (PRIMARY, CONSTANTS),
        )
        for arm, other, of, unit, why in arms
    ]  # fmt: skip


def claims(results: dict[str, Any]) -> list[Claim]:
    def claim(source: str, says: str, arm: str) -> Claim:
        found = decide(gains(results, arm, NO_LAW), SMALLEST)
        text = f"Gain in nats per token beyond the trained length: {show(found)}."
        return Claim(source, says, text, answered(found))

    return [
        claim(
            "YaRN, arXiv 2309.00071",
            "A constant temperature lowers the perplexity of longer contexts.",
            CONSTANT,
        ),
        claim(
            "post 9588",
            "A factor log n beyond the trained length improves extrapolation.",
            "Su",
        ),
    ]


def picture(results: dict[str, Any]) -> Figure:
    """Plot the gain of each arm over no law: a dot, and its interval over the documents."""
    arms = [arm for arm in laws_in(results) if arm != NO_LAW]
    figure, axes = plt.subplots(1, 2, figsize=(9, 4), sharey=True, layout="constrained")
    for axis, beyond in zip(axes, (True, False), strict=True):
        for at, arm in enumerate(reversed(arms)):
            found = decide(gains(results, arm, NO_LAW, beyond), SMALLEST)
            color = "C3" if arm == PRIMARY else "C0"
            axis.errorbar(found.mean, at, xerr=found.high - found.mean, fmt="o", color=color)
        axis.axvspan(-SMALLEST, SMALLEST, color="gray", alpha=0.2, lw=0)
        where = f"beyond {TRAINED} keys" if beyond else f"up to {TRAINED} keys"
        axis.set_title(f"{where} (bar: 95 % interval)", fontsize=9)
    axes[0].set_yticks(range(len(arms)), reversed(arms))
    figure.supxlabel("gain over no law, nats per token (red: the arm that was to decide)")
    return figure
