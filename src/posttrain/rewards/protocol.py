"""Scoring completions with the reward functions that people already write.

**How a function is called.**  Once per batch and by keyword, with what its signature asks for (everything, if it has
`**kwargs`): `prompts`, `completions`, `completion_ids`, `finish_reasons` and every dataset column, as lists with one
entry per completion.  For a plain prompt these are strings.  For a conversation `prompts[i]` is the list of messages
and `completions[i]` is `[{"role": "assistant", "content": ...}]`.  A completion's text is what was prefilled plus what
was sampled, tags kept, stop token removed.  A function with a parameter `response` scores one completion per call:
`(response, ground_truth) -> float`, where `ground_truth` is the column of that name or `answer`.

**What it returns.**  One `float | int | bool | None | Graded` per completion; None where it does not apply.  A function
may be `async` or return an awaitable: all of these run concurrently.

**What goes wrong.**  An exception, a wrong length, NaN, inf or another type stops the run and names the completion
(`on_error="none"`: scored as None and counted).  A `ScoringFailure` is tried again twice, then None and counted; more
than 5% of them in one function's scores stop the run.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Float64
from torch import Tensor

from posttrain.errors import RunError, UserError
from posttrain.records import Grades, Group
from posttrain.rewards.calling import Call, Row, calls_for, run
from posttrain.rewards.function import RewardFunction, ScoringFailure, reward_function
from posttrain.rewards.rounds import rounds
from posttrain.rewards.verdicts import UNSCORED, Problem, Score, Verdict, read, stop

__all__ = ["Journal", "OnError", "RewardFunction", "ScoringFailure", "grade", "reward_function"]

RETRY_WAITS_SECONDS = (0.5, 2.0)
"""Pauses before a failed scoring is tried again."""

MAX_FAILURE_SHARE = 0.05
"""Share of a function's scores that may be missing because scoring failed."""

GATED = "gated"
"""Outcome of a row that a function is not asked about, as its gate is shut."""

OnError = Literal["stop", "none"]
Journal = Callable[[Sequence[Group], Grades], None]


def grade(
    groups: Sequence[Group],
    functions: Sequence[RewardFunction],
    *,
    on_error: OnError = "stop",
    journal: Journal | None = None,
    step: int = 1,
) -> Grades:
    """Score every rollout with every function.

        reward = Σ_k weight_k · score_k   over the functions of non-zero weight that scored; NaN where none did

    Weights are those of the step, and scores are clipped where a function's terms say so.

    `journal` is handed all scores before anything uses them, also when too many failures then stop the run.
    """
    require_different_names(functions)
    rows = [Row(group, rollout) for group in groups for rollout in group.rollouts]
    verdicts = score(rows, functions, on_error)
    grades = collect(groups, functions, verdicts, step)
    if journal is not None:
        journal(groups, grades)
    for function, column in zip(functions, verdicts, strict=True):
        require_few_failures(function, column)
    return grades


def require_different_names(functions: Sequence[RewardFunction]) -> None:
    """Refuse functions whose scores would be logged as one."""
    if not functions:
        raise UserError("no reward function: name one under `rewards` (such as `my_rewards.py:solved`)")
    names = [function.name for function in functions]
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                f"two reward functions are called {name!r}, and their scores would merge in the logs;"
                " give each a name of its own: reward_function(call, name=...)"
            )


def score(rows: Sequence[Row], functions: Sequence[RewardFunction], on_error: OnError) -> list[list[Verdict]]:
    """Each function's verdict on each row: a score, or a failure that came back after every retry."""
    verdicts: list[list[Verdict]] = [[UNSCORED] * len(rows) for _ in functions]
    places = {function.name: place for place, function in enumerate(functions)}
    for together in rounds(functions):
        asked = [functions[place] for place in together]
        seen = [[as_seen(row, i, function, verdicts, places) for i, row in enumerate(rows)] for function in asked]
        columns: list[list[Verdict]] = [
            [said if isinstance(said, Score) else UNSCORED for said in column] for column in seen
        ]
        score_round(asked, seen, columns, on_error)
        for place, column in zip(together, columns, strict=True):
            verdicts[place] = column
    return verdicts


def as_seen(
    row: Row, index: int, function: RewardFunction, verdicts: Sequence[Sequence[Verdict]], places: Mapping[str, int]
) -> Row | Score:
    """The row as the function is asked about it, or what is settled without asking."""
    terms = function.terms
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


def score_round(
    functions: Sequence[RewardFunction],
    seen: Sequence[Sequence[Row | Score]],
    verdicts: Sequence[list[Verdict]],
    on_error: OnError,
) -> None:
    """Ask functions that wait for none of each other, again where scoring failed, and write down what they say."""
    wanted = [[index for index, row in enumerate(column) if isinstance(row, Row)] for column in seen]
    for wait in (*RETRY_WAITS_SECONDS, 0.0):
        calls = [
            calls_for(function, [row for row in map(column.__getitem__, todo) if isinstance(row, Row)])
            for function, column, todo in zip(functions, seen, wanted, strict=True)
        ]
        results = iter(run([call for of_function in calls for call in of_function]))
        for column, todo, of_function in zip(verdicts, wanted, calls, strict=True):
            fresh = [said for call in of_function for said in settled(call, read(call, next(results)), on_error)]
            for index, said in zip(todo, fresh, strict=True):
                column[index] = said
            todo[:] = [index for index in todo if isinstance(column[index], ScoringFailure)]
        if not any(wanted):
            break
        time.sleep(wait)


def settled(call: Call, answer: list[Verdict] | Problem, on_error: OnError) -> list[Verdict]:
    """The verdicts of a call; a problem stops the run, or stays beside the row it belongs to."""
    if isinstance(answer, Problem):
        return narrowed(call, answer, on_error)
    for row, said in zip(call.rows, answer, strict=True):
        if isinstance(said, Problem) and on_error == "stop":
            raise stop(call, said, row) from said.cause
    return answer


def narrowed(call: Call, problem: Problem, on_error: OnError) -> list[Verdict]:
    """Find the rows behind a problem of a whole call by calling again with each half of them.

    On "stop" this ends with the error at the first row found, or without a row where no half repeats the problem.
    """
    if len(call.rows) == 1 or problem.cause is None:  # a wrong length or type is no single row's fault
        if on_error == "stop":
            raise stop(call, problem, call.rows[0] if len(call.rows) == 1 else None) from problem.cause
        return [problem] * len(call.rows)
    middle = len(call.rows) // 2
    verdicts: list[Verdict] = []
    for half in (call.rows[:middle], call.rows[middle:]):
        again = Call(call.function, half, call.wanted)
        verdicts += settled(again, read(again, run([again])[0]), on_error)
    if on_error == "stop":
        raise stop(call, problem, None) from problem.cause
    return verdicts


def collect(
    groups: Sequence[Group], functions: Sequence[RewardFunction], verdicts: Sequence[Sequence[Verdict]], step: int
) -> Grades:
    """The verdicts as one record."""
    shape = (len(groups), len(groups[0].rollouts) if groups else 0)
    assert all(len(group.rollouts) == shape[1] for group in groups), "groups of different sizes"
    said = [[one if isinstance(one, Score) else UNSCORED for one in column] for column in verdicts]
    values = torch.tensor([[one.value for one in column] for column in said], dtype=torch.float64)
    scores = values.reshape(len(functions), *shape)
    at_step = [function.terms.weight_at(step, function.weight) for function in functions]
    weights = torch.tensor(at_step, dtype=torch.float64)[:, None, None]
    counted = ~scores.isnan() & (weights != 0)
    clipped = torch.stack([clip(column, function) for column, function in zip(scores, functions, strict=True)])
    rewards = torch.where(counted, weights * clipped, 0.0).sum(dim=0)
    outcomes = {
        function.name: tuple(
            tuple(one.outcome for one in column[start : start + shape[1]]) for start in range(0, len(column), shape[1])
        )
        for function, column in zip(functions, said, strict=True)
        if any(one.outcome for one in column)
    }
    return Grades(
        names=tuple(function.name for function in functions),
        scores=scores,
        rewards=torch.where(counted.any(dim=0), rewards, math.nan),
        outcomes=outcomes,
        num_failures=sum(not isinstance(one, Score) for column in verdicts for one in column),
    )


def clip(scores: Float64[Tensor, "prompt group"], function: RewardFunction) -> Float64[Tensor, "prompt group"]:
    """A function's scores as they go into the sum."""
    return scores if function.terms.clip is None else scores.clamp(*function.terms.clip)


def require_few_failures(function: RewardFunction, verdicts: Sequence[Verdict]) -> None:
    """Stop where so many scores failed that what is left may be a biased selection."""
    failures = [said for said in verdicts if isinstance(said, ScoringFailure)]
    if len(failures) > MAX_FAILURE_SHARE * len(verdicts):
        raise RunError(
            f"reward {function.name!r}: scoring failed for {len(failures)} of {len(verdicts)} completions, each tried"
            f" {1 + len(RETRY_WAITS_SECONDS)} times; at most {MAX_FAILURE_SHARE:.0%} may fail in a step."
            f" The last failure: {failures[-1]}. Mend the service behind it and resume the run."
        ) from failures[-1]
