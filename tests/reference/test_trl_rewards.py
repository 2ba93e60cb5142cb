"""posttrain.trl.rewards says what TRL 1.16's reward functions say; `make trl-parity` has TRL say it anew."""

import json
import runpy
from pathlib import Path
from typing import Any

from posttrain.rewards.grading.function import name_of_callable
from posttrain.trl import rewards
from tests.support.refusals import refused

ROOT = Path(__file__).parents[2]
CASES = runpy.run_path(str(ROOT / "benchmarks" / "trl" / "parity" / "reward_cases.py"))
BY_TRL: dict[str, list[Any]] = json.loads((ROOT / "tests" / "data" / "trl_rewards.json").read_text(encoding="utf-8"))


def test_every_function_says_what_trl_says() -> None:
    ours = CASES["answers_of"](rewards)
    assert ours.keys() == BY_TRL.keys()
    for question, expected in BY_TRL.items():
        assert ours[question] == expected, question


def test_the_questions_tell_right_from_wrong_from_unread() -> None:
    for name in ("accuracy_reward", "reasoning_accuracy_reward"):
        assert {*BY_TRL[name]} == {0.0, 1.0, None}


def test_every_name_of_trl_s_module_is_here_and_called_the_same_in_logs() -> None:
    assert {*rewards.__all__} == {question.partition(" ")[0].rstrip(",") for question in BY_TRL}
    assert name_of_callable(rewards.get_soft_overlong_punishment(9, 3)) == "soft_overlong_punishment_reward"
    assert name_of_callable(rewards.get_repetition_penalty_reward()) == "repetition_penalty_reward"
    assert name_of_callable(rewards.get_cosine_scaled_reward(9)) == "cosine_scaled_reward"


def test_what_was_read_goes_to_the_log() -> None:
    seen: dict[str, list[Any]] = {}
    completions = CASES["messages"]([r"\boxed{4}", "4", r"\boxed{4}"])
    rewards.accuracy_reward(completions, ["4", "4", "nothing"], log_extra=seen.__setitem__)
    assert seen["solution"] == ["4", "4", "nothing"]
    assert seen["answer_parsed"][1:] == ["[unparseable]", "[skipped]"]
    assert seen["gold_parsed"][2] == "[unparseable]"
    assert "4" in seen["answer_parsed"][0]


def test_a_penalty_that_would_pay_is_refused() -> None:
    with refused("max_penalty = 0.5: must be 0 or below"):
        rewards.get_repetition_penalty_reward(max_penalty=0.5)
