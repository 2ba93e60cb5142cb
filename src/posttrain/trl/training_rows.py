"""Datasets as scripts give them: of `datasets`, lists of dicts, or anything that gives rows one after the other."""

from collections.abc import Iterable, Mapping, Sequence, Sized
from itertools import islice

from posttrain.errors import UserError
from posttrain.models.policy import Policy
from posttrain.models.rendering import renderer_of
from posttrain.options.dataset import DatasetOptions
from posttrain.tasks.dataset import DatasetTask

Row = Mapping[str, object]
Dataset = Iterable[Row]


def rows_of_dataset(given: object, name: str, *, most: int | None) -> list[Row]:
    """The rows; of what has no length, such as a stream, as many as a run can draw."""
    if isinstance(given, Mapping):
        raise UserError(
            f"{name}: a {type(given).__name__} of {', '.join(map(str, given))} is given.  Give one of them, such as"
            f" {name}=data[{next(iter(given))!r}]."
        )
    if not isinstance(given, Iterable) or isinstance(given, str):
        raise UserError(
            f"{name}: {given!r:.60} ({type(given).__name__}) is given.  Give a datasets.Dataset, a list of dicts, or"
            " another iterable of rows."
        )
    if not isinstance(given, Sized) and most is None:
        if name == "eval_dataset":
            raise UserError(
                f"{name}: it has no length, as a stream has none, and an evaluation measures all of it.  Give a list"
                " of rows, such as list(data.take(100))."
            )
        raise UserError(f"{name}: it has no length, so max_steps has to say when the run ends.")
    rows = list(given) if isinstance(given, Sized) else list(islice(given, most))
    if not rows:
        raise UserError(f"{name}: it is empty.  Give at least one row.")
    other = next((row for row in rows if not isinstance(row, Mapping)), None)
    if other is not None:
        raise UserError(f"{name}: {other!r:.60} ({type(other).__name__}) is not a row.  Give dicts of columns.")
    return rows


def require_prompts(rows: Sequence[Row], name: str) -> None:
    """Refuse a row without the column `prompt`, unless all rows have their prompts in `messages` or in preferences."""
    columns = {column for row in rows for column in row}
    if "prompt" not in columns and ("messages" in columns or {"chosen", "rejected"} <= columns):
        return
    for number, row in enumerate(rows):
        if row.get("prompt") in (None, "", []):
            there = ", ".join(row) or "no columns"
            raise UserError(
                f"{name}: row {number}: the column `prompt` is {'empty' if 'prompt' in row else 'missing'}; it has"
                f" {there}.  Give every row a prompt, such as by {name}.rename_column('question', 'prompt')."
            )


def rows_task(
    rows: Sequence[Row], options: DatasetOptions, policy: Policy, template: Mapping[str, object]
) -> DatasetTask:
    """The rows as a task, none of them held out."""
    return DatasetTask(
        options,
        renderer_of(policy, template),
        seed=0,
        prompts_per_step=1,
        rows=rows,
    )


def longest_prompt(rows: Sequence[Row], options: DatasetOptions, policy: Policy, template: Mapping[str, object]) -> int:
    """Tokens of the longest prompt, as far as the longest texts tell."""
    return max(len(prompt.tokens) for prompt in rows_task(rows, options, policy, template).longest_prompts())
