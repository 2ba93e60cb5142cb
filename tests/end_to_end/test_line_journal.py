"""A journal of whole lines: what could not be written leaves nothing behind that a later line is glued to."""

import errno
import os
import threading
from pathlib import Path

import pytest

from posttrain.commands.collection.ballot import Ballot
from posttrain.commands.collection.collection_folder import VOTES, CollectionFolder
from posttrain.commands.collection.verdicts import standing_votes
from posttrain.errors import RunError
from posttrain.runs import files
from posttrain.runs.files import LineJournal
from tests.support.comparisons import written_pair


@pytest.mark.parametrize("begun", [True, False], ids=["grown", "new"])
def test_a_write_that_fails_half_way_leaves_the_file_as_it_was(
    begun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk that is full: half of a line is there when the error comes."""
    journal = LineJournal(tmp_path / "votes.jsonl")
    first = [{"vote": "first"}] if begun else []
    if begun:
        journal.append(first)

    def torn(path: Path, content: bytes) -> None:
        with path.open("ab") as file:
            file.write(content[:5])
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as full:
        full.setattr(files, "write_to_end", torn)
        with pytest.raises((RunError, OSError)):
            journal.append([{"vote": "second"}])
    assert os.path.getsize(journal.path) == (18 if begun else 0)
    journal.append([{"vote": "tie"}])
    assert journal.records() == [*first, {"vote": "tie"}]


def test_a_vote_that_fails_on_a_full_disk_takes_no_other_raters_vote_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one rater's line is half written, another votes; then the disk is full for the first."""
    begun = threading.Event()
    append = files.write_to_end

    def torn(path: Path, content: bytes) -> None:
        if b"anna" not in content:
            append(path, content)
            return
        with path.open("ab") as file:
            file.write(content[:5])
        begun.set()
        bens.join(0.5)  # his vote is through, or waits for this one to end
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(files, "write_to_end", torn)
    with CollectionFolder.create(tmp_path / "run", "seed: 7\n") as folder:
        asked = written_pair()
        anna, ben = (Ballot([asked], folder.journal(VOTES), rater=rater, seed=0) for rater in ("anna", "ben"))

        def vote_of_ben() -> None:
            assert begun.wait(30)
            ben.vote(asked.id, "tie")

        bens = threading.Thread(target=vote_of_ben)
        bens.start()
        with pytest.raises(RunError):
            anna.vote(asked.id, "tie")
        bens.join()
        assert ben.num_done == 1
        assert standing_votes(folder.journal(VOTES).records()) == {"ben": {asked.id: "tie"}}
