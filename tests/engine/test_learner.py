"""The learner between its parts: rates, trials, and the reference of a KL, a copy or the policy with no adapter."""

import time
from dataclasses import replace
from itertools import count
from pathlib import Path

import peft
import pytest
import torch
from torch import Tensor

from posttrain.algorithms.table import build_algorithm
from posttrain.batch import Batch
from posttrain.errors import RunError
from posttrain.generation.engine import sample_groups
from posttrain.generation.in_process import InProcessEngine
from posttrain.models.adapters.in_force import adapter_dropout, adapter_tensors
from posttrain.models.forward import Completions, PlainForward
from posttrain.models.logprobs import token_logprobs
from posttrain.models.policy import Policy, as_policy
from posttrain.options.model import AdapterOptions
from posttrain.options.training import UpdateOptions
from posttrain.runs.checkpoint import Checkpoint
from posttrain.runs.progress import Clock
from posttrain.training.learner import Learner, LearnerSettings
from posttrain.training.reference import EarlierAdapter, FrozenCopy, Reference, reference_of
from posttrain.training.session import trained_by_reward
from posttrain.training.update import group_logprobs
from tests.support.adapted import adapted_policy, fill
from tests.support.refusals import refused
from tests.support.stages import Stages, stages_with
from tests.support.tiny import request, some_prompts, tiny_model, tiny_policy, tokenizer

SHAPES = True
KL = {"name": "grpo", "kl": {"coefficient": 0.1}}


def learner_with(learner: Learner, **settings: object) -> Learner:
    """The same policy and algorithm under other settings."""
    return Learner(learner.policy, learner.algorithm, replace(learner.settings, **settings))


def test_the_rate_falls_over_the_updates_of_the_whole_run() -> None:
    stages = stages_with(epochs_per_step=2, minibatches_per_epoch=2)
    update = UpdateOptions(learning_rate=1.0, schedule="linear", epochs_per_step=2, minibatches_per_epoch=2)
    learner = learner_with(stages.learner, update=update)
    batches = learner.batches(stages.credited(), Clock())
    assert all(batch.completions for batch in batches)
    # Three steps of four updates each; the second step begins with the fifth of twelve.
    rates = [report.learning_rate for report in learner.learn(batches, 2, Clock())]
    assert rates == pytest.approx([8 / 12, 7 / 12, 6 / 12, 5 / 12], rel=1e-12)


def test_the_reference_is_the_policy_as_it_was_when_last_renewed() -> None:
    stages = stages_with(KL)
    learner = learner_with(stages.learner, refresh_reference_every=2)
    collected = stages.collected()
    reference, policy = [], []
    for step in (1, 2, 3):
        credited = learner.credit(replace(collected, step=step), Clock())
        reference.append(credited.groups.columns.reference_logprobs)
        learner.learn(learner.batches(credited, Clock()), step, Clock())
        policy.append(group_logprobs(learner.policy, collected.groups, temperature=1.0, max_tokens=99))
    assert torch.equal(reference[0], reference[1])
    torch.testing.assert_close(reference[2], policy[1], rtol=0, atol=1e-12)
    assert (reference[2] - reference[0]).abs().max() > 1e-3
    assert (policy[1] - policy[0]).abs().max() > 1e-3


def test_the_groups_of_a_mini_batch_keep_their_order() -> None:
    stages = stages_with(epochs_per_step=3, minibatches_per_epoch=2)
    batches = stages.learner.batches(stages.credited(), Clock())
    drawn = [list(dict.fromkeys(prompt for prompt, _ in batch.names)) for batch in batches]
    assert all(names == sorted(names) for names in drawn)
    for first, second in zip(drawn[::2], drawn[1::2], strict=True):
        assert sorted(first + second) == [f"draw {draw}" for draw in range(5)]
    assert len({tuple(names) for names in drawn[::2]}) > 1, "every epoch has an order of its own"


def try_gradient(stages: Stages, clock: Clock) -> list[Batch]:
    learner = stages.learner
    batches = learner.batches(stages.credited(), clock)
    learner.try_gradient(batches, clock)
    return batches


def test_a_trial_of_ppo_is_of_a_step_in_which_the_policy_moves_and_counts_all_of_its_updates(monkeypatch) -> None:
    """One second for the largest of eight batches, although the critic learns alone at first."""
    stages, ticks, gradients = stages_with({"name": "ppo"}), count(), []
    stages.policy.model.model.norm.weight.register_hook(gradients.append)
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    clock = Clock()
    batches = try_gradient(stages, clock)
    tokens = [len(batch.tokens) for batch in batches]
    assert len(tokens) == 8
    assert clock.seconds["update"] == pytest.approx(sum(tokens) / max(tokens))
    assert gradients[0].norm() > 0


def test_a_trial_computes_the_gradient_and_leaves_no_trace_of_it() -> None:
    stages = stages_with()
    before = [parameter.detach().clone() for parameter in stages.policy.model.parameters()]
    norm = stages.policy.model.model.norm.weight
    gradients = []
    norm.register_hook(gradients.append)
    try_gradient(stages, Clock())
    assert gradients
    assert gradients[0].norm() > 0
    assert all(parameter.grad is None for parameter in stages.policy.model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, stages.policy.model.parameters(), strict=True))


SETTINGS = LearnerSettings(update=UpdateOptions(), max_completion_tokens=8, temperature=1.0, num_steps=3)


def learner_of_an_adapter(*, seed: int = 0) -> Learner:
    return Learner(adapted_policy(seed=seed), build_algorithm({"name": "grpo"}), SETTINGS)


def saved_state(learner: Learner, *, num_updates: int = 0) -> Checkpoint:
    """What a checkpoint of the learner reads back as."""
    trained = trained_by_reward(learner)
    trained.run.num_updates = num_updates
    return Checkpoint(step=1, path=Path("step-1"), tensors=trained.tensors(), state=trained.state(), made_with={})


def test_an_adapter_is_restored_over_its_own_base_alone() -> None:
    saved, same, other = (learner_of_an_adapter(seed=seed) for seed in (0, 1, 0))
    with torch.no_grad():
        next(each for each in other.policy.model.parameters() if not each.requires_grad).add_(0.5)
    with refused("frozen weights", error=RunError):
        trained_by_reward(other).restore(saved_state(saved))
    trained_by_reward(same).restore(saved_state(saved, num_updates=7))
    theirs, ours = (trained_by_reward(each).tensors()["policy"] for each in (saved, same))
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    assert same.num_updates == 7


def test_a_checkpoint_calls_the_base_by_the_name_of_its_model() -> None:
    assert saved_state(learner_of_an_adapter()).state["frozen"]["model"] == "a model object"
    named = learner_of_an_adapter()
    named.policy.model.config.name_or_path = named.policy.model.name_or_path = "models/base"
    assert saved_state(named).state["frozen"]["model"] == "models/base"


def test_an_adapter_of_peft_beside_which_the_base_learns_is_refused() -> None:
    model = tiny_model("qwen3", torch.float32, exact=False)
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.0), model)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    with refused("adapter"):
        Learner(as_policy(model, tokenizer()), build_algorithm({"name": "grpo"}), SETTINGS)


GROUPS = sample_groups(InProcessEngine(tiny_policy(dtype=torch.float32)), some_prompts([3, 7, 1]), request())
each_forward = pytest.mark.parametrize("forward", ["auto", "plain"])


def logprobs_of(policy: Policy) -> Tensor:
    return group_logprobs(policy, GROUPS, temperature=1.0, max_tokens=60)


def under(reference: Reference) -> Tensor:
    with reference.entered() as policy:
        return logprobs_of(policy)


@each_forward
def test_the_reference_of_an_adapter_is_its_base_and_no_second_copy_of_it(forward: str) -> None:
    policy = adapted_policy(filled=False, forward=forward)
    base = logprobs_of(adapted_policy(filled=False, forward=forward))
    reference = reference_of(policy)
    assert isinstance(reference, EarlierAdapter)
    fill(policy.model)
    now = logprobs_of(policy)
    assert torch.equal(under(reference), base)
    assert torch.equal(logprobs_of(policy), now)  # and after it the adapter is on again
    assert (now - base).abs().max() > 0.1
    not_entered = reference.entered()  # without `with` it is no policy, which would be its own reference
    with refused("no attribute 'forward'", error=AttributeError):
        _ = not_entered.forward
    with reference.entered() as entered:
        assert entered.model is policy.model
    assert reference.tensors() == {}


def test_a_reference_that_is_taken_later_keeps_the_matrices_of_the_adapter_and_nothing_else() -> None:
    policy = adapted_policy()
    reference, then = reference_of(policy), logprobs_of(policy)
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
    reference, then = FrozenCopy(policy), logprobs_of(policy)
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
    assert torch.equal(under(reference), logprobs_of(whole))
    assert not torch.equal(logprobs_of(policy), logprobs_of(whole))
    again = FrozenCopy(policy)
    again.restore(reference.tensors())
    assert torch.equal(under(again), logprobs_of(whole))
    again.restore(dict(whole.model.named_parameters()))  # of a checkpoint that has them in float32
    assert torch.equal(under(again), logprobs_of(whole))


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
        torch.testing.assert_close(logprobs_of(policy), logprobs_of(whole), rtol=0, atol=1e-5)
        assert torch.equal(under(reference_of(policy)), logprobs_of(policy))
    assert (dropped - kept).abs().max() > 0.01
    with adapter_dropout(policy.model, 0, 5):
        assert torch.equal(with_gradient(policy), dropped)  # the same update drops the same
    with adapter_dropout(policy.model, 0, 6):
        assert not torch.equal(with_gradient(policy), dropped)
    assert torch.equal(with_gradient(policy), kept)
