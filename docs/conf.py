"""Sphinx configuration."""

import sys
from pathlib import Path

from isentropic import __version__

sys.path.insert(0, str(Path(__file__).parents[1] / "asv_benchmarks"))

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
myst_enable_extensions = ["dollarmath", "colon_fence"]
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

    figures = Path(app.srcdir, "generated", "figures.md")
    figures.parent.mkdir(exist_ok=True)
    figures.write_text(report())


def setup(app):
    app.connect("builder-inited", write_figures)
