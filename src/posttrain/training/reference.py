"""The policy that a KL term compares with: entered as a context, it yields a policy, and costs what it must.

    with reference.entered() as policy: ...

Of a model with frozen parts the copy shares them; of an adapter over a frozen model there is no copy of the model at
all: the reference is the same weights with the adapter off, or with the matrices that it had.
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
from posttrain.models.loading.tokenizer_folder import load_beside
from posttrain.models.policy import Policy
from posttrain.runs.tensor_state import Tensors, module_tensors, refuse_mismatch, restore_module, shapes

SAME_FAMILY = "What it says is of its own tokens: use a model of the policy's family, with its tokenizer."


@runtime_checkable
class Reference(Protocol):
    """What a KL compares with."""

    def entered(self) -> AbstractContextManager[Policy]: ...

    def tensors(self) -> Tensors: ...

    def restore(self, tensors: Tensors) -> None: ...


class FrozenCopy:
    """The policy as it was when this was made; parameters that are not trained are the policy's own.

    Matrices of linear layers are held in the type of their products, which rounds them to it anyway, so the numbers are
    those of a whole copy.  In the model's own forward pass a layer may do otherwise, and all are held as they are.
    """

    def __init__(self, policy: Policy) -> None:
        # What is not trained does not change, so that one copy of it does for both.
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
    """The policy's own model with the adapter off, or as it was: nothing but that adapter is kept.

    An adapter is as good as off where all its B are zero, as they are where training starts from the base.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        matrices = adapter_tensors(policy.model)
        is_base = all(not bool(each.any()) for name, each in matrices.items() if f".{UP}" in name)
        self.kept: Mapping[str, Tensor] | None = None if is_base else {n: each.clone() for n, each in matrices.items()}
        """The matrices of then; None where the adapter is off."""

    @contextmanager
    def entered(self) -> Iterator[Policy]:
        model = self.policy.model
        with adapter_off(model) if self.kept is None else adapter_as(model, self.kept):
            yield self.policy

    def tensors(self) -> Tensors:
        return self.kept or {}

    def restore(self, tensors: Tensors) -> None:
        own = adapter_tensors(self.policy.model)
        if tensors:
            refuse_mismatch("the reference's adapter", shapes(own), tensors)
        self.kept = {name: each.to(own[name], copy=True) for name, each in tensors.items()} if tensors else None


class UncopiedPolicy:
    """A policy that is entered as it is then: another model, which never changes, or the one that is trained."""

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
    """Refuse another model that reads one of the policy's tokens as another text, or not at all."""
    mine, theirs = policy.tokenizer.get_vocab(), other.tokenizer.get_vocab()
    differing = sorted(text for text in mine.keys() | theirs.keys() if mine.get(text) != theirs.get(text))
    if differing:
        numbers = ", ".join(
            "none" if each is None else str(each) for each in (mine.get(differing[0]), theirs.get(differing[0]))
        )
        raise UserError(
            f"{where}: its vocabulary is not the policy's: {len(differing)} tokens differ,"
            f" such as {differing[0]!r} (number {numbers}).  {SAME_FAMILY}"
        )
