"""Conversations and texts as rows of tokens, with the tokens to learn: those that the model itself would say.

A chat template writes a whole conversation without saying whose token is whose.  So it is called for every turn:

    before = T(messages before the turn, the assistant speaks next)        what the model reads before its turn
    upto   = T(messages up to the turn)                                    the same with its turn

The turn's tokens are those by which `upto` is longer, up to the first stop token after its text; what follows, such as
a newline, is never sampled and not learned.  This requires that `before` begins `upto` and `upto` the whole, token by
token, which is checked: templates that rewrite earlier turns, such as those that drop thoughts, would be learned
wrongly in silence.  A turn that its message marks as not learned (such as `weight: 0`) is only read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from posttrain.errors import UserError
from posttrain.models.context import num_embeddings, require_embeddings
from posttrain.models.messages import ASSISTANT, learned_mark
from posttrain.models.policy import Policy
from posttrain.models.rendering import TokenizerRenderer
from posttrain.records import Example, Prompt, TokenSequence

THINK = "<think>"
"""Begins thoughts; some templates write it themselves."""
OTHER_WAYS = (
    "  Set sft.loss_on: completion to learn only the last turn, sft.split_turns: true for a row per turn, or"
    " model.chat_template to a template that keeps turns."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """Messages, of which the assistant's are learned."""

    where: str
    """The row, for messages."""
    messages: Sequence[Mapping[str, Any]]
    num_given: int = 0
    """Messages at the beginning that are only read: those of a row's prompt."""
    tools: Sequence[Mapping[str, Any]] = ()

    @property
    def turns(self) -> list[int]:
        """The messages that are learned, by number from 0.  Raises UserError if there are none."""
        roles = [message["role"] for message in self.messages]
        spoken = [number for number, role in enumerate(roles) if role == ASSISTANT and number >= self.num_given]
        found = [number for number in spoken if number not in self.only_read]
        if not found:
            marked = "every assistant message is marked as not learned (such as weight: 0)"
            why = marked if spoken else f"no message of the role {ASSISTANT} (roles: {', '.join(roles)})"
            raise UserError(f"{self.where}: nothing to learn: {why}.  Correct the row or remove it.")
        if found[0] == 0:
            raise UserError(f"{self.where}: begins with the assistant's answer.  Add the message that it answers.")
        return found

    @property
    def only_read(self) -> list[int]:
        marks = [learned_mark(each, f"{self.where}, message {i}") for i, each in enumerate(self.messages)]
        return [number for number, mark in enumerate(marks) if mark is False]


@dataclass(frozen=True, slots=True, kw_only=True)
class Masking:
    """Makes examples for a model's template, tokenizer and stop tokens."""

    renderer: TokenizerRenderer
    stop_ids: tuple[int, ...]
    other_ways: str = OTHER_WAYS
    """The remedy for a template that rewrites turns."""
    num_embeddings: int | None = None
    """Rows of the model's embedding; None if no model learns."""

    @classmethod
    def of(cls, policy: Policy, renderer: TokenizerRenderer) -> "Masking":
        return cls(renderer=renderer, stop_ids=policy.stop_ids, num_embeddings=num_embeddings(policy.model))

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.renderer.tokenizer

    def require_known(self, tokens: Sequence[int], where: str) -> None:
        if self.num_embeddings is not None:
            require_embeddings(tokens, self.num_embeddings, self.tokenizer, where)

    @property
    def stop(self) -> int:
        """The stop token that ends a text: the tokenizer's, or else the model's first."""
        own = self.tokenizer.eos_token_id
        return own if own in self.stop_ids else self.stop_ids[0]

    def every_turn(self, conversation: Dialogue) -> Example:
        """All assistant turns in one row.  Raises UserError for a turn that the template rewrites."""
        whole = self._tokens(conversation, len(conversation.messages))
        learned = [False] * len(whole)
        for number in conversation.turns:
            start, end = self._span(conversation, number, whole)
            learned[start:end] = [True] * (end - start)
        return trimmed(whole, learned)

    def _span(self, conversation: Dialogue, number: int, whole: list[int]) -> tuple[int, int]:
        opened = self._text(conversation, number, open_answer=True)
        before = self.renderer.tokens(opened, conversation.where)
        upto = self._tokens(conversation, number + 1)
        if upto[: len(before)] != before:
            raise self._rewritten(conversation, number, "begins it differently from an open turn")
        text = turn_text(conversation, number, opened)
        end = len(before) + self._end(conversation, number, upto[len(before) :])
        if whole[:end] != upto[:end]:
            raise self._rewritten(conversation, number, "writes it differently once more follows")
        written = str(self.tokenizer.decode(upto[len(before) : end]))
        require_calls(conversation, number, written)
        if not has_all(written, text):
            raise self._rewritten(conversation, number, "leaves out a part of its text, such as the thoughts")
        return len(before), end

    def last_turn(self, conversation: Dialogue) -> Example:
        """Only the last turn, after what the model reads before it; its own text if the template changes that."""
        number, last = conversation.turns[-1], len(conversation.messages) - 1
        if number != last and last in conversation.only_read:
            raise UserError(f"{conversation.where}: nothing to learn: its last turn is marked as not learned.")
        if number != last:
            role = conversation.messages[-1]["role"]
            fault = f"{conversation.where}: ends with a message of the role {role}, not with an answer"
            raise UserError(f"{fault}.  Remove it, or set sft.loss_on: assistant to learn all turns.")
        opened, whole = self._text(conversation, number, open_answer=True), self._text(conversation, number + 1)
        before = self.renderer.tokens(opened, conversation.where)
        written, text = whole.removeprefix(opened), turn_text(conversation, number, opened)
        require_calls(conversation, number, written)
        if whole.startswith(opened) and has_all(written, text):
            answer = self._behind(opened, written, conversation.where)
            return answered(before, answer[: self._end(conversation, number, answer)])
        return answered(before, self._ended(self._behind(opened, text, conversation.where)))

    def turn_by_turn(self, conversation: Dialogue) -> list[Example]:
        """A row for each turn, after what the model reads before it."""
        where, tools = conversation.where, conversation.tools
        return [
            self.last_turn(Dialogue(where=where, messages=conversation.messages[: number + 1], tools=tools))
            for number in conversation.turns
        ]

    def all_tokens(self, conversation: Dialogue) -> Example:
        """Every token of the conversation except the first, which nothing predicts, and turns marked as not learned."""
        whole = self._tokens(conversation, len(conversation.messages))
        learned = [False, *[True] * (len(whole) - 1)]
        for number in conversation.only_read:
            if conversation.messages[number]["role"] == ASSISTANT:
                start, end = self._span(conversation, number, whole)
                learned[start:end] = [False] * (end - start)
        return trimmed(whole, learned)

    def completion(self, prompt: Prompt, text: str) -> Example:
        """A text after a plain prompt, with a stop token at its end."""
        return answered(prompt.tokens, self._ended(self._behind(prompt.text, text, prompt.id)))

    def text(self, text: Prompt) -> Example:
        """All of a text except its first token, with a stop token at its end."""
        tokens = self._ended([*text.tokens])
        return trimmed(tokens, [False, *[True] * (len(tokens) - 1)])

    def closing(self, conversation: Dialogue, example: Example) -> tuple[int, ...]:
        """What the template writes after an example's last token; nothing if the example does not begin the whole."""
        whole, size = self._tokens(conversation, len(conversation.messages)), len(example.tokens)
        return tuple(whole[size:]) if tuple(whole[:size]) == example.tokens else ()

    def _behind(self, prompt: str, text: str, where: str) -> list[int]:
        """The tokens of a text after a prompt, whose tokens must not change.

        Tokenised together if that keeps the prompt's tokens, else separately, as they are sampled.
        """
        before, whole = (self.renderer.tokens(each, where) for each in (prompt, prompt + text))
        return whole[len(before) :] if whole[: len(before)] == before else self.renderer.tokens(text, where)

    def _rewritten(self, conversation: Dialogue, number: int, how: str) -> UserError:
        return UserError(
            f"{conversation.where}, message {number}: the chat template {how}, so the model would not say these tokens."
            f"{self.other_ways}"
        )

    def _ended(self, tokens: list[int]) -> list[int]:
        return tokens if tokens and tokens[-1] in self.stop_ids else [*tokens, self.stop]

    def _text(self, conversation: Dialogue, count: int, *, open_answer: bool = False) -> str:
        messages, tools = conversation.messages[:count], conversation.tools
        return self.renderer.templated(messages, conversation.where, open_answer=open_answer, tools=tools)

    def _tokens(self, conversation: Dialogue, count: int) -> list[int]:
        return self.renderer.tokens(self._text(conversation, count), conversation.where)

    def _end(self, conversation: Dialogue, number: int, turn: list[int]) -> int:
        """Tokens of a turn up to and with the first stop token after its text.

        Only white space and further stop tokens may follow, as with a template that also ends conversations.
        """
        ends = [place for place, token in enumerate(turn, start=1) if token in self.stop_ids]
        rest = str(self.tokenizer.decode(turn[ends[-1] :] if ends else turn)).strip()
        if ends and not rest:
            text_ids = [[each for each in turn[end:] if each not in self.stop_ids] for end in ends]
            says_more = [bool(str(self.tokenizer.decode(ids)).strip()) for ids in text_ids]
            return next(end for end, more in zip(ends, says_more, strict=True) if not more)
        stops = ", ".join(repr(self.tokenizer.decode([each])) for each in self.stop_ids)
        raise UserError(
            f"{conversation.where}, message {number}: the chat template ends the assistant's turn with"
            f" {rest[-20:] or 'nothing'!r}, and the model stops at {stops}.  Set model.stop_tokens to the template's."
        )


def answered(prompt: Sequence[int], completion: Sequence[int]) -> Example:
    sampled = (False,) * len(prompt) + (True,) * len(completion)
    return Example(TokenSequence(tokens=(*prompt, *completion), sampled=sampled))


def trimmed(tokens: Sequence[int], learned: Sequence[bool]) -> Example:
    end = max((place for place, each in enumerate(learned, start=1) if each), default=0)
    return Example(TokenSequence(tokens=tuple(tokens[:end]), sampled=tuple(learned[:end])))


def turn_text(conversation: Dialogue, number: int, opened: str) -> str:
    """The text of a turn after its opening, without a <think> that the opening has."""
    text = str(conversation.messages[number]["content"])
    return text.lstrip().removeprefix(THINK).removeprefix("\n") if opened.rstrip().endswith(THINK) else text


def has_all(written: str, text: str) -> bool:
    """Whether a template has written all of a text, up to white space."""
    return "".join(text.split()) in "".join(written.split())


def require_calls(conversation: Dialogue, number: int, written: str) -> None:
    """Refuse a turn whose tool calls the template omits: they would not be learned."""
    for call in conversation.messages[number].get("tool_calls") or ():
        name = str(call.get("function", call).get("name", ""))
        if not name or name not in written:
            raise UserError(
                f"{conversation.where}, message {number}: the chat template does not write its call of"
                f" {name or 'a tool without a name'}.  Set model.chat_template to one that does, or remove the row."
            )
