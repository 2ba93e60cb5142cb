"""Commands as processes: a signal for each that whoever runs them got, none left running, their own last words."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.refusals import refused

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
from posttrain.runs.interruption import GOES_ON, run_posttrain
from posttrain.runs.interruption import stopped_with_a_word

sys.executable = "./stand-in"
with stopped_with_a_word(lambda: GOES_ON):
    run_posttrain(["rl"], name="cell", log=Path("log"))
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
    assert f"StoppedAtOnce: {number.name}: interrupted.  Finished parts are kept" in said
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
