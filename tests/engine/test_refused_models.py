"""Models that no log-probs can be computed of are refused by name, in one message, before anything is sampled."""

from collections.abc import Callable

import peft
import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from posttrain.models.policy import as_policy
from tests.support.families import OLDER, family_model
from tests.support.refusals import refused
from tests.support.tiny import SHAPE, tokenizer

ENCODER = {
    **OLDER,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


def made(kind: str, **options: object) -> PreTrainedModel:
    torch.manual_seed(0)  # of some draws the difference is that of rounding
    config = AutoConfig.for_model(kind, **{**ENCODER, **options})
    return AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]


def with_another_output() -> PreTrainedModel:
    model = family_model("mistral")
    model.lm_head.forward = lambda hidden: nn.functional.linear(2 * hidden, model.lm_head.weight)
    return model


def with_a_hook_on_the_output() -> PreTrainedModel:
    model = family_model("mistral")
    model.lm_head.register_forward_hook(lambda module, inputs, output: output / 2)
    return model


def with_an_adapter_on_the_output() -> PreTrainedModel:
    """Its logits would be taken from the matrix alone."""
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"]), model)
    return model


def with_learned_prompts() -> nn.Module:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    return peft.get_peft_model(LlamaForCausalLM(LlamaConfig(**SHAPE)), config)


def scaled(option: str) -> PreTrainedModel:
    """A scale or cap in the config of a family that ignores it."""
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, **{option: 0.25}))
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    return model


T5 = {"d_model": 16, "d_ff": 16, "d_kv": 4, "num_heads": 2, "num_layers": 1, "vocab_size": 24, "n_positions": 64}
MODERN = {"pad_token_id": 0, "cls_token_id": 0, "sep_token_id": 0}
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "it reads later tokens": (lambda: made("bert"), "BertLMHeadModel reads tokens that come later…is_decoder"),
    "an encoder": (lambda: T5ForConditionalGeneration(T5Config(**T5)), "T5ForConditionalGeneration…with an encoder"),
    "a head of two layers": (lambda: made("modernbert-decoder", **MODERN), "ModernBertDecoder…logits in another way"),
    "an ignored cap": (lambda: scaled("final_logit_softcapping"), "LlamaForCausalLM makes its logits in another way"),
    "an ignored scale": (lambda: scaled("logit_scale"), "LlamaForCausalLM makes its logits in another way"),
    "an ignored divisor": (lambda: scaled("logits_scaling"), "LlamaForCausalLM makes its logits in another way"),
    "another forward of the head": (with_another_output, "output layer has a forward function put in place"),
    "a hook on the head": (with_a_hook_on_the_output, "output layer has a hook"),
    "an adapter on the head": (with_an_adapter_on_the_output, "a peft.tuners.lora.layer.Linear, not torch.nn.Linear"),
    "no head": (lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)).model, "LlamaModel has no output layer"),
    "a wrapper that does more": (with_learned_prompts, "PROMPT_TUNING may do more than its layers do"),
    "a layer": (lambda: nn.Linear(2, 2), "a Linear is not a transformers model"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_model_without_log_probs_of_its_own_is_refused_by_name(what: str) -> None:
    make, words = REFUSED[what]
    with refused(words):
        as_policy(make(), tokenizer())
