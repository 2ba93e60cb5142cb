"""What is on the disk when a call returns: the order of writing, syncing and renaming, which a power cut would test.

A file's content survives once the file was synced after the last write, and its name once its folder was.  Journals,
checkpoints and run folders meet a crash, a full disk and a failing disk at every operation on files.
"""

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from posttrain.errors import RunError, UserError
from posttrain.records import Finish, Grades, Group, Prompt, Rollout, TokenSequence
from posttrain.runs.alarms import Alarm, Illustration
from posttrain.runs.checkpoint import forget_after, load_latest, prune, save
from posttrain.runs.files import LineJournal, append_lines, cut_lines_after, write_atomically
from posttrain.runs.folder import VERSION
from posttrain.runs.named_inputs import run_recipe
from posttrain.runs.reports import ScoredCompletions, UpdateTokens
from posttrain.runs.run_folder import RunFolder
from tests.support.file_operations import DONE, crashes, fails_at, num_operations
from tests.support.refusals import mentions, refused
from tests.support.runs import files_of


class Disk:
    """What a power cut would leave: names and contents as they were when they were last synced."""

    def __init__(self) -> None:
        self.contents: dict[int, bytes] = {}
        """By inode."""
        self.names: dict[Path, dict[str, int]] = {}
        """Of each folder: its entries' inodes."""

    def sync(self, descriptor: int) -> None:
        """Note what `os.fsync` of a file or folder makes safe."""
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_dir():
            self.names[path] = {entry.name: entry.stat().st_ino for entry in path.iterdir()}
        else:
            self.contents[path.stat().st_ino] = path.read_bytes()

    def holds(self, file: Path) -> bytes | None:
        """The content that is safe under a name, if any is."""
        return self.contents.get(self.names.get(file.parent, {}).get(file.name, -1))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    made, sync = Disk(), os.fsync

    def watched(descriptor: int) -> None:
        sync(descriptor)
        made.sync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    return made


def test_a_file_that_is_written_whole_is_safe_and_is_renamed_only_when_its_content_is(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_rename: list[bytes | None] = []
    rename = os.replace

    def watched(source: Path, target: Path) -> None:
        assert Path(source) == tmp_path / ".tmp-file"  # of its own: several files may be written at a time
        at_rename.append(disk.contents.get(os.stat(source).st_ino))
        rename(source, target)

    monkeypatch.setattr(os, "replace", watched)
    for content in (b"old", b"new and longer"):
        write_atomically(tmp_path / "file", content)
        assert disk.holds(tmp_path / "file") == content
    assert at_rename == [b"old", b"new and longer"]


def test_lines_are_safe_when_they_are_appended_and_when_they_are_cut(tmp_path: Path, disk: Disk) -> None:
    journal = tmp_path / "journal.jsonl"
    journal.touch()

    def safe() -> bytes:
        return disk.contents[journal.stat().st_ino]

    append_lines(journal, ['{"step": 1}', '{"step": 2}'])
    assert safe() == b'{"step": 1}\n{"step": 2}\n'
    append_lines(journal, ['{"step": 3}'])
    assert safe() == b'{"step": 1}\n{"step": 2}\n{"step": 3}\n'
    cut_lines_after(journal, 1)
    assert safe() == b'{"step": 1}\n' == journal.read_bytes()


def test_a_checkpoint_gets_its_name_when_all_of_it_is_safe_and_the_name_is_safe_in_the_end(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsafe: list[str] = []
    rename = os.rename

    def watched(source: Path, target: Path) -> None:
        if Path(target).name == "step-000007":
            files = list(Path(source).iterdir())
            assert {path.name for path in files} >= {"policy.safetensors", "state.json", "manifest.json"}
            unsafe.extend(path.name for path in files if disk.holds(path) != path.read_bytes())
            unsafe.append("none other")
        rename(source, target)

    monkeypatch.setattr(os, "rename", watched)
    save(tmp_path, 7, {"policy": {"w": torch.arange(9.0)}}, {"step": 7})
    assert unsafe == ["none other"]
    assert disk.names[tmp_path] == {"step-000007": (tmp_path / "step-000007").stat().st_ino}


def test_checkpoints_that_are_given_up_are_gone_for_good_when_that_returns(tmp_path: Path, disk: Disk) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, {}, {})
    forget_after(tmp_path, 1)
    assert set(disk.names[tmp_path]) == {"step-000001"}


def test_a_run_folder_is_safe_from_its_beginning_and_after_a_cut(tmp_path: Path, disk: Disk) -> None:
    path = tmp_path / "run"
    with RunFolder.create(path, "seed: 7\n") as run:
        assert disk.holds(path / "config.yaml") == b"seed: 7\n"
        assert set(disk.names[path]) >= {"metrics.jsonl", "scores.jsonl", "rollouts", "checkpoints"}
        run.append_metrics(1, {"reward": 0.5})
        assert disk.holds(path / "metrics.jsonl") == (path / "metrics.jsonl").read_bytes() != b""
        (path / "rollouts" / "step-000002.parquet").write_bytes(b"of a step that was lost")
        run.cut_after(1)
        assert disk.names[path / "rollouts"] == {}


def test_no_file_stays_open(tmp_path: Path) -> None:
    def num_open() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = num_open()
    for _ in range(3):
        write_atomically(tmp_path / "file", b"content")
        append_lines(tmp_path / "lines", ["{}"])
    assert num_open() == before


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


@pytest.fixture(params=PARTS)
def part(request: pytest.FixtureRequest) -> Part:
    return PARTS[request.param]


def test_a_crash_at_any_operation_loses_nothing_that_was_acknowledged(part: Part, tmp_path: Path) -> None:
    folder = tmp_path / "whole"
    folder.mkdir()
    left = list(crashes(folder, tmp_path / "left", part.work))
    whole = files_of(folder)
    assert len(left) > 10
    for copy, done in left:
        part.holds(copy, done)
        part.work(copy)
        assert files_of(copy) == whole, copy


def test_an_error_at_any_operation_is_told_and_loses_nothing_that_was_acknowledged(part: Part, tmp_path: Path) -> None:
    """A full disk and one that fails take turns."""
    (tmp_path / "whole").mkdir()
    count = num_operations(tmp_path / "whole", part.work)
    whole, folder = files_of(tmp_path / "whole"), tmp_path / "tried"
    for number in range(count):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        error = fails_at(folder, number, (errno.ENOSPC, errno.EIO)[number % 2], part.work)
        done = len(DONE)
        assert error is None or isinstance(error, UserError), (number, repr(error))
        part.holds(folder, done)
        part.work(folder)
        assert files_of(folder) == whole, number


def scored(*scores: float, greedy: bool = False, extra: object = None) -> ScoredCompletions:
    """A completion with each of these scores, of one prompt."""
    rollouts = tuple(
        Rollout(
            sample=i, sequence=TokenSequence.one_turn((7, i), logprobs=(-0.5, -1.0), finish=Finish.STOP), text=f"{i}"
        )
        for i, _ in enumerate(scores)
    )
    group = Group(prompt=Prompt(id="p", text="make", tokens=(3,)), draw=0, rollouts=rollouts)
    column = torch.tensor([scores], dtype=torch.float64)
    extras = {} if extra is None else {"right": (tuple({"seen": extra} for _ in scores),)}
    ones = torch.ones(1, dtype=torch.float64)
    grades = Grades(names=("right",), scores=column[None], weights=ones, rewards=column / 2, extras=extras)
    return ScoredCompletions(groups=[group], grades=grades, judged=column, greedy=greedy)


def rows(run: Path, folder: str, step: int) -> list[dict[str, Any]]:
    return pq.read_table(run / folder / f"step-{step:06d}.parquet").to_pylist()


def test_a_folder_says_its_format_from_the_start(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, "seed: 7\n"):
        assert (tmp_path / "format").read_text() == f"{VERSION}\n" == "2\n"


FORMATS = {
    "3": (UserError, ("format 3", "1 to 2", "Update posttrain")),
    "two": (RunError, ("format", "'two'", "delete the file")),
    "": (RunError, ("format", "''", "delete the file")),
}


@pytest.mark.parametrize("content", FORMATS)
def test_a_format_that_is_not_known_is_refused_with_its_value_and_a_remedy(content: str, tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, "run: {}\n"):
        pass
    (tmp_path / "format").write_text(content)
    kind, says = FORMATS[content]
    for opened in (RunFolder.resume, run_recipe):
        with pytest.raises(kind) as error:
            opened(tmp_path)
        assert all(each in str(error.value) for each in (*says, str(tmp_path)))


def test_a_folder_without_a_format_is_opened(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, "run: {}\n"):
        pass
    (tmp_path / "format").unlink()
    assert run_recipe(tmp_path).sections == {"run": {}}
    with RunFolder.resume(tmp_path) as run:
        run.cut_after(0)


def test_every_held_out_completion_is_kept_with_its_scores(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, "seed: 7\n") as run:
        run.write_evaluation(4, "brief", [scored(1.0)])
        run.write_evaluation(4, "after", [scored(1.0, nan), scored(0.0, greedy=True)])
    table = rows(tmp_path, "evaluations", 4)
    told = [(row["evaluation"], row["greedy"], row["sample"], row["judged"], row["reward"]) for row in table]
    assert told == [
        ("brief", False, 0, 1.0, 0.5),
        ("after", False, 0, 1.0, 0.5),
        ("after", False, 1, None, None),
        ("after", True, 0, 0.0, 0.0),
    ]
    assert [row["score/right"] for row in table] == [1.0, 1.0, None, 0.0]
    assert table[2]["tokens"] == [7, 1]
    assert "advantage" not in table[0]


def test_an_evaluation_that_is_made_again_takes_the_place_of_the_first(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, "seed: 7\n") as run:
        run.write_evaluation(4, "brief", [scored(1.0)])
        for score in (0.0, 1.0):
            run.write_evaluation(4, "after", [scored(score)])
    table = rows(tmp_path, "evaluations", 4)
    assert [(row["evaluation"], row["judged"]) for row in table] == [("brief", 1.0), ("after", 1.0)]


def test_a_logged_column_of_several_types_is_json(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, "seed: 7\n") as run:
        run.write_evaluation(4, "brief", [scored(1.0, extra=1)])
        run.write_evaluation(4, "after", [scored(1.0, extra="x"), scored(1.0)])
    assert [row["extra/right/seen"] for row in rows(tmp_path, "evaluations", 4)] == ["1", '"x"', None]


def test_evaluations_before_a_folder_is_begun_are_written_when_it_is(tmp_path: Path) -> None:
    with RunFolder.claim(tmp_path / "run") as run:
        run.write_evaluation(0, "before", [scored(1.0)])
        assert not (tmp_path / "run" / "evaluations").exists()
        run.begin("seed: 7\n")
    assert len(rows(tmp_path / "run", "evaluations", 0)) == 1


def test_resuming_cuts_what_was_written_after_the_checkpoint(tmp_path: Path) -> None:
    tokens = UpdateTokens(rollouts=[(0, "p", 0)], lengths=[1], columns={"ratio": torch.ones(1)})
    with RunFolder.create(tmp_path, "seed: 7\n") as run:
        run.write_evaluation(0, "before", [scored(1.0)])
        for step in (2, 4, 6):
            run.write_evaluation(step, "brief", [scored(1.0)])
            run.write_token_columns(step, [tokens])
        for step in (3, 4):
            run.write_evaluation(step, "after", [scored(0.0)])
    with RunFolder.resume(tmp_path) as run:
        run.cut_after(4)
        assert [row["evaluation"] for row in rows(tmp_path, "evaluations", 4)] == ["brief"]
        run.cut_after(3)  # where the run ended once, and nothing else was measured
    names = [
        [path.name[:11] for path in sorted((tmp_path / each).iterdir())] for each in ("evaluations", "token_columns")
    ]
    assert names == [["step-000000", "step-000002"], ["step-000002"]]
    assert rows(tmp_path, "evaluations", 0)[0]["evaluation"] == "before"


def test_a_damaged_evaluation_is_refused_with_its_file(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, "seed: 7\n") as run:
        (tmp_path / "evaluations" / "step-000004.parquet").write_bytes(b"PAR1")
        with pytest.raises(RunError) as error:
            run.cut_after(4)
    mentions(str(error.value), "step-000004.parquet: damaged", "Delete it")


def test_trainer_columns_have_a_row_for_each_completion_of_each_update(tmp_path: Path) -> None:
    first = UpdateTokens(
        rollouts=[(0, "p", 1), (2, "q", 0)],
        lengths=[2, 1],
        columns={"ratio": torch.tensor([1.0, 0.5, 2.0]), "clipped": torch.tensor([False, True, False])},
    )
    second = UpdateTokens(rollouts=[(2, "q", 0)], lengths=[1], columns={"ratio": torch.tensor([1.25])})
    with RunFolder.create(tmp_path, "seed: 7\n") as run:
        run.write_token_columns(3, [first, second])
    table = rows(tmp_path, "token_columns", 3)
    assert [(row["update"], row["draw"], row["prompt_id"], row["sample"]) for row in table] == [
        (1, 0, "p", 1),
        (1, 2, "q", 0),
        (2, 2, "q", 0),
    ]
    assert [row["ratio"] for row in table] == [[1.0, 0.5], [2.0], [1.25]]
    assert [row["clipped"] for row in table] == [[False, True], [False], None]


@pytest.mark.parametrize(("alarm", "says"), [("", "None"), (', "alarm": 7', "7")])
def test_a_line_of_alarms_that_names_none_is_told(tmp_path: Path, alarm: str, says: str) -> None:
    with RunFolder.create(tmp_path, "") as run:
        run.append_alarm(1, Alarm("length", "longer"), Illustration(""))
        assert run.raised() == {"length": 1}
        with (tmp_path / "alarms.jsonl").open("a") as file:
            file.write(f'{{"step": 2{alarm}}}\n')
        with refused(f"alarms.jsonl, line 2: alarm = {says} is not the name", "Restore", error=RunError):
            run.raised()
