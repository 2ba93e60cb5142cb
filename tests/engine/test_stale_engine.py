"""An engine that holds on to older weights, as one elsewhere may: corrected, its samples stand for today's policy."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from posttrain.generation.in_process import InProcessEngine
from posttrain.models.policy import Policy
from posttrain.needs import Need
from posttrain.runs.progress import Clock
from posttrain.training import credited_step
from posttrain.training.credited_step import CreditedStep
from posttrain.training.update import group_logprobs
from tests.support.adapted import LORA, adapted_policy
from tests.support.stages import PLAIN_DAPO, Stages, stages_with
from tests.support.tiny import gradient_of_update, plain_logprobs, relative_distance, tiny_policy

CORRECTION = {"truncate": 1.25, "mask_low": 0.8, "mask_high": 1.2}


def older(policy: Policy) -> Policy:
    """Weights of some updates ago."""
    then, before = policy.copy(), tiny_policy(seed=1)
    with torch.no_grad():
        for own, other in zip(then.model.parameters(), before.model.parameters(), strict=True):
            own.lerp_(other, 0.06)
    return then


def stale(config: dict[str, object], **update: int) -> Stages:
    """The stages of a step whose engine samples from older weights, and says the version that it was told."""
    stages = stages_with(config, **update)
    stages.collector.engine = InProcessEngine(older(stages.policy))
    return stages


def ratios(policy: Policy, credited: CreditedStep) -> list[Tensor]:
    """π/μ of the tokens of each completion, by plain rows through the Hugging Face model."""
    return [
        (
            plain_logprobs(policy.model, group.prompt.tokens, r.tokens).detach()
            - torch.tensor(r.logprobs, dtype=torch.float64)
        ).exp()
        for group in credited.groups.groups
        for r in group.rollouts
    ]


def test_the_update_weighs_older_samples_by_how_likely_they_are_now() -> None:
    stages = stale({**PLAIN_DAPO, "correction": CORRECTION})
    credited = stages.credited()
    found = ratios(stages.policy, credited)
    assert all((ratio - 1).abs().max() > 1e-3 for ratio in found)
    means = [ratio.log().mean().exp().item() for ratio in found]
    passes = [0.8 <= mean <= 1.2 for mean in means]
    assert 0 < sum(passes) < len(passes)
    expected = [r.clamp(max=1.25) if passed else 0 * r for r, passed in zip(found, passes, strict=True)]
    informed = credited.groups.informed.flatten().tolist()
    kept = torch.cat([weights for weights, trained in zip(expected, informed, strict=True) if trained])
    (batch,) = stages.learner.batches(credited, Clock())
    metrics = gradient_of_update(stages.policy, batch, stages.learner.objective())[1]
    assert metrics["correction/weight"] == pytest.approx(kept.mean().item(), rel=1e-9)
    assert metrics["correction/masked"] == pytest.approx((kept == 0).double().mean().item(), rel=1e-12)
    held_back = torch.cat([(r > 1.25) & passed for r, passed, on in zip(found, passes, informed, strict=True) if on])
    assert 0 < held_back.double().mean().item() == pytest.approx(metrics["correction/truncated"], rel=1e-12)


def test_its_gradient_is_that_of_the_weighted_tokens() -> None:
    # At the step's start π/π_prox = 1: -w A ∇log π of every token, mean over all of them.
    stages = stale({**PLAIN_DAPO, "correction": CORRECTION})
    credited = stages.credited()
    (batch,) = stages.learner.batches(credited, Clock())
    gradient, _ = gradient_of_update(stages.policy, batch, stages.learner.objective())
    policy, losses = stages.policy, []
    advantages = credited.advantages.flatten().tolist()
    rollouts = [(group.prompt.tokens, r) for group in credited.groups.groups for r in group.rollouts]
    for (prompt, rollout), advantage in zip(rollouts, advantages, strict=True):
        logprobs = plain_logprobs(policy.model, prompt, rollout.tokens)
        ratio = (logprobs.detach() - torch.tensor(rollout.logprobs, dtype=torch.float64)).exp()
        passed = 0.8 <= ratio.log().mean().exp().item() <= 1.2
        losses.append(-(ratio.clamp(max=1.25) if passed else 0 * ratio) * advantage * logprobs)
    by_hand = torch.autograd.grad(torch.cat(losses).mean(), list(policy.model.parameters()))
    assert relative_distance(gradient, torch.cat([each.flatten() for each in by_hand])) < 1e-9


def test_an_engine_that_is_up_to_date_is_left_alone() -> None:
    # Rounding alone is between its log-probs and the trainer's.
    stages = stages_with({**PLAIN_DAPO, "correction": CORRECTION})
    metrics = stages.learn(stages.credited())
    assert metrics["correction/weight"] == pytest.approx(1, abs=1e-9)
    assert metrics["correction/masked"] == metrics["correction/truncated"] == 0


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the passes over a step's completions beside those of its updates."""
    calls: Counter[str] = Counter()
    original = credited_step.group_logprobs

    def counted(*arguments: object, **options: object) -> Tensor:
        calls["group_logprobs"] += 1
        return original(*arguments, **options)

    monkeypatch.setattr(credited_step, "group_logprobs", counted)
    return calls


@pytest.mark.parametrize(
    ("correction", "update", "expected"),
    [(None, {"epochs_per_step": 2}, 0), (CORRECTION, {}, 0), (CORRECTION, {"epochs_per_step": 2}, 1)],
    ids=str,
)
def test_where_a_step_began_is_computed_once_and_only_where_updates_leave_it(
    correction, update, expected, passes
) -> None:
    stages = stale({**PLAIN_DAPO, "correction": correction}, **update)
    credited = stages.credited()
    assert passes["group_logprobs"] == expected
    assert ("proximal_logprobs" in credited.groups.columns.known) == bool(expected)
    stages.learn(credited)
    assert passes["group_logprobs"] == expected


def test_the_only_update_of_a_step_starts_where_the_step_does() -> None:
    stages = stale({**PLAIN_DAPO, "correction": CORRECTION})
    credited = stages.credited()
    proximal = group_logprobs(stages.policy, credited.collected.groups, temperature=1.0, max_tokens=99)
    columns = replace(credited.groups.columns, known={"proximal_logprobs": proximal})
    known = replace(credited, groups=replace(credited.groups, columns=columns))
    found = []
    for each in (credited, known):
        batch, *_ = stages.learner.batches(each, Clock())
        found.append(gradient_of_update(stages.policy, batch, stages.learner.objective())[0])
    assert relative_distance(*found) < 1e-12


def test_under_dropout_the_policy_that_a_step_starts_from_is_asked_without_it() -> None:
    """Else the update's own noise would be its denominator, every weight 1 and the correction nothing."""
    correction = {"name": "grpo", "correction": {}}
    still, dropping = (replace(LORA, dropout=share) for share in (0.0, 0.5))
    for options, asked in ((still, False), (dropping, True)):
        stages = stages_with(correction, policy=adapted_policy(options=options))
        assert (Need.PROXIMAL_LOGPROBS in stages.learner.column_needs) == asked
