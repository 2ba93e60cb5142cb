"""A reward model: a sequence classifier from a folder or the hub, and the bytes of its weights before it is loaded.

transformers makes up missing weights with a warning at most: a causal language model becomes a classifier with a random
head.  Here that is refused unless `untrained_head` is set.
"""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import cast

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
    require_no_lack,
    transformers_load_errors,
    without_progress_bars,
)
from posttrain.models.loading.devices import chosen_device
from posttrain.models.loading.folder_kinds import (
    SAFE_WEIGHTS,
    architecture_name,
    checked_config,
    hub_folder,
    quantisation,
    read_json,
)
from posttrain.models.memory.memory_parts import NF4_BYTES
from posttrain.options.model import ModelOptions
from posttrain.options.reward import RewardModelOptions

CAUSAL_HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Endings of the names of classes that write and do not score."""
HEAD_SEED = 0
"""Draws an untrained head."""


def classifier_files(options: RewardModelOptions) -> Path:
    """The local folder of a reward model, downloaded from the hub if it must be.  Reads only small files.

    Raises UserError for a folder that is not a classifier: a language model has no head that scores.
    """
    where, named = reward_option(options), ModelOptions(path=options.model)
    folder, trusted = named.folder, options.trust_remote_code
    if named.hub_name is not None:
        name = f"rewards: model = {named.hub_name}"
        folder = hub_folder(named.hub_name, named.hub_revision, with_code=trusted, option=name)
    if not folder.is_dir():
        raise UserError(
            f"{where}: no such folder.  Give the folder of a reward model (config.json, tokenizer and weights), or one"
            " of the hub as org/name."
        )
    option = "the reward's trust_remote_code"
    config = checked_config(folder, where, trusted=trusted, option=option, causal=False)
    made_as = architecture_name(config)
    if made_as.endswith(CAUSAL_HEADS) and not options.untrained_head:
        raise UserError(
            f"{where}: {made_as} is a language model, whose scoring head would be random.  Give a trained sequence"
            " classifier (…ForSequenceClassification), or set untrained_head: true."
        )
    return folder


def loaded_classifier(folder: Path, options: RewardModelOptions) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The classifier of a folder and its tokenizer, frozen, on its device and in its type."""
    where = reward_option(options)
    device = chosen_device(options.device, option="rewards: device")
    config, dtype = read_json(folder / "config.json", where), chosen_type(options, device)
    causal = architecture_name(config).endswith(CAUSAL_HEADS)
    with classifier_errors(where), without_progress_bars(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(HEAD_SEED)
        model, found = AutoModelForSequenceClassification.from_pretrained(
            folder,
            dtype=dtype,
            trust_remote_code=options.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # which is then refused below
            **({"num_labels": 1} if causal else {}),
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=options.trust_remote_code)
    require_classifier_weights(model, lacking_weights(found), where, untrained_head=options.untrained_head)
    model.requires_grad_(False).eval()
    if quantisation(config) is not None:
        compute_unpacked_in(model, dtype)
        return model, tokenizer
    if options.quantization is not None:
        quantize(model.base_model, dtype, device=device)
    cast(torch.nn.Module, model).to(device)
    return model, tokenizer


def chosen_type(options: RewardModelOptions, device: torch.device) -> torch.dtype:
    narrow = options.dtype == "bfloat16" or (options.dtype == "auto" and device.type == "cuda")
    return torch.bfloat16 if narrow else torch.float32


def require_classifier_weights(model: PreTrainedModel, lacking: list[str], where: str, *, untrained_head: bool) -> None:
    """Refuse a model whose weights are not all in its folder; its head may be new if the options say so."""
    body = f"{model.base_model_prefix}."
    require_no_lack(model, sorted(name for name in lacking if name.startswith(body)), where)
    heads = {name: each for name, each in model.named_parameters() if not name.startswith(body)}
    broken = [name for name, each in heads.items() if not each.isfinite().all()]
    if broken:
        raise UserError(
            f"{where}: its head cannot score: {broken[0]} holds NaN or infinity.  Give a folder whose training did not"
            " diverge."
        )
    if lacking and not untrained_head:
        raise UserError(
            f"{where}: its head is not trained: {', '.join(sorted(lacking))} would be random.  Give a folder that was"
            " saved after training, or set untrained_head: true."
        )


def classifier_errors(where: str) -> AbstractContextManager[None]:
    return transformers_load_errors(
        lambda said: (
            f"{where}: transformers cannot load it as a sequence classifier ({said}).  The folder needs config.json,"
            " model.safetensors, tokenizer.json and tokenizer_config.json of such a model."
        )
    )


def reward_option(options: RewardModelOptions) -> str:
    return f"rewards: model = {options.model}"


def classifier_bytes(options: RewardModelOptions, *, on_cuda: bool) -> int:
    """Bytes of the weights, by the config: b · N, and in 4 bits 4.127 / 8 for b of its linear layers.

    N: parameters, b: bytes of one.  A folder that is stored in 4 bits is as large as its files.  0 if the reward model
    is on another device than the policy, which is on CUDA if `on_cuda`.
    """
    there = on_cuda if options.device == "auto" else options.device == "cuda"
    if there != on_cuda:
        return 0
    folder, where = classifier_files(options), reward_option(options)
    if quantisation(read_json(folder / "config.json", where)) is not None:
        return sum(file.stat().st_size for file in folder.glob(SAFE_WEIGHTS))
    with classifier_errors(where), ONE_AT_A_TIME, torch.device("meta"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=options.trust_remote_code)
        model = AutoModelForSequenceClassification.from_config(config, trust_remote_code=options.trust_remote_code)
    width: int = chosen_type(options, torch.device("cuda" if on_cuda else "cpu")).itemsize
    parameters: int = sum(each.numel() for each in model.parameters())
    if options.quantization is None:
        return width * parameters
    body = cast(nn.Module, model.base_model)
    packed: int = sum(layer.weight.numel() for layer in body.modules() if type(layer) is nn.Linear)
    return width * (parameters - packed) + round(NF4_BYTES * packed)
