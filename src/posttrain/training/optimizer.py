"""AdamW with a warm-up and a schedule, and the one way an optimiser step is taken."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from posttrain.options.training import OptimizerOptions

POLICY = "policy"
"""The module that parameters belong to where nothing else is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroup:
    """The parameters of one module, with a rate and a clipping of their own."""

    module: str
    """Its gradient is clipped by its own norm, which is reported under this name."""
    parameters: Iterable[nn.Parameter]
    rate_scale: float = 1.0
    """Its learning rate as a multiple of the schedule's."""


def new_optimizer(
    parameters: Iterable[nn.Parameter] | Sequence[ParameterGroup], options: OptimizerOptions
) -> torch.optim.AdamW:
    """AdamW over trainable parameters; weight decay on matrices only, as is usual for norms and biases.

    Parameters alone are those of the policy; modules that learn at rates of their own are given as parameter groups.
    """
    given = list(parameters)
    modules = [each for each in given if isinstance(each, ParameterGroup)]
    if not modules:
        modules = [ParameterGroup(module=POLICY, parameters=[p for p in given if isinstance(p, nn.Parameter)])]
    groups = []
    for each in modules:
        trainable = [parameter for parameter in each.parameters if parameter.requires_grad]
        own = {"module": each.module, "rate_scale": each.rate_scale}
        groups += [
            {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": options.weight_decay, **own},
            {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0, **own},
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


def apply_gradients(optimizer: torch.optim.Optimizer, rate: float, max_grad_norm: float) -> dict[str, float]:
    """Clip each module's accumulated gradients to a norm, step, and clear them.  Returns the norms before clipping.

    Where a norm is not finite nothing is stepped, and weights stay as they are.
    """
    by_module: dict[str, list[nn.Parameter]] = {}
    for group in optimizer.param_groups:
        by_module.setdefault(group.get("module", POLICY), []).extend(group["params"])
    norms = {
        module: nn.utils.clip_grad_norm_(parameters, max_grad_norm).item() for module, parameters in by_module.items()
    }
    if not all(math.isfinite(norm) for norm in norms.values()):
        return norms
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("rate_scale", 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norms
