"""Scripts of the shapes that people publish for TRL: command lines, old argument classes, wrapped models."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser

from posttrain.trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser
from tests.support.trl_trainers import ANSWERS, PROMPTS, length

SHORT = {"max_completion_length": 4, "num_generations": 2, "per_device_train_batch_size": 4}


def trainer_of(model: Any, args: GRPOConfig | SFTConfig, **given: Any) -> GRPOTrainer | SFTTrainer:
    if isinstance(args, SFTConfig):
        return SFTTrainer(model, args, train_dataset=ANSWERS, **given)
    return GRPOTrainer(model, length, args, PROMPTS, **given)


@pytest.mark.parametrize("by_file", [False, True], ids=["flags", "--config"])
@pytest.mark.parametrize("kind", [GRPOConfig, SFTConfig])
def test_a_script_with_a_command_line_trains_with_every_default(
    model: str, tmp_path: Path, kind: Any, by_file: bool
) -> None:
    fields = {"output_dir": str(tmp_path / "run"), "max_steps": 1} | (SHORT if kind is GRPOConfig else {})
    line = [part for name, value in fields.items() for part in (f"--{name}", str(value))]
    if by_file:
        file = tmp_path / "config.yaml"
        file.write_text("".join(f"{name}: {value}\n" for name, value in fields.items()), encoding="utf-8")
        line = ["--config", str(file)]
    _, args, _ = TrlParser((ScriptArguments, kind, ModelConfig)).parse_args_and_config(line)
    made = trainer_of(model, args)
    assert made.notes == []
    assert made.train().global_step == 1


def test_transformers_own_parser_leads_to_a_trainer_too(model: str, tmp_path: Path) -> None:
    (args,) = HfArgumentParser(GRPOConfig).parse_args_into_dataclasses(["--output_dir", str(tmp_path), "--debug", ""])
    assert trainer_of(model, args).notes == []


def test_a_wrapped_model_needs_no_tokenizer(model: str, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(model)
    wrapped: Any = get_peft_model(base, LoraConfig(target_modules=["q_proj"]))
    made = trainer_of(wrapped, GRPOConfig(str(tmp_path / "run"), max_steps=1, gradient_checkpointing=True, **SHORT))
    assert made.processing_class.get_vocab() == AutoTokenizer.from_pretrained(model).get_vocab()
    assert base.is_gradient_checkpointing


def test_weight_decay_acts_on_an_adapter_however_it_was_given(model: str, tmp_path: Path) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj"])
    wrapped: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    for name, of_model, given in (("plain", model, {"peft_config": config}), ("wrapped", wrapped, {})):
        args = GRPOConfig(str(tmp_path / name), weight_decay=0.1, max_steps=1, learning_rate=0.5, **SHORT)
        made = trainer_of(of_model, args, **given)
        before = {name: each.detach().clone() for name, each in made.model.named_parameters() if "lora_A" in name}
        made.train()  # B is 0, so A has no gradient yet: the update of A is its decay
        after = dict(made.model.named_parameters())
        assert before
        for key, weight in before.items():
            torch.testing.assert_close(after[key], weight * (1 - 0.5 * 0.1))
