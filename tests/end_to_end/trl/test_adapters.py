"""Adapters through each of TRL's trainers: what is saved is read back, dropout, and a machine without peft."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.support.family_measures import apart, read_by_peft, saved
from tests.support.refusals import mentions, refused
from tests.support.trl_trainers import KINDS, PAIRS, Kind, trainer, weights


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


@pytest.mark.parametrize("how", ["path", "object", "wrapped"])
@Kind
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


@pytest.mark.parametrize("how", ["path", "object", "wrapped"])
@Kind
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
