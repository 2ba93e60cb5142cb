"""Credit per token, worked out by hand: rewards to go, and DeepSeekMath's steps."""

import math

import pytest
import torch

from posttrain.algorithms.credit import Evidence
from posttrain.algorithms.table import build_algorithm
from posttrain.errors import RunError
from tests.support.refusals import refused
from tests.support.sequences import doubles, evidence_of

nan = math.nan


def evidence(
    rewards: list[list[float]], parts: list[list[float]], *, steps: list[list[float]] | None = None
) -> Evidence:
    """One group a row; `parts` are the token rewards of each completion, `steps` those of them that are steps'."""
    flat = [doubles(*(value for part in each for value in part)) if each else None for each in (parts, steps)]
    lengths = torch.tensor([len(part) for part in parts]).view(len(rewards), -1)
    return evidence_of(rewards, lengths, limit=8, token_rewards=flat[0], step_rewards=flat[1])


def advantages(config: dict[str, object], given: Evidence) -> list[list[float]]:
    credit = build_algorithm(config).credit(given)
    return [part.tolist() for part in credit.advantages.split(given.lengths.flatten().tolist())]


# Two completions, of 3 and of 2 tokens, with rewards 1 and 0.
TWO = evidence([[1.0, 0.0]], [[0.2, 0.0, 0.4], [0.0, 0.5]])
# G = (1.6, 1.4, 1.4) and (0.5, 0.5), the second standing at 0.5 in the third place too.
ABOVE = [[0.55, 0.45, 0.45], [-0.55, -0.45]]  # G minus the mean of both


ONE_BY_ONE = evidence([[1.0], [0.0]], [[0.2, 0.0, 0.4], [0.0, 0.5]])


@pytest.mark.parametrize(
    ("config", "given", "expected"),
    [
        ({"name": "dr_grpo"}, TWO, ABOVE),
        # RLOO's baseline is what the others earn from the same place on.
        ({"name": "rloo"}, TWO, [[1.1, 0.9, 0.9], [-1.1, -0.9]]),
        # REINFORCE has none, or that of the whole step.
        ({"name": "reinforce"}, TWO, [[1.6, 1.4, 1.4], [0.5, 0.5]]),
        ({"name": "reinforce", "baseline": "batch_mean"}, ONE_BY_ONE, ABOVE),
        # The deviation holds where every completion is average somewhere: G = (6, 1), (0, 1) and (0, 1) centre to
        # (4, 0), (-2, 0), (-2, 0), mean squares 8, 2 and 2, σ² = 12 / 3.
        (
            {"name": "grpo"},
            evidence([[0.0, 0.0, 0.0]], [[5.0, 1.0], [-1.0, 1.0], [-1.0, 1.0]]),
            [[2, 0], [-1, 0], [-1, 0]],
        ),
    ],
)
def test_each_token_gets_what_is_earned_from_it_on_above_its_groups_mean_at_the_same_place(
    config, given, expected
) -> None:
    actual = advantages({**config, "credit": "reward_to_go"}, given)
    assert actual == [pytest.approx(part, abs=1e-15) for part in expected]


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
HALF = math.sqrt(3) / 2
BELOW = [[-1.0, -2.0, -2.0, -1.0], [1.0, 1.0, 0.0]]
PENALTIES = [[1.0, -0.25, 0.0, -0.25], [0.0, 1.0, 0.0]]
"""What steps earn, and .5 off for two tokens of the first completion."""


@pytest.mark.parametrize(
    ("options", "rewards", "parts", "steps", "expected"),
    [
        # The four steps earn 1, 0, 1, 0: normalised 1, -1, 1, -1.  Equal rewards of completions add nothing.
        ({}, [0.5, 0.5], OF_STEPS, STEPS, [[0.0, -1.0, -1.0, 0.0], [0.0, 0.0, -1.0]]),
        # Rewards of 1 and 0 are ±1 by themselves: steps are not part of them.
        ({"step_weight": 0.5}, [1.0, 0.0], OF_STEPS, STEPS, [[1.0, 0.5, 0.5, 1.0], [-1.0, -1.0, -1.5]]),
        # The deviation of steps is that of rewards: four steps off by 1/2, the sample's √(4 · 1/4 / 3) = 1/√3.
        ({"deviation": "none"}, [0.5, 0.5], OF_STEPS, STEPS, [[0.0, -0.5, -0.5, 0.0], [0.0, 0.0, -0.5]]),
        ({"deviation": "sample"}, [0.5, 0.5], OF_STEPS, STEPS, [[0, -HALF, -HALF, 0], [0, 0, -HALF]]),
        # A penalty beside the steps counts into the completion's reward: 1/2 and 1 are -1 and 1 after normalising.
        ({}, [1.0, 1.0], PENALTIES, STEPS, BELOW),
        # Without, ∓1/4, of which what steps earned is no part: those of 1, 0, 0 and 0 are 3/4 and -1/4.
        (
            {"deviation": "none"},
            [1.0, 1.0],
            [PENALTIES[0], [0.0, 0.0, 0.0]],
            [STEPS[0], [nan, 0.0, 0.0]],
            [[0.25, -0.5, -0.5, -0.25], [-0.25, -0.25, 0.0]],
        ),
        # One that every token bears does too: 1 - 4/4 and 1 - 3/4.
        ({}, [1.0, 1.0], [[value - 0.25 for value in part] for part in OF_STEPS], STEPS, BELOW),
        # Without steps a penalty is all that tokens earned.
        ({}, [1.0, 1.0], [[0.0, -0.25, -0.25], [0.0]], None, [[-1.0, -1.0, -1.0], [1.0]]),
        # A completion that nothing scored has no steps.
        ({}, [0.5, 0.5, nan], [*OF_STEPS, [9.0]], [*STEPS, [9.0]], [[0.0, -1.0, -1.0, 0.0], [0.0, 0.0, -1.0], [0.0]]),
    ],
)
def test_steps_are_normalised_over_the_group_and_summed_from_the_token_on(
    options, rewards, parts, steps, expected
) -> None:
    actual = advantages({"name": "grpo", "credit": "steps", **options}, evidence([rewards], parts, steps=steps))
    assert actual == [pytest.approx(part) for part in expected]


def test_scores_that_are_normalised_one_by_one_have_no_place_for_token_rewards() -> None:
    algorithm = build_algorithm({"name": "grpo", "reward_aggregation": "normalize_then_sum"})
    with refused("sum_then_normalize", error=RunError):
        algorithm.credit(TWO)
