"""`posttrain check-task` where an environment or tools reply to the attacks."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from posttrain.commands.check_task import tried
from posttrain.environments.protocol import Reply
from posttrain.environments.workers import ReplyWorkers
from posttrain.generation.spoken_text import ByteTurns
from posttrain.rewards.cheap_attacks import Answer, AttackExample
from posttrain.rewards.grading.function import reward_function
from posttrain.rewards.grading.resources import Resources
from tests.end_to_end.test_environment_runs import GAME
from tests.support.commands import called, printed, refusal
from tests.support.refusals import mentions
from tests.support.turns import environments


def test_check_task_says_attacks_to_an_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "game.py").write_text(GAME)
    (tmp_path / "careful.py").write_text(CAREFUL)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "3 + 4?", "answer": "7"}\n')
    monkeypatch.chdir(tmp_path)
    rows = ("--rows", "rows.jsonl")
    assert "every answer got what it deserves" in printed(
        "check-task", "environment", "--environment.path", "careful.py:Careful", *rows
    )
    careless = called("check-task", "environment", "--environment.path", "game.py:Game", *rows)
    assert careless.code == 1
    assert "should not be" in careless.out


def test_check_task_closes_an_environment_whose_reward_raises() -> None:
    def breaks(prompts: Sequence[str], completions: Sequence[str], **columns: object) -> list[float]:
        raise ValueError("no score")

    class Room:
        closed = threading.Event()

        def reset(self, row: Mapping[str, object], seed: int) -> None:
            return None

        def reply(self, said: str) -> Reply | None:
            return None

        def close(self) -> None:
            self.closed.set()

    made = replace(environments(Room), renderer=ByteTurns())
    with ReplyWorkers(made) as workers, Resources() as resources:
        example = AttackExample("3 + 4?", {})
        paid = tried(reward_function(breaks), example, Answer("seven", "7"), resources, workers)
        assert "no score" in paid.error
        assert Room.closed.wait(5)


def test_check_task_says_attacks_to_tools_in_chat_and_in_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(OF_TOOLS)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "3 + 4?", "answer": "7"}\n')
    monkeypatch.chdir(tmp_path)
    at = ("--rows", "rows.jsonl", "--tools", "calculator")
    assert "every answer got what it deserves" in printed("check-task", "mine.py:last_message", *at)
    careless = called("check-task", "mine.py:any_tool", *at)
    assert careless.code == 1
    mentions(
        careless.out, "only a call of calculator  <-- should not be", "a call that is not closed  <-- should not be"
    )
    in_text = called("check-task", "mine.py:sums", *at, "--tools-at", '{calculator: "="}')
    mentions(in_text.out, "asks calculator and nothing else  <-- should not be")  # it reads 1+1=21+1=22…
    assert "every answer got what it deserves" in printed(
        "check-task", "countdown", "--tools", "calculator", "--tools-at", '{calculator: "="}'
    )
    mentions(refusal("check-task", "environment", "--tools", "calculator"), "environment is not a reward")
    mentions(
        refusal("check-task", "countdown", "--tools-at", '{calculator: "="}'), "tools_at", "an environment or tools"
    )


def test_check_task_asks_at_the_stop_texts_of_an_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And says an answer on where it was stopped, then from its beginning."""
    (tmp_path / "mine.py").write_text(HEARS)
    monkeypatch.chdir(tmp_path)
    printed("check-task", "environment", "--environment.path", "mine.py:Hears")
    assert (tmp_path / "heard").read_text().split("|")[-13:] == ["What is", " 3 +", " 4?"] * 4 + [""]


OF_TOOLS = """
def last_message(completions, answer, **columns):
    return [float(said[-1]["content"].strip() == right) for said, right in zip(completions, answer)]

def any_tool(completions, **columns):
    return [float(any(each["role"] == "tool" for each in said)) for said in completions]

def sums(completions, **columns):
    return [float("1+1=2" in said) for said in completions]
"""
HEARS = """
from pathlib import Path
from posttrain import Reply

class Hears:
    stop_texts = ("is", "+")

    def reset(self, row, seed):
        pass

    def reply(self, said):
        if "4?" in said or "What" in said or " 3 +" in said:
            with Path("heard").open("a") as file:
                file.write(said + "|")
        return Reply("")
"""
CAREFUL = """
from posttrain import Reply

class Careful:
    def reset(self, row, seed):
        self.answer = row.get("answer")

    def reply(self, said):
        right = said.strip() == self.answer
        return Reply("ok" if right else "no", reward=float(right), done=True)
"""
