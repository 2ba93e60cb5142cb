"""A program's tests: a row's `tests` column, read and checked."""

import difflib
import json
import keyword
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.errors import UserError
from posttrain.rewards.grading.answers import safe_text
from posttrain.sandbox.inside import plain

FORMS = """{"kind": "stdio", "cases": [{"input": "1 2", "output": "3"}]}
    {"kind": "calls", "entry": "add", "cases": [{"args": [1, 2], "expected": 3}]}
    {"kind": "asserts", "entry": "add", "tests": ["assert add(1, 2) == 3"]}"""


@dataclass(frozen=True, slots=True)
class CallCase:
    """A function's arguments, and the value that it must return."""

    arguments: tuple[object, ...]
    named: Mapping[str, object]
    expected: object


@dataclass(frozen=True, slots=True)
class StdioTests:
    """Tests of what a whole program prints: its input, and the output of it."""

    cases: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class CallTests:
    """A function's tests."""

    entry: str
    cases: tuple[CallCase, ...]
    tolerance: float = 0.0
    """Allowed error of a float, relative to the larger of it and 1."""


@dataclass(frozen=True, slots=True)
class AssertTests:
    """Statements about functions; they run in another process than the program."""

    entry: tuple[str, ...]
    setup: str
    """Helpers and imports, run once before all tests."""
    cases: tuple[str, ...]


Tests = StdioTests | CallTests | AssertTests


def read_tests(column: object) -> Tests:
    """The tests of one row: a mapping, or its JSON text.  Raises UserError."""
    try:
        given: Any = json.loads(column) if isinstance(column, str) else column
        kind: Any = given.get("kind") if isinstance(given, Mapping) else None
        tests = READERS[obeying("kind", kind, kind in READERS, f"one of {', '.join(READERS)}")](given)
        obeying("tests", [], len(tests.cases) > 0, "at least one test, else every program would pass")
    except (BrokenTests, ValueError) as error:  # of json: a ValueError
        raise UserError(
            f"tests: {error}\n    given: {shown_value(column, 200)}\n    Use one of\n    {FORMS}"
        ) from error
    return tests


class BrokenTests(Exception):
    """Tests that cannot judge a program; the text gives the key, its value and the rule."""


def obeying(place: str, value: Any, holds: bool, rule: str) -> Any:
    """The value, if it obeys the rule; else raises BrokenTests."""
    if not holds:
        raise BrokenTests(f"{place} = {shown_value(value)}: must be {rule}")
    return value


def stdio_tests(given: Mapping[str, Any]) -> StdioTests:
    require_keys(given, "", {"kind", "cases"})
    cases = numbered_cases(given, {"input", "output"})
    return StdioTests(tuple((text_of(case, at, "input"), text_of(case, at, "output")) for at, case in cases))


def call_tests(given: Mapping[str, Any]) -> CallTests:
    """Tests of what a function returns."""
    require_keys(given, "", {"kind", "entry", "cases", "tolerance"})
    cases = []
    for where, case in numbered_cases(given, {"args", "kwargs", "expected"}):
        positional: Any = () if case.get("args") is None else case["args"]
        named: Any = {} if case.get("kwargs") is None else case["kwargs"]
        obeying(f"{where}.args", positional, isinstance(positional, list | tuple), "a list, such as [1, 2]")
        texts = isinstance(named, Mapping) and all(isinstance(name, str) for name in named)
        obeying(f"{where}.kwargs", named, texts, "an object of named arguments")
        arguments = tuple(plain_value(value, f"{where}.args[{at}]") for at, value in enumerate(positional))
        by_name = {name: plain_value(value, f"{where}.kwargs.{name}") for name, value in named.items()}
        if "expected" not in case:
            raise BrokenTests(f"{where}: has no `expected`")
        cases.append(CallCase(arguments, by_name, plain_value(case["expected"], f"{where}.expected")))
    tolerance: Any = 0.0 if given.get("tolerance") is None else given["tolerance"]
    is_number = isinstance(tolerance, int | float) and not isinstance(tolerance, bool)
    obeying("tolerance", tolerance, is_number and 0 <= tolerance <= 1, "a number from 0 to 1, such as 1e-6")
    return CallTests(function_name(given.get("entry")), tuple(cases), float(tolerance))


def assert_tests(given: Mapping[str, Any]) -> AssertTests:
    """Statements about functions."""
    require_keys(given, "", {"kind", "entry", "setup", "tests"})
    entry: Any = given.get("entry")
    tests: Any = given.get("tests")
    names = entry if isinstance(entry, list | tuple) and entry else [entry]
    obeying("tests", tests, isinstance(tests, list | tuple), "a list of texts, one for each test")
    numbered_texts = {f"tests[{at}]": test for at, test in enumerate(tests)}
    return AssertTests(
        tuple(function_name(name) for name in names),
        "" if given.get("setup") is None else text_of(given, "", "setup"),
        tuple(text_of(numbered_texts, "", where) for where in numbered_texts),
    )


READERS: dict[str, Callable[[Mapping[str, Any]], Tests]]
READERS = {"stdio": stdio_tests, "calls": call_tests, "asserts": assert_tests}


def require_keys(given: Any, where: str, known: set[str]) -> None:
    """Reject an unknown key, unless it is null, as in a table whose other rows have a value there."""
    listed = ", ".join(sorted(known))
    obeying(where, given, isinstance(given, Mapping), f"an object with {listed}")
    for key, value in given.items():
        if key not in known and value is not None:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.4)
            hint = f"Did you mean `{near[0]}`?" if near else f"Use {listed}."
            raise BrokenTests(f"{where + '.' if where else ''}{key}: no such key. {hint}")


def numbered_cases(given: Mapping[str, Any], known: set[str]) -> Iterator[tuple[str, Any]]:
    cases: Any = given.get("cases")
    obeying("cases", cases, isinstance(cases, list | tuple), "a list of objects")
    for at, case in enumerate(cases):
        require_keys(case, f"cases[{at}]", known)
        yield f"cases[{at}]", case


def text_of(given: Mapping[str, Any], where: str, key: str) -> str:
    if key not in given:
        raise BrokenTests(f"{where}: has no `{key}`")
    text: str = obeying(f"{where}.{key}" if where else key, given[key], isinstance(given[key], str), "text")
    return text


def function_name(value: object) -> str:
    is_name = isinstance(value, str) and value.isidentifier() and not keyword.iskeyword(value)
    return str(obeying("entry", value, is_name, "the name of a function, such as add"))


def plain_value(value: object, where: str) -> object:
    """A value as it reaches a process or is compared: plain, and numpy's as Python's."""
    try:
        return plain.load(plain.dump(value))
    except plain.NotPlainError as error:
        raise BrokenTests(f"{where}: {error}. Use numbers, texts, lists and objects.") from error


def shown_value(value: object, most: int = 60) -> str:
    written = safe_text(value, repr)
    return written if len(written) <= most else written[:most] + "…"


WHITE_SPACE = " \t\n\r\v\f"


def counted_lines(output: str) -> list[str]:
    """Without blanks at line ends and blank lines at the end: only a line feed ends a line, and blanks are ASCII's."""
    return [line.rstrip(WHITE_SPACE) for line in output.rstrip(WHITE_SPACE).split("\n")]


def same_value(actual: object, expected: object, tolerance: float = 0.0) -> bool:
    """Whether a result is the expected one, within the tolerance if one of them is a float.

    Tuples count as lists (JSON has none), True is not 1, and NaN is NaN.
    """
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
    is_bool = isinstance(expected, bool) or isinstance(actual, bool)
    if is_bool or not isinstance(expected, int | float) or not isinstance(actual, int | float):
        return type(actual) is type(expected) and actual == expected
    if actual == expected or (actual != actual and expected != expected):
        return True
    if tolerance == 0 or (isinstance(actual, int) and isinstance(expected, int)):
        return False
    try:
        return math.isclose(actual, expected, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:  # an integer beyond every float
        return False
