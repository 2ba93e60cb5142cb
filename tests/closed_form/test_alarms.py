"""Alarms on histories made by hand: raised where they should be, silent on a run that learns."""

from typing import Any

import pytest
import torch

from posttrain.records import Grades
from posttrain.training.alarms import AGAIN_AFTER, Alarm, alarms, repeated_share, transcript
from tests.laws.reward_rows import group

CALM = {
    "reward": 0.2,
    "frac_reward_zero_std": 0.3,
    "completions/mean_length": 50.0,
    "completions/clipped_ratio": 0.01,
    "completions/repetition": 0.1,
    "outcomes/f/right": 0.2,
    "outcomes/f/wrong": 0.8,
}


def history(*last: dict[str, Any], calm: int = 15) -> list[dict[str, Any]]:
    return [{"step": step, **CALM, **line} for step, line in enumerate([{}] * calm + list(last), start=1)]


def names(lines: list[dict[str, Any]], raised: dict[str, int] | None = None) -> list[str]:
    return [alarm.name for alarm in alarms(lines, raised or {})]


def test_a_calm_run_and_one_that_learns_raise_nothing() -> None:
    assert names(history()) == []
    lines = [
        {"step": step, **CALM, "reward": 0.2 + 0.01 * step, "completions/mean_length": 40.0 + 3 * step}
        | {"outcomes/f/right": 0.2 + 0.01 * step, "outcomes/f/wrong": 0.8 - 0.01 * step}
        | ({"eval/accuracy_sampled": 0.2 + 0.01 * step} if step % 5 == 0 else {})
        for step in range(40)
    ]
    assert all(names(lines[:end]) == [] for end in range(1, 41))


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ({"outcomes/f/malformed": 0.35}, "outcome f malformed"),
        ({"completions/mean_length": 130.0}, "length"),
        ({"completions/clipped_ratio": 0.5}, "length"),
        ({"completions/repetition": 0.7}, "repetition"),
    ],
)
def test_a_jump_raises_its_alarm_and_not_again_at_once(line: dict[str, float], name: str) -> None:
    lines = history(line)
    assert names(lines) == [name]
    assert names(lines, {name: 15}) == []
    assert names(lines, {name: 16 - AGAIN_AFTER}) == [name]


def test_no_signal_for_long() -> None:
    still = {"frac_reward_zero_std": 1.0}
    assert names(history(*[still] * 9)) == []
    assert names(history(*[still] * 10)) == ["no signal"]


def test_a_reward_that_rises_alone() -> None:
    first, last = {"eval/accuracy_sampled": 0.30}, {"eval/accuracy_sampled": 0.29, "reward": 0.6}
    rising = [{"reward": 0.2 + 0.04 * i} for i in range(10)]
    assert names(history(first, *rising, last)) == ["reward alone"]
    assert names(history(first, *rising, {**last, "eval/accuracy_sampled": 0.4})) == []
    assert names(history(first, *[{}] * 10, {**last, "reward": 0.2})) == []


def test_values_that_are_missing_raise_nothing() -> None:
    assert names([{"step": step} for step in range(30)]) == []
    assert names(history(dict.fromkeys(CALM))) == []


def test_the_transcript_shows_what_the_alarm_is_about() -> None:
    groups = [group(["short", "a longer one that was malformed"])]
    grades = Grades(
        names=("f",),
        scores=torch.zeros(1, 1, 2, dtype=torch.float64),
        rewards=torch.zeros(1, 2, dtype=torch.float64),
        outcomes={"f": (("right", "malformed"),)},
        num_failures=0,
    )
    shown = transcript(Alarm("outcome f malformed", "", ("f", "malformed")), groups, grades)
    assert "a longer one" in shown
    assert "1 + 1?" in shown


def test_the_share_of_repeated_ngrams() -> None:
    assert repeated_share([1, 2, 3]) == 0
    assert repeated_share(list(range(20))) == 0
    assert repeated_share([7] * 13) == pytest.approx(0.9)
