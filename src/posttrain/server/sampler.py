"""One thread samples for all requests: new requests join the running ones at the next token.

Continuations with equal settings share a sampling; random streams may differ.  `hands_off` is a time between two
tokens, in which weights may change.
"""

import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain

from posttrain.errors import RunError, UserError
from posttrain.generation.engine import SamplingTimeout
from posttrain.generation.in_process import InProcessEngine, InProcessSampling
from posttrain.generation.request import Continuation, Request, Sampled, SampledToken, StreamKey

JOIN_SECONDS = 0.01
"""While completions are in progress, new ones join them at most this often, so that those that come together share a
prefill."""
MAX_SAMPLINGS = 4
"""Number of different settings sampled at the same time, besides a probe; each has its own cache."""
NO_KEY = StreamKey(0, "none", 0)
"""Used instead of a sampling's own key: every continuation has its own."""
PROBE_KEY = replace(NO_KEY, purpose="probe")
"""The same for a trainer's probe of new weights, which has its own sampling since it must not wait for rows."""


class Ended(RunError):
    """The server stops, or all requests are aborted."""


@dataclass(slots=True, eq=False)
class SamplingJob:
    """Continuations of one request."""

    settings: Request
    continuations: Sequence[Continuation]
    result: "Future[list[Sampled]]" = field(default_factory=Future)
    """The completions, in the order of the continuations; cancelled if the client leaves."""
    asked_at: float = field(default_factory=time.monotonic)
    began_at: float | None = None
    """When it was started; None while it waits."""
    done: dict[int, Sampled] = field(default_factory=dict)
    """Completions by the `id` of the continuation, which the engine returns unchanged."""
    news: Callable[[], None] | None = None
    """Called by the sampler's thread when `tokens` has grown; None if the job is not streamed."""
    due: float = 0.0
    """When its reader wants new tokens; set by the reader, and infinite until it has read the last ones."""
    tokens: dict[int, list[SampledToken]] = field(default_factory=dict)
    """The tokens so far of unfinished completions, by the `id` of the continuation; append-only."""

    def fail(self, error: BaseException) -> None:
        with suppress(InvalidStateError):  # done, or cancelled
            self.result.set_exception(error)


@dataclass(slots=True, eq=False)
class OpenSampling:
    """A sampling and its unfinished jobs."""

    sampling: InProcessSampling
    jobs: dict[int, SamplingJob] = field(default_factory=dict)
    """Jobs by the `id` of each unfinished continuation."""


class Sampler:
    """The only user of the engine."""

    def __init__(self, engine: InProcessEngine) -> None:
        self.engine = engine
        self.changed = threading.Condition()
        self.waiting: deque[SamplingJob] = deque()
        self.open: dict[Request, OpenSampling] = {}
        self.paused = self.stopped = self.finishing = False
        """`finishing` accepts nothing new."""
        self.last_token_at = self._joined_at = 0.0
        """When the engine last sampled, and when jobs last started."""
        self._hands_off = 0
        self._stepping = False
        self._thread: threading.Thread | None = None

    # What other threads call

    def submit(
        self, request: Request, continuations: Sequence[Continuation], news: Callable[[], None] | None = None
    ) -> SamplingJob:
        """Sample these, with the request's streams if they do not have their own; `news` makes the job streamed."""
        settings = replace(request, key=PROBE_KEY if request.key.purpose == PROBE_KEY.purpose else NO_KEY)
        keyed = [each if each.key is not None else replace(each, key=request.key) for each in continuations]
        job = SamplingJob(settings, keyed, news=news)
        with self.changed:
            if self.stopped:
                job.fail(Ended("the server is stopping.  Try again later"))
                return job
            self.waiting.append(job)
            if self._thread is None:
                self._start_thread()
            self.changed.notify_all()
        return job

    def drop(self, continuations: Sequence[Continuation]) -> None:
        """These completions will not be continued, so their caches can be freed."""
        with self.hands_off():
            for each in self.open.values():
                each.sampling.drop(continuations)

    def cancel(self, job: SamplingJob) -> None:
        """End a job whose client has left."""
        job.result.cancel()
        with self.changed:
            self.changed.notify_all()

    @contextmanager
    def hands_off(self) -> Iterator[None]:
        """Inside the block, nothing is sampled; it is entered between two tokens."""
        with self.changed:
            self._hands_off += 1
            self.changed.wait_for(lambda: not self._stepping)
        try:
            yield
        finally:
            with self.changed:
                self._hands_off -= 1
                self.changed.notify_all()

    def pause(self) -> None:
        """Keep unfinished completions; returns between two tokens."""
        self.paused = True
        with self.hands_off():
            pass

    def finish(self, seconds: float) -> bool:
        """Accept nothing new, and pause when all completions are finished; returns whether they finished in time."""
        with self.changed:
            self.finishing = True
            done = self.changed.wait_for(lambda: not self.num_open or not self.finishing, timeout=seconds)
        self.pause()
        return done

    def resume(self) -> None:
        with self.changed:
            self.paused = self.finishing = False
            self.changed.notify_all()

    def abort(self) -> None:
        """End all jobs, unfinished or waiting."""
        with self.hands_off():
            self._fail_all(Ended("aborted"))

    def close_idle(self) -> None:
        """Close samplings without unfinished jobs; called with hands off."""
        for settings in self._idle():
            self._close(settings)

    def stop(self) -> None:
        """End everything permanently, and wait for the thread, since a thread inside torch would abort the process."""
        with self.changed:
            self.stopped = True
            self.changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()
        self._fail_all(Ended("the server is stopping.  Try again later"))

    @property
    def num_open(self) -> int:
        """Number of unfinished completions."""
        return sum(len(each.jobs) for each in list(self.open.values()))

    @property
    def began_at(self) -> float | None:
        """When the oldest unfinished job began."""
        jobs = [job for each in list(self.open.values()) for job in list(each.jobs.values())]
        return min((job.began_at for job in jobs if job.began_at is not None), default=None)

    # What its own thread does

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._run, daemon=True, name="sampler")
        thread.start()  # which may fail; the next job then tries again
        self._thread = thread

    def _run(self) -> None:
        """Step until `stop`.  A fault ends this thread and the unfinished jobs; another samples what waits."""
        try:
            while self._wait_to_step():
                self._step()
        except BaseException as error:
            with self.changed:  # so that no job is left to a thread that ends
                self._stepping, self._thread = False, None
                self.changed.notify_all()
                try:
                    self._fail_open(error)
                finally:
                    if self.waiting or self.num_open:
                        self._start_thread()
            raise

    def _wait_to_step(self) -> bool:
        """Whether there is a step to do; False after `stop`."""
        with self.changed:
            self._stepping = False
            self.changed.notify_all()
            while not self._may_step():
                self.changed.wait()
            self._stepping = not self.stopped
            return self._stepping

    def _may_step(self) -> bool:
        if self.stopped:
            return True
        held = self.paused or self._hands_off
        return not held and (self.num_open > 0 or self._ready() is not None)

    def _ready(self) -> SamplingJob | None:
        """The oldest job that can start."""
        if self.finishing:
            return None
        while self.waiting and self.waiting[0].result.cancelled():
            self.waiting.popleft()
        room = len(self.open) < MAX_SAMPLINGS or bool(self._idle())
        may_begin = (job for job in self.waiting if room or job.settings in self.open or job.settings.key == PROBE_KEY)
        return next(may_begin, None)

    def _idle(self) -> list[Request]:
        return [settings for settings, each in self.open.items() if not each.jobs]

    def _step(self) -> None:
        """Start jobs that are ready, drop jobs that nobody waits for, and sample a token in every sampling."""
        if not self.num_open or time.monotonic() >= self._joined_at + JOIN_SECONDS:
            while jobs := self._next_ready():
                self._put(jobs)
        for settings, each in list(self.open.items()):
            self._drop_cancelled(settings, each)
            if each.jobs:
                self._take(settings, each)

    def _next_ready(self) -> list[SamplingJob]:
        """The oldest job that can start, and all others with its settings."""
        with self.changed:
            first = self._ready()
            if first is None:
                return []
            ready = [job for job in self.waiting if job.settings == first.settings]
            self.waiting = deque(job for job in self.waiting if job.settings != first.settings)
            return [job for job in ready if not job.result.cancelled()]

    def _put(self, jobs: Sequence[SamplingJob]) -> None:
        """Start jobs of the same settings.  Equal prefixes are put in a row: the engine then prefills them once."""
        settings, by_prefix = jobs[0].settings, defaultdict[tuple[int, ...], list[Continuation]](list)
        for job in jobs:
            for each in job.continuations:
                by_prefix[each.prefix].append(each)
        try:
            if settings not in self.open:
                if len(self.open) >= MAX_SAMPLINGS and self._idle():
                    self._close(self._idle()[0])
                self.open[settings] = OpenSampling(self.engine.open(settings))
            to = self.open[settings]
            to.sampling.put([*chain(*by_prefix.values())])
        except UserError as error:
            if len(jobs) == 1:
                jobs[0].fail(error)
            else:  # which changed nothing, so the others can start
                left = deque(jobs)
                try:
                    while left:
                        self._put([left.popleft()])
                finally:  # after a fault the next thread starts those that are left
                    with self.changed:
                        self.waiting.extendleft(reversed(left))
            return
        except BaseException as error:
            for job in jobs:
                job.fail(error)
            raise
        self._joined_at = self.last_token_at = time.monotonic()
        for job in jobs:
            job.began_at = self._joined_at
            to.jobs |= {id(each): job for each in job.continuations}

    def _take(self, settings: Request, at: OpenSampling) -> None:
        now = time.monotonic()
        streamed = {place: job for place, job in at.jobs.items() if job.news is not None and job.due <= now}
        try:
            done = at.sampling.take(0)
        except SamplingTimeout:
            done = []
        except RunError as error:
            self._close(settings, error)
            return
        self.last_token_at = time.monotonic()
        for sampled in done:
            place = id(sampled.continuation)
            job = at.jobs.pop(place)
            job.done[place] = sampled
            if len(job.done) == len(job.continuations):
                with suppress(InvalidStateError):  # its client has just left
                    job.result.set_result([job.done[id(each)] for each in job.continuations])
        if streamed:
            self._pass_on(settings, at, streamed)
        if not at.jobs and not settings.keep:
            self._close(settings)

    def _pass_on(self, settings: Request, at: OpenSampling, streamed: Mapping[int, SamplingJob]) -> None:
        """Give streamed jobs their new tokens."""
        try:
            new = at.sampling.tokens_after({place: len(job.tokens.get(place, ())) for place, job in streamed.items()})
        except RunError as error:
            self._close(settings, error)
            return
        for place, tokens in new.items():
            streamed[place].tokens.setdefault(place, []).extend(tokens)
        for job in dict.fromkeys(streamed.values()):
            if job.news is not None:
                job.due = math.inf
                job.news()

    def _drop_cancelled(self, settings: Request, at: OpenSampling) -> None:
        gone = [job for job in dict.fromkeys(at.jobs.values()) if job.result.cancelled()]
        left = [each for job in gone for each in job.continuations if at.jobs.pop(id(each), None) is not None]
        if left and not at.jobs and not settings.keep:
            self._close(settings)
        elif left:
            at.sampling.drop(left)

    def _close(self, settings: Request, error: BaseException | None = None) -> None:
        """Close a sampling; its jobs fail."""
        closed = self.open.pop(settings)
        for job in dict.fromkeys(closed.jobs.values()):
            if error is not None:
                job.fail(error)
        closed.sampling.close()

    def _fail_open(self, error: BaseException) -> None:
        for settings in list(self.open):
            self._close(settings, error)

    def _fail_all(self, error: BaseException) -> None:
        self._fail_open(error)
        while self.waiting:
            self.waiting.popleft().fail(error)
