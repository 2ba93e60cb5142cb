"""What a task is: where prompts come from, what is held out, and what earns reward."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from posttrain.records import Group, Prompt
from posttrain.rewards.grading.function import RewardFunction

DRAWS_PER_STEP = 2**20
"""Room for draws within one step: draw d of step s is problem s · DRAWS_PER_STEP + d, whatever the step's size."""

Messages = Sequence[Mapping[str, str]]
"""Chat turns, each with `role` and `content`."""


@runtime_checkable
class PromptRenderer(Protocol):
    """Turns a problem into the tokens that a model reads."""

    def render(self, content: str | Messages, *, id: str, prefill: str, columns: Mapping[str, object]) -> Prompt:
        """Plain text as it stands, or messages through the model's chat template; `prefill` begins the answer."""
        ...


@runtime_checkable
class Task(Protocol):
    """Where prompts come from and what earns reward.  Made from (options, renderer, seed=)."""

    name: str
    reward_functions: tuple[RewardFunction, ...]
    """The task's own, which a recipe may replace."""
    closing_tags: tuple[str, ...]
    """Tokens with which a completion ends its search; without them it cannot give up.  Empty: no such notion."""

    def prompts(self, step: int, draws: range) -> list[Prompt]:
        """The training prompts with these draw numbers: a function of (seed, step, draw)."""
        ...

    def held_out(self) -> list[Prompt]:
        """The prompts that are never trained on, the same ones for every seed."""
        ...

    def longest_prompts(self) -> list[Prompt]:
        """Training prompts among which the longest is likely to be, so that a run can refuse it before it starts."""
        ...

    def statistics(self, groups: Sequence[Group]) -> dict[str, float]:
        """What the task can tell of completions besides their scores."""
        ...

    def found(self, prompt: Prompt, completion: str) -> bool:
        """Whether a completion comes upon a solution at any point; only asked where there are closing tags."""
        ...
