"""Countdown in a recipe: how its problems are drawn, asked and read."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le

from posttrain.options.bounds import Bounded, NonNegativeInt, PositiveInt
from posttrain.options.rules import Rule, Unused

NumbersRule = Literal["all", "subset"]
"""Whether an answer uses every given number exactly once, or each at most once."""

FormatMode = Literal["strict", "last"]
"""How much of a text must follow the structure of the tags: all of it, or its end."""
OPERATORS = "+-*/"


@dataclass(frozen=True, kw_only=True)
class CountdownOptions(Bounded):
    """Make a target from given numbers: which problems, how they are put, and how answers are read."""

    name: Literal["countdown"] = "countdown"
    variant: Literal["default", "course"] = "default"
    """`default`: as hard as the options below say.  `course`: four numbers from 1, 2, 5, 10, 25, 50, 75, 100, and a
    target made from three of them with + - * and |a-b| that is none of the four; made for `numbers: subset`."""
    numbers: NumbersRule = "all"
    """Said in the prompt and graded alike: use every number exactly once (`all`), or each at most once (`subset`)."""
    num_numbers: Annotated[int, Ge(2), Le(6)] = 3
    """Numbers that a problem gives, 2 to 6."""
    min_number: NonNegativeInt = 1
    """Smallest number given."""
    max_number: int = 30
    """Largest number given."""
    operators: str = OPERATORS
    """What targets are made with, some of `+-*/`; answers may use all four."""
    min_target: NonNegativeInt = 1
    """Smallest target."""
    max_target: int = 99
    """Largest target."""
    held_out_size: PositiveInt = 512
    """Problems kept for evaluation, of multisets of numbers that are never trained on; the same for every seed."""
    prompt_style: Literal["compact", "r1"] = "compact"
    """`compact`: one line, as the bundled model knows it.  `r1`: chat messages asking for the tags, for real models."""
    prefill_think: bool = False
    """Begin the answer with `<think>` in the prompt; the model continues from there."""
    format_mode: FormatMode = "strict"
    """`strict`: the whole response is the tags and what they hold.  `last`: only its last four tags count."""

    rules = (
        Unused("num_numbers min_number max_number operators min_target max_target", {"variant": "default"}),
        Rule("max_number", lambda o: o.max_number >= o.min_number, "is below min_number = {o.min_number}.  Raise it."),
        Rule("operators", lambda o: {*o.operators} <= {*OPERATORS}, f"should be some of {OPERATORS}.  Use those."),
        Rule("operators", lambda o: o.operators, f"should be some of {OPERATORS}.  Name at least one."),
        Rule("operators", lambda o: len({*o.operators}) == len(o.operators), "names one twice.  Name each once."),
        Rule("max_target", lambda o: o.max_target >= o.min_target, "is below min_target = {o.min_target}.  Raise it."),
    )
