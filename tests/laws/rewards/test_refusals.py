"""Rewards and grading options that are refused: each message names the option, its value and the remedy."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest

from posttrain.options.reward import GradingOptions, RewardOptions, RewardTerms
from posttrain.rewards.grading.function import reward_function
from posttrain.rewards.grading.grade import grade
from posttrain.rewards.reward_registry import load_reward
from tests.support.refusals import refused
from tests.support.reward_rows import graded, group


def length(completions, **_):
    return [float(len(text)) for text in completions]


def says_yes(completions, **_):
    return [float("yes" in text) for text in completions]


def shadowed(completions: list[str]) -> list[float]:
    return [0.0 for _ in completions]


hidden = shadowed


def shadowed(completions: list[str]) -> list[float]:  # type: ignore[no-redef]
    return [1.0 for _ in completions]


def local() -> Callable[[list[str]], list[float]]:
    def inner(completions: list[str]) -> list[float]:
        return [1.0 for _ in completions]

    return inner


class Judge:
    def __call__(self, completions: list[str]) -> list[float]:
        return [1.0 for _ in completions]

    def method(self, completions: list[str]) -> list[float]:
        return self(completions)


NAMELESS = [lambda completions: [1.0], local(), Judge(), Judge().method, functools.partial(shadowed), hidden]
"""No name in a module leads to these."""


def scored(*functions: Any, grading: GradingOptions | None = None, **columns: object) -> Callable[[], object]:
    return lambda: grade([group(["a", "b"], columns=columns)], functions, grading=grading or GradingOptions())


def made(call: Any, **settings: Any) -> Callable[[], object]:
    return lambda: reward_function(call, **settings)


def item(**options: Any) -> Callable[[], object]:
    return lambda: RewardOptions(**options)


REFUSED: list[tuple[Callable[[], object], list[str]]] = [
    # What a function needs to be called.
    (lambda: graded([group(["a"])]), ["rewards", "rewards=[...]"]),
    (scored(reward_function(lambda completions, answers: [1]), answer=1), ["'answers'", "'answer'"]),
    (scored(reward_function(lambda response, ground_truth: 1)), ["'ground_truth'", "`ground_truth` or `answer`"]),
    (scored(reward_function(lambda completions, ground_truth: [1])), ["add a column `ground_truth`"]),
    (scored(reward_function(lambda completions, ground_truth: [1]), answer=1), ["call the parameter `answer`"]),
    (lambda: graded([group(["x"], id="a"), group(["x", "y"], id="b")], length), ["'b' has 2", "'a' 1"]),
    (scored(reward_function(lambda completions, /: [1])), ["'completions'", "`/`"]),
    (made(dict), ["'dict'", "__call__", "instance"]),
    (made(len, weight=math.nan), ["weight", "nan", "finite"]),
    (made(length, gaet="says_yes"), ["'length'", "gaet", "`gate`"]),
    (made(length, clip=1.0), ["'length'", "clip = 1.0", "list"]),
    (made(length, where={"kind": object}), ["plain data"]),
    # Rewards that wait for others.
    (scored(reward_function(length, gate="nobody")), ["'length'", "'nobody'", "weight 0"]),
    (scored(reward_function(length, of="length")), ["length", "each other"]),
    (
        scored(reward_function(length, of="says_yes"), reward_function(says_yes, gate="length")),
        ["length", "says_yes", "each other"],
    ),
    *[
        (scored(reward_function(length, gate=f"z{number}", of=f"a{number}")), [f"'a{number}'"])  # the first by name
        for number in range(16)
    ],
    # Limits that nothing could enforce, and names that nothing could load.
    (scored(reward_function(length, item_seconds=1.0)), ["item_seconds = 1", "'length'", "`workers: 1`"]),
    (scored(reward_function(length, seconds=60.0)), ["seconds = 60", "'length'", "`workers: 1`"]),
    (
        scored(reward_function(length), grading=GradingOptions(seconds=60.0)),
        ["grading.seconds = 60", "'length'", "`workers: 1`"],
    ),
    *[
        (scored(reward_function(call, name="r", **{option: True if option == "cache" else 1})), ["'r'", "FILE.py:FUNC"])
        for option in ("workers", "cache")
        for call in NAMELESS
    ],
    # Options that contradict each other, or are of another kind of reward.
    (lambda: GradingOptions(cache_entries=0, cache_file="scores.db"), ["cache_file = scores.db", "cache_entries = 0"]),
    (item(path="mine.py:mine", item_seconds=3.0, seconds=2.0), ["item_seconds = 3.0", "seconds = 2.0"]),
    (item(name="code", workers=1), ["workers = 1", "path"]),
    (item(name="code", cache=True), ["cache", "path"]),
    (item(model="a/rm", workers=2), ["workers = 2", "path"]),
    (item(model="rm", path="mine.py:f"), ["name", "path"]),
    (item(name="maths", label=1), ["label = 1", "model"]),
    (item(path="mine.py:f", dtype="bfloat16"), ["dtype = bfloat16", "f"]),
    (item(model="a/rm", options={"a": 1}), ["options", "a/rm"]),
    *[(item(name=name), [name, "path"]) for name in ("how polite", "mine.py:solved", "1st")],
    (lambda: RewardTerms(clip=(1.0, 0.0)), ["clip"]),
    (lambda: RewardTerms(clip=(1.0, 1.0)), ["clip"]),
    (lambda: RewardTerms(clip=(0.0, math.inf)), ["clip"]),
    (lambda: RewardTerms(weight_to=1.0), ["weight_to", "over_steps"]),
    (lambda: RewardTerms(over_steps=3), ["over_steps", "weight_to"]),
    (lambda: RewardTerms(weight_to=math.nan, over_steps=2), ["weight_to", "nan"]),
]


@pytest.mark.parametrize(
    ("attempt", "names"), REFUSED, ids=lambda value: "-".join(value)[:40] if isinstance(value, list) else ""
)
def test_what_cannot_work_is_refused_with_the_option_its_value_and_the_remedy(attempt, names) -> None:
    with refused(*names):
        attempt()


@pytest.mark.parametrize("settings", [{"item_seconds": 9.0}, {"seconds": 60.0}])
def test_an_async_function_keeps_the_limits_that_a_plain_one_could_not(settings: dict[str, float]) -> None:
    async def later(completions: list[str]) -> list[float]:
        return [1.0 for _ in completions]

    limit = GradingOptions(seconds=60.0)
    assert grade([group(["a"])], [reward_function(later, **settings)], grading=limit).scores.item() == 1.0


def test_rewards_of_this_package_need_no_workers() -> None:
    assert load_reward(RewardOptions(name="code")).bounded
