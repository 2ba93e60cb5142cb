"""The watcher that raises alarms sees all that the run has measured, that before training too."""

from pathlib import Path

import torch

from posttrain.records import Grades
from posttrain.runs.progress import Progress
from posttrain.runs.reports import StepReport
from posttrain.runs.run_folder import RunFolder
from posttrain.runs.watchers import Alarms
from tests.support.tiny import written_group


def report(step: int, reward: float, accuracy: float | None) -> StepReport:
    metrics = {"reward": reward, "reward_std": 0.01}
    if accuracy is not None:
        metrics |= evaluation(accuracy)
    rewards = torch.tensor([[reward, reward]], dtype=torch.float64)
    grades = Grades(names=("mine",), scores=rewards[None], weights=torch.ones(1).double(), rewards=rewards)
    return StepReport(step=step, metrics=metrics, groups=[written_group((1,), [(2,), (3,)])], grades=grades)


def evaluation(accuracy: float) -> dict[str, float]:
    return {
        "eval/accuracy_sampled": accuracy,
        "eval/accuracy_sampled_low": accuracy - 0.01,
        "eval/accuracy_sampled_high": accuracy + 0.01,
    }


def test_a_reward_that_rises_alone_is_seen_against_the_evaluation_before_training(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", "{}") as folder:
        alarms = Alarms(folder, Progress(20))
        folder.append_metrics(0, evaluation(0.5))  # written after the watchers have been made, as a run does
        raised = []
        for step in range(1, 12):
            seen = report(step, reward=0.1 * step, accuracy=0.4 if step == 11 else None)
            raised.append(alarms.on_step(seen))
            folder.append_metrics(step, seen.metrics)
        assert raised[-1] == {"num_alarms": 1.0}
        assert folder.raised() == {"reward alone": 11}
