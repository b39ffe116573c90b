"""The ledger: what the documents behind this library claim, with a test for each claim.

`documents` says which numbered statements there are, and which of them compute nothing. Each of the
others is registered by `claim` on the test that shows it. The page "Ledger of claims" of the
documentation is made from both.

Numbers that we state are computed and not typed: `correct` has places for them, such as "@{k}" or
"@{deficit:.2f}", which `numbers` fills. The test of the claim uses the same `numbers`.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

PLACE = re.compile(r"@\{(\w+)(?::([^}]*))?\}")

Verdict = Literal["holds", "holds with a condition", "does not hold", "definition"]


@dataclass(frozen=True)
class Claim:
    """A numbered statement, in our words.

    Attributes
    ----------
    id : str
        The key of the document and the number in it, such as "9588-22".
    says : str
        The statement; Markdown with $…$.
    verdict : Verdict
    template : str
        What holds instead, or under which condition; a remark where it holds. With places for numbers.
    numbers : Callable
        Computes these numbers, or sequences of them, by name.
    function : str
        The dotted name of what implements it; empty where nothing does.
    test : Callable
        Shows it.
    """

    id: str
    says: str
    verdict: Verdict
    template: str
    numbers: Callable[[], Mapping[str, Any]]
    function: str
    test: Callable[..., Any]

    @property
    def correct(self) -> str:
        """The template with its numbers."""
        values = self.numbers()
        return PLACE.sub(lambda place: printed(values[place[1]], place[2] or ""), self.template)

    @property
    def document(self) -> str:
        return self.id.rpartition("-")[0]

    @property
    def number(self) -> str:
        return self.id.rpartition("-")[2]


def printed(value: Any, form: str = "") -> str:
    """A number in a format, or several with commas between them; Markdown, to stand outside of $…$.

    Digits are grouped by spaces in the format "_d".
    """
    if isinstance(value, tuple | list):
        *first, last = (printed(x, form) for x in value)
        return f"{', '.join(first)} and {last}" if first else last
    text = format(value, form).replace("_", " ").replace("-", "−")
    mantissa, exponential, exponent = text.partition("e")
    return rf"${mantissa}\cdot10^{{{int(exponent.replace('−', '-'))}}}$" if exponential else text


CLAIMS: dict[str, Claim] = {}


def claim(
    id: str,  # noqa: A002 - it is one
    *,
    says: str,
    verdict: Verdict,
    correct: str = "",
    numbers: Callable[[], Mapping[str, Any]] = dict,
    function: str = "",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated test as what shows a claim."""
    if verdict not in get_args(Verdict):
        raise ValueError(f"{id}: no verdict {verdict!r}")
    if verdict in ("does not hold", "holds with a condition") and not correct:
        raise ValueError(f"{id}: what holds is not said")

    def register(test: Callable[..., Any]) -> Callable[..., Any]:
        if id in CLAIMS:
            raise ValueError(
                f"{id} is claimed twice, by {CLAIMS[id].test.__name__} and {test.__name__}"
            )
        CLAIMS[id] = Claim(id, says, verdict, correct, numbers, function, test)
        return test

    return register


def load() -> dict[str, Claim]:
    """All claims: those of every module of tests here."""
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        importlib.import_module(f"{__name__}.{path.stem}")
    return CLAIMS


def resolve(name: str) -> Any:
    """The object of a dotted name such as "isentropic.laws.LogLength"."""
    return pkgutil.resolve_name(name)
