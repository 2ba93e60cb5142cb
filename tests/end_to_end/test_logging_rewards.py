"""What reward functions log of a run: in its metrics, its journal and its rollouts, the same when it is resumed."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

import posttrain
from posttrain.generation.groups import sample_groups
from posttrain.rewards.grading.function import TrainerState
from posttrain.runs.prompt_preview import graded_lines
from posttrain.training.caller_objects import CallerObjects
from posttrain.training.session import open_session
from tests.support.pages import documented
from tests.support.runs import metrics_of, save_tiny_model, untimed

ROWS = [{"prompt": f"{i} and {i} make ", "answer": i} for i in range(1, 9)]
HELD_OUT = [{"prompt": "9 and 9 make ", "answer": 9}]
STATES: list[TrainerState] = []


def lengths(completions: Sequence[str], log_extra: Any, log_metric: Any, trainer_state: TrainerState) -> list[float]:
    STATES.append(trainer_state)
    log_extra("letters", [sum(map(str.isalpha, text)) for text in completions])
    log_metric("shortest", min(map(len, completions)))
    log_metric("progress", trainer_state.global_step / trainer_state.max_steps)
    return [float(len(text)) for text in completions]


def config(model: Path, folder: Path) -> posttrain.Config:
    made = posttrain.load_recipe(
        model={"path": str(model)},
        task={"name": "dataset"},
        algorithm={"name": "grpo", "reward_aggregation": "normalize_then_sum"},
        rollout={"prompts_per_step": 4, "group_size": 3, "max_completion_tokens": 5},
        update={"learning_rate": 1e-2},
        evaluation={"every_steps": 2, "samples": 2, "brief_problems": 1},
        checkpoint={"every_steps": 1, "keep_last": 9},
        run={"folder": str(folder), "num_steps": 3, "threads": 1},
    )
    assert isinstance(made, posttrain.Config)
    return made


def own() -> dict[str, Any]:
    return {"rows": ROWS, "held_out_rows": HELD_OUT, "rewards": [lengths, lengths]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("logging") / "model")


@pytest.fixture(scope="module")
def run(model: Path) -> Path:
    return posttrain.train(config(model, model.parent / "run"), **own()).folder


def test_metrics_have_what_was_logged_beside_ours_and_of_each_function_apart(run: Path) -> None:
    lines = metrics_of(run)
    assert [line["logged/lengths/progress"] for line in lines[1:]] == [0, 1 / 3, 2 / 3]
    assert [line["eval/logged/lengths_2/progress"] for line in (lines[0], lines[2])] == [0, 2 / 3]
    assert lines[1]["logged/lengths/shortest"] == lines[1]["logged/lengths_2/shortest"]
    assert all(documented(name) for line in lines for name in line if "logged" in name)
    after = json.loads((run / "summary.json").read_text())["after"]
    assert after["logged"]["lengths/progress"] == 1


def test_rewards_are_told_how_far_the_run_is(run: Path) -> None:
    assert {(state.global_step, state.max_steps, state.epoch) for state in STATES} == {
        (0, 3, 0.0), (1, 3, 0.5), (2, 3, 1.0), (3, 3, 1.5)
    }  # fmt: skip


def test_every_completion_has_what_was_logged_of_it(run: Path) -> None:
    for row in parquet.read_table(run / "rollouts" / "step-000002.parquet").to_pylist():
        assert row["extra/lengths_2/letters"] == sum(map(str.isalpha, row["completion"]))


def test_a_step_that_is_taken_again_is_journalled_again_word_for_word(run: Path, model: Path) -> None:
    journal, metrics = (run / "scores.jsonl").read_text(), [untimed(line) for line in metrics_of(run)]
    assert '"extra"' in journal
    posttrain.train(config(model, run), **own(), resume=True, from_step=1)
    assert (run / "scores.jsonl").read_text() == journal
    assert [untimed(line) for line in metrics_of(run)] == metrics


def test_what_is_shown_of_a_completion_has_it_too(model: Path, tmp_path: Path) -> None:
    with open_session(config(model, tmp_path / "other"), CallerObjects(**own())) as session:
        (group,) = sample_groups(session.engine, session.task.held_out(), session.collector.request(1))
        grades = session.collector.grade([group])
        lines = graded_lines(group, grades, 0, session.policy.tokenizer)
    letters = sum(map(str.isalpha, group.rollouts[0].text))
    assert lines[-2:] == [f"logged     lengths: letters = {letters}", f"logged     lengths_2: letters = {letters}"]
