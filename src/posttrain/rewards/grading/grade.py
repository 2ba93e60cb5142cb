"""Scoring completions with the reward functions that people already write.

**How a function is called.**  Once per batch and by keyword, with what its signature asks for (everything, if it has
`**kwargs`): `prompts`, `completions`, `completion_ids`, `finish_reasons` and every dataset column, as lists with one
entry per completion; `trainer_state`, a posttrain.rewards.grading.trainer_state.TrainerState; and, to log by,
`log_extra(column, values)` and `log_metric(name, value)` of posttrain.rewards.grading.call_log.  For a plain prompt
prompts and completions are strings.  For a conversation `prompts[i]` is the list of messages and `completions[i]` is
`[{"role": "assistant", "content": ...}]`.  A completion's text is what was prefilled plus what was sampled, tags kept,
stop token removed.  A function with a parameter `response` scores one completion per call:
`(response, ground_truth) -> float`, where `ground_truth` is the column of that name or `answer`.

**What it returns.**  One `float | int | bool | None | Graded | ProcessReward` per completion; None where it does not
apply.  A ProcessReward has beside the score what single tokens, or spans of the text, earn.  A function may be `async`
or return an awaitable: all of these run concurrently.

**What goes wrong.**  An exception, a wrong length, NaN, inf or another type stops the run and names the completion
(`rollout.on_reward_error: none`, here `on_error="none"`: scored as None and counted).  A `ScoringFailure` is tried
again twice, then None and counted; more than 5% of them in one function's scores stop the run
(`grading.max_failure_share`).

**Where and for how long.**  In the trainer's process and without a limit, unless its options say otherwise
(posttrain.options.reward): in `workers`, processes that a deadline or a crash ends without harm, and that call
a function of lists once for each prompt.  What a deadline or a crash leaves without a score is a failure like others.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float64
from torch import Tensor

from posttrain.errors import RunError, UserError
from posttrain.options.grading import GradingOptions
from posttrain.options.reward import RewardTerms
from posttrain.records import Grades, Group, Marks
from posttrain.rewards.grading.answers import UNSCORED, InvalidScore, OutOfTime, Score, Verdict, safe_text
from posttrain.rewards.grading.calls import Call, RolloutRow, after, read_result, run_error
from posttrain.rewards.grading.dispatch import dispatch
from posttrain.rewards.grading.function import (
    RewardFunction,
    ScoringFailure,
    may_be_cached,
    reward_function,
    with_own_names,
)
from posttrain.rewards.grading.pending_scores import PendingScores, bounds_of, require_enforceable
from posttrain.rewards.grading.resources import Resources, default_resources
from posttrain.rewards.grading.trainer_state import TrainerState

__all__ = ["Journal", "OnError", "RewardFunction", "ScoringFailure", "grade", "reward_function"]

RETRY_WAITS_SECONDS = (0.5, 2.0)
"""Pauses before a failed scoring is tried again."""

DEFAULTS = GradingOptions()

GATED = "gated"
"""Outcome of a row that a function is not asked about, as its gate is shut."""

OnError = Literal["stop", "none"]
Told = TypeVar("Told")
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

    Weights are those of the step, and scores are clipped where a function's terms say so.

    `journal` is handed all scores before anything uses them, also when too many failures then stop the run.
    `resources` are the session's; without a session the process's own are used, with default options.  Functions that
    ask for it are told `trainer_state`; without one, that of a run before its step.
    """
    require_some(functions)
    functions = with_own_names(functions)
    require_equal_sizes(groups)
    for function in functions:
        require_enforceable(function, grading)
    rows = [RolloutRow(group, rollout) for group in groups for rollout in group.rollouts]
    state = TrainerState(global_step=step - 1) if trainer_state is None else trainer_state
    pending = score_rows(rows, functions, on_error, grading, resources or default_resources(), state)
    verdicts = [waiting.verdicts for waiting in pending]
    grades = as_grades(groups, functions, verdicts, step)
    grades = replace(grades, num_cached=sum(waiting.num_cached for waiting in pending))
    if journal is not None:
        journal(groups, grades)
    for waiting in pending:
        waiting.remember()  # after the journal, which a cache that fails must not keep a score from
    for function, column in zip(functions, verdicts, strict=True):
        require_few_failures(function, column, grading.max_failure_share)
    return grades


def require_equal_sizes(groups: Sequence[Group]) -> None:
    """Refuse groups that make no rectangle of scores, before any function is asked."""
    for group in groups:
        if len(group.rollouts) != len(groups[0].rollouts):
            raise UserError(
                f"groups: that of prompt {group.prompt.id!r} has {len(group.rollouts)} completions, that of"
                f" {groups[0].prompt.id!r} {len(groups[0].rollouts)}; all have as many as each other.  Call grade(...)"
                " once for each size."
            )


def require_some(functions: Sequence[RewardFunction]) -> None:
    """Refuse to score with nothing."""
    if not functions:
        raise UserError(
            "no reward function: name one under `rewards` in the recipe (such as `my_rewards.py:solved`), or give"
            " rewards=[...] in Python"
        )


def score_rows(
    rows: Sequence[RolloutRow],
    functions: Sequence[RewardFunction],
    on_error: OnError,
    grading: GradingOptions,
    resources: Resources,
    trainer_state: object,
) -> list[PendingScores]:
    """What each function says of each row: a score, or a failure that came back after every retry."""
    until = after(grading.seconds, f"grading.seconds = {grading.seconds:g} for all rewards of a batch were over")
    verdicts: list[list[Verdict]] = [[UNSCORED] * len(rows) for _ in functions]
    pending: dict[int, PendingScores] = {}
    places = {function.name: place for place, function in enumerate(functions)}
    for together in dependency_rounds(functions):
        for place in together:
            function = functions[place]
            seen = [row_for(row, i, function, verdicts, places) for i, row in enumerate(rows)]
            cache = resources.caches.cache_for(grading) if may_be_cached(function) else None
            bounds = bounds_of(function, len(rows), grading, until)
            pending[place] = PendingScores(function, seen, bounds, cache, trainer_state)
        call_with_retries([pending[place] for place in together], on_error, resources)
        for place in together:
            verdicts[place] = pending[place].conclude()
    return [pending[place] for place in range(len(functions))]


def row_for(
    row: RolloutRow,
    index: int,
    function: RewardFunction,
    verdicts: Sequence[Sequence[Verdict]],
    places: Mapping[str, int],
) -> RolloutRow | Score:
    """The row as the function is asked about it, or what is settled without asking."""
    terms = function.settings
    if not terms.applies(row.group.prompt.columns):
        return UNSCORED
    if terms.gate:
        gate = verdicts[places[terms.gate]][index]
        if not isinstance(gate, Score) or math.isnan(gate.value):
            return UNSCORED
        if gate.value <= 0:
            return Score(0.0, GATED)
    if terms.of:
        base = verdicts[places[terms.of]][index]
        known = isinstance(base, Score) and not math.isnan(base.value)
        return replace(row, base=base.value if known and isinstance(base, Score) else None)
    return row


def call_with_retries(pending: Sequence[PendingScores], on_error: OnError, resources: Resources) -> None:
    """Ask functions that wait for none of each other, and again where scoring failed while there is time."""
    for wait in (0.0, *RETRY_WAITS_SECONDS):
        still = [waiting for waiting in pending if waiting.open]
        if not still:
            break
        time.sleep(max(0.0, min(wait, max(waiting.bounds.until.left() for waiting in still))))
        calls = [waiting.calls() for waiting in still]
        results = iter(dispatch([call for of_function in calls for call in of_function], resources))
        for waiting, of_function in zip(still, calls, strict=True):
            waiting.take(
                [
                    said
                    for call in of_function
                    for said in checked_verdicts(call, read_result(call, next(results)), on_error, resources)
                ]
            )


def checked_verdicts(
    call: Call, answer: list[Verdict] | InvalidScore, on_error: OnError, resources: Resources
) -> list[Verdict]:
    """The verdicts of a call; a problem stops the run, or stays beside the row it belongs to."""
    if isinstance(answer, InvalidScore):
        return bisect_failure(call, answer, on_error, resources)
    for row, said in zip(call.rows, answer, strict=True):
        if isinstance(said, InvalidScore) and on_error == "stop":
            raise run_error(call, said, row) from said.cause
    return answer


def bisect_failure(call: Call, problem: InvalidScore, on_error: OnError, resources: Resources) -> list[Verdict]:
    """Find the rows behind a problem of a whole call by calling again with each half of them.

    On "stop" this ends with the error at the first row found, or without a row where no half repeats the problem.
    """
    if len(call.rows) == 1 or problem.cause is None:  # a wrong length or type is no single row's fault
        if on_error == "stop":
            raise run_error(call, problem, call.rows[0] if len(call.rows) == 1 else None) from problem.cause
        return [problem] * len(call.rows)
    middle = len(call.rows) // 2
    verdicts: list[Verdict] = []
    for half in (call.rows[:middle], call.rows[middle:]):
        again = replace(call, rows=half)
        verdicts += checked_verdicts(again, read_result(again, dispatch([again], resources)[0]), on_error, resources)
    if on_error == "stop":
        raise run_error(call, problem, None) from problem.cause
    return verdicts


def as_grades(
    groups: Sequence[Group], functions: Sequence[RewardFunction], verdicts: Sequence[Sequence[Verdict]], step: int
) -> Grades:
    """The verdicts as one record."""
    shape = (len(groups), len(groups[0].rollouts) if groups else 0)
    said = [[one if isinstance(one, Score) else UNSCORED for one in column] for column in verdicts]
    values = torch.tensor([[one.value for one in column] for column in said], dtype=torch.float64)
    scores = values.reshape(len(functions), *shape)
    by_name = {function.name: column for function, column in zip(functions, said, strict=True)}
    outcomes = {name: [one.outcome for one in column] for name, column in by_name.items()}
    details = {name: [one.details for one in column] for name, column in by_name.items()}
    extras = {name: [one.extra for one in column] for name, column in by_name.items()}
    logged = {name: [one.metrics for one in column] for name, column in by_name.items()}
    marks = {name: [marks_in(one) for one in column] for name, column in by_name.items()}
    grades = Grades(
        names=tuple(function.name for function in functions),
        scores=scores,
        weights=torch.tensor([function.settings.weight_at(step) for function in functions], dtype=torch.float64),
        rewards=torch.full(shape, math.nan, dtype=torch.float64),
        clips={each.name: each.settings.clip for each in functions if each.settings.clip is not None},
        outcomes={name: grouped(column, shape[1]) for name, column in outcomes.items() if any(column)},
        details={name: grouped(column, shape[1]) for name, column in details.items() if any(column)},
        extras={name: grouped(column, shape[1]) for name, column in extras.items() if any(column)},
        logged={name: grouped(column, shape[1]) for name, column in logged.items() if any(column)},
        marks={name: grouped(column, shape[1]) for name, column in marks.items() if any(column)},
        num_failures=sum(not isinstance(one, Score) for column in verdicts for one in column),
    )
    return replace(grades, rewards=weighted_sum(grades.clipped, grades.weights))


def marks_in(score: Score) -> Marks | None:
    """What a function gave tokens and spans."""
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


def grouped(column: Sequence[Told], size: int) -> tuple[tuple[Told, ...], ...]:
    """One entry for each rollout, in groups."""
    return tuple(tuple(column[start : start + size]) for start in range(0, len(column), size))


def require_few_failures(function: RewardFunction, verdicts: Sequence[Verdict], share: float) -> None:
    """Stop where so many scores failed that what is left may be a biased selection."""
    failures = [said for said in verdicts if isinstance(said, ScoringFailure)]
    if len(failures) > share * len(verdicts):
        last = next((said for said in reversed(failures) if not isinstance(said, OutOfTime)), failures[-1])
        raise RunError(
            f"reward {function.name!r}: scoring failed for {len(failures)} of {len(verdicts)} completions, each tried"
            f" up to {1 + len(RETRY_WAITS_SECONDS)} times; at most {100 * share:g}% may fail in a step"
            f" (grading.max_failure_share). The last failure: {safe_text(last, str)}. Mend what is behind it and resume"
            " the run."
        ) from last


@runtime_checkable
class NamedFunction(Protocol):
    """A reward function, as far as ordering asks."""

    @property
    def name(self) -> str: ...

    @property
    def settings(self) -> RewardTerms: ...


def dependency_rounds(functions: Sequence[NamedFunction]) -> list[list[int]]:
    """The functions, by place, in rounds: each after those that its gate and `of` name."""
    names = [function.name for function in functions]
    needs = [{name for name in (function.settings.gate, function.settings.of) if name} for function in functions]
    for function, needed in zip(functions, needs, strict=True):
        for name in sorted(needed - set(names)):
            raise UserError(
                f"reward {function.name!r} waits for a reward {name!r}, but there are only {', '.join(names)}."
                "  Add it, with weight 0 if it is to count for nothing itself."
            )
    done: set[str] = set()
    ordered: list[list[int]] = []
    left = list(range(len(functions)))
    while left:
        ready = [place for place in left if needs[place] <= done]
        if not ready:
            raise UserError(f"rewards {', '.join(names[place] for place in left)} wait for each other")
        ordered.append(ready)
        left = [place for place in left if place not in ready]
        done |= {names[place] for place in ready}
    return ordered
