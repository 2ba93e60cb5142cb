"""A PeftModel object with an adapter on all linear layers: what is saved of it is read again here, or that is said."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from posttrain.models.loading.saving import save_adapter
from posttrain.models.policy import as_policy
from posttrain.trl import SFTConfig, SFTTrainer
from tests.support.family_exports import apart, loaded
from tests.support.family_measures import saved
from tests.support.refusals import refused


def wrapped(label: str, base: Path, kind: Any) -> Any:
    """The library's model of a family under an adapter of peft."""
    model = kind.from_pretrained(saved(label, base), dtype=torch.float32)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))


@pytest.mark.parametrize("label", ["gemma3", "llava"])
def test_layers_that_a_wrapper_has_beside_its_text_part_are_left_out_unless_they_were_trained(
    label: str, tmp_path: Path
) -> None:
    model = wrapped(label, tmp_path / "base", AutoModelForImageTextToText)
    up = {name: each for name, each in model.named_parameters() if "lora_B" in name}
    for name, each in up.items():
        if ".language_model." in name:
            torch.nn.init.normal_(each, std=0.3)
    policy = as_policy(model, AutoTokenizer.from_pretrained(tmp_path / "base"))
    save_adapter(policy, tmp_path / "adapter")
    assert apart(loaded(tmp_path / "adapter").model, model) == 0
    assert apart(loaded(tmp_path / "adapter").model, loaded(tmp_path / "base").model) > 0.01
    next(each for name, each in up.items() if ".vision_tower." in name).data.fill_(1.0)
    save_adapter(policy, tmp_path / "adapter")
    with refused("its adapter has trained model.vision_tower", "Merge the adapter with peft"):
        loaded(tmp_path / "adapter")


def test_an_adapter_that_only_peft_reads_is_told_when_a_trainer_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = wrapped("qwen3_moe", tmp_path / "base", AutoModelForCausalLM)
    SFTTrainer(model, SFTConfig(str(tmp_path / "run")), train_dataset=[{"text": "1"}])
    said = capsys.readouterr().out
    assert "peft will read the adapter that is saved, and posttrain's commands will not" in said
    assert "gate.weight" in said
