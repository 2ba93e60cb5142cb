"""What counts as a try of a Countdown search, and which tries succeed."""

import pytest

from posttrain.rewards.countdown.grader import Countdown
from posttrain.tasks.countdown_task import Search, search, search_statistics

ALL = Countdown((3, 4, 5), 17, "all")
SUBSET = Countdown((3, 4, 5), 12, "subset")


@pytest.mark.parametrize(
    ("line", "solves"),
    [
        ("3*4=12,12+5=17", True),
        ("5+12=17", False),  # 12 is not on the table
        ("4*3=12,5+12=17", True),
        ("3*4=13,13+4=17", False),  # wrong arithmetic on the way
        ("3*4=12,12+5=18", False),
        ("3*4=12", False),  # 5 is left over, and so is the target
        ("3+4=7,5+12=17", False),
        ("5-3=2,2+4=6", False),
        ("3*4=12,4+5=9,12+9=21", False),
        ("3*4=12, 12+5=17", True),  # white space around a step
        ("3*4=12;12+5=17", False),
        ("3 * 4=12,12+5=17", False),
        ("", False),
        ("1e9+3=17", False),
    ],
)
def test_under_all_a_try_must_end_in_the_target_with_nothing_left(line: str, solves: bool) -> None:
    assert search(ALL, f"<think>{line}\n</think>").successes == solves


@pytest.mark.parametrize(
    ("numbers", "line", "solves"),
    [
        ((3, 4, 5), "3*4=12", True),  # 5 may stay
        ((3, 4, 5), "3*4=12,12+5=17", False),  # beyond the target
        ((3, 4, 5), "4+5=9,9+3=12", True),
        ((6, 4, 5), "6+6=12", False),  # 6 is there once
        ((6, 6, 5), "6+6=12", True),
        ((2, 4, 5), "2*4=8,8+4=12", False),  # 4 is spent
        ((2, 2, 8), "2+2=4,4+8=12", True),  # a result is used like a number
    ],
)
def test_under_subset_numbers_may_stay_and_none_may_be_used_again(
    numbers: tuple[int, ...], line: str, solves: bool
) -> None:
    assert search(Countdown(numbers, 12, "subset"), line).successes == solves


def test_tries_are_the_lines_before_the_end_of_thinking() -> None:
    text = "<think>3+4=7,7+5=12\n\n3*4=12,12+5=17\n5*4=20,20-3=17\n</think>\n<answer>3*4+5</answer>"
    assert search(ALL, text) == Search(tries=3, successes=2)
    assert search(ALL, "3*4=12,12+5=17\n3*4=1") == Search(tries=2, successes=1, at_once=True)  # cut off
    assert search(ALL, "<think></think>3*4=12,12+5=17") == Search(tries=0, successes=0)


def test_success_is_per_try_and_not_per_completion() -> None:
    # 3 tries with 1 success, and 1 try with 1: (1 + 1) / (3 + 1), where the mean of the two shares is 2/3.
    statistics = search_statistics([Search(3, 1), Search(1, 1, at_once=True)])
    assert statistics == {"tries_per_completion": 2.0, "success_per_try": 0.5, "success_of_first_try": 0.5}
    assert search_statistics([Search(0, 0)]) == {}  # prose, or another model's way of searching
