"""A sequence classifier of one label as a body and a head that are trained, and the two as a classifier again.

Both ways share the weights: what an update changes in one is changed in the other.
"""

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from posttrain.errors import UserError
from posttrain.models.classifiers.heads import ScoreHead, TextScorer
from posttrain.models.classifiers.saved_classifier import empty_classifier


def is_classifier(model: object) -> bool:
    """Whether this is a sequence classifier of transformers."""
    return isinstance(model, PreTrainedModel) and type(model).__name__.endswith("ForSequenceClassification")


def head_of(classifier: PreTrainedModel) -> ScoreHead:
    """The head of a classifier, its own parameter in it.  Raises UserError where it is not one vector."""
    score: Any = getattr(classifier, "score", None)
    if hasattr(score, "modules_to_save"):  # of a PeftModel, which trains a copy
        score = score.modules_to_save[score.active_adapters[0]]
    plain = type(score) is nn.Linear and score.bias is None
    if not plain or score.out_features != 1:
        labels = getattr(classifier.config, "num_labels", None)
        raise UserError(
            f"RewardTrainer: {type(classifier).__name__} has num_labels = {labels} and a head of another kind than one"
            " vector `score`.  Load it with num_labels=1, over a decoder such as Llama, Qwen, Gemma or GPT-2."
        )
    head = ScoreHead(score.in_features, seed=0)
    head.weight = score.weight
    return head


def causal_view(classifier: PreTrainedModel) -> PreTrainedModel:
    """The body of a classifier under an output layer that is its embedding: a language model of the same weights."""
    with torch.device("meta"):
        made: Any = AutoModelForCausalLM.from_config(classifier.config)
    setattr(made, made.base_model_prefix, classifier.base_model)
    output = made.get_output_embeddings()
    output.weight, output.bias = classifier.get_input_embeddings().weight, None
    made.name_or_path = classifier.name_or_path
    if hasattr(classifier, "peft_config"):
        made.peft_config = classifier.peft_config
    made.generation_config = None  # of a model that never writes
    return made  # type: ignore[no-any-return]


def classifier_view(scorer: TextScorer) -> PreTrainedModel:
    """Body and head as a classifier of transformers, over the weights that are trained."""
    made: Any = empty_classifier(scorer.policy.model)
    setattr(made, made.base_model_prefix, scorer.policy.model.base_model)
    made.score.weight = scorer.head.weight
    made.config.pad_token_id = scorer.policy.tokenizer.pad_token_id
    return made  # type: ignore[no-any-return]
