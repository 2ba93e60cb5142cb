"""Attacks on the sandbox, as the user who runs the tests and as root; nothing gets out, and the sandbox goes on."""

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import posttrain
from posttrain.rewards.code.code_reward import CodeReward
from posttrain.sandbox import process_pool as pools, replay_sandbox
from posttrain.sandbox.backends import CommandBackend, Container
from posttrain.sandbox.elsewhere import Remote
from posttrain.sandbox.execution import Execution, Exit, Limits, Process, ServerOptions
from posttrain.sandbox.probes import PROBES, Finding, MachineBait, SandboxUnavailable, of_environment, probes
from posttrain.sandbox.process_pool import ForkServerClient, ProcessPool
from posttrain.sandbox.replay_sandbox import ReplaySandbox
from tests.support.code_cheats import ALL, RIGHT
from tests.support.escape_programs import ATTEMPTS, BOMBS, PREAMBLE
from tests.support.refusals import refused
from tests.support.sandboxes import scored

LIMITS = Limits(cpu_seconds=0.3, memory_bytes=256 << 20, output_bytes=1 << 16)
VICTIM = Path("/tmp/posttrain-victim")


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    with ProcessPool() as made:
        yield made


def program(source: str) -> Process:
    return Process(kind="program", source=source, limits=LIMITS)


@pytest.fixture(scope="module")
def attempts(pool: ProcessPool) -> dict[str, Execution]:
    VICTIM.touch()
    sources = [f"{PREAMBLE}\nattempt(lambda: {expression})\n" for expression in ATTEMPTS.values()]
    return dict(zip(ATTEMPTS, pool.run(map(program, sources)), strict=True))


@pytest.mark.parametrize("name", ATTEMPTS)
def test_an_attempt_is_refused(name: str, attempts: dict[str, Execution]) -> None:
    said = attempts[name].stdout.decode()
    assert "OPEN" not in said
    # Where it was not refused it was ended: by the filter, which kills calls of another architecture.
    assert said.startswith("refused") or attempts[name].exit is Exit.SIGNALLED


def test_nothing_was_left_behind(attempts: dict[str, Execution]) -> None:
    assert VICTIM.exists()
    left = [*Path("/tmp").glob("posttrain-attack*"), *Path("/dev/shm").glob("posttrain-*")]
    assert left == []


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_hurts_itself_alone(name: str, pool: ProcessPool) -> None:
    (execution,) = pool.run([program(f"{PREAMBLE}\n{BOMBS[name]}\n")])
    assert execution.exit is not Exit.LOST
    assert execution.cpu_seconds < 2
    assert execution.wall_seconds < LIMITS.wall_seconds + 2
    assert len(execution.stdout) <= LIMITS.output_bytes
    (after,) = pool.run([program("print(sum(range(10)))")])
    assert (after.exit, after.stdout) == (Exit.FINISHED, b"45\n")


def test_no_process_is_left_over(pool: ProcessPool) -> None:
    pool.run([program("print(1)")])
    children = Path(f"/proc/{pool.server.process.pid}/task/{pool.server.process.pid}/children").read_text()
    assert children == ""


def test_a_program_sees_no_environment_and_no_secret(pool: ProcessPool, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
import os, fcntl
def open_one(n):
    try: fcntl.fcntl(n, fcntl.F_GETFD)
    except OSError: return False
    return True
print([n for n in range(1000) if open_one(n)], sorted(os.environ), os.getuid())
"""
    monkeypatch.setenv("POSTTRAIN_SECRET", "sesame")
    with ProcessPool() as fresh:  # started with the secret in our environment
        (execution,) = fresh.run([program(source)])
    said = execution.stdout.decode()
    assert said.startswith("[0, 1, 2] ")
    assert "SECRET" not in said
    assert (os.getuid() == 0) == said.rstrip().endswith("65534")


def test_programs_draw_numbers_of_their_own(pool: ProcessPool) -> None:
    draws = [execution.stdout for execution in pool.run([program("import random; print(random.random())")] * 5)]
    assert len(set(draws)) == 5


def test_a_sandbox_that_lets_a_probe_through_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    # A server that does not seal its children: the probes notice, and nothing else is run.
    monkeypatch.setattr(pools, "ForkServerClient", lambda options: ForkServerClient(replace(options, sealed=False)))
    with ProcessPool() as broken, refused("read a file", error=SandboxUnavailable) as refusal:
        broken.run([program("print(1)")])
    for name in ("UDP", "start a process", "list a folder", "Remedy"):
        assert name in str(refusal.value)


THREADS = """
import time, threading, _thread
threading.stack_size(32768)
for _ in range({}): _thread.start_new_thread(time.sleep, (2,))
time.sleep(0.5)
print("done")
"""


def run(source: str, pool: ProcessPool | None = None) -> Execution:
    with pool or ProcessPool() as used:
        (execution,) = used.run([Process(kind="program", source=source, limits=Limits(cpu_seconds=1.0))])
    return execution


def test_nothing_says_where_the_project_lies_or_what_the_machine_is_called() -> None:
    source = """
import os, platform, socket, sys
print(os.uname().nodename, platform.node(), socket.gethostname(), sys.argv, sys.orig_argv, sys.path, sys.executable)
frame, names = sys._getframe(), []
while frame:
    names += [frame.f_code.co_filename, *(str(value) for value in frame.f_globals.values() if isinstance(value, str))]
    frame = frame.f_back
print(names, [vars(sys.modules[name]).get("__file__") for name in ("runner", "frames", "plain", "lockdown", "filter")])
"""
    said = run(source).stdout.decode()
    first = "sandbox sandbox sandbox ['program.py'] ['python3', 'program.py'] [] /usr/bin/python3\n"
    assert said.startswith(first)
    folder = str(Path(posttrain.__file__).parent)
    assert folder not in said
    assert sys.prefix not in said
    assert "[None, None, None, None, None]" in said


def test_a_program_of_too_many_threads_is_ended_and_one_of_a_hundred_is_not() -> None:
    assert run(THREADS.format(100)).stdout == b"done\n"
    assert run(THREADS.format(400)).exit is Exit.THREAD_LIMIT
    source = f"{THREADS.format(400)}\n{RIGHT}"
    for kind in ALL:
        (found,) = scored(CodeReward(), [source], ALL[kind])
        assert (found.score, str(found.outcome)) == (0.0, "thread_limit"), kind  # type: ignore[union-attr]  # Graded


FAILING = """
import sys
kind = sys.modules["__main__"].ForkServer
made = kind.__init__
def failing_now_and_then(self, *given):
    made(self, *given)
    fork, asked = self.fork, []
    def other():
        asked.append(None)
        return -1 if len(asked) - {probes} in (2, 3) else fork()  # as where the user may have no more processes
    self.fork = other
kind.__init__ = failing_now_and_then
"""


def test_a_fork_that_fails_loses_its_job_and_no_other() -> None:
    options = ServerOptions(prepare=FAILING.format(probes=len(PROBES)))
    with ProcessPool(options, at_once=1) as pool:
        server = pool.opened()
        found = pool.run([Process(kind="program", source="print(1)")] * 5)
        assert [each.exit is Exit.LOST for each in found] == [False, True, True, False, False]
        assert {each.stdout for each in found} == {b"1\n", b""}
        assert pool.server is server


# Called as a container's command is, `... --entrypoint python3 IMAGE ARGUMENTS`: runs the arguments on this machine.
NO_CONTAINER = """#!/bin/sh
while [ "$1" != "--entrypoint" ]; do [ $# = 0 ] && exit 0; shift; done
shift 3
exec {keeps} python3 "$@"
"""
NAME = "see another environment than its own"


def place(tmp_path: Path, *, leaks: bool) -> CommandBackend:
    """What is taken for a container, and gives programs our environment or none."""
    script = tmp_path / "docker"
    script.write_text(NO_CONTAINER.format(keeps="" if leaks else f'env -i "PATH={os.environ["PATH"]}"'))
    script.chmod(0o755)
    return Container(str(script), "image")


def found(backend: CommandBackend, bait: MachineBait) -> Finding:
    probe = of_environment(bait)
    sandbox = ReplaySandbox(backend, at_once=1, probed=True, canary=bait.canary)
    (execution,) = sandbox.run([Process(kind="program", source=probe.source, limits=probe.limits)])
    return Finding(probe, execution)


@pytest.mark.parametrize("leaks", [True, False])
def test_a_place_that_hands_our_environment_on_is_found_out(leaks: bool, tmp_path: Path) -> None:
    before = dict(os.environ)
    with MachineBait() as bait:
        assert dict(os.environ) == before
        finding = found(place(tmp_path, leaks=leaks), bait)
    assert finding.passed != leaks, finding.line()


def test_each_of_several_that_probe_at_once_finds_its_own_canary(tmp_path: Path) -> None:
    find = partial(found, place(tmp_path, leaks=True))
    with MachineBait() as first:
        with MachineBait() as second, ThreadPoolExecutor(2) as threads:
            findings = [*threads.map(find, (first, second))]
        findings.append(find(first))  # when the other has gone
    assert [finding.passed for finding in findings] == [False] * 3


def test_it_is_tried_where_programs_are_started_here_and_nowhere_else(tmp_path: Path) -> None:
    backends = (place(tmp_path, leaks=False), Remote("http://127.0.0.1:1"))
    with MachineBait() as bait:
        assert [[probe.name for probe in probes(bait, each)].count(NAME) for each in backends] == [1, 0]


def test_probing_a_place_has_the_canary_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # This probe alone: the others would do to this machine what they try, for nothing here keeps programs in.
    monkeypatch.setattr(replay_sandbox, "probes", lambda bait, backend: [of_environment(bait)])
    with refused(f"NOT SAFE  {NAME}", error=SandboxUnavailable):
        ReplaySandbox(place(tmp_path, leaks=True), at_once=2).probe()
