"""Every causal family through the plain pass: sampler and trainer agree with the library's model, row by row.

The library's attention is the one that is written out (`eager`), a row at a time, without cache or padding.  Rows are
of mixed lengths, on both sides of every window and of the original context, and come and go while others are decoded.
Rotary angles are those of the context that a policy is given: no batch-mate and no length changes them.
"""

import copy
from functools import cache
from typing import Any

import pytest
import torch

from posttrain.errors import UserError
from posttrain.generation.engine import sample_groups
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.parity import largest_gap
from posttrain.models.forward import Completions
from posttrain.models.logprobs import token_logprobs
from posttrain.models.policy import Policy, as_policy
from posttrain.options.rollout import SamplingParams
from posttrain.records import Group
from posttrain.training.update import group_logprobs
from tests.support.families import (
    CONFIGS,
    CONTEXT,
    LONG,
    ORIGINAL,
    ROPE,
    WITHOUT_CACHE,
    eager_model,
    family_model,
    family_policy,
)
from tests.support.tiny import flat_gradient, plain_logprobs, relative_distance, request, some_prompts, tokenizer

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


FACTOR = 2
DYNAMIC: dict[str, Any] = {**ROPE, "rope_type": "dynamic", "factor": FACTOR}
each_rope = pytest.mark.parametrize("rope", [LONG, DYNAMIC], ids=["longrope", "dynamic"])
each_pass = pytest.mark.parametrize("chosen", ["auto", "plain"])


def policy_of(rope: dict[str, Any], context: int | None, chosen: str = "plain") -> Policy:
    model = family_model("llama_dynamic", rope_parameters=rope)
    return as_policy(model, tokenizer(), forward=chosen, context=context)  # type: ignore[arg-type]


def own_logprobs(policy: Policy, lengths: tuple[int, ...]) -> list[torch.Tensor]:
    """log-probs of the last token of rows of these lengths by the policy's pass, side by side."""
    rows = [prompt.tokens for prompt in some_prompts(lengths)]
    hidden = policy.forward.completion_hidden(
        Completions([row[:-1] for row in rows], [row[-1:] for row in rows], range(len(rows)))
    )
    logprobs = torch.log_softmax(policy.output_layer.logits(hidden), -1)
    return [logprob[row[-1]].detach() for logprob, row in zip(logprobs, rows, strict=True)]


def library_logprobs(rope: dict[str, Any], lengths: tuple[int, ...]) -> list[torch.Tensor]:
    """The same by a model that nobody touched, each row by itself."""
    model = family_model("llama_dynamic", rope_parameters=rope).eval()
    rows = [prompt.tokens for prompt in some_prompts(lengths)]
    return [plain_logprobs(copy.deepcopy(model), row[:-1], row[-1:])[0].detach() for row in rows]


@pytest.mark.parametrize(
    ("rope", "context", "positions", "lengths"),
    [
        (LONG, None, ORIGINAL, (5, ORIGINAL, 9)),  # within the original context, by the short angles
        (LONG, CONTEXT, CONTEXT, (ORIGINAL + 2, CONTEXT, 30)),
        (DYNAMIC, None, CONTEXT, (5, CONTEXT)),
        (DYNAMIC, FACTOR * CONTEXT, FACTOR * CONTEXT, (FACTOR * CONTEXT,)),
    ],
    ids=["short", "long", "dynamic", "dynamic, wide"],
)
@each_pass
def test_angles_are_those_of_a_sequence_as_long_as_the_context(
    rope: dict[str, Any], context: int | None, positions: int, lengths: tuple[int, ...], chosen: str
) -> None:
    policy = policy_of(rope, context, chosen)
    assert policy.max_positions == positions
    torch.testing.assert_close(own_logprobs(policy, lengths), library_logprobs(rope, lengths), rtol=0, atol=1e-5)
    if context is not None:
        # A shorter row has them too, where the library would take others: one policy, one set of angles.
        (alone,), (beside, _) = own_logprobs(policy, (9,)), own_logprobs(policy, (9, CONTEXT))
        torch.testing.assert_close(beside, alone, rtol=0, atol=1e-5)
        assert (alone - library_logprobs(rope, (9,))[0]).abs() > 1e-3


@each_rope
@each_pass
def test_sampler_and_trainer_agree_beyond_the_original_context(rope: dict[str, Any], chosen: str) -> None:
    policy = policy_of(rope, CONTEXT, chosen)
    groups = sample_groups(InProcessEngine(policy, max_rows=3), some_prompts((1, 33, 12)), request(2, 25))
    sampled = torch.tensor([p for group in groups for r in group.rollouts for p in r.logprobs], dtype=torch.float64)
    trained = group_logprobs(policy, groups, temperature=1.0, max_tokens=70)
    torch.testing.assert_close(sampled, trained, rtol=0, atol=1e-4)
    by_itself = torch.cat([group_logprobs(policy, [group], temperature=1.0, max_tokens=1) for group in groups])
    torch.testing.assert_close(trained, by_itself, rtol=0, atol=1e-5)


@each_rope
def test_the_config_stays_as_it_was_and_so_does_what_is_saved(rope: dict[str, Any]) -> None:
    model = family_model("llama_dynamic", rope_parameters=rope)
    before, names = model.config.to_dict(), set(model.state_dict())
    as_policy(model, tokenizer(), context=CONTEXT)
    assert model.config.to_dict() == before
    assert set(model.state_dict()) == names


def test_another_policy_of_the_same_model_may_have_another_context() -> None:
    policy = policy_of(LONG, CONTEXT)
    as_policy(policy.model, policy.tokenizer, context=None)
    (again,) = own_logprobs(policy, (9,))
    torch.testing.assert_close(again, library_logprobs(LONG, (9,))[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("family", "expected"), [("gpt2", 64), ("mpt", 64), ("mistral", 64), ("gemma2", 64)])
def test_the_context_is_found_under_whichever_name_and_no_window_cuts_it(family: str, expected: int) -> None:
    assert as_policy(family_model(family), tokenizer()).max_positions == expected


def test_a_smaller_context_ends_completions_there() -> None:
    policy = as_policy(family_model("gpt2"), tokenizer(), context=20)
    groups = sample_groups(InProcessEngine(policy), some_prompts((5, 12)), request(3, 60, suppressed=policy.stop_ids))
    lengths = {len(group.prompt.tokens) + len(rollout.tokens) for group in groups for rollout in group.rollouts}
    assert lengths == {20}


@pytest.mark.parametrize(
    ("family", "context", "message"),
    [
        ("mistral", CONTEXT + 1, "model.context = 65: the context of this mistral is 1 to 64 tokens"),
        ("mistral", 0, "model.context = 0: the context of this mistral is 1 to 64 tokens"),
        ("phi3_longrope", CONTEXT + 1, "model.context = 65: the context of this phi3 is 1 to 64 tokens"),
        ("llama_dynamic", FACTOR * CONTEXT + 1, "model.context = 129: the context of this llama is 1 to 128 tokens"),
        ("mamba", 0, "model.context = 0: the context of this mamba is at least 1 tokens"),
        ("mamba", None, "the config of this mamba does not say how many tokens it can read.  Set model.context"),
        ("bloom", None, "the config of this bloom does not say how many tokens it can read.  Set model.context"),
    ],
)
def test_a_context_that_cannot_be(family: str, context: int | None, message: str) -> None:
    with pytest.raises(UserError) as refusal:
        as_policy(family_model(family), tokenizer(), context=context)
    assert message in str(refusal.value)
