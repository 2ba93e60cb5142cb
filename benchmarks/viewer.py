"""The viewer on a run of 100,000 rollouts: seconds to open it, milliseconds for a page of 100 rows, memory.

    python benchmarks/viewer.py [--run RUN] [--steps 400]

Without RUN it writes a folder of 400 steps of 256 completions, about 60 tokens each.  The viewer runs in a process of
its own, as its command does, and is asked over HTTP.  Memory is VmHWM of that process.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from os import sysconf
from pathlib import Path
from statistics import median
from tempfile import mkdtemp
from urllib.parse import urlencode

import pyarrow as pa
from pyarrow import parquet

GROUPS, GROUP_SIZE = 16, 16
ALPHABET = "0123456789+-*/=(), \n"
TIMES = 15


def write_run(folder: Path, steps: int) -> None:
    """A folder as `posttrain rl` leaves it, of random texts."""
    dice = random.Random(0)
    (folder / "rollouts").mkdir(parents=True)
    (folder / "format").write_text("2\n")
    (folder / "config.yaml").write_text("algorithm: {name: grpo}\ntask: {name: countdown}\n")
    lines = []
    for step in range(1, steps + 1):
        rows = [random_row(dice, step, draw, sample) for draw in range(GROUPS) for sample in range(GROUP_SIZE)]
        file = folder / f"rollouts/step-{step:06d}.parquet"
        parquet.write_table(pa.Table.from_pylist(rows), file, compression="zstd")
        reward = sum(row["reward"] for row in rows) / len(rows)
        lines.append(json.dumps({"step": step, "reward": reward, "completions/mean_length": 60.0, "step_time": 1.0}))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def random_row(dice: random.Random, step: int, draw: int, sample: int) -> dict[str, object]:
    length = dice.randint(20, 100)
    return {
        "step": step,
        "draw": draw,
        "sample": sample,
        "prompt_id": f"train/{step * GROUPS + draw}",
        "prompt": f"Use all of {draw}, {step} to make 39.\n",
        "completion": "".join(dice.choices(ALPHABET, k=2 * length)),
        "prompt_tokens": list(range(16)),
        "tokens": [dice.randint(0, 380) for _ in range(length)],
        "logprobs": [-dice.random() for _ in range(length)],
        "finish": "stop",
        "columns": "{}",
        "reward": float(dice.random() < 0.4),
        "advantage": dice.gauss(0, 1),
        "score/countdown": float(dice.random() < 0.4),
        "outcome/countdown": dice.choice(("correct", "wrong_value", "truncated")),
    }


class Asked:
    """A viewer that was started, and its address."""

    def __init__(self, folder: Path) -> None:
        began = time.perf_counter()
        command = [sys.executable, "-m", "posttrain", "view", str(folder), "--no-open"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.base, _, behind = self.process.stdout.readline().strip().partition("#token=")
        self.token = behind.partition("&")[0]
        self.started = time.perf_counter() - began

    def __call__(self, path: str, **query: object) -> dict[str, object]:
        address = f"{self.base}api/{path}?{urlencode(query)}"
        asked = urllib.request.Request(address, headers={"X-Posttrain-Token": self.token})
        with urllib.request.urlopen(asked) as answer:
            found: dict[str, object] = json.load(answer)
            return found

    def megabytes(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / sysconf("SC_CLK_TCK")


def milliseconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - began)


def until_done(ask: Asked, **query: object) -> tuple[float, int]:
    """Seconds and answers until a filter has looked through all files."""
    began, answers = time.perf_counter(), 1
    while not ask("run/0/rows", **query)["done"]:
        answers += 1
    return time.perf_counter() - began, answers


def pages_at_random(ask: Asked, dice: random.Random, total: int, **query: object) -> str:
    """Milliseconds of a page at a random place, and the processor time of the server."""
    used = ask.cpu_seconds()
    asked = [partial(ask, "run/0/rows", offset=dice.randrange(total), **query) for _ in range(TIMES)]
    pages = [milliseconds(each) for each in asked]
    used = 1000 * (ask.cpu_seconds() - used) / TIMES
    return f"{median(pages):8.0f} ms   (longest of {TIMES}: {max(pages):.0f} ms; processor time of one: {used:.0f} ms)"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--run", type=Path)
    options.add_argument("--steps", type=int, default=400)
    given = options.parse_args()
    made = None if given.run else Path(mkdtemp())
    folder = given.run if made is None else made / "run"
    if made:
        write_run(folder, given.steps)
    ask = Asked(folder)
    try:
        print(f"address printed after       {ask.started:8.2f} s")
        print(f"overview, the first answer  {milliseconds(lambda: ask('run/0/overview')):8.0f} ms")
        print(f"list of steps               {milliseconds(lambda: ask('run/0/steps')):8.0f} ms")
        print(f"first page of 100 rows      {milliseconds(lambda: ask('run/0/rows')):8.0f} ms")
        total = int(str(ask("run/0/rows")["total"]))
        dice = random.Random(1)
        print(f"a page of 100 of {total:<10,} {pages_at_random(ask, dice, total)}")
        filters: dict[str, dict[str, object]] = {
            "an outcome": {"outcome": "correct"},
            "a text": {"text": "39="},
            "an order by reward": {"sort": "-reward"},
            "an order by length": {"sort": "-length"},
        }
        for name, query in filters.items():
            seconds, answers = until_done(ask, **query)
            matches = int(str(ask("run/0/rows", **query)["matches"]))
            print(f"{name + ' over all rows':27} {1000 * seconds:8.0f} ms   in {answers} answers")
            print(f"  then a page of 100        {pages_at_random(ask, dice, matches, **query)}")
        print(f"list of problems            {milliseconds(lambda: ask('run/0/problems')):8.0f} ms")
        print(f"memory at most              {ask.megabytes():8.0f} MB")
    finally:
        ask.process.terminate()
        if made:
            shutil.rmtree(made)


if __name__ == "__main__":
    main()
