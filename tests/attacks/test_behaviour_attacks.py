"""Completions written to make the reading of behaviours slow: none takes longer than a second for all rows together."""

import pytest

from posttrain.options.behaviours import BehaviourOptions
from posttrain.training.behaviours.behaviour_reader import BehaviourReader
from posttrain.training.behaviours.behaviour_table import TABLE, chosen_rows
from posttrain.training.behaviours.bounded_patterns import MOST_CHARACTERS
from tests.support.timing import idle_milliseconds

COLUMNS = {"numbers": (17, 5, 3), "target": 36}
PIECES = {
    "one letter": "a",
    "words that begin a sign": "let me just double-",
    "beginnings of all signs": "i'm not the problem since double each of the wait hmm, that is too i made a ",
    "signs": "let me check. wait, no! oops actually, because maybe ",
    "hmm": "m",
    "white space": " ",
    "line ends": "\n",
    "digits": "since 9",
    "steps": "17+5=22,",
    "tries": "17+5=22,22-3=19.\n",
    "tries that end at once": "1+1=3\n",
    "verdicts": "17+5=22!.!.\n",
    "tags": "<think></think>",
    "other scripts": "１７+５=２２\n ſ K İ",
    "halves of characters": "\ud800",
}


@pytest.mark.parametrize("name", PIECES)
def test_hostile_text_is_read_in_a_second(name: str) -> None:
    text = "<think>h" + PIECES[name] * (1_000_000 // len(PIECES[name]))
    reader = BehaviourReader(TABLE)
    assert len(text) > 10 * MOST_CHARACTERS
    assert idle_milliseconds(lambda: reader.read(text, COLUMNS)) < 1000


def test_a_pattern_of_as_many_ways_as_are_allowed_ends_on_its_worst_text() -> None:
    reader = BehaviourReader(chosen_rows(BehaviourOptions(patterns={"worst": {"any": ["a.{0,9}.{0,99}b"]}})))
    # 5,000 places, 1,000 ways each: five million, where (a+)+b would have 2^5000.
    assert idle_milliseconds(lambda: reader.read("a" * 5_000, {})) < 2_500
