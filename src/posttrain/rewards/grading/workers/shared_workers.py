"""The workers of a session: one pool for each function that asks for some, kept from step to step."""

from posttrain.rewards.grading.function import FunctionSource, RewardFunction
from posttrain.rewards.grading.workers.worker_pool import WorkerPool


class WorkerPools:
    """A pool for each reward, opened when first needed: a function that is asked under two names has two."""

    def __init__(self) -> None:
        self._opened: dict[tuple[str, FunctionSource, int], WorkerPool] = {}

    def pool_for(self, function: RewardFunction) -> WorkerPool:
        """The workers of a function; none is started before the first call."""
        source, size = function.find_source(), function.settings.workers
        return self._opened.setdefault((function.name, source, size), WorkerPool(source, size))

    def close(self) -> None:
        """End every worker; the next call starts others."""
        while self._opened:
            self._opened.popitem()[1].close()
