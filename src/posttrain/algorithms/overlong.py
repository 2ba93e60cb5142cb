"""DAPO's soft overlong punishment: a shaping of rewards by the length of their completions."""

from dataclasses import dataclass

from jaxtyping import Float, Int64
from torch import Tensor

from posttrain.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlong:
    """DAPO's soft overlong punishment: the last stretch before the length limit costs reward, more with every token."""

    buffer: float = 0.2
    """Length of that stretch, as a fraction of max_completion_tokens."""
    penalty: float = 1.0
    """What a completion of max_completion_tokens loses, in units of reward."""

    def __post_init__(self) -> None:
        if not 0 < self.buffer <= 1:
            raise UserError(f"buffer = {self.buffer}: a fraction of max_completion_tokens, above 0 and at most 1.")
        if not self.penalty > 0:
            raise UserError(f"penalty = {self.penalty}: must be above 0; for no punishment write `overlong: null`.")


PAPERS_OVERLONG = Overlong()
"""What DAPO has, in its proportions."""


def overlong_punishment(
    rewards: Float[Tensor, "prompt group"],
    lengths: Int64[Tensor, "prompt group"],
    *,
    max_completion_tokens: int,
    overlong: Overlong,
) -> Float[Tensor, "prompt group"]:
    """Rewards less DAPO's length penalty, linear over the buffer before the length limit.

        r - penalty · clip((|y| - (L - C)) / C, 0, 1),   L = max_completion_tokens, C = buffer · L

    Yu et al. 2025, arXiv:2503.14476.  Unscored (NaN) stays unscored.
    """
    buffer_tokens = overlong.buffer * max_completion_tokens
    into_buffer = (lengths.to(rewards.dtype) - (max_completion_tokens - buffer_tokens)) / buffer_tokens
    return rewards - overlong.penalty * into_buffer.clamp(0, 1)
