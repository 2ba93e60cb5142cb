"""From a recipe's `task` section to a task."""

from collections.abc import Mapping, Sequence

from posttrain.errors import UserError
from posttrain.options.countdown import CountdownOptions
from posttrain.options.dataset import ProgramsOptions
from posttrain.options.task import TaskOptions
from posttrain.tasks.base import PromptRenderer, Task
from posttrain.tasks.countdown.countdown_task import CountdownTask
from posttrain.tasks.dataset import DatasetTask
from posttrain.tasks.programs.programs_task import ProgramsTask


def load_task(
    options: TaskOptions,
    renderer: PromptRenderer,
    *,
    seed: int,
    prompts_per_step: int,
    rows: Sequence[Mapping[str, object]] | None = None,
) -> Task:
    """The task that the options describe; `rows`, given by a Python caller, stand for a dataset's file."""
    if isinstance(options, CountdownOptions):
        if rows is not None:
            raise UserError("rows: the task is countdown, which makes its own problems.  Use task.name = dataset.")
        return CountdownTask(options, renderer, seed=seed)
    if isinstance(options, ProgramsOptions):
        return ProgramsTask(options, renderer, seed=seed, prompts_per_step=prompts_per_step, rows=rows)
    return DatasetTask(options, renderer, seed=seed, prompts_per_step=prompts_per_step, rows=rows)
