"""What a reward function logs in addition to its scores: `log_extra(column, values)` and `log_metric(name, value)`.

Logs of a call that failed or was repeated are dropped with its scores, so nothing is counted twice.  Loads no torch.
"""

import json
import math
from collections.abc import Callable, Mapping
from typing import NoReturn

from posttrain.errors import RunError
from posttrain.rewards.grading import answers

LOGS = ("log_extra", "log_metric")


class CallLog:
    """Takes what a function logs in one call; raises RunError at once for invalid logs."""

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
        where = self.place("log_extra", column)
        found = self.read(where, answers.score_list, values)
        if isinstance(found, str):
            self.refuse(f"{where}: got {answers.value_and_type(values)}; give a list with one value per completion")
        if len(found) != self.count:
            problem = f"got {len(found)} values for the {self.count} completions of the call"
            self.refuse(f"{where}: {problem}; give one each, None if there is none")
        if column in self.extra:
            self.refuse(f"{where}: was called twice in one call; log all values once")
        self.extra[column] = [self.plain(where, value) for value in found]

    def log_metric(self, name: str, value: object) -> None:
        """Keep a number of the call; NaN means no number."""
        where = self.place("log_metric", name)
        number = self.read(where, answers.score_number, value)
        if number is None or isinstance(number, str):
            self.refuse(f"{where}: got {answers.value_and_type(value)}; give a number, or NaN if there is none")
        if math.isfinite(number) and abs(number) > answers.LARGEST:
            self.refuse(f"{where}: got {number:g}, {answers.TOO_LARGE}")
        if not math.isnan(number):
            self.numbers.setdefault(name, []).append(number)

    def place(self, log: str, name: object) -> str:
        """Where an error is; rejects an invalid name, and any log after the call has returned."""
        where = f"{log} of {name!r:.60}"
        if self.over:
            self.refuse(f"{where}: was called after its call had returned")
        if not isinstance(name, str) or not name or not name.isprintable():
            self.refuse(f"{where}: the first argument must be a name, a printable text")
        return where

    def read(self, where: str, read: Callable[[object], answers.Read], value: object) -> answers.Read:
        try:
            return answers.read_safely(read, value)
        except answers.FunctionError as failed:
            self.refuse(f"{where}: the value cannot be read: {answers.value_and_type(failed.__cause__)}")

    def plain(self, where: str, value: object) -> object:
        try:
            return as_plain(value)
        except (TypeError, ValueError, RecursionError) as error:
            what = f"got {answers.value_and_type(value)}, which cannot be written as JSON ({error})"
            self.refuse(f"{where}: {what}; give numbers, texts, booleans, None, lists or mappings")

    def refuse(self, problem: str) -> NoReturn:
        self.problem = f"reward {self.reward!r}: {problem}."
        raise RunError(self.problem)

    def close(self) -> None:
        """Reject further logs.  Raises RunError for an error that the function has caught."""
        self.over = True
        if self.problem:
            raise RunError(self.problem)

    def kept_with(
        self, verdicts: list[answers.Verdict] | answers.InvalidScore
    ) -> list[answers.Verdict] | answers.InvalidScore:
        self.close()
        if isinstance(verdicts, answers.InvalidScore) or not (self.extra or self.numbers):
            return verdicts
        metrics = {name: exact_mean(values) for name, values in self.numbers.items()} or None
        return [
            said._replace(extra={name: column[i] for name, column in self.extra.items()} or None, metrics=metrics)
            if isinstance(said, answers.Score)
            else said
            for i, said in enumerate(verdicts)
        ]


def exact_mean(values: list[float]) -> float:
    """The mean: exactly x where all are x, NaN where infinities cancel."""
    return values[0] if min(values) == max(values) else sum(values) / len(values)


def as_plain(value: object) -> object:
    """A value as JSON has it.  Raises TypeError or ValueError if it cannot."""
    if value is None or isinstance(value, bool | str):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("a mapping's keys must be texts")
        return {str(key): as_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(item) for item in value]
    if isinstance(value, int):
        json.dumps(int(value))  # an integer of thousands of digits has no text
        return int(value)
    number = answers.score_number(value)
    if isinstance(number, str):
        raise TypeError(f"a {type(value).__name__} is {number}")
    return number if number is not None and math.isfinite(number) else None
