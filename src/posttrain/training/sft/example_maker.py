"""From rows to examples: a row's format, its learned tokens, and the handling of rows that are too long."""

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.errors import UserError
from posttrain.models.conversation_masks import Dialogue, Masking, trimmed
from posttrain.models.messages import ASSISTANT, KNOWN_KEYS, learned_mark, makes_call, plain_answer
from posttrain.models.rendering import TooLongText
from posttrain.options.dataset import DatasetOptions
from posttrain.options.training import SftOptions
from posttrain.records import Example, TokenSequence
from posttrain.tasks.prompt_content import prompt_content
from posttrain.tasks.row_files import row_formats
from posttrain.tasks.row_files.row_formats import CompletionRow, ConversationRow, RowFormat
from posttrain.tasks.row_files.rows import BadRows, DatasetRow

TOKENS, LABELS = "input_ids", "labels"
MASKS = ("completion_mask", "assistant_masks")
"""Columns of 0 and 1, as TRL writes them; a token with a 0 is not learned."""
NOT_LEARNED = -100
"""The label of a token that is not learned."""
TEXT = "text"
"""The column of rows of plain text."""
BEFORE_TEXT = ({"messages"}, {"completion"}, {"instruction", "output"})
"""Columns of formats that take precedence over a text, which repeats the other columns in Alpaca's rows."""
WEIGHT = "weight"
READ = {TEXT: (TEXT,), TOKENS: (TOKENS, LABELS, *MASKS, "attention_mask")}
"""The columns of rows without a `RowFormat`."""
FORMATS = (RowFormat.PROMPT_COMPLETION, RowFormat.MESSAGES, RowFormat.SHAREGPT, RowFormat.ALPACA)
NAMED = 5
"""Number of rows that a message names."""


@dataclass(frozen=True, slots=True)
class TextRow:
    """A text, all of which is learned."""

    where: str
    text: str


@dataclass(frozen=True, slots=True)
class TokenRow:
    """Tokens, and which of them are learned; the first is never learned, since nothing predicts it."""

    where: str
    tokens: tuple[int, ...]
    learned: tuple[bool, ...]


LearnedRow = CompletionRow | ConversationRow | TextRow | TokenRow


def learned_rows(rows: Sequence[DatasetRow], bad: BadRows) -> list[LearnedRow]:
    """The valid rows; invalid ones are counted."""
    format = format_of(rows)
    found: list[LearnedRow] = []
    for row in rows:
        try:
            found.append(learned_row(row, format))
        except UserError as error:
            bad.add(str(error))
    return found


def format_of(rows: Sequence[DatasetRow]) -> str:
    columns = rows[0].columns
    if TOKENS in columns:
        return TOKENS
    if TEXT in columns and not any(each <= columns.keys() for each in BEFORE_TEXT):
        return TEXT
    return row_formats.detected_format(rows, FORMATS)


def learned_row(row: DatasetRow, format: str) -> LearnedRow:
    """One row.  Raises UserError if it is invalid."""
    weight, text = row.columns.get(WEIGHT), row.columns.get(TEXT)
    if weight is not None and weight != 1:
        raise UserError(
            f"{row.where}: the column `{WEIGHT}` = {weight!r:.40} is not supported: each row counts once.  Drop the row"
            f" or the column.  To learn only some messages, set the key `{WEIGHT}` (0 or 1) of each."
        )
    if format == TOKENS:
        return token_row(row)
    if format == TEXT:
        if isinstance(text, str) and text:
            return TextRow(row.where, text)
        raise UserError(f"{row.where}: the column `{TEXT}` must be a text, not {text!r:.80}.  Fix it or drop the row")
    made = row_formats.formatted([row], RowFormat(format))[0]
    assert isinstance(made, CompletionRow | ConversationRow)
    return made


def columns_line(rows: Sequence[DatasetRow], *, known: str = "") -> str:
    format, own = format_of(rows), (WEIGHT, known)

    def read(row: DatasetRow) -> Sequence[str]:
        return READ[format] if format in READ else row_formats.columns_read(RowFormat(format), row)

    return row_formats.format_line(format, rows, lambda row: (*read(row), *own))


@dataclass(frozen=True, slots=True)
class PackedExample:
    """An example in compact form."""

    tokens: "array[int]"
    learned: bytes

    @classmethod
    def of(cls, example: Example) -> "PackedExample":
        return cls(array("i", example.tokens), bytes(example.sampled))

    def unpacked(self) -> Example:
        return Example(TokenSequence(tokens=tuple(self.tokens), sampled=tuple(map(bool, self.learned))))


@dataclass(slots=True, kw_only=True)
class ExampleMaker:
    """Makes examples from rows, and counts rows for the plan."""

    masking: Masking
    task: DatasetOptions
    options: SftOptions
    longest: int
    """Maximum tokens of a row that is kept whole."""
    bad: BadRows
    too_long: list[tuple[str, int]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    """Rows with an empty answer, for which only the stop token is learned."""
    unread: Counter[str] = field(default_factory=Counter)
    """Keys of messages that neither we nor the chat template read, with their counts."""

    def examples(self, rows: Sequence[LearnedRow]) -> list[PackedExample]:
        """The examples of some rows; several of a row if its turns are split."""
        found: list[PackedExample] = []
        for row in rows:
            try:
                for example in (whole := self.whole(row)):
                    self.masking.require_known(example.tokens, row.where)
            except TooLongText:
                if self.options.long_rows == "error":
                    raise
                self.skipped.append(row.where)
                continue
            except UserError as error:
                self.bad.add(str(error))
                continue
            kept = (self.fitting(row.where, example) for example in whole)
            found += [PackedExample.of(each) for each in kept if each is not None]
        return found

    def whole(self, row: LearnedRow) -> list[Example]:
        """The examples of a row before their length is checked."""
        if isinstance(row, TokenRow):
            everything = (False, *[True] * (len(row.tokens) - 1))
            return [trimmed(row.tokens, everything if self.options.loss_on == "all" else row.learned)]
        if isinstance(row, TextRow):
            return [self.masking.text(self.masking.renderer.render(row.text, id=row.where))]
        if isinstance(row, ConversationRow):
            return self.of_conversation(
                Dialogue(where=row.where, messages=self.with_system(row), tools=row_formats.tools_of(row))
            )
        prompt = row.prompt if isinstance(row.prompt, str) else [*row.prompt]
        given, answer = prompt_content(prompt, self.task, row.where), row.completion
        if isinstance(given, str):
            prompt_tokens = self.masking.renderer.render(given, id=row.where)
            example = self.masking.completion(prompt_tokens, plain_answer(answer, row.where))
            if self.options.loss_on == "all":
                example = trimmed(example.tokens, [False, *[True] * example.num_inputs])
            return [example]
        for number, message in enumerate(given):
            if learned_mark(message, f"{row.where}, message {number}"):
                raise UserError(
                    f"{row.where}, message {number}: is marked as learned, but is in the prompt, which is only"
                    " read.  Give the conversation as `messages`, or remove the mark."
                )
        turns = [{"role": ASSISTANT, "content": answer}] if isinstance(answer, str) else [*answer]
        messages, tools = [*given, *turns], row_formats.tools_of(row)
        return self.of_conversation(Dialogue(where=row.where, messages=messages, num_given=len(given), tools=tools))

    def with_system(self, row: ConversationRow) -> list[Mapping[str, Any]]:
        """A conversation with the task's system message."""
        if self.task.prompt_format == "plain":
            raise UserError(
                f"{row.where}: task.prompt_format = plain leaves out roles, so turns cannot be distinguished."
                "  Remove it, or give `prompt` and `completion`."
            )
        before = next((i for i, message in enumerate(row.messages) if message["role"] == ASSISTANT), 0)
        opening = prompt_content([*row.messages[:before]], self.task, row.where) if before else []
        assert not isinstance(opening, str)
        return [*opening, *row.messages[before:]]

    def of_conversation(self, conversation: Dialogue) -> list[Example]:
        """The examples of a conversation, whose unread keys and empty answers are counted."""
        masking, learned = self.masking, [conversation.messages[each] for each in conversation.turns]
        if self.options.loss_on == "completion":
            found, learned = [masking.last_turn(conversation)], learned[-1:]
        elif self.options.loss_on == "all":
            found, learned = [masking.all_tokens(conversation)], []
        elif self.options.split_turns:
            found = masking.turn_by_turn(conversation)
        else:
            found = [masking.every_turn(conversation)]
        keys = (key for message in conversation.messages for key in message if key not in KNOWN_KEYS)
        self.unread.update(key for key in keys if key not in masking.renderer.template)
        if any(not str(turn["content"]).strip() and not makes_call(turn) for turn in learned):
            self.silent.append(conversation.where)
        return found

    def notes(self) -> list[str]:
        counts = [(self.skipped, "too long and skipped"), (self.cut, "too long and cut")]
        counts.append((self.silent, "with an empty answer, for which only the stop token is learned"))
        lines = [f"{len(rows)} {what}: {row_list(rows)}" for rows, what in counts if rows]
        if self.unread:
            keys = ", ".join(f"{key} ({count})" for key, count in sorted(self.unread.items()))
            lines.append(f"message keys that the chat template does not read: {keys}")
        return lines

    def fitting(self, where: str, example: Example) -> Example | None:
        """The example; cut or skipped if it is too long."""
        if not example.num_sampled:
            raise UserError(f"{where}: nothing to learn: no token after the first is learned.  Drop the row.")
        if len(example.tokens) <= self.longest:
            return example
        self.too_long.append((where, len(example.tokens)))
        kept = trimmed(example.tokens[: self.longest], example.sampled[: self.longest])
        if self.options.long_rows == "cut" and kept.num_sampled:
            self.cut.append(where)
            return kept
        self.skipped.append(where)
        return None


def row_list(rows: Sequence[str]) -> str:
    return ", ".join(rows[:NAMED]) + (", …" if len(rows) > NAMED else "")


def token_row(row: DatasetRow) -> TokenRow:
    """A row of tokens.  Raises UserError if its columns do not agree."""
    tokens = integers_in(row, TOKENS)
    if not tokens:
        raise UserError(f"{row.where}: the column `{TOKENS}` is empty.  Fill it or drop the row")
    if 0 in integers_in(row, "attention_mask", len(tokens), default=1):
        raise UserError(f"{row.where}: its attention_mask excludes tokens.  Give rows without padding")
    learned = [True] * len(tokens)
    for mask in MASKS:
        learned = [a and b != 0 for a, b in zip(learned, integers_in(row, mask, len(tokens), default=1), strict=True)]
    if row.columns.get(LABELS) is not None:
        labels = integers_in(row, LABELS, len(tokens), default=0)
        wrong = next((i for i, label in enumerate(labels) if label not in (NOT_LEARNED, tokens[i])), None)
        if wrong is not None:
            raise UserError(
                f"{row.where}: labels[{wrong}] = {labels[wrong]}, but {TOKENS}[{wrong}] = {tokens[wrong]}: a label is"
                f" its own token, or {NOT_LEARNED} if it is not learned.  Do not shift labels; the loss does"
            )
        learned = [a and label != NOT_LEARNED for a, label in zip(learned, labels, strict=True)]
    return TokenRow(row.where, tuple(tokens), (False, *learned[1:]))


def integers_in(row: DatasetRow, column: str, length: int | None = None, *, default: int = 0) -> Sequence[int]:
    """A column of whole numbers, one per token if their number is known; the default if the column is missing."""
    given = row.columns.get(column)
    if given is None and length is not None:
        return [default] * length
    listed = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(listed, Sequence) or isinstance(listed, str) or not all(isinstance(each, int) for each in listed):
        raise UserError(f"{row.where}: the column `{column}` must be a list of whole numbers, not {given!r:.80}")
    if length not in (None, len(listed)):
        told = f"{len(listed)} numbers in `{column}`, but {length} in `{TOKENS}`.  Give one for each"
        raise UserError(f"{row.where}: {told}")
    return [int(each) for each in listed]
