"""TRL's trainers with an optimiser that records, which both workers of trl_parity.py use."""

import base64
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import Trainer


class RecordingSgd(torch.optim.SGD):
    """Gradient descent that keeps each gradient and the weights after each step."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], rate: float) -> None:
        super().__init__(parameters.values(), lr=rate)
        self.parameters = parameters
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.weights: list[dict[str, torch.Tensor]] = []

    def step(self, closure: Any = None) -> None:
        self.gradients.append({name: each.grad.clone() for name, each in self.parameters.items()})
        super().step(closure)
        self.weights.append({name: each.detach().clone() for name, each in self.parameters.items()})


class Recording(Trainer):
    """TRL's trainer with that optimiser; it keeps the loss of each micro-batch."""

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        self.losses: list[float] = []
        self.optimizer = RecordingSgd(trained_parameters(self.model), self.args.learning_rate)
        return self.optimizer

    def training_step(self, *arguments: Any, **named: Any) -> torch.Tensor:
        loss = super().training_step(*arguments, **named)
        self.losses.append(loss.item())
        return loss


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What is trained, by the names that a model has without peft."""
    named = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            for part in ("base_model.model.", ".default", ".modules_to_save"):
                name = name.replace(part, "")
            named[name] = parameter
    return named


def encoded(tensors: Mapping[str, torch.Tensor]) -> str:
    """All numbers of the tensors, in order, as little-endian float32 in base64."""
    flat = torch.cat([tensor.detach().float().flatten() for tensor in tensors.values()])
    return base64.b64encode(flat.numpy().astype("<f4").tobytes()).decode("ascii")
