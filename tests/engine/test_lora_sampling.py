"""An adapter is part of the weights: sampler, trainer, evaluation and reference all run with it, over 4 bits too.

peft puts its layers in place of a model's own.  Such a layer is no `nn.Linear`, its `.weight` is that of the layer
below it, and what it holds are plain `nn.Linear`s: a forward pass that reads weights by name runs without the adapter.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from posttrain.algorithms.table import build_algorithm
from posttrain.generation.decoder_steps import StaticSteps
from posttrain.generation.engine import sample_groups
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.parity import engine_in_parity, largest_gap
from posttrain.models.adapters.lora import lora_layers
from posttrain.models.policy import Policy, as_policy
from posttrain.options.model import AdapterOptions
from posttrain.options.training import UpdateOptions
from posttrain.records import Group
from posttrain.runs.progress import Clock
from posttrain.training.learner import Learner, LearnerSettings
from posttrain.training.optimizer import new_optimizer
from posttrain.training.reference import FrozenCopy
from posttrain.training.update import Objective, group_logprobs, update
from tests.support.adapted import adapted_policy, fill
from tests.support.refusals import refused
from tests.support.tiny import batch_of, plain_logprobs, request, some_prompts, tiny_model, tokenizer

PROMPTS = some_prompts((3, 7, 1))
SETTINGS = LearnerSettings(update=UpdateOptions(learning_rate=0.1), max_completion_tokens=16)
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # transformers to peft


class AdaptedLinear(nn.Module):
    """A stand-in for an adapter layer of a library that we do not know: y = W·x + B·A·x."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.down = nn.Linear(base.in_features, 2, bias=False, dtype=base.weight.dtype)
        self.up = nn.Linear(2, base.out_features, bias=False, dtype=base.weight.dtype)

    weight = property(lambda self: self.base_layer.weight)
    bias = property(lambda self: self.base_layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.up(self.down(x))


def with_stand_in(model: PreTrainedModel) -> PreTrainedModel:
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = AdaptedLinear(layer.self_attn.q_proj)
        layer.mlp.down_proj = AdaptedLinear(layer.mlp.down_proj)
    return model


def injected(model: PreTrainedModel, targets: Sequence[str] = ("q_proj", "down_proj"), **options: Any) -> nn.Module:
    return peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=[*targets], **options), model)


def wrapped(model: PreTrainedModel) -> nn.Module:
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config)


def of_others(adapt: Callable[[PreTrainedModel], nn.Module]) -> Policy:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return as_policy(adapt(tiny_model("qwen3", exact=False)), tokenizer())


WAYS: dict[str, Callable[[], Policy]] = {
    "a stand-in": partial(of_others, with_stand_in),
    "injected by peft": partial(of_others, partial(injected, init_lora_weights=False)),
    "wrapped by peft": partial(of_others, wrapped),
    "ours": adapted_policy,
    "ours, plainly run": partial(adapted_policy, forward="plain"),
    "ours, nf4": partial(adapted_policy, nf4=True),
    "ours, nf4, plainly run": partial(adapted_policy, nf4=True, forward="plain"),
}
each_way = pytest.mark.parametrize("way", WAYS)


def sampled(groups: Sequence[Group]) -> Tensor:
    return torch.tensor([p for group in groups for r in group.rollouts for p in r.logprobs], dtype=torch.float64)


def truth(model: PreTrainedModel, groups: Sequence[Group]) -> Tensor:
    """log π of the completions by the Hugging Face model, one row at a time."""
    with torch.no_grad():
        rows = [plain_logprobs(model, g.prompt.tokens, r.tokens) for g in groups for r in g.rollouts]
    return torch.cat(rows).double()


@each_way
def test_sampler_trainer_and_reference_run_with_the_adapter_also_after_an_update(way: str) -> None:
    """Parity cannot see an adapter that both leave out, nor a merged copy that only the sampler has."""
    policy = WAYS[way]()
    engine = InProcessEngine(policy)
    groups = sample_groups(engine, PROMPTS, request())
    expected = truth(policy.model, groups)
    trained, reference = (
        group_logprobs(each, groups, temperature=1.0, max_tokens=60) for each in (policy, FrozenCopy(policy).policy)
    )
    for actual in (sampled(groups), trained, reference):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)  # norms are taken in float32
    assert (expected - truth(tiny_model("qwen3", exact=False), groups)).abs().max() > 0.1, "the adapter matters"
    with torch.no_grad():
        for each in (each for each in policy.model.parameters() if each.requires_grad):
            each.add_(0.03)
    again = sample_groups(engine, PROMPTS, request())
    torch.testing.assert_close(sampled(again), truth(policy.model, again), rtol=0, atol=1e-5)
    assert largest_gap(engine, 30) < 1e-5


@each_way
def test_an_update_moves_the_adapter_and_nothing_else(way: str) -> None:
    policy, algorithm = WAYS[way](), build_algorithm({"name": "grpo"})
    before = {name: parameter.detach().clone() for name, parameter in policy.model.named_parameters()}
    groups = sample_groups(InProcessEngine(policy), PROMPTS, request())
    optimizer = new_optimizer(policy.model.parameters(), UpdateOptions(learning_rate=1e-2))
    batch = batch_of(groups, [[1, -1, 0.5]] * len(groups), algorithm)
    update(policy, optimizer, batch, Objective(algorithm=algorithm, temperature=1.0), UpdateOptions(), 1e-2)
    moved = {name for name, parameter in policy.model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == {name for name, parameter in policy.model.named_parameters() if parameter.requires_grad}
    assert len(moved) == 2 * 2 * (7 if "ours" in way else 2), "two matrices for each layer of two blocks"


@pytest.mark.parametrize("nf4", [False, True], ids=["dense", "nf4"])
def test_in_bfloat16_they_agree_within_its_rounding(nf4: bool) -> None:
    policy = adapted_policy(nf4=nf4, compute="bfloat16")
    assert engine_in_parity(policy, max_rows=8, longest=30).policy.forward_reason is None


def test_captured_steps_follow_the_adapter_and_copy_no_base() -> None:
    policy = adapted_policy()
    engine, steps = InProcessEngine(policy), StaticSteps(policy)
    engine._steps = steps
    addresses = []
    for seed in (3, 9):
        fill(policy.model, seed=seed)
        groups = sample_groups(engine, PROMPTS, request())
        torch.testing.assert_close(sampled(groups), truth(policy.model, groups), rtol=0, atol=1e-5)
        addresses.append([each.data_ptr() for layer in steps.layers for each in (layer.qkv.down, *layer.qkv.ups)])
    assert addresses[0] == addresses[1]
    assert steps.layers[0].qkv.parts.bases[0].layer is policy.model.model.layers[0].self_attn.q_proj.base_layer


def test_weight_decay_on_an_adapter_is_refused() -> None:
    settings = LearnerSettings(update=UpdateOptions(weight_decay=0.1), max_completion_tokens=8)
    with refused("update.weight_decay = 0.1", "update.decay_adapter = true"):
        Learner(adapted_policy(), build_algorithm({"name": "grpo"}), settings)


def test_the_learner_drops_inputs_in_updates_alone_and_the_same_ones_after_a_resume() -> None:
    def gradients(num_updates: int, dropout: float = 0.5) -> Tensor:
        policy, algorithm = (
            adapted_policy(options=AdapterOptions(rank=3, dropout=dropout)),
            build_algorithm({"name": "grpo"}),
        )
        groups = sample_groups(InProcessEngine(policy), PROMPTS, request())
        learner = Learner(policy, algorithm, SETTINGS)
        learner.num_updates = num_updates
        learner.optimizer = torch.optim.SGD([p for p in policy.model.parameters() if p.requires_grad], lr=1.0)
        learner.learn([batch_of(groups, [[1, -1, 0.5]] * 3, algorithm)], 1, Clock())
        return torch.cat([layer.lora_B.detach().flatten() for layer in lora_layers(policy.model).values()])

    assert torch.equal(gradients(3), gradients(3))
    assert not torch.equal(gradients(3), gradients(4))
    assert not torch.equal(gradients(3), gradients(3, dropout=0.0))


LATE: dict[str, tuple[str, Callable[[PreTrainedModel], object], str]] = {
    "an adapter": ("auto", injected, "layers.0.mlp.down_proj has got or lost an adapter"),
    "a stand-in": ("auto", with_stand_in, "AdaptedLinear"),
    "a hook": (
        *("auto", lambda model: model.model.layers[0].register_forward_hook(lambda module, args, out: out)),
        "layers.0 has a hook",
    ),
    "dropout": (
        *("plain", lambda model: injected(model, ["v_proj"], lora_dropout=0.1).eval()),
        "layers.0.self_attn.v_proj has got an adapter with dropout",
    ),
    # As peft makes it: in training mode, so that its dropout would be on.
    "training mode": ("plain", injected, "layers in training mode"),
    "a head": ("plain", lambda model: injected(model, ["lm_head"]).eval(), "its output layer"),
}


@pytest.mark.parametrize("what", LATE)
def test_what_comes_into_a_model_after_its_policy_is_refused_and_a_policy_made_anew_has_it(what: str) -> None:
    forward, change, says = LATE[what]
    policy = as_policy(tiny_model("qwen3", exact=False), tokenizer(), forward=forward)  # type: ignore[arg-type]
    engine = InProcessEngine(policy)
    sample_groups(engine, PROMPTS, request())
    change(policy.model)
    with refused(says):
        sample_groups(engine, PROMPTS, request())
    if what != "a head":
        as_policy(policy.model, policy.tokenizer).require_as_made()
