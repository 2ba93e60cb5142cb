"""Making the calls of a round: in our process in order, asynchronous ones side by side, the others in workers."""

import inspect
from collections.abc import Sequence

from posttrain.rewards.grading.answers import FunctionError, OutOfTime, invoke
from posttrain.rewards.grading.async_calls import AsyncCall, start_async_calls
from posttrain.rewards.grading.calls import Call, Result, reward_arguments
from posttrain.rewards.grading.function import ScoringFailure
from posttrain.rewards.grading.precautions import keeping_stdout, keeping_torch, telling_what_is_waited_for
from posttrain.rewards.grading.resources import Resources, bind_resources
from posttrain.rewards.grading.workers.shared_workers import WorkerPools
from posttrain.rewards.grading.workers.worker_pool import Job, have_done


def dispatch(calls: Sequence[Call], resources: Resources) -> list[Result]:
    """What the calls come to, on a session's resources.

    Those in our process are made in their order; what turns out to be awaitable then runs beside the workers.
    """
    with telling_what_is_waited_for(calls):
        results = [None if call.function.settings.workers else start_calls(call, resources) for call in calls]
        waiting = [index for index, result in enumerate(results) if inspect.isawaitable(result)]
        if not waiting and not any(call.function.settings.workers for call in calls):
            return results
        names = ", ".join(dict.fromkeys(repr(calls[index].function.name) for index in waiting))
        started = [AsyncCall(calls[index], results[index]) for index in waiting]
        with keeping_stdout(names), keeping_torch(), start_async_calls(started) as finished:
            for index, result in in_workers(calls, resources.workers):
                results[index] = result
            for index, result in zip(waiting, finished(), strict=True):
                results[index] = result
    return results


def start_calls(call: Call, resources: Resources) -> Result:
    """The call's result, its awaitable, or what it raised."""
    if call.bounds.until.passed:
        return OutOfTime(call.bounds.until.says)
    arguments = reward_arguments(call)
    try:
        with keeping_stdout(repr(call.function.name)), keeping_torch():
            return invoke(bind_resources(call.function.call, resources), arguments)
    except (ScoringFailure, FunctionError) as failure:
        return failure


def in_workers(calls: Sequence[Call], pools: WorkerPools) -> list[tuple[int, Result]]:
    """What those calls come to that are made in workers, each with its place."""
    places: dict[str, list[int]] = {}
    for index, call in enumerate(calls):
        if call.function.settings.workers:
            places.setdefault(call.function.name, []).append(index)
    jobs = [Job(pools.pool_for(calls[of[0]].function), [calls[index] for index in of]) for of in places.values()]
    have_done(jobs)
    return [
        (index, result)
        for of, job in zip(places.values(), jobs, strict=True)
        for index, result in zip(of, job.results, strict=True)
    ]
