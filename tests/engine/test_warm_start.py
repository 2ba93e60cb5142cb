"""A critic learns from rollouts that a run has kept: what it learns, what stays as it was, and what is told."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from posttrain.algorithms.table import build_algorithm
from posttrain.rewards.grading.answers import ProcessReward
from posttrain.runs.progress import Clock
from posttrain.runs.rollout_file import parquet_bytes, read_rollouts
from posttrain.training.collector import CollectedStep
from posttrain.training.learner import earlier_rollouts, require_known_tokens, warm_start
from tests.support.refusals import refused
from tests.support.stages import Stages, stages_with
from tests.support.tiny import weights

RAW = {"name": "ppo", "whitening": "none", "largest_epoch_kl": None}
SCALED = {**RAW, "reward_scaling": {}}


def stages(folder: Path | str, trunk: str = "shared") -> Stages:
    return stages_with({**RAW, "critic": {"trunk": trunk, "warm_start": str(folder), "rate_scale": 1.0}})


def keep(folder: Path, steps: list[CollectedStep]) -> None:
    for number, step in enumerate(steps, 1):
        nothing = torch.zeros_like(step.grades.rewards)
        (folder / f"step-{number:06d}.parquet").write_bytes(parquet_bytes(number, step.groups, step.grades, nothing))


def value_loss(learned: Stages, step: CollectedStep) -> float:
    """Mean squared distance of values from the returns of a step, which are its rewards."""
    columns = learned.learner.credit(step, Clock()).groups.columns
    assert columns.values is not None
    assert columns.returns is not None
    return float((columns.values - columns.returns).square().mean())


@pytest.mark.parametrize("trunk", ["shared", "own"])
def test_the_critic_comes_to_expect_what_was_earned_and_the_policy_stays(trunk: str, tmp_path: Path) -> None:
    earlier = stages_with(RAW)
    steps = [earlier.collected(step) for step in (1, 2)]
    keep(tmp_path, steps)
    new = stages(tmp_path, trunk)
    before, untaught = weights(new.policy), value_loss(stages("", trunk), steps[1])
    (told,) = warm_start(new.learner, Clock())
    assert "learned from 40 earlier rollouts; explained variance of the last step's before it: " in told
    assert "unknown" not in told
    assert torch.equal(weights(new.policy), before)
    assert new.learner.critic is not None
    assert new.learner.critic.head.output.weight.abs().max() > 0
    state = new.learner.actor_critic_state
    assert (state.begun, state.fitted) == (True, False)
    assert value_loss(new, steps[1]) < untaught


def test_what_is_told_is_how_the_last_step_looked_before_it_was_learned_from(tmp_path: Path) -> None:
    """A new head expects one number everywhere, which explains nothing; rewards that are all alike ask for nothing."""
    step = stages_with(RAW).collected()
    keep(tmp_path, [step])
    assert warm_start(stages(tmp_path).learner, Clock())[0].endswith("before it: 0.00.")
    alike = replace(step, grades=replace(step.grades, rewards=torch.ones_like(step.grades.rewards)))
    keep(tmp_path, [step, alike])
    assert warm_start(stages(tmp_path).learner, Clock())[0].endswith("before it: unknown.")


def both_ways(completion_ids: list[list[int]], **columns: object) -> list[ProcessReward]:
    """Ten times what the tokens are worth, at each token, and 1 in the end."""
    return [ProcessReward(1.0, token_rewards=[10.0 * (token % 2) for token in tokens]) for tokens in completion_ids]


def test_what_tokens_earned_is_part_of_the_returns_as_in_the_step_that_wrote_it(tmp_path: Path) -> None:
    step = stages_with(RAW, both_ways).collected()
    learner = stages("").learner
    credited = learner.credit(step, Clock())
    nothing = torch.zeros_like(step.grades.rewards)
    assert credited.process_rewards is not None
    columns = {"process_rewards": credited.process_rewards}
    file = tmp_path / "step-000001.parquet"
    file.write_bytes(parquet_bytes(1, step.groups, step.grades, nothing, token_columns=columns))
    groups, grades = read_rollouts(file)
    again = learner.credit(replace(step, groups=groups, grades=grades), Clock())
    assert credited.groups.columns.returns is not None
    assert again.groups.columns.returns is not None
    assert credited.groups.columns.returns.max() > 10
    torch.testing.assert_close(again.groups.columns.returns, credited.groups.columns.returns, rtol=0, atol=0)
    file.write_bytes(parquet_bytes(1, step.groups, step.grades, nothing))
    with refused("has marks but no column `process_rewards`"):
        read_rollouts(file)


def test_rewards_that_were_seen_are_part_of_what_rewards_are_divided_by(tmp_path: Path) -> None:
    keep(tmp_path, [stages_with(SCALED).collected(step) for step in (1, 2)])
    new = stages_with({**SCALED, "critic": {"warm_start": str(tmp_path)}})
    warm_start(new.learner, Clock())
    assert new.learner.actor_critic_state.rewards.count == 40


def test_without_a_folder_nothing_is_done() -> None:
    new = stages("")
    before = new.learner.actor_critic_state
    assert warm_start(new.learner, Clock()) == []
    assert warm_start(stages_with({"name": "grpo"}).learner, Clock()) == []
    assert new.learner.actor_critic_state == before
    for config in ({"name": "grpo"}, {"name": "ppo"}):
        assert earlier_rollouts(build_algorithm(config)) == []


def test_a_folder_without_rollouts_is_refused_before_anything_is_sampled(tmp_path: Path) -> None:
    with refused("algorithm.critic.warm_start =", ": holds no step-N.parquet"):
        earlier_rollouts(build_algorithm({"name": "ppo", "critic": {"warm_start": str(tmp_path)}}))


def test_rollouts_of_a_larger_vocabulary_are_refused(tmp_path: Path) -> None:
    new = stages("")
    (group, *_) = new.collected().groups
    size = new.policy.num_logits
    for beyond in (False, True):
        prompt = replace(group.prompt, tokens=(size - 1 + beyond, *group.prompt.tokens[1:]))
        ours, theirs = [group, replace(group, prompt=prompt)], Path("step-000001.parquet")
        if beyond:
            with refused(f"step-000001.parquet has token {size}, and the policy knows {size}"):
                require_known_tokens(ours, new.policy, theirs)
        else:
            require_known_tokens(ours, new.policy, theirs)
