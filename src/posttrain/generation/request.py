"""What to sample, said once for all prompts."""

from dataclasses import dataclass

from posttrain.generation.streams import StreamKey
from posttrain.options.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to sample for each prompt."""

    group_size: int
    """Completions per prompt."""
    max_completion_tokens: int
    """Longest completion; also bounded by the room that the prompt leaves in the model's context."""
    sampling: Sampling
    key: StreamKey
    keep_alternatives: int = 0
    """How many of the likeliest tokens each sampled token is returned with; see `Rollout.alternatives`."""
    suppressed: tuple[int, ...] = ()
    """Tokens that are never sampled; for studies of a policy, not for training: log-probs are those among the rest."""
    stop_texts: tuple[str, ...] = ()
    """Texts that end a completion as a limit would, behind the token that completes one; for serving, not training."""
