"""Engines for tests: ours, with something done to what it samples."""

from collections.abc import Callable, Iterable, Sequence

from posttrain.generation.engine import Sampling
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.request import Continuation, Request, Sampled
from posttrain.models.policy import Policy

Change = Callable[[Sampled], Sampled]


class ChangedSampling(Sampling):
    """A sampling whose completions are changed as they are taken."""

    def __init__(self, inner: Sampling, change: Callable[[list[Sampled]], list[Sampled]]) -> None:
        self.inner, self.change = inner, change

    def put(self, continuations: Sequence[Continuation]) -> None:
        self.inner.put(continuations)

    def take(self, seconds: float) -> list[Sampled]:
        return self.change(self.inner.take(seconds))

    def release(self, sampled: Iterable[Sampled]) -> None:
        self.inner.release(sampled)

    def close(self) -> None:
        self.inner.close()


class ChangedEngine(InProcessEngine):
    """Ours, with a change of every completion for which `where` holds."""

    def __init__(
        self, policy: Policy, change: Change, *, where: Callable[[Request, Sampled], bool] = lambda *_: True
    ) -> None:
        super().__init__(policy)
        self.change, self.where = change, where

    def open(self, request: Request) -> Sampling:  # type: ignore[override]
        def changed(done: list[Sampled]) -> list[Sampled]:
            return [self.change(each) if self.where(request, each) else each for each in done]

        return ChangedSampling(super().open(request), changed)
