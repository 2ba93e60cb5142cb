"""Every causal family through the plain pass: sampler and trainer agree with the library's model, row by row.

The library's attention is the one that is written out (`eager`), a row at a time, without cache or padding.  Rows are
of mixed lengths, on both sides of every window and of the original context, and come and go while others are decoded.
"""

from functools import cache

import pytest
import torch

from posttrain.generation.engine import sample_groups
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.parity import largest_gap
from posttrain.models.forward import Completions
from posttrain.models.logprobs import token_logprobs
from posttrain.models.policy import Policy, as_policy
from posttrain.options.rollout import SamplingParams
from posttrain.records import Group
from posttrain.training.update import group_logprobs
from tests.support.families import CONFIGS, CONTEXT, WITHOUT_CACHE, eager_model, family_model, family_policy
from tests.support.tiny import (
    flat_gradient,
    plain_logprobs,
    relative_distance,
    request,
    some_prompts,
    tokenizer,
)

PROMPTS, LIMIT, TEMPERATURE = (3, 21, 1, 12), 22, 0.8
IN_BFLOAT16 = (
    *("gpt2", "gemma2", "phi3_longrope", "qwen3_moe", "granite"),
    *("gpt_oss", "deepseek_v3", "bloom", "mamba", "lfm2"),
)
"""Of each kind of attention, positions, experts, scale and state one; `make families` measures all in bfloat16."""
each_family = pytest.mark.parametrize("family", CONFIGS)


@cache
def sampled(family: str) -> tuple[Policy, list[Group]]:
    policy = family_policy(family)
    engine = InProcessEngine(policy, max_rows=3)
    asked = request(2, LIMIT, SamplingParams(temperature=TEMPERATURE))
    return policy, sample_groups(engine, some_prompts(PROMPTS), asked)


def rows(groups: list[Group]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(group.prompt.tokens, rollout.tokens) for group in groups for rollout in group.rollouts]


@each_family
def test_sampler_and_trainer_agree_with_the_model_itself(family: str) -> None:
    policy, groups = sampled(family)
    assert (policy.cache_refusal is not None) == (family in WITHOUT_CACHE)
    model = eager_model(family)
    with torch.no_grad():
        truth = torch.cat([plain_logprobs(model, *row, TEMPERATURE) for row in rows(groups)]).double()
    drawn = torch.tensor([value for group in groups for rollout in group.rollouts for value in rollout.logprobs])
    trained = group_logprobs(policy, groups, temperature=TEMPERATURE, max_tokens=100)
    assert 0.2 < truth.neg().mean() < 4  # neither certain nor even
    for mine in (drawn.double(), trained):
        gap = (mine - truth).abs()
        assert gap.mean() <= 1e-5
        assert gap.max() <= 1e-4


@each_family
def test_the_gradient_is_that_of_the_model_itself(family: str) -> None:
    policy, groups = sampled(family)
    model = eager_model(family)
    pairs = rows(groups)
    weights = torch.linspace(-1, 2, sum(len(completion) for _, completion in pairs))
    (torch.cat([plain_logprobs(model, *row, TEMPERATURE) for row in pairs]) @ weights).backward()
    prompts, completions = [prompt for prompt, _ in pairs], [completion for _, completion in pairs]
    policy.model.zero_grad()
    hidden = policy.forward.completion_hidden(Completions(prompts, completions, range(len(pairs))))
    targets = torch.tensor([token for completion in completions for token in completion])
    (token_logprobs(hidden, policy.output_layer, targets, temperature=TEMPERATURE) @ weights).backward()
    theirs = torch.cat(
        [
            (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).double().flatten()
            for parameter in model.parameters()
        ]
    )
    assert relative_distance(flat_gradient(policy), theirs) <= 1e-5


@pytest.mark.parametrize("family", ["mistral", "granite", "gemma2"])
def test_frozen_matrices_in_bfloat16_are_as_exact_as_products_in_it(family: str) -> None:
    model = family_model(family)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module is not model.get_output_embeddings():
            module.weight.requires_grad_(False)
            module.weight.data = module.weight.data.bfloat16()
    policy = as_policy(model, tokenizer(), dtype="bfloat16", forward="plain")
    assert largest_gap(InProcessEngine(policy, max_rows=4), CONTEXT // 2) <= 0.1


@pytest.mark.parametrize("family", IN_BFLOAT16)
def test_in_bfloat16_the_probe_finds_its_own_precision(family: str) -> None:
    policy = family_policy(family, compute="bfloat16")
    assert largest_gap(InProcessEngine(policy, max_rows=4), CONTEXT // 2) <= 0.1
