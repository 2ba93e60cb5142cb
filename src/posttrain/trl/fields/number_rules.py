"""Which numbers a field of TRL's configs may be, so that one that would say nothing is refused by the field's name."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Real

from posttrain.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """The numbers that a field may be; NaN is never one of them."""

    least: float = -math.inf
    most: float = math.inf
    above: bool = False
    """Whether `least` itself is too little."""
    below: bool = False
    """Whether `most` itself is too much."""
    whole: bool = False
    whole_from_one: bool = False
    """Below 1 a share of the run; from 1 on a count, which is whole."""
    infinite: bool = False
    """Whether infinity is one of them."""
    or_none: bool = False
    """Whether None may stand for one."""

    def allow(self, value: object) -> bool:
        """Whether a field may be this."""
        if value is None:
            return self.or_none
        if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(float(value)):
            return False
        number = float(value)
        if math.isinf(number) and not self.infinite:
            return False
        too_low = number <= self.least if self.above else number < self.least
        too_high = number >= self.most if self.below else number > self.most
        counts = self.whole or (self.whole_from_one and number >= 1)
        return not too_low and not too_high and not (counts and not number.is_integer())

    @property
    def told(self) -> str:
        """What they are, in words."""
        return " ".join(self.parts())

    def parts(self) -> Iterator[str]:
        """Kind and bounds, and what stands beside numbers."""
        yield "a whole number" if self.whole else "a number"
        bounds = []
        if self.least > -math.inf:
            bounds.append(f"{'>' if self.above else '>='} {self.least:g}")
        if self.most < math.inf:
            bounds.append(f"{'<' if self.below else '<='} {self.most:g}")
        if bounds:
            yield " and ".join(bounds)
        if self.whole_from_one:
            yield "(below 1 a share of the run, from 1 on whole)"
        if self.or_none:
            yield "or None"


def whole(least: float, *, or_none: bool = False) -> Numbers:
    """Whole numbers from this one on."""
    return Numbers(least=least, whole=True, or_none=or_none)


def above(least: float) -> Numbers:
    """What is more than that."""
    return Numbers(least=least, above=True)


def at_least(least: float, *, or_none: bool = False, infinite: bool = False) -> Numbers:
    """That and more."""
    return Numbers(least=least, or_none=or_none, infinite=infinite)


def between(least: float, most: float, *, above: bool = False, below: bool = False, or_none: bool = False) -> Numbers:
    """From one to the other, both included unless it is said."""
    return Numbers(least=least, most=most, above=above, below=below, or_none=or_none)


def interval(least: float, *, above: bool = False, or_none: bool = False) -> Numbers:
    """Updates between two events, or a share of all."""
    return Numbers(least=least, above=above, whole_from_one=True, or_none=or_none)


def require_number(owner: str, name: str, value: object, numbers: Numbers) -> None:
    """Refuse a value that a field cannot be."""
    if not numbers.allow(value):
        raise UserError(f"{owner}: {name} = {value!r:.40}: use {numbers.told}.")
