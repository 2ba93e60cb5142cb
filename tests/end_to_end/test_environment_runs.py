"""Runs with an environment of the user's: by the command, killed and resumed, and by everything else that samples."""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import posttrain
from posttrain.config import load_recipe
from posttrain.errors import RunError, UserError
from posttrain.generation.generate import generate
from posttrain.training.held_out import evaluate
from tests.support.accidents import Accident
from tests.support.commands import called, printed, refusal
from tests.support.refusals import mentions
from tests.support.runs import command, metrics_of, records, require_same, rollout_rows, save_tiny_model, tiny_recipe

KILLED = -9
LATE = Accident(moment="os.rename rollouts/.tmp-step-000004.parquet 1")
"""In step 4, where the last checkpoint is of step 2."""
PROBLEM = "Use all of 1, 2, 3 to make 6."
GAME = """
import random
import time
from pathlib import Path
from posttrain import Reply, ToolCall

SLOW = Path(__file__).with_name("slow").exists()

class Game:
    reproducible = True

    def __init__(self, pays: float = 1.0, fails: float = 0.0):
        self.pays, self.fails = pays, fails

    def reset(self, row, seed):
        self.seed, self.heard, self.row = seed, [], row
        return f"{seed % 10}:"

    def reply(self, said):
        self.heard.append(said)
        if SLOW:
            time.sleep(0.02 * random.random())
        dice = self.dice()
        if dice.random() < self.fails:
            raise ValueError("the game broke")
        if len(self.heard) == 3:
            return Reply("end", reward=self.pays, done=True)
        call = ToolCall("roll", failed=dice.random() < 0.5)
        return Reply(str(dice.randint(1, 6)), reward=dice.choice([None, 0.25]), calls=(call,))

    def dice(self):
        return random.Random(f"{self.seed} {self.heard}")

    stop_texts = tuple("aeiou 0123456789")


class Chance(Game):
    reproducible = False

    def dice(self):
        return random.Random()


def turns(completions, environment, environment_rewards, **columns):
    return [float(len(each.heard)) if each is not None else 0.0 for each in environment]
"""
SHORT: dict[str, Mapping[str, Any]] = {
    "rollout": {"max_completion_tokens": 12, "max_turns": 3},
    "checkpoint": {"every_steps": 2},
}


def game_recipe(folder: Path, name: str = "Game", options: Mapping[str, Any] | None = None, **sections: Any) -> Path:
    """Four steps with a game in `folder/game.py`."""
    folder.mkdir(exist_ok=True)
    (folder / "game.py").write_text(GAME)
    environment = {"path": f"{folder}/game.py:{name}", "options": dict(options or {})}
    return tiny_recipe(folder, environment=environment, **{**SHORT, **sections})


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """A run that was never stopped."""
    ended = command("rl", game_recipe(folder / "whole"), folder=folder / "whole")
    assert ended.code == 0, ended.err
    assert "replies    " in ended.out
    assert "at most 3 turns" in ended.out
    return folder / "whole" / "run"


def test_a_run_with_an_environment_writes_what_it_replied(whole: Path) -> None:
    rows = rollout_rows(whole, 1)
    replied = [row for row in rows if row["turn_ends"]]
    assert replied
    for row in replied:
        for end, given in zip(row["turn_ends"], row["turn_given"], strict=True):
            assert all(row["sampled"][:1])
            assert row["sampled"][end - 1]
            assert not any(row["sampled"][end : end + given])
        earned = [reward for reward in row["turn_rewards"] if reward is not None]
        assert row["score/environment"] == (pytest.approx(sum(earned)) if earned else None)
        assert json.loads(row["turn_calls"])
    assert {row["finish"] for row in rows} <= {"stop", "length", "turns", "environment"}
    metrics = metrics_of(whole)[1]
    assert metrics["turns/mean"] > 1
    assert metrics["tools/roll/call_frequency"] == metrics["tools/call_frequency"] > 0
    assert metrics["tokens/given"] == sum(len(row["sampled"]) - sum(row["sampled"]) for row in rows)
    for part in ("before", "brief", "after"):
        step = {"before": 0, "brief": 2, "after": 4}[part]
        of_part = [row for row in rollout_rows(whole, step, "evaluations") if row["evaluation"] == part]
        assert any(row["turn_ends"] for row in of_part), part
    assert not (whole / "replies.jsonl").exists()


def test_a_killed_run_with_slow_replies_has_the_bits_of_one_with_quick_ones_that_never_stopped(
    folder: Path, whole: Path
) -> None:
    place = folder / "killed"
    recipe = game_recipe(place)
    (place / "slow").touch()
    ended = command("rl", recipe, folder=place, accident=LATE)
    assert ended.code == KILLED
    resumed = command("rl", "--resume", place / "run", folder=place)
    assert resumed.code == 0, resumed.err
    require_same(place / "run", whole)


def test_replies_by_chance_are_kept_and_a_resumed_step_reads_them(folder: Path) -> None:
    place = folder / "chance"
    recipe = game_recipe(place, "Chance")
    ended = command("rl", recipe, folder=place, accident=LATE)
    assert ended.code == KILLED
    before = records(place / "run" / "replies.jsonl")
    steps = {record["step"] for record in before if record["place"] == "step"}
    assert steps == {1, 2, 3, 4}
    assert any(record["place"].startswith("evaluation at 0, sampled") for record in before)
    third = rollout_rows(place / "run", 3)
    resumed = command("rl", "--resume", place / "run", folder=place)
    assert resumed.code == 0, resumed.err
    assert [row["completion"] for row in rollout_rows(place / "run", 3)] == [row["completion"] for row in third]
    texts = [row["completion"] for row in rollout_rows(place / "run", 4)]
    replies = [record for record in before if (record["place"], record["step"]) == ("step", 4)]
    assert len(replies) == 4  # the groups that the killed life had finished
    said = {exchange["said"] for record in replies for each in record["exchanges"] for exchange in each[1:]}
    assert any(one and one in text for one in said for text in texts)
    assert records(place / "run" / "replies.jsonl")[: len(before)] == before  # added to, never cut


def test_one_that_fails_now_and_then_is_counted_and_one_that_fails_often_ends_the_run(folder: Path) -> None:
    place = folder / "fails"
    recipe = game_recipe(
        place, options={"fails": 0.05}, run={"num_steps": 2, "folder": str(place / "run"), "threads": 1}
    )
    content = recipe.read_text().replace("environment:\n", "environment:\n  max_failures: 0.9\n")
    recipe.write_text(content)
    ended = command("rl", recipe, folder=place)
    assert ended.code == 0, ended.err
    rows = [row for step in (1, 2) for row in rollout_rows(place / "run", step)]
    failed = [row for row in rows if row["finish"] == "failed"]
    assert failed
    for row in failed:
        assert row["reward"] is row["score/environment"] is row["score/dice"] is None
        assert row["advantage"] == 0
        assert "the game broke" in row["failure"]
    journaled = [each for line in records(place / "run" / "scores.jsonl") for each in line.get("failures", ()) if each]
    assert len(journaled) == len(failed)
    assert sum(line["environment/num_failed"] for line in metrics_of(place / "run")[1:]) == len(failed)
    stops = game_recipe(folder / "often", options={"fails": 0.9})
    ended = command("rl", stops, folder=folder / "often")
    assert ended.code == 1
    kept = folder / "often" / "run-failures.txt"  # beside the run, which has not begun
    mentions(ended.err, "environment.max_failures", "the game broke", "game.py", f"Tracebacks are in {kept}")
    assert not (folder / "often" / "run").exists()
    assert kept.read_text().startswith("rollout, step 1, draw ")


class Echo:
    """Says once what it heard."""

    def reset(self, row: Mapping[str, object], seed: int) -> None:
        self.heard: list[str] = []

    def reply(self, said: str) -> posttrain.Reply | None:
        self.heard.append(said)
        return posttrain.Reply(f"[{len(said)}]", reward=float(len(said) % 2)) if len(self.heard) == 1 else None

    stop_texts = tuple("aeiou 0123456789")


def config_of(model: Path, folder: Path, **sections: Any) -> posttrain.Config:
    return load_recipe(
        task={"name": "countdown", "held_out_size": 3},
        model={"path": str(model)},
        rollout={"prompts_per_step": 2, "group_size": 2, "max_completion_tokens": 8, **sections.pop("rollout", {})},
        evaluation={"samples": 1},
        run={"folder": str(folder), "num_steps": 1, "curves": False, "threads": 1},
        **sections,
    )


def test_python_takes_a_class_and_every_way_asks_it(model: Path, tmp_path: Path) -> None:
    config = config_of(model, tmp_path / "run")

    def heard(completions: list[str], environment: list[Echo], **_: object) -> list[float]:
        assert all(isinstance(each, Echo) for each in environment)
        return [float(len(each.heard)) for each in environment]

    run = posttrain.train(config, environment=Echo, rewards=[heard])
    assert run.summary["rewards"] == {"heard": 1.0, "environment": 1.0}
    assert any(row["turn_ends"] for row in rollout_rows(run.folder, 1))
    results = evaluate(run.model_folder, config, environment=Echo, rewards=[heard])
    assert results["num_problems"] == 3
    groups = generate(
        str(model), ["Use all of 1, 2 to make 3."], group_size=4, environment=Echo, max_completion_tokens=8
    )
    replied = [rollout for rollout in groups[0].rollouts if rollout.turns]
    assert replied
    assert all("[" in rollout.text for rollout in replied if rollout.turns[0].num_given)
    with posttrain.steps(config_of(model, tmp_path / "steps"), environment=Echo, rewards=[heard]) as steps:
        (step,) = steps
    assert "turns/mean" in step.metrics
    with pytest.raises(UserError) as told:
        posttrain.train(config_of(model, tmp_path / "other"), rewards=[heard])
    mentions(str(told.value), "environment", "set environment.path")


def test_failures_that_end_a_run_which_has_begun_are_kept_in_its_folder(model: Path, tmp_path: Path) -> None:
    class BreaksLater(Echo):
        def reply(self, said: str) -> posttrain.Reply | None:
            if (tmp_path / "run" / "format").exists():
                raise ValueError("out of order")
            return super().reply(said)

    config = config_of(model, tmp_path / "run")
    with pytest.raises(RunError) as told:
        posttrain.train(replace(config, run=replace(config.run, num_steps=2)), environment=BreaksLater)
    kept = tmp_path / "run" / "failures.txt"
    mentions(str(told.value), f"Tracebacks are in {kept}", "step 2")
    assert "rollout, step 2, draw " in kept.read_text()


def test_a_calculator_answers_in_place_in_every_command(folder: Path) -> None:
    save_tiny_model(folder / "model")
    asked = ["--tools", "calculator", "--tools-at", '{calculator: "="}', "--trust-code"]
    short = ["--rollout.max-completion-tokens", "6"]
    evaluated = printed(
        "eval", folder / "model", "--task.held-out-size", "2", "--evaluation.samples", "1", *asked, *short
    )
    assert "accuracy" in evaluated
    traced = printed("trace", folder / "model", "0", "--rollout.group-size", "2", *asked, *short)
    assert "log-prob of the completion" in traced
    chatted = printed("chat", folder / "model", "--prompt", "hi", "--sampling.max-completion-tokens", "4", *asked)
    assert "ended by" in chatted
    group = generate(
        "bundled", ["Use all of 11, 25, 11 to make 25.\n"], tools=["calculator"], tools_at={"calculator": "="}
    )
    rollout = group[0].rollouts[0]
    assert rollout.turns
    for turn in rollout.turns:
        assert turn.calls[0].name == "calculator"


def test_a_recipe_of_tools_trains_and_pays_nothing_for_replies(folder: Path) -> None:
    place = folder / "tools"
    one = {"num_steps": 1, "folder": str(place / "run"), "threads": 1}
    at_letters = {"calculator": "e"}  # which a random model writes
    recipe = tiny_recipe(place, tools=["calculator"], tools_at=at_letters, run=one, evaluation={"every_steps": 0})
    assert "replies    tools calculator: at most 16 turns" in printed("rl", recipe)
    rows = rollout_rows(place / "run", 1)
    calls = [call for row in rows for turn in json.loads(row["turn_calls"]) for call in turn]
    assert calls
    assert {call["name"] for call in calls} == {"calculator"}
    assert "score/environment" not in rows[0]
    saved = load_recipe(place / "run" / "config.yaml")
    assert (saved.tools, dict(saved.tools_at)) == (("calculator",), at_letters)


def test_collected_pairs_are_of_whole_conversations(whole: Path, folder: Path) -> None:
    words = ["--model.path", folder / "model", "--task.name", "countdown", "--task.held-out-size", "4"]
    words += ["--environment.path", f"{whole.parent}/game.py:Game", "--sampling.max-completion-tokens", "12"]
    words += ["--collect.num-prompts", "4", "--collect.group-size", "4", "--collect.cut-off", "keep"]
    said = printed("collect", *words, "--run.folder", folder / "pairs")
    assert "environment" in said or "pairs" in said
    (first, *_) = records(folder / "pairs" / "completions.jsonl")
    assert all("environment" in each["scores"] for each in first["completions"])
    assert records(folder / "pairs" / "preferences.jsonl")


def test_doctor_makes_what_replies(whole: Path) -> None:
    said = called("doctor", "--environment.path", f"{whole.parent}/game.py:Game").out
    assert "game.py:Game makes a Game" in said
    asked = called("doctor", "--tools", "calculator", "--tools-at", '{calculator: "="}').out
    assert "tool         calculator, called by '='" in asked


def test_chat_uses_a_run_s_environment_and_trace_shows_its_turns(whole: Path) -> None:
    said = printed("chat", whole, "--prompt", PROBLEM, "--seed", "3")
    assert "«" in said
    assert "turns" in said
    assert "the environment's reward" in printed("chat", whole, "--prompt", PROBLEM, "--seed", "1")
    traced = printed("trace", whole, "0", "--sample", "1")
    assert "turn 1 ends with token" in traced
    shown = printed("rl", whole.parent / "recipe.yaml", "--dry-run")
    assert "replies in «…»" in shown


NOTES = """
from pathlib import Path

class Notes:
    def reset(self, row, seed):
        self.note("open")

    def reply(self, said):
        return None

    def close(self):
        self.note("closed")

    def note(self, word):
        with Path(__file__).with_name("notes").open("a") as notes:
            notes.write(word + "\\n")
"""


def test_chat_closes_an_environment_before_it_reads_the_next_question(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes.py").write_text(NOTES)
    notes = tmp_path / "notes"

    def two_questions(_: str) -> Iterator[str]:
        yield "hi"
        for _ in range(100):
            if notes.read_text().endswith("closed\n"):
                break
            time.sleep(0.05)
        with notes.open("a") as written:
            written.write("asked again\n")
        yield "ho"

    save_tiny_model(folder / "model")
    monkeypatch.setattr("posttrain.commands.chat.typed", two_questions)
    environment = ("--environment.path", f"{tmp_path}/notes.py:Notes", "--trust-code")
    printed("chat", folder / "model", *environment, "--prompt-format", "plain", "--sampling.max-completion-tokens", "4")
    made_once = ["closed"]
    assert notes.read_text().split("\n") == [*made_once, "open", "closed", "asked again", "open", "closed", ""]


def test_a_run_from_elsewhere_makes_no_environment_that_was_not_run_here(
    folder: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for words in (("chat", whole, "--prompt", "x"), ("eval", whole), ("trace", whole, "0"), ("rl", "--resume", whole)):
        mentions(refusal(*map(str, words)), "environment.path = ", "game.py:Game", "--trust-code")


def test_a_changed_environment_is_told_on_resume(folder: Path) -> None:
    place = folder / "changed"
    recipe = game_recipe(place, run={"num_steps": 1, "folder": str(place / "run"), "threads": 1})
    assert command("rl", recipe, folder=place).code == 0
    (place / "game.py").write_text(GAME + "\n# another\n")
    mentions(refusal("rl", "--resume", str(place / "run")), "environment.path", "has changed")


MISTAKES = {
    "--environment.path nowhere.py:Game": ("environment", "nowhere.py"),
    "--tools nothing": ("tools", "calculator"),
    "--tools calculator": ("tools",),
    "--environment.options {a:1}": ("environment.options", "only for"),
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_a_mistake_is_one_message_before_anything_is_sampled(flags: str, folder: Path) -> None:
    place = folder / "mistakes"
    recipe = tiny_recipe(place)
    mentions(refusal("rl", str(recipe), *flags.split()), *MISTAKES[flags])
    assert not (place / "run").exists()


def test_failures_end_a_generation_too(model: Path) -> None:
    class Broken(Echo):
        def reply(self, said: str) -> posttrain.Reply | None:
            raise ValueError("out of order")

    with pytest.raises(RunError) as told:
        generate(str(model), ["Use all of 1, 2 to make 3."], group_size=4, environment=Broken, max_completion_tokens=8)
    mentions(str(told.value), "out of order", "max_failures")
