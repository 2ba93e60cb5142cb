"""The task of a session: the caller's, or that of the config."""

from dataclasses import replace

from posttrain.config import Config
from posttrain.errors import UserError
from posttrain.models.rendering import TokenizerRenderer
from posttrain.options.dataset import DatasetOptions
from posttrain.tasks.base import Task
from posttrain.tasks.dataset import Rows
from posttrain.tasks.task_registry import load_task, require_task


def task_of(
    config: Config,
    renderer: TokenizerRenderer,
    *,
    given: Task | None,
    rows: Rows | None,
    held_out_rows: Rows | None,
    context: int,
) -> Task:
    """The caller's task, or that of the config; long prompts that are skipped or cut leave room for a completion.

    The rows replace those of the config, and `context` is the model's.
    """
    if given is not None:
        for name, each in (("rows", rows), ("held_out_rows", held_out_rows)):
            if each is not None:
                raise UserError(f"{name}: a task is given as well, which makes its own prompts.  Give one of them.")
        return require_task(given, "task")
    task = config.task
    if isinstance(task, DatasetOptions) and task.over_long != "error" and task.max_prompt_tokens is None:
        completion = config.rollout.max_completion_tokens
        left = min(context, config.update.tokens_per_microbatch) - completion
        if left < 1:
            raise UserError(
                f"task.over_long = {task.over_long}: rollout.max_completion_tokens = {completion} leaves no prompt any"
                f" room in the model's context of {context}.  Lower it, or set task.max_prompt_tokens."
            )
        task = replace(task, max_prompt_tokens=left)
    return load_task(
        task,
        renderer,
        seed=config.run.seed,
        prompts_per_step=config.rollout.prompts_per_step,
        rows=rows,
        held_out_rows=held_out_rows,
    )
