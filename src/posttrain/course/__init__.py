"""The functions that courses on RLHF and GRPO have their readers write, over this library and under the same names.

Each takes and gives what the course's function does, is a few lines over a function of ours that the loop uses too, and
says which mistake of the course it does not make.  docs/course.md has the table: document, function, ours, mistake.
"""

from posttrain.course.countdown_episodes import create_grpo_training_episodes
from posttrain.course.formulas import (
    calc_kl_penalty,
    compute_advantages,
    compute_group_advantages,
    compute_grpo_advantages,
    compute_grpo_loss,
    grpo_sequence_loss,
)
from posttrain.course.one_group import compute_log_probs, grpo_step

__all__ = [
    "calc_kl_penalty",
    "compute_advantages",
    "compute_group_advantages",
    "compute_grpo_advantages",
    "compute_grpo_loss",
    "compute_log_probs",
    "create_grpo_training_episodes",
    "grpo_sequence_loss",
    "grpo_step",
]
