"""RewardTrainer: TRL's constructor and methods on `posttrain.train_reward_model`."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

import torch
import transformers
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase

from posttrain.algorithms.preference_losses import bradley_terry, centring
from posttrain.config import RewardModelConfig
from posttrain.errors import UserError
from posttrain.models.adapters.lora import lora_layers
from posttrain.models.adapters.peft_layers import peft_layers
from posttrain.models.classifiers import saved_classifier
from posttrain.models.classifiers.heads import ScoreHead, TextScorer, new_scorer
from posttrain.models.loading.folder_kinds import hub_folder
from posttrain.models.loading.saving import require_loadable
from posttrain.models.policy import without_wrapper
from posttrain.options.model import ModelOptions
from posttrain.options.pairs import RewardTrainingOptions
from posttrain.runs.checkpoint import load_checkpoint
from posttrain.runs.reports import Run
from posttrain.runs.tensor_state import restore_module
from posttrain.tasks.preference_set import preference_rows
from posttrain.tasks.row_files.rows import MEMORY, BadRows, numbered_rows
from posttrain.training.pair_updates import pair_scores
from posttrain.training.reward_model.reward_run import HEAD, train_reward_model
from posttrain.trl.base_trainer import BaseTrainer
from posttrain.trl.configs.field_rules import mapping_of
from posttrain.trl.configs.recipe import RunLength
from posttrain.trl.configs.trainer_configs import RewardConfig
from posttrain.trl.dpo_trainer import PairTrainer
from posttrain.trl.log_entries import Entry
from posttrain.trl.model_source import Dataset, Given, Optimizers, PeftConfig, Row, is_peft_model, revision_of

MERGED = (
    "save_model, push_to_hub and checkpoints write a classifier with the adapter merged; trainer.model.save_pretrained"
    " writes the adapter and the head."
)
WHOLE = ["score"]
"""modules_to_save of a classifier: the head, which is always trained here."""


class RewardTrainer(PairTrainer[RewardConfig]):
    """Trains a reward model on pairs, with the interface of TRL's class; the loop is `train_reward_model`."""

    config_class = RewardConfig
    logged = (*BaseTrainer.logged, "accuracy", "margin", "mean_reward", "min_reward", "max_reward")

    def __init__(
        self,
        model: str | nn.Module,
        args: RewardConfig | None = None,
        data_collator: None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | Mapping[str, Dataset] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        compute_metrics: None = None,
        callbacks: list[Any] | None = None,
        optimizers: Optimizers = (None, None),
        optimizer_cls_and_kwargs: None = None,
        preprocess_logits_for_metrics: None = None,
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: PeftConfig = None,
        **not_here: object,
    ) -> None:
        """`model` is a sequence classifier with one label, or a language model, which gets a new head."""
        not_here |= {"data_collator": data_collator, "compute_metrics": compute_metrics}
        not_here |= {"preprocess_logits_for_metrics": preprocess_logits_for_metrics}
        self.require_defaults({**not_here, "optimizer_cls_and_kwargs": optimizer_cls_and_kwargs})
        wrapped = model if isinstance(model, nn.Module) and is_peft_model(model) else None
        classifier = given_classifier(model if wrapped is None else below(wrapped, peft_config), args)
        body = model if classifier is None else causal_view(classifier)
        source = body, processing_class, plain_config(peft_config), quantization_config
        loaded_here = isinstance(model, str)
        given = Given(*source, callbacks, train_dataset, eval_dataset, optimizers, loaded_here)
        super().__init__(args, given)
        saved_classifier.require_classifier(self.policy)
        self.head = new_scorer(self.policy, seed=self.args.seed).head if classifier is None else score_head(classifier)
        self.head.to(self.policy.device)
        self.classifier = classifier or classifier_view(self.scorer)
        self.loaded_model = wrapped or self.classifier
        if lora_layers(self.policy.model) or peft_layers(self.policy.model):
            self.notes.append(MERGED)
        self._finish_init()

    @property
    def scorer(self) -> TextScorer:
        return TextScorer(self.policy, self.head)

    def recipe(self, rows: list[Row], length: RunLength) -> RewardModelConfig:
        return RewardModelConfig(reward_model=self.options(length), **self.sections(length))

    def _fit(self, config: RewardModelConfig, **given: Any) -> Run:
        return train_reward_model(config, head=self.head, **given)

    def options(self, length: RunLength) -> RewardTrainingOptions:
        args = self.args
        return RewardTrainingOptions(
            **self.pair_options(length),
            long_pairs="error" if args.max_length is None else "skip",
            center_coefficient=args.center_rewards_coefficient or 0.0,
        )

    def _measured(self, rows: list[Row]) -> Entry:
        """The loss, and TRL's metrics of scores."""
        options = self.options(self.length(len(rows)))
        pairs = self.pairs(rows, options)
        scores = pair_scores(self.scorer, pairs, options.tokens_per_microbatch)
        margins = torch.tensor([pair.margin or 0.0 for pair in pairs], dtype=torch.float64)
        losses = bradley_terry(scores.chosen, scores.rejected, margins)
        losses = losses + options.center_coefficient * centring(scores.chosen, scores.rejected)
        return {"loss": losses.mean().item(), **scores.metrics()}

    def write_model(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        rows = preference_rows(numbered_rows(self.train_rows(), MEMORY), BadRows())
        reading = saved_classifier.TextReading(
            stop_token_ids=self.policy.stop_ids,
            template_options=self.model_options.template_options,
            plain=all(isinstance(row.prompt, str) for row in rows),
        )
        require_loadable(saved_classifier.save_classifier(self.scorer, folder, reading), folder)

    write_checkpoint_model = write_model

    def take_best(self, checkpoint: Path, folder: Path) -> None:
        tensors = load_checkpoint(checkpoint).tensors
        restore_module(self.policy.model, tensors["policy"])
        restore_module(self.head, tensors[HEAD])
        self.write_model(folder / "model")


def given_classifier(model: str | nn.Module, args: object) -> PreTrainedModel | None:
    """The given sequence classifier, as an object or by its folder or name; None for a language model."""
    if not isinstance(model, str):
        return model if is_sequence_classifier(model) else None
    config = args if isinstance(args, RewardConfig) else RewardConfig()
    given = mapping_of(config, "model_init_kwargs")
    attention = given.get("attn_implementation")
    trusts = bool(given.get("trust_remote_code", config.trust_remote_code))
    options = ModelOptions(path=model, revision=revision_of(given.get("revision")), trust_remote_code=trusts)
    name, revision = options.hub_name, options.hub_revision
    folder = Path(model) if name is None else hub_folder(name, revision, with_code=trusts)
    file = folder / "config.json"
    kinds = json.loads(file.read_bytes()).get("architectures") if file.is_file() else None
    if not any(str(kind).endswith("ForSequenceClassification") for kind in kinds or []):
        return None
    made: PreTrainedModel = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, dtype=torch.float32, trust_remote_code=trusts, attn_implementation=attention
    )
    made.config._name_or_path = model
    return made


def below(wrapped: nn.Module, config: object) -> PreTrainedModel:
    """The classifier inside a PeftModel, with the adapter's layers.  Raises UserError for another model."""
    if config is not None:
        raise UserError("peft_config: the model is a PeftModel already.  Leave one of the two adapters out.")
    model = without_wrapper(wrapped)
    if not is_sequence_classifier(model):
        kind = type(model).__name__
        raise UserError(
            f"RewardTrainer: the model is a PeftModel of a {kind}.  Give one of a sequence classifier"
            ' (task_type="SEQ_CLS", num_labels=1), or the language model with peft_config.'
        )
    return model


def plain_config(config: PeftConfig) -> PeftConfig:
    """An adapter's config without its part about the head, which is always trained."""
    if config is None or getattr(config, "modules_to_save", None) not in (None, WHOLE):
        return config
    made: Any = copy.copy(config)
    made.modules_to_save, made.task_type = None, "CAUSAL_LM"
    return made  # type: ignore[no-any-return]


def is_sequence_classifier(model: object) -> TypeGuard[PreTrainedModel]:
    return isinstance(model, PreTrainedModel) and type(model).__name__.endswith("ForSequenceClassification")


def score_head(classifier: PreTrainedModel) -> ScoreHead:
    """The head of a classifier, its own parameter in it.  Raises UserError where it is not one vector."""
    score: Any = getattr(classifier, "score", None)
    if hasattr(score, "modules_to_save"):  # of a PeftModel, which trains a copy
        score = score.modules_to_save[score.active_adapters[0]]
    plain = type(score) is nn.Linear and score.bias is None
    if not plain or score.out_features != 1:
        labels = getattr(classifier.config, "num_labels", None)
        kind = type(classifier).__name__
        raise UserError(
            f"RewardTrainer: the head of {kind} is not one vector `score` (num_labels = {labels}).  Load it with"
            " num_labels=1, over a decoder such as Llama, Qwen, Gemma or GPT-2."
        )
    head = ScoreHead(score.in_features, seed=0)
    head.weight = score.weight
    return head


def causal_view(classifier: PreTrainedModel) -> PreTrainedModel:
    """A language model with the same weights: the body of a classifier, with its embedding as the output layer."""
    with torch.device("meta"):
        made: Any = transformers.AutoModelForCausalLM.from_config(classifier.config)
    setattr(made, made.base_model_prefix, classifier.base_model)
    output = made.get_output_embeddings()
    output.weight, output.bias = classifier.get_input_embeddings().weight, None
    made.name_or_path = classifier.name_or_path
    if hasattr(classifier, "peft_config"):
        made.peft_config = classifier.peft_config
    made.generation_config = None  # of a model that never writes
    return made  # type: ignore[no-any-return]


def classifier_view(scorer: TextScorer) -> PreTrainedModel:
    """Body and head as a transformers classifier, over the trained weights."""
    made: Any = saved_classifier.empty_classifier(scorer.policy.model)
    setattr(made, made.base_model_prefix, scorer.policy.model.base_model)
    made.score.weight = scorer.head.weight
    made.config.pad_token_id = scorer.policy.tokenizer.pad_token_id
    return made  # type: ignore[no-any-return]
