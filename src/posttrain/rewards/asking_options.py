"""How a reward function is asked: in which process, for how long, and whether twice."""

import math
from dataclasses import dataclass

from posttrain.errors import require


@dataclass(frozen=True, kw_only=True)
class Asking:
    """What a recipe may say of the asking of a reward function.

    In workers, a function of lists is called once for each prompt, with that prompt's completions, however many workers
    there are; one that compares completions of different prompts has to stay in the trainer's process.
    """

    workers: int = 0
    """Processes of its own that call it, which a deadline or a crash ends without harm; 0 is the trainer's process."""
    item_seconds: float = 0.0
    """Deadline for one completion, or for a call with n of them n times as long; needs workers or an async function."""
    seconds: float = 0.0
    """Deadline for all completions of a step together, other tries included; needs workers or an async function."""
    cache: bool = False
    """Ask once about the same completion and columns: you promise that it scores each completion by itself alone.
    A change of its file is noticed, a change of what the file imports is not."""

    def __post_init__(self) -> None:
        require(self.workers >= 0, self, "workers", "is no number of processes; use >= 0")
        for name in ("item_seconds", "seconds"):
            require(
                0 <= getattr(self, name) < math.inf, self, name, "is no number of seconds; use >= 0, 0 for no limit"
            )
        fits = not self.seconds or self.item_seconds <= self.seconds
        require(fits, self, "item_seconds", f"is more than seconds = {self.seconds} allows all completions together")
