"""Sphinx: README, CONTRIBUTING and CHANGELOG as pages, and the public names from docstrings."""

import re

project = "ppl_ext"
copyright = "the ppl_ext contributors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["build"]
html_theme = "alabaster"
autodoc_typehints = "none"
napoleon_use_ivar = True
# README's links are written for the root of the repository
suppress_warnings = ["myst.xref_missing", "image.not_readable"]


def _plain_text(app, what, name, obj, options, lines):
    """Docstrings are plain text: `|x|` is an absolute value, `name_` and `*args` are themselves."""
    for i, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...", ":", "..")):
            lines[i] = re.sub(r"(?<!\\)\||(?<![\\\w*`])\*(?=\w)", r"\\\g<0>", line)


def setup(app):
    app.connect("autodoc-process-docstring", _plain_text)
