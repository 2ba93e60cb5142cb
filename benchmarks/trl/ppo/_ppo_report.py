"""What vs_trl_ppo.py makes of its measurements: medians, and ratios of each side of ours to TRL's step before it."""

from collections.abc import Sequence
from typing import Any

from _vs_trl_report import LENGTH_TOLERANCE, side_line, side_summary, speed, spread, times

SIDES = {"trl": "TRL", "own": "posttrain, critic apart", "shared": "posttrain, shared trunk"}
"""In the order of their turns."""
Measured = dict[str, list[dict[str, Any]]]


def summary(measured: Measured) -> dict[str, Any]:
    """Of each side its medians and, where TRL ran too, how it compares."""
    result: dict[str, Any] = {side: side_summary(steps) for side, steps in measured.items()}
    if "trl" in measured:
        for side in measured.keys() - {"trl"}:
            result[f"trl_to_{side}"] = comparison(measured["trl"], measured[side])
    return result


def comparison(theirs: Sequence[dict[str, Any]], ours: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Ratios of neighbouring steps, and the share of memory."""
    pairs = list(zip(theirs, ours, strict=True))
    of_theirs, of_ours = side_summary(theirs), side_summary(ours)
    return {
        "times_faster": spread([a["seconds"] / b["seconds"] for a, b in pairs]),
        "times_cpu_seconds": spread([a["cpu_seconds"] / b["cpu_seconds"] for a, b in pairs]),
        "times_tokens_per_second": spread([speed(b) / speed(a) for a, b in pairs]),
        "peak_memory_share": of_ours["peak_mib"] / of_theirs["peak_mib"],
        "length_ratio": of_ours["mean_length"] / of_theirs["mean_length"],
    }


def lines(title: str, settings: str, result: dict[str, Any]) -> list[str]:
    """The result as a person reads it."""
    found = result["summary"]
    text = ["", title, f"  {settings}"]
    text += [f"  {label:24s} {side_line(found[side], result[side])}" for side, label in SIDES.items() if side in found]
    for side, label in SIDES.items():
        if (ratio := found.get(f"trl_to_{side}")) is None:
            continue
        text.append(
            f"  {label:24s} {times(ratio['times_faster'])} in seconds, {times(ratio['times_tokens_per_second'])} in"
            f" tokens/s, {times(ratio['times_cpu_seconds'])} in processor seconds,"
            f" {ratio['peak_memory_share']:.2f} of the memory"
        )
        if abs(ratio["length_ratio"] - 1) > LENGTH_TOLERANCE:
            text.append(f"  WARNING: our completions are {ratio['length_ratio']:.2f} times as long: see tokens/s")
    return text
