"""Rewards that are neural networks, fitted to demonstrations by maximum causal entropy.

Wulfmeier, Ondruska & Posner 2015, "Maximum entropy deep inverse reinforcement learning", arXiv:1507.04888: planning is
exact and in float64, as in `posttrain.irl`; only the network from inputs to rewards is learned by gradient descent.
The derivative of the dual with respect to a state's reward is its visits by the policy minus those by the
demonstrations.  The network backpropagates it to its weights:

    ∂L/∂r(s) = D_π(s) - D_E(s)        ∂L/∂θ = Σ_s ∂L/∂r(s) ∂r_θ(s)/∂θ

With a network the problem is not convex, so the certificates of `MaxCausalEntIRL` do not hold; the gap is still valid.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy import ndarray
from scipy.sparse import eye_array
from torch import Tensor
from torch.nn import Module

from posttrain.errors import UserError
from posttrain.irl.arguments import NON_NEGATIVE, POSITIVE, check_numbers, check_watch, checked_integer
from posttrain.irl.causal import MaxCausalEntIRL
from posttrain.irl.counting import check_whole, discounted_counts, in_world, start_shares
from posttrain.irl.demonstrations import Demonstrations
from posttrain.irl.features import LinearReward
from posttrain.irl.linear_solvers import Divergence
from posttrain.irl.mdp import TabularMDP
from posttrain.irl.minimisers import Point, Watch
from posttrain.irl.objectives import Dual, Plan


@dataclass(frozen=True, eq=False)
class NeuralFit:
    """The network's final rewards, and their policy."""

    reward: ndarray
    """Per state."""
    policy: ndarray
    """π(a|s); with a horizon it depends on the time too."""
    gaps: ndarray
    """The largest difference in discounted visits of a state, before each step; the last belongs to `policy`."""


@dataclass(frozen=True, kw_only=True)
class NeuralIRL:
    """Settings of a fit; the problem is that of `MaxCausalEntIRL`, with a weight decay in place of its l2."""

    discount: float = 0.99
    """Below 1 unless the network's rewards are bounded well below zero: at 1 a step must cost more than it may earn."""
    temperature: float = 1.0
    horizon: int | None = None
    learning_rate: float = 1e-2
    weight_decay: float = 1e-4
    num_steps: int = 500
    tolerance: float = 1e-4
    """Largest difference in discounted visits of a state at which to stop."""

    def __post_init__(self) -> None:
        check_numbers(self, learning_rate=POSITIVE, weight_decay=NON_NEGATIVE, tolerance=NON_NEGATIVE)
        checked_integer(self.num_steps, "num_steps", least=1)
        self.causal()

    def causal(self) -> MaxCausalEntIRL:
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

        `watch` is called with the `gap` before each step.
        """
        check_watch(watch)
        if not isinstance(network, Module) or not isinstance(inputs, Tensor):
            raise UserError("network, inputs: give a torch module, and a tensor with a row for each state")
        dual = self.state_dual(mdp, demonstrations)
        parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
        if not parameters:
            raise UserError("the network has no parameter that requires a gradient: there is nothing to train")
        optimizer = torch.optim.Adam(parameters, lr=self.learning_rate, weight_decay=self.weight_decay)
        gaps: list[float] = []
        plan: Plan | None = None
        for step in range(self.num_steps):
            output = network(inputs)
            if not isinstance(output, Tensor) or output.numel() != mdp.num_states:
                given = output.numel() if isinstance(output, Tensor) else type(output).__name__
                raise UserError(f"the network gives {given} rewards for {mdp.num_states} states; give a tensor of them")
            reward = output.reshape(-1)
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
        setting = self.causal().setting(features, start_shares(known, mdp.num_states))
        return Dual(setting, features.observed(discounted_counts(known, mdp, discount=self.discount)))

    def dual_at(self, dual: Dual, reward: Tensor, plan: Plan | None, step: int) -> Point[Plan]:
        rewards = reward.detach().cpu().double().numpy()
        if not np.isfinite(rewards).all():
            state = np.flatnonzero(~np.isfinite(rewards))[0]
            raise UserError(
                f"step {step}: the network's reward of state {state} is not finite; lower learning_rate ="
                f" {self.learning_rate}"
            )
        try:
            return dual.at(rewards, plan)
        except Divergence as error:
            raise Divergence(f"step {step} of a neural reward: {error}") from error
