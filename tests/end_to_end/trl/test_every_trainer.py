"""What each of TRL's trainers does around training: restarts, own optimisers, the best model, early stopping."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    EarlyStoppingCallback,
    Qwen3ForCausalLM,
    TrainerCallback,
    TrainerState,
)
from transformers.trainer_utils import get_last_checkpoint

from posttrain.models.loading import devices
from posttrain.runs.files import saved_steps
from posttrain.trl import GRPOConfig, GRPOTrainer
from posttrain.trl.saved_models import prune_checkpoints
from tests.support.model_folders import cached
from tests.support.refusals import refused
from tests.support.trl_trainers import KINDS, PAIRS, Kind, trainer, weights


class Killed(TrainerCallback):
    """Ends a job from outside after two updates."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == 2:
            raise KeyboardInterrupt


def numbers(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a log says but for how long things took."""
    return [{name: value for name, value in entry.items() if not re.search("time|second", name)} for entry in log]


@Kind
def test_a_job_that_is_started_again_goes_on_to_the_bit_and_its_log_too(kind: str, model: str, tmp_path: Path) -> None:
    args = {"save_steps": 1, "save_total_limit": 2}
    whole = trainer(kind, model, tmp_path / "whole", **args)
    whole.train()
    folder = tmp_path / "parts"
    with pytest.raises(KeyboardInterrupt):
        trainer(kind, model, folder, **args, callbacks=[Killed()]).train()
    last = get_last_checkpoint(str(folder))
    assert last == str(folder / "checkpoint-2")
    assert AutoTokenizer.from_pretrained(last).get_vocab() == whole.processing_class.get_vocab()
    parts = trainer(kind, model, folder, **args)
    parts.train({"grpo": True, "dpo": str(folder / "checkpoints" / "step-000002")}.get(kind, last))
    assert {path.name for path in folder.glob("checkpoint-*")} == {"checkpoint-3", "checkpoint-4"}, "others are pruned"
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


def test_a_reference_that_is_gone_is_not_replaced_by_the_trained_policy(model: str, tmp_path: Path) -> None:
    made = trainer("dpo", model, tmp_path / "run", precompute_ref_log_probs=True, overwrite_output_dir=True)
    made.train()
    with refused("the first policy, the reference, is gone"):
        made.train()
    known = trainer("dpo", model, tmp_path / "known", precompute_ref_log_probs=True, eval_dataset=PAIRS[:2])
    live = trainer("dpo", model, tmp_path / "same", eval_dataset=PAIRS[:2])
    for each in (known, live):
        each.train()
    for rows in (PAIRS[:2], PAIRS[1:2]):
        assert known.evaluate(rows)["eval_loss"] == live.evaluate(rows)["eval_loss"]
    with refused("is gone since training began"):
        known.evaluate(PAIRS[2:4])  # as many as were asked about, and others
    again = trainer("dpo", model, tmp_path / "live", overwrite_output_dir=True)
    for _ in range(2):
        again.train()


@Kind
def test_what_loads_a_model_is_told_of_where_the_model_is_loaded_already(
    kind: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"model_init_kwargs": {"attn_implementation": "eager", "dtype": "float32"}}
    loads = AutoModelForSequenceClassification if kind == "reward" else AutoModelForCausalLM
    made = trainer(kind, loads.from_pretrained(model, num_labels=1), tmp_path / "object", **given)
    said = "model_init_kwargs: attn_implementation = 'eager' sets nothing: the model is loaded already."
    assert [note for note in made.notes if "model_init" in note] == [said]
    made.save_model(str(tmp_path / "saved"))  # of the reward trainer a classifier
    made = trainer(kind, str(tmp_path / "saved"), tmp_path / "path", **given)
    assert not any("model_init" in note for note in made.notes)
    assert made.policy.model.config._attn_implementation == "eager"


def test_a_classifier_on_the_hub_is_trained_on(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = trainer("reward", model, tmp_path / "first")
    first.save_model(str(tmp_path / "saved"))
    cached(tmp_path / "hub", "org/judge", tmp_path / "saved")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    made = trainer("reward", "org/judge", tmp_path / "second")
    assert torch.equal(made.head.weight, first.head.weight)


@Kind
def test_what_only_transformers_trainer_has_is_told_with_a_remedy(kind: str, model: str, tmp_path: Path) -> None:
    made = trainer(kind, model, tmp_path, eval_dataset={"few": KINDS[kind][2][:2]})
    assert list(made.get_eval_dataloader("few")) == [KINDS[kind][2][:2]]
    assert list(made.get_eval_dataloader(KINDS[kind][2][:3])) == [KINDS[kind][2][:3]]
    assert not made.is_fsdp_enabled
    assert not made.is_deepspeed_enabled
    with refused("is_fsdp_enabled: training does not use it here"):
        made.is_fsdp_enabled = True
    assert made.args.ddp_timeout_delta.total_seconds() == 1800
    remedies = {
        "callback_handler": "add_callback",
        "predict": "`evaluate(rows)`",
        "tokenizer": "`processing_class`",
        "label_names": "Nothing here is named as a label",
        "is_in_train": "state.global_step",
        "get_batch_logps": "token_logprobs",
    }
    for name, remedy in remedies.items():
        with refused(f"{type(made).__name__}.{name} is not here.", remedy, error=AttributeError):
            getattr(made, name)


ROWS = [{"prompt": f"{number} + {number} =", "kind": "train"} for number in range(1, 9)]
HELD_OUT = [{"prompt": "3 + 4 =", "kind": "eval"}]
QUALITY = {1: 0.2, 2: 0.9, 3: 0.3, 4: 0.5}
"""What an evaluation after so many updates is scored."""
NO_BEST = {"metric_for_best_model": None}


def reward(completions: list[str], kind: list[str], trainer_state: TrainerState, **columns: Any) -> list[float]:
    measured = QUALITY.get(trainer_state.global_step, 0.0)
    return [measured if each == "eval" else float(len(text)) for each, text in zip(kind, completions, strict=True)]


def grpo(model: Any, folder: Path, *callbacks: Any, **args: Any) -> GRPOTrainer:
    small = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 4, "max_steps": 9}
    measured = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "reward", "logging_steps": 1}
    config = GRPOConfig(str(folder), **{"learning_rate": 1e-2, **small, **measured, **args})
    return GRPOTrainer(model, reward, config, ROWS, HELD_OUT, callbacks=[*callbacks])


class StopsAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        control.should_training_stop = state.global_step == self.step


def policy_of(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / f"step-{step:06d}" / "policy.safetensors")


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_a_run_stops_where_it_no_longer_improves_and_ends_with_its_best_weights(model: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    stops = EarlyStoppingCallback(early_stopping_patience=2)
    made = grpo(model, folder, stops, load_best_model_at_end=True, save_strategy="best")
    assert made.train().global_step == 4  # .9 after 2 updates, and twice less
    state = made.state
    assert (state.best_metric, state.best_global_step) == (0.9, 2)
    assert state.best_model_checkpoint == str(folder / "checkpoints" / "step-000002")
    # .2, then .9; the first and the last are always there
    assert [*saved_steps(folder / "checkpoints")] == [0, 1, 2, 4]
    best, last = policy_of(folder, 2), policy_of(folder, 4)
    assert same(best, made.model.state_dict())
    assert same(best, dict(AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()))
    assert not same(last, best)


@pytest.mark.parametrize(
    ("limit", "best", "left"),
    [
        (1, 2, [2, 9]),
        (2, 2, [2, 9]),
        (3, 2, [2, 8, 9]),
        (3, 8, [7, 8, 9]),
        (2, None, [8, 9]),
        (9, 2, [1, 2, 7, 8, 9]),
        (0, 2, [1, 2, 7, 8, 9]),
        (None, 2, [1, 2, 7, 8, 9]),
    ],
)
def test_the_best_and_the_last_checkpoint_are_kept(tmp_path: Path, limit: Any, best: Any, left: list[int]) -> None:
    folders = {step: tmp_path / f"step-{step:06d}" for step in (1, 2, 7, 8, 9)}
    for folder in folders.values():
        folder.mkdir()
        (folder / "manifest.json").touch()
    args = GRPOConfig(save_total_limit=limit, metric_for_best_model="reward")
    prune_checkpoints(tmp_path, args, None if best is None else str(folders[best]))
    assert [*saved_steps(tmp_path)] == left


def test_a_run_that_is_resumed_knows_its_log_and_its_best(model: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    grpo(model, folder, StopsAfter(2), load_best_model_at_end=True, max_steps=3).train()
    made = grpo(model, folder, load_best_model_at_end=True, max_steps=3)
    made.train(resume_from_checkpoint=True)
    assert [entry["step"] for entry in made.state.log_history if "loss" in entry] == [1, 2, 3]
    assert (made.state.best_metric, made.state.best_global_step) == (0.9, 2)
    assert same(policy_of(folder, 2), made.model.state_dict())


def test_training_twice_goes_on_from_the_weights_where_the_first_run_may_be_deleted(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = grpo(model, tmp_path / "run", max_steps=1, overwrite_output_dir=True, eval_strategy="no", **NO_BEST)
    made.train()
    first, entries = {name: each.clone() for name, each in made.model.state_dict().items()}, made.state.log_history
    output = made.train()
    assert same(policy_of(tmp_path / "run", 0), first), "it begins where the first ended"
    assert not same(policy_of(tmp_path / "run", 1), first)
    assert (made.state.global_step, len(made.state.log_history)) == (1, len(entries)), "the log is that of the second"

    # And what scripts write of a run.
    made.save_state()
    read = TrainerState.load_from_json(str(tmp_path / "run" / "trainer_state.json"))
    assert read.log_history == made.state.log_history
    made.save_metrics("train", output.metrics)
    made.save_metrics("eval", {"eval_loss": 0.5})
    made.save_metrics("test", {"test_loss": 0.25}, combined=False)
    everything = json.loads((tmp_path / "run" / "all_results.json").read_text())
    assert everything == {**output.metrics, "eval_loss": 0.5}
    assert json.loads((tmp_path / "run" / "test_results.json").read_text()) == {"test_loss": 0.25}
    capsys.readouterr()
    made.log_metrics("train", {"train_loss": 0.12345678, "steps": 3})
    assert capsys.readouterr().out == "posttrain.trl: train metrics\n  steps      = 3\n  train_loss = 0.1235\n"
    assert made.is_world_process_zero()


def test_completions_that_were_cut_off_teach_nothing_where_a_script_says_so(model: str, tmp_path: Path) -> None:
    made = grpo(model, tmp_path / "run", max_steps=1, mask_truncated_completions=True, eval_strategy="no", **NO_BEST)
    before = {name: each.clone() for name, each in made.model.state_dict().items()}
    made.train()
    assert made.state.log_history[0]["completions/clipped_ratio"] == 1
    assert made.state.log_history[0]["reward_std"] > 0, "else there is nothing to be learned anyway"
    assert same(made.model.state_dict(), before)


def test_a_model_object_is_moved_to_the_device_that_trains_unless_its_loader_has_placed_it(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[str] = []
    # A machine with a GPU, as far as the choice of a device goes; nothing can go there, so it is only written down.
    monkeypatch.setattr(devices.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Qwen3ForCausalLM, "to", lambda self, device: moved.append(str(device)))

    def given(**attributes: object) -> Any:
        made = AutoModelForCausalLM.from_pretrained(model)
        for name, value in attributes.items():
            setattr(made, name, value)
        return made

    grpo(given(), tmp_path / "run")
    assert moved == ["cuda"]
    grpo(given(), tmp_path / "run", use_cpu=True)
    assert moved == ["cuda"], "it is on the CPU already"
    grpo(given(hf_device_map={"": 0}), tmp_path / "run")
    grpo(given(is_quantized=True), tmp_path / "run")
    assert moved == ["cuda"]
