"""An environment is closed once: after its completion was graded or dropped, and never in the midst of a call."""

import asyncio
import random
import threading
import time
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import posttrain
from posttrain.commands.collection.prompt_sampler import PromptSampler
from posttrain.config.sections import CollectConfig
from posttrain.environments.protocol import Reply
from posttrain.environments.workers import Asking, LiveEnvironment, ReplyWorkers, cancel_tasks
from posttrain.errors import RunError
from posttrain.generation.conversations import sample_conversations
from posttrain.generation.in_process import InProcessEngine
from posttrain.training.session import CallerObjects
from tests.support.runs import save_tiny_model
from tests.support.stages import stages_with
from tests.support.tiny import request, some_prompts, tiny_policy
from tests.support.turns import conversations, environments


class Watched:
    """Notes its calls, and whether they break the law; it ends, fails, is late or cannot begin by chance."""

    made: list["Watched"]
    chance: random.Random
    late = 0.3

    def __init__(self) -> None:
        self.made.append(self)
        self.calls = self.closed = 0
        self.faults: list[str] = []
        self.does = self.chance.choice(["ends", "goes on", "fails", "is late", "cannot begin", "begins late"])

    def reset(self, row: Mapping[str, object], seed: int) -> None:
        self.begin()
        if self.does == "begins late":
            time.sleep(self.late)
        self.calls -= 1
        if self.does == "cannot begin":
            raise OSError("no board")

    def reply(self, said: str) -> Reply | None:
        self.begin()
        if self.does == "is late":
            time.sleep(self.late)
        self.calls -= 1
        if self.does == "fails":
            raise ValueError("the game broke")
        return None if self.does == "ends" else Reply("7")

    def begin(self) -> None:
        self.faults += ["called when it was closed"] * self.closed
        self.calls += 1

    def close(self) -> None:
        self.faults += ["closed in a call"] * self.calls
        self.closed += 1


class WatchedAsync(Watched):
    async def reply(self, said: str) -> Reply | None:  # type: ignore[override]
        self.begin()
        if self.does == "is late":  # and holds up the end of its own cancelling
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(10)
            await asyncio.sleep(0.2)
        self.calls -= 1
        if self.does == "fails":
            raise ValueError("the game broke")
        return None if self.does == "ends" else Reply("7")

    async def close(self) -> None:  # type: ignore[override]
        super().close()


def watched(kind: type[Watched], seed: int) -> type[Watched]:
    """A class of its own, with its own list of objects."""
    return type("Mine", (kind,), {"made": [], "chance": random.Random(seed)})


def only(kind: type[Watched], does: str) -> type[Watched]:
    kind.chance.choice = lambda _: does  # type: ignore[method-assign, assignment]
    return kind


def until(holds: object, seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not (done := holds()) and time.monotonic() < end:  # type: ignore[operator]
        time.sleep(0.01)
    return bool(done)


def require_closed(kind: type[Watched]) -> None:
    assert kind.made
    assert until(lambda: all(each.closed for each in kind.made)), [each.does for each in kind.made if not each.closed]
    assert [each.closed for each in kind.made] == [1] * len(kind.made)
    assert not [fault for each in kind.made for fault in each.faults]


@pytest.mark.parametrize("base", [Watched, WatchedAsync])
def test_it_is_open_until_its_completion_was_graded(base: type[Watched]) -> None:
    torch.set_num_threads(1)
    kind = watched(base, seed=5)
    made = environments(kind, seconds=0.15, workers=3, max_failures=1.0, max_turns=2)
    with ReplyWorkers(made) as workers:
        groups = sample_conversations(InProcessEngine(tiny_policy()), some_prompts([3, 4, 5]), request(6, 6), workers)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        graded = [rollout.environment for rollout in rollouts if not rollout.finish.failed]
        assert {each.does for each in kind.made} >= {
            "ends",
            "goes on",
            "fails",
            "is late",
            "cannot begin",
            "begins late",
        }
        assert len(graded) > 3
        assert not any(each.closed for each in graded)
        failed = [each for each in kind.made if each not in graded]
        assert until(lambda: all(each.closed for each in failed))  # a late one when its call has returned
        workers.end_of(groups)
        assert until(lambda: all(each.closed for each in graded))
    require_closed(kind)


@pytest.mark.parametrize("base", [Watched, WatchedAsync])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_those_of_completions_that_nobody_gets_are_closed(base: type[Watched], error: type[BaseException]) -> None:
    kind = watched(base, seed=6)
    made = environments(kind, seconds=5, workers=2, max_failures=1.0)

    def advance(count: int) -> None:
        if count:
            raise error

    with ReplyWorkers(made) as workers:
        with pytest.raises(error):
            sample_conversations(
                InProcessEngine(tiny_policy()), some_prompts([3, 4]), request(6, 6), workers, advance=advance
            )
        require_closed(kind)


class Torn:
    """A journal that breaks where it reads its third group, or keeps its last one."""

    def __init__(self, made: Sequence[object]) -> None:
        self.made = made

    def get(self, purpose: str, step: int, draw: int) -> None:
        if draw == 2:
            assert until(lambda: len(self.made) > 2)
            raise OSError("no disk")

    def put(self, purpose: str, step: int, draw: int, exchanges: object) -> None:
        raise OSError("no disk")


@pytest.mark.parametrize("num_prompts", [1, 3])
def test_those_that_had_begun_are_closed_if_the_journal_breaks(num_prompts: int) -> None:
    kind, prompts = watched(Watched, seed=6), some_prompts([3, 4, 5][:num_prompts])
    kind.late = 0.0
    made = environments(kind, max_failures=1.0, reproducible=False)
    with ReplyWorkers(made, Torn(kind.made)) as workers:  # type: ignore[arg-type]
        with pytest.raises(OSError, match="no disk"):
            sample_conversations(InProcessEngine(tiny_policy()), prompts, request(6, 6), workers)
        require_closed(kind)


def test_the_end_of_a_session_waits_for_an_async_close_that_has_begun() -> None:
    kind, begun = only(watched(WatchedAsync, seed=6), "ends"), threading.Event()

    class Slow(kind):  # type: ignore[misc, valid-type]
        async def close(self) -> None:
            begun.set()
            await asyncio.sleep(0.3)
            await super().close()

    with ReplyWorkers(environments(Slow)) as workers:
        workers.end_of(sample_conversations(InProcessEngine(tiny_policy()), some_prompts([3]), request(2, 6), workers))
        assert begun.wait(5)
    assert [each.closed for each in kind.made] == [1, 1]


class Awaitable:
    def __await__(self) -> Generator[None, None, None]:
        yield


def test_an_async_call_that_is_cancelled_before_its_first_step_has_ended() -> None:
    with ReplyWorkers(environments(Watched, seconds=5)) as workers:
        live, asking, loop = LiveEnvironment(), Asking[int](workers), workers._running_loop()
        loop.call_soon_threadsafe(time.sleep, 0.5)
        asking.ask(0, live, Awaitable, read=lambda _: None)
        assert until(lambda: live.num_calls)
        time.sleep(0.1)  # the call waits for the loop
        loop.call_soon_threadsafe(cancel_tasks, loop)
        assert until(lambda: asking.answered(0.1))
        assert until(lambda: not live.num_calls)


def test_one_whose_call_outlives_the_session_is_counted_and_closed_by_that_call() -> None:
    kind, never = only(watched(Watched, seed=7), "ends"), threading.Event()

    class Hangs(kind):  # type: ignore[misc, valid-type]
        def reply(self, said: str) -> Reply | None:
            self.begin()
            self.does = "hangs"
            never.wait(30)
            self.calls -= 1
            return None

        def close(self) -> None:
            super().close()
            if self.does == "hangs":
                raise OSError("no door")

    made = environments(Hangs, seconds=0.5, workers=2, max_failures=1.0)
    with pytest.warns(UserWarning, match=r"environment test: \d+ still open: a call or a close"), suppress(RunError):
        conversations(InProcessEngine(tiny_policy()), some_prompts([3, 4]), request(2, 6), made)
    assert not any(each.closed for each in kind.made if each.calls)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        never.set()
        require_closed(kind)
        num_late = sum(each.does == "hangs" for each in kind.made)
        assert until(lambda: sum("no door" in str(each.message) for each in warned) == num_late)


def test_every_round_of_a_step_is_closed_once_its_rewards_have_read_it() -> None:
    kind = watched(Watched, seed=8)
    kind.late = 0.0

    def reads(environment: Sequence[Watched], **columns: object) -> list[float]:
        assert not any(each.closed for each in environment)
        return [1.0] * len(environment)

    stages = stages_with({"name": "dapo", "overlong": None, "resample": {"max_rounds": 2}}, reads)
    with ReplyWorkers(environments(kind, max_failures=1.0, max_turns=2)) as workers:
        stages.collector.workers = workers
        assert stages.collected().replaced
        require_closed(kind)


@pytest.mark.parametrize("staleness", [0, 1])
def test_every_object_of_a_run_is_closed_in_training_and_evaluation(staleness: int, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    kind = watched(Watched, seed=9)
    kind.late = 0.0

    def reads(environment: Sequence[Watched], **columns: object) -> list[float]:
        assert not any(each.closed for each in environment)
        return [float(each.does == "ends") for each in environment]

    config = posttrain.load_recipe(
        task={"name": "countdown", "held_out_size": 2},
        model={"path": str(tmp_path / "model")},
        environment={"max_failures": 1.0},
        rollout={"prompts_per_step": 2, "group_size": 2, "max_completion_tokens": 6, "max_staleness": staleness},
        evaluation={"samples": 1},
        run={"folder": str(tmp_path / "run"), "num_steps": 3, "curves": False, "threads": 1},
    )
    with posttrain.steps(config, environment=kind, rewards=[reads]) as steps:
        next(steps)  # the run is stopped with steps under way
        if not staleness:  # those of the evaluation before it, and of the step
            require_closed(kind)
    require_closed(kind)


def test_a_collection_closes_them_once_they_were_scored(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    kind = watched(Watched, seed=9)
    kind.late = 0.0

    def reads(environment: Sequence[Watched], **columns: object) -> list[float]:
        assert not any(each.closed for each in environment)
        return [1.0] * len(environment)

    config = posttrain.load_recipe(
        kind=CollectConfig,
        task={"name": "countdown"},
        model={"path": str(tmp_path / "model")},
        environment={"max_failures": 1.0},
        sampling={"max_completion_tokens": 6},
        collect={"num_prompts": 2, "group_size": 2},
        run={"folder": str(tmp_path / "run"), "threads": 1},
    )
    with PromptSampler(config, CallerObjects(environment=kind, rewards=[reads])) as sampler:
        sampler.sampled(range(2))
        require_closed(kind)
