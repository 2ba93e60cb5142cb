"""Models that no log-probs can be computed of are refused by name, in one message, before anything is sampled."""

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

from posttrain.errors import UserError
from posttrain.models.policy import as_policy
from tests.support.families import OLDER, family_model
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


def refusal(model: nn.Module) -> str:
    with pytest.raises(UserError) as raised:
        as_policy(model, tokenizer())
    return str(raised.value)


def test_a_model_that_reads_later_tokens() -> None:
    message = refusal(made("bert"))
    assert "BertLMHeadModel reads tokens that come later" in message
    assert "is_decoder" in message


def test_a_model_with_an_encoder() -> None:
    shape = {"d_model": 16, "d_ff": 16, "d_kv": 4, "num_heads": 2, "num_layers": 1, "vocab_size": 24, "n_positions": 64}
    model = T5ForConditionalGeneration(T5Config(**shape))
    assert "T5ForConditionalGeneration reads prompts with an encoder" in refusal(model)


def test_a_model_whose_head_is_more_than_a_matrix() -> None:
    ids = {"pad_token_id": 0, "cls_token_id": 0, "sep_token_id": 0}
    message = refusal(made("modernbert-decoder", **ids))
    assert "ModernBertDecoderForCausalLM makes its logits in another way" in message


def test_a_scale_or_cap_in_a_config_that_the_family_ignores_is_not_applied_in_silence() -> None:
    for option in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, **{option: 0.25}))
        with torch.no_grad():
            model.lm_head.weight.mul_(20)
        assert "LlamaForCausalLM makes its logits in another way" in refusal(model), option


def test_a_layer_that_scales_what_the_head_reads() -> None:
    model = family_model("mistral")
    model.lm_head.forward = lambda hidden: nn.functional.linear(2 * hidden, model.lm_head.weight)
    assert "its output layer has a forward function put in place" in refusal(model)


def test_a_model_without_an_output_layer() -> None:
    assert "LlamaModel has no output layer" in refusal(LlamaForCausalLM(LlamaConfig(**SHAPE)).model)
