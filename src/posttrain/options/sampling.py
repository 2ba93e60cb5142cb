"""How a token is drawn from the policy's logits."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt

from posttrain.options.bounds import Bounded, NonNegativeInt
from posttrain.options.rules import Rule


@dataclass(frozen=True, kw_only=True)
class SamplingParams(Bounded):
    """Temperature first, then the cuts top-k, top-p, min-p; each works on the tokens that the last one kept."""

    temperature: float = 1.0
    """Divides the logits, here and where the update recomputes log-probs; from 0.001 (use `greedy` for 0) to 100."""
    top_k: NonNegativeInt = 0
    """Keep this many of the likeliest tokens, the lower token id first among equals; 0 keeps all."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """Keep the fewest likeliest tokens that together have this probability, in (0, 1]; 1 keeps all."""
    min_p: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Drop tokens less likely than this share of the likeliest one, in [0, 1); 0 keeps all."""
    greedy: bool = False
    """Take the likeliest token, the lower token id among equals, and ignore the other options."""

    rules = (
        Rule("temperature", lambda o: 1e-3 <= o.temperature <= 100, "must be from 0.001 to 100.  For 0 use greedy."),
    )

    @property
    def cuts(self) -> bool:
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def recorded_temperature(self) -> float:
        """The temperature behind the recorded log-probs; greedy records 1."""
        return 1.0 if self.greedy else self.temperature
