"""Chat messages as rows and callers give them: checked, and where a model has no template, written as plain text."""

from collections.abc import Mapping, Sequence

from posttrain.errors import UserError

BETWEEN_MESSAGES = "\n\n"
"""Stands between the contents of two messages that are written as plain text."""


def checked_messages(content: Sequence[object], where: str) -> list[dict[str, str]]:
    """The messages, each of them known to have a role and a text; parts of text are joined to one.

    Keys without a value are left out: columns of a Parquet file give them to every message.
    """
    messages = []
    for number, message in enumerate(content):
        place = f"{where}: message {number} of the prompt"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UserError(
                f"{place}: {str(message)[:80]!r} must have the texts `role` and `content`, such as"
                ' {"role": "user", "content": "…"}'
            )
        given = {key: value for key, value in message.items() if value is not None}
        messages.append({**given, "content": content_text(given.get("content"), place)})
    if not any(message["role"] != "assistant" for message in messages):
        raise UserError(f"{where}: the prompt has no message of a user; give at least one")
    return messages


def content_text(content: object, where: str) -> str:
    """The text of a message's content, which may come as parts of text that follow one another."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple) or not content:
        raise UserError(
            f"{where}: {str(content)[:80]!r} as its content: it must have the texts `role` and `content`, such as"
            ' {"role": "user", "content": "…"}'
        )
    texts = []
    for number, part in enumerate(content):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise UserError(
                f'{where}, part {number}: {str(part)[:80]} is no text, such as {{"type": "text", "text": "…"}}.  Only'
                " text is read: leave the row out, or say the rest in words."
            )
        texts.append(text)
    return "".join(texts)


def as_plain_text(messages: Sequence[Mapping[str, str]]) -> str:
    """The contents alone, without roles, with an empty line between two: what a model without a template reads."""
    return BETWEEN_MESSAGES.join(message["content"] for message in messages)
