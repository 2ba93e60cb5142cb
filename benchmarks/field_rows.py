"""What rows that the field has added buy on Countdown, at equal completion tokens: GRPO, MaxRL, distillation.

    python benchmarks/field_rows.py CELL [CELL ...] [--seed 0] [--tokens 250000]
    python benchmarks/field_rows.py --reading bundled
    python benchmarks/field_rows.py --hint-base
    python benchmarks/field_rows.py --table

Every cell is `countdown-tiny`, smaller and with another algorithm; it ends with the step that reaches the budget of
completion tokens.  Cells start from the bundled model, those named `hint_*` from one that `--hint-base` makes of it by
supervised updates on demonstrations, half of which show a right completion before the problem is put again: the bundled
model does not read one.  `distill_*` need the policy that `grpo` ends with, which is their teacher: its own tokens are
not counted.  `older_*` sample from weights of LAG steps ago.  Results go to benchmarks/results/field_rows.json, cell by
cell.
"""

import argparse
import itertools
import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

import posttrain
from posttrain.generation.engine import sample_groups
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.request import GroupRequest, StreamKey
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.loading.saving import ExportedWeights
from posttrain.models.rendering import TokenizerRenderer
from posttrain.options.algorithm import TeacherOptions
from posttrain.options.model import ModelOptions
from posttrain.options.rollout import SamplingParams
from posttrain.options.task import CountdownOptions, Demonstrator
from posttrain.records import Grades, Group, Prompt
from posttrain.rewards.countdown import HIT, MISS
from posttrain.rewards.grading.grade import grade
from posttrain.runs.reports import StepReport
from posttrain.tasks.countdown_problems import training_problem
from posttrain.tasks.countdown_task import CountdownTask, compact, demonstrate, difficulty
from posttrain.training.reference import PrivilegedPrompts
from posttrain.training.update import group_logprobs

RESULTS = Path(__file__).parent / "results" / "field_rows.json"
FOLDER = Path("runs/benchmark-field-rows")
KL = {"coefficient": 0.03}
SHOWN = "{prompt}{shown}\n{prompt}"
"""A prompt ends with a line break already."""

SIBLING = {"sees": "sibling", "template": SHOWN, "weights": "start"}
BESIDE = {"coefficient": 0.03, "reward_weight": 1.0}
CORRECTIONS: Mapping[str, Mapping[str, Any]] = {
    "uncorrected": {},
    "tis": {"correction": {"truncate": 2.0}},
    "mis": {
        "correction": {
            "level": "sequence_product",
            "truncate": None,
            "mask_level": "sequence_product",
            "mask_high": 3.0,
        }
    },
    "geometric_mask": {"correction": {"truncate": 2.0, "mask_low": 0.99, "mask_high": 1.01}},
}
"""As docs/algorithms/correction.md names them."""
CELLS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"name": "grpo", "token_weights": "mean_over_tokens", "kl": KL},
    "maxrl": {"name": "maxrl", "token_weights": "mean_over_tokens", "kl": KL},
    "distill_full": {"name": "distill", "teacher": {"model": "GRPO"}},
    "distill_sampled": {"name": "distill", "teacher": {"model": "GRPO"}, "signal": "sampled"},
    "self_alone": {"name": "distill", "teacher": SIBLING},
    "self_beside_reward": {"name": "distill", "teacher": SIBLING, **BESIDE},
    "hint_grpo": {"name": "grpo", "token_weights": "mean_over_tokens", "kl": KL},
    "hint_self": {"name": "distill", "teacher": SIBLING},
    "hint_self_beside_reward": {"name": "distill", "teacher": SIBLING, **BESIDE},
    "grpo_moving": {"name": "grpo", "token_weights": "mean_over_tokens", "kl": KL},
    **{
        f"older_{name}": {"name": "grpo", "token_weights": "mean_over_tokens", "kl": KL, **correction}
        for name, correction in CORRECTIONS.items()
    },
}
TOLD = ("kl", "kl_behaviour", "kl_teacher", "teacher/shown", "correction/weight", "correction/masked")
"""Metrics of the last step that are kept."""
MOVING = {"grpo_moving": {"refresh_every": 5}}
"""Cells whose reference is taken again."""
LAG = 8
"""Steps by which the weights that `older_*` sample from are behind; as many as there are, at first."""
NUM_HINTS = 4000
HINT_UPDATES = 200


class Budget(posttrain.Watcher):
    """Ends a run with the step in which its completion tokens reach a number."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.used, self.steps = tokens, 0, 0
        self.last: dict[str, float] = {}

    def on_step(self, report: StepReport) -> None:
        self.used += report.num_tokens
        self.steps += 1
        self.stopping = self.used >= self.tokens
        self.last = dict(report.metrics)


class OlderWeights(InProcessEngine):
    """Samples from the weights of LAG loads ago, as an engine elsewhere may; in evaluations too."""

    reproducible = False  # its log-probs are not those of the weights that were loaded last, and nobody is to wonder

    def __init__(self, model: str) -> None:
        super().__init__(load_policy(ModelOptions(path=model), inference=True))
        self.kept: deque[Mapping[str, Tensor]] = deque(maxlen=LAG + 1)

    def load(self, weights: ExportedWeights, version: int) -> None:
        """Keep these, and sample from the oldest that are kept."""
        state = weights.policy.model.state_dict()
        self.kept.append({name: each.detach().clone() for name, each in state.items()})
        self.policy.model.load_state_dict(dict(self.kept[0]))
        super().load(weights, version)


def folder_of(cell: str, seed: int) -> Path:
    """Where a cell's run is."""
    return FOLDER / f"{cell}-{seed}"


def algorithm_of(cell: str, seed: int) -> dict[str, Any]:
    """The cell's algorithm, its teacher named."""
    algorithm = dict(CELLS[cell])
    teacher = algorithm.get("teacher", {})
    if teacher.get("model") == "GRPO":
        algorithm["teacher"] = {**teacher, "model": str(folder_of("grpo", seed) / "model")}
    return algorithm


def hint_rows() -> Iterator[dict[str, str]]:
    """Demonstrations, every second one behind a right completion: its search ends sooner, with the line that it saw."""
    task = CountdownOptions()
    for index in range(NUM_HINTS):
        rng = Random(f"hints {index}")
        problem = training_problem(difficulty(task), task.numbers, seed=1, index=index)
        own, prompt = demonstrate(problem, rng, Demonstrator()), compact(problem)
        right = next(
            (each for each in (demonstrate(problem, rng, Demonstrator(give_up=0.0)) for _ in range(20)) if HIT in each),
            None,
        )
        if index % 2 or right is None:
            yield {"prompt": prompt, "completion": own}
            continue
        misses = [line for line in own.removeprefix("<think>").splitlines() if line.endswith(MISS)]
        seen = [line for line in right.removeprefix("<think>").splitlines() if line.endswith(HIT)]
        tries = misses[: next(count for count in itertools.count() if rng.random() < 0.7)]
        shown = SHOWN.replace("{shown}", right).replace("{prompt}", prompt)
        answer = right[right.index("</think>") :]
        yield {"prompt": shown, "completion": "<think>" + "\n".join([*tries, *seen]) + "\n" + answer}


def make_hint_base() -> None:
    """The model that `hint_*` cells start from."""
    config = posttrain.load_recipe(
        "own-sft",
        model={"path": "bundled"},
        task={"name": "dataset", "held_out_size": 64},
        sft={"learning_rate": 5e-4, "warmup_steps": 20, "num_epochs": None, "rows_per_batch": 32, "eval_every": 100},
        run={"folder": str(FOLDER / "hint-base"), "overwrite": True, "num_steps": HINT_UPDATES, "threads": 1},
    )
    print(posttrain.train_sft(config, rows=list(hint_rows())).summary["after"])


def reading(model: str) -> dict[str, float]:
    """What seeing a right sibling does to a model before any training: does it help whoever sees it?"""
    policy = load_policy(ModelOptions(path=model))
    engine, renderer = InProcessEngine(policy), TokenizerRenderer(policy.tokenizer)
    task = CountdownTask(CountdownOptions(), renderer, seed=0)

    def sampled(prompts: Sequence[Prompt], purpose: str) -> tuple[list[Group], Grades]:
        key = StreamKey(0, purpose, 1)
        asked = GroupRequest(group_size=8, max_completion_tokens=256, sampling=SamplingParams(), key=key)
        groups = sample_groups(engine, prompts, asked)
        return groups, grade(groups, task.reward_functions)

    groups, grades = sampled(task.prompts(1, range(24)), "student")
    shown = PrivilegedPrompts(TeacherOptions(sees="sibling", template=SHOWN), renderer, max_positions=1024)
    seen = shown.of(groups, grades).tokens
    own, theirs = (
        group_logprobs(policy, groups, temperature=1.0, max_tokens=4096, teacher_prompts=prompts)
        for prompts in (None, seen)
    )
    gaps = (theirs - own).split([len(rollout.tokens) for group in groups for rollout in group.rollouts])
    more = [prompt != group.prompt.tokens for group, prompts in zip(groups, seen, strict=True) for prompt in prompts]
    told = list(zip(gaps, grades.rewards.flatten().tolist(), more, strict=True))
    helped = [
        i for i, (group, prompts) in enumerate(zip(groups, seen, strict=True)) if group.prompt.tokens != prompts[0]
    ]
    _, by_teacher = sampled([replace(groups[i].prompt, tokens=seen[i][0]) for i in helped], "teacher")
    return {
        "accuracy": grades.rewards[helped].mean().item(),
        "accuracy_seeing_a_right_sibling": by_teacher.rewards.mean().item(),
        **{
            f"nats_per_token_{name}": torch.cat([gap for gap, reward, on in told if on and reward == value])
            .mean()
            .item()
            for name, value in (("right", 1.0), ("wrong", 0.0))
        },
    }


def run(cell: str, seed: int, tokens: int) -> dict[str, Any]:
    """One cell's row."""
    config = posttrain.load_recipe(
        "countdown-tiny",
        model={"path": str(FOLDER / "hint-base" / "model") if cell.startswith("hint_") else "bundled"},
        reference=MOVING.get(cell, {}),
        algorithm=algorithm_of(cell, seed),
        task={"name": "countdown", "prompt_style": "compact", "held_out_size": 128},
        rollout={"prompts_per_step": 16, "group_size": 8, "max_completion_tokens": 256},
        update={"learning_rate": 2e-4, "warmup_steps": 5, "schedule": "constant", "tokens_per_microbatch": 4096},
        evaluation={"every_steps": 0, "samples": 8},
        checkpoint={"every_steps": 0},
        run={
            "folder": str(folder_of(cell, seed)),
            "overwrite": True,
            "seed": seed,
            "num_steps": 1000,
            "time_limit_minutes": None,
            "threads": 1,
        },
    )
    budget = Budget(tokens)
    engine = OlderWeights(config.model.path) if cell.startswith("older_") else None
    summary: dict[str, Any] = dict(posttrain.train(config, watchers=[budget], engine=engine).summary)
    if engine is not None:  # whose last answers are of older weights
        summary["after"] = posttrain.evaluate(folder_of(cell, seed) / "model", config)
    kept = ("accuracy_sampled", "accuracy_sampled_interval", "pass_at_8", "success_per_try", "mean_length")
    return {
        "cell": cell,
        "seed": seed,
        "algorithm": algorithm_of(cell, seed),
        "steps": budget.steps,
        "completion_tokens": budget.used,
        "before": {name: summary["before"].get(name) for name in kept},
        "after": {name: summary["after"].get(name) for name in kept},
        "last_step": {name: value for name, value in budget.last.items() if name in TOLD},
        "seconds": summary["seconds"],
    }


def rows() -> list[dict[str, Any]]:
    """What was measured already."""
    found: list[dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    return found


def table() -> str:
    """All rows, before and after."""
    lines = ["| row | seed | tokens | accuracy before → after | 95 % | pass@8 | success per try | length | minutes |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for row in rows():
        before, after = row["before"], row["after"]
        low, high = after["accuracy_sampled_interval"]
        minutes = row["seconds"]["total"] / 60
        lines.append(
            f"| {row['cell']} | {row['seed']} | {row['completion_tokens'] / 1e6:.2f} M"
            f" | {before['accuracy_sampled']:.3f} → {after['accuracy_sampled']:.3f} | {low:.3f} to {high:.3f}"
            f" | {before['pass_at_8']:.3f} → {after['pass_at_8']:.3f}"
            f" | {before['success_per_try']:.3f} → {after['success_per_try']:.3f}"
            f" | {before['mean_length']:.0f} → {after['mean_length']:.0f} | {minutes:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run cells, or show what there is."""
    parser = argparse.ArgumentParser()
    parser.add_argument("cells", nargs="*", choices=[*CELLS, []])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=250_000)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--reading", metavar="MODEL")
    parser.add_argument("--hint-base", action="store_true")
    given = parser.parse_args()
    if given.reading:
        print(json.dumps(reading(given.reading), indent=1))
    if given.hint_base:
        make_hint_base()
    for cell in given.cells:
        row = run(cell, given.seed, given.tokens)
        kept = [each for each in rows() if (each["cell"], each["seed"]) != (cell, given.seed)]
        RESULTS.write_text(json.dumps([*kept, row], indent=1) + "\n", encoding="utf-8")
    print(table())


if __name__ == "__main__":
    main()
