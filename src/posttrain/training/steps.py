"""An RL run, one step at a time, for notebooks and for work between steps."""

from collections.abc import Sequence
from dataclasses import fields
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

from posttrain.algorithms.algorithm import Algorithm
from posttrain.config import Config
from posttrain.errors import UserError
from posttrain.generation.engine import Engine
from posttrain.models.policy import Policy
from posttrain.runs.reports import Run, StepReport
from posttrain.runs.watchers import Watcher
from posttrain.schemas import did_you_mean
from posttrain.tasks.base import Task
from posttrain.training.caller_objects import CallerObjects, Rewards, Rows, StartOptions
from posttrain.training.rl import RunSteps, run_steps


class TrainArguments(TypedDict, total=False):
    """The arguments of `train` apart from the config."""

    policy: Policy | None
    task: Task | None
    engine: Engine | None
    algorithm: Algorithm | None
    rewards: Rewards
    rows: Rows | None
    held_out_rows: Rows | None
    watchers: Sequence[Watcher]
    resume: bool
    from_step: int | None
    accept_changes: bool
    recipe: str


class TrainingSteps:
    """The steps of a run, each returned after it is journalled and, if due, saved.

    The first `next` also does what `train` does before its first step; the end measures again and saves the model.
    Leaving earlier, by the `with` block or `close`, interrupts the run: the last step is saved and `resume=True`
    continues from it.
    """

    def __init__(self, steps: RunSteps) -> None:
        self._steps = steps
        self.run: Run | None = None
        """The results; None until all steps are taken."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StepReport:
        try:
            return next(self._steps)
        except StopIteration as end:
            self.run = self.run or end.value
            raise

    def close(self) -> None:
        self._steps.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def steps(config: Config, **objects: Unpack[TrainArguments]) -> TrainingSteps:
    """The run of `train` with the same arguments, step by step.

        with posttrain.steps(config, rows=rows, rewards=[solved]) as steps:
            for step in steps:
                print(step.step, step.metrics["reward"], step.groups[0].rollouts[0].text)
        print(steps.run.summary)

    Each record has the step's metrics, groups, grades and advantages (`posttrain.runs.reports.StepReport`).  Weights,
    folder and checkpoints equal those of `train`, bit for bit.  Time between steps counts for `run.time_limit_minutes`
    only.  Without `with`, call `steps.close()` after leaving the loop early: until then the run folder is locked.
    """
    given: dict[str, Any] = dict(objects)
    unknown = given.keys() - TrainArguments.__annotations__.keys()
    if unknown:
        name = min(unknown)
        raise UserError(f"steps: there is no argument `{name}`.  {did_you_mean(name, TrainArguments.__annotations__)}")
    start = StartOptions(**{each.name: given.pop(each.name) for each in fields(StartOptions) if each.name in given})
    return TrainingSteps(run_steps(config, CallerObjects(**given), start))
