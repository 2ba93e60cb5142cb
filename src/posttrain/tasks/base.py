"""What a task is: where prompts come from, what is held out, and what earns reward; and checks of a task's answers.

A mistake in a user's own task is reported where the answer is used, by the name of its method.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from posttrain.errors import UserError
from posttrain.records import Group, Prompt
from posttrain.rewards.grading.function import RewardFunction, reward_function

DRAWS_PER_STEP = 2**20
"""Most draws within one step: draw d of step s is problem s · DRAWS_PER_STEP + d, whatever the step's size."""

FIRST_PROMPTS = 64
"""Prompts among which the longest is searched for, unless the task provides `longest_prompts`."""

Messages = Sequence[Mapping[str, str]]
"""Chat turns, each with `role` and `content`."""


@runtime_checkable
class PromptRenderer(Protocol):
    """Turns a problem into the tokens that a model reads."""

    def render(self, content: str | Messages, *, id: str, prefill: str, columns: Mapping[str, object]) -> Prompt:
        """Plain text unchanged, or messages through the model's chat template; `prefill` begins the answer."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How a number of a probe is shown."""

    label: str
    """What the end of a run and `posttrain eval` call it."""
    digits: int = 3
    """Digits after the decimal point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A measure of a policy that only one task can make, as data: evaluation runs it and reports print it.

    Without `suppressed` and `endless` it reads completions of the evaluation, the sampled ones unless it is `greedy`,
    else one completion more for each held-out problem.
    """

    readings: Mapping[str, Reading]
    """Name in summary.json -> how it is shown."""
    measure: Callable[[Sequence[Group]], Mapping[str, float]]
    """Groups of completions to a number for each of the readings."""
    suppressed: tuple[str, ...] = ()
    """Texts of one token each that may not be sampled; where one is not a single token, the probe is left out."""
    endless: bool = False
    """Whether no completion may stop before the token limit."""
    greedy: bool = False
    """Whether it reads the likeliest completion of each problem in place of the sampled ones."""

    def __post_init__(self) -> None:
        if self.greedy and self.samples_anew:
            raise UserError("greedy = True reads existing completions, suppressed and endless sample new ones: use one")

    @property
    def samples_anew(self) -> bool:
        """Whether it needs new completions."""
        return bool(self.suppressed) or self.endless


@runtime_checkable
class Task(Protocol):
    """Where prompts come from and what earns reward.

    Your own class inherits from this one to get its defaults.  In a recipe (`task: {path: FILE.py:CLASS}`) it is called
    as `Class(renderer, *, seed, **options)`; an object from Python may have any constructor.
    """

    name: str
    reward_functions: Sequence[RewardFunction] = ()
    """The task's own, which a recipe may replace; the first one judges held-out completions."""
    num_rows: int = 0
    """Training rows that prompts are read from; 0 if prompts are generated."""

    def prompts(self, step: int, draws: range) -> list[Prompt]:
        """The training prompts with these draw numbers: a function of (seed, step, draw).  Steps count from 1."""

    def held_out(self) -> list[Prompt]:
        """The prompts that are never trained on, the same ones for every seed."""

    def longest_prompts(self) -> list[Prompt]:
        """Training prompts that probably include the longest, so that a run can refuse it before it starts."""
        return self.prompts(1, range(FIRST_PROMPTS))

    def probes(self) -> Mapping[str, Probe]:
        """What else to measure of a policy, by name."""
        return {}

    def notes(self) -> Sequence[str]:
        """Lines of the plan about the prompts."""
        return ()

    def rows_to_reward(self) -> Sequence[tuple[str, Mapping[str, object]]]:
        """Place and columns of each row, for rewards that check rows before training."""
        return ()


def training_prompts(task: Task, step: int, draws: range) -> list[Prompt]:
    called = f"task {task.name}: prompts({step}, range({draws.start}, {draws.stop}))"
    prompts = checked_prompts(task.prompts(step, draws), called)
    if len(prompts) != len(draws):
        raise UserError(f"{called} gave {len(prompts)} prompts for {len(draws)} draws; give one for each, in order.")
    return prompts


def held_out_prompts(task: Task) -> list[Prompt]:
    return checked_prompts(task.held_out(), f"task {task.name}: held_out()")


def longest_prompts(task: Task) -> list[Prompt]:
    """Training prompts that probably include the longest, so that a run can refuse it before it starts."""
    if type(task).longest_prompts is Task.longest_prompts:
        return training_prompts(task, 1, range(FIRST_PROMPTS))  # what that does, and what its messages are to say
    return checked_prompts(task.longest_prompts(), f"task {task.name}: longest_prompts()")


def checked_prompts(answer: object, called: str) -> list[Prompt]:
    """The answer of a task's method as a list of prompts.  Raises UserError for anything else."""
    if not isinstance(answer, Sequence) or isinstance(answer, str):
        raise UserError(f"{called} gave {shown_answer(answer)}; give a list of prompts, as renderer.render makes them.")
    for index, each in enumerate(answer):
        if not isinstance(each, Prompt):
            raise UserError(f"{called} gave {shown_answer(each)} at {index}; give prompts of renderer.render.")
    return list(answer)


def task_rewards(task: Task) -> tuple[RewardFunction, ...]:
    return as_reward_functions(task.reward_functions, f"task {task.name}: reward_functions")


def as_reward_functions(given: object, where: str) -> tuple[RewardFunction, ...]:
    if not isinstance(given, Iterable) or isinstance(given, str | Mapping):
        raise UserError(f"{where} = {shown_answer(given)} should be a list of functions, such as [my_reward].")
    try:
        return tuple(each if isinstance(each, RewardFunction) else reward_function(each) for each in given)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def task_probes(task: Task) -> Mapping[str, Probe]:
    """The task's probes by name."""
    probes, where = task.probes(), f"task {task.name}: probes()"
    if not isinstance(probes, Mapping):
        raise UserError(f"{where} gave {shown_answer(probes)}; give a mapping of names to probes, or {{}}.")
    for name, probe in probes.items():
        if not isinstance(probe, Probe):
            raise UserError(f"{where} gave {shown_answer(probe)} as {name!r}; give a posttrain.Probe.")
        given: object = probe.readings
        items = given.items() if isinstance(given, Mapping) else [(None, given)]
        if not all(isinstance(key, str) and isinstance(reading, Reading) for key, reading in items):
            raise UserError(
                f"{where}: probe {name!r} has readings = {shown_answer(given)}; give a mapping such as"
                ' {"my_share": posttrain.Reading("share of mine")}.'
            )
    return probes


def shown_answer(value: object) -> str:
    return "None" if value is None else f"{value!r:.60} ({type(value).__name__})"
