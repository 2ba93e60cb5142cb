"""Rows with two answers, of a file or a list, as pairs of tokens: checked, split, measured in length and counted.

All rows are made into tokens before a run starts, so that faults show then, by file and line.  Pairs of one prompt stay
on one side of the split.  The order of pairs is drawn anew for each epoch, a function of the seed and the epoch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from posttrain.errors import RunError, UserError
from posttrain.models.conversation_masks import Masking
from posttrain.models.rendering import TooLongText
from posttrain.options.dataset import DatasetOptions
from posttrain.options.pairs import PairOptions
from posttrain.records import Preference
from posttrain.tasks.dataset import SOURCE, configured_rows, held_out_of, split
from posttrain.tasks.draw_order import permutation
from posttrain.tasks.pair_maker import PairMaker, cut_to, pair_masking
from posttrain.tasks.row_files.row_formats import (
    PreferenceRow,
    RowFormat,
    as_column,
    columns_read,
    detected_format,
    format_line,
    preference_row,
)
from posttrain.tasks.row_files.rows import MEMORY, NO_ROWS_GIVEN, BadRows, DatasetRow, GivenRows, numbered_rows

NAMED = 5
"""Pairs that a message names, of many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceSet:
    """Pairs to learn from, by number epoch after epoch, and pairs to measure on."""

    seed: int
    training: Sequence[Preference]
    held_out: Sequence[Preference]
    """Of prompts that are never trained on."""
    too_long: Sequence[str] = ()
    """Places of the pairs that are left out for their length."""
    bad: BadRows = field(default_factory=BadRows)
    """Rows that make no pair and are left out, where some may be."""
    format: str = ""
    """The line about columns that were read and not read; empty for sampled pairs."""
    order: str = "pairs"
    """Names the order: other sets of the run have another one."""

    def number(self, index: int) -> int:
        """The pair at an index counted from the beginning of the run: a function of the seed and the epoch."""
        epoch, place = divmod(index, len(self.training))
        return int(permutation(self.seed, self.order, epoch, len(self.training))[place])

    def batch(self, first: int, options: PairOptions) -> list[Preference]:
        """The pairs of an update, from a number on, to the end of the epoch at most; [] in a round of ties."""
        indices = self.batch_indices(first, options) if self.training else ()
        return [self.training[self.number(index)] for index in indices]

    def batch_indices(self, first: int, options: PairOptions) -> range:
        epoch_end = (first // len(self.training) + 1) * len(self.training)
        last = min(first + options.pairs_per_batch, epoch_end)
        found = range(first, last if options.num_epochs is None else min(last, self.num_pairs(options.num_epochs)))
        if not found:
            raise RunError(
                f"all {options.num_epochs:g} epochs of the {len(self.training)} pairs are learned, with steps left: the"
                " run was begun with more pairs.  Restore those, or start another run."
            )
        return found

    def num_pairs(self, epochs: float) -> int:
        """Pairs in that many epochs, each counted as often as it is learned."""
        return max(1, round(epochs * len(self.training)))

    def num_steps(self, options: PairOptions) -> int | None:
        """Updates in the epochs; None where the recipe sets the number of steps."""
        if options.num_epochs is None:
            return None
        whole, rest = divmod(self.num_pairs(options.num_epochs), len(self.training))
        size = options.pairs_per_batch
        return whole * -(-len(self.training) // size) + -(-rest // size)

    def described(self) -> list[str]:
        prompts = len({pair.prompt.tokens for pair in self.training})
        tokens = sum(pair.num_tokens for pair in self.training) / len(self.training)
        lines = [f"{len(self.training)} pairs of {prompts} prompts, {tokens:.0f} tokens long on average"]
        lines += [self.format] if self.format else []
        if self.too_long:
            lines.append(f"{len(self.too_long)} too long and left out: {first_few(self.too_long)}")
        return lines + (f"bad pairs left out:{self.bad.listed()}".splitlines() if self.bad.faults else [])

    def summary(self) -> dict[str, object]:
        counts = {"trained": len(self.training), "held_out": len(self.held_out)}
        return {"pairs": {**counts, "too_long": [*self.too_long], "bad": [*self.bad.faults]}}


def preference_set(
    masking: Masking,
    task: DatasetOptions,
    options: PairOptions,
    *,
    longest: int,
    seed: int,
    given: GivenRows = NO_ROWS_GIVEN,
) -> PreferenceSet:
    """The pairs of the task's file, or those given, of at most `longest` tokens.

    Raises UserError for a bad row, or for more of them than `task.skip_bad_rows`, and for pairs that are too long,
    unless they may be left out or cut.
    """
    bad = BadRows(task.skip_bad_rows)
    own = [SOURCE] if task.sources and given.rows is None else []
    own += [] if options.counts_tokens else ["margin"]  # which a reward model learns
    read = configured_rows(task, bad) if given.rows is None else numbered_rows(given.rows, MEMORY, bad)
    held_out_rows = held_out_of(task, given.held_out, bad)
    everything = rows_by_prompt(preference_rows(read, bad), task)
    apart = None if held_out_rows is None else rows_by_prompt(preference_rows(held_out_rows, bad), task)
    training, held_out = split(everything, apart, task)
    maker = PairMaker(
        masking=pair_masking(masking),
        task=task,
        counts_tokens=options.counts_tokens,
        closing_said=options.answers_with_closing,
    )
    unread: list[str] | None = None if options.long_pairs == "error" else []
    made = [made_pairs(part, maker, bad, unread) for part in (training, held_out)]
    if options.long_pairs == "cut":
        made = [
            [cut_to(each, longest) if each.num_tokens > longest > len(each.prompt.tokens) else each for each in part]
            for part in made
        ]
    long = [pair for part in made for pair in part if pair.num_tokens > longest]
    if long and options.long_pairs == "error":
        pairs = first_few([f"{pair.where} ({pair.num_tokens} tokens)" for pair in long])
        raise UserError(
            f"{options.section}.max_length: {len(long)} pairs are longer than {longest} tokens: {pairs}.  Raise it if"
            f" the model's context allows that, or set {options.section}.long_pairs = skip."
        )
    trained, measured = ([pair for pair in part if pair.num_tokens <= longest] for part in made)
    if not made[0] and bad.faults:
        raise UserError(f"no row makes a pair to train on.  The first:{bad.listed()}")
    if not trained:
        raise UserError(
            f"{options.section}.max_length: none of the {len(made[0])} pairs to train on has at most {longest} tokens."
            "  Raise it if the model's context allows that."
        )
    return PreferenceSet(
        seed=seed,
        training=trained,
        held_out=measured,
        too_long=[*(unread or ()), *(pair.where for pair in long)],
        bad=bad,
        format=format_line(RowFormat.PREFERENCE, read, lambda row: (*columns_read(RowFormat.PREFERENCE, row), *own)),
    )


def preference_rows(rows: Sequence[DatasetRow], bad: BadRows) -> list[PreferenceRow]:
    detected_format(rows, (RowFormat.PREFERENCE,))
    found = []
    for row in rows:
        with bad.counting():
            found.append(preference_row(row))
    return found


def made_pairs(
    rows: Sequence[DatasetRow], maker: PairMaker, bad: BadRows, unread: list[str] | None
) -> list[Preference]:
    """The pairs of some rows; bad rows are counted, and those too long for tokens added to `unread`, where allowed."""
    found = []
    for each in rows:
        row = each.columns["row"]
        assert isinstance(row, PreferenceRow)
        try:
            found.append(maker.pair(row))
        except TooLongText:
            if unread is None:
                raise
            unread.append(row.where)
        except UserError as error:
            bad.add(str(error))
    return found


def rows_by_prompt(rows: Sequence[PreferenceRow], task: DatasetOptions) -> list[DatasetRow]:
    """Rows with their prompts, so that equal prompts stay on one side of a split."""
    return [DatasetRow(row.where, {task.prompt_column: as_column(row.prompt), "row": row}) for row in rows]


def first_few(places: Sequence[str]) -> str:
    return ", ".join(places[:NAMED]) + (", …" if len(places) > NAMED else "")
