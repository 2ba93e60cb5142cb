"""An engine is whatever has an engine's members; one of a user's own serves where ours does."""

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch

from posttrain.errors import UserError
from posttrain.generation.engine import MEMBERS, Engine, require_engine, require_room_for
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.request import Request
from posttrain.records import Finish, Group, Prompt, Rollout, TokenSequence
from posttrain.rewards.grading.grade import reward_function
from posttrain.training.evaluation import Questions, sample_answers
from tests.support.tiny import STOP_IDS, some_prompts, tiny_policy, tokenizer

CONTEXT = 12


class Parrot:
    """Answers every prompt with its own tokens."""

    tokenizer = tokenizer()
    stop_ids = STOP_IDS
    reproducible = False

    def __init__(self) -> None:
        self.weights_version = 0
        self.requests: list[Request] = []

    def load(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        self.weights_version = version

    def room(self, prompt: Prompt) -> int:
        return CONTEXT - len(prompt.tokens)

    def rollout(
        self,
        prompts: Sequence[Prompt],
        request: Request,
        *,
        advance: Callable[[int], None] = lambda count: None,
        before_token: Callable[[], None] = lambda: None,
    ) -> list[Group]:
        self.requests.append(request)
        groups = []
        for index, prompt in enumerate(prompts):
            rollouts = tuple(self.repeated(prompt, sample) for sample in range(request.group_size))
            groups.append(Group(prompt=prompt, draw=request.key.first_draw + index, rollouts=rollouts))
            advance(request.group_size)
        return groups

    def repeated(self, prompt: Prompt, sample: int) -> Rollout:
        return Rollout(
            sample=sample,
            sequence=TokenSequence.one_turn(
                prompt.tokens, logprobs=(0.0,) * len(prompt.tokens), finish=Finish.LENGTH, version=self.weights_version
            ),
            text=self.tokenizer.decode(list(prompt.tokens)),
        )


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
    assert counts == [2] * 4
    assert engine.requests[0].max_completion_tokens == 5


def test_ours_is_an_engine_too_and_honours_the_uniform_numbers() -> None:
    engine = InProcessEngine(tiny_policy())
    assert require_engine(engine) is engine
    assert isinstance(engine, Engine)
    assert engine.reproducible
    assert engine.stop_ids == STOP_IDS
    assert engine.tokenizer is engine.policy.tokenizer


@pytest.mark.parametrize("length", [1, CONTEXT - 1])
def test_a_prompt_with_room_is_told_how_much(length: int) -> None:
    assert require_room_for(some_prompts([length])[0], Parrot()) == CONTEXT - length


def test_a_prompt_that_fills_the_context_of_an_engine_is_refused_with_the_numbers() -> None:
    with pytest.raises(UserError, match="p0: 13 tokens leave no room in the model's context of 12"):
        require_room_for(some_prompts([CONTEXT + 1])[0], Parrot())


class Mute:
    """Has an engine's data and none of its methods."""

    tokenizer, stop_ids, reproducible, weights_version = None, (), True, 0


WRONG: dict[str, tuple[object, str]] = {
    "nothing": (object(), f"a object is not an engine: it has no {', '.join(MEMBERS)}"),
    "half": (Mute(), "a Mute is not an engine: it has no load, rollout, room.  An engine has load, reproducible"),
    "class": (Parrot, "Parrot is a class; give an object of it"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_engine_is_refused_with_what_it_lacks(name: str) -> None:
    candidate, says = WRONG[name]
    with pytest.raises(UserError, match=f"^engine: {says}"):
        require_engine(candidate)
