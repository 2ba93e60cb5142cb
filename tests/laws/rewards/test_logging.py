"""`trainer_state`, `log_extra` and `log_metric`: what a function is told of the run, and says beside its scores."""

import asyncio
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from posttrain.errors import RunError
from posttrain.options.reward import GradingOptions
from posttrain.records import Grades
from posttrain.rewards.grading.function import ScoringFailure, TrainerState, reward_function, with_distinct_names
from posttrain.rewards.grading.grade import grade
from posttrain.rewards.grading.resources import Resources
from posttrain.runs.run_folder import RunFolder
from posttrain.training.metrics import logged_metrics
from tests.support.refusals import refused
from tests.support.reward_rows import graded, group
from tests.support.worker_rows import function_of

nan = math.nan
SOURCE = """
import asyncio

def listed(completions, log_extra, log_metric, trainer_state):
    log_extra("words", [len(text.split()) for text in completions])
    log_metric("length", sum(map(len, completions)) / len(completions))
    log_metric("step", trainer_state.global_step)
    return [float(len(text)) for text in completions]

async def later(completions, **given):
    await asyncio.sleep(0)
    return listed(completions, given["log_extra"], given["log_metric"], given["trainer_state"])

def one(response, log_extra, log_metric, trainer_state):
    log_extra("words", [len(response.split())])
    log_metric("length", len(response))
    log_metric("step", trainer_state.global_step)
    return float(len(response))

class Judge:
    async def __call__(self, completions, log_extra, log_metric, trainer_state):
        return await later(completions, log_extra=log_extra, log_metric=log_metric, trainer_state=trainer_state)

judge = Judge()

def short(completions, log_extra):
    log_extra("n", [1] * (len(completions) + 1))
    return [0.0 for _ in completions]

def caught(completions, log_metric):
    try:
        log_metric("n", "many")
    except Exception:
        pass
    return [0.0 for _ in completions]
"""


def mean_of(grades: Grades, name: str) -> float:
    return logged_metrics(grades.logged)[f"logged/{grades.names[0]}/{name}"]


def logging(log: Callable[[Any, Any], object]) -> Callable[..., list[float]]:
    """A function that logs and says 0."""

    def mine(completions: list[str], log_extra: Any, log_metric: Any) -> list[float]:
        log(log_extra, log_metric)
        return [0.0 for _ in completions]

    return mine


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", ["listed", "later", "one", "judge"])
def test_what_a_function_logs_is_the_same_however_it_is_called(tmp_path: Path, name: str, workers: int) -> None:
    function = function_of(tmp_path, SOURCE, name, workers=workers)
    groups = [group(["a", "b c"]), group(["d e f", ""])]
    grades = grade(groups, [function], step=7)
    assert grades.extras == {name: (({"words": 1}, {"words": 2}), ({"words": 3}, {"words": 0}))}
    assert mean_of(grades, "length") == (1 + 3 + 5 + 0) / 4
    assert mean_of(grades, "step") == 6  # finished, while completions of step 7 are scored


def test_a_state_of_the_run_is_handed_on_as_it_is() -> None:
    told: list[object] = []
    state = TrainerState(global_step=3, max_steps=9, epoch=0.5)
    graded([group(["a"])], lambda response, trainer_state: told.append(trainer_state), trainer_state=state, step=99)
    assert told == [state]


def test_what_a_call_logged_that_failed_is_gone_with_it_and_nothing_counts_twice() -> None:
    tries = []

    def flaky(completions: list[str], log_extra: Any, log_metric: Any) -> list[object]:
        tries.append(completions)
        log_extra("try", [len(tries)] * len(completions))
        log_metric("try", len(tries))
        if len(tries) == 1:
            raise ScoringFailure("error 500")  # the whole call
        return [ScoringFailure("busy") if text == "late" and len(tries) == 2 else 1.0 for text in completions]

    grades = graded([group(["a", "b", "late"])], flaky, grading=GradingOptions(max_failure_share=1.0))
    assert tries == [["a", "b", "late"], ["a", "b", "late"], ["late"]]
    assert [extra["try"] for extra in grades.extras["flaky"][0] if extra] == [2, 2, 3]
    assert mean_of(grades, "try") == pytest.approx((2 + 2 + 3) / 3)


def test_of_a_call_that_is_made_again_in_halves_each_half_s_own_log_stays() -> None:
    def breaks(completions: list[str], log_metric: Any) -> list[float]:
        log_metric("n", len(completions))
        return [1 / len(text) for text in completions]

    grades = graded([group(["a", "bb", "", "cc"])], breaks, on_error="none")
    # All 4 raise, and so do the last 2, who are asked one by one: 2 rows of a call of two, and 1 of a call of its own.
    assert [told and told["n"] for told in grades.logged["breaks"][0]] == [2, 2, None, 1]


def test_of_two_values_under_one_name_the_call_has_their_mean_and_nan_says_nothing() -> None:
    values = {"mixed": (1.0, torch.tensor(4.0), np.float32(nan), True), "unknown": (nan,), "endless": (math.inf,)}
    mine = logging(lambda _, metric: [metric(name, each) for name, some in values.items() for each in some])
    metrics = logged_metrics(graded([group(["a", "b"])], mine).logged)
    assert metrics == {"logged/mine/mixed": 2.0, "logged/mine/endless": math.inf}


def test_a_mean_of_equal_numbers_is_that_number_and_names_of_others_stay_apart() -> None:
    def log(extra: Any, metric: Any) -> None:
        metric("reward", 0.1)
        metric("step_time", 0.1)
        extra("reward", ["x", "y", "z"])

    grades = graded([group(["a", "b", "c"])], logging(log))
    assert logged_metrics(grades.logged) == {"logged/mine/reward": 0.1, "logged/mine/step_time": 0.1}
    assert grades.rewards.tolist() == [[0, 0, 0]]


def test_a_column_of_the_rows_with_such_a_name_gives_way() -> None:
    def named(completions: list[str], log_metric: Any, trainer_state: Any) -> list[float]:
        log_metric("n", trainer_state.global_step)
        return [0.0 for _ in completions]

    columns = {"log_metric": "mine", "trainer_state": "mine", "log_extra": 1}
    assert mean_of(graded([group(["a"], columns=columns)], named), "n") == 0


class Unreadable:
    def __iter__(self) -> Iterator[object]:
        raise ValueError("no")


ENDLESS: list[object] = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize(
    ("log", "says"),
    [
        (lambda extra, _: extra("n", [1]), "log_extra of 'n' … 1 values for the 2 completions"),
        (lambda extra, _: extra("n", "ab"), "got 'ab' (str); give a list"),
        (lambda extra, _: extra("n", {1, 2}), "give a list with one value"),
        (lambda extra, _: extra("n", 3), "give a list with one value"),
        (lambda extra, _: extra("n", Unreadable()), "value cannot be read"),
        (lambda extra, _: extra("n", [object(), 1]), "cannot be written … numbers, texts"),
        (lambda extra, _: extra("n", [b"x", 1]), "cannot be written"),
        (lambda extra, _: extra("n", [{1: 2}, 1]), "keys must be texts"),
        (lambda extra, _: extra("n", [ENDLESS, 1]), "cannot be written"),
        (lambda extra, _: extra("n", [10**5000, 1]), "cannot be written"),
        (lambda extra, _: [extra("n", [1, 2]), extra("n", [1, 2])], "called twice in one call"),
        (lambda extra, _: extra("", [1, 2]), "must be a name"),
        (lambda extra, _: extra(7, [1, 2]), "must be a name"),
        (lambda _, metric: metric("a\nb", 1), "must be a name"),
        (lambda _, metric: metric("n", "1"), "got '1' (str); give a number, or NaN"),
        (lambda _, metric: metric("n", None), "give a number, or NaN"),
        (lambda _, metric: metric("n", [1.0]), "give a number, or NaN"),
        (lambda _, metric: metric("n", torch.ones(2)), "give a number, or NaN"),
    ],
)
@pytest.mark.parametrize("on_error", ["stop", "none"])
def test_what_cannot_be_logged_ends_the_run_and_blames_no_completion(log: Any, says: str, on_error: Any) -> None:
    with refused("reward 'mine': ", says, error=RunError) as told:
        graded([group(["a", "b"])], logging(log), on_error=on_error)
    assert "sample" not in str(told.value)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_mistake_is_told_from_a_worker_and_where_the_function_catches_it(tmp_path: Path, workers: int) -> None:
    for name, says in (("short", "got 2 values for the 1 completions"), ("caught", "got 'many' (str)")):
        function = function_of(tmp_path, SOURCE, name, workers=workers)
        with refused(f"reward '{name}': ", says, error=RunError):
            grade([group(["a"])], [function])


def test_nothing_is_taken_once_the_call_is_over() -> None:
    kept: list[Any] = []
    graded([group(["a"])], logging(lambda _, metric: kept.append(metric)))
    with refused("after its call had returned", error=RunError):
        kept[0]("n", 1)


def test_what_an_async_function_logs_after_its_deadline_is_not_kept() -> None:
    async def slow(completions: list[str], log_metric: Any) -> list[float]:
        log_metric("n", 1)
        await asyncio.sleep(9)
        return [0.0 for _ in completions]

    function = reward_function(slow, item_seconds=0.01)
    grades = grade([group(["a"])], [function], grading=GradingOptions(max_failure_share=1.0))
    assert (grades.num_failures, grades.logged) == (1, {})


def test_a_remembered_score_brings_what_was_logged_of_its_completion(tmp_path: Path) -> None:
    source = SOURCE + "\ndef kept(response, log_extra):\n    log_extra('n', [len(response)])\n    return 1.0\n"
    function = function_of(tmp_path, source, "kept", cache=True)
    grading = GradingOptions(cache_file=str(tmp_path / "cache"))
    told = []
    for _ in range(2):  # the second time from the file
        with Resources() as resources:
            told.append(grade([group(["bb", "a", "a"])], [function], grading=grading, resources=resources))
    assert [grades.num_cached for grades in told] == [1, 3]
    assert told[0].extras == told[1].extras == {"kept": (({"n": 2}, {"n": 1}, {"n": 1}),)}


@pytest.mark.parametrize("name", ["log_metric", "trainer_state"])
def test_a_remembered_score_may_hang_on_no_step_and_no_call(tmp_path: Path, name: str) -> None:
    source = f"def mine(completions, {name}):\n    return [1.0 for _ in completions]\n"
    with refused(f"needs an argument '{name}'", "remove `cache`"):
        grade([group(["a"])], [function_of(tmp_path, source, cache=True)])
    source = f"def mine(completions, {name}=None, **more):\n    return [float({name} is None) for _ in completions]\n"
    assert grade([group(["a"])], [function_of(tmp_path, source, cache=True)]).rewards.tolist() == [[1.0]]


def test_it_is_in_the_journal_and_in_the_rollout_file_in_the_order_of_completions(tmp_path: Path) -> None:
    extras: dict[str, list[object]] = {
        "whole": [1, 2, 3, None],
        "real": [0.5, nan, 2, math.inf],
        "text": ["a", "b\ud800", None, ""],
        "mixed": [1, "x", [True, nan], {"k": 2}],
        "large": [2**70, 1, 0.5, None],
        "truth": [True, False, None, True],
    }

    def log(extra: Any, metric: Any) -> None:
        for name, values in extras.items():
            extra(name, values)
        metric("n", -math.inf)

    groups = [group(["a", "b"], id="p"), group(["c", "d"], id="q")]
    grades = graded(groups, logging(log))
    with RunFolder.claim(tmp_path / "run") as folder:
        folder.begin("")
        folder.journal_scores(1, groups, grades)
        file = folder.write_rollouts(1, groups, grades, torch.zeros(2, 2, dtype=torch.float64))
        (first, second) = map(json.loads, (folder.path / "scores.jsonl").read_text().splitlines())
    assert [each["whole"] for each in first["extra"]["mine"] + second["extra"]["mine"]] == [1, 2, 3, None]
    assert first["extra"]["mine"][1] | {"large": 0} == {
        "whole": 2, "real": None, "text": "b\ud800", "mixed": "x", "large": 0, "truth": False
    }  # fmt: skip
    assert second["logged"] == {"mine": [{"n": None}, {"n": None}]}
    columns = pq.read_table(file).to_pydict()
    read = {name.removeprefix("extra/mine/"): values for name, values in columns.items() if name.startswith("extra/")}
    written = {"real": [0.5, None, 2.0, None], "text": ["a", "b?", None, ""]}
    written |= {"mixed": ["1", '"x"', "[true, null]", '{"k": 2}'], "large": [str(2**70), "1", "0.5", None]}
    assert read == extras | written


def test_what_was_logged_follows_its_groups() -> None:
    def mine(completions: list[str], log_extra: Any, log_metric: Any) -> list[float]:
        log_extra("text", completions)
        log_metric("n", len(completions))
        return [0.0 for _ in completions]

    functions = mine, lambda response: 0.0
    first, second = graded([group(["a"]), group(["b"])], *functions), graded([group(["c"])], *functions)
    joined = first.select([1]).joined(second)
    assert joined.extras == {"mine": (({"text": "b"},), ({"text": "c"},))}
    assert mean_of(joined, "n") == 1.5


def named(*names: str) -> list[str]:
    functions = [reward_function(lambda completions: [0.0], name=name) for name in names]
    return [each.name for each in with_distinct_names(functions)]


def test_functions_of_one_name_are_told_apart_and_others_keep_theirs() -> None:
    assert named("solved", "solved", "solved") == ["solved", "solved_2", "solved_3"]
    assert named("solved", "solved", "solved_2", "a") == ["solved", "solved_3", "solved_2", "a"]
    assert named("a", "a_2", "a", "a_2") == ["a", "a_2", "a_3", "a_2_2"]
    assert named(*named("a", "a", "a_2", "a_2")) == named("a", "a", "a_2", "a_2")


def test_a_gate_means_the_first_of_a_name_unless_it_says_which() -> None:
    def of(value: float, **settings: Any) -> Any:
        return reward_function(lambda completions: [value for _ in completions], name="f", **settings)

    last = reward_function(lambda completions: [9.0], name="last", gate="f_2")
    grades = grade([group(["a"])], [of(0.0), of(1.0), of(5.0, gate="f"), last])
    assert grades.names == ("f", "f_2", "f_3", "last")
    assert grades.scores.flatten().tolist() == [0, 1, 0, 9]  # the third waits for the first, which is 0


def test_two_lambdas_are_two_rewards() -> None:
    grades = graded([group(["a"])], lambda completions: [1.0], lambda completions: [2.0])
    assert grades.names == ("<lambda>", "<lambda>_2")
    assert grades.rewards.tolist() == [[3.0]]
