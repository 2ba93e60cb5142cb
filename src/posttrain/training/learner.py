"""The second half of a step: credit → batches → loss → updates, by the owner of policy, optimiser and reference."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from random import Random

import torch
from jaxtyping import Float64
from torch import Tensor

from posttrain.algorithms import kl
from posttrain.algorithms.algorithm import Algorithm
from posttrain.algorithms.credit import Evidence, mean_of_rollouts
from posttrain.algorithms.terms import Need
from posttrain.batch import Batch, CreditedGroups, collate, sampled_columns
from posttrain.errors import RunError, UserError
from posttrain.models.adapters.lora import adapter_dropout, drops, lora_layers
from posttrain.models.adapters.peft_objects import require_whole_adapter
from posttrain.models.policy import Policy
from posttrain.options.training import UpdateOptions
from posttrain.rewards.process_rewards import process_rewards, with_penalties
from posttrain.runs.checkpoint import Checkpoint, load_latest
from posttrain.runs.clock import Clock
from posttrain.runs.tensor_state import (
    Tensors,
    frozen_state,
    module_tensors,
    optimizer_tensors,
    require_same_frozen,
    restore_module,
    restore_optimizer,
)
from posttrain.training.collector import CollectedStep
from posttrain.training.optimizer import OwnOptimizer, ParameterGroup, learning_rate, new_optimizer, require_all_trained
from posttrain.training.reference import Reference, named_reference, reference_of
from posttrain.training.teaching.privileged_prompts import TeacherPrompts
from posttrain.training.teaching.teacher import Teacher, teacher_of
from posttrain.training.update import Objective, Observations, group_logprobs, micro_loss, update
from posttrain.training.update_metrics import UpdateReport


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    """What a recipe says of the second half of a step."""

    update: UpdateOptions
    max_completion_tokens: int
    temperature: float = 1.0
    """The one that sampled: log-probs are taken at it."""
    seed: int = 0
    """Of the order of groups in mini-batches."""
    num_steps: int = 100
    """Steps of the whole run, which the learning rate's schedule ends with."""
    refresh_reference_every: int = 0
    """Steps after which the reference is taken from the policy again; 0 keeps the first."""
    reference_path: str = ""
    """Another model that is the reference; empty is the policy as it is at first."""
    template_options: Mapping[str, object] = field(default_factory=dict)
    """Arguments of the chat template, by which a teacher's prompts are written too."""

    @property
    def updates_per_step(self) -> int:
        """Optimiser updates of a step in which every group is informative."""
        return self.update.epochs_per_step * self.update.minibatches_per_epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditedStep:
    """Collected groups with what the algorithm makes of them."""

    collected: CollectedStep
    groups: CreditedGroups
    advantages: Float64[Tensor, "prompt group"]
    """One number for each completion: the mean over its tokens."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What else is known of the step's credit."""
    token_rewards: Float64[Tensor, " token"] | None = None
    """What single tokens earn beside their completion: process rewards and KL penalties; None where there are none."""


class Learner:
    """Owns what is trained: the policy, its optimiser, and the reference that a KL compares with."""

    def __init__(
        self,
        policy: Policy,
        algorithm: Algorithm,
        settings: LearnerSettings,
        *,
        parameter_groups: Sequence[ParameterGroup] = (),
        own_optimizer: OwnOptimizer | None = None,
    ) -> None:
        """Parameter groups have rates and clipping of their own; without any, all parameters are one group.

        An optimiser of the caller's takes the place of AdamW and of the options that are about it.

        Raises UserError where the algorithm needs what the policy does not have, or where a parameter is in no group.
        """
        if Need.VALUES in algorithm.needs:
            raise UserError(f"algorithm {algorithm.name}: a term needs values, and the policy has no value head.")
        self.policy, self.algorithm, self.settings = policy, algorithm, settings
        self.own_optimizer = own_optimizer
        self.optimizer: torch.optim.Optimizer = (
            new_optimizer(parameter_groups or policy.model.parameters(), settings.update)
            if own_optimizer is None
            else own_optimizer.optimizer
        )
        require_all_trained(self.optimizer, policy.model)
        require_whole_adapter(policy.model)
        require_undecayed_adapter(policy, settings.update)
        self.reference: Reference | None = None
        if algorithm.uses_reference:
            path = settings.reference_path
            self.reference = named_reference(path, policy) if path else reference_of(policy)
        self.teacher: Teacher | None = None
        if algorithm.uses_teacher and algorithm.teacher is not None:
            self.teacher = teacher_of(policy, algorithm.teacher, settings.template_options)
        self.num_updates = 0
        """Optimiser updates behind the policy's weights: their version."""

    def credit(self, collected: CollectedStep, clock: Clock) -> CreditedStep:
        """The algorithm's advantages, and returns, for every token of the groups."""
        groups, grades = collected.groups, collected.grades
        reference = self.reference_logprobs(collected, clock)
        shown = None if self.teacher is None else self.teacher.prompts(groups, grades)
        teacher = self.teacher_logprobs(collected, shown, clock)
        lengths = torch.tensor([[len(rollout.tokens) for rollout in group.rollouts] for group in groups])
        sampled = sampled_columns(groups)
        step_rewards = process_rewards(groups, grades, self.policy.tokenizer)
        token_rewards = with_penalties(step_rewards, self._penalties(sampled.behaviour_logprobs, reference))
        evidence = Evidence(
            rewards=grades.rewards,
            scores=grades.clipped,
            weights=grades.weights,
            lengths=lengths,
            max_completion_tokens=self.settings.max_completion_tokens,
            teacher_gaps=None if teacher is None else teacher - sampled.behaviour_logprobs,
            token_rewards=token_rewards,
            step_rewards=step_rewards,
        )
        credit = self.algorithm.credited(evidence, groups)
        columns = replace(
            sampled,
            advantages=credit.advantages,
            returns=credit.returns,
            reference_logprobs=reference,
            proximal_logprobs=self.proximal_logprobs(collected, clock),
            teacher_logprobs=teacher,
        )
        scored = ~grades.rewards.isnan()
        if self.algorithm.counts_unscored:
            scored = torch.ones_like(scored)
        return CreditedStep(
            collected=collected,
            groups=CreditedGroups(
                groups=groups,
                scored=scored,
                columns=columns,
                teacher_prompts=None if shown is None else shown.tokens,
            ),
            advantages=mean_of_rollouts(credit.advantages, lengths),
            metrics={} if shown is None else {"teacher/shown": shown.shown_share},
            token_rewards=token_rewards,
        )

    def reference_logprobs(self, collected: CollectedStep, clock: Clock) -> Float64[Tensor, " token"] | None:
        """log-probs of every completion token under the reference; None where nothing needs them."""
        if self.reference is None or Need.REFERENCE_LOGPROBS not in self.algorithm.needs:
            return None
        with clock("reference"), self.reference.entered() as reference:
            return self._logprobs_under(reference, collected)

    def proximal_logprobs(self, collected: CollectedStep, clock: Clock) -> Float64[Tensor, " token"] | None:
        """The same under the policy as the step finds it; None where nothing needs them.

        Nor are they computed of a step with one update: unless that drops something, its own are the same numbers.
        """
        known = self.settings.updates_per_step == 1 and not drops(self.policy.model)
        if Need.PROXIMAL_LOGPROBS not in self.algorithm.needs or known:
            return None
        with clock("proximal"):
            return self._logprobs_under(self.policy, collected)

    def teacher_logprobs(
        self, collected: CollectedStep, shown: TeacherPrompts | None, clock: Clock
    ) -> Float64[Tensor, " token"] | None:
        """The same under the teacher, behind the prompts that it sees; None where nothing needs them."""
        if self.teacher is None or Need.TEACHER_LOGPROBS not in self.algorithm.needs:
            return None
        with clock("teacher"), self.teacher.entered() as teacher:
            return self._logprobs_under(teacher, collected, None if shown is None else shown.tokens)

    def _logprobs_under(
        self,
        policy: Policy,
        collected: CollectedStep,
        teacher_prompts: Sequence[Sequence[tuple[int, ...]]] | None = None,
    ) -> Float64[Tensor, " token"]:
        return group_logprobs(
            policy,
            collected.groups,
            temperature=self.settings.temperature,
            max_tokens=self.settings.update.tokens_per_microbatch,
            teacher_prompts=teacher_prompts,
        )

    def _penalties(
        self, behaviour: Float64[Tensor, " token"], reference: Float64[Tensor, " token"] | None
    ) -> Float64[Tensor, " token"] | None:
        """What a KL in the reward takes off each token."""
        penalty = self.algorithm.kl_penalty
        if penalty is None:
            return None
        assert reference is not None, "a need that was not met"
        return -penalty.coefficient * kl.ESTIMATORS[penalty.estimator](behaviour, reference)

    def learn(self, batches: Sequence[Batch], step: int, clock: Clock) -> list[UpdateReport]:
        """Take the updates of a step, one on each of its batches that is not empty."""
        settings = self.settings
        reports: list[UpdateReport] = []
        for index, batch in enumerate(batches):
            rate = self.next_rate((step - 1) * settings.updates_per_step + index)
            if not batch.completions:
                continue  # nothing to learn from; a zero gradient would still move AdamW's weights
            with clock("update"), adapter_dropout(self.policy.model, settings.seed, self.num_updates):
                reports.append(update(self.policy, self.optimizer, batch, self.objective(), settings.update, rate))
            self.num_updates += 1
        every = settings.refresh_reference_every
        if self.reference is not None and every and step % every == 0:
            self.reference = reference_of(self.policy)
        return reports

    def next_rate(self, update: int) -> float:
        """The learning rate of the update of this number, from 0; of several groups the largest."""
        settings, own = self.settings, self.own_optimizer
        planned = learning_rate(settings.update, update, settings.num_steps * settings.updates_per_step)
        if own is None:
            return planned
        own.advance(int(update > 0))
        return own.set_rates(planned / settings.update.largest_rate)

    def objective(self) -> Objective:
        """What an update minimises, besides its batch."""
        return Objective(
            algorithm=self.algorithm,
            temperature=self.settings.temperature,
            reference=self.reference,
            teacher=self.teacher,
            measure_entropy=self.settings.update.measure_entropy,
        )

    def batches(self, credited: CreditedStep, clock: Clock) -> list[Batch]:
        """The batch of each update: whole groups, every epoch in an order of its own, weights fixed on each.

        A batch may be empty: where nothing in it can change the gradient.
        """
        groups, options, step = credited.groups, self.settings.update, credited.collected.step
        num_groups = len(groups.groups)
        parts = min(options.minibatches_per_epoch, num_groups)  # an evaluation may have fewer groups than a step
        made: list[Batch] = []
        for epoch in range(options.epochs_per_step):
            order = list(range(num_groups))
            if parts > 1:
                Random(f"{self.settings.seed} minibatches {step} {epoch}").shuffle(order)
            for part in range(parts):
                rows = sorted(order[part * num_groups // parts : (part + 1) * num_groups // parts])
                with clock("collate"):
                    batch = collate(
                        groups.select(rows),
                        self.algorithm.weighted,
                        max_completion_tokens=self.settings.max_completion_tokens,
                        keep_zero_advantages=self.algorithm.keeps_zero_advantages,
                        masks_truncated=self.algorithm.masks_truncated,
                    )
                made.append(batch)
        return made

    def differentiate(self, batch: Batch, clock: Clock) -> None:
        """Compute the gradient of an update and throw it away: what it costs, without one."""
        with clock("update"):
            budget, padded = self.settings.update.tokens_per_microbatch, self.policy.forward.padded
            for micro in batch.split(budget, padded=padded):
                micro_loss(self.policy, micro, self.objective(), Observations()).backward()
            self.policy.model.zero_grad(set_to_none=True)
            if self.policy.device.type == "cuda":
                torch.cuda.synchronize(self.policy.device)

    def weights(self) -> Mapping[str, Tensor]:
        """The policy's weights by name, as an engine elsewhere loads them; they go on changing."""
        weights: Mapping[str, Tensor] = self.policy.model.state_dict()
        return weights

    def tensors(self) -> dict[str, Tensors]:
        """All tensors that the next step reads; the reference only where it is no longer the model of the recipe."""
        saved: dict[str, Tensors] = {
            "policy": module_tensors(self.policy.model),
            "optimizer": optimizer_tensors(self.optimizer)[0],
        }
        if self.reference is not None and self.settings.refresh_reference_every:
            saved["reference"] = self.reference.tensors()
        return saved

    @cached_property
    def frozen(self) -> Mapping[str, object]:
        """What checkpoints say of the weights that they leave out; those never change."""
        return frozen_state(self.policy.model, self.policy.model.name_or_path or "a model object")

    def optimizer_state(self) -> dict[str, object]:
        """What of the optimiser is no tensor."""
        return optimizer_tensors(self.optimizer)[1]

    def go_on_with_optimizer(self, run: str) -> None:
        """Take over the optimiser of another run as its last checkpoint has it: moments and counters, no options.

        Raises UserError where there is none, or none of such parameters.
        """
        where = f"update.optimizer_from = {run}"
        saved = load_latest(Path(run) / "checkpoints")
        if saved is None:
            raise UserError(f"{where}: holds no checkpoint.  Name the folder of a run that has one.")
        state = saved.state["optimizer"]
        assert isinstance(state, Mapping)
        places = [{"params": group["params"]} for group in state["param_groups"]]
        try:
            restore_optimizer(self.optimizer, saved.tensors["optimizer"], {"param_groups": places})
        except RunError as error:
            rule = "Use a run that trained the same parameters, or leave it out."
            raise UserError(f"{where}: its optimiser is not of what is trained here ({error}).  {rule}") from error

    def restore(self, saved: Checkpoint, *, num_updates: int) -> None:
        """Put a checkpoint's weights and optimiser state back."""
        require_same_frozen(self.frozen, saved.state)
        if self.own_optimizer is not None:
            self.own_optimizer.advance(max(0, saved.step * self.settings.updates_per_step - 1))
        restore_module(self.policy.model, saved.tensors["policy"])
        optimizer = saved.state["optimizer"]
        assert isinstance(optimizer, Mapping)
        restore_optimizer(self.optimizer, saved.tensors["optimizer"], optimizer)
        if self.reference is not None and "reference" in saved.tensors:
            self.reference.restore(saved.tensors["reference"])
        self.num_updates = num_updates


def require_undecayed_adapter(policy: Policy, options: UpdateOptions) -> None:
    """Refuse weight decay where an adapter is trained: it would pull A and B to zero, and the policy to its base."""
    if options.weight_decay and lora_layers(policy.model):
        raise UserError(
            f"update.weight_decay = {options.weight_decay:g}, and an adapter is not decayed: that would pull the policy"
            " back to its base.  Leave it out."
        )
