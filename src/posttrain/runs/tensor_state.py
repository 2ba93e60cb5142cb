"""Modules and optimisers as named tensors, and back, bit for bit.

Safetensors stores tensors and nothing else, so what is not a tensor travels beside them as plain data.
"""

import hashlib
from collections.abc import Collection, Mapping

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from posttrain.errors import RunError

Tensors = Mapping[str, Tensor]
FROZEN = "frozen"
"""Where a checkpoint's state says what the weights were that it leaves out."""


def module_tensors(module: Module, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """What training changes of a module, or the tensors of these names.

    Where every parameter is trained that is parameters and persistent buffers; where some are frozen, those that are
    not.  Of tied ones (embedding and output head) the first name only.
    """
    named = untied(module)
    if names is None:
        names = trained_names(module, named)
    return {name: tensor.detach() for name, tensor in named.items() if name in names}


def restore_module(module: Module, tensors: Tensors, names: Collection[str] | None = None) -> None:
    """Copy saved tensors into a module; a name or a shape that does not fit is an error before anything is copied."""
    refuse_mismatch("the model", shapes(module_tensors(module, names)), tensors)
    module.load_state_dict(dict(tensors), strict=False)  # strict would ask for frozen and for tied names too


def untied(module: Module) -> dict[str, Tensor]:
    """A module's parameters and persistent buffers, each under its first name."""
    named: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            named[name] = tensor
    return named


def trained_names(module: Module, named: Tensors) -> Collection[str]:
    """The tensors that training changes, of those named."""
    if all(parameter.requires_grad for parameter in module.parameters()):
        return named.keys()
    return {name for name, tensor in named.items() if tensor.requires_grad}


def shapes(tensors: Tensors) -> dict[str, torch.Size]:
    """The shape of each."""
    return {name: tensor.shape for name, tensor in tensors.items()}


def frozen_digest(module: Module) -> str:
    """SHA-256 over all that training leaves as it is, names, types and numbers; empty where nothing is frozen.

    A checkpoint without these weights is worth nothing beside others.  A second for each 1.5 GB.
    """
    named = untied(module)
    frozen = named.keys() - trained_names(module, named)
    digest = hashlib.sha256()
    for name in sorted(frozen):
        tensor = named[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {[*tensor.shape]}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest() if frozen else ""


def frozen_state(module: Module, name: str) -> dict[str, object]:
    """What a checkpoint says of the weights that it leaves out, if any; `name` is the model's."""
    digest = frozen_digest(module)
    return {FROZEN: {"model": name, "sha256": digest}} if digest else {}


def require_same_frozen(now: Mapping[str, object], saved: Mapping[str, object]) -> None:
    """Refuse a checkpoint whose frozen weights were others than there are now, by what `frozen_state` says of both."""
    digests, said = [], []
    for state in (saved.get(FROZEN), now.get(FROZEN)):
        known = state if isinstance(state, Mapping) else {"model": "a model without frozen parts", "sha256": ""}
        digests.append(known["sha256"])
        said.append(f"{known['model']} (SHA-256 {str(known['sha256'])[:16]})" if known["sha256"] else known["model"])
    if digests[0] != digests[1]:
        raise RunError(
            f"the frozen weights are not those of the checkpoint: it was made over {said[0]}, and here there is"
            f" {said[1]}.  What was trained is of use over its own base alone: resume with that model."
        )


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
