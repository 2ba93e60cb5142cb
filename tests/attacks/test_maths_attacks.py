"""Mathematical answers, honest and hostile: what deserves pay is paid, nothing else is, and nothing takes long."""

import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from posttrain.rewards.gold_answers import AnswerOutcome
from posttrain.rewards.grading.answers import Graded
from posttrain.rewards.math_reward import MathsReward, quickly
from tests.support.corpus import built, read
from tests.support.timing import idle_milliseconds, milliseconds

ITEMS = read("maths.jsonl")
PAID = {"right": 1.0, "wrong": 0.0, "unscored": None}


def text_of(item: dict[str, Any]) -> str:
    return built(item["text"]) if "text" in item else rf"\boxed{{{built(item['answer'])}}}"


def shown(item: dict[str, Any], graded: object) -> str:
    return f"{item['kind']}: gold {item['gold']!r}, {text_of(item)[:100]!r} should be {item['verdict']}, is {graded}"


def test_what_deserves_pay_is_paid_and_nothing_else_is() -> None:
    golds = [item["gold"] or None for item in ITEMS]
    finish = [item.get("finish", "stop") for item in ITEMS]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the row that is not scored
        grades = MathsReward(cpu_seconds=1.0)(
            completions=[text_of(item) for item in ITEMS], finish_reasons=finish, answer=golds
        )
    assert all(isinstance(graded, Graded) for graded in grades)  # the sandbox lost nothing
    rows = [(item, graded) for item, graded in zip(ITEMS, grades, strict=True) if isinstance(graded, Graded)]
    # A right answer that is known to be missed has a reason in its line; when it is found the line has to go.
    wanted = [0.0 if "missed" in item else PAID[item["verdict"]] for item in ITEMS]
    mistaken = [shown(*row) for row, paid in zip(rows, wanted, strict=True) if row[1].score != paid]
    assert mistaken == []
    refused = {AnswerOutcome.REFUSED, AnswerOutcome.TIME_LIMIT, AnswerOutcome.UNREADABLE}
    honest = [item for item, graded in rows if item["verdict"] == "right" and graded.outcome in refused]
    assert all("missed" in item for item in honest)


def test_what_is_read_outside_of_the_sandbox_is_read_in_two_milliseconds_per_kilobyte() -> None:
    for item in ITEMS:
        text = text_of(item)
        kilobytes = len(text.encode("utf-8", "surrogatepass")) / 1000
        read, allowed = reading(text, item), 2 * max(1.0, kilobytes)
        in_time = milliseconds(read) < allowed or any(idle_milliseconds(read) < allowed for _ in range(20))
        assert in_time, shown(item, "slow")  # once is enough: something else may have come between


def reading(text: str, item: dict[str, Any]) -> Callable[[], object]:
    return partial(quickly, text, item.get("finish") == "length", item["gold"])


def test_the_corpus_has_many_answers_of_every_kind() -> None:
    verdicts = Counter(item["verdict"] for item in ITEMS)
    assert verdicts["right"] >= 250
    assert verdicts["wrong"] >= 400
    assert sum("missed" in item for item in ITEMS) <= 22
    keys = [(item["gold"], text_of(item), item.get("finish")) for item in ITEMS]
    assert len(set(keys)) == len(keys)
