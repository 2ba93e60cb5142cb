"""From a prompt to the tokens that a model reads: chat template, prefill, and one tokenisation of the whole text.

Pieces that are tokenised separately give other tokens than the model was trained on: "ab" may be one token, "a" and "b"
two.  So the text is completed first and tokenised once, and the token ids travel with the prompt.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from posttrain.errors import UserError
from posttrain.models import chat_templates
from posttrain.models.messages import checked_messages
from posttrain.models.policy import Policy
from posttrain.records import Prompt

PROBE = "a"
"""Any text, to find the special tokens that a tokenizer puts before it."""
FIRST_LOOK = 8
"""A text with more characters per allowed token is first measured by its beginning; few texts have that many."""


class TooLongText(UserError):
    """A text with more tokens than fit, known before all of it was tokenised."""

    def __init__(self, where: str, characters: int, limit: int) -> None:
        super().__init__(
            f"{where}: its {characters} characters are more than {limit} tokens, the model's limit.  Shorten it."
        )
        self.more_than = limit


class TokenizerRenderer:
    """Renders prompts for the model of a tokenizer.

    With `most_tokens`, a text that certainly has more is a `TooLongText` before it is tokenised: 8 MB take 20 seconds
    and 3 GB.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template_options: Mapping[str, Any] | None = None,
        most_tokens: int | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.tokenizer, self.most_tokens = tokenizer, most_tokens
        self.tools = tools
        """Descriptions of the tools that every conversation may call, where a call names no others."""
        self.template, self.template_options = chat_templates.read_template(tokenizer, template_options or {})
        """The template (empty if the model has no template) and its further arguments, such as `enable_thinking`."""
        self.prefix = opening_tokens(tokenizer)

    def render(
        self,
        content: str | Sequence[object],
        *,
        id: str,
        prefill: str = "",
        columns: Mapping[str, object] | None = None,
    ) -> Prompt:
        """Render plain text unchanged, or messages through the model's chat template; `prefill` begins the answer.

        A last assistant message also begins the answer, before `prefill`.  A tokenizer that opens plain text with a
        special token (BOS) does so once, in `tokens` and not in `text`.  Messages get only what their template writes.
        A prefill that the template writes itself, as some do with `<think>`, is not repeated.
        """
        messages = None
        if isinstance(content, str):
            text = content
        else:
            messages = checked_messages(content, f"prompt {id!r}")
            if messages[-1]["role"] == "assistant":
                prefill = messages.pop()["content"] + prefill
            text = self.templated(messages, id)
            if prefill:
                before = self.templated(messages, id, open_answer=False)
                if text.startswith(before) and text.removeprefix(before).endswith(prefill):
                    text = text.removesuffix(prefill)
        try:
            (text + prefill).encode("utf-8")
        except UnicodeEncodeError as error:  # JSON allows it, and neither tokenizers nor UTF-8 files do
            half, after = (text + prefill)[error.start], (text + prefill)[error.end :][:20]
            fault = f"half of a surrogate pair, {half!a}, before {after!a} is not a character"
            raise UserError(f"prompt {id!r}: {fault}.  Correct the text, or remove the row.") from error
        tokens = self.tokens(text + prefill, f"prompt {id!r}")
        if messages is None and tokens[: len(self.prefix)] != self.prefix:
            tokens = self.prefix + tokens
        if not tokens:
            raise UserError(f"prompt {id!r} is empty.  Give at least one token.")
        return Prompt(
            id=id,
            text=text + prefill,
            tokens=tuple(tokens),
            prefill=prefill,
            messages=None if messages is None else tuple(messages),
            columns=dict(columns or {}),
        )

    def templated(
        self,
        messages: Sequence[Mapping[str, str]],
        id: str,
        *,
        open_answer: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The messages as text by the chat template; `open_answer` begins the assistant's next turn."""
        chat_templates.require_template(self.tokenizer, id)
        tools = tools or self.tools
        if tools and "tools" not in self.template:
            fault = f"prompt {id!r}: it describes tools, and the chat template does not read them"
            raise UserError(f"{fault}.  Remove `tools`, or set model.chat_template to a template that reads them.")
        chat_templates.require_no_powers(self.template)
        try:
            text = chat_templates.bounded(
                lambda: self.tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    chat_template=self.template,
                    tokenize=False,
                    add_generation_prompt=open_answer,
                    tools=[dict(tool) for tool in tools] or None,
                    **self.template_options,
                )
            )
        except TemplateSyntaxError as error:
            fault = f"is not a Jinja template: line {error.lineno}: {error.message}"
            raise UserError(f"the chat template {fault}.  {chat_templates.OTHER_TEMPLATE}") from error
        except Exception as error:
            raise template_error(error, messages, id) from error
        assert isinstance(text, str)
        return text

    def tokens(self, text: str, where: str) -> list[int]:
        """The tokens of a text, without special ones around it.  Raises TooLongText for far too many."""
        limit, size = self.most_tokens, FIRST_LOOK * ((self.most_tokens or 0) + FIRST_LOOK)
        while limit is not None and size < len(text):
            # Twice, because a beginning may end within a word, and a part can have more tokens than the word.  Bytes
            # and the longest token give no bound: one token may mean 128 spaces, or any unknown word.
            if len(token_ids(self.tokenizer, text[:size], special=False)) > 2 * limit + FIRST_LOOK:
                raise TooLongText(where, len(text), limit)
            size *= 2
        return token_ids(self.tokenizer, text, special=False)


def template_error(error: Exception, messages: Sequence[Mapping[str, str]], id: str) -> UserError:
    """A template that refuses messages or fails with them."""
    roles, remedy = [message["role"] for message in messages], "Change the messages"
    if isinstance(error, TemplateError):
        fault = f"refuses these messages: {error}"
        remedy = "Move the system message into the first user message" if "system" in roles else "Keep one turn"
    elif isinstance(error, chat_templates.TemplateTooSlow):
        fault = f"takes more than {chat_templates.SECONDS:g} seconds of processor time over these messages"
    elif isinstance(error, MemoryError):
        fault = "needs more memory than allowed for these messages"
    else:
        fault = f"fails with {type(error).__name__} ({error}) at these messages"
    said = f"the model's chat template {fault} (roles: {', '.join(roles)})"
    return UserError(f"prompt {id!r}: {said}.  {remedy}, or set model.chat_template to another file.")


def renderer_of(
    policy: Policy, template_options: Mapping[str, Any] | None = None, tools: Sequence[Mapping[str, Any]] = ()
) -> TokenizerRenderer:
    """A policy's renderer, which refuses texts that cannot fit into its context."""
    return TokenizerRenderer(
        policy.tokenizer, template_options=template_options, most_tokens=policy.max_positions, tools=tools
    )


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return ids


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of the vocabulary: equal digests mean that equal ids are equal tokens."""
    entries = sorted((number, token) for token, number in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


def opening_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The special tokens that a tokenizer puts before plain text; those after it, such as EOS, are ignored."""
    bare, full = token_ids(tokenizer, PROBE, special=False), token_ids(tokenizer, PROBE, special=True)
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start]
    return []
