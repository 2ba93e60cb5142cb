"""From a row with two answers to a pair of tokens, and why some rows make none.

A pair's prompt is what the policy would be asked, and both answers continue its tokens.  An answer of text is the text
and a stop token.  An answer of messages is the assistant's turn in the chat template, up to its stop token; where the
conversation continues, others' turns are included and marked as not sampled.

Bad pairs, reported by their place: answers with equal tokens; an empty answer; one that does not begin with the
assistant's turn, so that the two answer different questions; turns that the template does not end with a stop token;
columns `margin` and `weight` that are not numbers; ties (column `tie`, as `posttrain collect` writes it).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from posttrain.errors import UserError
from posttrain.models.conversation_masks import Dialogue, Masking
from posttrain.models.messages import ASSISTANT, is_call, plain_answer, require_unmarked
from posttrain.options.dataset import DatasetOptions
from posttrain.records import Preference, Prompt, TokenSequence
from posttrain.tasks.prompt_content import prompt_content
from posttrain.tasks.row_files.row_formats import Content, PreferenceRow, as_column, cell_text, tools_of

MARGIN_RULE = "a number >= 0, by how much the chosen answer is better (a negative one means that they are swapped)"
OTHER_WAYS = "  Leave out what follows the first answer, or name another template as model.chat_template."


@dataclass(frozen=True, slots=True)
class PairAnswer:
    """One of a pair's two answers in tokens."""

    sequence: TokenSequence
    closing: tuple[int, ...]
    """The template's text after the last stop token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairMaker:
    """Makes pairs for one model."""

    masking: Masking
    task: DatasetOptions
    counts_tokens: bool = True
    """Whether the loss sums over the answers' tokens, so that it can leave out turns that are marked as not learned."""
    closing_said: bool = False
    """Whether the template's text after the last stop token is part of an answer."""

    def pair(self, row: PreferenceRow) -> Preference:
        """The pair of a row.  Raises UserError for a bad one."""
        if row.columns.get("tie") is True:
            raise UserError(f"{row.where}: the column `tie` says that neither answer is better.  Drop the row.")
        for answer in (row.chosen, row.rejected):
            if not isinstance(answer, str):
                require_answer(row.where, answer)
                if not self.counts_tokens:
                    require_unmarked(answer, row.where, "a reward model scores the whole of an answer")
        content = prompt_content(as_column(row.prompt), self.task, row.where)
        if isinstance(content, str):
            prompt = self.masking.renderer.render(content, id=row.where, columns=row.columns)
            chosen, rejected = (self.of_text(row.where, prompt, each) for each in (row.chosen, row.rejected))
        else:
            prompt = self.conversation_prompt(row, content)
            chosen, rejected = (self.of_messages(row, prompt, content, each) for each in (row.chosen, row.rejected))
        if chosen.sequence.tokens == rejected.sequence.tokens:
            raise UserError(f"{row.where}: `chosen` and `rejected` are the same answer.  Drop the row.")
        for made in (chosen, rejected):
            self.masking.require_known((*prompt.tokens, *made.sequence.tokens, *made.closing), row.where)
        return Preference(
            prompt=prompt,
            chosen=chosen.sequence,
            rejected=rejected.sequence,
            chosen_closing=chosen.closing,
            rejected_closing=rejected.closing,
            margin=column_number(row, "margin", MARGIN_RULE, lambda value: value >= 0),
            weight=column_number(row, "weight", "a number above 0", lambda value: value > 0) or 1.0,
            where=row.where,
        )

    def of_text(self, where: str, prompt: Prompt, answer: Content) -> PairAnswer:
        text = plain_answer(answer, where)
        require_words(where, text)
        tokens = self.masking.completion(prompt, text).tokens
        return PairAnswer(TokenSequence.one_turn(tokens[len(prompt.tokens) :]), ())

    def conversation_prompt(self, row: PreferenceRow, messages: Sequence[Mapping[str, Any]]) -> Prompt:
        text = self.masking.renderer.templated(messages, row.where, tools=tools_of(row))
        tokens = tuple(self.masking.renderer.tokens(text, row.where))
        return Prompt(id=row.where, text=text, tokens=tokens, messages=tuple(messages), columns=dict(row.columns))

    def of_messages(
        self, row: PreferenceRow, prompt: Prompt, messages: Sequence[Mapping[str, Any]], answer: Content
    ) -> PairAnswer:
        """The assistant's turn, and what may follow it, after the messages of a prompt."""
        turns = [{"role": ASSISTANT, "content": answer}] if isinstance(answer, str) else [*answer]
        if isinstance(answer, str):
            require_words(row.where, answer)
        dialogue = Dialogue(where=row.where, messages=[*messages, *turns], num_given=len(messages), tools=tools_of(row))
        one_turn = len(turns) == 1
        example = self.masking.last_turn(dialogue) if one_turn else self.masking.every_turn(dialogue)
        size = len(prompt.tokens)
        assert example.tokens[:size] == prompt.tokens, (row.where, "an answer continues the tokens of its prompt")
        tokens, sampled = example.tokens[size:], example.sampled[size:]
        closing = self.masking.closing(dialogue, example)
        if not self.closing_said:
            return PairAnswer(TokenSequence(tokens=tokens, sampled=sampled), closing)
        return PairAnswer(TokenSequence(tokens=tokens + closing, sampled=sampled + (True,) * len(closing)), ())


def require_answer(where: str, turns: Sequence[Mapping[str, Any]]) -> None:
    """Refuse messages that are not the assistant's answer, or are empty."""
    first, last = turns[0]["role"], turns[-1]["role"]
    if first != ASSISTANT:
        raise UserError(f"{where}: an answer begins with a message of the role {first}, not the assistant's.  Drop it.")
    if last != ASSISTANT:
        raise UserError(f"{where}: an answer ends with a message of the role {last}.  Leave that message out.")
    for turn in turns:
        if not is_call(turn):
            require_words(where, str(turn["content"]))


def require_words(where: str, text: str) -> None:
    if not text.strip():
        raise UserError(f"{where}: an answer is empty ({text[:20]!r}); give one, or drop the row")


def cut_to(pair: Preference, longest: int) -> Preference:
    """The pair with the ends of its answers cut off to `longest` tokens with the prompt."""
    room = longest - len(pair.prompt.tokens)
    chosen, rejected = pair.chosen.first(room), pair.rejected.first(room)
    return replace(pair, chosen=chosen, rejected=rejected, chosen_closing=(), rejected_closing=())


def column_number(row: PreferenceRow, column: str, rule: str, holds: Callable[[float], bool]) -> float | None:
    value = row.columns.get(column)
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and holds(value):
        return float(value)
    raise UserError(f"{row.where}: the column `{column}` must hold {rule}, not {cell_text(value)}")


def pair_masking(masking: Masking) -> Masking:
    return replace(masking, other_ways=OTHER_WAYS)
