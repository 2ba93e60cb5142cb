"""A policy as a folder that transformers reads, and a check of what was saved.

The check compares names and shapes in the files' headers with what transformers and peft would load.  It reads no
weights, so it takes milliseconds.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.pytorch_utils import Conv1D
from transformers.utils import SAFE_WEIGHTS_NAME

from posttrain.errors import RunError
from posttrain.models.adapters.adaptable import is_4_bit
from posttrain.models.adapters.in_force import merged_weights, trains_adapter_alone
from posttrain.models.adapters.lora import DOWN, UP, LoraExperts, layer_shape, lora_layers
from posttrain.models.adapters.peft_format import adapter_settings, write_adapter, written_tensors
from posttrain.models.adapters.peft_layers import PREFIX, WEIGHT, WEIGHTS, adapted_names, peft_name, wrapper_of
from posttrain.models.loading import construction
from posttrain.models.loading.adapter_folder import BASE_MODEL, write_stop_ids
from posttrain.models.loading.folder_kinds import model_digest
from posttrain.models.policy import Policy, stop_ids
from posttrain.models.sharding import led_copy
from posttrain.options.model import ADAPTER_CONFIG

Shape = tuple[int, ...]


def require_loadable(model: PreTrainedModel, folder: Path) -> None:
    """Raise RunError if the folder that this model was saved in, an adapter or a whole model, cannot be read again."""
    adapter = (folder / ADAPTER_CONFIG).is_file()
    fault = adapter_fault(model, folder) if adapter else model_fault(model, folder)
    if fault is not None:
        reader = "peft" if adapter else "transformers"
        raise RunError(
            f"{folder}: {reader} would not load what was saved ({fault}).  The folder is kept, and so are the run's"
            " checkpoints.  Please report this fault with the model's name."
        )


def model_fault(model: PreTrainedModel, folder: Path) -> str | None:
    """Which weights of a saved model transformers would make up or ignore; None if it reads them all."""
    loader: Any = type(model)
    try:
        files, index = [folder / SAFE_WEIGHTS_NAME], folder / f"{SAFE_WEIGHTS_NAME}.index.json"
        if index.is_file():
            named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = [folder / name for name in sorted(set(named.values()))]
        weights = {name: InFile(shape) for file in files for name, shape in saved_shapes(file).items()}
        config = type(model.config).from_pretrained(folder)
        given = {"config": config, "state_dict": weights, "dtype": torch.float32}
        _, lacking, found = construction.loaded(loader, None, **given)
    except construction.LOAD_ERRORS as error:
        return construction.first_words(error)
    kinds = {
        "weights are missing or have another shape": lacking,
        "weights have names that it does not know": sorted(found["unexpected_keys"]),
    }
    return "; ".join(f"{len(names)} {says} ({', '.join(names[:2])})" for says, names in kinds.items() if names) or None


@dataclass(frozen=True, slots=True)
class InFile:
    """A tensor in a file, which transformers reads as one on the meta device, without memory."""

    shape: Shape

    def __getitem__(self, _: object) -> "InFile":
        return self

    def to(self, device: object = None, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(self.shape, dtype=dtype, device="meta")


def adapter_fault(model: PreTrainedModel, folder: Path) -> str | None:
    """Which layer of a saved adapter, other than experts, peft would not find in the base; None if it finds all."""
    adapted = lora_layers(model)
    if not adapted:
        return None
    experts = {peft_name(model, name) for name, layer in adapted.items() if isinstance(layer, LoraExperts)}
    base = cast(nn.Module, model)  # as transformers loads it from its folder
    if wrapper_of(model).outside:
        config = AutoConfig.from_pretrained(str(model.name_or_path))
        with construction.ONE_AT_A_TIME, torch.device("meta"):
            base = AutoModelForImageTextToText.from_config(config)
    layers = {
        name.removesuffix(".base_layer"): layer_shape(layer)
        for name, layer in base.named_modules()
        if isinstance(layer, nn.Linear | Conv1D)
    }
    settings = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    by_weight = [name for name in settings.get("target_parameters", ()) if name.endswith(WEIGHT)]
    named = {*settings["target_modules"], *(name.removesuffix(WEIGHT) for name in by_weight)}
    written = saved_shapes(folder / WEIGHTS)
    in_file = {name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in written}
    for name in sorted((named | in_file) - experts):
        down, up = (written.get(f"{PREFIX}{name}.{which}{WEIGHT}") for which in (DOWN, UP))
        if name not in layers:
            return f"the model has no linear layer {name}"
        if name not in named or down is None or up is None:
            return f"{name} is not in both {ADAPTER_CONFIG} and {WEIGHTS}"
        if (up[0], down[1]) != layers[name]:
            return f"{name} is {[*layers[name]]} in the model, and {up[0]} by {down[1]} there"
    return None


def saved_shapes(file: Path) -> dict[str, Shape]:
    """The shapes of the tensors in a file, by its header."""
    with safe_open(file, framework="pt") as content:
        return {name: tuple(content.get_slice(name).get_shape()) for name in content.keys()}  # noqa: SIM118


def save_trained(policy: Policy, run: Path, save: Literal["adapter", "merged", "both"], card: str) -> None:
    """Save a finished run's model in RUN/model, or its adapter in RUN/adapter, or both, each with a card."""
    adapted, folders = len(adapted_names(policy.model)), []
    if adapted and save != "merged":
        folders.append(run / "adapter")
        with whole_folder(run / "adapter") as folder:
            save_adapter(policy, folder)
            write_card(folder, card)
    if not adapted or save != "adapter":
        folders.append(run / "model")
        with whole_folder(run / "model") as folder:
            save_policy(policy, folder)
            in_4_bits = any(is_4_bit(layer) for layer in policy.model.modules())
            onto = "the dequantised 4-bit (nf4) weights that it was trained over" if in_4_bits else "the base's weights"
            dtype = str(policy.stored_dtype or policy.model.dtype).removeprefix("torch.")
            sum_of = f"An adapter of {adapted} layers was merged in float32 onto {onto}, and the sum is stored"
            write_card(folder, card + (f"\n{sum_of} in {dtype}.\n" if adapted else ""))
    for folder in folders:  # last, so that both are kept whatever is wrong with them
        require_loadable(policy.model, folder)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder to fill, which then replaces the one of this name, or a link."""
    made = folder.with_name(f".tmp-{folder.name}")
    remove_folder(made)
    made.mkdir(parents=True)
    try:
        yield made
        remove_folder(folder)
        made.rename(folder)
    finally:
        remove_folder(made)


def remove_folder(folder: Path) -> None:
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder)
    else:
        folder.unlink(missing_ok=True)


def write_card(folder: Path, card: str) -> None:
    if card:
        (folder / "README.md").write_text(card, encoding="utf-8")


def save_adapter(policy: Policy, folder: Path) -> None:
    """Write only the adapter, in peft's format, with the tokenizer, its template and all stop tokens."""
    write_adapter(policy.model, folder)
    digest = model_digest(Path(policy.model.name_or_path)) if policy.model.name_or_path else ""
    (folder / BASE_MODEL).unlink(missing_ok=True)
    if digest:
        (folder / BASE_MODEL).write_text(json.dumps({"sha256": digest}) + "\n", encoding="utf-8")
    with construction.without_progress_bars():
        policy.tokenizer.save_pretrained(folder)
    write_stop_ids(policy.stop_ids, folder)
    readable_as(folder / ADAPTER_CONFIG, folder)


def save_policy(policy: Policy, folder: Path) -> None:
    """Write model and tokenizer; weights that were stored in bfloat16 are bfloat16 again, and config.json says so.

    An adapter is added to a copy of the weights, in float32; 4-bit weights are dequantised.
    """
    model, dtype = policy.model, policy.stored_dtype
    weights, converted = saved_weights(policy)
    with construction.without_progress_bars(), saved_whole(model):
        model.save_pretrained(folder, state_dict=weights)
        if converted:
            held = model.dtype
            model.config.dtype = dtype
            model.config.save_pretrained(folder)
            model.config.dtype = held
        policy.tokenizer.save_pretrained(folder)
    source = Path(model.name_or_path or "")
    if hasattr(model.config, "auto_map") and source.is_dir():  # the code that the model's folder brought
        for file in source.glob("*.py"):
            shutil.copyfile(file, folder / file.name)
    if policy.stop_ids != stop_ids(model, policy.tokenizer):  # it was trained with others than it names
        write_stop_ids(policy.stop_ids, folder)
    readable_as(folder / "config.json", folder)


def saved_weights(policy: Policy) -> tuple[dict[str, Tensor], bool]:
    """The weights to save, by the names of a model without an adapter, and whether their type was changed."""
    model, dtype = policy.model, policy.stored_dtype
    weights = merged_weights(model, dtype)
    if dtype is None or {each.dtype for each in weights.values() if each.is_floating_point()} == {dtype}:
        return weights, False
    return in_dtype(weights, dtype), True


@contextmanager
def saved_whole(model: PreTrainedModel) -> Iterator[None]:
    """Inside, transformers saves whole weights of a 4-bit model, and no quantisation config."""
    owners = ((model, "hf_quantizer"), (model, "_weight_conversions"), (model.config, "quantization_config"))
    quantised = "hf_quantizer" in vars(model)
    held = [(owner, name, vars(owner)[name]) for owner, name in owners if quantised and name in vars(owner)]
    for owner, name, _ in held:
        delattr(owner, name)
    try:
        yield
    finally:
        for owner, name, value in held:
            setattr(owner, name, value)


def in_dtype(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights in another floating-point type; tied ones stay one tensor."""
    made: dict[tuple[int, torch.Size], Tensor] = {}
    return {
        name: made.setdefault((value.data_ptr(), value.shape), value.detach().to(dtype))
        if value.is_floating_point()
        else value
        for name, value in weights.items()
    }


def readable_as(example: Path, folder: Path) -> None:
    """Give every file of a folder the mode of an ordinary one: safetensors' files are only readable by their owner."""
    mode = example.stat().st_mode & 0o777
    for file in folder.iterdir():
        if file.is_file():
            file.chmod(mode)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedAdapter:
    """A LoRA adapter as peft writes it, and its base."""

    base: str
    """Folder or hub name of the base."""
    base_digest: str
    """`model_digest` of that folder; empty if it is not a local folder, or is held in 4 bits and so not as saved."""
    settings: Mapping[str, object]
    """The content of adapter_config.json."""
    tensors: Mapping[str, Tensor]
    """The content of adapter_model.safetensors, not copied."""


@dataclass(frozen=True, slots=True)
class ExportedWeights:
    """The weights of a policy at the time of reading: `Engine.load` reads what it needs before it returns."""

    policy: Policy

    def merged(self) -> dict[str, Tensor]:
        """The tensors of the saved model's files, tied ones once; those that need no change are not copied."""
        policy = led_copy(self.policy)
        model = policy.model
        weights = dict(saved_weights(policy)[0])
        with saved_whole(model):
            single = remove_tied_weights_from_state_dict(weights, model)
            exported: dict[str, Tensor] = revert_weight_conversion(model, single)
        return {name: tensor.detach().contiguous() for name, tensor in exported.items()}

    def adapter(self) -> ExportedAdapter | None:
        """Only the adapter; None if other weights are trained too, or if it is in peft's layers."""
        model = self.policy.model
        if not lora_layers(model) or not trains_adapter_alone(model):
            return None
        model = led_copy(self.policy).model
        base = model.name_or_path or ""
        return ExportedAdapter(
            base=base,
            base_digest="" if not base or any(is_4_bit(each) for each in model.modules()) else model_digest(Path(base)),
            settings=adapter_settings(model),
            tensors=written_tensors(model),
        )
