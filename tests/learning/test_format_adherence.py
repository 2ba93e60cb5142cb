"""A model of 40,000 parameters that answers in prose learns to keep to a form, and where a clip ends that; its control.

What it is made from: sixty additions answered by one sentence, by tags on one line or, one time in five, as asked.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from random import Random
from statistics import fmean

import pytest

import posttrain
from posttrain.config import SftConfig
from posttrain.options.dataset import DatasetOptions
from posttrain.options.model import NewModelOptions
from posttrain.options.training import CheckpointOptions, RunOptions, SftOptions
from posttrain.rewards.grading.function import reward_function
from posttrain.rewards.shaping import line_format
from posttrain.tasks.arithmetic_task import training_additions
from posttrain.training.sft.sft_run import train_sft
from tests.support.runs import metrics_of

SYSTEM = "In tags."
IN_FORM = "<think>\nadd\n</think>\n<answer>\n7\n</answer>"
ANSWERS = (*["The result is 7."] * 6, *["<think>add</think>"] * 2, *[IN_FORM] * 2)
COURSE = {"name": "gspo", "sequence_ratio": "product", "ratio_to": "reference", "clip_low": 0.2, "clip_high": 0.2}
COURSE |= {"kl": {"coefficient": 0.05, "level": "completion"}}


@pytest.fixture(scope="module")
def instruct_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a chat template, made from nothing in three seconds."""
    rows = []
    for number, addition in enumerate(training_additions(60)):
        turns = (("system", SYSTEM), ("user", addition.question), ("assistant", ANSWERS[number % len(ANSWERS)]))
        rows.append({"messages": [{"role": role, "content": content} for role, content in turns]})
    folder = tmp_path_factory.mktemp("instruct")
    shape = {"hidden_size": 48, "mlp_size": 96, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1}
    config = SftConfig(
        model=NewModelOptions(template="turns", max_positions=128, **shape),
        task=DatasetOptions(held_out_share=0.0),
        sft=SftOptions(learning_rate=1e-2, warmup_steps=5, schedule="cosine", tokens_per_batch=600),
        checkpoint=CheckpointOptions(every_steps=0),
        run=RunOptions(folder=str(folder), num_steps=120, threads=1),
    )
    train_sft(config, rows=rows)
    return folder / "model"


def permuted(*, completions: list[str], finish_reasons: list[str]) -> list[float]:
    """The form's rewards of a step, dealt out anew over all of it: a function of what was sampled."""
    scores = [each.score for each in line_format(completions=completions, finish_reasons=finish_reasons)]
    Random(hashlib.blake2b("\0".join(completions).encode()).digest()).shuffle(scores)
    return scores


CONTROL = reward_function(permuted, text_only=True)


def trained(model: Path, folder: Path, algorithm: Mapping[str, object], **sections: object) -> posttrain.Run:
    """Ten steps of 64 completions with an adapter of rank 8."""
    rewards = sections.pop("rewards", ())
    config = posttrain.load_recipe(
        model={"path": str(model), "adapter": {"rank": 8, "alpha": 16}},
        task={"name": "arithmetic", "system": SYSTEM, "held_out_size": 16},
        algorithm=algorithm,
        rollout={"prompts_per_step": 16, "group_size": 4, "max_completion_tokens": 24, "temperature": 0.9},
        update={"learning_rate": 3e-3},
        evaluation={"every_steps": 0, "samples": 1},
        checkpoint={"every_steps": 0},
        run={"folder": str(folder), "num_steps": 10, "threads": 1},
        **sections,
    )
    return posttrain.train(config, rewards=rewards)


def rates(run: posttrain.Run) -> list[float]:
    """Share of each step's completions that keep to the form."""
    return [step["rewards/line_format/mean"] for step in metrics_of(run.folder)[1:]]


def test_the_form_is_learned_from_prose(instruct_model: Path, tmp_path: Path) -> None:
    run = trained(instruct_model, tmp_path / "run", {"name": "grpo", "kl": {"coefficient": 0.05}})
    assert run.summary["before"]["accuracy_greedy"] <= 0.3
    assert run.summary["after"]["accuracy_greedy"] >= 0.9
    assert fmean(rates(run)[:2]) < 0.35
    assert fmean(rates(run)[-3:]) > 0.65


def test_rewards_permuted_over_the_step_teach_no_form(instruct_model: Path, tmp_path: Path) -> None:
    run = trained(instruct_model, tmp_path / "run", {"name": "grpo", "kl": {"coefficient": 0.05}}, rewards=[CONTROL])
    assert run.summary["after"]["accuracy_greedy"] <= 0.3
    assert fmean(step["reward"] for step in metrics_of(run.folder)[-3:]) < 0.3


def test_a_ratio_of_completions_to_the_reference_stops_at_its_clip(instruct_model: Path, tmp_path: Path) -> None:
    run = trained(instruct_model, tmp_path / "run", COURSE)
    clipped = [step["clip_ratio/region_mean"] for step in metrics_of(run.folder)[1:]]
    assert clipped[0] == 0
    assert fmean(clipped[2:]) > 0.5
    assert fmean(rates(run)[-3:]) < 0.55
