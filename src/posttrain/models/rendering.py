"""From a problem to the tokens a model reads: text, chat template, prefill, and one tokenisation of the whole.

Joining pieces that were tokenised apart gives other tokens than the model was trained on ("ab" may be one token where
"a" and "b" are two), so the text is completed first and tokenised once, and the token ids travel with the prompt.
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from posttrain.errors import UserError
from posttrain.models.messages import checked_messages
from posttrain.records import Prompt
from posttrain.schemas import did_you_mean

PROBE = "a"
"""Any text, to learn which special tokens a tokenizer puts before it."""
OURS = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"tools", "documents"}
"""Arguments of the call itself, which no template option may take over."""
NO_TEMPLATE = (
    " has no chat template.  Use an instruction-tuned model, name a template's file as model.chat_template, or, of"
    " a dataset, have messages written as plain text by task.prompt_format: plain"
)


class TokenizerRenderer:
    """Renders prompts for the model that a tokenizer belongs to."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, template_options: Mapping[str, Any] | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.template_options = known_options(tokenizer, template_options or {})
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
        Messages get what their template writes and nothing else.  Where the template begins the answer with the
        prefill itself, as those of some thinking models do with `<think>`, it stands there once.
        """
        if isinstance(content, str):
            return self._prompt(content, None, id=id, prefill=prefill, columns=columns or {})
        messages = checked_messages(content, id)
        if messages[-1]["role"] == "assistant":
            prefill = messages.pop()["content"] + prefill
        text = self.templated(messages, id)
        if prefill and self._opening_of_answer(text, messages, id).endswith(prefill):
            text = text.removesuffix(prefill)
        return self._prompt(text, messages, id=id, prefill=prefill, columns=columns or {})

    def templated(self, messages: Sequence[Mapping[str, str]], id: str, *, open_answer: bool = True) -> str:
        """The text that the chat template makes of messages; `open_answer` ends it where the assistant speaks next."""
        if not self.tokenizer.chat_template:
            name = self.tokenizer.name_or_path or type(self.tokenizer).__name__
            raise UserError(f"prompt {id!r} is a list of messages, but the model's tokenizer ({name}){NO_TEMPLATE}.")
        if isinstance(self.tokenizer.chat_template, dict) and "default" not in self.tokenizer.chat_template:
            names = ", ".join(self.tokenizer.chat_template)
            raise UserError(
                f"the model's tokenizer has chat templates of the names {names} and none of the name default.  Put the"
                " one to use into a file, and name that as model.chat_template."
            )
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=open_answer,
                **self.template_options,
            )
        except TemplateSyntaxError as error:
            raise UserError(
                f"the chat template is no Jinja template: line {error.lineno}: {error.message}.  Mend it, or name"
                " another file as model.chat_template."
            ) from error
        except TemplateError as error:
            raise UserError(
                f"prompt {id!r}: the model's chat template refuses these messages: {error}"
                f" (roles: {', '.join(message['role'] for message in messages)}). Change the messages, for example"
                " move the system message into the first user message."
            ) from error
        assert isinstance(text, str)
        return text

    def _opening_of_answer(self, text: str, messages: Sequence[Mapping[str, str]], id: str) -> str:
        """What the template writes behind the messages to have the assistant speak; empty where that is not known."""
        before = self.templated(messages, id, open_answer=False)
        return text.removeprefix(before) if text.startswith(before) else ""

    def _prompt(
        self,
        text: str,
        messages: list[dict[str, str]] | None,
        *,
        id: str,
        prefill: str,
        columns: Mapping[str, object],
    ) -> Prompt:
        require_characters(text + prefill, id)
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


def known_options(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a chat template, each of which its text must speak of: a misspelt one would change nothing."""
    template = template_text(tokenizer)
    words = set(re.findall(r"\w+", template))
    for name in options:
        where = f"model.template_options.{name}"
        if name in OURS:
            raise UserError(f"{where}: that is decided where the template is called; leave it out")
        if not template:
            raise UserError(f"{where}: the model's tokenizer{NO_TEMPLATE}, and leave model.template_options out.")
        if name not in words:
            near = did_you_mean(name, words)
            hint = near if near.startswith("Did") else "Look for `if` in it to see which it reads."
            raise UserError(f"{where}: the chat template reads no variable of that name.  {hint}")
    return dict(options)


def template_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of a tokenizer's chat template, or templates; empty where it has none."""
    template = tokenizer.chat_template
    return "\n".join(template.values()) if isinstance(template, dict) else template or ""


def require_characters(text: str, id: str) -> None:
    """Refuse half of a surrogate pair, which JSON can say, no tokenizer reads, and no UTF-8 file can hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"prompt {id!r}: half of a surrogate pair, {text[error.start]!a}, before {text[error.end :][:20]!a} is no"
            " character.  Mend the text, or leave the row out."
        ) from error


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
