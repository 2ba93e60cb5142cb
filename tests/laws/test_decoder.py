"""Our forward pass computes what the model's own does, or leaves the model to it."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from posttrain.models.forward import SharedPromptForward
from posttrain.models.policy import as_policy
from posttrain.training.update import group_logprobs
from tests.support.tiny import SHAPE, plain_logprobs, tokenizer, written_group

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
