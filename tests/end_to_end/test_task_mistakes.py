"""A mistake in a task of one's own ends a run before it begins, in one message that names the task."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

import posttrain
from posttrain.records import Prompt
from tests.support.dice import dice
from tests.support.own_objects import Sums, config, policy_of
from tests.support.refusals import refused


def plain(completions: Sequence[str], **columns: object) -> list[float]:
    return dice(list(completions))


def test_a_task_names_plain_functions_as_train_takes_them(model: Path, tmp_path: Path) -> None:
    policy = policy_of(model)
    task = Sums(policy)
    task.reward_functions = [plain]  # type: ignore[list-item]
    run = posttrain.train(config(tmp_path / "run", 1), policy=policy, task=task)
    rows = parquet.read_table(run.folder / "rollouts" / "step-000001.parquet").to_pylist()
    assert [row["score/plain"] for row in rows] == plain([row["completion"] for row in rows])


PROMPT = Prompt(id="p", text="1", tokens=(20,))
HALF: Any = {"readings": {"x": "label"}, "measure": lambda groups: {}}
LISTED: Any = {"readings": ["x"], "measure": lambda groups: {}}


class Wrong(Sums):
    """Gives something else than it should."""


class NoPrompts(Wrong):
    def prompts(self, step: int, draws: range) -> Any:
        return None


class Generated(Wrong):
    def prompts(self, step: int, draws: range) -> Any:
        return (PROMPT for _ in draws)


class Texts(Wrong):
    def prompts(self, step: int, draws: range) -> Any:
        return ["1+1="] * len(draws)


class OneText(Wrong):
    def prompts(self, step: int, draws: range) -> Any:
        return "1+1="


class TooFew(Wrong):
    """A prompt less than the step has draws; config says 3."""

    def prompts(self, step: int, draws: range) -> list[Prompt]:
        return [PROMPT] * (2 if len(draws) == 3 else len(draws))


class TooMany(Wrong):
    def prompts(self, step: int, draws: range) -> list[Prompt]:
        return [PROMPT] * (len(draws) + 1)


class NothingHeldOut(Wrong):
    def held_out(self) -> Any:
        return None


class HeldOutText(Wrong):
    def held_out(self) -> Any:
        return [PROMPT, "1+1="]


class NoLongest(Wrong):
    def longest_prompts(self) -> Any:
        return 3


class OneReward(Wrong):
    reward_functions: Any = plain  # a method of its objects, which is a function still


class RewardByName(Wrong):
    reward_functions: Any = ("plain",)


class NoProbes(Wrong):
    def probes(self) -> Any:
        return None


class NumberForProbe(Wrong):
    def probes(self) -> Any:
        return {"p": 3}


class LabelForReading(Wrong):
    def probes(self) -> Any:
        return {"p": posttrain.Probe(**HALF)}


class ListOfReadings(Wrong):
    def probes(self) -> Any:
        return {"p": posttrain.Probe(**LISTED)}


SAYS: dict[type[Wrong], str] = {
    NoPrompts: "prompts(1, range(0, 64)) gave None; give a list of prompts, as renderer.render makes them",
    Generated: "prompts(1, range(0, 64)) gave <generator object",
    Texts: "prompts(1, range(0, 64)) gave '1+1=' (str) at 0; give prompts",
    OneText: "prompts(1, range(0, 64)) gave '1+1=' (str); give a list of prompts",
    TooFew: "prompts(1, range(0, 3)) gave 2 prompts for 3 draws; give one for each, in order",
    TooMany: "prompts(1, range(0, 64)) gave 65 prompts for 64 draws; give one for each",
    NothingHeldOut: "held_out() gave None; give a list of prompts",
    HeldOutText: "held_out() gave '1+1=' (str) at 1; give prompts",
    NoLongest: "longest_prompts() gave 3 (int); give a list of prompts",
    OneReward: "reward_functions = <bound method plain of",
    RewardByName: "reward_functions: reward 'str': 'plain' cannot score completions",
    NoProbes: "probes() gave None; give a mapping of names to probes, or {}",
    NumberForProbe: "probes() gave 3 (int) as 'p'; give a posttrain.Probe",
    LabelForReading: "probes(): probe 'p' has readings = {'x': 'label'} (dict); give a mapping such as",
    ListOfReadings: "probes(): probe 'p' has readings = ['x'] (list); give a mapping such as",
}


@pytest.mark.parametrize("wrong", SAYS, ids=lambda wrong: wrong.__name__)
def test_a_mistake_in_what_a_task_gives_is_told_by_its_name(wrong: type[Wrong], model: Path, tmp_path: Path) -> None:
    policy = policy_of(model)
    of_task = "reward_functions" in vars(wrong)
    with refused(f"task sums: {SAYS[wrong]}"):
        posttrain.train(config(tmp_path / "run"), policy=policy, task=wrong(policy), rewards=() if of_task else [plain])
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_rewards_of_the_caller_that_are_no_list_are_told_as_one(model: Path, tmp_path: Path) -> None:
    """A function by itself is one, and so is the name of a reward."""
    policy = policy_of(model)
    for given, said in (
        (7, "rewards = 7 (int) should be a list of functions"),
        ("plain", "rewards: no reward function"),
    ):
        wrong = {"rewards": given}
        with refused(said):
            posttrain.train(config(tmp_path / "run"), policy=policy, task=Sums(policy), **wrong)  # type: ignore[arg-type]
