"""Direct preference optimisation on pairs: the loss of an update, its reference, and held-out measurements."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, cast

import torch

from posttrain.algorithms.preference_losses import PREFERENCE_LOSSES, PairObjective
from posttrain.config import DpoConfig
from posttrain.errors import UserError
from posttrain.models.memory.memory_parts import MemorySetup
from posttrain.models.memory.model_shape import ModelShape
from posttrain.models.policy import Policy
from posttrain.options.model import run_model
from posttrain.options.pairs import DpoOptions
from posttrain.records import Preference
from posttrain.runs.checkpoint import Checkpoint
from posttrain.runs.folder import shown
from posttrain.runs.harness import Harness
from posttrain.runs.intervals import mean_intervals, share_of_pairs_interval
from posttrain.runs.planned_memory import dpo_setup
from posttrain.runs.reports import Metrics
from posttrain.runs.run_folder import HELD_OUT, RunFolder
from posttrain.runs.tensor_state import Tensors
from posttrain.tasks.preference_set import PreferenceSet
from posttrain.training import pair_updates
from posttrain.training.fit import model_card, write_model
from posttrain.training.fit_session import FitObjective, scored_pairs
from posttrain.training.held_out import Row, table_lines
from posttrain.training.reference import Reference
from posttrain.training.trained import FitState

WITH_INTERVAL = ("pairs/accuracy", "pairs/margin")
"""Held-out means with an interval, in addition to the loss."""
TABLE = {
    "ranked right": "pairs/accuracy",
    "margin": "pairs/margin",
    "loss": "loss",
    "log π of chosen": "logps/chosen",
    "log π of rejected": "logps/rejected",
}
NOTHING_MEASURED = "Nothing was held out, so nothing was measured before and after."


@dataclass(slots=True, kw_only=True)
class DpoState(FitState):
    """Counters of a run on pairs; a prompt's tokens count once per answer."""

    cursor: ClassVar[str] = "next_pair"
    round: int = 0
    """The round whose pairs are learned; 0 with rows."""
    next_pair: int = 0
    """The first pair of the next batch, counted from the beginning of the run or of the round."""
    places: list[str] = field(default_factory=list)
    """Names of the round's pairs, for messages."""
    num_updates: int = 0
    num_pairs: int = 0
    """Number of pairs learned so far, repetitions included."""
    completion_tokens: int = 0
    """Completion tokens sampled in rounds."""
    rounds: list[dict[str, object]] = field(default_factory=list)
    """Entries of summary.json, one for each round."""
    transcripts: list[list[str]] = field(default_factory=list)
    """With rounds: [prompt, completion before training] of the problems shown at the end."""

    def count(self, num_items: int, num_tokens: int) -> None:
        FitState.count(self, num_items, num_tokens)
        self.num_updates += 1
        self.num_pairs += num_items


class DpoObjective(FitObjective[Preference]):
    """A loss of the log-ratios to the reference of both answers of a pair."""

    by_stage = True
    title: ClassVar[str] = "held-out pairs"
    """Of the last table."""
    options: DpoOptions
    run: DpoState

    def __init__(
        self,
        config: DpoConfig,
        policy: Policy,
        pairs: PreferenceSet,
        *,
        model_name: str = "",
        reference: Reference | None = None,
    ) -> None:
        self.config, self.policy, self.pairs, self.model_name = config, policy, pairs, model_name
        self.options = config.dpo.resolved()
        self.held_out, self.run = pairs.held_out, DpoState()
        self.reference = pair_updates.PairReference(policy, self.options, reference)
        self.loss = pair_objective(self.options)
        self.measured_pairs: pair_updates.MeasuredPairs | None = None
        """The last measurement of held-out pairs."""

    def begin(self, harness: Harness) -> None:
        with harness.clock("reference"), self.policy.ranks.leading("keep_reference"):
            self.keep_reference()

    def keep_reference(self) -> None:
        self.reference.begin("training", self.pairs.training)
        self.reference.begin("held_out", self.held_out)

    def accumulate(self, batch: Sequence[Preference]) -> dict[str, float]:
        numbers = [self.pairs.number(self.run.first + place) for place in range(len(batch))]
        reference = self.reference.logprobs("training", numbers, batch)
        loss, measured = pair_updates.accumulate_pairs(
            self.policy, batch, reference, self.loss, self.options.tokens_per_microbatch
        )
        return {"loss": loss, **measured.means()}

    def counted(self, batch: Sequence[Preference]) -> dict[str, float]:
        return {"num_pairs": float(len(batch))}

    def num_tokens(self, batch: Sequence[Preference]) -> int:
        return sum(2 * len(pair.prompt.tokens) + len(pair.chosen.tokens) + len(pair.rejected.tokens) for pair in batch)

    def measured(self) -> tuple[dict[str, float], Mapping[str, object]]:
        """With bootstrap intervals over prompts."""
        pairs, prompts = self.held_out, [pair.prompt.tokens for pair in self.held_out]
        policy = pair_updates.logprobs_without_gradient(self.policy, pairs, self.options.tokens_per_microbatch)
        reference = self.reference.logprobs("held_out", range(len(pairs)), pairs)
        found = pair_updates.MeasuredPairs.of(self.loss, policy, reference, pair_updates.answer_lengths(pairs))
        self.measured_pairs = found
        columns = {"loss": found.losses, **{each: found.columns[each] for each in WITH_INTERVAL}}
        metrics = {f"eval/{name}": value for name, value in found.means().items()}
        metrics["eval/loss"] = found.losses.mean().item()
        intervals = mean_intervals(prompts, torch.stack([*columns.values()], dim=1).detach().numpy())
        for name, (low, high) in zip(columns, intervals, strict=True):
            if name == "pairs/accuracy":
                low, high = share_of_pairs_interval(prompts, metrics["eval/pairs/accuracy"], (low, high))
            metrics[f"eval/{name}_low"], metrics[f"eval/{name}_high"] = low, high
        return metrics, {name.removeprefix("eval/"): value for name, value in metrics.items()}

    def score(self, metrics: Metrics) -> float | None:
        return metrics.get("eval/accuracy_sampled", metrics.get("eval/pairs/accuracy"))

    def tensors(self) -> Mapping[str, Tensors]:
        return self.reference.tensors()

    def state(self) -> Mapping[str, object]:
        return {"pairs": pairs_digest(self.pairs)} if self.reference.kept and not self.options.rounds else {}

    def restore(self, saved: Checkpoint) -> None:
        if "pairs" in saved.state and saved.state["pairs"] != pairs_digest(self.pairs):
            raise UserError(
                "dpo.reference = precomputed: the checkpoint's reference log-probs belong to other pairs.  Restore"
                " the pairs, or start another run; with dpo.reference = live, pairs may change."
            )
        self.reference.restore(saved.tensors)

    def memory(self, shape: ModelShape, *, on_cuda: bool) -> MemorySetup:
        return dpo_setup(self.config, shape, on_cuda=on_cuda)

    def loss_lines(self) -> list[str]:
        options = self.options
        whose = "the policy at the beginning" + (" of each round" if options.refresh_reference else "")
        how = "computed once for all pairs" if options.reference == "precomputed" else "computed for each batch"
        return [f"loss       {loss_in_words(options)}", f"reference  {whose}, {how}"]

    def batch_words(self) -> str:
        return f"{self.options.pairs_per_batch} pairs"

    def save(self, folder: RunFolder) -> None:
        about = f"{self.model_name}, trained with posttrain on pairs of answers: {loss_in_words(self.options)}."
        card = model_card(folder.path, "dpo", about)
        write_model(self.config.model, self.policy, folder, curves=self.config.run.curves, card=card)
        if self.held_out:
            if self.measured_pairs is None:  # of a run that was resumed at its end
                with self.policy.ranks.leading("measured"):
                    self.measured()
            assert self.measured_pairs is not None
            rewards = (self.measured_pairs.columns[f"rewards/{side}"].tolist() for side in ("chosen", "rejected"))
            folder.write_rows(HELD_OUT, scored_pairs(self, *rewards))

    def summary(self) -> dict[str, object]:
        run = self.run
        return {
            "updates": run.num_updates,
            "loss": loss_in_words(self.options),
            "pairs_learned": run.num_pairs,
            **({"rounds": run.rounds} if self.options.rounds else {}),
            "seconds": {**run.seconds, "total": sum(run.seconds.values())},
            "tokens": {"trained": run.num_tokens, "completion": run.completion_tokens},
            "device": str(self.policy.device),
            "machine": {"cores": os.cpu_count(), "threads": torch.get_num_threads()},
        }

    def result_lines(self, folder: Path) -> list[str]:
        folder = shown(folder)
        return [
            "",
            *(table_lines(rows, self.title) if (rows := self.rows()) else [NOTHING_MEASURED]),
            "",
            *self.transcript_lines(),
            f"model        {run_model(folder)}",
            f"talk to it   posttrain chat {folder}",
        ]

    def rows(self) -> list[Row]:
        before, after = self.run.before, self.run.after
        return [
            (label, pair_result_text(before, name), pair_result_text(after, name))
            for label, name in TABLE.items()
            if name in before and name in after
        ]

    def transcript_lines(self) -> list[str]:
        return []


def pair_objective(options: DpoOptions) -> PairObjective:
    assert options.length_normalized is not None, "filled in with the options"
    return PairObjective(
        loss=PREFERENCE_LOSSES[options.loss],
        beta=options.beta,
        label_smoothing=options.label_smoothing,
        unbiased_smoothing=options.loss == "robust",
        length_normalized=options.length_normalized,
        nll_weight=options.nll_weight,
    )


def pairs_digest(pairs: PreferenceSet) -> str:
    parts = [
        [(pair.prompt.tokens, pair.chosen.tokens, pair.rejected.tokens) for pair in part]
        for part in (pairs.training, pairs.held_out)
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def loss_in_words(options: DpoOptions) -> str:
    parts = [f"{options.loss}, beta {options.beta:g}"]
    parts += [f"{options.label_smoothing:g} of the labels assumed wrong"] if options.label_smoothing else []
    parts += ["log-probs per token"] if options.length_normalized else []
    parts += [f"{options.nll_weight:g} × -log π of chosen answers per token"] if options.nll_weight else []
    return ", ".join(parts)


def pair_result_text(results: Mapping[str, object], name: str) -> str:
    value = cast(float, results[name])
    if f"{name}_low" not in results:
        return f"{value:.3f}"
    low, high = (cast(float, results[f"{name}_{end}"]) for end in ("low", "high"))
    return f"{value:.3f} [{low:.3f}, {high:.3f}]"
