"""What a run does at some steps and not at others: when it takes its reference anew, and when it saves."""

from pathlib import Path

import pytest

from posttrain.runs.files import saved_steps
from tests.support.runs import command, metrics_of, tiny_recipe


def test_a_reference_taken_every_second_step_is_the_policy_in_the_step_after(folder: Path) -> None:
    place = folder / "reference"
    recipe = tiny_recipe(
        place,
        algorithm={"name": "grpo", "kl": {"coefficient": 0.05}},
        reference={"refresh_every": 2},
        checkpoint={"every_steps": 2, "keep_last": 9},
        run={"num_steps": 5},
    )
    assert command("rl", recipe, folder=place).code == 0
    kl = {step["step"]: step["kl"] for step in metrics_of(place / "run") if step["step"]}
    # One update a step: its KL is that of the weights with which the step began, so 0 where the reference is they.
    assert [step for step, value in kl.items() if abs(value) < 1e-9] == [1, 3, 5]
    assert min(kl[2], kl[4]) > 1e-6
    # At the start, every second step, and where it ends.
    assert [*saved_steps(place / "run" / "checkpoints")] == [0, 2, 4, 5]


@pytest.mark.parametrize(("every", "steps"), [(0, [0, 3]), (1, [0, 1, 2, 3])])
def test_the_last_step_is_saved_whatever_the_rhythm(folder: Path, every: int, steps: list[int]) -> None:
    place = folder / f"every-{every}"
    recipe = tiny_recipe(place, checkpoint={"every_steps": every, "keep_last": 9}, run={"num_steps": 3})
    assert command("rl", recipe, folder=place).code == 0
    assert [*saved_steps(place / "run" / "checkpoints")] == steps
