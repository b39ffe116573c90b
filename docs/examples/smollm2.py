"""Does a law help a real language model beyond its trained length?

    python smollm2.py            # about four hours on two cores
    python smollm2.py --quick    # ten minutes, and no verdict

SmolLM2-135M-Instruct was trained with contexts of 8192 tokens, and reads documents of 16384 here. Its
positions are those of YaRN × 2. YaRN comes with one constant for all logits at all lengths. A law can
be 1 where the model was trained and grow beyond it, for each head by itself. Is there a law that is
better than YaRN's constant beyond the trained length, and loses nothing within it?

What follows was written before the first run.

Quantity. The mean negative log-likelihood per token, in nats, where queries see n keys: beyond the
trained length, 8192 < n ≤ 16384, and within it. Tables also have it by bands of n. Second quantity: the
same for text that is given again, of which the beginning is the cue (`copying`).

Documents. Twelve, of 16385 tokens each: three parts of Python's language reference, docstrings of three
packages, and six modules of the standard library. Laws are fitted on four others. The model may have
seen all of them in training, which is the same for all arms.

Arms, all with the same weights:

- no law.
- YaRN's constant: all logits times (1 + 0.1 ln 2)² = 1.143.
- Su: LogLength(8192, minimum=1).
- one slope: 1 + slope · ln(n/8192) beyond 8192, and 1 up to there. The slope is fitted by gradients.
- slope per layer, slope per head: the same with 30 and 270 slopes.
- calibrated: the same, where the slopes are those of `drift.calibrate` on queries and keys of the
  documents of the fit, without their loss. It does not know how the law of a layer changes later ones.
- constant and one slope: YaRN's constant times the law of "one slope", fitted with it. It equals YaRN's
  constant within the trained length.
- constant and slope per head: YaRN's constant times a law with 270 slopes, fitted with it (added later,
  see below).
- two numbers per layer, two numbers per head: a constant and a slope, with 60 and 540 numbers. Both are
  trained, from YaRN's constant and the slope 0 on (added last, see below).
- constant per head: a constant at all lengths for each head, and no slope: 270 numbers, trained from
  YaRN's constant on (the control of "two numbers per head", added after it, see below).
- as trained, YaRN × 4, NTK: other positions without a law, on two documents only, for orientation.
- two numbers per head, as trained: the numbers of "two numbers per head" at the positions of the
  training, also on two documents.
- held: each query beyond the trained length has its own factor, at which its entropy is the mean
  entropy of its head at the trained length (of 64 queries in each document of the fit). Also on two
  documents, as each took half an hour.

A fit has all weights frozen. It starts from "no law", and makes one step of Adam for each 1024 tokens.
Gradients do not reach the keys of earlier tokens.

Decision. Paired differences over the documents, each arm against YaRN's constant and against no law,
by `experiment.decide` with a smallest relevant effect of 0.01 nats per token. The answer of an arm is
yes if it helps beyond the trained length against YaRN's constant, and if its mean loss within that
length is at most 0.002 nats above that of no law. All laws that are 1 there keep this limit by
construction. YaRN's constant may itself gain within the trained length. So the answer also says whether
the arm keeps the same limit against YaRN's constant. Intervals are not corrected for the number of
arms. So "slope per head" is the primary arm, and others that pass are candidates for other documents.

What was known. On two texts, which may overlap with the documents, YaRN's constant gained 0.001 to
0.036 nats in bands within the trained length. Beyond it, the loss of Su in bands was between 0.022
below and 0.053 above that of YaRN's constant, and worst just beyond.

Added later. "constant and slope per head" was written down when the results of "no law", the constant,
"Su", "one slope", "slope per head" and "calibrated" on these documents were known, and before its own
fit. Slopes per head had a lower loss than the constant beyond the trained length (by 0.021 nats), and
the constant found more codes there (`retrieval`, by 0.087 nats per digit). So: is there something to
gain in both when the slopes are trained on top of the constant? The decision is as above: yes if the
arm helps against YaRN's constant. Within the trained length it equals the constant by construction.

"held" was written down when all results but those of "slope per layer" and "constant and one slope"
were known. Clamped positions (ReRoPE) are in `law_or_position`.

"two numbers per layer" and "two numbers per head" were written down when all other results were known.
Is a constant of each layer or head better than the same constant for all? The constants hold at all
lengths. They are trained on the loss beyond the trained length alone. So they may lose within it, which
the decision has to show. It is as above, and these arms are candidates too. They are also compared with
"constant and slope per head", by the same rule.

"two numbers per head, as trained" was written down when eight documents of "two numbers per head" were
known. There the loss fell within the trained length too, by 0.037 nats. Do the constants repair what
YaRN's positions do to the logits, or do they adapt the model to this kind of text? In the second case
they lower the loss within the trained length at the positions of the training as well.

"constant per head" was written down when the results of all other arms were known. "Two numbers per
head" gains 0.028 nats over YaRN's constant beyond the trained length, and 0.032 within it, where its
slopes do nothing. So constants gain something, and what do the slopes add to them? The arm is trained
like "two numbers per head", on the same documents, with slopes that stay 0. "Two numbers per head" is
compared with it beyond the trained length, by the same rule and the same smallest effect. If it helps,
the dependence on the length matters also where each head has a constant of its own. If there is no
effect, trained constants do what the trained laws do.

Time. Measured in two processes of one thread each, on two cores of an AMD EPYC (family 25, model 17).
In seconds: 75 for the tokens up to the trained length, 14 to 22 for each 1024 tokens beyond it, 110
with "held", and 46 for a step of a fit. So a document takes 75 once for each constant, and 150 for each
law. From these figures all arms and fits take four hours on two cores. The two that were added later
take 0.9 of them. `--quick` took 8 minutes. Most of the time goes into the products of attention, in
single precision. A step with 512 tokens had a peak of 4.7 GB, so one with 1024 may need 8 GB in each
process. Each result is kept in `results/smollm2.jsonl` as soon as it is there, so that a
run that was stopped goes on where it was; only a fit starts again. `--arms` runs some of the arms.
`--processes` sets how many documents or fits are computed at a time.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import experiment
import pretrained
import torch
from experiment import kept
from pretrained import CHUNK, CUE, SPAN, SPANS, TRAINED, Arm, Document, Numbers, Prefix, temperature
from smollm2_fits import QUERIES, RATE, Fit, calibrated, fit, held_entropies
from transformers import (
    DynamicCache,
)

NAME = "smollm2"
CHECKED, SANE = 1024, (1.0, 4.0)  # tokens of a known text, and the range of their mean loss in nats
# What decides, in nats per token.
SMALLEST, LIMIT_WITHIN = 0.01, 0.002
PRIMARY, NO_LAW, CONSTANT = "slope per head", "no law", "YaRN's constant"
ON_TOP, CALIBRATED, HELD = "constant and slope per head", "calibrated", "held"
TWO_NUMBERS = ("two numbers per layer", "two numbers per head")
CONSTANTS = "constant per head"
TEMPERATURE = temperature(2)

ARMS = {
    NO_LAW: Arm(),
    CONSTANT: Arm(constant=TEMPERATURE),
    "Su": Arm(law="Su"),
    "one slope": Arm(law="one slope"),
    "slope per layer": Arm(law="slope per layer"),
    "slope per head": Arm(law="slope per head"),
    CALIBRATED: Arm(law=CALIBRATED),
    "constant and one slope": Arm(constant=TEMPERATURE, law="constant and one slope"),
    ON_TOP: Arm(constant=TEMPERATURE, law=ON_TOP),
    **{name: Arm(constant=TEMPERATURE, law=name) for name in (*TWO_NUMBERS, CONSTANTS)},
    "as trained": Arm("as trained"),
    f"{TWO_NUMBERS[1]}, as trained": Arm("as trained", TEMPERATURE, TWO_NUMBERS[1]),
    "YaRN × 4": Arm("YaRN × 4"),
    "NTK": Arm("NTK"),
    HELD: Arm(law=HELD),
}


FITS = {
    "one slope": Fit("model", 2),
    "slope per layer": Fit("layer", 4),
    "slope per head": Fit("head", 4),
    "constant and one slope": Fit("model", 2, TEMPERATURE),
    ON_TOP: Fit("head", 4, TEMPERATURE),
    **{name: Fit(name.split()[-1], 4, TEMPERATURE) for name in (*TWO_NUMBERS, CONSTANTS)},
}
# What the fits train that do not train slopes alone.
TRAINED_NUMBERS = dict.fromkeys(TWO_NUMBERS, ("slopes", "constants")) | {CONSTANTS: ("constants",)}


class Size(NamedTuple):
    length: int
    test: tuple[str, ...]
    fit: tuple[str, ...]
    arms: tuple[str, ...]
    orientation: int  # how many documents for "held" and for other positions

    @property
    def edges(self) -> list[int]:
        """The limits of the bands: two within the trained length, and four beyond it."""
        step = (self.length - TRAINED) // 4
        return [0, TRAINED // 2, *range(TRAINED, self.length + 1, step)]


FULL = Size(
    2 * TRAINED,
    (
        "topics 0", "topics 1", "topics 2",
        "docstrings networkx", "docstrings matplotlib", "docstrings torch",
        "source argparse", "source doctest", "source inspect",
        "source tarfile", "source turtle", "source typing",
    ),
    ("topics 3", "source _pydecimal", "docstrings sympy", "source pickletools"),
    tuple(ARMS),
    2,
)  # fmt: skip
QUICK = Size(
    TRAINED + 2048,
    ("topics 0", "source argparse"),
    ("source _pydecimal",),
    (NO_LAW, CONSTANT, "Su", "one slope"),
    0,
)


def run(size: Size, converted: Path, path: Path, processes: int = 1) -> dict[str, Any]:
    """All results. Those that are kept are not computed again. Each process has one thread."""
    model, tokenizer = pretrained.load(converted)
    test, fitting = (
        [pretrained.read(x, tokenizer, size.length) for x in names] for names in (size.test, size.fit)
    )
    checked = kept(converted, "check", {"tokens": CHECKED}, lambda: check(model, tokenizer))
    if not SANE[0] < checked < SANE[1]:
        raise ValueError(f"the converted model must have a loss in {SANE}, got {checked:.3f}")

    steps = fits_of(size)
    by_length = sorted(steps, key=lambda name: -steps[name])  # so that the last ones are short
    work = partial(fitted, documents=fitting, size=size, converted=converted, path=path)
    numbers = experiment.run(work, by_length, sum(steps.values()), processes)
    fits = dict(zip(by_length, numbers, strict=True))

    work = partial(measured, size=size, fits=fits, converted=converted, path=path)
    count = sum(documents_of(ARMS[arm], size) for arm in size.arms)
    found = experiment.run(work, list(enumerate(test)), count, processes)
    return {
        "edges": size.edges,
        "documents": {x.name: x.digest for x in (*test, *fitting)},
        "check": checked,
        "fits": {name: fits[name] for name in steps},
        "arms": {
            arm: {x.name: y[arm] for x, y in zip(test, found, strict=True) if arm in y}
            for arm in size.arms
        },
    }


@torch.no_grad()
def check(model: Any, tokenizer: Any) -> float:
    pretrained.set_positions(model, "as trained")
    ids = pretrained.read("topics 0", tokenizer, CHECKED).ids
    return pretrained.losses(model, ids, DynamicCache(config=model.config)).mean().item()


def fits_of(size: Size) -> dict[str, int]:
    """The laws with numbers that are found on the documents, each with the steps of its progress."""
    fitting, steps = len(size.fit), (size.length - TRAINED) // CHUNK
    counts = {name: min(job.documents, fitting) * steps for name, job in FITS.items()}
    counts |= {CALIBRATED: fitting, HELD: fitting}
    names = dict.fromkeys(ARMS[arm].law for arm in size.arms)
    return {name: counts[name] for name in names if name in counts}


def fitted(
    name: str, documents: Sequence[Document], size: Size, converted: Path, path: Path
) -> dict[str, Any]:
    """The numbers of a law: slopes, constants, or entropies."""
    model, _ = pretrained.load(converted)
    settings: dict[str, Any] = {
        "trained": TRAINED,
        "length": size.length,
        "chunk": CHUNK,
        "rate": RATE,
    }
    if name in FITS:
        documents = documents[: FITS[name].documents]
        settings["job"] = FITS[name]
        compute = partial(
            fit, model, documents, FITS[name], trained=TRAINED_NUMBERS.get(name, ("slopes",))
        )
    else:
        settings["queries"] = QUERIES
        compute = partial(calibrated if name == CALIBRATED else held_entropies, model, documents)
    settings["documents"] = [x.digest for x in documents]
    return kept(path, name, settings, compute, fits_of(size)[name])


def documents_of(arm: Arm, size: Size) -> int:
    """On how many documents the arm is run: on all, or on some for orientation."""
    is_for_orientation = arm.law == HELD or arm.positions != Arm().positions
    return size.orientation if is_for_orientation else len(size.test)


def numbers_of(arm: Arm, fits: dict[str, dict]) -> Numbers:
    """The numbers of an arm; none if it has no fit."""
    found = fits.get(arm.law, {})
    return Numbers(*map(found.get, Numbers._fields))


def measured(
    job: tuple[int, Document], size: Size, fits: dict[str, dict], converted: Path, path: Path
) -> dict[str, Any]:
    """The results of all arms for a document and its index. A prefix is computed if an arm needs it."""
    index, document = job
    model, _ = pretrained.load(converted)

    # Arms with the same prefix follow one another, so that one is in memory at a time. `own` is an arm
    # with constants of its own.
    @lru_cache(1)
    def start(positions: str, constant: float, own: str = "") -> Prefix:
        constants = numbers_of(ARMS[own], fits).constants if own else None
        return pretrained.prefix(model, document, Arm(positions, constant), constants)

    settings = {
        "trained": TRAINED,
        "edges": size.edges,
        "chunk": CHUNK,
        "document": document.digest,
    }
    names = [x for x in size.arms if index < documents_of(ARMS[x], size)]
    result = {}
    for name in sorted(names, key=lambda x: ARMS[x][:2]):
        arm = ARMS[name]
        numbers = numbers_of(arm, fits)

        key = (*arm[:2], name if numbers.constants else "")

        def compute(arm: Arm = arm, numbers: Numbers = numbers, key: Any = key) -> dict[str, Any]:
            return pretrained.measure(model, document, start(*key), arm, numbers, size.edges)

        what = settings | {"arm": arm, "slopes": numbers.entropies or numbers.slopes}
        what |= {"copies": (SPANS, SPAN, CUE)} | (
            {"constants": numbers.constants} if numbers.constants else {}
        )
        result[name] = kept(path, f"{document.name} {name}", what, compute)
        experiment.advance()
    return result


def main(arguments: list[str] | None = None) -> None:
    import smollm2_results

    parser = pretrained.model_parser(NAME, __doc__, memory=8, quick="ten minutes, and no verdict")
    parser.add_argument(
        "--arms", type=arms, metavar="NAME,NAME", help="only these, and those without a law"
    )
    options = parser.parse_args(arguments)
    size, name = (QUICK, f"{NAME}-quick") if options.quick else (FULL, NAME)
    size = size._replace(arms=options.arms or size.arms)
    results = run(size, options.cache / "model", options.output / name, options.processes)
    experiment.finish(name, results, smollm2_results.report, smollm2_results.picture, options.output)


def arms(text: str) -> tuple[str, ...]:
    names = text.split(",")
    if unknown := [x for x in names if x not in ARMS]:
        raise argparse.ArgumentTypeError(f"must be of {', '.join(ARMS)}, got {unknown[0]}")
    return tuple(x for x in ARMS if x in {NO_LAW, CONSTANT, *names})


if __name__ == "__main__":
    main()
