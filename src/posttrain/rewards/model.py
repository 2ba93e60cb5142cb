"""Reward models, one or several: sequence classifiers that learned from people's preferences, as reward functions.

One reads prompt and completion, written with its tokenizer and chat template, and pays the label's logit at the last
token of the text.  It is not trained and shares nothing with the policy.

**Known hacks.**  Whatever the model overrates: length, lists, flattery, quirks of its data.  Judge held-out completions
by something else, and read them.  Tokens that would end the assistant's turn are read as text.
"""

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, cast

import torch
from jaxtyping import Float64
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.binding import bind
from posttrain.errors import UserError
from posttrain.models.classifiers.last_token_scores import (
    ScoreReading,
    classifier_files,
    classifier_scores,
    loaded_classifier,
    reward_option,
)
from posttrain.models.classifiers.saved_classifier import ClassifierText, TextReading
from posttrain.models.context import num_embeddings, own_context, require_embeddings
from posttrain.models.loading.folder_kinds import model_digest
from posttrain.options.reward import RewardModelOptions, RewardOptions, folder_name
from posttrain.rewards.grading.answers import Column, Graded

SOME_WEIGHTS = 64
"""Numbers of each parameter that distinguish two model objects of one shape."""
NO_LIMIT = 1_000_000
"""Tokenizers without a length limit give a number above this."""
OF_FOLDERS = ("dtype", "device", "quantization", "untrained_head", "trust_remote_code")
"""Options that decide how a folder is loaded, and do not apply to a model object."""


class ReadText(StrEnum):
    """How much of a text the reward model read."""

    WHOLE = "whole"
    CUT = "cut"
    """It was too long, and its beginning was left out."""


@dataclass(init=False, eq=False)
class RewardModel:
    """Reward function: the score of a sequence classifier for prompt and completion.

        RewardModel("my-reward-model", label="helpful")      a folder, or org/name of the hub
        RewardModel(model, tokenizer=tokenizer)              a transformers model, unchanged

    Other options are those of posttrain.options.reward, by name.
    """

    options: RewardModelOptions
    digest: str
    """A digest of the folder, or of some weights of an object: identifies this model."""

    def __init__(
        self, model: str | Path | PreTrainedModel, *, tokenizer: PreTrainedTokenizerBase | None = None, **options: Any
    ) -> None:
        """Load the folder, or put the object into eval mode."""
        found = model if isinstance(model, PreTrainedModel) else None
        path = (found.name_or_path or type(found).__name__) if found is not None else str(model)
        self.options = bind(RewardModelOptions, {"model": path, **options}, where=f"reward model {path}")
        self.where = reward_option(self.options)
        if found is not None:
            self.model, self.digest, known = found.eval(), some_weights(found), tokenizer
            for name in OF_FOLDERS:
                if name in options:
                    remedy = "Change the object, or give the folder's path."
                    raise UserError(f"{self.where}: {name} = {options[name]} only applies to a folder. {remedy}")
        else:
            folder = classifier_files(self.options)
            self.digest = model_digest(folder)
            self.model, saved = loaded_classifier(folder, self.options)
            known = tokenizer or saved
        if known is None:
            raise UserError(f"{self.where}: a model object needs its tokenizer: give tokenizer=...")
        self.__name__ = folder_name(path)
        self.label = label_index(self.model, self.options)
        reading = TextReading.of_config(self.model.config)
        self.text = ClassifierText(known, self.where, template_file=self.options.chat_template, reading=reading)
        self.limit = token_limit(self.model, known, self.options)
        written = {each for text, each in known.get_vocab().items() if text not in self.text.special}
        require_embeddings([*written], num_embeddings(self.model), known, self.where)
        self.scores = classifier_scores(self.model, pad_id=known.pad_token_id, where=self.where)
        if self.scores.reading is ScoreReading.ONE_BY_ONE:
            problem = f"{type(self.model).__name__} scores a row differently in a batch than by itself"
            warnings.warn(f"{self.where}: {problem}, so rows are scored one by one, which is slow.", stacklevel=2)

    def __call__(self, /, *, prompts: Column, completions: Column, **_columns: object) -> list[float] | list[Graded]:
        scores, cut = self.read(prompts, completions)
        return scores if self.options.over_long == "error" else graded_readings(scores, cut)

    def read(self, prompts: Column, completions: Column) -> tuple[list[float], list[bool]]:
        """A score for each completion, and whether it was cut.  Raises UserError for one that is too long."""
        rows = [self.text.tokens(*texts) for texts in zip(prompts, completions, strict=True)]
        for tokens in rows:
            require_embeddings(tokens, num_embeddings(self.model), self.text.tokenizer, self.where)
        cut = [len(tokens) > self.limit for tokens in rows]
        if self.options.over_long == "error" and any(cut):
            longest = f"prompt and completion have {max(map(len, rows))} tokens, the reward model reads {self.limit}"
            shorter = "Shorten them (rollout.max_completion_tokens, task.max_prompt_tokens)"
            raise UserError(f"{longest}. {shorter}, or set the reward's over_long: cut_left to read their end.")
        rows = [tokens[-self.limit :] for tokens in rows]
        self.model.eval()
        numbers = self.scores.of_rows(rows, tokens_per_batch=self.options.tokens_per_batch)  # [row label]
        return [float(score) for score in numbers[:, self.label]], cut

    @property
    def memory_bytes(self) -> int:
        return sum(each.numel() * each.element_size() for each in self.model.parameters())

    def require_apart(self, policy: PreTrainedModel) -> None:
        trained = {each.data_ptr() for each in policy.parameters()} - {0}
        shared = [name for name, each in self.model.named_parameters() if each.data_ptr() in trained]
        if shared:
            names = f"{shared[0]}{' ...' if len(shared) > 1 else ''}"
            problem = f"shares weights with the policy ({names}), so training would change the judge"
            raise UserError(f"{self.where}: {problem}. Give it a copy: copy.deepcopy(model).")


def graded_readings(scores: Sequence[float], cut: Sequence[bool]) -> list[Graded]:
    return [Graded(score, ReadText.CUT if over else ReadText.WHOLE) for score, over in zip(scores, cut, strict=True)]


def label_names(model: PreTrainedModel) -> list[str]:
    return [str(name) for _, name in sorted(cast(Mapping[int, object], model.config.id2label).items())]


def label_index(model: PreTrainedModel, options: RewardModelOptions) -> int:
    """The place of the label's number.  Raises UserError if the label is missing or unknown."""
    where = reward_option(options)
    names = label_names(model)
    listed = ", ".join(f"{index} ({name})" for index, name in enumerate(names))
    match options.label:
        case None if len(names) == 1:
            return 0
        case str(chosen) if names.count(chosen) == 1:
            return names.index(chosen)
        case int(chosen) if chosen < len(names):
            return chosen
        case None:
            many = f"the model gives {len(names)} numbers, {listed}"
            raise UserError(f"{where}: {many}. Name the one that is the score: label: {names[-1]}.")
    raise UserError(f"{where}: label = {options.label}: no such label. Its labels are {listed}.")


def token_limit(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: RewardModelOptions) -> int:
    """Tokens that the model reads; RoBERTa's family counts positions from after the padding position."""
    tables = [each for name, each in model.named_modules() if name.endswith("position_embeddings")]
    padded = [each for each in tables if isinstance(each, nn.Embedding) and each.padding_idx is not None]
    limits = [own_context(model.config), tokenizer.model_max_length]
    limits += [each.num_embeddings - int(each.padding_idx or 0) - 1 for each in padded]
    most = min((each for each in limits if each is not None and 0 < each < NO_LIMIT), default=NO_LIMIT)
    if options.max_tokens and options.max_tokens > most:
        raise UserError(f"{reward_option(options)}: max_tokens = {options.max_tokens}: must be at most {most}.")
    return options.max_tokens or most


def some_weights(model: PreTrainedModel) -> str:
    some = [each.detach().flatten()[:SOME_WEIGHTS].double().tolist() for each in model.parameters()]
    return hashlib.sha256(repr(some).encode()).hexdigest()


Combine = Literal["mean", "least", "mean_minus_deviation"]


def combined_scores(
    scores: Float64[Tensor, "model text"], combine: Combine, deviation_weight: float = 1.0
) -> Float64[Tensor, " text"]:
    """One score for each text; if all models agree, it is their score under every rule."""
    if combine == "least":
        return scores.amin(dim=0)
    mean = scores.mean(dim=0)
    return mean if combine == "mean" else mean - deviation_weight * deviations(scores)


def deviations(scores: Float64[Tensor, "model text"]) -> Float64[Tensor, " text"]:
    return scores.std(dim=0, correction=0)


@dataclass(eq=False)
class RewardModelEnsemble:
    """Reward function: the scores r_1 … r_n of several reward models for a text, as one.

        RewardModelEnsemble([RewardModel("rm-0"), RewardModel("rm-1")], combine="least")

        mean                   r̄ = Σ r_i / n
        least                  min r_i                        the "worst case" of Coste et al. 2023, arXiv:2310.02743
        mean_minus_deviation   r̄ - k·√(Σ (r_i - r̄)² / n)     their uncertainty weighting, with the deviation in place
                                                              of the variance: it has the scores' unit

    A policy trained against a reward model finds what that model overrates.  Models trained on the same pairs with
    other seeds overrate other things, and disagree there.  The models must have learned the same pairs, centred
    (`reward_model.center_coefficient` above 0): otherwise scores have no common unit, and one may always be least.
    Known hack: what all of them overrate, which is more the more alike they are (Eisenstein et al. 2023,
    arXiv:2312.09244).  Models with the same base share its mistakes.

    It logs `deviation`, how much the models disagree: the mean as a metric, and each completion's with its score.
    """

    models: Sequence[RewardModel]
    combine: Combine = "mean"
    deviation_weight: float = 1.0

    def __post_init__(self) -> None:
        if len(self.models) < 2:
            raise UserError(f"reward models: an ensemble of {len(self.models)}. Give two or more, or a RewardModel.")
        self.__name__ = "ensemble"

    def __call__(
        self,
        /,
        *,
        prompts: Column,
        completions: Column,
        log_metric: Callable[[str, float], None] | None = None,
        log_extra: Callable[[str, list[float]], None] | None = None,
        **_columns: object,
    ) -> list[float] | list[Graded]:
        """A score for each completion, with the outcome `cut` if a model has read only the end of it."""
        read = [model.read(prompts, completions) for model in self.models]
        scores = torch.tensor([of_model for of_model, _ in read], dtype=torch.float64)
        spread = deviations(scores)
        if log_metric is not None and len(completions):
            log_metric("deviation", spread.mean().item())
        if log_extra is not None:
            log_extra("deviation", spread.tolist())
        combined = combined_scores(scores, self.combine, self.deviation_weight).tolist()
        if all(model.options.over_long == "error" for model in self.models):
            return combined
        return graded_readings(combined, [any(each) for each in zip(*(cut for _, cut in read), strict=True)])


def reward_model_of(options: RewardOptions) -> RewardModel | RewardModelEnsemble:
    first, *others = [RewardModel(model, **options.model_options) for model in (options.model, *options.ensemble)]
    combine, weight = options.combine, options.deviation_weight
    return RewardModelEnsemble([first, *others], combine, weight) if others else first


def reward_models_in(call: object) -> tuple[RewardModel, ...]:
    if isinstance(call, RewardModelEnsemble):
        return tuple(call.models)
    return (call,) if isinstance(call, RewardModel) else ()
