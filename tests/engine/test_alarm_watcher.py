"""The watcher that raises alarms sees all that the run has measured, that before training too."""

import json
from pathlib import Path

import pytest
import torch

from posttrain.records import Grades
from posttrain.runs.progress import Progress
from posttrain.runs.reports import StepReport
from posttrain.runs.run_folder import RunFolder
from posttrain.runs.watchers import Alarms
from tests.support.tiny import written_group


def report(step: int, reward: float, accuracy: float | None) -> StepReport:
    metrics = {"reward": reward, "reward_std_within_groups": 0.01}
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


def graded(step: int, share: int, *, score: float) -> StepReport:
    """Of ten completions so many are `formatted`, which scores this much; the others, `prose`, score .5."""
    told = ("formatted",) * share + ("prose",) * (10 - share)
    rewards = torch.tensor([[score] * share + [0.5] * (10 - share)], dtype=torch.float64)
    grades = Grades(
        names=("form",),
        scores=rewards[None],
        weights=torch.ones(1).double(),
        rewards=rewards,
        outcomes={"form": (told,)},
    )
    metrics = {
        "reward": rewards.mean().item(),
        "outcomes/form/formatted": share / 10,
        "outcomes/form/prose": 1 - share / 10,
    }
    return StepReport(step=step, metrics=metrics, groups=[written_group((1,), [(2,)] * 10)], grades=grades)


@pytest.mark.parametrize(("score", "word"), [(1.0, "Notice"), (0.0, "ALARM")])
def test_an_outcome_that_becomes_frequent_is_an_alarm_unless_it_is_what_the_reward_pays(
    score: float, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunFolder.create(tmp_path / "run", "{}") as folder:
        alarms = Alarms(folder, Progress(20))
        counts = [alarms.on_step(graded(step, 2 if step < 12 else 8, score=score)) for step in range(1, 15)]
        told = [json.loads(line) for line in (folder.path / "alarms.jsonl").read_text().splitlines()]
    assert [(each["step"], each["alarm"], each.get("notice", False)) for each in told] == [
        (13, "outcome form formatted", word == "Notice")  # .8, .8, .2 on average are .4 above the .2 before
    ]
    assert f"{word}, step 13, outcome form formatted: 60% of completions" in capsys.readouterr().out
    assert sum(each["num_alarms"] for each in counts if each) == (word == "ALARM")
