"""What becomes of reward functions that crash, leave the program, return no scores, or cannot be called at all."""

import asyncio
import io
import math
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from posttrain.errors import RunError
from posttrain.records import Grades
from posttrain.rewards.grading.answers import Graded
from posttrain.rewards.grading.dispatch import LoopThread
from posttrain.rewards.grading.grade import RewardFunction, ScoringFailure, grade, reward_function
from tests.support.refusals import refused, warned
from tests.support.reward_rows import CHAT, Outcome, graded, group, scores
from tests.support.worker_rows import function_of


def raises_value_error(self: object) -> Any:
    raise ValueError("no")


Unprintable = type("Unprintable", (), {"__repr__": raises_value_error})
Unlistable = type("Unlistable", (), {"__iter__": raises_value_error})
MuteError = type("MuteError", (Exception,), {"__str__": raises_value_error})
MuteFailure = type("MuteFailure", (ScoringFailure,), {"__str__": raises_value_error})


WRONG = "reward '<lambda>' … 2 completions"


@pytest.mark.parametrize(
    ("returned", "complaint"),
    [
        ([1.0, math.nan], "sample 1: returned nan"),
        ([1.0, -math.inf], "sample 1: returned -inf"),
        ([1.0, "good"], "sample 1: returned 'good' (str)"),
        ([1.0, [1.0]], "sample 1: returned [1.0] (list)"),
        ([1.0, torch.tensor([1.0, 2.0])], "sample 1: returned tensor([1., 2.]) (Tensor)"),
        ([1.0, 10**400], "sample 1 … too large"),
        ([1.0, 1j], "sample 1: returned 1j (complex)"),
        ([1.0, Unprintable()], "sample 1: returned <a Unprintable, whose repr raises ValueError>"),
        ([1.0, bytearray(b"a")], "sample 1 … (bytearray)"),
        ([1.0, torch.zeros((), device="meta")], "sample 1 … meta"),
        (torch.zeros(2, device="meta"), "sample 0 … meta"),
        (np.array([1, 2], dtype="m8[ns]"), "sample 0 … (timedelta64)"),
        (np.array([1, 2], dtype="M8[ns]"), "sample 0 … (datetime64)"),
        *((each, WRONG) for each in ([1.0], [1.0] * 3, 1.0, None, "xy", {"a": 1, "b": 2}, torch.tensor(1.0))),
        (Graded(1.0, Outcome.RIGHT), WRONG),
        ({9.0, 1.0}, "which has no order … for 2 completions"),
        (frozenset((9.0, 1.0)), "which has no order"),
        ({9.0: "a", 1.0: "b"}.keys(), "which has no order"),
        (bytearray(b"ab"), "(bytearray) for 2 completions"),
        (memoryview(b"ab"), "(memoryview) for 2"),
        (Unlistable(), "cannot be read"),
    ],
)
def test_what_is_no_score_for_each_completion_stops_the_run_or_is_left_out(returned: Any, complaint: str) -> None:
    with refused(complaint, error=RunError):
        graded([group(["a", "b"])], lambda completions: returned)
    left_out = graded([group(["a", "b"])], lambda completions: returned, on_error="none")
    assert left_out.rewards.isnan().tolist() == [["sample 1" not in complaint, True]]
    assert left_out.num_failures == (1 if "sample 1" in complaint else 2)


def test_a_completion_in_a_message_cannot_steer_a_terminal() -> None:
    with refused(r"'second\n\x1b[2J'", error=RunError) as caught:
        graded([group(["first", "second\n\x1b[2J"], id="row-7")], lambda completions: [1.0, math.nan])
    assert str(caught.value).startswith("reward '<lambda>', prompt 'row-7', sample 1: ")


def test_a_score_that_numpy_masks_is_none() -> None:
    masked = np.ma.array([1.0, 2.0, 3.0], mask=[0, 1, 0])
    assert scores([group(["a", "b", "c"])], lambda completions: masked) == [[1.0, None, 3.0]]
    assert scores([group(["a"])], lambda completions: [np.ma.masked]) == [[None]]
    assert scores([group(["a"])], lambda completions: [np.ma.array([2.0], mask=[1])]) == [[None]]


def crash_at(bad: str) -> list[Any]:
    def crashing(completions: list[str]) -> list[float]:
        return [1.0 / (text != bad) for text in completions]

    async def crashing_later(completions: list[str]) -> list[float]:
        return crashing(completions)

    return [crashing, crashing_later, lambda response: 1.0 / (response != bad)]


@pytest.mark.parametrize("crashing", crash_at("c"))
def test_an_exception_stops_the_run_at_the_row_that_causes_it_and_stays_attached(crashing: Any) -> None:
    groups = [group(["a", "b"], id="fine"), group(["x", "c"], id="culprit"), group(["c", "d"], id="later")]
    with refused("prompt 'culprit', sample 1: ", "ZeroDivisionError", error=RunError) as caught:
        graded(groups, crashing)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert scores(groups, crashing, on_error="none") == [[1, 1], [1, None], [None, 1]]


def test_an_exception_that_no_single_row_causes_names_no_row() -> None:
    def crowded(completions: list[str]) -> list[float]:
        if len(completions) > 2:
            raise OSError("too many")
        return [0.0] * len(completions)

    with refused(error=RunError) as told:
        graded([group(["a", "b", "c"])], crowded)
    assert str(told.value) == "reward 'crowded' raised OSError: too many"


def test_exceptions_that_cannot_be_told_are_told_by_their_name(tmp_path: Path) -> None:
    def mute(response: str) -> float:
        raise MuteError if response == "a" else MuteFailure

    with refused("MuteError: <a MuteError, whose str raises ValueError>", error=RunError):
        graded([group(["a"])], mute)
    with refused("<a MuteFailure, whose str raises ValueError>", error=RunError):
        graded([group(["b"])], mute)
    source = "class Mute(Exception):\n    __str__ = None\n\ndef mine(response):\n    raise Mute\n"
    with refused("Mute: <a Mute, whose str raises TypeError>", error=RunError):
        grade([group(["a"])], [function_of(tmp_path, source, workers=1)])


def test_a_function_of_messages_that_gets_text_is_told_how_to_get_messages() -> None:
    def chats(completions: list[Any]) -> list[float]:
        return [float(len(completion[0]["content"])) for completion in completions]

    with refused("raised TypeError: string indices ", "task.prompt_format", error=RunError):
        graded([group(["ab"])], chats)
    assert scores([group(["ab"], messages=CHAT)], chats) == [[2.0]]
    with refused("raised TypeError", error=RunError) as caught:
        graded([group(["ab"])], lambda completions: [1.0 + completion for completion in completions])
    assert "task.prompt_format" not in str(caught.value)


@pytest.mark.parametrize("raises", [False, True])
def test_failed_scoring_is_tried_again_twice_and_only_where_it_failed(raises: bool) -> None:
    attempts = []

    def flaky(completions: list[str]) -> list[Any]:
        attempts.append(completions)
        if len(attempts) == 3:
            return [1.0] * len(completions)
        if raises:
            raise ScoringFailure("error 500")
        return [ScoringFailure("error 500") if text == "b" else 0.5 for text in completions]

    expected = ([[1.0, 1.0]], [["a", "b"]] * 3) if raises else ([[0.5, 1.0]], [["a", "b"], ["b"], ["b"]])
    assert (scores([group(["a", "b"])], flaky), attempts) == expected


def judge(response: str) -> Any:
    return ScoringFailure(f"error of {response}") if response.startswith("bad") else 1.0


def test_scoring_that_keeps_failing_is_left_out_and_counted_up_to_one_in_twenty() -> None:
    result = graded([group(["ok"] * 19 + ["bad"])], judge)  # 1 of 20 = 5%
    assert result.num_failures == result.rewards.isnan().sum() == 1
    journalled: list[Grades] = []
    with refused("'judge'", "2 of 20", "3 tries", "5%", "error of bad 2.", error=RunError):  # the last one
        texts = ["ok"] * 18 + ["bad 1", "bad 2"]
        graded([group(texts)], judge, journal=lambda groups, grades: journalled.append(grades))
    assert journalled[0].num_failures == 2  # paid-for scores are kept even then


def test_a_failing_judge_is_not_hidden_by_other_functions_that_work() -> None:
    works = [RewardFunction(name=f"works {i}", call=lambda completions: [0.0] * len(completions)) for i in range(9)]
    # 1 of 10 of the judge's scores, though 1 of 100 of all.
    with refused("1 of 10", error=RunError):
        grade([group(["bad"] + ["y"] * 9)], [*works, reward_function(judge)])


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
def test_an_async_function_that_leaves_the_program_fails_and_the_next_one_is_awaited(leaves, seconds) -> None:
    async def next_one(completions: list[str]) -> list[float]:
        await asyncio.sleep(0.001)
        return [1.0 for _ in completions]

    with refused("prompt 'p', sample 0: raised ", "The completion: 'a'", error=RunError):
        grade([group(["a", "b"])], [reward_function(leaves, seconds=seconds)])
    assert scores([group(["a", "b"])], next_one) == [[1.0, 1.0]]
    beside = grade([group(["a"])], [reward_function(leaves), reward_function(next_one)], on_error="none")
    assert beside.rewards.tolist() == [[1.0]]
    assert beside.num_failures == 1


class OwnEnd(BaseException):
    """What derives from no Exception, as some libraries' errors do."""


@pytest.mark.parametrize("error", [SystemExit, GeneratorExit, asyncio.CancelledError, OwnEnd])
def test_whatever_a_plain_function_raises_is_told_with_its_completion(error: type[BaseException]) -> None:
    def raises(response: str) -> float:
        if response == "b":
            raise error
        return 1.0

    with refused("'raises', prompt 'p', sample 1", error.__name__, error=RunError):
        graded([group(["a", "b"])], raises)
    assert scores([group(["a", "b"])], raises, on_error="none") == [[1.0, None]]


def test_ctrl_c_goes_through_a_plain_function() -> None:
    def interrupted(response: str) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        graded([group(["a"])], interrupted)


@pytest.mark.parametrize("leaves", ["def", "async def"])
@pytest.mark.parametrize("error", ["SystemExit(0)", "KeyboardInterrupt"])
def test_in_a_worker_leaving_is_the_functions_failure_too(tmp_path: Path, leaves: str, error: str) -> None:
    source = f"{leaves} mine(response):\n    raise {error}\n"
    with refused("'mine', prompt 'p', sample 0: raised ", error=RunError):
        grade([group(["a"])], [function_of(tmp_path, source, workers=1)])


def test_a_loop_whose_thread_is_gone_gives_way_to_another() -> None:
    thread = LoopThread()
    first = thread.running()
    assert thread.running() is first

    async def stop() -> None:
        asyncio.get_running_loop().stop()

    asyncio.run_coroutine_threadsafe(stop(), first).result(5)
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
        return sys.stdout.close() or 1.0

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
