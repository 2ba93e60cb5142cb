"""Scores completions with the reward functions that people already write.  docs/rewards.md describes the protocol.

An exception, a wrong length, NaN, inf or another type stops the run and names the completion (`on_error="none"`: scored
as None and counted).  A `ScoringFailure`, a deadline or a lost worker is retried twice, then None and counted; more
than `grading.max_failure_share` of them in one function's scores stop the run.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, TypeVar

import torch
from jaxtyping import Float64
from torch import Tensor

from posttrain.errors import RunError, UserError
from posttrain.options.reward import GradingOptions
from posttrain.records import Grades, Group, Marks
from posttrain.rewards.grading import answers, calls
from posttrain.rewards.grading.dispatch import dependency_rounds, dispatch, row_for
from posttrain.rewards.grading.function import (
    RewardFunction,
    ScoringFailure,
    TrainerState,
    keywords,
    may_be_cached,
    reward_function,
    with_distinct_names,
)
from posttrain.rewards.grading.resources import Cache, Resources, default_resources, keys_of

__all__ = ["Journal", "OnError", "RewardFunction", "ScoringFailure", "grade", "reward_function"]

RETRY_WAITS_SECONDS = (0.5, 2.0)
"""Pauses before failed scoring is retried."""
DEFAULTS = GradingOptions()

OnError = Literal["stop", "none"]
Read = TypeVar("Read")
Journal = Callable[[Sequence[Group], Grades], None]


def grade(
    groups: Sequence[Group],
    functions: Sequence[RewardFunction],
    *,
    on_error: OnError = "stop",
    journal: Journal | None = None,
    step: int = 1,
    grading: GradingOptions = DEFAULTS,
    resources: Resources | None = None,
    trainer_state: object = None,
) -> Grades:
    """Score every rollout with every function.

        reward = Σ_k weight_k · score_k   over the functions of non-zero weight that scored; NaN where none did

    Weights are those of the step; scores are clipped if a function's terms say so.  `journal` gets all scores before
    anything uses them, even if too many failures then stop the run.  `resources` are the session's; the default is one
    set per process.  The default `trainer_state` is that of a run before this step.
    """
    if not functions:
        remedy = "Name one under `rewards` in the recipe (such as `my_rewards.py:solved`), or give rewards=[...]."
        raise UserError(f"no reward function. {remedy}")
    functions = with_distinct_names(functions)
    for group in groups:
        if (size := len(group.rollouts)) != (first := len(groups[0].rollouts)):
            told = f"that of prompt {group.prompt.id!r} has {size} completions, that of {groups[0].prompt.id!r} {first}"
            raise UserError(f"groups: {told}. All must have the same number: call grade(...) once for each size.")
    for function in functions:
        require_enforceable(function, grading)
    rows = [calls.RolloutRow(group, rollout) for group in groups for rollout in group.rollouts]
    state = TrainerState(global_step=step - 1) if trainer_state is None else trainer_state
    pending = score_rows(rows, functions, on_error, grading, resources or default_resources(), state)
    grades = as_grades(groups, pending, step)
    if journal is not None:
        journal(groups, grades)
    for waiting in pending:
        waiting.remember()  # after the journal: a cache that fails must not keep a score from it
    for waiting in pending:
        waiting.require_few_failures(grading.max_failure_share)
    return grades


def require_enforceable(function: RewardFunction, grading: GradingOptions) -> None:
    """Reject time limits that cannot be enforced, and workers or a cache for a function that has no name to load."""
    settings = function.settings
    if settings.workers or settings.cache:
        function.find_source()
    if settings.workers or function.is_async:
        return
    limits = {"item_seconds": settings.item_seconds, "seconds": settings.seconds}
    if not function.bounded:
        limits["grading.seconds"] = grading.seconds
    for name, value in limits.items():
        if value:
            cannot = f"cannot end reward {function.name!r}, a plain function in the trainer's process"
            remedy = "Set `workers: 1` (reward_function(call, workers=1)), or make it an `async def`."
            raise UserError(f"{name} = {value:g} {cannot}. {remedy}")


class PendingScores:
    """The rows that one function scores in a round, and its verdicts so far."""

    def __init__(
        self,
        function: RewardFunction,
        rows: Sequence[calls.RolloutRow | answers.Score],
        grading: GradingOptions,
        until: calls.Deadline,
        cache: Cache | None = None,
        trainer_state: object = calls.NO_RUN,
    ) -> None:
        """A Score among `rows` needs no call; `until` is when all functions have to be done."""
        seconds = function.settings.seconds
        limit = calls.after(seconds, f"the reward's seconds = {seconds:g} for a batch were over")
        self.bounds = calls.Bounds(until=min(limit, until), may_lose=grading.max_failure_share * len(rows))
        self.function, self.cache, self.trainer_state = function, cache, trainer_state
        self.rows = {index: row for index, row in enumerate(rows) if isinstance(row, calls.RolloutRow)}
        no_time = answers.OutOfTime(self.bounds.until.says)
        self.verdicts: list[answers.Verdict] = [row if isinstance(row, answers.Score) else no_time for row in rows]
        self.unscored = list(self.rows)
        """Indices of rows without a score; after each try, those whose scoring failed."""
        self.keys: dict[int, bytes] = {}
        self.duplicates: dict[int, int] = {}
        """Rows that look like an earlier one to the function, and that row's index."""
        if cache is not None:
            self._look_up(cache)
        self.num_cached = len(self.rows) - len(self.unscored)
        """Rows that need no call: the score is cached, or is a duplicate's."""

    def _look_up(self, cache: Cache) -> None:
        keys = zip(self.rows, keys_of(self.function, list(self.rows.values()), cache.sandbox), strict=True)
        self.keys = {index: key for index, key in keys if key is not None}
        known = cache.known(self.keys.values())
        first: dict[bytes, int] = {}
        for index, key in self.keys.items():
            if key in known:
                self.verdicts[index] = known[key]
                self.unscored.remove(index)
            elif first.setdefault(key, index) != index:
                self.duplicates[index] = first[key]
                self.unscored.remove(index)

    @property
    def open(self) -> bool:
        return bool(self.unscored) and not self.bounds.until.passed

    def calls(self) -> list[calls.Call]:
        rows = tuple(self.rows[index] for index in self.unscored)
        call = calls.Call(self.function, rows, keywords(self.function), self.bounds, self.trainer_state)
        return calls.calls_for(call)

    def take(self, fresh: Sequence[answers.Verdict]) -> None:
        """Record the calls' verdicts; failed rows are retried, those that were never called first."""
        for index, verdict in zip(self.unscored, fresh, strict=True):
            self.verdicts[index] = verdict
        failed = [index for index in self.unscored if isinstance(self.verdicts[index], ScoringFailure)]
        self.unscored = sorted(failed, key=lambda index: not isinstance(self.verdicts[index], answers.OutOfTime))

    def conclude(self) -> list[answers.Verdict]:
        for index, first in self.duplicates.items():
            self.verdicts[index] = self.verdicts[first]
        return self.verdicts

    def remember(self) -> None:
        if self.cache is not None:
            verdicts = {key: self.verdicts[index] for index, key in self.keys.items()}
            self.cache.remember({key: each for key, each in verdicts.items() if isinstance(each, answers.Score)})

    def require_few_failures(self, share: float) -> None:
        """Stop if so many scores failed that the rest may be a biased selection."""
        failures = [verdict for verdict in self.verdicts if isinstance(verdict, ScoringFailure)]
        if len(failures) > share * len(self.verdicts):
            last = next((each for each in reversed(failures) if not isinstance(each, answers.OutOfTime)), failures[-1])
            raise RunError(
                f"reward {self.function.name!r}: scoring failed for {len(failures)} of {len(self.verdicts)} completions"
                f" after up to {1 + len(RETRY_WAITS_SECONDS)} tries; at most {100 * share:g}% may fail"
                f" (grading.max_failure_share). The last failure: {answers.safe_text(last, str)}. Fix its cause and"
                " resume the run."
            ) from last


def score_rows(
    rows: Sequence[calls.RolloutRow],
    functions: Sequence[RewardFunction],
    on_error: OnError,
    grading: GradingOptions,
    resources: Resources,
    trainer_state: object,
) -> list[PendingScores]:
    """The verdicts of each function on each row: a score, or a failure after every retry."""
    until = calls.after(grading.seconds, f"grading.seconds = {grading.seconds:g} for all rewards of a batch were over")
    verdicts: dict[str, list[answers.Verdict]] = {}
    pending: dict[int, PendingScores] = {}
    for indices in dependency_rounds(functions):
        for index in indices:
            function = functions[index]
            seen = [row_for(row, i, function, verdicts) for i, row in enumerate(rows)]
            cache = resources.cache_for(grading) if may_be_cached(function) else None
            pending[index] = PendingScores(function, seen, grading, until, cache, trainer_state)
        call_with_retries([pending[index] for index in indices], on_error, resources)
        for index in indices:
            verdicts[functions[index].name] = pending[index].conclude()
    return [pending[index] for index in range(len(functions))]


def call_with_retries(pending: Sequence[PendingScores], on_error: OnError, resources: Resources) -> None:
    """Call the functions of a round; retry rows whose scoring failed while there is time."""
    for wait in (0.0, *RETRY_WAITS_SECONDS):
        still = [waiting for waiting in pending if waiting.open]
        if not still:
            break
        time.sleep(max(0.0, min(wait, max(waiting.bounds.until.left() for waiting in still))))
        to_make = [waiting.calls() for waiting in still]
        results = iter(dispatch([call for of_function in to_make for call in of_function], resources))
        for waiting, of_function in zip(still, to_make, strict=True):
            fresh = [
                checked_verdicts(call, calls.read_result(call, next(results)), on_error, resources)
                for call in of_function
            ]
            waiting.take([verdict for of_call in fresh for verdict in of_call])


def checked_verdicts(
    call: calls.Call, answer: list[answers.Verdict] | answers.InvalidScore, on_error: OnError, resources: Resources
) -> list[answers.Verdict]:
    """The verdicts of a call; an invalid score stops the run, or stays with its row.

    If a call of several rows raised, each half of them is called again to find the rows that cause it: "stop" raises
    the error of the first such row, or names no row if neither half repeats the error.
    """
    if not isinstance(answer, answers.InvalidScore):
        for row, verdict in zip(call.rows, answer, strict=True):
            if isinstance(verdict, answers.InvalidScore) and on_error == "stop":
                raise calls.run_error(call, verdict, row) from verdict.cause
        return answer
    verdicts: list[answers.Verdict] = [answer] * len(call.rows)
    if len(call.rows) > 1 and answer.cause is not None:  # a wrong length or type is not the fault of one row
        middle = len(call.rows) // 2
        verdicts = []
        for rows in (call.rows[:middle], call.rows[middle:]):
            half = replace(call, rows=rows)
            again = calls.read_result(half, dispatch([half], resources)[0])
            verdicts += checked_verdicts(half, again, on_error, resources)
    if on_error == "stop":
        raise calls.run_error(call, answer, call.rows[0] if len(call.rows) == 1 else None) from answer.cause
    return verdicts


def as_grades(groups: Sequence[Group], pending: Sequence[PendingScores], step: int) -> Grades:
    """The verdicts as one record."""
    functions = [each.function for each in pending]
    shape = (len(groups), len(groups[0].rollouts) if groups else 0)
    scores = {
        each.function.name: [one if isinstance(one, answers.Score) else answers.UNSCORED for one in each.verdicts]
        for each in pending
    }
    values = torch.tensor([[one.value for one in column] for column in scores.values()], dtype=torch.float64)
    grades = Grades(
        names=tuple(scores),
        scores=values.reshape(len(functions), *shape),
        weights=torch.tensor([function.settings.weight_at(step) for function in functions], dtype=torch.float64),
        rewards=torch.full(shape, math.nan, dtype=torch.float64),
        clips={each.name: each.settings.clip for each in functions if each.settings.clip is not None},
        outcomes=by_group(scores, shape[1], lambda score: score.outcome),
        details=by_group(scores, shape[1], lambda score: score.details),
        extras=by_group(scores, shape[1], lambda score: score.extra),
        logged=by_group(scores, shape[1], lambda score: score.metrics),
        marks=by_group(scores, shape[1], marks_in),
        num_failures=sum(not isinstance(one, answers.Score) for each in pending for one in each.verdicts),
        num_cached=sum(each.num_cached for each in pending),
    )
    return replace(grades, rewards=weighted_sum(grades.clipped, grades.weights))


def by_group(
    scores: Mapping[str, Sequence[answers.Score]], size: int, read: Callable[[answers.Score], Read]
) -> dict[str, tuple[tuple[Read, ...], ...]]:
    found = {name: [read(score) for score in column] for name, column in scores.items()}
    return {
        name: tuple(tuple(column[start : start + size]) for start in range(0, len(column), size))
        for name, column in found.items()
        if any(column)
    }


def marks_in(score: answers.Score) -> Marks | None:
    if score.marks is None:
        return None
    spans = tuple((start, end, value) for start, end, value in score.marks["spans"])
    return Marks(tokens=tuple(score.marks["tokens"]), spans=spans)


def weighted_sum(
    scores: Float64[Tensor, "function prompt group"], weights: Float64[Tensor, " function"]
) -> Float64[Tensor, "prompt group"]:
    """Σ_k w_k s_k over the functions of non-zero weight that scored; NaN where none did."""
    by_function = weights[:, None, None]
    counted = ~scores.isnan() & (by_function != 0)
    total = torch.where(counted, by_function * scores, 0.0).sum(dim=0)
    return torch.where(counted.any(dim=0), total, math.nan)
