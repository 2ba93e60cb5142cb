"""From a recipe's `task` section to a task."""

from collections.abc import Mapping

from typing_extensions import get_protocol_members

from posttrain.binding import build_own
from posttrain.errors import UserError
from posttrain.options.dataset import DatasetOptions, GeneratedOptions, ProgramsOptions
from posttrain.options.task import ArithmeticOptions, CountdownOptions, SentencesOptions, TaskOptions
from posttrain.tasks.arithmetic_task import ArithmeticTask
from posttrain.tasks.base import PromptRenderer, Task
from posttrain.tasks.countdown_task import CountdownTask
from posttrain.tasks.dataset import DatasetTask, GeneratedTask, Rows
from posttrain.tasks.programs_task import ProgramsTask
from posttrain.tasks.sentences_task import SentencesTask

WITHOUT_DEFAULT = ("prompts", "held_out")
"""What a class that inherits from Task must still define."""


def load_task(
    options: TaskOptions | Mapping[str, object],
    renderer: PromptRenderer,
    *,
    seed: int,
    prompts_per_step: int,
    rows: Rows | None = None,
    held_out_rows: Rows | None = None,
) -> Task:
    """The task that the options describe; rows from a Python caller replace the files of a dataset.

    The options of a user's task are a mapping: `path`, FILE.py:CLASS, and the options of the class.
    """
    given = {"rows": rows, "held_out_rows": held_out_rows}
    named = next((name for name, value in given.items() if value is not None), "")
    if named and not isinstance(options, DatasetOptions):
        kind = options["path"] if isinstance(options, Mapping) else options.name
        raise UserError(f"{named}: the task is {kind}, which makes its own prompts.  Use task.name = dataset.")
    if isinstance(options, Mapping):
        return require_task(build_own("task", options, renderer, seed=seed), f"task: {options['path']}")
    if isinstance(options, CountdownOptions):
        return CountdownTask(options, renderer, seed=seed)
    if isinstance(options, ArithmeticOptions):
        return ArithmeticTask(options, renderer, seed=seed)
    if isinstance(options, SentencesOptions):
        return SentencesTask(options, renderer)
    kinds: dict[type, type[DatasetTask]] = {ProgramsOptions: ProgramsTask, GeneratedOptions: GeneratedTask}
    kind = kinds.get(type(options), DatasetTask)
    return kind(options, renderer, seed=seed, prompts_per_step=prompts_per_step, **given)


def require_task(candidate: object, where: str) -> Task:
    """The object as a task, if it has what a task needs."""
    if isinstance(candidate, type):
        raise UserError(f"{where}: {candidate.__name__} is a class; give an object of it")
    inherited = [name for name in WITHOUT_DEFAULT if getattr(type(candidate), name, None) is getattr(Task, name)]
    if not isinstance(candidate, Task) or inherited:
        lacking = sorted({name for name in get_protocol_members(Task) if not hasattr(candidate, name)} | {*inherited})
        missing = [name for name in lacking if name in WITHOUT_DEFAULT or not hasattr(Task, name)] or lacking
        raise UserError(f"{where} lacks {', '.join(missing)}; inherit from posttrain.Task, which describes each")
    return candidate
