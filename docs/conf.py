"""How the documentation is built: Sphinx, furo, Markdown through myst-nb, and the API from the docstrings."""

import re
from importlib.metadata import version as installed_version

project = "posttrain"
author = "the posttrain authors"
copyright = "the posttrain authors, Apache-2.0"
release = version = installed_version("posttrain")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.viewcode"]
exclude_patterns = ["_build", "_templates"]
templates_path = ["_templates"]
html_theme = "furo"
html_title = f"posttrain {release}"
html_copy_source = False

myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # tutorials are run by the tests

autosummary_generate = True
autodoc_default_options = {"members": True, "undoc-members": True, "member-order": "bysource", "show-inheritance": True}
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
maximum_signature_line_length = 80

ALIGNED = re.compile(r"\S {3,}\S")
CODE_SPAN = re.compile(r"`+([^`]+)`+")


def setup(app):
    app.connect("autodoc-process-docstring", as_written)


def as_written(app, what, name, obj, options, lines):
    """Show docstrings as they stand in the source: prose, `code` in backticks, indented blocks as they are.

    They are written to be read in an editor; reStructuredText would take |A|, π* and an indented equation for mark-up.
    """
    shown = []
    in_block = False
    for line in lines:
        if not line.strip():
            shown.append("")
        elif verbatim(line) and (in_block or not is_list_item(shown)):
            shown += [f"    {line}"] if in_block else ["", "::", "", f"    {line}"]
            in_block = True
        else:
            shown += ["", escaped(line)] if in_block else [escaped(line)]
            in_block = False
    lines[:] = shown


def verbatim(line):
    """Whether a line is an equation or a row of a table: indented, or with columns set apart by spaces."""
    return line.startswith(" ") or ALIGNED.search(line) is not None


def is_list_item(shown):
    """Whether the line before is a list item, which indented lines continue."""
    return bool(shown) and shown[-1].lstrip().startswith(("- ", "* ", "\\* "))


def escaped(line):
    pieces = CODE_SPAN.split(line)  # prose, code, prose, ...
    prose = [re.sub(r"([\\*|_])", r"\\\1", piece) for piece in pieces[::2]]
    code = [f"``{piece}``" for piece in pieces[1::2]] + [""]
    return "".join(part for pair in zip(prose, code, strict=True) for part in pair)
