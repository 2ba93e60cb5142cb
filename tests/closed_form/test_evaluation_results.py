"""The table at the end of a run, for rewards of any kind, and what a task's probe may measure."""

import json
from dataclasses import replace
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
from posttrain.training.evaluation import Answers, Questions, accuracies, full_evaluation, held_out_metrics
from posttrain.training.held_out import comparison
from posttrain.training.report import unmeasured_lines
from tests.support.refusals import refused
from tests.support.tiny import some_prompts, tiny_policy

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
    scores = torch.tensor([[0.0, 1.0], [2.0, 3.0]])
    numbers = scores.double().numpy()
    answers = Answers(groups=(), scores=numbers, rewards=numbers, outcomes={}, logged={})
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


def short(completion_ids: list[list[int]]) -> list[float]:
    return [float(len(ids) < 6) for ids in completion_ids]


PROBED = Questions(prompts=some_prompts([3, 5, 2, 4]), judge=reward_function(short), max_completion_tokens=6, seed=3)


@pytest.mark.parametrize(
    ("measured", "message"),
    [({"mean_length": 1.0}, "mean_length"), ({"other": 1.0}, "mine")],
)
def test_a_probe_gives_its_readings_and_nothing_that_is_measured_anyway(measured, message) -> None:
    probe = Probe(readings={"mine": Reading("mine")}, measure=lambda groups: measured)
    with refused(message):
        full_evaluation(InProcessEngine(tiny_policy()), replace(PROBED, probes={"p": probe}), samples=1)


def with_probe(measured: object) -> Questions:
    """Questions of the task `odd` with a probe that measures this."""
    probe = Probe(readings={"mine": Reading("mine")}, measure=lambda groups: measured)  # type: ignore[arg-type, return-value]
    return replace(PROBED, task="odd", probes={"p": probe})


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (float("nan"), "nan (float)"),
        (float("inf"), "inf (float)"),
        (None, "None (NoneType)"),
        ("0.5", "'0.5' (str)"),
        (torch.ones(2), "tensor([1., 1.]) (Tensor)"),
        (10**400, "1000"),
    ],
    ids=["nan", "inf", "none", "text", "two", "too large"],
)
def test_a_reading_that_is_no_finite_number_is_refused_by_task_probe_and_name(value: object, said: str) -> None:
    with refused("'p'", f"mine = {said}"):
        full_evaluation(InProcessEngine(tiny_policy()), with_probe({"mine": value}), samples=1)


def test_names_that_a_probe_must_not_give_are_said_in_order() -> None:
    names = ["zeta", "alpha", "mu", "kappa", "beta", "omega"]
    with refused("measured alpha, beta, kappa, mu, omega, zeta, but its readings are"):
        full_evaluation(InProcessEngine(tiny_policy()), with_probe(dict.fromkeys(names, 1.0)), samples=1)
    taken = ["num_unscored", "accuracy_sampled", "outcomes", "accuracy_greedy", "mean_length", "num_problems"]
    probe = Probe(readings={name: Reading(name) for name in taken}, measure=lambda groups: dict.fromkeys(taken, 1.0))
    with refused(f"gives {', '.join(sorted(taken))}, which evaluation has already"):
        full_evaluation(InProcessEngine(tiny_policy()), replace(PROBED, probes={"p": probe}), samples=1)


def test_a_probe_that_measures_nothing_says_so_with_a_mapping() -> None:
    with refused("'p'", "NoneType"):
        full_evaluation(InProcessEngine(tiny_policy()), with_probe(None), samples=1)
    results, _ = full_evaluation(InProcessEngine(tiny_policy()), with_probe({}), samples=1)
    assert "mine" not in results


@pytest.mark.parametrize("value", [np.float32(0.25), torch.tensor(0.25), np.array(0.25)])
def test_a_reading_of_numpy_or_torch_is_a_number_that_json_knows(value: object) -> None:
    results, _ = full_evaluation(InProcessEngine(tiny_policy()), with_probe({"mine": value}), samples=1)
    assert json.loads(json.dumps(results["mine"])) == 0.25
