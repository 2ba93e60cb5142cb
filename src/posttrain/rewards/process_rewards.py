"""From marks on tokens and spans of text to one number per token: a step's column of process rewards.

A span is in characters of the graded text, which is the prompt's prefill and then the decoded completion.  The token
that completes it gets its whole value: only then has the policy done what is paid for.  A character that several tokens
write, as byte-level pieces do, is complete with the last of them.  The stop token writes no text.

Only sampled tokens earn.  A mark on a given token, or a span that ends in given text, counts at the last sampled token
before it: the policy asked for what follows.  A mark with no sampled token before it, as in the prefill, earns nothing.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float64
from torch import Tensor

from posttrain.errors import RunError
from posttrain.records import Grades, Group, Marks, Rollout
from posttrain.rewards.grading.function import ENVIRONMENT_REWARD
from posttrain.rewards.grading.grade import weighted_sum


@runtime_checkable
class TextDecoder(Protocol):
    """A tokenizer, as far as text is decoded with it."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = ...) -> Any: ...


def process_rewards(
    groups: Sequence[Group], grades: Grades, tokenizer: TextDecoder
) -> Float64[Tensor, " token"] | None:
    """The weighted marks of all functions on each sampled token; None without marks.

        r_t = Σ_k w_k Σ_{marks m of k on token t} m        NaN where no function ended a step

    The sampled tokens of all completions are concatenated.
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


def turn_rewards(groups: Sequence[Group]) -> Float64[Tensor, " token"] | None:
    """What replies of an environment earned, on the token that ends the turn; None if no reply earned anything.

    NaN on other tokens, as in `process_rewards`.
    """
    columns: list[list[float]] = []
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        column = [torch.nan] * rollout.num_sampled
        counts = list(accumulate(rollout.sequence.sampled, initial=0))
        for turn in rollout.turns:
            if turn.reward is not None and (token := counts[turn.end] - 1) >= 0:
                column[token] = turn.reward + (0.0 if column[token] != column[token] else column[token])
        columns.append(column)
    earned = torch.tensor([value for column in columns for value in column], dtype=torch.float64)
    return None if bool(earned.isnan().all()) else earned


def turnless_rewards(grades: Grades) -> Float64[Tensor, "prompt group"]:
    """The rewards without what replies earned: 0 where nothing else scored a rollout, NaN where nothing did."""
    others = [place for place, name in enumerate(grades.names) if name != ENVIRONMENT_REWARD.name]
    rest = weighted_sum(grades.clipped[others], grades.weights[others])
    return torch.where(grades.rewards.isnan(), torch.nan, rest.nan_to_num(nan=0.0))


def on_tokens(marks: Marks, group: Group, text: "WrittenText") -> Iterator[tuple[int, float]]:
    """(token, value) for each mark, in order.  Raises RunError if the text is not the decoded tokens."""
    yield from ((token, value) for token, value in enumerate(marks.tokens) if value is not None)
    before = len(group.prompt.prefill)
    for _, end, value in marks.spans:
        if end > before:
            token = text.completed_by(end - before)
            if token is None:
                where = f"prompt {group.prompt.id!r}, sample {text.rollout.sample}: a reward marked a span"
                remedy = "Use token_rewards in the reward, or let the engine return the decoded text."
                raise RunError(f"{where}, but the text is not what its tokens decode to. {remedy}")
            yield token, value


class WrittenText:
    """Which token of a completion wrote which characters."""

    def __init__(self, rollout: Rollout, tokenizer: TextDecoder, pieces: dict[int, str]) -> None:
        """`pieces` caches the texts of single tokens."""
        self.rollout, self.tokenizer, self.pieces = rollout, tokenizer, pieces
        self.body = list(rollout.sequence.text_tokens)

    def completed_by(self, end: int) -> int | None:
        """The first token that completes the first `end` characters of the text, if any.

        Uses the lengths of single tokens if these make up the text, and else decodes beginnings: pieces of a character,
        and tokens that read differently at the start, have no length.
        """
        if self.ends is not None:
            return bisect_left(self.ends, end)
        wanted = self.rollout.text[:end]
        found = bisect_left(range(len(self.body)), True, key=lambda token: self.beginning(token)[:end] == wanted)
        return found if found < len(self.body) and self.beginning(found)[:end] == wanted else None

    def beginning(self, token: int) -> str:
        return str(self.tokenizer.decode(self.body[: token + 1], skip_special_tokens=False))

    @cached_property
    def ends(self) -> list[int] | None:
        """Where each token's text ends; None if single tokens do not make up the text."""
        for token in self.body:
            if token not in self.pieces:
                self.pieces[token] = str(self.tokenizer.decode([token], skip_special_tokens=False))
        texts = [self.pieces[token] for token in self.body]
        return list(accumulate(map(len, texts))) if "".join(texts) == self.rollout.text else None


def summed(
    first: Float64[Tensor, " token"] | None, second: Float64[Tensor, " token"] | None
) -> Float64[Tensor, " token"] | None:
    """Two columns of process rewards together; NaN where neither has a step that ends."""
    if first is None or second is None:
        return second if first is None else first
    both = first.nan_to_num(nan=0.0) + second.nan_to_num(nan=0.0)
    return torch.where(first.isnan() & second.isnan(), torch.nan, both)


def with_penalties(
    steps: Float64[Tensor, " token"] | None, penalties: Float64[Tensor, " token"] | None
) -> Float64[Tensor, " token"] | None:
    """The sum of process rewards (0 where no step ends) and penalties; None without both."""
    if steps is None:
        return penalties
    earned = torch.where(steps.isnan(), 0.0, steps)
    return earned if penalties is None else penalties + earned
