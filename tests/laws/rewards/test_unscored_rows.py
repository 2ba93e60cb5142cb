"""In a mixture every row has a reward that applies to it, or is named: before training where the recipe decides it."""

import warnings
from typing import Any

from posttrain.errors import RunError
from posttrain.options.reward import GradingOptions
from posttrain.records import Grades
from posttrain.rewards.grading.dispatch import UnscoredRows, require_rewarded_rows
from posttrain.rewards.grading.function import RewardFunction, ScoringFailure, reward_function
from posttrain.rewards.grading.grade import grade
from tests.support.refusals import refused
from tests.support.reward_rows import graded, group


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
