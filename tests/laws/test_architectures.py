"""The shared-prompt forward pass is used where it computes what the model computes, and nowhere else."""

import re
from collections.abc import Callable
from types import MethodType

import numpy as np
import peft
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen3ForCausalLM

from posttrain.generation.engine import sample_groups
from posttrain.generation.in_process import InProcessEngine
from posttrain.models.forward import Completions, PlainForward, SharedPromptForward
from posttrain.models.policy import Policy, as_policy
from posttrain.models.shared_prompt.families import FAMILIES
from posttrain.training.update import group_logprobs
from tests.support.families import family_model
from tests.support.tiny import CLASSES, DECODERS, SHAPE, plain_logprobs, request, some_prompts, tokenizer, written_group

PROMPTS = [(3, 9, 4), (1,)]
COMPLETIONS = [tuple(range(1, 20)), (7, 2), (5, 5, 8)]
PROMPT_OF = [0, 0, 1]
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # transformers to peft


def model_of(family: str, **config: object) -> PreTrainedModel:
    """The library's own model, weights wide enough that every layer matters."""
    model_class, config_class, extra = CLASSES[family]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: PreTrainedModel = model_class(config_class(**{**SHAPE, **extra, **config})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.ndim > 1 else 1)
    return model


def largest_gap(policy: Policy) -> float:
    """Between the hidden states of the policy's forward pass and of the model on one unpadded row at a time."""
    actual = policy.forward.completion_hidden(Completions(PROMPTS, COMPLETIONS, PROMPT_OF))
    model = policy.model.base_model
    rows = [(PROMPTS[p], tokens) for p, tokens in zip(PROMPT_OF, COMPLETIONS, strict=True)]
    expected = [
        model(input_ids=torch.tensor([[*prompt, *tokens[:-1]]])).last_hidden_state[0, len(prompt) - 1 :]
        for prompt, tokens in rows
    ]
    return (actual - torch.cat(expected)).abs().max().item()


ROPES: dict[str, dict[str, object]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
VARIANTS: dict[str, dict[str, object]] = {
    **{name: {"rope_parameters": {"rope_type": name, "rope_theta": 100.0, **more}} for name, more in ROPES.items()},
    "attention_bias": {"attention_bias": True},
    "attention_dropout": {"attention_dropout": 0.5},  # off in eval mode, in which a policy's model is
    "untied": {"tie_word_embeddings": False},
    "one_head_each": {"num_key_value_heads": 4},
    "eager": {"attn_implementation": "eager"},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", DECODERS)
def test_what_is_not_refused_computes_what_the_model_computes(family: str, variant: str) -> None:
    policy = as_policy(model_of(family, **VARIANTS[variant]), tokenizer())
    assert policy.forward_reason is None
    assert isinstance(policy.forward, SharedPromptForward)
    assert largest_gap(policy) <= 2e-5  # float32


# What is refused, and what is said of it.


class Halved(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / 2


class Scaled(Qwen3ForCausalLM):
    pass


class Marked(torch.Tensor):
    """A weight that is more than its numbers, as those of quantised and sharded models are."""


def with_a_weight_decomposing_adapter(model: PreTrainedModel) -> None:
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, use_dora=True, target_modules=["v_proj"]), model)


def with_another_kind_of_adapter(model: PreTrainedModel) -> None:
    peft.inject_adapter_in_model(peft.IA3Config(target_modules=["down_proj"], feedforward_modules=["down_proj"]), model)


def with_a_subclass(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.up_proj.__class__ = Halved


def with_a_model_class_of_its_own(model: PreTrainedModel) -> None:
    model.__class__ = Scaled


def with_another_module(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.act_fn = nn.GELU()


def with_a_hook(model: PreTrainedModel) -> None:
    model.model.layers[1].register_forward_hook(lambda module, inputs, output: 2 * output)


def with_a_pre_hook(model: PreTrainedModel) -> None:
    model.model.norm.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))


def with_another_forward(model: PreTrainedModel) -> None:
    norm = model.model.layers[0].input_layernorm
    norm.forward = MethodType(lambda self, x: x, norm)


def with_a_parametrised_weight(model: PreTrainedModel) -> None:
    parametrize.register_parametrization(model.model.layers[0].self_attn.q_proj, "weight", nn.Tanh())


def with_a_weight_of_another_type(model: PreTrainedModel) -> None:
    projection = model.model.layers[1].self_attn.k_proj
    projection.weight = nn.Parameter(projection.weight.detach().as_subclass(Marked))


REFUSED: dict[Callable[[PreTrainedModel], None], str] = {
    with_a_weight_decomposing_adapter: r"layers\.0\.self_attn\.v_proj has an adapter that is more than plain LoRA",
    with_another_kind_of_adapter: r"layers\.0\.mlp\.down_proj is a peft\.tuners\.ia3\.layer\.Linear",
    with_a_subclass: r"layers\.1\.mlp\.up_proj is a \S*Halved, which is not a layer of the qwen3 family",
    with_a_model_class_of_its_own: r"the model is a \S*Scaled",
    with_another_module: r"layers\.0\.mlp\.act_fn is a torch\.nn\.modules\.activation\.GELU",
    with_a_hook: r"layers\.1 has a hook",
    with_a_pre_hook: r"norm has a hook",
    with_another_forward: r"layers\.0\.input_layernorm has a forward function put in place of its class's own",
    with_a_parametrised_weight: r"layers\.0\.self_attn\.q_proj is a torch\.nn\.utils\.parametrize\.ParametrizedLinear",
    with_a_weight_of_another_type: r"layers\.1\.self_attn\.k_proj has a weight of type \S*Marked",
}


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
def test_a_model_that_was_changed_is_refused_with_the_place_and_runs_as_it_is(
    change: Callable[[PreTrainedModel], None],
) -> None:
    model = model_of("qwen3")
    change(model)
    policy = as_policy(model, tokenizer())
    assert policy.forward_reason is not None
    assert re.match(REFUSED[change], policy.forward_reason), policy.forward_reason
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
    copied, before = policy.copy(), policy.forward.completion_hidden(Completions(PROMPTS, COMPLETIONS, PROMPT_OF))
    with torch.no_grad():
        policy.model.model.norm.weight.mul_(2)
    assert type(copied.forward) is type(policy.forward)
    assert torch.equal(copied.forward.completion_hidden(Completions(PROMPTS, COMPLETIONS, PROMPT_OF)), before)
    assert not torch.equal(policy.forward.completion_hidden(Completions(PROMPTS, COMPLETIONS, PROMPT_OF)), before)


@pytest.mark.parametrize("chosen", ["auto", "plain"])
def test_nothing_outgrows_the_length_at_which_longrope_changes_every_angle(chosen: str) -> None:
    # Beyond it angles depend on the longest row beside a row, and the cache holds keys of other angles.
    rope = {"rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0, 1.5], "long_factor": [3.0, 9.0]}
    model = model_of("llama", rope_parameters={**rope, "original_max_position_embeddings": 16})
    policy = as_policy(model, tokenizer(), forward=chosen)
    groups = sample_groups(InProcessEngine(policy), some_prompts((3, 9)), request(4, 30))
    lengths = [len(group.prompt.tokens) + len(rollout.tokens) for group in groups for rollout in group.rollouts]
    assert max(lengths) == 16
    rows = [(group.prompt.tokens, rollout.tokens) for group in groups for rollout in group.rollouts]
    expected = torch.cat([plain_logprobs(model, *row) for row in rows]).double()
    sampled = torch.tensor([p for group in groups for r in group.rollouts for p in r.logprobs], dtype=torch.float64)
    trained = group_logprobs(policy, groups, temperature=1.0, max_tokens=1000)
    torch.testing.assert_close(sampled, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(trained, expected, rtol=0, atol=1e-4)


# The second prompt and completion outgrow a window of 4.
GROUPS = [
    written_group((1, 2, 3), [(4, 5), (6, 7, 8, 9)]),
    written_group((10, 11, 12, 13, 14), [(15, 16, 17, 18), (19, 20, 21)], draw=1),
]


def llama(**options: object) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SHAPE, **options))


def qwen2(**options: object) -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**SHAPE, **options))


def with_random_weights(model: PreTrainedModel) -> PreTrainedModel:
    """In float64; biases too, which start as 0, and norms, which start as 1."""
    random = np.random.Generator(np.random.Philox(0))
    model = model.to(torch.float64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name else 0.0
            parameter.copy_(centre + 0.35 * torch.from_numpy(random.random(parameter.shape) * 2 - 1))
    return model


WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("make", "options", "ours"),
    [
        (llama, {}, True),
        (qwen2, {}, True),
        (llama, {"rms_norm_eps": 0.1}, True),
        (llama, {"attention_bias": True}, True),
        (llama, {"head_dim": 6}, True),
        (llama, {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}, True),
        (qwen2, {"use_sliding_window": False, "sliding_window": 4}, True),
        (llama, {"mlp_bias": True}, True),
        (llama, {"hidden_act": "gelu_pytorch_tanh"}, True),
        (llama, {"hidden_act": "gelu"}, False),
        (qwen2, {"hidden_act": "relu"}, False),
        (qwen2, WINDOW, True),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),  # an address would differ between workers
)
def test_whatever_a_config_says_log_probs_are_those_of_the_models_own_forward(
    make: Callable[..., PreTrainedModel], options: dict[str, object], ours: bool
) -> None:
    model = with_random_weights(make(**options))
    policy = as_policy(model, tokenizer())
    assert isinstance(policy.forward, SharedPromptForward) == ours
    actual = group_logprobs(policy, GROUPS, temperature=1.0, max_tokens=1000)
    with torch.no_grad():
        expected = torch.cat([plain_logprobs(model, g.prompt.tokens, r.tokens) for g in GROUPS for r in g.rollouts])
    # Hugging Face computes norms and angles in float32: gaps of some 1e-7, where each option above makes 1e-3.
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)
