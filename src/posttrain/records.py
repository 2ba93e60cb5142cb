"""What travels between the stages of a step.

Every record is frozen: a later stage adds another record and never changes one.
Records are plain data, so that a stage may move to another process.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from itertools import compress
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from posttrain.errors import RunError
from posttrain.turns import Turn

Alternatives = tuple[tuple[tuple[int, float], ...], ...]
"""For each sampled token the likeliest tokens there with their log-probs in nats, likeliest first."""


class Finish(StrEnum):
    """Why a completion ended.  Code reads the properties, not the members, so that members can be added."""

    STOP = "stop"
    """The policy sampled one of the model's stop tokens."""
    LENGTH = "length"
    """The completion reached the token limit, or the context was full: it was cut off."""
    TURNS = "turns"
    """The policy had its last turn (`rollout.max_turns`), and the environment would have replied to it."""
    ENVIRONMENT = "environment"
    """The environment said that the conversation is over."""
    FAILED = "failed"
    """The environment raised or was late.  Such a completion has no score and is left out of updates."""

    @property
    def cut_off(self) -> bool:
        """Whether a limit ended the completion before the policy did."""
        return self in CUT_OFF

    @property
    def has_stop_token(self) -> bool:
        """Whether the last token is a stop token, which writes no text."""
        return self in WITH_STOP_TOKEN

    @property
    def failed(self) -> bool:
        """Whether it ended by no fault of the policy: no reward function sees it, and it has no score."""
        return self in NOT_SCORED


CUT_OFF = frozenset({Finish.LENGTH, Finish.TURNS})
WITH_STOP_TOKEN = frozenset({Finish.STOP})
NOT_SCORED = frozenset({Finish.FAILED})


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSequence:
    """Tokens of which the policy sampled some and was given the others, such as a prompt's or a tool's reply."""

    tokens: tuple[int, ...]
    sampled: tuple[bool, ...]
    """Whether the policy sampled each token.  A demonstration marks the tokens to learn in the same way."""
    logprobs: tuple[float, ...] = ()
    """log μ of each sampled token, in nats: after temperature and before any top-k, top-p or min-p cut.  Given tokens
    have no log μ.  Empty if nothing was sampled, as in a demonstration."""
    cut_logprobs: tuple[float, ...] | None = None
    """The same under the cut distribution that was sampled; None if nothing was cut."""
    versions: tuple[tuple[int, int], ...] = ((0, 0),)
    """(first, version): from sampled token number `first` on, the weights had `version` optimiser updates."""
    finish: Finish | None = None
    """Why it ended; None if nothing was sampled."""
    ends_in_stop_token: bool = False
    """Whether the last token is a stop token although `finish` is not STOP: the environment or a limit ended the
    conversation after the turn."""
    messages: tuple[Mapping[str, Any], ...] | None = None
    """The chat turns that the tokens were made from, if known."""

    def __post_init__(self) -> None:
        if len(self.sampled) != len(self.tokens):
            raise RunError(
                f"a sequence of {len(self.tokens)} tokens has {len(self.sampled)} marks in `sampled`.  Give one for"
                " each token."
            )

    @classmethod
    def one_turn(
        cls,
        tokens: tuple[int, ...],
        *,
        logprobs: tuple[float, ...] = (),
        cut_logprobs: tuple[float, ...] | None = None,
        finish: Finish | None = None,
        version: int = 0,
    ) -> "TokenSequence":
        """Tokens that the policy sampled one after the other, all of them with the same weights."""
        return cls(
            tokens=tokens,
            sampled=(True,) * len(tokens),
            logprobs=logprobs,
            cut_logprobs=cut_logprobs,
            versions=((0, version),),
            finish=finish,
        )

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled: the length of a completion, in every statistic, penalty and weight."""
        return self.sampled.count(True)

    @property
    def sampled_tokens(self) -> tuple[int, ...]:
        return self.tokens if False not in self.sampled else tuple(compress(self.tokens, self.sampled))

    @property
    def text_tokens(self) -> tuple[int, ...]:
        """The tokens that write text: all but a stop token at the end."""
        stopped = self.ends_in_stop_token or (self.finish is not None and self.finish.has_stop_token)
        return self.tokens[:-1] if stopped else self.tokens

    def first(self, count: int) -> "TokenSequence":
        """A demonstration's beginning, of at most this many tokens."""
        assert not self.logprobs, "a demonstration has no log-probs"
        return replace(self, tokens=self.tokens[:count], sampled=self.sampled[:count])


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
    """The chat turns that `text` was made from, or None for a plain prompt."""
    columns: Mapping[str, object] = field(default_factory=dict)
    """Every column of the problem's dataset row; reward functions receive them by name."""
    source: str = ""
    """The data set of a mixture that it is from; metrics are also reported by source."""


@dataclass(frozen=True, slots=True)
class Example:
    """A demonstration: a row of tokens, of which those marked as `sampled` are learned and the others only read."""

    sequence: TokenSequence
    """Ends with the last learned token.  The first token is never learned: nothing comes before it to predict it."""

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.sequence.tokens

    @property
    def sampled(self) -> tuple[bool, ...]:
        return self.sequence.sampled

    @property
    def num_inputs(self) -> int:
        """Tokens that go through the model: all but the last, which is only predicted."""
        return len(self.tokens) - 1

    @property
    def num_sampled(self) -> int:
        """Tokens that carry loss."""
        return self.sequence.num_sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """Two answers to one prompt, of which one was preferred: what reward models and direct preference losses learn."""

    prompt: Prompt
    """As sampling would see it; `prompt.columns` has the row's other columns."""
    chosen: TokenSequence
    """The preferred answer.  Its tokens continue the prompt's, the stop token included; other speakers' turns in it are
    not `sampled`."""
    rejected: TokenSequence
    """The other answer, likewise."""
    chosen_closing: tuple[int, ...] = ()
    """What a chat template writes after the last stop token of `chosen`, such as a line's end.  No policy samples it,
    but a reward model reads it, since it reads whole conversations."""
    rejected_closing: tuple[int, ...] = ()
    """The same for `rejected`."""
    margin: float | None = None
    """By how much the chosen answer is better, in units of the reward; None if the row does not say."""
    weight: float = 1.0
    """Weight of the pair in the loss."""
    where: str
    """The file and line, or number, that the pair is from: named in messages."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and the longer of the two answers."""
        return len(self.prompt.tokens) + max(
            len(self.chosen.tokens) + len(self.chosen_closing), len(self.rejected.tokens) + len(self.rejected_closing)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One completion exactly as it was sampled; later stages add columns, none writes here."""

    sample: int
    """Number within the group: 0 .. group_size - 1 where a request does not start with another."""
    sequence: TokenSequence
    """All tokens after the prompt, the stop token included: the policy must learn to stop."""
    text: str
    """The decoded tokens.  Added tokens such as `<think>` are kept, a stop token at the end is removed."""
    alternatives: Alternatives | None = None
    """For each sampled token the likeliest tokens there, with log μ; None unless the request keeps them."""
    turns: tuple[Turn, ...] = ()
    """Turns to which an environment replied; empty without an environment."""
    failure: str = ""
    """The traceback of an environment that failed (`Finish.FAILED`)."""
    in_conversation: bool = field(default=False, compare=False)
    """Whether an environment could reply to it, even where none did and its object is gone."""
    environment: object = field(default=None, compare=False, repr=False)
    """The environment's object, which reward functions may read; None without one, and after a change of process."""

    def __getstate__(self) -> list[object]:  # of a class with slots
        return [None if each.name == "environment" else getattr(self, each.name) for each in fields(self)]

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens of the completion, given ones included."""
        return self.sequence.tokens

    @property
    def logprobs(self) -> tuple[float, ...]:
        """log μ of each sampled token, in nats."""
        return self.sequence.logprobs

    @property
    def cut_logprobs(self) -> tuple[float, ...] | None:
        return self.sequence.cut_logprobs

    @property
    def num_sampled(self) -> int:
        return self.sequence.num_sampled

    @property
    def finish(self) -> Finish:
        assert self.sequence.finish is not None, "a completion that was sampled"
        return self.sequence.finish

    @property
    def has_environment(self) -> bool:
        """Whether an environment replied to it, or could have."""
        known = self.in_conversation or bool(self.turns)
        return known or self.environment is not None or self.finish.failed

    @property
    def num_turns(self) -> int:
        """Turns of the policy: those with a reply, and a last one without."""
        answered = self.turns[-1].end + self.turns[-1].num_given if self.turns else 0
        return len(self.turns) + (len(self.tokens) > answered)

    @property
    def environment_reward(self) -> float | None:
        """What its environment's replies earned together; None if no reply had a reward."""
        rewards = [turn.reward for turn in self.turns if turn.reward is not None]
        return math.fsum(rewards) if rewards else None

    @property
    def weights_version(self) -> int:
        """Number of optimiser updates of the oldest weights that sampled one of its tokens."""
        return min(version for _, version in self.sequence.versions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The rollouts of one prompt; group-relative advantages compare them with each other."""

    prompt: Prompt
    draw: int
    """Number of the prompt's draw within its step; refills continue the count."""
    rollouts: tuple[Rollout, ...]

    def graded_text(self, rollout: Rollout) -> str:
        """What a reward function reads: the prefilled start of the answer and the completion."""
        return self.prompt.prefill + rollout.text

    def graded_messages(self, rollout: Rollout) -> list[dict[str, Any]]:
        """The same as messages: the policy's turns, the first with the prefilled start, and the replies to them."""
        first, *others = rollout.sequence.messages or ({"role": "assistant", "content": rollout.text},)
        return [{**first, "content": f"{self.prompt.prefill}{first['content']}"}, *map(dict, others)]


@dataclass(frozen=True, slots=True)
class Marks:
    """What a reward function gave to tokens and spans of one completion, in addition to its score; they add up."""

    tokens: tuple[float | None, ...] = ()
    """One for each token of the completion, given ones included; None where no step ends.  Empty if the function marked
    no tokens."""
    spans: tuple[tuple[int, int, float], ...] = ()
    """(start, end, value): the characters [start, end) of the graded text, and what they earn together."""

    @property
    def total(self) -> float:
        """The sum of all of them."""
        return math.fsum([*(value for value in self.tokens if value is not None), *(each[2] for each in self.spans)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Grades:
    """What the reward functions said about some groups, function by function and in sum."""

    names: tuple[str, ...]
    """Reward functions, in the order of `scores`."""
    scores: Float64[Tensor, "function prompt group"]
    """One score per function and rollout; NaN where the function does not apply or its service failed."""
    weights: Float64[Tensor, " function"]
    """The weight of each function's scores at this step; 0 if it is only reported."""
    rewards: Float64[Tensor, "prompt group"]
    """Weighted sum of the scores that exist, clipped where `clips` says so; NaN where none does."""
    clips: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Function name -> bounds that its scores are clipped to in the sum; `scores` are unclipped."""
    outcomes: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    """For graders that say how a completion failed: function name -> outcome per prompt and rollout."""
    details: Mapping[str, tuple[tuple[Mapping[str, object] | None, ...], ...]] = field(default_factory=dict)
    """Further details from graders, in the same order: plain JSON for the journal."""
    extras: Mapping[str, tuple[tuple[Mapping[str, object] | None, ...], ...]] = field(default_factory=dict)
    """What functions logged about single completions with `log_extra`, in the same order: column -> plain JSON."""
    logged: Mapping[str, tuple[tuple[Mapping[str, float] | None, ...], ...]] = field(default_factory=dict)
    """What functions logged with `log_metric`, repeated for every rollout of its call: name -> number."""
    marks: Mapping[str, tuple[tuple[Marks | None, ...], ...]] = field(default_factory=dict)
    """Process rewards, of functions that gave some: function name -> what tokens and spans of each rollout earn."""
    num_failures: int = 0
    """Scores that are missing because scoring itself failed, not because the function does not apply."""
    num_cached: int = 0
    """Scores reused from an equal completion, without a call."""

    @property
    def clipped(self) -> Float64[Tensor, "function prompt group"]:
        """The scores as summed: clipped to each function's bounds."""
        bounds = [self.clips.get(name, (-torch.inf, torch.inf)) for name in self.names]
        low, high = torch.tensor(bounds, dtype=torch.float64).T[:, :, None, None]
        return self.scores.maximum(low).minimum(high)

    @property
    def marked(self) -> Float64[Tensor, "function prompt group"]:
        """The sum of each function's marks on tokens and spans of a rollout; 0 where it made no mark."""
        totals = torch.zeros_like(self.scores)
        for place, name in enumerate(self.names):
            for row, group in enumerate(self.marks.get(name, ())):
                given = [0.0 if marks is None else marks.total for marks in group]
                totals[place, row] = torch.tensor(given, dtype=torch.float64)
        return totals

    @property
    def totals(self) -> Float64[Tensor, "prompt group"]:
        """All that rollouts earn: the rewards, and the marks with their functions' weights."""
        return self.rewards + torch.einsum("f,fpg->pg", self.weights, self.marked) if self.marks else self.rewards

    def select(self, rows: Sequence[int]) -> "Grades":
        """The grades of some groups; counts stay those of all groups."""
        chosen = list(rows)
        told: dict[str, Any] = {
            kind: {name: tuple(each[i] for i in chosen) for name, each in getattr(self, kind).items()} for kind in TOLD
        }
        return replace(self, scores=self.scores[:, chosen], rewards=self.rewards[chosen], **told)

    def joined(self, other: "Grades") -> "Grades":
        """The grades of two lists of groups, one after the other."""
        return Grades(
            names=self.names,
            scores=torch.cat([self.scores, other.scores], dim=1),
            weights=self.weights,
            clips=self.clips,
            rewards=torch.cat([self.rewards, other.rewards]),
            **{kind: _appended((self, other), kind) for kind in TOLD},
            num_failures=self.num_failures + other.num_failures,
            num_cached=self.num_cached + other.num_cached,
        )


TOLD = ("outcomes", "details", "extras", "logged", "marks")
"""Fields with one entry per rollout from functions."""


def _appended(parts: Sequence[Grades], kind: str) -> dict[str, Any]:
    """Entries for some groups, then for others; a function may lack entries for either."""
    said: list[Mapping[str, Any]] = [getattr(grades, kind) for grades in parts]
    blank = "" if kind == "outcomes" else None
    nothing = [((blank,) * grades.rewards.shape[1],) * grades.rewards.shape[0] for grades in parts]
    return {
        name: tuple(row for each, none in zip(said, nothing, strict=True) for row in each.get(name, none))
        for name in parts[0].names
        if any(name in each for each in said)
    }
