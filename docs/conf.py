"""Sphinx configuration."""

import sys
from pathlib import Path

from isentropic import __version__

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("docs", "docs/examples", "asv_benchmarks", "tests")]

project = "isentropic"
author = "isentropic developers"
project_copyright = f"2026, {author}"
release = version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["_build", "generated"]
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
autosummary_generate = True
autodoc_typehints = "none"
napoleon_google_docstring = False
default_role = "py:obj"

html_theme = "pydata_sphinx_theme"
html_title = "isentropic"
html_theme_options = {"navigation_with_keys": False}


def write_figures(app):
    """The tables of the performance page, from the recorded benchmarks."""
    from report import report

    write(app, "figures.md", report())


def write_ledger(app):
    """The rows of the ledger of claims, from its tests."""
    from ledger_page import page

    write(app, "ledger.md", page())


def write_experiments(app):
    """Tables, verdicts and pictures of the experiments, from their committed results."""
    from experiments_page import pictures, texts

    for name, text in texts().items():
        write(app, name, text)
    for name, figure in pictures().items():
        figure.savefig(Path(app.srcdir, "generated", name))


def write(app, name, text):
    path = Path(app.srcdir, "generated", name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


def setup(app):
    app.connect("builder-inited", write_figures)
    app.connect("builder-inited", write_ledger)
    app.connect("builder-inited", write_experiments)
