"""How the documentation is built: Sphinx, furo, Markdown through myst-nb, and the API from the docstrings."""

import re
import sys
from importlib import import_module
from importlib.metadata import version as installed_version
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from sphinx.ext.autosummary import autosummary_toc

from posttrain.course.notebooks import lessons

sys.path.append(str(Path(__file__).parent))
import commands_reference
import lesson_pages
import options_reference
import trl_fields

commands_reference.write()
options_reference.write()
trl_fields.write()

project = "posttrain"
author = "the posttrain authors"
copyright = "the posttrain authors, Apache-2.0"
release = version = installed_version("posttrain")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.viewcode"]
exclude_patterns = ["_build", "_templates", "jupyter_execute", "*.py"]
templates_path = ["_templates"]
html_theme = "furo"
html_title = f"posttrain {release}"
html_copy_source = False

myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
nb_custom_formats = {".py": "lesson_pages.read"}
nb_execution_mode = "cache"
nb_execution_cache_path = lesson_pages.outputs_folder()
nb_execution_in_temp = True
nb_execution_timeout = 1800  # seconds for one cell; on a busy machine torch threads wait for each other
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_merge_streams = True

autosummary_generate = True
autodoc_default_options = {
    "members": True,
    "ignore-module-all": True,
    "undoc-members": True,
    "member-order": "bysource",
    "show-inheritance": True,
}
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False  # torch writes its own in a style that this documentation does not read
maximum_signature_line_length = 80

ALIGNED = re.compile(r"\S {3,}\S")
ESCAPED_BOLD = re.compile(r"(?<!\S)\\\*\\\*(\w[^*]*)\\\*\\\*(?!\w)")
CODE_SPAN = re.compile(r"`+([^`]+)`+")
FENCE = re.compile(r"^(```.*?^```)$", re.MULTILINE | re.DOTALL)
SOURCE_LINK = re.compile(r"\[(`?)([^\]`]+)\1\]\((?:\.\./)+src/(posttrain/[\w/]+?)(?:\.py|/)?\)")
DOTTED = re.compile(r"(?<![`\[\w])`(posttrain(?:\.\w+)+)`(?!`)")
LESSON = re.compile(r"(?<!\[)\blesson (\d+)\b")
CONTENTS = re.compile(r"^##+ (.+)\n\n((?:- \[.*\n)+)", re.MULTILINE)
PROGRAM_LINK = re.compile(r"\]\((?=(?:\.\./)+(?:tests|benchmarks)/[^)]*\.py\))")
"""A link to a program that is not a page: by its suffix it would be taken for a lesson."""


def setup(app):
    app.connect("doctree-read", outside_the_navigation, priority=100)  # before Sphinx collects tables of contents
    app.connect("autodoc-process-docstring", as_written)
    app.connect("source-read", with_references)


def outside_the_navigation(app, doctree):
    """Keep the modules out of the table on the left: each page writes it whole, and there are as many as modules."""
    for node in [*doctree.findall(autosummary_toc)]:
        node.parent.remove(node)


def with_references(app, name, source):
    """Pages are plain Markdown, to be read in a checkout; built, what they name in the source links to the API.

    A link to a source file and the dotted name of a module become references, the lists of the index its tables.
    """
    parts = FENCE.split(source[0])  # prose, code, prose, ...
    for place in range(0, len(parts), 2):
        text = DOTTED.sub(r"{py:obj}`\1`", SOURCE_LINK.sub(reference, parts[place]))
        text = PROGRAM_LINK.sub("](path:", text)
        text = LESSON.sub(lesson_link, text) if name == "learn/rows" else text
        parts[place] = CONTENTS.sub(table_of_contents, text) if name.endswith("index") else text
    source[0] = "".join(parts)


def reference(link):
    """Of a link to the file that defines it, a reference to the object; to the module where it is none's name."""
    text, module = link[2], link[3].replace("/", ".")
    if hasattr(import_module(module), text.partition(".")[0]):
        module = f"{module}.{text}"
    return f"{{py:obj}}`{text} <{module}>`"


def lesson_link(named):
    """The number of a lesson as a link to it."""
    found = [name for name in lessons() if int(name.split("_")[0]) == int(named[1])]
    return f"[{named[0]}]({found[0]}.py)" if found else named[0]


def table_of_contents(section):
    """A list of links and, in its place on the left of every page, the same as a table of contents."""
    pages = re.findall(r"\]\(([^)]+?)\.(?:md|rst|py)\)", section[2])
    entries = "\n".join(pages)
    return f"{section[0]}\n```{{toctree}}\n:hidden:\n:caption: {section[1]}\n:maxdepth: 1\n\n{entries}\n```\n"


def as_written(app, what, name, obj, options, lines):
    """Show docstrings as they stand in the source: prose, `code` in backticks, indented blocks as they are.

    They are written to be read in an editor; reStructuredText would take |A|, π* and an indented equation for mark-up.
    """
    shown = []
    for paragraph in "\n".join(lines).split("\n\n"):
        rows = paragraph.split("\n")
        is_list = rows[0].startswith("- ")
        for is_block, run in groupby(((is_verbatim(row) and not is_list, row) for row in rows), key=itemgetter(0)):
            text = [row for _, row in run]
            shown += ["::", "", *(f"    {row}" for row in text), ""] if is_block else [*escaped(text), ""]
    lines[:] = shown


def is_verbatim(row):
    """Whether a line is an equation or a row of a table: indented, or with columns set apart by spaces."""
    return row.startswith(" ") or ALIGNED.search(row) is not None


def escaped(rows):
    pieces = CODE_SPAN.split("\n".join(rows))  # prose, code, prose, ...
    prose = [ESCAPED_BOLD.sub(r"**\1**", re.sub(r"([\\*|_])", r"\\\1", piece)) for piece in pieces[::2]]
    code = [f"``{piece}``" for piece in pieces[1::2]] + [""]
    return "".join(part for pair in zip(prose, code, strict=True) for part in pair).split("\n")
