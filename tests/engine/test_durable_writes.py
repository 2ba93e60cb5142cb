"""What is on the disk when a call returns: the order of writing, syncing and renaming, which a power cut would test.

A file's content survives once the file was synced after the last write, and its name once its folder was.
"""

import os
from pathlib import Path

import pytest
import torch

from posttrain.runs.checkpoint import forget_after, save
from posttrain.runs.files import append_lines, cut_lines_after, write_atomically
from posttrain.runs.run_folder import RunFolder


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
