"""A teacher: a second policy, entered as a reference is, whose prompt may hold an answer hidden from the student."""

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from posttrain.errors import UserError
from posttrain.models.loading.model_folder import load_beside
from posttrain.models.policy import Policy
from posttrain.models.rendering import TokenizerRenderer
from posttrain.options.teacher import PLACES, TeacherOptions
from posttrain.records import Grades, Group, Prompt
from posttrain.training.reference import Reference, UncopiedPolicy, reference_of, require_same_vocabulary

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TeacherPrompts:
    """The prompt of each completion as the teacher sees it, group by group."""

    tokens: Sequence[Sequence[Tokens]]
    shown_share: float
    """Share of the completions whose teacher sees more than the student."""


class PrivilegedPrompts:
    """Writes the teacher's prompts; the student's own where there is nothing to add, or no room for it."""

    def __init__(self, options: TeacherOptions, renderer: TokenizerRenderer, *, max_positions: int) -> None:
        self.options, self.renderer, self.max_positions = options, renderer, max_positions

    def of(self, groups: Sequence[Group], grades: Grades) -> TeacherPrompts:
        tokens = [
            self._of_group(group, rewards) for group, rewards in zip(groups, grades.rewards.tolist(), strict=True)
        ]
        differ = [each != group.prompt.tokens for group, some in zip(groups, tokens, strict=True) for each in some]
        return TeacherPrompts(tokens, sum(differ) / len(differ))

    def _of_group(self, group: Group, rewards: Sequence[float]) -> list[Tokens]:
        written: dict[str, Tokens] = {}
        prompts: list[Tokens] = []
        for index, rollout in enumerate(group.rollouts):
            prompt, shown = group.prompt.tokens, self._shown(group, rewards, index)
            if shown is not None:
                if shown not in written:
                    written[shown] = self.written(group.prompt, shown)
                if len(written[shown]) + len(rollout.tokens) <= self.max_positions:
                    prompt = written[shown]
            prompts.append(prompt)
        return prompts

    def _shown(self, group: Group, rewards: Sequence[float], index: int) -> str | None:
        """The text added for this completion: its row's answer, or its shortest correct sibling."""
        if self.options.sees == "answer":
            return answer_of(group.prompt, self.options.answer_column)
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
            content = filled(self.options.template, prompt.text.removesuffix(prompt.prefill), shown)
        else:
            content = [dict(message) for message in prompt.messages]
            last = max((i for i, each in enumerate(content) if each["role"] == "user"), default=None)
            if last is None:
                raise UserError(f"prompt {prompt.id}: no message of the user's to put the teacher's text in.  Add one.")
            content[last]["content"] = filled(self.options.template, content[last]["content"], shown)
        return self.renderer.render(content, id=prompt.id, prefill=prompt.prefill).tokens


def filled(template: str, prompt: str, shown: str) -> str:
    """The template with both texts in their places, even if they contain a place's name."""
    texts = dict(zip(PLACES, (prompt, shown), strict=True))
    return re.sub("|".join(map(re.escape, PLACES)), lambda place: texts[place.group()], template)


def answer_of(prompt: Prompt, column: str) -> str:
    if column not in prompt.columns:
        raise UserError(
            f"algorithm.teacher.answer_column = {column}: prompt {prompt.id} has no such column (it has"
            f" {', '.join(map(str, prompt.columns)) or 'none'}).  Name one of them, or use sees = sibling."
        )
    return str(prompt.columns[column])


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
    """The teacher of this student.  Raises UserError where another model has another vocabulary."""
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
