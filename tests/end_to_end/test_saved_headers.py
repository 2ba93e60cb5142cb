"""Names and shapes of all that a run saves are checked, whoever saves it, and without the package accelerate."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel
from transformers.integrations import accelerate

from posttrain.errors import RunError
from posttrain.models.classifiers.heads import ValueHead
from posttrain.models.policy import Policy
from posttrain.training.critic import save_critic
from posttrain.trl import RewardConfig, RewardTrainer
from posttrain.trl.saved_models import save_into_checkpoint, save_model_folder
from tests.support.families import family_policy
from tests.support.refusals import refused
from tests.support.runs import save_tiny_model

PAIRS = [{"prompt": f"{number} + 1 =", "chosen": f" {number + 1}", "rejected": " no"} for number in range(4)]


def critic(policy: Policy, folder: Path) -> None:
    save_critic(ValueHead(16, "linear", seed=0), policy, folder)


def checkpoint(policy: Policy, folder: Path) -> None:
    folder.mkdir()
    policy.model.save_pretrained(folder)
    (folder / "model.safetensors").rename(folder / "policy.safetensors")
    save_into_checkpoint(policy, folder)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> RewardTrainer:
    base = save_tiny_model(tmp_path_factory.mktemp("base") / "model")
    return RewardTrainer(model=str(base), args=RewardConfig(str(base.parent / "run")), train_dataset=PAIRS)


@pytest.fixture
def loses_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = PreTrainedModel.save_pretrained

    def without_the_last(model: Any, folder: Path, **given: Any) -> None:
        whole(model, folder, **given)
        tensors = load_file(folder / "model.safetensors")
        del tensors[max(tensors)]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", without_the_last)
    monkeypatch.setattr(accelerate, "is_accelerate_available", lambda *_: False)


@pytest.mark.usefixtures("loses_a_weight")
@pytest.mark.parametrize("saved", [critic, save_model_folder, checkpoint])
@pytest.mark.parametrize("family", ["mistral", "qwen3_moe"])
def test_a_folder_that_lost_a_weight_is_told_and_kept(
    saved: Callable[[Policy, Path], None], family: str, tmp_path: Path
) -> None:
    with refused("out: transformers would not load", "are missing", "The folder is kept", error=RunError):
        saved(family_policy(family), tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.usefixtures("loses_a_weight")
def test_a_reward_model_that_lost_a_weight_is_told(trainer: RewardTrainer, tmp_path: Path) -> None:
    with refused("out: transformers would not load", "score.weight", error=RunError):
        trainer.save_model(str(tmp_path / "out"))


def test_a_trainers_reward_model_reads_texts_as_that_of_its_run(trainer: RewardTrainer, tmp_path: Path) -> None:
    trainer.args.max_steps, trainer.args.save_steps = 1, 1
    trainer.train()
    trainer.save_model(str(tmp_path / "out"))
    run = trainer.folder
    for folder in run / "model", run / "checkpoint-1", tmp_path / "out":
        assert AutoTokenizer.from_pretrained(folder)("a")["input_ids"][-1] == trainer.policy.stop_ids[0], folder
        model = AutoModelForSequenceClassification.from_pretrained(folder)
        assert model.config.reading["plain"] is True
