"""The two sides' processes of a comparison: started, told to take a step, ended; and where they ran.

Each is a process of its own that takes one step when told, in turns, so that a busy machine slows both.
"""

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[2] / "src"
PATIENCE = 10.0
"""Seconds that a worker has to end of its own accord."""


class Worker:
    """One side's process."""

    def __init__(self, command: list[str], variables: dict[str, str], log: Path) -> None:
        self.command, self.log = command, log
        with self.log.open("w", encoding="utf-8") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=variables
            )
        try:
            self.ready = self.read()
        except BaseException:  # interrupted before anybody else knows of this process
            self.close()
            raise

    def step(self) -> dict[str, Any]:
        """Have one step taken."""
        assert self.process.stdin is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        return self.read()

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.close()
            end = "".join(self.log.read_text(encoding="utf-8").splitlines(keepends=True)[-20:])
            raise SystemExit(f"This worker stopped: {' '.join(self.command)}\n{end}")
        facts: dict[str, Any] = json.loads(line)
        return facts

    def close(self) -> None:
        """End of input is what a worker stops at; one in the middle of a step is ended."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def environment(options: argparse.Namespace) -> dict[str, str]:
    """Variables of every process: the same threads, no network, and our source tree for both."""
    threads = str(options.threads)
    ours = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "PYTHONPATH": str(SOURCE),  # TRL's side takes the Countdown grader from it, which needs no package
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if options.device == "cpu":
        ours["CUDA_VISIBLE_DEVICES"] = ""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | ours


def require_same_inputs(sides: Sequence[dict[str, Any]]) -> None:
    """Refuse a comparison of different prompts or of different arithmetic."""
    prompts = {side["prompt_tokens"] for side in sides}
    if len(prompts) > 1:
        raise SystemExit("The two sides read the prompts as different tokens; the numbers above compare nothing.")
    for package in ("torch", "transformers"):
        versions = {side["versions"][package] for side in sides}
        if len(versions) > 1:
            raise SystemExit(f"The two sides run different versions of {package}: {sorted(versions)}")


def measured_where(options: argparse.Namespace) -> dict[str, Any]:
    """The first lines of a result: the day, the machine, the versions and the threads."""
    return {
        "date": date.today().isoformat(),
        "machine": {"cpu": cpu_model(), "cores": os.cpu_count(), "system": platform.platform()},
        "python": platform.python_version(),
        "posttrain": version("posttrain"),
        "device": options.device,
        "threads": options.threads,
    }


def cpu_model() -> str:
    """The processor's name."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()
