"""Scores of whole texts by a sequence classifier, read at each text's last token, however texts are batched.

transformers' classifiers over decoders look for that token by the pad token's id.  Where a model has none they refuse a
batch; where it is the end token as well they pass over the end token that a text really ends with, and read the score
one token too early; where a text has the pad token at its end, likewise.  Here rows are padded on the right, their
lengths are kept, and the head reads the hidden state at length - 1:

    score_i = W · h_i[length_i - 1]

Encoders that read a whole text at its first token have their own forward pass, under a mask.  Which of the ways gives
what the model gives for one row alone, without padding, is tried when it is made; where neither does, rows go one by
one.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from posttrain.errors import UserError
from posttrain.models.adapters.quantized import is_4_bit
from posttrain.models.context import num_embeddings

Tokens = Sequence[int]
TRIED_LENGTHS = (2, 3, 7, 12)
"""Tokens of the rows by which the ways of reading are tried."""
EXACT, ROUNDED = 1e-4, 0.1
"""Largest difference, relative to 1 + |score|, between a row alone and the same row in a batch: in float32 and float64,
and in types of eight bits or fewer behind the point, where another order of sums is another number."""


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
    """Any token will do where padding is masked; of RoBERTa's kind it must be the tokenizer's own."""
    reading: ScoreReading

    def of_rows(self, rows: Sequence[Tokens], *, tokens_per_batch: int) -> Float[Tensor, "row label"]:
        """The numbers of each row, in the rows' order, as float32 on the CPU.

        Equal rows are computed once.  The others go through sorted by length, in batches of at most `tokens_per_batch`
        tokens with their padding, or of one row.
        """
        different = sorted(set(map(tuple, rows)), key=lambda row: (len(row), row))
        one_by_one = self.reading is ScoreReading.ONE_BY_ONE
        found: dict[tuple[int, ...], Tensor] = {}
        for batch in batches(different, 1 if one_by_one else tokens_per_batch):
            found.update(zip(batch, self.of_batch(batch).float().cpu(), strict=True))
        return torch.stack([found[tuple(row)] for row in rows])

    def of_batch(self, rows: Sequence[Tokens]) -> Float[Tensor, "row label"]:
        """The numbers of some rows together."""
        with torch.inference_mode():
            if self.reading is ScoreReading.LAST_TOKEN:
                return last_token_scores(self.model, rows, self.pad_id)
            if self.reading is ScoreReading.ONE_BY_ONE:
                return torch.cat([alone(self.model, row) for row in rows])
            ids, mask = padded(rows, self.pad_id, device_of(self.model))
            return cast(Tensor, self.model(input_ids=ids, attention_mask=mask).logits)


def classifier_scores(model: PreTrainedModel, *, pad_id: int | None, where: str) -> ClassifierScores:
    """The fastest way to score with a model that agrees with the model itself on one row at a time.

    `pad_id` is the tokenizer's, if it has one.  Raises UserError where the model gives no numbers for a text.
    """
    vocab = num_embeddings(model)
    pad_id = 0 if pad_id is None or pad_id >= vocab else pad_id
    rows = [[(3 + 5 * place + length) % vocab for place in range(length)] for length in TRIED_LENGTHS]
    with torch.inference_mode():
        expected = [alone(model, row) for row in rows]
    if any(logits.ndim != 2 for logits in expected):
        shape = [*expected[0].shape]
        raise UserError(
            f"{where}: {type(model).__name__} gives numbers of shape {shape} for one text, and a reward model gives one"
            " number for each label.  Give a model for sequence classification."
        )
    for reading in ScoreReading:
        if reading is ScoreReading.LAST_TOKEN and head_of(model) is None:
            continue
        scores = ClassifierScores(model, pad_id, reading)
        if reading is ScoreReading.ONE_BY_ONE or agrees(scores.of_batch(rows), torch.cat(expected), model):
            return scores
    raise AssertionError("rows one by one are what the others are compared with")


def agrees(found: Float[Tensor, "row label"], expected: Float[Tensor, "row label"], model: PreTrainedModel) -> bool:
    """Whether rows have the same numbers in a batch as alone."""
    coarse = model.dtype.itemsize < 4 or any(is_4_bit(layer) for layer in model.modules())
    gap = ((found.double() - expected.double()).abs() / (1 + expected.double().abs())).max()
    return bool(gap <= (ROUNDED if coarse else EXACT))


def last_token_scores(model: PreTrainedModel, rows: Sequence[Tokens], pad_id: int) -> Float[Tensor, "row label"]:
    """The head on the hidden state of each row's last token; the head computes in float32 at least."""
    ids, mask = padded(rows, pad_id, device_of(model))
    hidden = model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state  # [row time hidden]
    last = torch.tensor([len(row) - 1 for row in rows], device=hidden.device)
    at_last = hidden[torch.arange(len(rows), device=hidden.device), last]  # [row hidden]
    head = cast(nn.Linear, head_of(model))
    wide = torch.promote_types(torch.float32, head.weight.dtype)
    bias = None if head.bias is None else head.bias.to(wide)
    return nn.functional.linear(at_last.to(wide), head.weight.to(wide), bias)


def head_of(model: PreTrainedModel) -> nn.Linear | None:
    """The linear layer that classifiers over decoders have on every token; None for other kinds."""
    found = dict(model.named_children()).get("score")
    return found if type(found) is nn.Linear else None


def padded(
    rows: Sequence[Tokens], pad_id: int, device: torch.device
) -> tuple[Int[Tensor, "row time"], Int[Tensor, "row time"]]:
    """Rows padded on the right to one length, and 1 where they are not padding."""
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[pad_id] * (width - len(row))] for row in rows], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device)
    return ids, mask


def alone(model: PreTrainedModel, row: Tokens) -> Tensor:
    """What the model gives for one row without padding: with no pad token to look for, it reads the last."""
    with without_pad_token(model):
        ids, mask = padded([row], 0, device_of(model))
        return cast(Tensor, model(input_ids=ids, attention_mask=mask).logits)


@contextmanager
def without_pad_token(model: PreTrainedModel) -> Iterator[None]:
    """Have a classifier not look for padding, for as long as there is none."""
    config: Any = model.config.get_text_config()
    before, config.pad_token_id = config.pad_token_id, None
    try:
        yield
    finally:
        config.pad_token_id = before


def batches(rows: Sequence[tuple[int, ...]], tokens_per_batch: int) -> Iterator[list[tuple[int, ...]]]:
    """Rows, sorted by length already, in batches of so many tokens with their padding; one row if it has more."""
    batch: list[tuple[int, ...]] = []
    for row in rows:
        if batch and (len(batch) + 1) * len(row) > tokens_per_batch:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def device_of(model: PreTrainedModel) -> torch.device:
    """Where a model's weights are."""
    return next(iter(model.parameters())).device
