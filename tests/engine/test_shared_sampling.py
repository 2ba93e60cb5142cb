"""One sampling for several threads: each gets what it would get alone, and the trainer has its turn."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from posttrain.errors import RunError
from posttrain.generation.engine import Sampling, SamplingTimeout, sample_groups
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.request import GroupRequest, Request, Sampled, StreamKey
from posttrain.generation.shared_sampling import EngineInTurns, SharedEngine, Turns
from posttrain.options.rollout import SamplingParams
from tests.support.engines import ChangedSampling
from tests.support.refusals import refused
from tests.support.tiny import rows_of, some_prompts, tiny_policy

REQUEST = GroupRequest(group_size=4, max_completion_tokens=9, sampling=SamplingParams(), key=StreamKey(3, "rollout", 1))
PROMPTS = some_prompts([3, 7, 1])


def request_of(step: int) -> GroupRequest:
    return replace(REQUEST, key=StreamKey(3, "rollout", step))


@pytest.mark.parametrize("max_rows", [5, 256])
def test_each_of_three_threads_gets_what_it_would_get_alone(max_rows: int) -> None:
    alone = [rows_of(sample_groups(InProcessEngine(tiny_policy()), PROMPTS, request_of(step))) for step in (1, 2, 3)]
    engine = InProcessEngine(tiny_policy(), max_rows=max_rows)
    with SharedEngine(engine, Turns()) as shared, ThreadPoolExecutor(3) as pool:
        found = [pool.submit(sample_groups, shared, PROMPTS, request_of(step)) for step in (1, 2, 3)]
        together = [rows_of(each.result(timeout=60)) for each in found]
    assert together == alone
    assert len({str(rows) for rows in together}) == 3
    assert shared.busy_seconds > 0


def test_while_it_is_the_trainers_turn_nothing_is_sampled_and_another_sampling_is() -> None:
    engine, turns = InProcessEngine(tiny_policy()), Turns()
    expected = rows_of(sample_groups(InProcessEngine(tiny_policy()), PROMPTS, request_of(1)))
    with SharedEngine(engine, turns) as shared, ThreadPoolExecutor(1) as pool:
        with turns.trainer():
            found = pool.submit(sample_groups, shared, PROMPTS, request_of(1))
            mine = sample_groups(
                EngineInTurns(engine, turns), PROMPTS, replace(REQUEST, sampling=SamplingParams(greedy=True))
            )
            time.sleep(0.1)
            assert not found.done()
            assert shared.busy_seconds == 0
        assert rows_of(found.result(timeout=60)) == expected
    assert rows_of(mine) != expected


def test_the_trainer_has_its_turn_amid_many_tokens() -> None:
    engine, turns = InProcessEngine(tiny_policy()), Turns()
    many = replace(REQUEST, group_size=16, max_completion_tokens=30)
    waits: list[float] = []
    with SharedEngine(engine, turns) as shared, ThreadPoolExecutor(2) as pool:
        found = [
            pool.submit(sample_groups, shared, PROMPTS, replace(many, key=request_of(step).key)) for step in (1, 2)
        ]
        while not all(each.done() for each in found):
            began = time.monotonic()
            with turns.trainer():
                waits.append(time.monotonic() - began)
                engine.load(None, engine.weights_version + 1)  # type: ignore[arg-type]
        groups = [each.result() for each in found]
    assert len(waits) > 3
    spans = {len(rollout.sequence.versions) for step in groups for group in step for rollout in group.rollouts}
    assert max(spans) > 2


def test_a_view_waits_as_long_as_it_is_asked_to() -> None:
    turns = Turns()
    with SharedEngine(InProcessEngine(tiny_policy()), turns) as shared, turns.trainer(), ThreadPoolExecutor(1) as pool:
        view = pool.submit(shared.open, REQUEST)
        time.sleep(0.05)
        assert not view.done()
        turns.give()
        try:
            with view.result(timeout=60) as sampling, refused("InProcessEngine", "0.01 seconds", error=SamplingTimeout):
                sampling.take(0.01)
        finally:
            turns.take()


class Impatient(InProcessEngine):
    patience_seconds = 0.2  # type: ignore[assignment]


def test_a_turn_of_the_trainer_that_outlasts_the_engines_patience_is_no_timeout() -> None:
    engine, turns = Impatient(tiny_policy()), Turns()
    with SharedEngine(engine, turns) as shared, ThreadPoolExecutor(1) as pool:
        found = pool.submit(sample_groups, shared, PROMPTS, REQUEST)
        with turns.trainer():
            time.sleep(0.5)
        assert rows_of(found.result(timeout=60)) == rows_of(sample_groups(engine, PROMPTS, REQUEST))


@pytest.mark.parametrize("look_seconds", [None, 0.05])
def test_an_engine_that_returns_nothing_for_longer_than_its_patience_is_an_error(look_seconds: float | None) -> None:
    class Stuck(Impatient):
        def open(self, request: Request) -> Sampling:  # type: ignore[override]
            return Silent(super().open(request), list)

    class Silent(ChangedSampling):
        def take(self, seconds: float) -> list[Sampled]:
            time.sleep(0.02)
            raise SamplingTimeout("Stuck", seconds, 1)

    with SharedEngine(Stuck(tiny_policy()), Turns()) as shared, refused("Stuck", "0.2 seconds", error=RunError):
        sample_groups(shared, PROMPTS, REQUEST, look_seconds=look_seconds)


def test_what_an_engine_raises_reaches_each_thread_that_waits() -> None:
    class Breaks(InProcessEngine):
        def open(self, request: Request):  # type: ignore[no-untyped-def]
            sampling = super().open(request)
            sampling._advance = lambda: 1 / 0  # type: ignore[method-assign]
            return sampling

    with SharedEngine(Breaks(tiny_policy()), Turns()) as shared, ThreadPoolExecutor(2) as pool:
        found = [pool.submit(sample_groups, shared, PROMPTS, request_of(step)) for step in (1, 2)]
        assert [type(each.exception(timeout=60)) for each in found] == [ZeroDivisionError] * 2


def test_the_end_wakes_those_who_wait_and_leaves_no_thread_and_no_cache() -> None:
    engine, turns, before = InProcessEngine(tiny_policy()), Turns(), threading.active_count()
    with SharedEngine(engine, turns) as shared, ThreadPoolExecutor(1) as pool:
        with turns.trainer():
            found = pool.submit(sample_groups, shared, PROMPTS, replace(REQUEST, max_completion_tokens=40))
            shared.end(RunError("enough"))
        assert str(found.exception(timeout=60)) == "enough"
    assert threading.active_count() == before
    engine.open(REQUEST).close()
    assert engine._open == []


def test_a_result_that_nobody_put_is_told() -> None:
    def stranger(done: list[Sampled]) -> list[Sampled]:
        return [replace(each, continuation=replace(each.continuation, sample=99)) for each in done]

    class Changed(InProcessEngine):
        def open(self, request: Request) -> Sampling:  # type: ignore[override]
            return ChangedSampling(super().open(request), stranger)

    with SharedEngine(Changed(tiny_policy()), Turns()) as shared, refused("Changed", "was not put", error=RunError):
        sample_groups(shared, PROMPTS, REQUEST)
