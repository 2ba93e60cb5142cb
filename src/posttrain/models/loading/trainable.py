"""Which parameters are trained, and in what type the others are held."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from posttrain.errors import UserError
from posttrain.models.adapters.adaptable import expert_matrices

MATRICES = (nn.Linear, Conv1D)
"""Layers whose matrix meets its input in the type that products are computed in, whatever type it is held in."""


def freeze(model: PreTrainedModel, patterns: Sequence[str]) -> None:
    """Take the parameters whose names match out of training; of tied ones any name will do.

    Raises UserError where a pattern matches nothing, or where nothing is left.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        found = [parameter for name, parameter in named if fnmatchcase(name, pattern)]
        if not found:
            some = ", ".join(name for name, _ in (*named[:2], *named[-2:]))
            raise UserError(
                f"model.frozen: no parameter is named {pattern}.  Names are such as {some}; * stands for any part."
            )
        for parameter in found:
            parameter.requires_grad_(False)
    if patterns and not any(parameter.requires_grad for _, parameter in named):
        raise UserError(f"model.frozen = {', '.join(patterns)} leaves no parameter to train.  Freeze fewer of them.")


def hold_frozen_in(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Hold the frozen matrices of linear layers and experts in a smaller type: what products round them to anyway.

    So the numbers stay the same.  Norms, biases and embeddings, whose type their output takes on, stay as they are, and
    so does a matrix that is an embedding too.
    """
    for matrix in linear_matrices(model):
        if not matrix.requires_grad:
            matrix.data = matrix.data.to(dtype)


def hold_rest_in(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Hold in this type all that `hold_frozen_in` leaves as it is."""
    matrices = {id(each) for each in linear_matrices(model)}
    for parameter in model.parameters():
        if id(parameter) not in matrices and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def hold_all_in(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Hold every parameter in this type but those in 4 bits."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def linear_matrices(model: nn.Module) -> list[Tensor]:
    """The parameters that are matrices of linear layers or of experts (no embedding), none of them in 4 bits.

    Each is there once.
    """
    others = {
        id(parameter)
        for module in model.modules()
        if not isinstance(module, MATRICES)
        for parameter in module.parameters(recurse=False)
    }
    found = {id(module.weight): module.weight for module in model.modules() if isinstance(module, MATRICES)}
    linear = [each for key, each in found.items() if key not in others and each.is_floating_point()]
    return [*linear, *expert_matrices(model).values()]
