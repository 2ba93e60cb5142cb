"""The sampler's log-probs are the trainer's: the same weights, two paths through the model.

The bounds are those of the design: float32 to 1e-5 nats in the mean and 1e-4 at most; bfloat16 apart.
"""

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from posttrain.algorithms.table import build_algorithm
from posttrain.generation.engine import sample_groups
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.request import StreamKey
from posttrain.models.policy import Policy, as_policy
from posttrain.options.rollout import SamplingParams
from posttrain.options.training import UpdateOptions
from posttrain.records import Group
from posttrain.training.optimizer import new_optimizer
from posttrain.training.update import Objective, group_logprobs, update
from tests.support.decoders import DECODER_CLASSES
from tests.support.families import CONTEXT, WINDOW, family_policy
from tests.support.tiny import (
    ALL_DECODERS,
    FAMILIES,
    SHAPE,
    STOP_IDS,
    batch_of,
    request,
    some_prompts,
    through_its_own_forward,
    tiny_policy,
    tokenizer,
)

LENGTHS = (3, 17, 1, 9)


def gaps(policy: Policy, groups: list[Group], temperature: float = 1.0) -> torch.Tensor:
    """|log π - log μ| of every token, the trainer's in micro-batches of about two groups."""
    trained = group_logprobs(policy, groups, temperature=temperature, max_tokens=60)
    sampled = [logprob for group in groups for rollout in group.rollouts for logprob in rollout.logprobs]
    return (trained - torch.tensor(sampled, dtype=torch.float64)).abs()


@pytest.mark.parametrize(
    ("dtype", "mean", "largest"), [(torch.float32, 1e-5, 1e-4), (torch.float64, 1e-14, 1e-12)], ids=["f32", "f64"]
)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("family", [*FAMILIES, *DECODER_CLASSES])
def test_sampler_and_trainer_agree(
    family: str, temperature: float, dtype: torch.dtype, mean: float, largest: float
) -> None:
    policy = tiny_policy(family, dtype)
    groups = sample_groups(
        InProcessEngine(policy), some_prompts(LENGTHS), request(4, 20, SamplingParams(temperature=temperature))
    )
    gap = gaps(policy, groups, temperature)
    assert gap.mean() <= mean
    assert gap.max() <= largest


@pytest.mark.parametrize("family", [*FAMILIES, *DECODER_CLASSES])
def test_in_bfloat16_they_agree_to_its_own_precision(family: str) -> None:
    # A bfloat16 product errs by 2^-9; through two layers log-probs of a few nats err by about a hundredth.
    policy = tiny_policy(family, torch.float32, compute="bfloat16")
    assert policy.compute_dtype == torch.bfloat16
    groups = sample_groups(InProcessEngine(policy), some_prompts(LENGTHS), request(4, 20))
    gap = gaps(policy, groups)
    assert gap.mean() <= 1e-2
    assert gap.max() <= 1e-1


@pytest.mark.parametrize("family", ALL_DECODERS)
def test_our_decoder_and_the_models_own_forward_agree(family: str) -> None:
    policy = tiny_policy(family)
    groups = sample_groups(InProcessEngine(policy), some_prompts(LENGTHS), request(4, 20))
    assert gaps(through_its_own_forward(policy), groups).max() <= 1e-12


@pytest.mark.parametrize("family", ["qwen3", "gpt2_plain"])
def test_they_agree_after_updates_because_the_sampler_reads_the_weights_anew(family: str) -> None:
    policy, algorithm = tiny_policy(family, torch.float32), build_algorithm({"name": "grpo"})
    engine, options = InProcessEngine(policy), UpdateOptions(learning_rate=1e-2)
    optimizer = new_optimizer(policy.model.parameters(), options)
    objective = Objective(algorithm=algorithm, temperature=1.0)
    stale = None
    for step in range(4):
        groups = sample_groups(engine, some_prompts(LENGTHS), request(4, 12, key=StreamKey(0, "test", step)))
        gap = gaps(policy, groups)
        assert gap.mean() <= 1e-5
        assert gap.max() <= 1e-4
        report = update(
            policy, optimizer, batch_of(groups, [[1, -1, 0.5, -0.5]] * 4, algorithm), objective, options, 1e-2
        )
        assert report.gaps.max().item() <= 1e-4  # the first update of a step sees parity
        stale = gaps(policy, groups)
    assert stale is not None
    assert stale.mean() > 1e-2  # an engine with old weights would be told from one with new ones


def test_completions_grow_beyond_a_sliding_window() -> None:
    # Once they were cut at the window, without a word.
    policy = family_policy("mistral", context=None)
    assert policy.max_positions == CONTEXT
    groups = sample_groups(InProcessEngine(policy), some_prompts((3, 9)), request(6, 80, suppressed=STOP_IDS))
    lengths = {len(group.prompt.tokens) + len(rollout.tokens) for group in groups for rollout in group.rollouts}
    assert lengths == {CONTEXT}
    assert CONTEXT > 4 * WINDOW


def test_they_agree_beyond_a_sliding_window_while_rows_come_and_go() -> None:
    shape = {**SHAPE, "sliding_window": 12, "bos_token_id": 0, "eos_token_id": list(STOP_IDS)}
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model = MistralForCausalLM(MistralConfig(**shape))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)  # far from uniform, so that one token too many in sight shows
    policy = as_policy(model, tokenizer())
    groups = sample_groups(InProcessEngine(policy, max_rows=5), some_prompts((3, 9, 20, 1)), request(6, 40))
    lengths = {len(group.prompt.tokens) + len(rollout.tokens) for group in groups for rollout in group.rollouts}
    assert max(lengths) > 3 * 12
    assert len(lengths) > 4
    gap = gaps(policy, groups)
    assert gap.mean() <= 1e-5
    assert gap.max() <= 1e-4
