"""Short mathematical answers as exact values, and what is left to others."""

from fractions import Fraction as F

import pytest

from posttrain.rewards.parsing.exact_numbers import MAX_CHARACTERS, ExactValue, exact


def value(number: F | int) -> ExactValue:
    return ExactValue("value", (F(number),))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12", value(12)),
        (" -3 ", value(-3)),
        ("+7", value(7)),
        ("007", value(7)),
        ("1,234", value(1234)),
        ("1,234,567.5", value(F(2469135, 2))),
        (".5", value(F(1, 2))),
        ("-.5", value(F(-1, 2))),
        ("12.", value(12)),
        ("1.50", value(F(3, 2))),
        ("0.1234567890", value(F(123456789, 10**9))),
        ("3/4", value(F(3, 4))),
        ("-6/8", value(F(-3, 4))),
        (r"\frac{3}{4}", value(F(3, 4))),
        (r"\dfrac34", value(F(3, 4))),
        (r"-\tfrac{1}{2}", value(F(-1, 2))),
        (r"1\frac{1}{2}", value(F(3, 2))),
        (r"50\%", value(F(1, 2))),
        ("12.5%", value(F(1, 8))),
        ("$0.5$", value(F(1, 2))),
        (r"\$1,200.50", value(F(2401, 2))),
        ("{{5}}", value(5)),
        ("(5)", value(5)),
        ("(1, 2)", ExactValue("tuple", (F(1), F(2)))),
        (r"\left(1,\, \frac12\right)", ExactValue("tuple", (F(1), F(1, 2)))),
        ("[1, 2)", ExactValue("right_open", (F(1), F(2)))),
        (r"\{2, 1, 2\}", ExactValue("set", (F(1), F(2)))),
        ("{2,1}", ExactValue("set", (F(1), F(2)))),
        ("3, 1", ExactValue("list", (F(3), F(1)))),
        ("1,2,3", ExactValue("list", (F(1), F(2), F(3)))),
    ],
)
def test_what_is_read(text: str, expected: ExactValue) -> None:
    assert exact(text) == expected


UNREAD = (
    *["", "()", "x", "1e5", "1/0", r"\frac{1}{0}", "2 3", "1 234", "٣", "²", "1.2.3", "--1", "1//2", "2^3"],
    *[r"\sqrt{2}"],
    *[
        "inf",
        "nan",
        "0x10",
        "1_000",
        "5 apples",
        "1" * 400,
        "1" * (MAX_CHARACTERS + 1),
        "(" * 50,
        "{" * 500,
        "\0",
        "1,,2",
        "0.3...",
    ],
)


@pytest.mark.parametrize("text", UNREAD)
def test_what_is_left_to_others(text: str) -> None:
    assert exact(text) is None


def test_order_counts_in_tuples_and_not_in_sets_or_lists() -> None:
    def same(one: str, other: str) -> bool:
        first, second = exact(one), exact(other)
        assert first is not None
        assert second is not None
        return first.same(second)

    assert not same("(1, 2)", "(2, 1)")
    assert same(r"\{1, 2\}", r"\{2, 1\}")
    assert same("1, 2", "2, 1")
    assert not same("(1, 2)", "[1, 2]")
    assert not same("(1, 2)", r"\{1, 2\}")
    assert not same("1, 1", "1")
