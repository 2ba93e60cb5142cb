"""From marks on tokens and on stretches of text to one number per token: the column of process rewards of a step.

A span is in characters of the graded text, which is the prompt's prefill and then the decoded completion.  Its whole
value goes to the token that completes it, the one with which the text reads as it does up to the span's end: only then
has the policy done what is paid for, and whoever sums rewards from a token on credits every token of the span.  A
character that several tokens write, as byte-level pieces do, is complete with the last of them.  The stop token writes
no text.

Only sampled tokens earn.  A mark on a given token, or a span that ends in given text, counts at the last sampled token
before it: the policy asked for what follows.  A mark with no sampled token before it, as in the prefill, earns nothing.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float64
from torch import Tensor

from posttrain.errors import RunError
from posttrain.records import Grades, Group, Marks, Rollout


@runtime_checkable
class TextDecoder(Protocol):
    """A tokenizer, as far as text is decoded with it."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = ...) -> Any: ...


def process_rewards(
    groups: Sequence[Group], grades: Grades, tokenizer: TextDecoder
) -> Float64[Tensor, " token"] | None:
    """What each sampled token earns by the marks of all functions, times their weights; None without any.

        r_t = Σ_k w_k Σ_{marks m of k on token t} m        NaN where no function ended a step

    Sampled tokens of all completions lie one after the other, as in the evidence that credit is made of.
    """
    counted = [(name, weight) for name, weight in zip(grades.names, grades.weights.tolist(), strict=True) if weight]
    marked = {name: weight for name, weight in counted if name in grades.marks}
    if not marked:
        return None
    pieces: dict[int, str] = {}
    columns: list[list[float]] = []
    for row, group in enumerate(groups):
        for sample, rollout in enumerate(group.rollouts):
            column = [torch.nan] * rollout.num_sampled
            text = WrittenText(rollout, tokenizer, pieces)
            counts = list(accumulate(rollout.sequence.sampled, initial=0))  # sampled before each token
            for name, weight in marked.items():
                marks = grades.marks[name][row][sample]
                for place, value in () if marks is None else on_tokens(marks, group, text):
                    if (token := counts[place + 1] - 1) < 0:
                        continue  # nothing was sampled before it
                    column[token] = weight * value + (0.0 if column[token] != column[token] else column[token])
            columns.append(column)
    return torch.tensor([value for column in columns for value in column], dtype=torch.float64)


def on_tokens(marks: Marks, group: Group, text: "WrittenText") -> Iterator[tuple[int, float]]:
    """(token, value) for each mark on one completion of the group, in order; a span at the token that completes it.

    Raises RunError where the completion's text is not what its tokens decode to.
    """
    yield from ((token, value) for token, value in enumerate(marks.tokens) if value is not None)
    before = len(group.prompt.prefill)
    for _, end, value in marks.spans:
        if end > before:
            token = text.completed_by(end - before)
            if token is None:
                raise RunError(
                    f"prompt {group.prompt.id!r}, sample {text.rollout.sample}: a reward marked a span of the text,"
                    " which is not what its tokens decode to, so that no token can be told to have written it.  Let the"
                    " reward give token_rewards in place of spans, or let the engine return the text as decoded."
                )
            yield token, value


class WrittenText:
    """Which token of a completion wrote what of its text."""

    def __init__(self, rollout: Rollout, tokenizer: TextDecoder, pieces: dict[int, str]) -> None:
        """`pieces` are the texts of single tokens as far as they are known; what is missing is added when needed."""
        self.rollout, self.tokenizer, self.pieces = rollout, tokenizer, pieces
        self.body = list(rollout.sequence.text_tokens)
        self._ends: list[int] | None = None
        self._looked = False

    def completed_by(self, end: int) -> int | None:
        """The first token with which the completion's text is there up to `end` characters; None where none is.

        Read off the lengths of single tokens where these make up the text, and else by decoding beginnings: pieces of
        a character, or tokens that read otherwise at the start, have no length of their own.
        """
        ends = self.ends_of_pieces()
        if ends is not None:
            return bisect_left(ends, end)
        wanted = self.rollout.text[:end]
        found = bisect_left(range(len(self.body)), True, key=lambda token: self.beginning(token)[:end] == wanted)
        return found if found < len(self.body) and self.beginning(found)[:end] == wanted else None

    def beginning(self, token: int) -> str:
        """The text of all tokens up to and with this one."""
        return str(self.tokenizer.decode(self.body[: token + 1], skip_special_tokens=False))

    def ends_of_pieces(self) -> list[int] | None:
        """Where the text of each token ends, or None where the tokens one by one do not make up the text."""
        if not self._looked:
            self._looked = True
            for token in self.body:
                if token not in self.pieces:
                    self.pieces[token] = str(self.tokenizer.decode([token], skip_special_tokens=False))
            pieces = [self.pieces[token] for token in self.body]
            if "".join(pieces) == self.rollout.text:
                self._ends = list(accumulate(map(len, pieces)))
        return self._ends


def with_penalties(
    steps: Float64[Tensor, " token"] | None, penalties: Float64[Tensor, " token"] | None
) -> Float64[Tensor, " token"] | None:
    """All that single tokens earn: process rewards, 0 where no step ends, and penalties; None of neither."""
    if steps is None:
        return penalties
    earned = torch.where(steps.isnan(), 0.0, steps)
    return earned if penalties is None else penalties + earned
