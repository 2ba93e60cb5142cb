"""What a task's probe may measure: its own readings, as finite numbers, under no name that evaluation has."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from posttrain.generation.in_process import InProcessEngine
from posttrain.rewards.grading.function import reward_function
from posttrain.tasks.base import Probe, Reading
from posttrain.training.evaluation import Questions, full_evaluation
from tests.support.refusals import refused
from tests.support.tiny import some_prompts, tiny_policy


def short(completion_ids: list[list[int]]) -> list[float]:
    return [float(len(ids) < 6) for ids in completion_ids]


QUESTIONS = Questions(prompts=some_prompts([3, 5, 2, 4]), judge=reward_function(short), max_completion_tokens=6, seed=3)


@pytest.mark.parametrize(
    ("measured", "message"),
    [({"mean_length": 1.0}, "mean_length"), ({"other": 1.0}, "mine")],
)
def test_a_probe_gives_its_readings_and_nothing_that_is_measured_anyway(
    measured: dict[str, float], message: str
) -> None:
    probe = Probe(readings={"mine": Reading("mine")}, measure=lambda groups: measured)
    with refused(message):
        full_evaluation(InProcessEngine(tiny_policy()), replace(QUESTIONS, probes={"p": probe}), samples=1)


def with_probe(measured: object) -> Questions:
    """Questions of the task `odd` with a probe that measures this."""
    probe = Probe(readings={"mine": Reading("mine")}, measure=lambda groups: measured)  # type: ignore[arg-type, return-value]
    return replace(QUESTIONS, task="odd", probes={"p": probe})


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
        full_evaluation(InProcessEngine(tiny_policy()), replace(QUESTIONS, probes={"p": probe}), samples=1)


def test_a_probe_that_measures_nothing_says_so_with_a_mapping() -> None:
    with refused("'p'", "NoneType"):
        full_evaluation(InProcessEngine(tiny_policy()), with_probe(None), samples=1)
    results, _ = full_evaluation(InProcessEngine(tiny_policy()), with_probe({}), samples=1)
    assert "mine" not in results


@pytest.mark.parametrize("value", [np.float32(0.25), torch.tensor(0.25), np.array(0.25)])
def test_a_reading_of_numpy_or_torch_is_a_number_that_json_knows(value: object) -> None:
    results, _ = full_evaluation(InProcessEngine(tiny_policy()), with_probe({"mine": value}), samples=1)
    assert json.loads(json.dumps(results["mine"])) == 0.25
