"""From a collected step to credit for each of its tokens: columns, evidence, and the algorithm's rule."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float64
from torch import Tensor

from posttrain.algorithms import kl
from posttrain.algorithms.algorithm import Algorithm
from posttrain.algorithms.credit import Credit, Evidence, mean_of_rollouts
from posttrain.batch import CreditedGroups, TokenColumns, sampled_columns
from posttrain.records import Group
from posttrain.rewards.process_rewards import process_rewards, with_penalties
from posttrain.runs.clock import Clock
from posttrain.training.actor_critic.actor_critic_state import NO_STATE, ActorCriticState, after_step, with_rewards
from posttrain.training.actor_critic.critic import truncated_of
from posttrain.training.actor_critic.value_metrics import credit_metrics
from posttrain.training.collector import CollectedStep
from posttrain.training.credit.step_columns import StepGroups, StepModels, step_columns


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditedStep:
    """Collected groups with what the algorithm makes of them."""

    collected: CollectedStep
    groups: CreditedGroups
    advantages: Float64[Tensor, "prompt group"]
    """One number for each completion: the mean over its sampled tokens."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What else is known of the step's credit: values, returns, what the rewards went through."""
    token_rewards: Float64[Tensor, " token"] | None = None
    """What single tokens earn beside their completion: process rewards and KL penalties; None where there are none."""
    process_rewards: Float64[Tensor, " token"] | None = None
    """The former alone; NaN where no step ends."""
    next_state: ActorCriticState = NO_STATE
    """What the run remembers once this step is learned from."""


def credited_step(
    collected: CollectedStep,
    algorithm: Algorithm,
    models: StepModels,
    state: ActorCriticState,
    *,
    max_completion_tokens: int,
    clock: Clock,
) -> CreditedStep:
    """The algorithm's advantages, and returns, for every sampled token of the groups.

    `state` is what earlier steps left behind.
    """
    groups, grades = collected.groups, collected.grades
    shown = None if models.teacher is None else models.teacher.prompts(groups, grades)
    state_seen, rewards = with_rewards(state, grades.rewards, algorithm)
    if models.critic is not None and not state.begun:
        models.critic.head.expect(rewards.nanmean().nan_to_num(nan=0.0).item())
    seen = StepGroups(groups=groups, teacher_prompts=None if shown is None else shown.tokens)
    known = step_columns(models, seen, clock)
    sampled = sampled_columns(groups)
    steps = process_rewards(groups, grades, models.policy.tokenizer)
    token_rewards = with_penalties(steps, penalties(algorithm, state, sampled.behaviour_logprobs, known))
    evidence = Evidence(
        rewards=rewards,
        scores=grades.clipped,
        weights=grades.weights,
        lengths=sampled_lengths(groups),
        max_completion_tokens=max_completion_tokens,
        token_rewards=token_rewards,
        step_rewards=steps,
        truncated=truncated_of(groups),
        known={"behaviour_logprobs": sampled.behaviour_logprobs, **known},
    )
    credit = algorithm.credited(evidence, groups)
    metrics = credit_metrics(evidence, credit, algorithm, state)
    next_state = after_step(state_seen, metrics, evidence.lengths.numel(), algorithm)
    if models.critic is not None:
        metrics["value/critic_alone"] = float(not next_state.fitted)
    if shown is not None:
        metrics["teacher/shown"] = shown.shown_share
    return CreditedStep(
        collected=collected,
        groups=CreditedGroups(
            groups=groups,
            scored=~grades.rewards.isnan() | algorithm.counts_unscored,
            columns=with_credit(sampled, credit, known),
            teacher_prompts=seen.teacher_prompts,
        ),
        advantages=mean_of_rollouts(credit.advantages, evidence.lengths),
        metrics=metrics,
        token_rewards=token_rewards,
        process_rewards=steps,
        next_state=next_state,
    )


def sampled_lengths(groups: Sequence[Group]) -> Tensor:
    """Sampled tokens of each completion, [prompt group]."""
    return torch.tensor([[rollout.num_sampled for rollout in group.rollouts] for group in groups])


def with_credit(sampled: TokenColumns, credit: Credit, known: Mapping[str, Tensor]) -> TokenColumns:
    """The columns of a step: what was sampled, what was computed of it, and the credit."""
    per_token = {name: column for name, column in known.items() if name != "final_values"}
    returns = {} if credit.returns is None else {"returns": credit.returns}
    return replace(
        sampled,
        advantages=credit.advantages,
        value_range=credit.value_range,
        known={**per_token, **returns},
    )


def penalties(
    algorithm: Algorithm, state: ActorCriticState, behaviour: Float64[Tensor, " token"], known: Mapping[str, Tensor]
) -> Float64[Tensor, " token"] | None:
    """What a KL in the reward takes off each token; None without one."""
    penalty = algorithm.kl_penalty
    if penalty is None:
        return None
    return -state.kl_coefficient * kl.ESTIMATORS[penalty.estimator](behaviour, known["reference_logprobs"])
