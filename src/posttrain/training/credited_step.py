"""From a collected step to credit for each of its tokens: columns, evidence, and the algorithm's rule.

A new column is a need, a row of `PROVIDERS`, and a property for the rules and terms that read it.  State that outlives
a step is an `ActorCriticState`: plain numbers, saved with every checkpoint.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import cast

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from posttrain.algorithms import kl
from posttrain.algorithms.advantages import LEAST_DEVIATION, RewardStatistics, scaled_rewards
from posttrain.algorithms.algorithm import Algorithm
from posttrain.algorithms.credit import Credit, Evidence, mean_of_rollouts
from posttrain.batch import Batch, CreditedGroups, completions_of, sampled_columns
from posttrain.errors import RunError
from posttrain.models.forward import ForwardNeeds
from posttrain.models.policy import Policy
from posttrain.needs import Need
from posttrain.records import Group, TokenSequence
from posttrain.rewards.process_rewards import process_rewards, summed, turn_rewards, turnless_rewards, with_penalties
from posttrain.runs.alarms import EXPLAINED
from posttrain.runs.progress import Clock
from posttrain.training.collector import CollectedStep
from posttrain.training.critic import Critic
from posttrain.training.metrics import STALENESS
from posttrain.training.reference import Reference, Teacher, Tokens
from posttrain.training.update import group_logprobs

COMPLETION_KL, TOKEN_KL = "kl_completion", "kl_token"
"""Metrics that decide the next steps."""
STATE = "actor_critic"
"""Name of the state in a checkpoint."""
SHIFT, SCALE = "whitening/mean", "whitening/deviation"
"""Metrics of how a step's advantages were whitened."""
LEAST_EXPLAINED = 1e-6
"""Minimum share of the variance of returns; a critic that predicts a constant explains less, due to rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorCriticState:
    """State of the run so far."""

    kl_coefficient: float = 0.0
    """Coefficient of the KL in the reward; 0 without one."""
    rewards: RewardStatistics = field(default_factory=RewardStatistics)
    begun: bool = False
    """Whether the critic has learned anything."""
    fitted: bool = True
    """Whether the policy learns: the critic is good enough, or there is no critic."""
    fit_steps: int = 0
    """Steps in which only the critic learned."""

    @classmethod
    def at_first(cls, algorithm: Algorithm, *, begun: bool) -> "ActorCriticState":
        penalty, critic = algorithm.kl_penalty, algorithm.critic
        coefficient = 0.0 if penalty is None else penalty.coefficient
        return cls(kl_coefficient=coefficient, begun=begun, fitted=critic is None or critic.fit_steps == 0)

    def as_json(self, algorithm: Algorithm) -> dict[str, object]:
        """The content for a checkpoint: empty without a critic, an adaptive KL or scaled rewards."""
        remembers = algorithm.critic or algorithm.adaptive_kl or algorithm.reward_scaling
        return {} if remembers is None else {STATE: asdict(self)}

    def restored(self, saved: Mapping[str, object], algorithm: Algorithm) -> "ActorCriticState":
        """The state in a checkpoint.  Raises RunError if a state that steps may have changed is missing."""
        found = saved.get(STATE)
        if isinstance(found, Mapping):
            return ActorCriticState(**{**found, "rewards": RewardStatistics(**found["rewards"])})
        if self.as_json(algorithm):
            told = f"the checkpoint does not contain the state of {algorithm.name}"
            raise RunError(f"{told}.  Start a new run.")
        return self


def after_step(
    state: ActorCriticState, metrics: Mapping[str, float], num_rollouts: int, algorithm: Algorithm
) -> ActorCriticState:
    """The state after a step: the next KL coefficient, and whether the policy learns.

    While only the critic learns, the KL is 0 for every coefficient, so the coefficient stays.
    """
    adaptive = algorithm.adaptive_kl
    if adaptive is not None and state.fitted:
        found = metrics[COMPLETION_KL if adaptive.per == "sequence" else TOKEN_KL]
        new = kl.next_coefficient(state.kl_coefficient, found, num_rollouts=num_rollouts, options=adaptive)
        state = replace(state, kl_coefficient=new)
    if state.fitted or algorithm.critic is None:
        return state
    good = metrics.get(EXPLAINED, 0.0) > LEAST_EXPLAINED
    if good or state.fit_steps >= algorithm.critic.fit_steps:
        return replace(state, fitted=True)
    return replace(state, fit_steps=state.fit_steps + 1)


def explained_variance(returns: Float64[Tensor, " token"], values: Float64[Tensor, " token"]) -> float | None:
    """Share of the variance of returns that the values explain; None if all returns are equal.

    EV = 1 - Var(R - V) / Var(R)        1: exact, 0: no better than a constant, below 0: worse
    """
    variance = returns.var(correction=0)
    if not len(returns) or not variance >= LEAST_DEVIATION**2:  # sums of rewards that are all equal differ by rounding
        return None
    return 1 - ((returns - values).var(correction=0) / variance).item()


def value_metrics(evidence: Evidence, credit: Credit) -> dict[str, float]:
    """Metrics of a step's values and returns; empty without a critic or rewards."""
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
    """Metrics of a step's credit; `state` is the state that was used to compute it."""
    metrics = value_metrics(evidence, credit)
    if credit.whitening is not None:
        metrics |= {SHIFT: credit.whitening.shift, SCALE: credit.whitening.scale}
    if algorithm.kl_penalty is not None and (algorithm.critic is not None or algorithm.adaptive_kl is not None):
        metrics |= penalty_metrics(evidence) | {"kl_coefficient": state.kl_coefficient}
    if algorithm.reward_scaling is not None:
        metrics["reward_scaled"] = evidence.rewards.nanmean().item()
    return metrics


TeacherPrompts = Sequence[Sequence[Tokens]] | None
"""The prompts that a teacher sees instead of the policy's, group by group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModels:
    """Which columns are computed, and with what."""

    needs: frozenset[Need]
    policy: Policy
    """The policy before the step's updates."""
    reference: Reference | None = None
    teacher: Teacher | None = None
    critic: Critic | None = None
    temperature: float
    """The sampling temperature, at which log-probs and entropies are computed."""
    max_tokens: int

    def logprobs(
        self, policy: Policy, groups: Sequence[Group], prompts: TeacherPrompts = None
    ) -> Float64[Tensor, " token"]:
        temperature, max_tokens = self.temperature, self.max_tokens
        return group_logprobs(policy, groups, temperature=temperature, max_tokens=max_tokens, teacher_prompts=prompts)


Provider = Callable[[StepModels, Sequence[Group], TeacherPrompts], Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditedStep:
    """Collected groups with the algorithm's credit."""

    collected: CollectedStep
    groups: CreditedGroups
    advantages: Float64[Tensor, "prompt group"]
    """One number per completion: the mean over its sampled tokens."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    token_rewards: Float64[Tensor, " token"] | None = None
    """Process rewards and KL penalties per token; None without any."""
    process_rewards: Float64[Tensor, " token"] | None = None
    """Process rewards only; NaN if no step ends at the token."""
    next_state: ActorCriticState = field(default_factory=ActorCriticState)
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
    groups, grades, rewards, seen = collected.groups, collected.grades, collected.grades.rewards, state
    shown = None if models.teacher is None else models.teacher.prompts(groups, grades)
    teacher_prompts = None if shown is None else shown.tokens
    if algorithm.reward_scaling is not None:
        seen = replace(state, rewards=state.rewards.with_rewards(rewards))
        rewards = scaled_rewards(rewards, seen.rewards, algorithm.reward_scaling)
    if models.critic is not None and not state.begun:
        models.critic.head.expect(rewards.nanmean().nan_to_num(nan=0.0).item())
    known = step_columns(models, groups, teacher_prompts, clock)
    sampled = sampled_columns(groups)
    marked = steps = process_rewards(groups, grades, models.policy.tokenizer)
    if algorithm.credits_turns and (earned := turn_rewards(groups)) is not None:
        rewards, steps = turnless_rewards(grades), summed(marked, earned)  # earned once, with the turn
    token_rewards = with_penalties(steps, penalties(algorithm, state, sampled.behaviour_logprobs, known))
    evidence = Evidence(
        rewards=rewards,
        scores=grades.clipped,
        weights=grades.weights,
        lengths=torch.tensor([[rollout.num_sampled for rollout in group.rollouts] for group in groups]),
        max_completion_tokens=max_completion_tokens,
        token_rewards=token_rewards,
        step_rewards=steps,
        truncated=torch.tensor([[rollout.finish.cut_off for rollout in group.rollouts] for group in groups]),
        known={"behaviour_logprobs": sampled.behaviour_logprobs, **known},
    )
    credit = algorithm.credited(evidence, groups)
    metrics = credit_metrics(evidence, credit, algorithm, state)
    next_state = after_step(seen, metrics, evidence.lengths.numel(), algorithm)
    if models.critic is not None:
        metrics["value/critic_alone"] = float(not next_state.fitted)
    if shown is not None:
        metrics["teacher/shown"] = shown.shown_share
    known.pop("final_values", None)  # the only one that is not of tokens
    known |= {} if credit.returns is None else {"returns": credit.returns}
    credited = CreditedGroups(
        groups=groups,
        scored=taking_part(groups, grades.rewards, algorithm),
        columns=replace(sampled, advantages=credit.advantages, value_range=credit.value_range, known=known),
        teacher_prompts=teacher_prompts,
    )
    return CreditedStep(
        collected=collected,
        groups=credited,
        advantages=mean_of_rollouts(credit.advantages, evidence.lengths),
        metrics=metrics,
        token_rewards=token_rewards,
        process_rewards=marked,
        next_state=next_state,
    )


def taking_part(
    groups: Sequence[Group], rewards: Float64[Tensor, "prompt group"], algorithm: Algorithm
) -> Bool[Tensor, "prompt group"]:
    """Rollouts with a reward; if the algorithm also counts others, all except those whose environment failed."""
    failed = torch.tensor([[rollout.finish.failed for rollout in group.rollouts] for group in groups])
    return (~rewards.isnan() | algorithm.counts_unscored) & ~failed


def penalties(
    algorithm: Algorithm, state: ActorCriticState, behaviour: Float64[Tensor, " token"], known: Mapping[str, Tensor]
) -> Float64[Tensor, " token"] | None:
    """What a KL in the reward subtracts from each token's reward; None without one."""
    penalty = algorithm.kl_penalty
    if penalty is None:
        return None
    return -state.kl_coefficient * kl.ESTIMATORS[penalty.estimator](behaviour, known["reference_logprobs"])


def step_columns(
    models: StepModels, groups: Sequence[Group], teacher_prompts: TeacherPrompts, clock: Clock
) -> dict[str, Tensor]:
    """The needed columns by name: a number for every sampled token, in float64 on the CPU."""
    columns: dict[str, Tensor] = {}
    for need, (stage, provider) in PROVIDERS.items():
        if need in models.needs:
            with clock(stage):
                columns |= provider(models, groups, teacher_prompts)
    return columns


def reference_logprobs(models: StepModels, groups: Sequence[Group], _: TeacherPrompts) -> Mapping[str, Tensor]:
    assert models.reference is not None
    with models.reference.entered() as reference:
        return {"reference_logprobs": models.logprobs(reference, groups)}


def teacher_logprobs(models: StepModels, groups: Sequence[Group], prompts: TeacherPrompts) -> Mapping[str, Tensor]:
    assert models.teacher is not None
    with models.teacher.entered() as teacher:
        return {"teacher_logprobs": models.logprobs(teacher, groups, prompts)}


def proximal_logprobs(models: StepModels, groups: Sequence[Group], _: TeacherPrompts) -> Mapping[str, Tensor]:
    return {"proximal_logprobs": models.logprobs(models.policy, groups)}


def value_columns(models: StepModels, groups: Sequence[Group], _: TeacherPrompts) -> Mapping[str, Tensor]:
    assert models.critic is not None
    return models.critic.of_groups(groups, max_tokens=models.max_tokens)


@torch.no_grad()
def entropies(models: StepModels, groups: Sequence[Group], _: TeacherPrompts) -> Mapping[str, Tensor]:
    """The policy's entropy at each sampled token, in nats."""
    forward = models.policy.forward
    asked = ForwardNeeds(logprobs=False, temperature=models.temperature, gradient=False, entropies=True)

    def found(micro: Batch) -> Tensor:
        return cast(Tensor, forward.completion_logprobs(micro, asked).entropies).double().cpu()

    ranks = models.policy.ranks
    split = completions_of(groups).split(models.max_tokens, padded=forward.padded, ranks=ranks)
    return {"entropies": torch.cat(ranks.each([*split], Batch.num_read, found))}


PROVIDERS: Mapping[Need, tuple[str, Provider]] = {
    Need.REFERENCE_LOGPROBS: ("reference", reference_logprobs),
    Need.TEACHER_LOGPROBS: ("teacher", teacher_logprobs),
    Need.PROXIMAL_LOGPROBS: ("proximal", proximal_logprobs),
    Need.VALUES: ("values", value_columns),
    Need.ENTROPY: ("entropies", entropies),
}
"""By need: the clock's stage for its seconds, and the function that computes it."""


def with_staleness(credited: CreditedStep, num_updates: int) -> CreditedStep:
    """Add the number of updates between each token's sampling weights and the current ones, as column and metrics.

    Nothing is added if the current weights sampled all tokens.
    """
    rollouts = [rollout for group in credited.collected.groups for rollout in group.rollouts]
    if all(rollout.weights_version == num_updates for rollout in rollouts if rollout.num_sampled):
        return credited
    staleness = num_updates - torch.cat([token_versions(rollout.sequence) for rollout in rollouts])
    columns = credited.groups.columns
    columns = replace(columns, known={**columns.known, STALENESS: staleness})
    told = {f"{STALENESS}/mean": staleness.mean().item(), f"{STALENESS}/max": staleness.max().item()}
    return replace(credited, groups=replace(credited.groups, columns=columns), metrics={**credited.metrics, **told})


def token_versions(sequence: TokenSequence) -> Float64[Tensor, " token"]:
    """The version of the weights that sampled each token."""
    starts = [first for first, _ in sequence.versions[1:]]
    counts = [end - start for start, end in zip([0, *starts], [*starts, sequence.num_sampled], strict=True)]
    versions = torch.tensor([version for _, version in sequence.versions], dtype=torch.float64)
    return versions.repeat_interleave(torch.tensor(counts))
