"""Tokens that a model has no embedding for: its tokenizer may know more than it does."""

from collections.abc import Sequence
from typing import cast

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.errors import UserError


def num_embeddings(model: PreTrainedModel) -> int:
    """Rows of the model's embedding."""
    return len(cast(nn.Embedding, model.get_input_embeddings()).weight)


def require_known_tokens(tokens: Sequence[int], rows: int, tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """Refuse tokens that an embedding with so many rows does not have."""
    least, last = min(tokens, default=0), max(tokens, default=0)
    if least >= 0 and last < rows:
        return
    unknown = last if least >= 0 else least
    text = f" ({tokenizer.decode([unknown])!r})" if 0 <= unknown < len(tokenizer) else ""
    raise UserError(
        f"{where}: the tokenizer's token {unknown}{text} has no row in the model's embedding, which has {rows}.  Leave"
        " that text out, or give the model the tokenizer that it was trained with."
    )
