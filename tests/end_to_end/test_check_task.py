"""`posttrain check-task`: rewards of the package get through it, and careless ones of a user's do not."""

import sys
import time
import warnings
from collections import Counter
from datetime import date
from http.server import BaseHTTPRequestHandler
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from posttrain.cli import main
from posttrain.commands.check_task import EXAMPLES, replayed, users_function
from posttrain.rewards.cheap_attacks import Answer, AttackExample
from posttrain.rewards.grading.resources import Resources
from posttrain.rewards.reward_registry import BUILT_IN
from tests.support.commands import printed, refusal
from tests.support.faulty_endpoint import endpoint, says
from tests.support.refusals import mentions

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


QUADRATIC = """
import re

def solved(completions, answer=None, **columns):
    return [float(re.fullmatch(r"(x+)+y", text) is not None or text == answer) for text in completions]
"""
SLEEPY = """
import time

def solved(completions, **columns):
    time.sleep(0.05)
    return [0.0 for _ in completions]
"""


def checked(tmp_path: Path, source: str, *flags: str) -> int:
    (tmp_path / "mine.py").write_text(source)
    return main(["check-task", f"{tmp_path}/mine.py:solved", *flags])


@pytest.fixture
def rows(tmp_path: Path) -> str:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "What is 3 + 4?", "answer": "7"}\n{"prompt": "What is 1 + 1?", "answer": "2"}\n')
    return str(file)


@pytest.mark.parametrize("reward", sorted(EXAMPLES))
def test_rewards_of_the_package_pay_what_is_right_and_nothing_else(reward: str) -> None:
    said = printed("check-task", reward)
    mentions(said, "every answer got what it deserves", "right")


def test_every_reward_of_the_package_can_be_checked() -> None:
    assert {*EXAMPLES, "judge"} == set(BUILT_IN)  # a judge is tried below
    for name, example in EXAMPLES.items():
        kinds = Counter(answer.right for answer in example.answers)
        assert kinds[True] >= 1, name
        assert kinds[False] - sum(answer.known for answer in example.answers) >= 2, name


@pytest.mark.parametrize(("reward", "module"), [("maths", "math_verify"), ("judge", "httpx")])
def test_a_reward_whose_extra_is_missing_says_so_once_and_tries_nothing(
    reward: str, module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["check-task", reward]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("not installed") == 1
    assert "pip install posttrain[" in said.err


def test_a_judge_without_an_endpoint_says_how_to_check_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-task", "judge"]) == 2
    said = capsys.readouterr()
    mentions(said.out, "0  ", "a forged verdict")
    assert "error" not in said.out
    assert "--endpoint URL --model NAME" in said.err


@pytest.mark.parametrize(("score_of_wrong", "code"), [(1, 0), (9, 1)])
def test_a_judge_is_tried_at_its_endpoint(score_of_wrong: int, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    def judge(body: dict[str, Any], connection: BaseHTTPRequestHandler) -> None:
        good = "3 * 8 = 24" in body["messages"][1]["content"]
        says(f'{{"score": {9 if good else score_of_wrong}}}')(body, connection)

    with endpoint(judge) as at, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the canary warns of the one that likes everything
        assert main(["check-task", "judge", "--endpoint", at.url, "--model", "m"]) == code
    said = capsys.readouterr().out
    assert ("a wrong answer  <-- should not be" in said) == bool(code)
    assert "a right answer" in said
    assert "a right answer  <--" not in said


def test_a_function_that_never_comes_back_is_ended_and_named(
    tmp_path: Path, rows: str, capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    assert checked(tmp_path, QUADRATIC, "--rows", rows, "--seconds=0.5") == 1
    assert time.monotonic() - began < 40
    lines = capsys.readouterr().out.splitlines()
    slow = [line for line in lines if "a million characters" in line]
    assert len(slow) == 2  # once in the table, as the other row is spared, and once in the summary
    assert "item_seconds = 0.5" in slow[0]
    assert slow[1].startswith("timed out")
    assert sum("praise for itself" in line for line in lines) == 1  # the same on both rows
    assert any(line.endswith("more got the same score on other rows") for line in lines)


def test_after_a_crash_the_next_answer_is_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dies = "import os\n\ndef solved(response, **columns):\n    return 0.0 if response.strip() else os._exit(3)\n"
    assert checked(tmp_path, dies) == 1
    said = capsys.readouterr().out
    mentions(said, "nothing  <-- its worker exited with 3", "2 of 11 are not as they should be")


def test_a_column_that_cannot_be_sent_is_checked_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(GENEROUS)
    example = AttackExample("When?", {"day": date(2020, 1, 1)}, (Answer("then", "then", right=True),))
    function = users_function(f"{tmp_path}/mine.py:solved", [example], 1.0)
    assert "without a time limit" in capsys.readouterr().out
    with Resources() as resources:
        assert [paid.fine for paid in replayed(function, [example], resources)] == [True]


class Terminal(StringIO):
    """Notes when text arrives: at each flush, with the length by then."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived: dict[int, float] = {}

    def flush(self) -> None:
        self.arrived.setdefault(self.tell(), time.monotonic())


def test_lines_are_told_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    checked(tmp_path, SLEEPY)
    first, *_, last = terminal.arrived.values()
    assert len(terminal.arrived) > 10
    assert last - first > 0.3  # eleven answers of 50 ms each


@pytest.mark.parametrize("task", ["countdown", "programs"])
def test_a_task_stands_for_its_reward(task: str) -> None:
    assert main(["check-task", task]) == 0


def test_a_careful_function_passes(tmp_path: Path, rows: str) -> None:
    assert checked(tmp_path, CAREFUL, "--rows", rows) == 0


def test_a_careless_function_is_shown_its_hacks(tmp_path: Path, rows: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert checked(tmp_path, CARELESS, f"--rows={rows}") == 1
    said = capsys.readouterr().out
    assert "praise for itself  <-- should not be" in said
    assert checked(tmp_path, GENEROUS) == 1
    assert "nothing  <-- should not be" in capsys.readouterr().out
    assert checked(tmp_path, FRAGILE) == 1
    assert "IndexError" in capsys.readouterr().out


def test_what_cannot_be_checked_is_refused() -> None:
    assert main(["check-task"]) == 2
    assert "dataset does not have a reward" in refusal("check-task", "dataset")
    assert main(["check-task", f"{__file__}:rows", "--seconds", "0"]) == 2
    assert main(["check-task", "judge", "--model", "m"]) == 2
    assert main(["check-task", "countdwn"]) == 2
    assert main(["check-task", "maths", "--row", "x"]) == 2


CHATS = """
def solved(completions, answer, **columns):
    return [float(text[0]["content"].strip() == right) for text, right in zip(completions, answer)]
"""
CONVERSATION = '[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 3 + 4?"}]'


def test_messages_reach_a_function_as_messages(tmp_path: Path, rows: str, capsys: pytest.CaptureFixture[str]) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text(f'{{"prompt": {CONVERSATION}, "answer": "7"}}\n')
    assert checked(tmp_path, CHATS, "--rows", str(chats)) == 0
    assert checked(tmp_path, CAREFUL, "--rows", str(chats)) == 1, "which reads text"
    assert "AttributeError" in capsys.readouterr().out
    # Plain rows are text, as in training, or messages where that is asked for.
    assert checked(tmp_path, CHATS, "--rows", rows) == 1
    told = capsys.readouterr().out
    assert "raised TypeError: string indices must be integers" in told
    assert "(reads messages and gets text: --chat here, --task.prompt-format chat in training)" in told
    assert checked(tmp_path, CHATS, "--rows", rows, "--chat") == 0
    assert checked(tmp_path, CHATS, "--chat", "--rows", rows) == 0


def test_a_function_is_called_as_in_training_with_what_it_logs_by(tmp_path: Path) -> None:
    source = (
        "def solved(completions, answer, log_extra, log_metric, trainer_state, **columns):\n"
        "    log_extra('length', [len(text) for text in completions])\n"
        "    log_metric('step', trainer_state.global_step)\n"
        "    return [float(text.strip() == right) for text, right in zip(completions, answer)]\n"
    )
    (tmp_path / "sums.jsonl").write_text('{"prompt": "3 + 4?", "answer": "7"}\n{"prompt": "1 + 1?", "answer": "2"}\n')
    assert checked(tmp_path, source, "--rows", str(tmp_path / "sums.jsonl")) == 0


def test_a_mistaken_function_is_told_once(tmp_path: Path, rows: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert checked(tmp_path, "def solved(completions, anwser):\n    return []\n", "--rows", rows) == 2
    told = capsys.readouterr()
    mentions(told.err, "needs an argument 'anwser'", "Did you mean 'answer'?")
    assert "anwser" not in told.out


def test_rows_without_prompts_are_refused_by_flag(tmp_path: Path, rows: str, capsys) -> None:
    assert checked(tmp_path, CAREFUL, "--rows", rows, "--prompt-column", "question") == 2
    assert "check-task: --prompt-column" in capsys.readouterr().err
