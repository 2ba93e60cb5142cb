"""Where a run is, as reward functions are told."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """A run's progress, under the names that transformers' TrainerState has for it; outside of a run all is 0."""

    global_step: int = 0
    """Steps finished: 0 while completions of the first one are scored."""
    max_steps: int = 0
    """Steps of the whole run."""
    epoch: float | None = None
    """Passes over the training rows so far; None where prompts are made and not read."""
    is_world_process_zero: bool = True
    """Whether this process is the one that prints, which a run of one process is."""
    is_local_process_zero: bool = True
    """The same of one machine."""
