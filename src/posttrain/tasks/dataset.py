"""A task of your own: prompts from the rows of a file or a list, rewards from your functions.

**What the prompt looks like.**  The row's prompt column: text unchanged, or messages through the model's chat template;
`prompt_format` sends everything through the template, or nothing.  Options add a system message before it and the
beginning of the answer after it.

**What earns what.**  The recipe's `rewards`; they get every column of the row except the prompt's.

**Which rows are trained on.**  Epoch by epoch, in a new order each time (a function of the seed), without replacement;
for mixtures see posttrain.tasks.draw_order.  Held-out rows are never trained on: those of `held_out_path` or
`held_out_split`, or a share chosen by a hash of the prompt, so that equal prompts stay together.

**Known hacks.**  Those of your reward functions.  Look at what scores well, and hold out some rows.
"""

import hashlib
import heapq
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

from posttrain.errors import UserError
from posttrain.models.messages import checked_messages
from posttrain.options.dataset import DatasetOptions
from posttrain.records import Prompt
from posttrain.rewards.generated_reward import GeneratedReward
from posttrain.rewards.grading.calls import GIVEN, WITHHELD
from posttrain.rewards.grading.function import RewardFunction
from posttrain.tasks.base import Messages, PromptRenderer, Task
from posttrain.tasks.draw_order import DrawOrder, quotas_of
from posttrain.tasks.prompt_content import LengthLimit, prompt_content, role_shape
from posttrain.tasks.row_files import row_formats
from posttrain.tasks.row_files.row_formats import as_column, cell_text
from posttrain.tasks.row_files.rows import MEMORY, BadRows, DatasetRow, numbered_rows, read_rows, require_column

LONG_ROWS = 64
"""Rows, of those with the most text, whose tokens are counted before a run starts."""
SOURCE = "source"
"""The column that says which data set of a mixture a row is of."""
PLACES = 5
"""Rows left out or cut that the plan names."""
Rows = Iterable[Mapping[str, object]]


class DatasetTask(Task):
    """Rows as the options say, or of lists given as `rows` and `held_out_rows`."""

    name = "dataset"
    reward_functions: tuple[RewardFunction, ...] = ()
    """None: the recipe names them."""

    def __init__(
        self,
        options: DatasetOptions,
        renderer: PromptRenderer,
        *,
        seed: int,
        prompts_per_step: int,
        rows: Rows | None = None,
        held_out_rows: Rows | None = None,
    ) -> None:
        self.options = options = self.resolved(options)
        self.renderer = renderer
        self.bad = BadRows(options.skip_bad_rows)
        self.too_long: list[str] = []
        """Places of the rows that are left out, or whose prompts are cut, for their length."""
        self.found = ""
        """Where the prompts are, if not in the prompt column."""
        self.names = source_names(options) if rows is None else []
        everything = self.usable(
            configured_rows(options, self.bad) if rows is None else numbered_rows(rows, MEMORY, self.bad)
        )
        apart = held_out_of(options, held_out_rows, self.bad)
        training, held_out = split(everything, None if apart is None else self.usable(apart), options)
        self.training_rows, self.held_out_rows = self.of_length(training), self.of_length(held_out)
        self.num_rows = len(self.training_rows)
        self.order = self.draw_order(seed, prompts_per_step)

    def resolved(self, options: DatasetOptions) -> DatasetOptions:
        """The options as this kind of task needs them."""
        return options

    def prepared(self, row: DatasetRow) -> DatasetRow:
        """The row as this kind of task needs it.  Raises UserError for a bad one."""
        return row

    def usable(self, rows: Sequence[DatasetRow]) -> list[DatasetRow]:
        """The usable rows; bad ones are counted now, so that a fault does not show in step 900."""
        kept, column = [], self.options.prompt_column
        find: Callable[[DatasetRow], object] | None = None
        if column == DatasetOptions.prompt_column and not any(column in row.columns for row in rows):
            for names, (found, note) in ELSEWHERE.items():
                if find is None and any(set(names) <= row.columns.keys() for row in rows):
                    find, self.found = found, self.found or note
        for row in rows:
            with self.bad.counting():
                ready = self.prepared(row)
                if find is not None:
                    ready = DatasetRow(ready.where, {**ready.columns, column: find(ready)})
                require_column([ready], column)
                content(ready, self.options)
                kept.append(ready)
        if not kept:
            raise UserError(f"none of the {len(rows)} rows can be used:{self.bad.listed()}")
        return kept

    def of_length(self, rows: list[DatasetRow]) -> list[DatasetRow]:
        """The rows whose prompts are short enough; others are left out, cut or bad, as the options say."""
        most, column, over_long = self.options.max_prompt_tokens, self.options.prompt_column, self.options.over_long
        if most is None:
            return rows
        limit = LengthLimit(most, lambda prompt: len(self.prompt(DatasetRow("a prompt", {column: prompt})).tokens))
        kept = []
        for row in rows:
            prompt = row.columns[column]
            assert isinstance(prompt, str | Sequence)
            given = prompt if isinstance(prompt, str) else checked_messages(prompt, row.where)
            with self.bad.counting(f"{row.where}: "):
                tokens = limit.exceeded(given)
                if tokens and over_long == "error":
                    raise UserError(
                        f"the prompt has {tokens} tokens, and task.max_prompt_tokens = {most}. Shorten it, or set"
                        " task.over_long = skip or cut_left."
                    )
                if not tokens:
                    kept.append(row)
                    continue
                if over_long == "cut_left":
                    kept.append(DatasetRow(row.where, {**row.columns, column: limit.cut(given)}))
                self.too_long.append(row.where)
        return kept

    def draw_order(self, seed: int, size: int) -> DrawOrder:
        order = partial(DrawOrder, seed=seed, size=size, shuffled=self.options.shuffle)
        if not self.names:
            return order(counts=(len(self.training_rows),), quotas=(len(self.training_rows),))
        counts = [sum(row.columns[SOURCE] == name for row in self.training_rows) for name in self.names]
        if 0 in counts:
            raise UserError(f"task.sources: no row of {self.names[counts.index(0)]} remains to train on")
        weights = [source.weight for source in self.options.sources if source.weight is not None]
        return order(names=tuple(self.names), counts=tuple(counts), quotas=quotas_of(counts, weights or None))

    def prompts(self, step: int, draws: range) -> list[Prompt]:
        """Draws below `prompts_per_step` go through the epochs; those above are refills from the other rows."""
        return [self.prompt(self.training_rows[self.order.row(step, draw)]) for draw in draws]

    def held_out(self) -> list[Prompt]:
        return [self.prompt(row) for row in self.held_out_rows]

    def longest_prompts(self) -> list[Prompt]:
        """The training rows with the most text, and one of each kind of conversation, which a template may refuse."""
        prompts = [row.columns[self.options.prompt_column] for row in self.training_rows]
        sizes = [len(str(prompt)) for prompt in prompts]
        chosen = heapq.nlargest(LONG_ROWS, range(len(sizes)), key=sizes.__getitem__)
        shapes = {role_shape(prompt): number for number, prompt in enumerate(prompts)}
        return [self.prompt(self.training_rows[number]) for number in dict.fromkeys([*chosen, *shapes.values()])]

    def prompt(self, row: DatasetRow) -> Prompt:
        columns = {name: value for name, value in row.columns.items() if name != self.options.prompt_column}
        given = content(row, self.options)
        prompt = self.renderer.render(given, id=row.where, prefill=self.options.prefill, columns=columns)
        return replace(prompt, source=str(row.columns.get(SOURCE, ""))) if self.names else prompt

    def rows_to_reward(self) -> list[tuple[str, Mapping[str, object]]]:
        column, rows = self.options.prompt_column, (*self.training_rows, *self.held_out_rows)
        return [(row.where, {**row.columns, "prompt": row.columns[column]}) for row in rows]

    def notes(self) -> list[str]:
        """The plan's lines on the rows: how many there are, and which were left out or cut."""
        total = sum(self.order.quotas)
        drawn = zip(self.names, self.order.quotas, strict=False)
        shares = ", ".join(f"{name} {quota / total:.1%} of the draws" for name, quota in drawn)
        notes = [f"{count_text(self.num_rows, 'row')} to train on" + (f": {shares}" if shares else "")]
        if self.found:
            notes.append(self.found)
        present = set(chain.from_iterable(row.columns for row in (*self.training_rows, *self.held_out_rows)))
        if hidden := [name for name in (*GIVEN, *WITHHELD) if name in present - {self.options.prompt_column}]:
            notes.append(
                f"rewards do not see the columns {', '.join(hidden)} of the rows, whose names are those of sampled"
                f" values; rename them by task.columns, such as {{own_{hidden[0]}: {hidden[0]}}}"
            )
        if self.options.last_assistant_message == "prefill":
            prompts = (role_shape(row.columns[self.options.prompt_column]) for row in self.training_rows)
            if begun := sum(roles[-1:] == ("assistant",) for roles in prompts):
                what = count_text(begun, "prompt")
                notes.append(f"{what} whose last message is the assistant's, which begins the answer")
        if self.too_long:
            done = "left out" if self.options.over_long == "skip" else "cut from their beginning"
            count, most = count_text(len(self.too_long), "prompt"), self.options.max_prompt_tokens
            more = f" and {len(self.too_long) - PLACES} more" if len(self.too_long) > PLACES else ""
            notes.append(f"{count} of more than {most} tokens {done}: {', '.join(self.too_long[:PLACES])}{more}")
        if self.bad.faults:
            notes += f"{count_text(len(self.bad.faults), 'bad row')} left out:{self.bad.listed()}".splitlines()
        return notes


def content(row: DatasetRow, options: DatasetOptions) -> str | Messages:
    given = row.columns[options.prompt_column]
    if not isinstance(given, str) and not (isinstance(given, list) and all(isinstance(m, Mapping) for m in given)):
        column = f"the column `{options.prompt_column}`"
        raise UserError(f"{row.where}: {column} must hold text or a list of messages, not {cell_text(given)}")
    return prompt_content(given, options, row.where)


def count_text(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def question_of(row: DatasetRow) -> list[Mapping[str, object]]:
    """A conversation without the assistant's last turn, which is the answer."""
    read = row_formats.conversation_row if "messages" in row.columns else row_formats.sharegpt_row
    messages = [*read(row).messages]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    return messages


ELSEWHERE: Mapping[tuple[str, ...], tuple[Callable[[DatasetRow], object], str]] = {
    ("messages",): (question_of, "prompts are `messages` without the assistant's last turn"),
    ("chosen", "rejected"): (
        lambda row: as_column(row_formats.preference_row(row).prompt),
        "prompts are what `chosen` and `rejected` begin with",
    ),
    ("conversations",): (question_of, "prompts are `conversations` without the assistant's last turn"),
    ("instruction", "output"): (
        lambda row: as_column(row_formats.alpaca_prompt(row)),
        "prompts are `instruction` and `input`",
    ),
}
"""Where the prompt is in rows without a column of prompts, by the columns that they have."""


def configured_rows(options: DatasetOptions, bad: BadRows) -> list[DatasetRow]:
    """The rows of the options' path, or of its sources one after the other."""
    if not options.sources:
        if not options.path and not options.generator:
            raise UserError("task.path is missing: name the file of rows, such as `path: rows.jsonl`")
        return read_rows(options.path, options, bad)
    rows = []
    for name, source in zip(source_names(options), options.sources, strict=True):
        for row in read_rows(source.path, source, bad):
            if SOURCE in row.columns:
                remedy = f"Rename it: columns: {{origin: {SOURCE}}}."
                raise UserError(f"{row.where}: mixtures write the column `{SOURCE}`. {remedy}")
            rows.append(DatasetRow(row.where, {**row.columns, SOURCE: name}))
    return rows


def source_names(options: DatasetOptions) -> list[str]:
    names = [each.name or each.generator or Path(each.path).stem.strip("*?-_") or each.path for each in options.sources]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"task.sources: two are called {twice}; give each another name")
    return names


def held_out_of(options: DatasetOptions, rows: Rows | None, bad: BadRows) -> list[DatasetRow] | None:
    """The rows that are held out by name; None if a share of all is."""
    if rows is not None:
        return numbered_rows(rows, f"held_out_{MEMORY}", bad)
    if options.held_out_path:
        return read_rows(options.held_out_path, replace(options, split=options.held_out_split, generator=""), bad)
    if options.held_out_split:
        return read_rows(options.path, options, bad, split=options.held_out_split)
    return None


def split(
    rows: Sequence[DatasetRow], held_out: Sequence[DatasetRow] | None, options: DatasetOptions
) -> tuple[list[DatasetRow], list[DatasetRow]]:
    """Training rows, and the held-out rows that are evaluated on; no prompt is on both sides."""
    column = options.prompt_column
    prints = [fingerprint(row, column) for row in rows]
    if held_out is None:
        threshold = int(options.held_out_share * 2**64)
        held_out = [row for row, value in zip(rows, prints, strict=True) if value < threshold]
    apart = {fingerprint(row, column) for row in held_out}
    training = [row for row, value in zip(rows, prints, strict=True) if value not in apart]
    if not training or (options.held_out_share > 0 and not held_out):
        source = options.held_out_path or options.held_out_split or f"held_out_share = {options.held_out_share}"
        raise UserError(
            f"{Path(options.path).name or options.generator or MEMORY}: {source} leaves {len(training)} of {len(rows)}"
            f" rows to train on and {len(held_out)} to evaluate on. Give more different prompts, or another"
            " task.held_out_share (0 evaluates on none)."
        )
    chosen = sorted(range(len(held_out)), key=lambda index: fingerprint(held_out[index], column))
    return training, [held_out[index] for index in sorted(chosen[: options.held_out_size])]


def fingerprint(row: DatasetRow, column: str) -> int:
    """A 64-bit hash of the prompt without white space around it."""
    prompt = row.columns[column]
    text = prompt.strip() if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=str)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


class GeneratedTask(DatasetTask):
    """Problems of a generator of reasoning-gym (extra `gym`): puzzles, logic, algorithms and arithmetic without end.

    The prompt is the generator's question, word for word; `task.system` may ask for `<answer>` tags.  The reward is
    `generated` (posttrain.rewards.generated_reward): 1 for a right answer.  Equal questions stay together, and a share
    of the different ones, chosen by a hash, is held out.  The rows are those of the generator's own seed, whatever the
    run's is.  reasoning-gym is Apache-2.0; problems are made on this machine.
    """

    name = "generated"
    reward_functions: tuple[RewardFunction, ...] = (
        RewardFunction(name="generated", call=GeneratedReward(), text_only=True, bounded=True),
    )
