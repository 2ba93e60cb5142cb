"""A learned reward beside the true one as the policy moves away from where it started, and what holds it back.

    posttrain phases three-stage-tiny --folder runs/three-stage       first: demonstrations, pairs, reward model, policy
    python benchmarks/over_optimisation.py                            every cell that has not been run
    python benchmarks/over_optimisation.py --table --picture docs/pictures/over-optimisation.png

Each cell is the last phase of the recipe with another reward or KL weight: PPO from the model of its first phase, the
true reward reported only.  A weight of 1e-6 measures the KL and holds nothing.  `free` is paid by the recipe's reward
model; the cells called `few` by one that learned every tenth of its pairs, and the ensemble is of three such that
learned the same pairs from other seeds, of which the least counts.  `flawed` learned the same completions as a judge
would order them whom large numbers impress (`larger_numbers` of benchmarks/sums_task.py).

Every cell's steps are kept in benchmarks/results/over_optimisation.json; a cell that is in there is not run again.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
from sums_task import larger_numbers

import posttrain
from posttrain.commands.phase_list import Phase, read_phases
from posttrain.config import RewardModelConfig

matplotlib.use("Agg")
from matplotlib import pyplot

RESULTS = Path(__file__).parent / "results" / "over_optimisation.json"
THREE_STAGE = Path("runs/three-stage")
FOLDER = Path("runs/over-optimisation")
FREE, HELD = 1e-6, 0.4
CELLS: Mapping[str, tuple[str, float]] = {
    "free": ("judge", FREE),
    "few_free": ("few", FREE),
    "few_kl": ("few", HELD),
    "few_ensemble": ("ensemble", FREE),
    "flawed_free": ("flawed", FREE),
    "flawed_kl": ("flawed", HELD),
}
"""What is optimised, and the weight of the KL in the reward."""
WORDS = {
    "free": "All pairs, no KL",
    "few_free": "A tenth of the pairs, no KL",
    "few_kl": "A tenth of the pairs, KL weight 0.4",
    "few_ensemble": "Least of three, a tenth of the pairs, no KL",
    "flawed_free": "Judge that likes large numbers, no KL",
    "flawed_kl": "The same judge, KL weight 0.4",
}
"""What cells are called in the picture; without KL is a weight of 10⁻⁶."""
OTHER_SEEDS = (1, 2)
FEW = 10
"""The judges of few pairs learn every tenth of the recipe's."""
SMOOTHED = 5
"""Steps that a point of the curve is the mean of."""
DRAWN = ("kl", "true", "learned")
"""What the picture shows."""
NEAR = 4
"""Steps before and behind one that somebody counts in who looks at every second."""
MEASURES = {
    "kl": "kl_completion",
    "learned": "rewards/judge/mean",
    "learned_std": "rewards/judge/std",
    "true": "rewards/true_reward/mean",
    "true_std": "rewards/true_reward/std",
    "sums": "rewards/num_sums/mean",
    "second_number": "rewards/second_number/mean",
}


def phases() -> dict[str, Phase]:
    """Those of the recipe, whose runs are there."""
    return {phase.name: phase for phase in read_phases("three-stage-tiny", THREE_STAGE)}


def config_of(name: str) -> Any:
    """A phase's config, with the folders of the others in place of their names."""
    found = phases()
    return found[name].config({each: phase for each, phase in found.items() if phase.number < found[name].number})


def few_pairs() -> list[dict[str, object]]:
    """Every tenth of the recipe's pairs."""
    lines = (phases()["pairs"].folder / "preferences.jsonl").read_text().splitlines()[::FEW]
    wanted = ("prompt", "chosen", "rejected", "margin")
    return [{name: row[name] for name in wanted} for row in map(json.loads, lines)]


def relabelled() -> list[dict[str, object]]:
    """The recipe's pairs, ties included, in the order of the judge with the flaw."""
    folder = phases()["pairs"].folder
    lines = [line for name in ("preferences", "ties") for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    rows = []
    for row in map(json.loads, lines):
        answers = [row["chosen"], row["rejected"]]
        low, high = sorted(zip(larger_numbers([row["prompt"]] * 2, answers), answers, strict=True))
        if low[0] < high[0]:  # with a margin, as the recipe's own rows have one
            rows.append({"prompt": row["prompt"], "chosen": high[1], "rejected": low[1], "margin": high[0] - low[0]})
    return rows


def reward_model(name: str, *, seed: int, rows: list[dict[str, object]]) -> Path:
    """The folder of another reward model, of these pairs by the recipe's own options; made where it is not there."""
    folder = FOLDER / name
    if not (folder / "summary.json").is_file():
        recipe = config_of("judge")
        config = posttrain.load_recipe(
            kind=RewardModelConfig,
            model=recipe.model,
            task={"name": "dataset", "held_out_share": recipe.task.held_out_share},
            reward_model=recipe.reward_model,
            checkpoint=recipe.checkpoint,
            run={"folder": str(folder), "overwrite": True, "seed": seed, "threads": 1},
        )
        require_whole(posttrain.train_reward_model(config, rows=rows))
    return folder / "model"


def require_whole(run: posttrain.Run) -> posttrain.Run:
    """End here where the run was interrupted: what is kept are whole cells."""
    if run.interrupted:
        raise SystemExit(f"{run.folder}: interrupted; the same command begins it again")
    return run


def rewards_of(kind: str) -> list[Any]:
    """What a cell is paid, and what is only reported."""
    reported = ("true_reward", "num_sums", "second_number")
    shown: list[Any] = [{"path": f"benchmarks/sums_task.py:{name}", "weight": 0.0} for name in reported]
    judge = str(phases()["judge"].folder / "model")
    if kind == "flawed":
        judge = str(reward_model("flawed", seed=0, rows=relabelled()))
    if kind in {"few", "ensemble"}:
        judge = str(reward_model("few", seed=0, rows=few_pairs()))
    paid: dict[str, Any] = {"model": judge, "name": "judge"}
    if kind == "ensemble":
        others = [str(reward_model(f"few-{seed}", seed=seed, rows=few_pairs())) for seed in OTHER_SEEDS]
        paid |= {"ensemble": others, "combine": "least"}
    return [*shown, paid]


def run(cell: str, *, steps: int, seed: int) -> dict[str, Any]:
    """A cell's curve."""
    kind, weight = CELLS[cell]
    recipe = config_of("policy")
    folder = FOLDER / f"{cell}-{seed}"
    config = posttrain.load_recipe(
        model=recipe.model,
        task=recipe.task,
        rewards=rewards_of(kind),
        algorithm={**recipe.algorithm, "kl": {**recipe.algorithm["kl"], "coefficient": weight}},
        rollout=recipe.rollout,
        update=recipe.update,
        evaluation={"every_steps": 0, "samples": 1},
        checkpoint={"every_steps": 0},
        run={"folder": str(folder), "overwrite": True, "seed": seed, "num_steps": steps, "threads": 1},
    )
    summary = require_whole(posttrain.train(config)).summary
    journal = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    taken = [record for record in journal if MEASURES["true"] in record]
    return {
        "cell": cell,
        "seed": seed,
        "optimised": kind,
        "kl_weight": weight,
        "completions_per_step": recipe.rollout.prompts_per_step * recipe.rollout.group_size,
        "curve": {name: [record.get(key) for record in taken] for name, key in MEASURES.items()},
        "seconds": summary["seconds"],
    }


def rows() -> list[dict[str, Any]]:
    """What was measured already."""
    found: list[dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    return found


def around(at: int, length: int) -> range:
    """The steps that a point of the smoothed curve is the mean of, numbered from 0."""
    return range(max(0, at - SMOOTHED // 2), min(length, at + SMOOTHED // 2 + 1))


def mean_of(numbers: Sequence[float], steps: Sequence[int]) -> float:
    """The mean over some steps."""
    return fmean(numbers[step] for step in steps)


def smoothed(numbers: Sequence[float], at: int) -> float:
    """The mean of the steps around one."""
    return mean_of(numbers, around(at, len(numbers)))


def peak(curve: Mapping[str, Sequence[float]]) -> int:
    """The step at which the two part: where the true reward, smoothed, is highest."""
    return max(range(len(curve["true"])), key=lambda step: smoothed(curve["true"], step))


def stopped_early(curve: Mapping[str, Sequence[float]]) -> int:
    """The step that somebody chooses who looks at the true reward of every second step alone: the highest mean."""
    looked_at = range(1, len(curve["true"]), 2)
    return max(looked_at, key=lambda step: mean_of(curve["true"], [at for at in looked_at if abs(at - step) <= NEAR]))


def not_looked_at(step: int, length: int) -> list[int]:
    """The steps around that choice which it was not made by: they owe nothing to the luck of the draw."""
    return [at for at in range(0, length, 2) if abs(at - step) <= NEAR]


def points(curve: Mapping[str, Sequence[float]]) -> dict[str, tuple[int, Sequence[int]]]:
    """What the table tells of a curve: the step, and the steps that are averaged for it."""
    length = len(curve["true"])
    highest, stopped = peak(curve), stopped_early(curve)
    return {
        "start": (0, [0]),
        "highest true": (highest, around(highest, length)),
        "stopped": (stopped, not_looked_at(stopped, length)),
        "end": (length - 1, range(max(0, length - SMOOTHED), length)),
    }


def told(row: Mapping[str, Any], steps: Sequence[int]) -> str:
    """KL, learned and true reward over some steps, the true one with its 95 % interval over completions."""
    means = {name: mean_of(values, steps) for name, values in row["curve"].items()}
    variance = fmean(row["curve"]["true_std"][step] ** 2 for step in steps)
    half = 1.96 * math.sqrt(variance / (len(steps) * row["completions_per_step"]))
    return (
        f"{means['kl']:z.1f} | {means['learned']:.2f} | {means['true']:.3f} [{means['true'] - half:.3f},"
        f" {means['true'] + half:.3f}] | {means['sums']:.1f} | {means['second_number']:.1f}"
    )


def table() -> str:
    """Start, parting, early stop and end of every cell."""
    heads = "| cell | seed | KL weight | where | step | KL, nats | learned | true | sums | second number |"
    lines = [heads, "|" + "---|" * 10]
    for row in rows():
        for where, (at, steps) in points(row["curve"]).items():
            begins = f"| {row['cell']} | {row['seed']} | {row['kl_weight']:g} | {where} | {at + 1}"
            lines.append(f"{begins} | {told(row, steps)} |")
    return "\n".join(lines)


def picture(file: Path) -> None:
    """Learned and true reward against the KL, a panel for each cell with a line for every seed."""
    found = rows()
    if not found:
        raise SystemExit(f"{RESULTS}: no cell has been run yet, so there is nothing to draw")
    cells = list(dict.fromkeys(row["cell"] for row in found))
    columns = math.ceil(len(cells) / 2)
    figure = pyplot.figure(figsize=(6 * columns, 13), layout="constrained")
    parts = figure.subfigures(2, columns, squeeze=False)
    for cell, part in zip(cells, parts.flat, strict=False):
        draw_cell([row for row in found if row["cell"] == cell], part)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=70)


def draw_cell(found: Sequence[Mapping[str, Any]], part: Any) -> None:
    """The curves of a cell's seeds, the true reward above the learned one, and dotted where each parts."""
    upper, lower = part.subplots(2, 1, sharex=True)
    for row, line in zip(found, ("-", "--", ":"), strict=False):
        curve = row["curve"]
        kl, true, said = ([smoothed(curve[name], at) for at in range(len(curve["kl"]))] for name in DRAWN)
        upper.plot(kl, true, color="#1b7837", linestyle=line, linewidth=2, label=f"seed {row['seed']}")
        lower.plot(kl, said, color="#b35806", linestyle=line, linewidth=2, label=f"seed {row['seed']}")
        for axis in (upper, lower):
            axis.axvline(kl[peak(curve)], color="#666666", linewidth=1.2, linestyle=":")
    part.suptitle(WORDS[found[0]["cell"]], fontsize=16, fontweight="bold")
    upper.set_ylabel("true reward", fontsize=14, color="#1b7837")
    lower.set_ylabel("learned reward", fontsize=14, color="#b35806")
    lower.set_xlabel("KL to the start, nats per completion", fontsize=14)
    for axis in (upper, lower):
        axis.tick_params(labelsize=13)
        axis.grid(alpha=0.25)
    upper.legend(fontsize=12)


def main() -> None:
    """Run cells, or show what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", choices=[*CELLS, []])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    done = {(row["cell"], row["seed"]) for row in rows()}
    shown_only = given.table or given.picture
    for cell in [] if shown_only else given.cells or CELLS:
        if (cell, given.seed) not in done:
            row = run(cell, steps=given.steps, seed=given.seed)
            RESULTS.write_text(json.dumps([*rows(), row]) + "\n", encoding="utf-8")
    print(table())
    if given.picture:
        picture(given.picture)


if __name__ == "__main__":
    main()
