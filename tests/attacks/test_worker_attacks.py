"""Reward functions that crash, print, hold on or leave things behind, and trainers that die: what workers leave."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from posttrain.errors import RunError
from posttrain.rewards.grading.grade import grade
from posttrain.rewards.grading.resources import default_resources
from tests.soak import COMPLETIONS, PROGRAMS, soak, soak_workers
from tests.support.refusals import refused
from tests.support.reward_rows import group
from tests.support.worker_rows import function_of

ROOT = Path(__file__).parents[2]

TALKS = """
for descriptor in range(3, 64):
    try:
        os.write(descriptor, b"\\x05\\0\\0\\0hello")
    except OSError:
        pass
time.sleep(60)
"""
IGNORES = """
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
while True:
    try:
        time.sleep(60)
    except BaseException:
        pass
"""
CRASHES = {
    "os._exit(0)": "exited with 0",
    "resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); ctypes.string_at(0)": "ended by SIGSEGV",
    "os.kill(os.getpid(), signal.SIGKILL)": "ended by SIGKILL",
    "os.closerange(0, 256); time.sleep(60)": "ended by SIGKILL",
    TALKS: "ended by SIGKILL",
    IGNORES: "item_seconds = 1",
}
CRASHING = """
import ctypes, os, resource, signal, time

def mine(response):
    if response == "bad":
{}
    return 1.0
"""

PIDS = """
import os, pathlib, subprocess, time

def mine(response):
    here = pathlib.Path(__file__).parent
    child = subprocess.Popen(["sleep", "300"])
    (here / f"pids-{os.getpid()}").write_text(f"{os.getpid()} {child.pid}")
    while response == "hang":
        time.sleep(0.01)
    return 1.0
"""

TRAINER = """
import sys
from pathlib import Path
from posttrain.options.reward import RewardOptions
from posttrain.rewards.grading.grade import grade
from posttrain.rewards.reward_registry import load_reward
from tests.support.reward_rows import group

if __name__ == "__main__":
    function = load_reward(RewardOptions(path=sys.argv[1] + ":mine", workers=2))
    grade([group(sys.argv[2:])], [function])
    print("graded", flush=True)
"""


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("posttrain.rewards.grading.grade.RETRY_WAITS_SECONDS", (0.0, 0.0))
    yield
    default_resources().close()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if holds():
            return True
        time.sleep(0.01)
    return holds()


def pids(folder: Path) -> list[tuple[int, int]]:
    """The workers that have been asked, and the process that each has started last."""
    texts = [file.read_text().split() for file in folder.glob("pids-*")]
    return [(int(text[0]), int(text[1])) for text in texts if len(text) == 2]


@pytest.mark.parametrize("crash", CRASHES)
def test_a_crash_costs_its_own_score_and_no_other(tmp_path: Path, crash: str) -> None:
    source = CRASHING.format(textwrap.indent(crash, " " * 8))
    function = function_of(tmp_path, source, workers=2, item_seconds=1.0)
    grades = grade([group(["a"] * 10 + ["bad"] + ["b"] * 10)], [function])
    assert grades.scores[0, 0].isnan().nonzero().flatten().tolist() == [10]
    assert grades.scores.nansum() == 20
    with refused("1 of 1", CRASHES[crash], error=RunError):
        grade([group(["bad"])], [function])


def test_a_worker_that_is_killed_between_steps_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.rewards.grading.grade.RETRY_WAITS_SECONDS", ())  # no other try would make up for it
    function = function_of(tmp_path, "import os\n\ndef mine(response):\n    return os.getpid()\n", workers=1)
    first = int(grade([group(["a"])], [function]).scores.item())
    os.kill(first, signal.SIGKILL)
    assert within(5.0, lambda: not alive(first))
    grades = grade([group(["a"])], [function])
    assert grades.num_failures == 0
    assert int(grades.scores.item()) != first


def test_what_a_function_prints_is_seen_and_is_no_answer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = """
import os, subprocess, sys

def mine(response):
    print("by print")
    os.write(1, b'\\x02\\0\\0\\0{}')
    subprocess.run(["echo", "by a program"])
    assert sys.stdin.read() == ""
    return 0.5
"""
    assert grade([group(["a"])], [function_of(tmp_path, source, workers=1)]).scores.item() == 0.5
    default_resources().close()
    seen = capfd.readouterr()
    assert "by a program" in seen.err
    assert seen.out == ""


def test_the_end_of_a_worker_is_the_end_of_what_it_has_started(tmp_path: Path) -> None:
    function = function_of(tmp_path, PIDS, workers=1, item_seconds=1.0)
    with refused("item_seconds", error=RunError):
        grade([group(["hang"])], [function])
    left = pids(tmp_path)
    assert len(left) == 3  # one for each try
    assert within(5.0, lambda: not any(alive(pid) for both in left for pid in both))
    # And a worker that is not at fault goes with what holds it.
    grade([group(["a"])], [function])
    (both,) = set(pids(tmp_path)) - set(left)
    assert all(alive(pid) for pid in both)
    default_resources().close()
    assert within(5.0, lambda: not any(alive(pid) for pid in both))


def trainer(folder: Path, *texts: str) -> subprocess.Popen[str]:
    (folder / "my_rewards.py").write_text(PIDS)
    (folder / "trainer.py").write_text(TRAINER)
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    command = [sys.executable, str(folder / "trainer.py"), str(folder / "my_rewards.py"), *texts]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, **pipes)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_workers_die_with_the_trainer_however_it_dies(tmp_path: Path, number: signal.Signals) -> None:
    running = trainer(tmp_path, "hang", "hang")
    try:
        assert within(60.0, lambda: len(pids(tmp_path)) == 2), running.poll()
        workers = [pid for pid, _ in pids(tmp_path)]
        began = time.monotonic()
        running.send_signal(number)
        running.wait(timeout=5.0)
        assert within(5.0, lambda: not any(map(alive, workers)))
        assert time.monotonic() - began < 5.0
    finally:
        running.kill()
        for _, child in pids(tmp_path):  # what a function has started outlives a trainer that is killed
            if alive(child):
                os.kill(child, signal.SIGKILL)
        running.communicate()


def test_a_trainer_that_ends_well_leaves_nothing_behind(tmp_path: Path) -> None:
    running = trainer(tmp_path, "a", "b")
    out, err = running.communicate(timeout=60.0)
    assert (running.returncode, out) == (0, "graded\n"), err
    assert pids(tmp_path)
    assert within(5.0, lambda: not any(alive(pid) for both in pids(tmp_path) for pid in both))


def test_where_no_system_tells_of_a_parents_end_a_thread_looks_for_it(tmp_path: Path) -> None:
    watching = (
        "import os, pathlib, sys; from posttrain.rewards.grading.worker_process import watch;"
        f" pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid())); watch(os.getppid())"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {watching!r}])"
    running = subprocess.Popen([sys.executable, "-c", parent], env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
    file = tmp_path / "pid"
    assert within(30.0, lambda: file.exists() and file.read_text() != "")
    pid = int(file.read_text())
    time.sleep(1.5)  # longer than between two looks: while the parent lives, so does it
    assert alive(pid)
    running.kill()
    running.wait()
    assert within(5.0, lambda: not alive(pid))


def test_a_long_message_goes_through_both_ways(tmp_path: Path) -> None:
    source = "def mine(completions):\n    return [len(text) for text in completions]\n"
    texts = ["é" * 3_000_000, "x" * 5_000_000]  # more than a socket holds, more than a sandbox's program may send
    assert grade([group(texts)], [function_of(tmp_path, source, workers=1)]).scores.tolist() == [[[3e6, 5e6]]]
    says = "def mine(response):\n    raise ValueError('x' * 10_000_000)\n"
    with refused("raised ValueError: xxx", error=RunError):
        grade([group(["a"])], [function_of(tmp_path, says, workers=1)])


def test_an_interrupt_ends_every_worker_at_once(tmp_path: Path) -> None:
    """As in a notebook, where the process goes on after it."""
    function = function_of(tmp_path, PIDS, workers=2)

    def interrupt() -> None:
        within(30.0, lambda: len(pids(tmp_path)) == 2)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        grade([group(["hang", "a", "a", "a"])], [function])
    thread.join()
    assert not any(alive(pid) for pid, _ in pids(tmp_path))
    assert grade([group(["a"])], [function]).scores.item() == 1.0


def test_nothing_is_left_behind_and_every_outcome_comes_as_often_as_it_should() -> None:
    assert soak(1000) == {
        "passed": 75 * 10,
        "raised": (8 + 4 + 3 + 2) * 10,
        "syntax_error": 5 * 10,
        "output_limit": 2 * 10,
        "time_limit": 1 * 10,
    }
    assert sum(count for _, _, count in PROGRAMS) == 100


def test_a_function_in_workers_leaves_nothing_behind_and_every_outcome_comes_as_often_as_it_should() -> None:
    assert soak_workers(2000) == {
        "4.0": 480 * 4 + 100 + 1000,  # the length of "good", of which there are more at the end
        "6.0": (5 + 2) * 4,  # and of "prints" and "starts"
        "InvalidScore": 10 * 4,
        "ScoringFailure": (2 + 1) * 4,
    }
    assert sum(COMPLETIONS.values()) == 500
