"""The policy that a KL term compares with, entered as a context: `with reference.entered() as policy: ...`.

A copy shares the frozen parts of a model, unless they are split over ranks.  With an adapter on a frozen model nothing
is copied: the reference is the same weights with the adapter off, or with its earlier matrices.
"""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from posttrain.errors import UserError
from posttrain.models.adapters import in_force
from posttrain.models.adapters.lora import UP
from posttrain.models.adapters.peft_layers import peft_layers
from posttrain.models.loading.construction import linear_matrices
from posttrain.models.loading.model_folder import load_beside
from posttrain.models.policy import Policy
from posttrain.models.rendering import TokenizerRenderer
from posttrain.models.sharding import parted_copy, sharded_forward, whole
from posttrain.options.algorithm import PLACES, TeacherOptions
from posttrain.records import Grades, Group, Prompt
from posttrain.runs.tensor_state import Tensors, module_tensors, refuse_mismatch, restore_module, shapes

SAME_FAMILY = "Use a model of the policy's family, with its tokenizer."


@runtime_checkable
class Reference(Protocol):
    """A policy to compare with."""

    def entered(self) -> AbstractContextManager[Policy]: ...

    def tensors(self) -> Tensors: ...

    def restore(self, tensors: Tensors) -> None: ...


class FrozenCopy:
    """A copy of the policy that shares its frozen parameters; for a sharded policy, only its 4-bit layers are shared.

    Matrices of linear layers are stored in the type of their products, which round to it anyway, so the numbers are the
    same.  In the model's own forward pass a layer may differ, so all are copied unchanged.
    """

    def __init__(self, policy: Policy) -> None:
        self.trained = tuple(module_tensors(policy.model))
        rounded: list[Tensor] = []
        if not policy.forward.padded:
            rounded = [each for each in linear_matrices(policy.model) if each.requires_grad]
        if sharded_forward(policy) is not None:
            self.policy = parted_copy(policy, {id(each): policy.compute_dtype for each in rounded}, trained=False)
            return
        copies = {id(each): each for each in policy.model.parameters() if not each.requires_grad}
        copies |= {id(each): nn.Parameter(each.detach().to(policy.compute_dtype, copy=True)) for each in rounded}
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
        matrices = {name: whole(each) for name, each in in_force.adapter_tensors(policy.model).items()}
        is_base = all(not bool(each.any()) for name, each in matrices.items() if f".{UP}" in name)
        self.kept: Mapping[str, Tensor] | None = None if is_base else {n: each.clone() for n, each in matrices.items()}
        """The earlier matrices; None if the adapter is off."""
        if not is_base and sharded_forward(policy) is not None and peft_layers(policy.model):
            raise UserError(
                "reference: earlier matrices of an adapter in PEFT's layers cannot replace sharded ones.  Give the"
                " adapter's folder as model.path, or use one rank."
            )

    @contextmanager
    def entered(self) -> Iterator[Policy]:
        model = self.policy.model
        with in_force.adapter_off(model) if self.kept is None else in_force.adapter_as(model, self.kept):
            yield self.policy

    def tensors(self) -> Tensors:
        return self.kept or {}

    def restore(self, tensors: Tensors) -> None:
        matrices = in_force.adapter_tensors(self.policy.model)
        if tensors:
            refuse_mismatch("the reference's adapter", shapes(matrices), tensors)
        kept = {n: each.to(matrices[n].device, matrices[n].dtype, copy=True) for n, each in tensors.items()}
        self.kept = kept or None


class UncopiedPolicy:
    """A policy without changes: another model, or the trained one."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    @contextmanager
    def entered(self) -> Iterator[Policy]:
        with in_force.without_dropout(self.policy.model):
            yield self.policy

    def tensors(self) -> Tensors:
        return {}

    def restore(self, tensors: Tensors) -> None:
        """There is nothing to restore."""


def reference_of(policy: Policy) -> Reference:
    """A snapshot of the policy, which later updates do not change; collective if it is sharded."""
    return EarlierAdapter(policy) if in_force.trains_adapter_alone(policy.model) else FrozenCopy(policy)


def refreshed(reference: Reference, policy: Policy) -> Reference:
    """The current policy as the reference; an existing copy is overwritten in place."""
    if not isinstance(reference, FrozenCopy):
        return reference_of(policy)
    reference.restore(module_tensors(policy.model, reference.trained))
    return reference


def named_reference(path: str, policy: Policy) -> Reference:
    other = load_beside(policy, path, option="reference.path")
    require_same_vocabulary(policy, other, f"reference.path = {path}")
    return UncopiedPolicy(other)


def require_same_vocabulary(policy: Policy, other: Policy, where: str) -> None:
    require_same_tokens(policy, other, where)
    rows = [each.num_logits for each in (policy, other)]
    if rows[0] != rows[1]:
        raise UserError(f"{where}: its output layer has {rows[1]} rows, but the policy's has {rows[0]}.  {SAME_FAMILY}")


def require_same_tokens(policy: Policy, other: Policy, where: str) -> None:
    """Reject a model whose vocabulary differs from the policy's."""
    mine, theirs = policy.tokenizer.get_vocab(), other.tokenizer.get_vocab()
    differing = sorted(text for text in mine.keys() | theirs.keys() if mine.get(text) != theirs.get(text))
    if differing:
        first, numbers = differing[0], ", ".join(str(each.get(differing[0], "none")) for each in (mine, theirs))
        raise UserError(
            f"{where}: its vocabulary differs from the policy's: {len(differing)} tokens differ, such as {first!r} ("
            f"number {numbers}).  {SAME_FAMILY}"
        )


Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TeacherPrompts:
    """The prompt of each completion as the teacher sees it, group by group."""

    tokens: Sequence[Sequence[Tokens]]
    shown_share: float
    """Share of the completions whose teacher sees more than the student."""


class PrivilegedPrompts:
    """Writes the teacher's prompts; the student's own if there is nothing to add, or no room for it."""

    def __init__(self, options: TeacherOptions, renderer: TokenizerRenderer, *, max_positions: int) -> None:
        self.options, self.renderer, self.max_positions = options, renderer, max_positions

    def of(self, groups: Sequence[Group], grades: Grades) -> TeacherPrompts:
        """The prompt of each completion."""
        tokens: list[list[Tokens]] = []
        for group, rewards in zip(groups, grades.rewards.tolist(), strict=True):
            tokens.append([])
            written: dict[str, Tokens] = {}
            for index, rollout in enumerate(group.rollouts):
                prompt, shown = group.prompt.tokens, self._shown(group, rewards, index)
                if shown is not None:
                    if shown not in written:
                        written[shown] = self.written(group.prompt, shown)
                    if len(written[shown]) + len(rollout.tokens) <= self.max_positions:
                        prompt = written[shown]
                tokens[-1].append(prompt)
        differ = [each != group.prompt.tokens for group, some in zip(groups, tokens, strict=True) for each in some]
        return TeacherPrompts(tokens, sum(differ) / len(differ))

    def _shown(self, group: Group, rewards: Sequence[float], index: int) -> str | None:
        """The text added for this completion: its row's answer, or its shortest correct sibling."""
        if self.options.sees == "answer":
            column, columns = self.options.answer_column, group.prompt.columns
            if column not in columns:
                raise UserError(
                    f"algorithm.teacher.answer_column = {column}: prompt {group.prompt.id} does not have it (it has"
                    f" {', '.join(map(str, columns)) or 'none'}).  Name one of them, or use sees = sibling."
                )
            return str(columns[column])
        right = [
            rollout
            for other, (rollout, reward) in enumerate(zip(group.rollouts, rewards, strict=True))
            if other != index and reward >= self.options.correct_from  # false for NaN, a missing reward
        ]
        return group.graded_text(min(right, key=lambda rollout: len(rollout.tokens))) if right else None

    def written(self, prompt: Prompt, shown: str) -> Tokens:
        """The teacher's prompt: the template around the student's last message, by the student's chat template."""
        content: str | list[dict[str, str]]
        if prompt.messages is None:
            content = filled_template(self.options.template, prompt.text.removesuffix(prompt.prefill), shown)
        else:
            content = [dict(message) for message in prompt.messages]
            last = max((i for i, each in enumerate(content) if each["role"] == "user"), default=None)
            if last is None:
                raise UserError(f"prompt {prompt.id}: there is no user message for the teacher's text.  Add one.")
            content[last]["content"] = filled_template(self.options.template, content[last]["content"], shown)
        return self.renderer.render(content, id=prompt.id, prefill=prompt.prefill).tokens


def filled_template(template: str, prompt: str, shown: str) -> str:
    """The template with both texts filled in, even if they contain a placeholder's name."""
    texts = dict(zip(PLACES, (prompt, shown), strict=True))
    return re.sub("|".join(map(re.escape, PLACES)), lambda place: texts[place.group()], template)


class Teacher:
    """The policy whose log-probs a student learns."""

    def __init__(self, reference: Reference, prompts: PrivilegedPrompts | None) -> None:
        """Without `prompts` the teacher sees the student's."""
        self.reference, self._prompts = reference, prompts

    def entered(self) -> AbstractContextManager[Policy]:
        return self.reference.entered()

    def prompts(self, groups: Sequence[Group], grades: Grades) -> TeacherPrompts | None:
        return None if self._prompts is None else self._prompts.of(groups, grades)


def teacher_of(policy: Policy, options: TeacherOptions, template_options: Mapping[str, object]) -> Teacher:
    """The teacher of this student.  Raises UserError if another model has a different vocabulary."""
    if options.model:
        model = load_beside(policy, options.model, option="algorithm.teacher.model")
        require_same_vocabulary(policy, model, f"algorithm.teacher.model = {options.model}")
        reference: Reference = UncopiedPolicy(model)
    else:
        model, reference = policy, reference_of(policy) if options.weights == "start" else UncopiedPolicy(policy)
    if options.sees == "prompt":
        return Teacher(reference, None)
    renderer = TokenizerRenderer(policy.tokenizer, template_options=template_options)
    return Teacher(reference, PrivilegedPrompts(options, renderer, max_positions=model.max_positions))
