"""summary.json: the results of a run, as numbers for other programs."""

import platform
import resource
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

HELD_OUT = ("accuracy_sampled", "accuracy_greedy", "pass_at_8")
"""Held-out results that come with an interval, `<name>_interval` = [low, high]."""

SCORE = "score"
"""The mean score by the task's measure; replaces accuracies where scores count something."""
LEFT_OUT = "accuracy"
"""The reason why there are no accuracies."""

REWARD = "reward"
"""The mean reward, as training sums it; None in runs of early versions."""

PACKAGES = ("posttrain", "torch", "transformers", "safetensors", "tokenizers", "numpy")
"""Packages that a run's numbers can depend on."""


def build_summary(
    *,
    before: Mapping[str, object],
    after: Mapping[str, object],
    seconds: Mapping[str, float],
    tokens: Mapping[str, int],
    device: str,
    run: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """The content of summary.json.

    `before` and `after` are held-out results: `accuracy_sampled`, `accuracy_greedy` and `pass_at_8`, each with a
    `<name>_interval` of [low, high], `mean_length` in tokens, and further ones.  None means not measured, such as
    pass@8 from fewer than 8 samples.  `run` has further entries: steps, algorithm, rewards, recipe, machine.
    `seconds` by stage and `tokens` by kind cover the whole run, also before a resume; peak memory is this process's.
    """
    return {
        "before": held_out_results(before),
        "after": held_out_results(after),
        "seconds": {**seconds, "total": sum(seconds.values())},
        "tokens": dict(tokens),
        "peak_memory_bytes": peak_memory_bytes(),
        "versions": versions(),
        "device": device,
        **(run or {}),
    }


def held_out_results(results: Mapping[str, object]) -> dict[str, object]:
    """An evaluation's results, with every required key of summary.json."""
    required = [*HELD_OUT, *(f"{name}_interval" for name in HELD_OUT), "mean_length"]
    missing = [name for name in required if name not in results]
    assert not missing, f"evaluation without {', '.join(missing)}"
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in results.items()}
    return {name: plain[name] for name in required} | {REWARD: None, f"{REWARD}_interval": None} | plain


def headline(results: Mapping[str, object], prefix: str = "") -> tuple[str, float] | None:
    """The main held-out result: the accuracy at temperature 1, else the mean score, else the mean reward."""
    for name in ("accuracy_sampled", SCORE, REWARD):
        value = results.get(prefix + name)
        if isinstance(value, int | float):
            return name, float(value)
    return None


def peak_memory_bytes() -> int:
    """Peak physical memory of this process so far, without graphics memory."""
    status = Path("/proc/self/status")
    if status.is_file():  # on Linux, getrusage also counts the parent process
        (peak,) = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
        return int(peak) * 1024
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024  # kilobytes elsewhere


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}
