"""Sphinx configuration."""

import re
import sys
import tomllib
import zlib
from inspect import signature
from pathlib import Path
from typing import get_origin

from sphinx.util.inspect import stringify_signature

from isentropic import __version__

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("docs", "docs/examples", "asv_benchmarks")]

project = "isentropic"
author = "isentropic developers"
project_copyright = f"2026, {author}"
release = version = __version__
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
INVENTORIES = tomllib.loads((ROOT / "docs" / "inventories.toml").read_text())

extensions = [
    "mathml",
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
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
toc_object_entries_show_parents = "hide"
nitpicky = True
# Words of types, names of parameters, and libraries without an inventory. What else names isentropic,
# or a library with an inventory, has to exist.
nitpick_ignore_regex = [("py:.*", rf"(?!({'|'.join(('isentropic', *INVENTORIES))})\b).*")]

# The address of a library, and the file that write_inventories makes.
intersphinx_mapping = {
    name: (objects["address"], f"generated/{name}.inv") for name, objects in INVENTORIES.items()
}

nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_output_stderr = "remove"  # progress bars
nb_merge_streams = True

# A copied example has neither prompts nor outputs.
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

html_math_renderer = "mathml"

html_theme = "pydata_sphinx_theme"
html_title = "isentropic"
html_theme_options = {
    "logo": {"text": f"isentropic {version}"},
    "icon_links": [
        {"name": name, "url": url, "icon": "fa-solid fa-code-branch"} for name, url in URLS.items()
    ],
    "navigation_with_keys": False,
    "navbar_center": [],
    "secondary_sidebar_items": ["sidebars/on-this-page"],
    "footer_start": ["copyright", "status-link"],
}
html_context = {"default_mode": "auto"}
html_sidebars = {"**": ["sidebars/pages.html"]}
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
highlight_options = {"python": {"stripnl": True}}  # doctests end with an empty line


def write_figures(app):
    """The tables of the performance page, from the recorded benchmarks."""
    from gpu_report import gpu_report, kernels_report
    from report import report

    write(app, "figures.md", report())
    write(app, "gpu.md", gpu_report())
    write(app, "kernels.md", kernels_report())


def write_experiments(app):
    """Tables, verdicts and pictures of the experiments, from their committed results."""
    from experiments_page import save_pictures, texts

    for name, text in texts().items():
        write(app, name, text)
    save_pictures(Path(app.srcdir, "generated"))


def write_inventories(app, config):
    """What sphinx.ext.intersphinx reads, made from text, so that a build needs no network."""
    for library, objects in INVENTORIES.items():
        lines = ""
        for kind in ("class", "function", "module"):
            for name, address in objects.get(kind, {}).items():
                page, _, anchor = address.partition("#")
                lines += f"{name} py:{kind} 1 {page}#{anchor or name} -\n"
        header = f"# Sphinx inventory version 2\n# Project: {library}\n# Version:\n# zlib\n"
        write(app, f"{library}.inv", header.encode() + zlib.compress(lines.encode()))


def write(app, name, content):
    path = Path(app.srcdir, "generated", name)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def skip_fields(app, what, name, obj, skip, options):
    """Fields of named tuples, which the docstrings describe under Attributes."""
    return skip or type(obj).__name__ == "_tuplegetter"


def show_bases(app, name, kind, options, bases):
    """The public base classes, without the types of their arrays."""
    private = re.compile(r"isentropic\._|.*\._[^.]*$")
    found = (get_origin(x) or x for x in bases if type(x).__name__ != "Generic")
    bases[:] = [x for x in found if not private.match(f"{x.__module__}.{x.__name__}")] or [object]


ANY = "(*args, **kwargs)"


def show_parameters(app, kind, name, obj, options, arguments, returns):
    """The parameters of laws and of other nodes, whose `__new__` takes any."""
    if kind == "class" and arguments == ANY:
        found = stringify_signature(signature(obj), show_annotation=False)
        return "()" if found == ANY else found, None  # a base class has none
    return None


def add_contents(app, name, source):
    """The contents of the site, which are no part of the page that a repository shows."""
    if name == app.config.root_doc:
        source[0] += "\n" + Path(app.srcdir, "_templates", "contents.md").read_text()


def setup(app):
    app.connect("autodoc-process-bases", show_bases)
    app.connect("autodoc-process-signature", show_parameters)
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("config-inited", write_inventories)
    app.connect("source-read", add_contents)
    app.connect("builder-inited", write_figures)
    app.connect("builder-inited", write_experiments)
