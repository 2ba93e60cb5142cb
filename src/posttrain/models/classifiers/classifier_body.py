"""A reward model's body as a language model beside the policy: what a critic that starts from one reads.

The value of a text that ends is what its reward model says of it, so a critic may begin as that model (Ouyang et al.
2022, arXiv:2203.02155, start their value function from the reward model).
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from posttrain.errors import UserError
from posttrain.models.adapters.quantized import is_4_bit, stays_quantised
from posttrain.models.classifiers.classifier_folder import classifier_files, loaded_classifier
from posttrain.models.classifiers.last_token_scores import head_of
from posttrain.models.classifiers.saved_classifier import READING
from posttrain.models.loading.construction import ONE_AT_A_TIME
from posttrain.models.policy import Policy, as_policy
from posttrain.options.reward_model import RewardModelOptions


@dataclass(frozen=True, slots=True)
class ScoredBody:
    """A model without the head that scores texts, and that head: r = w · h at a text's last token."""

    body: Policy
    """A causal language model whose output layer is its embedding, if it can be: nothing is to be sampled of it."""
    score: Float[Tensor, " hidden"] | None
    """w; None of a model that scores nothing."""


def scored_body(policy: Policy, path: str, *, option: str) -> ScoredBody:
    """The reward model of a folder, trainable, with the policy's tokenizer, on its device.

    Raises UserError, of `option`, where it is none of one number over a decoder, or where it reads other tokens.
    """
    where = f"{option} = {path}"
    on_cuda = policy.device.type == "cuda"
    options = RewardModelOptions(model=path, dtype="float32", device="cuda" if on_cuda else "cpu")
    try:
        classifier, tokenizer = loaded_classifier(classifier_files(options), options)
    except UserError as error:  # which speaks of the section `rewards`
        raise UserError(str(error).replace("rewards: model = ", f"{option} = ")) from error
    head = head_of(classifier)
    if head is None or head.out_features != 1:
        has = "another head" if head is None else f"{head.out_features} of them"
        raise UserError(
            f"{where}: a critic starts from a reward model of one number, read from a decoder's last token, and"
            f" {type(classifier).__name__} here has {has}."
        )
    if stays_quantised(classifier) or any(is_4_bit(layer) for layer in classifier.modules()):
        raise UserError(
            f"{where}: its weights are stored quantised, which cannot be trained.  Give the folder of the model that it"
            " was quantised from."
        )
    require_tokens_read(policy, tokenizer.get_vocab(), str(tokenizer.pad_token), where)
    model = with_output_layer(classifier)
    model.requires_grad_(True)
    narrow = policy.compute_dtype == torch.bfloat16
    body = as_policy(model, policy.tokenizer, dtype="bfloat16" if narrow else "float32", context=policy.context)
    return ScoredBody(body, head.weight.detach()[0].clone())


def require_tokens_read(policy: Policy, theirs: Mapping[str, int], pad: str, where: str) -> None:
    """Refuse a reward model that reads one of the policy's tokens as another; it may pad with one of its own."""
    mine = policy.tokenizer.get_vocab()
    differing = sorted(text for text in mine.keys() | (theirs.keys() - {pad}) if mine.get(text) != theirs.get(text))
    if differing:
        raise UserError(
            f"{where}: its vocabulary is not the policy's: {len(differing)} tokens differ, such as {differing[0]!r}."
            "  A critic reads what the policy wrote, so give a reward model over the policy's tokenizer."
        )


def with_output_layer(classifier: PreTrainedModel) -> PreTrainedModel:
    """A causal language model around a classifier's body, which has no output layer: its embedding, or else zeros."""
    config: Any = copy.deepcopy(classifier.config)
    config.tie_word_embeddings = True
    if hasattr(config, READING):
        delattr(config, READING)
    with ONE_AT_A_TIME, torch.device("meta"):
        made: Any = AutoModelForCausalLM.from_config(config)
    body = cast(PreTrainedModel, classifier.base_model)
    setattr(made, made.base_model_prefix, body)
    made.tie_weights()
    output = made.get_output_embeddings()
    for name, parameter in list(output.named_parameters()):
        if parameter.is_meta:
            zeros = torch.zeros(parameter.shape, dtype=body.dtype, device=body.device)
            setattr(output, name, nn.Parameter(zeros))
    made.name_or_path = classifier.name_or_path
    return made.eval()  # type: ignore[no-any-return]
