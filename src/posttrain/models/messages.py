"""Chat messages as rows and callers give them: checked, and where a model has no template, written as plain text.

A message has `role` and `content`, or ShareGPT's `from` and `value`.  Content is text, or parts of text, which are
joined.  A message of the assistant's may say whether it is learned: `weight` (OpenAI's), `train` (Axolotl's) or `loss`
(ms-swift's), each 0 or 1, false or true.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.errors import UserError

BETWEEN_MESSAGES = "\n\n"
"""Stands between the contents of two messages that are written as plain text."""
ASSISTANT = "assistant"
SHAREGPT_ROLES: Mapping[object, str] = {
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "model": ASSISTANT,
    "assistant": ASSISTANT,
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
"""Who speaks, by ShareGPT's names."""
LEARNED_KEYS = ("weight", "train", "loss")
"""Keys by which a message says whether it is learned."""
REFUSED_KEYS = ("loss_scale", "train_detail", "training", "trainable", "masked", "loss_mask", "mask", "learn")
"""Keys that have other libraries learn a message in part, or look like those that say whether it is learned."""
KNOWN_KEYS = frozenset({"role", "content", "tool_calls", *LEARNED_KEYS})
"""Keys of messages that are read, whatever the chat template reads."""


def checked_messages(content: Sequence[object], where: str) -> list[dict[str, Any]]:
    """The messages of a prompt, each of them known to have a role and a text."""
    messages = [
        checked_message(message, f"{where}: message {number} of the prompt") for number, message in enumerate(content)
    ]
    if not any(message["role"] != ASSISTANT for message in messages):
        raise UserError(f"{where}: the prompt has no message of a user; give at least one")
    return messages


def checked_message(message: object, where: str) -> dict[str, Any]:
    """A message with the texts `role` and `content`; the content is empty where it calls tools and says nothing.

    Keys without a value are left out: columns of a Parquet file give them to every message.
    """
    given = {key: value for key, value in message.items() if value is not None} if isinstance(message, Mapping) else {}
    if "role" not in given and {"from", "value"} <= given.keys():
        given = from_sharegpt(given, where)
    if not isinstance(given.get("role"), str) or ("content" not in given and not is_call(given)):
        raise UserError(
            f"{where}: {str(message)[:80]!r} must have the texts `role` and `content`, such as"
            ' {"role": "user", "content": "…"}'
        )
    return {**given, "content": content_text(given.get("content", ""), where)}


def from_sharegpt(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A message of ShareGPT's with our names."""
    role = SHAREGPT_ROLES.get(message["from"]) if isinstance(message["from"], str) else None
    if role is None:
        raise UserError(
            f"{where}: from = {message['from']!r} is not a known speaker.  Known are"
            f" {', '.join(map(str, SHAREGPT_ROLES))}.  Rename it, or write the message with `role` and `content`."
        )
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {"role": role, "content": message["value"], **rest}


def is_call(message: Mapping[str, Any]) -> bool:
    """Whether a message calls tools, so that it need not say anything."""
    calls = message.get("tool_calls")
    return isinstance(calls, list | tuple) and len(calls) > 0 and message["role"] == ASSISTANT


def learned_mark(message: Mapping[str, Any], where: str) -> bool | None:
    """Whether a message says that it is learned; None where it says nothing.  Raises UserError of any other value."""
    for key in REFUSED_KEYS:
        if message.get(key) is not None:
            raise UserError(
                f"{where}: the key `{key}` is not supported.  Remove it, or mark whole messages by `weight` or `train`"
                " (0: only read, 1: learned)."
            )
    marks = {key: message[key] for key in LEARNED_KEYS if message.get(key) is not None}
    for key, value in marks.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise UserError(
                f"{where}: {key} = {value!r} must be 0 or 1 (false or true): is the message only read, or learned?"
            )
    if len({bool(value) for value in marks.values()}) > 1:
        raise UserError(f"{where}: {', '.join(marks)} contradict each other.  Keep one of them.")
    if any(marks.values()) and message["role"] != ASSISTANT:
        raise UserError(
            f"{where}: {next(iter(marks))} asks to learn a message of the role {message['role']}, and only those of"
            " the assistant are learned.  Remove the key there."
        )
    return bool(next(iter(marks.values()))) if marks else None


def require_unmarked(messages: Sequence[Mapping[str, Any]], where: str, reason: str) -> None:
    """Refuse messages of which one is marked as not learned, where none can be left out."""
    for number, message in enumerate(messages):
        if learned_mark(message, f"{where}, message {number}") is False:
            raise UserError(f"{where}, message {number}: is marked as not learned, and {reason}.  Leave the row out.")


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
                f'{where}, part {number}: {str(part)[:80]} is not text, such as {{"type": "text", "text": "…"}}.  Only'
                " text is read: leave the row out, or say the rest in words."
            )
        texts.append(text)
    return "".join(texts)


def as_plain_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """The contents alone, without roles, with an empty line between two: what a model without a template reads."""
    return BETWEEN_MESSAGES.join(str(message["content"]) for message in messages)


def plain_answer(answer: str | Sequence[Mapping[str, Any]], where: str) -> str:
    """An answer as plain text, which is learned whole."""
    if isinstance(answer, str):
        return answer
    require_unmarked(answer, where, "task.prompt_format = plain writes the answer as one text")
    return as_plain_text(answer)
