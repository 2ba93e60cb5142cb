"""From the groups of a step to its updates: rewards, refills, several passes, mini-batches, steps without a signal."""

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum

import pytest
import torch

from posttrain.records import Prompt
from posttrain.rewards.grading.answers import DetailedGrade
from posttrain.runs.progress import Clock
from posttrain.runs.reports import StepReport
from posttrain.training.credited_step import CreditedStep
from posttrain.training.reference import FrozenCopy
from tests.support.stages import Stages, Tokens, even_tokens, stages_with
from tests.support.tiny import plain_logprobs, tiny_policy, weights


def prompts_of(stages: Stages, credited: CreditedStep, step: int = 1) -> list[list[str]]:
    """The prompts of each update's batch; where an advantage is 0 completions may be missing, never all here."""
    found = stages.learner.batches(in_step(credited, step), Clock())
    return [sorted({name for name, _ in batch.names}) for batch in found]


def in_step(credited: CreditedStep, step: int) -> CreditedStep:
    """The same groups as if another step had collected them."""
    return replace(credited, collected=replace(credited.collected, step=step))


def without_advantage(credited: CreditedStep) -> CreditedStep:
    columns = credited.groups.columns
    columns = replace(columns, advantages=torch.zeros_like(columns.advantages))
    return replace(credited, groups=replace(credited.groups, columns=columns))


def reported(credited: CreditedStep) -> StepReport:
    """What the watchers of a run would see."""
    collected = credited.collected
    return StepReport(
        step=collected.step,
        metrics={},
        groups=collected.groups,
        grades=collected.grades,
        advantages=credited.advantages,
        replaced=collected.replaced,
    )


# Passes and mini-batches.


def test_every_pass_goes_through_all_groups_once_in_whole_groups_and_its_own_order() -> None:
    stages = stages_with(epochs_per_step=3, minibatches_per_epoch=2)
    credited = stages.credited()
    everything = sorted(group.prompt.id for group in credited.groups.groups)
    parts = prompts_of(stages, credited)
    assert [len(part) for part in parts] == [2, 3] * 3  # five groups in two parts
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


# The reference.


def test_the_reference_is_run_only_where_its_log_probs_are_read() -> None:
    for term, wanted in (({"estimator": "k3"}, True), ({"estimator": "full"}, False)):
        stages = stages_with({"name": "grpo", "kl": {"coefficient": 0.1, **term}})
        credited = stages.credited()
        assert ("reference_logprobs" in credited.groups.columns.known) == wanted
        assert stages.learn(credited)["kl"] == pytest.approx(0, abs=1e-12)


# Without a signal.


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


def test_refilling_stops_after_its_rounds() -> None:
    stages = stages_with(
        {"name": "dapo", "overlong": None, "resample": {"max_rounds": 2}}, lambda completions: [1.0] * len(completions)
    )
    credited = stages.credited()
    assert [len(groups) for groups, _ in credited.collected.replaced] == [5, 5]
    assert [group.draw for group in credited.groups.groups] == [10, 11, 12, 13, 14]
    assert stages.learn(credited)["num_updates"] == 0


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
