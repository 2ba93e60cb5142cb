"""Nothing is asked twice, nothing that went wrong is remembered, and no file makes a score out of nothing."""

import contextlib
import math
import sqlite3
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from posttrain.errors import RunError
from posttrain.options.reward import GradingOptions, RewardOptions
from posttrain.options.sandbox import SandboxOptions
from posttrain.records import Finish, Grades, Group
from posttrain.rewards.code.code_reward import CodeReward
from posttrain.rewards.grading import resources as cache
from posttrain.rewards.grading.answers import Score
from posttrain.rewards.grading.function import RewardFunction, may_be_cached
from posttrain.rewards.grading.grade import grade, reward_function
from posttrain.rewards.grading.resources import Cache, default_resources
from posttrain.rewards.judge_reward import JudgeReward
from posttrain.rewards.math_reward import MathsReward
from posttrain.rewards.reward_registry import load_reward
from tests.support.refusals import refused
from tests.support.reward_rows import CHAT, group
from tests.support.sequences import resampled
from tests.support.worker_rows import function_of

# What was asked is in ASKED of the function's module, which lives in the test's own process.
SOURCE = """
from posttrain.rewards.grading.function import ScoringFailure
from posttrain.rewards.grading.answers import Graded
from enum import StrEnum

class How(StrEnum):
    FINE = "fine"

ASKED = []

def one(response, answer=None, base=None, finish_reason=None, prompt=None):
    ASKED.append(response)
    if response == "none":
        return None
    return ScoringFailure("error 500") if response == "fail" else Graded(0.1 * len(response), How.FINE)

def many(completions, **columns):
    ASKED.extend(completions)
    return [0.1 * len(text) for text in completions]

def bare(completions):
    ASKED.extend(completions)
    return [1.0 for text in completions]

def raises(response):
    ASKED.append(response)
    return 1 / 0
"""


def asked(function: RewardFunction) -> list[str]:
    """What the function was asked since this was last looked at."""
    seen: list[str] = function.call.__globals__["ASKED"]
    said = list(seen)
    seen.clear()
    return said


@pytest.mark.parametrize("name", ["one", "many"])
def test_a_completion_is_asked_about_once_in_a_batch_and_never_again(tmp_path: Path, name: str) -> None:
    function = function_of(tmp_path, SOURCE, name, cache=True)
    groups = [alike(["a", "bb", "a"]), alike(["ccc", "bb", "a"])]
    first = grade(groups, [function])
    assert asked(function) == ["a", "bb", "ccc"]
    assert first.num_cached == 3
    second = grade(groups, [function])
    assert asked(function) == []
    assert second.num_cached == 6
    assert second.scores.tolist() == first.scores.tolist() == [[[0.1, 0.2, 0.1], [0.1 * 3, 0.2, 0.1]]]
    assert second.outcomes == first.outcomes


def alike(texts: Sequence[str], **given: Any) -> Group:
    """A group whose rollouts differ in their text alone."""
    made = group(texts, **given)
    rollouts = (resampled(rollout, finish=Finish.STOP, tokens=(1, 2)) for rollout in made.rollouts)
    return replace(made, rollouts=tuple(rollouts))


def test_without_the_promise_or_with_no_room_nothing_is_remembered(tmp_path: Path) -> None:
    groups = [alike(["a", "a"])]
    for options, grading in (({}, GradingOptions()), ({"cache": True}, GradingOptions(cache_entries=0))):
        function = function_of(tmp_path, SOURCE, "one", **options)
        for _ in range(2):
            assert grade(groups, [function], grading=grading).num_cached == 0
        assert asked(function) == ["a"] * 4


DIFFERENT = {
    "text": lambda each: replace(each, rollouts=(replace(each.rollouts[0], text="b"),)),
    "finish": lambda each: replace(each, rollouts=(resampled(each.rollouts[0], finish=Finish.LENGTH),)),
    "prompt": lambda each: replace(each, prompt=replace(each.prompt, text="2 + 2?")),
    "messages": lambda each: replace(each, prompt=replace(each.prompt, messages=CHAT)),
    "prefill": lambda each: replace(each, prompt=replace(each.prompt, prefill="1 + 1?")),
    "column": lambda each: replace(each, prompt=replace(each.prompt, columns={"answer": 2})),
    "type of a column": lambda each: replace(each, prompt=replace(each.prompt, columns={"answer": 1.0})),
    "bool for a number": lambda each: replace(each, prompt=replace(each.prompt, columns={"answer": True})),
    "missing column": lambda each: replace(each, prompt=replace(each.prompt, columns={})),
}


@pytest.mark.parametrize("what", DIFFERENT)
@pytest.mark.parametrize("name", ["one", "many"])
def test_whatever_a_function_is_told_tells_rows_apart(tmp_path: Path, name: str, what: str) -> None:
    function = function_of(tmp_path, SOURCE, name, cache=True)
    row = alike(["a"], columns={"answer": 1})
    grade([row], [function])
    asked(function)
    assert grade([row], [function]).num_cached == 1
    assert grade([DIFFERENT[what](row)], [function]).num_cached == 0
    assert len(asked(function)) == 1


def test_what_a_function_is_not_told_tells_no_rows_apart(tmp_path: Path) -> None:
    row = alike(["a"], columns={"answer": 1})
    others = replace(row, prompt=replace(row.prompt, columns={"answer": 2, "more": 3}))
    retokenised = replace(row, rollouts=(resampled(row.rollouts[0], tokens=(7,)),))
    bare = function_of(tmp_path, SOURCE, "bare", cache=True)
    grade([row], [bare])
    assert grade([others], [bare]).num_cached == grade([retokenised], [bare]).num_cached == 1
    # One that takes everything is told the token ids too.
    many = function_of(tmp_path, SOURCE, "many", cache=True)
    grade([row], [many])
    assert grade([retokenised], [many]).num_cached == 0


def test_another_rewards_score_that_a_function_looks_at_tells_rows_apart(tmp_path: Path) -> None:
    function = function_of(tmp_path, SOURCE, "one", cache=True, of="length")
    row = alike(["a"])
    for value, known in ((1.0, 0), (2.0, 0), (1.0, 1)):
        other = reward_function(lambda completions, value=value: [value for _ in completions], name="length")
        assert grade([row], [function, other]).num_cached == known


def test_failures_and_mistakes_are_asked_about_again_and_none_is_remembered(tmp_path: Path) -> None:
    function = function_of(tmp_path, SOURCE, "one", cache=True)
    groups = [alike(["fail", "none", "fail"])]
    grading = GradingOptions(max_failure_share=1.0)
    first = grade(groups, [function], grading=grading)
    assert asked(function) == ["fail", "none", "fail", "fail"]  # the equal one shares the fate of the first
    assert (first.num_failures, first.num_cached) == (2, 1)
    second = grade(groups, [function], grading=grading)
    assert asked(function) == ["fail"] * 3
    assert second.scores.isnan().all()
    raises = function_of(tmp_path, SOURCE, "raises", cache=True)
    for _ in range(2):
        assert grade(groups, [raises], on_error="none", grading=grading).num_failures == 3
        assert asked(raises) == ["fail", "none"]


def test_a_changed_file_another_function_and_other_options_have_scores_of_their_own(tmp_path: Path) -> None:
    row = [alike(["a"], columns={"answer": "a"})]
    grade(row, [function_of(tmp_path, SOURCE, "many", cache=True)])
    assert grade(row, [function_of(tmp_path, SOURCE, "bare", cache=True)]).num_cached == 0
    changed = function_of(tmp_path, SOURCE.replace("0.1", "0.7"), "many", cache=True)
    grades = grade(row, [changed])
    assert (grades.num_cached, grades.scores.item()) == (0, 0.7)
    maths = [load_reward(RewardOptions(name="maths", options=options)) for options in ({}, {"symbolic": False})]
    numbers = [alike(["3"], columns={"answer": "3"})]
    assert [grade(numbers, [each]).num_cached for each in (*maths, *maths)] == [0, 0, 1, 1]


def test_workers_are_not_asked_about_what_is_known(tmp_path: Path) -> None:
    function = function_of(tmp_path, SOURCE, "one", cache=True, workers=1)
    groups = [alike(["a", "bb", "a"])]
    first = grade(groups, [function])
    default_resources().pool_for(function).close()
    (tmp_path / "my_rewards.py").unlink()  # no worker could be started now
    assert grade(groups, [function]).scores.tolist() == first.scores.tolist()


def test_which_rewards_may_be_remembered() -> None:
    judge = {"endpoint": "http://127.0.0.1:9/v1", "model": "j"}
    named = {name: load_reward(RewardOptions(name=name)) for name in ("code", "maths", "countdown", "graded_format")}
    assert {name: may_be_cached(function) for name, function in named.items()} == {
        "code": True,
        "maths": True,
        "countdown": False,  # quicker than a look into the cache
        "graded_format": False,
    }
    for compare, remembered in (("rubric", True), ("pairs", False)):
        function = load_reward(RewardOptions(name="judge", options=judge | {"compare": compare}))
        assert may_be_cached(function) is remembered
    told_apart = [CodeReward(), MathsReward(), JudgeReward(**judge), JudgeReward(**judge, rubric="Is it short?")]
    assert len({tuple(cache.identity(reward_function(each), SandboxOptions())) for each in told_apart}) == 4


@dataclass(frozen=True)
class Unsure:
    """A reward of our own kind whose rows hold what cannot be compared."""

    rows_stand_alone: ClassVar[bool] = True

    def __call__(self, completions: list[str], when: Any) -> list[float]:
        return [1.0 for _ in completions]


def test_rows_that_cannot_be_compared_are_asked_about_or_named_where_a_recipe_wants_them_remembered(tmp_path) -> None:
    groups = [group(["a", "a"], columns={"when": {1}})]
    for _ in range(2):
        assert grade(groups, [reward_function(Unsure())]).num_cached == 0
    with refused("'many'", "'when'", "`cache`"):
        grade(groups, [function_of(tmp_path, SOURCE, "many", cache=True)])


def test_a_cache_that_fails_keeps_no_score_from_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "LOCK_SECONDS", 0.1)
    grading = GradingOptions(cache_file=str(tmp_path / "scores.db"))
    function = function_of(tmp_path, SOURCE, "one", cache=True)
    grade([alike(["a"])], [function], grading=grading)
    holder = sqlite3.connect(tmp_path / "scores.db", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")  # others may read
    seen: list[Any] = []

    def journal(groups: object, grades: Grades) -> None:
        seen.append(grades.scores.item())

    with refused("another process", error=RunError):
        grade([alike(["bb"])], [function], grading=grading, journal=journal)
    assert seen == [0.2]
    holder.close()


def test_a_file_is_shared_from_run_to_run_and_side_by_side(tmp_path: Path) -> None:
    function = function_of(tmp_path, SOURCE, "one", cache=True)
    grading = GradingOptions(cache_file=str(tmp_path / "scores.db"))
    groups = [alike(["a", "none", "bb"])]
    beside = Cache(100, str(tmp_path / "scores.db"))  # another run has it open at the same time
    for _ in range(2):
        grades = grade(groups, [function], grading=grading)
        assert grades.scores.nan_to_num(-7.0).tolist() == [[[0.1, -7.0, 0.2]]]
        default_resources().close()
    assert grades.num_cached == 3
    beside.remember({b"k": Score(0.5, "x")})
    assert Cache(100, str(tmp_path / "scores.db")).known([b"k", b"l"]) == {b"k": Score(0.5, "x")}
    beside.close()


def test_the_oldest_scores_are_forgotten_first(tmp_path: Path) -> None:
    for file in ("", str(tmp_path / "scores.db")):
        few = Cache(3, file)
        for number in range(5):
            few.remember({b"%d" % number: Score(float(number))})
        assert sorted(few.known([b"%d" % number for number in range(5)])) == [b"2", b"3", b"4"]
        few.remember({b"3": Score(9.0)})  # known already: what was said first stands
        assert few.known([b"2", b"3"]) == {b"2": Score(2.0), b"3": Score(3.0)}
        few.close()


def test_a_score_comes_back_to_the_last_bit() -> None:
    kept = Cache(10)
    for value in (0.1 + 0.2, 5e-324, -1.7976931348623157e308, 1e16, -0.0):
        key = repr(value).encode()
        kept.remember({key: Score(value, "é")})
        assert repr(kept.known([key])) == repr({key: Score(value, "é")})
    kept.remember({b"none": Score(math.nan, "")})
    assert math.isnan(kept.known([b"none"])[b"none"].value)


def filled(folder: Path) -> Path:
    file = folder / "scores.db"
    kept = Cache(1000, str(file))
    kept.remember({b"%d" % number: Score(float(number)) for number in range(500)})
    kept.close()
    return file


def test_a_file_that_is_no_cache_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database, and much longer than the header of one would be. " * 20)
    other = sqlite3.connect(tmp_path / "other.db")
    other.execute("CREATE TABLE scores (key, said, seal)")
    other.commit()
    other.close()
    for name, words in (
        ("text", "cache_file = … file is not a database"),
        ("other.db", "another version"),
        ("no_such_folder/scores.db", "unable to open database file"),
    ):
        with refused(words, error=RunError):
            Cache(10, str(tmp_path / name))


@pytest.mark.parametrize("damage", ["cut", "noise", "said", "swapped"])
def test_a_damaged_file_ends_the_run_and_never_gives_a_wrong_score(tmp_path: Path, damage: str) -> None:
    file = filled(tmp_path)
    content = bytearray(file.read_bytes())
    if damage == "cut":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "noise":
        content[1000:-1000] = bytes(i % 251 for i in range(len(content) - 2000))
        file.write_bytes(content)
    else:
        database = sqlite3.connect(file)
        others = "(SELECT said, seal FROM scores WHERE key = x'3132')"
        says = "said = '[9.0, \"\"]'" if damage == "said" else f"(said, seal) = {others}"
        database.execute(f"UPDATE scores SET {says} WHERE key = x'37'")
        database.commit()
        database.close()
    with refused("cache_file = ", "scores.db", error=RunError):
        kept = Cache(1000, str(file))
        for number in range(500):
            key = b"%d" % number
            assert kept.known([key]).get(key, Score(float(number))) == Score(float(number))


def test_every_flipped_byte_of_a_file_leaves_each_score_right_unknown_or_refused(tmp_path: Path) -> None:
    file = tmp_path / "scores.db"
    kept = Cache(1000, str(file))
    truth = {b"%d" % number: Score(number + 0.5, "fine") for number in range(3)}
    kept.remember(truth)
    kept.close()
    content = file.read_bytes()
    ends = Counter()
    for place in range(0, len(content), 37):
        file.write_bytes(content[:place] + bytes([content[place] ^ 0x41]) + content[place + 1 :])
        try:
            with contextlib.closing(Cache(1000, str(file))) as damaged:
                assert damaged.known(truth).items() <= truth.items(), place
            ends["told"] += 1
        except RunError:
            ends["refused"] += 1
    assert min(ends["told"], ends["refused"]) > 0


def test_a_file_that_another_process_holds_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = filled(tmp_path)
    monkeypatch.setattr(cache, "LOCK_SECONDS", 0.1)
    kept = Cache(1000, str(file))
    holder = sqlite3.connect(file, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    with refused("scores.db", "0.1 s", error=RunError):
        kept.known([b"1"])
    with refused("another process", error=RunError):
        kept.remember({b"new": Score(1.0)})
    holder.execute("ROLLBACK")
    holder.close()
    assert kept.known([b"1", b"new"]) == {b"1": Score(1.0)}
    kept.remember({b"new": Score(1.0)})  # and it goes on
    kept.close()


PLACES = {
    "sealed": SandboxOptions(),
    "bubblewrap": SandboxOptions(kind="bubblewrap"),
    "container": SandboxOptions(kind="container"),
    "image": SandboxOptions(kind="container", image="python:3.13-slim"),
    "command": SandboxOptions(kind="container", command="podman"),
    "url": SandboxOptions(kind="remote", url="http://127.0.0.1:1"),
    "other url": SandboxOptions(kind="remote", url="http://127.0.0.1:2"),
}


def test_a_score_from_another_sandbox_is_not_taken() -> None:
    function = load_reward(RewardOptions(name="code"))
    seen = {}
    for name, options in PLACES.items():
        seen[name] = tuple(cache.identity(function, options))
        assert tuple(cache.identity(function, replace(options, at_once=3))) == seen[name]
    assert len(set(seen.values())) == len(PLACES)


def test_a_score_with_another_version_of_a_module_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    function = load_reward(RewardOptions(name="code", options={"modules": ["numpy.linalg", "json"]}))
    before = cache.identity(function, SandboxOptions())
    assert sum(each.startswith("numpy==") for each in before) == 1
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.0")
    cache.installed_versions.cache_clear()
    assert cache.identity(function, SandboxOptions()) != before
    cache.installed_versions.cache_clear()
