"""One sampling of an engine for several threads: each opens it, puts, and takes what it put; one thread samples.

    turns = Turns()                                  who may use the engine; the trainer comes first
    with SharedEngine(engine, turns) as shared:
        sample_groups(shared, prompts, request)      in as many threads as there are steps in progress

To each thread it looks like its own engine, whose other completions change nothing.
"""

import math
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Self

from posttrain.errors import RunError
from posttrain.generation.engine import Engine, Sampling, SamplingTimeout, opened
from posttrain.generation.in_process import InProcessEngine, Place, place_of
from posttrain.generation.request import Continuation, Request, Sampled, StreamKey
from posttrain.models.loading.saving import ExportedWeights

LOOK_SECONDS = 0.05
"""How long a take from an engine elsewhere may keep the trainer from its turn."""


class Turns:
    """Who uses an engine: the sampler for one token at a time, and next the trainer, as soon as it asks."""

    def __init__(self) -> None:
        self._next, self._now = threading.Lock(), threading.Lock()
        self._depth = 0
        """How many blocks of the trainer's, which is one thread, are open inside each other."""

    @contextmanager
    def trainer(self) -> Iterator[None]:
        self.take()
        try:
            yield
        finally:
            self.give()

    def take(self) -> None:
        """The trainer's turn begins, or continues inside another of its blocks."""
        if not self._depth:
            self._next.acquire()
            self._now.acquire()
        self._depth += 1

    def give(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._now.release()
            self._next.release()

    @contextmanager
    def sampler(self) -> Iterator[None]:
        with self._next:
            self._now.acquire()
        try:
            yield
        finally:
            self._now.release()


class HandedOver:
    """Keeps the error that a block in one thread ends with, for the thread that waits for it to raise."""

    error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self.error = error
        return True


class EngineInTurns:
    """An `Engine` for the trainer's thread: what it loads and samples has the whole engine meanwhile."""

    def __init__(self, engine: Engine, turns: Turns) -> None:
        self.engine, self.turns = engine, turns
        self.passes_on_to = engine
        """For messages."""
        self.reproducible, self.logprob_gap = engine.reproducible, engine.logprob_gap
        self.suppresses, self.patience_seconds = engine.suppresses, engine.patience_seconds
        self.tokenizer, self.stop_ids, self.max_positions = engine.tokenizer, engine.stop_ids, engine.max_positions

    @property
    def weights_version(self) -> int:
        return self.engine.weights_version

    def load(self, weights: ExportedWeights, version: int) -> None:
        with self.turns.trainer():
            self.engine.load(weights, version)

    def open(self, request: Request) -> Sampling:
        return TrainersSampling(self.engine, self.turns, request)


class TrainersSampling(Sampling):
    """A sampling that is the trainer's turn from its beginning to its end."""

    def __init__(self, engine: Engine, turns: Turns, request: Request) -> None:
        self.turns, self.closed = turns, False
        turns.take()
        try:
            self.sampling = engine.open(request)
        except BaseException:
            turns.give()
            raise

    def put(self, continuations: Sequence[Continuation]) -> None:
        self.sampling.put(continuations)

    def take(self, seconds: float) -> list[Sampled]:
        return self.sampling.take(seconds)

    def release(self, sampled: Iterable[Sampled]) -> None:
        self.sampling.release(sampled)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.sampling.close()
            self.turns.give()


class SharedEngine(EngineInTurns):
    """An `Engine` for several threads: their samplings are all one of another engine, until `with` ends."""

    def __init__(self, engine: Engine, turns: Turns) -> None:
        super().__init__(engine, turns)
        self.patience_seconds = math.inf
        """For a thread that waits while the trainer has its turn; the sampler's thread has the engine's patience."""
        self.busy_seconds = 0.0
        """How long the engine has sampled."""
        self.changed = threading.Condition()
        """Guards the fields below; notified of completions, continuations and the end."""
        self.ended: BaseException | None = None
        """Why nothing more is sampled; each thread that waits raises it."""
        self._look = 0.0 if isinstance(engine, InProcessEngine) else LOOK_SECONDS  # 0: one token
        self._sampling: Sampling | None = None
        self._request: Request | None = None
        self._open: dict[Place, tuple[SharedSampling, Continuation]] = {}
        self._thread = threading.Thread(target=self._sample, name="sampler", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """When this returns, sampling has ended; waiting threads raise a RunError."""
        self.end(RunError("sampling has ended"))
        self._thread.join()
        if self._sampling is not None:
            self._sampling.close()

    def end(self, why: BaseException) -> None:
        with self.changed:
            self.ended = self.ended or why
            self.changed.notify_all()

    def open(self, request: Request) -> "SharedSampling":
        """A view of the one sampling; requests differ only in their streams."""
        settings = {each.name: getattr(request, each.name) for each in fields(Request)}
        asked = Request(**{**settings, "key": StreamKey(0, "shared", 0)})
        with self.turns.sampler():
            if self._sampling is None:
                self._sampling, self._request = opened(self.engine, asked), asked
        assert asked == self._request, "samplings side by side have the same settings"
        return SharedSampling(self, request.key)

    def put(self, view: "SharedSampling", continuations: Sequence[Continuation]) -> None:
        keyed = [replace(each, key=each.key or view.key) for each in continuations]
        with self.turns.sampler():
            assert self._sampling is not None
            self._sampling.put(keyed)
            with self.changed:
                self._open |= {place_of(key): (view, each) for key, each in zip(keyed, continuations, strict=True)}
                self.changed.notify_all()

    def release(self, view: "SharedSampling", sampled: Iterable[Sampled]) -> None:
        with self.turns.sampler():
            if self._sampling is not None:
                self._sampling.release([replace(each, continuation=view.keyed(each.continuation)) for each in sampled])

    def _sample(self) -> None:
        with HandedOver() as failed:
            self._sample_all()
        if failed.error is not None:
            self.end(failed.error)

    def _sample_all(self) -> None:
        """Sample while anything is open, a token at a time.

        Raises RunError if nothing is done for as long as the engine's patience, without the trainer's turns.
        """
        waited = 0.0
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self._open or self.ended)
                if self.ended is not None:
                    return
            with self.turns.sampler():
                began = time.perf_counter()
                done = self._take()
                seconds = time.perf_counter() - began
            self.busy_seconds += seconds
            waited = 0.0 if done else waited + seconds
            if waited > self.engine.patience_seconds:
                timeout = SamplingTimeout(type(self.engine).__name__, self.engine.patience_seconds, len(self._open))
                raise RunError(str(timeout))  # a view may wait on after a SamplingTimeout, and this one is final
            if done:
                self._hand_out(done)

    def _take(self) -> list[Sampled]:
        assert self._sampling is not None
        try:
            return self._sampling.take(self._look)
        except SamplingTimeout:
            return []

    def _hand_out(self, done: Sequence[Sampled]) -> None:
        with self.changed:
            for sampled in done:
                found = self._open.pop(place_of(sampled.continuation), None)
                if found is None:
                    raise RunError(
                        f"engine {type(self.engine).__name__}, {sampled.continuation.label}: this continuation was not"
                        " put, or was returned before."
                    )
                view, continuation = found
                view.done.append(replace(sampled, continuation=continuation))
            self.changed.notify_all()


class SharedSampling(Sampling):
    """What one thread has put, and what is done of it."""

    def __init__(self, engine: SharedEngine, key: StreamKey) -> None:
        self.engine, self.key = engine, key
        self.done: list[Sampled] = []
        self.num_open = 0

    def put(self, continuations: Sequence[Continuation]) -> None:
        self.engine.put(self, continuations)
        self.num_open += len(continuations)

    def take(self, seconds: float) -> list[Sampled]:
        wait = None if seconds == float("inf") else seconds
        with self.engine.changed:
            self.engine.changed.wait_for(lambda: self.done or self.engine.ended, wait)
            done, self.done = self.done, []
            if not done and self.engine.ended is not None:
                raise self.engine.ended
        if not done:
            raise SamplingTimeout(type(self.engine.engine).__name__, seconds, self.num_open)
        self.num_open -= len(done)
        return done

    def release(self, sampled: Iterable[Sampled]) -> None:
        self.engine.release(self, sampled)

    def keyed(self, continuation: Continuation) -> Continuation:
        return replace(continuation, key=continuation.key or self.key)

    def close(self) -> None:
        """Nothing to do: the engine's sampling continues for the other threads."""
