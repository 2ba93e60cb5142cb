"""Scripts for TRL: they run with one line changed, and in the shapes that people publish (`make trl-scripts`)."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)

from posttrain.models.loading.new_model import new_tokenizer
from posttrain.trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser
from tests.support.refusals import mentions
from tests.support.trl_trainers import ANSWERS, PROMPTS, length

ROOT = Path(__file__).parents[3]
BY_TRL = json.loads((ROOT / "tests" / "data" / "trl_scripts.json").read_text(encoding="utf-8"))
"""What each script logs with TRL, entry by entry, or the error that TRL ends it with."""
OF_LOGITS = ("entropy", "mean_token_accuracy", "logits/chosen", "logits/rejected")
NOT_LOGGED = {"clip_ratio/low_min", "clip_ratio/high_max", "total_flos"}
"""The two extremes over completions, and an estimate of operations, which we do not have."""
NOT_LOGGED_OF_DPO = NOT_LOGGED | {*OF_LOGITS, *(f"eval_{name}" for name in OF_LOGITS)}
"""Nor what TRL's DPOTrainer measures of next-token distributions."""
SCRIPTS = ROOT / "benchmarks" / "trl" / "scripts"
OURS, THEIRS = "from posttrain.trl import ", "from trl import "


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Where a script finds its models, under the names that it has for them."""
    tokenizer = new_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        num_labels=1,
    )
    torch.manual_seed(0)
    for name, kind in (("policy", Qwen2ForCausalLM), ("scorer", Qwen2ForSequenceClassification)):
        kind(config).save_pretrained(tmp_path / "models" / name)
        tokenizer.save_pretrained(tmp_path / "models" / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(SCRIPTS)  # as `python SCRIPT` has it
    return tmp_path


def run(name: str, folder: Path) -> dict[str, Any]:
    """What the script has defined at its end."""
    text = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
    assert text.count(THEIRS) == 1
    changed = folder / f"{name}.py"
    changed.write_text(text.replace(THEIRS, OURS), encoding="utf-8")
    return runpy.run_path(str(changed))


def test_every_script_has_been_run_by_trl() -> None:
    assert sorted(BY_TRL) == sorted(path.stem for path in SCRIPTS.glob("*.py"))


@pytest.mark.parametrize("name", [name for name, made in BY_TRL.items() if "logged" in made])
def test_a_script_runs_with_one_line_changed_and_logs_what_trl_logs(name, folder) -> None:
    trainer = run(name, folder)["trainer"]
    history = trainer.state.log_history
    assert len(history) == len(BY_TRL[name]["logged"])
    for ours, theirs in zip(history, BY_TRL[name]["logged"], strict=True):
        assert set(theirs) - set(ours) <= (NOT_LOGGED_OF_DPO if name.startswith("dpo") else NOT_LOGGED)
    assert trainer.state.global_step == trainer.args.max_steps
    assert all(value == value for entry in history[:-1] for value in entry.values())  # no NaN


def test_a_courses_script_that_todays_trl_refuses_runs_here(folder, capsys) -> None:
    assert BY_TRL["course_rules"]["error"].startswith("TypeError")
    trainer = run("course_rules", folder)["trainer"]
    told = " ".join(trainer.notes)
    mentions(told, "max_prompt_length = 256", "bf16 = True", "1 completions are not a whole number of groups of 2")
    history = trainer.state.log_history
    assert trainer.state.global_step == 2
    assert {"rewards/tagged/mean", "rewards/right_sum/mean", "kl", "completions/mean_length"} <= set(history[0])
    assert Path("runs/course-rules/adapter/adapter_config.json").is_file()


SHORT = {"max_completion_length": 4, "num_generations": 2, "per_device_train_batch_size": 4}


def trainer_of(model: Any, args: GRPOConfig | SFTConfig, **given: Any) -> GRPOTrainer | SFTTrainer:
    if isinstance(args, SFTConfig):
        return SFTTrainer(model, args, train_dataset=ANSWERS, **given)
    return GRPOTrainer(model, length, args, PROMPTS, **given)


@pytest.mark.parametrize("by_file", [False, True], ids=["flags", "--config"])
@pytest.mark.parametrize("kind", [GRPOConfig, SFTConfig])
def test_a_script_with_a_command_line_trains_by_default(model: str, tmp_path: Path, kind: Any, by_file: bool) -> None:
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
