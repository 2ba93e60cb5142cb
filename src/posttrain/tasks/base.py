"""What a task is: where prompts come from, what is held out, and what earns reward."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from posttrain.errors import UserError
from posttrain.records import Group, Prompt
from posttrain.rewards.grading.function import RewardFunction

DRAWS_PER_STEP = 2**20
"""Room for draws within one step: draw d of step s is problem s · DRAWS_PER_STEP + d, whatever the step's size."""

FIRST_PROMPTS = 64
"""Prompts whose length stands for that of all, where a task knows no better."""

Messages = Sequence[Mapping[str, str]]
"""Chat turns, each with `role` and `content`."""


@runtime_checkable
class PromptRenderer(Protocol):
    """Turns a problem into the tokens that a model reads."""

    def render(self, content: str | Messages, *, id: str, prefill: str, columns: Mapping[str, object]) -> Prompt:
        """Plain text as it stands, or messages through the model's chat template; `prefill` begins the answer."""
        ...


@dataclass(frozen=True, slots=True)
class Reading:
    """How a number of a probe is shown."""

    label: str
    """What the end of a run and `posttrain eval` call it."""
    digits: int = 3
    """Digits after the decimal point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Something that only one task can tell of a policy, as data: evaluation runs it and reports print it.

    Without `suppressed` and `endless` it reads completions of the evaluation, the sampled ones unless it is `greedy`,
    else one completion more for each held-out problem.
    """

    readings: Mapping[str, Reading]
    """Name in summary.json -> how it is shown."""
    measure: Callable[[Sequence[Group]], Mapping[str, float]]
    """Groups of completions to a number for each of the readings."""
    suppressed: tuple[str, ...] = ()
    """Texts of one token each that may not be sampled; where one is no single token, the probe is left out."""
    endless: bool = False
    """Whether no completion may stop before the token limit."""
    greedy: bool = False
    """Whether it reads the likeliest completion of each problem in place of the sampled ones."""

    def __post_init__(self) -> None:
        if self.greedy and self.samples_anew:
            raise UserError(
                "a probe is greedy = True and has suppressed or endless too: those sample anew, and greedy reads what"
                " is there.  Use one of them."
            )

    @property
    def samples_anew(self) -> bool:
        """Whether it needs completions of its own."""
        return bool(self.suppressed) or self.endless


@runtime_checkable
class Task(Protocol):
    """Where prompts come from and what earns reward.

    A class of your own inherits this one, for what it has a default for: `Class(renderer, *, seed, **options)` where a
    recipe names it as `task: {path: FILE.py:CLASS}`, anything where it is handed over as an object.
    """

    name: str
    reward_functions: Sequence[RewardFunction] = ()
    """The task's own, which a recipe may replace; the first one judges held-out completions."""

    def prompts(self, step: int, draws: range) -> list[Prompt]:
        """The training prompts with these draw numbers: a function of (seed, step, draw).  Steps count from 1."""
        ...

    def held_out(self) -> list[Prompt]:
        """The prompts that are never trained on, the same ones for every seed."""
        ...

    def longest_prompts(self) -> list[Prompt]:
        """Training prompts among which the longest is likely to be, so that a run can refuse it before it starts."""
        return self.prompts(1, range(FIRST_PROMPTS))

    def probes(self) -> Mapping[str, Probe]:
        """What else to measure of a policy, by name; nothing unless a task says so."""
        return {}
