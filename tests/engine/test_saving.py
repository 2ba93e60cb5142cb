"""What is on the disk is what is in memory: saved, exported to an engine elsewhere, and read as it is stored."""

import json
import os
import weakref
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from posttrain.generation.in_process import InProcessEngine
from posttrain.models.adapters import adaptable
from posttrain.models.forward import Completions
from posttrain.models.loading import model_folder, saving
from posttrain.models.loading.folder_kinds import model_digest
from posttrain.models.loading.model_folder import load_policy, load_policy_to_train
from posttrain.models.loading.new_model import new_tokenizer
from posttrain.models.loading.saving import ExportedWeights, save_adapter, save_policy
from posttrain.models.policy import Policy, as_policy
from posttrain.options.model import AdapterOptions, ModelOptions
from tests.support.families import family_model
from tests.support.model_folders import family_folder
from tests.support.runs import save_tiny_model
from tests.support.tiny import tiny_model, tiny_policy, tokenizer

FAMILIES = ("qwen3", "qwen2")  # with one matrix for input and output, and with two


def stored_types(folder: Path) -> set[torch.dtype]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {file.get_tensor(name).dtype for name in list(file.keys())}


def test_a_model_object_is_saved_as_it_is(tmp_path: Path) -> None:
    save_policy(as_policy(tiny_model("qwen2", torch.float64, exact=False), tokenizer()), tmp_path / "saved")
    assert stored_types(tmp_path / "saved") == {torch.float64}


def test_the_files_have_the_modes_that_new_files_have(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save_policy(load_policy(ModelOptions()), tmp_path / "saved")
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "saved").iterdir()} == {0o640}  # 0666 without 027


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_is_saved_is_what_was_loaded_in_type_numbers_and_generation_config(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    source, saved = tmp_path / "source", tmp_path / "saved"
    model = tiny_model(family, dtype, exact=False)
    model.save_pretrained(source)
    tokenizer().save_pretrained(source)
    # As many models have it: a temperature without sampling.
    settings = {
        "do_sample": False,
        "temperature": 0.6,
        "top_p": 0.9,
        "eos_token_id": [5, 11],
        "repetition_penalty": 1.1,
    }
    (source / "generation_config.json").write_text(json.dumps(settings))
    policy = load_policy(ModelOptions(path=str(source)))
    assert {each.dtype for each in policy.model.parameters()} == {torch.float32}
    save_policy(policy, saved)
    assert json.loads((saved / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert stored_types(saved) == {dtype}
    assert policy.model.dtype == torch.float32  # what is in memory stays as it is
    # A number of the smaller type is one of float32, and comes back as itself.
    again = AutoModelForCausalLM.from_pretrained(saved, dtype=dtype)
    assert all(torch.equal(again.state_dict()[name], value) for name, value in model.state_dict().items())
    assert (again.get_input_embeddings().weight is again.get_output_embeddings().weight) == (family == "qwen3")
    assert (saved / "model.safetensors").stat().st_size == (source / "model.safetensors").stat().st_size
    kept = json.loads((saved / "generation_config.json").read_text())
    assert {name: kept[name] for name in settings} == settings


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
    ours, theirs = ({name: each.tolist() for name, each in of.items()} for of in (exported.tensors, written))
    assert ours == theirs
    assert exported.settings == json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert (exported.base, exported.base_digest) == (str(model), model_digest(model))
    in_4_bits = ExportedWeights(adapted(model, quantization="nf4")).adapter()
    assert in_4_bits.base_digest == ""  # a server of that folder has other weights


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


def test_a_family_whose_constants_take_the_type_of_its_weights_is_read_in_float32(tmp_path: Path, monkeypatch) -> None:
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
