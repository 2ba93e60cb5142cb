"""From a problem to the tokens a model reads: text, chat template, prefill, and one tokenisation of the whole.

Joining pieces that were tokenised apart gives other tokens than the model was trained on ("ab" may be one token where
"a" and "b" are two), so the text is completed first and tokenised once, and the token ids travel with the prompt.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from posttrain.errors import UserError
from posttrain.records import Prompt

PROBE = "a"
"""Any text, to learn which special tokens a tokenizer puts before it."""


class TokenizerRenderer:
    """Renders prompts for the model that a tokenizer belongs to."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, template_options: Mapping[str, Any] | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.template_options = dict(template_options or {})
        """Further arguments of the chat template, such as `enable_thinking`."""
        self.prefix = opening_tokens(tokenizer)

    def render(
        self,
        content: str | Sequence[object],
        *,
        id: str,
        prefill: str = "",
        columns: Mapping[str, object] | None = None,
    ) -> Prompt:
        """Plain text as it stands, or messages through the model's chat template; `prefill` begins the answer.

        A last message of the assistant's is the beginning of its answer too, before `prefill`.  A tokenizer that
        opens plain text with a special token (BOS) does so here, once: the token is in `tokens` and not in `text`.
        Messages get what their template writes and nothing else.
        """
        if isinstance(content, str):
            return self._prompt(content, None, id=id, prefill=prefill, columns=columns or {})
        messages = checked_messages(content, id)
        if messages[-1]["role"] == "assistant":
            prefill = messages.pop()["content"] + prefill
        return self._prompt(self.templated(messages, id), messages, id=id, prefill=prefill, columns=columns or {})

    def _prompt(
        self,
        text: str,
        messages: list[dict[str, str]] | None,
        *,
        id: str,
        prefill: str,
        columns: Mapping[str, object],
    ) -> Prompt:
        tokens = token_ids(self.tokenizer, text + prefill, special=False)
        if messages is None and tokens[: len(self.prefix)] != self.prefix:
            tokens = self.prefix + tokens
        if not tokens:
            raise UserError(f"prompt {id!r} is empty; the model needs at least one token to go on from")
        return Prompt(
            id=id,
            text=text + prefill,
            tokens=tuple(tokens),
            prefill=prefill,
            messages=None if messages is None else tuple(messages),
            columns=dict(columns),
        )

    def templated(self, messages: Sequence[Mapping[str, str]], id: str, *, open_answer: bool = True) -> str:
        """The text that the chat template makes of messages; `open_answer` ends it where the assistant speaks next."""
        if not self.tokenizer.chat_template:
            raise UserError(
                f"prompt {id!r} is a list of messages, but the model's tokenizer"
                f" ({self.tokenizer.name_or_path or type(self.tokenizer).__name__}) has no chat template to write them"
                " with. Use an instruction-tuned model, put a chat_template.jinja into the model's folder, or give"
                " prompts as plain text (of a dataset, with task.chat: false and no task.system)."
            )
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=open_answer,
                **self.template_options,
            )
        except TemplateError as error:
            raise UserError(
                f"prompt {id!r}: the model's chat template refuses these messages: {error}"
                f" (roles: {', '.join(message['role'] for message in messages)}). Change the messages, for example"
                " move the system message into the first user message."
            ) from error
        assert isinstance(text, str)
        return text


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool) -> list[int]:
    """The tokens of a text, with or without what the tokenizer adds around it."""
    ids: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return ids


def opening_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The special tokens that a tokenizer puts before plain text.

    What it adds behind, such as EOS, would end the answer before it begins, and is left out.
    """
    bare, full = token_ids(tokenizer, PROBE, special=False), token_ids(tokenizer, PROBE, special=True)
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start]
    return []


def checked_messages(content: Sequence[object], id: str) -> list[dict[str, str]]:
    """The messages, each of them known to have a role and a text."""
    messages = []
    for number, message in enumerate(content):
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise UserError(
                f"prompt {id!r}, message {number}: {str(message)[:80]!r} must have the texts `role` and `content`,"
                ' such as {"role": "user", "content": "…"}'
            )
        messages.append(dict(message))
    if not any(message["role"] != "assistant" for message in messages):
        raise UserError(f"prompt {id!r} has no message of a user; give at least one")
    return messages
