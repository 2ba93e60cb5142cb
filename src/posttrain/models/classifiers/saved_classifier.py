"""A reward model as a folder that transformers reads as a sequence classifier, and that `rewards` take by its path.

transformers' classifiers over decoders read a row's score at its last token that is not the pad token.  So the folder
pads with a token that ends no text: the tokenizer's, or its opening one, or a new one with a new row in the embedding.
`config.json` also says how texts are read, so that a score in use is the trained one:

    "reading": {"stop_token_ids": [0], "template_options": {}}

A conversation goes through the reward model's own chat template, with the completion as the last assistant message; a
plain prompt and its completion are tokenised as one text.  A reward model trained here reads both exactly as in
training, with closing tokens.  A policy's text is not trusted: a space breaks special tokens in it.
"""

import copy
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers.processors import Sequence as Processors, TemplateProcessing
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from posttrain.errors import UserError
from posttrain.models.adapters.adaptable import stays_quantised
from posttrain.models.adapters.in_force import merged_weights
from posttrain.models.classifiers.heads import TextScorer
from posttrain.models.conversation_masks import Dialogue, Masking
from posttrain.models.loading.adapter_folder import with_chat_template
from posttrain.models.loading.construction import ONE_AT_A_TIME, without_progress_bars
from posttrain.models.loading.saving import in_dtype, readable_as, write_card
from posttrain.models.policy import Policy
from posttrain.models.rendering import TokenizerRenderer, token_ids

HEAD = "score.weight"
LABEL = "reward"
READING = "reading"
"""The key of config.json that says how texts are read."""
OTHER_FAMILY = "Use a model of another family, such as Llama, Qwen, Gemma or GPT-2."


@dataclass(frozen=True, slots=True, kw_only=True)
class TextReading:
    """How a reward model trained here reads prompts and completions."""

    stop_token_ids: tuple[int, ...]
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template in training."""
    plain: bool = False
    """Whether it was trained on plain texts only: then the saved tokenizer ends every text with the stop token."""

    @classmethod
    def of_config(cls, config: Any) -> "TextReading | None":
        """The reading of a folder's config; None for a model that was not trained here."""
        said = getattr(config, READING, None)
        if not isinstance(said, Mapping) or not isinstance(said.get("stop_token_ids"), list):
            return None
        return cls(
            stop_token_ids=tuple(said["stop_token_ids"]),
            template_options=dict(said.get("template_options", {})),
            plain=said.get("plain") is True,
        )

    def as_json(self) -> dict[str, object]:
        plain = {"plain": True} if self.plain else {}
        return {"stop_token_ids": [*self.stop_token_ids], "template_options": dict(self.template_options), **plain}


def require_classifier(policy: Policy) -> None:
    """Raise UserError, before anything is trained, if no classifier could be saved."""
    empty_classifier(policy.model)
    if stays_quantised(policy.model):
        raise UserError("model: its weights are stored quantised.  Give the model that it was quantised from.")


def save_classifier(scorer: TextScorer, folder: Path, reading: TextReading, card: str = "") -> PreTrainedModel:
    """Write body (an adapter added in float32), head and tokenizer in their stored type; return the classifier."""
    policy, model = scorer.policy, scorer.policy.model
    weights, made = merged_weights(model, policy.stored_dtype), empty_classifier(model)
    body = {name: weights[name] for name in made.state_dict() if name != HEAD}
    tokenizer = copy.deepcopy(policy.tokenizer)
    ends = {*policy.stop_ids, tokenizer.eos_token_id}
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id in ends:  # which ends no text
        if tokenizer.bos_token_id is not None and tokenizer.bos_token_id not in ends:
            tokenizer.pad_token = tokenizer.bos_token
        else:
            tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    pad = int(tokenizer.pad_token_id)
    stop = tokenizer.eos_token_id if tokenizer.eos_token_id in reading.stop_token_ids else reading.stop_token_ids[0]
    appends = reading.plain and append_to_texts(tokenizer, stop)
    body = with_row(body, made, pad)
    tensors = in_dtype(body | {HEAD: scorer.head.weight.detach()}, policy.stored_dtype or model.dtype)
    config: Any = made.config
    config.pad_token_id, config.vocab_size = pad, max(config.vocab_size, pad + 1)
    config.dtype = policy.stored_dtype or model.dtype
    setattr(config, READING, reading.as_json())
    made.load_state_dict(tensors, assign=True)
    with without_progress_bars():
        made.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    write_card(folder, card + scoring_section(str(tokenizer.convert_ids_to_tokens(stop)), appends=appends))
    readable_as(folder / "config.json", folder)
    return made


def append_to_texts(tokenizer: PreTrainedTokenizerBase, stop: int) -> bool:
    """Have a tokenizer append this token to every text with special tokens; returns whether it can."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return False
    own, token = backend.post_processor, str(tokenizer.convert_ids_to_tokens(stop))
    end = TemplateProcessing(single=f"$A {token}", pair=f"$A $B {token}", special_tokens=[(token, stop)])
    backend.post_processor = end if own is None else Processors([own, end])
    return token_ids(tokenizer, "a", special=True)[-1:] == [stop]


def scoring_section(token: str, *, appends: bool) -> str:
    """The card's section on how other programs have to end a text."""
    own = (
        "The folder's tokenizer appends it, unless it is called with `add_special_tokens=False` (as TRL does)"
        if appends
        else "The folder's tokenizer does not append it"
    )
    return f"""
## Scoring texts

Plain text is scored at the stop token `{token}` after prompt and answer.  Without it the score differs.
{own}: then append it, `prompt + answer + "{token}"`.  A conversation only needs its chat template, applied by the
tokenizer's `apply_chat_template` with `tokenize=False`.
"""


def empty_classifier(model: PreTrainedModel) -> PreTrainedModel:
    """transformers' classifier with one label over a model's body and a linear head, without memory for weights."""
    config: Any = copy.deepcopy(model.config)
    vars(config).pop("quantization_config", None)  # the weights are whole again when they are saved
    config.num_labels, config.id2label, config.label2id = 1, {0: LABEL}, {LABEL: 0}
    kind = config.model_type
    try:
        with ONE_AT_A_TIME, torch.device("meta"):
            made = AutoModelForSequenceClassification.from_config(config)
    except ValueError as error:
        fault = f"transformers has no sequence classifier over a {kind}"
        raise UserError(f"model.path: {fault}.  {OTHER_FAMILY}") from error
    names = set(made.state_dict())
    plain = {name.replace(".base_layer.", ".") for name in model.state_dict()}  # without an adapter
    lacking = sorted(names - plain - {HEAD})
    if lacking or HEAD not in names or type(made.get_submodule("score")) is not nn.Linear:
        what = f"also needs {', '.join(lacking[:3])}" if lacking else "has no head named score"
        raise UserError(f"model.path: the sequence classifier of transformers over a {kind} {what}.  {OTHER_FAMILY}")
    return made  # type: ignore[no-any-return]


def with_row(body: Mapping[str, Tensor], made: PreTrainedModel, pad: int) -> dict[str, Tensor]:
    """The weights with a row for the pad token in the embedding; new rows are zeros."""
    embedding = made.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    grown = dict(body)
    more = pad + 1 - embedding.num_embeddings
    if more > 0:
        name = next(name for name, module in made.named_modules() if module is embedding) + ".weight"
        grown[name] = torch.cat([body[name], body[name].new_zeros(more, body[name].shape[1])])
        with torch.device("meta"):
            made.set_input_embeddings(nn.Embedding(pad + 1, embedding.embedding_dim))
    return grown


class ClassifierText:
    """Reads prompts and completions for the reward model of a tokenizer."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        where: str,
        *,
        template_file: str = "",
        reading: TextReading | None = None,
    ) -> None:
        """`where` begins messages; `template_file` replaces the tokenizer's template; `reading` is for our models."""
        self.where = where
        if template_file:
            tokenizer = with_chat_template(deepcopy(tokenizer), template_file, "rewards: chat_template")
        self.tokenizer = tokenizer
        options = {} if reading is None else reading.template_options
        self.renderer = TokenizerRenderer(tokenizer, template_options=options)
        self.masking = None if reading is None else Masking(renderer=self.renderer, stop_ids=reading.stop_token_ids)
        """How it reads; None for a model that was not trained here."""
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self.special = tuple(sorted({*special, *tokenizer.all_special_tokens}, key=len, reverse=True))
        """Texts that the tokenizer reads as special tokens, the longest first."""

    def tokens(self, prompt: object, completion: object) -> list[int]:
        """The tokens of a prompt and its completion, both texts or both messages."""
        if isinstance(prompt, str):
            assert isinstance(completion, str), completion
            if self.masking is not None:
                plain = self.renderer.render(prompt, id=self.where)
                return [*self.masking.completion(plain, self.as_plain(completion)).tokens]
            return token_ids(self.tokenizer, prompt + self.as_plain(completion), special=True)
        if not self.renderer.template:
            fault = f"{self.where}: the prompt is a conversation, and the reward model's tokenizer has no chat template"
            raise UserError(f"{fault}.  Set the reward's chat_template to a file with one, or prompt_format: plain.")
        assert isinstance(prompt, Sequence), prompt
        assert isinstance(completion, Sequence), completion
        answer = [{**message, "content": self.as_plain(message["content"])} for message in completion]
        if self.masking is not None:
            said = Dialogue(where=self.where, messages=[*prompt, *answer], num_given=len(prompt))
            read = self.masking.last_turn(said)
            return [*read.tokens, *self.masking.closing(said, read)]
        text = self.renderer.templated([*prompt, *answer], "of the reward model", open_answer=False)
        return token_ids(self.tokenizer, text, special=False)

    def as_plain(self, text: str) -> str:
        for special in self.special:
            if special in text:
                text = text.replace(special, f"{special[0]} {special[1:]}")
        return text
