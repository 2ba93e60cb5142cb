"""Scripts for TRL run with one line changed (`make trl-scripts`), and what they save of adapters is read back."""

import json
import runpy
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    HfArgumentParser,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)

from posttrain.models.loading.new_model import new_tokenizer
from posttrain.trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser
from tests.support.family_measures import apart, read_by_peft, saved
from tests.support.refusals import mentions, refused
from tests.support.trl_trainers import ANSWERS, KINDS, PAIRS, PROMPTS, length, trainer, weights

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


def adapted(kind: str, model: str, folder: Path, how: str, **given: Any) -> Any:
    """A trainer of an adapter, trained, and what its base is loaded by."""
    of_reward = kind == "reward"
    config = LoraConfig(r=4, target_modules="all-linear", task_type="SEQ_CLS" if of_reward else "CAUSAL_LM", **given)
    if how == "path":
        made = trainer(kind, model, folder, peft_config=config, max_steps=1, learning_rate=0.1)
    else:
        below = AutoModelForSequenceClassification if of_reward else AutoModelForCausalLM
        base = below.from_pretrained(model, **({"num_labels": 1} if of_reward else {}))
        given = {"model": get_peft_model(base, config)} if how == "wrapped" else {"model": base, "peft_config": config}
        made = trainer(kind, given.pop("model"), folder, max_steps=1, learning_rate=0.1, **given)
        if how == "wrapped":
            assert made.model is not base
            assert made.model.get_base_model() is base
    before = made.model.state_dict(keep_vars=True)
    before = {name: each.detach().clone() for name, each in before.items()}
    made.train()
    moved = [name for name, each in made.model.state_dict().items() if not torch.equal(each, before[name])]
    assert any("lora_B" in name for name in moved)
    assert all("lora_" in name or "modules_to_save" in name for name in moved)
    return made


@pytest.mark.parametrize(
    ("kind", "how"), [*((kind, "path") for kind in KINDS), *product(("sft", "reward"), ("object", "wrapped"))]
)
def test_whatever_a_script_saves_of_an_adapter_is_read_back(kind: str, model: str, tmp_path: Path, how: str) -> None:
    made = adapted(kind, model, tmp_path / "run", how)
    assert isinstance(made.model, PeftModel)
    ids = torch.tensor([[1, 2, 3]])
    loads = AutoModelForSequenceClassification if kind == "reward" else AutoModelForCausalLM
    labels = {"num_labels": 1} if kind == "reward" else {}

    def read(folder: Path) -> torch.Tensor:
        if (folder / "adapter_config.json").is_file():
            torch.manual_seed(1)
            found: Any = PeftModel.from_pretrained(loads.from_pretrained(model, **labels), str(folder))
        else:
            found = loads.from_pretrained(folder, **labels)
        return found.eval()(ids).logits

    logits = made.model(ids).logits
    made.model.save_pretrained(str(tmp_path / "model"))
    assert (tmp_path / "model" / "adapter_config.json").is_file()
    made.save_model(str(tmp_path / "saved"))
    for folder in (tmp_path / "model", tmp_path / "saved", tmp_path / "run" / "checkpoint-1"):
        torch.testing.assert_close(read(folder), logits)
    measured = made.evaluate(KINDS[kind][2])["eval_loss"] if kind not in ("grpo", "rloo") else None
    made.model.print_trainable_parameters()
    merged = made.model.merge_and_unload()
    merged.save_pretrained(str(tmp_path / "merged"))
    torch.testing.assert_close(read(tmp_path / "merged"), logits)
    if how == "path":
        torch.testing.assert_close(made.model(ids).logits, logits)
        assert measured is None or made.evaluate(KINDS[kind][2])["eval_loss"] == measured, "merged into a copy"


@pytest.mark.parametrize(
    ("kind", "how"), [("grpo", "path"), ("rloo", "wrapped"), ("sft", "object"), ("dpo", "wrapped"), ("reward", "path")]
)
def test_dropout_of_an_adapter_acts_in_updates_alone(kind: str, model: str, tmp_path: Path, how: str) -> None:
    def after(name: str, **given: Any) -> Any:
        torch.manual_seed(1)  # peft draws A by torch's own stream
        return adapted(kind, model, tmp_path / name, how, **given)

    plain, dropping, again = after("plain"), after("dropping", lora_dropout=0.5), after("again", lora_dropout=0.5)
    assert all(map(torch.equal, weights(dropping), weights(again)))
    moved = [(ours - theirs).abs().max().item() for ours, theirs in zip(weights(dropping), weights(plain), strict=True)]
    assert max(moved) > 0.01, "more than rounding: a step is as large as the rate, 0.1"
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(dropping.model(ids).logits, again.model(ids).logits), "none outside of updates"


def test_an_adapter_that_a_folder_holds_is_shown_as_one_too(model: str, tmp_path: Path) -> None:
    first = adapted("sft", model, tmp_path / "first", "path", lora_dropout=0.5, rank_pattern={"q_proj": 2})
    first.model.save_pretrained(str(tmp_path / "adapter"))
    made = trainer("sft", str(tmp_path / "adapter"), tmp_path / "second", max_steps=1, learning_rate=0.1)
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(made.model(ids).logits, first.model(ids).logits)
    made.train()
    assert not torch.equal(made.model(ids).logits, first.model(ids).logits)
    torch.testing.assert_close(made.model(ids).logits, made.policy.model(ids).logits)


def test_over_the_text_part_of_a_multimodal_model_the_trainer_saves_and_its_model_says_so(tmp_path: Path) -> None:
    config = LoraConfig(r=4, target_modules="all-linear")
    made = trainer("sft", str(saved("gemma3", tmp_path / "base")), tmp_path / "run", peft_config=config, max_steps=1)
    made.train_dataset = [{"input_ids": [2, 3, 4, 5]}]
    made.train()
    with refused("layers of a multimodal model", "Use trainer.save_model(folder)"):
        made.model.save_pretrained(str(tmp_path / "adapter"))
    assert not (tmp_path / "adapter").exists()
    made.save_model(str(tmp_path / "saved"))
    assert apart(made.policy.model, read_by_peft(tmp_path / "base", tmp_path / "saved")) < 1e-4


WITHOUT_PEFT = """
import sys


class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, *given):
        return None if name.partition(".")[0] == "peft" else self.finder.find_spec(name, *given)

    def __getattr__(self, name):
        return getattr(self.finder, name)


sys.meta_path[:] = map(Without, sys.meta_path)
from posttrain.errors import UserError
from posttrain.trl import ModelConfig, SFTConfig, SFTTrainer, get_peft_config

adapter, folder = sys.argv[1:]
rows = [{"prompt": "1 + 1 =", "completion": " 2"}]
made = SFTTrainer(adapter, SFTConfig(folder, max_steps=1, learning_rate=0.1), train_dataset=rows)
made.train()
made.save_model(folder + "/saved")
assert made.model is made.policy.model
try:
    get_peft_config(ModelConfig(use_peft=True))
except UserError as error:
    print(error)
"""


def test_without_peft_a_saved_adapter_is_trained_on_and_what_needs_peft_says_so(model: str, tmp_path: Path) -> None:
    first = adapted("sft", model, tmp_path / "first", "path")
    first.save_model(str(tmp_path / "adapter"))
    command = [sys.executable, "-c", WITHOUT_PEFT, str(tmp_path / "adapter"), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    mentions(done.stdout, "peft is not installed: save the adapter by trainer.save_model", "`pip install peft`")
    read = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(tmp_path / "run" / "saved"))
    ids = torch.tensor([[1, 2, 3]])
    assert not torch.equal(read(ids).logits, first.model(ids).logits)


def test_the_head_of_a_peft_model_of_a_classifier_goes_on_from_where_it_is(model: str, tmp_path: Path) -> None:
    first = adapted("reward", model, tmp_path / "first", "wrapped")
    made = trainer("reward", first.model, tmp_path / "second", max_steps=1)
    assert made.evaluate(PAIRS)["eval_loss"] == first.evaluate(PAIRS)["eval_loss"]
    language = get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(target_modules=["q_proj"]))
    with refused("the model is a PeftModel of a", "ForCausalLM.  Give one of a sequence"):
        trainer("reward", language, tmp_path / "third")
