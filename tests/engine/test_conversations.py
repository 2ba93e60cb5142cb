"""Several turns: what a conversation does not depend on, how it ends, and what is done with an environment's faults."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch

from posttrain.generation.engine import sample_groups
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.request import StreamKey
from posttrain.records import Finish, Group, Rollout
from tests.engine.test_continuation import engine_of as steps_of
from tests.support.tiny import plain_logprobs, request, some_prompts, tiny_policy
from tests.support.turns import Dice, conversations, environments

ROUNDING = 1e-12
LENGTHS = (3, 7, 1, 12, 2, 9, 4, 5)
ASKED = request(8, 24, key=StreamKey(3, "test", 2))


def engine_of(max_rows: int = 256) -> InProcessEngine:
    return InProcessEngine(tiny_policy("qwen3"), max_rows=max_rows)


def rollouts_of(groups: Sequence[Group]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.rollouts]


def assert_same(actual: Sequence[Rollout], expected: Sequence[Rollout]) -> None:
    for mine, other in zip(actual, expected, strict=True):
        assert (mine.tokens, mine.sequence.sampled, mine.finish) == (other.tokens, other.sequence.sampled, other.finish)
        assert mine.logprobs == pytest.approx(other.logprobs, abs=ROUNDING)
        assert [(turn.end, turn.num_given, turn.reward) for turn in mine.turns] == [
            (turn.end, turn.num_given, turn.reward) for turn in other.turns
        ]


PROMPTS = some_prompts(LENGTHS)
EXPECTED = conversations(engine_of(), PROMPTS, ASKED, environments(Dice, max_turns=4))


def test_conversations_have_turns_of_all_kinds() -> None:
    found = rollouts_of(EXPECTED)
    assert {each.finish for each in found} == {Finish.STOP, Finish.LENGTH, Finish.TURNS, Finish.ENVIRONMENT}
    assert max(len(each.turns) for each in found) == 4
    assert sum(turn.num_given for each in found for turn in each.turns) > 50


@pytest.mark.parametrize(("max_rows", "prompts"), [(2, 1), (9, 4), (256, 8)])
def test_the_order_in_which_replies_arrive_and_max_rows_change_nothing(max_rows: int, prompts: int) -> None:
    dice = partial(Dice, slow=lambda share: 0.02 * (share > 0.9))
    made = environments(dice, max_turns=4, workers=7)
    found = conversations(engine_of(max_rows), PROMPTS[:prompts], ASKED, made)
    assert_same(rollouts_of(found), rollouts_of(EXPECTED[:prompts]))


@pytest.mark.parametrize("path", ["static", "own_forward", "recomputed"])
def test_every_kind_of_steps_gives_the_same_conversations(path: str) -> None:
    asked = replace(ASKED, group_size=3)
    found = conversations(steps_of(path), PROMPTS[:4], asked, environments(Dice, max_turns=4))
    assert_same(rollouts_of(found), [each for group in EXPECTED[:4] for each in group.rollouts[:3]])


def test_a_conversation_alone_is_the_one_among_63_others() -> None:
    for place, sample in ((0, 0), (3, 5), (7, 7)):
        alone = replace(ASKED, group_size=1, first_draw=place, first_sample=sample)
        (group,) = conversations(engine_of(), [PROMPTS[place]], alone, environments(Dice, max_turns=4))
        assert_same(group.rollouts, [EXPECTED[place].rollouts[sample]])


def test_log_probs_are_the_trainers_on_the_whole_sequence_and_given_tokens_have_none() -> None:
    policy = tiny_policy("qwen3")
    for group in EXPECTED:
        assert group.prompt.tokens[:-1] in {prompt.tokens for prompt in PROMPTS}  # and one token of `reset`
        for rollout in group.rollouts:
            whole = plain_logprobs(policy.model, group.prompt.tokens, rollout.tokens).detach()
            of_sampled = whole[torch.tensor(rollout.sequence.sampled)]
            assert rollout.logprobs == pytest.approx(of_sampled.tolist(), abs=1e-10)
            assert rollout.sequence.sampled[-1]  # what nobody reads is not appended


def test_a_conversation_whose_environment_says_nothing_is_one_turn_of_the_same_length() -> None:
    """It is cut at stop texts, of which every second token is one."""
    texts = tuple(tiny_policy().tokenizer.decode([token]) for token in range(2, 24, 2))
    silent = environments(partial(Dice, most=0, ends=0, adds=False), max_turns=100, stop_texts=texts)
    cut = replace(silent, only_at_stop_texts=True)
    found = conversations(engine_of(), PROMPTS, ASKED, cut)
    assert_same(
        [replace(each, turns=()) for each in rollouts_of(found)],
        rollouts_of(sample_groups(engine_of(), PROMPTS, ASKED)),
    )
    assert sum(len(each.turns) for each in rollouts_of(found)) > 100
