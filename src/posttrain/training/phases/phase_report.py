"""One report over all phases: phases.json, and phases.md with a row for each measure of each phase."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.runs.files import write_atomically

HEADS = ("phase", "command", "measure", "before", "after", "steps", "minutes", "memory GB")


def write_report(folder: Path, results: Sequence[Mapping[str, Any]]) -> None:
    """Write both for the phases that are finished."""
    table = "\n".join(
        [
            f"| {' | '.join(HEADS)} |",
            f"| {' | '.join('---' if head in HEADS[:3] else '---:' for head in HEADS)} |",
            *(f"| {' | '.join(row)} |" for result in results for row in phase_rows(result)),
        ]
    )
    write_atomically(folder / "phases.json", (json.dumps(list(results), indent=1) + "\n").encode())
    write_atomically(folder / "phases.md", (table + "\n").encode())


def phase_rows(result: Mapping[str, Any]) -> Iterator[list[str]]:
    """A row for each measure that a phase has before and after; one with none where it measures nothing."""
    summary = result["summary"]
    seconds = summary.get("seconds")  # by stage, or of the whole run
    total = seconds["total"] if isinstance(seconds, Mapping) else seconds
    cost = [
        str(summary.get("steps", "")),
        "" if total is None else f"{total / 60:.1f}",
        f"{summary['peak_memory_bytes'] / 1e9:.2f}" if "peak_memory_bytes" in summary else "",
    ]
    measured = list(measures_of(summary.get("before") or {}, summary.get("after") or {}))
    for number, row in enumerate(measured or [["", "", ""]]):
        first = [result["name"], result["command"]] if number == 0 else ["", ""]
        yield [*first, *row, *(cost if number == 0 else ["", "", ""])]


def measures_of(before: Mapping[str, Any], after: Mapping[str, Any], source: str = "") -> Iterator[list[str]]:
    """What each measure is called and was, before and after; of a mixture then those of each of its sources."""
    for name in after:
        if interval_of(after, name) and isinstance(after[name], float):
            called = name.replace("_", " ") + (f", {source}" if source else "")
            yield [called, result_with_interval(before, name), result_with_interval(after, name)]
    earlier = before.get("sources") or {}
    for name, results in (after.get("sources") or {}).items():
        yield from measures_of(earlier.get(name) or {}, results, name)


def result_with_interval(results: Mapping[str, Any], name: str) -> str:
    """A result and its 95% interval, as far as there are any."""
    value, interval = results.get(name), interval_of(results, name)
    if not isinstance(value, float):
        return ""
    return f"{value:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else f"{value:.3f}"


def interval_of(results: Mapping[str, Any], name: str) -> Sequence[float] | None:
    """The interval of a result, which summaries have as a pair, and pairs' metrics as two numbers."""
    found: Sequence[float] | None = results.get(f"{name}_interval")
    low, high = results.get(f"{name}_low"), results.get(f"{name}_high")
    return found or (None if low is None or high is None else (low, high))
