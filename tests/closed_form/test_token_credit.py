"""Credit per token, worked out by hand: rewards to go, and DeepSeekMath's steps."""

import math

import pytest
import torch

from posttrain.algorithms.credit import Evidence
from posttrain.algorithms.table import build_algorithm
from posttrain.errors import RunError
from tests.support.refusals import refused

nan = math.nan


def evidence(
    rewards: list[list[float]], parts: list[list[float]], *, steps: list[list[float]] | None = None
) -> Evidence:
    """One group a row; `parts` are the token rewards of each completion, `steps` those of them that are steps'."""
    table = torch.tensor(rewards, dtype=torch.float64)
    return Evidence(
        rewards=table,
        scores=table[None],
        weights=torch.ones(1, dtype=torch.float64),
        lengths=torch.tensor([len(part) for part in parts]).view(table.shape),
        max_completion_tokens=8,
        token_rewards=torch.tensor([value for part in parts for value in part], dtype=torch.float64),
        step_rewards=None
        if steps is None
        else torch.tensor([value for part in steps for value in part], dtype=torch.float64),
    )


def advantages(config: dict[str, object], given: Evidence) -> list[list[float]]:
    credit = build_algorithm(config).credit(given)
    return [part.tolist() for part in credit.advantages.split(given.lengths.flatten().tolist())]


# Two completions, of 3 and of 2 tokens, with rewards 1 and 0.
TWO = evidence([[1.0, 0.0]], [[0.2, 0.0, 0.4], [0.0, 0.5]])
# G = (1.6, 1.4, 1.4) and (0.5, 0.5), the second standing at 0.5 in the third place too.
ABOVE = [[0.55, 0.45, 0.45], [-0.55, -0.45]]  # G minus the mean of both


def test_each_token_gets_what_is_earned_from_it_on_above_its_groups_mean_at_the_same_place() -> None:
    actual = advantages({"name": "dr_grpo", "credit": "reward_to_go"}, TWO)
    assert [pytest.approx(part, abs=1e-15) for part in ABOVE] == actual


def test_the_baseline_of_rloo_is_what_the_others_earn_from_the_same_place_on() -> None:
    actual = advantages({"name": "rloo", "credit": "reward_to_go"}, TWO)
    assert actual == [pytest.approx([1.1, 0.9, 0.9]), pytest.approx([-1.1, -0.9])]


def test_reinforce_has_no_baseline_or_that_of_the_whole_step() -> None:
    config = {"name": "reinforce", "credit": "reward_to_go"}
    assert advantages(config, TWO) == [pytest.approx([1.6, 1.4, 1.4]), pytest.approx([0.5, 0.5])]
    two_groups = evidence([[1.0], [0.0]], [[0.2, 0.0, 0.4], [0.0, 0.5]])
    actual = advantages(config | {"baseline": "batch_mean"}, two_groups)
    assert [pytest.approx(part, abs=1e-15) for part in ABOVE] == actual


@pytest.mark.parametrize(("deviation", "degrees"), [("population", 2), ("sample", 1)])
@pytest.mark.parametrize("epsilon", [0.0, 0.1])
def test_grpo_divides_by_the_root_mean_square_of_its_groups_centred_returns(deviation, degrees, epsilon) -> None:
    # Each completion counts alike, however long: σ² = (mean of .55², .45², .45² + mean of .55², .45²) / degrees.
    squares = (0.55**2 + 2 * 0.45**2) / 3 + (0.55**2 + 0.45**2) / 2
    divisor = math.sqrt(squares / degrees) + epsilon
    config = {"name": "grpo", "credit": "reward_to_go", "deviation": deviation, "deviation_epsilon": epsilon}
    assert advantages(config, TWO) == [pytest.approx([each / divisor for each in part]) for part in ABOVE]


# Steps of 1, 0 and 0 in the first completion and of 1 in the second: mean 1/2 over four, population deviation 1/2.
STEPS = [[1.0, nan, 0.0, nan], [nan, 1.0, 0.0]]
OF_STEPS = [[0.0 if value != value else value for value in part] for part in STEPS]


def test_steps_are_normalised_over_the_group_and_summed_from_the_token_on() -> None:
    # The four steps earn 1, 0, 1, 0: normalised 1, -1, 1, -1.  Equal rewards of completions add nothing.
    given = evidence([[0.5, 0.5]], OF_STEPS, steps=STEPS)
    assert advantages({"name": "grpo", "credit": "steps"}, given) == [[0.0, -1.0, -1.0, 0.0], [0.0, 0.0, -1.0]]


def test_an_outcome_counts_beside_its_steps_as_the_step_weight_says() -> None:
    # Rewards of 1 and 0 are ±1 by themselves: steps are not part of them.
    given = evidence([[1.0, 0.0]], OF_STEPS, steps=STEPS)
    actual = advantages({"name": "grpo", "credit": "steps", "step_weight": 0.5}, given)
    assert actual == [[1.0, 0.5, 0.5, 1.0], [-1.0, -1.0, -1.5]]


def test_the_deviation_of_steps_is_that_of_rewards() -> None:
    given = evidence([[0.5, 0.5]], OF_STEPS, steps=STEPS)
    config = {"name": "grpo", "credit": "steps"}
    in_units = advantages(config | {"deviation": "none"}, given)
    assert in_units == [[0.0, -0.5, -0.5, 0.0], [0.0, 0.0, -0.5]]
    # Four steps off by 1/2: the sample deviation is √(4 · 1/4 / 3) = 1/√3, and half of √3 is each step.
    sample = advantages(config | {"deviation": "sample"}, given)
    half = math.sqrt(3) / 2
    assert sample == [pytest.approx([0, -half, -half, 0]), pytest.approx([0, 0, -half])]


def test_a_penalty_beside_the_steps_counts_into_the_completions_reward() -> None:
    penalties = [[0.0, -0.25, 0.0, -0.25], [0.0, 0.0, 0.0]]
    both = [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(OF_STEPS, penalties, strict=True)]
    given = evidence([[1.0, 1.0]], both, steps=STEPS)
    # 1/2 and 1 are -1 and 1 after normalising; the steps are as before.
    actual = advantages({"name": "grpo", "credit": "steps"}, given)
    assert actual == [[-1.0, -2.0, -2.0, -1.0], [1.0, 1.0, 0.0]]
    # Without, ∓1/4, of which what steps earned is no part: those of 1, 0, 0 and 0 are 3/4 and -1/4.
    fewer = [STEPS[0], [nan, 0.0, 0.0]]
    both[1] = [0.0, 0.0, 0.0]
    given = evidence([[1.0, 1.0]], both, steps=fewer)
    actual = advantages({"name": "grpo", "credit": "steps", "deviation": "none"}, given)
    assert actual == [[0.25, -0.5, -0.5, -0.25], [-0.25, -0.25, 0.0]]


def test_a_penalty_that_every_token_bears_counts_into_the_completions_reward() -> None:
    # 1 - 4/4 and 1 - 3/4: the second is the better of the two.
    both = [[value - 0.25 for value in part] for part in OF_STEPS]
    actual = advantages({"name": "grpo", "credit": "steps"}, evidence([[1.0, 1.0]], both, steps=STEPS))
    assert actual == [[-1.0, -2.0, -2.0, -1.0], [1.0, 1.0, 0.0]]


def test_without_steps_a_penalty_is_all_that_tokens_earned() -> None:
    given = evidence([[1.0, 1.0]], [[0.0, -0.25, -0.25], [0.0]])
    assert advantages({"name": "grpo", "credit": "steps"}, given) == [[-1.0, -1.0, -1.0], [1.0]]


def test_the_deviation_of_returns_holds_where_every_completion_is_average_somewhere() -> None:
    # G = (6, 1), (0, 1) and (0, 1): centred (4, 0), (-2, 0), (-2, 0), mean squares 8, 2 and 2, σ² = 12 / 3.
    given = evidence([[0.0, 0.0, 0.0]], [[5.0, 1.0], [-1.0, 1.0], [-1.0, 1.0]])
    actual = advantages({"name": "grpo", "credit": "reward_to_go"}, given)
    assert actual == [pytest.approx([2, 0]), pytest.approx([-1, 0]), pytest.approx([-1, 0])]


def test_a_completion_that_nothing_scored_has_no_steps() -> None:
    unscored = evidence([[0.5, 0.5, nan]], [*OF_STEPS, [9.0]], steps=[*STEPS, [9.0]])
    actual = advantages({"name": "grpo", "credit": "steps"}, unscored)
    assert actual == [[0.0, -1.0, -1.0, 0.0], [0.0, 0.0, -1.0], [0.0]]


def test_scores_that_are_normalised_one_by_one_have_no_place_for_token_rewards() -> None:
    algorithm = build_algorithm({"name": "grpo", "reward_aggregation": "normalize_then_sum"})
    with refused("sum_then_normalize", error=RunError):
        algorithm.credit(TWO)
