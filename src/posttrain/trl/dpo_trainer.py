"""DPOTrainer, and what it shares with RewardTrainer: TRL's constructor and methods over `posttrain.train_dpo`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedTokenizerBase

from posttrain.algorithms.preference_losses import OfPairs
from posttrain.config import DpoConfig
from posttrain.errors import UserError
from posttrain.models.adapters.in_force import trains_adapter_alone
from posttrain.models.conversation_masks import Masking
from posttrain.models.loading.devices import chosen_device
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.policy import Policy, as_policy
from posttrain.models.rendering import TokenizerRenderer
from posttrain.options.dataset import DatasetOptions
from posttrain.options.pairs import DpoOptions, PairOptions
from posttrain.records import Preference
from posttrain.runs.reports import Run
from posttrain.tasks.preference_set import preference_set
from posttrain.tasks.row_files.rows import GivenRows
from posttrain.training.dpo.dpo_objective import pair_objective
from posttrain.training.dpo.dpo_run import train_dpo
from posttrain.training.pair_updates import MeasuredPairs, answer_lengths, logprobs_without_gradient
from posttrain.training.reference import Reference, UncopiedPolicy, reference_of, require_same_vocabulary
from posttrain.trl.base_trainer import BaseTrainer
from posttrain.trl.configs.recipe import RunLength, adamw_options
from posttrain.trl.configs.trainer_configs import DPOConfig, PairFields
from posttrain.trl.log_entries import Entry
from posttrain.trl.model_source import Dataset, Given, Optimizers, PeftConfig, Row, move_to

PairArgs = TypeVar("PairArgs", bound=PairFields)
GONE = "precompute_ref_log_probs = True, and the first policy, the reference, is gone since training began."
READ = ("prompt", "chosen", "rejected", "tools", "margin")
"""Columns of a row that are read; TRL reads no weights and no ties."""


class PairTrainer(BaseTrainer[PairArgs]):
    """A trainer on pairs of answers."""

    wanted = "give rows with `chosen` and `rejected`"

    def rows(self, given: Dataset | None, name: str) -> list[Row]:
        """The rows with the columns that are read.  Raises UserError if other columns would be ignored."""
        rows = super().rows(given, name)
        for column in ("image", "images", "chat_template_kwargs"):
            if any(row.get(column) for row in rows):
                raise UserError(f"{name}: the column {column!r} is not read here.  Leave it out.")
        return [{column: row[column] for column in READ if row.get(column) is not None} for row in rows]

    def pairs(self, rows: Sequence[Row], options: PairOptions) -> Sequence[Preference]:
        """The tokenised pairs of some rows."""
        renderer = TokenizerRenderer(self.policy.tokenizer, template_options=self.model_options.template_options)
        assert options.max_length is not None, "as options_of_pairs has it"
        return preference_set(
            Masking.of(self.policy, renderer),
            DatasetOptions(held_out_share=0.0),
            options,
            longest=options.max_length,
            seed=self.args.seed,
            given=GivenRows(rows=rows),
        ).training

    def pair_options(self, length: RunLength) -> dict[str, Any]:
        """The options of pairs that the training fields set."""
        args, longest = self.args, self.policy.max_positions
        limit = min(args.max_length or longest, longest)
        return {
            **adamw_options(args, self.model_options, length.updates),
            "max_length": limit,
            "num_epochs": None,
            "pairs_per_batch": args.rows_per_update,
            "tokens_per_microbatch": max(3, 2 * args.per_device_train_batch_size * limit),
        }


LOSSES: Mapping[str, Mapping[str, Any]] = {
    "sigmoid": {"loss": "sigmoid", "length_normalized": False},
    "hinge": {"loss": "hinge", "length_normalized": False},
    "ipo": {"loss": "ipo", "length_normalized": True},
    "robust": {"loss": "robust", "length_normalized": False},
    "sigmoid_norm": {"loss": "sigmoid", "length_normalized": True},
}
OF_PAIRS = tuple(f"rewards/{each}" for each in ("chosen", "rejected", "accuracies", "margins"))
OF_PAIRS += ("logps/chosen", "logps/rejected")
"""TRL's metrics of pairs, from our metrics."""


class DPOTrainer(PairTrainer[DPOConfig]):
    """Trains a policy on pairs of answers, with the interface of TRL's class; the loop is `train_dpo`."""

    config_class = DPOConfig
    logged = (*BaseTrainer.logged, *OF_PAIRS)
    loss_remedy = "Choose a loss by `loss_type` in DPOConfig."

    def __init__(
        self,
        model: str | nn.Module,
        ref_model: str | nn.Module | None = None,
        args: DPOConfig | None = None,
        data_collator: None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | Mapping[str, Dataset] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        compute_metrics: None = None,
        callbacks: list[Any] | None = None,
        optimizers: Optimizers = (None, None),
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: PeftConfig = None,
        **not_here: object,
    ) -> None:
        """Without `ref_model`, the reference is the current policy; `not_here` are arguments that are rejected."""
        self.require_defaults({"data_collator": data_collator, "compute_metrics": compute_metrics, **not_here})
        source = model, processing_class, peft_config, quantization_config
        given = Given(*source, callbacks, train_dataset, eval_dataset, optimizers)
        super().__init__(args, given)
        self.losses = loss_options(self.args, self.notes)
        self.ref_model = None if ref_model is None else self._loaded_reference(ref_model, model)
        apart = None if self.ref_model is None else UncopiedPolicy(self.ref_model)
        precomputed = self.args.precompute_ref_log_probs and not trains_adapter_alone(self.policy.model)
        self.reference: Reference | None = apart or (None if precomputed else reference_of(self.policy))
        """The reference; None if it is the first policy, whose log-probs are computed before the first update."""
        self.reference_logprobs: dict[object, tuple[float, float]] = {}
        """The first policy's log-probs of evaluation pairs, by their tokens."""
        self._finish_init()

    def recipe(self, rows: list[Row], length: RunLength) -> DpoConfig:
        return DpoConfig(dpo=self.options(length), **self.sections(length))

    def _fit(self, config: DpoConfig, **given: Any) -> Run:
        if self.reference is None and self._updates_before and not given["resume"]:
            raise UserError(f"DPOTrainer.train: {GONE}  Make a new trainer, or give a ref_model.")
        if self.reference is None and not (given["resume"] and self.reference_logprobs):
            self._keep_first_policy()
        return train_dpo(config, reference=self.ref_model or self.reference, **given)

    def _keep_first_policy(self) -> None:
        given = self.eval_dataset
        for dataset in given.values() if isinstance(given, Mapping) else [given]:
            if dataset is not None:
                rows = self.rows(dataset, "eval_dataset")
                options = self.options(self.length(len(rows)))
                pairs = self.pairs(rows, options)
                found = logprobs_without_gradient(self.policy, pairs, options.tokens_per_microbatch)
                both = zip(found.chosen.tolist(), found.rejected.tolist(), strict=True)
                self.reference_logprobs |= dict(zip(map(tokens_of, pairs), both, strict=True))

    def options(self, length: RunLength) -> DpoOptions:
        args = self.args
        return DpoOptions(
            **self.pair_options(length),
            **self.losses,
            long_pairs="error" if args.max_length is None else "cut",
            beta=args.beta,
            label_smoothing=args.label_smoothing,
            reference="precomputed" if args.precompute_ref_log_probs else "live",
            learn_closing=True,
        )

    def _measured(self, rows: list[Row]) -> Entry:
        options = self.options(self.length(len(rows)))
        pairs = self.pairs(rows, options)
        policy = logprobs_without_gradient(self.policy, pairs, options.tokens_per_microbatch)
        reference = self._reference_logprobs(pairs, options)
        found = MeasuredPairs.of(pair_objective(options), policy, reference, answer_lengths(pairs))
        means = found.means()
        return {"loss": found.losses.mean().item(), **{name: means[name] for name in OF_PAIRS}}

    def _reference_logprobs(self, pairs: Sequence[Preference], options: DpoOptions) -> OfPairs:
        """log π_ref of both answers of some pairs."""
        if self.reference is not None:
            with self.reference.entered() as reference:
                return logprobs_without_gradient(reference, pairs, options.tokens_per_microbatch)
        kept = [self.reference_logprobs.get(tokens_of(pair)) for pair in pairs]
        known = [each for each in kept if each is not None]
        if len(known) == len(pairs):
            chosen, rejected = torch.tensor(known, dtype=torch.float64).unbind(dim=1)
            return OfPairs(chosen, rejected)
        if self.state.global_step > 0:
            raise UserError(f"DPOTrainer.evaluate: {GONE}  Give these rows as eval_dataset, or a ref_model.")
        return logprobs_without_gradient(self.policy, pairs, options.tokens_per_microbatch)

    def _loaded_reference(self, given: str | nn.Module, model: object) -> Policy:
        """The policy of `ref_model`."""
        if given is model and not isinstance(given, str):
            raise UserError("DPOTrainer: ref_model is the trained model.  Leave it out to compare with its start.")
        if isinstance(given, str):
            plain = replace(self.model_options, path=given, adapter=None, quantization=None)
            policy = load_policy(plain, seed=self.args.seed, inference=True)
        else:
            move_to(given, chosen_device(self.model_options.device))
            policy = as_policy(given, self.policy.tokenizer)
        require_same_vocabulary(self.policy, policy, "DPOTrainer: ref_model")
        return policy


def loss_options(args: DPOConfig, notes: list[str]) -> dict[str, Any]:
    """TRL's losses as our options; differences are added to the notes."""
    kinds, weights = list(args.loss_type), args.loss_weights or [1.0] * len(args.loss_type)
    weighted = dict(zip(kinds, weights, strict=True))
    nll = weighted.pop("sft", 0.0)
    if len(kinds) != len(weighted) + ("sft" in kinds) or len(weighted) != 1 or not weighted.keys() <= LOSSES.keys():
        raise UserError(f"DPOConfig: loss_type = {kinds}: use one of {', '.join(LOSSES)}, with or without sft.")
    kind, weight = next(iter(weighted.items()))
    if weight != 1.0:
        raise UserError(f"DPOConfig: loss_weights = {weights}: the weight of {kind} is 1 here; scale learning_rate.")
    if args.label_smoothing and kind != "robust":
        given = f"label_smoothing = {args.label_smoothing} with loss_type = {kind}"
        raise UserError(f'DPOConfig: {given} is ignored by TRL 1.16.  Use loss_type=["robust"], or leave it out.')
    if nll:
        notes.append("loss_type = sft is a mean over pairs of the mean over their tokens; TRL's is over all tokens.")
    return {**LOSSES[kind], "nll_weight": nll}


def tokens_of(pair: Preference) -> tuple[object, ...]:
    """The tokens that the log-probs of a pair depend on."""
    answers = [(each.tokens, each.sampled) for each in (pair.chosen, pair.rejected)]
    return (tuple(pair.prompt.tokens), *answers, pair.chosen_closing, pair.rejected_closing)
