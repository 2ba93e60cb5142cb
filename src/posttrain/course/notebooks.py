"""The lessons of docs/learn as Jupyter notebooks.

A lesson is a Python file in the percent format: `# %%` begins a cell of code, `# %% [markdown]` a cell of text whose
lines are comments.  So the same file is a script, a page of the documentation and a notebook.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from posttrain.errors import UserError

CELL = re.compile(r"^# %%( \[markdown\])?$", re.MULTILINE)
PAGE_LINK = re.compile(r"\[([^\]]+)\]\(\.\./([^)]+)\)")
"""A link from a lesson to another page, which a notebook does not have next to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LessonCell:
    """One cell of a lesson."""

    kind: Literal["markdown", "code"]
    source: str
    first_line: int
    """Line of the file that the cell begins on, from 0."""


def lessons() -> dict[str, Path]:
    """The lessons by name, in the order in which they are read."""
    here = Path(__file__).parents[1]
    installed = here / "learn"  # in a wheel; in a checkout they are in docs
    folder = installed if installed.is_dir() else here.parents[1] / "docs" / "learn"
    return {path.stem: path for path in sorted(folder.glob("[0-9]*.py"))}


def lesson_cells(text: str) -> Iterator[LessonCell]:
    """The cells of a lesson; lines before the first one are ignored."""
    starts = [*CELL.finditer(text)]
    for start, end in zip(starts, [*(match.start() for match in starts[1:]), len(text)], strict=True):
        body = text[start.end() : end].strip("\n")
        first = text.count("\n", 0, start.end()) + 1
        if start[1]:
            yield LessonCell(kind="markdown", source=re.sub(r"^# ?", "", body, flags=re.MULTILINE), first_line=first)
        else:
            yield LessonCell(kind="code", source=body, first_line=first)


def notebook(text: str) -> dict[str, object]:
    """A lesson in Jupyter's format 4.5, without outputs."""
    found: list[dict[str, object]] = []
    for number, cell in enumerate(lesson_cells(text)):
        found.append({"cell_type": cell.kind, "id": f"cell-{number}", "metadata": {}, "source": cell.source})
        if cell.kind == "code":
            found[-1] |= {"execution_count": None, "outputs": []}
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return {"cells": found, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def write_notebooks(folder: Path) -> list[Path]:
    """Write every lesson as a notebook; links to other pages become the names of their files.

    Raises UserError if a file of that name is there: it may hold a student's work.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {folder / f"{name}.ipynb": path for name, path in lessons().items()}
    if there := next((file for file in files if file.exists()), None):
        raise UserError(f"{there}: exists.  Choose another folder, or move it away.")
    for file, path in files.items():
        content = notebook(PAGE_LINK.sub(r"\1 (docs/\2)", path.read_text(encoding="utf-8")))
        file.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return [*files]
