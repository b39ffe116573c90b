"""A Sphinx extension that writes formulas as MathML, which browsers draw without a script."""

from docutils import nodes
from math_core import LatexError, LatexToMathML
from sphinx.util import logging

CONVERTER = LatexToMathML()


def write(translator, node, displaystyle):
    try:
        formula = CONVERTER.convert_with_local_state(node.astext(), displaystyle=displaystyle)
    except LatexError as error:  # a warning, which fails the build
        logging.getLogger(__name__).warning(f"{node.astext()}: {error}", location=node)
        formula = translator.encode(node.astext())
    translator.body.append(f'<div class="formula">{formula}</div>\n' if displaystyle else formula)
    raise nodes.SkipNode


def setup(app):
    inline = (lambda translator, node: write(translator, node, displaystyle=False), None)
    display = (lambda translator, node: write(translator, node, displaystyle=True), None)
    app.add_html_math_renderer("mathml", inline, display)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
