"""What one side of vs_trl_ppo.py is told; the standard library only, because two environments import it."""

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class PpoJob:
    """One side's share of the comparison; the other sides' differ in nothing but what they do not read."""

    policy: str
    """Folder of the model that both train, compare with, and make their value model of."""
    reward_model: str
    """Folder of the sequence classifier that scores completions on both sides."""
    rows: list[dict[str, str]]
    """Prompts, step after step, `prompts_per_step` for each."""
    prompts_per_step: int
    completion_tokens: int
    """Exact length where nothing stops, else the limit."""
    stops: bool
    """Whether the end token ends a completion; if not, it is out of the policy's reach."""
    epochs: int
    learning_rate: float
    kl_coefficient: float
    lambda_: float
    value_coefficient: float
    steps: int
    """Steps that the rows are enough for."""
    seed: int
    threads: int
    trunk: str
    """Ours: what the critic reads, `own` or `shared`."""
    tokens_per_microbatch: int
    """Ours: tokens per pass."""
    micro_batch: int
    """TRL's completions per forward and backward pass."""
    rollout_batch: int
    """TRL's completions per sampling and scoring pass."""

    @staticmethod
    def read(path: str) -> "PpoJob":
        return PpoJob(**json.loads(Path(path).read_text(encoding="utf-8")))
