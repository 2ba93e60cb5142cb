"""RewardTrainer: TRL's constructor and methods over `posttrain.train_reward_model`."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_utils import TrainOutput

from posttrain.algorithms.bradley_terry import bradley_terry, centring
from posttrain.config import RewardModelConfig
from posttrain.errors import UserError
from posttrain.models.classifiers.saved_classifier import TextReading, require_classifier, save_classifier
from posttrain.models.classifiers.score_head import TextScorer, new_scorer
from posttrain.options.dataset import DatasetOptions
from posttrain.options.reward_training import RewardTrainingOptions
from posttrain.runs.checkpoint import load_checkpoint
from posttrain.runs.reports import Run, StepReport
from posttrain.runs.tensor_state import restore_module
from posttrain.training.reward_model.pair_scores import pair_scores
from posttrain.training.reward_model.reward_run import train_reward_model
from posttrain.training.reward_model.reward_state import HEAD
from posttrain.trl.as_config import RunLength, checkpoint_options, run_options, tracker_options
from posttrain.trl.fields.reward_config import REWARD_RULES, RewardConfig
from posttrain.trl.grpo_trainer import own_optimizer
from posttrain.trl.log_entries import Entry
from posttrain.trl.model_source import ModelSource, default_folder
from posttrain.trl.pairs.classifier_views import causal_view, classifier_view, head_of, is_classifier
from posttrain.trl.pairs.pair_trainer import PairTrainer, require_defaults
from posttrain.trl.sft_trainer import run_length
from posttrain.trl.training_rows import Dataset, Row

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig

ARGUMENTS = (
    "model",
    "args",
    "train_dataset",
    "eval_dataset",
    "processing_class",
    "callbacks",
    "optimizers",
    "quantization_config",
    "peft_config",
)
OF_SCORES = ("accuracy", "margin", "mean_reward", "min_reward", "max_reward")
LOGGED = ("loss", "grad_norm", "learning_rate", "num_tokens", *OF_SCORES)
"""What a step logs, as our metrics have it."""
WHOLE = ["score"]
"""What peft is told to train whole over a classifier: the head, which always is here."""


class RewardTrainer(PairTrainer[RewardConfig]):
    """Trains a reward model on pairs, called as TRL's class of that name; the loop is that of `train_reward_model`."""

    config_class = RewardConfig

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
        optimizers: tuple[Optimizer | None, LRScheduler | None] = (None, None),
        optimizer_cls_and_kwargs: None = None,
        preprocess_logits_for_metrics: None = None,
        quantization_config: "BitsAndBytesConfig | None" = None,
        peft_config: "LoraConfig | None" = None,
        **not_here: object,
    ) -> None:
        """`model` is a sequence classifier of one label, or a language model, which gets a new head."""
        refused: dict[str, object] = {
            "data_collator": data_collator,
            "compute_metrics": compute_metrics,
            "optimizer_cls_and_kwargs": optimizer_cls_and_kwargs,
            "preprocess_logits_for_metrics": preprocess_logits_for_metrics,
        }
        require_defaults("RewardTrainer", refused | not_here, ARGUMENTS)
        args = args or RewardConfig(default_folder(model, "Reward"))
        classifier = given_classifier(model, args)
        source = ModelSource(
            model=model if classifier is None else causal_view(classifier),
            processing_class=processing_class,
            peft_config=plain_config(peft_config),
            quantization_config=quantization_config,
        )
        super().__init__(source, args, REWARD_RULES, callbacks, (train_dataset, eval_dataset))
        require_classifier(self.policy)
        self.head = new_scorer(self.policy, seed=args.seed).head if classifier is None else head_of(classifier)
        self.head.to(self.policy.device)
        """The vector that a hidden state is scored by."""
        self.classifier = classifier or classifier_view(self.scorer)
        """Body and head as transformers has them, over the weights that are trained."""
        self.own_optimizer = own_optimizer(optimizers)
        self.tell()

    @property
    def scorer(self) -> TextScorer:
        """What is trained."""
        return TextScorer(self.policy, self.head)

    @property
    def model(self) -> PreTrainedModel:
        """What is trained, as a sequence classifier."""
        return self.classifier

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Train to the end, or to where a callback stops; the folder then is a run of posttrain's like any other."""
        return self._train(resume_from_checkpoint, self._fit, self._entry, self.take_best)

    def _fit(self, rows: Sequence[Row], length: RunLength, **how: Any) -> Run:
        """The run by `train_reward_model`."""
        config = RewardModelConfig(
            model=self.model_options,
            task=DatasetOptions(held_out_share=0.0),
            reward_model=self.options(length),
            checkpoint=checkpoint_options(self.args, length),
            tracker=tracker_options(self.args),
            run=run_options(self.args, length.steps),
        )
        return train_reward_model(
            config, policy=self.policy, head=self.head, rows=rows, optimizer=self.own_optimizer, **how
        )

    def options(self, length: RunLength) -> RewardTrainingOptions:
        """How pairs are learned."""
        args = self.args
        return RewardTrainingOptions(
            **self.pair_options(length, args.max_length),
            long_pairs="error" if args.max_length is None else "skip",
            center_coefficient=args.center_rewards_coefficient or 0.0,
        )

    def _entry(self, report: StepReport) -> Entry:
        """What a step logs."""
        self._num_tokens = report.metrics["num_tokens"]
        return {name: report.metrics[name] for name in LOGGED}

    def _measured(self, rows: list[Row], prefix: str) -> tuple[Entry, int]:
        """The loss, and what TRL logs of scores."""
        options = self.options(run_length(self.args, len(rows)))
        pairs = self.pairs(rows, options)
        scores = pair_scores(self.scorer, pairs, options.tokens_per_microbatch)
        margins = torch.tensor([pair.margin or 0.0 for pair in pairs], dtype=torch.float64)
        losses = bradley_terry(scores.chosen, scores.rejected, margins)
        losses = losses + options.center_coefficient * centring(scores.chosen, scores.rejected)
        return {"loss": losses.mean().item(), **scores.metrics()}, len(pairs)

    def write_model(self, folder: Path) -> None:
        """Write the reward model as a sequence classifier, an adapter added into it, with the tokenizer."""
        reading = TextReading(stop_token_ids=self.policy.stop_ids, template_options=self.model_options.template_options)
        folder.mkdir(parents=True, exist_ok=True)
        save_classifier(self.scorer, folder, reading)

    def write_checkpoint_model(self, checkpoint: Path) -> None:
        """Write the reward model into a checkpoint."""
        self.write_model(checkpoint)

    def take_best(self, checkpoint: Path, folder: Path) -> None:
        """Have body and head be those of a checkpoint, and the model of the run's folder."""
        tensors = load_checkpoint(checkpoint).tensors
        restore_module(self.policy.model, tensors["policy"])
        restore_module(self.head, tensors[HEAD])
        self.write_model(folder / "model")


def given_classifier(model: str | nn.Module, args: RewardConfig) -> PreTrainedModel | None:
    """The sequence classifier that is given, as an object or by its folder; None of a language model."""
    if isinstance(model, str):
        if not Path(model, "config.json").is_file():
            return None
        kinds = AutoConfig.from_pretrained(model).architectures or []
        if not any(str(kind).endswith("ForSequenceClassification") for kind in kinds):
            return None
        made: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(
            model, num_labels=1, dtype=torch.float32
        )
        return made
    if type(model).__name__.startswith("PeftModel"):
        raise UserError(
            "RewardTrainer: the model is a PeftModel.  Give the classifier below it as `model`, and its LoraConfig as"
            " peft_config."
        )
    return model if isinstance(model, PreTrainedModel) and is_classifier(model) else None


def plain_config(config: "LoraConfig | None") -> "LoraConfig | None":
    """An adapter's config without what it says of the head, which is trained in any case."""
    if config is None or getattr(config, "modules_to_save", None) not in (None, WHOLE):
        return config
    made: Any = copy.copy(config)
    made.modules_to_save, made.task_type = None, "CAUSAL_LM"
    return made  # type: ignore[no-any-return]
