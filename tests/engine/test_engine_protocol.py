"""An engine is whatever has an engine's members; what it returns is looked at before it is graded, faults are named."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest

from posttrain.errors import RunError
from posttrain.generation.engine import (
    MEMBERS,
    PAGE,
    Engine,
    Sampling,
    SamplingTimeout,
    require_engine,
    require_room_for,
    sample_groups,
    take_checked,
)
from posttrain.generation.in_process import InProcessEngine, InProcessSampling
from posttrain.generation.request import Continuation, GroupRequest, Request, Sampled, StreamKey
from posttrain.options.rollout import SamplingParams
from posttrain.records import Finish, Prompt
from posttrain.rewards.grading.grade import reward_function
from posttrain.runs.progress import Clock
from posttrain.tasks.base import Probe, Reading
from posttrain.training.collector import discard_scores
from posttrain.training.evaluation import Questions, sample_answers
from posttrain.training.full_evaluation import full_evaluation
from tests.support.engines import ChangedEngine, ChangedSampling
from tests.support.refusals import mentions, refused
from tests.support.stages import LIMIT, even_tokens, stages_with
from tests.support.tiny import STOP_IDS, measures, some_prompts, tiny_policy, tokenizer

CONTEXT = 12


class Parrot:
    """Answers every prompt with its own tokens, the newest prompt first."""

    tokenizer = tokenizer()
    stop_ids = STOP_IDS
    max_positions = CONTEXT
    reproducible, logprob_gap, suppresses, patience_seconds = False, None, False, 5.0

    def __init__(self) -> None:
        self.weights_version = 0
        self.requests: list[Request] = []

    def load(self, weights: object, version: int) -> None:
        self.weights_version = version

    def open(self, request: Request) -> "Repeated":
        self.requests.append(request)
        return Repeated(self)


class Repeated(Sampling):
    def __init__(self, parrot: Parrot) -> None:
        self.parrot = parrot
        self.waiting: list[Continuation] = []
        self.closed = False

    def put(self, continuations: Sequence[Continuation]) -> None:
        self.waiting += continuations

    def take(self, seconds: float) -> list[Sampled]:
        assert seconds == self.parrot.patience_seconds
        one = self.waiting.pop()
        return [
            Sampled(
                continuation=one,
                tokens=one.prefix,
                logprobs=(0.0,) * len(one.prefix),
                finish=Finish.LENGTH,
                versions=((self.parrot.weights_version, len(one.prefix)),),
            )
        ]

    def close(self) -> None:
        self.closed = True


def even_first(completion_ids: Sequence[Sequence[int]], **columns: object) -> list[float]:
    return [float(tokens[0] % 2 == 0) for tokens in completion_ids]


PROMPTS = [Prompt(id=str(first), text="", tokens=(first, 7)) for first in (2, 3, 8, 10)]
QUESTIONS = Questions(prompts=PROMPTS, judge=reward_function(even_first), max_completion_tokens=5, seed=3)


def test_an_engine_of_ones_own_can_be_evaluated() -> None:
    engine, counts = Parrot(), []
    engine.load({}, 6)
    answers = sample_answers(require_engine(engine), QUESTIONS, samples=2, advance=counts.append)
    assert answers.correct.tolist() == [[1, 1], [0, 0], [1, 1], [1, 1]]
    assert {rollout.weights_version for group in answers.groups for rollout in group.rollouts} == {6}
    assert counts == [1] * 8
    assert [group.prompt.id for group in answers.groups] == ["2", "3", "8", "10"]


def test_ours_is_an_engine_too_and_honours_the_uniform_numbers() -> None:
    engine = InProcessEngine(tiny_policy())
    assert require_engine(engine) is engine
    assert isinstance(engine, Engine)
    assert engine.reproducible
    assert engine.suppresses
    assert engine.stop_ids == STOP_IDS
    assert engine.tokenizer is engine.policy.tokenizer


@pytest.mark.parametrize("length", [1, CONTEXT - 1])
def test_a_prompt_with_room_is_told_how_much(length: int) -> None:
    assert require_room_for(some_prompts([length])[0], Parrot()) == CONTEXT - length


def test_a_prompt_that_fills_the_context_of_an_engine_is_refused_with_the_numbers() -> None:
    with refused("p0: 13 tokens", "12"):
        require_room_for(some_prompts([CONTEXT + 1])[0], Parrot())


class Mute:
    """Has an engine's data and none of its methods."""

    tokenizer, stop_ids, reproducible, weights_version = None, (), True, 0


class SamplesByRollout(Mute):
    """What an engine was before."""

    def rollout(self) -> None:
        """Samples."""


WRONG: dict[str, tuple[object, tuple[str, ...]]] = {
    "nothing": (object(), ("a object", ", ".join(MEMBERS))),
    "half": (Mute(), ("a Mute", "load, logprob_gap, max_positions, open, patience_seconds, suppresses")),
    "rollout": (SamplesByRollout(), ("a SamplesByRollout", "`rollout`", PAGE)),
    "class": (Parrot, ("Parrot is a class",)),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_engine_is_refused_with_what_it_lacks(name: str) -> None:
    candidate, says = WRONG[name]
    with refused("engine: ", *says):
        require_engine(candidate)


ASKED = some_prompts([3, 5, 2])
REQUEST = GroupRequest(
    group_size=2, max_completion_tokens=4, sampling=SamplingParams(), key=StreamKey(0, "test", 1), first_draw=7
)


def given(sampled: Sampled, *tokens: int, **columns: Any) -> Sampled:
    """The same with other tokens, as one that reached the limit has them."""
    changed = {"logprobs": (-1.0,) * len(tokens), "versions": ((4, len(tokens)),), "finish": Finish.LENGTH, **columns}
    return replace(sampled, tokens=tokens, **changed)


FAULTS: dict[str, tuple[Callable[[Sampled], Sampled], str]] = {
    "not put": (
        lambda sampled: replace(sampled, continuation=replace(sampled.continuation, limit=9)),
        "this continuation was not put",
    ),
    "empty": (lambda sampled: given(sampled), "0 tokens; it must have 1 (the stop token) to limit = 4"),
    "too long": (lambda sampled: given(sampled, 1, 1, 1, 1, 1), "5 tokens"),
    "a log-prob too few": (
        lambda sampled: given(sampled, 1, 1, 3, logprobs=(-1.0, -1.0)),
        "3 tokens and 2 logprobs.  There is one for each token, the stop token too",
    ),
    "a log-prob too many of the cut": (
        lambda sampled: given(sampled, 1, cut_logprobs=(-1.0, -1.0)),
        "1 tokens and 2 cut_logprobs",
    ),
    "NaN": (
        lambda sampled: given(sampled, 1, 1, logprobs=(-1.0, nan)),
        "logprobs[1] = nan; log μ of a sampled token is finite and at most 0",
    ),
    "infinite": (lambda sampled: given(sampled, 1, 1, logprobs=(-inf, -1.0)), "logprobs[0] = -inf"),
    "a probability": (lambda sampled: given(sampled, 1, 1, logprobs=(-1.0, 0.25)), "logprobs[1] = 0.25"),
    "older weights": (
        lambda sampled: given(sampled, 1, versions=((3, 1),)),
        "sampled by version 3 of the weights, but version 4 was loaded last",
    ),
    "half of them older": (lambda sampled: given(sampled, 1, 1, versions=((3, 1), (4, 1))), "sampled by version 3"),
    "versions of fewer tokens": (
        lambda sampled: given(sampled, 1, 1, versions=((4, 1),)),
        "versions = ((4, 1),) for 2 tokens",
    ),
    "a stop without its token": (lambda sampled: given(sampled, 1, finish=Finish.STOP), "finish = stop"),
    "a stop token at the limit": (lambda sampled: given(sampled, STOP_IDS[0]), "finish = length"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told_with_engine_prompt_and_sample(fault: str) -> None:
    change, says = FAULTS[fault]
    engine = ChangedEngine(tiny_policy(), change, where=lambda _, each: each.continuation.sample == 1)
    engine.load(None, 4)  # type: ignore[arg-type]
    with pytest.raises(RunError) as error:
        sample_groups(engine, ASKED, REQUEST)
    mentions(str(error.value), "engine ChangedEngine, prompt p", f", sample 1: {says}")


class Returning(InProcessEngine):
    """Ours, with a change of what each `take` returns."""

    def __init__(self, change: Callable[[list[Sampled]], list[Sampled]]) -> None:
        super().__init__(tiny_policy())
        self.change = change

    def open(self, request: Any) -> Any:
        return ChangedSampling(super().open(request), self.change)


@pytest.mark.parametrize(
    ("versions", "says"),
    [
        (((4, 1), (6, 1)), None),
        (((5, 2),), None),
        (((3, 1), (6, 1)), "sampled by version 3 of the weights, but version 6 was loaded last, and 4 when it was put"),
        (((6, 1), (7, 1)), "sampled by version 7"),
        (((6, 1), (4, 1)), "later tokens have later weights"),
    ],
)
def test_weights_loaded_meanwhile_sample_some_tokens_and_none_is_older_than_those_at_the_put(
    versions: tuple[tuple[int, int], ...], says: str | None
) -> None:
    def changed(done: list[Sampled]) -> list[Sampled]:
        engine.load(None, 6)  # type: ignore[arg-type]
        return [given(each, 1, 1, versions=versions) for each in done]

    engine = Returning(changed)
    engine.load(None, 4)  # type: ignore[arg-type]
    if says is None:
        groups = sample_groups(engine, ASKED, REQUEST)
        assert all(rollout.weights_version == versions[0][0] for group in groups for rollout in group.rollouts)
        return
    with pytest.raises(RunError, match=says):
        sample_groups(engine, ASKED, REQUEST)


@pytest.mark.parametrize("logprob", [0.0, 1e-4], ids=["certain", "rounded"])
def test_a_certain_token_and_a_rounded_one_pass(logprob: float) -> None:
    def certain(sampled: Sampled) -> Sampled:
        return given(sampled, 1, logprobs=(logprob,), versions=((0, 1),))

    groups = sample_groups(ChangedEngine(tiny_policy(), certain), ASKED, REQUEST)
    assert {rollout.logprobs for group in groups for rollout in group.rollouts} == {(logprob,)}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda done: [], "engine Returning: take returned nothing"),
        (lambda done: [*done, done[0]], "this continuation was not put, or was returned before"),
    ],
    ids=["nothing", "twice"],
)
def test_a_take_returns_what_is_done_once(change: Callable[[list[Sampled]], list[Sampled]], says: str) -> None:
    with refused(says, error=RunError):
        sample_groups(Returning(change), ASKED, REQUEST)


def test_an_engine_that_cannot_suppress_tokens_is_not_asked_to() -> None:
    engine = InProcessEngine(tiny_policy())
    engine.suppresses = False
    with refused("InProcessEngine", "suppress"):
        sample_groups(engine, ASKED, replace(REQUEST, suppressed=(3,)))


def short(sampled: Sampled) -> Sampled:
    return replace(sampled, logprobs=sampled.logprobs[:-1])


def test_what_a_step_and_its_refills_train_on_is_looked_at() -> None:
    algorithm = {"name": "dapo", "resample": {"max_rounds": 1}}
    made = stages_with(algorithm, even_tokens)
    made.collector.engine = ChangedEngine(made.policy, short, where=lambda _, each: each.continuation.draw == 1)
    with refused("ChangedEngine", "prompt draw 1", "logprobs", error=RunError):
        made.collected()

    def equal(completions: Sequence[str], **columns: object) -> list[float]:
        return [1.0] * len(completions)

    refilled = stages_with(algorithm, equal)
    refilled.collector.engine = ChangedEngine(refilled.policy, short, where=lambda _, each: each.continuation.draw >= 5)
    with refused("ChangedEngine", "prompt ", "logprobs", error=RunError):
        refilled.collector.collect(1, discard_scores, Clock())


def test_what_an_evaluation_and_its_probes_measure_is_looked_at() -> None:
    number = {"number": Reading("number")}
    endless = Probe(readings=number, measure=lambda groups: {"number": float(len(groups))}, endless=True)
    judge, probes = reward_function(even_tokens), {"endless": endless}
    questions = Questions(prompts=ASKED, judge=judge, max_completion_tokens=LIMIT, seed=0, probes=probes)
    assert full_evaluation(InProcessEngine(tiny_policy()), questions, measures(2))[0]["number"] == 3
    with refused("ChangedEngine", "prompt ", "logprobs", error=RunError):
        full_evaluation(ChangedEngine(tiny_policy(), short), questions, measures(2))
    of_probe = ChangedEngine(tiny_policy(), short, where=lambda request, _: bool(request.suppressed))
    with refused("ChangedEngine", "prompt ", "logprobs", error=RunError):
        full_evaluation(of_probe, questions, measures(2))


def test_a_look_that_finds_nothing_done_is_no_timeout() -> None:
    engine = InProcessEngine(tiny_policy())
    with engine.open(REQUEST) as sampling:
        sampling.put([Continuation(prefix=(3, 4), draw=0, sample=0, limit=4)])
        assert take_checked(sampling, engine, 0) == []
        assert len(take_checked(sampling, engine)) == 1


class Silent(InProcessEngine):
    """Returns no completion before the `done_after`-th take, and waits as long as each take allows."""

    patience_seconds = 0.2

    def __init__(self, done_after: int) -> None:
        super().__init__(tiny_policy())
        self.done_after = done_after

    def open(self, request: Any) -> Any:
        opened, takes = super().open(request), iter(range(1, 10**9))

        def take(seconds: float) -> list[Sampled]:
            if next(takes) % self.done_after:
                time.sleep(seconds)
                raise SamplingTimeout("Silent", seconds, 1)
            return InProcessSampling.take(opened, 60.0)

        opened.take = take
        return opened


@pytest.mark.parametrize("look_seconds", [None, 0.02], ids=["waiting", "looking"])
def test_an_engine_that_returns_nothing_ends_with_its_patience(look_seconds: float | None) -> None:
    looks: list[int] = []
    began = time.monotonic()
    with pytest.raises(SamplingTimeout) as error:
        sample_groups(Silent(10**9), ASKED, REQUEST, advance=looks.append, look_seconds=look_seconds)
    assert "no completion was done in 0.2 seconds" in str(error.value)
    assert 0.2 <= time.monotonic() - began < 10
    assert set(looks) <= {0}
    assert bool(looks) == (look_seconds is not None)


def test_patience_begins_anew_with_each_completion() -> None:
    """Three takes of .02 s lie before each result: together longer than the patience, one by one far below it."""
    engine = Silent(4)
    engine.max_rows = 1  # results come one at a time
    counts: list[int] = []
    groups = sample_groups(engine, ASKED * 2, REQUEST, advance=counts.append, look_seconds=0.02)
    assert len(groups) == sum(counts) / REQUEST.group_size == 6
    assert counts.count(0) >= 3 * 12
