"""What a program is tested by: a row's `tests` column, read and checked."""

import difflib
import json
import keyword
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.errors import UserError
from posttrain.sandbox.inside import plain

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
    """Tests of what a whole program prints."""

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
    """The tests of one row: a mapping, or its JSON text.  Raises UserError."""
    try:
        given: Any = json.loads(column) if isinstance(column, str) else column
        if not isinstance(given, Mapping) or given.get("kind") not in READERS:
            raise BrokenTests(f"must be an object whose `kind` is one of {', '.join(READERS)}")
        tests = READERS[given["kind"]](given)
        if not len(tests):
            raise BrokenTests("no cases, so every program would pass; leave the row's tests out or add one")
    except (BrokenTests, ValueError) as error:  # of json: a ValueError
        raise UserError(
            f"tests: {error}\n    given: {shown_value(column, 200)}\n    they are one of\n    {FORMS}"
        ) from error
    return tests


class BrokenTests(Exception):
    """Tests that no program could be judged by; the text says which key, what it holds and what it must."""


def stdio_tests(given: Mapping[str, Any]) -> StdioTests:
    """Tests of what a program prints."""
    require_keys(given, "", {"kind", "cases"})
    cases = []
    for where, case in numbered(given, "cases"):
        require_keys(case, where, {"input", "output"})
        cases.append(StdioCase(text_of(case, where, "input"), text_of(case, where, "output")))
    return StdioTests(tuple(cases))


def call_tests(given: Mapping[str, Any]) -> CallTests:
    """Tests of what a function returns."""
    require_keys(given, "", {"kind", "entry", "cases", "tolerance"})
    cases = []
    for where, case in numbered(given, "cases"):
        require_keys(case, where, {"args", "kwargs", "expected"})
        arguments, named = case.get("args"), case.get("kwargs")
        arguments, named = () if arguments is None else arguments, {} if named is None else named
        if not isinstance(arguments, list | tuple):
            raise BrokenTests(f"{where}.args = {shown_value(arguments)}: must be a list of arguments, such as [1, 2]")
        if not isinstance(named, Mapping) or not all(isinstance(name, str) for name in named):
            raise BrokenTests(f"{where}.kwargs = {shown_value(named)}: must be an object of named arguments")
        if "expected" not in case:
            raise BrokenTests(f"{where}: has no `expected`")
        arguments = tuple(plain_value(value, f"{where}.args[{at}]") for at, value in enumerate(arguments))
        named = {name: plain_value(value, f"{where}.kwargs.{name}") for name, value in named.items()}
        cases.append(CallCase(arguments, named, plain_value(case["expected"], f"{where}.expected")))
    return CallTests(function_name(given.get("entry"), "entry"), tuple(cases), tolerance_of(given.get("tolerance")))


def assert_tests(given: Mapping[str, Any]) -> AssertTests:
    """Statements about functions."""
    require_keys(given, "", {"kind", "entry", "setup", "tests"})
    entry, tests = given.get("entry"), given.get("tests")
    names = entry if isinstance(entry, list | tuple) and entry else [entry]
    if not isinstance(tests, list | tuple):
        raise BrokenTests(f"tests = {shown_value(tests)}: must be a list of texts, one for each test")
    numbered_texts = {f"tests[{at}]": test for at, test in enumerate(tests)}
    return AssertTests(
        tuple(function_name(name, "entry") for name in names),
        "" if given.get("setup") is None else text_of(given, "", "setup"),
        tuple(text_of(numbered_texts, "", where) for where in numbered_texts),
    )


READERS: dict[str, Callable[[Mapping[str, Any]], Tests]] = {
    "stdio": stdio_tests,
    "calls": call_tests,
    "asserts": assert_tests,
}


def require_keys(given: object, where: str, known: set[str]) -> None:
    """Refuse an unknown key, unless it is empty as in a table where another row has a value."""
    if not isinstance(given, Mapping):
        raise BrokenTests(f"{where} = {shown_value(given)}: must be an object with {', '.join(sorted(known))}")
    for key, value in given.items():
        if key not in known and value is not None:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.4)
            hint = f"did you mean `{near[0]}`?" if near else f"there are {', '.join(sorted(known))}"
            raise BrokenTests(f"{where + '.' if where else ''}{key}: no such key; {hint}")


def numbered(given: Mapping[str, Any], name: str) -> list[tuple[str, Any]]:
    """The cases, each with its path."""
    cases = given.get(name)
    if not isinstance(cases, list | tuple):
        raise BrokenTests(f"{name} = {shown_value(cases)}: must be a list of objects")
    return [(f"{name}[{at}]", case) for at, case in enumerate(cases)]


def text_of(given: Mapping[str, Any], where: str, key: str) -> str:
    """The text under a key."""
    place = f"{where}.{key}" if where else key
    if key not in given:
        raise BrokenTests(f"{where}: has no `{key}`")
    value = given[key]
    if not isinstance(value, str):
        raise BrokenTests(f"{place} = {shown_value(value)}: must be text")
    return value


def function_name(value: object, key: str) -> str:
    if not isinstance(value, str) or not value.isidentifier() or keyword.iskeyword(value):
        raise BrokenTests(f"{key} = {shown_value(value)}: must be the name of a function, such as add")
    return value


def tolerance_of(value: object) -> float:
    """How far a float may be off."""
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise BrokenTests(
            f"tolerance = {shown_value(value)}: must be a number from 0 to 1, such as 1e-6: it is relative to the"
            " numbers"
        )
    return float(value)


def plain_value(value: object, where: str) -> object:
    """A value as it reaches a process or is compared: plain, and numpy's as Python's."""
    try:
        return plain.load(plain.dump(value))
    except plain.NotPlainError as error:
        raise BrokenTests(f"{where}: {error}; give numbers, texts, lists and objects") from error


def shown_value(value: object, most: int = 60) -> str:
    try:
        written = repr(value)
    except ValueError:  # an integer beyond what Python writes out
        return f"a {type(value).__name__} of too many digits to show"
    return written if len(written) <= most else written[:most] + "…"


WHITE_SPACE = " \t\n\r\v\f"


def same_output(printed: str, expected: str) -> bool:
    """Equal line by line; white space at the ends of lines and blank lines at the end do not count."""
    return lines(printed) == lines(expected)


def lines(output: str) -> list[str]:
    """The lines that count; only a line feed ends a line, and white space is ASCII's."""
    return [line.rstrip(WHITE_SPACE) for line in output.rstrip(WHITE_SPACE).split("\n")]


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
