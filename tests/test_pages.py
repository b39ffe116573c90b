"""What pages of the documentation take from tests, records and the source is up to date."""

import ast
import re
import sys
from pathlib import Path

import pages
import pytest

pytestmark = pytest.mark.host

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "docs/examples", "asv_benchmarks")


@pytest.fixture(autouse=True)
def _paths(monkeypatch):
    for folder in FOLDERS:
        monkeypatch.syspath_prepend(ROOT / folder)


@pytest.mark.parametrize("path", [*pages.PAGES, *pages.FILES])
def test_is_up_to_date(path):
    assert pages.read(path) == pages.written(path), "run python tests/pages.py"


@pytest.mark.parametrize("path", pages.PAGES)
def test_numbers_begin_no_line(path):
    """There their comment would begin a block of HTML. That of several lines stands alone."""
    starts = [line for line in pages.read(path).splitlines() if line.lstrip().startswith("<!--")]
    assert all(re.fullmatch(r"<!-- [\w/-]+ -->", line) for line in starts)


def test_pages_with_places_are_written():
    """The text between comments is that of a program nowhere else."""
    paths = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    found = {
        path.relative_to(ROOT).as_posix() for path in paths if pages.PLACE.search(path.read_text())
    }
    assert found - {path for path in found if "_build" in path} == set(pages.PAGES)


def test_another_number_is_noticed(monkeypatch, tmp_path):
    path = "docs/performance.md"
    text = pages.read(path)
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    (tmp_path / path).write_text(text.replace("<!-- gradient -->", "<!-- gradient -->1"))
    assert pages.written(path) == text
    (tmp_path / path).write_text("no place")
    with pytest.raises(ValueError, match=r"has places for \[\], and there are \[.*'gradient'.*\]"):
        pages.written(path)


def test_the_documentation_needs_no_tests():
    """What builds it and what it runs imports nothing from here."""
    here = {path.stem for path in Path(__file__).parent.iterdir()} - sys.stdlib_module_names
    sources = [path for folder in FOLDERS for path in (ROOT / folder).glob("*.py")]
    found = {
        (path.name, name)
        for path in sources
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module or ""] if isinstance(node, ast.ImportFrom) else [x.name for x in node.names]
        )
        if name.partition(".")[0] in here
    }
    assert len(sources) > 30
    assert found == set()
