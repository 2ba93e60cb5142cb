"""The `demonstrations` section as episodes, and what is known of who made them."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from posttrain.errors import UserError
from posttrain.irl.course import expert_policy
from posttrain.irl.demonstrations import FIELDS, Demonstrations
from posttrain.irl.episode_sampling import sample_demonstrations
from posttrain.irl.planning import (
    Policy,
    Problem,
    Reward,
    action_values,
    greedy_policy,
    soft_policy_iteration,
    value_iteration,
)
from posttrain.irl_runs.arrays import read_arrays
from posttrain.irl_runs.worlds import World
from posttrain.options.irl_world import DemonstrationOptions, RecordedOptions, SampledOptions

COURSE_TOLERANCE = 1e-4
"""To which the course's expert iterates its values."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertEpisodes:
    """Episodes, and the expert behind them where the world's rewards are known."""

    episodes: Demonstrations
    reward: Reward | None
    """What the expert is after, in a world that ends: arriving in an end pays once."""
    policy: Policy | None
    discount: float
    """At which the expert values the future."""


def make_expert_episodes(options: DemonstrationOptions, world: World) -> ExpertEpisodes:
    """Read or sample the demonstrations of a recipe."""
    if isinstance(options, RecordedOptions):
        arrays = read_arrays(Path(options.path), "demonstrations.path", needed=FIELDS)
        episodes = Demonstrations.from_arrays(arrays)
        return ExpertEpisodes(episodes=episodes, reward=world.rewards, policy=None, discount=options.discount)
    if world.rewards is None:
        raise UserError(
            "demonstrations.name = sampled: this world names no rewards for an expert to be after.  Add `rewards` to"
            " its file, or use demonstrations.name = recorded."
        )
    policy, reward = expert(options, world, world.rewards)
    episodes = sample_demonstrations(
        world.mdp,
        policy,
        num_episodes=options.num_episodes,
        rng=np.random.default_rng(options.seed),
        max_steps=options.max_steps,
    )
    return ExpertEpisodes(episodes=episodes, reward=reward, policy=policy, discount=options.discount)


def expert(options: SampledOptions, world: World, rewards: Reward) -> tuple[Policy, Reward]:
    """How the expert acts, and what it is after in a world that ends."""
    mdp, discount = world.mdp, options.discount
    if options.expert == "soft":
        problem = Problem(mdp=mdp, reward=rewards, discount=discount, temperature=options.temperature)
        return soft_policy_iteration(problem).policy, rewards
    if options.expert == "greedy":
        values = value_iteration(mdp, rewards, discount=discount)
        return greedy_policy(mdp, action_values(mdp, rewards, values, discount=discount)), rewards
    grid = world.endless
    assert grid is not None, "IrlConfig sees to that"
    if discount == 1:
        raise UserError("demonstrations.discount = 1: to the course's expert the ends go on paying; use less than 1")
    values = value_iteration(grid.mdp, rewards, discount=discount, tolerance=COURSE_TOLERANCE)
    for_ever = rewards.copy()
    for_ever[grid.ends] /= 1 - discount  # what staying there would pay
    return expert_policy(grid.intended, values, steepness=options.steepness), for_ever
