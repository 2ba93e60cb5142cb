"""From the groups of a step to its updates: rewards, refills, several passes, mini-batches, steps without a signal."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum

import pytest
import torch

from posttrain.algorithms.table import build_algorithm
from posttrain.batch import Judged
from posttrain.config import Config
from posttrain.generation.in_process import InProcessEngine
from posttrain.options.rollout import RolloutOptions
from posttrain.options.training import RunOptions, UpdateOptions
from posttrain.records import Grades, Group, Prompt
from posttrain.rewards.grading.answers import Detailed
from posttrain.rewards.grading.function import RewardFunction
from posttrain.rewards.grading.grade import OnError, reward_function
from posttrain.runs.clock import Clock
from posttrain.training.collector import Collected, StepContext, collect
from posttrain.training.optimizer import new_optimizer
from posttrain.training.rl import batches, learn
from posttrain.training.session import Session, frozen_copy
from posttrain.training.state import RunState
from tests.support.tiny import plain_logprobs, some_prompts, tiny_policy, weights

PLAIN_DAPO = {"name": "dapo", "overlong": None, "resample": None}


def even_tokens(completion_ids: Sequence[Sequence[int]], **columns: object) -> list[float]:
    return [float(sum(token % 2 == 0 for token in tokens)) for tokens in completion_ids]


class Tokens:
    """Random prompts, scored by the number of even tokens that follow."""

    name = "tokens"
    reward_functions: tuple[RewardFunction, ...] = (reward_function(even_tokens),)
    closing_tags: tuple[str, ...] = ()

    def prompts(self, step: int, draws: range) -> list[Prompt]:
        made = some_prompts([3 + draw % 4 for draw in range(draws.stop)], seed=step)
        return [replace(made[draw], id=f"draw {draw}") for draw in draws]

    def held_out(self) -> list[Prompt]:
        return []

    def longest_prompts(self) -> list[Prompt]:
        return self.prompts(0, range(4))

    def statistics(self, groups: Sequence[Group]) -> dict[str, float]:
        return {}

    def found(self, prompt: Prompt, completion: str) -> bool:
        raise AssertionError("only asked where there are closing tags")


def session_with(
    algorithm: Mapping[str, object] = PLAIN_DAPO,
    reward: object = even_tokens,
    on_error: OnError = "stop",
    **update: int,
) -> Session:
    config = Config(
        algorithm=dict(algorithm),
        rollout=RolloutOptions(prompts_per_step=5, group_size=4, max_completion_tokens=8, on_reward_error=on_error),
        update=UpdateOptions(learning_rate=1e-2, **update),
        run=RunOptions(num_steps=3),
    )
    policy, made = tiny_policy(), build_algorithm(config.algorithm)
    return Session(
        config=config,
        policy=policy,
        engine=InProcessEngine(policy),
        optimizer=new_optimizer(policy.model.parameters(), config.update),
        algorithm=made,
        task=Tokens(),
        rewards=(reward_function(reward),),
        reference=frozen_copy(policy) if made.uses_reference else None,
    )


def collected_by(session: Session, step: int = 1) -> Collected:
    return collect(
        session, StepContext(step=step, weights_version=0, clock=Clock(), journal=lambda groups, grades: None)
    )


def prompts_of(session: Session, collected: Collected, step: int = 1) -> list[list[str]]:
    """The prompts of each update's batch; where an advantage is 0 completions may be missing, never all here."""
    found = batches(session, step, collected, Clock())
    return [sorted({name for name, _ in batch.names}) for batch in found]


# Passes and mini-batches.


def test_every_pass_goes_through_all_groups_once_in_whole_groups_and_its_own_order() -> None:
    session = session_with(epochs_per_step=3, minibatches_per_epoch=2)
    collected = collected_by(session)
    everything = sorted(group.prompt.id for group in collected.judged.groups)
    parts = prompts_of(session, collected)
    assert [len(part) for part in parts] == [2, 3] * 3  # five groups in two parts
    for first, second in zip(parts[::2], parts[1::2], strict=True):
        assert sorted(first + second) == everything
    assert len({tuple(part) for part in parts[::2]}) > 1
    assert prompts_of(session, collected) == parts  # a function of seed, step and pass
    assert prompts_of(session, collected, step=2) != parts


def test_each_mini_batch_has_weights_of_its_own() -> None:
    session = session_with(minibatches_per_epoch=2)
    collected = collected_by(session)
    lengths = {group.prompt.id: sum(len(r.tokens) for r in group.rollouts) for group in collected.judged.groups}
    for batch in batches(session, 1, collected, Clock()):
        num_tokens = sum(lengths[name] for name in {name for name, _ in batch.names})
        torch.testing.assert_close(batch.token_weights, torch.full_like(batch.token_weights, 1 / num_tokens))


def test_one_update_a_step_sees_ratios_of_one_and_several_do_not() -> None:
    once = learn_in(session_with())
    again = learn_in(session_with(epochs_per_step=2))
    halves = learn_in(session_with(minibatches_per_epoch=2))
    assert (once["num_updates"], again["num_updates"], halves["num_updates"]) == (1, 2, 2)
    assert once["ratio/max"] == pytest.approx(1, abs=1e-12)
    assert again["ratio/max"] > 1.01
    assert halves["ratio/max"] > 1.01
    # Parity is measured where sampler and trainer have the same weights: at the first update.
    assert max(m["sampling/sampling_logp_difference/max"] for m in (once, again, halves)) < 1e-12


def learn_in(session: Session) -> dict[str, float]:
    return learn(session, 1, collected_by(session), RunState(), Clock())


def test_the_schedule_counts_updates_not_steps() -> None:
    # Two updates a step for three steps, warm-up over four of them: step 2 ends with the fourth, at the full rate.
    session = session_with(minibatches_per_epoch=2, warmup_steps=4)
    collected, state = collected_by(session), RunState()
    assert learn(session, 1, collected, state, Clock())["learning_rate"] == pytest.approx(1e-2 * 2 / 4)
    assert learn(session, 2, collected, state, Clock())["learning_rate"] == pytest.approx(1e-2)
    assert state.num_updates == 4


# The reference.


def test_the_reference_is_run_only_where_its_log_probs_are_read() -> None:
    for term, wanted in (({"estimator": "k3"}, True), ({"estimator": "full"}, False)):
        session = session_with({"name": "grpo", "kl": {"coefficient": 0.1, **term}})
        assert (collected_by(session).judged.reference_logprobs is not None) == wanted
        assert learn_in(session)["kl"] == pytest.approx(0, abs=1e-12)


# Without a signal.


def test_a_step_without_a_signal_moves_no_weight_although_the_optimiser_has_momentum() -> None:
    session, state = session_with(), RunState()
    learn(session, 1, collected_by(session), state, Clock())
    before, moments = weights(session.policy), [s["exp_avg"].clone() for s in session.optimizer.state.values()]
    collected = collected_by(session, step=2)
    judged = replace(collected.judged, advantages=torch.zeros_like(collected.judged.advantages))
    metrics = learn(session, 2, replace(collected, judged=judged), state, Clock())
    assert torch.equal(weights(session.policy), before)
    assert all(torch.equal(s["exp_avg"], m) for s, m in zip(session.optimizer.state.values(), moments, strict=True))
    assert metrics["num_updates"] == 0
    assert state.num_updates == 1
    assert "loss" not in metrics


# Collection: what becomes of rewards before they are advantages.


def test_a_kl_in_the_reward_is_taken_off_before_advantages() -> None:
    session = session_with({"name": "rloo", "kl": {"coefficient": 0.5, "estimator": "k1", "place": "reward"}})
    session.reference = tiny_policy(seed=1)
    collected = collected_by(session)
    for group, advantages in zip(collected.judged.groups, collected.judged.advantages, strict=True):
        totals = []
        for rollout in group.rollouts:
            log_ref = plain_logprobs(session.reference.model, group.prompt.tokens, rollout.tokens).sum().item()
            totals.append(even_tokens([rollout.tokens])[0] - 0.5 * (sum(rollout.logprobs) - log_ref))
        others = [(sum(totals) - own) / 3 for own in totals]
        expected = [own - other for own, other in zip(totals, others, strict=True)]
        assert advantages.tolist() == pytest.approx(expected, abs=1e-10)
    # It acts through the advantage alone: no term in the loss, and no rollout is kept for it.
    assert "kl" in learn(session, 1, collected, RunState(), Clock())  # reported all the same


def test_long_completions_are_punished_in_the_reward() -> None:
    # Limit 8, buffer half of it: a completion of n > 4 tokens loses 2 (n - 4) / 4.
    session = session_with({"name": "dapo", "overlong": {"buffer": 0.5, "penalty": 2.0}, "resample": None})
    collected = collected_by(session)
    rewards = [
        [even_tokens([r.tokens])[0] - 2 * max(0, len(r.tokens) - 4) / 4 for r in group.rollouts]
        for group in collected.judged.groups
    ]
    expected = torch.tensor(rewards, dtype=torch.float64)
    expected = (expected - expected.mean(1, keepdim=True)) / expected.std(1, correction=0, keepdim=True)
    torch.testing.assert_close(collected.judged.advantages, expected, rtol=0, atol=1e-9)
    plain = torch.tensor([[even_tokens([r.tokens])[0] for r in g.rollouts] for g in collected.judged.groups])
    torch.testing.assert_close(collected.grades.rewards, plain.double())  # what is logged is the reward


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
    session = session_with({"name": "dapo", "overlong": None, "resample": {"max_rounds": 3}}, even_first_half)
    session.task = PartlyFlat()
    collected = collected_by(session)
    # Draws 0 to 4, of which 0 and 2 are flat; then 5 and 6, of which 5 is; then 7.
    assert [group.draw for group in collected.judged.groups] == [1, 3, 4, 6, 7]
    assert [[group.draw for group in groups] for groups, _ in collected.replaced] == [[0, 2], [5]]
    assert (collected.judged.advantages != 0).any(dim=1).all()
    kept = [[even_tokens([r.tokens])[0] for r in group.rollouts] for group in collected.judged.groups]
    assert collected.grades.rewards.tolist() == kept
    groups, grades, advantages = collected.everything()
    assert [group.draw for group in groups] == [1, 3, 4, 6, 7, 0, 2, 5]
    assert grades.rewards[5:].tolist() == [[1.0] * 4] * 3
    assert advantages.isnan().any(dim=1).tolist() == [False] * 5 + [True] * 3
    weighted = sum(len(batch.tokens) for batch in batches(session, 1, collected, Clock()))
    assert weighted <= sum(len(r.tokens) for group in collected.judged.groups for r in group.rollouts)


def test_refilling_stops_after_its_rounds() -> None:
    session = session_with(
        {"name": "dapo", "overlong": None, "resample": {"max_rounds": 2}}, lambda completions: [1.0] * len(completions)
    )
    collected = collected_by(session)
    assert [len(groups) for groups, _ in collected.replaced] == [5, 5]
    assert [group.draw for group in collected.judged.groups] == [10, 11, 12, 13, 14]
    assert learn(session, 1, collected, RunState(), Clock())["num_updates"] == 0


def test_unscored_rollouts_take_no_part() -> None:
    def sometimes(completion_ids: Sequence[Sequence[int]], **columns: object) -> list[float | None]:
        return [None if tokens[0] % 3 == 0 else even_tokens([tokens])[0] for tokens in completion_ids]

    collected = collected_by(session_with(reward=sometimes))
    judged: Judged = collected.judged
    grades: Grades = collected.grades
    unscored = torch.tensor([[r.tokens[0] % 3 == 0 for r in group.rollouts] for group in judged.groups])
    assert 0 < unscored.sum() < unscored.numel()
    assert torch.equal(judged.scored, ~unscored)
    assert torch.equal(grades.rewards.isnan(), unscored)
    assert (judged.advantages[unscored] == 0).all()
    # Centred over those that have a score.
    for advantages, seen in zip(judged.advantages, judged.scored, strict=True):
        assert advantages[seen].sum().item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("place", "updates"), [("loss", 1), ("reward", 0)])
def test_without_any_advantage_only_a_kl_in_the_loss_is_a_reason_to_update(place: str, updates: int) -> None:
    session = session_with({"name": "rloo", "kl": {"coefficient": 0.5, "estimator": "k1", "place": place}})
    session.reference = tiny_policy(seed=1)
    collected = collected_by(session)
    judged = replace(collected.judged, advantages=torch.zeros_like(collected.judged.advantages))
    metrics = learn(session, 1, replace(collected, judged=judged), RunState(), Clock())
    assert metrics["num_updates"] == updates


class Said(StrEnum):
    TOKENS = "tokens"


def test_refilled_rounds_count_their_failures_and_keep_each_groups_details() -> None:
    failed: list[int] = []

    def telling(completion_ids: Sequence[Sequence[int]], flat: Sequence[bool], **columns: object) -> list[object]:
        scores = even_first_half([], completion_ids, flat)
        failed.extend(tokens[0] % 5 == 0 for tokens in completion_ids)
        return [
            float("nan") if tokens[0] % 5 == 0 else Detailed(score, Said.TOKENS, {"tokens": list(tokens)})
            for tokens, score in zip(completion_ids, scores, strict=True)
        ]

    session = session_with({"name": "dapo", "overlong": None, "resample": {"max_rounds": 3}}, telling, on_error="none")
    session.task = PartlyFlat()
    collected = collected_by(session)
    assert [group.draw for group in collected.judged.groups] == [1, 3, 4, 6, 7]
    assert collected.grades.num_failures == sum(failed)
    first_round = sum(failed[:20])  # five groups of four
    assert 0 < first_round < sum(failed)
    groups, grades, _ = collected.everything()
    for group, details, outcomes in zip(groups, grades.details["telling"], grades.outcomes["telling"], strict=True):
        wanted = [None if r.tokens[0] % 5 == 0 else {"tokens": list(r.tokens)} for r in group.rollouts]
        assert list(details) == wanted
        assert list(outcomes) == ["" if one is None else "tokens" for one in wanted]
