"""What a teacher goes on from: the student's prompt, and beside it an answer or a right sibling that only it sees."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.errors import UserError
from posttrain.models.rendering import TokenizerRenderer
from posttrain.options.teacher import PLACES, TeacherOptions
from posttrain.records import Grades, Group, Prompt

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TeacherPrompts:
    """The prompt of each completion as the teacher sees it, group by group."""

    tokens: Sequence[Sequence[Tokens]]
    shown_share: float
    """Share of the completions whose teacher sees more than the student."""


class PrivilegedPrompts:
    """Writes the teacher's prompts."""

    def __init__(self, options: TeacherOptions, renderer: TokenizerRenderer, *, max_positions: int) -> None:
        """`max_positions` is the teacher's context, in tokens."""
        self.options, self.renderer, self.max_positions = options, renderer, max_positions

    def of(self, groups: Sequence[Group], grades: Grades) -> TeacherPrompts:
        """Those of all completions; that of the student where there is nothing to show, or no room for it."""
        tokens = [
            self._of_group(group, rewards) for group, rewards in zip(groups, grades.rewards.tolist(), strict=True)
        ]
        num_shown = sum(each != group.prompt.tokens for group, own in zip(groups, tokens, strict=True) for each in own)
        return TeacherPrompts(tokens, num_shown / sum(len(own) for own in tokens))

    def _of_group(self, group: Group, rewards: Sequence[float]) -> list[Tokens]:
        written: dict[str, Tokens] = {}
        prompts: list[Tokens] = []
        for index, rollout in enumerate(group.rollouts):
            shown = self._shown(group, rewards, index)
            if shown is None:
                prompts.append(group.prompt.tokens)
                continue
            if shown not in written:
                written[shown] = self.written(group.prompt, shown)
            fits = len(written[shown]) + len(rollout.tokens) <= self.max_positions
            prompts.append(written[shown] if fits else group.prompt.tokens)
        return prompts

    def _shown(self, group: Group, rewards: Sequence[float], index: int) -> str | None:
        """What the teacher of this completion sees beside the prompt; None where there is nothing."""
        if self.options.sees == "answer":
            return answer_of(group.prompt, self.options.answer_column)
        right = [
            rollout
            for other, (rollout, reward) in enumerate(zip(group.rollouts, rewards, strict=True))
            if other != index and reward >= self.options.correct_from  # a reward of NaN is none
        ]
        return group.graded_text(min(right, key=lambda rollout: len(rollout.tokens))) if right else None

    def written(self, prompt: Prompt, shown: str) -> Tokens:
        """The tokens of the teacher's prompt: the template around the student's, by the student's chat template."""
        content: str | list[dict[str, str]]
        if prompt.messages is None:
            content = filled(self.options.template, prompt.text.removesuffix(prompt.prefill), shown)
        else:
            content = [dict(message) for message in prompt.messages]
            last = max((i for i, each in enumerate(content) if each["role"] == "user"), default=None)
            if last is None:
                raise UserError(f"prompt {prompt.id}: no message of the user's that a teacher could be shown more in.")
            content[last]["content"] = filled(self.options.template, content[last]["content"], shown)
        return self.renderer.render(content, id=prompt.id, prefill=prompt.prefill).tokens


def filled(template: str, prompt: str, shown: str) -> str:
    """The template with both in their places, whatever they look like themselves."""
    texts = dict(zip(PLACES, (prompt, shown), strict=True))
    return re.sub("|".join(map(re.escape, PLACES)), lambda place: texts[place.group()], template)


def answer_of(prompt: Prompt, column: str) -> str:
    """The answer in a column of the prompt's row."""
    if column not in prompt.columns:
        raise UserError(
            f"algorithm.teacher.answer_column = {column}: prompt {prompt.id} has no such column (it has"
            f" {', '.join(map(str, prompt.columns)) or 'none'}).  Name one of them, or use sees = sibling."
        )
    return str(prompt.columns[column])
