"""`posttrain compare` from end to end: equal budgets, one table, and nothing run twice."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain.cli import main
from posttrain.commands import cells
from posttrain.commands.cells import Cell
from tests.support.commands import refusal
from tests.support.refusals import mentions
from tests.support.runs import save_tiny_model, tiny_recipe

Stop = Callable[[int], bool]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two variants over one base, of a tiny model."""
    made = tmp_path_factory.mktemp("compare")
    save_tiny_model(made / "model")
    tiny_recipe(made / "base", evaluation={"every_steps": 1, "samples": 1, "brief_problems": 2})
    for name in ("grpo", "rloo"):
        (made / f"{name}.yaml").write_text(yaml.safe_dump({"algorithm": {"name": name}}))
    return made


def in_process(calls: list[Sequence[str]], stop: Stop = lambda number: False) -> Callable[..., None]:
    """Runs the command of a cell here; an interruption in place of those that `stop` names."""

    def run(command: Sequence[str], *, name: str, log: Path) -> None:
        calls.append(command)
        if stop(len(calls)):
            raise KeyboardInterrupt
        assert main([str(each) for each in command]) == 0

    return run


def compare(place: Path, folder: str, *more: str) -> int:
    recipes = [str(place / "grpo.yaml"), str(place / "rloo.yaml")]
    given = ["--base", str(place / "base" / "recipe.yaml"), "--budget", "tokens=100"]
    given += [] if "--seeds" in more else ["--seeds", "2"]
    return main(["compare", *recipes, *given, "--folder", str(place / folder), *more])


def lasting(place: Path, folder: str) -> list[dict[str, Any]]:
    """What the comparison found, without what no two runs share."""
    cells = json.loads((place / folder / "comparison.json").read_text())["cells"]
    timed = ("seconds", "training_seconds", "peak_memory_bytes")
    return [
        {name: value for name, value in cell.items() if name not in timed}
        | {"curve": [(tokens, accuracy) for tokens, _, accuracy in cell["curve"]]}
        for cell in cells
    ]


def test_every_cell_has_the_same_budget_and_a_stopped_comparison_goes_on_with_the_cells_that_are_left(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Sequence[str]] = []
    monkeypatch.setattr(cells, "run_posttrain", in_process(calls))
    assert compare(place, "whole") == 0
    told = capsys.readouterr().out
    mentions(told, "[4/4] rloo seed 1", "| rloo | 0, 1 |")
    assert len(calls) == 4

    whole = lasting(place, "whole")
    # 16 completions of 1 to 6 tokens a step: whole steps until 100 tokens or more are sampled, and no step beyond.
    assert all(100 <= cell["sampled_tokens"] < 100 + 16 * 6 for cell in whole)
    assert all(cell["curve"][-1][0] == cell["sampled_tokens"] for cell in whole)
    assert [cell["kl"]["per_completion"] for cell in whole] != [0.0] * 4  # the policies have moved
    assert (place / "whole" / "comparison.png").is_file()

    assert compare(place, "whole") == 0  # all is finished
    assert len(calls) == 4

    monkeypatch.setattr(cells, "run_posttrain", in_process(calls, stop=lambda number: number == 6))
    assert compare(place, "stopped", "--seeds", "1") == 130  # in the second cell
    assert compare(place, "stopped", "--seeds", "1") == 0
    assert lasting(place, "stopped") == whole[:2]


def test_a_cell_that_was_stopped_does_not_go_on_under_another_recipe(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Sequence[str]] = []
    monkeypatch.setattr(cells, "run_posttrain", in_process(calls))

    def stopped(cell: Cell) -> dict[str, float]:
        raise KeyboardInterrupt

    monkeypatch.setattr(cells, "kl_to_start", stopped)
    one = ("--seeds", "1", "--run.threads", "1")
    assert compare(place, "begun", *one) == 130  # the run is over, and nothing kept of it yet
    assert compare(place, "begun", *one, "--update.learning-rate", "1e-3") == 2
    assert "grpo-seed-0: was begun by another recipe than grpo seed 0 has now" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr(cells, "run_posttrain", in_process(calls))
    (place / "begun").rename(place / "moved")
    assert compare(place, "moved", *one) == 0
    assert [command[0] for command in calls] == ["rl", "rl"]  # one for each cell: the first was finished


def test_a_cell_that_fails_is_told_with_its_log(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "failing.py").write_text("def failing(completions, **columns):\n    raise ValueError('no score')\n")
    failing = ("--rewards", f"{place}/failing.py:failing")
    assert compare(place, "failing", *failing) == 1
    said = capsys.readouterr().err
    mentions(said, "grpo seed 0: `posttrain rl ", "ended with", "grpo-seed-0.cell.log")
    assert "no score" in (place / "failing" / "cells" / "grpo-seed-0.cell.log").read_text()


def test_a_dry_run_lists_the_runs_and_makes_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(place, "dry", "--dry-run") == 0
    said = capsys.readouterr().out
    mentions(said, "4 runs, each with a budget of 100 tokens", "rloo seed 1")
    assert not (place / "dry").exists()


def test_base_must_name_a_recipe() -> None:
    assert "--base names no recipe" in refusal("compare", "a.yaml", "--base", "--seeds", "2")
