"""Prompts of more tokens than allowed: told from the others without counting the tokens of all, and cut where asked.

No token stands for less than a byte of what it was made from, so a text of few enough bytes needs no tokenizer.
"""

import unicodedata
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from posttrain.errors import UserError
from posttrain.models.rendering import TooLongText
from posttrain.tasks.base import Messages

Rendered = TypeVar("Rendered")
CountTokens = Callable[[str | Messages], int]
"""Tokens of a prompt as the policy sees it: system message, template and prefill included."""
SPARE = 16
"""Tokens that a template may add to what it adds to the shortest texts."""


class LengthLimit:
    """At most so many tokens."""

    def __init__(self, limit: int, count: CountTokens) -> None:
        self.limit, self.count = limit, count
        self.added: dict[tuple[str, ...], int] = {}
        """Tokens around the texts of a conversation, by the roles in it."""

    def exceeded(self, prompt: str | Messages) -> str:
        """How many tokens a prompt has that has too many, in words; empty of one that fits."""
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
        """The longest end of a prompt that fits.  Raises UserError where nothing of it does."""
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

        def fits(start: int) -> bool:
            return not self.exceeded(prompt_of(text[start:]))

        start = bisect_left(range(len(text)), True, key=fits)
        if start == len(text):
            raise UserError(
                f"nothing of the prompt fits into {self.limit} tokens; allow more by task.max_prompt_tokens"
            )
        return prompt_of(text[start:])


def most_tokens(text: str) -> int:
    """No fewer than a text's tokens: its bytes, also where a tokenizer spells letters out before it begins."""
    if text.isascii():
        return len(text)
    return max(len(text.encode()), len(unicodedata.normalize("NFKD", text).encode()))


def role_shape(prompt: object) -> tuple[str, ...]:
    """The roles of a conversation, on which a template's refusal depends; of text none."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, str):
        return ()
    return tuple(str(message.get("role", message.get("from"))) for message in prompt if isinstance(message, Mapping))
