"""docs/models.md says what the code does: the way of every family that the library has, and what it refuses.

`make families` writes that page, with figures for all of them; here are those of a few that no other test has.  What
has no log-probs of its own is refused by name, and of a multimodal model the text part gives them, or says it does not.
"""

from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from posttrain.models.loading.description import model_lines
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.policy import as_policy
from posttrain.options.model import ModelOptions
from tests.support.every_family import BESIDES, NOT_BUILT, SIGLIP, VARIANTS, every_label, small_config, small_model
from tests.support.families import CONTEXT, OLDER, family_model, randomise
from tests.support.family_measures import FAULT, FOUND_OUT, distances, exports, probed, quick_route, saved
from tests.support.family_page import PAGE, routes
from tests.support.refusals import refused
from tests.support.tiny import SHAPE, tokenizer

WRITTEN = routes(PAGE.read_text(encoding="utf-8"))
FOUND_BY_SAMPLING = sorted(label for label, route in WRITTEN.items() if FOUND_OUT in route.remarks)
SHARED = ("gemma3n_text with shared keys", "gemma4_text with shared keys")
SOME = ("cohere2", "falcon with ALiBi", *SHARED, "llama4", "olmo3", "opt", "qwen2 with windows")

SAVED = (
    *("afmoe", "beam", "deepseek_v3", "falcon_h1", "gemma4", "gpt2", "llama4", "llava", "phi3", "qwen3_5_moe"),
    *("qwen3_moe with dense layers", "qwen3_next"),
)
"""Families with traps for adapters: mixtures, state spaces, wrappers, transposed and joined matrices."""


def test_every_family_of_the_library_is_on_the_page_or_said_to_be_left_out() -> None:
    assert set(WRITTEN) == set(every_label())
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) | set(BESIDES) | set(VARIANTS) == set(WRITTEN) | set(NOT_BUILT)
    assert set(NOT_BUILT) < set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@pytest.mark.parametrize("label", [label for label in every_label() if label not in FOUND_BY_SAMPLING])
def test_a_family_takes_the_way_that_the_page_says(label: str, tmp_path: Path) -> None:
    assert quick_route(label, tmp_path) == WRITTEN[label]


@pytest.mark.parametrize("label", FOUND_BY_SAMPLING)
def test_what_only_sampling_finds_out_is_found_out(label: str, tmp_path: Path) -> None:
    """A cache that the library itself gets wrong is not used."""
    assert quick_route(label, tmp_path).name != WRITTEN[label].name
    assert probed(saved(label, tmp_path), "float32")[1].name == WRITTEN[label].name


@pytest.mark.parametrize("label", SAVED)
def test_what_a_run_saves_is_the_same_model_in_transformers_in_peft_and_here(label: str, tmp_path: Path) -> None:
    found = exports(saved(label, tmp_path / "base"), tmp_path / "out")
    assert found.model == found.again == 0
    assert isinstance(found.adapter, float)
    assert isinstance(found.merged, float)
    assert max(found.adapter, found.merged) <= 1e-4


@pytest.mark.parametrize("label", SOME)
def test_sampler_and_trainer_are_the_librarys_own_model(label: str, tmp_path: Path) -> None:
    policy, _ = probed(saved(label, tmp_path), "float32")
    found = distances(policy, label, tmp_path)
    assert 0 < found.sampler <= 1e-4
    assert 0 < found.trainer <= 1e-4
    assert found.moved


def test_a_model_that_wants_more_than_tokens_is_refused_in_its_own_words() -> None:
    config = small_config("xmod")
    config.default_language = None
    with refused("a XmodForCausalLM cannot read", "(ValueError: Input language"):
        as_policy(AutoModelForCausalLM.from_config(config), tokenizer())


def test_a_model_whose_layers_do_not_take_bfloat16_is_refused_where_that_is_asked_for() -> None:
    model = small_model("dbrx")
    assert as_policy(model, tokenizer(), dtype="float32").compute_dtype == torch.float32
    with refused("a DbrxForCausalLM cannot", "set model.dtype to float32."):
        as_policy(model, tokenizer(), dtype="bfloat16")


def test_a_family_that_has_gradients_in_training_mode_alone_is_refused() -> None:
    with refused("a ReformerModelWithLMHead computes gradients only in training mode"):
        as_policy(small_model("reformer"), tokenizer())


def test_no_family_ends_in_a_traceback() -> None:
    assert FAULT not in {route.name for route in WRITTEN.values()}


def test_hidden_states_that_are_divided_before_the_output_layer_are_a_scale() -> None:
    policy = as_policy(small_model("inkling_text"), tokenizer(), context=CONTEXT)
    assert policy.output_layer.scale == pytest.approx(1 / policy.model.config.logits_mup_width_multiplier)


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
WITHOUT_LOGPROBS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "it reads later tokens": (lambda: made("bert"), "BertLMHeadModel reads tokens that come later…is_decoder"),
    "an encoder": (lambda: T5ForConditionalGeneration(T5Config(**T5)), "T5ForConditionalGeneration…with an encoder"),
    "a head of two layers": (lambda: made("modernbert-decoder", **MODERN), "ModernBertDecoder…not compute its logits"),
    "an ignored cap": (lambda: scaled("final_logit_softcapping"), "LlamaForCausalLM does not compute its logits"),
    "an ignored scale": (lambda: scaled("logit_scale"), "LlamaForCausalLM does not compute its logits"),
    "an ignored divisor": (lambda: scaled("logits_scaling"), "LlamaForCausalLM does not compute its logits"),
    "another forward of the head": (with_another_output, "output layer has a forward function put in place"),
    "a hook on the head": (with_a_hook_on_the_output, "output layer has a hook"),
    "an adapter on the head": (with_an_adapter_on_the_output, "a peft.tuners.lora.layer.Linear, not torch.nn.Linear"),
    "no head": (lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)).model, "LlamaModel has no output layer"),
    "a wrapper that does more": (with_learned_prompts, "PROMPT_TUNING may do more than its layers do"),
    "a layer": (lambda: nn.Linear(2, 2), "a Linear is not a transformers model"),
}


@pytest.mark.parametrize("what", WITHOUT_LOGPROBS)
def test_a_model_without_log_probs_of_its_own_is_refused_by_name(what: str) -> None:
    make, words = WITHOUT_LOGPROBS[what]
    with refused(words):
        as_policy(make(), tokenizer())


def aya_vision() -> PreTrainedModel:
    """Whose text part multiplies its logits by `logit_scale`, as the whole model does not."""
    text = small_config("cohere2").to_dict() | {"logit_scale": 0.3}
    return AutoModelForImageTextToText.from_config(
        AutoConfig.for_model("aya_vision", text_config=text, vision_config=SIGLIP)
    )


def gemma3() -> PreTrainedModel:
    return AutoModelForImageTextToText.from_config(small_config("gemma3"))


@pytest.mark.parametrize(("make", "differs"), [(aya_vision, True), (gemma3, False)])
def test_a_text_part_that_makes_its_logits_in_another_way_is_said(
    make: Callable[[], PreTrainedModel], differs: bool, tmp_path: Path
) -> None:
    randomise(make()).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    lines = model_lines(load_policy(ModelOptions(path=str(tmp_path), device="cpu")), "model")
    assert any(f"from those of the {make.__name__} that" in line for line in lines) == differs
