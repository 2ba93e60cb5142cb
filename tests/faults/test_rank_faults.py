"""A rank that is killed or stopped, in every phase of a step: all ranks end in time and name it; a resume mends it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults.phases import STEP_2, TAKE, let_go, pausing, phase_recipe, tried, wait_for_pause
from tests.support.rank_runs import WAITING, by_ranks, start_ranks
from tests.support.runs import Command, require_same, save_tiny_model, tiny_recipe

TIMEOUT_SECONDS = 10.0
"""run.rank_timeout_seconds of these runs; short, but a busy machine needs its time."""
DEADLINE = TIMEOUT_SECONDS + 10
LEARN = "call posttrain.training.following:RlFollower.learn"
PHASES = {
    "sampling": f"{LEARN} 1, {TAKE} 2",
    "grading": "",
    "credit": STEP_2["credit"],
    "update": STEP_2["update"],
    "evaluation": f"{LEARN} 2, {TAKE} 1",
    "checkpoint": "open step-000002/shard-00002-model-00001-of-00001.safetensors 2",
}
"""As rank 1 meets the phases of step 2; while rank 0 grades, it waits."""
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rank-faults")
    save_tiny_model(folder / "model")
    return folder


@pytest.fixture(scope="module")
def undisturbed(place: Path) -> Path:
    ended = by_ranks("rl", recipe(place / "whole"), folder=place / "whole")
    assert ended.code == 0, ended.err
    return place / "whole" / "run"


def recipe(folder: Path) -> Path:
    return phase_recipe(folder, run={"num_steps": 3, "rank_timeout_seconds": TIMEOUT_SECONDS})


def disturbed(folder: Path, name: str, victim: int, number: int) -> tuple[list[Command], float]:
    """Ranks, one of which got a signal in that phase; and when."""
    holder = victim if PHASES[name] else 0
    accident = pausing(PHASES[name] if holder else STEP_2[name])
    started = start_ranks("rl", recipe(folder), folder=folder, accidents={holder: accident})
    wait_for_pause(started[holder], folder)
    started[victim].signal(number)
    let_go(folder)
    return started, time.monotonic()


CASES = [f"{name} {how} {victim}" for how in SIGNALS for victim in (0, 1) for name in PHASES]


@pytest.mark.parametrize("case", tried(CASES, "update killed 1"))
def test_a_rank_that_dies_or_hangs_is_named_in_time_and_a_resume_has_the_same_bits(
    place: Path, undisturbed: Path, case: str
) -> None:
    name, how, rank = case.split()
    folder, victim = place / case, int(rank)
    started, when = disturbed(folder, name, victim, SIGNALS[how])
    try:
        ended = started[1 - victim].ended(DEADLINE)
        seconds = time.monotonic() - when
        said = [line for line in ended.err.splitlines() if "posttrain: " in line]
        print(f"{case}: {seconds:.1f} s {ended.code} {said}")
        assert ended.code == 1
        assert how == "stopped" or seconds < TIMEOUT_SECONDS
        assert len(said) == 1
        assert f"rank {victim} " in said[0]
        assert "last checkpoint" in said[0]
        assert ("step-000001" in ended.err) == (victim == 1)
        assert "Traceback" not in ended.err
        if started[victim].process.is_alive():  # it is stopped, and rank 0 held the keys that tell others of it
            started[victim].signal(signal.SIGCONT)
        assert started[victim].ended(DEADLINE).code in (1, -SIGNALS[how])
    finally:
        for each in started:
            each.process.kill()
    resumed = by_ranks("rl", "--resume", folder / "run", folder=folder)
    assert resumed.code == 0, resumed.err
    require_same(folder / "run", undisturbed)


GRACE_SECONDS = 20.0
"""What starting and ending processes may take here, besides the timeout."""


@pytest.mark.scale
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("how", SIGNALS)
def test_the_starter_of_ranks_leaves_no_process_when_one_dies_or_hangs(place: Path, how: str, victim: int) -> None:
    folder = place / f"started-{how}-{victim}"
    rewards = [{"path": f"{folder}/waiting.py:patient"}]
    recipe = tiny_recipe(folder, rewards=rewards, run={"rank_timeout_seconds": TIMEOUT_SECONDS})
    (folder / "waiting.py").write_text(WAITING)
    argv = [sys.executable, "-m", "posttrain", "rl", str(recipe), "--ranks", "2", "--run.curves", "false"]
    running = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder)
    try:
        while not (folder / "in_step_3").exists():
            assert running.poll() is None, running.communicate()[0]
            time.sleep(0.05)
        ranks = ranks_of(running.pid)
        os.kill(ranks[victim], SIGNALS[how])
        (folder / "go").touch()
        said, _ = running.communicate(timeout=TIMEOUT_SECONDS + GRACE_SECONDS)
    finally:
        running.kill()
    assert running.returncode == 1, said
    assert f"rank {victim} " in said
    assert not any(Path(f"/proc/{each}").exists() for each in ranks.values())


def ranks_of(starter: int) -> dict[int, int]:
    """The process of each rank that a starter has begun."""
    found = {}
    for process in Path(f"/proc/{starter}/task/{starter}/children").read_text().split():
        environment = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        found |= {int(each.removeprefix(b"RANK=")): int(process) for each in environment if each.startswith(b"RANK=")}
    assert sorted(found) == [0, 1]
    return found
