"""transformers' callbacks on our runs.

A watcher calls them, keeps log_history, finds the best evaluation, and stops for them.  With `metric_for_best_model`,
each evaluation is compared with the best so far.  Unlike in transformers, the best step is saved when it is found, so
save_steps does not have to be a multiple of eval_steps.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers
from torch import nn, optim
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState

from posttrain.errors import UserError
from posttrain.runs.reports import BeginReport, CheckpointReport, EndReport, StepReport
from posttrain.runs.watchers import Watcher
from posttrain.trl.configs.recipe import RunLength
from posttrain.trl.configs.training_fields import TrainingFields
from posttrain.trl.log_entries import Entry, taken_entry
from posttrain.trl.saved_models import link_checkpoint, prune_checkpoints, write_trainer_state

LOGGED_BY_STEPS = ("loss", "grad_norm", "learning_rate")
"""Keys that only entries of steps have."""


class RunRates:
    """The learning rates of a run's optimiser; the run sets them itself before each update."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.optimizer = optimizer

    def get_last_lr(self) -> list[float]:
        """The rate of each parameter group in the last update; before the first update, the initial rate."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, list[float]]:
        return {"_last_lr": self.get_last_lr()}


Schedule = optim.lr_scheduler.LRScheduler | RunRates


@dataclass(slots=True, kw_only=True)
class Events:
    """The callbacks of a trainer, with the state and the control that they receive."""

    args: TrainingFields
    model: Callable[[], nn.Module]
    processing_class: PreTrainedTokenizerBase
    callbacks: list[TrainerCallback]
    optimizer: optim.Optimizer | None = None
    lr_scheduler: Schedule | None = None
    """The optimiser and the scheduler of the last run; None before the first."""
    log_step: Callable[[Entry, float | None], None]
    """The trainer's `log`, which a script may override, with when training began."""
    save_model: Callable[[Path], None]
    state: TrainerState = field(default_factory=TrainerState)
    control: TrainerControl = field(default_factory=TrainerControl)

    def call(self, event: str, **more: object) -> None:
        """Call a method of each callback; if one returns a control, it replaces the current one."""
        for callback in self.callbacks:
            returned = getattr(callback, event)(
                self.args,
                self.state,
                self.control,
                model=self.model(),
                processing_class=self.processing_class,
                optimizer=self.optimizer,
                lr_scheduler=self.lr_scheduler,
                train_dataloader=None,
                eval_dataloader=None,
                **more,
            )
            self.control = self.control if returned is None else returned

    def begin(self, state: TrainerState) -> None:
        """Start training with this state, which is new or from a checkpoint.

        Raises UserError for a callback that could never have an effect.
        """
        metric, strategy = self.args.metric_for_best_model, self.args.eval_strategy
        measured = metric is not None and strategy != "no"
        if not measured and any(isinstance(each, transformers.EarlyStoppingCallback) for each in self.callbacks):
            raise UserError(
                f"{type(self.args).__name__}: metric_for_best_model = {metric} and eval_strategy = {strategy}, which"
                " EarlyStoppingCallback needs.  Give both, such as 'reward' and 'steps'."
            )
        self.state, self.control = state, TrainerControl()

    def log(self, entry: Entry) -> None:
        logs: dict[str, Any] = {**entry, "epoch": self.state.epoch}
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.control.should_log = False
        self.call("on_log", logs=logs)


def made_callback(given: object) -> TrainerCallback:
    """A callback, created if its class is given.  Raises UserError for another object."""
    made = given() if isinstance(given, type) else given
    if not isinstance(made, TrainerCallback):
        raise UserError(
            f"callbacks: {made!r:.60} ({type(made).__name__}): Inherit from transformers.TrainerCallback; a"
            " posttrain.Watcher goes to posttrain.train."
        )
    return made


@dataclass(kw_only=True, eq=False)
class CallbackWatcher(Watcher):
    """Calls callbacks in each step, then logs, evaluates and saves as they and the arguments request."""

    events: Events
    length: RunLength
    entry_of: Callable[[StepReport], Entry]
    evaluate: Callable[[], Mapping[str, object]] | None
    """Measures and logs; None without evaluation rows."""
    take_best: Callable[[Path, Path], None]
    """Loads a checkpoint's weights and writes them into a folder."""
    take_optimizer: Callable[[optim.Optimizer], None]
    pending: list[Entry] = field(default_factory=list)
    """The steps since the last entry of the log."""
    losses: list[float] = field(default_factory=list)
    ended: dict[str, Any] = field(default_factory=dict)
    """The last entry of the log, which train() returns."""
    began: float = field(default_factory=time.monotonic)
    start_time: float = field(default_factory=time.time)

    @property
    def args(self) -> TrainingFields:
        return self.events.args

    def on_begin(self, report: BeginReport) -> None:
        """Give the callbacks the intervals, the optimiser and the rates of a run that starts or continues."""
        self.take_optimizer(report.optimizer)
        state, args, length = self.events.state, self.args, self.length
        state.max_steps, state.num_train_epochs = length.updates, -(-length.updates // length.updates_per_epoch)
        state.logging_steps = self.interval(args.logging_steps)
        state.save_steps = self.interval(args.save_steps)
        state.eval_steps = self.interval(args.eval_steps or args.logging_steps)
        state.train_batch_size = args.per_device_train_batch_size
        self.events.call("on_train_begin")

    def interval(self, updates: float) -> int:
        """A number of updates, which can be given as a share of all updates."""
        return -int(-self.length.updates * updates // 1) if updates < 1 else int(updates)

    def on_step_begin(self, step: int) -> None:
        state, done = self.events.state, (step - 1) * self.length.updates_per_step
        state.global_step, state.epoch = done, done / self.length.updates_per_epoch
        if step == 1 and self.args.eval_on_start and self.evaluate is not None:
            self.evaluate()
        if step == 1 or self.crossed(self.length.updates_per_epoch, before=max(0, done - self.length.updates_per_step)):
            self.events.call("on_epoch_begin")
        self.events.call("on_step_begin")

    def crossed(self, interval: float, *, before: int) -> bool:
        """Whether a multiple of the interval was reached after `before` updates."""
        return self.events.state.global_step // interval > before // interval

    def on_step(self, report: StepReport) -> None:
        """Log, evaluate, save and stop as the arguments and the callbacks say."""
        events, length = self.events, self.length
        state, control = events.state, events.control
        before = state.global_step
        state.global_step = report.step * length.updates_per_step
        state.epoch = state.global_step / length.updates_per_epoch
        entry = self.entry_of(report)
        state.num_input_tokens_seen = int(entry["num_tokens"] or 0)
        self.pending.append(entry)
        self.losses.append(entry["loss"] or 0.0)
        control.should_log |= self.due("logging", state.logging_steps, before)
        control.should_log |= report.step == 1 and self.args.logging_first_step
        waited = state.epoch if self.args.eval_strategy == "epoch" else state.global_step
        last = self.args.eval_strategy == "steps" and state.global_step >= state.max_steps
        due = last or self.due("eval", state.eval_steps, before)
        control.should_evaluate |= due and waited >= self.args.eval_delay
        events.call("on_step_end")
        if self.crossed(length.updates_per_epoch, before=before):
            events.call("on_epoch_end")
        if events.control.should_log:
            events.log_step(taken_entry(self.pending), self.start_time)
        if events.control.should_evaluate and self.evaluate is not None:
            events.control.should_evaluate = False
            wanted = self.args.load_best_model_at_end or self.args.save_strategy == "best"
            events.control.should_save |= is_best(self.args, state, self.evaluate()) and wanted
        self.saving = events.control.should_save
        self.stopping = events.control.should_training_stop

    def due(self, what: str, interval: int, before: int) -> bool:
        strategy = vars(self.args)[f"{what}_strategy"]
        every = {"no": float("inf"), "steps": interval, "epoch": self.length.updates_per_epoch}[strategy]
        return self.crossed(every, before=before)

    def on_save(self, report: CheckpointReport) -> None:
        """Complete a written checkpoint, and call callbacks unless it is the one of step 0."""
        state = self.events.state
        self.events.control.should_save = False
        if report.step * self.length.updates_per_step == state.best_global_step:
            state.best_model_checkpoint = str(report.path)
        write_trainer_state(state, report.path)
        prune_checkpoints(report.path.parent, self.args, state.best_model_checkpoint)
        if report.step:
            self.events.save_model(report.path)
            run = report.path.parent.parent
            link_checkpoint(run, report.path, report.step * self.length.updates_per_step)
            self.events.call("on_save")

    def on_end(self, report: EndReport) -> None:
        """The last entry of the log, and the end."""
        seconds, state, args = time.monotonic() - self.began, self.events.state, self.args
        entry: Entry = {
            "train_runtime": seconds,
            "train_samples_per_second": state.global_step * args.rows_per_update / seconds,
            "train_steps_per_second": state.global_step / seconds,
            "train_loss": self.mean_loss,
        }
        # As in TRL, the last entry covers the steps since the entry before, without what every step logs.
        rest = {name: value for name, value in taken_entry(self.pending).items() if name not in LOGGED_BY_STEPS}
        self.ended = {**entry, **rest, "epoch": state.epoch, "step": state.global_step}
        self.events.log_step(entry | rest, None)
        if args.load_best_model_at_end and state.best_model_checkpoint is not None and not report.interrupted:
            self.take_best(Path(state.best_model_checkpoint), report.folder)
        self.events.call("on_train_end")

    @property
    def mean_loss(self) -> float:
        return sum(self.losses) / max(1, len(self.losses))


def is_best(args: TrainingFields, state: TrainerState, measured: Mapping[str, object]) -> bool:
    """Whether an evaluation is better than all earlier ones; if so, the state records it.

    None and NaN are never better.  Raises UserError if the evaluation does not have the metric.
    """
    if args.metric_for_best_model is None:
        return False
    name = "eval_" + args.metric_for_best_model.removeprefix("eval_")
    if name not in measured:
        given = f"{type(args).__name__}: metric_for_best_model = {args.metric_for_best_model!r}"
        raise UserError(f"{given}: an evaluation has no {name}; use one of {', '.join(sorted(measured))}.")
    value, best, sign = measured[name], state.best_metric, 1 if args.greater_is_better else -1
    if not isinstance(value, int | float) or not (best is None or sign * value > sign * best) or math.isnan(value):
        return False
    state.best_metric, state.best_global_step = float(value), state.global_step
    return True
