"""The ledger: what the documents behind this library claim, with a test for each claim.

`documents` says which numbered statements there are, and which of them compute nothing. Each of the
others is registered by `claim` on the test that shows it. The page "Ledger of claims" of the
documentation is made from both.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

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
    correct : str
        What holds instead, or under which condition; a remark where it holds.
    function : str
        The dotted name of what implements it; empty where nothing does.
    test : Callable
        Shows it.
    """

    id: str
    says: str
    verdict: Verdict
    correct: str
    function: str
    test: Callable[..., Any]

    @property
    def document(self) -> str:
        return self.id.rpartition("-")[0]

    @property
    def number(self) -> str:
        return self.id.rpartition("-")[2]


CLAIMS: dict[str, Claim] = {}


def claim(
    id: str,  # noqa: A002 - it is one
    *,
    says: str,
    verdict: Verdict,
    correct: str = "",
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
        CLAIMS[id] = Claim(id, says, verdict, correct, function, test)
        return test

    return register


def load() -> dict[str, Claim]:
    """All claims: those of every module of tests here."""
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        importlib.import_module(f"{__name__}.{path.stem}")
    return CLAIMS


def resolve(name: str) -> Any:
    """The object of a dotted name such as "isentropic.laws.LogLength"."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)
