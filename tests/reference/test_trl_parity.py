"""The loss, every gradient and the weights after a step are TRL's, for the same completions and rewards.

TRL wrote its numbers to tests/data/trl_parity.json; `make trl-parity` writes them anew.  Each case has two updates on
one batch: the first where the policy is the one that sampled, the second where it has left it, so that ratios, clips
and the KL act.  Ours come through `posttrain.trl`, so that what its fields mean is proven with them.
"""

import json
import runpy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.records import Group
from posttrain.rewards.grading.function import name_of_callable
from posttrain.runs.progress import Clock
from posttrain.training.collector import discard_scores
from posttrain.training.metrics import update_metrics
from posttrain.training.session import open_session
from posttrain.trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, rewards
from posttrain.trl.log_entries import Logged, logged_by, token_entry
from tests.support import trl_numbers
from tests.support.refusals import refused
from tests.support.tiny import relative_distance
from tests.support.trl_numbers import CASES, GIVEN, GROUP_SIZE

ROUNDED = ("normalised, then summed", "normalised, then summed, with a KL", "rloo with a KL, normalised")
"""Where TRL leaves a group whose scores say nothing an advantage of 5e-8, so that its tokens count as clipped."""
WORST = 1e-5
"""Relative distance of a parameter's gradient, or of its weights, from TRL's."""


GRPO = [name for name in CASES if not name.startswith("rloo")]
CONSTANT_LOSS = "rloo with a KL, truncated masked"
"""Where TRL's loss has a constant for each masked completion, its advantage, which has no gradient."""


def trainer_of(
    name: str, folder: Path, dtype: torch.dtype
) -> tuple[GRPOTrainer | RLOOTrainer, trl_numbers.RecordingSgd]:
    """posttrain.trl with what TRL was given: fields, model, rewards, rows, and gradient descent at the same rate."""
    fields = trl_numbers.FIELDS | CASES[name]["fields"]
    model = trl_numbers.model().to(dtype)
    sgd = trl_numbers.RecordingSgd(dict(model.named_parameters()), fields["learning_rate"])
    kinds = (GRPOTrainer, GRPOConfig) if name in GRPO else (RLOOTrainer, RLOOConfig)
    trainer = kinds[0](
        model=model,
        reward_funcs=trl_numbers.reward_functions(name),
        args=kinds[1](output_dir=str(folder / "run"), **fields),
        train_dataset=trl_numbers.rows(),
        processing_class=trl_numbers.tokenizer(),
        optimizers=(sgd, None),
    )
    trainer.engine = trl_numbers.ForcedEngine(trainer.policy)
    return trainer, sgd


@dataclass(frozen=True)
class Outcome:
    """What became of a case: our advantages by prompt, and what each of the two updates was."""

    advantages: torch.Tensor
    losses: list[float]
    groups: Sequence[Group]
    logged: Logged
    metrics: list[dict[str, float]]
    updates: list[trl_numbers.Recorded]
    kls: list[float | None]
    """What a batch's first update logs of a KL in the rewards."""


@cache
def outcome(name: str) -> Outcome:
    """Of the case in float64, step by step: so nothing but TRL's own rounding stands between the numbers."""
    trainer, sgd = trainer_of(name, Path("unused"), torch.float64)
    config, _, rows = trainer.described()
    reports, kls = [], []
    with open_session(config, trainer.objects(rows)) as session:
        for step in range(1, len(CASES[name]["updates"]) // 2 + 1):
            collected = session.collector.collect(step, discard_scores, Clock())
            credited = session.learner.credit(collected, Clock())
            kls += [logged_by(trainer.args).penalised_kl(collected.groups, credited.token_rewards).get("kl"), None]
            reports += session.learner.learn(session.learner.batches(credited, Clock()), step, Clock())
    order = [GIVEN["prompts"].index(list(group.prompt.tokens)) for group in collected.groups]
    return Outcome(
        advantages=credited.advantages[torch.tensor(order).argsort()],
        losses=[report.loss for report in reports],
        groups=collected.groups,
        logged=logged_by(trainer.args),
        metrics=[update_metrics([report]) for report in reports],
        updates=sgd.updates,
        kls=kls,
    )


def require_same(ours: dict[str, torch.Tensor], theirs: str, what: str) -> None:
    """Of every parameter ‖ours - theirs‖ ≤ WORST · ‖theirs‖."""
    for name, expected in trl_numbers.decoded(theirs).items():
        distance = relative_distance(ours[name].double(), expected.double())
        assert distance <= WORST, f"{what} of {name}: {distance:.1e} apart"


def require_same_updates(name: str, made: list[trl_numbers.Recorded]) -> None:
    """The gradients of both updates and the weights after each."""
    for number, (ours, theirs) in enumerate(zip(made, CASES[name]["updates"], strict=True), start=1):
        require_same(ours.gradient, theirs["gradient"], f"gradient {number}")
        require_same(ours.weights, theirs["weights"], f"weights after update {number}")


@pytest.mark.parametrize("name", CASES)
def test_loss_gradients_and_weights_are_those_of_trl(name) -> None:
    made = outcome(name)
    for loss, expected in zip(made.losses if name != CONSTANT_LOSS else (), CASES[name]["updates"], strict=False):
        # TRL's is a float32 mean of terms of size 1, which may cancel.
        assert loss == pytest.approx(expected["loss"], rel=WORST, abs=2e-7)
    require_same_updates(name, made.updates)


def test_a_whole_run_takes_the_steps_of_trl(tmp_path, capsys) -> None:
    """In float32, through `train()`, with its log: what a script sees."""
    name = "dapo with a KL"
    trainer, sgd = trainer_of(name, tmp_path, torch.float32)
    trainer.train()
    require_same_updates(name, sgd.updates)
    entry = trainer.state.log_history[0]
    # Scores .9 + .4/2, .1, .3 + 1/2, .2 + .2/2; 1, 0, .6/2, .7; 1, 1, 1, 1 add up to 8.3 over 12 completions.
    assert entry["reward"] == pytest.approx(8.3 / 12)
    assert entry["completions/mean_length"] == pytest.approx(58 / 12)


@pytest.mark.parametrize("name", CASES)
def test_advantages_are_those_of_trl(name) -> None:
    expected = torch.tensor(CASES[name]["advantages"], dtype=torch.float64).view(-1, GROUP_SIZE)
    torch.testing.assert_close(outcome(name).advantages, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("micro-batches", *ROUNDED)])
def test_logged_metrics_are_those_of_trl(name) -> None:
    """Of tokens, and with ratios of sequences of completions; with micro-batches TRL's means are of means."""
    made = outcome(name)
    assert any("clip" in metric for metric in CASES[name]["updates"][0]["metrics"])
    for ours, kl, update in zip(made.metrics, made.kls, CASES[name]["updates"], strict=True):
        share = made.logged.trained_share(
            tokens=ours["tokens/trained"], completions=ours["completions/trained"], groups=made.groups
        )
        entry = token_entry(ours, made.logged, trained_share=share) | ({} if kl is None else {"kl": kl})
        for metric, value in update["metrics"].items():
            if metric != "entropy":  # which is measured on request
                assert entry[metric] == pytest.approx(value, rel=1e-5, abs=1e-8), metric


@pytest.mark.parametrize("name", GRPO)
def test_in_the_second_update_clips_act_and_a_kl_pulls(name) -> None:
    """Else the numbers would prove little."""
    metrics = CASES[name]["updates"][1]["metrics"]
    assert metrics.get("clip_ratio/region_mean", metrics.get("cispo_clip_ratio")) > 0.1
    assert ("kl" in metrics) == bool(CASES[name]["fields"].get("beta"))
    assert metrics.get("kl", 1) > 0.01


@pytest.mark.parametrize("name", [name for name in CASES if name not in GRPO])
def test_with_rloo_clips_act_and_the_second_batch_has_a_kl(name) -> None:
    updates = [update["metrics"] for update in CASES[name]["updates"]]
    assert updates[1]["clip_ratio/region_mean"] > 0.1
    assert len(updates) == 2 or abs(updates[2]["kl"]) > 0.01


ROOT = Path(__file__).parents[2]
REWARD_CASES = runpy.run_path(str(ROOT / "benchmarks" / "trl" / "parity" / "reward_cases.py"))
BY_TRL: dict[str, list[Any]] = json.loads((ROOT / "tests" / "data" / "trl_rewards.json").read_text(encoding="utf-8"))


def test_every_function_says_what_trl_says() -> None:
    ours = REWARD_CASES["answers_of"](rewards)
    assert ours.keys() == BY_TRL.keys()
    for question, expected in BY_TRL.items():
        assert ours[question] == expected, question


def test_the_questions_tell_right_from_wrong_from_unread() -> None:
    for name in ("accuracy_reward", "reasoning_accuracy_reward"):
        assert {*BY_TRL[name]} == {0.0, 1.0, None}


def test_every_name_of_trl_s_module_is_here_and_called_the_same_in_logs() -> None:
    assert {*rewards.__all__} == {question.partition(" ")[0].rstrip(",") for question in BY_TRL}
    assert name_of_callable(rewards.get_soft_overlong_punishment(9, 3)) == "soft_overlong_punishment_reward"
    assert name_of_callable(rewards.get_repetition_penalty_reward()) == "repetition_penalty_reward"
    assert name_of_callable(rewards.get_cosine_scaled_reward(9)) == "cosine_scaled_reward"


def test_what_was_read_goes_to_the_log() -> None:
    seen: dict[str, list[Any]] = {}
    completions = REWARD_CASES["messages"]([r"\boxed{4}", "4", r"\boxed{4}"])
    rewards.accuracy_reward(completions, ["4", "4", "nothing"], log_extra=seen.__setitem__)
    assert seen["solution"] == ["4", "4", "nothing"]
    assert seen["answer_parsed"][1:] == ["[unparseable]", "[skipped]"]
    assert seen["gold_parsed"][2] == "[unparseable]"
    assert "4" in seen["answer_parsed"][0]


def test_a_penalty_that_would_pay_is_refused() -> None:
    with refused("max_penalty = 0.5: must be 0 or below"):
        rewards.get_repetition_penalty_reward(max_penalty=0.5)
