"""Calls of reward functions in worker processes, which a deadline or a crash ends without harm to the run.

A call that is lost with its worker becomes a failure, and is counted.
"""

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from posttrain.errors import RunError, UserError
from posttrain.rewards.grading.call_log import LOGS
from posttrain.rewards.grading.calls import ENVIRONMENT, NEVER, Call, Deadline, Result, after, reward_arguments
from posttrain.rewards.grading.function import CodeSource, ScoringFailure, TrainerState
from posttrain.rewards.grading.worker_process import MOST_BYTES, NotWritableError, message_bytes, result_from, to_json
from posttrain.sandbox.inside.frames import ChannelClosed
from posttrain.sandbox.sandboxed_process import MessageStream

ROOT = Path(__file__).parents[3]
START_SECONDS = 120.0
"""How long a worker may take to import what the function needs."""
END_SECONDS = 5.0
"""How long a killed process may take to end."""


class Worker:
    """A process that calls one function; it has at most one call."""

    def __init__(self, source: CodeSource) -> None:
        self.ready = False
        self.idle = False
        self.deadline = after(START_SECONDS, f"it was not ready to be called within {START_SECONDS:g} s")
        self.channel = MessageStream(most=MOST_BYTES)
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "posttrain.rewards.grading.worker_process", str(os.getpid())],
                stdin=self.channel.theirs.fileno(),
                stdout=2,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # the terminal's Ctrl-C is ours to handle, and its children end with it
            )
        except BaseException:
            self.channel.close()
            raise
        self.channel.theirs.close()
        self.channel.send(message_bytes({"place": source.place, "name": source.name, "path": sys.path}))

    def call(self, payload: bytes, deadline: Deadline) -> None:
        assert self.idle
        self.idle, self.deadline = False, deadline
        self.channel.send(payload)

    def close(self) -> int:
        self.channel.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # before waiting: until then no other process has its number
        try:
            return self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:  # stuck in the kernel, as on a file system that does not answer
            return -signal.SIGKILL


class WorkerPool:
    """The processes that call one function; usable again after `close`.  For one thread."""

    def __init__(self, source: CodeSource, size: int) -> None:
        self.source, self.size = source, size
        self.workers: list[Worker] = []

    def idle(self, wanted: int) -> Worker | None:
        """A worker that waits for a call; if there is none, starts up to `wanted`."""
        for worker in [worker for worker in self.workers if worker.idle]:
            if not worker.channel.has_ended():
                return worker
            self.drop(worker)  # killed between two batches: no call is lost
        while len(self.workers) < min(self.size, wanted):
            self.source.require_unchanged()
            self.workers.append(Worker(self.source))
        return None

    def drop(self, worker: Worker) -> int:
        self.workers.remove(worker)
        return worker.close()

    def close(self) -> None:
        while self.workers:
            self.drop(self.workers[-1])


class Job:
    """Some calls of one function under the same bounds, and their results."""

    def __init__(self, pool: WorkerPool, calls: Mapping[int, Call]) -> None:
        """`calls` and `results` are by the calls' places in the round."""
        first, *_ = calls.values()
        self.pool, self.calls, self.name, self.bounds = pool, calls, first.function.name, first.bounds
        self.results: dict[int, Result] = {}
        self.waiting = deque(calls)
        self.under_way: dict[Worker, int] = {}
        self.rows_lost = 0

    def feed(self) -> None:
        while self.waiting:
            refusal = self.bounds.refusal(self.rows_lost)
            if refusal is not None:
                self.results |= dict.fromkeys(self.waiting, refusal)
                self.waiting.clear()
                return
            worker = self.pool.idle(len(self.waiting) + len(self.under_way))
            if worker is None:
                return
            index = self.under_way[worker] = self.waiting.popleft()
            worker.call(payload(self.calls[index]), self.calls[index].deadline())

    def hear(self, worker: Worker) -> None:
        """Take a worker's messages, or record that it has ended."""
        worker.channel.flush()
        try:
            for message in worker.channel.messages():
                self.take(worker, json.loads(message))
        except (ChannelClosed, json.JSONDecodeError, UnicodeDecodeError):
            status = self.pool.drop(worker)
            signalled = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"exited with {status}"
            self.lose(worker, f"its worker {signalled}")

    def take(self, worker: Worker, message: dict[str, Any]) -> None:
        if "refused" in message:
            raise RunError(f"reward {self.name!r}: in a worker, {message['refused']}")
        worker.idle, worker.deadline = True, NEVER
        if worker.ready:
            self.results[self.under_way.pop(worker)] = result_from(message)
        worker.ready = True

    def lose(self, worker: Worker, why: str) -> None:
        if not worker.ready:
            raise RunError(f"reward {self.name!r}: {why}, before its worker had loaded {self.pool.source.file}")
        index = self.under_way.pop(worker)
        self.results[index] = ScoringFailure(why)
        self.rows_lost += len(self.calls[index].rows)


def finish_jobs(jobs: Sequence[Job]) -> None:
    """Make all calls of the jobs; whatever ends this early ends the workers."""
    try:
        while True:
            for job in jobs:
                job.feed()
            if not any(job.waiting or job.under_way for job in jobs):
                return
            wait(jobs)
    except BaseException:
        for job in jobs:
            job.pool.close()
        raise


def wait(jobs: Sequence[Job]) -> None:
    """Wait until a worker sends something or a deadline passes, and handle it."""
    busy = {worker.channel.fileno(): (job, worker) for job in jobs for worker in job.pool.workers if not worker.idle}
    poll = select.poll()
    for descriptor, (_, worker) in busy.items():
        poll.register(descriptor, select.POLLIN | (select.POLLOUT if worker.channel.outgoing else 0))
    left = [worker.deadline.left() for _, worker in busy.values()]
    soonest = min(left + [job.bounds.until.left() for job in jobs if job.waiting])
    for descriptor, _ in poll.poll(None if math.isinf(soonest) else max(0, math.ceil(1000 * soonest))):
        job, worker = busy[descriptor]
        job.hear(worker)
    for job, worker in busy.values():
        if worker in job.pool.workers and worker.deadline.passed:
            job.pool.drop(worker)
            job.lose(worker, worker.deadline.says)


def payload(call: Call) -> bytes:
    """A call as a message.  Raises UserError for an argument that cannot be sent."""
    given = reward_arguments(call)
    logs = [name for name in LOGS if given.pop(name, None) is not None]
    request: dict[str, object] = {"one_by_one": call.wanted.one_by_one, "count": len(call.rows)}
    request |= {"reward": call.function.name, "logs": logs}
    where = f"reward {call.function.name!r} runs in a worker"
    if given.pop(ENVIRONMENT, None) is not None and ENVIRONMENT in call.wanted.required:
        raise UserError(f"{where}, and an `environment` stays in its process. Remove `workers` or the argument.")
    if "trainer_state" in given:
        state = given.pop("trainer_state")
        if not isinstance(state, TrainerState):
            problem = f"a `trainer_state` of type {type(state).__name__} cannot be sent"
            raise UserError(f"{where}: {problem}. Remove `workers` or the argument.")
        request["trainer_state"] = asdict(state)
    arguments = {}
    for name, value in given.items():
        try:
            arguments[name] = to_json(value)
            message_bytes(arguments[name])
        except NotWritableError as error:
            remedy = "Use numbers, texts, lists and mappings, or remove `workers`."
            raise UserError(f"{where}: the column {name!r} cannot be sent: it holds {error}. {remedy}") from None
    return message_bytes({"arguments": arguments, **request})
