"""A mistake in an object of the caller's: in the first step it costs nothing, later it is told with what is left."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import posttrain
from posttrain.algorithms.credit import Evidence
from posttrain.algorithms.table import grpo
from posttrain.errors import RunError
from tests.support.own_objects import Sums, config, policy_of, rewarded_by_answer
from tests.support.refusals import refused


def test_a_mistake_in_an_algorithm_is_told_with_the_step_and_what_is_left(model: Path, tmp_path: Path) -> None:
    """In step 1 before anything is written."""
    policy, right = policy_of(model), grpo()
    for mistaken, said in [
        (1, ("algorithm grpo", "returned a tensor")),
        (2, ("step 2", "algorithm grpo", "returned a tensor", "step-00000")),
    ]:
        calls = iter(range(1, 9))
        own = replace(right, credit=lambda evidence, at=mistaken, calls=calls: credit_until(at, calls, evidence))
        with refused(*said, error=RunError):
            posttrain.train(
                config(tmp_path / "run", 2),
                policy=policy,
                task=Sums(policy),
                algorithm=own,
                rewards=[rewarded_by_answer],
            )
        assert (tmp_path / "run" / "checkpoints").exists() == (mistaken > 1)


def credit_until(mistaken: int, calls: Iterator[int], evidence: Evidence) -> Any:
    """GRPO's, until the call that is mistaken."""
    return evidence.rewards if next(calls) == mistaken else grpo().credit(evidence)
