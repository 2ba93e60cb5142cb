"""What stands at the end of a run: a table that makes sense for rewards of any kind, and without held-out rows."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from posttrain.options.reward import GradingOptions, RewardOptions
from posttrain.records import Grades
from posttrain.rewards.reward_registry import load_reward
from posttrain.runs.summary import headline
from posttrain.training.evaluation import Answers, Questions, accuracies
from posttrain.training.held_out import comparison, held_out_metrics
from posttrain.training.report import unmeasured_lines

QUESTIONS = Questions(
    prompts=(),
    judge=load_reward(RewardOptions(name="period_count")),
    max_completion_tokens=4,
    seed=0,
    grading=GradingOptions(),
)
ACCURACIES = ("accuracy_sampled", "accuracy_greedy", "pass_at_8")


def results(*, accuracy: float | None = 0.0, reward: float | None = None) -> dict[str, Any]:
    """Those of an evaluation, with intervals of no width."""
    numbers = dict.fromkeys(ACCURACIES, accuracy) | {"reward": reward}
    spread = {f"{name}_interval": None if value is None else [value, value] for name, value in numbers.items()}
    return {**numbers, **spread, "mean_length": 7.0}


def labels(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [label for label, _, _ in comparison({"before": before, "after": after})]


ACCURACY_ROWS = ["accuracy, sampled at temperature 1", "accuracy, greedy", "pass@8"]
REWARD, LENGTH = "reward, sampled at temperature 1", "mean length, tokens"


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [
        # A reward of 0 and 1 is the accuracy: told once, also where nothing was ever right.
        (results(accuracy=0.25, reward=0.25), results(accuracy=0.5, reward=0.5), [*ACCURACY_ROWS, LENGTH]),
        (results(accuracy=0.0, reward=0.0), results(accuracy=0.0, reward=0.0), [*ACCURACY_ROWS, LENGTH]),
        # A shaped reward that never reaches 1 has no accuracy.
        (results(reward=-3.0), results(reward=-1.5), [REWARD, LENGTH]),
        # It has one as soon as some answer of the run was right.
        (results(reward=0.2), results(accuracy=0.1, reward=0.4), [REWARD, *ACCURACY_ROWS, LENGTH]),
        # Training pays for something that is not measured here, or the run began before rewards were.
        (results(accuracy=0.0), results(accuracy=0.0), [*ACCURACY_ROWS, LENGTH]),
        # The judge scores nothing, and the other rewards something.
        (results(accuracy=None, reward=0.5), results(accuracy=None, reward=0.6), [REWARD, LENGTH]),
    ],
)
def test_the_table_has_the_reward_or_the_accuracy_or_both(
    before: dict[str, Any], after: dict[str, Any], shown: list[str]
) -> None:
    assert labels(before, after) == shown


def test_a_reward_that_counts_has_no_accuracy_but_a_mean() -> None:
    """Counts of 0 to 3: `score >= 1` would be called right, and an accuracy of 1.000 stand above the mean."""
    scores = torch.tensor([[0.0, 1.0], [2.0, 3.0]])
    ones, numbers = torch.ones(1, dtype=torch.float64), scores.double().numpy()
    grades = Grades(names=("count",), scores=scores[None].double(), weights=ones, rewards=scores.double())
    answers = Answers(groups=(), scores=numbers, rewards=numbers, outcomes={}, logged={}, grades=grades)
    paid, free = (replace(QUESTIONS, rewards=rewards) for rewards in ((QUESTIONS.judge,), ()))
    assert answers.counts
    assert set(accuracies(answers, answers, paid)) == {"accuracy"}
    found = accuracies(answers, answers, free)
    assert set(found) == {"accuracy", "score", "score_interval"}
    assert found["score"] == (0.5 + 2.5) / 2
    solved = replace(answers, scores=scores.clamp(max=1).double().numpy())
    assert accuracies(solved, solved, paid)["accuracy_sampled"] == (0.5 + 1.0) / 2
    assert "accuracy_sampled" not in accuracies(solved, solved, replace(paid, counts=True))
    before, after = results(accuracy=None, reward=1.6), results(accuracy=None, reward=2.8)
    assert labels(before, after) == [REWARD, LENGTH]
    assert headline({"reward": 1.6, "accuracy_sampled": None}) == ("reward", 1.6)


def test_a_run_from_before_rewards_were_measured_is_compared_as_it_was() -> None:
    earlier = {name: value for name, value in results(accuracy=0.25).items() if not name.startswith("reward")}
    assert labels(earlier, results(accuracy=0.5, reward=0.5)) == [*ACCURACY_ROWS, LENGTH]
    assert "eval/reward" not in held_out_metrics(earlier)


def test_a_reward_is_shown_with_its_interval() -> None:
    before = results(reward=-1.5) | {"reward_interval": [-2.0, -1.0]}
    rows = comparison({"before": before, "after": results(reward=0.25)})
    assert rows[0] == (REWARD, "-1.500 [-2.000, -1.000]", "0.250 [0.250, 0.250]")


def test_without_held_out_rows_the_end_says_how_to_have_some() -> None:
    first, last = {"first_step": 0.25, "last_step": 0.5}, {"first_step": None, "last_step": 0.5}
    nothing, remedy, told = unmeasured_lines({"training_reward": first})
    assert "No rows were held out" in nothing
    assert "task.held_out_share" in remedy
    assert "task.held_out_path" in remedy
    assert told == "Reward in training: 0.250 in the first step, 0.500 in the last."
    assert unmeasured_lines({"training_reward": last})[-1].startswith("Reward in training: unknown")
    assert len(unmeasured_lines({"training_reward": None})) == 2
