"""Conversations and texts as rows of tokens, with those that are to be learned: what the model itself would say.

A chat template writes a whole conversation and does not tell who says which token.  So it is asked turn by turn:

    before = T(messages before the turn, the assistant speaks next)        what the model reads when it is asked
    upto   = T(messages up to the turn)                                    what it has said then

The turn's own tokens are those by which `upto` is longer, up to the first stop token behind its text; what a template
writes behind that, such as a line's end or another stop token, is never sampled and not learned.  This holds where
`before` begins `upto` and `upto` begins the whole, token by token.  Both are checked for every turn: templates that
rewrite earlier turns, as those of thinking models do that drop their thoughts, would be learned wrongly in silence.

A turn that its message marks as not learned (such as `weight: 0`) is read like what the others say.
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
"""Begins the thoughts of models that have their template open them."""
OTHER_WAYS = (
    "  With sft.loss_on: completion the last turn alone is learned, and with sft.split_turns: true each turn in a row"
    " of its own, as the model meets it.  Or name a template that keeps turns as they are: model.chat_template."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """Messages of which the assistant's are to be learned."""

    where: str
    """Named in messages: the row."""
    messages: Sequence[Mapping[str, Any]]
    num_given: int = 0
    """Messages at the beginning that are given, whoever says them: those of a row's prompt."""
    tools: Sequence[Mapping[str, Any]] = ()
    """What the template is told of tools that may be called."""

    @property
    def turns(self) -> list[int]:
        """The messages that are learned, by number from 0.  Raises UserError where there are none."""
        roles = [message["role"] for message in self.messages]
        spoken = [number for number, role in enumerate(roles) if role == ASSISTANT and number >= self.num_given]
        found = [number for number in spoken if number not in self.only_read]
        if not found:
            marked = "every message of the assistant's is marked as not learned (such as weight: 0)"
            why = marked if spoken else f"no message of the role {ASSISTANT} (roles: {', '.join(roles)})"
            raise UserError(f"{self.where}: nothing to learn: {why}.  Mend the row or leave it out.")
        if found[0] == 0:
            raise UserError(f"{self.where}: begins with the assistant's answer.  Put before it what it answers.")
        return found

    @property
    def only_read(self) -> list[int]:
        """The messages that are marked as not learned."""
        marks = [learned_mark(each, f"{self.where}, message {i}") for i, each in enumerate(self.messages)]
        return [number for number, mark in enumerate(marks) if mark is False]


@dataclass(frozen=True, slots=True, kw_only=True)
class Masking:
    """Makes examples for one model: its template, its tokenizer and its stop tokens."""

    renderer: TokenizerRenderer
    stop_ids: tuple[int, ...]
    other_ways: str = OTHER_WAYS
    """What can be done where a template rewrites turns, said at the end of that message."""
    num_embeddings: int | None = None
    """Rows of the model's embedding, if there is a model that learns."""

    @classmethod
    def of(cls, policy: Policy, renderer: TokenizerRenderer) -> "Masking":
        return cls(renderer=renderer, stop_ids=policy.stop_ids, num_embeddings=num_embeddings(policy.model))

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.renderer.tokenizer

    def require_known(self, tokens: Sequence[int], where: str) -> None:
        """Raise UserError for tokens that the model has no embedding for."""
        if self.num_embeddings is not None:
            require_embeddings(tokens, self.num_embeddings, self.tokenizer, where)

    @property
    def stop(self) -> int:
        """The stop token that ends a text: the tokenizer's own, or the first that the model names."""
        own = self.tokenizer.eos_token_id
        return own if own in self.stop_ids else self.stop_ids[0]

    def every_turn(self, conversation: Dialogue) -> Example:
        """All turns of the assistant in one row.  Raises UserError naming the turn that the template rewrites."""
        whole = self._tokens(conversation, len(conversation.messages))
        learned = [False] * len(whole)
        for number in conversation.turns:
            start, end = self._span(conversation, number, whole)
            learned[start:end] = [True] * (end - start)
        return trimmed(whole, learned)

    def _span(self, conversation: Dialogue, number: int, whole: list[int]) -> tuple[int, int]:
        """Where the tokens of a turn begin and end in those of the whole conversation."""
        opened = self._text(conversation, number, open_answer=True)
        before = self.renderer.tokens(opened, conversation.where)
        upto = self._tokens(conversation, number + 1)
        if upto[: len(before)] != before:
            raise self._rewritten(conversation, number, "begins it in another way than when the assistant is to speak")
        text = turn_text(conversation, number, opened)
        end = len(before) + self._end(conversation, number, upto[len(before) :])
        if whole[:end] != upto[:end]:
            raise self._rewritten(conversation, number, "writes what leads to its end in another way once more follows")
        written = str(self.tokenizer.decode(upto[len(before) : end]))
        require_calls(conversation, number, written)
        if not has_all(written, text):
            raise self._rewritten(conversation, number, "leaves out a part of its text, such as the thoughts")
        return len(before), end

    def last_turn(self, conversation: Dialogue) -> Example:
        """The last turn alone, behind what the model reads when it is asked for it.

        Where the template does not write the turn as it stands, the text itself is behind it, and a stop token.
        """
        number, last = conversation.turns[-1], len(conversation.messages) - 1
        if number != last and last in conversation.only_read:
            raise UserError(f"{conversation.where}: nothing to learn: its last turn is marked as not learned.")
        if number != last:
            role = conversation.messages[-1]["role"]
            raise UserError(
                f"{conversation.where}: ends with a message of the role {role}, so its last turn is not an answer. "
                " Leave that out, or learn all turns: sft.loss_on: assistant."
            )
        opened, whole = self._text(conversation, number, open_answer=True), self._text(conversation, number + 1)
        before = self.renderer.tokens(opened, conversation.where)
        written, text = whole.removeprefix(opened), turn_text(conversation, number, opened)
        require_calls(conversation, number, written)
        if whole.startswith(opened) and has_all(written, text):
            answer = self._behind(opened, written, conversation.where)
            return answered(before, answer[: self._end(conversation, number, answer)])
        return answered(before, self._ended(self._behind(opened, text, conversation.where)))

    def turn_by_turn(self, conversation: Dialogue) -> list[Example]:
        """Each turn in a row of its own, behind what the model reads when it is asked for it."""
        return [
            self.last_turn(
                Dialogue(
                    where=conversation.where,
                    messages=conversation.messages[: number + 1],
                    tools=conversation.tools,
                )
            )
            for number in conversation.turns
        ]

    def all_tokens(self, conversation: Dialogue) -> Example:
        """Every token of the conversation but the first, which nothing predicts, and turns marked as not learned."""
        whole = self._tokens(conversation, len(conversation.messages))
        learned = [False, *[True] * (len(whole) - 1)]
        for number in conversation.only_read:
            if conversation.messages[number]["role"] == ASSISTANT:
                start, end = self._span(conversation, number, whole)
                learned[start:end] = [False] * (end - start)
        return trimmed(whole, learned)

    def completion(self, prompt: Prompt, text: str) -> Example:
        """A text behind a plain prompt, and a stop token if it does not end with one."""
        return answered(prompt.tokens, self._ended(self._behind(prompt.text, text, prompt.id)))

    def text(self, text: Prompt) -> Example:
        """All of a text but its first token, and a stop token if it does not end with one."""
        tokens = self._ended([*text.tokens])
        return trimmed(tokens, [False, *[True] * (len(tokens) - 1)])

    def closing(self, conversation: Dialogue, example: Example) -> tuple[int, ...]:
        """What the template writes behind an example's last token, such as a line's end.

        Nothing where the example is not what the whole conversation begins with.
        """
        whole, size = self._tokens(conversation, len(conversation.messages)), len(example.tokens)
        return tuple(whole[size:]) if tuple(whole[:size]) == example.tokens else ()

    def _behind(self, prompt: str, text: str, where: str) -> list[int]:
        """The tokens of a text behind a prompt, whose own stay as they are: they are what the model is asked with.

        Read together with it where that leaves the prompt's tokens alone, else apart, as they are sampled.
        """
        before, whole = (self.renderer.tokens(each, where) for each in (prompt, prompt + text))
        return whole[len(before) :] if whole[: len(before)] == before else self.renderer.tokens(text, where)

    def _rewritten(self, conversation: Dialogue, number: int, how: str) -> UserError:
        return UserError(
            f"{conversation.where}, message {number}: the chat template {how}, so its tokens in the whole conversation"
            f" are not those that the model would say.{self.other_ways}"
        )

    def _ended(self, tokens: list[int]) -> list[int]:
        return tokens if tokens and tokens[-1] in self.stop_ids else [*tokens, self.stop]

    def _text(self, conversation: Dialogue, count: int, *, open_answer: bool = False) -> str:
        messages, tools = conversation.messages[:count], conversation.tools
        return self.renderer.templated(messages, conversation.where, open_answer=open_answer, tools=tools)

    def _tokens(self, conversation: Dialogue, count: int, *, open_answer: bool = False) -> list[int]:
        text = self._text(conversation, count, open_answer=open_answer)
        return self.renderer.tokens(text, conversation.where)

    def _end(self, conversation: Dialogue, number: int, turn: list[int]) -> int:
        """Tokens of a turn up to the first stop token behind its text, that included.

        Only white space and further stop tokens may follow it, as where a template ends conversations too.
        """
        ends = [place for place, token in enumerate(turn, start=1) if token in self.stop_ids]
        rest = str(self.tokenizer.decode(turn[ends[-1] :] if ends else turn)).strip()
        if ends and not rest:
            return next(end for end in ends if not self._says_more(turn[end:]))
        stops = ", ".join(repr(self.tokenizer.decode([each])) for each in self.stop_ids)
        raise UserError(
            f"{conversation.where}, message {number}: the chat template ends the assistant's turn with"
            f" {rest[-20:] or 'nothing'!r}, and the model stops at {stops}: it would not learn to stop.  If a token of"
            ' the template ends turns, make it a stop token of the model: model.stop_tokens, such as ["<|im_end|>"].'
        )

    def _says_more(self, tokens: list[int]) -> bool:
        """Whether tokens are more than stop tokens and white space."""
        return bool(str(self.tokenizer.decode([each for each in tokens if each not in self.stop_ids])).strip())


def answered(prompt: Sequence[int], completion: Sequence[int]) -> Example:
    """A prompt that is read and a completion that is learned."""
    sampled = (False,) * len(prompt) + (True,) * len(completion)
    return Example(TokenSequence(tokens=(*prompt, *completion), sampled=sampled))


def trimmed(tokens: Sequence[int], learned: Sequence[bool]) -> Example:
    """An example without what comes behind its last learned token."""
    end = max((place for place, each in enumerate(learned, start=1) if each), default=0)
    return Example(TokenSequence(tokens=tuple(tokens[:end]), sampled=tuple(learned[:end])))


def turn_text(conversation: Dialogue, number: int, opened: str) -> str:
    """The text of a turn that is said behind what opens it: thoughts that are open are not opened again."""
    text = str(conversation.messages[number]["content"])
    return text.lstrip().removeprefix(THINK).removeprefix("\n") if opened.rstrip().endswith(THINK) else text


def has_all(written: str, text: str) -> bool:
    """Whether what a template has written has all of a text; it may have changed the white space."""
    return "".join(text.split()) in "".join(written.split())


def require_calls(conversation: Dialogue, number: int, written: str) -> None:
    """Refuse a turn whose calls of tools the template leaves out: nothing of them would be learned."""
    for call in conversation.messages[number].get("tool_calls") or ():
        name = str(call.get("function", call).get("name", ""))
        if not name or name not in written:
            raise UserError(
                f"{conversation.where}, message {number}: the chat template does not write its call of"
                f" {name or 'a tool without a name'}, so it would not be learned.  Name a template that does as"
                " model.chat_template, or leave the row out."
            )
