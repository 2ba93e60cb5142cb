"""How noisy the gradient of REINFORCE is under each baseline, on the same rollouts of the bundled model on Countdown.

    python benchmarks/gradient_noise.py sample none batch_mean leave_one_out zscore critic
    python benchmarks/gradient_noise.py leave_one_out_of_4 leave_one_out_of_2 groups
    python benchmarks/gradient_noise.py --table

`sample` keeps rollouts of the model as it is: blocks of 8 prompts with 8 completions each, no prompt twice.  Each
baseline is a row of the table of algorithms, asked through its own credit, loss and token weights for the gradient of
each block; all weigh tokens alike (`sum_over_sequence`): they differ in the baseline alone.  `leave_one_out_of_4`
and `_of_2` see the same completions in smaller groups.  `critic` first fits a value head on a trunk of its own to other
rollouts.  `groups` samples some prompts 64 times each, for what a group's mean and its equal rewards come to at every
size.  Results go to benchmarks/results/gradient_noise.json.
"""

import argparse
import json
import platform
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import posttrain
from posttrain.records import Grades, Group
from posttrain.runs.progress import Clock
from posttrain.runs.rollout_file import parquet_bytes, read_rollouts
from posttrain.training.collector import CollectedStep, discard_scores
from posttrain.training.learner import fit_critic
from posttrain.training.session import Session, open_session
from posttrain.variance import (
    Ratio,
    baseline_deviation,
    gradient_noise,
    gram,
    in_groups,
    measured_baseline_deviation,
    measured_uninformative_share,
    policy_gradient,
    relative_variance,
    squared_advantage,
    success_rates,
    unbiased_uninformative_share,
    uninformative_share,
)

RESULTS = Path(__file__).parent / "results" / "gradient_noise.json"
FOLDER = Path("runs/benchmark-gradient-noise")
SUMS = {"token_weights": "sum_over_sequence"}
BASELINES: Mapping[str, Mapping[str, Any]] = {
    "none": {"name": "reinforce", **SUMS},
    "batch_mean": {"name": "reinforce", "baseline": "batch_mean", **SUMS},
    "leave_one_out": {"name": "rloo", **SUMS},
    "leave_one_out_of_4": {"name": "rloo", **SUMS},
    "leave_one_out_of_2": {"name": "rloo", **SUMS},
    "zscore": {"name": "grpo", **SUMS},
    "critic": {"name": "ppo", "gae": {"lambda_policy": 1.0}, "whitening": "none", "critic": {"trunk": "own"}, **SUMS},
}
SIBLINGS = {"leave_one_out_of_4": 4, "leave_one_out_of_2": 2}
"""Baselines that see fewer completions of a prompt: the same rollouts, in smaller groups."""
NUM_BLOCKS, PROMPTS, GROUP = 24, 8, 8
CRITIC_STEPS, CRITIC_PROMPTS = 12, 128
BANK_PROMPTS, BANK_SAMPLES = 48, 64
GROUP_SIZES = (2, 4, 8, 16, 32)
FIRST_CRITIC_STEP, BANK_STEP = 1001, 2001
"""Steps of the task that no block has: their prompts are others."""


def session_of(algorithm: Mapping[str, Any], prompts: int = PROMPTS, group: int = GROUP) -> Session:
    """The bundled model on Countdown, one update a step."""
    config = posttrain.load_recipe(
        "countdown-tiny",
        algorithm=algorithm,
        rollout={"prompts_per_step": prompts, "group_size": group, "max_completion_tokens": 256},
        update={"tokens_per_microbatch": 4096, "epochs_per_step": 1, "minibatches_per_epoch": 1},
        run={"threads": 1},
    )
    return open_session(config)


def keep(name: str, groups: list[Group], grades: Grades) -> None:
    """Put some rollouts on the disk."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{name}.parquet").write_bytes(parquet_bytes(1, groups, grades, torch.zeros_like(grades.rewards)))


def sample() -> dict[str, Any]:
    """The blocks that every baseline is asked about."""
    with session_of(BASELINES["none"]) as session:
        lengths: list[int] = []
        rewards: list[float] = []
        for block in range(NUM_BLOCKS):
            collected = session.collector.collect(block + 1, discard_scores, Clock())
            keep(f"block-{block:02d}", list(collected.groups), collected.grades)
            lengths += [len(each.tokens) for group in collected.groups for each in group.rollouts]
            rewards += collected.grades.rewards.flatten().tolist()
    return {"completions": len(lengths), "tokens": sum(lengths), "mean_reward": sum(rewards) / len(rewards)}


def blocks(group_size: int) -> list[CollectedStep]:
    """The same from the disk, in groups of this size."""
    found = [read_rollouts(FOLDER / f"block-{block:02d}.parquet") for block in range(NUM_BLOCKS)]
    return [
        CollectedStep(
            step=number,
            groups=[part for group in groups for part in parts_of(group, group_size)],
            grades=replace(
                grades,
                rewards=in_groups(grades.rewards, group_size),
                scores=torch.stack([in_groups(scores, group_size) for scores in grades.scores]),
            ),
        )
        for number, (groups, grades) in enumerate(found, start=1)
    ]


def parts_of(group: Group, size: int) -> list[Group]:
    """A group as several smaller ones of the same prompt."""
    return [replace(group, rollouts=group.rollouts[i : i + size]) for i in range(0, len(group.rollouts), size)]


def fitted(session: Session) -> dict[str, Any]:
    """Fit the session's critic to rollouts of other prompts; what it explained of the last ones before it saw them."""
    explained: list[float] = []
    with session_of(BASELINES["none"], CRITIC_PROMPTS, 1) as source:
        for step in range(CRITIC_STEPS):
            collected = source.collector.collect(FIRST_CRITIC_STEP + step, discard_scores, Clock())
            explained.append(fit_critic(session.learner, collected, Clock())["value/explained_variance"])
            print(f"critic {step + 1}/{CRITIC_STEPS}: explained variance {explained[-1]:.3f}", flush=True)
    return {"rollouts": CRITIC_STEPS * CRITIC_PROMPTS, "explained_variance": explained}


def measure(baseline: str) -> dict[str, Any]:
    """The products of the gradients of all blocks with each other, and what they come to."""
    with session_of(BASELINES[baseline]) as session:
        told = {"critic": fitted(session)} if session.learner.critic is not None else {}
        explained: list[float] = []
        gradients = []
        for block in blocks(SIBLINGS.get(baseline, GROUP)):
            credited = session.learner.credit(block, Clock())
            explained += [credited.metrics[name] for name in ("value/explained_variance",) if name in credited.metrics]
            gradients.append(policy_gradient(session.learner, credited))
            print(f"{baseline} {len(gradients)}/{NUM_BLOCKS}", flush=True)
    products = gram(gradients)
    noise = gradient_noise(products)
    if explained:
        told["critic"]["explained_on_blocks"] = sum(explained) / len(explained)
    return {
        "algorithm": dict(BASELINES[baseline]),
        "squared_mean": noise.squared_mean,
        "total_variance": noise.total_variance,
        "relative_variance": noise.relative_variance,
        "signal_to_noise": noise.signal_to_noise,
        "products": products.tolist(),
        **told,
    }


def groups() -> dict[str, Any]:
    """Of each group size: uninformative groups and the noise of the mean, by formula and as sampled."""
    with session_of(BASELINES["none"], BANK_PROMPTS, BANK_SAMPLES) as session:
        collected = session.collector.collect(BANK_STEP, discard_scores, Clock())
    rewards = collected.grades.rewards
    success = success_rates(rewards)
    rows = [
        {
            "group_size": size,
            "uninformative_at_rates": uninformative_share(success, size),
            "uninformative_unbiased": unbiased_uninformative_share(rewards, size),
            "uninformative_sampled": measured_uninformative_share(rewards, size),
            "baseline_deviation": baseline_deviation(success, size) * (BANK_SAMPLES / (BANK_SAMPLES - 1)) ** 0.5,
            "baseline_deviation_sampled": measured_baseline_deviation(rewards, size),
        }
        for size in GROUP_SIZES
    ]
    rates = sorted(success.tolist())
    return {"prompts": BANK_PROMPTS, "samples": BANK_SAMPLES, "success_rates": rates, "sizes": rows}


def results() -> dict[str, Any]:
    """What was measured already."""
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    return found


def told(ratio: Ratio) -> str:
    """A ratio with its error."""
    return f"{ratio.value:.2f} (× or ÷ {ratio.error_factor:.2f})"


def table() -> str:
    """All that was measured."""
    found = results()
    tables = {name: torch.tensor(found[name]["products"], dtype=torch.float64) for name in BASELINES if name in found}
    lines = ["| baseline | tr Cov g | squared mean | noise / signal | relative to none | signal to noise |"]
    lines.append("|---|---|---|---|---|---|")
    for name, products in tables.items():
        noise, own = gradient_noise(products), relative_variance(products)
        beside = relative_variance(products, tables["none"]) if name != "none" else None
        lines.append(
            f"| {name} | {noise.total_variance:.4g} | {noise.squared_mean:.4g} | {told(own)}"
            f" | {'1' if beside is None else told(beside)} | {noise.signal_to_noise:.3f} |"
        )
    lines += ["", "| G | p^G + (1-p)^G at c/n | the same, unbiased | sampled | √(p(1-p)/G) | sampled | A² |"]
    lines.append("|---|---|---|---|---|---|---|")
    groups = found.get("groups", {"sizes": [], "success_rates": []})
    rates = torch.tensor(groups["success_rates"], dtype=torch.float64)
    for row in groups["sizes"]:
        square = squared_advantage(rates, row["group_size"]) * BANK_SAMPLES / (BANK_SAMPLES - 1)
        lines.append("| " + " | ".join(f"{value:.3g}" for value in (*row.values(), square)) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure parts, or show what there is."""
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", choices=["sample", "groups", *BASELINES, []])
    parser.add_argument("--table", action="store_true")
    for part in parser.parse_args().parts:
        began = time.perf_counter()
        measured = {"sample": sample, "groups": groups}[part]() if part in ("sample", "groups") else measure(part)
        measured |= {
            "seconds": time.perf_counter() - began,
            "torch": torch.__version__,
            "machine": platform.processor(),
        }
        RESULTS.write_text(json.dumps({**results(), part: measured}) + "\n", encoding="utf-8")
    print(table())


if __name__ == "__main__":
    main()
