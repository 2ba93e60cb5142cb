"""A prompt as a dataset has it, in the shape that the options ask for: text as it stands, or messages."""

from collections.abc import Mapping, Sequence

from posttrain.errors import UserError
from posttrain.models.messages import as_plain_text, checked_messages
from posttrain.options.dataset import DatasetOptions
from posttrain.tasks.base import Messages


def prompt_content(given: str | Sequence[Mapping[str, object]], options: DatasetOptions, where: str) -> str | Messages:
    """Text for `prompt_format: plain`, and for text that is asked for as it stands; else messages, the system's first.

    Raises UserError, at `where`, for messages that are none or that end with the assistant's where that is not allowed.
    """
    plain = options.prompt_format == "plain"
    if isinstance(given, str):
        if not options.system and options.prompt_format != "chat":
            return given
        messages = [{"role": "user", "content": given}]
    else:
        messages = open_messages(checked_messages(given, where), options, where)
    if options.system:
        if any(message["role"] == "system" for message in messages):
            raise UserError(f"{where}: the prompt has a system message of its own; leave task.system out or remove it")
        messages = [{"role": "system", "content": options.system}, *messages]
    return as_plain_text(messages) if plain else messages


def open_messages(messages: list[dict[str, str]], options: DatasetOptions, where: str) -> list[dict[str, str]]:
    """Messages that leave the assistant to speak, or begin what it says, as `last_assistant_message` has it."""
    if messages[-1]["role"] != "assistant" or options.last_assistant_message == "prefill":
        return messages
    if options.last_assistant_message == "drop":
        return open_messages(messages[:-1], options, where)
    raise UserError(
        f"{where}: the last message is the assistant's: {messages[-1]['content'][:60]!r}.  Say by"
        " task.last_assistant_message what it is: `drop` leaves it out, as the answer that it is in rows for supervised"
        " training; `prefill` gives it to the model as the beginning of its answer."
    )
