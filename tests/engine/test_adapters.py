"""An adapter is part of the weights: sampler, trainer, evaluation and reference all run with it.

peft puts its layers in place of a model's own.  Such a layer is no `nn.Linear`, its `.weight` is that of the layer
below it, and what it holds are plain `nn.Linear`s: a forward pass that reads weights by name runs without the adapter.
"""

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from posttrain.algorithms.table import build_algorithm
from posttrain.generation.engine import sample_groups
from posttrain.generation.in_process import InProcessEngine
from posttrain.models.policy import Policy, as_policy
from posttrain.options.training import UpdateOptions
from posttrain.training.optimizer import new_optimizer
from posttrain.training.reference import FrozenCopy
from posttrain.training.update import Objective, group_logprobs, update
from tests.support.refusals import refused
from tests.support.tiny import batch_of, plain_logprobs, request, some_prompts, tiny_model, tokenizer

PROJECTIONS = ("q_proj", "down_proj")
LENGTHS = (3, 7, 1)
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # transformers to peft


class AdaptedLinear(nn.Module):
    """A stand-in for an adapter layer of a library that we do not know: y = W·x + B·A·x."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.down = nn.Linear(base.in_features, 2, bias=False, dtype=base.weight.dtype)
        self.up = nn.Linear(2, base.out_features, bias=False, dtype=base.weight.dtype)

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.up(self.down(x))


def with_stand_in(model: PreTrainedModel) -> PreTrainedModel:
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = AdaptedLinear(layer.self_attn.q_proj)
        layer.mlp.down_proj = AdaptedLinear(layer.mlp.down_proj)
    return model


def injected(model: PreTrainedModel) -> PreTrainedModel:
    config = peft.LoraConfig(r=2, target_modules=list(PROJECTIONS), init_lora_weights=False)
    return peft.inject_adapter_in_model(config, model)


def wrapped(model: PreTrainedModel) -> PreTrainedModel:
    config = peft.LoraConfig(r=2, target_modules=list(PROJECTIONS), init_lora_weights=False)
    return peft.get_peft_model(model, config)


def adapted_policy(adapt) -> Policy:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return as_policy(adapt(tiny_model("qwen3", exact=False)), tokenizer())


each_way = pytest.mark.parametrize("adapt", [with_stand_in, injected, wrapped])


def logprobs_of(model: PreTrainedModel, groups) -> Tensor:
    with torch.no_grad():
        rows = [plain_logprobs(model, group.prompt.tokens, r.tokens) for group in groups for r in group.rollouts]
    return torch.cat(rows)


@each_way
def test_sampler_trainer_and_reference_run_with_the_adapter(adapt) -> None:
    policy = adapted_policy(adapt)
    groups = sample_groups(InProcessEngine(policy), some_prompts(LENGTHS), request())
    expected = logprobs_of(policy.model, groups)
    sampled = torch.tensor([p for group in groups for r in group.rollouts for p in r.logprobs], dtype=torch.float64)
    trained = group_logprobs(policy, groups, temperature=1.0, max_tokens=60)
    reference = group_logprobs(FrozenCopy(policy).policy, groups, temperature=1.0, max_tokens=60)
    for actual in (sampled, trained, reference):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)  # norms are taken in float32
    assert (expected - logprobs_of(tiny_model("qwen3", exact=False), groups)).abs().max() > 0.1  # the adapter matters


@each_way
def test_an_update_moves_the_adapter_and_nothing_else(adapt) -> None:
    policy, algorithm = adapted_policy(adapt), build_algorithm({"name": "grpo"})
    before = {name: parameter.detach().clone() for name, parameter in policy.model.named_parameters()}
    groups = sample_groups(InProcessEngine(policy), some_prompts(LENGTHS), request())
    optimizer = new_optimizer(policy.model.parameters(), UpdateOptions(learning_rate=1e-2))
    batch = batch_of(groups, [[1, -1, 0.5]] * len(groups), algorithm)
    update(policy, optimizer, batch, Objective(algorithm=algorithm, temperature=1.0), UpdateOptions(), 1e-2)
    moved = {name for name, parameter in policy.model.named_parameters() if not torch.equal(parameter, before[name])}
    trainable = {name for name, parameter in policy.model.named_parameters() if parameter.requires_grad}
    assert moved == trainable
    assert len(moved) == 2 * 2 * len(PROJECTIONS)  # two matrices for each projection of two layers


def plainly_run(model: PreTrainedModel) -> Policy:
    return as_policy(model, tokenizer(), forward="plain")


def quickly_run(model: PreTrainedModel) -> Policy:
    return as_policy(model, tokenizer())


def with_hook(model: PreTrainedModel) -> None:
    model.model.layers[0].register_forward_hook(lambda module, args, out: out)


def with_adapted_head(model: PreTrainedModel) -> None:
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["lm_head"], lora_dropout=0.0), model).eval()


def with_dropout(model: PreTrainedModel) -> None:
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["v_proj"], lora_dropout=0.1), model).eval()


LATE = {
    "an adapter": (quickly_run, injected, "layers.0.mlp.down_proj has got or lost an adapter"),
    "a stand-in": (quickly_run, with_stand_in, "AdaptedLinear"),
    "a hook": (quickly_run, with_hook, "layers.0 has a hook"),
    "dropout": (plainly_run, with_dropout, "layers.0.self_attn.v_proj has got an adapter with dropout"),
    # As peft makes it: in training mode, so that its dropout would be on.
    "training mode": (plainly_run, injected, "layers in training mode"),
    "a head": (plainly_run, with_adapted_head, "its output layer"),
}


@pytest.mark.parametrize("what", LATE)
def test_what_comes_into_a_model_after_its_policy_is_refused_and_a_policy_made_anew_has_it(what: str) -> None:
    make, change, says = LATE[what]
    policy = make(tiny_model("qwen3", exact=False))
    engine = InProcessEngine(policy)
    sample_groups(engine, some_prompts(LENGTHS), request())
    change(policy.model)
    with refused(says):
        sample_groups(engine, some_prompts(LENGTHS), request())
    if what != "a head":
        as_policy(policy.model, policy.tokenizer).require_as_made()
