"""A reward model from a folder or the hub, and its scores of whole texts, read at each text's last token.

transformers makes up missing weights with a warning at most, so a language model would get a random head.  Here that is
refused unless `untrained_head` is set.

transformers' classifiers over decoders find the last token by the pad token's id.  Without one they refuse a batch; if
it also ends texts, they read the score one token too early.  Here rows are padded on the right, their lengths are kept,
and the head reads the hidden state at length - 1:  score_i = W · h_i[length_i - 1].  Encoders that read a text at its
first token run their own forward pass.  Both ways are compared with the model's result for single rows; if neither
agrees, rows go one by one.

`scored_body` is such a classifier as a language model: a critic may start as the reward model whose score is the value
of a finished text (Ouyang et al. 2022, arXiv:2203.02155).
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from posttrain.errors import UserError
from posttrain.models.adapters.adaptable import compute_unpacked_in, is_4_bit, quantize, stays_quantised
from posttrain.models.classifiers.saved_classifier import READING
from posttrain.models.context import num_embeddings
from posttrain.models.loading import construction, folder_kinds
from posttrain.models.loading.devices import chosen_device
from posttrain.models.memory.memory_parts import NF4_BYTES
from posttrain.models.policy import Policy, as_policy
from posttrain.options.model import ModelOptions
from posttrain.options.reward import RewardModelOptions

CAUSAL_HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Endings of the names of classes that write and do not score."""


def classifier_files(options: RewardModelOptions) -> Path:
    """The local folder of a classifier, downloaded from the hub if it must be.  Reads only small files."""
    where, named = reward_option(options), ModelOptions(path=options.model)
    folder, trusted = named.folder, options.trust_remote_code
    if named.hub_name is not None:
        name = f"rewards: model = {named.hub_name}"
        folder = folder_kinds.hub_folder(named.hub_name, named.hub_revision, with_code=trusted, option=name)
    if not folder.is_dir():
        raise UserError(
            f"{where}: no such folder.  Give the folder of a reward model (config.json, tokenizer and weights), or one"
            " of the hub as org/name."
        )
    option = "the reward's trust_remote_code"
    config = folder_kinds.checked_config(folder, where, trusted=trusted, option=option, causal=False)
    made_as = folder_kinds.architecture_name(config)
    if made_as.endswith(CAUSAL_HEADS) and not options.untrained_head:
        remedy = "Give a trained sequence classifier (…ForSequenceClassification), or set untrained_head: true."
        raise UserError(f"{where}: {made_as} is a language model, whose scoring head would be random.  {remedy}")
    return folder


def loaded_classifier(folder: Path, options: RewardModelOptions) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The classifier of a folder and its tokenizer, frozen, on its device and in its type."""
    where = reward_option(options)
    device = chosen_device(options.device, option="rewards: device")
    config, dtype = folder_kinds.read_json(folder / "config.json", where), chosen_type(options, device)
    causal = folder_kinds.architecture_name(config).endswith(CAUSAL_HEADS)
    given: dict[str, Any] = {"dtype": dtype, **({"num_labels": 1} if causal else {})}
    trusted = {"trust_remote_code": options.trust_remote_code}
    with classifier_errors(where), construction.ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # draws an untrained head
        model, lacking, _ = construction.loaded(AutoModelForSequenceClassification, folder, **given, **trusted)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **trusted)
    require_classifier_weights(model, lacking, where, untrained_head=options.untrained_head)
    model.requires_grad_(False).eval()
    if folder_kinds.quantisation(folder, where) is not None:
        compute_unpacked_in(model, dtype)
        return model, tokenizer
    if options.quantization is not None:
        quantize(cast(PreTrainedModel, model.base_model), dtype, device=device)
    cast(torch.nn.Module, model).to(device)
    return model, tokenizer


def chosen_type(options: RewardModelOptions, device: torch.device) -> torch.dtype:
    narrow = options.dtype == "bfloat16" or (options.dtype == "auto" and device.type == "cuda")
    return torch.bfloat16 if narrow else torch.float32


def require_classifier_weights(model: PreTrainedModel, lacking: list[str], where: str, *, untrained_head: bool) -> None:
    """Refuse a model whose weights are not all in its folder; its head may be new if the options say so."""
    body = f"{model.base_model_prefix}."
    construction.require_no_lack(model, [name for name in lacking if name.startswith(body)], where)
    heads = {name: each for name, each in model.named_parameters() if not name.startswith(body)}
    broken = [name for name, each in heads.items() if not each.isfinite().all()]
    if broken:
        fault = f"its head cannot score: {broken[0]} holds NaN or infinity"
        raise UserError(f"{where}: {fault}.  Give a folder whose training did not diverge.")
    if lacking and not untrained_head:
        remedy = "Give a folder that was saved after training, or set untrained_head: true."
        raise UserError(f"{where}: its head is not trained: {', '.join(lacking)} would be random.  {remedy}")


def classifier_errors(where: str) -> AbstractContextManager[None]:
    return construction.transformers_load_errors(
        lambda said: (
            f"{where}: transformers cannot load it as a sequence classifier ({said}).  The folder needs config.json,"
            " model.safetensors, tokenizer.json and tokenizer_config.json of such a model."
        )
    )


def reward_option(options: RewardModelOptions) -> str:
    return f"rewards: model = {options.model}"


def classifier_bytes(options: RewardModelOptions, *, on_cuda: bool) -> int:
    """Bytes of the weights, by the config: b · N, and in 4 bits 4.127 / 8 for b of its linear layers.

    N: parameters, b: bytes of one.  A folder that is stored in 4 bits is as large as its files.  0 if the reward model
    is on another device than the policy, which is on CUDA if `on_cuda`.
    """
    there = on_cuda if options.device == "auto" else options.device == "cuda"
    if there != on_cuda:
        return 0
    folder, where = classifier_files(options), reward_option(options)
    if folder_kinds.quantisation(folder, where) is not None:
        return sum(file.stat().st_size for file in folder.glob(folder_kinds.SAFE_WEIGHTS))
    with classifier_errors(where), construction.ONE_AT_A_TIME, torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=options.trust_remote_code)
        model = AutoModelForSequenceClassification.from_config(config, trust_remote_code=options.trust_remote_code)
    width: int = chosen_type(options, torch.device("cuda" if on_cuda else "cpu")).itemsize
    parameters: int = sum(each.numel() for each in model.parameters())
    if options.quantization is None:
        return width * parameters
    body = cast(nn.Module, model.base_model)
    packed: int = sum(layer.weight.numel() for layer in body.modules() if type(layer) is nn.Linear)
    return width * (parameters - packed) + round(NF4_BYTES * packed)


Tokens = Sequence[int]
TRIED_LENGTHS = (2, 3, 7, 12)
"""Lengths of the rows that compare the ways of reading."""
EXACT, ROUNDED = 1e-4, 0.1
"""Largest difference, relative to 1 + |score|, between a row by itself and in a batch: in float32 and float64, and in
types of at most eight fraction bits, where the order of sums changes numbers."""


class ScoreReading(StrEnum):
    """How a batch of rows is scored."""

    LAST_TOKEN = "the head at each row's last token"
    OWN_FORWARD = "the model's own forward pass over padded rows"
    ONE_BY_ONE = "the model's own forward pass, one row at a time"


@dataclass(frozen=True, slots=True, eq=False)
class ClassifierScores:
    """Scores texts, given as tokens."""

    model: PreTrainedModel
    pad_id: int
    """Any token, as padding is masked; for models like RoBERTa it must be the tokenizer's."""
    reading: ScoreReading

    def of_rows(self, rows: Sequence[Tokens], *, tokens_per_batch: int) -> Float[Tensor, "row label"]:
        """The numbers of each row, as float32 on the CPU; equal rows are computed once, others in batches."""
        different = sorted(set(map(tuple, rows)), key=lambda row: (len(row), row))
        one_by_one = self.reading is ScoreReading.ONE_BY_ONE
        found: dict[tuple[int, ...], Tensor] = {}
        for batch in batches(different, 1 if one_by_one else tokens_per_batch):
            found.update(zip(batch, self.of_batch(batch).float().cpu(), strict=True))
        return torch.stack([found[tuple(row)] for row in rows])

    def of_batch(self, rows: Sequence[Tokens]) -> Float[Tensor, "row label"]:
        with torch.inference_mode():
            if self.reading is ScoreReading.ONE_BY_ONE:
                return torch.cat([alone(self.model, row) for row in rows])
            given = padded(rows, self.pad_id, self.model.device)
            if self.reading is ScoreReading.LAST_TOKEN:
                return last_token_scores(self.model, given, [len(row) - 1 for row in rows])
            return cast(Tensor, self.model(**given).logits)


def classifier_scores(model: PreTrainedModel, *, pad_id: int | None, where: str) -> ClassifierScores:
    """The fastest way to score that agrees with the model on one row at a time; `pad_id` is the tokenizer's."""
    vocab = num_embeddings(model)
    pad_id = 0 if pad_id is None or pad_id >= vocab else pad_id
    rows = [[(3 + 5 * place + length) % vocab for place in range(length)] for length in TRIED_LENGTHS]
    with torch.inference_mode():
        expected = [alone(model, row) for row in rows]
    if any(logits.ndim != 2 for logits in expected):
        shape = [*expected[0].shape]
        fault = f"{type(model).__name__} returns numbers of shape {shape} for one text, not one per label"
        raise UserError(f"{where}: {fault}.  Give a model for sequence classification.")
    batched = [] if score_layer(model) is None else [ScoreReading.LAST_TOKEN]
    for reading in (*batched, ScoreReading.OWN_FORWARD):
        scores = ClassifierScores(model, pad_id, reading)
        if agrees(scores.of_batch(rows), torch.cat(expected), model):
            return scores
    return ClassifierScores(model, pad_id, ScoreReading.ONE_BY_ONE)


def agrees(found: Float[Tensor, "row label"], expected: Float[Tensor, "row label"], model: PreTrainedModel) -> bool:
    coarse = model.dtype.itemsize < 4 or any(is_4_bit(layer) for layer in model.modules())
    gap = ((found.double() - expected.double()).abs() / (1 + expected.double().abs())).max()
    return bool(gap <= (ROUNDED if coarse else EXACT))


def last_token_scores(
    model: PreTrainedModel, given: Mapping[str, Tensor], last: Sequence[int]
) -> Float[Tensor, "row label"]:
    """The head on the hidden state of each row's last token, in float32 at least."""
    hidden = model.base_model(**given).last_hidden_state  # [row time hidden]
    at_last = hidden[range(len(last)), last]  # [row hidden]
    head = cast(nn.Linear, score_layer(model))
    wide = torch.promote_types(torch.float32, head.weight.dtype)
    bias = None if head.bias is None else head.bias.to(wide)
    return nn.functional.linear(at_last.to(wide), head.weight.to(wide), bias)


def score_layer(model: PreTrainedModel) -> nn.Linear | None:
    """The linear head of classifiers over decoders; None for other kinds."""
    found = dict(model.named_children()).get("score")
    return found if type(found) is nn.Linear else None


def padded(rows: Sequence[Tokens], pad_id: int, device: torch.device) -> dict[str, Int[Tensor, "row time"]]:
    """Rows padded on the right to one length, and their mask, as a model takes them."""
    width = max(map(len, rows))
    ids = [[*row, *[pad_id] * (width - len(row))] for row in rows]
    mask = [[1] * len(row) + [0] * (width - len(row)) for row in rows]
    return {"input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(mask, device=device)}


def alone(model: PreTrainedModel, row: Tokens) -> Tensor:
    """The model's result for one row: without a pad token, it reads the last."""
    config: Any = model.config.get_text_config()
    before, config.pad_token_id = config.pad_token_id, None
    try:
        return cast(Tensor, model(**padded([row], 0, model.device)).logits)
    finally:
        config.pad_token_id = before


def batches(rows: Sequence[tuple[int, ...]], tokens_per_batch: int) -> Iterator[list[tuple[int, ...]]]:
    """Rows, sorted by length, in batches of at most `tokens_per_batch` tokens with padding, or of one row."""
    batch: list[tuple[int, ...]] = []
    for row in rows:
        if batch and (len(batch) + 1) * len(row) > tokens_per_batch:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


@dataclass(frozen=True, slots=True)
class ScoredBody:
    """A model without its scoring head, and that head: r = w · h at a text's last token."""

    body: Policy
    """A causal language model whose output layer is its embedding or zeros: nothing is sampled."""
    score: Float[Tensor, " hidden"] | None
    """w; None for a model that does not score."""


def scored_body(policy: Policy, path: str, *, option: str) -> ScoredBody:
    """The reward model of a folder, trainable and on the policy's device, if it reads the policy's tokens."""
    where = f"{option} = {path}"
    on_cuda = policy.device.type == "cuda"
    options = RewardModelOptions(model=path, dtype="float32", device="cuda" if on_cuda else "cpu")
    try:
        classifier, tokenizer = loaded_classifier(classifier_files(options), options)
    except UserError as error:  # which names the section `rewards`
        raise UserError(str(error).replace("rewards: model = ", f"{option} = ")) from error
    head = score_layer(classifier)
    if head is None or head.out_features != 1:
        has = "another head" if head is None else f"{head.out_features} of them"
        fault = f"{where}: {type(classifier).__name__} has {has}"
        raise UserError(f"{fault}.  A critic starts from a reward model of one number, read at a decoder's last token.")
    if stays_quantised(classifier) or any(is_4_bit(layer) for layer in classifier.modules()):
        raise UserError(f"{where}: its weights are stored quantised.  Give the model that it was quantised from.")
    mine, theirs, pad = policy.tokenizer.get_vocab(), tokenizer.get_vocab(), str(tokenizer.pad_token)
    texts = mine.keys() | (theirs.keys() - {pad})  # which may be new
    differing = sorted(text for text in texts if mine.get(text) != theirs.get(text))
    if differing:
        fault = f"its vocabulary is not the policy's: {len(differing)} tokens differ, such as {differing[0]!r}"
        raise UserError(f"{where}: {fault}.  Give a reward model with the policy's tokenizer.")
    model = with_output_layer(classifier)
    model.requires_grad_(True)
    narrow = policy.compute_dtype == torch.bfloat16
    body = as_policy(model, policy.tokenizer, dtype="bfloat16" if narrow else "float32", context=policy.context)
    return ScoredBody(body, head.weight.detach()[0].clone())


def with_output_layer(classifier: PreTrainedModel) -> PreTrainedModel:
    """A causal language model around a classifier's body; the output layer is its embedding, or else zeros."""
    config: Any = copy.deepcopy(classifier.config)
    config.tie_word_embeddings = True
    if hasattr(config, READING):
        delattr(config, READING)
    with construction.ONE_AT_A_TIME, torch.device("meta"):
        made: Any = transformers.AutoModelForCausalLM.from_config(config)
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
