"""The table at the end of a run, for rewards of any kind, and what a task's probe may measure."""

import json
import math
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

from posttrain.generation.in_process import InProcessEngine
from posttrain.options.reward import GradingOptions, RewardOptions
from posttrain.rewards.grading.function import reward_function
from posttrain.rewards.reward_registry import load_reward
from posttrain.runs.reports import headline
from posttrain.tasks.base import Probe, Reading
from posttrain.training.evaluation import Answers, Questions, held_out_metrics
from posttrain.training.full_evaluation import accuracies, full_evaluation, pass_at_k
from posttrain.training.held_out import comparison
from posttrain.training.report import unmeasured_lines
from tests.support.refusals import refused
from tests.support.tiny import measures, some_prompts, tiny_policy

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
def test_the_table_has_the_reward_or_the_accuracy_or_both(before, after, shown) -> None:
    assert labels(before, after) == shown


def test_a_reward_that_counts_has_no_accuracy_but_a_mean() -> None:
    """Counts of 0 to 3: `score >= 1` would be called right, and an accuracy of 1.000 stand above the mean."""
    scores = np.array([[0.0, 1.0], [2.0, 3.0]])
    answers = Answers(groups=(), scores=scores, rewards=scores, outcomes={}, logged={})
    paid, free = (replace(QUESTIONS, rewards=rewards) for rewards in ((QUESTIONS.judge,), ()))
    assert answers.counts
    assert set(accuracies(answers, answers, answers.correct, paid)) == {"accuracy"}
    found = accuracies(answers, answers, answers.correct, free)
    assert set(found) == {"accuracy", "score", "score_interval"}
    assert found["score"] == (0.5 + 2.5) / 2
    solved = replace(answers, scores=scores.clip(max=1))
    assert accuracies(solved, solved, solved.correct, paid)["accuracy_sampled"] == (0.5 + 1.0) / 2
    assert "accuracy_sampled" not in accuracies(solved, solved, solved.correct, replace(paid, counts=True))
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
    lines = unmeasured_lines({"training_reward": {"first_step": 0.25, "last_step": 0.5}})
    for part in ("No rows were held out", "task.held_out_share", "task.held_out_path"):
        assert part in " ".join(lines)
    assert lines[2] == "Reward in training: 0.250 in the first step, 0.500 in the last."
    unknown = unmeasured_lines({"training_reward": {"first_step": None, "last_step": 0.5}})
    assert unknown[-1].startswith("Reward in training: unknown")
    assert len(unmeasured_lines({"training_reward": None})) == 2


def short(completion_ids: list[list[int]]) -> list[float]:
    return [float(len(ids) < 6) for ids in completion_ids]


PROBED = Questions(prompts=some_prompts([3, 5, 2, 4]), judge=reward_function(short), max_completion_tokens=6, seed=3)


def evaluated(measured: object, *readings: str) -> dict[str, Any]:
    """Results on the task `odd` with a probe of these readings that measures this."""
    named = {name: Reading(name) for name in readings or ("mine",)}
    probe = Probe(readings=named, measure=lambda groups: measured)
    questions = replace(PROBED, task="odd", probes={"p": probe})
    return full_evaluation(InProcessEngine(tiny_policy()), questions, measures(1))[0]


NAMES = ("zeta", "alpha", "mu", "kappa", "beta", "omega")
TAKEN = ("num_unscored", "accuracy_sampled", "outcomes", "accuracy_greedy", "mean_length", "num_problems")


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        *(({"mine": given}, f"mine = {given!r} ({type(given).__name__})") for given in (math.nan, math.inf, None, "1")),
        ({"mine": torch.ones(2)}, "mine = tensor([1., 1.]) (Tensor)"),
        ({"mine": 10**400}, "mine = 1000"),
        (None, "NoneType"),
        ({"other": 1.0}, "mine"),
        ({"mean_length": 1.0}, "mean_length"),
        (dict.fromkeys(NAMES, 1.0), "returned alpha, beta, kappa, mu, omega, zeta, but its readings are"),
    ],
    ids=["nan", "inf", "none", "text", "two", "too large", "nothing", "other", "taken", "in order"],
)
def test_what_a_probe_measures_must_be_its_readings_as_finite_numbers(measured: object, said: str) -> None:
    with refused("'p'", said):
        evaluated(measured)


def test_a_probe_gives_nothing_that_is_measured_anyway() -> None:
    with refused(f"returned {', '.join(sorted(TAKEN))}, which evaluations already have"):
        evaluated(dict.fromkeys(TAKEN, 1.0), *TAKEN)


def test_a_probe_may_leave_readings_out() -> None:
    assert "mine" not in evaluated({})


@pytest.mark.parametrize("value", [np.float32(0.25), torch.tensor(0.25), np.array(0.25)])
def test_a_reading_of_numpy_or_torch_is_a_number_that_json_knows(value: object) -> None:
    assert json.loads(json.dumps(evaluated({"mine": value})["mine"])) == 0.25


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_share_of_choices_of_k_samples_that_hold_a_right_one(k: int) -> None:
    correct = np.array([[1.0] * right + [0.0] * (5 - right) for right in range(6)])
    by_hand = [np.mean([any(row[list(chosen)]) for chosen in combinations(range(5), k)]) for row in correct]
    assert pass_at_k(correct, k) == pytest.approx(np.array(by_hand), abs=1e-15)


def test_the_chance_that_one_of_k_is_right_is_of_scored_samples() -> None:
    nan = np.nan
    correct = np.array([[1.0, 0, 0, nan], [nan, nan, 1, 0], [0, 0, 0, 0]])
    assert pass_at_k(correct, 3).tolist() == [1.0, 0.0]  # 1 of 3; too few; none of 4
    assert pass_at_k(correct, 2).tolist() == pytest.approx([2 / 3, 1.0, 0.0])
