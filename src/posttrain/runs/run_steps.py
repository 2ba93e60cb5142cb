"""How a run starts, and its steps: all at once, or one by one by the caller."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Self

from posttrain.errors import UserError
from posttrain.ranks.group import RankGroup
from posttrain.runs.reports import Run, StepReport
from posttrain.runs.watchers import Watcher, require_watchers


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """Who watches a run, and whether it resumes."""

    watchers: Sequence[Watcher] = ()
    resume: bool = False
    """Whether the run in `config.run.folder` resumes from its last checkpoint."""
    from_step: int | None = None
    """The step whose checkpoint it resumes from; None: the last."""
    accept_changes: bool = False
    """Whether it also resumes if rows, rewards or files have changed."""
    recipe: str = ""
    """Source of the config, for the summary."""

    def __post_init__(self) -> None:
        if self.from_step is not None and not self.resume:
            step, rule = self.from_step, "only a resumed run starts from a step"
            raise UserError(
                f"from_step = {step}: {rule}; call train(config, resume=True, from_step={step}).",
                command=f"--from-step {step}: {rule}; give --resume RUN as well.",
            )
        object.__setattr__(self, "watchers", require_watchers(self.watchers))

    def now(self, ranks: RankGroup) -> "StartOptions":
        """The same, or a resume from the last checkpoint if torchrun has restarted ranks."""
        return replace(self, resume=True, from_step=None) if ranks.has_begun() else self


RunSteps = Generator[StepReport, None, Run]
"""A run: yields each step when it is recorded, and returns its results.

If it is closed early, it ends like an interrupted run: the last recorded step is saved, and no `Run` is returned.
"""


def to_the_end(steps: RunSteps) -> Run:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            run: Run = end.value
            return run


class TrainingSteps:
    """The steps of a run; each is returned after it is in the journal and, if due, saved.

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

    def __exit__(self, *_: object) -> None:
        self.close()
