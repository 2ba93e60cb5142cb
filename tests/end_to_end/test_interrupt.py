"""SIGINT and SIGTERM end a run after the step in progress, whole and ready to go on; a second one ends it at once."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.runs import (
    Command,
    command,
    metrics_of,
    require_same,
    save_tiny_model,
    start,
    tiny_recipe,
)

WAITING = """
import signal
import time
from pathlib import Path
from dice import dice

HERE = Path(__file__).parent
calls = []

def patient(completions, **columns):
    calls.append("call")
    if len(calls) == 2:  # after step 1
        (HERE / "in_step_2").touch()
        while not (HERE / "go").exists():
            time.sleep(0.01)
            if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
                (HERE / "first_signal_noted").touch()
    return dice(completions)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("interrupt")
    save_tiny_model(made / "model")
    return made


def in_step_2(place: Path) -> Command:
    """A run of three steps that waits in its second one until there is a file `go`."""
    sections = {"checkpoint": {"every_steps": 0}, "run": {"num_steps": 3}}
    recipe = tiny_recipe(place, **sections, rewards=[{"path": f"{place}/waiting.py:patient"}])
    (place / "waiting.py").write_text(WAITING)
    running = start("rl", recipe, folder=place)
    running.wait_until((place / "in_step_2").exists)
    return running


def steps_logged(run: Path) -> list[int]:
    journal = run / "metrics.jsonl"
    return [step["step"] for step in metrics_of(run)] if journal.exists() else []


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_a_signal_ends_the_run_after_its_step_and_resuming_makes_it_whole(folder: Path) -> None:
    place = folder / "stopped"
    running = in_step_2(place)
    running.signal(signal.SIGTERM)
    (place / "go").touch()
    ended = running.ended()
    run = place / "run"
    assert ended.code == 130
    assert ended.err == ""
    assert steps_logged(run) == [0, 1, 2]
    assert checkpoints(run) == ["step-000000", "step-000002"]
    assert "SIGTERM: stopped after step 2; everything is saved." in ended.out
    assert "posttrain rl --resume run\n" in ended.out  # as it is called where the command was typed
    assert not (run / "summary.json").exists()
    resumed = command("rl", "--resume", run, folder=place)
    assert resumed.code == 0, resumed.err
    assert steps_logged(run) == [0, 1, 2, 3]
    assert json.loads((run / "summary.json").read_text())["after"]["accuracy_sampled"] is not None


@pytest.mark.parametrize(("second", "code", "says"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, -15, "")])
def test_a_second_signal_ends_it_at_once(folder: Path, second: int, code: int, says: str) -> None:
    place = folder / f"at-once-{second}"
    running = in_step_2(place)
    running.signal(signal.SIGINT)
    running.wait_until((place / "first_signal_noted").exists)
    running.signal(second)
    ended = running.ended()
    assert ended.code == code
    assert ended.err.removeprefix("posttrain: ").strip() == says
    assert steps_logged(place / "run") == [0, 1]


def test_the_installed_program_is_killed_and_interrupted_the_same_way(folder: Path) -> None:
    """As a person runs it: an interpreter of its own, `python -m posttrain`, killed at an arbitrary moment."""
    place, whole = folder / "program", folder / "program-whole"
    arguments = [sys.executable, "-m", "posttrain", "rl"]
    run = place / "run"
    program = subprocess.Popen([*arguments, str(tiny_recipe(place))], stdout=subprocess.DEVNULL)
    while len(steps_logged(run)) < 3:
        assert program.poll() is None
        time.sleep(0.001)
    program.kill()
    assert program.wait(60) == -signal.SIGKILL
    resumed = subprocess.run([*arguments, "--resume", str(run)], capture_output=True, text=True, timeout=300)
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stderr == ""
    assert command("rl", tiny_recipe(whole), folder=whole).code == 0
    require_same(run, whole / "run")
