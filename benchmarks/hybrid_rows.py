"""The rows of recipes/hybrid-tiny.yaml: demonstrations of two tasks, and puzzles that a rule can check.

    python benchmarks/hybrid_rows.py --write runs/hybrid-rows

`demonstrations.jsonl` has searches for Countdown and continued sums by turns, `puzzles.jsonl` Countdown problems with
the columns that the reward `countdown` reads, `sums.jsonl` the prompts of benchmarks/sums_task.py.
Problems are those that `task: countdown` trains on: numbers that it holds out are in no row.
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from random import Random

import sums_task

from posttrain.options.task import CountdownOptions, Demonstrator
from posttrain.rewards.countdown import Countdown
from posttrain.tasks.countdown_problems import training_problem
from posttrain.tasks.countdown_task import compact, demonstrate, difficulty


def problem(seed: int, index: int) -> Countdown:
    """A Countdown problem that may be trained on."""
    task = CountdownOptions()
    return training_problem(difficulty(task), task.numbers, seed=seed, index=index)


def puzzles(number: int) -> Iterator[Mapping[str, object]]:
    """Problems as rows."""
    for each in (problem(2, index) for index in range(number)):
        yield {"prompt": compact(each), "numbers": each.numbers, "target": each.target, "rule": each.rule}


def demonstrations(number: int) -> Iterator[Mapping[str, object]]:
    """As many of each task."""
    for index, sums in enumerate(sums_task.demonstrations(number)):
        asked = problem(1, index)
        search = demonstrate(asked, Random(f"hybrid {index}"), Demonstrator())
        yield {"prompt": compact(asked), "completion": search}
        yield sums


def write(folder: Path, *, num_demonstrations: int, num_puzzles: int) -> None:
    """The three files."""
    rows: Mapping[str, Iterable[Mapping[str, object]]] = {
        "demonstrations": demonstrations(num_demonstrations),
        "puzzles": puzzles(num_puzzles),
        "sums": ({"prompt": each} for each in sums_task.prompts()),
    }
    sums_task.write_rows(folder, rows)


def main() -> None:
    """Write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", metavar="FOLDER", type=Path, required=True)
    parser.add_argument("--num-demonstrations", type=int, default=1500, help="of each task")
    parser.add_argument("--num-puzzles", type=int, default=1000)
    given = parser.parse_args()
    write(given.write, num_demonstrations=given.num_demonstrations, num_puzzles=given.num_puzzles)


if __name__ == "__main__":
    main()
