"""The course's period-count toy: PPO pays a small GPT-2 for full stops, under KL weights 0, .1 and 1.

    python benchmarks/period_count.py                       what is missing, cell after cell
    python benchmarks/period_count.py --minutes 7           no cell is begun after so many minutes
    python benchmarks/period_count.py --cells kl-0.1 --seeds 1
    python benchmarks/period_count.py --table --picture docs/pictures/period-count.png

A cell is `recipes/period-count-ppo.yaml` with a KL weight and a seed; `permuted` deals the rewards of kl-0.1 out over
the step at random, `course-loss` has the course's KL, the full one in the loss.  Finished cells are kept in
benchmarks/results/period_count.json and never run again; one that was stopped goes on from its last checkpoint.  Of a
policy, the base's first, completions of the four openings are measured as they are trained on, and of the course's two
other beginnings at temperature .8 and `LONG` tokens each.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from statistics import fmean, stdev
from time import monotonic
from typing import Any

import posttrain
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.policy import Policy
from posttrain.options.model import ModelOptions
from posttrain.options.task import SentencesOptions
from posttrain.records import Finish, Group
from posttrain.tasks.sentences_task import PeriodUse, period_strategies
from posttrain.training.update import group_logprobs

RESULTS = Path(__file__).parent / "results" / "period_count.json"
FOLDER = Path("runs/benchmark-period-count")
BASE = "bundled-prose"
IN_REWARD = {"estimator": "k1", "place": "reward"}
CELLS: Mapping[str, Mapping[str, Any] | None] = {
    "kl-0": None,
    "kl-0.1": {"coefficient": 0.1, **IN_REWARD},
    "kl-1": {"coefficient": 1.0, **IN_REWARD},
    "permuted": {"coefficient": 0.1, **IN_REWARD},
    "course-loss": {"coefficient": 0.1, "estimator": "full", "place": "loss"},
}
"""The KL term of each cell."""
WORDS = {
    "base": "before",
    "kl-0": "without KL",
    "kl-0.1": "KL weight 0.1",
    "kl-1": "KL weight 1",
    "permuted": "control, rewards permuted",
    "course-loss": "KL in the loss, as the course",
}
"""What cells are called in the picture."""
PURPOSES = {
    PeriodUse.RUN: "next to another",
    PeriodUse.DECIMAL: "in a decimal number",
    PeriodUse.LIST: "in a numbered list",
    PeriodUse.ABBREVIATION: "in an abbreviation",
    PeriodUse.SENTENCE: "ends a sentence",
    PeriodUse.OTHER: "other",
}
SHORT, LONG = 20, 50
"""Tokens, as in the course: in training, and behind its two other beginnings."""
SAMPLES = 64
"""Completions of each opening that a policy is measured on."""
SHOWN = 2
"""Completions of each of the course's two other beginnings that are kept as text."""


def permuted_periods(completions: list[str]) -> list[float]:
    """Reward function: the step's numbers of full stops, dealt out over its completions at random."""
    counts = [float(text.count(".")) for text in completions]
    Random("".join(completions)).shuffle(counts)
    return counts


def run(cell: str, seed: int, steps: int) -> dict[str, Any]:
    """One cell's entry."""
    folder = FOLDER / f"{cell}-{seed}"
    config = posttrain.load_recipe(
        "period-count-ppo",
        model={"path": BASE},
        algorithm={"name": "ppo", "kl": CELLS[cell]},
        rollout={"max_completion_tokens": SHORT},
        task={"name": "sentences", "held_out_size": 8},
        evaluation={"samples": 1},
        checkpoint={"every_steps": 10},
        run={"folder": str(folder), "seed": seed, "num_steps": steps, "threads": 1},
    )
    rewards = [permuted_periods] if cell == "permuted" else []
    goes_on = any((folder / "checkpoints").glob("step-*"))
    config = replace(config, run=replace(config.run, overwrite=not goes_on))
    trained = posttrain.train(config, rewards=rewards, resume=goes_on)
    if trained.interrupted:
        raise SystemExit(f"{folder}: interrupted; the same command goes on")
    policy = load_policy(ModelOptions(path=str(folder / "model")), inference=True)
    return {
        "cell": cell,
        "seed": seed,
        "steps": steps,
        "algorithm": config.algorithm,
        "rewards": step_rewards(folder),
        "seconds": trained.summary["seconds"]["total"],
        **measured(policy, load_policy(ModelOptions(path=BASE), inference=True)),
    }


def step_rewards(folder: Path) -> list[float]:
    """The mean reward of every step, those before a stop included."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [line["reward"] for line in map(json.loads, lines) if "reward" in line]


def measured(policy: Policy, base: Policy) -> dict[str, Any]:
    """What a policy writes: behind the openings as in training, and behind the others for the reader."""
    options = SentencesOptions()
    trained = posttrain.generate(
        policy, list(options.openings), group_size=SAMPLES, seed=1, max_completion_tokens=SHORT
    )
    others = posttrain.generate(
        policy, list(options.held_out_openings), group_size=SAMPLES, seed=1, max_completion_tokens=LONG, temperature=0.8
    )
    return {
        "openings": found(trained) | drift(trained, base),
        "others": {group.prompt.text: found([group]) for group in others},
        "shown": {group.prompt.text: [each.text for each in group.rollouts[:SHOWN]] for group in others},
    }


def found(groups: Sequence[Group]) -> dict[str, Any]:
    """Strategies and lengths of completions, and the share that stopped."""
    rollouts = [each for group in groups for each in group.rollouts]
    counts = [each.text.count(".") for each in rollouts]
    return {
        **asdict(period_strategies([each.text for each in rollouts])),
        "periods_error": stdev(counts) / math.sqrt(len(counts)),
        "mean_length": fmean(len(each.tokens) for each in rollouts),
        "characters": fmean(len(each.text) for each in rollouts),
        "stopped": fmean(each.finish is Finish.STOP for each in rollouts),
    }


def drift(groups: Sequence[Group], base: Policy) -> dict[str, float]:
    """KL(π‖base) of completions, k1 summed over each, in nats, with its standard error."""
    rollouts = [each for group in groups for each in group.rollouts]
    logprobs = group_logprobs(base, groups, temperature=1.0, max_tokens=4096)
    of_base = [part.sum().item() for part in logprobs.split([len(each.tokens) for each in rollouts])]
    ratios = [sum(each.logprobs) - other for each, other in zip(rollouts, of_base, strict=True)]
    return {"kl": fmean(ratios), "kl_error": stdev(ratios) / math.sqrt(len(ratios))}


def kept() -> dict[str, Any]:
    """What was measured already, by cell and seed."""
    entries: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    return entries


def keep(name: str, entry: Mapping[str, Any]) -> None:
    """Write one entry beside the others."""
    text = json.dumps({**kept(), name: entry}, indent=1) + "\n"
    RESULTS.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=list(CELLS), choices=list(CELLS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--picture", metavar="FILE", default="")
    given = parser.parse_args()
    began = monotonic()
    if not (given.table or given.picture):
        if "base" not in kept():
            base = load_policy(ModelOptions(path=BASE), inference=True)
            keep("base", measured(base, base))
        for seed in range(given.seeds):
            for cell in given.cells:
                if f"{cell}-{seed}" in kept() or monotonic() - began > 60 * given.minutes:
                    continue
                entry = run(cell, seed, given.steps)
                keep(f"{cell}-{seed}", entry)
                print(f"{cell} {seed}: {entry['rewards'][0]:.2f} -> {entry['openings']['periods']:.2f} full stops")
    if given.table:
        print(table(kept()))
    if given.picture:
        draw(kept(), Path(given.picture))


def of_cell(entries: Mapping[str, Any], cell: str) -> list[Mapping[str, Any]]:
    """The entries of a cell, by seed; the base is one too."""
    return [entry for name, entry in entries.items() if name == cell or name.rpartition("-")[0] == cell]


def table(entries: Mapping[str, Any]) -> str:
    """Means over the seeds of every cell, behind the openings and behind the others."""
    lines = [
        "| | seeds | full stops (of each seed) | " + " | ".join(PeriodUse) + " | words per sentence | KL | others |"
    ]
    lines.append("|---|---|---|" + "---|" * (len(PeriodUse) + 3))
    for cell in ("base", *CELLS):
        own = of_cell(entries, cell)
        if own:
            lines.append(row(cell, own))
    return "\n".join(lines)


def row(cell: str, own: Sequence[Mapping[str, Any]]) -> str:
    """One line of the table."""
    openings = [entry["openings"] for entry in own]
    single = ", ".join(f"{each['periods']:.2f}" for each in openings)
    uses = " | ".join(f"{fmean(each['uses'][use] for each in openings):.2f}" for use in PeriodUse)
    words, kl = (fmean(each[name] for each in openings) for name in ("words_per_sentence", "kl"))
    others = fmean(other["periods"] for entry in own for other in entry["others"].values())
    mean = fmean(each["periods"] for each in openings)
    return f"| {cell} | {len(own)} | {mean:.2f} ({single}) | {uses} | {words:.1f} | {kl:z.1f} | {others:.1f} |"


def draw(entries: Mapping[str, Any], picture: Path) -> None:
    """Draw the reward of every step, and what the full stops of the trained policies are for."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 5.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = [cell for cell in CELLS if of_cell(entries, cell)]
    for cell in names:
        curves = [entry["rewards"] for entry in of_cell(entries, cell)]
        steps = range(1, min(map(len, curves)) + 1)
        [line] = left.plot(
            steps, [fmean(curve[step - 1] for curve in curves) for step in steps], label=WORDS[cell], lw=2
        )
        for curve in curves:
            left.plot(steps, curve[: len(steps)], color=line.get_color(), alpha=0.25, linewidth=0.8)
    left.set(xlabel="step", ylim=(0, None))
    left.set_ylabel("full stops in 20 tokens", fontsize=12)
    left.set_title("Reward: mean over seeds, and each seed", fontsize=13)
    left.legend(fontsize=11)
    bars = ["base", *names]
    below = [0.0] * len(bars)
    for use in PeriodUse:
        counts = [fmean(entry["openings"]["uses"][use] for entry in of_cell(entries, cell)) for cell in bars]
        shares = [
            count / fmean(entry["openings"]["periods"] for entry in of_cell(entries, cell))
            for count, cell in zip(counts, bars, strict=True)
        ]
        labels = [WORDS[cell].replace(", ", ",\n").replace(" permuted", "\npermuted") for cell in bars]
        right.bar(labels, shares, bottom=below, label=PURPOSES[use])
        below = [bottom + share for bottom, share in zip(below, shares, strict=True)]
    right.set_ylabel("share of full stops", fontsize=12)
    right.set_title("What the full stops are for", fontsize=13)
    right.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=11)
    for axes in (left, right):
        axes.tick_params(labelsize=11)
    right.tick_params(axis="x", labelsize=10)
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main()
