"""Sentences in a recipe: the beginnings of completions that are trained on, and of those that are measured."""

from dataclasses import dataclass
from typing import Literal

from posttrain.options.bounds import Bounded, PositiveInt
from posttrain.options.rules import Rule


@dataclass(frozen=True, kw_only=True)
class SentencesOptions(Bounded):
    """Beginnings of texts that a model continues; for `posttrain sft`, texts of a small grammar."""

    name: Literal["sentences"] = "sentences"
    openings: tuple[str, ...] = ("The weather today is", "I think that", "Once upon a time", "In my opinion")
    """Beginnings that are trained on, in turn; by default those of a well-known course."""
    held_out_openings: tuple[str, ...] = (
        "The most important thing about science is",
        "I went to the store and bought",
    )
    """Beginnings that are never trained on."""
    held_out_size: PositiveInt = 64
    """Completions of held-out beginnings, in turn, in an evaluation; each is one problem."""

    rules = (
        Rule("openings", lambda o: are_texts(o.openings), "must be one or more texts, none empty.  Give some."),
        Rule("held_out_openings", lambda o: are_texts(o.held_out_openings), "must be texts, none empty.  Give some."),
        Rule(
            "held_out_openings",
            lambda o: not {*o.openings} & {*o.held_out_openings},
            "and openings = {o.openings} have one in common.  Leave it out of one of them.",
        ),
    )


def are_texts(given: tuple[str, ...]) -> bool:
    return bool(given) and all(map(str.strip, given))
