"""What an engine elsewhere loads: the files that the policy would be saved as, made only when they are read."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from posttrain.generation.in_process import InProcessEngine
from posttrain.models.loading import saving
from posttrain.models.loading.folder_kinds import model_digest
from posttrain.models.loading.model_folder import load_policy_to_train
from posttrain.models.loading.saving import ExportedWeights, save_adapter, save_policy
from posttrain.models.policy import Policy
from posttrain.options.model import AdapterOptions, ModelOptions
from tests.support.runs import save_tiny_model
from tests.support.tiny import tiny_policy


def adapted(folder: Path, **options: object) -> Policy:
    """A model with an adapter that is not nothing."""
    given = ModelOptions(path=str(folder), adapter=AdapterOptions(rank=2), **options)  # type: ignore[arg-type]
    policy = load_policy_to_train(given, seed=0)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    return policy


def policies(folder: Path) -> dict[str, Policy]:
    model = save_tiny_model(folder / "model")
    return {
        "plain": tiny_policy("qwen3"),
        "tied": tiny_policy("gpt2_plain"),
        "from a folder": load_policy_to_train(ModelOptions(path=str(model)), seed=0),
        "adapter": adapted(model),
        "4 bits": adapted(model, quantization="nf4"),
    }


@pytest.mark.parametrize("kind", ["plain", "tied", "from a folder", "adapter", "4 bits"])
def test_merged_weights_are_those_of_the_saved_model(kind: str, tmp_path: Path) -> None:
    policy = policies(tmp_path)[kind]
    exported = ExportedWeights(policy).merged()
    save_policy(policy, tmp_path / "saved")
    written = load_file(tmp_path / "saved" / "model.safetensors")
    assert exported.keys() == written.keys()
    for name, tensor in written.items():
        assert torch.equal(exported[name].cpu(), tensor), name
        assert exported[name].dtype == tensor.dtype


def test_an_adapter_is_exported_as_peft_writes_it_with_the_digest_of_its_base(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    policy = adapted(model)
    exported = ExportedWeights(policy).adapter()
    save_adapter(policy, tmp_path / "saved")
    written = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    assert exported is not None
    assert {name: tensor.tolist() for name, tensor in exported.tensors.items()} == {
        name: tensor.tolist() for name, tensor in written.items()
    }
    assert exported.settings == json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert (exported.base, exported.base_digest) == (str(model), model_digest(model))


def test_where_more_than_an_adapter_is_trained_there_is_none(tmp_path: Path) -> None:
    policy = adapted(save_tiny_model(tmp_path / "model"))
    policy.model.get_parameter("model.norm.weight").requires_grad_(True)
    assert ExportedWeights(policy).adapter() is None
    assert ExportedWeights(tiny_policy()).adapter() is None


def test_the_in_process_engine_makes_nothing_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy()
    monkeypatch.setattr(saving, "saved_weights", None)  # would be called
    InProcessEngine(policy).load(ExportedWeights(policy), 1)
    with pytest.raises(TypeError):
        ExportedWeights(policy).merged()
