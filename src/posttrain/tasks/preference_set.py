"""Rows with two answers, of a file or a list, as pairs of tokens: checked, split, measured in length and counted.

All rows are made into tokens before a run starts, so that faults show then, by file and line.  Pairs of one prompt stay
on one side of the split.  Each epoch has a new order of pairs, a function of the seed and the epoch.

A pair's prompt is what the policy would be asked, and both answers continue its tokens.  An answer of text is the text
and a stop token.  An answer of messages is the assistant's turn in the chat template, up to its stop token; where the
conversation continues, others' turns are included and marked as not sampled.

Bad pairs, reported by their place: answers with equal tokens; an empty answer; one that does not begin with the
assistant's turn, so that the two answer different questions; turns that the template does not end with a stop token;
columns `margin` and `weight` that are not numbers; ties (column `tie`, as `posttrain collect` writes it).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from posttrain.errors import RunError, UserError
from posttrain.models.conversation_masks import Dialogue, Masking
from posttrain.models.messages import ASSISTANT, makes_call, plain_answer, require_unmarked
from posttrain.models.rendering import TooLongText
from posttrain.options.dataset import DatasetOptions
from posttrain.options.pairs import PairOptions
from posttrain.records import Preference, Prompt, TokenSequence
from posttrain.tasks.base import Messages
from posttrain.tasks.dataset import SOURCE, configured_rows, held_out_of, split
from posttrain.tasks.draw_order import permutation
from posttrain.tasks.prompt_content import prompt_content
from posttrain.tasks.row_files import row_formats
from posttrain.tasks.row_files.row_formats import Content, PreferenceRow, RowFormat, as_column, tools_of
from posttrain.tasks.row_files.rows import MEMORY, NO_ROWS_GIVEN, BadRows, DatasetRow, GivenRows, numbered_rows

MARGIN_RULE = "a number >= 0, by how much the chosen answer is better (a negative one means that they are swapped)"
OTHER_WAYS = "  Leave out what follows the first answer, or name another template as model.chat_template."


PairAnswer = tuple[TokenSequence, tuple[int, ...]]
"""One of a pair's two answers in tokens, and the template's text after its last stop token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairMaker:
    """Makes pairs for one model."""

    masking: Masking
    task: DatasetOptions
    counts_tokens: bool = True
    """Whether the loss sums over the answers' tokens, so that it can leave out turns that are marked as not learned."""
    closing_said: bool = False
    """Whether the template's text after the last stop token is part of an answer."""

    def pair(self, row: PreferenceRow) -> Preference:
        """The pair of a row.  Raises UserError for a bad one."""
        if row.columns.get("tie") is True:
            raise UserError(f"{row.where}: the column `tie` says that neither answer is better.  Drop the row.")
        for answer in (row.chosen, row.rejected):
            if not isinstance(answer, str):
                require_answer(row.where, answer)
                if not self.counts_tokens:
                    require_unmarked(answer, row.where, "a reward model scores the whole of an answer")
        content = prompt_content(as_column(row.prompt), self.task, row.where)
        answer_of = self.of_text if isinstance(content, str) else self.of_messages
        prompt = self.prompt(row, content)
        (chosen, after_chosen), (rejected, after_rejected) = (
            answer_of(row, prompt, each) for each in (row.chosen, row.rejected)
        )
        if chosen.tokens == rejected.tokens:
            raise UserError(f"{row.where}: `chosen` and `rejected` are the same answer.  Drop the row.")
        for tokens in (chosen.tokens + after_chosen, rejected.tokens + after_rejected):
            self.masking.require_known((*prompt.tokens, *tokens), row.where)
        return Preference(
            prompt=prompt,
            chosen=chosen,
            rejected=rejected,
            chosen_closing=after_chosen,
            rejected_closing=after_rejected,
            margin=column_number(row, "margin", MARGIN_RULE, lambda value: value >= 0),
            weight=column_number(row, "weight", "a number above 0", lambda value: value > 0) or 1.0,
            where=row.where,
        )

    def prompt(self, row: PreferenceRow, content: str | Messages) -> Prompt:
        renderer = self.masking.renderer
        if isinstance(content, str):
            return renderer.render(content, id=row.where, columns=row.columns)
        text = renderer.templated(content, row.where, tools=tools_of(row))
        tokens = tuple(renderer.tokens(text, row.where))
        return Prompt(id=row.where, text=text, tokens=tokens, messages=tuple(content), columns=dict(row.columns))

    def of_text(self, row: PreferenceRow, prompt: Prompt, answer: Content) -> PairAnswer:
        text = plain_answer(answer, row.where)
        require_words(row.where, text)
        tokens = self.masking.completion(prompt, text).tokens
        return TokenSequence.one_turn(tokens[len(prompt.tokens) :]), ()

    def of_messages(self, row: PreferenceRow, prompt: Prompt, answer: Content) -> PairAnswer:
        """The assistant's turn, and what may follow it, after the messages of a prompt."""
        turns = [{"role": ASSISTANT, "content": answer}] if isinstance(answer, str) else [*answer]
        if isinstance(answer, str):
            require_words(row.where, answer)
        given = prompt.messages or ()
        dialogue = Dialogue(where=row.where, messages=[*given, *turns], num_given=len(given), tools=tools_of(row))
        example = self.masking.last_turn(dialogue) if len(turns) == 1 else self.masking.every_turn(dialogue)
        size = len(prompt.tokens)
        assert example.tokens[:size] == prompt.tokens, (row.where, "an answer continues the tokens of its prompt")
        tokens, sampled = example.tokens[size:], example.sampled[size:]
        closing = self.masking.closing(dialogue, example)
        if not self.closing_said:
            return TokenSequence(tokens=tokens, sampled=sampled), closing
        return TokenSequence(tokens=tokens + closing, sampled=sampled + (True,) * len(closing)), ()


def require_answer(where: str, turns: Sequence[Mapping[str, Any]]) -> None:
    """Refuse messages that are not the assistant's answer, or are empty."""
    first, last = turns[0]["role"], turns[-1]["role"]
    if first != ASSISTANT:
        raise UserError(f"{where}: an answer begins with a message of the role {first}, not the assistant's.  Drop it.")
    if last != ASSISTANT:
        raise UserError(f"{where}: an answer ends with a message of the role {last}.  Leave that message out.")
    for turn in turns:
        if not makes_call(turn):
            require_words(where, str(turn["content"]))


def require_words(where: str, text: str) -> None:
    if not text.strip():
        raise UserError(f"{where}: an answer is empty ({text[:20]!r}); give one, or drop the row")


def cut_to(pair: Preference, longest: int) -> Preference:
    """The pair with the ends of its answers cut off to `longest` tokens with the prompt, if that fits and is needed."""
    if not pair.num_tokens > longest > len(pair.prompt.tokens):
        return pair
    room = longest - len(pair.prompt.tokens)
    chosen, rejected = pair.chosen.first(room), pair.rejected.first(room)
    return replace(pair, chosen=chosen, rejected=rejected, chosen_closing=(), rejected_closing=())


def column_number(row: PreferenceRow, column: str, rule: str, holds: Callable[[float], bool]) -> float | None:
    value = row.columns.get(column)
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and holds(value):
        return float(value)
    raise UserError(f"{row.where}: the column `{column}` must hold {rule}, not {row_formats.cell_text(value)}")


NAMED = 5
"""Pairs that a message names, of many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceSet:
    """Pairs to learn from, by number epoch after epoch, and pairs to measure on."""

    seed: int
    training: Sequence[Preference]
    held_out: Sequence[Preference]
    """Pairs whose prompts are never trained on."""
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
        if not self.training:
            return []
        epoch_end = (first // len(self.training) + 1) * len(self.training)
        last = min(first + options.pairs_per_batch, epoch_end)
        found = range(first, last if options.num_epochs is None else min(last, self.num_pairs(options.num_epochs)))
        if not found:
            raise RunError(
                f"all {options.num_epochs:g} epochs of the {len(self.training)} pairs are learned, with steps left: the"
                " run was begun with more pairs.  Restore those, or start another run."
            )
        return [self.training[self.number(index)] for index in found]

    def num_pairs(self, epochs: float) -> int:
        """Pairs in that many epochs, each counted as often as it is learned."""
        return max(1, round(epochs * len(self.training)))

    def num_steps(self, options: PairOptions) -> int | None:
        """Updates in the epochs; None if the recipe sets the number of steps."""
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
    bad, kind = BadRows(task.skip_bad_rows), RowFormat.PREFERENCE
    own = [SOURCE] if task.sources and given.rows is None else []
    own += [] if options.counts_tokens else ["margin"]  # which a reward model learns
    read = configured_rows(task, bad) if given.rows is None else numbered_rows(given.rows, MEMORY, bad)
    held_out_rows = held_out_of(task, given.held_out, bad)
    everything = rows_by_prompt(preference_rows(read, bad), task)
    apart = None if held_out_rows is None else rows_by_prompt(preference_rows(held_out_rows, bad), task)
    training, held_out = split(everything, apart, task)
    maker = PairMaker(
        masking=replace(masking, other_ways=OTHER_WAYS),
        task=task,
        counts_tokens=options.counts_tokens,
        closing_said=options.answers_with_closing,
    )
    unread: list[str] | None = None if options.long_pairs == "error" else []
    made = [made_pairs(part, maker, bad, unread) for part in (training, held_out)]
    if options.long_pairs == "cut":
        made = [[cut_to(each, longest) for each in part] for part in made]
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
        format=row_formats.format_line(kind, read, lambda row: (*row_formats.columns_read(kind, row), *own)),
    )


def preference_rows(rows: Sequence[DatasetRow], bad: BadRows) -> list[PreferenceRow]:
    row_formats.detected_format(rows, (RowFormat.PREFERENCE,))
    found = []
    for row in rows:
        with bad.counting():
            found.append(row_formats.preference_row(row))
    return found


def made_pairs(rows: Sequence[DatasetRow], make: PairMaker, bad: BadRows, unread: list[str] | None) -> list[Preference]:
    """The pairs of some rows; bad rows are counted, and those too long for tokens added to `unread`, where allowed."""
    found = []
    for each in rows:
        row = each.columns["row"]
        assert isinstance(row, PreferenceRow)
        try:
            found.append(make.pair(row))
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
