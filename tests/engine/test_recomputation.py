"""Gradient checkpointing: the same gradients from fewer kept tensors, with dropout off and sampling untouched."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from posttrain.generation.engine import sample_groups
from posttrain.generation.in_process import InProcessEngine
from posttrain.models.forward import Completions
from posttrain.models.loading.description import model_lines
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.model_outputs import enable_recomputation, is_recomputing, recomputing_layers
from posttrain.models.policy import Policy, as_policy
from posttrain.options.model import ModelOptions
from tests.support.model_folders import family_folder, small_folder
from tests.support.refusals import refused
from tests.support.tiny import SHAPE, request, some_prompts, tokenizer

PROMPTS, COMPLETIONS, PROMPT_OF = [[1, 2, 3, 4], [5, 6]], [[3, 4, 5, 6, 7], [7, 8], [9, 10, 11]], [0, 0, 1]


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=24, n_embd=16, n_layer=3, n_head=4, n_positions=64, eos_token_id=5))


def mistral() -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**{**SHAPE, "num_hidden_layers": 3}, sliding_window=None))


def opt() -> PreTrainedModel:
    """Its layers themselves ask for their own training mode, and drop out by it."""
    config = OPTConfig(
        vocab_size=24,
        hidden_size=16,
        ffn_dim=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=64,
        dropout=0.5,
        eos_token_id=5,
        word_embed_proj_dim=16,
    )
    return OPTForCausalLM(config)


def experts() -> PreTrainedModel:
    few = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SHAPE, "num_hidden_layers": 3}, **few))


each_family = pytest.mark.parametrize("make", [gpt2, mistral, opt, experts])


def policy_of(make, *, recompute: bool, dtype: str = "auto") -> Policy:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make()
    if recompute:
        enable_recomputation(model)
    return as_policy(model, tokenizer(), forward="plain", dtype=dtype)  # type: ignore[arg-type]


def gradients(policy: Policy) -> tuple[dict[str, Tensor], int]:
    """The gradient of a sum over hidden states, and the numbers that the forward pass kept for it."""
    parameters = {id(parameter) for parameter in policy.model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if id(tensor) not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = policy.forward.completion_hidden(Completions(PROMPTS, COMPLETIONS, PROMPT_OF))
        loss = hidden.float().square().sum()
    loss.backward()
    return {name: each.grad for name, each in policy.model.named_parameters() if each.grad is not None}, sum(
        kept.values()
    )


@each_family
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_gradients_are_the_same_bits_and_less_is_kept(make, dtype: str) -> None:
    (expected, much), (found, little) = (
        gradients(policy_of(make, recompute=recompute, dtype=dtype)) for recompute in (False, True)
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert little < 0.5 * much


@each_family
def test_the_model_stays_in_eval_mode_and_samples_as_before(make) -> None:
    plain, policy = policy_of(make, recompute=False), policy_of(make, recompute=True)
    prompts, asked = some_prompts([3, 7]), request(2, 6)
    expected = sample_groups(InProcessEngine(plain), prompts, asked)
    assert sample_groups(InProcessEngine(policy), prompts, asked) == expected
    gradients(policy)
    policy.require_as_made()
    assert not any(module.training for module in policy.model.modules())
    assert not any("forward" in vars(module) for module in policy.model.modules())
    assert sample_groups(InProcessEngine(policy), prompts, asked) == expected


def test_a_layer_that_fails_leaves_the_model_as_it_was() -> None:
    policy = policy_of(mistral, recompute=True)
    with pytest.raises(IndexError), recomputing_layers(policy.model):
        policy.model(input_ids=torch.tensor([[1000]]))
    policy.require_as_made()
    assert not any("forward" in vars(module) for module in policy.model.modules())


def test_without_gradients_nothing_is_wrapped() -> None:
    policy = policy_of(mistral, recompute=True)
    with torch.no_grad(), recomputing_layers(policy.model):
        assert not any("forward" in vars(module) for module in policy.model.modules())


def test_the_option_and_the_models_own_switch_are_the_same(tmp_path: Path) -> None:
    folder = str(family_folder(tmp_path / "model", "gpt2"))
    on, off = (
        load_policy(ModelOptions(path=folder, gradient_checkpointing=True)),
        load_policy(ModelOptions(path=folder)),
    )
    assert (is_recomputing(on.model), is_recomputing(off.model)) == (True, False)
    assert "layers computed again for gradients" in model_lines(on, "it")[0]
    with pytest.warns(FutureWarning):
        off.model.gradient_checkpointing_enable()
    again = as_policy(off.model, off.tokenizer)
    assert gradients(again)[1] == gradients(on)[1]


def test_the_quicker_pass_is_kept_with_layers_that_are_computed_again(tmp_path: Path) -> None:
    folder = str(small_folder(tmp_path / "model"))
    on, off = (load_policy(ModelOptions(path=folder, gradient_checkpointing=each)) for each in (True, False))
    assert (on.forward_reason, off.forward_reason) == (None, None)
    with pytest.warns(FutureWarning):
        off.model.gradient_checkpointing_enable()
    assert as_policy(off.model, off.tokenizer).forward_reason is None


def test_a_model_whose_layers_cannot_be_computed_again_is_refused() -> None:
    model = mistral()
    model.model.layers = torch.nn.ModuleList()
    with refused("the layers of a MistralForCausalLM cannot be computed again"):
        enable_recomputation(model)
