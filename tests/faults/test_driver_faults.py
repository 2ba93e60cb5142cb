"""A driver that is killed, or stopped for a while, in every phase of a step: the same bits, after a resume."""

import signal
import time
from pathlib import Path

import pytest

from tests.faults.phases import STEP_2, let_go, pausing, phase_recipe, tried, wait_for_pause
from tests.support.accidents import Accident
from tests.support.runs import command, require_same, start


@pytest.mark.parametrize("phase", tried(STEP_2, "update"))
def test_a_driver_that_is_killed_is_resumed_to_the_same_bits(one_driver: Path, phase: str) -> None:
    folder = one_driver / f"killed-{phase}"
    killed = command("rl", phase_recipe(folder), folder=folder, accident=Accident(moment=STEP_2[phase]))
    assert killed.code == -signal.SIGKILL
    resumed = command("rl", "--resume", folder / "run", folder=folder)
    assert resumed.code == 0, resumed.err
    assert "Resumed after step" in resumed.out
    require_same(folder / "run", one_driver / "whole" / "run")


@pytest.mark.parametrize("phase", tried(STEP_2, "sampling"))
def test_a_driver_that_is_stopped_for_a_while_goes_on(one_driver: Path, phase: str) -> None:
    folder = one_driver / f"stopped-{phase}"
    running = start("rl", phase_recipe(folder), folder=folder, accident=pausing(STEP_2[phase]))
    wait_for_pause(running, folder)
    running.signal(signal.SIGSTOP)
    let_go(folder)
    time.sleep(0.5)
    running.signal(signal.SIGCONT)
    ended = running.ended(60)
    assert ended.code == 0, ended.err
    require_same(folder / "run", one_driver / "whole" / "run")
