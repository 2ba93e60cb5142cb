"""Servers whose answers are wrong on purpose, or that return as others: left out in time, while the others sample."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from posttrain.errors import RunError
from posttrain.generation.engine import sample_groups
from posttrain.generation.http import completion_requests, http_sampling, probe, servers as hosts
from posttrain.generation.http.server_calls import words_of
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.request import Continuation
from posttrain.generation.rl_protocol import GENERATE, PAUSE
from posttrain.models.loading.saving import ExportedWeights
from posttrain.models.policy import Policy
from tests.support.fake_inference import FakeInference
from tests.support.faulty_endpoint import Play, hangs_up, raw, reply, status
from tests.support.http_engines import PROMPTS, assert_same, changed, engine_of, move, ready, servers
from tests.support.refusals import refused
from tests.support.tiny import request, tiny_policy, twin


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_policy()


@pytest.fixture(autouse=True)
def short_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "NUM_SEQUENCES", 2)


def with_choice(change: Callable[[dict[str, Any]], object]) -> Callable[[FakeInference], Play]:
    """The right answer, but for its first completion."""
    return changed(lambda answer: change(answer["choices"][0]))


def token(number: int) -> Callable[[dict[str, Any]], object]:
    def change(choice: dict[str, Any]) -> None:
        choice["token_ids"] = [number, *choice["token_ids"][1:]]
        choice["logprobs"]["content"][0]["token_id"] = number

    return change


def logprob(value: float) -> Callable[[dict[str, Any]], object]:
    return lambda choice: choice["logprobs"]["content"][0].update(logprob=value)


HOSTILE: dict[str, tuple[Callable[[FakeInference], Play], str]] = {
    "a token beyond the vocabulary": (with_choice(token(24)), "token id 24; the policy has 0 to 23"),
    "a negative token": (with_choice(token(-1)), "token id -1"),
    "NaN": (with_choice(logprob(float("nan"))), "a log-prob of nan"),
    "infinity": (with_choice(logprob(float("-inf"))), "a log-prob of -inf"),
    "a log-prob above 0": (with_choice(logprob(0.01)), "a log-prob of 0.01"),
    "cut log-probs": (with_choice(lambda each: each.update(cut_logprobs=[-1.0])), "1 log-probs for"),
    "a version of 5,000 digits": (
        with_choice(lambda each: each["weight_versions"][0].update(version="9" * 5000)),
        "it sampled with weights '999",
    ),
    **{f"status {code}": (lambda fake, code=code: status(code), f"status {code}") for code in (400, 404, 409)},  # type: ignore[misc]
}


@pytest.mark.parametrize("fault", HOSTILE)
def test_a_server_whose_answers_cannot_be_used_is_left_out(
    fault: str, policy: Policy, capsys: pytest.CaptureFixture[str]
) -> None:
    make, says = HOSTILE[fault]
    with ready(policy, 2) as (engine, (_, bad)):
        bad.faults[GENERATE].extend([make(bad)] * 20)
        groups = sample_groups(engine, PROMPTS, request(3))
        assert_same(groups, sample_groups(InProcessEngine(policy), PROMPTS, request(3)))
        assert says in capsys.readouterr().err


def test_an_error_that_is_nested_too_deep_to_be_read_has_its_text() -> None:
    assert words_of(b"[" * 100_000).startswith("[[[")


def test_an_error_of_ours_ends_sampling_at_once(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> object:
        raise ZeroDivisionError("ours")

    with ready(policy) as (engine, _):
        monkeypatch.setattr(http_sampling, "completions_of", broken)
        with pytest.raises(ZeroDivisionError, match="ours"):
            sample_groups(engine, PROMPTS, request(2))


RETURNS: dict[str, tuple[bool, Callable[[FakeInference], object], str]] = {
    "vocabulary": (True, lambda fake: fake.facts.update(vocabulary=25), "25 logits"),
    "tokenizer": (True, lambda fake: fake.facts.update(tokenizer_digest="00"), "other tokens"),
    "context": (True, lambda fake: fake.facts.update(max_positions=20), "context has 20 tokens"),
    "vLLM, vocabulary": (False, lambda fake: fake.faults[GENERATE].append(status(400)), "fewer than 24 tokens"),
    "vLLM, tokenizer": (False, lambda fake: fake.faults["/tokenize"].append(raw('{"tokens": [1]}')), "other tokens"),
    "vLLM, context": (False, lambda fake: fake.settings.update(model_config={"max_model_len": 20}), "has 20 tokens"),
}


@pytest.mark.parametrize("returns", RETURNS)
def test_a_server_that_returns_as_another_stays_left_out(
    returns: str, policy: Policy, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, arrange, says = RETURNS[returns]
    trained = twin(policy)
    with servers(policy, count=2, ours=ours) as fakes, engine_of(policy, fakes) as engine:
        engine.load(ExportedWeights(trained), 0)
        bad = fakes[1]
        bad.faults[GENERATE].append(status(400))  # as where its embedding has fewer tokens than the prefix
        sample_groups(engine, PROMPTS, request(2))
        assert "status 400" in capsys.readouterr().err
        for version in (1, 2):
            move(trained)
            if version == 1:
                arrange(bad)
            engine.load(ExportedWeights(trained), version)
            groups = sample_groups(engine, PROMPTS, request(2))
            assert {each.weights_version for group in groups for each in group.rollouts} == {version}
            assert (says in capsys.readouterr().err) == (version == 1)
            bad.facts, bad.settings = {}, {}
        assert bad.version == "2"


def test_what_is_under_way_at_a_server_that_fails_in_an_update_goes_to_others_at_once(policy: Policy) -> None:
    with ready(policy, 2) as (engine, (_, bad)):
        held = threading.Event()
        bad.faults[GENERATE].extend([lambda body, connection: held.wait(30) and hangs_up(body, connection)] * 4)
        with engine.open(engine.probe.request) as sampling:
            sampling.put(
                [Continuation(prefix=each.tokens, draw=n, sample=0, limit=4) for n, each in enumerate(PROMPTS)]
            )
            while len(bad.faults[GENERATE]) == 4:
                time.sleep(0.01)
            bad.faults[PAUSE].append(hangs_up)
            began = time.monotonic()
            engine.load(ExportedWeights(policy), 1)
            num_done = 0
            while num_done < len(PROMPTS):
                num_done += len(sampling.take(20))
            assert time.monotonic() - began < 20
        held.set()


def test_a_sampling_that_finds_no_room_begins_when_another_ends(policy: Policy) -> None:
    with ready(policy) as (engine, _):
        engine.servers[0].facts = replace(engine.servers[0].facts, max_rows=1)
        with engine.open(engine.probe.request) as first, engine.open(engine.probe.request) as second:
            first.put([Continuation(prefix=(3, 4), draw=each, sample=0, limit=4) for each in range(2)])
            second.put([Continuation(prefix=(3, 5), draw=5, sample=0, limit=4)])
            assert len(second.take(20)) == 1
            num_done = 0
            while num_done < 2:
                num_done += len(first.take(20))


def test_transport_by_put_is_refused_for_vllm(policy: Policy) -> None:
    with (
        servers(policy, ours=False) as fakes,
        refused("engine.transport = put", "Use engine.transport: folder"),
        engine_of(policy, fakes, transport="put"),
    ):
        pass


def test_a_group_whose_answer_would_be_too_large_is_several_requests_with_the_same_completions(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = sample_groups(InProcessEngine(policy), PROMPTS[:1], request(5))
    with ready(policy) as (engine, (fake,)):
        before = len(fake.asked)
        monkeypatch.setattr(completion_requests, "MOST_LOGPROBS", 2 * request(5).max_completion_tokens)
        assert_same(sample_groups(engine, PROMPTS[:1], request(5)), expected)
        asked = [body for path, body in fake.asked[before:] if path == GENERATE]
    places = [(body["posttrain"]["sample"], body["sampling_params"]["n"]) for body in asked]
    assert sorted(places) == [(0, 2), (2, 2), (4, 1)]


def test_an_answer_may_have_what_was_asked_for_and_no_more(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is for hostile servers: it grows with the request."""
    monkeypatch.setattr(hosts, "MOST_ANSWER_BYTES", 0)
    with ready(policy) as (engine, (fake,)):
        sample_groups(engine, PROMPTS, request(5))
        fake.faults[GENERATE].append(lambda body, connection: reply(connection, 200, "[" + " " * 200_000 + "]"))
        with refused("an answer of more than", error=RunError):
            sample_groups(engine, PROMPTS, request(5))
