"""The words in which a recipe says how Countdown answers are read."""

from typing import Literal

NumbersRule = Literal["all", "subset"]
"""Whether an answer uses every given number exactly once, or each at most once."""

FormatMode = Literal["strict", "last"]
"""How much of a text has to keep to the structure of the tags: all of it, or its end."""
