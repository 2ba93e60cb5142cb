"""The policy that a KL term compares with, entered as a context: `with reference.entered() as policy: ...`.

A copy shares the frozen parts of a model.  With an adapter over a frozen model nothing is copied: the reference is the
same weights with the adapter off, or with its earlier matrices.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from posttrain.errors import UserError
from posttrain.models.adapters.in_force import (
    adapter_as,
    adapter_off,
    adapter_tensors,
    trains_adapter_alone,
    without_dropout,
)
from posttrain.models.adapters.lora import UP
from posttrain.models.loading.construction import linear_matrices
from posttrain.models.loading.model_folder import load_beside
from posttrain.models.policy import Policy
from posttrain.runs.tensor_state import Tensors, module_tensors, refuse_mismatch, restore_module, shapes

SAME_FAMILY = "Use a model of the policy's family, with its tokenizer."


@runtime_checkable
class Reference(Protocol):
    """A policy to compare with."""

    def entered(self) -> AbstractContextManager[Policy]: ...

    def tensors(self) -> Tensors: ...

    def restore(self, tensors: Tensors) -> None: ...


class FrozenCopy:
    """A copy of the policy that shares the parameters that are not trained.

    Matrices of linear layers are held in the type of their products, which round them to it anyway, so the numbers are
    the same.  In the model's own forward pass a layer may do otherwise, and all are copied unchanged.
    """

    def __init__(self, policy: Policy) -> None:
        copies = {id(each): each for each in policy.model.parameters() if not each.requires_grad}
        if not policy.forward.padded:
            rounded = [each for each in linear_matrices(policy.model) if each.requires_grad]
            copies |= {id(each): nn.Parameter(each.detach().to(policy.compute_dtype, copy=True)) for each in rounded}
        self.trained = tuple(module_tensors(policy.model))
        model, forward = copy.deepcopy((policy.model, policy.forward), copies)
        self.policy = replace(policy, model=model, forward=forward)
        model.requires_grad_(False)

    @contextmanager
    def entered(self) -> Iterator[Policy]:
        yield self.policy

    def tensors(self) -> Tensors:
        return module_tensors(self.policy.model, self.trained)

    def restore(self, tensors: Tensors) -> None:
        restore_module(self.policy.model, tensors, self.trained)


class EarlierAdapter:
    """The policy's model with the adapter off, or with its earlier matrices.

    If all B are zero, as in training from the base, the adapter is off.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        matrices = adapter_tensors(policy.model)
        is_base = all(not bool(each.any()) for name, each in matrices.items() if f".{UP}" in name)
        self.kept: Mapping[str, Tensor] | None = None if is_base else {n: each.clone() for n, each in matrices.items()}
        """The earlier matrices; None if the adapter is off."""

    @contextmanager
    def entered(self) -> Iterator[Policy]:
        model = self.policy.model
        with adapter_off(model) if self.kept is None else adapter_as(model, self.kept):
            yield self.policy

    def tensors(self) -> Tensors:
        return self.kept or {}

    def restore(self, tensors: Tensors) -> None:
        matrices = adapter_tensors(self.policy.model)
        if tensors:
            refuse_mismatch("the reference's adapter", shapes(matrices), tensors)
        self.kept = {name: each.to(matrices[name], copy=True) for name, each in tensors.items()} if tensors else None


class UncopiedPolicy:
    """The policy itself, unchanged: another model, or the one that is trained."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    @contextmanager
    def entered(self) -> Iterator[Policy]:
        with without_dropout(self.policy.model):
            yield self.policy

    def tensors(self) -> Tensors:
        return {}

    def restore(self, tensors: Tensors) -> None:
        """There is nothing to restore."""


def reference_of(policy: Policy) -> Reference:
    return EarlierAdapter(policy) if trains_adapter_alone(policy.model) else FrozenCopy(policy)


def named_reference(path: str, policy: Policy) -> Reference:
    other = load_beside(policy, path, option="reference.path")
    require_same_vocabulary(policy, other, f"reference.path = {path}")
    return UncopiedPolicy(other)


def require_same_vocabulary(policy: Policy, other: Policy, where: str) -> None:
    require_same_tokens(policy, other, where)
    rows = [each.num_logits for each in (policy, other)]
    if rows[0] != rows[1]:
        raise UserError(f"{where}: its output layer has {rows[1]} rows, and the policy's {rows[0]}.  {SAME_FAMILY}")


def require_same_tokens(policy: Policy, other: Policy, where: str) -> None:
    """Refuse a model with another vocabulary than the policy's."""
    mine, theirs = policy.tokenizer.get_vocab(), other.tokenizer.get_vocab()
    differing = sorted(text for text in mine.keys() | theirs.keys() if mine.get(text) != theirs.get(text))
    if differing:
        first, numbers = differing[0], ", ".join(str(each.get(differing[0], "none")) for each in (mine, theirs))
        raise UserError(
            f"{where}: its vocabulary is not the policy's: {len(differing)} tokens differ, such as {first!r} (number"
            f" {numbers}).  {SAME_FAMILY}"
        )
