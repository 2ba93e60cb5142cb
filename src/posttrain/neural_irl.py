"""Rewards that are neural networks, fitted to demonstrations by maximum causal entropy.

Wulfmeier, Ondruska & Posner 2015, "Maximum entropy deep inverse reinforcement learning", arXiv:1507.04888: planning is
exact and in float64, as in `posttrain.irl`; only how a reward depends on its inputs is learned by gradient descent.
The derivative of the dual with respect to the reward of each state is how much oftener the policy is there than the
demonstrations were, and the network carries it on to its weights:

    ∂L/∂r(s) = D_π(s) - D_E(s)        ∂L/∂θ = Σ_s ∂L/∂r(s) ∂r_θ(s)/∂θ

With a network the problem is no longer convex, and the certificates of `MaxCausalEntIRL` are gone; the gap is not.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy import ndarray
from scipy.sparse import eye_array
from torch import Tensor
from torch.nn import Module

from posttrain.errors import UserError, require
from posttrain.irl.arguments import brief_repr, check_watch, checked_integer, require_numeric_options
from posttrain.irl.causal import MaxCausalEntIRL
from posttrain.irl.counting import check_whole, discounted_counts, in_world, initial_histogram
from posttrain.irl.demonstrations import Demonstrations
from posttrain.irl.divergence import Divergence
from posttrain.irl.features import LinearReward
from posttrain.irl.mdp import TabularMDP
from posttrain.irl.minimisers import Point, Watch
from posttrain.irl.objectives import Dual, Plan
from posttrain.options.bounds import Bounded, NonNegativeFloat, PositiveFloat


@dataclass(frozen=True, eq=False)
class NeuralFit:
    """What a network ended with; the policy is that of these rewards."""

    reward: ndarray
    """Per state."""
    policy: ndarray
    """π(a|s); with a horizon it depends on the time too."""
    gaps: ndarray
    """The largest difference in discounted visits of a state, before each step; the last belongs to `policy`."""


@dataclass(frozen=True, kw_only=True)
class NeuralIRL(Bounded):
    """Settings of a fit; the problem is that of `MaxCausalEntIRL`, with a weight decay in place of its l2."""

    discount: float = 0.99
    """Below 1 unless the network's rewards are bounded well below zero: at 1 a step must cost more than it may earn."""
    temperature: float = 1.0
    horizon: int | None = None
    learning_rate: PositiveFloat = 1e-2
    weight_decay: NonNegativeFloat = 1e-4
    num_steps: int = 500
    tolerance: NonNegativeFloat = 1e-4
    """Largest difference in discounted visits of a state at which to stop."""

    def __post_init__(self) -> None:
        require_numeric_options(self, "learning_rate", "weight_decay", "num_steps", "tolerance")
        super().__post_init__()
        require(checked_integer(self.num_steps, "num_steps") >= 1, self, "num_steps", "is too few; use at least 1")
        self.causal()

    def causal(self) -> MaxCausalEntIRL:
        """The problem for given rewards; refuses what it cannot be."""
        return MaxCausalEntIRL(discount=self.discount, temperature=self.temperature, horizon=self.horizon, l2=0.0)

    def fit(
        self,
        mdp: TabularMDP,
        network: Module,
        inputs: Tensor,
        demonstrations: Demonstrations,
        *,
        watch: Watch | None = None,
    ) -> NeuralFit:
        """Train the network, in place, to map a row of inputs for each state to the reward of that state.

        `watch` is shown the `gap` before each step.
        """
        check_watch(watch)
        if not isinstance(network, Module) or not isinstance(inputs, Tensor):
            raise UserError(
                f"network is {brief_repr(network)} and inputs {brief_repr(inputs)}: give a torch module, and a tensor "
                "with a row for each state"
            )
        dual = self.state_dual(mdp, demonstrations)
        parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
        if not parameters:
            raise UserError("the network has no parameter that requires a gradient: there is nothing to train")
        optimizer = torch.optim.Adam(parameters, lr=self.learning_rate, weight_decay=self.weight_decay)
        gaps: list[float] = []
        plan: Plan | None = None
        for step in range(self.num_steps):
            output = network(inputs)
            if not isinstance(output, Tensor):
                raise UserError(f"the network gives {brief_repr(output)}: it must give a tensor of rewards")
            reward = output.reshape(-1)
            if reward.shape != (mdp.num_states,):
                raise UserError(f"the network gives {reward.numel()} rewards for {mdp.num_states} states; use one each")
            point = self.dual_at(dual, reward, plan, step)
            plan = point.plan
            gaps.append(point.gradient_norm)
            if watch is not None:
                watch({"gap": gaps[-1]})
            if gaps[-1] <= self.tolerance or step == self.num_steps - 1:
                break
            optimizer.zero_grad()
            reward.backward(torch.as_tensor(point.gradient, dtype=reward.dtype, device=reward.device))
            optimizer.step()
        return NeuralFit(reward=point.weights, policy=point.plan.policy, gaps=np.array(gaps))

    def state_dual(self, mdp: TabularMDP, demonstrations: Demonstrations) -> Dual:
        """The dual with one weight per state: its weights are the rewards, and its gradient is theirs."""
        known = in_world(demonstrations, mdp)
        check_whole(known, mdp, discount=self.discount, horizon=self.horizon)
        features = LinearReward(features=eye_array(mdp.num_states, format="csr")).bound(mdp)
        setting = self.causal().setting(features, initial_histogram(known, mdp.num_states))
        return Dual(setting, features.observed(discounted_counts(known, mdp, discount=self.discount)))

    def dual_at(self, dual: Dual, reward: Tensor, plan: Plan | None, step: int) -> Point[Plan]:
        """The dual at the network's rewards."""
        rewards = reward.detach().cpu().double().numpy()
        if not np.isfinite(rewards).all():
            raise UserError(
                f"step {step}: the network's reward of state {np.flatnonzero(~np.isfinite(rewards))[0]} is "
                f"not finite; lower learning_rate = {self.learning_rate}"
            )
        try:
            return dual.at(rewards, plan)
        except Divergence as error:
            raise Divergence(f"step {step} of a neural reward: {error}") from error
