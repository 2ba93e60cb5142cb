"""Hostile Countdown completions: each gets its verdict, is paid for nothing twice, and is read in no time."""

from functools import partial
from typing import Any

import pytest
from hypothesis import given, strategies as st

from posttrain.rewards.countdown import CountdownSteps, countdown, countdown_last
from posttrain.rewards.grading.answers import ProcessReward
from posttrain.rewards.shaping import graded_format, last_format, strict_format
from tests.support.hostile_texts import built, read
from tests.support.timing import milliseconds

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
        assert min(milliseconds(partial(reward, **columns)) for _ in range(3)) < max(1.0, kilobytes)


def test_no_two_attacks_have_one_name() -> None:
    assert len({attack["name"] for attack in ATTACKS}) == len(ATTACKS)


REWARD = CountdownSteps()
SEARCHES = {
    "one step for ever": "<think>" + "17+5=22\n" * 20_000,
    "one step for ever on a line": "<think>" + "17+5=22," * 20_000,
    "one try for ever": "<think>" + "17+5=22,22-3=19.\n" * 10_000,
    "sums about other numbers": "<think>" + "1+1=2,2+2=4.\n" * 10_000,
    "every digit there is": "<think>" + "9" * 200_000,
    "big numbers": "<think>" + "999999999*999999999=999999998\n" * 5_000,
    "towers": "<think>" + "9**9**9**9=1\n" * 10_000,
    "division by zero": "<think>17-17=0\n5/0=1\n3/0=0",
    "code": "<think>__import__('os').system('true')=1,17+5=22\n",
    "open tags": "<think>" * 30_000,
    "closed at once": "<think></think>17+5=22,22-3=19.",
    "another script": "<think>١٧+٥=٢٢\n１７+５=２２\n17＋5=22\n",
    "no line ends": "<think>" + "17+5=22" * 30_000,
    "carriage returns": "<think>17+5=22\r17+5=22\r\n17+5=22\x0b17-5=12\x85",
    "halves of characters": "<think>\ud80017+5=22\n17-5=12\udfff",
    "nul bytes": "<think>17+5=22\x00\n\x0017-5=12",
    "commas": "<think>17+5=22" + "," * 100_000,
    "verdicts": "<think>17+5=22" + "!." * 100_000,
}


def paid(text: str, most_milliseconds: float = 1e9) -> ProcessReward:
    given: list[ProcessReward] = []
    columns = {"completions": [text], "numbers": [[17, 5, 3]], "target": [36], "rule": ["all"]}
    assert milliseconds(lambda: given.extend(REWARD(**columns))) < most_milliseconds
    return given[0]


@pytest.mark.parametrize("name", SEARCHES)
def test_it_earns_no_more_than_what_it_does_once_and_costs_a_millisecond_per_kilobyte(name: str) -> None:
    text = SEARCHES[name]
    given = paid(text, max(20.0, len(text) / 1000))
    # 17 + 5, 22 - 3 and the try that they make; 17 - 17 is no step, for 17 is there once.
    assert sum(max(0.0, each.value) for each in given.spans) <= 3 * 0.02 + 1e-12
    assert given.score == 0.0
    assert all(0 <= start < end <= len(text) for start, end, _ in given.spans)


@each_attack
def test_hostile_answers_are_read_as_searches_without_harm(attack: dict[str, object]) -> None:
    text = built(attack["text"] if "text" in attack else attack["answer"])
    given = paid("<think>" + text, max(20.0, len(text) / 1000))
    assert abs(sum(each.value for each in given.spans)) <= REWARD.most + 1e-12


def test_all_right_steps_that_there_are_stay_below_the_answer() -> None:
    numbers, lines = [17, 5, 3], set[str]()
    for a in numbers:
        for b in numbers:
            for operator, value in (("+", a + b), ("-", a - b), ("*", a * b)):
                rest = [number for number in numbers if number not in (a, b)]
                lines |= {f"{a}{operator}{b}={value},{value}*{c}={value * c}." for c in rest if value >= 0}
                lines |= {f"{a}{operator}{b}={value},{value}+{c}={value + c}." for c in rest if value >= 0}
    given = paid("<think>" + "\n".join(sorted(lines)))
    assert sum(max(0.0, each.value) for each in given.spans) == pytest.approx(REWARD.most)


@given(lines=st.lists(st.text("0123456789+-*/=,.!<>\n think", max_size=30), max_size=20))
def test_whatever_the_text_is_the_bounds_hold(lines: list[str]) -> None:
    text = "<think>" + "\n".join(lines)
    given = paid(text)
    assert sum(max(0.0, each.value) for each in given.spans) <= REWARD.most + 1e-12
    assert sum(min(0.0, each.value) for each in given.spans) >= -REWARD.most - 1e-12
    assert all(0 <= start < end <= len(text) for start, end, _ in given.spans)
