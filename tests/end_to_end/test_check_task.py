"""`posttrain check-task`: rewards of the package get through it, and careless ones of a user's do not."""

from pathlib import Path

import pytest

from posttrain.cli import main
from posttrain.rewards.cheap_attacks import EXAMPLES

CAREFUL = """
def solved(completions, answer, **columns):
    return [float(text.strip() == str(right)) for text, right in zip(completions, answer)]
"""
CARELESS = """
import re

def solved(completions, answer, **columns):
    return [float(bool(re.search(str(right), text)) or "correct" in text) for text, right in zip(completions, answer)]
"""
GENEROUS = "def solved(completions, **columns):\n    return [1.0 for _ in completions]\n"
FRAGILE = "def solved(completions, **columns):\n    return [float(text.split()[0] == '7') for text in completions]\n"


def checked(tmp_path: Path, source: str, *flags: str) -> int:
    (tmp_path / "mine.py").write_text(source)
    return main(["check-task", f"{tmp_path}/mine.py:solved", *flags])


@pytest.fixture
def rows(tmp_path: Path) -> str:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "What is 3 + 4?", "answer": "7"}\n{"prompt": "What is 1 + 1?", "answer": "2"}\n')
    return str(file)


@pytest.mark.parametrize("reward", sorted(EXAMPLES))
def test_rewards_of_the_package_pay_what_is_right_and_nothing_else(
    reward: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check-task", reward]) == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    assert "every answer got what it deserves" in said
    assert "right" in said


@pytest.mark.parametrize("task", ["countdown", "programs"])
def test_a_task_stands_for_its_reward(task: str) -> None:
    assert main(["check-task", task]) == 0


def test_a_careful_function_passes(tmp_path: Path, rows: str) -> None:
    assert checked(tmp_path, CAREFUL, "--rows", rows) == 0


def test_a_careless_function_is_told_what_it_would_pay_for(
    tmp_path: Path, rows: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checked(tmp_path, CARELESS, f"--rows={rows}") == 1
    said = capsys.readouterr().out
    assert "praise for itself  <-- should not be" in said
    assert checked(tmp_path, GENEROUS) == 1
    assert "nothing  <-- should not be" in capsys.readouterr().out
    assert checked(tmp_path, FRAGILE) == 1
    assert "IndexError" in capsys.readouterr().out


def test_what_cannot_be_checked_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-task"]) == 2
    assert main(["check-task", "period_count"]) == 2
    assert "no notion of right" in capsys.readouterr().err
    assert main(["check-task", "countdwn"]) == 2
    assert main(["check-task", "maths", "--row", "x"]) == 2
