"""What every reward would have paid along runs that one of them trained: scores of the completions in rollouts/.

    python benchmarks/rewards_along_runs.py RUN [RUN ...] [--steps 4]

Of each run of `posttrain rl` on Countdown the first and the last steps are read.  Each step draws problems of its own,
so no completion is of a problem that was trained on before.  Means with 95% intervals, 1.96 deviations of the means of
problems over the root of their number.  Nothing is sampled, and no model is loaded.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pyarrow.parquet as pq

from posttrain.rewards.countdown import CountdownCredit, CountdownSteps, countdown
from posttrain.rewards.shaping import graded_format

REWARDS = ("outcome", "format", "near", "process")


def scores(row: Mapping[str, Any]) -> dict[str, float]:
    """One completion by each reward."""
    columns = {name: [value] for name, value in json.loads(row["columns"]).items()}
    given: dict[str, Any] = {"completions": [row["completion"]], "finish_reasons": [row["finish"]], **columns}
    return {
        "outcome": countdown(**given)[0].score,
        "format": graded_format(**given)[0].score,
        "near": CountdownCredit(credit=0.5)(**given)[0].score,
        "process": sum(span.value for span in CountdownSteps()(**given)[0].spans),
    }


def of_steps(files: Sequence[Path]) -> dict[str, list[float]]:
    """The mean of each problem of some steps by each reward."""
    problems: dict[str, list[dict[str, float]]] = {}
    for file in files:
        for row in pq.read_table(file, columns=["prompt_id", "completion", "finish", "columns"]).to_pylist():
            problems.setdefault(row["prompt_id"], []).append(scores(row))
    return {name: [fmean(each[name] for each in rows) for rows in problems.values()] for name in REWARDS}


def shown(values: Sequence[float]) -> str:
    """A mean with its interval."""
    half = 1.96 * stdev(values) / len(values) ** 0.5
    return f"{fmean(values):.3f} ± {half:.3f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--steps", type=int, default=4)
    given = parser.parse_args()
    print(f"| run | steps | {' | '.join(REWARDS)} |")
    print("|---" * (len(REWARDS) + 2) + "|")
    for run in given.runs:
        files = sorted((run / "rollouts").glob("step-*.parquet"))
        for some in (files[: given.steps], files[-given.steps :]):
            told = of_steps(some)
            steps = f"{int(some[0].stem[5:])} to {int(some[-1].stem[5:])}"
            print(f"| {run.name} | {steps} | {' | '.join(shown(told[name]) for name in REWARDS)} |", flush=True)


if __name__ == "__main__":
    main()
