"""A run is resumed with what it was made of, or not at all: objects of a caller in Python, and files of the recipe."""

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

import posttrain
from posttrain.algorithms.algorithm import Algorithm
from posttrain.algorithms.table import grpo, rloo
from posttrain.algorithms.terms import KlTerm
from posttrain.cli import main
from posttrain.options.training import ReferenceOptions
from posttrain.runs.run_inputs import RunInput
from posttrain.training.session import CallerObjects, inputs_of
from tests.support.commands import refusal
from tests.support.dice import dice
from tests.support.own_objects import ROWS, Counts, Sums, config, config_for, inputs, policy_of, upside_down
from tests.support.refusals import refused
from tests.support.runs import files_of, metrics_of


def objects_for(model: Path, **others: Any) -> dict[str, Any]:
    """A new set of objects that make one and the same run."""
    policy = policy_of(model)
    made = {"policy": policy, "task": Sums(policy), "engine": Counts(policy), "algorithm": rloo(), "rewards": [dice]}
    return {**made, **others}


class Differences(Sums):
    name = "differences"


@pytest.fixture(scope="module")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step whose every part is an object."""
    folder = tmp_path_factory.mktemp("made") / "run"
    posttrain.train(config(folder, 1), **objects_for(model))
    return folder


def resume(folder: Path, num_steps: int = 2, **objects: Any) -> posttrain.Run:
    return posttrain.train(config(folder, num_steps), **objects, resume=True)


def test_the_command_refuses_a_run_that_was_made_of_objects_and_says_how_to_go_on(
    made: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    num_parameters = sum(each.numel() for each in policy_of(model).model.parameters())
    before = files_of(made)
    capsys.readouterr()
    assert main(["rl", "--resume", str(made), "--run.num-steps", "2"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == (
        f"posttrain: resume {made}: the run was made with objects that this resume lacks: policy = Qwen3ForCausalLM of"
        f" {num_parameters} parameters, task = Sums (sums), engine = Counts, algorithm = rloo, rewards[0] = dice."
        "  Resume it from Python: posttrain.train(config, policy=..., task=..., engine=..., algorithm=...,"
        " rewards=..., resume=True).\n"
    )
    assert files_of(made) == before


@pytest.mark.parametrize("forgotten", ["policy", "task", "engine", "algorithm", "rewards"])
def test_an_object_that_is_forgotten_is_named(forgotten: str, made: Path, model: Path) -> None:
    objects = {name: each for name, each in objects_for(model).items() if name != forgotten}
    with refused("resume lacks", forgotten):
        resume(made, **objects)


def louder(completions: Sequence[str], **columns: object) -> list[float]:
    return [2 * score for score in dice(list(completions))]


def same_name(factor: float) -> Callable[..., list[float]]:
    """Functions of one name and one source that are not the same."""

    def scored(completions: Sequence[str], **columns: object) -> list[float]:
        return [factor * score for score in dice(list(completions))]

    return scored


OTHERS: dict[str, tuple[Callable[[Path], dict[str, Any]], tuple[str, ...]]] = {
    "another task": (
        lambda model: {"task": Differences(policy_of(model))},
        ("task = Differences (differences)", "Sums (sums)"),
    ),
    "another algorithm": (lambda model: {"algorithm": grpo()}, ("algorithm = grpo", "Undo the change")),
    "the same algorithm with other options": (
        lambda model: {"algorithm": replace(rloo(), credit=upside_down)},
        ("algorithm = rloo",),
    ),
    "another reward": (lambda model: {"rewards": [louder]}, ("rewards[0] = louder", "dice")),
    "another reward of its name": (
        lambda model: {"rewards": [posttrain.reward_function(louder, name="dice")]},
        ("rewards[0] = dice",),
    ),
    "another weight": (
        lambda model: {"rewards": [posttrain.reward_function(dice, weight=0.5)]},
        ("rewards[0] = dice (weight = 0.5)",),
    ),
    "a reward more": (lambda model: {"rewards": [dice, louder]}, ("rewards[1] = louder", "made with nothing")),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_object_is_refused(other: str, made: Path, model: Path) -> None:
    change, says = OTHERS[other]
    before = files_of(made)
    with refused("Undo the change", *says):
        resume(made, **objects_for(model, **change(model)))
    assert files_of(made) == before


def test_a_run_without_a_record_of_its_objects_is_resumed_as_before(model: Path, tmp_path: Path) -> None:
    posttrain.train(config(tmp_path / "run", 1), **objects_for(model))
    (tmp_path / "run" / "inputs.json").unlink()
    resume(tmp_path / "run", **objects_for(model, algorithm=grpo()))
    assert not (tmp_path / "run" / "inputs.json").exists()


def test_the_settings_in_a_function_and_around_it_tell_two_of_one_source_apart() -> None:
    functions = [same_name(1.0), same_name(2.0), *(functools.partial(louder, weight=weight) for weight in (1, 2))]
    functions += [functools.partial(dice, weight=2), Scorer(3).twice, Scorer(3)]
    known = [inputs(rewards=[posttrain.reward_function(each, name="same")]).as_json() for each in functions]
    assert len(set(known)) == len(functions)
    again = [same_name(1.0), same_name(2.0), functools.partial(louder, weight=1)]
    assert [inputs(rewards=[posttrain.reward_function(each, name="same")]).as_json() for each in again] == known[:3]


class Scorer:
    """A reward that is an object."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, completions: Sequence[str], **columns: object) -> list[float]:
        return [float(self.factor)] * len(completions)

    def twice(self, completions: Sequence[str], **columns: object) -> list[float]:
        return [2.0 * self.factor] * len(completions)


def test_what_a_function_fills_as_it_runs_is_no_setting() -> None:
    seen: list[int] = []

    def counted(completions: Sequence[str], **columns: object) -> list[float]:
        seen.append(len(completions))
        return [0.0] * len(completions)

    before = inputs(rewards=[counted])
    counted(["a"])
    assert inputs(rewards=[counted]) == before
    assert before.objects["rewards[0]"].digest


def test_a_function_without_source_is_known_by_its_name_alone() -> None:
    def typed(function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as if it had been typed at a prompt, where nothing keeps its source."""
        return FunctionType(function.__code__.replace(co_filename="<stdin>"), {"__name__": "__main__"}, "typed")

    assert inputs(rewards=[typed(louder)]).objects == {"rewards[0]": RunInput("typed", "")}
    one, other = RunInput("typed", ""), RunInput("typed", "0f")
    assert not one.differs(other)
    assert not other.differs(one)
    assert other.differs(RunInput("typed", "1f"))


def test_other_rows_are_refused(model: Path, tmp_path: Path) -> None:
    posttrain.train(config_for(model, tmp_path / "run"), rows=ROWS, rewards=[dice])
    more = config_for(model, tmp_path / "run", run={"num_steps": 2})
    changed = [*ROWS[:-1], {**ROWS[-1], "answer": 0}]
    for rows, says in ((changed, "rows = 6 rows"), (ROWS[:5], "rows = 5 rows")):
        with refused(says):
            posttrain.train(more, rows=rows, rewards=[dice], resume=True)
    assert inputs(rows=[dict(row) for row in ROWS]) == inputs(rows=ROWS)
    assert inputs(rows=[{"prompt": "a", "puzzle": Scorer(1)}]) == inputs(rows=[{"prompt": "a", "puzzle": Scorer(1)}])


def with_kl() -> Algorithm:
    return grpo(kl=KlTerm(coefficient=0.1))


def test_the_weights_of_a_policy_matter_where_they_are_the_reference_and_nowhere_else(model: Path) -> None:
    policy, trained = policy_of(model), policy_of(model)
    with torch.no_grad():
        trained.model.get_parameter("model.norm.weight")[0] += 0.5
    free, pulled = ({"algorithm": each} for each in (grpo(), with_kl()))
    assert inputs(policy=policy, **free) == inputs(policy=trained, **free)
    assert inputs(policy=policy, **pulled) == inputs(policy=policy_of(model), **pulled)
    began, now = inputs(policy=policy, **pulled), inputs(policy=trained, **pulled)
    assert now.objects["policy"].differs(began.objects["policy"])
    by_config = posttrain.load_recipe(algorithm={"name": "grpo", "kl": {"coefficient": 0.1}})
    refreshed = replace(by_config, reference=ReferenceOptions(refresh_every=2))  # then a checkpoint holds it
    assert inputs_of(by_config, CallerObjects(policy=policy)).objects["policy"].digest
    assert not inputs_of(refreshed, CallerObjects(policy=policy)).objects["policy"].digest


def test_files_in_whose_place_there_is_an_object_are_not_asked_for(model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1"}\n')
    made = config_for(model, tmp_path / "run", task={"path": str(rows)})
    posttrain.train(made, rows=ROWS, rewards=[dice])
    assert json.loads((tmp_path / "run" / "inputs.json").read_text())["files"].keys() == {"model.path"}
    policy = policy_of(model)
    posttrain.train(config_for(model, tmp_path / "other"), rows=ROWS, rewards=[dice], policy=policy)
    assert json.loads((tmp_path / "other" / "inputs.json").read_text())["files"] == {}


class Drawing(Counts):
    """Says of itself that it draws numbers of its own."""

    reproducible = False


def test_where_an_engine_has_random_numbers_of_its_own_a_resumed_run_says_so(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for num_steps in (1, 2):
        policy = policy_of(model)
        objects = objects_for(model, policy=policy, task=Sums(policy), engine=Drawing(policy))
        said = "Engine Drawing is not reproducible"
        assert said not in capsys.readouterr().out
        posttrain.train(config(tmp_path / "run", num_steps), **objects, resume=num_steps == 2)
    assert said in capsys.readouterr().out
    kept = json.loads((tmp_path / "run" / "inputs.json").read_text())["objects"]
    assert kept["engine"]["is"] == "Drawing, with random numbers of its own"


def test_a_reference_is_judged_by_the_algorithm_that_is_given(model: Path, tmp_path: Path) -> None:
    def trained(folder: Path, num_steps: int, algorithm: Algorithm) -> posttrain.Run:
        made = config(folder, num_steps, reference={"refresh_every": 1}, update={"learning_rate": 1e-2})
        policy = policy_of(model)
        objects = {"policy": policy, "task": Sums(policy), "rewards": [dice], "algorithm": algorithm}
        return posttrain.train(made, **objects, resume=num_steps == 3)

    run = trained(tmp_path / "run", 2, with_kl())
    # One update a step, and the reference is the policy that the step begins with.
    assert all(abs(line["kl"]) < 1e-9 for line in metrics_of(run.folder)[1:])
    trained(tmp_path / "run", 3, with_kl())
    with refused("reference.refresh_every = 1"):
        trained(tmp_path / "other", 2, rloo())
    assert not (tmp_path / "other").exists()
    # By the command too the objects are what is missing, and not a use for the reference.
    assert "objects that this resume lacks: policy = " in refusal("rl", "--resume", tmp_path / "run")


def test_an_accepted_change_is_noted_once(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    posttrain.train(config(folder, 1), **objects_for(model))
    other = objects_for(model, rewards=[mended])
    with refused("rewards[0] = mended", "accept_changes") as refusal:
        resume(folder, **other)
    assert refusal.value.command.endswith("or accept it: --accept-changes.")
    posttrain.train(config(folder, 2), **objects_for(model, rewards=[mended]), resume=True, accept_changes=True)
    (change,) = json.loads((folder / "inputs.json").read_text())["changes"]
    assert change == "rewards[0] = mended is given, but the run was made with dice"
    assert f"Changed since the run began: {change}." in capsys.readouterr().out
    resume(folder, 3, **objects_for(model, rewards=[mended]))  # which is now what the run is made of
    assert json.loads((folder / "inputs.json").read_text())["changes"] == [change]
    lacking = {name: each for name, each in objects_for(model).items() if name != "task"}
    with refused("objects that this resume lacks: task ="):  # nobody can accept nothing
        posttrain.train(config(folder, 4), **lacking, resume=True, accept_changes=True)


def mended(completions: Sequence[str]) -> list[float]:
    return [1.0 for _ in completions]
