"""Hostile Countdown completions: each gets its verdict, and none takes more than a millisecond per kilobyte."""

import time
from typing import Any

import pytest

from posttrain.rewards.countdown.grader import countdown, countdown_last
from posttrain.rewards.format import graded_format, last_format, strict_format
from tests.support.corpus import built, read

ATTACKS = read("countdown.jsonl")
GRADERS = {"strict": countdown, "last": countdown_last}

each_attack = pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack["name"])


def text_of(attack: dict[str, Any]) -> str:
    if "text" in attack:
        return built(attack["text"])
    return f"<think>hm</think>\n<answer>{built(attack['answer'])}</answer>"


def columns_of(attack: dict[str, Any]) -> dict[str, Any]:
    return {
        "prompts": ["Use all of 17, 5, 3 to make 36.\n"],
        "completion_ids": [(1,)],
        "completions": [text_of(attack)],
        "finish_reasons": [attack.get("finish", "stop")],
        "numbers": [attack.get("numbers", [17, 5, 3])],
        "target": [attack.get("target", 36)],
        "rule": [attack.get("rule", "all")],
    }


@pytest.mark.parametrize("mode", GRADERS)
@each_attack
def test_it_gets_its_verdict(attack: dict[str, Any], mode: str) -> None:
    outcome = attack["outcome"] if isinstance(attack["outcome"], str) else attack["outcome"][mode]
    [graded] = GRADERS[mode](**columns_of(attack))
    assert graded.outcome == outcome
    assert graded.score == (1.0 if outcome == "correct" else 0.0)


@each_attack
def test_it_is_graded_in_a_millisecond_per_kilobyte(attack: dict[str, Any]) -> None:
    columns = columns_of(attack)
    kilobytes = len(columns["completions"][0].encode("utf-8", "surrogatepass")) / 1000
    for reward in (countdown, countdown_last, strict_format, last_format, graded_format):
        assert min(seconds(reward, columns) for _ in range(3)) < 1e-3 * max(1.0, kilobytes)


def seconds(reward: Any, columns: dict[str, Any]) -> float:
    start = time.process_time()
    reward(**columns)
    return time.process_time() - start


def test_no_two_attacks_have_one_name() -> None:
    assert len({attack["name"] for attack in ATTACKS}) == len(ATTACKS)
