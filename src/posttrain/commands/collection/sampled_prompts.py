"""What was sampled, as the journal of completions keeps it: a line for each prompt, with what the rewards said."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from posttrain.records import Finish, Grades, Group, Prompt

Messages = tuple[Mapping[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledCompletion:
    """One completion, as text."""

    sample: int
    text: str
    """As rewards read it: what was prefilled, and what was sampled without its stop token."""
    finish: Finish
    num_tokens: int
    reward: float | None = None
    """The weighted sum of the scores; None where none applies, or none was asked for."""
    scores: Mapping[str, float | None] | None = None
    """By reward function; None where none was asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledPrompt:
    """A prompt with its completions."""

    draw: int
    """Number of the prompt within its round."""
    prompt_id: str
    prompt: str | Messages
    """As rows of data have it: text, or the messages of a conversation; without the beginning of the answer."""
    completions: tuple[SampledCompletion, ...]

    @property
    def question(self) -> str:
        """The prompt for a judge or a person to read."""
        if isinstance(self.prompt, str):
            return self.prompt
        if len(self.prompt) == 1:
            return self.prompt[0]["content"]
        return "\n\n".join(f"{message['role']}: {message['content']}" for message in self.prompt)

    def by_sample(self, sample: int) -> SampledCompletion:
        """The completion of this number."""
        return next(each for each in self.completions if each.sample == sample)

    def as_record(self) -> dict[str, Any]:
        """Plain data for the journal."""
        return asdict(self)


def sampled_prompt(record: Mapping[str, Any]) -> SampledPrompt:
    """What `as_record` wrote."""
    made = [SampledCompletion(**{**each, "finish": Finish(each["finish"])}) for each in record["completions"]]
    prompt = record["prompt"] if isinstance(record["prompt"], str) else tuple(record["prompt"])
    return SampledPrompt(**{**record, "prompt": prompt, "completions": tuple(made)})


def sampled_prompts(groups: Sequence[Group], grades: Grades | None) -> list[SampledPrompt]:
    """Groups with what the rewards said of them, if they were asked."""
    return [
        SampledPrompt(
            draw=group.draw,
            prompt_id=group.prompt.id,
            prompt=dataset_prompt(group.prompt),
            completions=tuple(
                SampledCompletion(
                    sample=rollout.sample,
                    text=group.graded_text(rollout),
                    finish=rollout.finish,
                    num_tokens=rollout.num_sampled,
                    reward=None if grades is None else score_or_none(grades.rewards[row, column].item()),
                    scores=None if grades is None else scores_of(grades, row, column),
                )
                for column, rollout in enumerate(group.rollouts)
            ),
        )
        for row, group in enumerate(groups)
    ]


def dataset_prompt(prompt: Prompt) -> str | Messages:
    """The messages behind a prompt, or its text without the beginning of the answer."""
    return prompt.text.removesuffix(prompt.prefill) if prompt.messages is None else prompt.messages


def scores_of(grades: Grades, row: int, column: int) -> dict[str, float | None]:
    """Each function's score of a completion."""
    return {name: score_or_none(grades.scores[place, row, column].item()) for place, name in enumerate(grades.names)}


def score_or_none(score: float) -> float | None:
    """A score, or None where there is none."""
    return None if math.isnan(score) else score
