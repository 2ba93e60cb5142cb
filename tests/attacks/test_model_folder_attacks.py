"""Damaged and hostile model folders: each is one clear error, and no code in them runs."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from posttrain.models.loading.model_folder import load_policy
from posttrain.options.model import AdapterOptions, ModelOptions
from posttrain.rewards.model import RewardModel
from tests.support.commands import refusal
from tests.support.model_folders import changed, small_folder
from tests.support.refusals import refused
from tests.support.reward_models import reward_folder

BRACKETS = "[" * 100_000


class Bomb:
    """What a pickle of it would run."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.mark}",)


def pickled(folder: Path) -> None:
    weights = folder / "model.safetensors"
    torch.save(load_file(weights) | {"bomb": Bomb(folder / "exploded")}, folder / "pytorch_model.bin")
    weights.unlink()


def plainly_pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(folder / "exploded")))


def written(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def config(**content: Any) -> Callable[[Path], None]:
    return lambda folder: changed(folder / "config.json", **content)


def weights(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        file = folder / "model.safetensors"
        save_file({name: change(each) for name, each in load_file(file).items()}, file, metadata={"format": "pt"})

    return damage


KERNEL = "kernels-community/flash-attn2"
DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a pickle bomb in a zip": (pickled, "could run code"),
    "a plain pickle bomb": (plainly_pickled, "could run code"),
    "a generation config that is a list": (written("generation_config.json", "[1]"), "cannot load it"),
    "an index without a map": (written("model.safetensors.index.json", "{}"), "weight_map"),
    "an index that is a list": (written("model.safetensors.index.json", "[]"), "not a JSON object"),
    "a config of brackets": (written("config.json", BRACKETS), "config.json cannot be read"),
    "a tokenizer of brackets": (written("tokenizer_config.json", BRACKETS), "tokenizer_config.json"),
    "layers in words": (config(num_hidden_layers="two"), "cannot load it"),
    "heads that do not fit": (config(num_attention_heads=3, num_key_value_heads=2), "are missing"),
    "another width": (config(hidden_size=24), "are missing"),
    "code that is a list": (config(auto_map=["x.Y"], model_type="other"), "Python code"),
    "a family that is a list": (config(model_type=["qwen3"]), "cannot load it"),
    "attention from a hub": (config(_attn_implementation=KERNEL), "kernel hub"),
    "attention from a hub, below": (config(text_config={"attn_implementation": KERNEL}), "kernel hub"),
    "a header cut off": (written("model.safetensors", "\x08"), "cannot load it"),
    "NaN": (weights(lambda each: each * float("nan")), "NaN or infinity"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_folder(tmp_path_factory.mktemp("whole") / "model")


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_one_error_that_says_what_is_wrong(name: str, whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    damage, says = DAMAGES[name]
    damage(folder)
    said = [line for line in refusal("doctor", "--model", folder).splitlines() if line.startswith("posttrain: ")]
    assert len(said) == 1
    assert says in said[0]
    assert "weights_only" not in said[0]
    assert len(said[0]) < 900
    assert not (folder / "exploded").exists()


@pytest.mark.parametrize("named", [7, [7]])
def test_a_class_that_is_a_number_is_not_needed_for_a_known_family(named: object, whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    changed(folder / "config.json", architectures=named)
    assert load_policy(ModelOptions(path=str(folder)))


def test_a_kernel_of_a_hub_that_the_user_overrules_is_not_asked_for(whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    changed(folder / "config.json", _attn_implementation=KERNEL)
    policy = load_policy(ModelOptions(path=str(folder), attn_implementation="eager"))
    assert policy.model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    "settings",
    [{"r": "x"}, {"lora_alpha": None}, {"alpha_pattern": {"(": 3}}, {"alpha_pattern": 3}, {"target_parameters": [1]}],
)
def test_an_adapter_with_settings_of_other_kinds_is_one_error(settings: dict[str, Any], tmp_path: Path) -> None:
    from posttrain.models.loading.saving import save_adapter

    save_adapter(load_policy(ModelOptions(adapter=AdapterOptions(rank=2, targets=("q_proj",)))), tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    with refused("adapter_config.json cannot be read"):
        load_policy(ModelOptions(path=str(tmp_path)))


REWARD_DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a pickle bomb": (pickled, "could run code"),
    "labels in words": (config(num_hidden_layers="two"), "cannot load it"),
    "attention from a hub": (config(_attn_implementation=KERNEL), "kernel hub"),
    "a head of NaN": (
        weights(lambda each: each * float("nan") if each.shape[0] == 1 else each),
        "its head cannot score",
    ),
}


@pytest.mark.parametrize("name", REWARD_DAMAGES)
def test_a_damaged_reward_model_is_one_error(name: str, tmp_path: Path) -> None:
    folder = reward_folder(tmp_path / "reward")
    damage, says = REWARD_DAMAGES[name]
    damage(folder)
    with refused(says) as raised:
        RewardModel(str(folder))
    assert "weights_only" not in str(raised.value)
    assert not (folder / "exploded").exists()
