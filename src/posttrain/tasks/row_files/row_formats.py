"""The formats of rows of data, recognised by their columns, and the same row as a record.

| format | columns | record |
|---|---|---|

| preference | `chosen`, `rejected`, and `prompt` unless it is implicit | `PreferenceRow` |
| prompt_completion | `prompt`, `completion` | `CompletionRow` |
| messages | `messages`: a whole conversation | `ConversationRow` |
| sharegpt | `conversations`: the same, as ShareGPT has it; a column `system` goes before it | `ConversationRow` |
| alpaca | `instruction`, `output`, and perhaps `input` and `system` | `CompletionRow` |


A prompt or completion is text or a list of messages (posttrain.models.messages); an assistant's message with
`tool_calls` needs no content.  If one is text and the other messages, the text becomes a message: a prompt the
user's, a completion the assistant's.  Alpaca rows are messages: the user's has the instruction and, below an empty
line, the input.  Preferences without `prompt` take it from `conversations` or `instruction`.

**Implicit prompts.**  Of messages: the longest common prefix of `chosen` and `rejected`.  Of text: the longest common
prefix without white space at its end that is followed by white space in both, which belongs to the completions; without
one, the longest common prefix.  Next to a prompt, completions of messages that both begin with it lose it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import takewhile

from posttrain.errors import UserError
from posttrain.models.messages import ASSISTANT, as_plain_text, checked_message
from posttrain.tasks.row_files.rows import DatasetRow

Message = Mapping[str, object]
"""`role` and `content`, both texts, and whatever else the row says."""
Content = str | tuple[Message, ...]
"""Plain text, or messages for a chat template."""


class RowFormat(StrEnum):
    """The format of a row, in the order in which they are tried."""

    PREFERENCE = "preference"
    PROMPT_COMPLETION = "prompt_completion"
    MESSAGES = "messages"
    SHAREGPT = "sharegpt"
    ALPACA = "alpaca"


@dataclass(frozen=True, slots=True, kw_only=True)
class FormattedRow:
    """A row of a format."""

    where: str
    columns: Mapping[str, object]
    """Every column that is not part of the format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRow(FormattedRow):
    """A problem with the answer to learn."""

    prompt: Content
    completion: Content


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceRow(FormattedRow):
    """A problem with two answers, of which one was preferred."""

    prompt: Content
    chosen: Content
    rejected: Content


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationRow(FormattedRow):
    """A conversation, the assistant's turns included."""

    messages: tuple[Message, ...]


TOOLS = "tools"
"""The column of the tools that the messages of a row may call."""

SYSTEM_AND_INPUT = ("input", "system", "history")


def detected_format(rows: Sequence[DatasetRow], accepted: Sequence[RowFormat] = tuple(RowFormat)) -> RowFormat:
    """The first of the accepted formats whose columns the first row has; every other row must have it too."""
    assert rows, "rows are read, and there are some, before their format is detected"
    columns = rows[0].columns
    for each in accepted:
        if all(name in columns for name in FORMATS[each][0]):
            return each
    wanted = "; ".join(f"{each}: {', '.join(FORMATS[each][0])}" for each in accepted)
    raise UserError(
        f"{rows[0].where}: its columns ({', '.join(columns) or 'none'}) match no supported format; the formats are"
        f" {wanted}. Rename columns by `columns`, such as {{prompt: question}}."
    )


def columns_read(format: RowFormat, row: DatasetRow) -> tuple[str, ...]:
    required, also, _ = FORMATS[format]
    read = (*required, *also, TOOLS)
    if format != RowFormat.PREFERENCE:
        return read
    prompt = next((name for name in PROMPT_COLUMNS if row.columns.get(name) is not None), "")
    return (*read, prompt, *PROMPT_COLUMNS[prompt][0]) if prompt else read


def format_line(format: str, rows: Sequence[DatasetRow], read: Callable[[DatasetRow], Sequence[str]]) -> str:
    """The line of a plan that names the format of rows, and every column that is not read."""
    unread: dict[str, None] = {}
    for row in rows:
        known = read(row)
        unread |= {name: None for name, value in row.columns.items() if value is not None and name not in known}
    return f"row format {format}" + (f"; columns that are not read: {', '.join(unread)}" if unread else "")


def formatted(rows: Sequence[DatasetRow], format: RowFormat) -> list[FormattedRow]:
    return [FORMATS[format][2](row) for row in rows]


def completion_row(row: DatasetRow) -> CompletionRow:
    prompt, completion = same_kind(column_content(row, "prompt"), column_content(row, "completion"))
    columns = other_columns(row, "prompt", "completion")
    return CompletionRow(where=row.where, prompt=prompt, completion=completion, columns=columns)


def preference_row(row: DatasetRow) -> PreferenceRow:
    """A row with two completions; if no column holds their prompt, their common beginning is the prompt."""
    chosen, rejected = column_content(row, "chosen"), column_content(row, "rejected")
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise row_error(row, "`chosen` and `rejected` must both be text or both be messages")
    column = next((name for name in PROMPT_COLUMNS if row.columns.get(name) is not None), "")
    if not column:
        prompt, (chosen, rejected) = common_prompt(row, chosen, rejected)
    else:
        given = PROMPT_COLUMNS[column][1](row)
        (prompt, chosen), (_, rejected) = same_kind(given, chosen), same_kind(given, rejected)
        if not isinstance(prompt, str) and chosen[: len(prompt)] == prompt == rejected[: len(prompt)]:
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    for name, completion in (("chosen", chosen), ("rejected", rejected)):
        if not completion:
            raise row_error(row, f"`{name}` has nothing after the prompt; give an answer, or drop the row")
    columns = other_columns(row, "prompt", "conversations", "instruction", "chosen", "rejected")
    return PreferenceRow(where=row.where, prompt=prompt, chosen=chosen, rejected=rejected, columns=columns)


def conversation_row(row: DatasetRow, column: str = "messages") -> ConversationRow:
    messages = column_content(row, column)
    if isinstance(messages, str):
        raise row_error(row, f"the column `{column}` must hold a list of messages, not text ({cell_text(messages)})")
    return ConversationRow(where=row.where, messages=messages, columns=other_columns(row, column))


def sharegpt_row(row: DatasetRow) -> ConversationRow:
    made = conversation_row(row, "conversations")
    columns = {name: value for name, value in made.columns.items() if name != "system"}
    return replace(made, messages=with_system(row, made.messages), columns=columns)


def alpaca_row(row: DatasetRow) -> CompletionRow:
    columns = other_columns(row, "instruction", "input", "output", "system", "history")
    answer = ({"role": ASSISTANT, "content": text_column(row, "output", required=True)},)
    return CompletionRow(where=row.where, prompt=alpaca_prompt(row), completion=answer, columns=columns)


def alpaca_prompt(row: DatasetRow) -> tuple[Message, ...]:
    """What a row of Alpaca's asks: the instruction, and below it the input, if there is one."""
    asked, given = text_column(row, "instruction", required=True), text_column(row, "input")
    if row.columns.get("history"):
        raise row_error(row, "the column `history` is not read; write the whole conversation as `messages`")
    text = as_plain_text([{"content": each} for each in (asked, given) if each])
    return with_system(row, ({"role": "user", "content": text},))


def with_system(row: DatasetRow, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    system = text_column(row, "system")
    if system and any(message["role"] == "system" for message in messages):
        raise row_error(row, "a system message is in the conversation and in the column `system`; keep one")
    return ({"role": "system", "content": system}, *messages) if system else messages


PROMPT_COLUMNS: Mapping[str, tuple[tuple[str, ...], Callable[[DatasetRow], Content]]] = {
    "prompt": ((), lambda row: column_content(row, "prompt")),
    "conversations": (("system",), lambda row: sharegpt_row(row).messages),
    "instruction": (SYSTEM_AND_INPUT, alpaca_prompt),
}
"""Columns that may hold the prompt of a row with two answers, in order: those read with each, and what reads it."""


FORMATS: Mapping[RowFormat, tuple[tuple[str, ...], tuple[str, ...], Callable[[DatasetRow], FormattedRow]]] = {
    RowFormat.PREFERENCE: (("chosen", "rejected"), ("weight", "tie"), preference_row),
    RowFormat.PROMPT_COMPLETION: (("prompt", "completion"), (), completion_row),
    RowFormat.MESSAGES: (("messages",), (), conversation_row),
    RowFormat.SHAREGPT: (("conversations",), ("system",), sharegpt_row),
    RowFormat.ALPACA: (("instruction", "output"), SYSTEM_AND_INPUT, alpaca_row),
}
"""For each format: the columns by which it is recognised, others that it reads, and the function that reads a row."""


def column_content(row: DatasetRow, name: str) -> Content:
    """A column as non-empty text, or as one or more messages."""
    value = row.columns.get(name)
    if (isinstance(value, Sequence) and len(value) == 0) or value is None:
        problem = f"the column `{name}` is empty" if name in row.columns else f"there is no column `{name}`"
        raise row_error(row, f"{problem}; fill it or drop the row")
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return (checked_message(value, f"{row.where}: the column `{name}`"),)
    if isinstance(value, list | tuple):
        place = f"{row.where}: the column `{name}`, message"
        return tuple(checked_message(message, f"{place} {number}") for number, message in enumerate(value))
    raise row_error(row, f"the column `{name}` must hold text or a list of messages, not {cell_text(value)}")


def text_column(row: DatasetRow, name: str, *, required: bool = False) -> str:
    value = column_content(row, name) if required else row.columns.get(name) or ""
    if not isinstance(value, str):
        raise row_error(row, f"the column `{name}` must hold text, not {cell_text(value)}")
    return value


def tools_of(row: FormattedRow) -> Sequence[Mapping[str, object]]:
    """The tools that a row's column `tools` describes to the chat template; empty without the column."""
    tools = row.columns.get(TOOLS)
    if tools is None:
        return ()
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise UserError(
            f"{row.where}: the column `{TOOLS}` must hold a list of tools, not {cell_text(tools)}; for text set"
            f" task.json_columns: [{TOOLS}]"
        )
    return tools


def same_kind(prompt: Content, completion: Content) -> tuple[Content, Content]:
    if isinstance(prompt, str) and not isinstance(completion, str):
        return ({"role": "user", "content": prompt},), completion
    if isinstance(completion, str) and not isinstance(prompt, str):
        return prompt, ({"role": "assistant", "content": completion},)
    return prompt, completion


def common_prompt(row: DatasetRow, chosen: Content, rejected: Content) -> tuple[Content, tuple[Content, Content]]:
    """The implicit prompt of two completions, and the rest of each."""
    size = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
    if isinstance(chosen, str) and isinstance(rejected, str):
        ends = (
            end for end in range(size, 0, -1) if chosen[end : end + 1].isspace() and rejected[end : end + 1].isspace()
        )
        size = next((end for end in ends if not chosen[end - 1].isspace()), size)
    if size == 0:
        raise row_error(row, "`chosen` and `rejected` have no common beginning as a prompt; add a column `prompt`")
    return chosen[:size], (chosen[size:], rejected[size:])


def as_column(content: Content) -> str | list[Message]:
    """Text, or messages as rows have them."""
    return content if isinstance(content, str) else [*content]


def other_columns(row: DatasetRow, *names: str) -> dict[str, object]:
    return {name: value for name, value in row.columns.items() if name not in names}


def row_error(row: DatasetRow, problem: str) -> UserError:
    return UserError(f"{row.where}: {problem}")


def cell_text(value: object) -> str:
    return f"{str(value)[:80]!r} ({type(value).__name__})"
