"""Turns that are written one after the other as text, without a template."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from posttrain.environments.protocol import Said, SaidAndReply
from posttrain.errors import UserError
from posttrain.models.given_text import CUT, GivenText
from posttrain.models.messages import ASSISTANT
from posttrain.models.rendering import TokenizerRenderer
from posttrain.records import Prompt


class TextTurns:
    """Replies as text after what was said: for plain prompts, and for tools that answer in place."""

    def __init__(self, renderer: TokenizerRenderer, stop_ids: Sequence[int]) -> None:
        self.renderer, self.stop_ids = renderer, frozenset(stop_ids)
        self.given = GivenText(renderer.tokenizer)

    def opened(self, prompt: Prompt, added: Said) -> Prompt:
        """The prompt with a text added before the beginning of the answer."""
        text = prompt.text.removesuffix(prompt.prefill) + self.given.cut(require_text(added, prompt.id))
        rendered = self.renderer.render(text, id=prompt.id, prefill=prompt.prefill, columns=prompt.columns)
        return opened_prompt(self.given, prompt, rendered, self.renderer.prefix)

    def said(self, tokens: Sequence[int]) -> str:
        ended = len(tokens) > 0 and tokens[-1] in self.stop_ids
        return str(self.renderer.tokenizer.decode([*(tokens[:-1] if ended else tokens)], skip_special_tokens=False))

    def reply_tokens(self, prompt: Prompt, turns: Sequence[SaidAndReply]) -> tuple[int, ...]:
        reply = require_text(turns[-1].reply, prompt.id)
        return tuple(self.given.tokens(self.given.cut(reply), continues=True))

    def messages(self, turns: Sequence[SaidAndReply], said: str | None) -> tuple[Mapping[str, object], ...]:
        """One message of the assistant, replies included."""
        text = "".join(f"{each.said}{require_text(each.reply, 'a reply')}" for each in turns)
        return ({"role": ASSISTANT, "content": text + (said or "")},)


def opened_prompt(given: GivenText, before: Prompt, rendered: Prompt, prefix: Sequence[int] = ()) -> Prompt:
    """What was rendered of texts that were cut, without the cuts in it; `prefix` opens plain text."""
    tokens = rendered.tokens
    if CUT in rendered.text:
        made = given.tokens(rendered.text, continues=False)
        tokens = tuple(made) if made[: len(prefix)] == [*prefix] else (*prefix, *made)
    messages = rendered.messages
    if messages is not None:
        messages = tuple(
            {key: value.replace(CUT, "") if isinstance(value, str) else value for key, value in each.items()}
            for each in messages
        )
    text = rendered.text.replace(CUT, "")
    return replace(before, text=text, tokens=tokens, prefill=rendered.prefill, messages=messages)


def require_text(said: Said, where: str) -> str:
    """The text of a reply to a plain prompt.  Raises UserError for messages."""
    if isinstance(said, str):
        return said
    raise UserError(
        f"{where}: the environment gives messages, and the prompt is plain text.  Return text, or set"
        " task.prompt_format: chat."
    )
