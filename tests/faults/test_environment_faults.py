"""The server of an environment that is killed, stopped or slow in each phase of a conversation."""

import signal
import time
from pathlib import Path

import pytest

from tests.faults.environments import REPLY_SECONDS, EnvironmentServer, environment_server, talking_recipe
from tests.faults.phases import let_go, tried, wait_for_pause
from tests.support.accidents import Accident
from tests.support.runs import command, require_same, save_tiny_model, start

DEADLINE = 2 * REPLY_SECONDS + 10
"""A completion that fails at `reset` is late once, and one that fails at a reply twice at most."""
PHASES = {
    "reset": "openenv reset 50",
    "reply": "openenv step 60",
    "close": "openenv close 30",
    "evaluation": "openenv reset 74",
}
"""The first evaluation has 40 completions, a step 16, and the evaluation of step 2 begins with the 73rd."""
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environment-faults")
    save_tiny_model(folder / "model")
    return folder


@pytest.fixture(scope="module")
def undisturbed(place: Path) -> Path:
    with environment_server(place / "server") as server:
        ended = command("rl", talking_recipe(place / "whole", server), folder=place / "whole")
    assert ended.code == 0, ended.err
    return place / "whole" / "run"


@pytest.mark.scale
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("how", SIGNALS)
def test_a_dead_server_ends_the_run_in_time_by_its_name_and_a_resume_has_the_same_bits(
    place: Path, undisturbed: Path, how: str, phase: str
) -> None:
    folder = place / f"{how}-{phase}"
    with environment_server(folder / "server", Accident(moment=PHASES[phase], signal=SIGNALS[how])) as server:
        running = start("rl", talking_recipe(folder, server), folder=folder)
        running.wait_until(lambda: is_down(server), 60)
        began = time.monotonic()
        ended = running.ended(DEADLINE)
        assert time.monotonic() - began < DEADLINE
        assert ended.code == 1
        for text in (f"ws://127.0.0.1:{server.port}", "environment.max_failures", "step-00000"):
            assert text in ended.err
        server.restart()
        resumed = command("rl", "--resume", folder / "run", folder=folder)
        assert resumed.code == 0, resumed.err
    (folder / "run" / "failures.txt").unlink()  # the tracebacks of the step that was refused
    require_same(folder / "run", undisturbed)


def is_down(server: EnvironmentServer) -> bool:
    """Whether its process has ended or is stopped."""
    try:
        state = Path(f"/proc/{server.command.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZXTt"


@pytest.mark.parametrize("phase", tried(PHASES))
def test_a_late_answer_changes_no_bit(place: Path, undisturbed: Path, phase: str) -> None:
    folder = place / f"late-{phase}"
    with environment_server(folder / "server", Accident(moment=PHASES[phase], signal=0)) as server:
        running = start("rl", talking_recipe(folder, server), folder=folder)
        wait_for_pause(server.command, server.folder)
        time.sleep(0.5)
        let_go(server.folder)
        ended = running.ended(60)
    assert ended.code == 0, ended.err
    require_same(folder / "run", undisturbed)
