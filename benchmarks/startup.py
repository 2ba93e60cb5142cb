"""Seconds from typing `posttrain rl countdown-tiny` to the first token that it samples, on an otherwise idle machine.

    python benchmarks/startup.py [--runs 5]

The parity probe's tokens, before the plan is shown, do not count.  Each run is a process of its own and ends with that
token; the first one, which finds cold files, is left out.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time

PROGRAM = """
import os, sys, time

began = float(sys.argv.pop(1))
import posttrain.generation.decoding_rows as decoding

add = decoding.Rows.add


def timed_add(rows, starting):
    add(rows, starting)
    if rows.request.key.purpose != "parity":
        print("first token", time.time() - began, flush=True)
        os._exit(0)


decoding.Rows.add = timed_add
from posttrain.cli import main

sys.exit(main())
"""


def seconds_to_first_token() -> float:
    """One run, from the start of its process."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", PROGRAM, str(time.time()), "rl", "countdown-tiny", "--run.folder", folder]
        done = subprocess.run(
            [*command, "--run.overwrite"], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
        )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("first token")] or [done.stderr]
    return float(line.removeprefix("first token "))


def main() -> None:
    """Print the least, the median and the most of several runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    _, *times = [seconds_to_first_token() for _ in range(given.runs + 1)]
    print(f"{min(times):.2f} s at least, {statistics.median(times):.2f} s median, {max(times):.2f} s at most")


if __name__ == "__main__":
    main()
