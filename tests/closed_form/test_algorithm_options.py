"""Options of algorithms that are out of range, unknown or contradict each other: named with their value and remedy."""

import math
from dataclasses import replace
from typing import Any

import pytest

from posttrain.algorithms.algorithm import Algorithm
from posttrain.algorithms.losses import ClipRange
from posttrain.algorithms.table import ALGORITHMS, build_algorithm
from tests.support.refusals import refused

KL = {"coefficient": 1}
IN_REWARD = {**KL, "estimator": "k1", "place": "reward"}
ONE_BY_ONE = {"reward_aggregation": "normalize_then_sum"}

MISTAKES: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    # Names.
    ({}, ("algorithm.name is missing", *ALGORITHMS)),
    ({"name": "gpro"}, ("algorithm.name = 'gpro'", "Did you mean `grpo` or `gspo`?")),
    ({"name": "q_learning"}, ("algorithm.name = 'q_learning'", "There are: reinforce, rloo, grpo")),
    ({"name": 3}, ("algorithm.name = 3",)),
    ({"name": ["grpo"]}, ("algorithm.name = ['grpo']",)),
    ({"name": "grpo", "clip_hi": 0.3}, ("algorithm.clip_hi", "Did you mean `clip_high`?")),
    ({"name": "rloo", "zzz": 1}, ("algorithm.zzz", "There are: token_weights, clip_low, clip_high, reward_range,")),
    ({"name": "grpo", "kl": {"coeficient": 1}}, ("algorithm.kl.coeficient", "Did you mean `coefficient`?")),
    # Types.
    ({"name": "grpo", "clip_high": "wide"}, ("algorithm.clip_high = 'wide'", "a number")),
    ({"name": "grpo", "clip_high": True}, ("algorithm.clip_high = true", "a number")),
    ({"name": "grpo", "kl": 0.1}, ("algorithm.kl = 0.1", "mapping", "coefficient, estimator, place, importance")),
    ({"name": "grpo", "kl": {}}, ("algorithm.kl.coefficient is missing",)),
    ({"name": "grpo", "deviation": "sampel"}, ("'population', 'sample' or 'none'", "Did you mean `sample`?")),
    ({"name": "grpo", "kl": {**KL, "estimator": "k4"}}, ("algorithm.kl.estimator = 'k4'",)),
    ({"name": "dapo", "resample": {"max_rounds": 2.0}}, ("max_rounds = 2.0", "a whole number")),
    # Bounds.
    ({"name": "grpo", "clip_low": 1.5}, ("algorithm.clip_low = 1.5", "1")),
    ({"name": "grpo", "clip_low": -0.1}, ("algorithm.clip_low = -0.1", "0")),
    ({"name": "grpo", "clip_low": math.nan}, ("clip_low = nan", "1")),
    ({"name": "cispo", "clip_high": -0.1}, ("algorithm.clip_high = -0.1", "0")),
    ({"name": "dapo", "clip_high": math.nan}, ("clip_high = nan",)),
    ({"name": "grpo", "dual_clip": 1.1}, ("dual_clip = 1.1", "1.2", "or null")),
    ({"name": "grpo", "dual_clip": math.nan}, ("dual_clip = nan",)),
    ({"name": "grpo", "deviation_epsilon": -1}, ("deviation_epsilon = -1",)),
    ({"name": "grpo", "credit": "steps", "step_weight": 0.0}, ("step_weight = 0.0", "greater than 0")),
    ({"name": "grpo", "credit": "steps", "step_weight": math.inf}, ("step_weight = inf",)),
    ({"name": "grpo", "kl": {"coefficient": 0}}, ("algorithm.kl.coefficient = 0.0", "greater than 0")),
    ({"name": "grpo", "kl": {"coefficient": math.nan}}, ("algorithm.kl.coefficient = nan",)),
    ({"name": "grpo", "correction": {"truncate": 0.5}}, ("algorithm.correction.truncate = 0.5", "1", "null")),
    ({"name": "grpo", "correction": {"truncate": math.inf}}, ("truncate = inf", "finite")),
    ({"name": "grpo", "correction": {"mask_low": 1.5}}, ("mask_low = 1.5", "at most 1")),
    ({"name": "grpo", "correction": {"mask_low": -0.1}}, ("mask_low = -0.1", "at least 0")),
    ({"name": "grpo", "correction": {"mask_high": 0.9}}, ("mask_high = 0.9", "at least 1")),
    ({"name": "dapo", "resample": {"max_rounds": 0}}, ("algorithm.resample.max_rounds = 0", "at least 1")),
    ({"name": "dapo", "overlong": {"buffer": 0}}, ("algorithm.overlong.buffer = 0.0", "greater than 0")),
    ({"name": "dapo", "overlong": {"buffer": 1.1}}, ("algorithm.overlong.buffer = 1.1", "at most 1")),
    ({"name": "dapo", "overlong": {"penalty": 0}}, ("algorithm.overlong.penalty = 0.0", "greater than 0")),
    ({"name": "distill", "coefficient": 0}, ("algorithm.coefficient = 0", "greater than 0")),
    ({"name": "distill", "reward_weight": -1}, ("algorithm.reward_weight = -1", "0")),
    ({"name": "ppo", "gae": {"gamma": 1.1}}, ("algorithm.gae.gamma = 1.1", "at most 1")),
    ({"name": "ppo", "gae": {"lambda_policy": -0.1}}, ("lambda_policy = -0.1", "at least 0")),
    ({"name": "ppo", "gae": {"lambda_value": math.nan}}, ("lambda_value = nan",)),
    ({"name": "ppo", "gae": {"length_adaptive": 0.0}}, ("length_adaptive = 0.0", "null")),
    ({"name": "ppo", "adaptive_kl": {"target": 0.0}}, ("adaptive_kl.target = 0.0", "greater than 0")),
    ({"name": "ppo", "adaptive_kl": {"target": 1.0, "horizon": 0.0}}, ("horizon = 0.0", "greater than 0")),
    ({"name": "ppo", "reward_scaling": {"clip": 0.0}}, ("reward_scaling.clip = 0.0", "null")),
    ({"name": "ppo", "value_loss": {"clip": 0.0}}, ("value_loss.clip = 0.0", "null")),
    ({"name": "ppo", "value_loss": {"coefficient": 0.0}}, ("value_loss.coefficient = 0.0",)),
    ({"name": "ppo", "entropy_bonus": -0.1}, ("entropy_bonus = -0.1",)),
    ({"name": "ppo", "missing_stop_penalty": -1.0}, ("missing_stop_penalty = -1",)),
    ({"name": "ppo", "largest_epoch_kl": 0.0}, ("largest_epoch_kl = 0", "greater than 0")),
    ({"name": "ppo", "critic": {"rate_scale": 0.0}}, ("critic.rate_scale = 0.0",)),
    ({"name": "ppo", "critic": {"fit_steps": -1}}, ("critic.fit_steps = -1",)),
    ({"name": "ppo", "critic": {"max_grad_norm": 0.0}}, ("critic.max_grad_norm = 0.0",)),
    # Options that nothing would read, or that contradict each other.
    ({"name": "grpo", "deviation": "none", "deviation_epsilon": 1e-4}, ("deviation_epsilon = 0.0001", "none")),
    ({"name": "cispo", "deviation": "none", "deviation_over": "batch"}, ("deviation_over = batch", "none")),
    ({"name": "grpo", "step_weight": 0.5}, ("step_weight", "credit = steps")),
    ({"name": "grpo", "credit": "steps", **ONE_BY_ONE}, ("credit = steps", "sum_then_normalize")),
    ({"name": "grpo", "credit": "reward_to_go", "deviation_over": "batch"}, ("reward_to_go", "deviation_over: group")),
    ({"name": "grpo", "kl": {**IN_REWARD, "estimator": "full"}}, ("estimator = full", "only for place = loss")),
    ({"name": "grpo", "kl": {**IN_REWARD, "importance": "token"}}, ("importance = token", "only for place = loss")),
    ({"name": "grpo", "kl": {**IN_REWARD, "level": "completion"}}, ("level = completion", "only for place = loss")),
    ({"name": "grpo", "kl": {**KL, "estimator": "full", "importance": "token"}}, ("importance", "k1 or k2 or k3")),
    ({"name": "grpo", "kl": {**KL, "estimator": "full", "level": "completion"}}, ("completion", "k1 or k2 or k3")),
    ({"name": "grpo", "kl": IN_REWARD, **ONE_BY_ONE}, ("kl.place = reward", "kl.place = loss")),
    ({"name": "dapo", **ONE_BY_ONE}, ("overlong", "`overlong: null`")),
    ({"name": "grpo", "deviation": "none", **ONE_BY_ONE}, ("deviation = none", "population or sample")),
    ({"name": "cispo", "deviation_over": "batch", **ONE_BY_ONE}, ("deviation_over = batch", "group")),
    ({"name": "rloo", "clip_low": 0.2}, ("clip_low = 0.2", "mean_over_sequences")),
    ({"name": "rloo", "credit": "reward_to_go", "normalize_advantages": True}, ("reward_to_go", "credit: completion")),
    ({"name": "rloo", "credit": "reward_to_go", "reward_range": [0, 1]}, ("reward_to_go", "credit: completion")),
    ({"name": "maxrl", "kl": IN_REWARD}, ("kl.place = reward", "place = loss")),
    ({"name": "grpo", "correction": {"level": None, "mask_high": 2.0, "truncate": 5.0}}, ("truncate = 5.0", "level")),
    ({"name": "grpo", "correction": {"mask_level": "sequence_product"}}, ("mask_level = sequence_product", "mask_low")),
    ({"name": "grpo", "correction": {"level": None}}, ("level = null", "`correction: null`")),
    ({"name": "distill", "horizon": "completion"}, ("horizon = completion", "signal = sampled")),
    ({"name": "distill", "correction": {}}, ("correction", "signal = sampled", "Leave it out")),
    ({"name": "distill", "clip_low": 0.1}, ("clip_low", "Leave it out")),
    ({"name": "distill", "clip_high": 0.3}, ("clip_high", "Leave it out")),
    ({"name": "distill", "kl": IN_REWARD}, ("kl.place = reward", "kl.place = loss")),
    ({"name": "ppo", "baseline": "none", "critic": {"head": "linear"}}, ("critic", "baseline = critic")),
    ({"name": "ppo", "baseline": "leave_one_out", "value_loss": {"clip": 0.2}}, ("value_loss", "baseline = critic")),
    ({"name": "ppo", "baseline": "none", "gae": {"truncated": "bootstrap"}}, ("gae.truncated", "baseline = critic")),
    ({"name": "ppo", "baseline": "none", "gae": {"lambda_value": 0.9}}, ("gae.lambda_value", "baseline = critic")),
    (
        {"name": "ppo", "gae": {"estimator": "one_step", "length_adaptive": 0.05}},
        ("length_adaptive = 0.05", "one_step"),
    ),
    ({"name": "ppo", "adaptive_kl": {"target": 6.0}}, ("adaptive_kl", "estimator: k1, place: reward")),
    ({"name": "ppo", "adaptive_kl": {"target": 6.0}, "kl": KL}, ("adaptive_kl", "estimator: k1, place: reward")),
    ({"name": "ppo", "reward_scaling": {"centre": False, "scale": False, "clip": None}}, ("clip = null", "centre")),
    ({"name": "ppo", "critic": {"trunk": "own", "through_trunk": False}}, ("through_trunk", "trunk = own")),
]


@pytest.mark.parametrize(("config", "words"), MISTAKES, ids=str)
def test_a_mistake_is_named_with_its_value_and_the_remedy(config: dict[str, Any], words: tuple[str, ...]) -> None:
    with refused(*words):
        build_algorithm(config)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("grpo", {"clip_low": 1.5}, ("clip_low = 1.5", "at least 0 and at most 1")),
        ("ppo", {"largest_epoch_kl": 0.0}, ("largest_epoch_kl = 0.0", "greater than 0, or null")),
        ("distill", {"coefficient": math.nan}, ("coefficient = nan", "a finite number greater than 0")),
    ],
)
def test_a_row_called_in_python_is_held_to_the_same_bounds(name, options, words) -> None:
    with refused(*words):
        ALGORITHMS[name](**options)


@pytest.mark.parametrize("bounds", [(-0.1, 0.2), (1.1, 0.2), (math.nan, 0.2), (0.2, -0.1), (0.2, math.nan)])
def test_a_clip_range_that_no_ratio_fits_is_an_error(bounds: tuple[float, float]) -> None:
    with refused(min(bounds, key=lambda bound: bound == 0.2)):
        ClipRange(low=bounds[0], high=bounds[1])


def test_a_row_whose_terms_need_another_model_names_it() -> None:
    with refused("algorithm distill", "teacher = None", "TeacherOptions"):
        replace(build_algorithm({"name": "distill"}), teacher=None)
    ppo = build_algorithm({"name": "ppo"})
    with refused("algorithm mine", "critic = None", "CriticOptions"):
        Algorithm(name="mine", credit=ppo.credit, terms=ppo.terms, token_weights=ppo.token_weights)
