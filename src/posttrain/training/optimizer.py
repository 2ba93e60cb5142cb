"""AdamW with a warm-up and a schedule, and the one way an optimiser step is taken."""

import math
from collections.abc import Iterable

import torch
from torch import nn

from posttrain.options.training import OptimizerOptions


def new_optimizer(parameters: Iterable[nn.Parameter], options: OptimizerOptions) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; weight decay on matrices only, as is usual for norms and biases."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=options.learning_rate,
        betas=(options.beta1, options.beta2),
        fused=True,
    )


def learning_rate(options: OptimizerOptions, update: int, num_updates: int) -> float:
    """The rate of one update: a linear rise over `warmup_steps`, then constant, or falling to zero at `num_updates`.

    update counts from 0.  The first update of a warm-up over w has rate lr/w, never zero.
    """
    if update < options.warmup_steps:
        return options.learning_rate * (update + 1) / options.warmup_steps
    if options.schedule == "constant":
        return options.learning_rate
    progress = (update - options.warmup_steps) / max(1, num_updates - options.warmup_steps)
    left = 1 - min(progress, 1.0)
    share = left if options.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left))
    return options.learning_rate * share


def apply_gradients(optimizer: torch.optim.Optimizer, rate: float, max_grad_norm: float) -> float:
    """Clip the accumulated gradients to a norm, step, and clear them.  Returns the norm before clipping.

    A non-finite norm returns without a step and leaves weights and gradients as they are.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    norm = nn.utils.clip_grad_norm_(parameters, max_grad_norm).item()
    if not math.isfinite(norm):
        return norm
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm
