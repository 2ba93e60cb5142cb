"""What a task gives, looked at where it is asked: a mistake in one of your own is told in a message that names it."""

from collections.abc import Iterable, Mapping, Sequence

from posttrain.errors import UserError
from posttrain.records import Prompt
from posttrain.rewards.grading.function import RewardFunction, reward_function
from posttrain.tasks.base import FIRST_PROMPTS, Probe, Reading, Task


def training_prompts(task: Task, step: int, draws: range) -> list[Prompt]:
    """The task's prompts for these draws, one for each."""
    called = f"task {task.name}: prompts({step}, range({draws.start}, {draws.stop}))"
    prompts = listed_prompts(task.prompts(step, draws), called)
    if len(prompts) != len(draws):
        raise UserError(f"{called} gave {len(prompts)} prompts for {len(draws)} draws; give one for each, in order.")
    return prompts


def held_out_prompts(task: Task) -> list[Prompt]:
    """The task's held-out prompts."""
    return listed_prompts(task.held_out(), f"task {task.name}: held_out()")


def longest_prompts(task: Task) -> list[Prompt]:
    """Prompts among which the longest is likely to be."""
    if type(task).longest_prompts is Task.longest_prompts:
        return training_prompts(task, 1, range(FIRST_PROMPTS))  # what that does, and what its messages are to say
    return listed_prompts(task.longest_prompts(), f"task {task.name}: longest_prompts()")


def listed_prompts(answer: object, called: str) -> list[Prompt]:
    """The answer of a task's method as a list of prompts."""
    if not isinstance(answer, Sequence) or isinstance(answer, str):
        raise UserError(f"{called} gave {excerpt(answer)}; give a list of prompts, as renderer.render makes them.")
    for index, each in enumerate(answer):
        if not isinstance(each, Prompt):
            raise UserError(
                f"{called} gave a list with {excerpt(each)} at {index}; give prompts, as renderer.render makes them."
            )
    return list(answer)


def task_rewards(task: Task) -> tuple[RewardFunction, ...]:
    """The task's own reward functions, plain ones under their own names."""
    return as_reward_functions(task.reward_functions, f"task {task.name}: reward_functions")


def as_reward_functions(given: object, where: str) -> tuple[RewardFunction, ...]:
    """Functions, or what `reward_function` makes of one, as reward functions."""
    if not isinstance(given, Iterable) or isinstance(given, str | Mapping):
        raise UserError(f"{where} = {excerpt(given)} should be a list of functions, such as [my_reward].")
    try:
        return tuple(each if isinstance(each, RewardFunction) else reward_function(each) for each in given)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def task_probes(task: Task) -> Mapping[str, Probe]:
    """The task's probes by name."""
    probes, where = task.probes(), f"task {task.name}: probes()"
    if not isinstance(probes, Mapping):
        raise UserError(f"{where} gave {excerpt(probes)}; give a mapping of names to probes, or {{}}.")
    for name, probe in probes.items():
        if not isinstance(probe, Probe):
            raise UserError(f"{where} gave {excerpt(probe)} as {name!r}; give a posttrain.Probe.")
        readings = probe.readings.items() if isinstance(probe.readings, Mapping) else [("", probe.readings)]
        for key, reading in readings:
            if not isinstance(key, str) or not isinstance(reading, Reading):
                raise UserError(
                    f"{where}: probe {name!r} has readings = {excerpt(probe.readings)}, which should be a mapping such"
                    ' as {"my_share": posttrain.Reading("share of mine")}.'
                )
    return probes


def excerpt(value: object) -> str:
    """A value that is not what it should be, cut, with its type."""
    return "None" if value is None else f"{value!r:.60} ({type(value).__name__})"
