"""Ranks that come late, never come, or lose the process that started them."""

from collections.abc import Mapping
from itertools import chain
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.support.rank_runs import WAITING, ended_ranks, environments
from tests.support.runs import Command, Ended, save_tiny_model, start, start_program, tiny_recipe

SECONDS = 6.0
LOADS_SLOWLY = """
from posttrain.models import sharding
from posttrain.models.loading import new_model

sent = sharding.can_be_sent
sharding.can_be_sent = lambda model: {is_sent} and sent(model)
load = new_model.load_policy_to_train

def slowly(*given, **named):
    print("slept", {seconds}, "s", flush=True)
    time.sleep({seconds})
    return load(*given, **named)

new_model.load_policy_to_train = slowly
"""
SAMPLES_SLOWLY = """
from posttrain.generation.engine import SamplingTimeout
from posttrain.generation.in_process import InProcessSampling

take, began = InProcessSampling.take, []

def slowly(sampling, seconds):
    if seconds < 100:  # of a share
        began.append(time.monotonic())
    if began and time.monotonic() - began[0] < {seconds}:
        print("slept", {seconds}, "s", flush=True)
        time.sleep(0.5)
        raise SamplingTimeout("rank", seconds, 1)
    return take(sampling, seconds)

InProcessSampling.take = slowly
"""
RUNS = """
import os, sys, time
os.environ.update({environment!r})
{change}
from posttrain.cli import main
sys.exit(main(["rl", {recipe!r}]))
"""
SLOW = {
    "rank 0 loads": (0, LOADS_SLOWLY, True),
    "rank 1 loads": (1, LOADS_SLOWLY, False),
    "rank 1 samples": (1, SAMPLES_SLOWLY, True),
}


@pytest.fixture(scope="module")
def slow_runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[Ended]]:
    """All at once, since they wait most of the time."""
    folder = tmp_path_factory.mktemp("slow")
    save_tiny_model(folder / "model")
    started: dict[str, list[Command]] = {name: [] for name in SLOW}
    for name, (slow, change, is_sent) in SLOW.items():
        place = folder / name.replace(" ", "-")
        recipe = tiny_recipe(place, run={"num_steps": 1, "rank_timeout_seconds": SECONDS})
        for rank, environment in enumerate(environments(2)):
            (logs := place / f"rank-{rank}").mkdir()
            changed = change.format(seconds=1.5 * SECONDS * (rank == slow), is_sent=is_sent)
            program = RUNS.format(environment=environment, change=changed, recipe=str(recipe))
            started[name].append(start_program(program, folder=folder, logs=logs))
    try:
        return {name: ended_ranks(each) for name, each in started.items()}
    finally:
        for command in chain(*started.values()):
            command.process.kill()


@pytest.mark.parametrize("name", SLOW)
def test_a_rank_slower_than_the_timeout_is_waited_for(slow_runs: Mapping[str, list[Ended]], name: str) -> None:
    ended, slow = slow_runs[name], SLOW[name][0]
    assert f"slept {1.5 * SECONDS} s" in ended[slow].out
    assert [each.code for each in ended] == [0, 0], ended[0].err + ended[1].err


@pytest.mark.parametrize(
    ("rank", "code", "said"),
    [
        (0, 1, "rank 1 did not start within run.rank_timeout_seconds = 2.  Read what rank 1 printed"),
        (1, 2, "Check that rank 0 runs there, and the port is open."),
    ],
)
def test_a_rank_that_never_comes_is_named(tmp_path: Path, rank: int, code: int, said: str) -> None:
    save_tiny_model(tmp_path / "model")
    recipe = tiny_recipe(tmp_path / "run", run={"rank_timeout_seconds": 2.0})
    ended = start("rl", recipe, folder=tmp_path, environment=environments(2)[rank]).ended()
    assert said in ended.err
    assert ended.code == code
    assert "Traceback" not in ended.err


def test_ranks_name_the_process_that_started_them_if_it_ends(tmp_path: Path) -> None:
    """It holds their store, as torchrun does."""
    starter = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    save_tiny_model(tmp_path / "model")
    recipe = tiny_recipe(place := tmp_path / "run", rewards=[{"path": f"{tmp_path}/run/waiting.py:patient"}])
    (place / "waiting.py").write_text(WAITING)
    started = []
    for rank, environment in enumerate(environments(2)):
        (logs := tmp_path / f"rank-{rank}").mkdir()
        held = {**environment, "MASTER_PORT": str(starter.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        started.append(start("rl", recipe, folder=tmp_path, logs=logs, environment=held))
    started[0].wait_until((place / "in_step_3").exists)
    del starter
    (place / "go").touch()
    first, _ = ended_ranks(started)
    assert "the process that started rank 0 ended, or its machine cannot be reached" in first.err
    assert first.code == 1


TWICE = """
import os
os.environ.update({environment!r})
from posttrain.ranks.rank_store import RankStore

stores = [RankStore(0, 2, number, seconds=5.0 + number) for number in range(2)]
for number, store in enumerate(stores):
    store.write("key", str(number))
print([store.read("key") for store in stores])
"""


def test_the_next_run_of_a_process_may_have_another_limit(tmp_path: Path) -> None:
    ended = start_program(TWICE.format(environment=environments(2)[0]), folder=tmp_path, logs=tmp_path).ended()
    assert ended.out == "['0', '1']\n", ended.err
