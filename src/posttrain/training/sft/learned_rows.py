"""Rows of a file or a list as examples: split, masked and counted.

All rows are tokenised before a run starts, so that a bad one is found then.  Their order in an epoch is a function of
the seed and the epoch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from posttrain.errors import UserError
from posttrain.models.conversation_masks import Masking
from posttrain.models.messages import ASSISTANT
from posttrain.options.dataset import DatasetOptions
from posttrain.options.training import SftOptions
from posttrain.records import Example
from posttrain.tasks.dataset import SOURCE, configured_rows, held_out_of, split
from posttrain.tasks.draw_order import permutation
from posttrain.tasks.row_files.row_formats import CompletionRow
from posttrain.tasks.row_files.rows import MEMORY, NO_ROWS_GIVEN, BadRows, DatasetRow, GivenRows, numbered_rows
from posttrain.training.sft.example_maker import (
    ExampleMaker,
    LearnedRow,
    PackedExample,
    TextRow,
    TokenRow,
    columns_line,
    learned_rows,
)


@dataclass(slots=True, kw_only=True)
class RowExamples:
    """Examples by number, epoch after epoch."""

    seed: int
    trained: Sequence[PackedExample]
    apart: Sequence[PackedExample]
    """Held-out ones."""
    maker: ExampleMaker
    """Holds the counts of rows that were cut, left out or empty."""
    format: str
    """The columns that are read, and those that are not, for the plan."""

    def row(self, index: int) -> int:
        epoch, place = divmod(index, len(self.trained))
        return int(permutation(self.seed, "sft", epoch, len(self.trained))[place])

    def batch(self, first: int, options: SftOptions) -> list[Example]:
        return [self.trained[number].unpacked() for number in self.batch_rows(first, options)]

    def batch_rows(self, first: int, options: SftOptions) -> list[int]:
        """The numbers of the rows of a batch."""
        most = options.rows_per_batch or len(self.trained)
        if options.num_epochs is not None:
            most = min(most, self.num_rows(options.num_epochs) - first)
        chosen: list[int] = []
        tokens = 0
        while len(chosen) < most and tokens < options.tokens_per_batch:
            number = self.row(first + len(chosen))
            if number in chosen:  # an epoch ends within the batch, which holds no row twice
                break
            chosen.append(number)
            tokens += len(self.trained[number].tokens) - 1
        return chosen

    def num_rows(self, epochs: float) -> int:
        return max(1, round(epochs * len(self.trained)))

    def num_steps(self, options: SftOptions) -> int | None:
        if options.num_epochs is None:
            return None
        steps = first = 0
        while first < self.num_rows(options.num_epochs):
            first += len(self.batch_rows(first, options))
            steps += 1
        return steps

    def held_out(self, options: SftOptions) -> list[Example]:
        return [each.unpacked() for each in self.apart]

    def described(self) -> list[str]:
        tokens = sum(len(each.tokens) for each in self.trained)
        learned = sum(sum(each.learned) for each in self.trained)
        bad = self.maker.bad
        return [
            f"{len(self.trained)} rows of {tokens} tokens, {learned} of them learned",
            self.format,
            *self.maker.notes(),
            *(f"bad rows left out:{bad.listed()}".splitlines() if bad.faults else []),
        ]

    def summary(self) -> dict[str, object]:
        counts = {"trained": len(self.trained), "held_out": len(self.apart)}
        listed = {"skipped": self.maker.skipped, "cut": self.maker.cut, "empty_answers": self.maker.silent}
        return {"rows": {**counts, **{name: [*rows] for name, rows in listed.items()}, "bad": [*self.maker.bad.faults]}}


def row_examples(
    masking: Masking,
    task: DatasetOptions,
    options: SftOptions,
    *,
    longest: int,
    seed: int,
    given: GivenRows = NO_ROWS_GIVEN,
) -> RowExamples:
    """The rows of the task's file, or those given, as examples of at most `longest` tokens."""
    bad = BadRows(task.skip_bad_rows)
    read = configured_rows(task, bad) if given.rows is None else numbered_rows(given.rows, MEMORY, bad)
    held_out_rows = held_out_of(task, given.held_out, bad)
    everything = learned_rows(read, bad)
    apart = None if held_out_rows is None else learned_rows(held_out_rows, bad)
    training, held_out = split(keyed(everything, task), None if apart is None else keyed(apart, task), task)
    maker = ExampleMaker(masking=masking, task=task, options=options, longest=longest, bad=bad)
    trained, measured = (
        maker.examples([cast(LearnedRow, row.columns["row"]) for row in part]) for part in (training, held_out)
    )
    maker.require_short()
    if not trained and not (maker.too_long or maker.skipped):
        raise UserError(f"no row can be learned.  The first:{bad.listed()}")
    if not trained:
        where = f"sft.long_rows = {options.long_rows}"
        raise UserError(f"{where}: all rows are longer than {longest} tokens.  Use a larger sft.max_length.")
    format = columns_line(read, known=SOURCE if task.sources and given.rows is None else "")
    return RowExamples(seed=seed, trained=trained, apart=measured, maker=maker, format=format)


def keyed(rows: Sequence[LearnedRow], task: DatasetOptions) -> list[DatasetRow]:
    return [DatasetRow(row.where, {task.prompt_column: text_before_answer(row), "row": row}) for row in rows]


def text_before_answer(row: LearnedRow) -> object:
    """The part of a row before its first answer."""
    if isinstance(row, TextRow):
        return row.text
    if isinstance(row, TokenRow):
        return [*row.tokens]
    if isinstance(row, CompletionRow):
        return row.prompt if isinstance(row.prompt, str) else [*row.prompt]
    roles = [message["role"] for message in row.messages]
    return [*row.messages[: roles.index(ASSISTANT) if ASSISTANT in roles else None]]
