"""Turns as a chat template writes them: only what is new is rendered and encoded, and appended.

What the policy said is not rendered again.  A marker takes its place, which is found again in the template's output:

    T(messages so far, the policy's turn = MARK, the reply, the policy speaks next) = … MARK ⟨end⟩ ⟨reply⟩ ⟨opening⟩

After MARK comes the end of the policy's turn, including a stop token, which was sampled; the policy is given the rest
next.  Earlier ids stay, even if the template would now write them differently; `template_check` tests this before a
run.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.environments.protocol import Messages, Said, SaidAndReply
from posttrain.environments.text_turns import TextTurns, opened_prompt
from posttrain.environments.tool_calls import CallReader
from posttrain.errors import UserError
from posttrain.models.given_text import CUT, MARK
from posttrain.models.messages import ASSISTANT
from posttrain.models.rendering import TokenizerRenderer
from posttrain.records import Prompt

TOOL, USER = "tool", "user"
SHORT = "a"
"""Stands for texts that do not show in what is new."""


class ChatTurns(TextTurns):
    """Turns of a conversation by its tokenizer's template; a plain prompt gets text."""

    def __init__(self, renderer: TokenizerRenderer, stop_ids: Sequence[int], reader: CallReader | None = None) -> None:
        """`reader` finds the calls in what was said; None without tools."""
        super().__init__(renderer, stop_ids)
        self.reader = reader
        stops = {token: str(renderer.tokenizer.decode([token])) for token in stop_ids}
        self.stops = {text: token for token, text in stops.items() if text}

    def opened(self, prompt: Prompt, added: Said) -> Prompt:
        """The prompt with further messages; text is added to the user's last message, if that is the last one."""
        if prompt.messages is None:
            return super().opened(prompt, added)
        messages: list[Mapping[str, Any]] = [*prompt.messages]
        if isinstance(added, str) and messages[-1]["role"] == USER:
            messages[-1] = {**messages[-1], "content": messages[-1]["content"] + self.given.cut(added)}
        else:
            messages += self.given.cut_messages(reply_messages(added))
        rendered = self.renderer.render(messages, id=prompt.id, prefill=prompt.prefill, columns=prompt.columns)
        return opened_prompt(self.given, prompt, rendered)

    def reply_tokens(self, prompt: Prompt, turns: Sequence[SaidAndReply]) -> tuple[int, ...]:
        if prompt.messages is None:
            return super().reply_tokens(prompt, turns)
        history: list[Mapping[str, Any]] = [*prompt.messages]
        replies = [reply_messages(turn.reply) for turn in turns]
        for reply in replies[:-1]:
            history += [policy_turn(SHORT, reply), *({**message, "content": SHORT} for message in reply)]
        end, behind = self.behind(history, replies[-1], prompt.id)
        stop = self.stops[end]
        tokens = self.given.tokens(end + behind, continues=False)
        # Together, since a stop token may swallow white space after it; unless it is one of text, and joins with more.
        new = tokens[tokens.index(stop) + 1 :] if stop in tokens[:2] else self.given.tokens(behind, continues=True)
        return tuple(new if turns[-1].stopped else [stop, *new])

    def behind(self, history: Sequence[Mapping[str, Any]], reply: Messages, where: str) -> tuple[str, str]:
        """The stop token that ends the policy's turn, and the text after it, if a turn with this reply is next."""
        messages = [*history, policy_turn(MARK, reply), *self.given.cut_messages(reply)]
        _, marked, behind = self.renderer.templated(messages, where).rpartition(MARK)
        if not marked:
            what = "calls of tools" if is_call(reply) else "what the assistant said"
            raise UserError(
                f"{where}: the chat template does not write {what}.  Set model.chat_template to a template that does."
            )
        places = {behind.find(stop): stop for stop in self.stops if stop in behind}
        if not places:
            stops = ", ".join(map(repr, self.stops)) or "nothing"
            raise UserError(
                f"{where}: the chat template ends the assistant's turn with {behind[:20]!r}, and the model stops at"
                f" {stops}.  Set model.stop_tokens to the template's."
            )
        place = min(places)
        end = max((stop for stop in self.stops if behind.startswith(stop, place)), key=len)
        return end, behind[place + len(end) :]

    def messages(self, turns: Sequence[SaidAndReply], said: str | None) -> tuple[Mapping[str, object], ...]:
        found: list[Mapping[str, object]] = []
        for turn in turns:
            found += [self.message(turn.said), *reply_messages(turn.reply)]
        return tuple(found if said is None else [*found, self.message(said)])

    def message(self, said: str) -> Mapping[str, object]:
        return {"role": ASSISTANT, "content": said} if self.reader is None else self.reader.message(said)


def reply_messages(said: Said) -> list[Mapping[str, Any]]:
    """A reply as messages, text as one of the user's."""
    return [{"role": USER, "content": said}] if isinstance(said, str) else [*said]


def is_call(reply: Messages) -> bool:
    return any(message["role"] == TOOL for message in reply)


def policy_turn(text: str, reply: Messages) -> dict[str, Any]:
    """A turn of the policy with a text to find again: in a call where tools reply, since many templates need one."""
    if not is_call(reply):
        return {"role": ASSISTANT, "content": text}
    # One call whatever the number of replies: there are templates that refuse more.
    called = next(message for message in reply if message["role"] == TOOL)
    name = str(called.get("name", SHORT)).replace(CUT, "")
    return call_message("", name, {SHORT: text}, str(called.get("tool_call_id", "")))


def call_message(content: str, name: str, arguments: Mapping[str, Any], id: str) -> dict[str, Any]:
    call = {"type": "function", "id": id, "function": {"name": name, "arguments": arguments}}
    return {"role": ASSISTANT, "content": content, "tool_calls": [call]}
