"""Sentences in a recipe: how completions begin that are trained on, and how those that are measured."""

from dataclasses import dataclass
from typing import Literal

from posttrain.errors import UserError, require
from posttrain.options.bounds import Bounded, PositiveInt


@dataclass(frozen=True, kw_only=True)
class SentencesOptions(Bounded):
    """Beginnings of texts that a model goes on with; for `posttrain sft`, texts of a small grammar."""

    name: Literal["sentences"] = "sentences"
    """Which task this is."""
    openings: tuple[str, ...] = ("The weather today is", "I think that", "Once upon a time", "In my opinion")
    """Beginnings that are trained on, one after the other; by default those of a well-known course."""
    held_out_openings: tuple[str, ...] = (
        "The most important thing about science is",
        "I went to the store and bought",
    )
    """Beginnings that are never trained on."""
    held_out_size: PositiveInt = 64
    """Completions of held-out beginnings that evaluations begin with, in turns; each is one problem."""

    def __post_init__(self) -> None:
        super().__post_init__()
        some = bool(self.openings) and all(each.strip() for each in self.openings)
        require(some, self, "openings", "must be texts, none of them empty, at least one")
        apart = bool(self.held_out_openings) and all(each.strip() for each in self.held_out_openings)
        require(apart, self, "held_out_openings", "must be texts, none of them empty, at least one")
        both = next((each for each in self.openings if each in self.held_out_openings), None)
        if both is not None:
            raise UserError(
                f"held_out_openings has {both!r}, which openings trains on too.  Leave it out of one of them."
            )
