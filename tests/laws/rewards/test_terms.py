"""When a reward counts and how much: routing, gates, clips, schedules, others' scores; and the way from `grade`."""

import math
import sys
import time
from pathlib import Path
from types import FrameType

import pytest

import posttrain
from posttrain.options.reward import GradingOptions, RewardOptions, RewardSettings
from posttrain.rewards.grading.function import ScoringFailure, reward_function
from posttrain.rewards.grading.grade import grade
from tests.support.reward_rows import group


@pytest.fixture(autouse=True)
def afresh() -> None:
    """Here what failed is given its time."""


def length(completions, **_):
    return [float(len(text)) for text in completions]


def says_yes(completions, **_):
    return [float("yes" in text) for text in completions]


def test_a_reward_applies_to_the_rows_it_is_for_and_the_sum_is_over_what_applies() -> None:
    routed = reward_function(length, where={"kind": "long"})
    both = [group(["ab", "abc"], columns={"kind": kind}) for kind in ("long", "short")]
    rewards = grade(both, [routed, reward_function(says_yes)]).rewards
    assert rewards.tolist() == [[2.0, 3.0], [0.0, 0.0]]
    alone = grade(both, [routed]).rewards
    assert alone[0].tolist() == [2.0, 3.0]
    assert all(map(math.isnan, alone[1].tolist()))


def test_behind_a_shut_gate_a_reward_is_zero_and_is_not_asked() -> None:
    asked: list[str] = []

    def costly(completions, **_):
        asked.extend(completions)
        return [5.0] * len(completions)

    gated = reward_function(costly, gate="says_yes")
    # Listed before the reward that it waits for.
    grades = grade([group(["yes", "no"])], [gated, reward_function(says_yes, weight=0)])
    assert asked == ["yes"]
    assert grades.rewards.tolist() == [[5.0, 0.0]]
    assert grades.outcomes["costly"] == (("", "gated"),)


def test_a_gate_that_says_nothing_leaves_the_reward_out() -> None:
    def unsure(completions, **_):
        return [None for _ in completions]

    gated = reward_function(length, gate="unsure")
    assert grade([group(["yes", "no"])], [gated, reward_function(unsure)]).rewards.isnan().all()


def test_a_reward_may_look_at_anothers_scores() -> None:
    def doubled(base, **_):
        return [None if score is None else 2 * score for score in base]

    functions = [reward_function(doubled, of="length"), reward_function(length, weight=0)]
    assert grade([group(["ab", "abc"])], functions).rewards.tolist() == [[4.0, 6.0]]


def test_a_clip_bounds_the_sum_and_not_the_score() -> None:
    clipped = reward_function(length, weight=2.0, clip=(0.0, 2.5))
    grades = grade([group(["a", "abcd"])], [clipped])
    assert grades.scores[0].tolist() == [[1.0, 4.0]]
    assert grades.rewards.tolist() == [[2.0, 5.0]]


def test_a_weight_goes_in_a_line_and_stays() -> None:
    scheduled = reward_function(length, weight=1.0, weight_to=0.0, over_steps=4)
    at = {step: grade([group(["ab", "a"])], [scheduled], step=step).rewards[0, 0].item() for step in (1, 2, 3, 4)}
    assert at == {1: 2.0, 2: 1.5, 3: 1.0, 4: 0.5}
    assert grade([group(["ab", "a"])], [scheduled], step=5).rewards.isnan().all()  # weight 0 counts for nothing


@pytest.mark.parametrize(("first", "last"), [(1.0, 3.0), (2.0, -0.5)])
def test_a_weight_that_has_arrived_goes_no_further(first: float, last: float) -> None:
    scheduled = reward_function(length, weight=first, weight_to=last, over_steps=4)
    for step, weight in ((1, first), (3, (first + last) / 2), (5, last), (6, last), (500, last)):
        assert grade([group(["a", "ab"])], [scheduled], step=step).rewards.tolist() == [[weight, 2 * weight]]


def test_a_reward_is_given_none_where_the_one_it_looks_at_said_nothing() -> None:
    given: list[float | None] = []

    def looking(base, **_):
        given.extend(base)
        return [1.0 for _ in base]

    def seldom(completions, **_):
        return [None if text == "b" else math.nan if text == "c" else 0.5 for text in completions]

    functions = [reward_function(looking, of="seldom"), reward_function(seldom, weight=0)]
    grade([group(["a", "b", "c"])], functions, on_error="none")
    assert given == [0.5, None, None]


def test_a_failure_behind_a_gate_is_retried_and_left_out() -> None:
    tries, times = [], []

    def flaky(completions, **_):
        tries.append(len(completions))
        times.append(time.monotonic())
        return [ScoringFailure("later") if len(tries) == 1 else 1.0 for _ in completions]

    gated = reward_function(flaky, gate="says_yes")
    grades = grade([group(["yes", "no"])], [reward_function(says_yes, weight=0), gated])
    assert tries == [1, 1]
    assert times[1] - times[0] >= 0.5  # what failed is given time to recover
    assert grades.rewards.tolist() == [[1.0, 0.0]]


def test_a_try_waits_its_time_although_another_reward_has_none_left() -> None:
    times: list[float] = []

    async def hurried(completions, **_):
        return [ScoringFailure("later") for _ in completions]

    def patient(completions, **_):
        times.append(time.monotonic())
        return [ScoringFailure("later") if len(times) == 1 else 1.0 for _ in completions]

    functions = [reward_function(hurried, seconds=0.1, weight=0), reward_function(patient)]
    grade([group(["a"])], functions, grading=GradingOptions(max_failure_share=1.0))
    assert times[1] - times[0] >= 0.5


def test_an_unconditional_reward_keeps_its_rows_and_weight_and_waits_for_nothing() -> None:
    scheduled = reward_function(
        length, weight=2.0, where={"kind": "long"}, gate="g", clip=(0, 1), weight_to=0.0, over_steps=3, of="h"
    )
    assert scheduled.unconditional().settings == RewardSettings(weight=2.0, where={"kind": "long"})


def test_a_reward_is_named_by_a_word_and_a_reward_model_as_one_likes() -> None:
    assert RewardOptions(name="solved").called == "solved"
    assert RewardOptions(model="FOLDER", name="how polite").called == "how polite"


PACKAGE = Path(posttrain.__file__).parent
MOST_FILES = 11


def test_a_score_passes_through_few_files() -> None:
    entered: set[str] = set()
    at_the_function: list[set[str]] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            entered.add(path.relative_to(PACKAGE).as_posix())

    def mine(completions: list[str], **columns: object) -> list[float]:
        at_the_function.append(set(entered))
        return [float(len(text)) for text in completions]

    groups, functions = [group(["a", "bc"])], [reward_function(mine)]
    grade(groups, functions)  # what is made once per process is made
    entered.clear()
    sys.setprofile(note)
    try:
        grades = grade(groups, functions)
    finally:
        sys.setprofile(None)
    assert grades.rewards.tolist() == [[1.0, 2.0]]
    assert "rewards/grading/dispatch.py" in at_the_function[-1]
    assert len(entered) <= MOST_FILES, "\n".join(sorted(entered))
