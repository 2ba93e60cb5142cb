"""Journals, checkpoints and run folders: a crash, a full disk and a failing disk at every operation on files.

What was acknowledged by then is there afterwards, and the same work, done again, ends in the same bytes.
"""

import errno
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from posttrain.errors import UserError
from posttrain.runs.checkpoint import forget_after, load_latest, prune, save
from posttrain.runs.files import LineJournal
from posttrain.runs.run_folder import RunFolder
from tests.support.file_operations import DONE, crashes, fails_at, num_operations


def journal_work(folder: Path) -> None:
    """Votes, one after the other; those that are there already are not cast again."""
    journal = LineJournal(folder / "votes.jsonl")
    for number in range(len(journal.records()), 4):
        journal.append([{"vote": number}])
        DONE.append(number)


def journal_holds(folder: Path, done: int) -> None:
    assert [each["vote"] for each in LineJournal(folder / "votes.jsonl").records()][:done] == [*range(done)]


def checkpoint_work(folder: Path) -> None:
    """Two steps are saved, the old one removed, and later ones of an earlier life forgotten."""
    latest = load_latest(folder)
    forget_after(folder, 0 if latest is None else latest.step)
    for step in range(1, 3):
        save(folder, step, {"policy": {"w": torch.full((3,), float(step))}}, {"step": step}, recipe="seed: 7\n")
        DONE.append(step)
        prune(folder, keep_last=1)


def checkpoint_holds(folder: Path, done: int) -> None:
    latest = load_latest(folder) if folder.is_dir() else None
    step = 0 if latest is None else latest.step
    assert step >= done
    assert latest is None or torch.equal(latest.tensors["policy"]["w"], torch.full((3,), float(step)))


def run_work(folder: Path) -> None:
    """A run is begun, or goes on behind the last step that its journal tells of."""
    begun = (folder / "config.yaml").is_file()
    with RunFolder.resume(folder) if begun else RunFolder.create(folder, "seed: 7\n") as run:
        last = run.last_step()
        run.cut_after(last)
        for step in range(last + 1, 4):
            run.append_metrics(step, {"reward": step / 2})
            DONE.append(step)
        run.replace_config("seed: 8\n")
        run.write_summary({"steps": 3})


def run_holds(folder: Path, done: int) -> None:
    if done:
        with RunFolder.resume(folder) as run:
            assert run.last_step() >= done


@dataclass(frozen=True)
class Part:
    """Work on a folder, and what must hold of it after so many of its marks."""

    work: Callable[[Path], None]
    holds: Callable[[Path, int], None]


PARTS = {
    "journal": Part(journal_work, journal_holds),
    "checkpoints": Part(checkpoint_work, checkpoint_holds),
    "run folder": Part(run_work, run_holds),
}


def contents(folder: Path) -> dict[str, bytes]:
    """All files but the lock, which names the process."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".posttrain.lock")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.fixture(params=PARTS)
def part(request: pytest.FixtureRequest) -> Part:
    return PARTS[request.param]


def test_a_crash_at_any_operation_loses_nothing_that_was_acknowledged(part: Part, tmp_path: Path) -> None:
    folder = tmp_path / "whole"
    folder.mkdir()
    left = list(crashes(folder, tmp_path / "left", part.work))
    whole = contents(folder)
    assert len(left) > 10
    for copy, done in left:
        part.holds(copy, done)
        part.work(copy)
        assert contents(copy) == whole, copy


def test_an_error_at_any_operation_is_told_and_loses_nothing_that_was_acknowledged(part: Part, tmp_path: Path) -> None:
    """A full disk and one that fails take turns."""
    (tmp_path / "whole").mkdir()
    count = num_operations(tmp_path / "whole", part.work)
    whole, folder = contents(tmp_path / "whole"), tmp_path / "tried"
    for number in range(count):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        error = fails_at(folder, number, (errno.ENOSPC, errno.EIO)[number % 2], part.work)
        done = len(DONE)
        assert error is None or isinstance(error, UserError), (number, repr(error))
        part.holds(folder, done)
        part.work(folder)
        assert contents(folder) == whole, number
