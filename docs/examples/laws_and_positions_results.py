"""What the experiment with all laws at all positions has found: tables, effects and the picture."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import experiment
import matplotlib.pyplot as plt
import smollm2
import smollm2_results
from effects import BOTH, Effect
from effects import POSITIONS as FAILING
from experiment import Claim, Decision, answered, decide, plot_intervals, table
from laws_and_positions import CALLED, COLUMNS, EXTENDED, LAWS, LIMIT_OF_ERROR, POSITIONS
from matplotlib.figure import Figure
from pretrained import TRAINED
from smollm2 import CONSTANT, NO_LAW, PRIMARY, SMALLEST
from smollm2_results import gains


def pairs(results: dict[str, Any], extended: dict[str, Any]) -> dict[str, Any]:
    """Results for the functions of `smollm2`, whose arms are pairs of positions and laws.

    `extended` are the results of `smollm2`, for the positions of YaRN × 2.
    """
    at = results["positions"] | {EXTENDED: extended["arms"]}  # which has all documents
    documents = results["documents"]
    arms = {
        (positions, law): {name: at[positions][law][name] for name in documents}
        for positions in COLUMNS
        for law in LAWS
    }
    return {"edges": results["edges"], "arms": arms}


def decision(of_pairs: dict[str, Any], pair: Any, other: Any) -> Decision:
    return decide(gains(of_pairs, pair, other), SMALLEST)


def mean_loss(of_pairs: dict[str, Any], pair: Any) -> float:
    names = of_pairs["arms"][pair]
    return statistics.fmean(smollm2_results.loss(of_pairs, pair, name, True) for name in names)


def losses_table(of_pairs: dict[str, Any]) -> str:
    rows = [[law, *(f"{mean_loss(of_pairs, (x, law)):.3f}" for x in COLUMNS)] for law in LAWS]
    return table(["law", *COLUMNS], rows)


def decisions_table(of_pairs: dict[str, Any], other: str) -> str:
    """The gain of each law over another at the same positions."""

    def cell(positions: str, law: str) -> str:
        found = decision(of_pairs, (positions, law), (positions, other))
        is_primary = (law, other) == (PRIMARY, NO_LAW)
        return found.interval("+.3f") + (f" **{found.verdict}**" if is_primary else "")

    rows = [[law, *(cell(x, law) for x in COLUMNS)] for law in LAWS if law not in (NO_LAW, other)]
    return table([f"gain over {other}", *COLUMNS], rows)


def within(of_pairs: dict[str, Any]) -> str:
    """What the constant gains within the trained length, where laws alone are 1."""
    found = {
        x: statistics.fmean(gains(of_pairs, (x, CONSTANT), (x, NO_LAW), beyond=False)) for x in COLUMNS
    }
    return ", ".join(f"{gained:+.3f} {CALLED[x]}" for x, gained in found.items())


def lowest(of_pairs: dict[str, Any]) -> tuple[str, str]:
    return min(of_pairs["arms"], key=partial(mean_loss, of_pairs))


def about_the_lowest(of_pairs: dict[str, Any]) -> str:
    best = lowest(of_pairs)
    others = {x: decision(of_pairs, best, x) for x in of_pairs["arms"] if x != best}
    equal = [f"{x}, {law}" for (x, law), found in others.items() if found.verdict != "helps"]
    text = (
        f'The lowest mean loss beyond the trained length has the law "{best[1]}" at the positions '
        f'"{best[0]}": {mean_loss(of_pairs, best):.3f} nats per token.'
    )
    if not equal:
        return f"{text} It is lower than that of each other pair, by more than {SMALLEST} nats."
    rest = f" than those of {len(others) - len(equal)} of the {len(others)} other pairs"
    return f"{text} It is lower by more than {SMALLEST} nats{rest}. The others are: {'; '.join(equal)}."


def errors(results: dict[str, Any], extended: dict[str, Any]) -> dict[tuple[str, str], float]:
    """By how much mean gains in mixed precision are off, for laws and what they are compared with."""
    check = results["positions"][EXTENDED]
    again = {law: {x: extended["arms"][law][x] for x in check[law]} for law in LAWS}
    of_both = [{"edges": results["edges"], "arms": arms} for arms in (check, again)]
    found = {}
    for law in LAWS[1:]:
        for other in (NO_LAW, CONSTANT):
            if law != other:
                mixed, single = (statistics.fmean(gains(x, law, other)) for x in of_both)
                found[law, other] = mixed - single
    return found


def precision(results: dict[str, Any], extended: dict[str, Any]) -> str:
    worst = max(map(abs, errors(results, extended).values()))
    says = (
        f"So the differences above have an error of about {worst:.3f} nats."
        if worst > LIMIT_OF_ERROR
        else f"That is below the {LIMIT_OF_ERROR} nats that were allowed."
    )
    return (
        f"Mixed precision changes the mean gains at {EXTENDED} by at most {worst:.4f} nats, on the "
        f"{len(results['positions'][EXTENDED][NO_LAW])} documents that were computed in both ways. "
        f"{says}"
    )


def report(results: dict[str, Any]) -> str:
    extended = experiment.load(smollm2.NAME)
    of_pairs = pairs(results, extended)
    return f"""\
The mean negative log-likelihood per token, in nats, of {len(results["documents"])} documents, where
tokens see {TRAINED + 1} to {results["edges"][-1]} keys, by the law and the positions:

{losses_table(of_pairs)}

Paired differences over the documents, in nats per token, with 95 % intervals. The smallest relevant
effect is {SMALLEST} nats. The primary arm, "{PRIMARY}", has verdicts, and all else is exploratory:

{decisions_table(of_pairs, NO_LAW)}

{decisions_table(of_pairs, CONSTANT)}

Within the trained length laws alone change nothing, and YaRN's constant gains in the mean
{within(of_pairs)}.

{about_the_lowest(of_pairs)}

{precision(results, extended)}
"""


def effects(results: dict[str, Any]) -> list[Effect]:
    of_pairs = pairs(results, experiment.load(smollm2.NAME))
    return [
        Effect(
            FAILING if positions == COLUMNS[0] else BOTH, f"SmolLM2, positions {CALLED[positions]}",
            law, NO_LAW, decision(of_pairs, (positions, law), (positions, NO_LAW)), SMALLEST,
            "nats per token", "" if law == PRIMARY else "not the primary arm", "+.3f",
        )
        for positions in POSITIONS
        for law in (PRIMARY, CONSTANT)
    ]  # fmt: skip


def claims(results: dict[str, Any]) -> list[Claim]:
    of_pairs = pairs(results, experiment.load(smollm2.NAME))

    def claim(source: str, says: str, positions: str, law: str) -> Claim:
        found = decision(of_pairs, (positions, law), (positions, NO_LAW))
        text = f"Gain in nats per token {CALLED[positions]}: {smollm2_results.show(found)}."
        return Claim(source, says, text, answered(found))

    constant, su = ((x.source, x.says) for x in smollm2_results.claims(experiment.load(smollm2.NAME)))
    return [
        claim(*constant, "YaRN × 4", CONSTANT),
        *(claim(*su, positions, "Su") for positions in POSITIONS),
    ]


def picture(results: dict[str, Any]) -> Figure:
    """Plot the gain of each law over no law, by the positions, with intervals over the documents."""
    of_pairs = pairs(results, experiment.load(smollm2.NAME))
    figure, axis = plt.subplots(figsize=(9, 4), layout="constrained")
    laws = LAWS[1:]
    for i, law in enumerate(laws):
        found = [decision(of_pairs, (x, law), (x, NO_LAW)) for x in COLUMNS]
        places = [x + (i - (len(laws) - 1) / 2) * 0.1 for x in range(len(COLUMNS))]
        plot_intervals(axis, places, found, markersize=4, color=f"C{i}", label=law)
    axis.axhline(0, color="gray", linewidth=0.5)
    axis.set_xticks(range(len(COLUMNS)), COLUMNS)
    axis.set_xlabel("positions")
    axis.set_ylabel("gain over no law, nats per token")
    axis.set_title("means over the documents, with their 95 % intervals", fontsize=9)
    figure.legend(fontsize=8, loc="outside right upper")
    return figure
