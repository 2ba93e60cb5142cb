"""What scoring keeps open from batch to batch: owned by a session, passed to `grade`, and closed with the session.

Two sessions in one process share nothing.  Calls outside any session use `default_resources()`.
"""

import functools
import inspect
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

from posttrain.options.sandbox import SandboxOptions
from posttrain.rewards.grading.score_cache import ScoreCaches
from posttrain.rewards.grading.worker import WorkerPools
from posttrain.sandbox.sandboxes import Sandboxes

Kept = TypeVar("Kept")


class Resources:
    """Sandboxes, workers, score caches and rewards' memory, opened when first needed; for one thread at a time."""

    def __init__(self, sandbox: SandboxOptions | None = None) -> None:
        self.sandboxes = Sandboxes(sandbox)
        self.workers = WorkerPools()
        self.caches = ScoreCaches(self.sandboxes.options)
        self._memory: dict[tuple[Hashable, Callable[[], object]], object] = {}
        weakref.finalize(self, close_all, self.sandboxes, self.workers, self.caches)

    def __enter__(self) -> "Resources":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def memory(self, reward: Hashable, kind: Callable[[], Kept]) -> Kept:
        """A reward's state, made by `kind` on first use; equal rewards share it."""
        return cast(Kept, self._memory.setdefault((reward, kind), kind()))

    def close(self) -> None:
        """End processes, close files and forget everything; later use opens them again."""
        self._memory.clear()
        close_all(self.sandboxes, self.workers, self.caches)


def close_all(*opened: Sandboxes | WorkerPools | ScoreCaches) -> None:
    """Close each, even if closing another fails."""
    with ExitStack() as stack:
        for each in opened:
            stack.callback(each.close)


@runtime_checkable
class NeedsResources(Protocol):
    """A reward that runs programs, or remembers something from batch to batch."""

    def with_resources(self, resources: Resources) -> Callable[..., object]:
        """The reward bound to a session's resources, with the same arguments."""
        ...


@runtime_checkable
class ChecksRows(Protocol):
    """A reward that can find rows before training whose completions could not be scored."""

    def check_rows(self, rows: Sequence[tuple[str, Mapping[str, object]]], resources: Resources) -> None:
        """Check rows (name, columns).  Raises UserError that names the invalid ones."""
        ...


class CallSignature:
    """The signature of a `SessionReward`'s call; the class keeps its constructor's."""

    def __get__(self, reward: "SessionReward | None", owner: type) -> inspect.Signature | None:
        if reward is None:
            return None
        _, *others = inspect.signature(reward.scores).parameters.values()
        return inspect.Signature(others)


class SessionReward:
    """A reward that scores on a session's resources, or on those of the process when called directly.

    A subclass defines `scores(resources, /, *, completions, …)`; its other parameters are the reward's signature.
    """

    scores: Callable[..., Any]

    __signature__ = CallSignature()

    def __call__(self, /, **columns: Any) -> Any:
        return self.scores(default_resources(), **columns)

    def with_resources(self, resources: Resources) -> Callable[..., Any]:
        return partial(self.scores, resources)


@functools.cache
def default_resources() -> Resources:
    """Resources with default options for scoring outside any session; for one thread."""
    return Resources()
