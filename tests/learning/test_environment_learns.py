"""A policy learns what an environment's replies pay; replies that pay at random teach it nothing."""

import random
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

import pytest

from posttrain import Reply, load_recipe, train
from tests.support.runs import metrics_of, rollout_rows, save_tiny_model

STEPS = 16


def digits(text: str) -> float:
    """Share of digits among the characters of a text."""
    return sum(each in "0123456789" for each in text) / max(1, len(text))


class Digits:
    """Pays each turn by its digits.  A turn ends at a digit or a vowel, so that there are several."""

    stop_texts = tuple("aeiou0123456789")

    def reset(self, row: Mapping[str, object], seed: int) -> None:
        self.seed, self.heard = seed, list[str]()

    def reply(self, said: str) -> Reply:
        self.heard.append(said)
        return Reply("-", reward=self.pays(said))

    def pays(self, said: str) -> float:
        return digits(said)


class Chance(Digits):
    """Pays at random: a function of what was said, so that the run is one of its seed."""

    def pays(self, said: str) -> float:
        return random.Random(f"{self.seed} {self.heard}").random()


def digits_of_steps(environment: type[Digits], folder: Path) -> list[float]:
    """Share of digits in the completions of each step, what was replied left out."""
    save_tiny_model(folder / "model")
    config = load_recipe(
        model={"path": str(folder / "model")},
        task={"name": "countdown", "held_out_size": 1},
        rewards=[{"name": "repetition", "weight": 0.0}],
        rollout={"prompts_per_step": 4, "group_size": 8, "max_completion_tokens": 8, "max_turns": 4},
        algorithm={"name": "rloo", "credit": "reward_to_go"},
        update={"learning_rate": 3e-2, "tokens_per_microbatch": 4096},
        evaluation={"samples": 1},
        run={"folder": str(folder / "run"), "num_steps": STEPS, "threads": 1, "curves": False},
    )
    run = train(config, environment=environment)
    assert metrics_of(run.folder)[1]["turns/mean"] > 1
    steps = (
        [row["completion"].replace("-", "") for row in rollout_rows(run.folder, step)] for step in range(1, STEPS + 1)
    )
    return [fmean(map(digits, texts)) for texts in steps]


def test_a_policy_learns_what_replies_pay(tmp_path: Path) -> None:
    shares = digits_of_steps(Digits, tmp_path)
    assert shares[0] < 0.1
    assert fmean(shares[-3:]) > 0.3


def test_replies_that_pay_at_random_teach_nothing(tmp_path: Path) -> None:
    shares = digits_of_steps(Chance, tmp_path)
    assert fmean(shares[-3:]) == pytest.approx(fmean(shares[:3]), abs=0.1)
