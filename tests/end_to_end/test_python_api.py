"""From Python: own rows and own functions of every kind, and runs taken step by step."""

import ast
import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import posttrain
from posttrain.errors import UserError
from posttrain.models.loading.new_model import new_tokenizer
from tests.support.dice import dice
from tests.support.own_objects import ROWS, Notes, config_for
from tests.support.refusals import refused
from tests.support.runs import records, require_same, rollout_rows, save_tiny_model, untimed

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_model(tmp_path_factory.mktemp("api") / "model")
    tokenizer = new_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


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
    for row in rollout_rows(run.folder, 1):
        answer = json.loads(row["columns"])["answer"]
        assert row["score/patient"] == answer
        assert row["score/even"] == (None if answer % 2 else 10.0)
        assert row["score/watched"] == dice([row["completion"]])[0]
        assert row["score/never"] is None
        assert row["reward"] == answer + (0.0 if answer % 2 else 5.0)


def test_a_weight_that_is_no_number_is_refused() -> None:
    with refused("reward 'dice': weight = inf: must be a finite number"):
        posttrain.reward_function(dice, weight=float("inf"))


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


THROWS = [{"prompt": f"Throw {n}. "} for n in range(12)]


def config(model: Path, folder: Path) -> posttrain.Config:
    return config_for(
        model,
        folder,
        task={"held_out_share": 0.2},
        rollout={"prompts_per_step": 2, "max_completion_tokens": 4},
        evaluation={"every_steps": 2, "samples": 1, "brief_problems": 2},
        checkpoint={"every_steps": 2, "keep_last": 1, "keep_best": False},
        run={"num_steps": 4},
    )


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run that `train` makes."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    return posttrain.train(config(model, folder), rows=THROWS, rewards=[dice]).folder


def test_a_run_taken_step_by_step_is_the_run_of_train(model: Path, trained: Path, tmp_path: Path) -> None:
    with posttrain.steps(config(model, tmp_path / "run"), rows=THROWS, rewards=[dice]) as steps:
        assert not (tmp_path / "run").exists()  # nothing is done before the first step is asked for
        told = list(steps)
        assert (steps.run.folder, steps.run.interrupted) == (tmp_path / "run", False)
        assert steps.run.summary["after"]
    require_same(tmp_path / "run", trained)
    lines = records(tmp_path / "run" / "metrics.jsonl")[1:-1]
    metrics = [{"step": record.step, **record.metrics, "num_non_finite": 0} for record in told]
    assert [untimed(each) for each in metrics] == [untimed(line) for line in lines]
    assert all(record.seconds["update"] > 0 and len(record.groups) == 2 for record in told)


def test_what_is_left_early_is_saved_let_go_of_and_resumed_to_the_same_bits(
    model: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, notes = config(model, tmp_path / "run"), Notes()
    steps = posttrain.steps(made, rows=THROWS, rewards=[dice], watchers=[notes])
    assert [next(steps).step for _ in range(3)] == [1, 2, 3]
    with refused("another"):  # one writer
        next(posttrain.steps(made, rows=THROWS, rewards=[dice], resume=True))
    steps.close()
    steps.close()
    assert [step for step, _ in notes.saves] == [0, 2, 3], "step 3 was not due"
    assert [(end.interrupted, end.summary) for end in notes.ends] == [(True, {})]
    assert "closed: stopped after step 3; everything is saved." in capsys.readouterr().out
    assert list(steps) == []
    assert steps.run is None

    for record in posttrain.steps(made, rows=THROWS, rewards=[dice], resume=True):
        assert record.step == 4
    require_same(tmp_path / "run", trained)


def test_a_saved_step_is_not_saved_again_where_an_error_ends_the_run(model: Path, tmp_path: Path) -> None:
    notes = Notes()

    def stopped_in_between() -> None:
        with posttrain.steps(config(model, tmp_path / "run"), rows=THROWS, rewards=[dice], watchers=[notes]) as steps:
            for record in steps:
                if record.step == 2:
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        stopped_in_between()
    assert ([step for step, _ in notes.saves], [end.interrupted for end in notes.ends]) == ([0, 2], [True])
    assert (tmp_path / "run" / "checkpoints" / "step-000002").is_dir()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"reward": [dice]}, ("no such argument: `reward`", "rewards")),
        ({"from_step": 2}, ("from_step = 2: only a resumed run",)),
    ],
)
def test_a_mistake_in_the_arguments_is_told_at_once(given: Any, says: tuple[str, ...]) -> None:
    with refused(*says):
        posttrain.steps(posttrain.Config(), **given)
