"""An engine is whatever has an engine's members; one of a user's own serves where ours does."""

from collections.abc import Sequence

import pytest

from posttrain.generation.engine import MEMBERS, PAGE, Engine, Sampling, require_engine, require_room_for
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.request import Continuation, Request, Sampled
from posttrain.records import Finish, Prompt
from posttrain.rewards.grading.grade import reward_function
from posttrain.training.evaluation import Questions, sample_answers
from tests.support.refusals import refused
from tests.support.tiny import STOP_IDS, some_prompts, tiny_policy, tokenizer

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
    "half": (
        Mute(),
        ("a Mute", "load, logprob_gap, max_positions, open, patience_seconds, suppresses"),
    ),
    "rollout": (SamplesByRollout(), ("a SamplesByRollout", "`rollout`", PAGE)),
    "class": (Parrot, ("Parrot is a class",)),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_engine_is_refused_with_what_it_lacks(name: str) -> None:
    candidate, says = WRONG[name]
    with refused("engine: ", *says):
        require_engine(candidate)
