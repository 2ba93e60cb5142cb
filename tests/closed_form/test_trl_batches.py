"""TRL's batch vocabulary in ours: the table of docs/guides/trl.md, row by row.

The last column of its first ten rows is what `set_initial_training_values` of TRL 1.16's trainer gives for 100 rows.
"""

from pathlib import Path

import pytest

from posttrain.trl import GRPOConfig
from posttrain.trl.configs.batch_arithmetic import batch_plan

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "trl.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.partition("| per device |")[2].partition("\n\n")[0].splitlines()[2:]
]
FIELDS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_generations",
    "steps_per_generation",
    "generation_batch_size",
    "num_iterations",
)


def test_the_page_works_twelve_cases() -> None:
    assert len(ROWS) == 12


@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join(row[:6]))
def test_a_worked_case_is_what_comes_out(row: list[str]) -> None:
    given = {name: int(cell) for name, cell in zip(FIELDS, row, strict=False) if cell}
    plan = batch_plan(GRPOConfig(**given))
    assert f"{plan.prompts_per_step} × {plan.group_size}" == row[6]
    assert f"{plan.epochs_per_step} × {plan.minibatches_per_epoch}" == row[7]
    assert str(plan.updates_per_epoch(100)) == row[8]


def test_epochs_and_max_steps_count_updates() -> None:
    args = GRPOConfig(
        per_device_train_batch_size=8, gradient_accumulation_steps=2, num_generations=4, num_train_epochs=1.5
    )
    plan = batch_plan(args)  # 4 prompts an update; of 30 rows TRL takes 7 chunks of 4 and drops 2
    assert (plan.updates_per_epoch(30), plan.num_updates(args, 30)) == (7, 11)  # ⌈1.5 · 7⌉
    assert plan.num_updates(GRPOConfig(max_steps=5), 30) == 5


def test_several_updates_of_a_step_are_taken_whole() -> None:
    plan = batch_plan(GRPOConfig(steps_per_generation=4, max_steps=6))
    assert (plan.updates_per_step, plan.num_steps(6)) == (4, 2)


def test_a_group_that_trl_would_tear_apart_is_one_update_and_that_is_said() -> None:
    plan = batch_plan(GRPOConfig(per_device_train_batch_size=2, num_generations=8, steps_per_generation=4))
    assert (plan.prompts_per_step, plan.minibatches_per_epoch) == (1, 1)
    assert plan.notes == (
        "TRL would take 4 updates on parts of 1 group of 8; a group stays whole here, so there is 1.",
    )


@pytest.mark.parametrize(
    "given",
    [
        {"steps_per_generation": 4},  # TRL takes 4 updates on one group; one here
        {"steps_per_generation": 1, "gradient_accumulation_steps": 4},  # TRL refuses a generation batch of 1
        {"steps_per_generation": 1, "gradient_accumulation_steps": 4, "num_iterations": 2},
        {"steps_per_generation": 4, "num_iterations": 3},
        {"per_device_train_batch_size": 2, "steps_per_generation": 4},
        {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2, "steps_per_generation": 1},
    ],
)
def test_an_epoch_asks_every_prompt_about_once_however_groups_are_kept_whole(given: dict[str, int]) -> None:
    args = GRPOConfig(**{"per_device_train_batch_size": 1, "num_generations": 4, "num_train_epochs": 1, **given})
    plan = batch_plan(args)
    prompts = plan.num_steps(plan.num_updates(args, 120)) * plan.prompts_per_step
    assert prompts == 120


def test_a_batch_smaller_than_a_group_is_rounded_up_and_that_is_said() -> None:
    plan = batch_plan(GRPOConfig(per_device_train_batch_size=1, num_generations=2))
    assert plan.notes == ("1 completions are not a whole number of groups of 2: a step has 2, those of 1 prompt.",)
