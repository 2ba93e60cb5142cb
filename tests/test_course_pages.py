"""The pages of the mistakes and the list of rows name what is there, and show what the command prints."""

import re
from functools import cache
from pathlib import Path

import pytest
import torch

from posttrain import course
from posttrain.cli import COMMANDS
from posttrain.course.exercises import Exercise
from posttrain.course.mistakes import IGNORED_LABELS, LABELS, MISTAKES, ignored_labels
from posttrain.course.trainer import MeasuredStep, train
from tests.support.commands import printed

LEARN = Path(__file__).parents[1] / "docs" / "learn"
ROWS = (LEARN / "rows.md").read_text(encoding="utf-8")
CELLS = [line.strip("| ").split(" | ") for line in ROWS.splitlines() if line.startswith("| ") and " => " not in line]
PLACES = [place for what, place in CELLS if what != "what it teaches"]
MISTAKE_PAGES = LEARN / "mistakes"
LARGEST_PICTURE = 60_000


def links(text: str) -> list[str]:
    return re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text)


@pytest.mark.parametrize("page", [LEARN / "rows.md", *sorted(MISTAKE_PAGES.glob("*.md"))], ids=lambda page: page.stem)
def test_every_link_leads_to_a_file(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert [link for link in links(text) if not (page.parent / link).is_file()] == []


def test_every_row_has_a_place_and_every_function_and_command_named_there_is_one() -> None:
    assert len(PLACES) == int(re.search(r"lists the (\d+) things", ROWS).group(1)) >= 148
    named = {name for place in PLACES for name in re.findall(r"`([^`]+)`", place)}
    commands = {name.split()[1] for name in named if name.startswith("posttrain ")}
    assert commands <= COMMANDS.keys()
    assert {name for name in named if not name.startswith("posttrain ")} <= set(course.__all__)


def test_every_function_lesson_and_mistake_is_named_in_the_rows() -> None:
    settings = {"HomeworkConfig"}
    assert {name for name in course.__all__ if f"`{name}`" not in ROWS} == settings
    named = {int(number) for number in re.findall(r"\blesson (\d+)", ROWS)}
    assert named >= {int(each.name[:2]) for each in LEARN.glob("[0-9]*.py")}
    mistakes = {int(n) for n in re.findall(r"\[mistake (\d+)\]\(mistakes/\d+\.md\)", ROWS)}
    assert mistakes <= {*MISTAKES, IGNORED_LABELS}


@pytest.mark.parametrize("number", MISTAKES)
def test_the_page_of_a_mistake_shows_what_the_command_prints(number: int) -> None:
    page = (MISTAKE_PAGES / f"{number:02}.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```console\n(.*?)```", page, re.DOTALL)
    assert f"$ posttrain course mistake {number}\nMistake {number}: {MISTAKES[number].title}\n" in shown
    assert f"What tells: {MISTAKES[number].told_by}.\n" in shown
    assert re.search(
        r"^Alarms that the mistaken run would raise: (none|`[a-z ]+` at step \d+.*)\.$", shown, re.MULTILINE
    )
    assert all(re.search(rf"^{re.escape(label)} +-?[\dn]", shown, re.MULTILINE) for label in LABELS.values())
    picture = MISTAKE_PAGES / f"../../pictures/mistake-{number}.png"
    assert picture.stat().st_size <= LARGEST_PICTURE
    assert f"(../../pictures/{picture.name})" in page


def shown_block(number: int) -> str:
    page = (MISTAKE_PAGES / f"{number:02}.md").read_text(encoding="utf-8")
    return re.findall(r"```console\n(.*?)```", page, re.DOTALL)[0]


@cache
def first_step(exercise: Exercise, mistake: int = 0) -> MeasuredStep:
    torch.set_num_threads(1)
    return train(exercise, mistake, num_steps=1)[0]


@pytest.mark.parametrize("number", [1, 2, 3, 4, 6, 7, 9, 12])  # those whose mistake is not in the reward
def test_the_first_step_on_a_page_is_what_the_trainer_measures(number: int) -> None:
    exercise = MISTAKES[number].exercise
    right, wrong = first_step(exercise), first_step(exercise, number)
    for name, label in LABELS.items():
        (first, first_wrong) = re.findall(
            rf"^{re.escape(label)} +(\S+) +\S+ +(\S+) ", shown_block(number), re.MULTILINE
        )[0]
        measured = getattr(right, name), getattr(wrong, name)
        assert (float(first), float(first_wrong)) == pytest.approx(measured, rel=1e-3, abs=6e-4), label


@pytest.mark.scale
@pytest.mark.parametrize("number", MISTAKES)
def test_a_page_shows_all_that_the_command_prints(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last digit, on the kind of machine that wrote the pages; others may round differently."""
    monkeypatch.chdir(tmp_path)
    assert shown_block(number) == f"$ posttrain course mistake {number}\n{printed('course', 'mistake', str(number))}"


def test_the_page_of_the_labels_shows_its_error() -> None:
    page = (MISTAKE_PAGES / f"{IGNORED_LABELS:02}.md").read_text(encoding="utf-8")
    assert ignored_labels() in page


def test_the_index_lists_every_page_and_the_quiz_folds_its_answers() -> None:
    index = (MISTAKE_PAGES / "index.md").read_text(encoding="utf-8")
    listed = re.findall(r"^- \[.*?\]\((\w+)\.md\)", index, re.MULTILINE)
    assert listed == [*(f"{number:02}" for number in range(1, 14)), "quiz"]
    quiz = (MISTAKE_PAGES / "quiz.md").read_text(encoding="utf-8")
    assert quiz.count("<details>") == quiz.count("</details>") == quiz.count("![") == 6
    pictures = [MISTAKE_PAGES / link for link in links(quiz) if link.endswith(".png")]
    assert all(picture.stat().st_size <= LARGEST_PICTURE for picture in pictures)
