"""What both workers of vs_trl.py have in common; the standard library only, because two environments import it.

A worker reads its job from the JSON file that it is given, says when it is ready, and takes one training step for
each line on its standard input.  Its own standard output carries one JSON object a line; what libraries print goes
to standard error.
"""

import json
import os
import resource
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Job:
    """One side's share of a comparison; the other side's differs in nothing but what it does not read."""

    model: str
    """Folder of the model that both load."""
    rows: list[dict[str, Any]]
    """Prompts with their columns, step after step, `prompts_per_step` for each."""
    countdown: bool
    """Whether the rows are problems of the Countdown task."""
    reward: str
    """hash or countdown."""
    prompts_per_step: int
    group_size: int
    max_completion_tokens: int
    learning_rate: float
    tokens_per_microbatch: int
    steps: int
    """Steps that the rows are enough for."""
    seed: int
    threads: int
    device: str
    dtype: str
    micro_batch: int
    """TRL's completions per forward and backward pass; ours goes by its own default token budget."""

    @staticmethod
    def read(path: str) -> "Job":
        return Job(**json.loads(Path(path).read_text(encoding="utf-8")))


class Wire:
    """The worker's end of its conversation with vs_trl.py."""

    def __init__(self) -> None:
        self.out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)  # prints of libraries

    def send(self, facts: dict[str, Any]) -> None:
        print(json.dumps(facts), file=self.out, flush=True)

    def ready(self, prompts: Sequence[Sequence[int]], packages: Sequence[str]) -> None:
        """Say that steps may begin, and what they begin from."""
        self.send(
            {
                "versions": {name: version(name) for name in packages},
                "prompt_tokens": blake2b(repr([list(map(int, prompt)) for prompt in prompts]).encode()).hexdigest()[
                    :16
                ],
                "loaded_mib": resident_mib(),
            }
        )

    def wait(self) -> bool:
        """Whether another step is wanted."""
        return bool(sys.stdin.readline())

    def report(self, took: "Took", lengths: Sequence[int], rewards: Sequence[float], **more: float) -> None:
        self.send(
            {
                "seconds": took.seconds,
                "cpu_seconds": took.cpu_seconds,
                "tokens": sum(lengths),
                "mean_length": sum(lengths) / len(lengths),
                "longest": max(lengths),
                "reward": sum(rewards) / len(rewards),
                "peak_mib": peak_mib(),
                **more,
            }
        )


@dataclass(frozen=True, slots=True)
class Took:
    """What a step cost."""

    seconds: float
    cpu_seconds: float
    """Processor time of all threads of the process, those that wait for others in a loop included."""


class Stopwatch:
    """Runs from when it is made."""

    def __init__(self) -> None:
        self.began, self.cpu_began = time.perf_counter(), time.process_time()

    def read(self) -> Took:
        return Took(time.perf_counter() - self.began, time.process_time() - self.cpu_began)


def hash_score(token_ids: Sequence[int]) -> float:
    """A number in [0, 1) that any change of the completion changes, so that no group is uninformative."""
    return zlib.crc32(repr([int(token) for token in token_ids]).encode()) / 2**32


def peak_mib() -> float:
    """Most memory that this process ever had resident: ru_maxrss, in bytes on macOS and KiB elsewhere."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / MIB if sys.platform == "darwin" else peak / 1024


def resident_mib() -> float | None:
    """Memory resident now; None where there is no /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return None
    return pages * resource.getpagesize() / MIB
