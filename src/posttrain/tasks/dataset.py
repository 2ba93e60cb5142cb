"""A task of your own: prompts from the rows of a file or a list, rewards from your functions.

**What the prompt looks like.**  The row's prompt column: text as it stands, or messages through the model's chat
template, unless `prompt_format` has it all go through the template, or nothing.  The options put a system message
before it and the beginning of the answer behind it.

**What earns what.**  What the recipe's `rewards` say; they are given every column of the row but the prompt's.

**Which rows are trained on.**  Epoch by epoch in an order drawn anew for each, without replacement.  Held-out rows
never are: those of `held_out_path`, or a share chosen by a hash of the prompt, so that equal prompts stay together.

**Known hacks.**  They are those of your reward functions; look at what scores well, and keep rows held out.
"""

import functools
import hashlib
import heapq
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from posttrain.errors import UserError
from posttrain.options.dataset import DatasetOptions
from posttrain.records import Prompt
from posttrain.rewards.grading.function import RewardFunction
from posttrain.tasks.base import Messages, PromptRenderer, Task
from posttrain.tasks.prompt_content import prompt_content
from posttrain.tasks.rows import MEMORY, DatasetRow, read_rows, require_column, rows_of

LONG_ROWS = 64
"""Rows, of those with the most text, whose tokens are counted before a run starts."""


class DatasetTask(Task):
    """Rows of a file, or of a list given as `rows`, as the options say."""

    name = "dataset"
    reward_functions: tuple[RewardFunction, ...] = ()
    """None of its own: the recipe names them."""

    def __init__(
        self,
        options: DatasetOptions,
        renderer: PromptRenderer,
        *,
        seed: int,
        prompts_per_step: int,
        rows: Iterable[Mapping[str, object]] | None = None,
    ) -> None:
        self.options = options
        self.renderer = renderer
        self.seed = seed
        self.prompts_per_step = prompts_per_step
        everything = self.prepared(configured_rows(options) if rows is None else rows_of(rows, MEMORY))
        require_column(everything, options.prompt_column)
        apart = self.prepared(read_rows(options.held_out_path)) if options.held_out_path else None
        self.training_rows, self.held_out_rows = split(everything, apart, options)
        for row in (*self.training_rows, *self.held_out_rows):
            content(row, options)  # a fault in any row shows now, not in step 900

    def prepared(self, rows: list[DatasetRow]) -> list[DatasetRow]:
        """The rows as the task takes them."""
        return rows

    def prompts(self, step: int, draws: range) -> list[Prompt]:
        """Draws below `prompts_per_step` go through the epochs; those above are refills, from the rest of the rows."""
        size = self.prompts_per_step
        numbers = [
            row_number(draw, seed=self.seed, step=step, size=size, num_rows=len(self.training_rows)) for draw in draws
        ]
        return [self.prompt(self.training_rows[number]) for number in numbers]

    def held_out(self) -> list[Prompt]:
        """At most `held_out_size` rows that are never trained on, in the file's order."""
        return [self.prompt(row) for row in self.held_out_rows]

    def longest_prompts(self) -> list[Prompt]:
        """The training rows with the most text; how many tokens that makes is known once they are rendered."""
        sizes = [len(str(row.columns[self.options.prompt_column])) for row in self.training_rows]
        chosen = heapq.nlargest(LONG_ROWS, range(len(sizes)), key=sizes.__getitem__)
        return [self.prompt(self.training_rows[number]) for number in chosen]

    def prompt(self, row: DatasetRow) -> Prompt:
        """A row as the policy sees it."""
        columns = {name: value for name, value in row.columns.items() if name != self.options.prompt_column}
        return self.renderer.render(
            content(row, self.options), id=row.where, prefill=self.options.prefill, columns=columns
        )


def row_number(draw: int, *, seed: int, step: int, size: int, num_rows: int) -> int:
    """Which training row a draw is, in steps of `size` prompts, counted from 1: a function of its arguments."""
    if draw >= size:
        refills = refill_order(seed, step, size, num_rows)
        return refills[(draw - size) % len(refills)]
    epoch, position = divmod((step - 1) * size + draw, num_rows)
    return int(permutation(seed, "epoch", epoch, num_rows)[position])


@functools.lru_cache(maxsize=1)
def refill_order(seed: int, step: int, size: int, num_rows: int) -> list[int]:
    """Rows that can replace this step's uninformative ones: those it has not drawn, or all where it drew all."""
    drawn = {row_number(draw, seed=seed, step=step, size=size, num_rows=num_rows) for draw in range(size)}
    order: list[int] = permutation(seed, "refill", step, num_rows).tolist()
    return [row for row in order if row not in drawn] or order


@functools.lru_cache(maxsize=4)
def permutation(seed: int, purpose: str, index: int, num_rows: int) -> Int64[ndarray, " row"]:
    """The order of the rows in one epoch (or of one step's refills): a function of what it is for."""
    name = repr(("dataset", seed, purpose, index)).encode()
    key = np.frombuffer(hashlib.blake2b(name, digest_size=16).digest(), dtype="<u8").astype(np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).permutation(num_rows)


def content(row: DatasetRow, options: DatasetOptions) -> str | Messages:
    """The row's prompt as text or as messages."""
    given = row.columns[options.prompt_column]
    if not isinstance(given, str) and not (isinstance(given, list) and all(isinstance(m, Mapping) for m in given)):
        raise UserError(
            f"{row.where}: the column `{options.prompt_column}` must hold text or a list of messages, not"
            f" {str(given)[:80]!r} ({type(given).__name__})"
        )
    return prompt_content(given, options, row.where)


def configured_rows(options: DatasetOptions) -> list[DatasetRow]:
    """The rows of the options' file."""
    if not options.path:
        raise UserError("task.path is missing: name the file of rows, such as `path: rows.jsonl`")
    return read_rows(options.path)


def split(
    rows: Sequence[DatasetRow], held_out: Sequence[DatasetRow] | None, options: DatasetOptions
) -> tuple[list[DatasetRow], list[DatasetRow]]:
    """Training rows, and the held-out rows that are evaluated on; no prompt is on both sides."""
    column = options.prompt_column
    if held_out is None:
        threshold = int(options.held_out_share * 2**64)
        held_out = [row for row in rows if fingerprint(row, column) < threshold]
    else:
        require_column(held_out, column)
    apart = {fingerprint(row, column) for row in held_out}
    training = [row for row in rows if fingerprint(row, column) not in apart]
    if not training or (options.held_out_share > 0 and not held_out):
        source = options.held_out_path or f"held_out_share = {options.held_out_share}"
        raise UserError(
            f"{Path(options.path).name or MEMORY}: {source} leaves {len(training)} rows to train on and"
            f" {len(held_out)} to evaluate on, of {len(rows)}; there must be some of each. Give more different"
            " prompts, or another task.held_out_share (0 evaluates on none)."
        )
    chosen = sorted(range(len(held_out)), key=lambda index: fingerprint(held_out[index], column))
    return training, [held_out[index] for index in sorted(chosen[: options.held_out_size])]


def fingerprint(row: DatasetRow, column: str) -> int:
    """A 64-bit hash of the prompt alone, white space around it left out."""
    prompt = row.columns[column]
    text = prompt.strip() if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=str)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
