"""Two drivers and one server: a run under way keeps its weights there, whatever another command wants of the server."""

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from posttrain.generation import rl_protocol as wire
from posttrain.generation.http import http_engine, weight_updates
from posttrain.generation.http.http_engine import HttpEngine
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.loading.saving import ExportedWeights
from posttrain.options.model import ModelOptions
from posttrain.options.rollout import HttpOptions, SamplingParams
from tests.support.rank_runs import WAITING
from tests.support.rl_server import RlServer, own_server
from tests.support.runs import Command, command, files_of, require_same, save_tiny_model, start, tiny_recipe


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("owners")
    save_tiny_model(folder / "model")
    return folder


@pytest.fixture
def server(place: Path, tmp_path: Path) -> Iterator[RlServer]:
    with own_server(place / "model", tmp_path / "weights") as made:
        yield made


def recipe(place: Path, name: str, server: RlServer | None) -> Path:
    """Of a run that waits in its third step."""
    folder = place / name
    engine = {} if server is None else {"engine": {"name": "http", "urls": [server.url]}}
    made = tiny_recipe(folder, rewards=[{"path": f"{folder}/waiting.py:patient"}], **engine)
    (folder / "waiting.py").write_text(WAITING)
    return made


def waiting(place: Path, name: str, server: RlServer) -> Command:
    running = start("rl", recipe(place, name, server), folder=place / name)
    running.wait_until((place / name / "in_step_3").exists)
    return running


def refused(place: Path, server: RlServer, holder: str) -> None:
    """Every other command ends with one message and leaves no file."""
    other = recipe(place, "other", server)
    for argv in (("rl", other), ("rl", other, "--dry-run"), ("eval", place / "model", other)):
        ended = command(*argv, folder=place / "other")
        assert ended.code == 1
        assert f"{server.url}: weights 0: init: status 409: this server samples for" in ended.err
        assert f": {place}/{holder}/run. End that run, or use another server" in ended.err
        assert "Traceback" not in ended.err
        assert not files_of(place / "other" / "run")


@pytest.fixture(scope="module")
def undisturbed(place: Path) -> Path:
    made = recipe(place, "undisturbed", None)
    (place / "undisturbed" / "go").touch()
    assert command("rl", made, folder=place / "undisturbed").code == 0
    return place / "undisturbed" / "run"


def test_a_run_under_way_keeps_its_server_until_its_end(place: Path, server: RlServer, undisturbed: Path) -> None:
    running = waiting(place, "first", server)
    refused(place, server, "first")
    assert server.info().weight_version == "2"
    (place / "first" / "go").touch()
    assert running.ended().code == 0
    require_same(place / "first" / "run", undisturbed)
    ended = command("eval", place / "model", recipe(place, "other", server), folder=place / "other")
    assert ended.code == 0, ended.err


def test_a_killed_run_has_its_server_again_when_it_is_resumed(place: Path, server: RlServer, undisturbed: Path) -> None:
    running = waiting(place, "killed", server)
    running.signal(signal.SIGKILL)
    running.process.join(10)
    refused(place, server, "killed")
    (place / "killed" / "go").touch()
    ended = command("rl", "--resume", place / "killed" / "run", folder=place / "killed")
    assert ended.code == 0, ended.err
    require_same(place / "killed" / "run", undisturbed)


def test_a_lease_ends_after_its_time_and_each_call_renews_it(server: RlServer) -> None:
    assert server.take("ann", 0.5)[0] == 200
    for _ in range(4):
        time.sleep(0.2)
        assert server.post(wire.RESUME, **{wire.OWNER_HEADER: "ann"})[0] == 200
        assert server.take("bob", 0.5)[0] == 409
    time.sleep(0.6)
    assert server.take("bob", 60)[0] == 200
    status, said = server.post(wire.RESUME, **{wire.OWNER_HEADER: "ann"})
    assert (status, "samples for bob" in str(said)) == (409, True)
    assert server.take("bob", 0)[0] == 200  # given back
    status, said = server.post(wire.RESUME, **{wire.OWNER_HEADER: "ann"})
    assert (status, "does not belong to a run" in str(said)) == (409, True)
    assert server.take("bob", 0.05)[0] == 200
    time.sleep(0.1)
    status, said = server.post(wire.RESUME, **{wire.OWNER_HEADER: "ann"})
    assert (status, "bob took this server, and its lease has ended" in str(said)) == (409, True)


CHANGING = (wire.PAUSE, wire.RESUME, wire.START, wire.UPDATE, wire.FINISH)


def test_only_its_run_changes_a_server_and_others_may_sample(server: RlServer) -> None:
    assert server.take("ann: /räume/1", 60)[0] == 200
    for path in CHANGING:
        for owner in ({}, {wire.OWNER_HEADER: "bob"}):
            status, said = server.post(path, **owner)
            assert (status, "samples for ann: /räume/1" in str(said)) == (409, True)
    assert server.put(wire.UPLOAD.format(sha256="0" * 64), b"weights")[0] == 409
    assert len(server.generate((3, 4))) == 1
    assert server.post(wire.PAUSE, **{wire.OWNER_HEADER: "ann: /r%C3%A4ume/1"})[0] == 200


@pytest.mark.parametrize("taken_back", [False, True])
def test_what_a_run_that_lost_its_server_had_under_way_is_not_answered(taken_back: bool, server: RlServer) -> None:
    """Weights of another run may have sampled it, and may have the same version."""
    assert server.take("ann", 0.05)[0] == 200
    body = wire.GenerateRequest(token_ids=(3, 4), sampling_params=wire.SamplingFields(max_tokens=4))
    server.post(wire.PAUSE, **{wire.OWNER_HEADER: "ann"})
    with ThreadPoolExecutor(1) as other:
        under_way = other.submit(server.post, wire.GENERATE, body, **{wire.OWNER_HEADER: "ann"})
        while not server.server.service.sampler.waiting:
            time.sleep(0.01)
        time.sleep(0.1)
        assert server.take("bob", 60)[0] == 200
        if taken_back:
            assert server.take("bob", 0)[0] == 200
            assert server.take("ann", 60)[0] == 200
        server.post(wire.RESUME, **{wire.OWNER_HEADER: "ann" if taken_back else "bob"})
        assert under_way.result()[0] == 409


@pytest.fixture
def engine(place: Path, server: RlServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpEngine]:
    """Of a run that has the server, with a short lease."""
    for module in (http_engine, weight_updates):
        monkeypatch.setattr(module, "LEASE_SECONDS", 0.3)
    policy = load_policy(ModelOptions(path=str(place / "model")))
    made = HttpEngine(policy, HttpOptions(urls=(server.url,)), longest=40, sampling=SamplingParams())
    try:
        made.load(ExportedWeights(policy), 0)
        yield made
    finally:
        made.close()


def test_a_run_that_calls_no_server_for_long_keeps_it(server: RlServer, engine: HttpEngine) -> None:
    time.sleep(1)
    assert server.take("bob", 60)[0] == 409
    engine.close()
    assert server.take("bob", 60)[0] == 200


def test_a_run_that_was_stopped_does_not_take_its_server_back_or_free_it(server: RlServer, engine: HttpEngine) -> None:
    """The server has the other run's weights until the next update."""
    engine.loop.call(time.sleep, 1)  # as SIGSTOP does
    time.sleep(0.5)
    for seconds in (60, 0):
        assert server.take("bob", seconds)[0] == 200
    time.sleep(1)
    assert server.take("bob", 0.05)[0] == 200
    time.sleep(0.3)
    engine.close()
    assert server.post(wire.RESUME, **{wire.OWNER_HEADER: "bob"})[0] == 200
