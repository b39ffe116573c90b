"""The tables of the page "Ledger of claims", from the registry in `ledger`; `pages` writes them."""

from collections import Counter
from typing import get_args

from ledger import Claim, Verdict, load, resolve
from ledger.documents import DOCUMENTS, Document

REMARKS = {
    "holds": "Remark",
    "definition": "Remark",
    "holds with a condition": "Condition",
    "does not hold": "Instead",
}


def texts() -> dict[str, str]:
    """The counts with what does not hold, then every document by its sections."""
    claims = load()
    lines = [*counts(claims), "", *failing(claims)]
    for key, document in DOCUMENTS.items():
        lines += ["", f"## {document.title}", "", f"{document.source}."]
        for title, numbers in document.sections.items():
            rows = [claims[f"{key}-{n}"] for n in numbers if n not in document.not_computed]
            if rows:
                lines += ["", f"### {title}", "", "```{list-table}", ":widths: 18 82", ""]
                lines += [line for row in rows for line in block(row)]
                lines += ["```"]
        lines += ["", *excused(document)]
    return {"claims": "\n\n" + "\n".join(lines) + "\n\n"}


def counts(claims: dict[str, Claim]) -> list[str]:
    """A table of verdicts by document, and their sums."""
    verdicts = get_args(Verdict)
    table = []
    total: Counter[str] = Counter()
    for key, document in DOCUMENTS.items():
        found = Counter(row.verdict for row in claims.values() if row.document == key)
        found["computes nothing"] = len(document.not_computed)
        total += found
        table.append((document.title, found))
    table.append(("**All**", total))
    columns = (*verdicts, "computes nothing")
    lines = ["| | " + " | ".join(columns) + " |", "|---" + "|--:" * len(columns) + "|"]
    for title, found in table:
        lines.append(f"| {title} | " + " | ".join(str(found[c]) for c in columns) + " |")
    return lines


def failing(claims: dict[str, Claim]) -> list[str]:
    """Links to what does not hold, a line for each document that has any."""
    lines = ["What does not hold:", ""]
    for key, document in DOCUMENTS.items():
        wrong = [n for n in document.numbers if is_wrong(claims.get(f"{key}-{n}"))]
        if wrong:
            links = ", ".join(f"[{n}](#ledger-{key}-{n})" for n in wrong)
            lines.append(f"- {document.title}: {links}")
    return lines


def is_wrong(row: Claim | None) -> bool:
    return row is not None and row.verdict == "does not hold"


def block(row: Claim) -> list[str]:
    """The row of a claim: number and verdict, and what there is to say and to run."""
    verdict = f"**{row.verdict}**" if is_wrong(row) else row.verdict
    parts = [row.says]
    if row.correct:
        parts.append(f"*{REMARKS[row.verdict]}:* {row.correct}")
    test = f"`{row.test.__module__.rpartition('.')[2]}.{row.test.__name__}`"
    if row.function:
        resolve(row.function)
        name = row.function.removeprefix("isentropic.")
        link = f"`{name}`" if name.startswith("_") else f"[`{name}`](#{row.function})"
        test = f"{link} · {test}"
    parts.append(test)
    first, *others = parts
    lines = [f"* - (ledger-{row.id})=", f"    {row.number}", "", f"    {verdict}", f"  - {first}"]
    for part in others:
        lines += ["", f"    {part}"]
    return lines


def excused(document: Document) -> list[str]:
    """The numbers that compute nothing, with the reasons."""
    if not document.not_computed:
        return []
    reasons = "; ".join(f"{n} ({reason})" for n, reason in document.not_computed.items())
    return [f"*Computes nothing:* {reasons}."]
