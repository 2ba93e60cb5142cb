"""What a run on pairs trains, and what it remembers between steps."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property

import torch

from posttrain.algorithms.preference_losses import PREFERENCE_LOSSES, PairObjective
from posttrain.errors import RunError, UserError
from posttrain.models.adapters.in_force import adapter_dropout
from posttrain.models.adapters.peft_layers import require_whole_adapter
from posttrain.models.policy import Policy
from posttrain.options.dpo import DpoOptions
from posttrain.records import Preference
from posttrain.runs.checkpoint import Checkpoint
from posttrain.runs.tensor_state import (
    Tensors,
    frozen_state,
    module_tensors,
    optimizer_tensors,
    require_same_frozen,
    restore_module,
    restore_optimizer,
)
from posttrain.tasks.preference_set import PreferenceSet
from posttrain.training.dpo.pair_reference import PairReference
from posttrain.training.dpo.pair_update import MeasuredPairs, accumulate, logprobs_without_gradient, sampled_lengths
from posttrain.training.dpo.sampled_pairs import pair_tensors, pairs_from
from posttrain.training.optimizer import (
    POLICY,
    OwnOptimizer,
    apply_gradients,
    new_optimizer,
    next_rate,
    require_all_trained,
)
from posttrain.training.reference import Reference


@dataclass(slots=True, kw_only=True)
class DpoState:
    """What a run on pairs remembers between steps, besides tensors; plain data."""

    step: int = 0
    round: int = 0
    """The round whose pairs are learned; 0 where they are of rows."""
    next_pair: int = 0
    """The first pair of the next batch, counted from the beginning of the run or of the round."""
    places: list[str] = field(default_factory=list)
    """What the pairs of the round are called."""
    num_updates: int = 0
    num_pairs: int = 0
    """Learned so far, each as often as it was."""
    num_tokens: int = 0
    """That went through the policy with a gradient, prompts counted once for each pair."""
    completion_tokens: int = 0
    """Sampled in rounds."""
    rounds: list[dict[str, object]] = field(default_factory=list)
    """What summary.json says of each round."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time by stage, resumed parts included."""
    before: dict[str, object] = field(default_factory=dict)
    """What was measured before training, as summary.json has it."""
    after: dict[str, object] = field(default_factory=dict)
    """What was measured last."""
    transcripts: list[list[str]] = field(default_factory=list)
    """[prompt, completion before training] of the problems that the end of a run in rounds shows side by side."""


class TrainedOnPairs:
    """A policy, its optimiser, what it is compared with, the pairs at hand, and the counters of its run."""

    def __init__(
        self,
        policy: Policy,
        options: DpoOptions,
        pairs: PreferenceSet,
        *,
        reference: Reference | None = None,
        optimizer: OwnOptimizer | None = None,
    ) -> None:
        """Of a run in rounds `pairs` are none yet; without a `reference` it is the policy as it is now."""
        require_whole_adapter(policy.model)
        options = options.resolved()
        self.policy, self.options, self.pairs, self.run = policy, options, pairs, DpoState()
        self.learned: Sequence[Preference] = ()
        """The pairs of the last step."""
        self.own_optimizer = optimizer
        self.optimizer: torch.optim.Optimizer = (
            new_optimizer(policy.model.parameters(), options) if optimizer is None else optimizer.optimizer
        )
        require_all_trained(self.optimizer, policy.model)
        self.reference = PairReference(policy, options, reference)
        self.objective = pair_objective(options)

    @property
    def step(self) -> int:
        """Steps finished."""
        return self.run.step

    @property
    def seconds(self) -> float:
        """What they and the evaluations have taken, in all lives of the run."""
        return sum(self.run.seconds.values())

    def begin_rows(self) -> None:
        """Be ready for the pairs of rows, before the first update."""
        self.reference.begin("training", self.pairs.training)
        self.reference.begin("held_out", self.pairs.held_out)

    def begin_round(self, number: int, pairs: Sequence[Preference]) -> None:
        """Be ready for the pairs of a round, before its first update."""
        self.pairs = replace(self.pairs, training=pairs, order=order_of(number))
        self.run.round, self.run.next_pair, self.run.places = number, 0, [pair.where for pair in pairs]
        if self.options.refresh_reference and number > 1:
            self.reference.refresh()
        self.reference.begin("training", pairs)

    def learn(self, step: int, num_steps: int) -> dict[str, float]:
        """Take one optimiser step on the next pairs; returns its metrics.  Where there are no pairs none is taken."""
        self.run.step, self.learned = step, ()
        rate = next_rate(self.options, self.own_optimizer, step - 1, num_steps)
        if not self.pairs.training:
            return {"num_pairs": 0.0, "learning_rate": rate}
        numbers = [self.pairs.number(i) for i in self.pairs.batch_indices(self.run.next_pair, self.options)]
        pairs = [self.pairs.training[number] for number in numbers]
        reference = self.reference.logprobs("training", numbers, pairs)
        self.optimizer.zero_grad(set_to_none=True)
        with adapter_dropout(self.policy.model, self.pairs.seed, step):
            budget = self.options.tokens_per_microbatch
            loss, measured = accumulate(self.policy, pairs, reference, self.objective, budget)
        grad_norm = apply_gradients(self.optimizer, rate, self.options.max_grad_norm)[POLICY]
        if not math.isfinite(grad_norm):
            raise RunError(f"loss {loss}, gradient norm {grad_norm}.  No step was taken.  Lower dpo.learning_rate.")
        self.count(pairs)
        self.learned = pairs
        return {
            "loss": loss,
            **measured.means(),
            "grad_norm": grad_norm,
            "learning_rate": rate,
            "num_pairs": float(len(pairs)),
            "num_tokens": float(self.run.num_tokens),
        }

    def count(self, pairs: Sequence[Preference]) -> None:
        """Count a batch that was learned."""
        self.run.num_updates += 1
        self.run.next_pair += len(pairs)
        self.run.num_pairs += len(pairs)
        self.run.num_tokens += batch_tokens(pairs)

    def measured(self) -> MeasuredPairs:
        """The held-out pairs under the policy as it is."""
        pairs = self.pairs.held_out
        policy = logprobs_without_gradient(self.policy, pairs, self.options.tokens_per_microbatch)
        reference = self.reference.logprobs("held_out", range(len(pairs)), pairs)
        return MeasuredPairs.of(self.objective, policy, reference, sampled_lengths(pairs))

    def tensors(self) -> Mapping[str, Tensors]:
        """All tensors that the next step reads."""
        return {
            "policy": module_tensors(self.policy.model),
            "optimizer": optimizer_tensors(self.optimizer)[0],
            **self.reference.tensors(),
            **({"pairs": pair_tensors(self.pairs.training)} if self.options.rounds else {}),
        }

    @cached_property
    def frozen(self) -> Mapping[str, object]:
        """What checkpoints say of the weights that they leave out; those never change."""
        return frozen_state(self.policy.model, self.policy.model.name_or_path or "a model object")

    def state(self) -> Mapping[str, object]:
        """Whatever else it reads, as plain data."""
        kept = {"pairs": pairs_digest(self.pairs)} if self.reference.kept and not self.options.rounds else {}
        return {"run": asdict(self.run), "optimizer": optimizer_tensors(self.optimizer)[1], **self.frozen, **kept}

    def add_seconds(self, seconds: Mapping[str, float]) -> None:
        """Count the time of a step, by stage."""
        for stage, value in seconds.items():
            self.run.seconds[stage] = self.run.seconds.get(stage, 0.0) + value

    def restore(self, saved: Checkpoint) -> None:
        """Be as the checkpoint was."""
        optimizer, run = saved.state["optimizer"], saved.state["run"]
        assert isinstance(optimizer, Mapping)
        assert isinstance(run, Mapping)
        require_same_frozen(self.frozen, saved.state)
        if saved.state.get("pairs", digest := pairs_digest(self.pairs)) != digest:
            raise UserError(
                "dpo.reference = precomputed: the log-probs of the reference in the checkpoint are of other pairs than"
                " those of now, and the first policy is gone.  Give the pairs back, or start another run; with"
                " dpo.reference = live pairs may change."
            )
        if self.own_optimizer is not None:
            self.own_optimizer.advance(max(0, saved.step - 1))
        restore_module(self.policy.model, saved.tensors["policy"])
        restore_optimizer(self.optimizer, saved.tensors["optimizer"], optimizer)
        self.run = DpoState(**run)
        self.reference.restore(saved.tensors)
        if self.options.rounds:
            pairs = pairs_from(saved.tensors["pairs"], self.run.places)
            self.pairs = replace(self.pairs, training=pairs, order=order_of(self.run.round))


def pair_objective(options: DpoOptions) -> PairObjective:
    """What an update minimises."""
    assert options.length_normalized is not None, "filled in with the options"
    return PairObjective(
        loss=PREFERENCE_LOSSES[options.loss],
        beta=options.beta,
        label_smoothing=options.label_smoothing,
        unbiased_smoothing=options.loss == "robust",
        length_normalized=options.length_normalized,
        nll_weight=options.nll_weight,
    )


def order_of(round_number: int) -> str:
    """What the order of a round's pairs is drawn for."""
    return f"pairs of round {round_number}"


def batch_tokens(pairs: Sequence[Preference]) -> int:
    """Tokens of pairs, those of a prompt counted with each of its answers, as TRL counts them."""
    return sum(2 * len(pair.prompt.tokens) + len(pair.chosen.tokens) + len(pair.rejected.tokens) for pair in pairs)


def pairs_digest(pairs: PreferenceSet) -> str:
    """Tells the tokens of all pairs, in their order, from any others'."""
    parts = [
        [(pair.prompt.tokens, pair.chosen.tokens, pair.rejected.tokens) for pair in part]
        for part in (pairs.training, pairs.held_out)
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()
