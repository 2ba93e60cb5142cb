"""The order in which reward functions are asked, where some wait for others' scores."""

from collections.abc import Sequence
from typing import Protocol

from posttrain.errors import UserError
from posttrain.rewards.terms_options import Terms


class Named(Protocol):
    """A reward function, as far as ordering asks."""

    @property
    def name(self) -> str: ...

    @property
    def terms(self) -> Terms: ...


def rounds(functions: Sequence[Named]) -> list[list[int]]:
    """The functions, by place, in rounds: each after those that its gate and `of` name."""
    names = [function.name for function in functions]
    needs = [{name for name in (function.terms.gate, function.terms.of) if name} for function in functions]
    for function, needed in zip(functions, needs, strict=True):
        for name in sorted(needed - set(names)):
            raise UserError(
                f"reward {function.name!r} waits for a reward {name!r}, but there are only {', '.join(names)}."
                "  Add it, with weight 0 if it is to count for nothing itself."
            )
    done: set[str] = set()
    ordered: list[list[int]] = []
    left = list(range(len(functions)))
    while left:
        ready = [place for place in left if needs[place] <= done]
        if not ready:
            raise UserError(f"rewards {', '.join(names[place] for place in left)} wait for each other")
        ordered.append(ready)
        left = [place for place in left if place not in ready]
        done |= {names[place] for place in ready}
    return ordered
