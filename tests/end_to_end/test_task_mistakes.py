"""A mistake in a task or an algorithm of one's own is one message that names it; before step 1 it costs nothing."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

import posttrain
from posttrain.algorithms.credit import Evidence
from posttrain.algorithms.table import grpo
from posttrain.errors import RunError
from posttrain.records import Prompt
from tests.support.dice import dice
from tests.support.own_objects import Sums, config, policy_of, rewarded_by_answer
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


def probe(readings: object) -> Any:
    return lambda self: {"p": posttrain.Probe(readings=readings, measure=lambda groups: {})}


def gives(what: object) -> Any:
    return lambda self, *asked: what


WRONG: dict[str, tuple[str, Any, str]] = {
    "no prompts": (
        *("prompts", gives(None)),
        "prompts(1, range(0, 64)) gave None; give a list of prompts, as renderer.render makes them",
    ),
    "a generator": (
        *("prompts", lambda self, step, draws: (PROMPT for _ in draws)),
        "prompts(1, range(0, 64)) gave <generator object",
    ),
    "texts": ("prompts", lambda self, step, draws: ["1+1="] * len(draws), "gave '1+1=' (str) at 0; give prompts"),
    "one text": ("prompts", gives("1+1="), "prompts(1, range(0, 64)) gave '1+1=' (str); give a list of prompts"),
    "a prompt too few": (  # of the 3 draws of a step
        *("prompts", lambda self, step, draws: [PROMPT] * (2 if len(draws) == 3 else len(draws))),
        "prompts(1, range(0, 3)) gave 2 prompts for 3 draws; give one for each, in order",
    ),
    "a prompt too many": (
        *("prompts", lambda self, step, draws: [PROMPT] * (len(draws) + 1)),
        "prompts(1, range(0, 64)) gave 65 prompts for 64 draws; give one for each",
    ),
    "nothing held out": ("held_out", gives(None), "held_out() gave None; give a list of prompts"),
    "a held-out text": ("held_out", gives([PROMPT, "1+1="]), "held_out() gave '1+1=' (str) at 1; give prompts"),
    "no longest": ("longest_prompts", gives(3), "longest_prompts() gave 3 (int); give a list of prompts"),
    "a reward": ("reward_functions", plain, "reward_functions = <bound method plain of"),  # a function of its objects
    "a name": ("reward_functions", ("plain",), "reward_functions: reward 'str': 'plain' cannot score completions"),
    "no probes": ("probes", gives(None), "probes() gave None; give a mapping of names to probes, or {}"),
    "a number": ("probes", gives({"p": 3}), "probes() gave 3 (int) as 'p'; give a posttrain.Probe"),
    "a label": ("probes", probe({"x": "label"}), "probe 'p' has readings = {'x': 'label'} (dict); give a mapping"),
    "a list": ("probes", probe(["x"]), "probes(): probe 'p' has readings = ['x'] (list); give a mapping such as"),
}
"""What of a task is wrong, what stands there, and what is said of it."""


@pytest.mark.parametrize("wrong", WRONG)
def test_a_mistake_in_what_a_task_gives_is_told_by_its_name(wrong: str, model: Path, tmp_path: Path) -> None:
    name, given, says = WRONG[wrong]
    policy = policy_of(model)
    task = type("Wrong", (Sums,), {name: given})(policy)
    with refused("task sums: …" + says):
        posttrain.train(
            config(tmp_path / "run"), policy=policy, task=task, rewards=() if name == "reward_functions" else [plain]
        )
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_rewards_of_the_caller_that_are_no_list_are_told_as_one(model: Path, tmp_path: Path) -> None:
    """A function by itself is one, and so is the name of a reward."""
    policy = policy_of(model)
    for given, said in ((7, "rewards = 7 (int) should be a list of functions"), ("plain", "no reward function")):
        wrong: Any = {"rewards": given}
        with refused(said):
            posttrain.train(config(tmp_path / "run"), policy=policy, task=Sums(policy), **wrong)


@pytest.mark.parametrize(("mistaken", "says"), [(1, ()), (2, ("step 2", "step-00000"))])
def test_a_mistake_in_an_algorithm_is_told(mistaken: int, says: tuple[str, ...], model: Path, tmp_path: Path) -> None:
    """In step 1 before anything is written."""
    policy, calls = policy_of(model), iter(range(1, 9))
    own = replace(grpo(), credit=lambda evidence: credit_until(mistaken, calls, evidence))
    objects = {"policy": policy, "task": Sums(policy), "algorithm": own, "rewards": [rewarded_by_answer]}
    with refused("algorithm grpo", "returned a tensor", *says, error=RunError):
        posttrain.train(config(tmp_path / "run", 2), **objects)
    assert (tmp_path / "run" / "checkpoints").exists() == (mistaken > 1)


def credit_until(mistaken: int, calls: Iterator[int], evidence: Evidence) -> Any:
    """GRPO's, until the call that is mistaken."""
    return evidence.rewards if next(calls) == mistaken else grpo().credit(evidence)
