"""The workers of this process: one pool for each function that asks for some, kept from step to step."""

import atexit
import functools

from posttrain.rewards.grading.function import FunctionSource, RewardFunction
from posttrain.rewards.grading.workers.worker_pool import Pool

_open: list[Pool] = []


def pool_for(function: RewardFunction) -> Pool:
    """The workers of a function; none is started before the first call."""
    return shared_pool(function.name, function.find_source(), function.settings.workers)


def close_all() -> None:
    """End every worker of this process; the next call starts others."""
    shared_pool.cache_clear()
    while _open:
        _open.pop().close()


atexit.register(close_all)


@functools.cache
def shared_pool(name: str, source: FunctionSource, size: int) -> Pool:
    """One pool for each reward: a function that is asked under two names has workers for each."""
    _open.append(Pool(source, size))
    return _open[-1]
