"""A journal of whole lines: what could not be written leaves nothing behind that a later line is glued to."""

import os
from pathlib import Path

import pytest

from posttrain.errors import RunError
from posttrain.training.collection import line_journal
from posttrain.training.collection.line_journal import LineJournal


@pytest.mark.parametrize("begun", [True, False], ids=["grown", "new"])
def test_a_write_that_fails_half_way_leaves_the_file_as_it_was(
    begun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk that is full: half of a line is there when the error comes."""
    journal = LineJournal(tmp_path / "votes.jsonl")
    first = [{"vote": "first"}] if begun else []
    if begun:
        journal.append(first)

    def torn(path: Path, lines: list[str]) -> None:
        with path.open("a") as file:
            file.write(lines[0][:5])
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as full:
        full.setattr(line_journal, "append_lines", torn)
        with pytest.raises((RunError, OSError)):
            journal.append([{"vote": "second"}])
    assert os.path.getsize(journal.path) == (18 if begun else 0)
    journal.append([{"vote": "tie"}])
    assert journal.records() == [*first, {"vote": "tie"}]
