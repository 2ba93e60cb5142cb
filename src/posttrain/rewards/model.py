"""Reward models: sequence classifiers that learned from people's preferences, as reward functions.

**What it reads.**  Prompt and completion as the model's own tokenizer and chat template have them
(posttrain.models.classifiers.saved_classifier).

**What earns what.**  The model's number for the label, a logit as it stands, at the last token of the text
(posttrain.models.classifiers.last_token_scores).  Nothing is trained, and nothing of the policy is in it.

**Known hacks.**  All that the model takes for good and is not: length, lists, flattery, whatever its data had.  Judge
held-out completions by something else, and read them.  Tokens that would end the assistant's turn are read as text.
"""

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.binding import bind
from posttrain.errors import UserError
from posttrain.models.classifiers.classifier_folder import classifier_files, loaded_classifier, reward_option
from posttrain.models.classifiers.last_token_scores import ScoreReading, classifier_scores
from posttrain.models.classifiers.saved_classifier import ClassifierText, TextReading
from posttrain.models.context import num_embeddings, own_context, require_embeddings
from posttrain.models.loading.folder_kinds import model_digest
from posttrain.options.reward_model import RewardModelOptions, folder_name
from posttrain.rewards.grading.answers import Graded

SOME_WEIGHTS = 64
"""Of each parameter, to tell two model objects of one shape from each other."""
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
    """Of the folder, or of some weights of an object: it tells another model from this one."""

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **options: Any,
    ) -> None:
        """Load the folder, or take the object, which is put into eval mode.  Raises UserError for what cannot score."""
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
        """Refuse a text of more tokens than the model reads."""
        if tokens > self.limit:
            raise UserError(
                f"prompt and completion have {tokens} tokens, and the reward model reads {self.limit}.  Shorten them"
                " (rollout.max_completion_tokens, task.max_prompt_tokens), or say over_long: cut_left of the reward to"
                " have it read their end."
            )

    @property
    def memory_bytes(self) -> int:
        """Bytes of its weights."""
        return sum(each.numel() * each.element_size() for each in self.model.parameters())

    def require_apart(self, policy: PreTrainedModel) -> None:
        """Refuse weights that are the policy's too: training would change what it is judged by."""
        trained = {each.data_ptr() for each in policy.parameters()} - {0}
        shared = [name for name, each in self.model.named_parameters() if each.data_ptr() in trained]
        if shared:
            raise UserError(
                f"{self.where}: shares weights with the policy ({shared[0]}{' ...' if len(shared) > 1 else ''}), so"
                " that training would change what it is judged by.  Give it a copy: copy.deepcopy(model)."
            )


def label_names(model: PreTrainedModel) -> list[str]:
    """What the model's numbers are called, in their order."""
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
    """Refuse options of how a folder is loaded where there is an object already."""
    for name in OF_FOLDERS:
        if name in options:
            raise UserError(
                f"{where}: {name} = {options[name]} is for a folder; an object is scored with where and as it is."
                "  Change the object, or give the folder's path."
            )


def some_weights(model: PreTrainedModel) -> str:
    """The SHA-256 of the first numbers of every parameter."""
    some = [each.detach().flatten()[:SOME_WEIGHTS].double().tolist() for each in model.parameters()]
    return hashlib.sha256(repr(some).encode()).hexdigest()
