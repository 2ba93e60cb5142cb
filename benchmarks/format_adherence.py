"""Format adherence by several objectives beside each other, and its control: which of them learn, and where one stops.

    .venv/bin/python benchmarks/format_adherence.py --seeds 0 1 2

Each is recipes/format-adherence-tiny.yaml with another `algorithm`:

    ours              the recipe: token ratios to the policy that sampled, k3 of tokens to the model without adapter
    course            one ratio to the reference per completion, clipped at .2, and k3 of the summed log-ratio
    course, as run    the same with the reference taken from the policy before each step, which is what a loop does that
                      calls disable_adapter() and never enters it: ratio 1, KL 0
    course, ratio μ   the course's KL to the true reference, but the completion's ratio to the policy that sampled
    course, longer    `course` for 75 steps
    control           the recipe, with every step's rewards permuted over the whole step

Held-out questions are judged by the true grader in all.  Results go to benchmarks/results/format-adherence.json.
"""

import argparse
import hashlib
import json
import os
import platform
import time
from pathlib import Path
from random import Random
from typing import Any

RESULTS = Path(__file__).parent / "results" / "format-adherence.json"
COMPLETION_LEVEL: dict[str, Any] = {
    "name": "gspo",
    "sequence_ratio": "product",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "kl": {"coefficient": 0.05, "level": "completion"},
}
TO_REFERENCE = {**COMPLETION_LEVEL, "ratio_to": "reference"}
VARIANTS: dict[str, dict[str, Any]] = {
    "ours": {},
    "course": {"algorithm": TO_REFERENCE},
    "course, as run": {"algorithm": TO_REFERENCE, "reference": {"refresh_every": 1}},
    "course, ratio μ": {"algorithm": COMPLETION_LEVEL},
    "course, longer": {"algorithm": TO_REFERENCE, "run": {"num_steps": 75}},
    "control": {},
}
SHOWN = ("accuracy_greedy", "accuracy_sampled", "answer_accuracy_greedy", "format_and_answer_greedy", "mean_length")
METRICS = ("reward", "clip_ratio/region_mean", "kl", "loss/kl", "ratio/mean", "eval/accuracy_sampled")


def permuted_format(completions: list[str], **columns: Any) -> list[float]:
    """The format's rewards of a step, dealt out anew among its completions by a generator seeded with their text."""
    from posttrain.rewards.shaping import line_format

    scores = [graded.score for graded in line_format(completions=completions, **columns)]
    digest = hashlib.blake2b("\0".join(completions).encode(), digest_size=8).digest()
    Random(digest).shuffle(scores)
    return scores


def measured(name: str, seed: int, folder: Path) -> dict[str, Any]:
    """One run: what was held out before and after, the course's training rows after, and the metrics of its steps."""
    import posttrain
    from posttrain.rewards.grading.function import reward_function

    control = reward_function(permuted_format, text_only=True)
    place = {"seed": seed, "folder": str(folder), "overwrite": True}
    variant = VARIANTS[name]
    config = posttrain.load_recipe("format-adherence-tiny", **{**variant, "run": {**variant.get("run", {}), **place}})
    began = time.perf_counter()
    run = posttrain.train(config, rewards=[control] if name == "control" else ())
    minutes = (time.perf_counter() - began) / 60
    summary = json.loads((folder / "summary.json").read_text())
    rows = posttrain.load_recipe("format-adherence-tiny", task={"measured_on": "training"})
    steps = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "name": name,
        "seed": seed,
        "minutes": minutes,
        "before": {key: summary["before"][key] for key in SHOWN},
        "after": {key: summary["after"][key] for key in SHOWN},
        "training_rows": {key: value for key, value in posttrain.evaluate(run.folder, rows).items() if key in SHOWN},
        "steps": [{key: step[key] for key in METRICS if key in step} for step in steps],
    }


def machine() -> dict[str, Any]:
    """What the minutes were measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = (line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    return {"cpu": next(named, platform.processor()), "cores": os.cpu_count(), "python": platform.python_version()}


def table(runs: list[dict[str, Any]]) -> list[str]:
    """Before → after of every run."""
    lines = [f"{'run':<24}{'minutes':>8}  " + "  ".join(f"{name:<24}" for name in (*SHOWN, "training rows, greedy"))]
    for item in runs:
        cells = [f"{item['before'][name]:.3f} -> {item['after'][name]:.3f}" for name in SHOWN]
        cells.append(f"{item['training_rows']['accuracy_greedy']:.3f}")
        name = f"{item['name']}, seed {item['seed']}"
        lines.append(f"{name:<24}{item['minutes']:>8.1f}  " + "  ".join(f"{cell:<24}" for cell in cells))
    return lines


def main() -> None:
    """Run all, print a table, keep the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--only", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmark-format-adherence"))
    given = parser.parse_args()
    runs = []
    for seed in given.seeds:
        for name in given.only:
            folder = given.folder / f"{'-'.join(name.replace(',', '').split())}-{seed}"
            runs.append(measured(name, seed, folder))
            print("\n".join(table(runs)), flush=True)
    earlier = json.loads(RESULTS.read_text())["runs"] if RESULTS.is_file() else []
    done = {(item["name"], item["seed"]) for item in runs}
    kept = [item for item in earlier if (item["name"], item["seed"]) not in done]
    RESULTS.write_text(json.dumps({"machine": machine(), "runs": [*kept, *runs]}, indent=1) + "\n")
    print(f"kept in {RESULTS}")


if __name__ == "__main__":
    main()
