"""From a collected step to credit for each of its tokens: columns, evidence, and the algorithm's rule.

A new column is a need, a row of `PROVIDERS` and a property where rules and terms read it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch
from jaxtyping import Float64
from torch import Tensor

from posttrain.algorithms import kl
from posttrain.algorithms.algorithm import Algorithm
from posttrain.algorithms.credit import Credit, Evidence, mean_of_rollouts
from posttrain.algorithms.kl import next_coefficient
from posttrain.algorithms.reward_shaping import LEAST_DEVIATION, RewardStatistics, scaled_rewards
from posttrain.batch import CreditedGroups, TokenColumns, completions_of, sampled_columns
from posttrain.errors import RunError
from posttrain.models.forward import ForwardNeeds
from posttrain.models.policy import Policy
from posttrain.needs import Need
from posttrain.records import Group
from posttrain.rewards.process_rewards import process_rewards, with_penalties
from posttrain.runs.progress import Clock
from posttrain.training.collector import CollectedStep
from posttrain.training.critic import Critic, truncated_of
from posttrain.training.reference import Reference, Teacher
from posttrain.training.update import group_logprobs

EXPLAINED = "value/explained_variance"
COMPLETION_KL, TOKEN_KL = "kl_completion", "kl_token"
"""Names of the metrics that decide the next steps."""
STATE = "actor_critic"
"""Its name in a checkpoint's state."""
SHIFT, SCALE = "whitening/mean", "whitening/deviation"
"""Metrics of what a step's advantages were whitened by."""
LEAST_EXPLAINED = 1e-6
"""Share of the variance of returns; a critic that predicts a constant explains less, by rounding."""
NO_REWARDS = RewardStatistics()


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorCriticState:
    """The run so far."""

    kl_coefficient: float = 0.0
    """Of the KL in the reward; 0 without one."""
    rewards: RewardStatistics = NO_REWARDS
    begun: bool = False
    """Whether the critic has learned anything."""
    fitted: bool = True
    """Whether the policy learns: the critic is good enough, or there is none."""
    fit_steps: int = 0
    """Steps in which only the critic learned."""


NO_STATE = ActorCriticState()
"""The state of algorithms without a critic, a KL in the reward or scaled rewards."""


def remembers(algorithm: Algorithm) -> bool:
    return algorithm.critic is not None or algorithm.adaptive_kl is not None or algorithm.reward_scaling is not None


def state_json(state: ActorCriticState, algorithm: Algorithm) -> dict[str, object]:
    return {STATE: asdict(state)} if remembers(algorithm) else {}


def at_first(algorithm: Algorithm, *, begun: bool) -> ActorCriticState:
    penalty, critic = algorithm.kl_penalty, algorithm.critic
    return ActorCriticState(
        kl_coefficient=0.0 if penalty is None else penalty.coefficient,
        begun=begun,
        fitted=critic is None or critic.fit_steps == 0,
    )


def restored(saved: Mapping[str, object], at_first: ActorCriticState, algorithm: Algorithm) -> ActorCriticState:
    """The state in a checkpoint.  Raises RunError where it lacks one that steps may have changed."""
    found = saved.get(STATE)
    if isinstance(found, Mapping):
        return ActorCriticState(**{**found, "rewards": RewardStatistics(**found["rewards"])})
    if remembers(algorithm):
        raise RunError(f"the checkpoint does not say what {algorithm.name} remembered of steps.  Begin the run again.")
    return at_first


def with_rewards(
    state: ActorCriticState, rewards: Float64[Tensor, "prompt group"], algorithm: Algorithm
) -> tuple[ActorCriticState, Float64[Tensor, "prompt group"]]:
    if algorithm.reward_scaling is None:
        return state, rewards
    seen = replace(state, rewards=state.rewards.with_rewards(rewards))
    return seen, scaled_rewards(rewards, seen.rewards, algorithm.reward_scaling)


def after_step(
    state: ActorCriticState, metrics: Mapping[str, float], num_rollouts: int, algorithm: Algorithm
) -> ActorCriticState:
    """The state after a step: the next KL coefficient, and whether the policy learns.

    While only the critic learns, the KL is 0 whatever its coefficient, so the coefficient stays.
    """
    adaptive = algorithm.adaptive_kl
    if adaptive is not None and state.fitted:
        kl = metrics[COMPLETION_KL if adaptive.per == "sequence" else TOKEN_KL]
        new = next_coefficient(state.kl_coefficient, kl, num_rollouts=num_rollouts, options=adaptive)
        state = replace(state, kl_coefficient=new)
    if state.fitted or algorithm.critic is None:
        return state
    good = metrics.get(EXPLAINED, 0.0) > LEAST_EXPLAINED
    if good or state.fit_steps >= algorithm.critic.fit_steps:
        return replace(state, fitted=True)
    return replace(state, fit_steps=state.fit_steps + 1)


def explained_variance(returns: Float64[Tensor, " token"], values: Float64[Tensor, " token"]) -> float | None:
    """Share of the variance of returns that the values explain; None where all returns are equal.

    EV = 1 - Var(R - V) / Var(R)        1: exact, 0: no better than a constant, below 0: worse
    """
    variance = returns.var(correction=0)
    if not len(returns) or not variance >= LEAST_DEVIATION**2:  # sums of rewards that are all equal differ by rounding
        return None
    return 1 - ((returns - values).var(correction=0) / variance).item()


def value_metrics(evidence: Evidence, credit: Credit) -> dict[str, float]:
    """Metrics of a step's values and returns; none where no critic or no reward is."""
    counted = ~evidence.rewards.isnan().flatten()[evidence.rollout]  # tokens of completions that have a reward
    if credit.returns is None or "values" not in evidence.known or not bool(counted.any()):
        return {}
    returns, values = credit.returns[counted], evidence.values[counted]
    explained = explained_variance(returns, values)
    return {
        **({} if explained is None else {EXPLAINED: explained}),
        "value/mean": values.mean().item(),
        "returns/mean": returns.mean().item(),
        "returns/std": returns.std(correction=0).item(),
    }


def penalty_metrics(evidence: Evidence) -> dict[str, float]:
    """Estimates (k1) of the KL to the reference, per completion and per token, in nats.

    mean over completions of Σ_t x_t,   mean over tokens of x_t        x = log μ - log ref
    """
    ratios = evidence.behaviour_logprobs - evidence.reference_logprobs
    total = ratios.sum().item()
    return {COMPLETION_KL: total / evidence.rewards.numel(), TOKEN_KL: total / len(ratios)}


def credit_metrics(
    evidence: Evidence, credit: Credit, algorithm: Algorithm, state: ActorCriticState
) -> dict[str, float]:
    """Metrics of a step's credit; `state` is the one that credit was computed with."""
    metrics = value_metrics(evidence, credit)
    if credit.whitening is not None:
        metrics |= {SHIFT: credit.whitening.shift, SCALE: credit.whitening.scale}
    if algorithm.kl_penalty is not None and (algorithm.critic is not None or algorithm.adaptive_kl is not None):
        metrics |= penalty_metrics(evidence) | {"kl_coefficient": state.kl_coefficient}
    if algorithm.reward_scaling is not None:
        metrics["reward_scaled"] = evidence.rewards.nanmean().item()
    return metrics


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
