"""From a problem to the tokens a model reads: text, chat template, prefill, and one tokenisation of the whole.

Joining pieces that were tokenised apart gives other tokens than the model was trained on ("ab" may be one token where
"a" and "b" are two), so the text is completed first and tokenised once, and the token ids travel with the prompt.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from posttrain.errors import UserError
from posttrain.models import chat_templates
from posttrain.models.chat_templates import (
    DATE,
    TODAY,
    TemplateTooSlow,
    bounded,
    known_options,
    require_no_powers,
    require_template,
    template_text,
    with_one_date,
)
from posttrain.models.messages import checked_messages
from posttrain.models.policy import Policy
from posttrain.records import Prompt

PROBE = "a"
"""Any text, to learn which special tokens a tokenizer puts before it."""
FIRST_LOOK = 8
"""Characters for each token that fits, of which a longer text is measured by its beginning; few texts have so many."""


class TooLongText(UserError):
    """A text that has more tokens than fit, known before all of it was made tokens."""

    def __init__(self, where: str, characters: int, limit: int) -> None:
        super().__init__(
            f"{where}: its {characters} characters are more than {limit} tokens, which is all that the model can read."
            "  Shorten it."
        )
        self.more_than = limit
        """Tokens that it has at least one more than."""


class TokenizerRenderer:
    """Renders prompts for the model that a tokenizer belongs to.

    With `most_tokens`, a text that cannot have so few is a `TooLongText` before it is made tokens: those of 8 MB take
    20 seconds and 3 GB.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template_options: Mapping[str, Any] | None = None,
        most_tokens: int | None = None,
    ) -> None:
        self.tokenizer, self.most_tokens = tokenizer, most_tokens
        template = template_text(tokenizer)
        self.template_options = known_options(template, template_options or {})
        """Further arguments of the chat template, such as `enable_thinking`."""
        self.template = with_one_date(template, self.template_options.pop(TODAY, DATE))
        """The text of the chat template; empty where the model has none for messages."""
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
        messages = checked_messages(content, f"prompt {id!r}")
        if messages[-1]["role"] == "assistant":
            prefill = messages.pop()["content"] + prefill
        text = self.templated(messages, id)
        if prefill and self._opening_of_answer(text, messages, id).endswith(prefill):
            text = text.removesuffix(prefill)
        return self._prompt(text, messages, id=id, prefill=prefill, columns=columns or {})

    def templated(
        self,
        messages: Sequence[Mapping[str, str]],
        id: str,
        *,
        open_answer: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The text that the chat template makes of messages; `open_answer` ends it where the assistant speaks next.

        `tools` are those that the messages may call, as the template wants them described.
        """
        require_template(self.tokenizer, id)
        if tools and "tools" not in self.template:
            raise UserError(
                f"prompt {id!r}: its column `tools` describes tools, and the chat template does not read them.  Drop"
                " the column, or name a template that does as model.chat_template."
            )
        require_no_powers(self.template)
        try:
            text = bounded(
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
            raise UserError(
                f"the chat template is not a Jinja template: line {error.lineno}: {error.message}.  Mend it, or name"
                " another file as model.chat_template."
            ) from error
        except TemplateError as error:
            roles = [message["role"] for message in messages]
            remedy = "move the system message into the first user message" if "system" in roles else "keep one turn"
            raise UserError(
                f"prompt {id!r}: the model's chat template refuses these messages: {error} (roles: {', '.join(roles)})."
                f"  Change the messages (for example {remedy}), or use a model whose template takes them."
            ) from error
        except Exception as error:
            raise template_error(error, messages, id) from error
        assert isinstance(text, str)
        return text

    def tokens(self, text: str, where: str) -> list[int]:
        """The tokens of a text, without what the tokenizer adds around it.  Raises TooLongText, named by `where`."""
        if self.most_tokens is not None:
            require_text_that_may_fit(self.tokenizer, text, self.most_tokens, where)
        return token_ids(self.tokenizer, text, special=False)

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
        tokens = self.tokens(text + prefill, f"prompt {id!r}")
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


def template_error(error: Exception, messages: Sequence[Mapping[str, str]], id: str) -> UserError:
    """What to say of a template that fails at messages in another way than by refusing them."""
    if isinstance(error, TemplateTooSlow):
        fails = f"takes more than {chat_templates.SECONDS:g} seconds of processor time over"
    elif isinstance(error, MemoryError):
        fails = "needs more memory than a template may have for"
    else:
        fails = f"fails with {type(error).__name__} ({error}) at"
    return UserError(
        f"prompt {id!r}: the model's chat template {fails} these messages (roles:"
        f" {', '.join(message['role'] for message in messages)}).  Change the messages, or name another template as"
        " model.chat_template."
    )


def renderer_of(policy: Policy, template_options: Mapping[str, Any] | None = None) -> TokenizerRenderer:
    """Renders what a policy is to read, and refuses what cannot fit into its context."""
    return TokenizerRenderer(policy.tokenizer, template_options=template_options, most_tokens=policy.max_positions)


def require_characters(text: str, id: str) -> None:
    """Refuse half of a surrogate pair, which JSON can say, no tokenizer reads, and no UTF-8 file can hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"prompt {id!r}: half of a surrogate pair, {text[error.start]!a}, before {text[error.end :][:20]!a} is not"
            " a character.  Mend the text, or leave the row out."
        ) from error


def require_text_that_may_fit(tokenizer: PreTrainedTokenizerBase, text: str, limit: int, where: str) -> None:
    """Refuse a text whose beginning alone has more than twice the tokens that are allowed.

    Twice, since a beginning may end within a word, which then has more tokens than the whole word.  A bound by bytes
    and the longest token would not do: those of a tokenizer may stand for 128 spaces, or for any word that it does not
    know.  Raises TooLongText.
    """
    size = FIRST_LOOK * (limit + FIRST_LOOK)
    while size < len(text):
        if len(token_ids(tokenizer, text[:size], special=False)) > 2 * limit + FIRST_LOOK:
            raise TooLongText(where, len(text), limit)
        size *= 2


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
