"""Sandboxes beside the sealed one: the same verdicts, the same refusals, and clear words where they cannot be had."""

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from posttrain.cli import main
from posttrain.options.sandbox import SandboxOptions
from posttrain.rewards.code.code_reward import CodeOutcome, CodeReward
from posttrain.rewards.grading.function import ScoringFailure
from posttrain.sandbox import elsewhere
from posttrain.sandbox.backends import Bubblewrap, Container
from posttrain.sandbox.elsewhere import Backend, Remote, ReplayRun
from posttrain.sandbox.execution import Execution, Exit, Limits, Process
from posttrain.sandbox.probes import SandboxUnavailable
from posttrain.sandbox.replay_sandbox import ReplaySandbox
from tests.support.code_cheats import ALL, CHEATS, RIGHT
from tests.support.commands import printed
from tests.support.refusals import mentions, refused
from tests.support.sandboxes import chosen, graded, needs_bubblewrap, outcomes, scored
from tests.support.timing import takes

CONTAINER = os.environ.get("POSTTRAIN_TEST_CONTAINER", "")
"""COMMAND|IMAGE, such as `podman|localhost/python`: containers are tried where somebody says with what."""
LIMITS = Limits(cpu_seconds=0.5, memory_bytes=256 << 20, output_bytes=1 << 18)
needs_container = pytest.mark.skipif(not CONTAINER, reason="POSTTRAIN_TEST_CONTAINER names no command and image")


Runs = Callable[[str, bytes, float], "tuple[int | None, bytes, bytes]"]


def sealed_off(code: str, stdin: bytes, timeout: float) -> tuple[int | None, bytes, bytes]:
    """In bubblewrap: what a service that keeps its word does."""
    limits = Limits(cpu_seconds=(timeout - 2) / 3, output_bytes=1 << 20)
    ended = Bubblewrap().run(ReplayRun(text=code, stdin=stdin, limits=limits, mark="0"))
    timed_out = ended.exit in (Exit.WALL_LIMIT, Exit.CPU_LIMIT)
    return None if timed_out else ended.status, ended.stdout[: 1 << 20], ended.stderr


def wide_open(code: str, stdin: bytes, timeout: float) -> tuple[int | None, bytes, bytes]:
    """As whoever runs the service: what one without isolation does."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", code]
        try:
            done = subprocess.run(command, input=stdin, capture_output=True, timeout=1, check=False, cwd=folder)
        except subprocess.TimeoutExpired:
            return None, b"", b""
    return done.returncode, done.stdout[: 1 << 20], done.stderr


@contextmanager
def service(runs: Runs, before: list[str] | None = None) -> Iterator[str]:
    """A service on loopback; `before` is what it does to the first requests instead of answering them."""
    troubles = [] if before is None else before

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/run_code"
            trouble = troubles.pop(0) if troubles else ""
            if trouble == "busy":
                return self.say(503, {"detail": "busy"})
            if trouble == "error":
                return self.say(200, {"status": "SandboxError", "message": "no room"})
            if trouble == "half":
                return self.say(200, {"status": "Success"}, told=1000)
            if trouble.startswith("late"):
                ran = float(trouble.partition(" ")[2]) * body["run_timeout"]
                late = {"status": "TimeLimitExceeded", "return_code": None, "execution_time": ran}
                began = f"{re.search('[0-9a-f]{16}', body['code'])[0]} ready\n"  # type: ignore[index]
                return self.say(200, {"status": "Failed", "run_result": {**late, "stdout": "", "stderr": began}})
            if trouble.startswith("computes"):
                assert body["code"] == elsewhere.SPIN
                done = {"status": "Finished", "return_code": 0, "stdout": trouble.partition(" ")[2]}
                return self.say(200, {"status": "Success", "run_result": done})
            status, stdout, stderr = runs(body["code"], body["stdin"].encode(), body["run_timeout"])
            result: dict[str, Any] = {
                "status": "TimeLimitExceeded" if status is None else "Finished",
                "return_code": status,
                "stdout": stdout.decode("utf-8", "replace"),
                "stderr": stderr.decode("utf-8", "replace"),
            }
            return self.say(200, {"status": "Failed" if status else "Success", "message": "", "run_result": result})

        def say(self, status: int, body: dict[str, Any], told: int | None = None) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(told or len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def running() -> str:
    """The commands of all processes."""
    return subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout


@contextmanager
def kind(name: str) -> Iterator[None]:
    """Have programs run in this kind of sandbox."""
    with ExitStack() as stack:
        given: dict[str, Any] = {"kind": name, "at_once": 2}
        if name == "remote":
            stack.enter_context(pytest.MonkeyPatch.context()).setattr(Remote, "busy", lambda self: False)
            given["url"] = stack.enter_context(service(sealed_off))  # however busy this machine is
        elif name == "container":
            given["command"], given["image"] = CONTAINER.split("|")
        stack.enter_context(chosen(SandboxOptions(**given)))
        yield


MARKS = {"bubblewrap": needs_bubblewrap, "remote": needs_bubblewrap, "container": needs_container}
each_kind = pytest.mark.parametrize("name", [pytest.param(name, marks=mark) for name, mark in MARKS.items()])

PROGRAMS = {
    "right": RIGHT,
    "wrong": "def add(a, b): return a - b\nprint(0)",
    "does_not_parse": "def add(a, b",
    "raises": "raise KeyError(1)",
    "loops": "while True: pass",
    "prints_much": f"print('x' * 5_000_000)\n{RIGHT}",
    "crashes": "import os\nos.kill(os.getpid(), 11)",
    "not_plain": "def add(a, b): return object()\nprint('?')",
    "loops_when_called_again": "n = []\ndef add(a, b):\n    n.append(1)\n    while len(n) > 1: pass\n    return a + b",
    "counts_its_calls": "n = []\ndef add(a, b):\n    n.append(1)\n    return a + b + (len(n) == 3)",
    "prints_in_a_function": "def add(a, b):\n    print('thinking')\n    return a + b",
    "dies_when_called_again": """
import os
n = []
def add(a, b):
    n.append(1)
    if len(n) == 2: os._exit(0)
    return a + b
""",
}


@each_kind
def test_verdicts_are_those_of_the_sealed_sandbox(name: str) -> None:
    # Stopping at the first failure and going on are tried in turn; nothing in the place depends on it.
    reward = CodeReward(cpu_seconds=0.3, score="binary" if name == "remote" else "fraction")
    sources = list(PROGRAMS.values())
    sealed = {tests: scored(reward, sources, ALL[tests]) for tests in ALL}
    assert len({str(one) for found in sealed.values() for one in found}) >= 6
    with kind(name):
        there = {tests: scored(reward, sources, ALL[tests]) for tests in ALL}
    # What a function prints goes to standard error elsewhere, since there is no third stream, and that is dropped.
    for tests in ("calls", "asserts"):
        place = list(PROGRAMS).index("prints_much")
        assert outcomes([there[tests].pop(place)]) == [(1.0, CodeOutcome.PASSED)]
        assert outcomes([sealed[tests].pop(place)]) == [(0.0, CodeOutcome.OUTPUT_LIMIT)]
    for tests in ALL:
        assert outcomes(there[tests]) == outcomes(sealed[tests]), tests


@needs_bubblewrap
def test_no_cheat_passes() -> None:
    # In bubblewrap only: the other places are reached by the same text and the same reading of what it says.
    with kind("bubblewrap"):
        for tests in ALL.values():
            found = scored(CodeReward(cpu_seconds=0.3), list(CHEATS.values()), tests)
            assert [(cheat, one) for cheat, one in zip(CHEATS, outcomes(found), strict=True) if one[0] != 0] == []


def run_in(place: Backend, *sources: str) -> list[Execution]:
    with ReplaySandbox(place, at_once=2) as there:
        return there.run([Process(kind="program", source=source, limits=LIMITS) for source in sources])


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(lambda: Bubblewrap(), marks=needs_bubblewrap, id="bubblewrap"),
        pytest.param(lambda: Container(*CONTAINER.split("|")), marks=needs_container, id="container"),
    ],
)
def test_programs_have_files_and_processes_of_their_own_that_end_with_them(place: Callable[[], Backend]) -> None:
    leaves = """
import os, subprocess, sys
open("kept", "w").write("x" * 1000)
print(os.path.getsize("kept"))
print(subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True, text=True).stdout.strip())
if os.fork() == 0:
    import time
    time.sleep(60)
"""
    with takes(most=45):
        first, second = run_in(place(), leaves, "import os; print(os.listdir('.'))")
    assert (first.exit, first.stdout) == (Exit.FINISHED, b"1000\n42\n")
    assert second.stdout == b"[]\n"
    assert not re.search("posttrain-|bwrap --unshare", running())


@needs_bubblewrap
def test_processor_time_of_all_processes_of_a_program_counts() -> None:
    split = """
import os
for _ in range(3):
    if os.fork() == 0:
        while True: pass
import time
time.sleep(60)
"""
    (execution,) = run_in(Bubblewrap(), split)
    assert execution.exit is Exit.CPU_LIMIT
    assert execution.wall_seconds < LIMITS.wall_seconds


@needs_bubblewrap
def test_nothing_is_left_behind() -> None:
    run_in(Bubblewrap(), "print(1)")
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    run_in(Bubblewrap(), *["print(1)"] * 20, *["while True: print('x' * 4096)"] * 4)
    time.sleep(0.2)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) <= before


@needs_bubblewrap
def test_an_interrupt_ends_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    there = ReplaySandbox(Bubblewrap(), at_once=1, probed=True)
    threading.Timer(0.5, lambda: os.kill(os.getpid(), 2)).start()
    with takes(most=3), pytest.raises(KeyboardInterrupt):
        there.run([Process(kind="program", source="import time; time.sleep(60)")])
    time.sleep(0.2)
    assert "bwrap --unshare" not in running()


def test_a_container_is_removed_by_name_also_when_all_is_stopped(tmp_path: Path) -> None:
    # Ending docker's own command ends no container: a stand-in notes what it is asked to do.
    noted, stand_in = tmp_path / "noted", tmp_path / "docker"
    stand_in.write_text(f'#!/bin/sh\necho "$@" >> {noted}\n[ "$1" = run ] && exec sleep 60\n')
    stand_in.chmod(0o755)
    place = Container(str(stand_in), "image")
    run = ReplayRun(text="", stdin=b"", limits=LIMITS, mark="abcd")
    thread = threading.Thread(target=place.run, args=(run,))
    thread.start()
    while not place.live:
        time.sleep(0.01)
    place.stop()
    thread.join(10)
    assert not thread.is_alive()
    asked = noted.read_text()
    assert asked.startswith("run --rm")
    assert "--network none" in asked
    assert asked.count("rm --force posttrain-abcd") == 2  # by whoever stops it, and by the run if it still can


def test_a_service_without_isolation_on_this_machine_is_found_out() -> None:
    with service(wide_open) as url, pytest.raises(SandboxUnavailable) as refusal:
        run_in(Remote(url), "print(1)")
    for name in ("read a file of this machine", "write a file", "TCP", "kill a process", "isolation: none"):
        assert name in str(refusal.value)


@pytest.mark.parametrize(
    ("place", "says"),
    [
        (Remote("http://127.0.0.1:1"), "Connection refused"),
        (Container("no-such-docker", "python"), "no-such-docker"),
        (Container("false", "python"), "`false run --rm python"),
    ],
)
def test_a_place_that_does_not_work_says_so_once(place: Backend, says: str) -> None:
    with refused("does not work", error=SandboxUnavailable) as refusal:
        run_in(place, "print(1)")
    assert says in str(refusal.value)
    assert "Remedy" in str(refusal.value)


@needs_bubblewrap
def test_a_service_is_asked_again_and_a_failure_is_never_a_score(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elsewhere, "WAIT_SECONDS", 0.01)
    troubles: list[str] = []
    with service(sealed_off, troubles) as url, chosen(SandboxOptions(kind="remote", url=url, at_once=1)):
        assert graded(CodeReward(), [RIGHT], ALL["calls"]) == [(1.0, "passed")]
        for trouble in (["busy"], ["half"], ["busy", "half"]):
            troubles[:] = trouble
            assert graded(CodeReward(), [RIGHT], ALL["calls"]) == [(1.0, "passed")]
        for trouble in (["busy"] * 3, ["half"] * 3, ["error"]):
            troubles[:] = trouble
            (failure,) = scored(CodeReward(), [RIGHT], ALL["calls"])
            assert isinstance(failure, ScoringFailure)


@pytest.mark.parametrize("tests", ALL)
def test_what_a_busy_service_ends_is_never_a_score(tests: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReplaySandbox, "probe", lambda self: None)  # nothing but our own program is run
    in_time, waited = f"computes {elsewhere.SPIN_SECONDS}", f"computes {5 * elsewhere.SPIN_SECONDS}"
    troubles: list[str] = []
    with service(wide_open, troubles) as url, chosen(SandboxOptions(kind="remote", url=url, at_once=1)):
        assert graded(CodeReward(), [RIGHT], ALL[tests]) == [(1.0, "passed")]
        for trouble, verdict in (
            (["late 1.01", in_time], (0.0, "time_limit")),  # it had its processor and was late all the same
            (["late 1.01", waited], (1.0, "passed")),  # once more, alone
            (["late 1.01", waited] * 2, (None, "failure")),
            (["late 1.01", "computes"] * 2, (None, "failure")),
            (["late 0.5"], (None, "failure")),  # the service allows less than was asked for
        ):
            troubles[:] = trouble
            assert graded(CodeReward(score="binary"), [RIGHT], ALL[tests]) == [verdict], trouble
            assert not troubles


def test_what_is_chosen_together_must_make_sense(capsys: pytest.CaptureFixture[str]) -> None:
    with refused("needs the service's address"):
        SandboxOptions(kind="remote")
    with refused("kind = sealed"):
        SandboxOptions(url="http://127.0.0.1:8080")
    with refused("url: has a user name") as refusal:
        SandboxOptions(kind="remote", url="http://me:s3cret@127.0.0.1:8080")
    assert "s3cret" not in str(refusal.value)
    assert main(["doctor", "--sandbox.kind", "container", "--sandbox.command", "no-such-docker"]) == 1
    said = capsys.readouterr().out
    mentions(said, "does not work", "NOT SAFE: posttrain will not run programs here")


@needs_bubblewrap
def test_the_doctor_tries_the_sandbox_that_is_named() -> None:
    said = printed("doctor", "--sandbox.kind", "bubblewrap")
    mentions(said, "refused   read a file of this machine", "allowed   start a process", "safe: every probe passed")
