"""Seconds from typing `posttrain rl countdown-tiny` to the first token that it samples, on an otherwise idle machine.

    python benchmarks/startup.py [--runs 5]

The parity probe's tokens, before the plan is shown, do not count.  Each run is a process of its own and ends with that
token; the first one, which finds cold files, is left out.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time


def timed_run(began: float, arguments: list[str]) -> None:
    """The command, ended by the first token that it samples."""
    from posttrain.generation.decoding_rows import Rows

    start = Rows.start

    def timed_start(rows, prefilled):
        start(rows, prefilled)
        if rows.request.key.purpose != "parity":
            print("first token", time.time() - began, flush=True)
            os._exit(0)

    Rows.start = timed_start
    from posttrain.cli import main

    sys.exit(main(arguments))


def seconds_to_first_token() -> float:
    """One run, from the start of its process."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--began", str(time.time()), "rl", "countdown-tiny"]
        done = subprocess.run(
            [*command, "--run.folder", folder, "--run.overwrite"],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    found = [line for line in done.stdout.splitlines() if line.startswith("first token")]
    if not found:
        raise SystemExit(f"no token was sampled: {done.stdout}\n{done.stderr}")
    return float(found[0].removeprefix("first token "))


def main() -> None:
    """Print the least, the median and the most of several runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    given, command = parser.parse_known_args()
    if given.began is not None:
        timed_run(given.began, command)
    _, *times = [seconds_to_first_token() for _ in range(given.runs + 1)]
    print(f"{min(times):.2f} s at least, {statistics.median(times):.2f} s median, {max(times):.2f} s at most")


if __name__ == "__main__":
    main()
