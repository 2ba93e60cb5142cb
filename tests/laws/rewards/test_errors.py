"""What becomes of reward functions that crash, return no scores, or cannot be called at all."""

import math
from typing import Any

import pytest
import torch

from posttrain.errors import RunError
from posttrain.records import Grades
from posttrain.rewards.grading.answers import Graded
from posttrain.rewards.grading.grade import RewardFunction, ScoringFailure, grade, reward_function
from tests.support.refusals import refused
from tests.support.reward_rows import Outcome, graded, group, scores


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.rewards.grading.grade.RETRY_WAITS_SECONDS", (0.0, 0.0))


@pytest.mark.parametrize(
    ("returned", "complaint"),
    [
        ([1.0, math.nan], "returned nan"),
        ([1.0, -math.inf], "returned -inf"),
        ([1.0, "good"], "returned 'good' (str)"),
        ([1.0, [1.0]], "returned [1.0] (list)"),
        ([1.0, torch.tensor([1.0, 2.0])], "returned tensor([1., 2.]) (Tensor)"),
        ([1.0, 10**400], "too large"),
        ([1.0, 1j], "returned 1j (complex)"),
    ],
)
def test_a_value_that_is_no_score_stops_the_run_and_names_its_row(returned: list[Any], complaint: str) -> None:
    def mine(completions: list[str]) -> list[Any]:
        return returned

    with pytest.raises(RunError) as caught:
        graded([group(["first", "second\n\x1b[2J"], id="row-7")], mine)
    message = str(caught.value)
    assert message.startswith("reward 'mine', prompt 'row-7', sample 1: ")
    assert complaint in message
    assert r"'second\n\x1b[2J'" in message  # shown so that it cannot steer a terminal
    # Left out and counted, when that is asked for by name.
    result = graded([group(["first", "second"])], mine, on_error="none")
    assert result.rewards.isnan().tolist() == [[False, True]]
    assert result.num_failures == 1


@pytest.mark.parametrize(
    "returned", [[1.0], [1.0] * 3, 1.0, None, "xy", {"a": 1, "b": 2}, Graded(1.0, Outcome.RIGHT), torch.tensor(1.0)]
)
def test_anything_but_one_score_per_completion_stops_the_run(returned: object) -> None:
    groups = [group(["a", "b"])]
    with refused("reward '<lambda>'", "2 completions", error=RunError):
        graded(groups, lambda completions: returned)
    assert graded(groups, lambda completions: returned, on_error="none").num_failures == 2


def crash_at(bad: str) -> list[Any]:
    def crashing(completions: list[str]) -> list[float]:
        return [1.0 / (text != bad) for text in completions]

    async def crashing_later(completions: list[str]) -> list[float]:
        return crashing(completions)

    def crashing_row(response: str) -> float:
        return 1.0 / (response != bad)

    return [crashing, crashing_later, crashing_row]


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

    got = scores([group(["a", "b"])], flaky)
    if raises:
        assert (got, attempts) == ([[1.0, 1.0]], [["a", "b"]] * 3)
    else:
        assert (got, attempts) == ([[0.5, 1.0]], [["a", "b"], ["b"], ["b"]])


def test_scoring_that_keeps_failing_is_left_out_and_counted_up_to_one_in_twenty() -> None:
    def judge(response: str) -> Any:
        return ScoringFailure("error 500") if response.startswith("bad") else 1.0

    result = graded([group(["ok"] * 19 + ["bad"])], judge)  # 1 of 20 = 5%
    assert result.num_failures == 1
    assert result.rewards.isnan().sum() == 1
    journalled: list[Grades] = []
    with refused("'judge'", "2 of 20", "3 tries", "5%", "error 500", error=RunError):
        graded([group(["ok"] * 18 + ["bad"] * 2)], judge, journal=lambda groups, grades: journalled.append(grades))
    assert journalled[0].num_failures == 2  # paid-for scores are kept even then


def test_a_failing_judge_is_not_hidden_by_other_functions_that_work() -> None:
    def judge(response: str) -> Any:
        return ScoringFailure("down") if response == "x" else 1.0

    works = [RewardFunction(name=f"works {i}", call=lambda completions: [0.0] * len(completions)) for i in range(9)]
    # 1 of 10 of the judge's scores, though 1 of 100 of all.
    with refused("1 of 10", error=RunError):
        grade([group(["x"] + ["y"] * 9)], [*works, reward_function(judge)])


def test_the_failure_that_is_told_is_the_last_one() -> None:
    def failing(response: str) -> Any:
        return ScoringFailure(f"error of {response}")

    with refused("3 of 3", "error of c.", error=RunError):
        graded([group(["a", "b", "c"])], failing)
