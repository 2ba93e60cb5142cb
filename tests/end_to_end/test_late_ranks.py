"""Ranks that come late, never come, or lose the process that started them."""

from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.support.rank_runs import WAITING, ended_ranks, environments
from tests.support.runs import save_tiny_model, start, start_program, tiny_recipe

SECONDS = 6.0
SLOW = """
import os, sys, time
os.environ.update({environment!r})
from posttrain.models import sharding
from posttrain.models.loading import new_model

sent = sharding.can_be_sent
sharding.can_be_sent = lambda model: {is_sent} and sent(model)
load = new_model.load_policy_to_train

def slowly(*given, **named):
    time.sleep({slow_seconds})
    return load(*given, **named)

new_model.load_policy_to_train = slowly
from posttrain.cli import main
sys.exit(main(["rl", {recipe!r}]))
"""


@pytest.mark.parametrize(("slow", "is_sent"), [(0, True), (1, False)], ids=["rank 0", "rank 1"])
def test_a_rank_that_loads_for_longer_than_the_timeout_is_waited_for(tmp_path: Path, slow: int, is_sent: bool) -> None:
    save_tiny_model(tmp_path / "model")
    recipe = tiny_recipe(tmp_path / "run", run={"num_steps": 1, "rank_timeout_seconds": SECONDS})
    started = []
    for rank, environment in enumerate(environments(2)):
        (logs := tmp_path / f"rank-{rank}").mkdir()
        seconds = 1.5 * SECONDS * (rank == slow)
        program = SLOW.format(environment=environment, recipe=str(recipe), slow_seconds=seconds, is_sent=is_sent)
        started.append(start_program(program, folder=tmp_path, logs=logs))
    ended = ended_ranks(started)
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
