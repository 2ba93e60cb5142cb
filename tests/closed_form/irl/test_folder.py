"""The folder of a run of inverse RL: claimed before anything is spent, cleared only when the new run begins."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from posttrain.irl_runs.irl_folder import CONTENTS, IrlFolder
from tests.support.refusals import refused


def earlier_run(path: Path) -> None:
    """What a run leaves that drew its plots, and a note that a person put beside it."""
    with IrlFolder.claim(path) as folder:
        folder.begin("world: {}\n")
        folder.write_curve([{"gap": 1.0}, {"gap": 0.5}])
        folder.write_arrays("reward.npz", {"weights": np.arange(3.0)})
        folder.write_arrays("demonstrations.npz", {"states": np.arange(2)})
        folder.write_summary({"gap": 0.5})
    (path / "plots").mkdir()
    (path / "plots" / "rewards.png").write_bytes(b"")
    (path / "note.txt").write_text("the good one")


def kept(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir() if not entry.name.startswith(".")}


def test_what_an_earlier_run_left_stays_until_the_new_one_begins(tmp_path: Path) -> None:
    earlier_run(tmp_path)
    assert kept(tmp_path) == {*CONTENTS, "format", "note.txt"}
    with IrlFolder.claim(tmp_path, overwrite=True):
        pass  # a mistake, or an interruption
    assert kept(tmp_path) == {*CONTENTS, "format", "note.txt"}
    with IrlFolder.claim(tmp_path, overwrite=True) as folder:
        folder.begin("world: {size: 3}\n")
        assert kept(tmp_path) == {"config.yaml", "format", "note.txt"}
    assert (tmp_path / "config.yaml").read_text() == "world: {size: 3}\n"


def test_a_folder_has_one_writer_and_the_next_may_come_when_it_is_closed(tmp_path: Path) -> None:
    first = IrlFolder.claim(tmp_path)
    with refused("is writing to this run folder"):
        IrlFolder.claim(tmp_path)
    first.close()
    first.close()
    IrlFolder.claim(tmp_path).close()


@pytest.mark.parametrize(
    ("trace", "overwrite", "refusal"),
    [
        ("metrics.jsonl", False, "already holds a run"),
        ("checkpoints", True, "another command"),
        ("scores.jsonl", True, "another command"),
    ],
)
def test_a_folder_that_is_refused_is_let_go(trace: str, overwrite: bool, refusal: str, tmp_path: Path) -> None:
    with IrlFolder.claim(tmp_path) as folder:
        folder.begin("")
    (tmp_path / trace).write_text("{}\n")
    for _ in range(2):  # the second time nobody is "writing to this run folder"
        with refused(refusal):
            IrlFolder.claim(tmp_path, overwrite=overwrite)


def test_what_is_no_number_in_json_is_null_wherever_it_is(tmp_path: Path) -> None:
    with IrlFolder.claim(tmp_path) as folder:
        folder.begin("")
        folder.write_curve([{"gap": math.inf, "step": 1.0}, {"gap": math.nan, "step": np.float64("inf")}])
        folder.write_summary({"gap": math.nan, "seconds": {"fit": math.inf, "total": 2.0}, "states": [1, 2]})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"iteration": 0, "gap": None, "step": 1.0}, {"iteration": 1, "gap": None, "step": None}]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == {"gap": None, "seconds": {"fit": None, "total": 2.0}, "states": [1, 2]}
