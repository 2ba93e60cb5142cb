"""The reference of a KL, entered as a context: a copy sharing what is frozen, or the policy with its adapter off."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from posttrain.algorithms.table import build_algorithm
from posttrain.generation.engine import sample_groups
from posttrain.generation.in_process import InProcessEngine
from posttrain.models.adapters.in_force import adapter_dropout, adapter_tensors
from posttrain.models.forward import Completions, PlainForward
from posttrain.models.logprobs import token_logprobs
from posttrain.models.policy import Policy
from posttrain.options.model import AdapterOptions
from posttrain.training.reference import EarlierAdapter, FrozenCopy, Reference, reference_of
from posttrain.training.update import Objective, group_logprobs
from tests.support.adapted import adapted_policy, fill
from tests.support.refusals import refused
from tests.support.tiny import batch_of, gradient_of_update, request, some_prompts, tiny_policy

GROUPS = sample_groups(InProcessEngine(tiny_policy(dtype=torch.float32)), some_prompts([3, 7, 1]), request())
each_forward = pytest.mark.parametrize("forward", ["auto", "plain"])


def logprobs(policy: Policy) -> Tensor:
    return group_logprobs(policy, GROUPS, temperature=1.0, max_tokens=60)


def under(reference: Reference) -> Tensor:
    with reference.entered() as policy:
        return logprobs(policy)


@each_forward
def test_the_reference_of_an_adapter_is_its_base_and_no_second_copy_of_it(forward: str) -> None:
    policy = adapted_policy(filled=False, forward=forward)
    base = logprobs(adapted_policy(filled=False, forward=forward))
    reference = reference_of(policy)
    assert isinstance(reference, EarlierAdapter)
    fill(policy.model)
    now = logprobs(policy)
    assert torch.equal(under(reference), base)
    assert torch.equal(logprobs(policy), now)  # and after it the adapter is on again
    assert (now - base).abs().max() > 0.1
    with reference.entered() as entered:
        assert entered.model is policy.model
    assert reference.tensors() == {}


@each_forward
@pytest.mark.parametrize("estimator", ["k3", "full"])
def test_the_kl_to_it_is_that_to_a_separate_copy_of_the_base(forward: str, estimator: str) -> None:
    policy = adapted_policy(filled=False, forward=forward)
    copy, off = FrozenCopy(adapted_policy(filled=False, forward=forward)), reference_of(policy)
    fill(policy.model)
    algorithm = build_algorithm({"name": "dapo", "kl": {"coefficient": 0.1, "estimator": estimator}})
    found = []
    for reference in (copy, off):
        batch = batch_of(GROUPS, [[1, -1, 0.5]] * 3, algorithm, reference_logprobs=under(reference))
        found.append(
            gradient_of_update(policy, batch, Objective(algorithm=algorithm, temperature=1.0, reference=reference))
        )
    (gradient, metrics), (others, other_metrics) = found
    assert torch.equal(gradient, others)
    assert metrics["kl"] == other_metrics["kl"] > 1e-3


def test_trap_4_a_context_that_is_not_entered_is_no_reference() -> None:
    """The notebook called disable_adapter() without `with`: its reference was the policy, and the KL zero for ever."""
    policy = adapted_policy(filled=False)
    reference = reference_of(policy)
    fill(policy.model)
    not_entered = reference.entered()
    with refused("no attribute 'forward'", error=AttributeError):
        _ = not_entered.forward
    theirs = logprobs(policy)  # what the notebook then computed with
    assert (theirs - under(reference)).abs().max() > 0.1


def test_a_reference_that_is_taken_later_keeps_the_matrices_of_the_adapter_and_nothing_else() -> None:
    policy = adapted_policy()
    reference, then = reference_of(policy), logprobs(policy)
    fill(policy.model, seed=9)
    torch.testing.assert_close(under(reference), then, rtol=0, atol=0)
    kept = reference.tensors()
    assert kept.keys() == adapter_tensors(policy.model).keys()
    again = EarlierAdapter(adapted_policy(filled=False))
    again.restore(kept)
    assert torch.equal(under(again), then)
    again.restore({})
    assert not torch.equal(under(again), then)


def test_a_frozen_copy_shares_what_is_frozen_and_follows_nothing() -> None:
    policy = adapted_policy()
    frozen = {name: p for name, p in policy.model.named_parameters() if not p.requires_grad}
    reference, then = FrozenCopy(policy), logprobs(policy)
    copied = dict(reference.policy.model.named_parameters())
    assert all(copied[name] is parameter for name, parameter in frozen.items())
    assert frozen
    fill(policy.model, seed=9)
    assert torch.equal(under(reference), then)
    assert set(reference.tensors()) == set(adapter_tensors(policy.model))


def test_a_model_with_frozen_parts_and_no_adapter_has_a_copy_of_the_rest_for_its_reference() -> None:
    policy = tiny_policy(dtype=torch.float32)
    policy.model.model.embed_tokens.requires_grad_(False)
    reference = reference_of(policy)
    assert isinstance(reference, FrozenCopy)
    copied = reference.policy.model
    assert copied.model.embed_tokens.weight is policy.model.model.embed_tokens.weight
    assert copied.model.norm.weight is not policy.model.model.norm.weight


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_copy_of_what_computes_in_bfloat16_holds_its_matrices_in_it_and_no_number_changes(family: str) -> None:
    policy = tiny_policy(family, torch.float32, compute="bfloat16")
    whole, reference = policy.copy(), FrozenCopy(policy)
    tied = family == "qwen3"
    for name, parameter in reference.policy.model.named_parameters():
        matrix = parameter.ndim == 2 and "embed" not in name
        assert parameter.dtype == (torch.bfloat16 if matrix else torch.float32), name
        assert not parameter.requires_grad
    assert ("lm_head.weight" in dict(reference.policy.model.named_parameters())) != tied
    assert {parameter.dtype for parameter in policy.model.parameters()} == {torch.float32}
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.5)
    assert torch.equal(under(reference), logprobs(whole))
    assert not torch.equal(logprobs(policy), logprobs(whole))
    again = FrozenCopy(policy)
    again.restore(reference.tensors())
    assert torch.equal(under(again), logprobs(whole))
    again.restore(dict(whole.model.named_parameters()))  # of a checkpoint that has them in float32
    assert torch.equal(under(again), logprobs(whole))


def test_a_copy_shares_frozen_matrices_and_holds_the_others_of_the_models_own_pass_as_they_are() -> None:
    policy = tiny_policy(dtype=torch.float32, compute="bfloat16")
    frozen = policy.model.model.layers[0].requires_grad_(False)
    copied = FrozenCopy(policy).policy.model
    assert copied.model.layers[0].mlp.up_proj.weight is frozen.mlp.up_proj.weight
    assert frozen.mlp.up_proj.weight.dtype == torch.float32
    assert copied.model.layers[1].mlp.up_proj.weight.dtype == torch.bfloat16
    plain = replace(policy, forward=PlainForward(policy.model, torch.bfloat16))
    assert {parameter.dtype for parameter in FrozenCopy(plain).policy.model.parameters()} == {torch.float32}


def test_dropout_is_of_the_policy_s_gradients_alone_not_of_its_reference_or_its_sampling() -> None:
    policy = adapted_policy(options=AdapterOptions(rank=3, dropout=0.5))
    whole = adapted_policy(options=AdapterOptions(rank=3))

    def with_gradient(policy: Policy) -> Tensor:
        group = GROUPS[0]
        tokens = [rollout.tokens for rollout in group.rollouts]
        hidden = policy.forward.completion_hidden(Completions([group.prompt.tokens], tokens, [0] * len(tokens)))
        targets = torch.tensor([token for each in tokens for token in each])
        return token_logprobs(hidden, policy.output_layer, targets).detach()

    assert policy.forward_reason is None
    kept = with_gradient(policy)
    torch.testing.assert_close(kept, with_gradient(whole), rtol=0, atol=1e-5)
    with adapter_dropout(policy.model, 0, 5):
        dropped = with_gradient(policy)
        torch.testing.assert_close(logprobs(policy), logprobs(whole), rtol=0, atol=1e-5)
        assert torch.equal(under(reference_of(policy)), logprobs(policy))
    assert (dropped - kept).abs().max() > 0.01
    with adapter_dropout(policy.model, 0, 5):
        assert torch.equal(with_gradient(policy), dropped)  # the same update drops the same
    with adapter_dropout(policy.model, 0, 6):
        assert not torch.equal(with_gradient(policy), dropped)
    assert torch.equal(with_gradient(policy), kept)
