"""`posttrain.train` with objects of one's own in place of what the config describes, and what is said of wrong ones."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

import posttrain
from posttrain.algorithms.table import grpo
from posttrain.models.policy import Policy
from posttrain.records import Prompt
from posttrain.rewards.code.code_reward import CodeReward
from posttrain.runs.planned_memory import MachineMemory
from posttrain.training import report
from posttrain.training.rl import show_rl_plan
from posttrain.training.session import CallerObjects, open_session
from tests.support.dice import dice
from tests.support.own_objects import Counts, Sums, config, config_for, policy_of, rewarded_by_answer, upside_down
from tests.support.refusals import mentions, refused
from tests.support.runs import require_same, rollout_rows


def test_a_run_is_made_of_the_objects_that_it_is_given(model: Path, tmp_path: Path) -> None:
    policy = policy_of(model)
    task, engine = Sums(policy), Counts(policy)
    algorithm = replace(grpo(), name="upside-down", credit=upside_down)
    before = policy.model.get_parameter("model.norm.weight").detach().clone()
    own: dict[str, Any] = {"policy": policy, "task": task, "engine": engine, "algorithm": algorithm}
    run = posttrain.train(config(tmp_path / "run"), **own, rewards=[rewarded_by_answer])
    assert [(step, len(draws)) for step, draws in task.drawn if len(draws) == 3] == [(1, 3), (2, 3), (3, 3)]
    rollouts = [("rollout", step, step - 1) for step in (1, 2, 3)]
    assert [call for call in engine.sampled if call[0] != "evaluation"] == rollouts
    for step in (1, 2, 3):
        rows = rollout_rows(run.folder, step)
        assert {row["prompt_id"] for row in rows} == {f"train/{10 * step + draw}" for draw in range(3)}
        rewards = torch.tensor([row["reward"] for row in rows], dtype=torch.float64).view(3, 4)
        expected = rewards.mean(dim=1, keepdim=True) - rewards
        assert torch.tensor([row["advantage"] for row in rows]).view(3, 4).tolist() == expected.tolist()
    after = policy.model.get_parameter("model.norm.weight")
    assert not torch.equal(before, after)
    saved = AutoModelForCausalLM.from_pretrained(run.model_folder).get_parameter("model.norm.weight")
    assert torch.equal(saved, after)
    assert "upside-down on sums for 3 steps" in (run.model_folder / "README.md").read_text()


def test_an_engine_is_given_the_weights_of_updates_and_of_the_checkpoint(model: Path, tmp_path: Path) -> None:
    updates = {"epochs_per_step": 2, "learning_rate": 1e-2}
    policy = policy_of(model)
    first = Counts(policy)
    made = config(tmp_path / "run", 2, update=updates)
    posttrain.train(made, policy=policy, task=Sums(policy), engine=first, rewards=[rewarded_by_answer])
    # Two updates in each step: versions 0, 2 and 4.
    assert first.versions == [0, 2, 4]
    assert torch.equal(first.loaded[-1][1], policy.model.get_parameter("model.norm.weight"))
    again = policy_of(model)
    second = Counts(again)
    longer = config(tmp_path / "run", 3, update=updates)
    posttrain.train(longer, policy=again, task=Sums(again), engine=second, rewards=[rewarded_by_answer], resume=True)
    assert second.versions == [4, 6]
    assert torch.equal(second.loaded[0][1], first.loaded[-1][1])
    rows = rollout_rows(tmp_path / "run", 3)
    assert {row["weights_version"] for row in rows} == {4}


def test_a_policy_object_and_an_engine_around_ours_give_the_same_bits(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+{n}=", "answer": 2 * n} for n in range(9)]

    def run(name: str, path: Path, **objects: Any) -> Path:
        made = config_for(path, tmp_path / name / "run", run={"folder": str(tmp_path / name / "run"), "num_steps": 2})
        return posttrain.train(made, rows=rows, rewards=[dice], **objects).folder

    policy = policy_of(model)
    require_same(run("a", model), run("b", tmp_path / "none", policy=policy, engine=Counts(policy)))


class Silent:
    """Has some of what a task has, and some of what an engine has."""

    name = "silent"
    stop_ids = (0,)

    def prompts(self, step: int, draws: range) -> list[Prompt]:
        return []


WRONG: dict[str, tuple[str, object, str]] = {
    "a name for a policy": ("policy", "my-model", "policy: 'my-model' (str)"),
    "a class for a policy": ("policy", Policy, "posttrain.as_policy"),
    "a class for a task": ("task", Sums, "task: Sums is a class; give an object of it"),
    "half a task": ("task", Silent(), "task lacks held_out; inherit from posttrain.Task"),
    "a name for a task": ("task", "countdown", "inherit from posttrain.Task"),
    "a class for an engine": ("engine", Counts, "engine: Counts is a class; give an object of it"),
    "half an engine": ("engine", Silent(), "load, logprob_gap, max_positions, open, patience_seconds, reproducible"),
    "a function for an algorithm": ("algorithm", grpo, "posttrain.algorithms.table.grpo()"),
    "a name for an algorithm": ("algorithm", "grpo", "algorithm: 'grpo' (str)"),
    "a class for an algorithm": ("algorithm", posttrain.Algorithm, "(type)"),
    "a function for a watcher": (
        "watchers",
        [print],
        "watchers: <built-in function print> (builtin_function_or_method).  Give a list of objects",
    ),
    "a class for a watcher": ("watchers", [posttrain.Watcher], "Watcher'> (type).  Give a list of objects"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_object_is_told_with_what_it_lacks(mistake: str, model: Path, tmp_path: Path) -> None:
    argument, wrong, says = WRONG[mistake]
    policy = policy_of(model)
    right: dict[str, Any] = {"policy": policy, "task": Sums(policy), "rewards": [rewarded_by_answer]}
    with refused(says):
        posttrain.train(config(tmp_path / "run"), **{**right, argument: wrong})
    assert not (tmp_path / "run").exists()


def test_a_task_of_ones_own_takes_no_rows_and_needs_a_reward(model: Path, tmp_path: Path) -> None:
    policy = policy_of(model)
    with refused("rows: ", "task"):
        posttrain.train(config(tmp_path / "run"), policy=policy, task=Sums(policy), rows=[{"prompt": "x"}])
    with refused("rewards: ", "task"):
        posttrain.train(config(tmp_path / "run"), policy=policy, task=Sums(policy))


def test_an_evaluation_takes_the_objects_of_a_run_and_gives_its_numbers(model: Path, tmp_path: Path) -> None:
    def objects() -> dict[str, Any]:
        policy = policy_of(model)
        algorithm = replace(grpo(), name="upside-down", credit=upside_down)
        return {"policy": policy, "task": Sums(policy), "engine": Counts(policy), "algorithm": algorithm}

    made = config(tmp_path / "run", 1, evaluation={"every_steps": 0, "samples": 8})
    of_run = objects()
    run = posttrain.train(made, **of_run, rewards=[dice])
    fresh = objects()
    before = posttrain.evaluate(config=made, **fresh, rewards=[dice])
    assert {call[0] for call in fresh["engine"].sampled} == {"evaluation"}
    assert fresh["engine"].versions == [0]
    numbers = ("num_problems", "accuracy_sampled", "accuracy_greedy", "pass_at_8", "mean_length")
    assert {name: before[name] for name in numbers} == {name: run.summary["before"][name] for name in numbers}
    assert before["num_problems"] == 3
    # The trained object, and the folder that it was saved to.
    after = posttrain.evaluate(config=made, **of_run, rewards=[dice])
    others = {name: each for name, each in fresh.items() if name != "policy"}
    of_folder = posttrain.evaluate(run.model_folder, made, **{**others, "engine": None}, rewards=[dice])
    assert after == of_folder
    assert {name: after[name] for name in numbers} == {name: run.summary["after"][name] for name in numbers}


def test_an_evaluation_is_of_one_model(model: Path, tmp_path: Path) -> None:
    policy = policy_of(model)
    with refused("evaluate", "policy="):
        posttrain.evaluate(config=config(tmp_path / "run"), task=Sums(policy), rewards=[dice])
    with refused("evaluate: model =", "policy"):
        posttrain.evaluate(model, config(tmp_path / "run"), policy=policy, task=Sums(policy), rewards=[dice])
    with refused("held_out"):
        posttrain.evaluate(model, config(tmp_path / "run"), task=Silent(), rewards=[dice])  # type: ignore[arg-type]


def test_an_evaluation_asks_nothing_of_the_reference(model: Path, tmp_path: Path) -> None:
    made = config(tmp_path / "run", reference={"refresh_every": 1})
    policy = policy_of(model)
    assert posttrain.evaluate(config=made, policy=policy, task=Sums(policy), rewards=[dice])["num_problems"] == 3


def test_a_plan_is_made_of_the_given_objects(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = policy_of(model)
    algorithm = replace(grpo(), name="upside-down")
    own = CallerObjects(policy=policy, task=Sums(policy), algorithm=algorithm, rewards=[rewarded_by_answer])
    show_rl_plan(config(tmp_path / "run"), own)
    printed = capsys.readouterr().out
    mentions(printed, "task       sums, 3 held-out", "algorithm  upside-down,", "rewards    rewarded_by_answer × 1")
    with refused("upside-down"):
        show_rl_plan(config(tmp_path / "run", reference={"refresh_every": 1}), own)
    assert not (tmp_path / "run").exists()


TESTS = {"kind": "calls", "entry": "add", "cases": [{"args": [1, 2], "expect": 3}]}
BAD_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "no answer can pass": ({"rows": [{"prompt": "add", "tests": TESTS}], "rewards": [CodeReward()]}, "rows:1"),
    "too long, and not drawn": (
        {"rows": [{"prompt": "1+1="}], "held_out_rows": [{"prompt": "1+1=" * 200}], "rewards": [dice]},
        "held_out_rows:1",
    ),
}


@pytest.mark.parametrize("bad", BAD_ROWS)
def test_a_plan_refuses_bad_rows(bad: str, model: Path, tmp_path: Path) -> None:
    objects, says = BAD_ROWS[bad]
    made = config(tmp_path / "run", task={"name": "dataset", "held_out_share": 0.0})
    with refused(says):
        show_rl_plan(made, CallerObjects(policy=policy_of(model), **objects))


def test_a_plan_says_what_to_change_where_memory_is_short_and_whose_template_is_used(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = policy_of(model)
    policy.tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (tmp_path / "unused.jinja").write_text("{{ messages }}")
    made = config(tmp_path / "run", task={"name": "dataset", "held_out_share": 0.0})
    made = replace(made, model=replace(made.model, chat_template=str(tmp_path / "unused.jinja")))
    own = CallerObjects(
        policy=policy,
        rows=[{"prompt": [{"role": "user", "content": "1+1="}]}],
        rewards=[lambda completions: [0.0] * len(completions)],
    )
    show_rl_plan(made, own, show_prompts=1)
    printed = capsys.readouterr().out
    assert "template   the model's own" in printed
    assert "will not fit" not in printed
    monkeypatch.setattr(report, "machine_memory", lambda *, on_cuda, ranks: MachineMemory(1, "RAM"))
    show_rl_plan(made, own)
    assert "this run will not fit" in capsys.readouterr().out


def adapted(policy: Policy) -> None:
    """Put an adapter into a policy's model, as `peft.inject_adapter_in_model` is called."""
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, policy.model)


def test_an_adapter_that_comes_later_is_refused_at_once_or_when_weights_are_loaded(model: Path, tmp_path: Path) -> None:
    policy = policy_of(model)
    engine = Counts(policy)
    own: dict[str, Any] = {"policy": policy, "task": Sums(policy), "engine": engine, "rewards": [dice]}
    with open_session(config(tmp_path / "run"), CallerObjects(**own)) as session:
        session.load_weights()
        adapted(policy)
        with refused("policy: its model has changed since"):
            session.load_weights()
    with refused("q_proj", "posttrain.as_policy"):
        posttrain.train(config(tmp_path / "run"), **own)
    assert engine.versions == [0]
    assert not (tmp_path / "run").exists()
