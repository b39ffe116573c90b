"""Write what pages of the documentation take from tests, records and the source.

    python tests/pages.py            # writes what is out of date
    python tests/pages.py --check    # only says what is

In a page a number, or some lines of Markdown, stands between `<!-- name -->` and `<!-- / -->`. Some
files are written as a whole. `tests/test_pages.py` fails where any of them is out of date, so that
what is committed is the documentation, and to build it no test is needed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACE = re.compile(r"(<!-- ([\w-]+) -->)(.*?)(<!-- / -->)", re.DOTALL)

# The functions that return the texts of a page by place, or the text of a file.
PAGES = {
    "README.md": "numbers_in_text.readme",
    "docs/index.md": "numbers_in_text.overview",
    "docs/train-with-a-law.md": "numbers_in_text.train_with_a_law",
    "docs/performance.md": "numbers_in_text.performance",
    "docs/how-to/reduce-dimension.md": "numbers_in_text.reduce_dimension",
    "docs/how-to/rotate.md": "numbers_in_text.rotate",
    "docs/how-to/quantize.md": "numbers_in_text.quantize",
    "docs/explanation/what-holds.md": "numbers_in_text.what_holds",
    "docs/explanation/johnson-lindenstrauss.md": "numbers_in_text.johnson_lindenstrauss",
    "docs/explanation/ledger.md": "ledger_page.texts",
    "docs/reference/what-runs-where.md": "capabilities_page.texts",
}
FILES = {
    "docs/images/architecture.svg": "architecture.picture",
    "docs/reference/law-vectors.json": "law_vectors.text",
}


def written(path: str) -> str:
    """The text that a page or file should have."""
    if path in FILES:
        return _function(FILES[path])()
    text, texts = read(path), _function(PAGES[path])()
    places = [name for _, name, _, _ in PLACE.findall(text)]
    if set(places) != set(texts):
        raise ValueError(f"{path} has places for {sorted(places)}, and there are {sorted(texts)}.")
    return PLACE.sub(lambda place: place[1] + texts[place[2]] + place[4], text)


def _function(name: str) -> Callable:
    module, _, function = name.partition(".")
    return getattr(import_module(module), function)


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def main(arguments: list[str]) -> int:
    sys.path[:0] = [str(ROOT / folder) for folder in ("asv_benchmarks", "docs", "docs/examples")]
    checks = "--check" in arguments
    stale = {path: text for path in (*PAGES, *FILES) if (text := written(path)) != read(path)}
    for path, text in stale.items():
        print(f"{path}: {'out of date' if checks else 'written'}")
        if not checks:
            (ROOT / path).write_text(text, encoding="utf-8")
    return int(checks and bool(stale))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
