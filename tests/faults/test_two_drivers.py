"""Two drivers on one run folder: the second is refused in every phase of the first, which does not notice it."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.faults.phases import STEP_2, let_go, pausing, phase_recipe, tried, wait_for_pause
from tests.support.commands import called
from tests.support.runs import files_of, require_same, start

MOMENTS = {
    "before the first step": "call posttrain.training.collector:Collector.grade 1",
    **STEP_2,
    "export": "open .tmp-model/config.json 1",
}


def second_drivers(recipe: Path, run: Path) -> dict[str, Sequence[object]]:
    """The ways in which a second driver may come."""
    begun = {"the same recipe": (recipe,), "a new run in its place": (recipe, "--run.overwrite")}
    return {**begun, "a resume": ("--resume", run)} if (run / "config.yaml").exists() else begun


@pytest.mark.parametrize("phase", tried(MOMENTS, "checkpoint"))
def test_a_second_driver_is_refused_and_changes_nothing(one_driver: Path, phase: str) -> None:
    folder = one_driver / phase
    recipe, run = phase_recipe(folder), folder / "run"
    first = start("rl", recipe, folder=folder, accident=pausing(MOMENTS[phase]))
    wait_for_pause(first, folder)
    before = files_of(run)
    for how, arguments in second_drivers(recipe, run).items():
        ended = called("rl", *arguments)
        assert ended.code == 2, (how, ended.out, ended.err)
        assert f"process {first.process.pid} is writing to this run folder" in ended.err, how
        assert "Traceback" not in ended.err, how
        assert files_of(run) == before, how
    let_go(folder)
    ended = first.ended(60)
    assert ended.code == 0, ended.err
    require_same(run, one_driver / "whole" / "run")
