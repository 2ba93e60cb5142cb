"""Kinds of model folders: what can be loaded is, and what cannot is refused in a line that says what it is."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BitsAndBytesConfig,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    PixtralVisionConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.utils import logging as transformers_logging

from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.parity import largest_gap
from posttrain.models.adapters.adaptable import is_4_bit, runs_packed
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.loading.new_model import new_tokenizer
from posttrain.models.loading.saving import save_policy
from posttrain.options.model import AdapterOptions, ModelOptions
from tests.support.model_folders import changed, family_folder, small_folder
from tests.support.refusals import refused
from tests.support.runs import save_tiny_model

LONGEST_MESSAGE = 600
TEXT = {
    "vocab_size": 400,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}


def load(folder: Path, **options: object) -> PreTrainedModel:
    return load_policy(ModelOptions(path=str(folder), **options)).model  # type: ignore[arg-type]


def refusal(folder: Path) -> str:
    with refused() as raised:
        load(folder)
    said = str(raised.value)
    assert said.startswith(f"model.path = {folder}: ")
    assert len(said) < LONGEST_MESSAGE
    assert "\n" not in said
    return said


def without(*names: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        small_folder(folder)
        for name in names:
            (folder / name).unlink()

    return make


def of_another_library(folder: Path) -> None:
    without("model.safetensors")(folder)
    (folder / "model-q4.gguf").write_bytes(b"GGUF")


def encoder_decoder(folder: Path) -> None:
    shape = T5Config(vocab_size=400, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(shape).save_pretrained(folder)
    new_tokenizer().save_pretrained(folder)


def encoder(folder: Path) -> None:
    shape = {key: value for key, value in TEXT.items() if key != "num_key_value_heads"}
    BertForMaskedLM(BertConfig(**shape)).save_pretrained(folder)
    new_tokenizer().save_pretrained(folder)


def qwen_that_sees(folder: Path) -> None:
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    config = Qwen2_5_VLConfig(text_config={**TEXT, "rope_parameters": ROPE}, vision_config=vision)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    new_tokenizer().save_pretrained(folder)


def lacking_a_layer(folder: Path) -> None:
    weights = load_file(small_folder(folder) / "model.safetensors")
    kept = {name: value for name, value in weights.items() if "layers.1." not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def quantised(folder: Path) -> None:
    small_folder(folder)
    changed(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})


def lacking_a_part(folder: Path) -> None:
    small_folder(folder)
    load(folder).save_pretrained(folder, max_shard_size="10KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    sorted(folder.glob("model-0*.safetensors"))[1].unlink()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (without("tokenizer.json"), ("no tokenizer", "Copy tokenizer.json and tokenizer_config.json")),
        (without("model.safetensors"), ("holds no weights", "needs model.safetensors")),
        (of_another_library, ("holds no weights", "llama.cpp's, which are not read")),
        (lacking_a_part, ("or not all that its index names", "all of its parts")),
        (lacking_a_layer, ("are missing", "model.layers.1.", "Copy all files")),
        (encoder_decoder, ("T5ForConditionalGeneration", "it has an encoder")),
        (encoder, ("BertForMaskedLM is not a causal language model",)),
        (qwen_that_sees, ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text")),
        (quantised, ("quantised (gptq)", "that it was quantised from")),
    ],
)
def test_what_is_no_causal_language_model_is_refused_by_name(
    make: Callable[[Path], None], says: tuple[str, ...], tmp_path: Path
) -> None:
    make(tmp_path / "model")
    said = refusal(tmp_path / "model")
    assert [each for each in says if each not in said] == []


def test_an_adapter_keeps_the_context_that_was_asked_for(tmp_path: Path) -> None:
    folder = small_folder(tmp_path / "model")
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    changed(folder / "config.json", rope_parameters=rope)
    plain, adapted = (
        load_policy(ModelOptions(path=str(folder), context=200, adapter=adapter))
        for adapter in (None, AdapterOptions(rank=2))
    )
    assert (plain.max_positions, adapted.max_positions) == (200, 200)
    tokens = torch.arange(30)[None]  # B is 0: the adapter changes nothing yet
    assert torch.equal(plain.model(input_ids=tokens).logits, adapted.model(input_ids=tokens).logits)


def test_a_folder_in_4_bits_is_sampled_as_it_is_trained(tmp_path: Path) -> None:
    source = small_folder(tmp_path / "source")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    folder = tmp_path / "folder"
    AutoModelForCausalLM.from_pretrained(source, quantization_config=config).save_pretrained(folder)
    new_tokenizer().save_pretrained(folder)
    policy = load_policy(ModelOptions(path=str(folder)))
    assert len([layer for layer in policy.model.modules() if is_4_bit(layer)]) == 2 * 7
    # Its layers would pack their weights in the first pass without gradient, and compute something else from then on.
    assert not any(runs_packed(layer) for layer in policy.model.modules())
    assert largest_gap(InProcessEngine(policy), 40) < 1e-4


def test_weights_in_several_files_are_loaded_whole(tmp_path: Path) -> None:
    whole = load(small_folder(tmp_path / "one"))
    shutil.copytree(tmp_path / "one", tmp_path / "many")
    (tmp_path / "many" / "model.safetensors").unlink()
    whole.save_pretrained(tmp_path / "many", max_shard_size="10KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    again = load(tmp_path / "many").state_dict()
    assert all(torch.equal(again[name], value) for name, value in whole.state_dict().items())


def gemma() -> PreTrainedModel:
    text = {**TEXT, "head_dim": 8, "sliding_window": 16}
    return Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=VISION))


def llava() -> PreTrainedModel:
    parts = {"text_config": LlamaConfig(**TEXT), "vision_config": CLIPVisionConfig(**VISION)}
    return LlavaForConditionalGeneration(LlavaConfig(**parts))


def mistral() -> PreTrainedModel:
    parts = {"text_config": MistralConfig(**TEXT), "vision_config": PixtralVisionConfig(**VISION)}
    return Mistral3ForConditionalGeneration(Mistral3Config(**parts))


@pytest.mark.parametrize(
    ("make", "kind"),
    [(gemma, "Gemma3ForCausalLM"), (llava, "LlamaForCausalLM"), (mistral, "MistralForCausalLM")],
)
def test_of_a_model_that_sees_the_text_part_is_loaded_and_saved(
    make: Callable[[], PreTrainedModel], kind: str, tmp_path: Path
) -> None:
    whole = make().eval()
    whole.save_pretrained(tmp_path / "whole")
    new_tokenizer().save_pretrained(tmp_path / "whole")
    policy = load_policy(ModelOptions(path=str(tmp_path / "whole")))
    assert type(policy.model).__name__ == kind
    assert not any("vision" in name for name, _ in policy.model.named_parameters())
    tokens = torch.arange(5, 30)[None]  # beyond Gemma's window of 16
    expected = whole(input_ids=tokens).logits
    torch.testing.assert_close(policy.model(input_ids=tokens).logits, expected)
    save_policy(policy, tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(again(input_ids=tokens).logits, expected)


CODE = """
from transformers import Qwen3Config, Qwen3ForCausalLM


class OwnConfig(Qwen3Config):
    model_type = "own_model"


class OwnModel(Qwen3ForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def with_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose code comes with it."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = small_folder(tmp_path / "own")
    (folder / "own_code.py").write_text(CODE)
    own = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnModel"}
    changed(folder / "config.json", model_type="own_model", architectures=["OwnModel"], auto_map=own)
    return folder


def test_code_that_comes_with_a_model_runs_only_where_it_is_trusted(with_code: Path, tmp_path: Path) -> None:
    said = refusal(with_code)
    assert "own_code.OwnModel" in said
    assert "model.trust_remote_code: true (--model.trust-remote-code)" in said
    options = ModelOptions(path=str(with_code), trust_remote_code=True)
    policy = load_policy(options)
    assert type(policy.model).__name__ == "OwnModel"
    assert "OwnModel" in str(policy.forward_reason) or "own_model" in str(policy.forward_reason)
    save_policy(policy, tmp_path / "saved")
    shutil.rmtree(with_code)  # what was saved stands by itself
    tokens = torch.arange(8)[None]
    again = load(tmp_path / "saved", trust_remote_code=True)
    assert torch.equal(again(input_ids=tokens).logits, policy.model(input_ids=tokens).logits)


def test_code_beside_a_family_that_transformers_knows_is_left_alone(tmp_path: Path) -> None:
    folder = small_folder(tmp_path / "model")
    changed(folder / "config.json", auto_map={"AutoModelForCausalLM": "modeling_absent.Absent"})
    assert type(load(folder)).__module__.startswith("transformers.")


def test_a_chosen_attention_is_the_models_and_one_that_is_not_here_is_refused(tmp_path: Path) -> None:
    folder = family_folder(tmp_path / "model", "gpt2")
    assert load(folder, attn_implementation="eager").config._attn_implementation == "eager"
    assert load(folder).config._attn_implementation == "sdpa"
    with refused("attn_implementation = fast", "auto, eager"):
        load(folder, attn_implementation="fast")
    with refused("attn_implementation = flash_attention_2", "Use auto"):
        load(folder, attn_implementation="flash_attention_2")


def test_a_config_that_is_no_json_is_told(tmp_path: Path) -> None:
    folder = small_folder(tmp_path / "model")
    (folder / "config.json").write_text("{")
    assert "config.json cannot be read" in refusal(folder)
    (folder / "config.json").write_text(json.dumps([1]))
    assert "holds a list, not a JSON object" in refusal(folder)


@pytest.mark.parametrize("shown", [True, False])
def test_loading_a_policy_leaves_the_progress_bars_of_transformers_as_they_were(shown: bool, tmp_path: Path) -> None:
    before = transformers_logging.is_progress_bar_enabled()
    (transformers_logging.enable_progress_bar if shown else transformers_logging.disable_progress_bar)()
    try:
        load_policy(ModelOptions(path=str(save_tiny_model(tmp_path / "model"))))
        assert transformers_logging.is_progress_bar_enabled() == shown
    finally:
        (transformers_logging.enable_progress_bar if before else transformers_logging.disable_progress_bar)()
