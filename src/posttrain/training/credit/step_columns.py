"""Columns of a step that are computed before it has batches: one provider for each need.

A new column is a need, a row of `PROVIDERS` and a property where rules and terms read it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

from posttrain.batch import completions_of
from posttrain.models.forward import ForwardNeeds
from posttrain.models.policy import Policy
from posttrain.needs import Need
from posttrain.records import Group
from posttrain.runs.clock import Clock
from posttrain.training.actor_critic.critic import Critic
from posttrain.training.distillation.teacher import Teacher
from posttrain.training.reference import Reference
from posttrain.training.update import group_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModels:
    """Which columns are computed, and with what."""

    needs: frozenset[Need]
    policy: Policy
    """As the step finds it."""
    reference: Reference | None = None
    teacher: Teacher | None = None
    critic: Critic | None = None
    temperature: float
    """The one that sampled: log-probs and entropies are taken at it."""
    max_tokens: int
    """Tokens of a micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGroups:
    """What columns are computed of."""

    groups: Sequence[Group]
    teacher_prompts: Sequence[Sequence[tuple[int, ...]]] | None = None
    """What a teacher goes on from, group by group; None where that is the groups' prompts."""


Provider = Callable[[StepModels, StepGroups], Mapping[str, Tensor]]
"""The columns of a need by name; each has a number for every sampled token, in float64 on the CPU."""


def step_columns(models: StepModels, step: StepGroups, clock: Clock) -> dict[str, Tensor]:
    """The columns of the needs.  The clock counts the seconds of each."""
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
    """log-probs of every sampled token, in nats."""
    temperature, max_tokens = models.temperature, models.max_tokens
    return group_logprobs(
        policy, step.groups, temperature=temperature, max_tokens=max_tokens, teacher_prompts=teacher_prompts
    )


def reference_logprobs(models: StepModels, step: StepGroups) -> Mapping[str, Tensor]:
    """log-probs under the reference."""
    assert models.reference is not None, "a need without what it is computed with"
    with models.reference.entered() as reference:
        return {"reference_logprobs": logprobs_under(reference, models, step)}


def teacher_logprobs(models: StepModels, step: StepGroups) -> Mapping[str, Tensor]:
    """log-probs under the teacher, behind the prompts that it sees."""
    assert models.teacher is not None, "a need without what it is computed with"
    with models.teacher.entered() as teacher:
        return {"teacher_logprobs": logprobs_under(teacher, models, step, step.teacher_prompts)}


def proximal_logprobs(models: StepModels, step: StepGroups) -> Mapping[str, Tensor]:
    """log π of the policy as the step finds it."""
    return {"proximal_logprobs": logprobs_under(models.policy, models, step)}


def value_columns(models: StepModels, step: StepGroups) -> Mapping[str, Tensor]:
    """What the critic expects before each token, and after each completion that was cut off."""
    assert models.critic is not None, "a need without what it is computed with"
    found = models.critic.of_groups(step.groups, max_tokens=models.max_tokens)
    return {"values": found.values, "final_values": found.final_values}


@torch.no_grad()
def entropies(models: StepModels, step: StepGroups) -> Mapping[str, Tensor]:
    """Entropy of the policy's distribution of each token, as the step finds the policy."""
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
"""By need: the stage that its seconds count for, and what computes it."""
