"""Sampling from servers: the same completions as in process, also where a server fails or hangs."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from posttrain.errors import RunError
from posttrain.generation.engine import EngineElsewhere, require_engine, sample_groups
from posttrain.generation.http import probe
from posttrain.generation.http.http_engine import HttpEngine
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.request import Continuation, Request, Sampled, StreamKey
from posttrain.generation.rl_protocol import FINISH, GENERATE, INIT, PAUSE, RELEASE, RESUME, START, UPDATE
from posttrain.models.loading.saving import ExportedWeights
from posttrain.models.policy import Policy
from posttrain.options.rollout import HttpOptions, SamplingParams
from posttrain.records import Group
from tests.support.fake_inference import FakeInference
from tests.support.faulty_endpoint import Play, hangs_up, raw, reply, status, truncated
from tests.support.http_engines import (
    HASTY,
    LONGEST,
    PROMPTS,
    QUICK,
    assert_same,
    changed,
    engine_of,
    move,
    ready,
    servers,
)
from tests.support.refusals import refused
from tests.support.tiny import request, tiny_policy, twin


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_policy()


@pytest.fixture(scope="module")
def expected(policy: Policy) -> Sequence[Group]:
    """What one process samples."""
    return sample_groups(InProcessEngine(policy), PROMPTS, request(5))


@pytest.fixture(autouse=True)
def short_probe(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences are enough for tests of something else."""
    if "the_probe" not in request.node.name:
        monkeypatch.setattr(probe, "NUM_SEQUENCES", 2)


@pytest.mark.parametrize("count", [1, 3])
def test_servers_sample_what_one_process_does(count: int, policy: Policy, expected: Sequence[Group]) -> None:
    with ready(policy, count) as (engine, fakes):
        assert require_engine(engine) is engine
        assert isinstance(engine, EngineElsewhere)
        assert engine.reproducible
        assert engine.suppresses
        assert_same(sample_groups(engine, PROMPTS, request(5)), expected)
        assert all(each.routes().count(GENERATE) > 2 for each in fakes)  # the probe, and a share of the groups
        greedy = request(2, sampling=SamplingParams(greedy=True))
        assert_same(sample_groups(engine, PROMPTS, greedy), sample_groups(InProcessEngine(policy), PROMPTS, greedy))


def test_a_group_is_one_request_with_its_streams(policy: Policy) -> None:
    with ready(policy) as (engine, (fake,)):
        before = len(fake.asked)
        sample_groups(engine, PROMPTS, request(5, key=StreamKey(3, "rollout", 7), first_draw=2))
        bodies = [body for path, body in fake.asked[before:] if path == GENERATE]
    assert len(bodies) == len(PROMPTS)
    assert sorted(body["posttrain"]["draw"] for body in bodies) == [2, 3, 4, 5]
    for body in bodies:
        own, params = body["posttrain"], body["sampling_params"]
        assert (own["seed"], own["purpose"], own["step"], own["sample"]) == (3, "rollout", 7, 0)
        assert (params["n"], params["ignore_eos"], params["stop_token_ids"]) == (5, True, [*policy.stop_ids])
    assert len({body["request_id"] for body in bodies}) == len(PROMPTS)


def another_number(body: dict[str, Any], connection: Any) -> None:
    reply(connection, 200, json.dumps({"request_id": "another", "choices": []}))


def unversioned(answer: dict[str, Any]) -> None:
    for choice in answer["choices"]:
        choice["weight_versions"] = [{"version": "default", "start": 0, "end": len(choice["token_ids"])}]


def late_but_sound(fake: FakeInference) -> Play:
    def play(body: dict[str, Any], connection: Any) -> None:
        time.sleep(HASTY.sample + 0.5)
        reply(connection, 200, json.dumps(fake.answer(GENERATE, body)))

    return play


def always(play: Play) -> Callable[[FakeInference], Play]:
    return lambda fake: play


FAULTS: dict[str, tuple[Callable[[FakeInference], Play], str]] = {
    "500": (always(status(500)), "status 500"),
    "an empty 500": (always(lambda body, connection: reply(connection, 500, "")), "status 500: no text"),
    "garbage": (always(raw("<html>")), "not a GenerateResponse"),
    "half a body": (always(truncated), "sample"),
    "hangs up": (always(hangs_up), "sample"),
    "late": (late_but_sound, "no answer in 4 seconds"),
    "another's answer": (always(another_number), "answer to 'another'"),
    "old weights": (changed(unversioned), "'default'; version 0 was sent"),
    "a completion missing": (changed(lambda answer: answer["choices"].pop(0)), "4 completions; 5"),
    "a log-prob missing": (changed(lambda answer: answer["choices"][0]["logprobs"]["content"].pop()), "log-probs of"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_failing_server_had_is_sampled_by_the_other_to_the_same_tokens(
    fault: str, policy: Policy, expected: Sequence[Group], capsys: pytest.CaptureFixture[str]
) -> None:
    make, says = FAULTS[fault]
    seconds = HASTY if fault == "late" else QUICK
    with ready(policy, 2, seconds=seconds) as (engine, (good, bad)):
        bad.faults[GENERATE].extend([make(bad)] * 20)
        began = time.monotonic()
        groups = sample_groups(engine, PROMPTS, request(5))
        assert time.monotonic() - began < seconds.sample + 10
        assert_same(groups, expected)
        told = capsys.readouterr().err
        assert bad.url in told
        assert says in told
        assert good.url not in told


def test_a_server_that_failed_is_left_out_until_the_next_update(policy: Policy) -> None:
    with ready(policy, 2) as (engine, (_, bad)):
        bad.faults[GENERATE].append(hangs_up)
        sample_groups(engine, PROMPTS, request(2))
        before = bad.routes().count(GENERATE)
        sample_groups(engine, PROMPTS, request(2))
        assert bad.routes().count(GENERATE) == before
        engine.load(ExportedWeights(policy), 1)
        sample_groups(engine, PROMPTS, request(2))
        assert bad.routes().count(GENERATE) > before + 2


@pytest.mark.parametrize("code", [400, 503])
def test_no_server_left_is_an_error_that_names_each(code: int, policy: Policy) -> None:
    """Also where each refuses one request: it is asked once of each, and not again."""
    with ready(policy, 2) as (engine, fakes):
        for each in fakes:
            each.faults[GENERATE].extend([status(code)] * 20)
        with refused("no server is left", fakes[0].url, fakes[1].url, f"sample: status {code}", error=RunError):
            sample_groups(engine, PROMPTS, request(5))


def test_a_server_that_recovers_replaces_one_that_fails_in_the_same_update(policy: Policy) -> None:
    with ready(policy, 2) as (engine, fakes):
        for version, fake in ((1, fakes[1]), (2, fakes[0])):
            fake.faults[UPDATE].append(status(500))
            engine.load(ExportedWeights(policy), version)
        groups = sample_groups(engine, PROMPTS, request(2))
        assert {each.weights_version for group in groups for each in group.rollouts} == {2}


PHASES = {PAUSE: "pause", INIT: "init", START: "start", UPDATE: "update", FINISH: "finish", RESUME: "resume"}


@pytest.mark.parametrize("route", [INIT, UPDATE, RESUME])
def test_a_server_that_fails_in_an_update_is_left_out_and_tried_again_at_the_next(
    route: str, policy: Policy, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = twin(policy)
    with ready(policy, 2) as (engine, (_, bad)):
        for version in (1, 2):
            move(trained)
            if version == 1:
                bad.faults[route].append(hangs_up)
            engine.load(ExportedWeights(trained), version)
            groups = sample_groups(engine, PROMPTS, request(2))
            assert_same(groups, sample_groups(InProcessEngine(trained), PROMPTS, request(2)))
            assert {each.weights_version for group in groups for each in group.rollouts} == {version}
        assert f"weights 1: {PHASES[route]}" in capsys.readouterr().err
        assert bad.version == "2"


@pytest.mark.parametrize("route", PHASES)
def test_the_first_update_is_strict(route: str, policy: Policy) -> None:
    with servers(policy, count=2) as fakes, engine_of(policy, fakes) as engine:
        fakes[1].faults[route].append(status(500))
        fakes[1].faults[UPDATE].extend([status(500)] * (route == START))
        with refused(fakes[1].url, f"weights 0: {PHASES[route]}: status 500", error=RunError):
            engine.load(ExportedWeights(policy), 0)
        with refused("Call load first"):
            engine.open(request())


def test_an_update_that_a_killed_trainer_left_open_is_gone_on_with(policy: Policy) -> None:
    with servers(policy) as (fake,), engine_of(policy, [fake]) as engine:
        fake.started = fake.paused = True
        engine.load(ExportedWeights(policy), 0)
        assert (fake.version, fake.paused) == ("0", False)


def turns_of(engine: HttpEngine | InProcessEngine, count: int) -> list[Sampled]:
    """Conversations of some turns, each put as soon as the one before is done."""
    asked = Request(sampling=SamplingParams(), key=StreamKey(5, "rollout", 1), keep=True)
    done: list[Sampled] = []
    with engine.open(asked) as sampling:
        sampling.put(
            [Continuation(prefix=prompt.tokens, draw=draw, sample=0, limit=5) for draw, prompt in enumerate(PROMPTS)]
        )
        while len(done) < count * len(PROMPTS):
            for each in sampling.take(30):
                done.append(each)
                place = each.continuation
                position = place.first_position + len(each.tokens)
                if sum(other.continuation.draw == place.draw for other in done) < count:
                    prefix = (*each.sequence, 3, 1)
                    sampling.put([replace(place, prefix=prefix, first_position=position)])
                else:
                    sampling.release([each])
    return sorted(done, key=lambda each: (each.continuation.draw, each.continuation.first_position))


@pytest.mark.parametrize("dies", [False, True])
def test_a_conversation_stays_with_its_server_and_goes_on_at_another_when_that_dies(dies: bool, policy: Policy) -> None:
    expected = turns_of(InProcessEngine(policy), 3)
    with ready(policy, 2) as (engine, fakes):
        if dies:
            fakes[1].faults[GENERATE].extend(
                [lambda body, connection: reply(connection, 200, json.dumps(fakes[1].answer(GENERATE, body)))]
                + [status(500)] * 20
            )
        before = [len(each.asked) for each in fakes]
        found = turns_of(engine, 3)
        assert [each.tokens for each in found] == [each.tokens for each in expected]
        at = [
            {body["posttrain"]["draw"] for path, body in fake.asked[start:] if path == GENERATE}
            for fake, start in zip(fakes, before, strict=True)
        ]
        assert at[0] | at[1] == set(range(len(PROMPTS)))
        assert bool(at[0] & at[1]) == dies
        released = [body for fake in fakes for path, body in fake.asked if path == RELEASE]
        assert dies or sum(len(body["streams"]) for body in released) == len(PROMPTS)


def test_an_evaluation_server_samples_evaluations_and_nothing_else(policy: Policy) -> None:
    with servers(policy, count=2) as (first, own):
        options = HttpOptions(urls=(first.url,), evaluation=own.url, seconds=QUICK)
        engine = HttpEngine(policy, options, longest=LONGEST, sampling=SamplingParams())
        try:
            engine.load(ExportedWeights(policy), 0)
            counts = []
            for purpose in ("rollout", "evaluation"):
                before = first.routes().count(GENERATE), own.routes().count(GENERATE)
                sample_groups(engine, PROMPTS, request(2, key=StreamKey(0, purpose, 1)))
                counts.append((first.routes().count(GENERATE) - before[0], own.routes().count(GENERATE) - before[1]))
            assert counts == [(4, 0), (0, 4)]
            own.faults[GENERATE].extend([status(500)] * 9)
            sample_groups(engine, PROMPTS, request(2, key=StreamKey(0, "evaluation", 1)))  # the others do it
        finally:
            engine.close()
