"""SIGINT and SIGTERM end a run after the step in progress, whole and ready to go on; a second one ends it at once."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.accidents import Accident
from tests.support.refusals import refused
from tests.support.runs import Command, command, metrics_of, start, tiny_recipe

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
            if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
                (HERE / "first_signal_noted").touch()
    return dice(completions)
"""


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
    assert ended.err == "SIGTERM: the run stops after step 2 and saves it.  Interrupt again to stop immediately.\n"
    assert steps_logged(run) == [0, 1, 2]
    assert checkpoints(run) == ["step-000000", "step-000002"]
    assert "SIGTERM: stopped after step 2; everything is saved." in ended.out
    assert "posttrain rl --resume run\n" in ended.out  # as it is called where the command was typed
    assert not (run / "summary.json").exists()
    resumed = command("rl", "--resume", run, folder=place)
    assert resumed.code == 0, resumed.err
    assert steps_logged(run) == [0, 1, 2, 3]
    assert json.loads((run / "summary.json").read_text())["after"]["accuracy_sampled"] is not None


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_it_at_once(folder: Path, second: signal.Signals) -> None:
    place = folder / f"at-once-{second}"
    running = in_step_2(place)
    running.signal(signal.SIGINT)
    running.wait_until((place / "first_signal_noted").exists)
    running.signal(second)
    ended = running.ended()
    assert ended.code == 130
    assert ended.err == (
        "SIGINT: the run stops after step 2 and saves it.  Interrupt again to stop immediately.\n"
        f"posttrain: {second.name}: interrupted.  Kept: step 0 and everything before it.  Continue with"
        "   posttrain rl --resume run   (in Python train(config, resume=True))\n"
    )
    assert steps_logged(place / "run") == [0, 1]


NOTHING_KEPT = "interrupted.  Nothing of this run is kept yet.  Start again with   posttrain rl "
EARLY = {
    "loading": "open .posttrain.lock 1",
    "first rewards": "dice call 1",
    "measured": "os.rename .tmp-config.yaml 1",
}


@pytest.mark.parametrize(("moment", "by"), zip(EARLY, (signal.SIGINT, signal.SIGTERM, signal.SIGINT), strict=True))
def test_a_signal_before_the_first_step_ends_a_run_at_once(folder: Path, moment: str, by: signal.Signals) -> None:
    place = folder / f"{moment.replace(' ', '-')}-{by}"
    recipe = tiny_recipe(place)
    ended = command("rl", recipe, folder=place, accident=Accident(moment=EARLY[moment], signal=by))
    assert (ended.code, ended.err) == (130, f"posttrain: {by.name}: {NOTHING_KEPT}{recipe}\n")
    assert not (place / "run" / "checkpoints").exists()


def test_a_signal_while_a_run_is_loaded_again_says_what_is_kept(folder: Path) -> None:
    place = folder / "again"
    assert command("rl", tiny_recipe(place, run={"num_steps": 1}), folder=place).code == 0
    for moment in ("open .posttrain.lock 1", "dice call 1"):
        accident = Accident(moment=moment, signal=signal.SIGTERM)
        ended = command("rl", "--resume", "run", "--run.num-steps", "2", folder=place, accident=accident)
        assert ended.code == 130
        if moment.startswith("open"):
            assert ended.err == (
                "posttrain: SIGTERM: interrupted.  Kept: step 1 and everything before it.  Continue with"
                "   posttrain rl --resume run   (in Python train(config, resume=True))\n"
            )
        else:  # in a step it waits for the end of that
            assert (
                ended.err == "SIGTERM: the run stops after step 2 and saves it.  Interrupt again to stop immediately.\n"
            )
            assert "SIGTERM: stopped after step 2; everything is saved." in ended.out


def test_a_signal_leaves_the_earlier_run_in_a_folder_that_was_to_be_overwritten(folder: Path) -> None:
    place = folder / "overwrite"
    recipe = tiny_recipe(place, run={"num_steps": 1})
    assert command("rl", recipe, folder=place).code == 0
    accident = Accident(moment="dice call 1", signal=signal.SIGTERM)
    ended = command("rl", recipe, "--run.overwrite", folder=place, accident=accident)
    assert (ended.code, ended.err) == (130, f"posttrain: SIGTERM: {NOTHING_KEPT}{recipe} --run.overwrite\n")
    assert steps_logged(place / "run") == [0, 1]


STAND_IN = """#!{python}
import os, signal, sys, time
from pathlib import Path

told = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: told.append(number))
Path("pid").write_text(str(os.getpid()))
while not told:
    time.sleep(0.01)
Path("told").write_text("1")
ends = time.monotonic() + {rest}
while len(told) < 2 and time.monotonic() < ends:
    time.sleep(0.01)  # the rest of a step
print(f"told {{len(told)}} times", flush=True)
sys.exit(130)
"""
RUNNER = """
import sys
from pathlib import Path
from posttrain.runs.interruption import KeptWork, run_posttrain
from posttrain.runs.interruption import stopped_with_a_word

sys.executable = "./stand-in"
with stopped_with_a_word(lambda: KeptWork("Kept: the first.")):
    run_posttrain(["rl"], name="cell", log=Path("log"), show=print)
"""


def wait_for(file: Path) -> int:
    """The process number that a file comes to hold."""
    ends = time.monotonic() + 30
    while not (file.is_file() and file.read_text()):
        assert time.monotonic() < ends, "it has not begun"
        time.sleep(0.01)
    return int(file.read_text())


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("of", ["a terminal", "the process", "twice"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_run_is_told_once_and_waited_for(tmp_path: Path, number: signal.Signals, of: str) -> None:
    """A terminal's Ctrl-C goes to all processes of its group: what runs in it would be told twice, and save nothing."""
    script = tmp_path / "stand-in"
    twice = of == "twice" and number == signal.SIGINT  # a second SIGTERM is not for the program to decide about
    script.write_text(STAND_IN.format(python=sys.executable, rest=20 if twice else 0.5))
    script.chmod(0o755)
    runner = subprocess.Popen(
        [sys.executable, "-c", RUNNER], cwd=tmp_path, start_new_session=True, stderr=subprocess.PIPE, text=True
    )
    child = wait_for(tmp_path / "pid")
    if of == "a terminal":
        os.killpg(runner.pid, number)
    else:
        runner.send_signal(number)
    if twice:
        wait_for(tmp_path / "told")
        runner.send_signal(number)
    _, said = runner.communicate(timeout=30)
    assert not is_running(child)
    assert f"StoppedAtOnce: {number.name}: interrupted.  Kept: the first." in said
    assert "cell: it stops after its current step.  Interrupt again to stop immediately.\n" in said
    assert (tmp_path / "log").read_text() == f"told {1 + twice} times\n"


def test_the_last_words_are_those_of_this_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from posttrain.errors import RunError
    from posttrain.runs.interruption import run_posttrain

    script = tmp_path / "stand-in"
    monkeypatch.setattr(sys, "executable", str(script))
    for says, told in (("echo of this", "of this"), ("true", "")):
        script.write_text(f"#!/bin/sh\n{says}\nexit 2\n")
        script.chmod(0o755)
        (tmp_path / "log").write_text("of an earlier one\n")
        with refused(
            f"cell: `posttrain rl x` ended with 2: {told}\n", "Its output is in", "log", error=RunError
        ) as error:
            run_posttrain(["rl", "x"], name="cell", log=tmp_path / "log")
        assert "of an earlier one" not in str(error.value)
    assert (tmp_path / "log").read_text() == "of an earlier one\n"
