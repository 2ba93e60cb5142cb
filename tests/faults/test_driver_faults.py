"""A driver that is killed, or stopped for a while, in every phase of a step: the same bits, after a resume."""

import signal
import time
from pathlib import Path

import pytest

from tests.faults.phases import STEP_2, let_go, pausing, phase_recipe, tried, wait_for_pause
from tests.support.accidents import Accident
from tests.support.runs import command, require_same, save_tiny_model, start


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver-faults")
    save_tiny_model(folder / "model")
    return folder


@pytest.fixture(scope="module")
def undisturbed(place: Path) -> Path:
    ended = command("rl", phase_recipe(place / "whole"), folder=place / "whole")
    assert ended.code == 0, ended.err
    return place / "whole" / "run"


@pytest.mark.parametrize("phase", tried(STEP_2, "update"))
def test_a_driver_that_is_killed_is_resumed_to_the_same_bits(place: Path, undisturbed: Path, phase: str) -> None:
    folder = place / f"killed-{phase}"
    killed = command("rl", phase_recipe(folder), folder=folder, accident=Accident(moment=STEP_2[phase]))
    assert killed.code == -signal.SIGKILL
    resumed = command("rl", "--resume", folder / "run", folder=folder)
    assert resumed.code == 0, resumed.err
    assert "Resumed after step" in resumed.out
    require_same(folder / "run", undisturbed)


@pytest.mark.parametrize("phase", tried(STEP_2, "sampling"))
def test_a_driver_that_is_stopped_for_a_while_goes_on(place: Path, undisturbed: Path, phase: str) -> None:
    folder = place / f"stopped-{phase}"
    running = start("rl", phase_recipe(folder), folder=folder, accident=pausing(STEP_2[phase]))
    wait_for_pause(running, folder)
    running.signal(signal.SIGSTOP)
    let_go(folder)
    time.sleep(0.5)
    running.signal(signal.SIGCONT)
    ended = running.ended(60)
    assert ended.code == 0, ended.err
    require_same(folder / "run", undisturbed)
