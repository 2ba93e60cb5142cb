"""Collects steps while earlier ones are trained on: `rollout.max_staleness`.

Step s only starts when the weights after step s - 1 - K are loaded, so older weights never sample its tokens.  The
bound does not need counters, and nothing is thrown away.  Prompts and random streams are the same as with K = 0.

    trainer   collect(s) ─ waits ─► credit, updates, load, evaluate ─► collect(s + 1) ...
    threads   one for each step under way: prompts, completions, grades; one at a time where a task or reward is called
    sampler   one thread, one open sampling, a token at a time

An in-process engine reads the trainer's own weights, so its sampler waits while the trainer works.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from queue import SimpleQueue
from time import perf_counter
from typing import Self

from posttrain.errors import RunError
from posttrain.generation.engine import Engine
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.shared_sampling import EngineInTurns, HandedOver, SharedEngine, Turns
from posttrain.records import Grades, Group, Prompt
from posttrain.runs.progress import Clock
from posttrain.training.collector import CollectedStep, Collector, Journal, discard_scores

SAMPLER_WAIT = "seconds/sampler_wait"
"""The metric of the sampler's idle time in a step; the trainer's wait is the stage `wait`."""


class CollectedApart(HandedOver):
    """A step, or the error that replaced it."""

    collected: CollectedStep

    def __init__(self) -> None:
        self.journaled: list[tuple[int, Sequence[Group], Grades]] = []

    def journal(self, step: int, groups: Sequence[Group], grades: Grades) -> None:
        self.journaled.append((step, groups, grades))


Turn = Callable[[int | None], AbstractContextManager[object]]
"""Entered around calls of the task, and with the step around those of rewards."""


class CollectorApart(Collector):
    """The collector of the threads."""

    def __init__(self, collector: Collector, engine: Engine, turn: Turn, sampled: Callable[[int], None]) -> None:
        """`sampled` is called with a step when its completions are sampled, before they are graded."""
        vars(self).update(vars(collector))
        self.engine, self.turn, self.sampled = engine, turn, sampled

    def prompts(self, step: int, draws: range) -> list[Prompt]:
        with self.turn(None):
            return super().prompts(step, draws)

    def grade(self, groups: Sequence[Group], *, step: int = 1, journal: Journal = discard_scores) -> Grades:
        self.sampled(step)
        with self.turn(step):
            return super().grade(groups, step=step, journal=journal)


class CollectorAhead(Collector):
    """A collector that starts steps before they are requested; a context manager."""

    def __init__(self, collector: Collector) -> None:
        vars(self).update(vars(collector))
        self.turns = Turns()
        self.staleness, self.last = collector.settings.rollout.max_staleness, collector.settings.num_steps
        self.shares_weights = isinstance(collector.engine, InProcessEngine)
        self.shared = SharedEngine(collector.engine, self.turns)
        self.apart = CollectorApart(collector, self.shared, self.one_at_a_time, self._note_completions)
        self._prompting, self._grading, self._stopped = threading.Lock(), threading.Lock(), False
        self._next = 0
        """The step whose rewards are computed next."""
        self._have_completions: set[int] = set()
        self._oldest: dict[int, int] = {}
        """Started step -> the version of the weights at its start."""
        self._todo: SimpleQueue[int | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._done: dict[int, CollectedApart] = {}
        # Until the run ends: processes that grade die with the thread that has started them.
        self._threads = [
            threading.Thread(target=self._work, name="collector", daemon=True) for _ in range(1 + self.staleness)
        ]
        self._measured = 0.0, 0.0

    @property
    def trainers_engine(self) -> Engine:
        """The engine, for evaluations and updates."""
        return EngineInTurns(self.shared.engine, self.turns)

    def __enter__(self) -> Self:
        if self.shares_weights:
            self.turns.take()
        self.shared.__enter__()
        for thread in self._threads:
            thread.start()
        self._measured = perf_counter(), 0.0
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Drop unfinished steps.  Waits for running reward calls, except after an error."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self.shares_weights:
            self.turns.give()
        self.shared.__exit__()
        if kind is None:
            with self._grading:
                pass

    def close(self) -> None:
        for _ in self._threads:
            self._todo.put(None)

    def collect(self, step: int, journal: Journal, clock: Clock) -> CollectedStep:
        """The step, once it is done; later steps continue.  Scores are in the journal before they are used here."""
        with self._changed:
            self._next = max(self._next, step)
            self._changed.notify_all()
        for begun in range(max(self._oldest, default=step - 1) + 1, min(step + self.staleness, self.last) + 1):
            self._oldest[begun] = self.engine.weights_version
            self._todo.put(begun)
        with clock("wait"), self._sampling_goes_on(), self._changed:
            self._changed.wait_for(lambda: step in self._done and self._sampled_enough(step))
        done = self._done.pop(step)
        if done.error is not None:
            raise done.error
        collected = done.collected
        for line in done.journaled:
            journal(*line)
        self._require_bound(collected)
        return replace(collected, metrics={**collected.metrics, SAMPLER_WAIT: self._sampler_waited()})

    def _note_completions(self, step: int) -> None:
        with self._changed:
            self._have_completions.add(step)
            self._changed.notify_all()

    def _sampled_enough(self, step: int) -> bool:
        """Whether the trainer may now work on this step.

        If sampling waits for the trainer, the next step is sampled first, so that its grading overlaps the updates.
        """
        following = step + 1
        return (
            not self.shares_weights
            or following > self.last
            or following in self._have_completions
            or following in self._done
        )

    def _require_bound(self, collected: CollectedStep) -> None:
        """Check the bound, which holds by construction; a violation is a fault of the engine."""
        allowed = self._oldest.pop(collected.step)
        rollouts = [rollout for group in collected.groups for rollout in group.rollouts if rollout.num_sampled]
        oldest = min((rollout.weights_version for rollout in rollouts), default=allowed)
        if oldest < allowed:
            found = f"a token was sampled by version {oldest} of the weights, after version {allowed} was loaded"
            raise RunError(f"engine {type(self.engine).__name__}: {found}.")

    def _sampler_waited(self) -> float:
        """Seconds since the last step in which nothing was sampled."""
        before, self._measured = self._measured, (perf_counter(), self.shared.busy_seconds)
        return max(0.0, self._measured[0] - before[0] - (self._measured[1] - before[1]))

    @contextmanager
    def _sampling_goes_on(self) -> Iterator[None]:
        """Let the engine use the weights while the trainer does not."""
        if not self.shares_weights:
            yield
            return
        self.turns.give()
        try:
            yield
        finally:
            self.turns.take()

    @contextmanager
    def one_at_a_time(self, step: int | None) -> Iterator[None]:
        """Entered around calls of the task, or, with a step, of rewards, so that neither must be thread-safe.

        Rewards of a step are called after those of all earlier steps, as with K = 0.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or step is None or step <= self._next)
            if self._stopped:
                raise RunError("the run has ended")
        with self._prompting if step is None else self._grading:
            yield

    def _work(self) -> None:
        while (step := self._todo.get()) is not None:
            with CollectedApart() as apart:
                apart.collected = self.apart.collect(step, apart.journal, Clock())
            with self._changed:
                self._done[step] = apart
                self._next = max(self._next, step + 1) if apart.error is None else self._next
                self._changed.notify_all()
