"""What vs_trl.py makes of its measurements: medians, ratios of neighbouring steps, and the lines it prints."""

import argparse
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from _vs_trl_shapes import Line, Shape

LENGTH_TOLERANCE = 0.10
"""Mean completion lengths further apart than this make seconds incomparable; tokens per second still are."""

Measured = dict[str, list[dict[str, Any]]]


def summary(measured: Measured) -> dict[str, Any]:
    """Medians of each side and, where both ran, ratios of each step of TRL's to ours that followed it."""
    result: dict[str, Any] = {side: side_summary(steps) for side, steps in measured.items()}
    if len(measured) == 2:
        pairs = list(zip(measured["trl"], measured["ours"], strict=True))
        result["times_faster"] = spread([theirs["seconds"] / ours["seconds"] for theirs, ours in pairs])
        result["times_cpu_seconds"] = spread([theirs["cpu_seconds"] / ours["cpu_seconds"] for theirs, ours in pairs])
        result["times_tokens_per_second"] = spread([speed(ours) / speed(theirs) for theirs, ours in pairs])
        theirs, ours = result["trl"], result["ours"]
        result["peak_memory_share"] = ours["peak_mib"] / theirs["peak_mib"]
        if "peak_device_mib" in ours:
            result["peak_device_memory_share"] = ours["peak_device_mib"] / theirs["peak_device_mib"]
        result["length_ratio"] = ours["mean_length"] / theirs["mean_length"]
    return result


def side_summary(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One side's steps in brief."""
    result = {
        "seconds": spread([step["seconds"] for step in steps]),
        "cpu_seconds": spread([step["cpu_seconds"] for step in steps]),
        "tokens_per_second": spread([speed(step) for step in steps]),
        "peak_mib": max(step["peak_mib"] for step in steps),
        "mean_length": fmean(step["mean_length"] for step in steps),
        "longest": max(step["longest"] for step in steps),
        "reward": fmean(step["reward"] for step in steps),
    }
    if "peak_device_mib" in steps[0]:
        result["peak_device_mib"] = max(step["peak_device_mib"] for step in steps)
    stages = [name for name in steps[0] if name.startswith("seconds_")]
    return result | {name: median(step[name] for step in steps) for name in stages}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def speed(step: dict[str, Any]) -> float:
    """Completion tokens per second of one step."""
    return float(step["tokens"] / step["seconds"])


def lines(options: argparse.Namespace, shape: Shape, line: Line, result: dict[str, Any]) -> list[str]:
    """The result as a person reads it."""
    found = result["summary"]
    text = ["", f"{options.shape} on {options.device}, {options.threads} threads, {line}:"]
    text += [f"  {setting}" for setting in settings(options, shape, line, result)]
    for side, label in (("trl", "TRL"), ("ours", "posttrain")):
        if side in found:
            text.append(f"  {label:9s}  {side_line(found[side], result[side])}")
    if "times_faster" in found:
        seconds, tokens = times(found["times_faster"]), times(found["times_tokens_per_second"])
        text.append(
            f"  ratio      {seconds} in seconds, {tokens} in tokens/s, {found['peak_memory_share']:.2f} of the memory"
        )
        text.append(f"             {times(found['times_cpu_seconds'])} in processor seconds")
        if "peak_device_memory_share" in found:
            text.append(f"             {found['peak_device_memory_share']:.2f} of the device memory")
        if abs(found["length_ratio"] - 1) > LENGTH_TOLERANCE:
            text.append(
                f"  WARNING    our completions are {found['length_ratio']:.2f} times as long on average:"
                " compare tokens per second, or measure more steps"
            )
    return text


def settings(options: argparse.Namespace, shape: Shape, line: Line, result: dict[str, Any]) -> list[str]:
    """What was the same, and what TRL was given."""
    arithmetic = "float32" if options.device == "cpu" else "bfloat16 autocast over float32 weights"
    exact = shape.network is not None or line.exact_tokens is not None
    length = f"{'exactly' if exact else 'at most'} {line.exact_tokens or shape.completion_tokens} completion tokens"
    shared = (
        f"{shape.prompts} prompts x {shape.group_size}, {length}, temperature 1, one update, GRPO without KL,"
        f" sample deviation, AdamW {shape.learning_rate:g}, {arithmetic}"
    )
    text = [shared]
    if "trl" in result:
        tried = ", ".join(
            f"{size}: {seconds:.2f} s" for size, seconds in result["trl_micro_batches_tried_seconds"].items()
        )
        text.append(
            f"TRL: transformers generate, {result['trl_micro_batch']} completions per pass"
            f"{f' (tried {tried})' if tried else ''}, no gradient checkpointing, fused AdamW, nothing logged or saved"
        )
    return text


def side_line(found: dict[str, Any], side: dict[str, Any]) -> str:
    """One side's medians."""
    seconds, tokens = found["seconds"], found["tokens_per_second"]
    versions = ", ".join(f"{name} {number}" for name, number in side["versions"].items())
    device = f", {found['peak_device_mib']:,.0f} MiB on the device" if "peak_device_mib" in found else ""
    return (
        f"{seconds['median']:.2f} s per step ({seconds['min']:.2f} to {seconds['max']:.2f}), "
        f"{found['cpu_seconds']['median']:.2f} s of processor time, "
        f"{tokens['median']:,.0f} tokens/s, peak {found['peak_mib']:,.0f} MiB{device}, "
        f"mean length {found['mean_length']:.1f}, longest {found['longest']}, reward {found['reward']:.3f}; {versions}"
    )


def times(values: dict[str, float]) -> str:
    """A ratio with its range."""
    return f"{values['median']:.2f}x ({values['min']:.2f} to {values['max']:.2f})"
