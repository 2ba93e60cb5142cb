"""A run taken step by step is the run that `train` makes, and leaving it early is an interruption."""

import json
from pathlib import Path
from typing import Any

import pytest

import posttrain
from posttrain.errors import UserError
from posttrain.runs.reports import CheckpointReport, EndReport
from tests.support.dice import dice
from tests.support.refusals import refused
from tests.support.runs import require_same, untimed

ROWS = [{"prompt": f"Throw {n}. "} for n in range(12)]


def config(model: Path, folder: Path) -> posttrain.Config:
    return posttrain.load_recipe(
        model={"path": str(model)},
        task={"name": "dataset", "held_out_share": 0.2},
        rollout={"prompts_per_step": 2, "group_size": 4, "max_completion_tokens": 4},
        update={"learning_rate": 1e-2},
        evaluation={"every_steps": 2, "samples": 1, "brief_problems": 2},
        checkpoint={"every_steps": 2, "keep_last": 1, "keep_best": False},
        run={"folder": str(folder), "num_steps": 4, "threads": 1},
    )


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run that `train` makes."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    return posttrain.train(config(model, folder), rows=ROWS, rewards=[dice]).folder


class Ends(posttrain.Watcher):
    """Notes which steps are saved, and how the run ends."""

    def __init__(self) -> None:
        self.saved: list[int] = []
        self.interrupted: list[bool] = []

    def on_save(self, report: CheckpointReport) -> None:
        self.saved.append(report.step)

    def on_end(self, report: EndReport) -> None:
        self.interrupted.append(report.interrupted)


def test_a_run_taken_step_by_step_is_the_run_of_train(model: Path, trained: Path, tmp_path: Path) -> None:
    with posttrain.steps(config(model, tmp_path / "run"), rows=ROWS, rewards=[dice]) as steps:
        assert not (tmp_path / "run").exists()  # nothing is done before the first step is asked for
        records = list(steps)
        assert steps.run is not None
        assert (steps.run.folder, steps.run.interrupted) == (tmp_path / "run", False)
        assert steps.run.summary["after"]
    require_same(tmp_path / "run", trained)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][1:-1]
    told = [{"step": record.step, **record.metrics, "num_non_finite": 0} for record in records]
    assert [untimed(each) for each in told] == [untimed(line) for line in lines]
    assert all(record.seconds["update"] > 0 and len(record.groups) == 2 for record in records)


def test_what_is_left_early_is_saved_let_go_of_and_resumed_to_the_same_bits(
    model: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, ends = config(model, tmp_path / "run"), Ends()
    steps = posttrain.steps(made, rows=ROWS, rewards=[dice], watchers=[ends])
    assert [next(steps).step for _ in range(3)] == [1, 2, 3]
    with refused("another"):  # one writer
        next(posttrain.steps(made, rows=ROWS, rewards=[dice], resume=True))
    steps.close()
    steps.close()
    assert (ends.saved, ends.interrupted) == ([0, 2, 3], [True])  # step 3 was not due
    assert "closed: stopped after step 3; everything is saved." in capsys.readouterr().out
    assert list(steps) == []
    assert steps.run is None

    for record in posttrain.steps(made, rows=ROWS, rewards=[dice], resume=True):
        assert record.step == 4
    require_same(tmp_path / "run", trained)


def test_a_step_that_was_saved_is_not_saved_again_and_an_error_between_steps_leaves_the_run_to_be_resumed(
    model: Path, tmp_path: Path
) -> None:
    ends = Ends()

    def stopped_in_between() -> None:
        with posttrain.steps(config(model, tmp_path / "run"), rows=ROWS, rewards=[dice], watchers=[ends]) as steps:
            for record in steps:
                if record.step == 2:
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        stopped_in_between()
    assert (ends.saved, ends.interrupted) == ([0, 2], [True])
    assert (tmp_path / "run" / "checkpoints" / "step-000002").is_dir()


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"reward": [dice]}, UserError, "there is no argument `reward`.*rewards"),
        ({"watchers": [Ends]}, UserError, "watchers: .*Ends.*a list of objects"),
        ({"from_step": 2}, UserError, "from_step = 2: only a resumed run"),
        ({"policy": 3}, UserError, "policy: 3 .*is not a Policy"),
    ],
)
def test_a_mistake_in_the_arguments_is_told_at_once(given: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        posttrain.steps(posttrain.Config(), **given)
