"""Rows that are tokens already: `input_ids`, with `labels` or a mask that say which of them are learned."""

from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.errors import UserError
from posttrain.records import Example, TokenSequence
from posttrain.tasks.row_files.rows import DatasetRow

TOKENS, LABELS = "input_ids", "labels"
MASKS = ("completion_mask", "assistant_masks")
"""Columns of 0 and 1, as TRL writes them; a token that one of them leaves out is not learned."""
NOT_LEARNED = -100
"""The label of a token that is read and not learned."""


@dataclass(frozen=True, slots=True)
class TokenRow:
    """Tokens, and which of them are learned; the first never is, since nothing predicts it."""

    where: str
    tokens: tuple[int, ...]
    learned: tuple[bool, ...]


def token_row(row: DatasetRow) -> TokenRow:
    """A row of tokens.  Raises UserError where its columns do not fit together."""
    tokens = whole_numbers(row, TOKENS)
    if not tokens:
        raise UserError(f"{row.where}: the column `{TOKENS}` is empty; fill it or drop the row")
    if 0 in of_length(row, "attention_mask", len(tokens), default=1):
        raise UserError(
            f"{row.where}: its attention_mask leaves out tokens, as padding does; give rows without padding"
        )
    learned = [True] * len(tokens)
    for mask in MASKS:
        learned = [a and b != 0 for a, b in zip(learned, of_length(row, mask, len(tokens), default=1), strict=True)]
    if row.columns.get(LABELS) is not None:
        labels = of_length(row, LABELS, len(tokens), default=0)
        wrong = next((i for i, label in enumerate(labels) if label not in (NOT_LEARNED, tokens[i])), None)
        if wrong is not None:
            raise UserError(
                f"{row.where}: labels[{wrong}] = {labels[wrong]}, and {TOKENS}[{wrong}] = {tokens[wrong]}: a label is"
                f" its own token, or {NOT_LEARNED} where that is not learned; the shift by one is made here"
            )
        learned = [a and label != NOT_LEARNED for a, label in zip(learned, labels, strict=True)]
    return TokenRow(row.where, tuple(tokens), (False, *learned[1:]))


def of_length(row: DatasetRow, column: str, length: int, *, default: int) -> Sequence[int]:
    """A column of as many whole numbers as there are tokens; where it is not there, the default each time."""
    if row.columns.get(column) is None:
        return [default] * length
    found = whole_numbers(row, column)
    if len(found) != length:
        raise UserError(
            f"{row.where}: {len(found)} numbers in `{column}`, and {length} in `{TOKENS}`; give one for each"
        )
    return found


def whole_numbers(row: DatasetRow, column: str) -> Sequence[int]:
    """A column of whole numbers."""
    given = row.columns.get(column)
    listed = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(listed, Sequence) and not isinstance(listed, str) and all(isinstance(each, int) for each in listed):
        return [int(each) for each in listed]
    raise UserError(f"{row.where}: the column `{column}` must be a list of whole numbers, not {given!r:.80}")


def example_of(row: TokenRow, *, learn_all: bool) -> Example:
    """The example of a row; with `learn_all` every token of it is learned."""
    learned = (False, *[True] * (len(row.tokens) - 1)) if learn_all else row.learned
    return Example(TokenSequence(tokens=row.tokens, sampled=learned))
