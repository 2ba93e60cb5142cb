"""How completions are sampled: the `rollout` section of a recipe, and the part of it that one prompt needs."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le

from posttrain.errors import require
from posttrain.options.bounds import Bounded, PositiveInt
from posttrain.options.sampling import SamplingParams


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(Bounded):
    """How the next token is chosen, and when a completion is cut off."""

    max_completion_tokens: PositiveInt = 400
    """A completion that has not stopped after this many tokens is cut off there (finish reason `length`)."""
    temperature: float = 1.0
    """Divides the logits when sampling *and* when the update recomputes log-probs.  0 takes the likeliest token."""
    top_k: int = 0
    """Sample among the k likeliest tokens only; 0 is all of them."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that together hold this probability; 1 is all of them."""
    min_p: float = 0.0
    """Leave out tokens less likely than this share of the likeliest one; 0 leaves out none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.sampling  # holds the rules of its own fields

    @property
    def sampling(self) -> SamplingParams:
        """How a token is drawn."""
        if self.temperature == 0:
            return SamplingParams(greedy=True)
        return SamplingParams(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)


@dataclass(frozen=True, kw_only=True)
class RolloutOptions(SamplingOptions):
    """What one training step samples: prompts × group completions."""

    prompts_per_step: PositiveInt = 32
    """Prompts drawn at each step, P."""
    group_size: PositiveInt = 8
    """Completions per prompt, G; an advantage that compares the completions of a prompt needs at least 2."""
    allow_cut_sampling: bool = False
    """Train on completions sampled under a top-k, top-p or min-p cut, although the update scores them under the full
    distribution: the ratios are then those of another policy than the one that sampled."""
    on_reward_error: Literal["stop", "none"] = "stop"
    """What a reward function's exception, NaN or infinity does: stop the run with the row, or leave that score out and
    count it."""
    keep_alternatives: Annotated[int, Ge(0), Le(20)] = 0
    """Write this many of the likeliest tokens, with log μ, for each sampled token to `rollouts/`; 0 writes none.  It
    changes no completion; docs/run_folder.md gives sizes."""
    max_rows: PositiveInt = 256
    """Completions decoded side by side; bounds the memory of the key/value cache and changes no completion."""

    def __post_init__(self) -> None:
        require(self.temperature > 0, self, "temperature", "would make all completions of a group the same; use > 0")
        super().__post_init__()
        if self.sampling.cuts and not self.allow_cut_sampling:
            cut = "top_k" if self.top_k > 0 else "top_p" if self.top_p < 1 else "min_p"
            rule = "samples from a cut distribution, which is not the one that the update scores.  Leave it out"
            require(False, self, cut, f"{rule}, or set rollout.allow_cut_sampling: true to train on such samples.")

    @property
    def rollouts_per_step(self) -> int:
        """Completions of one step."""
        return self.prompts_per_step * self.group_size
