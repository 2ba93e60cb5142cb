"""What travels between the stages of a step.

Every record is frozen: a later stage adds a record of its own, none writes into an earlier one.
Records are plain data, so that a stage may move to another process.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

Alternatives = tuple[tuple[tuple[int, float], ...], ...]
"""For each sampled token the likeliest tokens there with their log-probs in nats, likeliest first."""


class Finish(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    """The policy sampled one of the model's stop tokens."""
    LENGTH = "length"
    """The completion reached the token limit and was cut off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One problem as the policy sees it, with everything that a reward may need to judge an answer."""

    id: str
    text: str
    """The rendered prompt, chat template and prefill included: `tokens` decode to it."""
    tokens: tuple[int, ...]
    """Carried from here on; no later stage tokenises text again."""
    prefill: str = ""
    """The end of `text` that already belongs to the answer (such as `<think>`); graded text starts with it."""
    messages: tuple[Mapping[str, str], ...] | None = None
    """The chat turns behind `text`, or None for a plain prompt."""
    columns: Mapping[str, object] = field(default_factory=dict)
    """Every column of the problem's dataset row; reward functions receive them by name."""
    source: str = ""
    """The data set of a mixture that it is from: what it earns is told apart by it."""


@dataclass(frozen=True, slots=True)
class Example:
    """A row of tokens to learn from, of which some are learned and the others only read."""

    tokens: tuple[int, ...]
    """No more than up to the last that is learned: what comes behind it plays no part."""
    learned: tuple[bool, ...]
    """One for each token; that of the first is False, for nothing comes before it that could predict it."""

    @property
    def num_inputs(self) -> int:
        """Tokens that go through the model: all but the last, which is only predicted."""
        return len(self.tokens) - 1

    @property
    def num_learned(self) -> int:
        """Tokens that carry loss."""
        return sum(self.learned)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """Two answers to one prompt, of which one was preferred: what reward models and direct preference losses learn."""

    prompt: Prompt
    """As sampling would see it; `prompt.columns` has the row's other columns."""
    chosen: tuple[int, ...]
    """The answer that was preferred, as tokens that continue the prompt's, the stop token included."""
    rejected: tuple[int, ...]
    """The other one, likewise."""
    chosen_said: tuple[bool, ...] | None = None
    """Which tokens of `chosen` the policy itself says: where a conversation goes on, another's turns are not.  None is
    all of them."""
    rejected_said: tuple[bool, ...] | None = None
    """The same of `rejected`."""
    chosen_closing: tuple[int, ...] = ()
    """What a chat template writes behind the last stop token of `chosen`, such as a line's end: nobody samples it, and
    a reward model, which reads whole conversations, reads it."""
    rejected_closing: tuple[int, ...] = ()
    """The same of `rejected`."""
    margin: float | None = None
    """By how much the chosen one is better, as the row says it, in units of the reward; None where it does not."""
    weight: float = 1.0
    """What the pair counts beside others."""
    where: str
    """The file and line, or number, that the pair is from: named in messages."""

    @property
    def chosen_example(self) -> Example:
        """The prompt, which is read, and the chosen answer, which is learned."""
        return _answered(self.prompt, self.chosen, self.chosen_said)

    @property
    def rejected_example(self) -> Example:
        """The same of the rejected one."""
        return _answered(self.prompt, self.rejected, self.rejected_said)

    @property
    def num_tokens(self) -> int:
        """Of the prompt and the longer of the two answers."""
        return len(self.prompt.tokens) + max(
            len(self.chosen) + len(self.chosen_closing), len(self.rejected) + len(self.rejected_closing)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One completion exactly as it was sampled; later stages add columns, none writes here."""

    sample: int
    """Number within the group: 0 .. group_size - 1 where a request does not start with another."""
    tokens: tuple[int, ...]
    """Sampled tokens, the stop token included: the policy must be taught to stop."""
    logprobs: tuple[float, ...]
    """log μ(token) in nats, after temperature and before any top-k, top-p or min-p cut, so μ = π at first."""
    cut_logprobs: tuple[float, ...] | None = None
    """log-probs under the cut distribution that was sampled, in nats; None when nothing was cut."""
    finish: Finish
    text: str
    """Decoded completion, added tokens such as `<think>` kept, the stop token removed."""
    alternatives: Alternatives | None = None
    """For each token the likeliest tokens there with log μ in nats, likeliest first; None where nobody asked."""
    weights_version: int = 0
    """Number of optimiser updates behind the weights that sampled it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The rollouts of one prompt; group-relative advantages compare them with each other."""

    prompt: Prompt
    draw: int
    """Number of the prompt's draw within its step; refills go on counting."""
    rollouts: tuple[Rollout, ...]

    def graded_text(self, rollout: Rollout) -> str:
        """What a reward function reads: the prefilled start of the answer and the completion."""
        return self.prompt.prefill + rollout.text


@dataclass(frozen=True, slots=True)
class Marks:
    """What a reward function gave single tokens and stretches of one completion, beside its score; they add up."""

    tokens: tuple[float | None, ...] = ()
    """One for each token of the completion, None where no step ends; empty where the function marked no tokens."""
    spans: tuple[tuple[int, int, float], ...] = ()
    """(start, end, value): the characters [start, end) of the graded text, and what they earn together."""

    @property
    def total(self) -> float:
        """All that it gave."""
        return math.fsum([*(value for value in self.tokens if value is not None), *(each[2] for each in self.spans)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Grades:
    """What the reward functions said of some groups, function by function and in sum."""

    names: tuple[str, ...]
    """Reward functions, in the order of `scores`."""
    scores: Float64[Tensor, "function prompt group"]
    """One score per function and rollout; NaN where the function does not apply or its service failed."""
    weights: Float64[Tensor, " function"]
    """What each function's scores count, with the step's place in their schedules; 0 for what is only reported."""
    rewards: Float64[Tensor, "prompt group"]
    """Weighted sum of the scores that exist, clipped where `clips` says so; NaN where none does."""
    clips: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Function name -> bounds of what counts of its scores; `scores` are as they were given."""
    outcomes: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    """For graders that tell how a completion failed: function name -> outcome per prompt and rollout."""
    details: Mapping[str, tuple[tuple[Mapping[str, object] | None, ...], ...]] = field(default_factory=dict)
    """What else graders tell, in the same order: plain JSON for the journal."""
    extras: Mapping[str, tuple[tuple[Mapping[str, object] | None, ...], ...]] = field(default_factory=dict)
    """What functions logged of single completions by `log_extra`, in the same order: column -> plain JSON."""
    logged: Mapping[str, tuple[tuple[Mapping[str, float] | None, ...], ...]] = field(default_factory=dict)
    """What functions logged by `log_metric`, at every rollout of the call that it is of: name -> number."""
    marks: Mapping[str, tuple[tuple[Marks | None, ...], ...]] = field(default_factory=dict)
    """Process rewards, of functions that gave some: function name -> what tokens and spans of each rollout earn."""
    num_failures: int = 0
    """Scores that are missing because scoring itself failed, not because the function does not apply."""
    num_cached: int = 0
    """Scores that were known from an equal completion, and for which no function was asked."""

    @property
    def clipped(self) -> Float64[Tensor, "function prompt group"]:
        """The scores as they go into the sum: within the bounds that a function's are clipped to."""
        bounds = [self.clips.get(name, (-torch.inf, torch.inf)) for name in self.names]
        low, high = torch.tensor(bounds, dtype=torch.float64).T[:, :, None, None]
        return self.scores.maximum(low).minimum(high)

    @property
    def marked(self) -> Float64[Tensor, "function prompt group"]:
        """What each function gave to tokens and spans of a rollout together; 0 where it marked none."""
        totals = torch.zeros_like(self.scores)
        for place, name in enumerate(self.names):
            for row, group in enumerate(self.marks.get(name, ())):
                given = [0.0 if marks is None else marks.total for marks in group]
                totals[place, row] = torch.tensor(given, dtype=torch.float64)
        return totals

    @property
    def totals(self) -> Float64[Tensor, "prompt group"]:
        """All that rollouts earn: the rewards, and with the weight of its function what was marked."""
        return self.rewards + torch.einsum("f,fpg->pg", self.weights, self.marked) if self.marks else self.rewards

    def select(self, rows: Sequence[int]) -> "Grades":
        """Those of some groups; what is counted of all of them goes with it."""
        chosen = list(rows)
        return replace(
            self,
            scores=self.scores[:, chosen],
            rewards=self.rewards[chosen],
            outcomes={name: tuple(outcomes[i] for i in chosen) for name, outcomes in self.outcomes.items()},
            details={name: tuple(details[i] for i in chosen) for name, details in self.details.items()},
            extras={name: tuple(extras[i] for i in chosen) for name, extras in self.extras.items()},
            logged={name: tuple(logged[i] for i in chosen) for name, logged in self.logged.items()},
            marks={name: tuple(marks[i] for i in chosen) for name, marks in self.marks.items()},
        )

    def joined(self, other: "Grades") -> "Grades":
        """Those of two lists of groups, one after the other."""
        return Grades(
            names=self.names,
            scores=torch.cat([self.scores, other.scores], dim=1),
            weights=self.weights,
            clips=self.clips,
            rewards=torch.cat([self.rewards, other.rewards]),
            outcomes=_appended([(self, self.outcomes), (other, other.outcomes)], blank=""),
            details=_appended([(self, self.details), (other, other.details)], blank=None),
            extras=_appended([(self, self.extras), (other, other.extras)], blank=None),
            logged=_appended([(self, self.logged), (other, other.logged)], blank=None),
            marks=_appended([(self, self.marks), (other, other.marks)], blank=None),
            num_failures=self.num_failures + other.num_failures,
            num_cached=self.num_cached + other.num_cached,
        )


def _answered(prompt: Prompt, answer: tuple[int, ...], said: tuple[bool, ...] | None) -> Example:
    learned = said if said is not None else (True,) * len(answer)
    return Example((*prompt.tokens, *answer), (False,) * len(prompt.tokens) + learned)


def _appended(parts: Sequence[tuple[Grades, Mapping[str, Any]]], *, blank: object) -> dict[str, Any]:
    """What functions said of some groups and then of others; a function may have said nothing of some of them."""
    speaking = [name for name in parts[0][0].names if any(name in of_part for _, of_part in parts)]
    nothing = [((blank,) * grades.rewards.shape[1],) * grades.rewards.shape[0] for grades, _ in parts]
    return {
        name: tuple(row for (_, of_part), none in zip(parts, nothing, strict=True) for row in of_part.get(name, none))
        for name in speaking
    }
