"""The shared-prompt forward pass is used where it computes what the model computes, and nowhere else."""

import re
from collections.abc import Callable

import peft
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel, Qwen3ForCausalLM

from posttrain.generation.engine import sample_groups
from posttrain.generation.in_process import InProcessEngine
from posttrain.models.forward import Completions, PlainForward, SharedPromptForward
from posttrain.models.policy import Policy, as_policy
from posttrain.models.shared_prompt.families import FAMILIES
from posttrain.training.update import group_logprobs
from tests.support import tiny
from tests.support.families import family_model
from tests.support.tiny import DECODERS, SHAPE, plain_logprobs, plain_states, request, rows_of, some_prompts, tokenizer

PROMPTS = [(3, 9, 4), (1,)]
COMPLETIONS = [tuple(range(1, 20)), (7, 2), (5, 5, 8)]
PROMPT_OF = [0, 0, 1]
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # transformers to peft


def model_of(family: str, **config: object) -> PreTrainedModel:
    """The library's own model, weights wide enough that every layer matters."""
    model_class, config_class, extra = tiny.CLASSES[family]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: PreTrainedModel = model_class(config_class(**{**SHAPE, **extra, **config})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.ndim > 1 else 1)
    return model


BATCH = Completions(PROMPTS, COMPLETIONS, PROMPT_OF)


def largest_gap(policy: Policy) -> float:
    """Between the hidden states of the policy's forward pass and of the model on one unpadded row at a time."""
    rows = [(PROMPTS[p], tokens) for p, tokens in zip(PROMPT_OF, COMPLETIONS, strict=True)]
    expected = torch.cat([plain_states(policy.model, *row) for row in rows])
    return (policy.forward.completion_hidden(BATCH) - expected).abs().max().item()


ROPES: dict[str, dict[str, object]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
}
VARIANTS: dict[str, dict[str, object]] = {
    **{name: {"rope_parameters": {"rope_type": name, "rope_theta": 100.0, **more}} for name, more in ROPES.items()},
    "attention_bias": {"attention_bias": True},
    "attention_dropout": {"attention_dropout": 0.5},  # off in eval mode, in which a policy's model is
    "untied": {"tie_word_embeddings": False},
    "one_head_each": {"num_key_value_heads": 4},
    "eager": {"attn_implementation": "eager"},
    "eps": {"rms_norm_eps": 0.1},
    "head_dim": {"head_dim": 6},
    "no window": {"use_sliding_window": False, "sliding_window": 4},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", DECODERS)
def test_what_is_not_refused_computes_what_the_model_computes(family: str, variant: str) -> None:
    policy = as_policy(model_of(family, **VARIANTS[variant]), tokenizer())
    assert policy.forward_reason is None
    assert isinstance(policy.forward, SharedPromptForward)
    assert largest_gap(policy) <= 2e-5  # float32


class Halved(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / 2


class Scaled(Qwen3ForCausalLM):
    pass


class Marked(torch.Tensor):
    """A weight that is more than its numbers, as those of quantised and sharded models are."""


def with_a_weight_of_another_type(model: PreTrainedModel) -> None:
    projection = model.model.layers[1].self_attn.k_proj
    projection.weight = nn.Parameter(projection.weight.detach().as_subclass(Marked))


REFUSED: dict[str, tuple[Callable[[PreTrainedModel], object], str]] = {
    "a weight-decomposing adapter": (
        lambda model: peft.inject_adapter_in_model(peft.LoraConfig(use_dora=True, target_modules=["v_proj"]), model),
        r"layers\.0\.self_attn\.v_proj has an adapter that is more than plain LoRA",
    ),
    "another kind of adapter": (
        lambda model: peft.inject_adapter_in_model(
            peft.IA3Config(target_modules=["down_proj"], feedforward_modules=["down_proj"]), model
        ),
        r"layers\.0\.mlp\.down_proj is a peft\.tuners\.ia3\.layer\.Linear",
    ),
    "a subclass": (
        lambda model: setattr(model.model.layers[1].mlp.up_proj, "__class__", Halved),
        r"layers\.1\.mlp\.up_proj is a \S*Halved, which is not a layer of the qwen3 family",
    ),
    "a model class of its own": (lambda model: setattr(model, "__class__", Scaled), r"the model is a \S*Scaled"),
    "another module": (
        lambda model: setattr(model.model.layers[0].mlp, "act_fn", nn.GELU()),
        r"layers\.0\.mlp\.act_fn is a torch\.nn\.modules\.activation\.GELU",
    ),
    "a hook": (
        lambda model: model.model.layers[1].register_forward_hook(lambda module, inputs, output: 2 * output),
        r"layers\.1 has a hook",
    ),
    "a pre-hook": (
        lambda model: model.model.norm.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],)),
        r"norm has a hook",
    ),
    "another forward": (
        lambda model: setattr(model.model.layers[0].input_layernorm, "forward", lambda x: x),
        r"layers\.0\.input_layernorm has a forward function put in place of its class's own",
    ),
    "a parametrised weight": (
        lambda model: parametrize.register_parametrization(model.model.layers[0].self_attn.q_proj, "weight", nn.Tanh()),
        r"layers\.0\.self_attn\.q_proj is a torch\.nn\.utils\.parametrize\.ParametrizedLinear",
    ),
    "a weight of another type": (
        with_a_weight_of_another_type,
        r"layers\.1\.self_attn\.k_proj has a weight of type \S*Marked",
    ),
}


@pytest.mark.parametrize("changed", REFUSED)
def test_a_model_that_was_changed_is_refused_with_the_place_and_runs_as_it_is(changed: str) -> None:
    change, reason = REFUSED[changed]
    model = model_of("qwen3")
    change(model)
    policy = as_policy(model, tokenizer())
    assert re.match(reason, policy.forward_reason), policy.forward_reason
    assert isinstance(policy.forward, PlainForward)
    assert largest_gap(policy) <= 2e-5


def test_another_family_is_refused_by_name() -> None:
    reason = as_policy(family_model("gpt_neox"), tokenizer()).forward_reason
    assert reason == f"its family is gpt_neox, not one of {', '.join(FAMILIES)}"


def test_the_plain_pass_can_be_asked_for() -> None:
    policy = as_policy(model_of("qwen3"), tokenizer(), forward="plain")
    assert isinstance(policy.forward, PlainForward)
    assert policy.forward_reason == "forward = plain was chosen"
    assert largest_gap(policy) <= 2e-5


@pytest.mark.parametrize("chosen", ["auto", "plain"])
def test_a_copy_takes_the_same_pass_over_weights_of_its_own(chosen: str) -> None:
    policy = as_policy(model_of("qwen3"), tokenizer(), forward=chosen)
    copied, before = policy.copy(), policy.forward.completion_hidden(BATCH)
    with torch.no_grad():
        policy.model.model.norm.weight.mul_(2)
    assert type(copied.forward) is type(policy.forward)
    assert torch.equal(copied.forward.completion_hidden(BATCH), before)
    assert not torch.equal(policy.forward.completion_hidden(BATCH), before)


@pytest.mark.parametrize("chosen", ["auto", "plain"])
def test_nothing_outgrows_the_length_at_which_longrope_changes_every_angle(chosen: str) -> None:
    # Beyond it angles depend on the longest row beside a row, and the cache holds keys of other angles.
    rope = {"rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0, 1.5], "long_factor": [3.0, 9.0]}
    model = model_of("llama", rope_parameters={**rope, "original_max_position_embeddings": 16})
    policy = as_policy(model, tokenizer(), forward=chosen)
    groups = sample_groups(InProcessEngine(policy), some_prompts((3, 9)), request(4, 30))
    assert max(len(prompt) + len(completion) for prompt, completion in rows_of(groups)) == 16
    expected = torch.cat([plain_logprobs(model, *row) for row in rows_of(groups)]).double()
    sampled = torch.tensor([p for group in groups for r in group.rollouts for p in r.logprobs], dtype=torch.float64)
    trained = group_logprobs(policy, groups, temperature=1.0, max_tokens=1000)
    torch.testing.assert_close(sampled, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(trained, expected, rtol=0, atol=1e-4)
