"""Sphinx configuration."""

from isentropic import __version__

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
exclude_patterns = ["_build"]
myst_enable_extensions = ["dollarmath", "colon_fence"]
autosummary_generate = True
autodoc_typehints = "none"
napoleon_google_docstring = False
default_role = "py:obj"

html_theme = "pydata_sphinx_theme"
html_title = "isentropic"
html_theme_options = {"navigation_with_keys": False}
