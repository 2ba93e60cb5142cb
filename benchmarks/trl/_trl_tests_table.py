"""What became of each of TRL's tests, in a table, and why where one does not pass."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from posttrain.errors import UserError

KINDS = ("passed", "refused", "failed", "skipped")
EXPLAINED = {
    "test_compute_entropy": "calls an internal method of TRL's trainer; `top_entropy_quantile` is refused",
    "test_training_vlm": "vision models are not supported; the test gets no such model or data set",
    "test_training_with_mask_truncated_completions_all_masked": "needs a vocabulary so large that no completion of"
    " 8 tokens stops; our small model stops in some of them, and these are learned",
    "test_warning_raised_all_rewards_none": "our warning uses Python's `warnings`, not TRL's logger",
}
"""The beginning of a name -> why such a test fails and is left so."""


@dataclass
class Outcomes:
    """A plugin of pytest that keeps what each test came to."""

    of: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Test -> one of KINDS, and the message."""

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


def counted(outcomes: Outcomes) -> str:
    """How many of each kind."""
    counts = Counter(kind for kind, _ in outcomes.of.values())
    return ", ".join(f"{counts[kind]} {kind}" for kind in KINDS)


def summary(outcomes: Outcomes) -> str:
    """Counts, and the failures without an explanation."""
    told = (f"not explained: {name}: {outcomes.of[name][1]:.300}" for name in outcomes.unexplained)
    return "\n".join([counted(outcomes), *told])


def page(outcomes: Outcomes, version: str) -> str:
    """The page of docs: what was run, the counts, and a line for each test."""
    counts = counted(outcomes)
    lines = [
        "# TRL's own tests",
        "",
        "`make trl-tests` runs TRL's tests of its GRPO trainer with `trl` replaced by `posttrain.trl`, and writes this",
        "page. Models and the data set on the hub are replaced by small models and six rows, made locally under the",
        "same names. Only the tests are downloaded, from the source archive of TRL 0.23.1, the last one found to",
        "contain them. `make trl-tests TRL=FOLDER` uses a checkout of another version.",
        "",
        f"Of TRL {version}: **{counts}**.",
        "",
        "- *Refused*: the test ends in our message that names an unsupported option.",
        "- *Failed*: the table gives the reason.",
        "- *Skipped*: the suite itself skips the test (vLLM, and libraries that are not installed).",
        "",
        "| test | outcome | why |",
        "|---|---|---|",
    ]
    for name, (kind, message) in sorted(outcomes.of.items(), key=lambda item: (KINDS.index(item[1][0]), item[0])):
        why = {"passed": "", "failed": explanation(name) or message}.get(kind, message)
        lines.append(f"| `{name.partition('_trl-internal-testing')[0]}` | {kind} | {why.replace('|', '/'):.220} |")
    return "\n".join([*lines, ""])
