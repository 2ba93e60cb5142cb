"""Runs whose numbers are kept, through the real loops in float64: what golden.json holds is made here.

Two runs by reward go through `train` from the first evaluation to the last: one with the KL in the loss, full metrics
and a moving reference, one with the KL in the reward, dynamic sampling, length punishment and a probe of its task.
Both take two epochs of two mini-batches each step, and neither scores every rollout.  A third is supervised.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from posttrain.config import Config, SftConfig
from posttrain.models.rendering import TokenizerRenderer
from posttrain.options.model import ModelOptions
from posttrain.options.rollout import RolloutOptions
from posttrain.options.task import CountdownOptions, Demonstrator
from posttrain.options.training import (
    CheckpointOptions,
    EvaluationOptions,
    ReferenceOptions,
    RunOptions,
    SftOptions,
    UpdateOptions,
)
from posttrain.records import Group, Prompt
from posttrain.rewards.grading.function import reward_function
from posttrain.runs.harness import Harness
from posttrain.runs.run_folder import RunFolder
from posttrain.runs.run_steps import StartOptions
from posttrain.tasks.base import Probe, Reading, Task
from posttrain.tasks.countdown_task import CountdownTask
from posttrain.training import rl
from posttrain.training.fit import fit, harness_options
from posttrain.training.fit_session import FitSession
from posttrain.training.sft.learned_rows import CountdownDemonstrations, DemonstrationSet
from posttrain.training.sft.sft_run import SftObjective
from tests.support import tiny
from tests.support.runs import lines_of
from tests.support.tiny import some_prompts, tiny_policy, tokenizer

UNSCORED = 7
"""A completion that begins with this token is scored by no function."""
NUM_STEPS = 6
LENGTHS = [3, 6, 1, 4]


def mostly_even(completion_ids: Sequence[Sequence[int]], **columns: object) -> list[float | None]:
    """1 for a completion most of whose tokens are even."""
    return [
        None if ids[0] == UNSCORED else float(sum(t % 2 == 0 for t in ids) > len(ids) / 2) for ids in completion_ids
    ]


def variety(completion_ids: Sequence[Sequence[int]], **columns: object) -> list[float | None]:
    """Share of a completion's tokens that are different."""
    return [None if ids[0] == UNSCORED else len(set(ids)) / len(ids) for ids in completion_ids]


class TokenTask(Task):
    """Prompts of random tokens; a probe says how often a completion that may not say `0` has its first token again."""

    name = "tokens"

    def prompts(self, step: int, draws: range) -> list[Prompt]:
        return [some_prompts([LENGTHS[draw % 4]], seed=100 * step + draw)[0] for draw in draws]

    def held_out(self) -> list[Prompt]:
        return some_prompts([2, 5, 3], seed=7)

    def longest_prompts(self) -> list[Prompt]:
        return some_prompts(LENGTHS, seed=8)

    def probes(self) -> Mapping[str, Probe]:
        longest = Probe(readings={"longest": Reading("longest completion", digits=1)}, measure=longest_of)
        again = Probe(
            readings={"accuracy_never_giving_up": Reading("first token again")},
            measure=first_again,
            suppressed=("0",),
            endless=True,
        )
        return {"longest": longest, "again": again}


def longest_of(groups: Sequence[Group]) -> dict[str, float]:
    longest = [max(len(rollout.tokens) for rollout in group.rollouts) for group in groups]
    return {"longest": sum(longest) / len(longest)}


def first_again(groups: Sequence[Group]) -> dict[str, float]:
    texts = [group.rollouts[0].text for group in groups]
    return {"accuracy_never_giving_up": sum(text.count(text[:1]) > 1 for text in texts) / len(texts)}


def config(folder: Path, **sections: Any) -> Config:
    """A recipe of six steps, each of 4 × 4 completions and four updates."""
    return Config(
        model=ModelOptions(),
        rollout=RolloutOptions(
            prompts_per_step=4, group_size=4, max_completion_tokens=10, temperature=0.9, max_rows=12
        ),
        update=UpdateOptions(
            learning_rate=1e-2,
            warmup_steps=3,
            schedule="cosine",
            weight_decay=0.1,
            tokens_per_microbatch=60,
            epochs_per_step=2,
            minibatches_per_epoch=2,
            measure_entropy=True,
        ),
        evaluation=EvaluationOptions(every_steps=2, samples=8, brief_problems=2),
        checkpoint=CheckpointOptions(every_steps=0),
        run=RunOptions(folder=str(folder), num_steps=NUM_STEPS, threads=1),
        **sections,
    )


RUNS: Mapping[str, dict[str, Any]] = {
    "kl_in_the_loss": {
        "algorithm": {"name": "grpo", "kl": {"coefficient": 0.05}},
        "reference": ReferenceOptions(refresh_every=4),
    },
    "kl_in_the_reward": {
        "algorithm": {
            "name": "dapo",
            "kl": {"coefficient": 0.05, "estimator": "k1", "place": "reward"},
            "overlong": {"buffer": 0.3, "penalty": 0.5},
        }
    },
}
REWARDS = {"kl_in_the_loss": [(mostly_even, 1.0), (variety, 0.5)], "kl_in_the_reward": [(mostly_even, 1.0)]}


def run_by_reward(name: str, folder: Path) -> dict[str, Any]:
    """Everything in the run's folder that is a number and no time, and its last weights."""
    policy = tiny_policy()
    functions = [reward_function(call, weight=weight) for call, weight in REWARDS[name]]
    run = rl.train(config(folder, **RUNS[name]), policy=policy, task=TokenTask(), rewards=functions)
    kept = {key: {**run.summary[key]} for key in ("before", "after", "tokens")}
    for when in ("before", "after"):  # how many completions a number rests on
        del kept[when]["measured_on"]
    return {**kept, "metrics": lines_of(folder), "rollouts": rollouts(folder), "weights": checksum(policy.model)}


def supervised_run(folder: Path) -> dict[str, Any]:
    """Four steps on demonstrations of Countdown, with held-out ones."""
    with pytest.MonkeyPatch().context() as patch:
        patch.setitem(tiny.SHAPE, "vocab_size", len(tokenizer()))
        patch.setitem(tiny.SHAPE, "max_position_embeddings", 160)
        policy = tiny_policy()
    options = CountdownOptions()
    demonstrations = DemonstrationSet(
        policy=policy,
        demonstrations=CountdownDemonstrations(
            CountdownTask(options, TokenizerRenderer(tokenizer()), seed=0), Demonstrator(give_up=0.9, max_tries=1)
        ),
        seed=0,
        num_different=0,
    )
    recipe = SftConfig(
        sft=SftOptions(
            learning_rate=1e-2,
            warmup_steps=2,
            tokens_per_batch=200,
            tokens_per_microbatch=100,
            eval_every=2,
            eval_size=3,
        ),
        run=RunOptions(folder=str(folder), num_steps=4, threads=1),
    )
    objective = SftObjective(recipe, policy, demonstrations.held_out(recipe.sft))
    session = FitSession(recipe, "tiny", demonstrations, objective)
    with Harness(RunFolder.create(folder, "{}"), session.trained, harness_options(session, StartOptions())) as harness:
        harness.start([])
        fit(session, harness)
    summary = json.loads((folder / "summary.json").read_text())
    kept = {key: summary[key] for key in ("eval_loss", "best_eval_loss", "tokens", "examples")}
    return {**kept, "metrics": lines_of(folder), "weights": checksum(policy.model)}


def rollouts(folder: Path) -> list[dict[str, Any]]:
    """What the rollout files say of rewards and advantages, step by step."""
    columns = ["draw", "sample", "tokens", "reward", "advantage"]
    files = sorted((folder / "rollouts").glob("*.parquet"))
    return [pq.read_table(file, columns=columns).to_pydict() for file in files]


def checksum(model: Any) -> list[float]:
    """Two numbers that no exchange of weights leaves alone."""
    final: Tensor = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return [final.norm().item(), (final @ torch.linspace(-1, 1, len(final), dtype=torch.float64)).item()]


def all_runs(folder: Path) -> dict[str, Any]:
    """Every run by its name."""
    return {
        **{name: run_by_reward(name, folder / name) for name in RUNS},
        "supervised": supervised_run(folder / "supervised"),
    }
