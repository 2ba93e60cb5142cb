"""The demo for several seeds, and its control: does reward teach, and does it take the right reward?

    .venv/bin/python benchmarks/demo.py --seeds 0 1 2

Each seed is `posttrain rl countdown-tiny --run.seed SEED`, or another recipe (--recipe), timed as a whole process.  The
control is the same run with every step's rewards permuted across the whole step: as many rewards, none where it was
earned.  Held-out problems are judged by the true grader in both.  With `--compiler with without`, the seeds also run
without a C compiler, so that torch does all the work.  Results go to benchmarks/results/, a file for each recipe, where
runs of other names stay.
"""

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

RESULTS = Path(__file__).parent / "results"
FILES = {"countdown-tiny": "demo.json", "countdown-first-try": "first_try.json"}
SHOWN = (
    "accuracy_sampled",
    "accuracy_greedy",
    "pass_at_8",
    "mean_length",
    "tries_per_completion",
    "success_per_try",
    "success_of_first_try",
    "accuracy_never_giving_up",
)


def permuted_countdown(completions: list[str], **columns: object) -> list[float]:
    """Countdown's rewards of a step, dealt out anew among its completions by a generator seeded with their text."""
    from posttrain.rewards.countdown import countdown

    scores = [graded.score for graded in countdown(completions=completions, **columns)]
    digest = hashlib.blake2b("\0".join(completions).encode(), digest_size=8).digest()
    Random(digest).shuffle(scores)
    return scores


def run(recipe: str, name: str, flags: list[str], folder: Path, *, compiler: str | None = None) -> dict[str, Any]:
    """One run as the command makes it; its summary and its whole wall time."""
    command = [sys.executable, "-m", "posttrain", "rl", recipe, "--run.folder", str(folder), "--run.overwrite"]
    began = time.perf_counter()
    environment = os.environ | ({} if compiler is None else {"CC": compiler})
    subprocess.run([*command, *flags], check=True, env=environment)
    minutes = (time.perf_counter() - began) / 60
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "name": name,
        "machine": machine(),
        "minutes": minutes,
        **{key: summary[key] for key in ("before", "after", "seconds", "tokens")},
    }


def machine() -> dict[str, object]:
    """What the figures were measured on."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    return {"cpu": model, "cores": os.cpu_count(), "python": platform.python_version()}


def main() -> None:
    """Run all, print a table, keep the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--recipe", choices=FILES, default="countdown-tiny")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--no-control", action="store_true")
    parser.add_argument("--compiler", nargs="+", choices=("with", "without"), default=["with"])
    parser.add_argument("--folder", type=Path, help="default: runs/benchmark-RECIPE")
    parser.add_argument("flags", nargs="*", help="more flags of `posttrain rl`, after --")
    given = parser.parse_args()
    folder = given.folder or Path("runs") / f"benchmark-{given.recipe}"
    runs = []
    if not given.no_control:
        control = ["--rewards", f"{__file__}:permuted_countdown", "--run.seed", "0", *given.flags]
        runs.append(run(given.recipe, "control, rewards permuted", control, folder / "control"))
    for compiler, seed in product(given.compiler, given.seeds):
        name = f"seed {seed}" + (", no C compiler" if compiler == "without" else "")
        flags = ["--run.seed", str(seed), *given.flags]
        none = "no-compiler" if compiler == "without" else None
        runs.append(run(given.recipe, name, flags, folder / name.replace(", ", "-").replace(" ", "-"), compiler=none))
    print(f"\n{'run':<28}{'minutes':>8}  " + "  ".join(SHOWN))
    for item in runs:
        cells = [f"{item['before'][name]:.3f} -> {item['after'][name]:.3f}" for name in SHOWN if name in item["after"]]
        print(f"{item['name']:<28}{item['minutes']:>8.1f}  " + "  ".join(cells))
    results = RESULTS / FILES[given.recipe]
    kept = json.loads(results.read_text())["runs"] if results.exists() else []
    others = [item for item in kept if item["name"] not in {new["name"] for new in runs}]
    results.write_text(json.dumps({"runs": [*others, *runs]}, indent=2) + "\n")
    print(f"kept in {results}")


if __name__ == "__main__":
    main()
