"""Before a run, sampler and trainer are compared with the model itself: a wrong one falls back, or is refused."""

import pytest
import torch
from transformers import GPTNeoConfig, GPTNeoForCausalLM, LlamaConfig, LlamaForCausalLM

from posttrain.errors import UserError
from posttrain.models.forward import PlainForward, SharedPromptForward
from posttrain.models.policy import Policy, as_policy
from posttrain.training.parity import EXACT_NATS, engine_in_parity, largest_gap
from tests.support.tiny import FAMILIES, SHAPE, tiny_policy


def llama() -> Policy:
    torch.manual_seed(0)
    return as_policy(LlamaForCausalLM(LlamaConfig(**SHAPE)), tiny_policy("llama").tokenizer)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_that_are_right_go_through_the_pass_that_was_chosen(family: str) -> None:
    policy = tiny_policy(family)
    engine = engine_in_parity(policy, max_rows=4, longest=40)
    assert engine.policy is policy
    assert largest_gap(engine, 40) < 1e-9


def test_float32_stays_a_hundred_times_below_its_bound() -> None:
    assert largest_gap(engine_in_parity(llama(), max_rows=4, longest=40), 40) < EXACT_NATS / 100


def test_a_wrong_quick_pass_falls_back_to_the_models_own() -> None:
    policy = llama()
    assert isinstance(policy.forward, SharedPromptForward)
    policy.model.model.layers[0].input_layernorm.register_forward_hook(lambda module, args, out: out * 1.1)
    engine = engine_in_parity(policy, max_rows=4, longest=40)
    assert isinstance(engine.policy.forward, PlainForward)
    assert "nats off" in str(engine.policy.forward_reason)
    assert largest_gap(engine, 40) <= EXACT_NATS


def test_a_model_whose_cache_is_wrong_at_mixed_lengths_is_refused() -> None:
    torch.manual_seed(0)
    shape = {"vocab_size": 24, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64}
    local = GPTNeoConfig(**shape, attention_types=[[["global", "local"], 1]], window_size=8, initializer_range=0.5)
    local.eos_token_id = 5
    policy = as_policy(GPTNeoForCausalLM(local), tiny_policy("gpt2").tokenizer)
    with pytest.raises(UserError, match=r"model: sampling and training do not compute the same.*gpt_neo") as refusal:
        engine_in_parity(policy, max_rows=4, longest=40)
    assert "1 to 40 tokens" in str(refusal.value)
