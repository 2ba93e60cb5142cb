"""The formats that rows of data come in, told from their columns, and the same row as a record.

| format | columns | record |
|---|---|---|
| labelled | `prompt`, `completion`, `label` (true: wanted, false: not) | `LabelledRow` |
| preference | `chosen`, `rejected`, and `prompt` unless it is implicit | `PreferenceRow` |
| prompt_completion | `prompt`, `completion` | `CompletionRow` |
| messages | `messages`: a whole conversation | `ConversationRow` |
| prompt | `prompt` | `PromptRow` |

A prompt or completion is text or a list of messages, each with the texts `role` and `content`; a message of the
assistant's that has `tool_calls` may go without content.  Where one of a row's is
text and another messages, the text becomes a message: a prompt the user's, a completion the assistant's.

**Implicit prompts.**  Of messages: the longest common prefix of `chosen` and `rejected`.  Of text: the longest common
prefix that ends in no white space and is followed by white space in both, which belongs to the completions; where there
is none, the longest common prefix.  Beside a prompt, completions of messages that both begin with it lose it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from posttrain.errors import UserError
from posttrain.tasks.rows import DatasetRow

Message = Mapping[str, object]
"""`role` and `content`, both texts, and whatever else the row says."""
Content = str | tuple[Message, ...]
"""Text as it stands, or messages for a chat template."""


class RowFormat(StrEnum):
    """What the columns of a row say it is, in the order in which they are asked."""

    LABELLED = "labelled"
    PREFERENCE = "preference"
    PROMPT_COMPLETION = "prompt_completion"
    MESSAGES = "messages"
    PROMPT = "prompt"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """A problem to be answered."""

    where: str
    prompt: Content
    columns: Mapping[str, object]
    """Every column that is not part of the format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRow(PromptRow):
    """A problem with the answer that is to be learned."""

    completion: Content


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledRow(CompletionRow):
    """A problem with an answer that is wanted or not."""

    label: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceRow(PromptRow):
    """A problem with two answers, of which one was preferred."""

    chosen: Content
    rejected: Content


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationRow:
    """A conversation, the assistant's turns included."""

    where: str
    messages: tuple[Message, ...]
    columns: Mapping[str, object]
    """Every other column."""


FormattedRow = PromptRow | ConversationRow
TOOLS = "tools"
"""The column that describes the tools which the messages of a row may call."""

REQUIRED: Mapping[RowFormat, tuple[str, ...]] = {
    RowFormat.LABELLED: ("prompt", "completion", "label"),
    RowFormat.PREFERENCE: ("chosen", "rejected"),
    RowFormat.PROMPT_COMPLETION: ("prompt", "completion"),
    RowFormat.MESSAGES: ("messages",),
    RowFormat.PROMPT: ("prompt",),
}
"""The columns by which a format is told."""


def told_format(rows: Sequence[DatasetRow], accepted: Sequence[RowFormat] = tuple(RowFormat)) -> RowFormat:
    """The first of the accepted formats whose columns the first row has; every other row is of it too, or at fault."""
    assert rows, "rows are read, and known to be some, before their format is told"
    columns = rows[0].columns
    for each in accepted:
        if all(name in columns for name in REQUIRED[each]):
            return each
    wanted = "; ".join(f"{each}: {', '.join(REQUIRED[each])}" for each in accepted)
    raise UserError(
        f"{rows[0].where}: its columns are of no format that is taken here. It has {', '.join(columns) or 'none'};"
        f" the formats are {wanted}. Rename columns by `columns`, such as {{prompt: question}}."
    )


def formatted(rows: Sequence[DatasetRow], format: RowFormat) -> list[FormattedRow]:
    """Rows of one format as records.  Raises UserError with the place of the first that is none."""
    return [RECORDS[format](row) for row in rows]


def prompt_row(row: DatasetRow) -> PromptRow:
    """A row with a prompt alone."""
    return PromptRow(where=row.where, prompt=content_of(row, "prompt"), columns=others(row, "prompt"))


def completion_row(row: DatasetRow) -> CompletionRow:
    """A row with a prompt and its completion."""
    prompt, completion = alike(content_of(row, "prompt"), content_of(row, "completion"))
    columns = others(row, "prompt", "completion")
    return CompletionRow(where=row.where, prompt=prompt, completion=completion, columns=columns)


def labelled_row(row: DatasetRow) -> LabelledRow:
    """A row with a prompt, a completion and a label: true and false, or 1 and 0."""
    plain, label = completion_row(row), row.columns.get("label")
    if not isinstance(label, bool | int) or label not in (0, 1):
        raise fault(row, f"the column `label` must be true or false, not {excerpt(label)}")
    columns = others(row, "prompt", "completion", "label")
    return LabelledRow(
        where=row.where, prompt=plain.prompt, completion=plain.completion, label=bool(label), columns=columns
    )


def preference_row(row: DatasetRow) -> PreferenceRow:
    """A row with two completions; the prompt they have in common is found where no column holds it."""
    chosen, rejected = content_of(row, "chosen"), content_of(row, "rejected")
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise fault(row, "`chosen` and `rejected` must both be text or both be messages")
    if row.columns.get("prompt") is None:
        prompt, (chosen, rejected) = common_prompt(row, chosen, rejected)
    else:
        prompt = content_of(row, "prompt")
        (prompt, chosen), (_, rejected) = alike(prompt, chosen), alike(prompt, rejected)
        if not isinstance(prompt, str) and chosen[: len(prompt)] == prompt == rejected[: len(prompt)]:
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    for name, completion in (("chosen", chosen), ("rejected", rejected)):
        if not completion:
            raise fault(row, f"nothing is left of `{name}` behind the prompt; give an answer, or drop the row")
    columns = others(row, "prompt", "chosen", "rejected")
    return PreferenceRow(where=row.where, prompt=prompt, chosen=chosen, rejected=rejected, columns=columns)


def conversation_row(row: DatasetRow) -> ConversationRow:
    """A row with a whole conversation."""
    messages = content_of(row, "messages")
    if isinstance(messages, str):
        raise fault(row, f"the column `messages` must hold a list of messages, not text ({excerpt(messages)})")
    return ConversationRow(where=row.where, messages=messages, columns=others(row, "messages"))


RECORDS: Mapping[RowFormat, Callable[[DatasetRow], FormattedRow]] = {
    RowFormat.LABELLED: labelled_row,
    RowFormat.PREFERENCE: preference_row,
    RowFormat.PROMPT_COMPLETION: completion_row,
    RowFormat.MESSAGES: conversation_row,
    RowFormat.PROMPT: prompt_row,
}
"""What makes a record of a row."""


def content_of(row: DatasetRow, name: str) -> Content:
    """A column as text that is not empty, or as messages of which there are some."""
    value = row.columns.get(name)
    if (isinstance(value, Sequence) and len(value) == 0) or value is None:
        problem = f"the column `{name}` is empty" if name in row.columns else f"there is no column `{name}`"
        raise fault(row, f"{problem}; fill it or drop the row")
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        return tuple(message_of(row, name, number, message) for number, message in enumerate(value))
    raise fault(row, f"the column `{name}` must hold text or a list of messages, not {excerpt(value)}")


def message_of(row: DatasetRow, name: str, number: int, message: object) -> Message:
    """A message with a role and a text, empty where it calls tools and says nothing.

    Keys without a value are left out, as Parquet gives each message all keys.
    """
    if isinstance(message, Mapping) and isinstance(message.get("role"), str):
        given = {key: value for key, value in message.items() if value is not None}
        if isinstance(given.get("content"), str):
            return given
        if "content" not in given and is_call(given):
            return {**given, "content": ""}
    foreign = isinstance(message, Mapping) and {"from", "value"} <= message.keys()
    renamed = " (`from` and `value` are ShareGPT's names for them)" if foreign else ""
    raise fault(
        row,
        f"the column `{name}`, message {number}: {excerpt(message)} must have the texts `role` and `content`{renamed},"
        ' such as {"role": "user", "content": "…"}',
    )


def is_call(message: Message) -> bool:
    """Whether a message calls tools, so that it need not say anything."""
    calls = message.get("tool_calls")
    return isinstance(calls, list | tuple) and len(calls) > 0 and message["role"] == "assistant"


def tools_of(row: FormattedRow) -> Sequence[Mapping[str, object]]:
    """The tools that a row's column `tools` describes to the chat template; none where it is empty or not there."""
    tools = row.columns.get(TOOLS)
    if tools is None:
        return ()
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise UserError(
            f"{row.where}: the column `{TOOLS}` must hold a list of descriptions of tools, not {excerpt(tools)}; one"
            f" that is text is read by task.json_columns: [{TOOLS}]"
        )
    return tools


def alike(prompt: Content, completion: Content) -> tuple[Content, Content]:
    """Both as text or both as messages."""
    if isinstance(prompt, str) and not isinstance(completion, str):
        return ({"role": "user", "content": prompt},), completion
    if isinstance(completion, str) and not isinstance(prompt, str):
        return prompt, ({"role": "assistant", "content": completion},)
    return prompt, completion


def common_prompt(row: DatasetRow, chosen: Content, rejected: Content) -> tuple[Content, tuple[Content, Content]]:
    """The implicit prompt of two completions, and what is left of them."""
    size = 0
    while size < min(len(chosen), len(rejected)) and chosen[size] == rejected[size]:
        size += 1
    if isinstance(chosen, str) and isinstance(rejected, str):
        size = word_end(chosen, rejected, size)
    if size == 0:
        raise fault(
            row,
            "`chosen` and `rejected` begin with nothing in common, so that there is no prompt; add a column `prompt`",
        )
    return chosen[:size], (chosen[size:], rejected[size:])


def word_end(chosen: str, rejected: str, common: int) -> int:
    """Where the longest prefix within the first `common` characters ends that white space follows in both texts."""
    for size in range(common, 0, -1):
        if chosen[size : size + 1].isspace() and rejected[size : size + 1].isspace() and not chosen[size - 1].isspace():
            return size
    return common


def others(row: DatasetRow, *names: str) -> dict[str, object]:
    """The columns of a row that are not part of its format."""
    return {name: value for name, value in row.columns.items() if name not in names}


def fault(row: DatasetRow, problem: str) -> UserError:
    """What to raise of a row."""
    return UserError(f"{row.where}: {problem}")


def excerpt(value: object) -> str:
    """A value that is not what it should be, cut, with its type."""
    return f"{str(value)[:80]!r} ({type(value).__name__})"
