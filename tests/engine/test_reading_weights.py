"""Weights are read as they are stored where they end in that type or in 4 bits: half the memory, the same numbers."""

import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from posttrain.models.adapters import adaptable
from posttrain.models.forward import Completions
from posttrain.models.loading import model_folder
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.loading.new_model import new_tokenizer
from posttrain.models.policy import Policy
from posttrain.options.model import AdapterOptions, ModelOptions
from tests.support.families import family_model
from tests.support.model_folders import family_folder

pytest.importorskip("bitsandbytes")
BF16 = torch.bfloat16


def loaded(folder: Path, **options: object) -> Policy:
    return load_policy(ModelOptions(path=str(folder), adapter=AdapterOptions(rank=2), **options))  # type: ignore[arg-type]


def read_in(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The types that weights are read in from now on."""
    read: list[torch.dtype] = []
    loaded_model = model_folder.loaded_model

    def noted(folder: Path, config: PreTrainedConfig, options: ModelOptions, dtype: torch.dtype) -> PreTrainedModel:
        read.append(dtype)
        return loaded_model(folder, config, options, dtype)

    monkeypatch.setattr(model_folder, "loaded_model", noted)
    return read


def tensors(policy: Policy) -> dict[str, torch.Tensor]:
    model = policy.model
    return dict(model.state_dict()) | dict(model.named_parameters()) | dict(model.named_buffers())


def assert_same(policy: Policy, other: Policy) -> None:
    found, expected = tensors(policy), tensors(other)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].device) == (tensor.dtype, tensor.device), name
        assert torch.equal(found[name], tensor), name
    assert policy.compute_dtype == other.compute_dtype
    assert policy.model.config.to_dict() == other.model.config.to_dict()
    hidden = [each.forward.completion_hidden(Completions([[1, 2, 3]], [(4, 5)], [0])) for each in (policy, other)]
    assert torch.equal(*hidden)


@pytest.mark.parametrize("family", ["qwen3", "llama"])  # tied and not; with biases
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("nf4", [False, True])
@pytest.mark.parametrize("weights", ["auto", "float32"])
def test_a_frozen_base_is_read_as_it_is_stored_and_is_the_same(
    family: str, dtype: str, nf4: bool, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = family_folder(tmp_path / "model", family, dtype=BF16)
    options = {"dtype": dtype, "weights": weights, "quantization": "nf4" if nf4 else None}
    read = read_in(monkeypatch)
    policy = loaded(folder, **options)
    assert read == [BF16 if nf4 or (dtype == "bfloat16" and weights == "auto") else torch.float32]
    monkeypatch.setattr(model_folder, "read_as_stored", lambda *given: False)
    assert_same(policy, loaded(folder, **options))


def test_what_is_stored_in_more_is_read_in_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the config says otherwise."""
    folder = family_folder(tmp_path / "model", "qwen3")
    file = folder / "config.json"
    file.write_text(file.read_text(encoding="utf-8").replace('"float32"', '"bfloat16"'), encoding="utf-8")
    read = read_in(monkeypatch)
    loaded(folder, dtype="bfloat16", quantization="nf4")
    assert read == [torch.float32]


def test_a_family_whose_constants_take_the_type_of_its_weights_is_read_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma multiplies embeddings by √hidden, which in bfloat16 is another number."""
    family_model("gemma2", hidden_size=24).to(BF16).save_pretrained(tmp_path)
    new_tokenizer().save_pretrained(tmp_path)
    read = read_in(monkeypatch)
    policy = loaded(tmp_path, dtype="bfloat16")
    assert read == [torch.float32]
    assert policy.model.model.embed_tokens.embed_scale.item() == pytest.approx(24**0.5, rel=1e-6)


def test_a_trained_model_is_read_in_the_type_of_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = family_folder(tmp_path / "model", "qwen3", dtype=BF16)
    read = read_in(monkeypatch)
    for weights in ("auto", "float32", "bfloat16"):
        load_policy(ModelOptions(path=str(folder), weights=weights))
    assert read == [torch.float32, torch.float32, BF16]


def test_each_layer_is_let_go_of_before_the_next_is_quantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = family_folder(tmp_path / "model", "llama", dtype=BF16)
    whole: list[weakref.ref[torch.Tensor]] = []
    held: list[int] = []
    wide: list[int] = []
    in_4_bits = adaptable.in_4_bits

    def watched(library: object, layer: nn.Linear, dtype: torch.dtype, *, packed_kernel: bool) -> nn.Module:
        whole.append(weakref.ref(layer.weight))
        held.append(sum(each() is not None for each in whole))
        others = [module for module in models[0].modules() if type(module) is nn.Linear]
        wide.append(sum(module.weight.dtype == torch.float32 for module in others))
        return in_4_bits(library, layer, dtype, packed_kernel=packed_kernel)

    models: list[PreTrainedModel] = []
    loaded_model = model_folder.loaded_model
    monkeypatch.setattr(model_folder, "loaded_model", lambda *given: models.append(loaded_model(*given)) or models[0])
    monkeypatch.setattr(adaptable, "in_4_bits", watched)
    loaded(folder, quantization="nf4")
    assert held == [1] * 14
    assert wide == [1] * 14
