"""From the groups of a step to its updates: rewards, refills, passes, mini-batches, no signal, an engine held back."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum

import pytest
import torch
from torch import Tensor

from posttrain.generation.in_process import InProcessEngine
from posttrain.models.policy import Policy
from posttrain.needs import Need
from posttrain.records import Prompt
from posttrain.rewards.grading.answers import DetailedGrade
from posttrain.runs.progress import Clock
from posttrain.runs.reports import StepReport
from posttrain.training import credited_step
from posttrain.training.credited_step import CreditedStep
from posttrain.training.reference import FrozenCopy
from posttrain.training.update import group_logprobs
from tests.support.adapted import LORA, adapted_policy
from tests.support.stages import PLAIN_DAPO, Stages, Tokens, even_tokens, stages_with
from tests.support.tiny import gradient_of_update, plain_logprobs, relative_distance, tiny_policy, weights

SHAPES = True


def prompts_of(stages: Stages, credited: CreditedStep, step: int = 1) -> list[list[str]]:
    """The prompts of each update's batch; where an advantage is 0 completions may be missing, never all here."""
    found = stages.learner.batches(in_step(credited, step), Clock())
    return [[*dict.fromkeys(name for name, _ in batch.names)] for batch in found]


def in_step(credited: CreditedStep, step: int) -> CreditedStep:
    """The same groups as if another step had collected them."""
    return replace(credited, collected=replace(credited.collected, step=step))


def without_advantage(credited: CreditedStep) -> CreditedStep:
    columns = credited.groups.columns
    columns = replace(columns, advantages=torch.zeros_like(columns.advantages))
    return replace(credited, groups=replace(credited.groups, columns=columns))


def reported(credited: CreditedStep) -> StepReport:
    """What the watchers of a run would see."""
    of_step = {name: getattr(credited.collected, name) for name in ("step", "groups", "grades", "replaced")}
    return StepReport(metrics={}, advantages=credited.advantages, **of_step)


def test_every_pass_goes_through_all_groups_once_in_whole_groups_and_its_own_order() -> None:
    stages = stages_with(epochs_per_step=3, minibatches_per_epoch=2)
    credited = stages.credited()
    everything = sorted(group.prompt.id for group in credited.groups.groups)
    parts = prompts_of(stages, credited)
    assert [len(part) for part in parts] == [2, 3] * 3  # five groups in two parts
    assert all(part == sorted(part) for part in parts), "groups keep their order"
    for first, second in zip(parts[::2], parts[1::2], strict=True):
        assert sorted(first + second) == everything
    assert len({tuple(part) for part in parts[::2]}) > 1
    assert prompts_of(stages, credited) == parts  # a function of seed, step and pass
    assert prompts_of(stages, credited, step=2) != parts


def test_each_mini_batch_has_weights_of_its_own() -> None:
    stages = stages_with(minibatches_per_epoch=2)
    credited = stages.credited()
    lengths = {group.prompt.id: sum(len(r.tokens) for r in group.rollouts) for group in credited.groups.groups}
    for batch in stages.learner.batches(credited, Clock()):
        num_tokens = sum(lengths[name] for name in {name for name, _ in batch.names})
        torch.testing.assert_close(batch.columns.weights, torch.full_like(batch.columns.weights, 1 / num_tokens))


def test_one_update_a_step_sees_ratios_of_one_and_several_do_not() -> None:
    once, again, halves = (
        stages.learn(stages.credited())
        for stages in (stages_with(), stages_with(epochs_per_step=2), stages_with(minibatches_per_epoch=2))
    )
    assert (once["num_updates"], again["num_updates"], halves["num_updates"]) == (1, 2, 2)
    assert once["ratio/max"] == pytest.approx(1, abs=1e-12)
    assert again["ratio/max"] > 1.01
    assert halves["ratio/max"] > 1.01
    # Parity is measured where sampler and trainer have the same weights: at the first update.
    assert max(m["sampling/sampling_logp_difference/max"] for m in (once, again, halves)) < 1e-12


def test_the_schedule_counts_updates_not_steps() -> None:
    # Two updates a step for three steps, warm-up over four of them: step 2 ends with the fourth, at the full rate.
    stages = stages_with(minibatches_per_epoch=2, warmup_steps=4)
    credited = stages.credited()
    assert stages.learn(credited)["learning_rate"] == pytest.approx(1e-2 * 2 / 4)
    assert stages.learn(in_step(credited, 2))["learning_rate"] == pytest.approx(1e-2)
    assert stages.learner.num_updates == 4


def test_the_reference_is_run_only_where_its_log_probs_are_read() -> None:
    for term, wanted in (({"estimator": "k3"}, True), ({"estimator": "full"}, False)):
        stages = stages_with({"name": "grpo", "kl": {"coefficient": 0.1, **term}})
        credited = stages.credited()
        assert ("reference_logprobs" in credited.groups.columns.known) == wanted
        assert stages.learn(credited)["kl"] == pytest.approx(0, abs=1e-12)


def test_a_step_without_a_signal_moves_no_weight_although_the_optimiser_has_momentum() -> None:
    stages = stages_with()
    stages.learn(stages.credited())
    before, moments = weights(stages.policy), [s["exp_avg"].clone() for s in stages.learner.optimizer.state.values()]
    credited = stages.credited(step=2)
    metrics = stages.learn(without_advantage(credited))
    assert torch.equal(weights(stages.policy), before)
    assert all(
        torch.equal(s["exp_avg"], m) for s, m in zip(stages.learner.optimizer.state.values(), moments, strict=True)
    )
    assert metrics["num_updates"] == 0
    assert stages.learner.num_updates == 1
    assert "loss" not in metrics


# Collection: what becomes of rewards before they are advantages.


def test_a_kl_in_the_reward_is_taken_off_before_advantages() -> None:
    stages = stages_with({"name": "rloo", "kl": {"coefficient": 0.5, "estimator": "k1", "place": "reward"}})
    stages.learner.reference = FrozenCopy(tiny_policy(seed=1))
    credited = stages.credited()
    for group, advantages in zip(credited.groups.groups, credited.advantages, strict=True):
        totals = []
        for rollout in group.rollouts:
            log_ref = (
                plain_logprobs(stages.learner.reference.policy.model, group.prompt.tokens, rollout.tokens).sum().item()
            )
            totals.append(even_tokens([rollout.tokens])[0] - 0.5 * (sum(rollout.logprobs) - log_ref))
        others = [(sum(totals) - own) / 3 for own in totals]
        expected = [own - other for own, other in zip(totals, others, strict=True)]
        assert advantages.tolist() == pytest.approx(expected, abs=1e-10)
    # It acts through the advantage alone: no term in the loss, and no rollout is kept for it.
    assert "kl" in stages.learn(credited)  # reported all the same


def test_long_completions_are_punished_in_the_reward() -> None:
    # Limit 8, buffer half of it: a completion of n > 4 tokens loses 2 (n - 4) / 4.
    stages = stages_with({"name": "dapo", "overlong": {"buffer": 0.5, "penalty": 2.0}, "resample": None})
    credited = stages.credited()
    rewards = [
        [even_tokens([r.tokens])[0] - 2 * max(0, len(r.tokens) - 4) / 4 for r in group.rollouts]
        for group in credited.groups.groups
    ]
    expected = torch.tensor(rewards, dtype=torch.float64)
    expected = (expected - expected.mean(1, keepdim=True)) / expected.std(1, correction=0, keepdim=True)
    torch.testing.assert_close(credited.advantages, expected, rtol=0, atol=1e-9)
    plain = torch.tensor([[even_tokens([r.tokens])[0] for r in g.rollouts] for g in credited.groups.groups])
    torch.testing.assert_close(credited.collected.grades.rewards, plain.double())  # what is logged is the reward


def even_first_half(prompts: Sequence[str], completion_ids: Sequence[Sequence[int]], flat: Sequence[bool],
                    **columns: object) -> list[float]:  # fmt: skip
    """1 throughout where the prompt is flat, else the number of even tokens."""
    return [1.0 if same else even_tokens([tokens])[0] for same, tokens in zip(flat, completion_ids, strict=True)]


class PartlyFlat(Tokens):
    """Draws 0, 2 and 5 earn every completion the same."""

    def prompts(self, step: int, draws: range) -> list[Prompt]:
        made = super().prompts(step, draws)
        return [replace(p, columns={"flat": draw in {0, 2, 5}}) for p, draw in zip(made, draws, strict=True)]


def test_groups_without_a_signal_make_room_for_further_draws() -> None:
    stages = stages_with(
        {"name": "dapo", "overlong": None, "resample": {"max_rounds": 3}}, even_first_half, task=PartlyFlat()
    )
    credited = stages.credited()
    # Draws 0 to 4, of which 0 and 2 are flat; then 5 and 6, of which 5 is; then 7.
    assert [group.draw for group in credited.groups.groups] == [1, 3, 4, 6, 7]
    assert [[group.draw for group in groups] for groups, _ in credited.collected.replaced] == [[0, 2], [5]]
    assert (credited.advantages != 0).any(dim=1).all()
    kept = [[even_tokens([r.tokens])[0] for r in group.rollouts] for group in credited.groups.groups]
    assert credited.collected.grades.rewards.tolist() == kept
    groups, grades, advantages = reported(credited).all_rollouts()
    assert [group.draw for group in groups] == [1, 3, 4, 6, 7, 0, 2, 5]
    assert grades.rewards[5:].tolist() == [[1.0] * 4] * 3
    assert advantages.isnan().any(dim=1).tolist() == [False] * 5 + [True] * 3
    weighted = sum(len(batch.tokens) for batch in stages.learner.batches(credited, Clock()))
    assert weighted <= sum(len(r.tokens) for group in credited.groups.groups for r in group.rollouts)


def test_unscored_rollouts_take_no_part() -> None:
    def sometimes(completion_ids: Sequence[Sequence[int]], **columns: object) -> list[float | None]:
        return [None if tokens[0] % 3 == 0 else even_tokens([tokens])[0] for tokens in completion_ids]

    credited = stages_with(reward=sometimes).credited()
    groups, grades = credited.groups, credited.collected.grades
    unscored = torch.tensor([[r.tokens[0] % 3 == 0 for r in group.rollouts] for group in groups.groups])
    assert 0 < unscored.sum() < unscored.numel()
    assert torch.equal(groups.scored, ~unscored)
    assert torch.equal(grades.rewards.isnan(), unscored)
    assert (credited.advantages[unscored] == 0).all()
    # Centred over those that have a score.
    for advantages, seen in zip(credited.advantages, groups.scored, strict=True):
        assert advantages[seen].sum().item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("place", "updates"), [("loss", 1), ("reward", 0)])
def test_without_any_advantage_only_a_kl_in_the_loss_is_a_reason_to_update(place: str, updates: int) -> None:
    stages = stages_with({"name": "rloo", "kl": {"coefficient": 0.5, "estimator": "k1", "place": place}})
    stages.learner.reference = FrozenCopy(tiny_policy(seed=1))
    credited = stages.credited()
    metrics = stages.learn(without_advantage(credited))
    assert metrics["num_updates"] == updates


class Said(StrEnum):
    TOKENS = "tokens"


def test_refilled_rounds_count_their_failures_and_keep_each_groups_details() -> None:
    failed: list[int] = []

    def telling(completion_ids: Sequence[Sequence[int]], flat: Sequence[bool], **columns: object) -> list[object]:
        scores = even_first_half([], completion_ids, flat)
        failed.extend(tokens[0] % 5 == 0 for tokens in completion_ids)
        return [
            float("nan") if tokens[0] % 5 == 0 else DetailedGrade(score, Said.TOKENS, {"tokens": list(tokens)})
            for tokens, score in zip(completion_ids, scores, strict=True)
        ]

    stages = stages_with(
        {"name": "dapo", "overlong": None, "resample": {"max_rounds": 3}}, telling, task=PartlyFlat(), on_error="none"
    )
    credited = stages.credited()
    assert [group.draw for group in credited.groups.groups] == [1, 3, 4, 6, 7]
    assert credited.collected.grades.num_failures == sum(failed)
    first_round = sum(failed[:20])  # five groups of four
    assert 0 < first_round < sum(failed)
    groups, grades, _ = reported(credited).all_rollouts()
    for group, details, outcomes in zip(groups, grades.details["telling"], grades.outcomes["telling"], strict=True):
        wanted = [None if r.tokens[0] % 5 == 0 else {"tokens": list(r.tokens)} for r in group.rollouts]
        assert list(details) == wanted
        assert list(outcomes) == ["" if one is None else "tokens" for one in wanted]


class Noting(Tokens):
    """Remembers which draws were asked for."""

    def __init__(self) -> None:
        self.asked: list[range] = []

    def prompts(self, step: int, draws: range) -> list[Prompt]:
        self.asked.append(draws)
        return super().prompts(step, draws)


@pytest.mark.parametrize("rounds", [1, 3])
def test_each_round_of_refills_goes_on_behind_the_draws_of_the_last(rounds: int) -> None:
    task = Noting()
    stages = stages_with(
        {"name": "dapo", "resample": {"max_rounds": rounds}}, lambda completions: [1.0] * len(completions), task=task
    )
    collected = stages.collected()
    # Five prompts a step; equal rewards make all of them uninformative in every round.
    assert task.asked == [range(5 * number, 5 * number + 5) for number in range(rounds + 1)]
    assert [group.prompt.id for group in collected.groups] == [f"draw {draw}" for draw in task.asked[-1]]
    assert len(collected.replaced) == rounds


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
