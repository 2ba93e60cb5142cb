"""A policy as a folder that transformers reads."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.models.adapters.merging import merged_weights
from posttrain.models.adapters.peft_format import write_adapter
from posttrain.models.adapters.peft_layers import adapted_names
from posttrain.models.adapters.quantized import is_4_bit
from posttrain.models.exports.saved_weights import require_loadable
from posttrain.models.loading.adapting import note_base
from posttrain.models.loading.chat_settings import write_stop_ids
from posttrain.models.loading.construction import without_progress_bars
from posttrain.models.policy import Policy, stop_ids
from posttrain.options.adapter import ADAPTER_CONFIG


def save_trained(policy: Policy, run: Path, save: Literal["adapter", "merged", "both"], card: str) -> None:
    """What a finished run keeps, each with a card: the model in RUN/model, or an adapter in RUN/adapter, or both.

    `save` is `model.adapter.save`; where no adapter is trained it plays no part.
    """
    adapted = bool(adapted_names(policy.model))
    if adapted and save != "merged":
        with whole_folder(run / "adapter") as folder:
            save_adapter(policy, folder)
            write_card(folder, card)
    if not adapted or save != "adapter":
        with whole_folder(run / "model") as folder:
            save_policy(policy, folder)
            write_card(folder, card + merged_note(policy))
    # Asked last, so that both are kept whatever is wrong with them.
    if adapted and save != "merged":
        require_loadable(policy.model, run / "adapter")
    if not adapted or save != "adapter":
        require_loadable(policy.model, run / "model")


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which then takes the place of what a run has under a name: whole, and over no link."""
    beside = folder.with_name(f".tmp-{folder.name}")
    remove_folder(beside)
    beside.mkdir(parents=True)
    try:
        yield beside
        remove_folder(folder)
        beside.rename(folder)
    finally:
        remove_folder(beside)


def remove_folder(folder: Path) -> None:
    """Remove what is there under a name, if anything is; of a link the link."""
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder)
    else:
        folder.unlink(missing_ok=True)


def write_card(folder: Path, card: str) -> None:
    """Write a model card, if there is one."""
    if card:
        (folder / "README.md").write_text(card, encoding="utf-8")


def merged_note(policy: Policy) -> str:
    """What the card of a merged model says of how it was made; empty where nothing was merged."""
    layers = adapted_names(policy.model)
    if not layers:
        return ""
    dtype = str(policy.stored_dtype or policy.model.dtype).removeprefix("torch.")
    in_4_bits = any(is_4_bit(layer) for layer in policy.model.modules())
    onto = "dequantised 4-bit (nf4) weights, those that it was trained over" if in_4_bits else "the base's weights"
    return (
        f"\nAn adapter of {len(layers)} layers was merged in float32 onto {onto}, and the sum is stored in {dtype}.\n"
    )


def save_adapter(policy: Policy, folder: Path) -> None:
    """Write the adapter alone, in peft's format, with the tokenizer, its template and all stop tokens."""
    write_adapter(policy.model, folder)
    note_base(policy.model.name_or_path or "", folder)
    with without_progress_bars():
        policy.tokenizer.save_pretrained(folder)
    write_stop_ids(policy.stop_ids, folder)
    readable_as(folder / ADAPTER_CONFIG, folder)


def save_policy(policy: Policy, folder: Path) -> None:
    """Write model and tokenizer; weights that were loaded from bfloat16 are bfloat16 again, and config.json says so.

    An adapter is added into a copy of the weights, in float32; those in 4 bits are what their numbers stand for.
    """
    model, dtype = policy.model, policy.stored_dtype
    adapted = bool(adapted_names(model)) or any(is_4_bit(layer) for layer in model.modules())
    weights = merged_weights(model, dtype) if adapted else model.state_dict()
    with without_progress_bars(), saved_whole(model):
        if dtype is None or {each.dtype for each in weights.values() if each.is_floating_point()} == {dtype}:
            model.save_pretrained(folder, state_dict=weights if adapted else None)
        else:
            held = model.dtype
            model.save_pretrained(folder, state_dict=in_dtype(weights, dtype))
            model.config.dtype = dtype
            model.config.save_pretrained(folder)
            model.config.dtype = held
        policy.tokenizer.save_pretrained(folder)
    save_code(policy, folder)
    save_stop_ids(policy, folder)
    readable_as(folder / "config.json", folder)


@contextmanager
def saved_whole(model: PreTrainedModel) -> Iterator[None]:
    """Inside, transformers saves whole weights of a model whose weights are in 4 bits, and says nothing of these."""
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


def save_code(policy: Policy, folder: Path) -> None:
    """Copy the Python code that a model's folder brought, so that the one that is saved can be loaded again."""
    source = Path(policy.model.name_or_path or "")
    if hasattr(policy.model.config, "auto_map") and source.is_dir():
        for file in source.glob("*.py"):
            shutil.copyfile(file, folder / file.name)


def save_stop_ids(policy: Policy, folder: Path) -> None:
    """Name the stop tokens that the model did not name itself, in its generation config: it was trained to use them."""
    if policy.stop_ids != stop_ids(policy.model, policy.tokenizer):
        write_stop_ids(policy.stop_ids, folder)


def in_dtype(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights in another floating-point type; those that are one tensor under two names stay one."""
    made: dict[tuple[int, torch.Size], Tensor] = {}
    return {
        name: made.setdefault((value.data_ptr(), value.shape), value.detach().to(dtype))
        if value.is_floating_point()
        else value
        for name, value in weights.items()
    }


def readable_as(example: Path, folder: Path) -> None:
    """Give every file of a folder the mode of one that was made as files are: safetensors' own are their owner's."""
    mode = example.stat().st_mode & 0o777
    for file in folder.iterdir():
        if file.is_file():
            file.chmod(mode)
