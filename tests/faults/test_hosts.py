"""Runs over several hosts: the bits of one machine, cables that are pulled, and hosts that lose their power."""

import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.hosts import Gate, Host, hosts, needs_hosts
from tests.support.rank_runs import ended_ranks, environments
from tests.support.runs import Command, command, require_same, save_tiny_model, tiny_recipe

pytestmark = needs_hosts
TOKEN = {"POSTTRAIN_SERVE_TOKEN": "a-secret-of-these-tests"}
SECONDS = {"connect": 3, "sample": 4, "update": 6}
RANK_SECONDS = 12
DEADLINE = RANK_SECONDS + 10


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hosts")
    save_tiny_model(folder / "model")
    return folder


@pytest.fixture(scope="module")
def of_one(place: Path) -> Path:
    """The run in one process."""
    assert command("rl", tiny_recipe(place / "one"), folder=place / "one").code == 0
    return place / "one" / "run"


@pytest.fixture
def three() -> Iterator[list[Host]]:
    with hosts("node-0", "node-1", "node-2") as made:
        yield made


def served(host: Host, folder: Path, gate: Gate | None = None) -> Command:
    """A server that the others reach."""
    flags = ("--rl", "--host", "0.0.0.0", "--port", "8100")
    return host.start("serve", folder.parent / "model", *flags, folder=folder, environment=TOKEN, before=gate)


def listens(server: Command) -> None:
    server.wait_until(lambda: server.log.exists() and "http://" in server.log.read_text())


def rl_recipe(folder: Path) -> Path:
    engine = {"name": "http", "urls": ["http://node-1:8100", "http://node-2:8100"], "seconds": SECONDS}
    return tiny_recipe(folder, engine=engine)


def test_a_run_over_servers_on_other_hosts_has_the_bits_of_one_process(place, three, of_one):
    folder = place / "servers"
    recipe = rl_recipe(folder)
    started = [served(host, folder) for host in three[1:]]
    for each in started:
        listens(each)
    ended = three[0].start("rl", recipe, folder=folder, environment=TOKEN).ended()
    assert ended.code == 0, ended.err
    assert "by PUT" in ended.out
    require_same(folder / "run", of_one)


@pytest.mark.scale
@pytest.mark.parametrize(
    ("module", "method", "call"),
    [
        pytest.param("posttrain.server.rl_routes", "TrainingRoutes.generate", 20, id="sampling"),
        pytest.param("posttrain.server.rl_routes", "TrainingRoutes.update", 2, id="update"),
    ],
)
def test_a_server_whose_cable_is_pulled_and_put_back_changes_no_bit(place, three, of_one, module, method, call):
    folder = place / f"cut-{method}"
    recipe = rl_recipe(folder)
    gate = Gate(folder, module, method, call)
    started = [served(three[1], folder, gate), served(three[2], folder)]
    for each in started:
        listens(each)
    run = three[0].start("rl", recipe, folder=folder, environment=TOKEN)
    run.wait_until(gate.reached.exists)
    three[1].unplug()
    gate.open()
    errors = run.log.with_suffix(".err")
    run.wait_until(lambda: "It is left out until the next update" in errors.read_text(), 30)
    three[1].plug()
    ended = run.ended()
    assert ended.code == 0, ended.err
    assert "http://node-1:8100: " in ended.err
    assert ended.err.count("left out") == 1, "it came back at the next update"
    require_same(folder / "run", of_one)


def rank_run(two: list[Host], folder: Path, *argv: object, gates: dict[int, Gate] | None = None) -> list[Command]:
    """Ranks 0 and 1, each on its host."""
    started = []
    for rank, (host, variables) in enumerate(zip(two, environments(2), strict=True)):
        environment = {**variables, "MASTER_ADDR": two[0].name, "LOCAL_RANK": "0"}
        gate = (gates or {}).get(rank)
        started.append(host.start("rl", *argv, folder=folder, environment=environment, before=gate))
    return started


@pytest.fixture(scope="module")
def two() -> Iterator[list[Host]]:
    with hosts("node-0", "node-1") as made:
        yield made


@pytest.fixture(scope="module")
def of_two(place: Path, two: list[Host]) -> Path:
    """The run by two ranks on two hosts."""
    folder = place / "two"
    first, other = ended_ranks(rank_run(two, folder, tiny_recipe(folder)), 200)
    assert (first.code, other.code) == (0, 0), first.err
    return folder / "run"


PHASES = {
    "sampling": Gate(Path(), "posttrain.generation.rank_sampling", "RankShare.sample", 7),
    "update": Gate(Path(), "posttrain.training.learner", "Learner.learn", 3),
}


@pytest.mark.scale
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("fault", ["unplugged", "killed"])
def test_a_rank_whose_host_is_gone_is_named_in_time_and_a_resume_has_the_same_bits(place, two, of_two, phase, fault):
    folder = place / f"{fault}-{phase}"
    recipe = tiny_recipe(folder, run={"rank_timeout_seconds": RANK_SECONDS})
    gate = replace(PHASES[phase], place=folder)
    started = rank_run(two, folder, recipe, gates={1: gate})
    started[1].wait_until(gate.reached.exists)
    began = time.monotonic()
    if fault == "unplugged":
        two[1].unplug()
        gate.open()
    else:
        two[1].kill_all()
    first, other = ended_ranks(started, DEADLINE)
    assert time.monotonic() - began < DEADLINE
    two[1].plug()
    assert first.code == 1
    assert "rank 1 " in first.err
    assert "step-000002" in first.err
    if fault == "unplugged":
        assert other.code == 1
        assert "MASTER_ADDR = node-0" in other.err
    else:
        assert other.code == -signal.SIGKILL
    assert "Traceback" not in first.err + other.err
    gate.opened.touch()
    again = ended_ranks(rank_run(two, folder, "--resume", folder / "run"), 200)
    assert [each.code for each in again] == [0, 0], again[0].err
    require_same(folder / "run", of_two)
