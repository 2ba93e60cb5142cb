"""Twenty float64 steps whose numbers are kept: a change of numerics must be declared.

Everything takes part: sampling, shared prompts, the clipped surrogate, a KL term, micro-batches, clipping, AdamW, a
warm-up and a schedule.  A change that is meant to leave numbers as they are must pass.  One that is not writes them
anew with

    .venv/bin/python -m tests.engine.test_golden

and goes into CHANGELOG.md under *Numerics*.  First weights and draws come from numpy's counter-based generator, and
another order of the float64 sums moves the last step's numbers by 1e-15, so they hold on any machine.
"""

import json
from pathlib import Path

import pytest
import torch

from posttrain.options.training import UpdateOptions
from tests.support.tiny import tiny_policy, weights
from tests.support.toy import Toy, train_on

GOLDEN = Path(__file__).parents[1] / "data" / "golden.json"
KEPT = ("loss", "reward", "kl", "grad_norm", "tokens/trained")
TOY = Toy(
    algorithm={"name": "grpo", "kl": {"coefficient": 0.05}},
    update=UpdateOptions(
        learning_rate=1e-2, warmup_steps=3, schedule="cosine", weight_decay=0.1, tokens_per_microbatch=60
    ),
    group_size=4,
    temperature=0.9,
)


def golden_run() -> dict[str, list[float]]:
    policy = tiny_policy()
    steps = list(train_on(TOY, policy))
    final = weights(policy)
    # Two numbers that no exchange of weights leaves alone.
    checksum = [final.norm().item(), (final @ torch.linspace(-1, 1, len(final), dtype=torch.float64)).item()]
    return {**{name: [step[name] for step in steps] for name in KEPT}, "weights": checksum}


def test_twenty_steps_give_the_numbers_that_were_kept() -> None:
    expected, actual = json.loads(GOLDEN.read_text(encoding="utf-8")), golden_run()
    assert len(actual["loss"]) == 20
    assert expected.keys() == actual.keys()
    for name, numbers in expected.items():
        assert actual[name] == pytest.approx(numbers, rel=1e-9, abs=1e-11), name


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(golden_run(), indent=1) + "\n", encoding="utf-8")
