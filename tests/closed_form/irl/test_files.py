"""Files of inverse RL: a person's own of every wrong kind, and the folder of a run."""

import json
import math
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_array

from posttrain.irl.counting import in_world
from posttrain.irl.grids import IcyGridWorld
from posttrain.irl_runs.expert_episodes import make_expert_episodes
from posttrain.irl_runs.methods import linear_reward
from posttrain.irl_runs.run import CONTENTS, IrlFolder
from posttrain.irl_runs.worlds import World, table_world
from posttrain.options.irl import FileFeatures, RecordedOptions, TableOptions
from tests.support.refusals import refused

GRID = World(mdp=IcyGridWorld(3), rewards=None)
# Two states and an end; action 0 goes on, action 1 stays with probability .7 (state 0) or ends.
TRANSITIONS = np.array([[[0, 1, 0], [0.7, 0, 0.3]], [[0.5, 0.5, 0], [0, 0, 1]], [[0, 0, 1], [0, 0, 1]]])
ROWS = csr_array(TRANSITIONS.reshape(6, 3))
DENSE = {"transitions": TRANSITIONS, "start": [1.0, 0, 0], "terminal": [2]}
SPARSE = {"data": ROWS.data, "indices": ROWS.indices, "indptr": ROWS.indptr, "start": [1.0, 0, 0], "terminal": [2]}
# 0 →+x 1 →+x 2 →+y 5 →+y 8, the end.
SHOWN = {"states": [0, 1, 2, 5, 8], "actions": [0, 0, 2, 2], "lengths": [4], "terminated": [True], "truncated": [False]}


@pytest.mark.parametrize("terminal", [[2], [2.0], 2, [False, False, True]])
@pytest.mark.parametrize("table", [DENSE, SPARSE])
def test_the_ends_of_a_world_are_numbers_of_states_or_a_flag_for_each(table: dict, terminal: object, tmp_path) -> None:
    np.savez(tmp_path / "world.npz", **{**table, "terminal": terminal})
    mdp = table_world(TableOptions(path=str(tmp_path / "world.npz"))).mdp
    assert mdp.terminal.tolist() == [False, False, True]
    assert mdp.transitions.toarray()[:4].tolist() == TRANSITIONS.reshape(6, 3)[:4].tolist()
    assert mdp.transitions.nnz == 6


@pytest.mark.parametrize(
    ("table", "change", "message"),
    [
        (DENSE, {"start": ["a", "b", "c"]}, "the array 'start' … give real numbers"),
        (DENSE, {"start": 0}, "start has the shape (): give one probability for each of 3 states"),
        (DENSE, {"start": [[1.0, 0, 0]]}, "start has the shape (1, 3)"),
        (DENSE, {"terminal": [1.5]}, "terminal state 1.5 does not exist"),
        (DENSE, {"terminal": [True, False]}, "terminal has 2 flags: give one for each of 3 states"),
        (DENSE, {"transitions": TRANSITIONS + 0j}, "the array 'transitions' … give real numbers"),
        (DENSE, {"transitions": TRANSITIONS.astype(object)}, "not a file of numpy arrays, or damaged … Object arrays"),
        (DENSE, {"transitions": TRANSITIONS.reshape(6, 3)}, "not (state action next): check the layout"),
        (DENSE, {"transitions": TRANSITIONS / 2}, "state 0, action 0 (row 0) … add up to 0.5"),
        (DENSE, {"rewards": [1.0, 2.0]}, "the reward has the shape (2,); use (3,)"),
        (DENSE, {"rewards": [1.0, np.nan, 2.0]}, "the reward has nan at (1)"),
        (DENSE, {"rewards": ["a", "b", "c"]}, "the array 'rewards' … give real numbers"),
        (SPARSE, {"indices": ROWS.indices + 100_000_000}, "the sparse table is malformed"),
        (SPARSE, {"indices": ROWS.indices - 1}, "the sparse table is malformed"),
        (SPARSE, {"indices": ROWS.indices + 0.5}, "the array 'indices' holds float64; give whole numbers"),
        (SPARSE, {"indptr": ROWS.indptr[::-1]}, "the sparse table is malformed"),
        (SPARSE, {"data": ROWS.data[:-1]}, "the sparse table is malformed"),
        (SPARSE, {"indptr": ROWS.indptr[:-1]}, "5 rows and 3 columns"),
    ],
)
def test_a_file_that_is_no_world_is_refused_naming_the_file(table: dict, change: dict, message: str, tmp_path) -> None:
    np.savez(tmp_path / "world.npz", **{**table, **change})
    with refused(f"world.path = … world.npz: … {message}"):
        table_world(TableOptions(path=str(tmp_path / "world.npz")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"states": [0, 1, np.nan, 5, 8]}, "each state must be one whole number … entry 2 is nan"),
        ({"states": [0, 1, np.inf, 5, 8]}, "each state must be one whole number … entry 2 is inf"),
        ({"states": ["0", "1", "2", "5", "8"]}, "the array 'states' … give real numbers"),
        ({"states": np.eye(9)[[0, 1, 2, 5, 8]]}, "they have the shape (5, 9)"),
        ({"lengths": 4}, "each length must be one whole number; … the shape ()"),
        ({"lengths": [-1]}, "demonstration 0: its length is -1"),
        ({"terminated": [[True]]}, "`terminated` must be one true or false for each episode; … the shape (1, 1)"),
        ({"terminated": True}, "`terminated` must be one true or false … the shape ()"),
        ({"terminated": ["False"]}, "the array 'terminated' … give real numbers"),
        ({"truncated": [np.nan]}, "`truncated` must be one true or false for each episode"),
        ({"states": [0, 1, 2, 4, 8]}, "demonstration 0, step 2: action 2 in state 2 never leads to state 4"),
        ({"states": [0, 1, 2, 5, 9]}, "demonstration 0, step 4: there is no state 9"),
        ({"actions": [0, 0, 2, 4]}, "demonstration 0, step 3: action 4 in state"),
    ],
)
def test_a_file_that_holds_no_demonstrations_is_refused_naming_the_row(change: dict, message: str, tmp_path) -> None:
    np.savez(tmp_path / "shown.npz", **{**SHOWN, **change})
    with refused(message):
        in_world(make_expert_episodes(RecordedOptions(path=str(tmp_path / "shown.npz")), GRID).episodes, GRID.mdp)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (np.full((9, 2), "a"), "features.path = … : the array … give real numbers"),
        (np.eye(9) * 1j, "features.path = … : the array … give real numbers"),
        (np.ones(9), "features on state have the shape (9,); use 9 rows"),
        (np.ones((8, 2)), "features on state have the shape (8, 2); use 9 rows"),
        (np.where(np.eye(9) == 1, np.nan, 0), "features: row 0, column 0 is nan"),
    ],
)
def test_a_file_that_holds_no_features_is_refused_naming_the_row(table: np.ndarray, message: str, tmp_path) -> None:
    np.save(tmp_path / "features.npy", table)
    with refused(message):
        linear_reward(FileFeatures(path=str(tmp_path / "features.npy")), GRID).bound(GRID.mdp)


def changed(path: Path, change: Callable[[bytes], bytes]) -> None:
    np.savez(path, **SHOWN)
    path.write_bytes(change(path.read_bytes()))


def letters(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name in SHOWN:
            archive.writestr(name, "dear reader")


BROKEN: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: None, "the file does not exist"),
    (lambda path: path.mkdir(), "cannot be read: Is a directory"),
    (lambda path: path.write_bytes(b""), "not a file of numpy arrays"),
    (lambda path: path.write_bytes(b"PK\x03\x04 and then nothing"), "not a file of numpy arrays"),
    (lambda path: changed(path, lambda content: content[:900]), "not a file of numpy arrays"),
    (
        lambda path: changed(path, lambda content: content[:60] + bytes(20) + content[80:]),
        "not a file of numpy arrays, or damaged … Bad CRC-32",
    ),
    (letters, "not a file of numpy arrays, but an archive of something else"),
]


@pytest.mark.parametrize(("spoil", "message"), BROKEN)
def test_a_file_that_cannot_be_read_is_a_mistake_with_its_name(spoil, message: str, tmp_path) -> None:
    path = tmp_path / "shown.npz"
    spoil(path)
    with refused(f"demonstrations.path = … shown.npz: {message}"):
        make_expert_episodes(RecordedOptions(path=str(path)), GRID)


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
        ("metrics.jsonl", False, "already contains a run"),
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
