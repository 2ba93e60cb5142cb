"""Deadlines for a completion, for a function and for all of them: what is late is left out, and nothing takes hours."""

import asyncio
import math
import time
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import RunError
from posttrain.options.reward import GradingOptions
from posttrain.rewards.grading.calls import NEVER, Bounds, after
from posttrain.rewards.grading.grade import RewardFunction, ScoringFailure, grade, reward_function
from tests.support.refusals import refused
from tests.support.reward_rows import group
from tests.support.timing import takes
from tests.support.worker_rows import function_of

HANGS = """
import pathlib

def one(response, log=None):
    with open(pathlib.Path(__file__).with_name("log"), "a") as file:
        file.write(response + "\\n")
    while response.startswith("hang"):
        pass
    return len(response)

def many(completions):
    while "hang" in completions:
        pass
    return [len(text) for text in completions]
"""


def log(folder: Path) -> list[str]:
    return (folder / "log").read_text().splitlines()


def test_one_completion_that_hangs_is_tried_three_times_and_costs_nobody_else_a_score(tmp_path: Path) -> None:
    function = function_of(tmp_path, HANGS, "one", workers=2, item_seconds=0.6)
    texts = ["x" * (1 + i % 7) for i in range(40)]
    texts[3] = "hang"
    grades = grade([group(texts)], [function])
    expected = [math.nan if text == "hang" else float(len(text)) for text in texts]
    assert grades.scores[0, 0].tolist() == pytest.approx(expected, nan_ok=True)
    assert grades.num_failures == 1
    assert sorted(log(tmp_path)) == sorted([*texts, "hang", "hang"])


def test_a_call_with_a_whole_prompts_completions_has_as_many_times_the_seconds(tmp_path: Path) -> None:
    function = function_of(tmp_path, HANGS, "many", workers=2, item_seconds=0.3)
    groups = [group(["a", "hang"], id="bad"), *(group(["bb", "c"], id=str(i)) for i in range(19))]
    with takes(least=3 * 2 * 0.3, most=60):  # three tries, for two completions each
        grades = grade(groups, [function])  # 2 of 40 = 5%
    assert grades.scores[0].isnan().tolist() == [[True, True]] + [[False, False]] * 19
    with refused("3 of 3", "item_seconds = 0.1 for each of 3 completions", error=RunError):
        grade([group(["a", "hang", "c"])], [function_of(tmp_path, HANGS, "many", workers=2, item_seconds=0.1)])


def test_a_function_that_always_hangs_is_given_up_on_without_asking_about_every_completion(tmp_path: Path) -> None:
    function = function_of(tmp_path, HANGS, "one", workers=1, item_seconds=0.3)
    texts = [f"hang {i}" for i in range(40)]
    with refused("40 of 40", "3 tries", "5%", "item_seconds = 0.3.", error=RunError):
        grade([group(texts)], [function])
    # Two of forty may fail, so the third that is lost ends a try: three tries of three; those never asked go first.
    assert log(tmp_path) == texts[:9]


def test_a_slow_spell_is_survived(tmp_path: Path) -> None:
    """Lost completions end a try; in the next one all the others have their turn first."""
    source = HANGS.replace(
        'response.startswith("hang")', 'response.startswith("hang") and len(list(open(file.name))) <= 3'
    )
    function = function_of(tmp_path, source, "one", workers=1, item_seconds=0.5)
    texts = [f"hang {i:02}" for i in range(40)]
    assert grade([group(texts)], [function]).scores.tolist() == [[[7.0] * 40]]
    assert log(tmp_path) == texts[:3] + texts[3:] + texts[:3]


def test_the_batch_deadline_covers_every_retry(tmp_path: Path) -> None:
    function = function_of(tmp_path, HANGS, "one", workers=1, item_seconds=0.3, seconds=0.7)
    with takes(least=0.7, most=2.7), refused("20 of 20", error=RunError):
        grade([group(["hang"] * 20)], [function])
    assert 1 <= len(log(tmp_path)) <= 3
    with refused("the reward's seconds = 0.2", error=RunError):
        grade([group(["hang"])], [function_of(tmp_path, HANGS, "one", workers=1, seconds=0.2)])


def test_what_waits_when_the_batch_deadline_passes_is_not_begun(tmp_path: Path) -> None:
    function = function_of(tmp_path, HANGS, "one", workers=1, seconds=0.3)
    with takes(most=0.3 + 3.0):  # to start 300 workers and end them would take half a minute
        grades = grade([group(["hang"] * 300)], [function], grading=GradingOptions(max_failure_share=1.0))
    assert grades.num_failures == 300


def test_retries_end_with_the_batch_deadline_for_failures_of_the_functions_own(tmp_path: Path) -> None:
    source = """
import time
from posttrain.rewards.grading.function import ScoringFailure

def mine(response):
    time.sleep(0.3)
    return ScoringFailure("error 500")
"""
    with takes(most=0.4 + 2.0), refused("1 of 1", error=RunError):
        grade([group(["a"])], [function_of(tmp_path, source, workers=1, seconds=0.4)])


def test_the_recipes_deadline_is_for_all_functions_together(tmp_path: Path) -> None:
    hangs = function_of(tmp_path, HANGS, "one", workers=1)

    async def behind(completions: list[str], base: list[float | None]) -> list[float]:
        return [1.0 for _ in completions]

    rows, functions, seen = [group(["a", "hang"])], [hangs, reward_function(behind, of="one")], []
    with takes(most=0.6 + 2.0), refused("'one'", "grading.seconds = 0.6", error=RunError):
        grade(rows, functions, grading=GradingOptions(seconds=0.6), journal=lambda groups, grades: seen.append(grades))
    # What was in time is kept, and what was to come after the deadline was never asked.
    assert seen[0].scores.isnan().tolist() == [[[False, True]], [[True, True]]]
    allowed = grade(rows, [hangs], grading=GradingOptions(seconds=0.6, max_failure_share=0.5))
    assert allowed.scores[0].isnan().tolist() == [[False, True]]


def test_an_async_function_is_cancelled_at_its_deadline_row_by_row_or_for_all_of_its_rows() -> None:
    cancelled: list[str] = []

    async def slow(response: str) -> float:
        try:
            await asyncio.sleep(60 if response == "slow" else 0)
        except asyncio.CancelledError:
            cancelled.append(response)
            raise
        return 1.0

    async def slow_for_all(completions: list[str]) -> list[float]:
        return [await slow("slow") for _ in completions]

    with takes(most=10.0):
        grades = grade([group(["slow"] + ["x"] * 19)], [reward_function(slow, item_seconds=0.1)])
        assert grades.scores[0, 0].isnan().tolist() == [True] + [False] * 19
        assert cancelled == ["slow"] * 3
        with refused("item_seconds = 0.05 for each of 4 completions", error=RunError):
            grade([group(["x"] * 4)], [reward_function(slow_for_all, item_seconds=0.05)])
        with refused("seconds = 0.1 for a batch", error=RunError):
            grade([group(["x"] * 4)], [reward_function(slow_for_all, seconds=0.1)])
    assert len(cancelled) == 3 + 3 + 1  # after the batch's deadline there is no other try


def test_an_async_function_that_will_not_be_cancelled_holds_nobody_up() -> None:
    async def stubborn(response: str) -> float:
        for _ in range(10):
            try:
                await asyncio.sleep(0.2)
            except asyncio.CancelledError:
                continue
        raise RuntimeError("nobody is left to hear this")

    with takes(most=1.0), refused("1 of 1", error=RunError):
        grade([group(["a"])], [reward_function(stubborn, seconds=0.1)])


def test_an_async_function_that_blocks_its_loop_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.rewards.grading.dispatch.GRACE_SECONDS", 0.1)

    async def blocks(response: str) -> float:
        time.sleep(1.0)
        return 1.0

    with refused("'blocks'", "set workers", error=RunError):
        grade([group(["a"])], [reward_function(blocks, seconds=0.1)])


def test_an_async_function_in_a_worker_is_ended_even_if_it_blocks_its_loop(tmp_path: Path) -> None:
    source = "import time\n\nasync def mine(response):\n    time.sleep(60)\n"
    with takes(most=10.0), refused("item_seconds = 0.2", error=RunError):
        grade([group(["a"])], [function_of(tmp_path, source, workers=1, item_seconds=0.2)])


@pytest.mark.parametrize(
    ("answer", "texts", "words"),
    [(1.0, "abcd", ("3 of 4",)), (ScoringFailure("error 500"), "a", ("1 of 1", "error 500"))],
)
def test_what_is_known_to_come_back_is_not_begun_or_tried_after_the_recipes_deadline(answer, texts, words) -> None:
    begun: list[str] = []

    def bounded(response: str) -> Any:
        begun.append(response)
        time.sleep(0.2)
        return answer

    function = RewardFunction(name="bounded", call=bounded, bounded=True)
    with refused(*words, error=RunError):
        grade([group([*texts])], [function], grading=GradingOptions(seconds=0.1))
    assert begun == ["a"]


@pytest.mark.parametrize(("share", "fails"), [(0.0, 1), (0.25, 2), (0.5, 3)])
def test_how_much_may_fail_is_the_recipes_to_say(share: float, fails: int) -> None:
    judge = reward_function(lambda response: ScoringFailure("error 500") if response == "bad" else 1.0)
    grading = GradingOptions(max_failure_share=share)
    with refused(f"{fails} of 4", f"{100 * share:g}%", "grading.max_failure_share", error=RunError):
        grade([group(["bad"] * fails + ["ok"] * (4 - fails))], [judge], grading=grading)
    allowed = group(["bad"] * (fails - 1) + ["ok"] * (5 - fails))
    assert grade([allowed], [judge], grading=grading).num_failures == fails - 1


def test_the_sooner_of_two_deadlines_holds_and_zero_sets_none() -> None:
    assert after(0.0, "x") is NEVER
    soon, late = after(1.0, "soon"), after(2.0, "late")
    assert min(late, NEVER, soon) is soon
    assert not NEVER.passed
    assert after(-1.0, "x").passed
    assert Bounds().until is NEVER
