"""A dataset's prompt in the shape of the options: text or messages, short enough.

Long prompts are found without counting the tokens of all: a token is at least a byte of text, so short texts need no
tokenizer.
"""

import unicodedata
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

from posttrain.errors import UserError
from posttrain.models.messages import as_plain_text, checked_messages
from posttrain.models.rendering import TooLongText
from posttrain.options.dataset import DatasetOptions
from posttrain.tasks.base import Messages


def prompt_content(given: str | Sequence[Mapping[str, object]], options: DatasetOptions, where: str) -> str | Messages:
    """Text for `prompt_format: plain`, and for text that needs no template; else messages, the system's first.

    Raises UserError, at `where`, for malformed messages, or if the assistant's is last where that is not allowed.
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
            raise UserError(f"{where}: the prompt has a system message; leave task.system out, or remove it")
        messages = [{"role": "system", "content": options.system}, *messages]
    return as_plain_text(messages) if plain else messages


def open_messages(messages: list[dict[str, str]], options: DatasetOptions, where: str) -> list[dict[str, str]]:
    """Messages that end before the assistant's answer, or begin it."""
    if messages[-1]["role"] != "assistant" or options.last_assistant_message == "prefill":
        return messages
    if options.last_assistant_message == "drop":
        return open_messages(messages[:-1], options, where)
    raise UserError(
        f"{where}: the last message is the assistant's: {messages[-1]['content'][:60]!r}.  Set"
        " task.last_assistant_message: `drop` leaves it out, `prefill` makes it the beginning of the model's answer."
    )


SPARE = 16
"""Tokens that a template may add to what it adds to the shortest texts."""


class LengthLimit:
    """The greatest number of tokens of a prompt."""

    def __init__(self, limit: int, count: Callable[[str | Messages], int]) -> None:
        """`count` gives a prompt's tokens as the policy sees them: system message, template and prefill included."""
        self.limit, self.count = limit, count
        self.added: dict[tuple[str, ...], int] = {}
        """Tokens around the texts of a conversation, by the roles in it."""

    def exceeded(self, prompt: str | Messages) -> str:
        """The number of tokens of a prompt that has too many, in words; else ""."""
        roles = () if isinstance(prompt, str) else tuple(message["role"] for message in prompt)
        if roles not in self.added:
            self.added[roles] = self.count(
                "a" if isinstance(prompt, str) else [{**each, "content": "a"} for each in prompt]
            )
        texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
        if self.added[roles] + SPARE + sum(map(most_tokens, texts)) <= self.limit:
            return ""
        try:
            tokens = self.count(prompt)
        except TooLongText as error:  # than the model can read, and so than the limit
            return f"more than {error.more_than}"
        return str(tokens) if tokens > self.limit else ""

    def cut(self, prompt: str | Messages) -> str | Messages:
        """The longest end of a prompt that fits.  Raises UserError if none does."""
        if isinstance(prompt, str):
            return self.longest_end(prompt, lambda text: text)
        opening = [message for message in prompt[:1] if message["role"] == "system"]
        turns = prompt[len(opening) :]
        for first in range(1, len(turns)):
            kept = [*opening, *turns[first:]]
            if turns[first]["role"] == "user" and not self.exceeded(kept):
                return kept
        last = turns[-1]
        return self.longest_end(last["content"], lambda text: [*opening, {**last, "content": text}])

    def longest_end(self, text: str, prompt_of: Callable[[str], str | Messages]) -> str | Messages:
        """A prompt with the longest end of a text with which it fits, to where its tokens grow with the text."""
        start = bisect_left(range(len(text)), True, key=lambda start: not self.exceeded(prompt_of(text[start:])))
        if start == len(text):
            raise UserError(f"nothing of the prompt fits into {self.limit} tokens; raise task.max_prompt_tokens")
        return prompt_of(text[start:])


def most_tokens(text: str) -> int:
    """An upper bound of a text's tokens: its bytes, also where a tokenizer decomposes letters first."""
    return max(len(text.encode()), len(unicodedata.normalize("NFKD", text).encode()))


def role_shape(prompt: object) -> tuple[str, ...]:
    """The roles of a conversation, on which a template's refusal depends; empty for text."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, str):
        return ()
    return tuple(str(message.get("role", message.get("from"))) for message in prompt if isinstance(message, Mapping))
