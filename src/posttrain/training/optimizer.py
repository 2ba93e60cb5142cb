"""AdamW with warm-up and a schedule, and the optimiser step of every run."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.errors import RunError, UserError
from posttrain.models.sharding import own_part
from posttrain.models.transfers import on_cpu
from posttrain.options.training import OptimizerOptions
from posttrain.runs.checkpoint import load_latest
from posttrain.runs.tensor_state import renamed, restore_optimizer

POLICY = "policy"
"""The default module of parameters."""
ADAMW_ENTRIES = frozenset({"step", "exp_avg", "exp_avg_sq"})
"""Names of AdamW's state of a parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroup:
    """The parameters of one module, with their learning rate and clipping."""

    module: str
    """The name under which its gradient norm is reported."""
    parameters: Iterable[nn.Parameter]
    rate_scale: float = 1.0
    """Its learning rate as a multiple of the schedule's."""
    max_grad_norm: float | None = None
    """Limit of its gradient's norm.  Groups with None are clipped together, as one vector, to the optimiser's
    `max_grad_norm`."""

    def __post_init__(self) -> None:
        where = f"parameter group {self.module}"
        if not 0 <= self.rate_scale < math.inf:
            raise UserError(f"{where}: rate_scale = {self.rate_scale}: must be a finite number, at least 0.")
        if self.max_grad_norm is not None and not 0 < self.max_grad_norm < math.inf:
            rule = "must be a finite number above 0 (1e9 never clips), or None"
            raise UserError(f"{where}: max_grad_norm = {self.max_grad_norm}: {rule}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnOptimizer:
    """A caller's optimiser.  Its groups' rates follow its scheduler, or else the schedule of the options."""

    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None

    def set_rates(self, share: float) -> float:
        """Set the next update's rates: the scheduler's, or this share of the first ones.  Returns the largest."""
        groups = self.optimizer.param_groups
        if self.scheduler is None:
            rates = [share * group.setdefault("initial_lr", group["lr"]) for group in groups]
        else:
            rates = [float(rate) for rate in self.scheduler.get_last_lr()]
        largest: float = max(rates)
        for group, rate in zip(groups, rates, strict=True):
            group["rate_scale"] = rate / largest if largest else 1.0
        return largest

    def advance(self, updates: int = 1) -> None:
        for _ in range(updates if self.scheduler is not None else 0):
            self.scheduler.step()  # type: ignore[union-attr]


def new_optimizer(
    parameters: Iterable[nn.Parameter] | Sequence[ParameterGroup], options: OptimizerOptions
) -> torch.optim.AdamW:
    """AdamW over the trainable parameters of the policy, or of the given groups; weight decay only on matrices.

    Raises UserError if two groups share a name or a parameter.
    """
    given = list(parameters)
    modules = [each for each in given if isinstance(each, ParameterGroup)]
    if not modules:
        modules = [ParameterGroup(module=POLICY, parameters=[p for p in given if isinstance(p, nn.Parameter)])]
    groups: list[dict[str, Any]] = []
    for each in modules:
        trainable = [parameter for parameter in each.parameters if parameter.requires_grad]
        own = {"module": each.module, "rate_scale": each.rate_scale, "max_grad_norm": each.max_grad_norm}
        groups += [
            {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": options.weight_decay, **own},
            {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0, **own},
        ]
    if not any(group["params"] for group in groups):
        raise UserError("model: every parameter is frozen (requires_grad is False), so there is nothing to train.")
    for module, count in Counter(each.module for each in modules).items():
        if count > 1:
            raise UserError(f"parameter groups: {count} have the name {module!r}.  Give each a unique name.")
    owners: dict[int, str] = {}
    for group in groups:
        for parameter in group["params"]:
            other = owners.setdefault(id(parameter), group["module"])
            if other != group["module"]:
                raise UserError(
                    f"parameter groups: a parameter of shape {list(parameter.shape)} is in {other!r} and in"
                    f" {group['module']!r}.  Put it in only one of them."
                )
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=options.largest_rate,
        betas=(options.beta1, options.beta2),
        fused=True,
    )


def require_no_own(given: object) -> None:
    """Reject a caller's optimiser or parameter groups if several ranks split the weights."""
    if given:
        raise UserError(
            "optimizer: it or your parameter groups hold whole weights, but several ranks split them.  Leave them"
            " out, or use one rank."
        )


def learning_rate(options: OptimizerOptions, update: int, num_updates: int) -> float:
    """The learning rate of an update: a linear rise over `warmup_steps`, then constant or decaying to 0 at the end.

    Updates count from 0.  The first of a warm-up over w steps has rate lr/w, never 0.
    """
    if update < options.warmup_steps:
        return options.largest_rate * (update + 1) / options.warmup_steps
    if options.schedule == "constant":
        return options.largest_rate
    progress = (update - options.warmup_steps) / max(1, num_updates - options.warmup_steps)
    left = 1 - min(progress, 1.0)
    share = left if options.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left))
    return options.largest_rate * share


def next_rate(options: OptimizerOptions, own: OwnOptimizer | None, update: int, num_updates: int) -> float:
    planned = learning_rate(options, update, num_updates)
    if own is None:
        return planned
    own.advance(int(update > 0))
    return own.set_rates(planned / options.largest_rate)


def standing_still(parameters: Iterable[nn.Parameter], rate: float) -> float:
    """Share of the trained weights for which a step of the size of the learning rate rounds to nothing, as in AdamW.

        |w| ∈ [2^(e-1), 2^e) moves by a step of at least eps · 2^(e-2)      eps = 2^-7 in bfloat16

    Weights in float32 or wider count as moved.  With sharded weights, only this rank's weights count.
    """
    trained = [own_part(parameter.detach()) for parameter in parameters if parameter.requires_grad]
    still = torch.zeros((), dtype=torch.float64)
    for weight in trained:
        eps = torch.finfo(weight.dtype).eps
        if eps > torch.finfo(torch.float32).eps:
            least = eps * torch.exp2(torch.frexp(weight.float()).exponent - 2.0)
            still += ((least > rate) & (weight != 0)).sum().cpu()
    return still.item() / max(1, sum(weight.numel() for weight in trained))


def apply_gradients(optimizer: torch.optim.Optimizer, rate: float, max_grad_norm: float) -> dict[str, float]:
    """Clip the accumulated gradients, step, and clear them.  Returns the norm of each module before clipping.

    Gradients are scaled down to the limits of their modules; modules without one share `max_grad_norm`.  If a norm is
    not finite, no step is taken.
    """
    by_module: dict[str, list[nn.Parameter]] = {}
    limits: dict[str, float | None] = {}
    for group in optimizer.param_groups:
        module = group.get("module", POLICY)
        by_module.setdefault(module, []).extend(group["params"])
        limits[module] = group.get("max_grad_norm")
    norms = {module: gradient_norm(parameters) for module, parameters in by_module.items()}
    found = {module: norm.item() for module, norm in zip(norms, on_cpu([*norms.values()]), strict=True)}
    if not all(math.isfinite(norm) for norm in found.values()):
        return found
    sharing = [module for module, limit in limits.items() if limit is None]
    for module, limit in limits.items():
        if limit is not None:
            nn.utils.clip_grads_with_norm_(by_module[module], limit, norms[module])
    if sharing:
        parameters = [parameter for module in sharing for parameter in by_module[module]]
        # For one module its norm itself, which a second computation could miss by a rounding.
        norm = norms[sharing[0]] if len(sharing) == 1 else gradient_norm(parameters)
        nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("rate_scale", 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return found


def gradient_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    return nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])


def require_all_trained(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in trained:
            raise UserError(
                f"parameter groups: `{name}` is in none of them.  Put it in one, or freeze it: requires_grad_(False)."
            )


def take_over(optimizer: torch.optim.Optimizer, run: str, *, where: str) -> None:
    """Load AdamW's moments and counters, but not its options, from another run's last checkpoint, module by module.

    Modules that only one of the runs trains are skipped.  Raises UserError if there is no checkpoint of AdamW with the
    same parameters.
    """
    saved = load_latest(Path(run) / "checkpoints")
    if saved is None:
        raise UserError(f"{where}: has no checkpoint.  Name the folder of a run that has one.")
    state = saved.state["optimizer"]
    assert isinstance(state, Mapping)
    groups, names = optimizer.state_dict()["param_groups"], dict[str, str]()
    try:
        places = places_of_modules(state["param_groups"], groups)
        for name in saved.tensors["optimizer"]:
            number, entry = name.split(".")
            if entry not in ADAMW_ENTRIES:
                raise RunError(f"it keeps {entry}, which AdamW does not have")
            if int(number) in places:
                names[name] = f"{places[int(number)]}.{entry}"
        moved = renamed(saved.tensors["optimizer"], names)
        restore_optimizer(optimizer, moved, {"param_groups": [{"params": group["params"]} for group in groups]})
    except RunError as error:
        rule = "Use a run that trained the same parameters, or leave it out."
        raise UserError(f"{where}: its optimiser belongs to other parameters ({error}).  {rule}") from error


def places_of_modules(theirs: Sequence[Mapping[str, Any]], ours: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Positions of one optimiser's parameters in the other, for the modules that both train.

    Raises RunError if the policy is not among them, or if a module differs.
    """
    numbers = [
        {
            module: [group["params"] for group in groups if group.get("module", POLICY) == module]
            for module in dict.fromkeys(group.get("module", POLICY) for group in groups)
        }
        for groups in (theirs, ours)
    ]
    common = [module for module in numbers[1] if module in numbers[0]]
    for module in common or [POLICY]:
        counts = [[len(group) for group in each.get(module, [])] for each in numbers]
        if counts[0] != counts[1]:
            raise RunError(f"it trained groups of {counts[0]} parameters of `{module}`, but here there are {counts[1]}")
    if POLICY not in common:
        raise RunError(f"it trained {', '.join(numbers[0])}, but here {', '.join(numbers[1])} are trained")
    pairs = [
        (there, here)
        for module in common
        for both in zip(numbers[0][module], numbers[1][module], strict=True)
        for there, here in zip(*both, strict=True)
    ]
    return dict(pairs)
