"""When the trainers of posttrain.trl log, evaluate and save, told without a run: what strategies and intervals mean."""

from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.optim import SGD
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerState

from posttrain.runs.reports import BeginReport, StepReport
from posttrain.trl import GRPOConfig
from posttrain.trl.callback_watcher import CallbackWatcher, Events
from posttrain.trl.configs.recipe import RunLength
from tests.support.refusals import refused


def logged(*callbacks: TrainerCallback, steps: int = 12, updates: int = 1, epoch: int = 5, **given: Any) -> Events:
    """The events of a run whose steps report their number as the loss, and whose evaluations are noted at theirs."""
    events = Events(
        args=GRPOConfig(**{"logging_strategy": "no", **given}),
        model=nn.Module,
        processing_class=cast(Any, None),
        callbacks=[*callbacks],
        log_step=lambda entry, start_time: events.log(entry),
        save_model=print,
    )
    events.begin(TrainerState())
    length = RunLength(updates=steps * updates, updates_per_step=updates, updates_per_epoch=epoch)
    watcher = CallbackWatcher(
        events=events,
        length=length,
        entry_of=lambda report: {"loss": float(report.step), "num_tokens": report.metrics["num_tokens"]},
        evaluate=lambda: measure(events),
        take_best=lambda checkpoint, folder: None,
        take_optimizer=print,
    )
    watcher.on_begin(BeginReport(step=0, optimizer=SGD([nn.Parameter(torch.zeros(1))])))
    for step in range(1, steps + 1):
        watcher.on_step_begin(step)
        watcher.on_step(StepReport(step=step, metrics={"num_tokens": 10.0 * step}))
        if watcher.stopping:
            break
    return events


def measure(events: Events) -> dict[str, float | None]:
    """An evaluation whose reward is 1 at step 4 and less elsewhere."""
    entry = {"eval_reward": 1 - abs(4 - events.state.global_step) / 10, "eval_cost": None}
    events.log(entry)
    events.call("on_evaluate", metrics=entry)
    return entry


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
        ({"eval_strategy": "steps", "eval_steps": 5}, [5, 10, 12]),  # and at the end, as transformers has it
        ({"eval_strategy": "steps", "eval_steps": 0, "logging_steps": 6}, [6, 12]),
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
    seen: list[tuple[str, int]] = []

    class Epochs(TrainerCallback):
        def on_epoch_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            seen.append(("begins", state.global_step))

        def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            seen.append(("ends", state.global_step))

    logged(Epochs())
    assert seen == [("begins", 0), ("ends", 5), ("begins", 5), ("ends", 10), ("begins", 10)]


MEASURED = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "reward"}


@pytest.mark.parametrize(
    ("given", "best", "last"),
    [
        ({}, (4, 1.0), 6),  # 1 is the best; steps 5 and 6 are no better
        ({"metric_for_best_model": "eval_reward"}, (4, 1.0), 6),
        ({"greater_is_better": False}, (1, 0.7), 3),  # and the least is that of the first
        ({"metric_for_best_model": "cost"}, (None, None), 12),  # which is never measured: nothing is better or worse
    ],
)
def test_transformers_early_stopping_ends_a_run_that_no_longer_improves(given, best, last) -> None:
    events = logged(EarlyStoppingCallback(early_stopping_patience=2), **{**MEASURED, **given})
    assert (events.state.best_global_step, events.state.best_metric) == best
    assert events.state.global_step == last


def test_an_improvement_below_the_threshold_is_none_for_the_callback_and_the_best_all_the_same() -> None:
    events = logged(EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=0.2), **MEASURED)
    assert (events.state.global_step, events.state.best_metric) == (2, 0.8)  # 0.7, then 0.8


def test_early_stopping_without_something_to_stop_for_is_told_before_training() -> None:
    for given in ({**MEASURED, "eval_strategy": "no"}, {**MEASURED, "metric_for_best_model": None}):
        with refused("GRPOConfig: metric_for_best_model =", "EarlyStoppingCallback needs"):
            logged(EarlyStoppingCallback(), **given)


def test_a_metric_that_no_evaluation_has_is_told_with_those_that_there_are() -> None:
    with refused("an evaluation has no eval_accuracy; use one of eval_cost, eval_reward"):
        logged(**{**MEASURED, "metric_for_best_model": "accuracy"})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (None, None)),
        ({"metric_for_best_model": "reward"}, ("reward", True)),
        ({"metric_for_best_model": "eval_loss"}, ("eval_loss", False)),
        ({"load_best_model_at_end": True}, ("loss", False)),
        ({"metric_for_best_model": "kl", "greater_is_better": False}, ("kl", False)),
    ],
)
def test_what_is_better_is_told_by_the_name_of_the_metric(given: dict[str, Any], expected: tuple[Any, Any]) -> None:
    args = GRPOConfig(**given)
    assert (args.metric_for_best_model, args.greater_is_better) == expected
