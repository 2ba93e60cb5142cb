"""What a program is tested by: a row's `tests` column, read and checked."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.errors import UserError

FORMS = """{"kind": "stdio", "cases": [{"input": "1 2", "output": "3"}]}
    {"kind": "calls", "entry": "add", "cases": [{"args": [1, 2], "expected": 3}]}
    {"kind": "asserts", "entry": "add", "tests": ["assert add(1, 2) == 3"]}"""


@dataclass(frozen=True, slots=True)
class StdioCase:
    """Text that a program reads, and the text that it must print."""

    given: str
    printed: str


@dataclass(frozen=True, slots=True)
class CallCase:
    """Arguments of a function, and what it must return."""

    arguments: tuple[object, ...]
    named: Mapping[str, object]
    expected: object


@dataclass(frozen=True, slots=True)
class StdioTests:
    """A whole program's tests."""

    cases: tuple[StdioCase, ...]

    def __len__(self) -> int:
        return len(self.cases)


@dataclass(frozen=True, slots=True)
class CallTests:
    """A function's tests."""

    entry: str
    cases: tuple[CallCase, ...]
    tolerance: float = 0.0
    """How far a float may be off, relative to the larger of it and 1."""

    def __len__(self) -> int:
        return len(self.cases)


@dataclass(frozen=True, slots=True)
class AssertTests:
    """Statements about functions; they run where the program does not."""

    entry: tuple[str, ...]
    setup: str
    """Run once before all of them, for helpers and imports."""
    tests: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.tests)


Tests = StdioTests | CallTests | AssertTests


def read_tests(column: object) -> Tests:
    """The tests that one row holds: a mapping, or JSON text of one.  Raises UserError."""
    try:
        given: Any = json.loads(column) if isinstance(column, str) else column
        tests = READERS[given["kind"]](given)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        shown = repr(column)
        raise UserError(
            f"tests = {shown if len(shown) <= 200 else shown[:200] + '…'}: not one of\n    {FORMS}\n"
            f"    ({type(error).__name__}: {error})"
        ) from error
    if not len(tests):
        raise UserError("tests: no cases, so every program would pass; leave the row's tests out or add one")
    return tests


def stdio_tests(given: Any) -> StdioTests:
    """Tests of what a program prints."""
    return StdioTests(
        tuple(StdioCase(must_be_text(case["input"]), must_be_text(case["output"])) for case in given["cases"])
    )


def call_tests(given: Any) -> CallTests:
    """Tests of what a function returns."""
    cases = tuple(
        CallCase(tuple(case.get("args", ())), dict(case.get("kwargs", {})), case["expected"]) for case in given["cases"]
    )
    return CallTests(must_be_text(given["entry"]), cases, float(given.get("tolerance", 0.0)))


def assert_tests(given: Any) -> AssertTests:
    """Statements about functions."""
    entry = given["entry"]
    names = (entry,) if isinstance(entry, str) else tuple(must_be_text(name) for name in entry)
    return AssertTests(
        names, must_be_text(given.get("setup", "")), tuple(must_be_text(test) for test in given["tests"])
    )


READERS: dict[str, Callable[[Any], Tests]] = {"stdio": stdio_tests, "calls": call_tests, "asserts": assert_tests}


def must_be_text(value: object) -> str:
    """The value, which must be text."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r} should be text")
    return value


def same_output(printed: str, expected: str) -> bool:
    """Equal line by line; white space at the ends of lines and blank lines at the end do not count."""
    return lines(printed) == lines(expected)


def lines(output: str) -> list[str]:
    """What counts of an output."""
    return [line.rstrip() for line in output.rstrip().splitlines()]


def same_value(actual: object, expected: object, tolerance: float = 0.0) -> bool:
    """Whether a result is the expected one: tuples count as lists (JSON has none), True is not 1, and NaN is NaN."""
    if isinstance(expected, list | tuple):
        return (
            isinstance(actual, list | tuple)
            and len(actual) == len(expected)
            and all(same_value(a, e, tolerance) for a, e in zip(actual, expected, strict=True))
        )
    if isinstance(expected, dict):
        return (
            isinstance(actual, dict)
            and actual.keys() == expected.keys()
            and all(same_value(actual[key], expected[key], tolerance) for key in expected)
        )
    if isinstance(expected, bool) or isinstance(actual, bool):
        return isinstance(expected, bool) and isinstance(actual, bool) and actual == expected
    if isinstance(expected, int | float) and isinstance(actual, int | float):
        return same_number(actual, expected, tolerance)
    return type(actual) is type(expected) and actual == expected


def same_number(actual: float, expected: float, tolerance: float) -> bool:
    """Whether two numbers are equal, or near enough where a tolerance is given and one of them is a float."""
    if actual == expected or (actual != actual and expected != expected):
        return True
    if tolerance == 0 or (isinstance(actual, int) and isinstance(expected, int)):
        return False
    try:
        return math.isclose(actual, expected, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:  # an integer beyond every float
        return False
