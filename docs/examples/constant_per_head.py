"""Where does a constant for each head help? SmolLM2 at stretched positions, with the missing controls.

    python constant_per_head.py            # two hours and a half on two cores
    python constant_per_head.py --quick    # a quarter of an hour, and no verdict

In `smollm2.py` a constant for each head, trained at the positions of YaRN × 2, gained 0.028 nats per
token over YaRN's own constant for all heads. That arm was added last, and its documents are of three
kinds. Here are new documents, of eight sources, three of which are no Python: they are the descriptions
(READMEs) of the installed packages. And there are constants that are as well trained, but not per head.

Arms, with the same weights at the positions of YaRN × 2:

- no constant: 1.
- YaRN's constant: (1 + 0.1 ln 2)² = 1.143 on all logits.
- one constant, constant per layer, constant per head: 1, 30 and 270 numbers, trained from YaRN's
  constant on, with all weights frozen, by 32 steps of Adam on eight documents of four other sources.

The same constants are also used at the positions of the training within 8192 tokens, for half of the
documents. There they were not trained: do they adapt the model to such texts?

Documents have 12288 tokens each: three of each source. A source is the code of a package, the
docstrings of one, or a quarter of the packages' descriptions.

What decides
------------
This section was written before the experiment was run. The results of `smollm2.py` were known.

The quantity is the mean loss in nats per token where a query sees 8193 to 12288 keys. The smallest
effect that matters is 0.01. The unit is the source: the mean of the differences of its three documents.
There are eight. There are three registered comparisons: "constant per head" against "one constant" (the
primary one), "constant per head" against "constant per layer", and "one constant" against "YaRN's
constant". The t intervals have 98.33 % confidence each, so that all of them hold together with 95 %.
Above 0.01, the arm helps. Within ±0.01, it has no effect of that size. Below −0.01, it harms. Otherwise
it is not decided. The same over the 24 documents, within the trained length, and at the positions of
the training is exploratory.
"""

from __future__ import annotations

import importlib.metadata
from functools import lru_cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import experiment
import matplotlib.pyplot as plt
import pretrained
import torch
from effects import BOTH, Effect
from experiment import Claim, Decision, decide, table
from matplotlib.figure import Figure
from package_texts import pool
from pretrained import CHUNK, TRAINED, Arm, Document, Numbers
from smollm2_fits import RATE, Fit, fit

NAME = "constant_per_head"
CONSTANT = pretrained.temperature(2)
NO, YARN = "no constant", "YaRN's constant"
FITS = {
    "one constant": Fit("model", 8, CONSTANT),
    "constant per layer": Fit("layer", 8, CONSTANT),
    "constant per head": Fit("head", 8, CONSTANT),
}
ONE, LAYER, HEAD = FITS
ARMS = (NO, YARN, *FITS)
TRAINED_POSITIONS = "as trained"

# What decides
SMALLEST = 0.01  # nats per token
REGISTERED = ((HEAD, ONE), (HEAD, LAYER), (ONE, YARN))
EXPLORATORY = ((HEAD, YARN), (LAYER, ONE), (YARN, NO))
CONFIDENCE = 1 - 0.05 / len(REGISTERED)


class Size(NamedTuple):
    length: int
    sources: tuple[str, ...]
    parts: int  # documents of each source
    fit: tuple[str, ...]  # sources of the fit, of which two documents each are used
    steps: int  # of the documents of the fit, as their number times the chunks beyond TRAINED


FULL = Size(
    TRAINED + 4 * CHUNK,
    (
        "code pandas", "code sqlalchemy", "code sklearn", "docstrings scipy", "docstrings transformers",
        "readme 0", "readme 1", "readme 2",
    ),
    3,
    ("code sympy", "code dask", "docstrings numpy", "readme 3"),
    8,
)  # fmt: skip
QUICK = Size(TRAINED + 2 * CHUNK, ("code pandas", "readme 0"), 1, ("code sympy",), 1)


# ------------------------------------------------------------------------------------ documents


@lru_cache
def text_of(source: str) -> str:
    kind, _, name = source.partition(" ")
    if kind == "readme":
        texts = readmes()
        return "\n\n".join(texts[int(name) :: 4])
    of_package = pool()[name]["code" if kind == "code" else "prose"]
    return of_package.tobytes().decode(errors="ignore")


def readmes() -> list[str]:
    """The descriptions of the installed packages, in the order of their names."""
    found = {
        x.metadata["Name"].lower(): x.metadata.get_payload() or x.metadata.get("Description") or ""
        for x in importlib.metadata.distributions()
    }
    return [found[name] for name in sorted(found) if found[name]]


def documents(source: str, parts: int, tokenizer: Any, length: int) -> list[Document]:
    """Parts of a source, one after the other: (length + 1,) tokens each."""
    ids = tokenizer(text_of(source), add_special_tokens=False)["input_ids"]
    found = [ids[i * (length + 1) : (i + 1) * (length + 1)] for i in range(parts)]
    if len(found[-1]) <= length:
        raise ValueError(f"{source} has only {len(ids)} tokens here")
    return [
        Document(f"{source}, part {i}", torch.tensor(x), experiment.digest_of(x))
        for i, x in enumerate(found)
    ]


# ----------------------------------------------------------------------------------------- runs


def run(size: Size, converted: Path, path: Path, processes: int) -> dict[str, Any]:
    """All results. Those that are kept are not computed again. Each process has one thread."""
    _, tokenizer = pretrained.load(converted)
    test = [y for x in size.sources for y in documents(x, size.parts, tokenizer, size.length)]
    count = -(-size.steps // len(size.fit))
    fitting = [y for x in size.fit for y in documents(x, count, tokenizer, size.length)][: size.steps]
    steps = len(fitting) * (size.length - TRAINED) // CHUNK
    work = partial(fitted, documents=fitting, converted=converted, path=path, steps=steps)
    found = experiment.run(work, list(FITS), steps * len(FITS), processes)
    fits = dict(zip(FITS, found, strict=True))
    work = partial(measured, fits=fits, size=size, converted=converted, path=path)
    losses = experiment.run(work, list(enumerate(test)), len(test) * len(ARMS), processes)
    return {
        "length": size.length,
        "documents": {x.name: x.digest for x in (*test, *fitting)},
        "constants": {name: x["constants"] for name, x in fits.items()},
        "losses": {x.name: y for x, y in zip(test, losses, strict=True)},
    }


def fitted(
    name: str, documents: list[Document], converted: Path, path: Path, steps: int
) -> dict[str, Any]:
    model, _ = pretrained.load(converted)
    what = {"job": FITS[name], "rate": RATE, "chunk": CHUNK, "documents": [x.digest for x in documents]}
    compute = partial(fit, model, documents, FITS[name], trained=("constants",))
    return experiment.kept(path, name, what, compute, steps)


def measured(
    job: tuple[int, Document], fits: dict[str, Any], size: Size, converted: Path, path: Path
) -> dict[str, Any]:
    """The losses of all arms: beyond the trained length, within it, and as trained within it."""
    index, document = job
    model, _ = pretrained.load(converted)
    edges = [0, TRAINED, size.length]
    result = {}
    for name in ARMS:
        constants = fits[name]["constants"] if name in fits else None
        arm = Arm(constant=1.0 if name == NO else CONSTANT, law=name if name in fits else "")

        def compute(arm: Arm = arm, constants: Any = constants) -> dict[str, float]:
            start = pretrained.prefix(model, document, arm, constants)
            bands = pretrained.measure(
                model, document, start, arm, Numbers(constants=constants), edges
            )["bands"]
            found = dict(zip(("within", "beyond"), bands, strict=True))
            if index % 2 == 0:
                own = arm._replace(positions=TRAINED_POSITIONS)
                losses = pretrained.prefix(model, document, own, constants).losses
                found[TRAINED_POSITIONS] = losses.mean().item()
            return found

        what = {"arm": arm, "constants": constants, "edges": edges, "document": document.digest}
        result[name] = experiment.kept(path, f"{document.name} {name}", what, compute)
        experiment.advance()
    return result


# -------------------------------------------------------------------------------------- results


def gains(results: dict[str, Any], arm: str, other: str, where: str = "beyond") -> dict[str, float]:
    """How much less loss an arm has than another, by document."""
    return {
        name: found[other][where] - found[arm][where]
        for name, found in results["losses"].items()
        if where in found[arm]
    }


def by_source(of_documents: dict[str, float]) -> list[float]:
    """The means of the documents of each source."""
    found: dict[str, list[float]] = {}
    for name, x in of_documents.items():
        found.setdefault(name.partition(",")[0], []).append(x)
    return [fmean(x) for x in found.values()]


def decision(results: dict[str, Any], arm: str, other: str, confidence: float = CONFIDENCE) -> Decision:
    return decide(by_source(gains(results, arm, other)), SMALLEST, confidence)


def effects(results: dict[str, Any]) -> list[Effect]:
    task = f"SmolLM2 with YaRN × 2, eight new sources, n = {TRAINED + 1} to {results['length']}"
    return [
        Effect(
            BOTH, task, arm, other, decision(results, arm, other), SMALLEST, "nats per token", "",
            "+.3f", leads=True,
        )
        for arm, other in REGISTERED
    ]  # fmt: skip


def claims(results: dict[str, Any]) -> list[Claim]:
    """None: the documents say nothing about constants for each head."""
    return []


def report(results: dict[str, Any]) -> str:
    where = ("within", "beyond", TRAINED_POSITIONS)
    head = ["[95 % interval, documents]", "within the trained length", TRAINED_POSITIONS]
    registered = f"gain in nats per token [{100 * CONFIDENCE:.2f} % interval, sources]"
    means = [[arm, *(f"{mean_loss(results, arm, x):.3f}" for x in where)] for arm in ARMS]
    numbers = [
        [name, *(f"{x:.3f}" for x in (min(flat), fmean(flat), max(flat)))]
        for name, layers in results["constants"].items()
        for flat in [[x for layer in layers for x in layer]]
    ]
    return f"""\
{table(["registered", registered, "verdict", *head], rows(results, REGISTERED, CONFIDENCE))}

{table(["exploratory", "gain [95 % interval, sources]", *head], rows(results, EXPLORATORY))}

{table(["loss in nats per token", *where[:2], f"{where[2]}, half of the documents"], means)}

{table(["trained constants", "least", "mean", "greatest"], numbers)}
"""


def rows(
    results: dict[str, Any], pairs: tuple[tuple[str, str], ...], confidence: float = 0.95
) -> list[list[str]]:
    """A row for each pair. Only registered pairs have verdicts."""
    found = []
    for arm, other in pairs:
        decided = decision(results, arm, other, confidence)
        documents = decide(list(gains(results, arm, other).values()), SMALLEST)
        means = (fmean(gains(results, arm, other, x).values()) for x in ("within", TRAINED_POSITIONS))
        verdict = [decided.verdict] if pairs == REGISTERED else []
        found.append(
            [f"{arm} against {other}", decided.interval("+.3f"), *verdict, documents.interval("+.3f")]
            + [f"{x:+.3f}" for x in means]
        )
    return found


def mean_loss(results: dict[str, Any], arm: str, where: str) -> float:
    return fmean(x[arm][where] for x in results["losses"].values() if where in x[arm])


def picture(results: dict[str, Any]) -> Figure:
    """Plot the gain of each arm over YaRN's constant: a dot for each source, and the interval."""
    arms = [arm for arm in ARMS if arm != YARN]
    figure, ax = plt.subplots(figsize=(7, 2.8), layout="constrained")
    for at, arm in enumerate(reversed(arms)):
        found = by_source(gains(results, arm, YARN))
        ax.plot(found, [at - 0.15] * len(found), ".", color="gray")
        mean = decide(found, SMALLEST)
        ax.errorbar(mean.mean, at, xerr=mean.high - mean.mean, fmt="o", color="C0")
    ax.axvspan(-SMALLEST, SMALLEST, color="gray", alpha=0.2, lw=0)
    ax.set_yticks(range(len(arms)), reversed(arms))
    ax.set_xlabel(f"gain over {YARN}, nats per token\n(a dot for each source; bar: 95 % interval)")
    return figure


def main(arguments: list[str] | None = None) -> None:
    parser = pretrained.model_parser(
        NAME, __doc__, memory=8, quick="a quarter of an hour, and no verdict"
    )
    options = parser.parse_args(arguments)
    size, name = (QUICK, f"{NAME}_quick") if options.quick else (FULL, NAME)
    path = options.output / f"{name}_runs"
    results = run(size, options.cache / "model", path, options.processes)
    experiment.finish(name, results, report, picture, options.output)


if __name__ == "__main__":
    main()
