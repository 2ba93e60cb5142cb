"""Bytes of a reward model's weights, before any of them is loaded."""

from functools import partial
from typing import cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification

from posttrain.models.classifiers.classifier_folder import chosen_type, classifier_files, classifier_load_message, place
from posttrain.models.loading.construction import ONE_AT_A_TIME, transformers_load_errors
from posttrain.models.loading.folder_kinds import SAFE_WEIGHTS, quantisation, read_json
from posttrain.models.memory.memory_parts import NF4_BYTES
from posttrain.options.reward_model import RewardModelOptions


def classifier_bytes(options: RewardModelOptions, *, on_cuda: bool) -> int:
    """Bytes of the weights on the disk's config alone: b · N, and in 4 bits 4.127 / 8 for b of its linear layers.

    N: parameters, b: bytes of one.  A folder that is in 4 bits already is as large as its files.  Nothing where the
    reward model lives on another device than the policy, which is on CUDA where `on_cuda`.
    """
    there = on_cuda if options.device == "auto" else options.device == "cuda"
    if there != on_cuda:
        return 0
    folder, where = classifier_files(options), place(options)
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
