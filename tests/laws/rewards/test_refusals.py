"""Rewards and options that are refused, and rows that no reward applies to: each is named with its remedy."""

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from posttrain.errors import RunError
from posttrain.options.reward import GradingOptions, RewardOptions, RewardTerms
from posttrain.records import Grades
from posttrain.rewards.grading.dispatch import UnscoredRows, require_rewarded_rows
from posttrain.rewards.grading.function import RewardFunction, ScoringFailure, reward_function
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


def of(name: str, **settings: Any) -> RewardFunction:
    return reward_function(lambda completions: [1.0 for _ in completions], name=name, **settings)


ROWS: list[tuple[str, dict[str, object]]] = [
    ("rows.jsonl:1", {"kind": "code"}),
    ("rows.jsonl:2", {"kind": "maths"}),
    ("rows.jsonl:3", {"kind": "poetry"}),
    ("rows.jsonl:4", {}),
]


def test_the_first_row_that_every_where_leaves_out_is_named_with_what_it_has() -> None:
    apart = [of("code", where={"kind": "code"}), of("maths", where={"kind": "maths"})]
    with refused(
        "rows.jsonl:3: ", "1 others", "code is for kind = 'code'", "has 'poetry'; maths is for kind = 'maths'"
    ):
        require_rewarded_rows(ROWS, apart)
    require_rewarded_rows(ROWS[:2], apart)
    require_rewarded_rows(ROWS, [*apart, of("shape", weight=0.1)])  # for all rows
    with refused("rows.jsonl:4: ", "no such column"):
        require_rewarded_rows(ROWS[3:], apart)


def test_a_reward_without_weight_pays_for_no_row_and_one_behind_a_gate_only_where_the_gate_is() -> None:
    seen = of("seen", weight=0.0)
    with refused("rows.jsonl:2: "):
        require_rewarded_rows(ROWS, [seen, of("code", where={"kind": "code"})])
    rises = of("rises", weight=0.0, weight_to=1.0, over_steps=9)  # which counts later, in every row
    require_rewarded_rows(ROWS, [rises, of("code", where={"kind": "code"})])
    require_rewarded_rows(ROWS, [seen])  # nothing is trained on, as was asked for
    behind = [of("last", gate="code"), of("code", weight=0.0, where={"kind": "code"})]
    with refused("rows.jsonl:2: ", "last waits for its gate code."):
        require_rewarded_rows(ROWS, behind)


def none_of(completions: list[str], kind: list[str]) -> list[float | None]:
    return [1.0 if text == of == "code" else None for text, of in zip(completions, kind, strict=True)]


def told(groups: list[Any], grades: Grades, watch: UnscoredRows) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watch.look_at(groups, grades)
    return [str(each.message) for each in caught]


def test_a_prompt_of_which_every_function_says_none_is_named_once() -> None:
    groups = [
        group(["code", "x"], id="f:1", columns={"kind": "code"}),
        group(["a", "b"], id="f:2", columns={"kind": "?"}),
    ]
    grades = graded(groups, none_of)
    watch = UnscoredRows("warn")
    (said,) = told(groups, grades, watch)
    assert said.startswith("prompt f:2: no reward applies: none_of returned None for all 2 completions")
    assert told(groups, grades, watch) == []
    with refused("prompt f:2: ", "grading.on_unscored_row = warn", error=RunError):
        UnscoredRows("stop").look_at(groups, grades)


def test_after_a_few_rows_it_is_quiet() -> None:
    groups = [group(["a"], id=f"f:{i}", columns={"kind": "?"}) for i in range(9)]
    said = told(groups, graded(groups, none_of), UnscoredRows("warn"))
    assert [each.split(":")[1] for each in said] == ["0", "1", "2", "3", "4"]
    assert said[-1].endswith("Further rows like it are not named.")


def test_a_failure_of_scoring_and_rewards_without_weight_are_no_row_s_fault() -> None:
    groups = [group(["a"], id="f:1", columns={"kind": "?"})]
    lost = reward_function(lambda response: ScoringFailure("error 500"), name="lost")
    failed = grade(groups, [lost], grading=GradingOptions(max_failure_share=1.0))
    idle = grade(groups, [reward_function(none_of, weight=0.0)])
    for grades in (failed, idle):
        assert grades.rewards.isnan().all()
        UnscoredRows("stop").look_at(groups, grades)
    with refused("none_of", error=RunError):  # of a reported one nothing is expected
        UnscoredRows("stop").look_at(groups, grade(groups, [reward_function(none_of), of("seen", weight=0.0)]))
