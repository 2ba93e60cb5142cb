"""Calls of reward functions in workers: handed out one at a time, watched, and made up for where a worker is lost."""

import math
import select
import signal
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from posttrain.errors import RunError, UserError
from posttrain.rewards.grading.answers import OutOfTime
from posttrain.rewards.grading.call_log import LOGS
from posttrain.rewards.grading.calls import NEVER, Call, Result, reward_arguments
from posttrain.rewards.grading.function import FunctionSource, ScoringFailure
from posttrain.rewards.grading.trainer_state import TrainerState
from posttrain.rewards.grading.workers.worker import Worker, WorkerLost
from posttrain.rewards.grading.workers.worker_messages import NotWritableError, dump, result_of, to_json


class WorkerPool:
    """The processes that call one function; open until closed, and again when it is asked again.  For one thread."""

    def __init__(self, source: FunctionSource, size: int) -> None:
        self.source, self.size = source, size
        self.workers: list[Worker] = []

    def idle(self, wanted: int) -> Worker | None:
        """A worker that waits for a call; where there is none, up to `wanted` are started."""
        for worker in [worker for worker in self.workers if worker.idle]:
            if not worker.is_gone():
                return worker
            self.drop(worker)  # killed between two batches: nobody's call is lost
        while len(self.workers) < min(self.size, wanted):
            self.source.require_unchanged()
            self.workers.append(Worker(self.source))
        return None

    def drop(self, worker: Worker) -> int:
        """End a worker; returns its exit status."""
        self.workers.remove(worker)
        return worker.close()

    def close(self) -> None:
        """End all of them."""
        while self.workers:
            self.drop(self.workers[-1])


class Job:
    """Some calls of one function under the same bounds, and what they have come to."""

    def __init__(self, pool: WorkerPool, calls: Sequence[Call]) -> None:
        self.pool, self.calls = pool, calls
        self.results: list[Result] = [None] * len(calls)
        self.waiting = deque(range(len(calls)))
        self.under_way: dict[Worker, int] = {}
        self.rows_lost = 0

    @property
    def unfinished(self) -> bool:
        return bool(self.waiting or self.under_way)

    def feed(self) -> None:
        """Give every idle worker a call, or give up on those that wait."""
        while self.waiting:
            excuse = self.excuse()
            if excuse:
                self.results[self.waiting.popleft()] = OutOfTime(excuse)
                continue
            worker = self.pool.idle(len(self.waiting) + len(self.under_way))
            if worker is None:
                return
            index = self.waiting.popleft()
            self.under_way[worker] = index
            call = self.calls[index]
            worker.ask(payload(call), call.deadline())

    def excuse(self) -> str:
        """Why the calls that wait are not made, if so."""
        bounds = self.calls[0].bounds
        if bounds.until.passed:
            return bounds.until.says
        if self.rows_lost > bounds.may_lose:
            return f"not asked, since {self.rows_lost} completions before were lost to deadlines or crashes"
        return ""

    def hear(self, worker: Worker) -> None:
        """Deal with what a worker says, or with its end."""
        worker.flush()
        try:
            for message in worker.messages():
                self.take(worker, message)
        except WorkerLost:
            self.lose(worker, ended(self.pool.drop(worker)))

    def take(self, worker: Worker, message: dict[str, Any]) -> None:
        """Ready, or the answer to the call that is with it."""
        if "refused" in message:
            raise RunError(f"reward {self.name!r}: in a worker, {message['refused']}")
        worker.idle, worker.deadline = True, NEVER
        if not worker.ready:
            worker.ready = True
            return
        self.results[self.under_way.pop(worker)] = result_of(message)

    def expire(self, worker: Worker) -> None:
        """End a worker that is past its deadline."""
        self.pool.drop(worker)
        self.lose(worker, worker.deadline.says)

    def lose(self, worker: Worker, why: str) -> None:
        """Write down that the call with a worker came to nothing."""
        if not worker.ready:
            raise RunError(f"reward {self.name!r}: {why}, before its worker had loaded {self.pool.source.file}")
        index = self.under_way.pop(worker)
        self.results[index] = ScoringFailure(why)
        self.rows_lost += len(self.calls[index].rows)

    @property
    def name(self) -> str:
        return self.calls[0].function.name


def have_done(jobs: Sequence[Job]) -> None:
    """Make all calls of the jobs; whatever ends this early ends the workers."""
    try:
        while True:
            for job in jobs:
                job.feed()
            if not any(job.unfinished for job in jobs):
                return
            wait(jobs)
    except BaseException:
        for job in jobs:
            job.pool.close()
        raise


def wait(jobs: Sequence[Job]) -> None:
    """Until a worker says something or a deadline passes, and deal with it."""
    at_work = {worker.fileno(): (job, worker) for job in jobs for worker in job.pool.workers if not worker.idle}
    poll = select.poll()
    for descriptor, (_, worker) in at_work.items():
        poll.register(descriptor, select.POLLIN | (select.POLLOUT if worker.outgoing else 0))
    left = [worker.deadline.left() for _, worker in at_work.values()]
    left += [job.calls[0].bounds.until.left() for job in jobs if job.waiting]
    soonest = min(left)
    for descriptor, _ in poll.poll(None if math.isinf(soonest) else max(0, math.ceil(1000 * soonest))):
        job, worker = at_work[descriptor]
        job.hear(worker)
    for job, worker in at_work.values():
        if worker in job.pool.workers and worker.deadline.passed:
            job.expire(worker)


def payload(call: Call) -> bytes:
    """A call as its worker is told of it.  Raises UserError where a column cannot be told."""
    arguments, given = {}, reward_arguments(call)
    request = {"one_by_one": call.wanted.one_by_one, "count": len(call.rows), "reward": call.function.name}
    request["logs"] = [name for name in LOGS if given.pop(name, None) is not None]
    if "trainer_state" in given:
        request["trainer_state"] = state_as_json(call, given.pop("trainer_state"))
    for name, value in given.items():
        try:
            arguments[name] = to_json(value)
            dump(arguments[name])
        except NotWritableError as error:
            raise UserError(
                f"reward {call.function.name!r} runs in a worker, and the column {name!r} holds what cannot be sent to"
                f" one: {error}.  Give it as numbers, texts, lists and mappings, or leave out `workers`."
            ) from None
    return dump({"arguments": arguments, **request})


def state_as_json(call: Call, state: object) -> dict[str, object]:
    """The state of the run as a worker is told it.  Raises UserError for one that is not ours."""
    if not isinstance(state, TrainerState):
        raise UserError(
            f"reward {call.function.name!r} runs in a worker, and asks for a `trainer_state` that cannot be sent to"
            f" one: {type(state).__name__}.  Leave out `workers`, or the argument."
        )
    return asdict(state)


def ended(status: int) -> str:
    """How a worker came to its end."""
    return (
        f"its worker was ended by {signal.Signals(-status).name}" if status < 0 else f"its worker exited with {status}"
    )
