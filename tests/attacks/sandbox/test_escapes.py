"""Attacks on the sandbox, as the user who runs the tests and as root; nothing gets out, and the sandbox goes on."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from posttrain.sandbox import process_pool as pools
from posttrain.sandbox.execution import Execution, Exit, Limits, Process
from posttrain.sandbox.fork_server import ForkServerClient
from posttrain.sandbox.probes import SandboxUnavailable
from posttrain.sandbox.process_pool import ProcessPool
from tests.support.escape_programs import ATTEMPTS, BOMBS, PREAMBLE
from tests.support.refusals import refused

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
    assert pool.server is not None
    children = Path(f"/proc/{pool.server.process.pid}/task/{pool.server.process.pid}/children").read_text()
    assert children == ""


def test_a_program_sees_four_descriptors_an_empty_environment_and_no_secret(
    pool: ProcessPool, monkeypatch: pytest.MonkeyPatch
) -> None:
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
