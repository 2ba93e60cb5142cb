"""The `grading` section of a recipe: limits for all reward functions together, and the cache of their scores."""

from dataclasses import dataclass
from typing import Literal

from posttrain.options.bounds import Bounded, NonNegativeFloat, NonNegativeInt, Share
from posttrain.options.rules import GIVEN, Unused

OnUnscoredRow = Literal["warn", "stop"]


@dataclass(frozen=True, kw_only=True)
class GradingOptions(Bounded):
    """How long scoring may take, how much of it may fail, and which scores are cached."""

    max_failure_share: Share = 0.05
    """Share of a function's scores of a step that may be missing because scoring failed; more stop the run."""
    max_unscored_steps: NonNegativeInt = 10
    """Stop the run after this many steps in a row without a single reward; 0 never stops it."""
    on_unscored_row: OnUnscoredRow = "warn"
    """What happens if all functions return None for all completions of a prompt: warn names the prompt, stop ends the
    run.  Rows that every reward's `where` leaves out are always refused before training."""
    max_same_reward_steps: NonNegativeInt = 50
    """Stop the run if all completions of its first steps, this many, have the same reward; 0 never stops it."""
    seconds: NonNegativeFloat = 0.0
    """Deadline for all reward functions on one batch of completions, of a step or of an evaluation; 0 sets none."""
    cache_entries: NonNegativeInt = 100_000
    """Scores to cache, of rewards with `cache`; the oldest are dropped first.  0: none."""
    cache_file: str = ""
    """File of cached scores, which several runs may share; empty keeps them in memory."""

    rules = (Unused("cache_file", {"cache_entries": GIVEN}),)
