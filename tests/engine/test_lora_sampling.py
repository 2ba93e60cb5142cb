"""Sampling runs through the adapter, with the trainer's arithmetic; over a base in 4 bits too.

Parity cannot see an adapter that both leave out, nor a merged copy that only the sampler has: the first test can.
"""

import pytest
import torch
from torch import Tensor

from posttrain.algorithms.table import build_algorithm
from posttrain.generation.decoder_steps import StaticSteps
from posttrain.generation.engine import sample_groups
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.parity import engine_in_parity, largest_gap
from posttrain.models.adapters.in_force import adapter_off, adapter_tensors
from posttrain.models.adapters.lora import lora_layers
from posttrain.models.policy import Policy
from posttrain.options.model import AdapterOptions
from posttrain.options.training import UpdateOptions
from posttrain.runs.progress import Clock
from posttrain.training.learner import Learner, LearnerSettings
from posttrain.training.optimizer import new_optimizer
from posttrain.training.update import Objective, group_logprobs, update
from tests.support.adapted import adapted_policy, fill
from tests.support.refusals import refused
from tests.support.tiny import batch_of, plain_logprobs, request, some_prompts

LENGTHS = (3, 7, 1)
each_forward = pytest.mark.parametrize("forward", ["auto", "plain"])
each_base = pytest.mark.parametrize("nf4", [False, True], ids=["dense", "nf4"])


def sampled(policy: Policy, engine: InProcessEngine | None = None) -> Tensor:
    groups = sample_groups((engine or InProcessEngine(policy)), some_prompts(LENGTHS), request())
    return torch.tensor([p for group in groups for r in group.rollouts for p in r.logprobs], dtype=torch.float64)


def truth(policy: Policy) -> Tensor:
    """Of the completions that the policy samples, log π by the Hugging Face model, one row at a time."""
    groups = sample_groups(InProcessEngine(policy), some_prompts(LENGTHS), request())
    with torch.no_grad():
        rows = [plain_logprobs(policy.model, g.prompt.tokens, r.tokens) for g in groups for r in g.rollouts]
    return torch.cat(rows).double()


@each_forward
@each_base
def test_what_is_sampled_is_sampled_through_the_adapter(forward: str, nf4: bool) -> None:
    policy = adapted_policy(forward=forward, nf4=nf4)
    engine = InProcessEngine(policy)
    torch.testing.assert_close(sampled(policy, engine), truth(policy), rtol=0, atol=1e-5)
    before = sampled(policy, engine)
    with adapter_off(policy.model):
        off = sampled(policy, engine)
    assert len(off) != len(before) or (off - before).abs().max() > 0.1  # it matters
    fill(policy.model, seed=9)  # an update
    torch.testing.assert_close(sampled(policy, engine), truth(policy), rtol=0, atol=1e-5)


@each_forward
@each_base
def test_sampler_and_trainer_agree_under_an_adapter(forward: str, nf4: bool) -> None:
    policy = adapted_policy(forward=forward, nf4=nf4)
    groups = sample_groups(InProcessEngine(policy), some_prompts(LENGTHS), request())
    trained = group_logprobs(policy, groups, temperature=1.0, max_tokens=60)
    torch.testing.assert_close(sampled(policy), trained, rtol=0, atol=1e-5)
    assert largest_gap(InProcessEngine(policy), 30) < 1e-5


@each_base
def test_in_bfloat16_they_agree_within_its_rounding(nf4: bool) -> None:
    policy = adapted_policy(nf4=nf4, compute="bfloat16")
    assert engine_in_parity(policy, max_rows=8, longest=30).policy.forward_reason is None


def test_captured_steps_follow_the_adapter_and_copy_no_base() -> None:
    policy = adapted_policy()
    engine, steps = InProcessEngine(policy), StaticSteps(policy)
    engine._steps = steps
    torch.testing.assert_close(sampled(policy, engine), truth(policy), rtol=0, atol=1e-5)
    addresses = [each.data_ptr() for layer in steps.layers for each in (layer.qkv.down, *layer.qkv.ups)]
    fill(policy.model, seed=9)
    torch.testing.assert_close(sampled(policy, engine), truth(policy), rtol=0, atol=1e-5)
    assert addresses == [each.data_ptr() for layer in steps.layers for each in (layer.qkv.down, *layer.qkv.ups)]
    assert steps.layers[0].qkv.parts.bases[0].layer is policy.model.model.layers[0].self_attn.q_proj.base_layer


@each_forward
@each_base
def test_an_update_moves_the_adapter_and_nothing_else(forward: str, nf4: bool) -> None:
    policy, algorithm = adapted_policy(forward=forward, nf4=nf4), build_algorithm({"name": "grpo"})
    before = {name: tensor.detach().clone() for name, tensor in policy.model.state_dict().items()}
    groups = sample_groups(InProcessEngine(policy), some_prompts(LENGTHS), request())
    optimizer = new_optimizer(policy.model.parameters(), UpdateOptions(learning_rate=1e-2))
    batch = batch_of(groups, [[1, -1, 0.5]] * len(groups), algorithm)
    update(policy, optimizer, batch, Objective(algorithm=algorithm, temperature=1.0), UpdateOptions(), 1e-2)
    after = policy.model.state_dict()
    assert {name for name in before if not torch.equal(before[name], after[name])} == set(adapter_tensors(policy.model))


def test_weight_decay_on_an_adapter_is_refused() -> None:
    settings = LearnerSettings(update=UpdateOptions(weight_decay=0.1), max_completion_tokens=8)
    with refused("update.weight_decay = 0.1", "update.decay_adapter = true"):
        Learner(adapted_policy(), build_algorithm({"name": "grpo"}), settings)


def test_the_learner_drops_inputs_in_updates_alone_and_the_same_ones_after_a_resume() -> None:
    def gradients(num_updates: int, dropout: float = 0.5) -> Tensor:
        policy = adapted_policy(options=AdapterOptions(rank=3, dropout=dropout))
        groups = sample_groups(InProcessEngine(policy), some_prompts(LENGTHS), request())
        algorithm = build_algorithm({"name": "grpo"})
        settings = LearnerSettings(update=UpdateOptions(learning_rate=0.1), max_completion_tokens=16)
        learner = Learner(policy, algorithm, settings)
        learner.num_updates = num_updates
        learner.optimizer = torch.optim.SGD([p for p in policy.model.parameters() if p.requires_grad], lr=1.0)
        learner.learn([batch_of(groups, [[1, -1, 0.5]] * 3, algorithm)], 1, Clock())
        return torch.cat([layer.lora_B.detach().flatten() for layer in lora_layers(policy.model).values()])

    assert torch.equal(gradients(3), gradients(3))
    assert not torch.equal(gradients(3), gradients(4))
    assert not torch.equal(gradients(3), gradients(3, dropout=0.0))
