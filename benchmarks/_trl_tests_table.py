"""What became of each of TRL's tests, in a table, and why where one does not pass."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from posttrain.errors import UserError

NO_FIXTURE = (FileNotFoundError, OSError, ConnectionError)
EXPLAINED: dict[str, str] = {}
"""Name, or the beginning of names -> why it fails and is left so."""


@dataclass
class Outcomes:
    """A plugin of pytest that keeps what each test came to."""

    of: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Test -> passed, refused, failed or skipped, and the message."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        report = yield
        if report.when == "call" or report.outcome != "passed":
            error = call.excinfo.value if call.excinfo is not None else None
            self.of.setdefault(item.name, (kind_of(report.outcome, error), said(report, error)))
        return report

    @property
    def unexplained(self) -> list[str]:
        """Failures that nobody has looked into."""
        return [name for name, (kind, _) in self.of.items() if kind == "failed" and explanation(name) is None]


def kind_of(outcome: str, error: BaseException | None) -> str:
    """How the page calls it."""
    if outcome != "failed":
        return outcome
    return "refused" if any(isinstance(each, UserError) for each in chain(error)) else "failed"


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it came of."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def said(report: pytest.TestReport, error: BaseException | None) -> str:
    """The message, on one line."""
    if report.outcome == "skipped":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        return reason.removeprefix("Skipped: ")
    told = next((each for each in chain(error) if isinstance(each, UserError)), error)
    if told is None:
        return ""
    text = " ".join(str(told).split())
    return text if isinstance(told, UserError) else f"{type(told).__name__}: {text}"


def explanation(name: str) -> str | None:
    """Why a test that fails is left so."""
    return next((why for start, why in EXPLAINED.items() if name.startswith(start)), None)


def summary(outcomes: Outcomes) -> str:
    """Counts, and the failures without an explanation."""
    counts = Counter(kind for kind, _ in outcomes.of.values())
    lines = [", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "refused", "failed", "skipped"))]
    return "\n".join(
        [*lines, *(f"not explained: {name}: {outcomes.of[name][1]:.200}" for name in outcomes.unexplained)]
    )


def page(outcomes: Outcomes, version: str) -> str:
    return summary(outcomes)
