"""How noisy the gradient of an update is: gradients of disjoint prompts, and their spread around their mean.

A gradient estimate is g = ∇J + noise.  Its total variance is the trace of its covariance, and in units of the squared
mean gradient it says how much of a step is chance: 0 is none, 1 as much as there is signal.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from posttrain.algorithms.advantages import informative
from posttrain.errors import UserError
from posttrain.needs import Need
from posttrain.runs.progress import Clock
from posttrain.training.credited_step import CreditedStep
from posttrain.training.learner import Learner
from posttrain.training.observations import Observations
from posttrain.training.update import Objective, micro_losses


def policy_gradient(learner: Learner, credited: CreditedStep) -> Float[Tensor, " parameter"]:
    """The policy's gradient of the step's one update, before clipping; no step is taken.

    It uses the algorithm's own credit, terms and token weights, without terms that need a critic.  Raises UserError if
    the recipe makes several updates of a step: the first would change the others.
    """
    batches = learner.batches(credited, Clock())
    if len(batches) != 1:
        remedy = "Set update.epochs_per_step: 1 and update.minibatches_per_epoch: 1."
        raise UserError(f"a step has {len(batches)} updates, and a gradient is that of one.  {remedy}")
    parameters = [each for each in learner.policy.model.parameters() if each.requires_grad]
    terms = tuple(term for term in learner.algorithm.terms if Need.VALUES not in term.needs)
    objective = Objective(
        algorithm=replace(learner.algorithm, terms=terms),
        temperature=learner.settings.temperature,
        reference=learner.reference,
        teacher=learner.teacher,
    )
    learner.optimizer.zero_grad(set_to_none=True)
    if batches[0].completions:  # else nothing in the step has an advantage
        budget, padded = learner.settings.update.tokens_per_microbatch, learner.policy.forward.padded
        for micro in batches[0].split(budget, padded=padded):
            for share in micro_losses(learner.policy, micro, objective, Observations()):
                share.backward()
    parts = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
    gradient = torch.cat([part.detach().flatten().cpu() for part in parts])
    learner.optimizer.zero_grad(set_to_none=True)
    return gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientNoise:
    """Signal and noise of a gradient estimator, from independent estimates of equal size."""

    num_estimates: int
    squared_mean: float
    """‖E g‖², without bias; may be below 0 if there is hardly any signal."""
    total_variance: float
    """tr Cov g of a single estimate, without bias."""

    @property
    def relative_variance(self) -> float:
        """tr Cov g / ‖E g‖²; infinite if no signal was found."""
        return self.total_variance / self.squared_mean if self.squared_mean > 0 else math.inf

    @property
    def signal_to_noise(self) -> float:
        """‖E g‖ / √tr Cov g: 1 where an estimate has as much signal as noise; 0 if no signal was found."""
        return 1 / math.sqrt(self.relative_variance) if self.relative_variance > 0 else math.inf


def gradient_noise(products: Float64[Tensor, "estimate estimate"]) -> GradientNoise:
    """The noise of K estimates, from the products of each with each, `gram` of them.

        ‖E g‖² ≈ mean_{i≠j} g_i·g_j        tr Cov g ≈ mean_i g_i·g_i - ‖E g‖²

    Both without bias: different estimates are independent.  ‖mean_i g_i‖² would count a K-th of the noise as signal.
    Raises UserError for fewer than two.
    """
    count = len(products)
    if count < 2:
        raise UserError(f"{count} gradient: a spread is that of at least 2.")
    own = products.diagonal().sum().item()
    signal = (products.sum().item() - own) / (count * (count - 1))
    return GradientNoise(num_estimates=count, squared_mean=signal, total_variance=own / count - signal)


def gram(gradients: Sequence[Float[Tensor, " parameter"]]) -> Float64[Tensor, "estimate estimate"]:
    """g_i · g_j of all pairs, summed in float64."""
    products = torch.zeros(len(gradients), len(gradients), dtype=torch.float64)
    for first in range(0, len(gradients[0]), PARAMETERS_AT_ONCE):
        rows = torch.stack([each[first : first + PARAMETERS_AT_ONCE].double() for each in gradients])
        products += rows @ rows.T
    return products


PARAMETERS_AT_ONCE = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A positive number and its accuracy."""

    value: float
    error_factor: float
    """exp of the standard error of its logarithm: the truth lies between value / factor and value · factor in about two
    of three cases.  Infinite if some estimate finds no signal."""


def relative_variance(
    products: Float64[Tensor, "estimate estimate"], beside: Float64[Tensor, "estimate estimate"] | None = None
) -> Ratio:
    """tr Cov g / ‖E g‖² of an estimator, or over that of another on the same prompts, estimate by estimate.

        error² = (K - 1)/K Σ_i (ℓ_i - mean ℓ)²        ℓ_i: the logarithm without estimate i (jackknife; Tukey 1958)

    What two estimators share of their prompts moves both alike, so that their ratio is known better than either.
    """

    def logarithm(kept: Sequence[int]) -> float:
        rows = torch.tensor(kept)
        own, other = (
            0.0 if table is None else math.log(gradient_noise(table[rows][:, rows]).relative_variance)
            for table in (products, beside)
        )
        return own - other

    count = len(products)
    without = [logarithm([each for each in range(count) if each != left_out]) for left_out in range(count)]
    error = math.inf
    if all(map(math.isfinite, without)):
        error = math.sqrt((count - 1) / count * sum((each - fmean(without)) ** 2 for each in without))
    return Ratio(value=math.exp(logarithm(range(count))), error_factor=math.exp(error))


def uninformative_share(success: Float64[Tensor, " prompt"], group_size: int) -> float:
    """The share of groups whose completions all earn the same, so that they teach nothing.

    mean over prompts of p^G + (1 - p)^G        p: the chance that a completion of the prompt earns 1
    """
    return (success**group_size + (1 - success) ** group_size).mean().item()


def baseline_deviation(success: Float64[Tensor, " prompt"], group_size: int) -> float:
    """How far the mean of a group is from the prompt's mean reward, in units of reward.

    √(mean over prompts of p (1 - p) / G)        the same of a leave-one-out baseline with G - 1 in place of G
    """
    return (success * (1 - success) / group_size).mean().sqrt().item()


def squared_advantage(success: Float64[Tensor, " prompt"], group_size: int) -> float:
    """The mean square of a leave-one-out advantage, in units of that of the reward itself (dimensionless).

        mean over prompts of p (1 - p) G/(G - 1), over the mean of p        1 is as noisy as no baseline

    Prompts that differ make it smaller than at their mean chance: (1 - p) G/(G - 1) of one p is below 1 from G > 1/p
    on.  Raises UserError if no prompt has a chance, or a group is one completion.
    """
    if group_size < 2 or not bool((success > 0).any()):
        raise UserError(f"groups of {group_size}, at most {success.max():g} of which earn 1: nothing to compare.")
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
        raise UserError("rewards must be 0 or 1: other groups have no chance of success.")
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
    """log of the number of ways to choose `chosen` of `count`; -inf if there are too few."""
    enough = count >= chosen
    held = torch.where(enough, count, chosen)
    ways = torch.lgamma(held + 1) - torch.lgamma(held - chosen + 1) - torch.lgamma(torch.tensor(chosen + 1.0).double())
    return torch.where(enough, ways, -torch.inf)
