"""The second half of a step: credit → batches → loss → updates, by the owner of policy, optimiser and reference."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from posttrain.algorithms.algorithm import Algorithm
from posttrain.algorithms.token_locality import LocalityCheck
from posttrain.batch import Batch, CreditedGroups, collate
from posttrain.errors import UserError
from posttrain.models.adapters.in_force import adapter_dropout, drops
from posttrain.models.adapters.lora import lora_layers
from posttrain.models.adapters.peft_layers import require_whole_adapter
from posttrain.models.loading.saving import ExportedWeights
from posttrain.models.policy import Policy
from posttrain.models.sharding import sharded
from posttrain.needs import Need
from posttrain.options.training import UpdateOptions, require_adapter_decay
from posttrain.records import Group
from posttrain.runs.alarms import EXPLAINED
from posttrain.runs.checkpoint import Checkpoint
from posttrain.runs.progress import Clock
from posttrain.runs.reports import UpdateTokens
from posttrain.runs.rollout_file import read_rollouts, stored_steps
from posttrain.runs.tensor_state import Tensors
from posttrain.training import optimizer
from posttrain.training.collector import CollectedStep
from posttrain.training.credited_step import ActorCriticState, CreditedStep, StepModels, credited_step, with_staleness
from posttrain.training.critic import CRITIC, Critic
from posttrain.training.metrics import STALENESS, UpdateReport, kl_limit
from posttrain.training.observations import Observations
from posttrain.training.reference import (
    Reference,
    Teacher,
    UncopiedPolicy,
    named_reference,
    reference_of,
    refreshed,
    teacher_of,
)
from posttrain.training.update import Objective, group_logprobs, micro_losses, update, updated_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    """Learner settings from the recipe."""

    update: UpdateOptions
    max_completion_tokens: int
    temperature: float = 1.0
    """The sampling temperature, at which log-probs are computed."""
    seed: int = 0
    """Seed of the order of groups in mini-batches."""
    num_steps: int = 100
    """Number of steps of the whole run, where the learning rate schedule ends."""
    refresh_reference_every: int = 0
    """Every this many steps, the current policy becomes the reference; 0: never."""
    reference_path: str = ""
    """Another model as the reference; empty: the policy before training."""
    template_options: Mapping[str, object] = field(default_factory=dict)
    """Arguments of the chat template, for a teacher's prompts."""
    keep_token_columns: bool = False
    """Report the numbers that each update computes per token."""


class Learner:
    """Owns the trained state: policy, optimiser, critic, KL reference and teacher."""

    def __init__(
        self,
        policy: Policy,
        algorithm: Algorithm,
        settings: LearnerSettings,
        *,
        parameter_groups: Sequence[optimizer.ParameterGroup] = (),
        own_optimizer: optimizer.OwnOptimizer | None = None,
    ) -> None:
        """Parameter groups set rates and clipping of modules; a caller's optimiser replaces AdamW and its options.

        With several ranks, all weights are sharded over them; `policy` is then the sharded one.  Raises UserError if a
        caller's optimiser is combined with a critic or several ranks, or if a parameter is in no group.
        """
        if policy.ranks.size > 1:
            optimizer.require_no_own(own_optimizer or parameter_groups)
        policy = sharded(policy)  # and so are copies of it
        self.policy, self.algorithm, self.settings = policy, algorithm, settings
        self.passes = settings.update.passes(algorithm.passes)
        self.critic = None if algorithm.critic is None else Critic(policy, algorithm.critic, seed=settings.seed)
        begun = self.critic is not None and self.critic.begun
        self.actor_critic_state = ActorCriticState.at_first(algorithm, begun=begun)
        self.own_optimizer = own_optimizer
        if self.critic is not None and own_optimizer is not None:
            raise UserError(
                f"optimizer: {algorithm.name} trains a critic, which your optimiser does not have.  Leave it out."
            )
        self.reference: Reference | None = None
        if algorithm.uses_reference:
            path = settings.reference_path
            self.reference = named_reference(path, policy) if path else reference_of(policy)
        self.teacher: Teacher | None = None
        if algorithm.uses_teacher and algorithm.teacher is not None:
            self.teacher = teacher_of(policy, algorithm.teacher, settings.template_options)
        self.optimizer = self._made_optimizer(parameter_groups)
        optimizer.require_all_trained(self.optimizer, policy.model)
        require_whole_adapter(policy.model)
        if lora_layers(policy.model):
            require_adapter_decay(settings.update, "update")
        self.num_updates = 0
        """Number of optimiser updates so far: the version of the policy's weights."""
        self.check_terms = LocalityCheck()
        self.left_out = 0
        """Updates of the last step that were skipped because the KL limit was exceeded."""

    def _made_optimizer(self, parameter_groups: Sequence[optimizer.ParameterGroup]) -> torch.optim.Optimizer:
        if self.own_optimizer is not None:
            return self.own_optimizer.optimizer
        everything = optimizer.ParameterGroup(module=optimizer.POLICY, parameters=[*self.policy.model.parameters()])
        groups = [*parameter_groups] or [everything]
        groups += [] if self.critic is None else [self.critic.parameter_group]
        return optimizer.new_optimizer(groups, self.settings.update)

    def credit(self, collected: CollectedStep, clock: Clock) -> CreditedStep:
        """The step with its advantages; on all ranks, which share its forward passes."""
        models = StepModels(
            needs=self.column_needs,
            policy=self.policy,
            reference=self.reference,
            teacher=self.teacher,
            critic=self.critic,
            temperature=self.settings.temperature,
            max_tokens=self.settings.update.tokens_per_microbatch,
        )
        state, limit = self.actor_critic_state, self.settings.max_completion_tokens
        with self.policy.ranks.leading("credit", collected):
            credited = credited_step(collected, self.algorithm, models, state, max_completion_tokens=limit, clock=clock)
        return with_staleness(credited, self.num_updates)

    @property
    def column_needs(self) -> frozenset[Need]:
        """The columns to compute before a step's updates.

        If a step has a single update, log π is left out, unless a credit rule reads it: the update computes the same
        numbers.
        """
        algorithm, proximal = self.algorithm, {Need.PROXIMAL_LOGPROBS}
        again = self.passes.updates > 1 or drops(self.policy.model) or proximal <= algorithm.credit_needs
        return algorithm.column_needs - (set() if again else proximal)

    def remember(self, credited: CreditedStep) -> None:
        self.actor_critic_state = credited.next_state

    def learn(self, batches: Sequence[Batch], step: int, clock: Clock) -> list[UpdateReport]:
        """Take one update on each non-empty batch.  Once the KL limit is exceeded, skip the remaining batches."""
        with self.policy.ranks.leading("learn", step):
            self.policy.ranks.agree("the batches", lambda: batches_digest(batches))
            return self._learn(batches, step, clock)

    def _learn(self, batches: Sequence[Batch], step: int, clock: Clock) -> list[UpdateReport]:
        settings, limit, noisy = self.settings, self.algorithm.largest_epoch_kl, drops(self.policy.model)
        reports: list[UpdateReport] = []
        self.left_out = 0
        for index, batch in enumerate(batches):
            number, total = (step - 1) * self.passes.updates + index, settings.num_steps * self.passes.updates
            rate = optimizer.next_rate(settings.update, self.own_optimizer, number, total)
            if not batch.completions:
                continue  # nothing to learn from; a zero gradient would still move AdamW's weights
            objective = replace(self.objective(), largest_kl=kl_limit(limit, reports, noisy=noisy))
            with clock("update"), adapter_dropout(self.policy.model, settings.seed, self.num_updates):
                report = update(self.policy, self.optimizer, batch, objective, settings.update, rate)
            if not report.taken:
                self.left_out = sum(bool(later.completions) for later in batches[index:])
                break
            reports.append(report)
            self.num_updates += 1
            if self.critic is not None:
                self.actor_critic_state = replace(self.actor_critic_state, begun=True)
        every = settings.refresh_reference_every
        if self.reference is not None and every and step % every == 0:
            self.reference = refreshed(self.reference, self.policy)
        return reports

    def updated(self, groups: CreditedGroups, updates: Sequence[UpdateReport], clock: Clock) -> UpdateTokens | None:
        """Numbers of all sampled tokens after a step's updates; None without an update or `keep_token_columns`."""
        if not (updates and self.settings.keep_token_columns):
            return None
        with clock("token_columns"), self.policy.ranks.leading("updated"):
            objective, max_tokens = self.objective(whole=True), self.settings.update.tokens_per_microbatch
            return updated_tokens(self.policy, groups, objective, max_tokens)

    def try_gradient(self, batches: Sequence[Batch], clock: Clock) -> None:
        """Compute and discard the gradient of a step's largest batch; the clock's seconds are scaled to all batches.

        Has no effect if all batches are empty.  Includes the policy's gradient, even if only the critic would learn at
        first.
        """
        first, policy = max(batches, key=lambda batch: len(batch.tokens)), self.policy
        if not first.completions:
            return
        with clock("update"):
            for micro in first.split(self.settings.update.tokens_per_microbatch, padded=policy.forward.padded):
                for share in micro_losses(policy, micro, self.objective(whole=True), Observations()):
                    share.backward()
            self.optimizer.zero_grad(set_to_none=True)
            if policy.device.type == "cuda":
                torch.cuda.synchronize(policy.device)
        clock.seconds["update"] *= sum(len(batch.tokens) for batch in batches) / len(first.tokens)

    def undropped_gaps(self, groups: CreditedGroups) -> Tensor | None:
        """|log π - log μ| before a step's first update, without dropout; None if updates have no dropout.

        Covers all tokens if log π is known, else the tokens of the first group, which is scored for this purpose.
        """
        if not drops(self.policy.model):
            return None
        logprobs = groups.columns.known.get("proximal_logprobs")
        if logprobs is None:
            temperature, budget = self.settings.temperature, self.settings.update.tokens_per_microbatch
            with self.policy.ranks.leading("undropped_gaps"):
                logprobs = group_logprobs(self.policy, groups.groups[:1], temperature=temperature, max_tokens=budget)
        gaps = (logprobs - groups.columns.behaviour_logprobs[: len(logprobs)]).abs()
        stale = groups.columns.known.get(STALENESS)
        return gaps if stale is None else gaps[stale[: len(gaps)] == 0]

    def objective(self, *, whole: bool = False) -> Objective:
        """What an update minimises: only the critic's terms until it has learned enough, unless `whole` is set."""
        algorithm, frozen = self.algorithm, not (whole or self.actor_critic_state.fitted)
        if frozen:
            algorithm = replace(algorithm, terms=tuple(term for term in algorithm.terms if Need.VALUES in term.needs))
        return Objective(
            algorithm=algorithm,
            temperature=self.settings.temperature,
            reference=self.reference,
            teacher=self.teacher,
            measure_entropy=self.settings.update.measure_entropy,
            keep_tokens=self.settings.keep_token_columns,
            critic=self.critic,
            check_terms=self.check_terms,
            policy_frozen=frozen,
        )

    def batches(self, credited: CreditedStep, clock: Clock) -> list[Batch]:
        """The batch of each update: whole groups, shuffled again in each epoch, with fixed token weights.

        A batch is empty if none of its completions can change the gradient.
        """
        groups, step = credited.groups, credited.collected.step
        num_groups = len(groups.groups)
        parts = min(self.passes.minibatches, num_groups)  # an evaluation may have fewer groups than a step
        made: list[Batch] = []
        for epoch in range(self.passes.epochs):
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

    def weights(self) -> ExportedWeights:
        return ExportedWeights(self.policy)

    def tensors(self) -> dict[str, Tensors]:
        saved: dict[str, Tensors] = {}
        if self.reference is not None and self.settings.refresh_reference_every:
            saved["reference"] = self.reference.tensors()
        if self.critic is not None:
            saved[CRITIC] = self.critic.tensors()
        return saved

    def state(self) -> dict[str, object]:
        return self.actor_critic_state.as_json(self.algorithm)

    def require_context(self, longest: int) -> None:
        """Reject a reference, teacher or critic that cannot read the longest completion."""
        others = {
            "reference.path": self.reference,
            "algorithm.teacher.model": self.teacher,
            "algorithm.critic.path": None if self.critic is None else UncopiedPolicy(self.critic.trunk),
        }
        for option, other in others.items():
            if other is None:
                continue
            with other.entered() as policy:
                if policy.max_positions < longest:
                    raise UserError(
                        f"{option}: the model reads {policy.max_positions} tokens, and the longest prompt with its"
                        f" completion has up to {longest}.  Lower rollout.max_completion_tokens, or use another model."
                    )

    def load_optimizer_state(self, run: str) -> None:
        if self.own_optimizer is not None:
            raise UserError(
                f"update.optimizer_from = {run}: only works with AdamW.  Leave it out, or leave out your optimiser."
            )
        with self.policy.ranks.leading("load_optimizer_state", run):
            optimizer.take_over(self.optimizer, run, where=f"update.optimizer_from = {run}")

    def restore(self, saved: Checkpoint) -> None:
        if self.reference is not None and "reference" in saved.tensors:
            self.reference.restore(saved.tensors["reference"])
        if self.critic is not None:
            self.critic.restore(saved.tensors[CRITIC])
        self.actor_critic_state = self.actor_critic_state.restored(saved.state, self.algorithm)
        run = saved.state["run"]
        assert isinstance(run, Mapping)
        self.num_updates = run["num_updates"]


def batches_digest(batches: Sequence[Batch]) -> str:
    """SHA-256 of everything that updates read; must be equal on all ranks."""
    digest = hashlib.sha256()
    for batch in batches:
        digest.update(repr((batch.prompts, batch.completions, batch.prompt_of)).encode())
        for name, column in batch.columns.named().items():
            digest.update(name.encode() + column.contiguous().numpy().tobytes())
    return digest.hexdigest()


OPTION = "algorithm.critic.warm_start"


def warm_start(learner: Learner, clock: Clock) -> list[str]:
    """Train the critic once on each step in the folder of its options, if any; returns notes.

    The explained variance of a step is measured before the critic learns from it.
    """
    files, last, count = earlier_rollouts(learner.algorithm), None, 0
    for number, file in enumerate(files):
        groups, grades = read_rollouts(file)
        require_known_tokens(groups, learner.policy, file)
        metrics = fit_critic(learner, CollectedStep(step=-number, groups=groups, grades=grades), clock)
        last, count = metrics.get(EXPLAINED), count + sum(len(group.rollouts) for group in groups)
    explained = (
        f"explained variance on the last step, before learning it: {'unknown' if last is None else f'{last:.2f}'}"
    )
    return [f"The critic learned from {count} earlier rollouts; {explained}."] if files else []


def fit_critic(learner: Learner, collected: CollectedStep, clock: Clock) -> Mapping[str, float]:
    """Train only the critic on rollouts; returns its metrics before this."""
    with learner.policy.ranks.leading("fit_critic", collected):
        return fit_critic_here(learner, collected, clock)


def fit_critic_here(learner: Learner, collected: CollectedStep, clock: Clock) -> Mapping[str, float]:
    """This rank's share of `learn`."""
    before, options = learner.actor_critic_state, learner.settings.update
    credited = learner.credit(collected, clock)
    learner.actor_critic_state = replace(before, rewards=credited.next_state.rewards, begun=True, fitted=False)
    batches = learner.batches(credited, clock)
    learner.policy.ranks.agree("the batches", lambda: batches_digest(batches))
    for batch in batches:
        if batch.completions:
            with clock("update"):
                update(learner.policy, learner.optimizer, batch, learner.objective(), options, options.largest_rate)
    learner.actor_critic_state = replace(learner.actor_critic_state, fitted=before.fitted)
    return credited.metrics


def require_known_tokens(groups: Sequence[Group], policy: Policy, file: Path) -> None:
    largest = max(max(*rollout.tokens, *group.prompt.tokens) for group in groups for rollout in group.rollouts)
    if largest >= policy.num_logits:
        where = f"{OPTION}: {file} contains token {largest}, but the policy has {policy.num_logits} tokens"
        raise UserError(f"{where}.  Give rollouts of a policy with the same tokenizer.")


def earlier_rollouts(algorithm: Algorithm) -> list[Path]:
    """The files to train a critic on before the first step, in order.  Raises UserError if the folder has none."""
    critic = algorithm.critic
    return [] if critic is None or not critic.warm_start else [*stored_steps(critic.warm_start, OPTION)]
