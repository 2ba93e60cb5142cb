"""Regular expressions that no text can make slow: the ways through them counted by hand, and what is refused."""

import pytest

from posttrain.errors import UserError
from posttrain.training.behaviours.bounded_patterns import MOST_WAYS, PatternReader, bounded_pattern


@pytest.mark.parametrize(
    ("pattern", "ways"),
    [
        ("abc", 1),
        ("a|b|cd", 3),
        ("a{0,3}", 4),
        ("a?b", 2),
        ("a{3}", 1),
        ("(?:a|b){2}", 4),  # two choices, twice
        ("(?:a|b){0,2}", 7),  # 1 + 2 + 4
        ("(?:a{0,2}){0,2}", 13),  # 1 + 3 + 9
        ("a{0,2}b{0,3}?c{1,4}", 48),  # 3 · 4 · 4
        ("a{,4}", 5),
        (r"[*+{]\*\+a{b}{}", 1),  # characters, all of them
        ("[]a]b[^]*]", 1),
        (r"[\]+]", 1),
        (r"(?P<name>a|b)(?=c|d)(?<!e)", 4),
    ],
)
def test_the_ways_through_a_pattern_are_those_counted_by_hand(pattern: str, ways: int) -> None:
    assert PatternReader(pattern, "here").alternatives() == ways
    assert bounded_pattern(f"x{pattern}", where="here").pattern == f"x{pattern}"


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("(a+)+b", "a repeat without a bound"),
        ("xa*", "a repeat without a bound"),
        ("xa*?", "a repeat without a bound"),
        ("a{2,}", "a repeat without a bound"),
        ("xa{,}", "a repeat without a bound"),
        ("x(?:a|[b*]+)", "a repeat without a bound"),
        (r"x\++", "a repeat without a bound"),
        (r"(a)\1", "refers to an earlier group"),
        ("(?P<x>a)(?P=x)", "a group with flags, a condition, a comment or a reference"),
        ("(?i:a)", "a group with flags"),
        ("(a)?(?(1)b|c)", "a condition"),
        ("x.{0,99}.{0,99}y", "and at most 1000 are allowed"),
        ("x(?:a?){0,40}", "and at most 1000 are allowed"),
        ("x(?:a|b){100}", "and at most 1000 are allowed"),
        ("a?", "matches where there is nothing"),
        ("(a", "is not a regular expression"),
        ("a{99999999999999999999}", "is not a regular expression"),
    ],
)
def test_what_a_text_could_make_slow_is_refused(pattern: str, says: str) -> None:
    with pytest.raises(UserError) as told:
        bounded_pattern(pattern, where="behaviours: mine")
    assert str(told.value).startswith("behaviours: mine: ")
    assert says in str(told.value)


def test_as_many_ways_as_are_allowed_are_allowed() -> None:
    assert MOST_WAYS == 10 * 100
    assert bounded_pattern("x.{0,9}.{0,99}", where="here")
    with pytest.raises(UserError):
        bounded_pattern("x.{0,9}.{0,100}", where="here")
