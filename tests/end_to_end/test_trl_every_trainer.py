"""What each of TRL's trainers does around training: restarts, optimisers of one's own, the best model, the push."""

import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from posttrain.errors import UserError
from posttrain.trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from tests.support.family_exports import apart, read_by_peft
from tests.support.family_measures import saved
from tests.support.runs import save_tiny_model

PROMPTS = [{"prompt": f"{number} + 1 ="} for number in range(1, 9)]
ANSWERS = [row | {"completion": f" {number + 1}"} for number, row in enumerate(PROMPTS)]
PAIRS = [row | {"chosen": f" {number + 1}", "rejected": f" {number + 2}!"} for number, row in enumerate(PROMPTS)]
SAMPLED = {"max_completion_length": 4, "num_generations": 2}
KINDS: dict[str, tuple[Any, Any, list[dict[str, str]], dict[str, Any]]] = {
    "grpo": (GRPOTrainer, GRPOConfig, PROMPTS, SAMPLED),
    "rloo": (RLOOTrainer, RLOOConfig, PROMPTS, SAMPLED),
    "sft": (SFTTrainer, SFTConfig, ANSWERS, {}),
    "dpo": (DPOTrainer, DPOConfig, PAIRS, {}),
    "reward": (RewardTrainer, RewardConfig, PAIRS, {}),
}
"""Trainer, arguments, rows and what its arguments have beside those that all have."""
CONSTRUCTOR = ("eval_dataset", "callbacks", "optimizers", "ref_model", "peft_config")
Kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("trl") / "model"))


def length(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def trainer(kind: str, model: Any, folder: Path, *, bases: Callable[[Any], Any] = lambda own: own, **given: Any) -> Any:
    """A trainer; what its constructor has goes there, and the rest is arguments."""
    own, config, rows, sampled = KINDS[kind]
    named = {name: given.pop(name) for name in CONSTRUCTOR if name in given}
    args = {"max_steps": 4, "per_device_train_batch_size": 4, "logging_steps": 1, "learning_rate": 1e-3}
    rewards = {"reward_funcs": length} if sampled else {}
    config = config(str(folder), **{**args, **sampled, **given})
    return bases(own)(model=model, args=config, train_dataset=rows, **rewards, **named)


class Killed(TrainerCallback):
    """Ends a job from outside after two updates."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == 2:
            raise KeyboardInterrupt


def numbers(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a log says but for how long things took."""
    return [{name: value for name, value in entry.items() if not re.search("time|second", name)} for entry in log]


def weights(made: Any) -> list[torch.Tensor]:
    return [each.detach().clone() for each in made.model.parameters()]


@Kind
def test_a_job_that_is_started_again_goes_on_to_the_bit_and_its_log_too(kind: str, model: str, tmp_path: Path) -> None:
    whole = trainer(kind, model, tmp_path / "whole", save_steps=1)
    whole.train()
    with pytest.raises(KeyboardInterrupt):
        trainer(kind, model, tmp_path / "parts", save_steps=1, callbacks=[Killed()]).train()
    last = get_last_checkpoint(str(tmp_path / "parts"))
    assert last == str(tmp_path / "parts" / "checkpoint-2")
    parts = trainer(kind, model, tmp_path / "parts", save_steps=1)
    parts.train(resume_from_checkpoint=last)
    assert all(map(torch.equal, weights(whole), weights(parts)))
    for ours, theirs in zip(numbers(parts.state.log_history[:4]), numbers(whole.state.log_history[:4]), strict=True):
        assert ours == theirs
    loads = AutoModelForSequenceClassification if kind == "reward" else AutoModelForCausalLM
    kept = loads.from_pretrained(tmp_path / "parts" / "checkpoint-4", dtype=torch.float32)
    assert all(map(torch.equal, kept.parameters(), weights(parts)))


@Kind
def test_a_scripts_own_optimiser_is_the_one_that_trains(kind: str, model: str, tmp_path: Path) -> None:
    seen: list[str] = []

    def with_sgd(own: Any) -> Any:
        class Mine(own):
            def create_optimizer(self) -> Any:
                seen.append("made")
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.25, momentum=0.9)
                return self.optimizer

            def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
                return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 - update / num_training_steps)

        return Mine

    made = trainer(kind, model, tmp_path / "own", bases=with_sgd)
    before = weights(made)
    made.train()
    rates = [entry["learning_rate"] for entry in made.state.log_history if "learning_rate" in entry]
    assert (seen, rates) == (["made"], [0.25, 0.1875, 0.125, 0.0625])
    assert any("momentum_buffer" in each for each in made.optimizer.state.values())
    assert made.lr_scheduler.get_last_lr() == [0.0625]
    assert not all(map(torch.equal, before, weights(made)))
    still = trainer(kind, model, tmp_path / "still")
    optimizer = torch.optim.SGD(still.model.parameters(), lr=0.0)
    still = trainer(kind, still.model, tmp_path / "still", optimizers=(optimizer, None), overwrite_output_dir=True)
    before = weights(still)
    still.train()
    assert (still.optimizer, still.lr_scheduler.get_last_lr()) == (optimizer, [0.0])
    still.train()
    assert still.optimizer is optimizer, "it stays the script's own"
    assert all(map(torch.equal, before, weights(still))), "a rate of 0 moves nothing"


class Rates(TrainerCallback):
    """Notes what a callback sees of the optimiser."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.seen.append(given["optimizer"].param_groups[0]["lr"])

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.seen.append(given["lr_scheduler"].get_last_lr()[0])


@Kind
def test_after_training_the_optimiser_and_the_rates_are_those_of_the_run(kind: str, model: str, tmp_path: Path) -> None:
    made = trainer(kind, model, tmp_path / "run", callbacks=[rates := Rates()], overwrite_output_dir=True)
    assert (made.optimizer, made.lr_scheduler) == (None, None)
    made.train()
    expected = [1e-3, 7.5e-4, 5e-4, 2.5e-4]  # linear, of 4 updates
    assert rates.seen == pytest.approx([1e-3, *expected])
    first = made.optimizer
    assert isinstance(first, torch.optim.AdamW)
    assert first.param_groups[0]["lr"] == made.lr_scheduler.get_last_lr()[0] == pytest.approx(2.5e-4)
    assert made.lr_scheduler.state_dict() == {"_last_lr": made.lr_scheduler.get_last_lr()}
    trained = {id(each) for group in first.param_groups for each in group["params"]}
    assert trained == {id(each) for each in made.model.parameters() if each.requires_grad}
    assert {int(each["step"]) for each in first.state.values()} == {4}
    made.train()
    assert made.optimizer is not first, "a second run begins with moments of its own"
    assert {int(each["step"]) for each in made.optimizer.state.values()} == {4}


@Kind
def test_the_best_model_is_the_one_that_is_left(kind: str, model: str, tmp_path: Path) -> None:
    def measures(own: Any) -> Any:
        class Mine(own):
            def evaluate(self, *given: Any, **named: Any) -> Any:
                return super().evaluate(*given, **named) | {"eval_quality": {1: 0.2, 2: 0.9}[self.state.global_step]}

        return Mine

    asked = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "quality", "greater_is_better": True}
    asked |= {"load_best_model_at_end": True, "max_steps": 2, "eval_dataset": KINDS[kind][2][:2]}
    made = trainer(kind, model, tmp_path / "run", bases=measures, **asked)
    made.train()
    of_evaluations = [entry for entry in made.state.log_history if "eval_runtime" in entry]
    assert len(of_evaluations) == 2
    assert all(math.isfinite(entry["eval_samples_per_second"]) for entry in of_evaluations)
    assert all(entry["eval_num_tokens"] > 0 for entry in of_evaluations)
    assert made.state.best_global_step == 2
    loads = AutoModelForSequenceClassification if kind == "reward" else AutoModelForCausalLM
    kept = loads.from_pretrained(tmp_path / "run" / "checkpoint-2", dtype=torch.float32)
    assert all(map(torch.equal, kept.parameters(), weights(made)))


@Kind
def test_a_trainer_without_rows_says_so(kind: str, model: str, tmp_path: Path) -> None:
    own, config, _, sampled = KINDS[kind]
    given = {"reward_funcs": length} if sampled else {}
    with pytest.raises(UserError, match=rf"{own.__name__}: train_dataset is missing; give rows"):
        own(model=model, args=config(str(tmp_path), **sampled), **given)
    with pytest.raises(UserError, match=rf"{own.__name__}: eval_dataset is missing; give rows"):
        trainer(kind, model, tmp_path).evaluate()
    with pytest.raises(UserError, match=rf"{own.__name__}: there is no argument 'trian_dataset'.  Did you mean"):
        own(model=model, args=config(str(tmp_path), **sampled), trian_dataset=[], **given)


@Kind
def test_what_would_be_done_with_nothing_is_refused_by_the_constructor(kind: str, model: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="metric_for_best_model = 'banana', and nothing is measured: give"):
        trainer(kind, model, tmp_path, metric_for_best_model="banana")
    with pytest.raises(UserError, match="save_total_limit = -5: use a whole number >= -1 or None"):
        trainer(kind, model, tmp_path, save_total_limit=-5)


@pytest.mark.parametrize("kind", ["dpo", "reward"])
def test_columns_that_would_be_left_unread_are_refused(kind: str, model: str, tmp_path: Path) -> None:
    made = trainer(kind, model, tmp_path)
    made.train_dataset = [row | {"images": ["a.png"]} for row in PAIRS]
    with pytest.raises(UserError, match="train_dataset: the column 'images' is not read here"):
        made.train()


def test_a_reference_that_is_the_policy_itself_is_refused(model: str, tmp_path: Path) -> None:
    policy = AutoModelForCausalLM.from_pretrained(model)
    with pytest.raises(UserError, match="ref_model is the model that is trained, so it would change with it"):
        trainer("dpo", policy, tmp_path, ref_model=policy)


def test_a_reference_that_is_gone_is_not_replaced_by_the_trained_policy(model: str, tmp_path: Path) -> None:
    made = trainer("dpo", model, tmp_path / "run", precompute_ref_log_probs=True, overwrite_output_dir=True)
    made.train()
    with pytest.raises(UserError, match=r"the first policy, which is the reference, is gone since the first train\(\)"):
        made.train()
    again = trainer("dpo", model, tmp_path / "live", overwrite_output_dir=True)
    for _ in range(2):
        again.train()


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
def test_dropout_of_an_adapter_acts_in_updates_and_nowhere_else(
    kind: str, model: str, tmp_path: Path, how: str
) -> None:
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
    with pytest.raises(UserError, match=r"the text part of a multimodal one, .*Use trainer\.save_model\(folder\)"):
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
    assert "peft is not installed: save the adapter by trainer.save_model" in done.stdout
    assert "`pip install posttrain[lora]`" in done.stdout
    read = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(tmp_path / "run" / "saved"))
    ids = torch.tensor([[1, 2, 3]])
    assert not torch.equal(read(ids).logits, first.model(ids).logits)


def test_the_head_of_a_peft_model_of_a_classifier_goes_on_from_where_it_is(model: str, tmp_path: Path) -> None:
    first = adapted("reward", model, tmp_path / "first", "wrapped")
    made = trainer("reward", first.model, tmp_path / "second", max_steps=1)
    assert made.evaluate(PAIRS)["eval_loss"] == first.evaluate(PAIRS)["eval_loss"]
    language = get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(UserError, match=r"the model is a PeftModel of a .*ForCausalLM.  Give one of a sequence"):
        trainer("reward", language, tmp_path / "third")


@Kind
def test_what_only_transformers_trainer_has_is_told_with_a_remedy_that_fits(
    kind: str, model: str, tmp_path: Path
) -> None:
    made = trainer(kind, model, tmp_path, eval_dataset={"few": KINDS[kind][2][:2]})
    assert list(made.get_eval_dataloader("few")) == [KINDS[kind][2][:2]]
    assert list(made.get_eval_dataloader(KINDS[kind][2][:3])) == [KINDS[kind][2][:3]]
    assert made.args.ddp_timeout_delta.total_seconds() == 1800
    remedies = {
        "callback_handler": "add_callback",
        "predict": r"`evaluate\(rows\)`",
        "label_names": "Nothing here is named as a label",
        "is_in_train": "state.global_step",
        "get_batch_logps": "token_logprobs",
    }
    for name, remedy in remedies.items():
        with pytest.raises(AttributeError, match=rf"{type(made).__name__}\.{name} is not here\.  .*{remedy}"):
            getattr(made, name)
