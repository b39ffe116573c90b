"""A law at four times the trained length of a language model.

    python four_times.py    # two hours of one core

The model, its loss and its laws are those of `smollm2.py`: SmolLM2-135M, trained with 8192 tokens. It
reads 32768 here, at the positions of YaRN × 4. It is a measurement on two documents, without a verdict.

What follows was written before the run. The arms are: no law; YaRN's constant, which is
(1 + 0.1 ln 4)² = 1.297 for four times the length; Su: LogLength(8192, minimum=1); and "constant and
slope per head": that constant, times the slopes that `smollm2.py` trained on other texts, at the
positions of YaRN × 2 and with its constant. So these slopes are used at twice the length of their
training, at other positions. One document is of Python's language reference, the other is a module of
its standard library. They begin with texts that the experiment with twice the length has too, but
none of the fit. The result of each arm is kept beside the others as soon as it is there.

Added later, when those results and all of `smollm2.py` were known, and before their run. "constant per
head": the constants for each head that `smollm2.py` has trained at YaRN × 2, times 1.297/1.143, so that
they are relative to YaRN's constant as there. "two numbers per head": the same with its constants and
its slopes. At twice the length slopes added nothing to such constants. Do they at four times, where
ln(n/8192) is up to 1.39?
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import experiment
import matplotlib.pyplot as plt
import pretrained
import smollm2
import smollm2_results
from matplotlib.figure import Figure
from pretrained import CUE, SPAN, SPANS, TRAINED, Arm, Numbers
from smollm2 import CONSTANT, CONSTANTS, NO_LAW, ON_TOP, TWO_NUMBERS
from tqdm import tqdm

NAME = "four_times"
LENGTH = 4 * TRAINED
DOCUMENTS = ("topics 0", "source turtle")
POSITIONS = "YaRN × 4"
TEMPERATURE = pretrained.temperature(4)
ARMS = {
    NO_LAW: Arm(POSITIONS),
    "Su": Arm(POSITIONS, law="Su"),
    CONSTANT: Arm(POSITIONS, TEMPERATURE),
    **{name: Arm(POSITIONS, TEMPERATURE, name) for name in (ON_TOP, CONSTANTS, TWO_NUMBERS[1])},
}


def run(names: tuple[str, ...], length: int, converted: Path, path: Path) -> dict[str, Any]:
    """All results. Those that are kept are not computed again."""
    model, tokenizer = pretrained.load(converted)
    fits = experiment.load(smollm2.NAME)["fits"]
    edges = smollm2.Size(length, names, (), (), 0).edges
    arms: dict[str, dict] = {arm: {} for arm in ARMS}
    digests = {}
    for name in tqdm(names, desc="documents", unit=" documents"):
        document = pretrained.read(name, tokenizer, length)
        digests[name] = document.digest
        start = lru_cache(1)(
            lambda constant, constants, of=document: pretrained.prefix(
                model, of, Arm(POSITIONS, constant), constants
            )
        )
        for title, arm in tqdm(ARMS.items(), desc=name, leave=False):
            own = numbers(fits.get(arm.law, {}))

            def compute(arm: Arm = arm, own: Any = own, of: Any = document, start: Any = start) -> Any:
                before = start(arm.constant, own.constants)
                return pretrained.measure(model, of, before, arm, own, edges)

            what = {"trained": TRAINED, "edges": edges, "document": document.digest, "arm": arm}
            what |= {"slopes": own.slopes, "copies": (SPANS, SPAN, CUE)}
            what |= {} if own.constants is None else {"constants": own.constants}
            arms[title][name] = experiment.kept(path, f"{name} {title}", what, compute)
    return {"edges": edges, "documents": digests, "arms": arms}


def numbers(fit: dict[str, Any]) -> Numbers:
    """Slopes as they were fitted, and constants relative to YaRN's."""
    constants = fit.get("constants")
    if constants is not None:
        relative = TEMPERATURE / smollm2.TEMPERATURE
        constants = tuple(tuple(relative * x for x in layer) for layer in constants)
    return Numbers(fit.get("slopes"), constants)


def report(results: dict[str, Any]) -> str:
    return f"""\
The mean negative log-likelihood per token, in nats, by the number n of keys, at the positions of
{POSITIONS}:

{smollm2_results.bands_table(results, list(results["arms"]))}

"Copied" is the loss of parts of the text that are given again, of which the beginning is the cue.
"""


def picture(results: dict[str, Any]) -> Figure:
    """Plot the gain of each arm against no law, by bands: a kind of line for each document."""
    figure, axis = plt.subplots(figsize=(7, 3.8), layout="constrained")
    edges, arms = results["edges"], results["arms"]
    middles = [(a + b) / 2 for a, b in pairwise(edges)]
    for color, arm in enumerate(x for x in arms if x != NO_LAW):
        for style, name in zip(("-", "--"), results["documents"], strict=True):
            pair = arms[NO_LAW][name]["bands"], arms[arm][name]["bands"]
            gain = [a - b for a, b in zip(*pair, strict=True)]
            label = arm if style == "-" else None
            axis.plot(middles, gain, f"o{style}", color=f"C{color}", label=label, markersize=4)
    for style, name in zip(("-", "--"), results["documents"], strict=True):
        axis.plot([], [], style, color="gray", label=name)
    axis.axvline(TRAINED, color="gray", linestyle=":")
    axis.set(xlabel="keys", ylabel="gain over no law, nats per token")
    figure.legend(fontsize=8, loc="outside right center")
    return figure


def main(arguments: list[str] | None = None) -> None:
    options = pretrained.model_parser(NAME, __doc__).parse_args(arguments)
    results = run(DOCUMENTS, LENGTH, options.cache / "model", options.output / NAME)
    experiment.finish(NAME, results, report, picture, options.output)


if __name__ == "__main__":
    main()
