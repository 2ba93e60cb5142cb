"""How noisy the gradient of an update is: gradients of disjoint prompts, and their spread around what they share.

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

from posttrain.errors import UserError
from posttrain.needs import Need
from posttrain.runs.clock import Clock
from posttrain.training.credited_step import CreditedStep
from posttrain.training.learner import Learner
from posttrain.training.update import Objective, Observations, micro_losses


def policy_gradient(learner: Learner, credited: CreditedStep) -> Float[Tensor, " parameter"]:
    """The gradient that the step's one update has for the policy, before clipping, and takes no step with.

    Through the algorithm's own credit, terms and token weights; terms that need a critic are its, and are left out.
    Raises UserError where the recipe makes several updates of a step: the first would move what the others see.
    """
    batches = learner.batches(credited, Clock())
    if len(batches) != 1:
        raise UserError(
            f"a step has {len(batches)} updates, and a gradient is that of one; set update.epochs_per_step: 1 and"
            " update.minibatches_per_epoch: 1."
        )
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
    """What some independent gradient estimates of equal size say of the estimator."""

    num_estimates: int
    squared_mean: float
    """‖E g‖², without bias; may come out below 0 where there is hardly any signal."""
    total_variance: float
    """tr Cov g of a single estimate, without bias."""

    @property
    def relative_variance(self) -> float:
        """tr Cov g / ‖E g‖²; infinite where no signal was found."""
        return self.total_variance / self.squared_mean if self.squared_mean > 0 else math.inf

    @property
    def signal_to_noise(self) -> float:
        """‖E g‖ / √tr Cov g: 1 where an estimate has as much signal as noise; 0 where no signal was found."""
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
    """A positive number and how well it is known."""

    value: float
    error_factor: float
    """exp of the standard error of its logarithm: what is true lies between value / factor and value · factor in about
    two of three cases.  Infinite where some estimate finds no signal."""


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
