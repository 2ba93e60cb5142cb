"""When the trainers of posttrain.trl log, evaluate and save, told without a run: what strategies and intervals mean."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from transformers import TrainerCallback

from posttrain.models.policy import Policy
from posttrain.runs.reports import StepReport
from posttrain.trl import GRPOConfig
from posttrain.trl.as_config import RunLength
from posttrain.trl.callback_watcher import CallbackWatcher, Events

POLICY = cast(Policy, SimpleNamespace(model=None, tokenizer=None))


def logged(*callbacks: TrainerCallback, steps: int = 12, updates: int = 1, epoch: int = 5, **given: Any) -> Events:
    """The events of a run whose steps report their number as the loss, and whose evaluations are noted at theirs."""
    events = Events(args=GRPOConfig(**{"logging_strategy": "no", **given}), policy=POLICY, callbacks=[*callbacks])
    length = RunLength(updates=steps * updates, updates_per_step=updates, updates_per_epoch=epoch)
    watcher = CallbackWatcher(
        events,
        length,
        entry_of=lambda report: {"loss": float(report.step), "num_tokens": report.metrics["num_tokens"]},
        evaluate=lambda: events.log({"eval_reward": 0.0}),
    )
    watcher.begin(None)
    for step in range(1, steps + 1):
        watcher.on_step_begin(step)
        watcher.on_step(StepReport(step=step, metrics={"num_tokens": 10.0 * step}))
        if watcher.stopping:
            break
    return events


def steps_of(events: Events, name: str) -> list[int]:
    return [entry["step"] for entry in events.state.log_history if name in entry]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"logging_strategy": "steps"}, [10]),  # every 10 updates, where nothing is said
        ({"logging_strategy": "steps", "logging_steps": 4}, [4, 8, 12]),
        ({"logging_strategy": "steps", "logging_steps": 0.25}, [3, 6, 9, 12]),  # of 12 updates
        ({"logging_strategy": "epoch"}, [5, 10]),
        ({"logging_strategy": "no"}, []),
        ({"logging_first_step": True}, [1]),
        ({"logging_strategy": "steps", "logging_steps": 4, "updates": 3, "steps": 4}, [6, 9, 12]),  # 4, 8, 12 passed
    ],
)
def test_an_entry_is_logged_when_it_is_due(given: dict[str, Any], expected: list[int]) -> None:
    assert steps_of(logged(**given), "loss") == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, []),
        ({"eval_strategy": "steps", "eval_steps": 5}, [5, 10]),
        ({"eval_strategy": "steps", "logging_steps": 6}, [6, 12]),  # eval_steps is logging_steps where it is left out
        ({"eval_strategy": "epoch"}, [5, 10]),
        ({"eval_strategy": "steps", "eval_steps": 3, "eval_delay": 7}, [9, 12]),
        ({"eval_strategy": "epoch", "eval_delay": 2}, [10]),
        ({"eval_on_start": True}, [0]),
        ({"evaluation_strategy": "epoch"}, [5, 10]),  # as it was once called
    ],
)
def test_an_evaluation_is_made_when_it_is_due(given: dict[str, Any], expected: list[int]) -> None:
    assert steps_of(logged(**given), "eval_reward") == expected


def test_an_entry_has_means_since_the_last_one_and_counts_as_they_are() -> None:
    entry = logged(logging_strategy="steps", logging_steps=4).state.log_history[1]
    assert (entry["loss"], entry["num_tokens"], entry["epoch"]) == (6.5, 80.0, 8 / 5)  # of steps 5 to 8


def test_a_callback_asks_for_an_entry_and_an_evaluation_and_for_the_end() -> None:
    class Asks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> Any:
            control.should_log = control.should_evaluate = state.global_step == 2
            control.should_training_stop = state.global_step == 3
            return control

    events = logged(Asks())
    assert (steps_of(events, "loss"), steps_of(events, "eval_reward")) == ([2], [2])
    assert events.state.global_step == 3


def test_epochs_begin_and_end_where_their_updates_do() -> None:
    class Epochs(TrainerCallback):
        def __init__(self) -> None:
            self.seen: list[tuple[str, int]] = []

        def on_epoch_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.seen.append(("begins", state.global_step))

        def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.seen.append(("ends", state.global_step))

    logged(made := Epochs())
    assert made.seen == [("begins", 0), ("ends", 5), ("begins", 5), ("ends", 10), ("begins", 10)]
