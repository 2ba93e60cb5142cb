"""What a script overrides of TRL's trainers is used by training, or refused by its name: never ignored."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer as TheirTrainer

from posttrain.trl import DPOTrainer, GRPOConfig, GRPOTrainer, SFTTrainer
from posttrain.trl.names_elsewhere import NAMES, TRAINER_NAMES, not_here
from tests.support.refusals import refused
from tests.support.runs import save_tiny_model
from tests.support.trl_trainers import PROMPTS, length

SMALL: dict[str, Any] = {
    "max_completion_length": 4,
    "num_generations": 2,
    "per_device_train_batch_size": 4,
    "max_steps": 2,
    "logging_steps": 1,
}
HONOURED = {"create_optimizer", "create_optimizer_and_scheduler", "create_scheduler", "evaluate", "log", "save_model"}
HONOURED |= {"add_callback", "is_world_process_zero", "log_metrics", "pop_callback", "push_to_hub", "remove_callback"}
HONOURED |= {"is_local_process_zero", "train", "get_num_trainable_parameters"}
"""Methods that training calls, or that a script alone calls, as in TRL."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("trl") / "model"))


def trainer(model: str, folder: Path, kind: Any = GRPOTrainer, **args: Any) -> Any:
    return kind(model, length, GRPOConfig(str(folder), **{**SMALL, **args}), PROMPTS)


@pytest.mark.parametrize("kind", [GRPOTrainer, SFTTrainer])
def test_every_method_of_theirs_is_honoured_or_refused_in_a_subclass(kind: Any) -> None:
    names = NAMES["Trainer"] | NAMES[kind.__name__]
    methods = {name for name in names if callable(getattr(kind, name, None))}
    honoured = methods - not_here(kind)
    assert honoured <= HONOURED
    for name in sorted(names - honoured - {"model", "state", "control", "model_wrapped", "hub_model_id", "_tag_names"}):
        if name in {"train_dataset", "eval_dataset", "optimizer", "lr_scheduler"} and name not in not_here(kind):
            continue
        with refused(f"Mine.{name}: training does not use it here", ".  "):
            type("Mine", (kind,), {name: lambda self: None})


def test_the_list_holds_the_names_of_the_transformers_that_is_here() -> None:
    if json.loads(TRAINER_NAMES.read_bytes())["made by"]["transformers"] != version("transformers"):
        pytest.skip("the list was written from another version of transformers")
    assert {name for name in vars(TheirTrainer) if not name.startswith("__")} <= NAMES["Trainer"]


def test_mixins_patches_and_attributes_of_a_trainer_are_refused_too(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mixin:
        def compute_loss(self, *given: Any) -> None: ...

    for kind, remedy in ((GRPOTrainer, "a LossTerm"), (DPOTrainer, "`loss_type`"), (SFTTrainer, "cannot be replaced")):
        with refused("Mixed.compute_loss:", remedy):
            type("Mixed", (Mixin, kind), {})
    made = trainer(model, tmp_path)
    for name in ("compute_loss", "_calculate_rewards", "beta", "processing_class", "args", "get_train_dataloader"):
        with refused(f"GRPOTrainer.{name}: training does not use it"):
            setattr(made, name, None)
    made.train_dataset, made.note, made.model = PROMPTS[:2], "a script's own", made.model.to("cpu")
    with refused("GRPOTrainer.model:", "Make a trainer with that model"):
        made.model = torch.nn.Linear(1, 1)
    with refused("GRPOTrainer.ref_model is not here.", error=AttributeError):
        print(made.ref_model)
    assert not hasattr(made, "_metrics")
    made.args.lr_scheduler_type = "polynomial"
    with refused("GRPOConfig: lr_scheduler_type = 'polynomial': use linear"):
        made.train()
    made.args.lr_scheduler_type, made.args.optim = "linear", "lion_8bit"
    with refused("GRPOConfig: optim = 'lion_8bit': AdamW of torch is the optimiser here"):
        made.train()
    monkeypatch.setattr(GRPOTrainer, "training_step", print, raising=False)
    with refused("GRPOTrainer.training_step: training does not use it"):
        trainer(model, tmp_path)


def test_what_is_honoured_is_called_and_has_its_effect(model: str, tmp_path: Path) -> None:
    saved: list[str] = []

    class Mine(GRPOTrainer):
        def log(self, logs: Any, start_time: float | None = None) -> None:
            super().log({**logs, "mine": 1.0}, start_time)

        def create_optimizer(self) -> Any:  # type: ignore[override]  # as scripts write it
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.25)
            return self.optimizer

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 - update / num_training_steps)

        def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
            return {**super().evaluate(eval_dataset, ignore_keys, metric_key_prefix), "eval_mine": 2.0}

        def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
            saved.append(f"{output_dir} {_internal_call}")
            super().save_model(output_dir, _internal_call)

    args = GRPOConfig(str(tmp_path / "run"), **SMALL, eval_strategy="steps", metric_for_best_model="mine")
    made = Mine(model, length, args, PROMPTS, PROMPTS[:2])
    made.train()
    assert [entry["mine"] for entry in made.state.log_history] == [1.0] * 5  # 2 steps, 2 evaluations, the end
    rates = [entry["learning_rate"] for entry in made.state.log_history if "learning_rate" in entry]
    assert rates == [0.25, 0.125]
    assert made.state.best_metric == 2.0
    assert saved == [f"{tmp_path / 'run' / 'checkpoints' / 'step-000002'} True"]
    assert trainer(model, tmp_path).create_optimizer().param_groups[0]["lr"] == 1e-6


def test_a_function_put_in_place_of_log_is_called(model: str, tmp_path: Path) -> None:
    made, seen = trainer(model, tmp_path / "run"), []
    made.log = lambda logs, start_time=None: seen.append(logs)
    made.train()
    assert len(seen) == 3
    assert made.state.log_history == []
