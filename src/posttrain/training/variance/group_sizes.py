"""What the size of a group does to its baseline, for rewards of 0 and 1: closed forms, and what was measured."""

import torch
from jaxtyping import Float64
from torch import Tensor

from posttrain.algorithms.advantages import informative
from posttrain.errors import UserError


def uninformative_share(success: Float64[Tensor, " prompt"], group_size: int) -> float:
    """The share of groups whose completions all earn the same, so that they teach nothing.

    mean over prompts of p^G + (1 - p)^G        p: the chance that a completion of the prompt earns 1
    """
    return (success**group_size + (1 - success) ** group_size).mean().item()


def baseline_deviation(success: Float64[Tensor, " prompt"], group_size: int) -> float:
    """How far the mean of a group is from what the prompt earns on average, in units of reward.

    √(mean over prompts of p (1 - p) / G)        the same of a leave-one-out baseline with G - 1 in place of G
    """
    return (success * (1 - success) / group_size).mean().sqrt().item()


def squared_advantage(success: Float64[Tensor, " prompt"], group_size: int) -> float:
    """The mean square of a leave-one-out advantage, in units of that of the reward itself (dimensionless).

        mean over prompts of p (1 - p) G/(G - 1), over the mean of p        1 is no gain over no baseline

    Prompts that differ make it smaller than at their mean chance: (1 - p) G/(G - 1) of one p is below 1 from G > 1/p
    on.  Raises UserError where no prompt has a chance, or a group is one completion.
    """
    if group_size < 2 or not bool((success > 0).any()):
        raise UserError(
            f"groups of {group_size}, at most {success.max().item():g} of which earn 1: nothing to compare."
        )
    spread = baseline_deviation(success, 1) ** 2
    return spread * group_size / (group_size - 1) / success.mean().item()


def measured_uninformative_share(rewards: Float64[Tensor, "prompt sample"], group_size: int) -> float:
    """The same share of groups that were sampled: disjoint ones of each prompt's samples."""
    return 1 - informative(in_groups(rewards, group_size)).double().mean().item()


def measured_baseline_deviation(rewards: Float64[Tensor, "prompt sample"], group_size: int) -> float:
    """The same deviation of groups that were sampled, around the mean of each prompt's groups.

    √(mean over prompts of Σ_k (b_k - mean b)² / (K - 1))        b_k: the mean of group k of the prompt's K

    Raises UserError where a prompt has a single group.
    """
    means = in_groups(rewards, group_size).mean(dim=1).view(len(rewards), -1)
    if means.shape[1] < 2:
        raise UserError(f"{rewards.shape[1]} samples of a prompt are {means.shape[1]} group of {group_size}: give 2.")
    return means.var(dim=1, correction=1).mean().sqrt().item()


def in_groups(rewards: Float64[Tensor, "prompt sample"], group_size: int) -> Float64[Tensor, "part member"]:
    """The samples of each prompt as disjoint groups, those that are left over left out."""
    whole = rewards.shape[1] // group_size
    if not whole:
        raise UserError(f"{rewards.shape[1]} samples of a prompt make no group of {group_size}.")
    return rewards[:, : whole * group_size].reshape(len(rewards) * whole, group_size)


def success_rates(rewards: Float64[Tensor, "prompt sample"]) -> Float64[Tensor, " prompt"]:
    """p of each prompt, as its samples have it.  Raises UserError for rewards other than 0 and 1."""
    if not bool(((rewards == 0) | (rewards == 1)).all()):
        raise UserError("rewards other than 0 and 1: their groups have no chance of success to be told by.")
    return rewards.mean(dim=1)


def unbiased_uninformative_share(rewards: Float64[Tensor, "prompt sample"], group_size: int) -> float:
    """`uninformative_share` of the true chances, without bias, from n samples a prompt of which c earned 1.

        mean over prompts of (C(c, G) + C(n - c, G)) / C(n, G)

    It is the share among all groups that the samples can be put into; p^G at c/n itself is too high on average.
    """
    size = rewards.shape[1]
    if size < group_size:
        raise UserError(f"{size} samples of a prompt make no group of {group_size}.")
    right = (success_rates(rewards) * size).round()
    whole = torch.full_like(right, size)
    ways = [(choices(count, group_size) - choices(whole, group_size)).exp() for count in (right, whole - right)]
    return (ways[0] + ways[1]).mean().item()


def choices(count: Float64[Tensor, " prompt"], chosen: int) -> Float64[Tensor, " prompt"]:
    """log of the number of ways to choose so many of `count`; -inf where there are too few."""
    enough = count >= chosen
    held = torch.where(enough, count, chosen)
    ways = torch.lgamma(held + 1) - torch.lgamma(held - chosen + 1) - torch.lgamma(torch.tensor(chosen + 1.0).double())
    return torch.where(enough, ways, -torch.inf)
