"""The `grading` section of a recipe: limits for all reward functions together, and the cache of their scores."""

from dataclasses import dataclass
from typing import Literal

from posttrain.errors import UserError
from posttrain.options.bounds import Bounded, NonNegativeFloat, NonNegativeInt, Share

OnUnscoredRow = Literal["warn", "stop"]


@dataclass(frozen=True, kw_only=True)
class GradingOptions(Bounded):
    """How long scoring may take, how much of it may fail, and what is remembered of it."""

    max_failure_share: Share = 0.05
    """Share of a function's scores of a step that may be missing because scoring failed; more stop the run."""
    max_unscored_steps: NonNegativeInt = 10
    """Steps in a row in which no completion is given a reward, after which the run stops; 0 lets it go on."""
    on_unscored_row: OnUnscoredRow = "warn"
    """What a prompt does to whose completions no reward of a step applies, for all functions said None: warn names it
    and goes on, stop ends the run.  Rows that every reward's `where` leaves out are refused before training anyway."""
    max_same_reward_steps: NonNegativeInt = 50
    """Steps since the start in which all completions have one and the same reward, after which the run stops; 0 lets
    it go on."""
    seconds: NonNegativeFloat = 0.0
    """Deadline for all reward functions on one batch of completions, of a step or of an evaluation; 0 sets none."""
    cache_entries: NonNegativeInt = 100_000
    """Scores remembered, of rewards that score each completion by itself and say so; the oldest go first.  0: none."""
    cache_file: str = ""
    """File to remember them in from run to run, which several runs may share; empty keeps them in memory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cache_file and not self.cache_entries:
            raise UserError(
                f"cache_file = {self.cache_file} is never used with cache_entries = 0; leave one of them out"
            )
