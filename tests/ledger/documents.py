"""The documents, their numbered statements in order, and those that compute nothing.

A number without a dot is an equation; one with a dot is a section whose text or table states something
that is no equation of its own; a word names a statement in a post without a number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Document:
    """A text with numbered statements.

    Attributes
    ----------
    title : str
    source : str
        Where to find it; Markdown.
    equations : int
        The largest equation number, 0 where equations have no numbers.
    sections : dict
        The numbers of each section, as strings, in the order of the text.
    not_computed : dict
        Why a number is no claim that could be tested.
    """

    title: str
    source: str
    equations: int
    sections: dict[str, tuple[str, ...]]
    not_computed: dict[str, str]

    @property
    def numbers(self) -> tuple[str, ...]:
        return tuple(n for numbers in self.sections.values() for n in numbers)


def _numbers(*parts: Any) -> tuple[str, ...]:
    """Strings as they are, and pairs of integers as ranges with both ends."""
    found: list[str] = []
    for part in parts:
        if isinstance(part, str):
            found.append(part)
        else:
            found += [str(i) for i in range(part[0], part[1] + 1)]
    return tuple(found)


DOCUMENTS = {
    "8823-post": Document(
        "Su 2021, the scale of attention from entropy invariance",
        "Su Jianlin's post [archives/8823](https://spaces.ac.cn/archives/8823); its displayed equations, "
        "counted from 1",
        12,
        {
            "Entropy invariance": _numbers((1, 3)),
            "The new factor": _numbers((4, 5), "table"),
            "Derivation": _numbers((6, 11)),
            "Related results": _numbers("12"),
        },
        {"table": "accuracies of trained models; a training run, not a computation"},
    ),
    "8823": Document(
        "Annotated derivation of archives/8823",
        "A derivation with numbered equations that follows a copy of the post in circulation",
        67,
        {
            "1 Entropy": _numbers((1, 8), "1.3", "9"),
            "2 Entropy of attention": _numbers((10, 15), "2.3"),
            "3 Derivation": _numbers("3.1", (16, 41)),
            "4 The factor": _numbers((42, 48), "4.4", "49"),
            "5 The Johnson–Lindenstrauss lemma": _numbers((50, 53)),
            "6 Information": _numbers((54, 55), "6.1", (56, 59)),
            "7 Experiments": _numbers("7.1", "7.1.1", "60", "7.2", "7.3"),
            "8 Variants": _numbers((61, 65)),
            "9 Practice": _numbers("9.1", "9.2", "66", "9.3"),
            "10 Limits and open questions": _numbers(
                *(f"10.1.{i}" for i in range(1, 5)),
                *(f"10.2.{i}" for i in range(1, 5)),
                *(f"10.3.{i}" for i in range(1, 5)),
            ),
            "11 Summary": _numbers("67", "11.3"),
        },
        {
            "16": "the goal",
            "28": "the goal again",
            "56": "notation: the rate–distortion function, for no source and no distortion",
            "57": "notation: an objective that nothing is derived from",
            "10.2.3": "a question about trained models: which form is best for generating text; for one model the "
            "[experiments](experiments-language-model.md#a-language-model-beyond-its-trained-length) compare several forms: constants for each head that do not depend "
            "on n, which were added last, gain as much as any law",
            "10.3.2": "a wish: which objectives, and with which weights, is not said",
            "67": "a diagram",
        },
    ),
    "9588-post": Document(
        "Su 2023, entropy-invariant attention from the Johnson–Lindenstrauss lemma",
        "Su Jianlin's post [archives/9588](https://spaces.ac.cn/archives/9588), its readers' comments, and "
        "an English translation with the same equations",
        3,
        {
            "Entropy invariance": _numbers("1", "base", "power"),
            "The lemma": _numbers("vocabulary", "heads"),
            "The connection": _numbers((2, 3)),
            "Comments": _numbers("factorized", "sparse", "iid", "oneself"),
        },
        {},
    ),
    "9588": Document(
        "Annotated derivation of archives/9588",
        "A derivation with numbered equations that follows a copy of the post in circulation",
        83,
        {
            "1 The lemma": _numbers((1, 6)),
            "2 Proof": _numbers((7, 29)),
            "3 Dimensions of embeddings": _numbers((30, 43)),
            "4 Random projections": _numbers((44, 49), "4.2", "50"),
            "5 In attention": _numbers((51, 58)),
            "6 Entropy": _numbers((59, 69)),
            "7 Information": _numbers((70, 77)),
            "8 Checks": _numbers("78", "8.2", "8.3"),
            "9 Further topics": _numbers((79, 82)),
            "10 Summary": _numbers("83", "10.3"),
        },
        {
            "30": "gives a condition its name",
            "63": "a premise of 67",
            "64": "a premise of 67",
            "65": "a premise of 67",
            "66": "63 and 64 put into 65",
            "76": "notation: an objective that nothing is derived from",
            "77": "a slogan: no variable, no ε, no derivation",
            "80": "notation: which R(x) is not said",
            "82": "not defined: of which states, maps and measurements is not said",
            "83": "a slogan",
            "10.3": "advice that repeats 51, 69 and 53",
        },
    ),
    "tutorial": Document(
        "A tutorial on attention",
        "“Day 1: the mathematics of attention”, a tutorial in circulation; its numbers are of sections",
        0,
        {
            "2 Foundations": _numbers("2.1", "2.2.1", "2.2.2", "2.2.3", "2.2.4"),
            "3 The formula": _numbers("3.1", "3.2", "3.3"),
            "4 Properties": _numbers("4.1", "4.2", "4.3"),
            "5 Masks": _numbers("5.1", "5.2"),
            "6 Geometry": _numbers("6.1", "6.2", "6.3"),
            "7 Variants": _numbers("7.1", "7.1.1", "7.2"),
            "8 Practice": _numbers("8.1", "8.2", "8.3"),
        },
        {
            "2.1": "notation",
            "6.3": "no formula",
            "8.2": "no formula",
            "8.3": "no formula",
        },
    ),
    "quantizers": Document(
        "Papers on quantizers",
        "QJL, TurboQuant, DRIVE, RaBitQ and others, as named in each row; see "
        "[which quantizer](../how-to/quantize.md)",
        0,
        {
            "Johnson–Lindenstrauss maps": _numbers("signs"),
            "Codebooks after a rotation": _numbers("squared", "inner", "drive", "cosine"),
            "Uses": _numbers("bound", "keys"),
        },
        {},
    ),
}
