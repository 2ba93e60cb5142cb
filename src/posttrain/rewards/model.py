"""Reward models, one or several: sequence classifiers that learned from people's preferences, as reward functions.

**What it reads.**  Prompt and completion as the model's own tokenizer and chat template have them
(posttrain.models.classifiers.saved_classifier).

**What earns what.**  The model's number for the label, a logit, at the last token of the text
(posttrain.models.classifiers.last_token_scores).  Nothing is trained, and nothing of the policy is in it.

**Known hacks.**  All that the model takes for good and is not: length, lists, flattery, whatever its data had.  Judge
held-out completions by something else, and read them.  Tokens that would end the assistant's turn are read as text.
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
from posttrain.models.classifiers.classifier_folder import classifier_files, loaded_classifier, reward_option
from posttrain.models.classifiers.last_token_scores import ScoreReading, classifier_scores
from posttrain.models.classifiers.saved_classifier import ClassifierText, TextReading
from posttrain.models.context import num_embeddings, own_context, require_embeddings
from posttrain.models.loading.folder_kinds import model_digest
from posttrain.options.reward import RewardOptions
from posttrain.options.reward_model import RewardModelOptions, folder_name
from posttrain.rewards.grading.answers import Graded

SOME_WEIGHTS = 64
"""Of each parameter, to distinguish two model objects of one shape."""
NO_LIMIT = 1_000_000
"""Tokenizers that know no longest text say a number beyond this."""
OF_FOLDERS = ("dtype", "device", "quantization", "untrained_head", "trust_remote_code")
"""Options that decide how a folder is loaded, and say nothing of an object."""


class ReadText(StrEnum):
    """How much of a text the reward model read."""

    WHOLE = "whole"
    CUT = "cut"
    """Its beginning was left out, for its length."""


@dataclass(init=False, eq=False)
class RewardModel:
    """Reward function: the score of a sequence classifier for prompt and completion.

        RewardModel("my-reward-model", label="helpful")      a folder, or org/name of the hub
        RewardModel(model, tokenizer=tokenizer)              an object of transformers, where and as it is

    Other options are those of posttrain.options.reward_model, by name.
    """

    options: RewardModelOptions
    digest: str
    """Of the folder, or of some weights of an object: it distinguishes this model from others."""

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **options: Any,
    ) -> None:
        """Load the folder, or take the object, which is put into eval mode."""
        found = model if isinstance(model, PreTrainedModel) else None
        path = (found.name_or_path or type(found).__name__) if found is not None else str(model)
        self.options = bind(RewardModelOptions, {"model": path, **options}, where=f"reward model {path}")
        self.where = reward_option(self.options)
        if found is not None:
            self.model, self.digest, own = found.eval(), some_weights(found), None
            require_no_loading(options, self.where)
        else:
            folder = classifier_files(self.options)
            self.digest = model_digest(folder)
            self.model, own = loaded_classifier(folder, self.options)
        if tokenizer is None and own is None:
            raise UserError(f"{self.where}: an object of transformers needs its tokenizer too; give tokenizer=...")
        known = tokenizer or own
        assert known is not None
        self.__name__ = folder_name(path)
        self.label = label_index(self.model, self.options)
        reading = TextReading.of_config(self.model.config)
        self.text = ClassifierText(known, self.where, template_file=self.options.chat_template, reading=reading)
        self.limit = token_limit(self.model, known, self.options)
        written = {each for text, each in known.get_vocab().items() if text not in self.text.special}
        require_embeddings([*written], num_embeddings(self.model), known, self.where)
        self.scores = classifier_scores(self.model, pad_id=known.pad_token_id, where=self.where)
        if self.scores.reading is ScoreReading.ONE_BY_ONE:
            warnings.warn(
                f"{self.where}: {type(self.model).__name__} scores a row in a batch otherwise than alone, so its rows"
                " go one by one, which is slow.",
                stacklevel=2,
            )

    def __call__(
        self, /, *, prompts: Sequence[object], completions: Sequence[object], **_columns: object
    ) -> list[float] | list[Graded]:
        """A score for each completion.  Raises UserError for one that is too long, unless such are cut."""
        read = [self.text.tokens(*texts) for texts in zip(prompts, completions, strict=True)]
        for tokens in read:
            require_embeddings(tokens, num_embeddings(self.model), self.text.tokenizer, self.where)
        cut = [len(tokens) > self.limit for tokens in read]
        if self.options.over_long == "error":
            self.require_room(max(map(len, read), default=0))
        rows = [tokens[-self.limit :] for tokens in read]
        self.model.eval()
        numbers = self.scores.of_rows(rows, tokens_per_batch=self.options.tokens_per_batch)  # [row label]
        scores = [float(score) for score in numbers[:, self.label]]
        if self.options.over_long == "error":
            return scores
        outcomes = [ReadText.CUT if each else ReadText.WHOLE for each in cut]
        return [Graded(score, outcome) for score, outcome in zip(scores, outcomes, strict=True)]

    def require_room(self, tokens: int) -> None:
        if tokens > self.limit:
            raise UserError(
                f"prompt and completion have {tokens} tokens, and the reward model reads {self.limit}.  Shorten them"
                " (rollout.max_completion_tokens, task.max_prompt_tokens), or say over_long: cut_left of the reward to"
                " have it read their end."
            )

    @property
    def memory_bytes(self) -> int:
        return sum(each.numel() * each.element_size() for each in self.model.parameters())

    def require_apart(self, policy: PreTrainedModel) -> None:
        """Refuse weights shared with the policy: training would change the judge."""
        trained = {each.data_ptr() for each in policy.parameters()} - {0}
        shared = [name for name, each in self.model.named_parameters() if each.data_ptr() in trained]
        if shared:
            raise UserError(
                f"{self.where}: shares weights with the policy ({shared[0]}{' ...' if len(shared) > 1 else ''}), so"
                " that training would change what it is judged by.  Give it a copy: copy.deepcopy(model)."
            )


def label_names(model: PreTrainedModel) -> list[str]:
    return [str(name) for _, name in sorted(cast(Mapping[int, object], model.config.id2label).items())]


def label_index(model: PreTrainedModel, options: RewardModelOptions) -> int:
    """The place of the number that is the score.  Raises UserError where that is not said, or there is none such."""
    names = label_names(model)
    listed = ", ".join(f"{index} ({name})" for index, name in enumerate(names))
    chosen = options.label
    if chosen is None:
        if len(names) > 1:
            raise UserError(
                f"{reward_option(options)}: the model gives {len(names)} numbers, {listed}.  Say which one is"
                f" the score: label: {names[-1]}."
            )
        return 0
    if isinstance(chosen, str) and names.count(chosen) == 1:
        return names.index(chosen)
    if isinstance(chosen, int) and chosen < len(names):
        return chosen
    raise UserError(f"{reward_option(options)}: label = {chosen}: there is none such.  Its labels are {listed}.")


def token_limit(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: RewardModelOptions) -> int:
    """The most tokens that the model reads."""
    own = [own_context(model.config), positions_behind_padding(model), tokenizer.model_max_length]
    most = min((each for each in own if each is not None and 0 < each < NO_LIMIT), default=NO_LIMIT)
    asked = options.max_tokens or most
    if asked > most:
        raise UserError(f"{reward_option(options)}: max_tokens = {asked}: it was made for {most}.  Use at most {most}.")
    return asked


def positions_behind_padding(model: PreTrainedModel) -> int | None:
    """Positions of a family that counts them from behind the one of padding, as RoBERTa does; None of all others."""
    tables = [each for name, each in model.named_modules() if name.endswith("position_embeddings")]
    found = [each for each in tables if isinstance(each, nn.Embedding) and each.padding_idx is not None]
    return min((each.num_embeddings - int(each.padding_idx or 0) - 1 for each in found), default=None)


def require_no_loading(options: Mapping[str, object], where: str) -> None:
    """Refuse options that only apply to a folder."""
    for name in OF_FOLDERS:
        if name in options:
            raise UserError(
                f"{where}: {name} = {options[name]} is for a folder; an object is scored with where and as it is."
                "  Change the object, or give the folder's path."
            )


def some_weights(model: PreTrainedModel) -> str:
    some = [each.detach().flatten()[:SOME_WEIGHTS].double().tolist() for each in model.parameters()]
    return hashlib.sha256(repr(some).encode()).hexdigest()


Combine = Literal["mean", "least", "mean_minus_deviation"]


def combined_scores(
    scores: Float64[Tensor, "model text"], combine: Combine, deviation_weight: float = 1.0
) -> Float64[Tensor, " text"]:
    """One score for each text; of equal scores it is that score, whatever the rule."""
    if combine == "least":
        return scores.amin(dim=0)
    mean = scores.mean(dim=0)
    if combine == "mean":
        return mean
    return mean - deviation_weight * deviations(scores)


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

    A policy that is trained against a reward model finds what that model overrates.  Models trained on the same pairs
    from other seeds overrate other things, and disagree there.  The models must have learned the same pairs, centred
    (`reward_model.center_coefficient` above 0): scores of different kinds have no common unit, and one may always be
    least.  Known hack: what all of them overrate, which is more the more alike they are (Eisenstein et al. 2023,
    arXiv:2312.09244).  Models that share their base share its mistakes.

    It logs `deviation`, by which the models disagree: the mean as a metric, and each completion's with its score.
    """

    models: Sequence[RewardModel]
    combine: Combine = "mean"
    deviation_weight: float = 1.0

    def __post_init__(self) -> None:
        if len(self.models) < 2:
            raise UserError(f"reward models: an ensemble of {len(self.models)}; give two or more, or a RewardModel.")
        self.__name__ = "ensemble"

    def __call__(
        self,
        /,
        *,
        prompts: Sequence[object],
        completions: Sequence[object],
        log_metric: Callable[[str, float], None] | None = None,
        log_extra: Callable[[str, list[float]], None] | None = None,
        **_columns: object,
    ) -> list[float] | list[Graded]:
        """A score for each completion, and the outcome `cut` where a model has read only the end of one."""
        said = [model(prompts=prompts, completions=completions) for model in self.models]
        scores = torch.tensor([[score_of(each) for each in of_model] for of_model in said], dtype=torch.float64)
        spread = deviations(scores)
        if log_metric is not None and len(completions):
            log_metric("deviation", spread.mean().item())
        if log_extra is not None:
            log_extra("deviation", spread.tolist())
        combined = combined_scores(scores, self.combine, self.deviation_weight).tolist()
        if not any(isinstance(each, Graded) for of_model in said for each in of_model):
            return combined
        cut = [any(is_cut(of_model[place]) for of_model in said) for place in range(len(combined))]
        outcomes = [ReadText.CUT if each else ReadText.WHOLE for each in cut]
        return [Graded(score, outcome) for score, outcome in zip(combined, outcomes, strict=True)]


def score_of(said: float | Graded) -> float:
    """The number in a reward model's score."""
    score = said.score if isinstance(said, Graded) else said
    assert score is not None
    return score


def is_cut(said: float | Graded) -> bool:
    return isinstance(said, Graded) and said.outcome is ReadText.CUT


def reward_model_of(options: RewardOptions) -> RewardModel | RewardModelEnsemble:
    """The reward model of an item of a recipe's `rewards`, or several as one."""
    models = [RewardModel(model, **options.model_options) for model in (options.model, *options.ensemble)]
    if len(models) == 1:
        return models[0]
    return RewardModelEnsemble(models, combine=options.combine, deviation_weight=options.deviation_weight)


def reward_models_in(call: object) -> tuple[RewardModel, ...]:
    """The reward models of a reward function, if any."""
    if isinstance(call, RewardModelEnsemble):
        return tuple(call.models)
    return (call,) if isinstance(call, RewardModel) else ()
