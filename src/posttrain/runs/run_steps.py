"""A run as its steps: taken to the end at once, or one by one by the caller."""

from collections.abc import Generator
from typing import Self

from posttrain.runs.reports import Run, StepReport

RunSteps = Generator[StepReport, None, Run]
"""A run: yields each step when it is recorded, and returns its results.

Closed early it ends as an interrupted run does: the last recorded step is saved, and no `Run` is returned.
"""


def to_the_end(steps: RunSteps) -> Run:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            run: Run = end.value
            return run


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

    def __exit__(self, *_: object) -> None:
        self.close()
