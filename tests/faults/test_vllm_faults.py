"""Two vLLM servers, which `make test-vllm` starts, that hang or are killed: the other one samples, or the run ends in
time and names them.

vLLM draws its own numbers, so runs differ; log-probs stay the trainer's at every step.  The tests are in this order
because what is killed stays dead.
"""

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from posttrain.runs.alarms import GAP
from tests.support.faulty_proxy import Fault, FaultyProxy, faulty_proxy
from tests.support.rl_server import MODEL, NATS, PROCESSES
from tests.support.runs import metrics_of, start, tiny_recipe

pytestmark = pytest.mark.skipif(PROCESSES not in os.environ, reason="needs vLLM's servers: make test-vllm")
SECONDS = {"connect": 5.0, "sample": 60.0, "update": 60.0}
DEADLINE = SECONDS["sample"] + SECONDS["update"] + 4 * SECONDS["connect"] + 90
"""A server that hangs is waited for once, and looked at again at each of four updates; the run itself takes a minute on
a busy machine."""
GENERATE, UPDATE = "/inference/v1/generate", "/update_weights"
AT = {"sampling": (GENERATE, b'"purpose":"rollout"'), "update": (UPDATE, b"")}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture
def two() -> Iterator[list[tuple[FaultyProxy, int]]]:
    """A proxy before each server, and the group of its processes; stopped ones go on at the end."""
    with ExitStack() as opened:
        found = []
        for each in os.environ[PROCESSES].split():
            port, _, group = each.partition(":")
            found.append((opened.enter_context(faulty_proxy("127.0.0.1", int(port))), int(group)))
        yield found
        for _, group in found:
            send(group, signal.SIGCONT)


def send(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        assert number == signal.SIGCONT, "it was killed before"


def recipe(folder: Path, proxies: list[FaultyProxy]) -> Path:
    engine = {"name": "http", "urls": [each.url for each in proxies], "seconds": SECONDS}
    return tiny_recipe(folder, model={"path": os.environ[MODEL]}, engine=engine, rollout={"max_completion_tokens": 40})


CASES = [
    *((signal.SIGSTOP, alone, phase) for alone in (False, True) for phase in AT),
    (signal.SIGKILL, False, "sampling"),  # the second server
    (signal.SIGKILL, True, "update"),  # the first one
]


@pytest.mark.parametrize(("number", "alone", "phase"), CASES)
def test_a_run_goes_on_with_the_other_server_or_ends_in_time_and_names_it(
    two: list[tuple[FaultyProxy, int]], place: Path, number: signal.Signals, alone: bool, phase: str
) -> None:
    chosen = two[:1] if alone else two
    proxy, group = chosen[-1]
    path, body = AT[phase]
    proxy.faults = [
        Fault("pass", path, body=body, skip=1 + (phase == "sampling"), times=1, call=lambda: send(group, number))
    ]
    folder = place / "case"  # the same one for all: servers know the run by it
    shutil.rmtree(folder, ignore_errors=True)
    running = start("rl", recipe(folder, [each for each, _ in chosen]), folder=place)
    try:
        ended = running.ended(DEADLINE)
    finally:
        running.process.kill()
    assert proxy.faults[0].times == 0
    assert proxy.url in ended.err
    if alone:
        assert ended.code == 1
        assert "no server is left" in ended.err
        assert "Traceback" not in ended.err
        return
    assert ended.code == 0, ended.err
    steps = metrics_of(folder / "run")[1:]
    assert len(steps) == 4
    assert max(step.get(GAP, 0.0) for step in steps) < NATS
    assert "It is left out until the next update." in ended.err
