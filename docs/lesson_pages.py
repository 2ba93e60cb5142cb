"""Lessons as pages: docs/learn/*.py are read as notebooks, and run by `make docs` unless nothing has changed."""

import os
import shutil
from hashlib import sha256
from pathlib import Path

import nbformat

from posttrain.course.notebooks import lesson_cells, notebook

ROOT = Path(__file__).parents[1]


def read(text):
    """A lesson for myst-nb, with the lines of its cells, so that a warning names the right one."""
    lines = [cell.first_line for cell in lesson_cells(text)]
    page = nbformat.from_dict(notebook(text))
    page.metadata["source_map"] = lines
    return page


def outputs_folder():
    """Where outputs are kept: one folder for each state of the source and size of the lessons, and only the latest.

    Inside it a lesson is run again if its code changed.
    """
    digest = sha256(os.environ.get("POSTTRAIN_TINY", "").encode())
    for path in sorted((ROOT / "src").rglob("*.py")):
        digest.update(path.read_bytes())
    folder = ROOT / "docs" / "_build" / ".lessons" / digest.hexdigest()[:16]
    for old in {*folder.parent.glob("*")} - {folder}:
        shutil.rmtree(old)
    return str(folder)
