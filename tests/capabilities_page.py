"""The tables of the page "What runs where", from the declaration `capabilities`; `pages` writes them."""

import re
import tomllib
from pathlib import Path

from capabilities import COLUMNS, INTEGRATIONS, ROWS, Cell, Row, bare

TITLES = {
    "": "Attention and entropy",
    "laws": "Laws",
    "masks": "Masks",
    "layers": "Layers",
    "jl": "Johnson–Lindenstrauss",
    "theory": "Theory",
}
SYMBOLS = {True: "✓", False: "✗", None: "–"}


def texts() -> dict[str, str]:
    """A table for each module, then the notes."""
    notes: dict[str, int] = {}
    lines: list[str] = []
    for module, title in TITLES.items():
        lines += [f"## {title}", "", *table(module, notes), ""]
    lines += [
        "## Integrations and plots",
        "",
        "| | takes | compiled by | gradient |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {link(name, qualified=True)} | {x.takes} | {x.compiled} | {x.gradient} |"
        for name, x in INTEGRATIONS.items()
    ]
    lines += ["", "## Notes", ""]
    lines += [f"{number}. {note}" for note, number in notes.items()]
    return {"lowest": lowest(), "tables": "\n\n" + "\n".join(lines) + "\n\n"}


def lowest() -> str:
    """The libraries that the table of versions has no row for, with their lowest versions."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = {"NumPy": project["dependencies"]} | {
        name: extras[extra]
        for name, extra in {
            "CuPy": "cupy", "scikit-learn": "sklearn", "Flax": "flax", "Dask": "dask", "Matplotlib": "plots"
        }.items()
    }  # fmt: skip
    found = {
        name: [x.partition(">=") for x in requirements if x.startswith(name.lower())]
        for name, requirements in needed.items()
    }
    return ", ".join(f"{name} {version}" for name, [(_, _, version)] in found.items())


def table(module: str, notes: dict[str, int]) -> list[str]:
    """The rows of a module. Notes that are new take the next numbers."""
    head = [
        "| | " + " | ".join(COLUMNS.values()) + " |",
        "|---" + "|:-:" * len(COLUMNS) + "|",
    ]
    return head + [
        "| " + " | ".join([link(name), *symbols(row, notes)]) + " |"
        for name, row in ROWS.items()
        if name.removesuffix(bare(name)).removesuffix(".") == module
    ]


def link(name: str, *, qualified: bool = False) -> str:
    shown = name.removeprefix("integrations.") if qualified else bare(name)
    # The maps, which functions return, have their pages under the module that defines them.
    module = "jl._quantizers." if name == "jl.Quantizer" else "jl._maps."
    name = re.sub(r"^jl\.(?=[A-Z])", module, name)
    return f"[`{shown}`](#isentropic.{name})"


def symbols(row: Row, notes: dict[str, int]) -> list[str]:
    return [symbol(cell, notes) for cell in row.cells().values()]


def symbol(cell: Cell, notes: dict[str, int]) -> str:
    if not cell.note:
        return SYMBOLS[cell.runs]
    number = notes.setdefault(cell.note, len(notes) + 1)
    return f"{SYMBOLS[cell.runs]}<sup>{number}</sup>"
