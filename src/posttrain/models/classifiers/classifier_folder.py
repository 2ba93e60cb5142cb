"""A sequence classifier from a folder or the hub: what a reward model is.

transformers makes up what a folder lacks and says so in a warning at most: a causal language model becomes a classifier
with a random head.  Here that is refused by name, unless it is asked for.

`classifier_bytes` estimates the bytes of a classifier's weights before any is loaded.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from posttrain.errors import UserError
from posttrain.models.adapters.quantized import compute_unpacked_in, quantize
from posttrain.models.loading.construction import (
    ONE_AT_A_TIME,
    lacking_weights,
    transformers_load_errors,
    without_progress_bars,
)
from posttrain.models.loading.devices import chosen_device
from posttrain.models.loading.folder_kinds import (
    SAFE_WEIGHTS,
    architecture_name,
    hub_folder,
    quantisation,
    read_json,
    require_model_files,
    require_no_adapter,
    require_no_hub_kernel,
)
from posttrain.models.memory.memory_parts import NF4_BYTES
from posttrain.options.model import ModelOptions
from posttrain.options.reward_model import RewardModelOptions

CAUSAL_HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""How the names of classes end that write and do not score."""
HEAD_SEED = 0
"""Draws a head that nobody trained, if that is asked for."""


def classifier_files(options: RewardModelOptions) -> Path:
    """The folder of a reward model on this machine, known to hold one; of the hub it is downloaded if it must be.

    Reads small files alone.  Raises UserError for what is not a classifier.
    """
    where, named = reward_option(options), ModelOptions(path=options.model)
    if named.hub_name is not None:
        option, trusted = f"rewards: model = {named.hub_name}", options.trust_remote_code
        folder = hub_folder(named.hub_name, named.hub_revision, with_code=trusted, option=option)
    else:
        folder = named.folder
    if not folder.is_dir():
        raise UserError(
            f"{where}: no such folder.  Give the folder of a reward model (config.json, tokenizer and weights), or one"
            " of the hub as org/name."
        )
    require_no_adapter(folder, where)
    if not (folder / "config.json").is_file():
        raise UserError(f"{where}: the folder holds no config.json, so it is not a model that transformers can load.")
    config = read_json(folder / "config.json", where)
    require_no_hub_kernel(config, where, "Remove it from config.json.")
    require_model_files(
        folder, config, where, trust_remote_code=options.trust_remote_code, option="the reward's trust_remote_code"
    )
    require_head(config, where, untrained_head=options.untrained_head)
    return folder


def require_head(config: Mapping[str, Any], where: str, *, untrained_head: bool) -> None:
    """Refuse a language model: it has no head that scores, and one would be made up."""
    made_as = architecture_name(config)
    if made_as.endswith(CAUSAL_HEADS) and not untrained_head:
        raise UserError(
            f"{where}: {made_as} is a language model and no reward model: it has no head that scores a text, and a new"
            " one would be random.  Give a folder whose model was trained as a sequence classifier"
            " (…ForSequenceClassification), or say untrained_head: true to have random scores."
        )


def loaded_classifier(folder: Path, options: RewardModelOptions) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The classifier of a folder and its tokenizer, frozen, on its device and in its type."""
    where = reward_option(options)
    device = chosen_device(options.device, option="rewards: device")
    config = read_json(folder / "config.json", where)
    causal = architecture_name(config).endswith(CAUSAL_HEADS)
    with (
        transformers_load_errors(partial(classifier_load_message, where)),
        without_progress_bars(),
        torch.random.fork_rng(devices=[]),
    ):
        torch.manual_seed(HEAD_SEED)
        model, found = AutoModelForSequenceClassification.from_pretrained(
            folder,
            dtype=chosen_type(options, device),
            trust_remote_code=options.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # which is then refused below
            **({"num_labels": 1} if causal else {}),
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=options.trust_remote_code)
    lacking = lacking_weights(found)
    require_classifier_weights(model, lacking, where, untrained_head=options.untrained_head)
    model.requires_grad_(False).eval()
    stored_in_bits = quantisation(config) is not None
    if options.quantization is not None and not stored_in_bits:
        quantize(model.base_model, chosen_type(options, device), device=device)
    if stored_in_bits:
        compute_unpacked_in(model, chosen_type(options, device))
    else:
        cast(torch.nn.Module, model).to(device)
    return model, tokenizer


def chosen_type(options: RewardModelOptions, device: torch.device) -> torch.dtype:
    narrow = options.dtype == "bfloat16" or (options.dtype == "auto" and device.type == "cuda")
    return torch.bfloat16 if narrow else torch.float32


def require_classifier_weights(model: PreTrainedModel, lacking: list[str], where: str, *, untrained_head: bool) -> None:
    """Refuse a model whose weights are not all in its folder; of a head that may be so by name."""
    body = f"{model.base_model_prefix}."
    of_body = sorted(name for name in lacking if name.startswith(body))
    if of_body:
        raise UserError(
            f"{where}: the weights lack {len(of_body)} of what a {type(model).__name__} needs"
            f" ({', '.join(of_body[:3])}{' ...' if len(of_body) > 3 else ''}), which would be made up at random.  The"
            " files are those of another model, or not whole."
        )
    broken = [name for name, each in model.named_parameters() if not name.startswith(body) and not is_finite(each)]
    if broken:
        raise UserError(
            f"{where}: its head cannot score: {broken[0]} holds NaN or infinity.  Give a folder whose training did not"
            " diverge."
        )
    if lacking and not untrained_head:
        raise UserError(
            f"{where}: nobody has trained its head: the weights lack {', '.join(sorted(lacking))}, which would be made"
            " up at random.  Give a folder that was saved after training, or say untrained_head: true to have random"
            " scores."
        )


def is_finite(tensor: torch.Tensor) -> bool:
    return bool(tensor.isfinite().all())


def classifier_load_message(where: str, said: str) -> str:
    return (
        f"{where}: transformers cannot load it as a sequence classifier ({said}).  The folder needs config.json,"
        " model.safetensors, tokenizer.json and tokenizer_config.json of such a model."
    )


def reward_option(options: RewardModelOptions) -> str:
    return f"rewards: model = {options.model}"


def classifier_bytes(options: RewardModelOptions, *, on_cuda: bool) -> int:
    """Bytes of the weights on the disk's config alone: b · N, and in 4 bits 4.127 / 8 for b of its linear layers.

    N: parameters, b: bytes of one.  A folder that is in 4 bits already is as large as its files.  Nothing where the
    reward model lives on another device than the policy, which is on CUDA where `on_cuda`.
    """
    there = on_cuda if options.device == "auto" else options.device == "cuda"
    if there != on_cuda:
        return 0
    folder, where = classifier_files(options), reward_option(options)
    if quantisation(read_json(folder / "config.json", where)) is not None:
        return sum(file.stat().st_size for file in folder.glob(SAFE_WEIGHTS))
    with transformers_load_errors(partial(classifier_load_message, where)), ONE_AT_A_TIME, torch.device("meta"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=options.trust_remote_code)
        model = AutoModelForSequenceClassification.from_config(config, trust_remote_code=options.trust_remote_code)
    width: int = chosen_type(options, torch.device("cuda" if on_cuda else "cpu")).itemsize
    parameters: int = sum(each.numel() for each in model.parameters())
    if options.quantization is None:
        return width * parameters
    body = cast(nn.Module, model.base_model)
    packed: int = sum(layer.weight.numel() for layer in body.modules() if type(layer) is nn.Linear)
    return width * (parameters - packed) + round(NF4_BYTES * packed)
