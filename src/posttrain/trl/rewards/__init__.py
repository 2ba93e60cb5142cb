"""The reward functions of `trl.rewards` 1.16, by the same names: `from posttrain.trl.rewards import accuracy_reward`.

They earn what TRL's earn.  Mathematics is read by math-verify as in TRL, but inside the sandbox, with a limit on time.
"""

from posttrain.trl.rewards.completion_rewards import (
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    think_format_reward,
)
from posttrain.trl.rewards.solution_rewards import (
    accuracy_reward,
    get_cosine_scaled_reward,
    reasoning_accuracy_reward,
)

__all__ = [
    "accuracy_reward",
    "get_cosine_scaled_reward",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "reasoning_accuracy_reward",
    "think_format_reward",
]
