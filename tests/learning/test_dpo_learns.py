"""A tiny model learns a rule from pairs, and asks it of new prompts; from pairs labelled at random it learns none."""

import json
import random
from pathlib import Path

import pytest
import torch

import posttrain
from posttrain.config import DpoConfig
from tests.support.conversations import chat_model, chat_tokenizer
from tests.support.golden_runs import TokenTask
from tests.support.tiny import tiny_policy

DRAW = random.Random(7)


def rows(*, shuffled: bool) -> list[dict[str, str]]:
    """The better of two answers has even digits; shuffled, a coin says which is better."""
    made = []
    for number in range(160):
        even, odd = ("".join(DRAW.choices(digits, k=4)) for digits in ("2468", "1357"))
        chosen, rejected = (odd, even) if shuffled and DRAW.random() < 0.5 else (even, odd)
        made.append({"prompt": f"{number:03d}=", "chosen": chosen, "rejected": rejected})
    return made


def trained(folder: Path, *, shuffled: bool, **dpo: object) -> posttrain.Run:
    tokenizer = chat_tokenizer()
    config = posttrain.load_recipe(
        kind=DpoConfig,
        task={"name": "dataset", "held_out_share": 0.3},
        dpo={"learning_rate": 1e-3, "pairs_per_batch": 16, "num_epochs": 2, **dpo},
        run={"folder": str(folder), "threads": 1},
    )
    policy = posttrain.as_policy(chat_model(tokenizer), tokenizer)
    return posttrain.train_dpo(config, policy=policy, rows=rows(shuffled=shuffled))


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_a_rule_is_learned_and_holds_for_held_out_pairs(tmp_path: Path, loss: str) -> None:
    run = trained(tmp_path / "run", shuffled=False, loss=loss)
    before, after = (run.summary[when] for when in ("before", "after"))
    assert isinstance(before, dict)
    assert isinstance(after, dict)
    assert before["pairs/accuracy"] < 0.65
    assert after["pairs/accuracy"] >= 0.95
    assert after["pairs/margin_low"] > before["pairs/margin_high"]


def test_from_labels_of_a_coin_nothing_holds_for_held_out_pairs(tmp_path: Path) -> None:
    after = trained(tmp_path / "run", shuffled=True).summary["after"]
    assert isinstance(after, dict)
    assert after["pairs/accuracy_low"] < 0.5 < after["pairs/accuracy_high"]


def even(completion_ids: list[list[int]], **columns: object) -> list[float]:
    """The share of even tokens."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def coin(completion_ids: list[list[int]], **columns: object) -> list[float]:
    """Anything."""
    return [random.Random(str(ids)).random() for ids in completion_ids]


@pytest.mark.parametrize(("judge", "learns"), [(even, True), (coin, False)])
def test_in_rounds_a_policy_comes_to_what_its_judge_likes_and_from_a_coin_to_nothing(tmp_path, judge, learns) -> None:
    config = posttrain.load_recipe(
        kind=DpoConfig,
        dpo={"rounds": 4, "prompts_per_round": 16, "steps_per_round": 4, "pairs_per_batch": 8, "learning_rate": 1e-2},
        rollout={"group_size": 6, "max_completion_tokens": 8},
        evaluation={"every_steps": 0, "samples": 1},
        run={"folder": str(tmp_path / "run"), "threads": 1},
    )
    rewards = [posttrain.reward_function(judge), posttrain.reward_function(even, weight=0, name="measured")]
    run = posttrain.train_dpo(config, policy=tiny_policy(dtype=torch.float32), task=TokenTask(), rewards=rewards)
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    shares = [line["rewards/measured/mean"] for line in lines if "round" in line]
    assert abs(shares[0] - 0.5) < 0.1
    assert shares[-1] > 0.7 if learns else abs(shares[-1] - shares[0]) < 0.1
