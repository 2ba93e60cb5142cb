"""Modules and optimisers as named tensors, and back, bit for bit; other state is plain data."""

import hashlib
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from posttrain.errors import RunError
from posttrain.models.sharding import part_like, whole

Tensors = Mapping[str, Tensor]
FROZEN = "frozen"
"""The key of a checkpoint's state that identifies the weights it does not hold."""


class PartedTensors(Mapping[str, Tensor]):
    """Tensors of a checkpoint that are read on request, whole or only this rank's parts."""

    described: Tensors
    """The same tensors without data, on the meta device."""

    def __iter__(self) -> Iterator[str]:
        return iter(self.described)

    def __len__(self) -> int:
        return len(self.described)

    def read_into(self, targets: Tensors) -> None:
        """Read tensors into others of the same shapes, of which this rank may have parts."""
        raise NotImplementedError

    def renamed(self, names: Mapping[str, str]) -> "PartedTensors":
        """The tensors under new names: `names` maps each new name to the old one."""
        raise NotImplementedError


def renamed(tensors: Tensors, names: Mapping[str, str]) -> Tensors:
    if isinstance(tensors, PartedTensors):
        return tensors.renamed(names)
    return {new: tensors[name] for name, new in names.items()}


def copy_into(targets: Tensors, tensors: Tensors) -> None:
    """Copy whole tensors, or parts like the targets, into the targets of their names."""
    if isinstance(tensors, PartedTensors):
        tensors.read_into(targets)
        return
    for name, target in targets.items():
        target.copy_(part_like(tensors[name], target))


def module_tensors(module: Module, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """The tensors of a module that training changes, or those with these names.

    If every parameter is trained, all parameters and persistent buffers; otherwise the trained parameters.  Tied
    tensors (embedding and output head) have their first name only.
    """
    named = untied(module)
    if names is None:
        names = trained_names(module, named)
    return {name: tensor.detach() for name, tensor in named.items() if name in names}


def restore_module(module: Module, tensors: Tensors, names: Collection[str] | None = None) -> None:
    """Copy saved tensors into it, whole ones or parts like the module's.

    Raises RunError for a wrong name or shape before anything is copied.
    """
    own = module_tensors(module, names)
    refuse_mismatch("the model", shapes(own), tensors)
    copy_into(own, tensors)


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
    if all(parameter.requires_grad for parameter in module.parameters()):
        return named.keys()
    return {name for name, tensor in named.items() if tensor.requires_grad}


def described(tensors: Tensors) -> Tensors:
    """Tensors of these shapes and types; nothing is read."""
    return tensors.described if isinstance(tensors, PartedTensors) else tensors


def shapes(tensors: Tensors) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def frozen_digest(module: Module) -> str:
    """SHA-256 over the frozen tensors: names, types and numbers; empty if nothing is frozen.

    A checkpoint does not contain these weights and only works with the same ones.  Takes a second per 1.5 GB.  For a
    sharded module, the call is collective and the result is the same.
    """
    named = untied(module)
    frozen = named.keys() - trained_names(module, named)
    digest = hashlib.sha256()
    for name in sorted(frozen):
        tensor = whole(named[name].detach()).cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {[*tensor.shape]}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest() if frozen else ""


def frozen_state(module: Module, name: str) -> dict[str, object]:
    """State that identifies the frozen weights of a model of this name, if any."""
    digest = frozen_digest(module)
    return {FROZEN: {"model": name, "sha256": digest}} if digest else {}


def require_same_frozen(now: Mapping[str, object], saved: Mapping[str, object]) -> None:
    """Reject a checkpoint that was made with other frozen weights, by the `frozen_state` of both."""
    states = [state if isinstance(state, Mapping) else {} for state in (saved.get(FROZEN), now.get(FROZEN))]
    if states[0].get("sha256", "") != states[1].get("sha256", ""):
        then, here = (
            f"{state['model']} (SHA-256 {state['sha256'][:16]})" if state else "a model without frozen parts"
            for state in states
        )
        raise RunError(
            f"the frozen weights differ from the checkpoint's: it was made with {then}, but this is {here}.  Resume"
            " with the model that it was made with."
        )


def optimizer_tensors(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, object]]:
    """An optimiser's tensors, named `<parameter index>.<entry>`, such as `3.exp_avg`, and its options as data."""
    state = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    for index, entries in state["state"].items():
        for name, value in entries.items():
            assert isinstance(value, Tensor), f"optimiser entry {name} is not a tensor"
            tensors[f"{index}.{name}"] = value
    return tensors, {"param_groups": state["param_groups"]}


def restore_optimizer(optimizer: Optimizer, tensors: Tensors, state: Mapping[str, object]) -> None:
    """Load a saved optimiser state; its tensors are copied."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # Counters such as Adam's `step` are scalars; every other entry has the shape of its parameter.
    expected = {
        name: parameters[int(name.split(".")[0])].shape if each.ndim else each.shape
        for name, each in described(tensors).items()
        if int(name.split(".")[0]) < len(parameters)
    }
    refuse_mismatch("the optimiser", expected, tensors)
    made: dict[str, Tensor] = {}
    entries: dict[int, dict[str, Tensor]] = {}
    for name, each in described(tensors).items():
        index, entry = name.split(".")
        shaped = parameters[int(index)].detach() if each.ndim else torch.empty(())
        made[name] = torch.empty_like(shaped, dtype=each.dtype)
        entries.setdefault(int(index), {})[entry] = made[name]
    copy_into(made, tensors)
    groups = state["param_groups"]
    live = optimizer.state_dict()["param_groups"]
    if not isinstance(groups, list) or [g["params"] for g in groups] != [g["params"] for g in live]:
        raise RunError("the optimiser's parameter groups differ from the checkpoint's.  Resume with its recipe.")
    restored = [
        # Options that an earlier version did not save keep their values.
        current | {name: like(saved[name], current.get(name)) for name in saved}
        for saved, current in zip(groups, live, strict=True)
    ]
    optimizer.load_state_dict({"state": entries, "param_groups": restored})


def like(saved: object, current: object) -> object:
    """Restore a tuple, such as Adam's betas, that JSON turned into a list."""
    return tuple(saved) if isinstance(saved, list) and isinstance(current, tuple) else saved


def refuse_mismatch(owner: str, expected: Mapping[str, torch.Size], tensors: Tensors) -> None:
    """Raise RunError if names or shapes differ from the checkpoint's."""
    saved = described(tensors)
    for name in sorted({*expected, *saved}):
        here = [*expected[name]] if name in expected else "none"
        there = [*saved[name].shape] if name in saved else "none"
        if here != there:
            says = f"{owner}: `{name}` has shape {here} here and {there} in the checkpoint"
            raise RunError(f"{says}.  Resume with the recipe that made it.")
