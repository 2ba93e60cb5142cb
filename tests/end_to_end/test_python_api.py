"""From Python: own rows and own functions, of every kind that the reward protocol knows."""

import ast
import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

import posttrain
from posttrain.errors import UserError
from posttrain.models.loading.new_model import new_tokenizer
from tests.support.dice import dice
from tests.support.own_objects import ROWS, config_for
from tests.support.refusals import refused
from tests.support.runs import save_tiny_model

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_model(tmp_path_factory.mktemp("api") / "model")
    tokenizer = new_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def first_step(run: posttrain.Run) -> list[dict[str, Any]]:
    return parquet.read_table(run.folder / "rollouts" / "step-000001.parquet").to_pylist()


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
