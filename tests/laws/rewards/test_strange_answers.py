"""What functions return that is no list of scores, and columns that a function could change: told, or copied."""

import asyncio
import io
import itertools
import sys
import time
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from posttrain.errors import RunError
from posttrain.rewards.countdown import Countdown, countdown, puzzle
from posttrain.rewards.grading.calls import private_copy
from posttrain.rewards.grading.grade import ScoringFailure, grade, reward_function
from tests.support.refusals import refused, warned
from tests.support.reward_rows import CHAT, graded, group, scores
from tests.support.worker_rows import function_of


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.rewards.grading.grade.RETRY_WAITS_SECONDS", (0.0, 0.0))


# Leaving the program.


async def exits(completions: list[str]) -> list[float]:
    sys.exit(0)


async def interrupts(completions: list[str]) -> list[float]:
    raise KeyboardInterrupt


async def exits_in_a_task_of_its_own(completions: list[str]) -> list[float]:
    return await asyncio.create_task(exits(completions))


async def stops_the_loop(completions: list[str]) -> list[float]:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0.001)
    raise SystemExit(3)


@pytest.mark.parametrize("seconds", [0.0, 5.0])
@pytest.mark.parametrize("leaves", [exits, interrupts, exits_in_a_task_of_its_own, stops_the_loop])
def test_an_async_function_that_leaves_the_program_fails_and_the_next_one_is_awaited(
    leaves: Callable[..., Any], seconds: float
) -> None:
    async def next_one(completions: list[str]) -> list[float]:
        await asyncio.sleep(0.001)
        return [1.0 for _ in completions]

    with refused("prompt 'p', sample 0: raised ", "The completion: 'a'", error=RunError):
        grade([group(["a", "b"])], [reward_function(leaves, seconds=seconds)])
    assert scores([group(["a", "b"])], next_one) == [[1.0, 1.0]]
    beside = grade([group(["a"])], [reward_function(leaves), reward_function(next_one)], on_error="none")
    assert beside.rewards.tolist() == [[1.0]]
    assert beside.num_failures == 1


def test_a_plain_function_that_leaves_the_program_fails_at_its_completion_and_ctrl_c_goes_through() -> None:
    def leaves(response: str) -> float:
        return sys.exit(0) if response == "b" else 1.0

    def interrupted(response: str) -> float:
        raise KeyboardInterrupt

    with refused("'leaves', prompt 'p', sample 1", "SystemExit: 0", error=RunError):
        graded([group(["a", "b"])], leaves)
    assert scores([group(["a", "b"])], leaves, on_error="none") == [[1.0, None]]
    with pytest.raises(KeyboardInterrupt):
        graded([group(["a"])], interrupted)


class OwnEnd(BaseException):
    """What derives from no Exception, as some libraries' errors do."""


@pytest.mark.parametrize("error", [GeneratorExit, asyncio.CancelledError, OwnEnd])
def test_whatever_else_a_plain_function_raises_is_told_with_its_completion(error: type[BaseException]) -> None:
    def raises(response: str) -> float:
        if response == "b":
            raise error
        return 1.0

    with refused("'raises', prompt 'p', sample 1", error.__name__, error=RunError):
        graded([group(["a", "b"])], raises)
    assert scores([group(["a", "b"])], raises, on_error="none") == [[1.0, None]]


@pytest.mark.parametrize("leaves", ["def", "async def"])
@pytest.mark.parametrize("error", ["SystemExit(0)", "KeyboardInterrupt"])
def test_in_a_worker_leaving_is_the_functions_failure_too(tmp_path: Any, leaves: str, error: str) -> None:
    source = f"{leaves} mine(response):\n    raise {error}\n"
    with refused("'mine', prompt 'p', sample 0: raised ", error=RunError):
        grade([group(["a"])], [function_of(tmp_path, source, workers=1)])


def test_a_loop_whose_thread_is_gone_gives_way_to_another() -> None:
    from posttrain.rewards.grading.dispatch import LoopThread

    thread = LoopThread()
    first = thread.running()
    assert thread.running() is first

    async def close_when_stopped() -> None:
        asyncio.get_running_loop().stop()

    asyncio.run_coroutine_threadsafe(close_when_stopped(), first).result(5)
    first.call_soon_threadsafe(first.close)  # refused while it runs: the loop goes on
    assert thread.running() is first
    assert thread._thread is not None
    thread._loop = asyncio.new_event_loop()
    thread._loop.close()
    second = thread.running()
    assert second is not first
    assert asyncio.run_coroutine_threadsafe(asyncio.sleep(0, "here"), second).result(5) == "here"


def test_a_function_that_closes_the_standard_output_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def closes(response: str) -> float:
        sys.stdout.close()
        return 1.0

    async def closes_later(response: str) -> float:
        return closes(response)

    for function in (closes, closes_later):
        monkeypatch.setattr(sys, "stdout", io.StringIO())
        with refused(f"reward '{function.__name__}': ", "workers: 1", error=RunError):
            graded([group(["a", "b"])], function)
        print("still told")  # there is something to print to


def test_what_is_waited_for_is_told_once_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.rewards.grading.dispatch.PATIENCE_SECONDS", 0.05)

    def slow(completions: list[str]) -> list[float]:
        time.sleep(0.3)
        return [1.0]

    async def slow_later(completions: list[str]) -> list[float]:
        await asyncio.sleep(0.3)
        return [1.0]

    for function in (slow, slow_later):
        with warned(f"'{function.__name__}'", "`workers: 1` and `item_seconds`", kind=RuntimeWarning):
            graded([group(["a"])], function)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grade([group(["a"])], [reward_function(slow_later, seconds=9.0)])  # it has a deadline
        graded([group(["a"])], lambda completions: [1.0])


# What is no list of scores.


class Unprintable:
    """A value that cannot even be shown."""

    def __repr__(self) -> str:
        raise ValueError("no")


class MuteError(Exception):
    """An exception that cannot be told."""

    def __str__(self) -> str:
        raise ValueError("no")


class MuteFailure(ScoringFailure):
    """The same of a failure."""

    __str__ = MuteError.__str__


class Unlistable:
    """Something to go through that cannot be gone through."""

    def __iter__(self) -> Any:
        raise ValueError("no")


@pytest.mark.parametrize(
    ("returned", "complaint"),
    [
        ({9.0, 1.0}, "which has no order … for 2 completions"),
        (frozenset((9.0, 1.0)), "which has no order"),
        ({9.0: "a", 1.0: "b"}.keys(), "which has no order"),
        (bytearray(b"ab"), "(bytearray) for 2 completions"),
        (memoryview(b"ab"), "(memoryview) for 2"),
        (Unlistable(), "cannot be read"),
        ([1.0, Unprintable()], "sample 1: returned <a Unprintable, whose repr raises ValueError>"),
        ([1.0, bytearray(b"a")], "sample 1 … (bytearray)"),
        (np.array([1, 2], dtype="m8[ns]"), "sample 0 … (timedelta64)"),
        (np.array([1, 2], dtype="M8[ns]"), "sample 0 … (datetime64)"),
        (torch.zeros(2, device="meta"), "sample 0 … meta"),
        ([1.0, torch.zeros((), device="meta")], "sample 1 … meta"),
    ],
)
def test_what_is_no_list_of_scores_is_told_and_never_a_number(returned: Any, complaint: str) -> None:
    with refused(complaint, error=RunError):
        graded([group(["a", "b"])], lambda completions: returned)
    left_out = graded([group(["a", "b"])], lambda completions: returned, on_error="none")
    assert left_out.rewards.isnan().any()


def test_a_score_that_numpy_masks_is_none() -> None:
    masked = np.ma.array([1.0, 2.0, 3.0], mask=[0, 1, 0])
    assert scores([group(["a", "b", "c"])], lambda completions: masked) == [[1.0, None, 3.0]]
    assert scores([group(["a"])], lambda completions: [np.ma.masked]) == [[None]]
    assert scores([group(["a"])], lambda completions: [np.ma.array([2.0], mask=[1])]) == [[None]]


def test_exceptions_that_cannot_be_told_are_told_by_their_name(tmp_path: Any) -> None:
    def mute(response: str) -> float:
        raise MuteError

    def fails(response: str) -> float:
        raise MuteFailure

    with refused("MuteError: <a MuteError, whose str raises ValueError>", error=RunError):
        graded([group(["a"])], mute)
    with refused("<a MuteFailure, whose str raises ValueError>", error=RunError):
        graded([group(["a"])], fails)
    source = "class Mute(Exception):\n    __str__ = None\n\ndef mine(response):\n    raise Mute\n"
    with refused("Mute: <a Mute, whose str raises TypeError>", error=RunError):
        grade([group(["a"])], [function_of(tmp_path, source, workers=1)])


def test_groups_of_different_sizes_are_refused_before_anything_is_asked() -> None:
    def never(completions: list[str]) -> list[float]:
        raise AssertionError

    with refused("'b' has 2", "'a' 1"):
        graded([group(["x"], id="a"), group(["x", "y"], id="b")], never)


def test_a_function_of_messages_that_gets_text_is_told_how_to_get_messages() -> None:
    def chats(completions: list[Any]) -> list[float]:
        return [float(len(completion[0]["content"])) for completion in completions]

    with refused("raised TypeError: string indices ", "task.prompt_format", error=RunError):
        graded([group(["ab"])], chats)
    assert scores([group(["ab"], messages=CHAT)], chats) == [[2.0]]

    def wrong(completions: list[Any]) -> list[float]:
        return [1.0 + completion for completion in completions]

    with refused("raised TypeError", error=RunError) as caught:
        graded([group(["ab"])], wrong)
    assert "task.prompt_format" not in str(caught.value)


def test_ground_truth_is_explained_to_whom_it_concerns() -> None:
    def of_lists(completions: list[str], ground_truth: list[str]) -> list[float]:
        return [1.0]

    with refused("call the parameter `answer`"):
        graded([group(["a"], columns={"answer": "1"})], of_lists)
    with refused("add a column `ground_truth`"):
        graded([group(["a"])], of_lists)
    with refused("`ground_truth` or `answer`"):
        graded([group(["a"])], lambda response, ground_truth: 1.0)


# What a function is given.


def written_over(given: Any) -> None:
    """Change a value in the way that its kind allows."""
    match given:
        case tuple():
            given[0].append(9)
        case dict():
            given["x"] = 9
        case deque() | list():
            given.append(9)
        case torch.Tensor():
            given += 9
        case _:
            given[0] = 9


MAKERS: list[Callable[[], Any]] = [
    lambda: np.array([3, 8]),
    lambda: torch.tensor([3, 8]),
    lambda: torch.ones(2, requires_grad=True) * 3,
    lambda: bytearray(b"ab"),
    lambda: memoryview(bytearray(b"ab")),
    lambda: ([3], [8]),
    lambda: [[3], [8]],
    lambda: [3, 8],
    lambda: deque([3, 8]),
    lambda: OrderedDict(a=1),
    lambda: np.ma.array([3.0, 8.0], mask=[0, 1]),
]


@pytest.mark.parametrize(("make", "one_by_one"), [*itertools.product(MAKERS, [False, True])])
def test_no_function_can_change_a_problem(make: Callable[[], Any], one_by_one: bool) -> None:
    def of_lists(completions: list[str], numbers: list[Any]) -> list[float]:
        for given in numbers:
            written_over(given)
        return [1.0 for _ in completions]

    def of_one(response: str, numbers: Any) -> float:
        written_over(numbers)
        return 1.0

    mine, untouched = make(), make()
    graded([group(["a", "b"], columns={"numbers": mine})], of_one if one_by_one else of_lists)
    assert type(mine) is type(untouched)
    assert bool(np.all(np.asarray(np_view(mine) == np_view(untouched))))


def np_view(value: Any) -> Any:
    """Something that `==` compares value by value."""
    return value.detach().numpy() if isinstance(value, torch.Tensor) else value


def test_what_nobody_can_change_is_not_copied() -> None:
    pair, text, fixed = (1, "a"), "x" * 10, memoryview(b"ab")
    assert all(private_copy(value) is value for value in (pair, text, fixed, None, 1.5))
    numbers = [3, 8]
    assert private_copy(numbers) == numbers
    assert private_copy(numbers) is not numbers


# Countdown's columns.


@pytest.mark.parametrize(
    "numbers", [np.array([3, 8]), [np.int64(3), np.uint8(8)], (3, torch.tensor(8)), torch.tensor([3, 8])]
)
@pytest.mark.parametrize("target", [11, np.int64(11), torch.tensor(11)])
def test_whole_numbers_of_any_library_make_a_puzzle(numbers: Any, target: Any) -> None:
    made = puzzle(numbers, target, "all")
    assert made == Countdown((3, 8), 11)
    assert {type(each) for each in (*made.numbers, made.target)} == {int}
    text = "<think>3</think>\n<answer>3 + 8</answer>"
    told = countdown(completions=[text], finish_reasons=["stop"], numbers=[numbers], target=[target])
    assert told[0].score == 1.0


@pytest.mark.parametrize(
    "numbers",
    [
        [True, 8],
        [np.True_, 8],
        np.array([True, False]),
        [torch.tensor(True)],
        [1.5],
        [np.float64(3)],
        [-1],
        ["3"],
        "38",
        np.array([[3, 8]]),
        np.array(3),
        {3, 8},
        None,
    ],
)
def test_what_no_answer_could_write_is_no_puzzle(numbers: Any) -> None:
    with refused("numbers = "):
        puzzle(numbers, 11, "all")


@pytest.mark.parametrize("target", [True, np.True_, "11", 11.0, np.array([11, 12]), None])
def test_a_target_that_is_no_whole_number_is_refused(target: Any) -> None:
    with refused("target = "):
        puzzle([3, 8], target, "all")
