"""A model that was loaded and saved is on the disk what it was: its type of numbers, and files that others may read."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from posttrain.models.loading.model_folder import load_policy
from posttrain.models.loading.saving import save_policy
from posttrain.models.policy import as_policy
from posttrain.options.model import ModelOptions
from tests.support.tiny import tiny_model, tokenizer

FAMILIES = ("qwen3", "qwen2")  # with one matrix for input and output, and with two


def stored_types(folder: Path) -> set[torch.dtype]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {file.get_tensor(name).dtype for name in list(file.keys())}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_are_saved_in_the_type_that_they_were_loaded_from(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    source, saved = tmp_path / "source", tmp_path / "saved"
    model = tiny_model(family, dtype, exact=False)
    model.save_pretrained(source)
    tokenizer().save_pretrained(source)
    policy = load_policy(ModelOptions(path=str(source)))
    assert {each.dtype for each in policy.model.parameters()} == {torch.float32}
    save_policy(policy, saved)
    assert json.loads((saved / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert stored_types(saved) == {dtype}
    # A number of the smaller type is one of float32, and comes back as itself.
    again = AutoModelForCausalLM.from_pretrained(saved, dtype=dtype).state_dict()
    assert all(torch.equal(again[name], value) for name, value in model.state_dict().items())
    assert (saved / "model.safetensors").stat().st_size == (source / "model.safetensors").stat().st_size
    assert policy.model.dtype == torch.float32  # what is in memory stays as it is


def test_a_model_object_is_saved_as_it_is(tmp_path: Path) -> None:
    save_policy(as_policy(tiny_model("qwen2", torch.float64, exact=False), tokenizer()), tmp_path / "saved")
    assert stored_types(tmp_path / "saved") == {torch.float64}


def test_the_files_have_the_modes_that_new_files_have(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save_policy(load_policy(ModelOptions()), tmp_path / "saved")
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "saved").iterdir()} == {0o640}  # 0666 without 027


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_saved_gives_the_same_logits_and_keeps_its_generation_config(family: str, tmp_path: Path) -> None:
    source, saved = tmp_path / "source", tmp_path / "saved"
    model = tiny_model(family, torch.float32, exact=False)
    model.save_pretrained(source)
    tokenizer().save_pretrained(source)
    # As many models have it: a temperature without sampling.
    settings = {
        "do_sample": False,
        "temperature": 0.6,
        "top_p": 0.9,
        "eos_token_id": [5, 11],
        "repetition_penalty": 1.1,
    }
    (source / "generation_config.json").write_text(json.dumps(settings))
    save_policy(load_policy(ModelOptions(path=str(source))), saved)
    kept = json.loads((saved / "generation_config.json").read_text())
    assert {name: kept[name] for name in settings} == settings
    again = AutoModelForCausalLM.from_pretrained(saved)
    tokens = torch.arange(20)[None] % 24
    assert torch.equal(again(input_ids=tokens).logits, model(input_ids=tokens).logits)
    tied = again.get_input_embeddings().weight is again.get_output_embeddings().weight
    assert tied == (family == "qwen3")
