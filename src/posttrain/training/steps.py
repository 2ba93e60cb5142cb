"""A run by reward, one step at a time: for notebooks, and for whoever wants to do something between two steps."""

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
    """What `train` takes beside the config."""

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
    """The steps of a run, each told once it is in the journal and, where that is due, saved.

    What `train` does before its first step is done with the first one that is asked for, and what it does after the
    last (measuring again, saving the model) when there is none left.  Leaving before that, by the `with` block's end or
    by `close`, ends the run as an interruption does: the last step is saved and `resume=True` goes on from it.
    """

    def __init__(self, steps: RunSteps) -> None:
        self._steps = steps
        self.run: Run | None = None
        """What came out; None until the steps have come to their end."""

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
    """A run as `train` makes it, of the same arguments, handed out step by step.

        with posttrain.steps(config, rows=rows, rewards=[solved]) as steps:
            for step in steps:
                print(step.step, step.metrics["reward"], step.groups[0].rollouts[0].text)
        print(steps.run.summary)

    Each record has the step's metrics, groups, grades and advantages (`posttrain.runs.reports.StepReport`).  The
    weights, the folder and the checkpoints are those of `train`, bit for bit; what is done between two steps counts as
    no time of theirs, but it does count for `run.time_limit_minutes`.  Without `with`, a loop that is left early should
    be followed by `steps.close()`: until then the run folder is locked.
    """
    given: dict[str, Any] = dict(objects)
    unknown = given.keys() - TrainArguments.__annotations__.keys()
    if unknown:
        name = min(unknown)
        raise UserError(f"steps: there is no argument `{name}`.  {did_you_mean(name, TrainArguments.__annotations__)}")
    how = StartOptions(**{each.name: given.pop(each.name) for each in fields(StartOptions) if each.name in given})
    return TrainingSteps(run_steps(config, CallerObjects(**given), how))
