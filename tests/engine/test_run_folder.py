"""The run folder: one writer, nothing lost, nothing told twice, and every mistake answered in one message."""

import errno
import json
import math
import os
import signal
import subprocess
import sys
from math import nan
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from posttrain.errors import RunError
from posttrain.records import Finish, Grades, Group, Prompt, Rollout, TokenSequence
from posttrain.rewards.countdown import Countdown
from posttrain.runs.files import read_metrics
from posttrain.runs.folder import LOCK
from posttrain.runs.run_folder import RunFolder
from tests.support.refusals import refused


def group(draw: int) -> Group:
    prompt = Prompt(
        id=f"p{draw}",
        text=f"make {draw}",
        tokens=(draw, 9),
        columns={"puzzle": Countdown(numbers=(1, 2), target=3), "source": "né\x00"},
    )
    right = TokenSequence.one_turn((7, 2), logprobs=(-0.25, -1.5), finish=Finish.STOP, version=4)
    cut = TokenSequence.one_turn((8,), logprobs=(-2.0,), cut_logprobs=(-1.0,), finish=Finish.LENGTH)
    first, second = Rollout(sample=0, sequence=right, text="3"), Rollout(sample=1, sequence=cut, text="<think>")
    return Group(prompt=prompt, draw=draw, rollouts=(first, second))


GROUPS = [group(0), group(5)]
GRADES = Grades(
    names=("right", "shape"),
    scores=torch.tensor([[[1.0, 0.0], [0.5, nan]], [[0.0, 0.25], [nan, nan]]], dtype=torch.float64),
    weights=torch.tensor([1.0, 1.0], dtype=torch.float64),
    rewards=torch.tensor([[1.0, 0.25], [0.5, nan]], dtype=torch.float64),
    outcomes={"right": (("correct", "no_answer"), ("partly", "none"))},
)
ADVANTAGES = torch.tensor([[0.375, -0.375], [nan, nan]], dtype=torch.float64)


def test_a_new_run_folder_holds_the_configuration_and_empty_journals(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "a" / "run", "seed: 7\n") as run:
        assert (run.path / "config.yaml").read_text() == "seed: 7\n"
        assert read_metrics(run.path / "metrics.jsonl") == []
        assert run.checkpoints.is_dir()


def test_an_existing_run_is_not_overwritten_unless_told(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, "old: 1\n") as run:
        run.append_metrics(1, {"reward": 0.5})
        run.write_rollouts(1, GROUPS, GRADES, ADVANTAGES)
    (tmp_path / "notes.txt").write_text("mine")
    with refused("already contains a run", "resume=True", "run.overwrite = true") as error:
        RunFolder.create(tmp_path, "new: 1\n")
    assert error.value.exit_code == 2
    assert all(flag in error.value.command for flag in ("--resume", "--run.overwrite", "--run.folder"))
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1
    with RunFolder.create(tmp_path, "new: 1\n", overwrite=True) as run:
        assert (run.path / "config.yaml").read_text() == "new: 1\n"
        assert read_metrics(tmp_path / "metrics.jsonl") == []
        assert list((tmp_path / "rollouts").iterdir()) == []
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_overwriting_never_touches_a_folder_that_posttrain_did_not_make(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_text("precious")
    (tmp_path / "config.yaml").write_text("of another program")
    with refused("not a run folder: config.yaml, model."):
        RunFolder.create(tmp_path, "seed: 7\n", overwrite=True)
    assert (tmp_path / "model" / "weights").read_text() == "precious"
    assert not (tmp_path / LOCK).exists()


@pytest.mark.parametrize(
    ("place", "words", "code"),
    [("file", "is a file", 2), ("file/run", "cannot be written: Not a directory … --run.folder", 1)],
)
def test_a_folder_that_cannot_be_made_is_refused(place: str, words: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refused(words) as error:
        RunFolder.create(tmp_path / place, "")
    assert error.value.exit_code == code  # type: ignore[attr-defined]


def test_resuming_what_is_no_run_folder_is_a_usage_error(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with refused("config.yaml is missing"):
            RunFolder.resume(folder)


HOLD = """
import sys, time
from posttrain.runs.run_folder import RunFolder
run = RunFolder.create(sys.argv[1], "")
print("locked", flush=True)
time.sleep(60)
"""


def test_a_second_writer_is_refused_by_the_name_of_the_first_and_let_in_when_that_one_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout.readline() == b"locked\n"
            for second in (lambda: RunFolder.resume(tmp_path), lambda: RunFolder.create(tmp_path, "", overwrite=True)):
                with refused(f"process {holder.pid} is writing"):
                    second()
        finally:
            holder.send_signal(signal.SIGKILL)
    RunFolder.resume(tmp_path).close()


def test_the_lock_names_its_holder_and_is_gone_when_that_is_closed_or_fails(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("12345678901\n")  # longer than any process number
    run = RunFolder.create(tmp_path, "")
    assert (tmp_path / LOCK).read_text() == f"{os.getpid()}\n"
    with refused(f"process {os.getpid()} is writing"):
        RunFolder.resume(tmp_path)
    run.append_metrics(0, {})
    run.close()
    run.close()
    with refused("already contains"):
        RunFolder.create(tmp_path, "")
    RunFolder.resume(tmp_path).close()


@pytest.mark.parametrize("begun", [False, True])
def test_a_run_that_ended_before_its_first_measurement_is_no_obstacle(begun: bool, tmp_path: Path) -> None:
    if begun:
        RunFolder.create(tmp_path, "mistaken: 1\n").close()
    else:  # killed before it had a configuration
        (tmp_path / LOCK).write_text("1\n")
        (tmp_path / ".tmp-config.yaml").write_text("se")
    with RunFolder.create(tmp_path, "seed: 7\n") as run:
        assert (run.path / "config.yaml").read_text() == "seed: 7\n"


def test_metrics_are_one_json_line_per_step_with_non_finite_values_as_null_and_counted(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, "") as run:
        run.append_metrics(1, {"reward": 0.1, "loss": nan, "kl": math.inf})
        run.append_metrics(2, {"reward": 0.2})
    first, second = (json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "metrics.jsonl").open())
    assert first == {"step": 1, "reward": 0.1, "loss": None, "kl": None, "num_non_finite": 2}
    assert second == {"step": 2, "reward": 0.2, "num_non_finite": 0}


def test_every_score_is_in_the_journal_by_prompt_and_function(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, "") as run:
        run.journal_scores(3, GROUPS, GRADES)
    first, second = (json.loads(line) for line in (tmp_path / "scores.jsonl").open())
    assert first == {
        "step": 3,
        "draw": 0,
        "prompt_id": "p0",
        "scores": {"right": [1.0, 0.0], "shape": [0.0, 0.25]},
        "outcomes": {"right": ["correct", "no_answer"]},
    }
    assert second["draw"] == 5
    assert second["scores"] == {"right": [0.5, None], "shape": [None, None]}
    assert second["outcomes"] == {"right": ["partly", "none"]}


def test_the_rollout_file_holds_everything_that_a_step_used(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, "") as run:
        path = run.write_rollouts(12, GROUPS, GRADES, ADVANTAGES)
    assert path == tmp_path / "rollouts" / "step-000012.parquet"
    rows = pq.read_table(path).to_pylist()
    assert [(row["draw"], row["sample"]) for row in rows] == [(0, 0), (0, 1), (5, 0), (5, 1)]
    columns = rows[1].pop("columns")
    assert json.loads(columns) == {"puzzle": {"numbers": [1, 2], "target": 3, "rule": "all"}, "source": "né\x00"}
    assert rows[1] == {
        "step": 12,
        "draw": 0,
        "sample": 1,
        "prompt_id": "p0",
        "prompt": "make 0",
        "completion": "<think>",
        "prompt_tokens": [0, 9],
        "tokens": [8],
        "sampled": [True],
        "logprobs": [-2.0],
        "cut_logprobs": [-1.0],
        "finish": "length",
        "weights_version": 0,
        "reward": 0.25,
        "advantage": -0.375,
        "score/right": 0.0,
        "score/shape": 0.25,
        "outcome/right": "no_answer",
    }
    assert [row["weights_version"] for row in rows] == [4, 0, 4, 0]
    assert [row["reward"] for row in rows] == [1.0, 0.25, 0.5, None]
    assert [row["advantage"] for row in rows] == [0.375, -0.375, None, None]
    assert rows[0]["cut_logprobs"] is None


def test_cutting_forgets_a_second_line_of_the_last_step_and_no_score(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, "") as run:
        for step in (0, 1, 2):
            run.append_metrics(step, {"reward": float(step)})
            run.journal_scores(step, GROUPS, GRADES)
        run.append_metrics(2, {"eval/reward": 0.5})  # measured after training, which goes on now
        run.cut_after(2)
        run.append_metrics(3, {"reward": 3.0})
    assert [record.get("reward") for record in read_metrics(tmp_path / "metrics.jsonl")] == [0.0, 1.0, 2.0, 3.0]
    assert (tmp_path / "scores.jsonl").read_bytes().count(b"\n") == 3 * len(GROUPS)


def test_cutting_forgets_later_steps_and_a_torn_last_line(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, "") as run:
        for step in range(5):
            run.append_metrics(step, {"reward": float(step)})
            run.journal_scores(step, GROUPS, GRADES)
            run.write_rollouts(step, GROUPS, GRADES, ADVANTAGES)
    with (tmp_path / "scores.jsonl").open("a") as file:
        file.write('{"step": 2, "dra')
    (tmp_path / "rollouts" / ".tmp-step-000005.parquet").write_bytes(b"half")
    with RunFolder.resume(tmp_path) as run:
        run.cut_after(2)
        assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2]
        assert (tmp_path / "scores.jsonl").read_bytes().count(b"\n") == 3 * len(GROUPS)
        assert (tmp_path / "scores.jsonl").read_bytes().endswith(b"}\n")
        names = sorted(path.name for path in (tmp_path / "rollouts").iterdir())
        assert names == ["step-000000.parquet", "step-000001.parquet", "step-000002.parquet"]
        run.append_metrics(3, {"reward": 9.0})
        assert [record["reward"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [0.0, 1.0, 2.0, 9.0]
        run.cut_after(-1)
        assert read_metrics(tmp_path / "metrics.jsonl") == []


@pytest.mark.parametrize("num_bytes", range(12, 70))
def test_a_metrics_line_torn_anywhere_is_removed_and_the_lines_before_it_stay(tmp_path: Path, num_bytes: int) -> None:
    with RunFolder.create(tmp_path, "") as run:
        run.append_metrics(1, {"reward": 1.0})
        run.append_metrics(2, {"reward": 2.0})
    journal = tmp_path / "metrics.jsonl"
    whole = journal.read_bytes()
    os.truncate(journal, num_bytes)
    with RunFolder.resume(tmp_path) as run:
        run.cut_after(9)
    lines = whole.splitlines(keepends=True)
    num_whole = sum(len(b"".join(lines[: i + 1])) <= num_bytes for i in range(len(lines)))
    assert journal.read_bytes() == b"".join(lines[:num_whole])


def test_a_damaged_line_in_the_middle_of_a_journal_is_named(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, "").close()
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"st\n{"step": 2}\n')
    with RunFolder.resume(tmp_path) as run, refused("metrics.jsonl, line 2: not JSON", error=RunError):
        run.cut_after(1)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("[1, 2]", "list instead of an object"),
        ("7", "int instead of an object"),
        ('{"reward": 0.5}', "step = None is not the number of a step"),
        ('{"step": "one"}', "step = 'one' is not the number of a step"),
        ('{"step": true}', "step = True is not the number of a step"),
    ],
)
@pytest.mark.parametrize("journal", ["metrics.jsonl", "scores.jsonl", "alarms.jsonl"])
def test_a_line_that_is_no_record_of_a_step_is_named(tmp_path: Path, journal: str, line: str, says: str) -> None:
    RunFolder.create(tmp_path, "").close()
    (tmp_path / journal).write_text(f'{{"step": 0}}\n{line}\n{{"step": 2}}\n')
    with RunFolder.resume(tmp_path) as run, pytest.raises(RunError) as error:
        run.cut_after(1)
    assert str(error.value) == (
        f"{tmp_path / journal}, line 2: {says}; the file was changed after it was written."
        "  Restore the file or delete that line."
    )


def test_what_somebody_else_put_beside_rollouts_stays_and_breaks_nothing(tmp_path: Path) -> None:
    stray = [".DS_Store", "notes.txt", "step-000009.parquet.bak", "step-9.parquet", "step-000002-mine.parquet"]
    folders = [".tmp-x", "step-000003.parquet", "step-000077.parquet"]
    with RunFolder.create(tmp_path, "") as run:
        for step in (1, 2):
            run.write_rollouts(step, GROUPS, GRADES, ADVANTAGES)
        for name in stray:
            (tmp_path / "rollouts" / name).write_text("mine")
        for name in folders:
            (tmp_path / "rollouts" / name).mkdir()
        run.cut_after(1)
        assert run.missing(1, {"rollouts": 1}) == {}
        assert run.missing(3, {"rollouts": 3}) == {"rollouts": [3]}, "a folder is no file of a step"
    left = {path.name for path in (tmp_path / "rollouts").iterdir()}
    assert left == {*stray, *folders, "step-000001.parquet"}


KEPT_FROM = {"metrics.jsonl": 0, "scores.jsonl": 1, "rollouts": 1}


def test_finished_steps_that_are_missing_are_found(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, "") as run:
        for step in range(5):
            run.append_metrics(step, {"num_groups": 1.0, "num_replaced_groups": 1.0} if step else {})
            if step:
                run.journal_scores(step, GROUPS, GRADES)
                run.write_rollouts(step, GROUPS, GRADES, ADVANTAGES)
        assert run.missing(4, KEPT_FROM) == {}
        assert run.missing(4, {"metrics.jsonl": 1}) == {}
        (tmp_path / "rollouts" / "step-000003.parquet").unlink()
        scores = (tmp_path / "scores.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / "scores.jsonl").write_text("".join(scores[:-1]))  # one of step 4's two groups
        assert run.missing(4, KEPT_FROM) == {"scores.jsonl": [4], "rollouts": [3]}
        assert run.missing(3, KEPT_FROM) == {"rollouts": [3]}  # what is behind the checkpoint is taken again
        metrics = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / "metrics.jsonl").write_text(metrics[2] + metrics[4])
        (tmp_path / "scores.jsonl").write_text("")
        found = run.missing(4, KEPT_FROM)
        assert found == {"metrics.jsonl": [0, 1, 3], "scores.jsonl": [1, 2, 3, 4], "rollouts": [3]}


def test_a_full_disk_ends_in_one_message_that_says_what_was_kept_and_leaves_no_piece(tmp_path, monkeypatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with RunFolder.create(tmp_path, "") as run:
        monkeypatch.setattr(os, "fsync", full)
        with refused("metrics.jsonl: cannot be written: No space left", error=RunError) as error:
            run.append_metrics(1, {"reward": 0.5})
        assert "Free some space" in str(error.value)
        assert "--resume" not in str(error.value)  # nothing to resume from yet
        with refused("step-000001.parquet: cannot be written: No space left", error=RunError):
            run.write_rollouts(1, GROUPS, GRADES, ADVANTAGES)
        (run.checkpoints / "step-000004").mkdir()
        (run.checkpoints / "step-000004" / "manifest.json").write_text("{}")
        (run.checkpoints / "step-000005-backup").mkdir()
        with refused("Kept:", "step-000004 and every", f"resume with --resume {tmp_path}", error=RunError):
            run.append_metrics(1, {"reward": 0.5})
        monkeypatch.undo()
    assert error.value.exit_code == 1
    assert list((tmp_path / "rollouts").iterdir()) == []
