"""Which rewards score which rows (`where`, `gate` and `of` decide), and their calls, round by round.

Calls in the trainer's process are made in order, others in workers, async ones on a background loop.  A call in the
trainer's process cannot be ended: a slow one is reported, and changes to the process are undone.
"""

import asyncio
import functools
import inspect
import math
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch

from posttrain.errors import RunError, UserError
from posttrain.options.reward import OnUnscoredRow, RewardTerms
from posttrain.records import Grades, Group
from posttrain.rewards.grading.answers import UNSCORED, FunctionError, Score, Verdict, as_raised, invoke, settled
from posttrain.rewards.grading.calls import Call, Deadline, Result, RolloutRow, reward_arguments
from posttrain.rewards.grading.function import RewardFunction, ScoringFailure
from posttrain.rewards.grading.resources import NeedsResources, Resources
from posttrain.rewards.grading.worker import Job, finish_jobs

GRACE_SECONDS = 5.0
PATIENCE_SECONDS = 60.0
"""How long functions without a deadline may take before a warning names them."""


def dispatch(calls: Sequence[Call], resources: Resources) -> list[Result]:
    """The results of the calls, in their order, on a session's resources."""
    with warning_when_slow(calls):
        results = [None if call.function.settings.workers else call_here(call, resources) for call in calls]
        waiting = [index for index, result in enumerate(results) if inspect.isawaitable(result)]
        in_workers: dict[str, dict[int, Call]] = {}
        for index, call in enumerate(calls):
            if call.function.settings.workers:
                in_workers.setdefault(call.function.name, {})[index] = call
        if not waiting and not in_workers:
            return results
        names = names_of(calls[index] for index in waiting)
        started = [(calls[index], results[index]) for index in waiting]
        with requiring_open_stdout(names), restoring_torch_state(), awaiting(started, names) as finished:
            jobs = [
                Job(resources.pool_for(next(iter(of_function.values())).function), of_function)
                for of_function in in_workers.values()
            ]
            finish_jobs(jobs)
            found = dict(zip(waiting, finished(), strict=True))
            for job in jobs:
                found |= job.results
    return [found.get(index, result) for index, result in enumerate(results)]


def names_of(calls: Iterable[Call]) -> str:
    return ", ".join(dict.fromkeys(repr(call.function.name) for call in calls))


def call_here(call: Call, resources: Resources) -> Result:
    """The call's result, its awaitable, or what it raised."""
    refusal = call.bounds.refusal()
    if refusal is not None:
        return refusal
    arguments = reward_arguments(call)
    function: Any = call.function.call
    if isinstance(function, NeedsResources):
        function = function.with_resources(resources)
    try:
        with requiring_open_stdout(repr(call.function.name)), restoring_torch_state():
            return invoke(function, arguments)
    except (ScoringFailure, FunctionError) as failure:
        return failure


@contextmanager
def awaiting(started: Sequence[tuple[Call, Any]], names: str) -> Iterator[Callable[[], list[Result]]]:
    """Run awaitables in the background; yields a function that waits for their results.  Leaving cancels them."""
    if not started:
        yield list
        return
    deadlines = [call.deadline() for call, _ in started]

    async def together() -> list[object]:
        pairs = zip(started, deadlines, strict=True)
        return await asyncio.gather(*(in_time(awaitable, deadline) for (_, awaitable), deadline in pairs))

    future = asyncio.run_coroutine_threadsafe(together(), shared_loop().running())

    def results() -> list[Result]:
        last = max(deadlines, key=lambda deadline: deadline.at).timeout
        try:
            done = future.result(None if last is None else last + GRACE_SECONDS)
        except TimeoutError as error:
            problem = f"reward {names}: cannot be ended at its deadline: it never gives control back to its event loop"
            raise RunError(f"{problem}. Await what is slow (asyncio.sleep, not time.sleep), or set workers.") from error
        return [as_raised(result) for result in done]

    try:
        yield results
    finally:
        future.cancel()  # after an interrupt nothing runs on in the background; otherwise this does nothing


async def in_time(awaitable: Any, deadline: Deadline) -> object:
    """Its result or exception; at the deadline it is cancelled, which is a failure."""
    task = asyncio.ensure_future(settled(awaitable))
    try:  # not wait_for, which waits for functions that ignore being cancelled
        done, _ = await asyncio.wait([task], timeout=deadline.timeout)
    finally:
        task.cancel()  # does nothing to a finished task
    if not done:
        task.add_done_callback(lambda late: late.cancelled() or late.exception())  # asyncio warns of exceptions unread
        return ScoringFailure(deadline.says)
    if task.cancelled():
        return asyncio.CancelledError()
    error = task.exception()
    return task.result() if error is None else error


class LoopThread:
    """An event loop in a background thread, since notebooks already run a loop in theirs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def running(self) -> asyncio.AbstractEventLoop:
        """The loop; a new one if its thread is dead, as after a fork, or if it was closed."""
        with self._lock:
            alive = self._thread is not None and self._thread.is_alive()
            if self._loop is None or not alive or self._loop.is_closed():
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._run, args=[self._loop], name="async rewards", daemon=True)
                self._thread.start()
            return self._loop

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        while not loop.is_closed():  # a task that a function has started may stop it, or raise what ends it
            with suppress(SystemExit, KeyboardInterrupt):  # the task has it as its exception already
                loop.run_forever()


@functools.cache
def shared_loop() -> LoopThread:
    """One loop for all steps, since clients that a function keeps belong to the loop that made them."""
    return LoopThread()


@contextmanager
def warning_when_slow(calls: Sequence[Call]) -> Iterator[None]:
    """Warn, after a while, of functions among the calls that have no deadline."""
    endless = [call for call in calls if not call.function.bounded and math.isinf(call.deadline().at)]
    if not endless:
        yield
        return
    message = (
        f"reward {names_of(endless)}: still running after {PATIENCE_SECONDS:g} s, and it has no deadline. To set one,"
        " give it `workers: 1` and `item_seconds` (reward_function(call, workers=1, item_seconds=...) in Python)."
    )
    timer = threading.Timer(PATIENCE_SECONDS, warnings.warn, [message, RuntimeWarning])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def requiring_open_stdout(names: str) -> Iterator[None]:
    closed = stdout_is_closed()
    try:
        yield
    finally:
        if stdout_is_closed() and not closed:
            sys.stdout = sys.stderr  # for what is printed until the end
            remedy = "Leave it open, or set `workers: 1` (reward_function(call, workers=1) in Python)."
            raise RunError(f"reward {names}: closed the standard output, which the run prints to. {remedy}")


def stdout_is_closed() -> bool:
    return sys.stdout is not None and sys.stdout.closed  # a program without a standard output prints nothing


@contextmanager
def restoring_torch_state() -> Iterator[None]:
    """Restore torch's settings that functions may change for the whole thread: gradients, the default type."""
    dtype = torch.get_default_dtype()
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            yield
    finally:
        torch.set_default_dtype(dtype)


def dependency_rounds(functions: Sequence[RewardFunction]) -> list[list[int]]:
    """The indices of the functions in rounds: each after those that its `gate` and `of` name."""
    names = [function.name for function in functions]
    needs = [{name for name in (function.settings.gate, function.settings.of) if name} for function in functions]
    for function, needed in zip(functions, needs, strict=True):
        for name in sorted(needed - set(names)):
            where = f"reward {function.name!r} waits for a reward {name!r}, but there are only {', '.join(names)}."
            raise UserError(f"{where} Add it (with weight 0 if it should not count).")
    done: set[str] = set()
    ordered: list[list[int]] = []
    left = list(range(len(functions)))
    while left:
        ready = [index for index in left if needs[index] <= done]
        if not ready:
            waiting = ", ".join(names[index] for index in left)
            raise UserError(f"rewards {waiting} wait for each other. Remove one `gate` or `of`.")
        ordered.append(ready)
        left = [index for index in left if index not in ready]
        done |= {names[index] for index in ready}
    return ordered


def row_for(
    row: RolloutRow, index: int, function: RewardFunction, verdicts: Mapping[str, Sequence[Verdict]]
) -> RolloutRow | Score:
    """The row as the function sees it, or its score without a call: by `where`, the gate or a failed environment."""
    terms = function.settings
    if row.rollout.finish.failed or not terms.applies(row.group.prompt.columns):
        return UNSCORED
    if terms.gate:
        gate = verdicts[terms.gate][index]
        if not isinstance(gate, Score) or math.isnan(gate.value):
            return UNSCORED
        if gate.value <= 0:
            return Score(0.0, "gated")
    if terms.of:
        base = verdicts[terms.of][index]
        return replace(row, base=base.value if isinstance(base, Score) and not math.isnan(base.value) else None)
    return row


def require_rewarded_rows(rows: Sequence[tuple[str, Mapping[str, object]]], rewards: Sequence[RewardFunction]) -> None:
    """Reject a row (name, columns) that no reward with a weight scores, by its `where` or its gate's."""
    ordered = [rewards[index] for indices in dependency_rounds(rewards) for index in indices]
    paying = [each for each in rewards if has_weight(each.settings)]
    without = []
    for where, columns in rows if paying else ():
        found: set[str] = set()
        for function in ordered:
            terms = function.settings
            if terms.applies(columns) and (not terms.gate or terms.gate in found):
                found.add(function.name)
        if not any(each.name in found for each in paying):
            without.append((where, columns))
    if not without:
        return
    (where, columns), reasons = without[0], []
    for function in paying:
        others = [(name, value) for name, value in function.settings.where.items() if columns.get(name) != value]
        reason = f"{function.name} waits for its gate {function.settings.gate}"
        for name, value in others[:1]:
            has = f"{columns[name]!r:.40}" if name in columns else "no such column"
            reason = f"{function.name} is for {name} = {value!r:.40}, but this row has {has}"
        reasons.append(reason)
    more = f" and {len(without) - 1} others" if len(without) > 1 else ""
    remedy = "Add a reward, widen a `where`, or remove it."
    raise UserError(f"{where}: no reward applies to this row{more}: {'; '.join(reasons)}. {remedy}")


def has_weight(terms: RewardTerms) -> bool:
    return terms.weight != 0 or bool(terms.weight_to)


class UnscoredRows:
    """Reports, once each, prompts for which every function with a weight returned None for all completions."""

    def __init__(self, what_then: OnUnscoredRow) -> None:
        self.what_then = what_then
        self.named: set[str] = set()

    def look_at(self, groups: Sequence[Group], grades: Grades) -> None:
        """Warn of the first few such prompts, or raise RunError; silent in a step whose scoring failed."""
        if grades.num_failures:
            return
        functions = ", ".join(name for name, weight in zip(grades.names, grades.weights, strict=True) if weight)
        for group, unscored in zip(groups, grades.rewards.isnan().all(dim=1).tolist(), strict=True):
            asked = sum(not rollout.finish.failed for rollout in group.rollouts)
            if not unscored or not functions or not asked or group.prompt.id in self.named:
                continue
            said = f"{functions} returned None for all {asked} completions"
            message = f"prompt {group.prompt.id}: no reward applies: {said}"
            if self.what_then == "stop":
                raise RunError(f"{message}. Add a reward, remove such rows, or set grading.on_unscored_row = warn.")
            self.named.add(group.prompt.id)
            if len(self.named) <= 5:  # others are only counted, as `frac_unscored`
                last = " Further rows like it are not named." if len(self.named) == 5 else ""
                warnings.warn(f"{message}, so it trains on nothing here.{last}", RuntimeWarning, stacklevel=1)
