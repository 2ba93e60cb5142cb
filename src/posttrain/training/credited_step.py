"""From a collected step to credit for each of its tokens: columns, evidence, and the algorithm's rule.

A new column is a need, a row of `PROVIDERS` and a property where rules and terms read it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float64
from torch import Tensor

from posttrain.algorithms import kl
from posttrain.algorithms.algorithm import Algorithm
from posttrain.algorithms.credit import Credit, Evidence, mean_of_rollouts
from posttrain.batch import CreditedGroups, TokenColumns, completions_of, sampled_columns
from posttrain.models.forward import ForwardNeeds
from posttrain.models.policy import Policy
from posttrain.needs import Need
from posttrain.records import Group
from posttrain.rewards.process_rewards import process_rewards, with_penalties
from posttrain.runs.progress import Clock
from posttrain.training.actor_critic_state import NO_STATE, ActorCriticState, after_step, credit_metrics, with_rewards
from posttrain.training.collector import CollectedStep
from posttrain.training.critic import Critic, truncated_of
from posttrain.training.reference import Reference, Teacher
from posttrain.training.update import group_logprobs

NO_MODEL = "a need without the model that computes it"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModels:
    """Which columns are computed, and with what."""

    needs: frozenset[Need]
    policy: Policy
    """Before the step's updates."""
    reference: Reference | None = None
    teacher: Teacher | None = None
    critic: Critic | None = None
    temperature: float
    """The one that sampled: log-probs and entropies are taken at it."""
    max_tokens: int
    """Tokens of a micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGroups:
    """The completions that columns are computed for."""

    groups: Sequence[Group]
    teacher_prompts: Sequence[Sequence[tuple[int, ...]]] | None = None
    """The teacher's prompt of each completion, group by group; None if it sees the student's."""


Provider = Callable[[StepModels, StepGroups], Mapping[str, Tensor]]
"""The columns of a need by name: a number for every sampled token, in float64 on the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditedStep:
    """Collected groups with the algorithm's credit."""

    collected: CollectedStep
    groups: CreditedGroups
    advantages: Float64[Tensor, "prompt group"]
    """One number for each completion: the mean over its sampled tokens."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    token_rewards: Float64[Tensor, " token"] | None = None
    """Process rewards and KL penalties of single tokens; None without any."""
    process_rewards: Float64[Tensor, " token"] | None = None
    """Process rewards only; NaN where no step ends."""
    next_state: ActorCriticState = NO_STATE
    """The state of the run after the updates of this step."""


def credited_step(
    collected: CollectedStep,
    algorithm: Algorithm,
    models: StepModels,
    state: ActorCriticState,
    *,
    max_completion_tokens: int,
    clock: Clock,
) -> CreditedStep:
    """The algorithm's advantages and returns for every sampled token; `state` is that of earlier steps."""
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
        lengths=torch.tensor([[rollout.num_sampled for rollout in group.rollouts] for group in groups]),
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


def with_credit(sampled: TokenColumns, credit: Credit, known: Mapping[str, Tensor]) -> TokenColumns:
    per_token = {name: column for name, column in known.items() if name != "final_values"}
    returns = {} if credit.returns is None else {"returns": credit.returns}
    advantages, value_range = credit.advantages, credit.value_range
    return replace(sampled, advantages=advantages, value_range=value_range, known={**per_token, **returns})


def penalties(
    algorithm: Algorithm, state: ActorCriticState, behaviour: Float64[Tensor, " token"], known: Mapping[str, Tensor]
) -> Float64[Tensor, " token"] | None:
    """What a KL in the reward subtracts from each token's reward; None without one."""
    penalty = algorithm.kl_penalty
    if penalty is None:
        return None
    return -state.kl_coefficient * kl.ESTIMATORS[penalty.estimator](behaviour, known["reference_logprobs"])


def step_columns(models: StepModels, step: StepGroups, clock: Clock) -> dict[str, Tensor]:
    columns: dict[str, Tensor] = {}
    for need, (stage, provider) in PROVIDERS.items():
        if need in models.needs:
            with clock(stage):
                columns |= provider(models, step)
    return columns


def logprobs_under(
    policy: Policy,
    models: StepModels,
    step: StepGroups,
    teacher_prompts: Sequence[Sequence[tuple[int, ...]]] | None = None,
) -> Float64[Tensor, " token"]:
    temperature, max_tokens = models.temperature, models.max_tokens
    return group_logprobs(
        policy, step.groups, temperature=temperature, max_tokens=max_tokens, teacher_prompts=teacher_prompts
    )


def reference_logprobs(models: StepModels, step: StepGroups) -> Mapping[str, Tensor]:
    assert models.reference is not None, NO_MODEL
    with models.reference.entered() as reference:
        return {"reference_logprobs": logprobs_under(reference, models, step)}


def teacher_logprobs(models: StepModels, step: StepGroups) -> Mapping[str, Tensor]:
    assert models.teacher is not None, NO_MODEL
    with models.teacher.entered() as teacher:
        return {"teacher_logprobs": logprobs_under(teacher, models, step, step.teacher_prompts)}


def proximal_logprobs(models: StepModels, step: StepGroups) -> Mapping[str, Tensor]:
    return {"proximal_logprobs": logprobs_under(models.policy, models, step)}


def value_columns(models: StepModels, step: StepGroups) -> Mapping[str, Tensor]:
    assert models.critic is not None, NO_MODEL
    found = models.critic.of_groups(step.groups, max_tokens=models.max_tokens)
    return {"values": found.values, "final_values": found.final_values}


@torch.no_grad()
def entropies(models: StepModels, step: StepGroups) -> Mapping[str, Tensor]:
    policy, columns = models.policy, []
    needs = ForwardNeeds(logprobs=False, temperature=models.temperature, gradient=False, entropies=True)
    for micro in completions_of(step.groups).split(models.max_tokens, padded=policy.forward.padded):
        found = policy.forward.completion_logprobs(micro, needs).entropies
        assert found is not None
        columns.append(found.double().cpu())
    return {"entropies": torch.cat(columns)}


PROVIDERS: Mapping[Need, tuple[str, Provider]] = {
    Need.REFERENCE_LOGPROBS: ("reference", reference_logprobs),
    Need.TEACHER_LOGPROBS: ("teacher", teacher_logprobs),
    Need.PROXIMAL_LOGPROBS: ("proximal", proximal_logprobs),
    Need.VALUES: ("values", value_columns),
    Need.ENTROPY: ("entropies", entropies),
}
"""By need: the clock's stage that its seconds count for, and the function that computes it."""
