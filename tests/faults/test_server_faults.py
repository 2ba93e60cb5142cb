"""Servers that die, hang or answer nonsense in any phase: no bit of a run changes, or it ends in time and says why."""

import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.faults.servers import SAMPLE_SECONDS, UPDATE_SECONDS, Server, http_section, servers
from tests.support.faulty_proxy import Fault, FaultyProxy
from tests.support.rank_runs import by_ranks
from tests.support.runs import command, records, require_same, save_tiny_model, start, tiny_recipe

ROLLOUT, EVALUATION, PROBE = b'"purpose":"rollout"', b'"purpose":"evaluation"', b'"purpose":"probe"'
GENERATE = "/inference/v1/generate"
DEADLINE = UPDATE_SECONDS + SAMPLE_SECONDS + 10
RUN_SECONDS = 30
"""More than a run takes without a fault."""


@dataclass(frozen=True)
class Phase:
    """Requests of one phase of a run, and how many of them pass before a fault."""

    name: str
    path: str
    body: bytes = b""
    skip: int = 0

    def fault(self, kind: str, *, times: int = 1_000_000, **more: object) -> Fault:
        return Fault(kind, self.path, body=self.body, skip=self.skip, times=times, **more)  # type: ignore[arg-type]


PHASES = [
    Phase("sampling", GENERATE, ROLLOUT, skip=6),
    Phase("evaluation", GENERATE, EVALUATION, skip=2),
    Phase("pause", "/pause", skip=1),
    Phase("upload of weights", "/weights/", skip=1),
    Phase("start of an update", "/start_weight_update", skip=1),
    Phase("update", "/update_weights", skip=1),
    Phase("end of an update", "/finish_weight_update", skip=1),
    Phase("resume", "/resume", skip=1),
]
KINDS = {"stall": 0.0, "cut": 0.0, "error": 0.0, "garbage": 0.0, "refuse": 0.0, "delay": 1.0, "long delay": 8.0}
"""Of answers; a delay has its seconds, which are within the deadlines or behind them."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    save_tiny_model(folder / "model")
    return folder


@pytest.fixture(scope="module")
def undisturbed(place: Path) -> Path:
    """The run in one process."""
    assert command("rl", tiny_recipe(place / "whole"), folder=place / "whole").code == 0
    return place / "whole" / "run"


@pytest.fixture
def two(place: Path, request: pytest.FixtureRequest) -> Iterator[tuple[list[Server], list[FaultyProxy]]]:
    with servers(place / "model", place / request.node.name.translate(NO_BRACKETS), 2) as started:
        yield started


@pytest.fixture(scope="module")
def lasting(place: Path) -> Iterator[tuple[list[Server], list[FaultyProxy]]]:
    """Two servers that faults of their proxies do not harm."""
    with servers(place / "model", place / "lasting", 2) as started:
        yield started


NO_BRACKETS = str.maketrans("[] ", "---")


def run_over(proxies: list[FaultyProxy], folder: Path, **sections: Mapping[str, Any]) -> Path:
    recipe = tiny_recipe(folder, engine=http_section(proxies), **sections)
    ended = start("rl", recipe, folder=folder).ended(RUN_SECONDS + DEADLINE)
    assert ended.code == 0, ended.err
    return folder / "run"


def test_a_run_over_two_servers_has_the_bits_of_one_in_process(place, lasting, undisturbed):
    _, proxies = lasting
    require_same(run_over(proxies, place / "over-two"), undisturbed)


QUICK = ("sampling", "update")
"""Phases that `make test` tries too."""
MARKED = [pytest.param(each, marks=() if each.name in QUICK else pytest.mark.scale, id=each.name) for each in PHASES]


@pytest.mark.parametrize("phase", MARKED)
def test_a_server_that_is_killed_in_a_phase_changes_no_bit(place, two, undisturbed, phase):
    (first, _), proxies = two
    proxies[0].faults = [phase.fault("pass", times=1, call=first.kill)]
    require_same(run_over(proxies, place / f"killed-{phase.name}"), undisturbed)
    assert not first.command.process.is_alive()


@pytest.mark.parametrize("phase", MARKED)
def test_a_run_ahead_of_updates_whose_server_is_killed_is_replayed_to_the_bit(place, two, phase):
    """Which tokens the old and the new weights sample depends on time, so that there is no run to compare with."""
    (first, _), proxies = two
    proxies[0].faults = [phase.fault("pass", times=1, call=first.kill)]
    folder = place / f"ahead-{phase.name}"
    run = run_over(proxies, folder, rollout={"max_staleness": 2}, checkpoint={"every_steps": 1, "keep_last": 9})
    assert not first.command.process.is_alive()
    replayed = command("replay", run, folder=folder)
    assert replayed.code == 0, replayed.out
    assert replayed.out.splitlines() == [f"step {step}: equal in every bit" for step in range(5)]


@pytest.mark.scale
@pytest.mark.parametrize("phase", PHASES[:1] + PHASES[5:6], ids=lambda phase: phase.name)
def test_a_server_that_hangs_in_a_phase_changes_no_bit(place, two, undisturbed, phase):
    (first, _), proxies = two
    proxies[0].faults = [phase.fault("pass", times=1, call=lambda: first.send(signal.SIGSTOP))]
    require_same(run_over(proxies, place / f"hangs-{phase.name}"), undisturbed)


@pytest.mark.scale
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name)
@pytest.mark.parametrize("kind", KINDS)
def test_answers_that_are_broken_once_change_no_bit(place, lasting, undisturbed, kind, phase):
    _, proxies = lasting
    proxies[0].faults = [phase.fault(kind.removeprefix("long "), times=1, seconds=KINDS[kind])]
    proxies[1].faults = []
    require_same(run_over(proxies, place / f"{kind}-{phase.name}"), undisturbed)
    assert proxies[0].faults[0].times == 0


def test_a_server_that_is_started_again_with_the_old_model_gets_the_new_weights(place, two, undisturbed):
    (first, _), proxies = two
    asked: list[int] = []

    def restart() -> None:
        """The request that is passed on next asks the old model, whose answer must not be taken."""
        first.kill()
        first.restart()
        asked.append(len(proxies[0].requests))

    proxies[0].faults = [PHASES[0].fault("pass", times=1, call=restart)]
    require_same(run_over(proxies, place / "restarted"), undisturbed)
    assert proxies[0].requests[asked[0] :].count(GENERATE) > 16, "it samples again"


SAID = {"sampling": "sample", "update": "weights 1: update"}
"""The phase as a message names it."""


@pytest.mark.parametrize("kind", [pytest.param("stall", marks=pytest.mark.scale), "error", "refuse"])
@pytest.mark.parametrize("phase", [PHASES[0], PHASES[5]], ids=lambda phase: phase.name)
def test_without_another_server_a_run_ends_in_time_and_names_server_phase_and_checkpoint(place, lasting, kind, phase):
    _, proxies = lasting
    proxies[0].faults = [phase.fault(kind)]
    folder = place / f"alone-{kind}-{phase.name}"
    running = start("rl", tiny_recipe(folder, engine=http_section(proxies[:1])), folder=folder)
    running.wait_until(lambda: proxies[0].faults[0].times < 1_000_000)
    ended = running.ended(DEADLINE)
    assert ended.code == 1
    for text in (f"{proxies[0].url}: {SAID[phase.name]}: ", "no server is left", "The last good checkpoint is "):
        assert text in ended.err
    proxies[0].faults = []


@pytest.fixture(scope="module")
def by_two_ranks(place: Path, lasting: tuple[list[Server], list[FaultyProxy]]) -> Path:
    folder = place / "two-ranks"
    ended = by_ranks("rl", tiny_recipe(folder, engine=http_section(lasting[1])), folder=folder)
    assert ended.code == 0, ended.err
    return folder / "run"


@pytest.mark.scale
@pytest.mark.parametrize("phase", PHASES[:1] + PHASES[5:6], ids=lambda phase: phase.name)
def test_a_server_that_is_killed_while_two_ranks_train_changes_no_bit(place, two, by_two_ranks, phase):
    (first, _), proxies = two
    proxies[0].faults = [phase.fault("pass", times=1, call=first.kill)]
    folder = place / f"two-ranks-{phase.name}"
    ended = by_ranks("rl", tiny_recipe(folder, engine=http_section(proxies)), folder=folder)
    assert ended.code == 0, ended.err
    assert not first.command.process.is_alive()
    require_same(folder / "run", by_two_ranks)


def test_a_cut_off_network_that_is_joined_again_changes_no_bit(place, lasting, undisturbed):
    _, proxies = lasting
    proxies[0].faults = [PHASES[0].fault("refuse", times=3)]
    require_same(run_over(proxies, place / "joined"), undisturbed)


def test_a_run_that_lost_its_only_server_resumes_to_the_same_bits(place, lasting, undisturbed):
    _, proxies = lasting
    folder = place / "resumed"
    proxies[0].faults = [Phase("sampling", GENERATE, ROLLOUT, skip=9).fault("refuse")]
    recipe = tiny_recipe(folder, engine=http_section(proxies[:1]))
    assert command("rl", recipe, folder=folder).code == 1
    proxies[0].faults = []
    assert command("rl", "--resume", folder / "run", folder=folder).code == 0
    require_same(folder / "run", undisturbed)
    assert records(folder / "run" / "metrics.jsonl")
