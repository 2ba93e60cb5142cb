"""What a reward function logs in addition to its scores: `log_extra(column, values)` and `log_metric(name, value)`.

Both belong to one call, and are kept with the scores that this call gave: what a call has logged that failed, or was
made again, is gone with it, so that nothing is counted twice.  Loads neither torch nor numpy: workers have it too.
"""

import json
import math
from collections.abc import Callable, Mapping
from typing import NoReturn

from posttrain.errors import RunError
from posttrain.rewards.grading.answers import (
    LARGEST,
    TOO_LARGE,
    FunctionError,
    InvalidScore,
    Score,
    Verdict,
    read_safely,
    score_list,
    score_number,
    value_and_type,
)

LOGS = ("log_extra", "log_metric")
"""Arguments by which a function logs."""


class CallLog:
    """Takes what a function logs in one call, and says at once what is wrong with it."""

    def __init__(self, reward: str, count: int) -> None:
        self.reward, self.count = reward, count
        self.extra: dict[str, list[object]] = {}
        self.numbers: dict[str, list[float]] = {}
        self.problem = ""
        """What was wrong, for a function that catches the error."""
        self.over = False

    def arguments(self) -> dict[str, Callable[[str, object], None]]:
        return {"log_extra": self.log_extra, "log_metric": self.log_metric}

    def log_extra(self, column: str, values: object) -> None:
        """Keep a plain value for each completion of the call."""
        asked = f"log_extra of {column!r:.60}"
        self.require_name(asked, column)
        try:
            found = read_safely(score_list, values)
        except FunctionError as failed:
            self.refuse(f"{asked}: its values cannot be read: {value_and_type(failed.__cause__)}")
        if isinstance(found, str):
            self.refuse(f"{asked} was given {value_and_type(values)}; give a list of one value for each completion")
        if len(found) != self.count:
            self.refuse(
                f"{asked} was given {len(found)} values for the {self.count} completions of the call; give one for"
                " each, None where there is none"
            )
        if column in self.extra:
            self.refuse(f"{asked} was called twice in one call; collect the values and log them once")
        self.extra[column] = [self.plain(asked, value) for value in found]

    def log_metric(self, name: str, value: object) -> None:
        """Keep a number of the call; NaN means that there is none."""
        asked = f"log_metric of {name!r:.60}"
        self.require_name(asked, name)
        try:
            number = read_safely(score_number, value)
        except FunctionError as failed:
            self.refuse(f"{asked}: its value cannot be read: {value_and_type(failed.__cause__)}")
        if number is None or isinstance(number, str):
            self.refuse(f"{asked} was given {value_and_type(value)}; give a number, or NaN where there is none")
        if math.isfinite(number) and abs(number) > LARGEST:
            self.refuse(f"{asked} was given {number:g}, {TOO_LARGE}")
        if not math.isnan(number):
            self.numbers.setdefault(name, []).append(number)

    def require_name(self, asked: str, name: object) -> None:
        """Refuse an invalid name, and any log after the call has returned."""
        if self.over:
            self.refuse(f"{asked} was called after the call that it belongs to had returned")
        if not isinstance(name, str) or not name or not name.isprintable():
            self.refuse(f"{asked}: its first argument is a name, which is a printable text; here it is {name!r:.60}")

    def plain(self, asked: str, value: object) -> object:
        try:
            return as_plain(value)
        except (TypeError, ValueError, RecursionError) as error:
            self.refuse(
                f"{asked} was given {value_and_type(value)}, which cannot be written down ({error}); give numbers,"
                " texts, truth values, None, or lists and mappings of these"
            )

    def refuse(self, says: str) -> NoReturn:
        self.problem = f"reward {self.reward!r}: {says}."
        raise RunError(self.problem)

    def close(self) -> None:
        """Refuse further logs.  Raises RunError for a mistake that the function has caught."""
        self.over = True
        if self.problem:
            raise RunError(self.problem)

    def kept_with(self, verdicts: list[Verdict] | InvalidScore) -> list[Verdict] | InvalidScore:
        """The verdicts of the call, each score with its logs."""
        self.close()
        if isinstance(verdicts, InvalidScore) or not (self.extra or self.numbers):
            return verdicts
        metrics = {name: mean(values) for name, values in self.numbers.items()} or None
        return [
            said._replace(extra={name: column[i] for name, column in self.extra.items()} or None, metrics=metrics)
            if isinstance(said, Score)
            else said
            for i, said in enumerate(verdicts)
        ]


def mean(values: list[float]) -> float:
    """The mean: exactly x where all are x, NaN where infinities cancel."""
    return values[0] if min(values) == max(values) else sum(values) / len(values)


def as_plain(value: object) -> object:
    """A value in terms of JSON.  Raises TypeError or ValueError where it has none."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("a mapping's keys are texts")
        return {str(key): as_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(item) for item in value]
    if isinstance(value, int):
        json.dumps(int(value))  # an integer of thousands of digits has no text
        return int(value)
    number = score_number(value)
    if isinstance(number, str):
        raise TypeError(f"a {type(value).__name__} is {number}")
    return number if number is not None and math.isfinite(number) else None
