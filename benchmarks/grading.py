"""How many Countdown completions one core grades in a second.

    python benchmarks/grading.py [RUN]

With a run folder, its logged completions are graded; without one, written demonstrations of some eight tries, which
look the same.  A reasoning text of about 1,000 tokens is measured beside them.  The goal is 50,000 a second for the
first.
"""

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from posttrain.options.task import Demonstrator
from posttrain.rewards.countdown import Countdown, countdown
from posttrain.rewards.parsing.tags import END_THINK, THINK
from posttrain.tasks.countdown_problems import Difficulty, training_problem
from posttrain.tasks.countdown_task import demonstrate

NUM_GENERATED = 2000
SECONDS = 1.0


@dataclass(frozen=True)
class Row:
    """One completion with what its grade depends on."""

    problem: Countdown
    text: str
    finish: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", help="run folder whose rollouts/*.parquet are graded")
    run = parser.parse_args().run
    if run is None:
        rows, source = generated(), "written demonstrations (no run folder given)"
    else:
        rows, source = logged(run), f"completions logged in {run}"
    report(source, rows)
    report("a reasoning text of about 1,000 tokens", [reasoned(row) for row in generated()[:200]])


def logged(run: Path) -> list[Row]:
    """The completions of a run, as they were graded."""
    import pyarrow.parquet as pq

    files = sorted((run / "rollouts").glob("step-*.parquet"))
    if not files:
        raise SystemExit(f"{run} holds no rollouts/step-*.parquet; give the folder of a Countdown run")
    rows = []
    for file in files:
        table = pq.read_table(file, columns=["prompt", "completion", "finish", "columns"]).to_pylist()
        for line in table:
            columns = json.loads(line["columns"])
            problem = Countdown(tuple(columns["numbers"]), columns["target"], columns["rule"])
            prefill = THINK if line["prompt"].endswith(THINK) else ""
            rows.append(Row(problem, prefill + line["completion"], line["finish"]))
    return rows


def generated() -> list[Row]:
    """Completions as the bundled model writes them once it keeps trying."""
    who = Demonstrator(give_up=0.05)
    rng = Random("benchmark")
    problems = [training_problem(Difficulty(), "all", seed=0, index=index) for index in range(NUM_GENERATED)]
    return [Row(problem, demonstrate(problem, rng, who), "stop") for problem in problems]


def reasoned(row: Row) -> Row:
    """The same answer after 4,000 characters of prose, at about four characters a token."""
    a, b, c = row.problem.numbers
    line = f"Let me try {a} - {b} first: that gives {a - b}, and with {c} I am still not at {row.problem.target}. Hmm. "
    thinking = (line * (1 + 4000 // len(line)))[:4000]
    return Row(row.problem, THINK + thinking + row.text[row.text.index(END_THINK) :], row.finish)


def report(source: str, rows: list[Row]) -> None:
    """Grade the rows again and again for a second of processor time, and print the rate."""
    columns: dict[str, Any] = {
        "completions": [row.text for row in rows],
        "finish_reasons": [row.finish for row in rows],
        "numbers": [row.problem.numbers for row in rows],
        "target": [row.problem.target for row in rows],
        "rule": [row.problem.rule for row in rows],
    }
    correct = sum(graded.score == 1.0 for graded in countdown(**columns))
    passes, start = 0, time.process_time()
    while (spent := time.process_time() - start) < SECONDS:
        countdown(**columns)
        passes += 1
    characters = sum(len(row.text) for row in rows) / len(rows)
    print(f"{source}:")
    print(f"  {len(rows)} completions, {characters:.0f} characters on average, {correct / len(rows):.2f} correct")
    print(f"  {passes * len(rows) / spent:,.0f} gradings per second on one core")


if __name__ == "__main__":
    main()
