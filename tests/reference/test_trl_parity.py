"""The loss, every gradient and the weights after a step are TRL's, for the same completions and rewards.

TRL wrote its numbers to tests/data/trl_parity.json; `make trl-parity` writes them anew.  Each case has two updates on
one batch: the first where the policy is the one that sampled, the second where it has left it, so that ratios, clips
and the KL act.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from posttrain.config import Config
from posttrain.models.policy import as_policy
from posttrain.options.dataset import DatasetOptions
from posttrain.options.rollout import RolloutOptions
from posttrain.options.training import UpdateOptions
from posttrain.rewards.grading.grade import reward_function
from posttrain.runs.clock import Clock
from posttrain.training.collector import no_journal
from posttrain.training.session import CallerObjects, open_session
from posttrain.training.update_metrics import update_metrics
from tests.support import trl_numbers
from tests.support.tiny import relative_distance
from tests.support.trl_numbers import CASES, GIVEN, GROUP_SIZE

WEIGHTS = {
    "grpo": "mean_over_sequences",
    "bnpo": "mean_over_tokens",
    "dapo": "mean_over_tokens",
    "dr_grpo": "constant_length",
    "luspo": "sum_over_sequence",
}
"""What TRL's losses are called here; docs/algorithms/grpo.md has the table."""


def algorithm(fields: dict[str, Any]) -> dict[str, Any]:
    """Our algorithm for some fields of TRL's config."""
    scale = fields.get("scale_rewards", "group")
    low = fields.get("epsilon", 0.2)
    high = fields.get("epsilon_high", low)
    made: dict[str, Any] = {
        "deviation": "none" if scale == "none" else "sample",
        "ratio_level": "sequence_mean" if fields.get("importance_sampling_level") == "sequence" else "token",
    }
    if scale != "none":
        made |= {"deviation_over": scale, "deviation_epsilon": 1e-4}
    if fields.get("beta"):
        weighed = fields.get("use_bias_correction_kl", True)
        made["kl"] = {"coefficient": fields["beta"], "importance": made["ratio_level"] if weighed else None}
    if fields["loss_type"] == "cispo":
        return {"name": "cispo", "clip_high": high - 1, **made}
    clip = {"clip_low": low, "clip_high": high, "dual_clip": fields.get("delta")}
    return {"name": "grpo", "token_weights": WEIGHTS[fields["loss_type"]], **clip, **made}


@dataclass(frozen=True)
class Outcome:
    """What became of a case: our advantages by prompt, and what each of the two updates was."""

    advantages: torch.Tensor
    losses: list[float]
    num_tokens: list[int]
    metrics: list[dict[str, float]]
    updates: list[trl_numbers.Recorded]


@cache
def outcome(name: str) -> Outcome:
    fields = CASES[name]["fields"]
    policy = as_policy(trl_numbers.model().double(), trl_numbers.tokenizer(), dtype="float32")
    config = Config(
        task=DatasetOptions(held_out_share=0.0),
        algorithm=algorithm(fields),
        rollout=RolloutOptions(
            prompts_per_step=len(GIVEN["prompts"]),
            group_size=GROUP_SIZE,
            max_completion_tokens=GIVEN["max_completion_length"],
            temperature=fields.get("temperature", 1.0),
        ),
        update=UpdateOptions(learning_rate=fields.get("learning_rate", 1.0), max_grad_norm=math.inf, epochs_per_step=2),
    )
    rewards = [
        reward_function(function, weight=weight)
        for function, weight in zip(trl_numbers.reward_functions(), GIVEN["reward_weights"], strict=True)
    ]
    own = CallerObjects(
        policy=policy, engine=trl_numbers.ForcedEngine(policy), rewards=rewards, rows=trl_numbers.rows()
    )
    with open_session(config, own) as session:
        session.learner.optimizer = sgd = trl_numbers.RecordingSgd(policy.model)
        collected = session.collector.collect(1, no_journal, Clock())
        credited = session.learner.credit(collected, Clock())
        reports = session.learner.learn(session.learner.batches(credited, Clock()), 1, Clock())
    order = [GIVEN["prompts"].index(list(group.prompt.tokens)) for group in collected.groups]
    return Outcome(
        advantages=credited.advantages[torch.tensor(order).argsort()],
        losses=[report.loss for report in reports],
        num_tokens=[report.num_tokens for report in reports],
        metrics=[update_metrics([report]) for report in reports],
        updates=sgd.updates,
    )


def require_same(ours: dict[str, torch.Tensor], theirs: str, what: str) -> None:
    """Of every parameter ‖ours - theirs‖ ≤ 1e-5 ‖theirs‖."""
    for name, expected in trl_numbers.decoded(theirs).items():
        distance = relative_distance(ours[name].double(), expected.double())
        assert distance <= 1e-5, f"{what} of {name}: {distance:.1e} apart"


@pytest.mark.parametrize("name", CASES)
def test_loss_gradients_and_weights_are_those_of_trl(name) -> None:
    made = outcome(name)
    assert len(made.updates) == 2
    for number, expected in enumerate(CASES[name]["updates"]):
        # TRL's loss is a float32 mean of terms of size 1, which may cancel.
        assert made.losses[number] == pytest.approx(expected["loss"], rel=1e-5, abs=2e-7)
        require_same(made.updates[number].gradient, expected["gradient"], f"gradient {number + 1}")
        require_same(made.updates[number].weights, expected["weights"], f"weights after update {number + 1}")


@pytest.mark.parametrize("name", CASES)
def test_advantages_are_those_of_trl(name) -> None:
    expected = torch.tensor(CASES[name]["advantages"], dtype=torch.float64).view(-1, GROUP_SIZE)
    torch.testing.assert_close(outcome(name).advantages, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "name", [name for name in CASES if "sequences" not in name and name not in ("luspo", "micro-batches")]
)
def test_metrics_of_one_name_are_those_of_trl(name) -> None:
    """With ratios of sequences TRL counts completions, and with micro-batches its means are of means."""
    renamed = {"cispo_clip_ratio": "clip_ratio/high_mean"}
    made, total = outcome(name), sum(len(ids) for group in GIVEN["completions"] for ids in group)
    for ours, num_tokens, update in zip(made.metrics, made.num_tokens, CASES[name]["updates"], strict=True):
        for metric, value in update["metrics"].items():
            if metric != "entropy":  # which is measured on request
                # Ours are of the tokens of the update, without groups that teach nothing: none of theirs is clipped.
                assert ours[renamed.get(metric, metric)] * num_tokens == pytest.approx(value * total, rel=1e-5), metric


@pytest.mark.parametrize("name", CASES)
def test_in_the_second_update_clips_act_and_a_kl_pulls(name) -> None:
    """Else the numbers would prove little."""
    metrics = CASES[name]["updates"][1]["metrics"]
    assert metrics.get("clip_ratio/region_mean", metrics.get("cispo_clip_ratio")) > 0.1
    assert ("kl" in metrics) == bool(CASES[name]["fields"].get("beta"))
    assert metrics.get("kl", 1) > 0.01
