"""Models that are made from nothing, of either family: their parts, their seed, and the passes that they go through."""

from pathlib import Path

import torch
from transformers import GPT2LMHeadModel, Qwen3ForCausalLM

from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.parity import largest_gap
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.loading.new_model import new_model, new_tokenizer
from posttrain.models.memory.model_shape import recipe_shape
from posttrain.models.policy import Policy, as_policy
from posttrain.options.model import ModelOptions, NewModelOptions
from tests.support.refusals import refused

SMALL = {"hidden_size": 16, "mlp_size": 24, "num_layers": 2, "num_heads": 2, "max_positions": 64}
GPT2 = NewModelOptions(family="gpt2", **SMALL)


def made(options: NewModelOptions, seed: int = 0) -> Policy:
    tokenizer = new_tokenizer()
    return as_policy(new_model(options, tokenizer, seed=seed), tokenizer)


def test_the_family_decides_the_architecture() -> None:
    assert isinstance(made(NewModelOptions(**SMALL)).model, Qwen3ForCausalLM)
    model = made(GPT2).model
    assert isinstance(model, GPT2LMHeadModel)
    assert model.transformer.wpe.weight.shape == (64, 16)
    assert model.transformer.h[1].mlp.c_fc.weight.shape == (16, 24)
    assert isinstance(model.transformer.ln_f, torch.nn.LayerNorm)
    assert {each.p for each in model.modules() if isinstance(each, torch.nn.Dropout)} == {0.0}
    assert model.lm_head.weight is model.transformer.wte.weight


def test_a_new_gpt2_goes_through_the_shared_prompt_pass_and_sampler_and_trainer_agree() -> None:
    policy = made(GPT2)
    assert not policy.forward.padded
    assert largest_gap(InProcessEngine(policy), longest=40) < 1e-4


def test_weights_are_a_function_of_the_seed_and_survive_a_folder(tmp_path: Path) -> None:
    one, again, other = (made(GPT2, seed).model.state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["transformer.wte.weight"], other["transformer.wte.weight"])
    policy = made(GPT2, 3)
    policy.model.save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    loaded = load_policy(ModelOptions(path=str(tmp_path))).model.state_dict()
    assert all(torch.equal(one[name], loaded[name]) for name in one)


def test_the_memory_plan_counts_its_parameters() -> None:
    count = sum(each.numel() for each in made(GPT2).model.parameters())
    assert recipe_shape(GPT2).parameters == count


def test_key_heads_of_their_own_are_refused_for_gpt2() -> None:
    NewModelOptions(family="gpt2", num_heads=4, num_kv_heads=4)
    with refused("num_kv_heads = 1 is only for family = qwen3", "Leave it out"):
        NewModelOptions(family="gpt2", num_heads=4, num_kv_heads=1)


def test_a_tokenizer_for_text_has_plain_words_as_tokens_and_loses_nothing() -> None:
    tokenizer = new_tokenizer("text")
    assert [len(tokenizer.encode(text)) for text in ("The weather today is", "I think that")] == [4, 3]
    # Full stops and digits stay single: their number is that of their tokens.
    said = "It rained... Dr. Lee paid 12.5 £."
    assert tokenizer.decode(tokenizer.encode(said)) == said
    dots = tokenizer.encode("................")
    assert len(dots) == 16
    assert len(set(dots)) == 1
