"""Every lesson runs whole on tiny settings, has the parts that a lesson has, and is a notebook."""

import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import nbformat
import pytest
import torch

from posttrain.course.notebooks import lesson_cells, lessons, notebook
from tests.support.commands import printed, refusal
from tests.support.refusals import mentions

LEARN = Path(__file__).parents[1] / "docs" / "learn"
INDEX = (LEARN / "index.md").read_text(encoding="utf-8")
MOST_MINUTES = 4
each_lesson = pytest.mark.parametrize("name", lessons())


@pytest.fixture
def tiny_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a notebook gives a lesson: a folder, a figure window; and nothing that the next test would notice."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POSTTRAIN_TINY", "1")
    monkeypatch.setattr(plt, "show", lambda: plt.close("all"))
    threads = torch.get_num_threads()
    with mpl.rc_context(), torch.random.fork_rng():
        yield
    assert torch.get_default_dtype() == torch.float32
    torch.set_num_threads(threads)
    plt.close("all")


@each_lesson
@pytest.mark.usefixtures("tiny_settings")
def test_a_lesson_runs_whole(name: str) -> None:
    """Its own assertions are the test: numbers by hand are those of the library."""
    runpy.run_path(str(lessons()[name]))


@each_lesson
def test_a_lesson_has_its_parts(name: str) -> None:
    text = lessons()[name].read_text(encoding="utf-8")
    first, *rest = lesson_cells(text)
    number, title, question, minutes = re.fullmatch(
        r"# (\d+) · (.+)\n\n\*\*([^*]+\?)\*\*\n\n\*On 2 cores: (.+)\.\*\n\n.*", first.source, re.DOTALL
    ).groups()
    code = "\n".join(cell.source for cell in rest if cell.kind == "code")
    assert name.startswith(f"{int(number):02}_")
    count, unit = minutes.split()
    assert float(count) * {"second": 1 / 60, "minute": 1}[unit.removesuffix("s")] <= MOST_MINUTES
    headings = " ".join(
        re.findall(r"^#+ .*$", "\n".join(cell.source for cell in rest if cell.kind == "markdown"), re.M)
    )
    assert all(
        part in headings.lower() for part in ("formula in ten lines", "by hand", "with the library", "experiment")
    )
    assert f"- [{number} · {title}]({name}.py): {' '.join(question.split())} ({minutes})\n" in INDEX
    assert 'FULL = not os.environ.get("POSTTRAIN_TINY")' in code
    assert {"posttrain"} <= {*re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE)}
    assert re.search(r"^\s*assert ", code, re.MULTILINE)
    questions = "\n".join(cell.source for cell in rest if cell.kind == "markdown").partition("## Questions\n")[2]
    assert questions.count("\n<details><summary>Answer</summary>\n\n") >= 3
    assert questions.count("\n\n</details>") == questions.count("<details>")


def test_the_index_lists_every_lesson_and_no_other() -> None:
    assert re.findall(r"^- \[.*?\]\((\w+)\.py\)", INDEX, re.MULTILINE) == [*lessons()]


@each_lesson
def test_a_lesson_is_a_valid_notebook_with_the_same_code(name: str) -> None:
    text = lessons()[name].read_text(encoding="utf-8")
    page = nbformat.from_dict(notebook(text))
    nbformat.validate(page)
    code = [cell.source for cell in page.cells if cell.cell_type == "code"]
    kept = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert [line for cell in code for line in cell.splitlines() if line and not line.startswith("#")] == kept
    for cell in code:
        compile(cell, name, "exec")


def test_cells_are_text_and_code_with_their_lines() -> None:
    text = "# %% [markdown]\n# # Title\n#\n# words\n\n# %%\n# a comment\nx = 1\n\n\ny = '# %%'\n"
    assert [(cell.kind, cell.source, cell.first_line) for cell in lesson_cells(text)] == [
        ("markdown", "# Title\n\nwords", 1),
        ("code", "# a comment\nx = 1\n\n\ny = '# %%'", 6),
    ]


def test_notebooks_are_written_once_and_name_the_pages_that_they_link_to(tmp_path: Path) -> None:
    command = "course", "notebooks", str(tmp_path / "lessons")
    assert f"{len(lessons())} lessons in" in printed(*command)
    written = sorted((tmp_path / "lessons").iterdir())
    assert [file.stem for file in written] == [*lessons()]
    for file in written:
        page = json.loads(file.read_text(encoding="utf-8"))
        assert "](../" not in "".join(cell["source"] for cell in page["cells"])
    written[0].write_text("mine")
    mentions(refusal(*command), str(written[0]), "exists")
    assert written[0].read_text() == "mine"
