"""Completions written to make the reading of behaviours slow: none takes longer than a second for all rows together."""

import pytest

from posttrain.behaviours.behaviour_reader import MAX_CHARACTERS, BehaviourReader, PatternTimeout
from posttrain.behaviours.behaviour_table import TABLE, chosen_rows
from posttrain.options.behaviours import BehaviourOptions
from tests.support.refusals import warned
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
    assert len(text) > 10 * MAX_CHARACTERS
    assert idle_milliseconds(lambda: reader.read(text, COLUMNS)) < 1000


@pytest.mark.parametrize("pattern", [r"(?:a|aa)+c", r"a.{0,999}.{0,999}c"])
def test_a_slow_pattern_is_ended_by_its_timeout_and_costs_only_its_own_row(pattern: str) -> None:
    patterns = {"slow": {"any": [pattern]}, "quick": {"any": ["a{10}b"]}}
    reader = BehaviourReader(chosen_rows(BehaviourOptions(patterns=patterns)), timeout_seconds=0.1)
    with warned("slow", kind=PatternTimeout):
        found = reader.read("a" * 5_000 + "b", {})
    assert {name: signs.shown for name, signs in found.items()} == {"quick": True}
    assert {name: signs.shown for name, signs in reader.read("ac", {}).items()} == {"slow": True, "quick": False}
    with pytest.warns(PatternTimeout):
        assert idle_milliseconds(lambda: reader.read("a" * 5_000, {})) < 1000
