"""Chat messages of rows and callers: checked, and written as plain text for a model without a template.

A message has `role` and `content`, or ShareGPT's `from` and `value`.  Content is text, or a list of text parts, which
are joined.  An assistant message may say whether it is learned: `weight` (OpenAI), `train` (Axolotl) or `loss`
(ms-swift), each 0 or 1, false or true.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.errors import UserError

ASSISTANT = "assistant"
SHAREGPT_ROLES: Mapping[object, str] = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "model", "assistant"), ASSISTANT),
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
"""Roles by ShareGPT's names."""
LEARNED_KEYS = ("weight", "train", "loss")
"""Keys by which a message says whether it is learned."""
REFUSED_KEYS = ("loss_scale", "train_detail", "training", "trainable", "masked", "loss_mask", "mask", "learn")
"""Keys by which other libraries mask parts of a message, or that look like `LEARNED_KEYS`."""
KNOWN_KEYS = frozenset({"role", "content", "tool_calls", *LEARNED_KEYS})
"""Keys of messages that are read in addition to those of the chat template."""
WRONG_MESSAGE = 'must have the texts `role` and `content`, such as {"role": "user", "content": "…"}'


def checked_messages(content: Sequence[object], where: str) -> list[dict[str, Any]]:
    messages = [checked_message(each, f"{where}: message {i} of the prompt") for i, each in enumerate(content)]
    if not any(message["role"] != ASSISTANT for message in messages):
        raise UserError(f"{where}: the prompt has no user message.  Add one.")
    return messages


def checked_message(message: object, where: str) -> dict[str, Any]:
    """A message with the texts `role` and `content`, without the empty keys that a Parquet file's columns add."""
    given = {key: value for key, value in message.items() if value is not None} if isinstance(message, Mapping) else {}
    if "role" not in given and {"from", "value"} <= given.keys():
        role = SHAREGPT_ROLES.get(given["from"]) if isinstance(given["from"], str) else None
        if role is None:
            known = ", ".join(map(str, SHAREGPT_ROLES))
            raise UserError(f"{where}: from = {given['from']!r} is unknown.  Use {known}, or `role` and `content`.")
        given = {"role": role, "content": given.pop("value"), **given}
        del given["from"]
    if not isinstance(given.get("role"), str) or ("content" not in given and not makes_call(given)):
        raise UserError(f"{where}: {str(message)[:80]!r} {WRONG_MESSAGE}.")
    return {**given, "content": content_text(given.get("content", ""), where)}


def makes_call(message: Mapping[str, Any]) -> bool:
    calls = message.get("tool_calls")
    return isinstance(calls, list | tuple) and len(calls) > 0 and message["role"] == ASSISTANT


def learned_mark(message: Mapping[str, Any], where: str) -> bool | None:
    """Whether a message is marked as learned (True) or not learned (False); None without a mark."""
    marks = {key: message[key] for key in LEARNED_KEYS if message.get(key) is not None}
    refused = [key for key in REFUSED_KEYS if message.get(key) is not None]
    odd = [key for key, value in marks.items() if not isinstance(value, bool | int | float) or value not in (0, 1)]
    fault = ""
    if refused:
        fault = f"the key `{refused[0]}` is not supported.  Mark whole messages by `weight` or `train` (0 or 1)."
    elif odd:
        fault = f"{odd[0]} = {marks[odd[0]]!r} must be 0 (only read) or 1 (learned)."
    elif len({bool(value) for value in marks.values()}) > 1:
        fault = f"{', '.join(marks)} contradict each other.  Keep one of them."
    elif any(marks.values()) and message["role"] != ASSISTANT:
        fault = f"{next(iter(marks))} marks a {message['role']} message as learned; only assistants' are.  Remove it."
    if fault:
        raise UserError(f"{where}: {fault}")
    return next((bool(mark) for mark in marks.values()), None)


def require_unmarked(messages: Sequence[Mapping[str, Any]], where: str, reason: str) -> None:
    """Refuse messages that are marked as not learned, where that is not possible."""
    for number, message in enumerate(messages):
        if learned_mark(message, f"{where}, message {number}") is False:
            raise UserError(f"{where}, message {number}: is marked as not learned, and {reason}.  Remove the row.")


def content_text(content: object, where: str) -> str:
    """The text of a message's content, which may be a list of text parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple) or not content:
        raise UserError(f"{where}: its content is {str(content)[:80]!r}; it {WRONG_MESSAGE}.")
    texts = []
    for number, part in enumerate(content):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise UserError(
                f'{where}, part {number}: {str(part)[:80]} is not text, such as {{"type": "text", "text": "…"}}.'
                "  Remove the row, or write the rest as text."
            )
        texts.append(text)
    return "".join(texts)


def as_plain_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """The contents without roles, separated by empty lines, for a model without a template."""
    return "\n\n".join(str(message["content"]) for message in messages)


def plain_answer(answer: str | Sequence[Mapping[str, Any]], where: str) -> str:
    if isinstance(answer, str):
        return answer
    require_unmarked(answer, where, "task.prompt_format = plain writes the answer as one text")
    return as_plain_text(answer)
