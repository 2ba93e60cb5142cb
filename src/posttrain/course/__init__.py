"""The functions that courses on RLHF and GRPO have their readers write, over this library and under the same names.

Each has the arguments and results of the course's function, is a few lines over a function that our loop also uses, and
explains the mistake in the course's version.  docs/course.md has the table: document, function, ours, mistake.
`posttrain course check FUNCTION FILE.py` tries a version of your own; `posttrain course mistake N` trains a mistake.
"""

from posttrain.course.actor_critic import RLHFConfig, TransformerWithValueHead, compare_models, rlhf_step
from posttrain.course.countdown_episodes import (
    compute_total_reward,
    create_countdown_prompt,
    create_grpo_training_episodes,
    equation_reward_func,
    format_reward,
    format_reward_func,
    generate_countdown_problem,
    reward_fn_period_count,
    simple_math_reward_func,
)
from posttrain.course.formulas import (
    calc_kl_penalty,
    compute_advantages,
    compute_group_advantages,
    compute_grpo_advantages,
    compute_grpo_loss,
    grpo_sequence_loss,
)
from posttrain.course.grid_demonstrations import (
    compute_expected_svf,
    feature_expectation_from_trajectories,
    initial_probabilities_from_trajectories,
    maxent_irl,
)
from posttrain.course.homework import (
    HomeworkConfig,
    completion_log_probs,
    evaluate_format_rate,
    grpo_update,
    sample_group,
)
from posttrain.course.one_prompt import compute_log_probs, grpo_step

__all__ = [
    "HomeworkConfig",
    "RLHFConfig",
    "TransformerWithValueHead",
    "calc_kl_penalty",
    "compare_models",
    "completion_log_probs",
    "compute_advantages",
    "compute_expected_svf",
    "compute_group_advantages",
    "compute_grpo_advantages",
    "compute_grpo_loss",
    "compute_log_probs",
    "compute_total_reward",
    "create_countdown_prompt",
    "create_grpo_training_episodes",
    "equation_reward_func",
    "evaluate_format_rate",
    "feature_expectation_from_trajectories",
    "format_reward",
    "format_reward_func",
    "generate_countdown_problem",
    "grpo_sequence_loss",
    "grpo_step",
    "grpo_update",
    "initial_probabilities_from_trajectories",
    "maxent_irl",
    "reward_fn_period_count",
    "rlhf_step",
    "sample_group",
    "simple_math_reward_func",
]
