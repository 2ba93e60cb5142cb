"""Engines over fake inference servers, and what their tests share."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from posttrain.generation.http.http_engine import HttpEngine
from posttrain.generation.rl_protocol import GENERATE
from posttrain.models.loading.saving import ExportedWeights
from posttrain.models.policy import Policy
from posttrain.options.rollout import HttpOptions, HttpSeconds, SamplingParams
from posttrain.records import Group
from tests.support.fake_inference import FakeInference, fake_inference
from tests.support.faulty_endpoint import Play, reply
from tests.support.tiny import some_prompts

QUICK = HttpSeconds(connect=10, sample=60, update=60)
HASTY = HttpSeconds(connect=10, sample=4, update=60)
LONGEST = 40


@contextmanager
def servers(policy: Policy, *, count: int = 1, ours: bool = True) -> Iterator[list[FakeInference]]:
    with ExitStack() as held:
        yield [held.enter_context(fake_inference(policy, ours=ours)) for _ in range(count)]


@contextmanager
def engine_of(
    policy: Policy, fakes: Sequence[FakeInference], *, sampling: SamplingParams | None = None, **options: Any
) -> Iterator[HttpEngine]:
    """An engine over servers; closed at the end, as a session does."""
    options = {"seconds": QUICK, **options}
    made = HttpOptions(urls=tuple(each.url for each in fakes), **options)
    engine = HttpEngine(policy, made, longest=LONGEST, sampling=sampling or SamplingParams())
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def ready(policy: Policy, count: int = 1, **options: Any) -> Iterator[tuple[HttpEngine, list[FakeInference]]]:
    """An engine whose servers have version 0."""
    with servers(policy, count=count) as fakes, engine_of(policy, fakes, **options) as engine:
        engine.load(ExportedWeights(policy), 0)
        yield engine, fakes


def assert_same(found: Sequence[Group], expected: Sequence[Group]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.draw == other.draw
        for mine, theirs in zip(one.rollouts, other.rollouts, strict=True):
            assert (mine.sample, mine.tokens, mine.finish) == (theirs.sample, theirs.tokens, theirs.finish)
            assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-12)


PROMPTS = some_prompts([4, 9, 1, 6])


@torch.no_grad()
def move(policy: Policy) -> None:
    """As an update does: by so much that old weights are tenths of a nat off."""
    for parameter in policy.model.parameters():
        parameter.mul_(1.1)


def changed(change: Callable[[dict[str, Any]], object]) -> Callable[[FakeInference], Play]:
    """The right answer, but for one thing."""

    def make(fake: FakeInference) -> Play:
        def play(body: dict[str, Any], connection: Any) -> None:
            answer = fake.answer(GENERATE, body)
            change(answer)
            reply(connection, 200, json.dumps(answer))

        return play

    return make
