"""Rotary angles are those of the context that a policy is given: no batch-mate and no length changes them."""

import copy
from typing import Any

import pytest
import torch

from posttrain.errors import UserError
from posttrain.generation.engine import sample_groups
from posttrain.generation.in_process import InProcessEngine
from posttrain.models.forward import Completions
from posttrain.models.policy import Policy, as_policy
from posttrain.training.update import group_logprobs
from tests.support.families import CONTEXT, LONG, ORIGINAL, ROPE, family_model
from tests.support.tiny import plain_logprobs, request, some_prompts, tokenizer

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


@each_pass
def test_within_the_original_context_longrope_is_the_librarys_short_one(chosen: str) -> None:
    policy = policy_of(LONG, None, chosen)
    assert policy.max_positions == ORIGINAL
    lengths = (5, ORIGINAL, 9)
    torch.testing.assert_close(own_logprobs(policy, lengths), library_logprobs(LONG, lengths), rtol=0, atol=1e-5)


@each_pass
def test_beyond_it_every_row_has_the_angles_that_the_library_gives_to_long_ones(chosen: str) -> None:
    policy = policy_of(LONG, CONTEXT, chosen)
    assert policy.max_positions == CONTEXT
    lengths = (ORIGINAL + 2, CONTEXT, 30)
    torch.testing.assert_close(own_logprobs(policy, lengths), library_logprobs(LONG, lengths), rtol=0, atol=1e-5)
    # A row that stays below has them too, where the library would take the short ones: one policy, one set of angles.
    (short,) = own_logprobs(policy, (9,))
    assert (short - library_logprobs(LONG, (9,))[0]).abs() > 1e-3
    (beside_a_long_row, _) = own_logprobs(policy, (9, CONTEXT))
    torch.testing.assert_close(beside_a_long_row, short, rtol=0, atol=1e-5)


@each_pass
def test_dynamic_angles_are_those_of_a_sequence_as_long_as_the_context(chosen: str) -> None:
    own = policy_of(DYNAMIC, None, chosen)
    assert own.max_positions == CONTEXT
    lengths = (5, CONTEXT)
    torch.testing.assert_close(own_logprobs(own, lengths), library_logprobs(DYNAMIC, lengths), rtol=0, atol=1e-5)
    wide = policy_of(DYNAMIC, FACTOR * CONTEXT, chosen)
    whole = (FACTOR * CONTEXT,)
    torch.testing.assert_close(own_logprobs(wide, whole), library_logprobs(DYNAMIC, whole), rtol=0, atol=1e-5)
    (alone,), (beside, _) = own_logprobs(wide, (40,)), own_logprobs(wide, (40, 100))
    torch.testing.assert_close(beside, alone, rtol=0, atol=1e-5)
    assert (alone - library_logprobs(DYNAMIC, (40,))[0]).abs() > 1e-3


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
