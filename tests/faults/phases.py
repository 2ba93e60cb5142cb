"""The phases of a step, as moments at which a process that trains can be met; and recipes that have them all."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from tests.support.accidents import GO, PAUSED, Accident
from tests.support.runs import Command, tiny_recipe

TAKE = "call posttrain.generation.in_process:InProcessSampling.take"
STEP_2 = {
    "sampling": f"call posttrain.training.collector:Collector.collect 2, {TAKE} 2",
    "grading": "call posttrain.training.collector:Collector.grade 2",
    "credit": "call posttrain.training.credited_step:group_logprobs 2",
    "update": "call posttrain.training.update:apply_gradients 2",
    "evaluation": f"call posttrain.training.rl:evaluate_when_due 2, {TAKE} 1",
    "checkpoint": "open checkpoints/.tmp-step-000002/.tmp-manifest.json 1",
}
"""Of the process that leads: amid each phase of step 2, whose checkpoint is half written in the last."""
SECTIONS: Mapping[str, Mapping[str, Any]] = {
    "algorithm": {"name": "grpo", "kl": {"coefficient": 0.1}},  # so that credit needs a pass
    "update": {"tokens_per_microbatch": 128},
    "evaluation": {"every_steps": 2, "samples": 1},
    "checkpoint": {"every_steps": 1, "keep_last": 9},
    "run": {"num_steps": 3},
}


def phase_recipe(folder: Path, **sections: Mapping[str, Any]) -> Path:
    """Three steps, each with a checkpoint; the second is measured."""
    return tiny_recipe(
        folder, **{name: {**SECTIONS.get(name, {}), **sections.get(name, {})} for name in {**SECTIONS, **sections}}
    )


def tried(cases: Iterable[str], *quick: str) -> list[ParameterSet]:
    """Cases of a table as parameters, of which `make test` tries the quick ones only."""
    return [pytest.param(each, marks=() if each in quick else pytest.mark.scale) for each in cases]


def pausing(moment: str) -> Accident:
    return Accident(moment=moment, signal=0)


def wait_for_pause(command: Command, folder: Path) -> None:
    command.wait_until((folder / PAUSED).exists, 240)


def let_go(folder: Path) -> None:
    (folder / GO).touch()
