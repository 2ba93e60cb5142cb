"""From groups and advantages to the tensors of an update, with fixed token weights and no padding.

The axis `token` is that of the *sampled* tokens, completion after completion: a given token (of a tool's reply, say)
has no log μ, no advantage and no weight.  Only a forward pass reads it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from posttrain.needs import StepColumns
from posttrain.ranks.group import ONE_RANK, RankGroup
from posttrain.records import Group

TokenWeights = Callable[..., Float64[Tensor, " rollout"]]
Row = TypeVar("Row")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenColumns(StepColumns):
    """The numbers of every sampled token of an update.

    Float64 as collated; an update takes them in the precision of its log-probs.  A column that some algorithms need is
    a row of `training.credited_step`; it is selected, split and moved with the others.
    """

    advantages: Float[Tensor, " token"]
    weights: Float[Tensor, " token"]
    """What each token's loss is multiplied by; fixed on the whole update, before anything is dropped or split.
    0 before there is an update."""
    behaviour_logprobs: Float[Tensor, " token"]
    value_range: Float[Tensor, " token"] | None = None
    """How far from `values` a value may move before a clipped value loss stops it; None means no limit."""

    @property
    def returns(self) -> Float[Tensor, " token"]:
        """The target of the value before each token."""
        return self.column("returns")

    def named(self) -> dict[str, Tensor]:
        """Every existing column, by name."""
        always = {name: getattr(self, name) for name in ("advantages", "weights", "behaviour_logprobs")}
        held = {} if self.value_range is None else {"value_range": self.value_range}
        return {**always, **held, **self.known}

    def map_named(self, change: Callable[[str, Tensor], Tensor]) -> "TokenColumns":
        changed: dict[str, Any] = {name: change(name, column) for name, column in self.named().items()}
        return TokenColumns(known={name: changed.pop(name) for name in self.known}, **changed)

    def map(self, change: Callable[[Tensor], Tensor]) -> "TokenColumns":
        return self.map_named(lambda _, column: change(column))


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Completions of an update on one packed token axis, each prompt stored once however many continue it."""

    prompts: tuple[tuple[int, ...], ...]
    completions: tuple[tuple[int, ...], ...]
    """All tokens of each completion, as a forward pass reads them."""
    marks: tuple[tuple[bool, ...], ...]
    """Whether the policy sampled each of those tokens."""
    num_sampled: tuple[int, ...]
    """Tokens of each completion that the policy sampled."""
    prompt_of: tuple[int, ...]
    """The prompt that each completion continues; completions of a prompt are consecutive."""
    names: tuple[tuple[str, int], ...]
    """(prompt id, sample) of each completion, for messages."""
    draws: tuple[int, ...] = ()
    """The draw of each completion's prompt within its step."""
    tokens: Int64[Tensor, " token"]
    """All sampled tokens, completion after completion."""
    rollout: Int64[Tensor, " token"]
    """Which completion each token belongs to."""
    columns: TokenColumns
    teacher_prompts: tuple[tuple[int, ...], ...] | None = None
    """The teacher's prompts, completion by completion; None where they are the student's."""

    @property
    def lengths(self) -> list[int]:
        """Tokens of each completion that a forward pass reads."""
        return [len(completion) for completion in self.completions]

    def num_read(self, *, padded: bool = False) -> int:
        """Tokens that go through the model; prompts count once, or for padded rows with every completion."""
        read = self.prompt_of if padded else range(len(self.prompts))
        return sum(self.lengths) + sum(len(self.prompts[prompt]) for prompt in read)

    @property
    def sampled(self) -> Bool[Tensor, " read_token"] | None:
        """Whether each completion token was sampled; None where all were.  See `models.forward.CompletionBatch`."""
        if sum(self.lengths) == len(self.rollout):
            return None
        return torch.tensor([mark for marks in self.marks for mark in marks])

    @property
    def behind_teacher_prompts(self) -> "Batch":
        """The same completions, each after the prompt that the teacher sees."""
        if self.teacher_prompts is None:
            return self
        prompts: list[tuple[int, ...]] = []
        prompt_of: list[int] = []
        for prompt in self.teacher_prompts:
            if not prompts or prompt != prompts[-1]:
                prompts.append(prompt)
            prompt_of.append(len(prompts) - 1)
        return replace(self, prompts=tuple(prompts), prompt_of=tuple(prompt_of))

    def split(self, max_tokens: int, *, padded: bool = False, ranks: RankGroup = ONE_RANK) -> "Iterator[Batch]":
        """Micro-batches of at most `max_tokens` tokens, counted as the forward pass computes them.

        They are smaller where several ranks need a share each.

        A prompt counts once, and whole groups stay together wherever one fits; or, for a pass of padded rows, every
        completion counts its prompt and all are as wide as the widest.  A completion that is too long is its own
        micro-batch; one without a token, whose environment could not begin, is left out.  Every loss term is a weighted
        sum over tokens and the weights are fixed, so the split changes no gradient.
        """
        max_tokens = ranks.budget(self.num_read(padded=padded), max_tokens)
        widths = [len(self.prompts[prompt]) + own for prompt, own in zip(self.prompt_of, self.lengths, strict=True)]
        if padded:
            batches = packed(self._read, max_tokens, cost=lambda row, _: widths[row], padded=True)
        else:
            batches = self._whole_groups(max_tokens)
        for rows in batches:
            yield self.select(rows)

    @property
    def _read(self) -> list[int]:
        """Completions that have a token."""
        return [row for row, length in enumerate(self.lengths) if length]

    def _whole_groups(self, max_tokens: int) -> Iterator[list[int]]:
        """Completions in order, their prompts counted once: groups that fit in whole, or parts of one that does not."""
        lengths, runs = self.lengths, list[list[int]]()
        for prompt, rows in groupby(self._read, key=lambda row: self.prompt_of[row]):
            runs += packed(rows, max_tokens - len(self.prompts[prompt]), cost=lambda row, _: lengths[row])

        def tokens(run: list[int], _: object) -> int:
            return len(self.prompts[self.prompt_of[run[0]]]) + sum(lengths[row] for row in run)

        for together in packed(runs, max_tokens, cost=tokens):
            yield [row for run in together for row in run]

    def select(self, rows: Sequence[int]) -> "Batch":
        """Some of the completions, with the tokens and weights that they have here."""
        prompts = sorted({self.prompt_of[row] for row in rows})
        place = {prompt: i for i, prompt in enumerate(prompts)}
        starts = list(accumulate(self.num_sampled, initial=0))
        index = torch.cat([torch.arange(0), *(torch.arange(starts[row], starts[row + 1]) for row in rows)])
        return Batch(
            prompts=tuple(self.prompts[prompt] for prompt in prompts),
            completions=tuple(self.completions[row] for row in rows),
            marks=tuple(self.marks[row] for row in rows),
            num_sampled=tuple(self.num_sampled[row] for row in rows),
            prompt_of=tuple(place[self.prompt_of[row]] for row in rows),
            names=tuple(self.names[row] for row in rows),
            draws=tuple(self.draws[row] for row in rows) if self.draws else (),
            tokens=self.tokens[index],
            rollout=_owners([self.num_sampled[row] for row in rows]),
            columns=self.columns.map(lambda column: column[index]),
            teacher_prompts=None if (seen := self.teacher_prompts) is None else tuple(seen[row] for row in rows),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditedGroups:
    """Groups with the columns of their tokens."""

    groups: Sequence[Group]
    scored: Bool[Tensor, "prompt group"]
    """Rollouts that have a reward; the others are ignored and not counted."""
    columns: TokenColumns
    """Columns of the sampled tokens of all their completions, in order; none has a weight yet."""
    teacher_prompts: Sequence[Sequence[tuple[int, ...]]] | None = None
    """The teacher's prompts, group by group; None where they are the groups'."""

    @property
    def informed(self) -> Bool[Tensor, "prompt group"]:
        """Rollouts with an advantage on some token; the others only matter to loss terms that act without one."""
        lengths = [rollout.num_sampled for group in self.groups for rollout in group.rollouts]
        found = torch.zeros(len(lengths), dtype=torch.bool)
        found[_owners(lengths)[self.columns.advantages != 0]] = True
        return found.view(self.scored.shape)

    def select(self, rows: Sequence[int]) -> "CreditedGroups":
        """Some of the groups, in the order given."""
        sizes = [sum(rollout.num_sampled for rollout in group.rollouts) for group in self.groups]

        def of_rows(column: Tensor) -> Tensor:
            parts = column.split(sizes)
            return torch.cat([parts[row] for row in rows])

        seen = self.teacher_prompts
        return CreditedGroups(
            groups=[self.groups[row] for row in rows],
            scored=self.scored[rows],
            columns=self.columns.map(of_rows),
            teacher_prompts=None if seen is None else [seen[row] for row in rows],
        )


def collate(
    credited: CreditedGroups,
    token_weights: TokenWeights,
    *,
    max_completion_tokens: int,
    keep_zero_advantages: bool,
    masks_truncated: bool = False,
) -> Batch:
    """The batch of one update.

    Weights are computed on every rollout given; then those without weight are left out, and those all of whose
    advantages are exactly 0 too, unless another loss term (`keep_zero_advantages`) acts on them: neither can change
    the gradient.  With `masks_truncated` completions that a limit cut off have no weight: each counts as a rollout and
    none of its tokens does (overlong filtering; Yu et al. 2025, arXiv:2503.14476, §3.4).
    """
    batch = completions_of(credited.groups, credited.teacher_prompts)
    lengths = torch.tensor(batch.num_sampled)
    truncated = [rollout.finish.cut_off for group in credited.groups for rollout in group.rollouts]
    learned = ~torch.tensor(truncated) if masks_truncated else torch.ones(len(lengths), dtype=torch.bool)
    counted = torch.where(learned, lengths, 0)
    weights = token_weights(counted, credited.scored.flatten(), max_completion_tokens=max_completion_tokens)
    weights = torch.where(learned, weights, 0.0)
    batch = replace(batch, columns=replace(credited.columns, weights=weights.repeat_interleave(lengths)))
    matters = (weights > 0) & (credited.informed.flatten() | keep_zero_advantages)
    return batch.select(matters.nonzero().flatten().tolist())


def completions_of(
    groups: Sequence[Group], teacher_prompts: Sequence[Sequence[tuple[int, ...]]] | None = None
) -> Batch:
    """All completions of the groups in order, none with an advantage or a weight yet."""
    rollouts = [(group, rollout) for group in groups for rollout in group.rollouts]
    num_sampled = tuple(rollout.num_sampled for _, rollout in rollouts)
    return Batch(
        prompts=tuple(group.prompt.tokens for group in groups),
        completions=tuple(rollout.tokens for _, rollout in rollouts),
        marks=tuple(rollout.sequence.sampled for _, rollout in rollouts),
        num_sampled=num_sampled,
        prompt_of=tuple(i for i, group in enumerate(groups) for _ in group.rollouts),
        names=tuple((group.prompt.id, rollout.sample) for group, rollout in rollouts),
        draws=tuple(group.draw for group, _ in rollouts),
        tokens=torch.tensor([token for _, rollout in rollouts for token in rollout.sequence.sampled_tokens]),
        rollout=_owners(num_sampled),
        columns=sampled_columns(groups),
        teacher_prompts=None if teacher_prompts is None else tuple(each for own in teacher_prompts for each in own),
    )


def sampled_columns(groups: Sequence[Group]) -> TokenColumns:
    """Columns of tokens that were just sampled: log μ, and advantages and weights of 0."""
    logprobs = [logprob for group in groups for rollout in group.rollouts for logprob in rollout.logprobs]
    behaviour = torch.tensor(logprobs, dtype=torch.float64)
    none = torch.zeros_like(behaviour)
    return TokenColumns(advantages=none, weights=none, behaviour_logprobs=behaviour)


def _owners(lengths: Sequence[int]) -> Int64[Tensor, " token"]:
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.long))


def packed(
    rows: Iterable[Row], most: int, *, cost: Callable[[Row, Row | None], int], padded: bool = False
) -> Iterator[list[Row]]:
    """Consecutive rows of at most `most` tokens together; a row that is too long is alone.

    `cost` is that of a row after the previous one in its micro-batch, or after None as the first.  Padded rows each
    cost as much as the widest of them.
    """
    batch: list[Row] = []
    held = 0  # of padded rows the widest
    for row in rows:
        more = cost(row, batch[-1] if batch else None)
        if batch and ((len(batch) + 1) * max(held, more) if padded else held + more) > most:
            yield batch
            batch, held, more = [], 0, cost(row, None)
        batch.append(row)
        held = max(held, more) if padded else held + more
    if batch:
        yield batch
