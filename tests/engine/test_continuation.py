"""A completion that goes on, as in a second turn: its tokens are drawn with numbers that its first part did not use."""

from dataclasses import replace

import pytest

from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.static import StaticSteps
from posttrain.generation.streams import StreamKey
from posttrain.models.policy import Policy
from tests.support.tiny import request, some_prompts, through_its_own_forward, tiny_policy

LENGTHS = (3, 7, 1, 12)


def engine_of(policy: Policy, path: str) -> InProcessEngine:
    """An engine that samples through our decoder, through the model's own forward, or in steps of fixed shapes."""
    engine = InProcessEngine(through_its_own_forward(policy) if path == "own_forward" else policy)
    if path == "static":
        engine._steps = StaticSteps(policy)
    return engine


@pytest.mark.parametrize(("family", "path"), [("qwen3", "decoder"), ("qwen3", "static"), ("gpt2_plain", "own_forward")])
@pytest.mark.parametrize("length", [1, 3])
def test_a_completion_that_is_cut_and_continued_is_the_uncut_one(family: str, path: str, length: int) -> None:
    key = StreamKey(4, "test", 2, first_draw=5)
    engine = engine_of(tiny_policy(family), path)
    groups = engine.rollout(some_prompts(LENGTHS), request(8, 12, key=key))
    longer = [(group, r) for group in groups for r in group.rollouts if len(r.tokens) > length][:10]
    assert len(longer) >= 3
    others = 0
    for group, rollout in longer:
        prompt = replace(group.prompt, tokens=(*group.prompt.tokens, *rollout.tokens[:length]))
        here = replace(key, first_draw=group.draw, first_sample=rollout.sample, first_position=length)
        ((second,),) = (g.rollouts for g in engine.rollout([prompt], request(1, 12 - length, key=here)))
        assert second.tokens == rollout.tokens[length:]
        assert second.logprobs == pytest.approx(rollout.logprobs[length:], abs=1e-12)
        assert (second.sample, second.finish) == (rollout.sample, rollout.finish)
        again = replace(here, first_position=0)  # the numbers of the first part once more
        others += engine.rollout([prompt], request(1, 12 - length, key=again))[0].rollouts[0].tokens != second.tokens
    assert others > len(longer) / 2
