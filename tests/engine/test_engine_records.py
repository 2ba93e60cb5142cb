"""What the engine records beside tokens: log-probs under a cut, versions of the weights, progress."""

import math
from collections.abc import Sequence

import pytest
import torch

from posttrain.generation.engine import sample_groups
from posttrain.generation.in_process import InProcessEngine
from posttrain.options.rollout import SamplingParams
from posttrain.records import Group
from tests.support.tiny import (
    STOP_IDS,
    next_logprobs,
    request,
    some_prompts,
    tiny_policy,
)

ROUNDING = 1e-12
LENGTHS = (3, 7, 1, 12)


def tokens_of(groups: Sequence[Group]) -> list[list[tuple[int, ...]]]:
    return [[rollout.tokens for rollout in group.rollouts] for group in groups]


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(top_k=3), SamplingParams(top_p=0.6, temperature=1.5), SamplingParams(min_p=0.3)],
)
def test_under_a_cut_both_log_probs_are_recorded(sampling: SamplingParams) -> None:
    policy = tiny_policy("qwen2")
    groups = sample_groups(InProcessEngine(policy), some_prompts([4, 2]), request(3, 6, sampling))
    for group in groups:
        for rollout in group.rollouts:
            assert rollout.cut_logprobs is not None
            for t, token in enumerate(rollout.tokens):
                full = next_logprobs(policy.model, (*group.prompt.tokens, *rollout.tokens[:t]), sampling.temperature)
                ordered = full.exp().sort(descending=True).values
                if sampling.top_k:
                    kept = ordered[:3].sum()
                elif sampling.min_p:
                    kept = ordered[ordered >= 0.3 * ordered[0]].sum()
                else:  # the fewest that hold 0.6
                    kept = ordered[: int((ordered.cumsum(0) < 0.6).sum()) + 1].sum()
                assert rollout.logprobs[t] == pytest.approx(full[token].item(), abs=ROUNDING)
                assert rollout.cut_logprobs[t] == pytest.approx((full[token] - kept.log()).item(), abs=1e-11)


def test_without_a_cut_nothing_is_recorded_beside() -> None:
    (group,) = sample_groups(InProcessEngine(tiny_policy()), some_prompts([4]), request())
    assert {rollout.cut_logprobs for rollout in group.rollouts} == {None}


def test_suppressed_tokens_never_appear() -> None:
    engine, prompts, suppressed = InProcessEngine(tiny_policy()), some_prompts([4] * 4), (0, 9, 15, *STOP_IDS)
    assert {0, 9, 15} & {
        t for g in tokens_of(sample_groups(engine, prompts, request(8))) for tokens in g for t in tokens
    }
    groups = sample_groups(engine, prompts, request(8, suppressed=suppressed))
    assert not set(suppressed) & {token for group in tokens_of(groups) for tokens in group for token in tokens}
    # The recorded log-probs are those among the other tokens.
    first = groups[0].rollouts[0]
    everything = next_logprobs(engine.policy.model, groups[0].prompt.tokens)
    rest = everything.index_fill(0, torch.tensor(suppressed), -math.inf)
    assert first.logprobs[0] == pytest.approx((rest[first.tokens[0]] - rest.logsumexp(0)).item(), abs=ROUNDING)


def test_every_rollout_says_which_weights_sampled_it() -> None:
    engine, versions = InProcessEngine(tiny_policy()), [0, 9, 12]
    seen = []
    for following in [*versions[1:], None]:
        (group,) = sample_groups(engine, some_prompts([4]), request())
        seen.append(engine.weights_version)
        assert {rollout.weights_version for rollout in group.rollouts} == {engine.weights_version}
        if following is not None:
            engine.load(engine.policy.model.state_dict(), following)
    assert seen == versions


def test_progress_is_told_of_every_completion() -> None:
    counts: list[int] = []
    sample_groups(InProcessEngine(tiny_policy(), max_rows=3), some_prompts(LENGTHS), request(2), advance=counts.append)
    assert sum(counts) == 8
    assert len(counts) > 2
