"""Steps and tokens per minute, and held-out accuracy where steps are collected ahead, beside the same run in order.

    .venv/bin/python benchmarks/staleness.py --staleness 0 2
    .venv/bin/python benchmarks/staleness.py --staleness 0 1 2 4 --steps 40 --seeds 0 1 2 --reward-seconds 0

The runs are recipes/countdown-tiny.yaml with a reward that takes a second for each completion, 32 at a time, as a judge
on a server does: 8 seconds for the 256 completions of a step.  With --correction each run is made a second time with
`correction: {level: token}`.  Results are added to benchmarks/results/staleness.json.
"""

import argparse
import asyncio
import json
import platform
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

RESULTS = Path(__file__).parent / "results" / "staleness.json"
HELD_OUT = ("accuracy_sampled", "accuracy_sampled_interval", "mean_length")
FILLED = 4
"""Steps before the speed is measured: until then fewer than K + 1 are under way."""
METRICS = (
    "staleness/mean",
    "staleness/max",
    "sampling/effective_sample_size",
    "seconds/grade",
    "seconds/wait",
    "seconds/sampler_wait",
)


class SlowReward:
    """The task's own reward, a while after it is asked for."""

    __name__ = "slow"

    def __init__(self, seconds: float, at_once: int) -> None:
        from posttrain.rewards.countdown import countdown

        self.seconds, self.at_once, self.grade = seconds, at_once, countdown

    async def __call__(self, completions: Sequence[str], **columns: Any) -> Any:
        if self.seconds:
            slots = asyncio.Semaphore(self.at_once)
            await asyncio.gather(*(self.wait(slots) for _ in completions))
        return self.grade(completions=completions, **columns)

    async def wait(self, slots: asyncio.Semaphore) -> None:
        async with slots:
            await asyncio.sleep(self.seconds)


def measured(options: argparse.Namespace, staleness: int, correction: bool, seed: int, folder: Path) -> dict[str, Any]:
    import posttrain

    begun: list[float] = []

    class Times(posttrain.Watcher):
        def on_step(self, report: Any) -> None:
            begun.append(time.monotonic())

    algorithm = {"correction": {"level": "token"}} if correction else {}
    config = posttrain.load_recipe(
        "countdown-tiny",
        algorithm=algorithm,
        task={"held_out_size": options.held_out},
        update={"learning_rate": 1e-4, "warmup_steps": 5, "epochs_per_step": options.epochs},
        engine={"native": False},
        rollout={"max_staleness": staleness, "max_rows": options.rows or 256 * (1 + staleness)},
        evaluation={"every_steps": 0, "samples": options.samples},
        run={
            "folder": str(folder),
            "num_steps": options.steps,
            "time_limit_minutes": None,
            "seed": seed,
            "threads": options.threads,
            "curves": False,
        },
        checkpoint={"every_steps": 0},
    )
    reward = SlowReward(options.reward_seconds, options.at_once)
    began = time.process_time()
    run = posttrain.train(config, rewards=[reward], watchers=[Times()])
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "step_time" in line][1:]
    minutes = (begun[-1] - begun[FILLED - 1]) / 60
    tokens = sum(line["tokens/completion"] for line in steps[FILLED - 1 :])
    return {
        "staleness": staleness,
        "correction": correction,
        "seed": seed,
        "steps": options.steps,
        "reward_seconds": options.reward_seconds,
        "at_once": options.at_once,
        "epochs": options.epochs,
        "max_rows": config.rollout.max_rows,
        "steps_per_minute": (len(begun) - FILLED) / minutes,
        "tokens_per_minute": tokens / minutes,
        "cpu_seconds": time.process_time() - began,
        "before": {name: run.summary["before"][name] for name in HELD_OUT},
        "after": {name: run.summary["after"][name] for name in HELD_OUT},
        **{name: fmean(found) for name in METRICS if (found := [line[name] for line in steps if name in line])},
        "machine": f"{platform.machine()}, {options.threads} threads",
    }


def shown(found: dict[str, Any]) -> str:
    low, high = found["after"]["accuracy_sampled_interval"]
    what = f"K = {found['staleness']}{', corrected' if found['correction'] else ''}, seed {found['seed']}"
    before, after = (found[when]["accuracy_sampled"] for when in ("before", "after"))
    stale, effective = found.get("staleness/mean", 0.0), found.get("sampling/effective_sample_size", 1.0)
    return (
        f"{what:24} {found['steps_per_minute']:6.2f} steps and {found['tokens_per_minute']:6.0f} tokens a minute"
        f"   accuracy {before:.3f} -> {after:.3f}"
        f" [{low:.3f}, {high:.3f}]   staleness {stale:.2f}   effective {effective:.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=16, help=f"at least {FILLED + 1}")
    parser.add_argument("--held-out", type=int, default=512, help="held-out problems")
    parser.add_argument("--samples", type=int, default=8, help="held-out completions of each problem")
    parser.add_argument("--epochs", type=int, default=1, help="passes of the update over a step: more make it longer")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--reward-seconds", type=float, default=1.0)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--rows", type=int, default=0, help="decoded together; 0 is 256 for each step under way")
    parser.add_argument("--correction", action="store_true", help="each run with K > 0 a second time, corrected")
    options = parser.parse_args()
    lines: list[str] = []
    for seed, staleness in product(options.seeds, options.staleness):
        for correction in (False, True) if options.correction and staleness else (False,):
            with tempfile.TemporaryDirectory() as folder:
                found = measured(options, staleness, correction, seed, Path(folder) / "run")
            lines.append(shown(found))
            results = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
            RESULTS.write_text(json.dumps([*results, found], indent=1) + "\n")
    print("\n".join(["", *lines]))


if __name__ == "__main__":
    main()
