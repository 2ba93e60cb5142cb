"""Early stopping and the best model, as scripts for transformers ask for them, and what else a trainer can be asked."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    EarlyStoppingCallback,
    Qwen3ForCausalLM,
    TrainerCallback,
    TrainerState,
)

from posttrain.models.loading import devices
from posttrain.runs.manifest import saved_steps
from posttrain.trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from posttrain.trl.saved_models import prune_checkpoints

ROWS = [{"prompt": f"{number} + {number} =", "kind": "train"} for number in range(1, 9)]
HELD_OUT = [{"prompt": "3 + 4 =", "kind": "eval"}]
QUALITY = {1: 0.2, 2: 0.9, 3: 0.3, 4: 0.5}
"""What an evaluation after so many updates is scored."""
NO_BEST = {"metric_for_best_model": None}


def reward(completions: list[str], kind: list[str], trainer_state: TrainerState, **columns: Any) -> list[float]:
    measured = QUALITY.get(trainer_state.global_step, 0.0)
    return [measured if each == "eval" else float(len(text)) for each, text in zip(kind, completions, strict=True)]


def trainer(model: Any, folder: Path, *callbacks: Any, **args: Any) -> GRPOTrainer:
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
    made = trainer(model, folder, stops, load_best_model_at_end=True, save_strategy="best")
    assert made.train().global_step == 4  # .9 after 2 updates, and twice less
    state = made.state
    assert (state.best_metric, state.best_global_step) == (0.9, 2)
    assert state.best_model_checkpoint == str(folder / "checkpoints" / "step-000002")
    assert [*saved_steps(folder / "checkpoints")] == [
        0,
        1,
        2,
        4,
    ]  # .2, then .9; the first and the last are always there
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
def test_a_limit_of_checkpoints_deletes_neither_the_best_nor_the_last(
    tmp_path: Path, limit: Any, best: Any, left: list[int]
) -> None:
    folders = {step: tmp_path / f"step-{step:06d}" for step in (1, 2, 7, 8, 9)}
    for folder in folders.values():
        folder.mkdir()
        (folder / "manifest.json").touch()
    args = GRPOConfig(save_total_limit=limit, metric_for_best_model="reward")
    prune_checkpoints(tmp_path, args, None if best is None else str(folders[best]))
    assert [*saved_steps(tmp_path)] == left


def test_a_run_that_is_resumed_knows_its_log_and_its_best(model: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    trainer(model, folder, StopsAfter(2), load_best_model_at_end=True, max_steps=3).train()
    made = trainer(model, folder, load_best_model_at_end=True, max_steps=3)
    made.train(resume_from_checkpoint=True)
    assert [entry["step"] for entry in made.state.log_history if "loss" in entry] == [1, 2, 3]
    assert (made.state.best_metric, made.state.best_global_step) == (0.9, 2)
    assert same(policy_of(folder, 2), made.model.state_dict())


def test_a_supervised_run_keeps_the_weights_of_its_lowest_loss(model: str, tmp_path: Path) -> None:
    rows = [{"prompt": f"{number} + 1 =", "completion": f" {number + 1}"} for number in range(1, 7)]
    args = SFTConfig(
        str(tmp_path / "run"), per_device_train_batch_size=2, learning_rate=0.3, max_steps=4, eval_strategy="steps",
        eval_steps=1, load_best_model_at_end=True, lr_scheduler_type="constant", max_grad_norm=0,
    )  # fmt: skip
    made = SFTTrainer(model, args, train_dataset=rows, eval_dataset=rows[:2], callbacks=[EarlyStoppingCallback(9)])
    made.train()
    losses = {entry["step"]: entry["eval_loss"] for entry in made.state.log_history if "eval_loss" in entry}
    best = min(losses, key=lambda step: losses[step])
    assert (made.state.best_global_step, made.state.best_metric) == (best, losses[best])
    assert made.evaluate()["eval_loss"] == pytest.approx(losses[best])


def test_training_twice_goes_on_from_the_weights_where_the_first_run_may_be_deleted(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = trainer(model, tmp_path / "run", max_steps=1, overwrite_output_dir=True, eval_strategy="no", **NO_BEST)
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
    made = trainer(model, tmp_path / "run", max_steps=1, mask_truncated_completions=True, eval_strategy="no", **NO_BEST)
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

    trainer(given(), tmp_path / "run")
    assert moved == ["cuda"]
    trainer(given(), tmp_path / "run", use_cpu=True)
    assert moved == ["cuda"], "it is on the CPU already"
    trainer(given(hf_device_map={"": 0}), tmp_path / "run")
    trainer(given(is_quantized=True), tmp_path / "run")
    assert moved == ["cuda"]
