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
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["_build", "_templates", "generated"]
templates_path = ["_templates"]
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
autosummary_generate = True
autodoc_typehints = "none"
napoleon_google_docstring = False
napoleon_use_param = napoleon_use_rtype = False  # types are prose: their words are no links
default_role = "py:obj"
nitpicky = True
# Words of types, names of parameters, other libraries, and private base classes; what else names
# isentropic has to exist.
nitpick_ignore_regex = [("py:.*", r"(?!isentropic\b).*"), ("py:class", r"isentropic\._.*")]

nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_output_stderr = "remove"  # progress bars
nb_merge_streams = True

html_theme = "pydata_sphinx_theme"
html_title = "isentropic"
html_theme_options = {
    "navigation_with_keys": False,
    "navbar_center": [],
    # Elsewhere the width is better used for code.
    "secondary_sidebar_items": {
        "**": [],
        "reference/index": ["page-toc"],
        "reference/what-runs-where": ["page-toc"],
        "reference/models": ["page-toc"],
        "explanation/ledger": ["page-toc"],
        "explanation/experiments": ["page-toc"],
    },
}
html_sidebars = {"**": ["sidebars/pages.html"]}
html_show_sourcelink = False
highlight_options = {"python": {"stripnl": True}}  # doctests end with an empty line


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


def write_capabilities(app):
    """The tables of what runs where, from the declaration that the tests try."""
    from capabilities_page import page

    write(app, "capabilities.md", page())


def write_models(app):
    """The tables of models of transformers, from the stored survey."""
    from models_page import page

    write(app, "models.md", page())


def write(app, name, text):
    path = Path(app.srcdir, "generated", name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


def skip_fields(app, what, name, obj, skip, options):
    """Fields of named tuples, which the docstrings describe under Attributes."""
    return skip or type(obj).__name__ == "_tuplegetter"


def setup(app):
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("builder-inited", write_figures)
    app.connect("builder-inited", write_ledger)
    app.connect("builder-inited", write_experiments)
    app.connect("builder-inited", write_capabilities)
    app.connect("builder-inited", write_models)
