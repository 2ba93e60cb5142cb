"""From Python: own rows and own functions, of every kind that the reward protocol knows."""

import ast
import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

import posttrain
from posttrain.errors import UserError
from posttrain.models.loading.new_model import new_tokenizer
from tests.support.dice import dice
from tests.support.refusals import refused
from tests.support.runs import require_same, save_tiny_model

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_model(tmp_path_factory.mktemp("api") / "model")
    tokenizer = new_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def config_for(model: Path, folder: Path, **sections: Mapping[str, Any]) -> posttrain.Config:
    given: dict[str, dict[str, Any]] = {
        "model": {"path": str(model)},
        "task": {"name": "dataset", "held_out_share": 0.0},
        "rollout": {"prompts_per_step": 3, "group_size": 4, "max_completion_tokens": 5},
        "update": {"learning_rate": 1e-2},
        "evaluation": {"every_steps": 0},
        "run": {"folder": str(folder), "num_steps": 1, "threads": 1},
    }
    for name, options in sections.items():
        given[name] = {**given.get(name, {}), **options}
    config = posttrain.load_recipe(**given)
    assert isinstance(config, posttrain.Config)
    return config


def first_step(run: posttrain.Run) -> list[dict[str, Any]]:
    return parquet.read_table(run.folder / "rollouts" / "step-000001.parquet").to_pylist()


ROWS = [{"prompt": f"{i} and {i} make ", "answer": i} for i in range(1, 7)]


async def patient(answer: Sequence[int], **columns: object) -> list[float]:
    await asyncio.sleep(0.001)
    return [float(a) for a in answer]


def only_even(answer: Sequence[int], **columns: object) -> list[float | None]:
    return [None if a % 2 else 10.0 for a in answer]


def never(completions: Sequence[str], **columns: object) -> list[None]:
    return [None] * len(completions)


def test_every_public_name_is_loaded_from_its_home_when_it_is_first_used() -> None:
    assert sorted(posttrain.HOMES) == sorted(posttrain.__all__) == sorted(dir(posttrain))
    for name in posttrain.__all__:
        defined = getattr(posttrain, name)
        assert defined.__name__ == name
        assert f"{defined.__module__}.".startswith(f"{posttrain.HOMES[name]}.")  # there, or in its package
    with refused("has no attribute 'trian'", error=AttributeError):
        _ = posttrain.trian
    for_type_checkers = {
        alias.name: str(node.module)
        for node in ast.walk(ast.parse(Path(posttrain.__file__).read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("posttrain.")
        for alias in node.names
    }
    assert for_type_checkers == posttrain.HOMES


def test_importing_the_package_loads_nothing_heavy_and_a_light_name_nothing_but_its_own() -> None:
    program = (
        "import sys, posttrain; heavy = {'torch', 'transformers', 'numpy', 'pydantic'};"
        " print(*sorted(heavy & set(sys.modules))); posttrain.reward_function;"
        " print('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split("\n")[:2] == ["", "False"]


def test_functions_of_every_kind_add_up_with_their_weights(model: Path, tmp_path: Path) -> None:
    rewards = [
        patient,
        posttrain.reward_function(only_even, weight=0.5, name="even"),
        posttrain.reward_function(dice, name="watched", weight=0.0),
        never,
    ]
    run = posttrain.train(config_for(model, tmp_path / "run"), rows=ROWS, rewards=rewards)
    for row in first_step(run):
        answer = json.loads(row["columns"])["answer"]
        assert row["score/patient"] == answer
        assert row["score/even"] == (None if answer % 2 else 10.0)
        assert row["score/watched"] == dice([row["completion"]])[0]
        assert row["score/never"] is None
        assert row["reward"] == answer + (0.0 if answer % 2 else 5.0)


def test_a_step_that_nothing_scored_changes_no_weight(model: Path, tmp_path: Path) -> None:
    run = posttrain.train(config_for(model, tmp_path / "run"), rows=ROWS, rewards=[never])
    assert {row["reward"] for row in first_step(run)} == {None}
    policies = [tmp_path / "run" / "checkpoints" / f"step-00000{step}" / "policy.safetensors" for step in (0, 1)]
    assert policies[0].read_bytes() == policies[1].read_bytes()


def test_conversations_reach_the_function_as_messages(model: Path, tmp_path: Path) -> None:
    seen: list[tuple[Any, Any]] = []

    def look(prompts: list[Any], completions: list[Any]) -> list[float]:
        seen.extend(zip(prompts, completions, strict=True))
        return dice([messages[0]["content"] for messages in completions])

    rows = [{"prompt": [{"role": "user", "content": "Hello?"}]}, {"prompt": [{"role": "user", "content": "Who?"}]}]
    config = config_for(model, tmp_path / "run", task={"prefill": "So"}, rollout={"prompts_per_step": 2})
    row = first_step(posttrain.train(config, rows=rows, rewards=[look]))[0]
    assert row["prompt"] in ("user: Hello?\nassistant: So", "user: Who?\nassistant: So")
    assert {prompt[0]["content"] for prompt, _ in seen} == {"Hello?", "Who?"}
    assert all(answer[0]["role"] == "assistant" and answer[0]["content"].startswith("So") for _, answer in seen)


def test_two_runs_in_one_process_do_not_know_of_each_other(model: Path, tmp_path: Path) -> None:
    sections = {"algorithm": {"name": "dapo"}, "run": {"num_steps": 2, "threads": 1}}
    for name in ("first", "second"):
        folder = tmp_path / name / "run"
        posttrain.train(config_for(model, folder, **_in(sections, folder)), rows=ROWS, rewards=[dice])
    require_same(tmp_path / "first" / "run", tmp_path / "second" / "run")


def _in(sections: Mapping[str, Mapping[str, Any]], folder: Path) -> dict[str, dict[str, Any]]:
    return {**{k: dict(v) for k, v in sections.items()}, "run": {**sections["run"], "folder": str(folder)}}


def test_a_run_from_python_is_resumed_from_python(model: Path, tmp_path: Path) -> None:
    def trained(name: str, *lengths: int) -> Path:
        for resume, num_steps in enumerate(lengths):
            config = config_for(model, tmp_path / name, run={"num_steps": num_steps, "folder": str(tmp_path / name)})
            posttrain.train(config, rows=ROWS, rewards=[dice], resume=bool(resume))
        return tmp_path / name

    parts, whole = trained("parts", 1, 3), trained("whole", 3)
    for name in ("step-000003/policy.safetensors", "step-000003/optimizer.safetensors"):
        assert (parts / "checkpoints" / name).read_bytes() == (whole / "checkpoints" / name).read_bytes()


def test_an_evaluation_gives_rates_with_their_intervals(model: Path, tmp_path: Path) -> None:
    config = config_for(model, tmp_path / "none", task={"held_out_share": 0.5}, evaluation={"samples": 8})
    results = posttrain.evaluate(model, config, rows=[{"prompt": f"Say {i}. "} for i in range(30)], rewards=[dice])
    for name in ("accuracy_sampled", "accuracy_greedy", "pass_at_8"):
        low, high = results[f"{name}_interval"]
        assert 0 <= low <= results[name] <= high <= 1
    assert results["accuracy_sampled"] < results["pass_at_8"]
    assert not (tmp_path / "none").exists()


def test_mistakes_are_errors_with_a_message(model: Path, tmp_path: Path) -> None:
    with refused("rewards: the task has no reward function of its own, and none is given"):
        posttrain.train(config_for(model, tmp_path / "a"), rows=ROWS)
    with refused("reward 'dice': weight = inf: must be a finite number"):
        posttrain.reward_function(dice, weight=float("inf"))


def test_a_run_resumed_from_python_keeps_its_recipe_and_says_how_long_it_now_is(model, tmp_path):
    config = config_for(model, tmp_path / "run")
    posttrain.train(config, rows=ROWS, rewards=[patient])
    other = config_for(model, tmp_path / "run", rollout={"temperature": 0.5})
    with refused("differs from the run's own in rollout"):
        posttrain.train(other, rows=ROWS, rewards=[patient], resume=True)
    longer = config_for(model, tmp_path / "run", run={"num_steps": 2})
    run = posttrain.train(longer, rows=ROWS, rewards=[patient], resume=True)
    assert (run.folder / "rollouts" / "step-000002.parquet").is_file()
    saved = posttrain.load_recipe(run.folder / "config.yaml")
    assert isinstance(saved, posttrain.Config)
    assert saved.run.num_steps == 2


def test_an_error_of_a_reward_may_be_counted_instead_of_stopping_the_run(model, tmp_path):
    def odd_ones_fail(answer: Sequence[int], **columns: object) -> list[float]:
        return [float("nan") if a % 2 else 1.0 for a in answer]

    with refused("nan"):
        posttrain.train(config_for(model, tmp_path / "stops"), rows=ROWS, rewards=[odd_ones_fail])
    # All rows are even ones, or more than 5 % of the scores would be missing and that stops a run as well.
    even = [row for row in ROWS if row["answer"] % 2 == 0]
    config = config_for(model, tmp_path / "run", rollout={"on_reward_error": "none"})
    run = posttrain.train(config, rows=even, rewards=[odd_ones_fail])
    assert all(row["score/odd_ones_fail"] == 1.0 for row in first_step(run))


def test_a_row_that_is_too_long_is_refused_before_anything_is_trained(model, tmp_path, monkeypatch):
    monkeypatch.setattr("posttrain.tasks.dataset.LONG_ROWS", 1)  # so that it must be the longest that is looked at
    rows = [*ROWS, {"prompt": "7 " * 600, "answer": 7}]
    with pytest.raises(UserError, match=r"prompt .?rows:7.?: .*(tokens|characters)"):
        posttrain.train(config_for(model, tmp_path / "run"), rows=rows, rewards=[patient])
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_calls_the_rewards_for_its_own_steps_only(model, tmp_path):
    asked: list[int] = []

    def counted(completions: Sequence[str], **columns: object) -> list[float]:
        asked.append(len(completions))
        return [float(len(text)) for text in completions]

    posttrain.train(config_for(model, tmp_path / "run"), rows=ROWS, rewards=[counted])
    assert asked == [12], "one step, which is collected once"
    longer = config_for(model, tmp_path / "run", run={"num_steps": 2})
    posttrain.train(longer, rows=ROWS, rewards=[counted], resume=True)
    assert asked == [12, 12]
