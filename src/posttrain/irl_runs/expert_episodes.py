"""The `demonstrations` section as episodes, and the expert who made them."""

from dataclasses import dataclass

import numpy as np

from posttrain.errors import UserError
from posttrain.irl import planning
from posttrain.irl.array_files import read_arrays
from posttrain.irl.course import expert_policy
from posttrain.irl.demonstrations import FIELDS, Demonstrations
from posttrain.irl.episode_sampling import sample_demonstrations
from posttrain.irl_runs.worlds import World
from posttrain.options.irl import DemonstrationOptions, RecordedOptions, SampledOptions

COURSE_TOLERANCE = 1e-4
"""Tolerance of the values of the course's expert."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertEpisodes:
    """Episodes, and the expert who made them if the world's rewards are known."""

    episodes: Demonstrations
    reward: planning.Reward | None
    """The expert's reward, in a world that ends: arriving in an end pays once."""
    policy: planning.Policy | None
    discount: float
    """The expert's discount."""


def make_expert_episodes(options: DemonstrationOptions, world: World) -> ExpertEpisodes:
    """Read or sample the demonstrations of a recipe."""
    if isinstance(options, RecordedOptions):
        arrays = read_arrays(options.path, needed=FIELDS, where="demonstrations.path = ")
        episodes = Demonstrations.from_arrays(arrays)
        return ExpertEpisodes(episodes=episodes, reward=world.rewards, policy=None, discount=options.discount)
    if world.rewards is None:
        raise UserError(
            "demonstrations.name = sampled: this world has no rewards for an expert.  Add `rewards` to its file, or use"
            " demonstrations.name = recorded."
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


def expert(options: SampledOptions, world: World, rewards: planning.Reward) -> tuple[planning.Policy, planning.Reward]:
    """The expert's policy, and its reward in a world that ends."""
    mdp, discount = world.mdp, options.discount
    if options.expert == "soft":
        problem = planning.Problem(mdp=mdp, reward=rewards, discount=discount, temperature=options.temperature)
        return planning.soft_policy_iteration(problem).policy, rewards
    if options.expert == "greedy":
        values = planning.value_iteration(mdp, rewards, discount=discount)
        return planning.greedy_policy(mdp, planning.action_values(mdp, rewards, values, discount=discount)), rewards
    grid = world.endless
    assert grid is not None, "IrlConfig sees to that"
    if discount == 1:
        raise UserError("demonstrations.discount = 1: the course's expert is paid in ends without limit; use less")
    values = planning.value_iteration(grid.mdp, rewards, discount=discount, tolerance=COURSE_TOLERANCE)
    for_ever = rewards.copy()
    for_ever[grid.ends] /= 1 - discount  # the value of staying there
    return expert_policy(grid.intended, values, steepness=options.steepness), for_ever
