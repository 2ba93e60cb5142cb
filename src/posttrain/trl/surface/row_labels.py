"""Rows as an SFTTrainer learns them, to look at: `trainer.train_dataset[0]["labels"]`."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

from posttrain.records import Example
from posttrain.training.sft.token_rows import LABELS, NOT_LEARNED, TOKENS


class TokenRows(Sequence[dict[str, list[int]]]):
    """The rows as tokens with labels, made when they are first asked for; a column by its name."""

    column_names = (TOKENS, LABELS)

    def __init__(self, make: Callable[[], Sequence[Example]], *, learned_whole: bool) -> None:
        """With `learned_whole` the label of the first token, which nothing predicts, is the token, as in TRL."""
        self.make, self.learned_whole = make, learned_whole

    @cached_property
    def examples(self) -> Sequence[Example]:
        """The rows, made into tokens once."""
        return self.make()

    def __len__(self) -> int:
        return len(self.examples)

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return (self.row(example) for example in self.examples)

    def __getitem__(self, place: Any) -> Any:
        """A row, several rows, or a column."""
        if isinstance(place, str):
            return [self.row(example)[place] for example in self.examples]
        found = self.examples[place]
        return self.row(found) if isinstance(found, Example) else [self.row(each) for each in found]

    def row(self, example: Example) -> dict[str, list[int]]:
        """Tokens and labels of one row."""
        ids = [*example.tokens]
        masked = [token if each else NOT_LEARNED for token, each in zip(ids, example.learned, strict=True)]
        return {TOKENS: ids, LABELS: ids if self.learned_whole else masked}
