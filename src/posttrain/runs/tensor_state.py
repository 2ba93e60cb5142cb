"""Modules and optimisers as named tensors, and back, bit for bit.

Safetensors stores tensors and nothing else, so what is not a tensor travels beside them as plain data.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from posttrain.errors import RunError

Tensors = Mapping[str, Tensor]


def module_tensors(module: Module) -> dict[str, Tensor]:
    """A module's parameters and persistent buffers; of tied ones (embedding and output head) the first name only."""
    named: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            named[name] = tensor.detach()
    return named


def restore_module(module: Module, tensors: Tensors) -> None:
    """Copy saved tensors into a module; a name or a shape that does not fit is an error before anything is copied."""
    refuse_mismatch("the model", {name: t.shape for name, t in module_tensors(module).items()}, tensors)
    module.load_state_dict(dict(tensors), strict=False)  # strict would ask for the tied names too


def optimizer_tensors(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, object]]:
    """An optimiser's state: tensors named `<parameter index>.<entry>`, such as `3.exp_avg`, and the options as data."""
    state = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    for index, entries in state["state"].items():
        for name, value in entries.items():
            assert isinstance(value, Tensor), f"optimiser entry {name} is not a tensor"
            tensors[f"{index}.{name}"] = value
    return tensors, {"param_groups": state["param_groups"]}


def restore_optimizer(optimizer: Optimizer, tensors: Tensors, state: Mapping[str, object]) -> None:
    """Continue with a saved optimiser state; the tensors are copied, so the checkpoint stays as it was read."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    expected: dict[str, torch.Size] = {}
    entries: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        index, entry = name.split(".")
        entries.setdefault(int(index), {})[entry] = tensor.clone()
        if int(index) < len(parameters):
            # Counters such as Adam's `step` are scalars; every other entry has the shape of its parameter.
            expected[name] = tensor.shape if tensor.ndim == 0 else parameters[int(index)].shape
    refuse_mismatch("the optimiser", expected, tensors)
    groups = state["param_groups"]
    live = optimizer.state_dict()["param_groups"]
    if not isinstance(groups, list) or [g["params"] for g in groups] != [g["params"] for g in live]:
        raise RunError(
            "the optimiser's parameter groups are not those of the checkpoint: it was made by another recipe."
        )
    restored = [
        # What an earlier version did not save stays as it is.
        current | {name: like(saved[name], current.get(name)) for name in saved}
        for saved, current in zip(groups, live, strict=True)
    ]
    optimizer.load_state_dict({"state": entries, "param_groups": restored})


def like(saved: object, current: object) -> object:
    """JSON has no tuples: an option that is one in the live optimiser (Adam's betas) becomes one again."""
    return tuple(saved) if isinstance(saved, list) and isinstance(current, tuple) else saved


def refuse_mismatch(owner: str, expected: Mapping[str, torch.Size], tensors: Tensors) -> None:
    """Names and shapes must be those of the checkpoint."""
    for name in sorted(expected.keys() ^ tensors.keys()):
        where = "checkpoint" if name in expected else f"one of {owner} here"
        raise RunError(f"{owner}: `{name}` has no counterpart in the {where}.  Resume with the recipe that made it.")
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise RunError(
                f"{owner}: `{name}` has shape {list(shape)} here and {list(tensors[name].shape)} in the checkpoint.  "
                "Resume with the recipe that made it."
            )
