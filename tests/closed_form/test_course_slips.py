"""Slips of course texts that docs/course.md lists: what the text's own code gives, and what ours does with the same."""

import math
import random
import re
from pathlib import Path
from statistics import fmean, stdev

import pytest
import torch

from posttrain.algorithms.losses import ClipRange, clipped_surrogate
from posttrain.rewards.shaping import graded_format, line_format, strict_format
from posttrain.trl import ModelConfig, get_peft_config

PAGE = (Path(__file__).parents[2] / "docs" / "course.md").read_text(encoding="utf-8")


def scores(reward: object, text: str) -> float:
    assert callable(reward)
    [graded] = reward(completions=[text], finish_reasons=["stop"])
    return float(graded.score)


def test_text_behind_the_answer_is_paid_for_by_the_homework_and_a_second_answer_by_the_page_on_trl() -> None:
    homework = re.compile(r"^<think>\n[\s\S]*\n</think>\n<answer>\n[\s\S]*\n</answer>$", re.MULTILINE)
    page = r"^<think>([^<]*(?:<(?!/?think>)[^<]*)*)<\/think>\n<answer>([\s\S]*?)<\/answer>$"
    behind = "<think>\na\n</think>\n<answer>\n1\n</answer>\nand more"
    second = "<think>a</think>\n<answer>1</answer> junk <answer>2</answer>"
    assert homework.match(behind) is not None
    assert re.search(page, behind, re.DOTALL) is None
    assert re.search(page, second, re.DOTALL) is not None
    assert [scores(line_format, behind), scores(strict_format, behind), scores(strict_format, second)] == [0, 0, 0]
    rows = {
        line.split("|")[2].strip(): line for line in PAGE.splitlines() if line.startswith("|") and "MULTILINE" in line
    }
    assert list(rows) == ["`format_reward(responses)`"]


def test_the_simulation_of_group_sizes_draws_rewards_of_mean_minus_a_sixth() -> None:
    rewards = [1.0, -0.5, -1.0]
    assert fmean(rewards) == pytest.approx(-1 / 6)
    deviation = math.sqrt(fmean([(each - fmean(rewards)) ** 2 for each in rewards]))
    assert deviation == pytest.approx(0.85, abs=0.005)
    random.seed(42)  # as there
    for size in (2, 4, 8, 16, 32):
        means = [fmean(random.choice(rewards) for _ in range(size)) for _ in range(1000)]
        assert -0.19 < fmean(means) < -0.15
        assert stdev(means) == pytest.approx(deviation / math.sqrt(size), rel=0.06)


def test_the_answers_that_are_said_to_hack_the_format_earn_half() -> None:
    answers = [
        "Let me think about this. I'll try 25 × 4 = 100, then 100 - 3 = 97. Actually, let me try...",
        "<think>numbers</think>\n<answer>random equation</answer>",
        "<think>try multiply</think>\n<answer>25 × 4 - 3</answer>",
    ]

    def course(text: str) -> float:
        """The notebook's format_reward_func; its equation_reward_func gives all three 0."""
        if not re.search(r"<think>.*?</think>\s*\n\s*<answer>.*?</answer>", text, re.DOTALL):
            return 0.0
        answer = re.search(r"<answer>(.*?)</answer>", text, re.DOTALL)
        return 1.0 if re.match(r"^[\d+\-*/().\s]+$", answer.group(1).strip()) else 0.5

    assert [course(text) for text in answers] == [0, 0.5, 0.5]
    assert [scores(graded_format, text) for text in answers] == [0, 0.5, 0.5]


def test_a_ratio_below_the_bound_is_clipped_only_where_the_advantage_is_negative() -> None:
    logprobs = torch.tensor([0.4, 0.4], dtype=torch.float64).log().requires_grad_()
    behaviour = torch.zeros(2, dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0], dtype=torch.float64)
    loss = clipped_surrogate(logprobs, behaviour, advantages, torch.arange(2), clip=ClipRange(low=0.2, high=0.2))
    assert loss.tolist() == pytest.approx([-0.4, 0.8])
    [gradient] = torch.autograd.grad(loss.sum(), logprobs)
    assert gradient.tolist() == pytest.approx([-0.4, 0.0])


def test_the_facade_says_that_four_bits_do_not_reach_a_model_that_is_given_by_name(capsys) -> None:
    get_peft_config(ModelConfig(model_name_or_path="org/name", use_peft=True, load_in_4bit=True))
    assert "load_in_4bit = True: give get_quantization_config" in capsys.readouterr().out
