"""A user's watchers see a run of inverse RL as they see any other."""

from pathlib import Path

import posttrain
from posttrain.runs.reports import EndReport, StepReport
from posttrain.runs.watchers import Watcher


class Notes(Watcher):
    def __init__(self) -> None:
        self.steps: list[StepReport] = []
        self.ends: list[EndReport] = []

    def on_step(self, report: StepReport) -> None:
        self.steps.append(report)

    def on_end(self, report: EndReport) -> None:
        self.ends.append(report)


def test_a_watcher_sees_each_evaluation_of_the_fit_and_the_end(tmp_path: Path) -> None:
    config = posttrain.load_recipe("irl-course-exact", run={"folder": str(tmp_path / "run"), "plots": False})
    notes = Notes()
    run = posttrain.recover(config, watchers=[notes])
    assert [report.step for report in notes.steps] == [*range(1, len(notes.steps) + 1)]
    assert len(notes.steps) >= run.summary["iterations"]
    gradients = [report.metrics["largest_gradient"] for report in notes.steps]
    assert gradients[-1] < gradients[0]
    (end,) = notes.ends
    assert (end.folder, end.interrupted) == (run.folder, False)
    assert end.summary == run.summary
