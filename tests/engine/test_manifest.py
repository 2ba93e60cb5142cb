"""What somebody or something did to checkpoints: damage of a manifest is told, strangers' files are passed over."""

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch

from posttrain.errors import RunError
from posttrain.runs.checkpoint import forget_after, load_latest, load_step, prune, save
from posttrain.runs.files import DamageError, manifest_from, read_manifest, saved_steps
from tests.support.accidents import flip_bit
from tests.support.refusals import refused


def fill(folder: Path, *steps: int) -> None:
    for step in steps:
        save(folder, step, {"policy": {"w": torch.full((64,), float(step))}}, {"step": step})


MISSHAPEN = {
    "a list": [1, 2],
    "a number": 7,
    "an empty object": {},
    "no files": {"step": 5, "score": None, "made_with": {"threads": 1, "torch": "2", "cpu": "x"}},
    "files in a list": {"step": 5, "score": None, "made_with": {"threads": 1, "torch": "2", "cpu": "x"}, "files": []},
    "another step": {"step": 6, "score": None, "made_with": {"threads": 1, "torch": "2", "cpu": "x"}, "files": {}},
    "a step in words": {"step": "5", "score": None, "made_with": {"threads": 1, "torch": "2", "cpu": "x"}, "files": {}},
    "no threads": {"step": 5, "score": None, "made_with": {"torch": "2", "cpu": "x"}, "files": {}},
    "a score in words": {"step": 5, "score": "1", "made_with": {"threads": 1, "torch": "2", "cpu": "x"}, "files": {}},
    "a file elsewhere": {
        "step": 5,
        "score": None,
        "made_with": {"threads": 1, "torch": "2", "cpu": "x"},
        "files": {"../other": {"sha256": "0", "bytes": 1}},
    },
    "no cpu": {"step": 5, "score": None, "made_with": {"threads": 1, "torch": "2"}, "files": {}},
    "one file of two without hash": {
        "step": 5,
        "score": None,
        "made_with": {"threads": 1, "torch": "2", "cpu": "x"},
        "files": {"state.json": {"bytes": 1}, "policy.safetensors": {"bytes": 1, "sha256": "0" * 64}},
    },
    "a file without hash": {
        "step": 5,
        "score": None,
        "made_with": {"threads": 1, "torch": "2", "cpu": "x"},
        "files": {"state.json": {"bytes": 1}},
    },
}


@pytest.mark.parametrize("written", [1, 2])
@pytest.mark.parametrize("shape", MISSHAPEN)
def test_a_manifest_of_another_shape_is_damage_of_its_checkpoint(tmp_path: Path, shape: str, written: int) -> None:
    fill(tmp_path, 3, 5)
    content = MISSHAPEN[shape]
    if isinstance(content, dict):
        content = {"format": written, **content}
        if written == 2:
            text = json.dumps(content, sort_keys=True, separators=(",", ":"))
            content["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (tmp_path / "step-000005" / "manifest.json").write_text(json.dumps(content))
    with refused("step-000005/manifest.json: damaged:", "checkpoint is", "step-000003.", error=RunError):
        load_latest(tmp_path)


def test_no_bit_of_a_manifest_flips_unnoticed(tmp_path: Path) -> None:
    """Every bit of the file: it is told as damage, or what is read is the same."""
    save(tmp_path, 5, {"policy": {"w": torch.ones(2)}}, {}, score=0.25)
    path = tmp_path / "step-000005"
    whole, content = read_manifest(path), bytearray((path / "manifest.json").read_bytes())
    assert whole.score == 0.25
    unnoticed = []
    for bit in range(8 * len(content)):
        content[bit // 8] ^= 1 << bit % 8
        try:
            if manifest_from(bytes(content), path.name) != whole:
                unnoticed.append(bit)
        except DamageError:
            pass
        content[bit // 8] ^= 1 << bit % 8
    assert unnoticed == []


def test_the_hash_of_a_manifest_is_of_its_content_in_whatever_order(tmp_path: Path) -> None:
    fill(tmp_path, 5)
    file = tmp_path / "step-000005" / "manifest.json"
    content = json.loads(file.read_text())
    before = read_manifest(file.parent)
    file.write_text(json.dumps(dict(reversed(content.items()))))
    assert read_manifest(file.parent) == before


def test_a_folder_that_cannot_be_looked_into_is_not_taken_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may look into all of them, so the answer of the system is put in."""
    (tmp_path / "step-000005").mkdir()
    assert list(saved_steps(tmp_path, empty=True)) == [5]
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.F_OK)
    assert list(saved_steps(tmp_path, empty=True)) == []


def test_a_manifest_of_an_earlier_version_has_no_hash_and_is_read(tmp_path: Path) -> None:
    fill(tmp_path, 5)
    file = tmp_path / "step-000005" / "manifest.json"
    content = json.loads(file.read_text())
    del content["sha256"]
    file.write_text(json.dumps(content))
    with refused("SHA-256", error=RunError):  # of this version it would have one
        load_latest(tmp_path)
    file.write_text(json.dumps({**content, "format": 1}))
    saved = load_latest(tmp_path)
    assert saved is not None
    assert saved.step == 5


@pytest.mark.parametrize("harm", [Path.unlink, lambda file: os.truncate(file, 30)], ids=["missing", "cut"])
def test_an_older_checkpoint_without_its_manifest_does_not_end_a_healthy_run(tmp_path: Path, harm) -> None:
    fill(tmp_path, 5, 10, 15)
    harm(tmp_path / "step-000015" / "manifest.json")
    fill(tmp_path, 20)
    (wrong,) = prune(tmp_path, keep_last=2, keep_best=1)
    assert str(tmp_path / "step-000015" / "manifest.json") in wrong
    assert list(saved_steps(tmp_path)) == [10, 15, 20]  # it is none of the two that are of use, and may be mended


STRAY = ["step-000003-backup", "step-3", "step-000012 (copy)", "notes.txt", ".DS_Store", "step-000099", ".tmp-file"]


def test_what_somebody_else_put_beside_checkpoints_breaks_nothing(tmp_path: Path) -> None:
    fill(tmp_path, 5, 10)
    for name in STRAY:
        (tmp_path / name).write_text("mine")
    (tmp_path / "step-000020.bak").mkdir()
    (tmp_path / "step-000010" / "._policy.safetensors").write_text("of another system")
    saved = load_latest(tmp_path)
    assert saved is not None
    assert (saved.step, list(saved.tensors)) == (10, ["policy"])
    fill(tmp_path, 15)
    prune(tmp_path, keep_last=1)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*STRAY, "step-000020.bak", "step-000015"} - {".tmp-file"}


def test_any_good_checkpoint_can_be_gone_on_from_and_a_damaged_or_absent_one_is_refused(tmp_path: Path) -> None:
    fill(tmp_path, 5, 10, 15)
    flip_bit(tmp_path / "step-000010" / "policy.safetensors")
    assert load_step(tmp_path, 5).state == {"step": 5}
    with refused("step-000010/policy", "checkpoint is", "step-000005.", "--from-step 5", error=RunError):
        load_step(tmp_path, 10)
    with refused("from_step = 7:", "no checkpoint of that step.", "one of 5, 10, 15."):
        load_step(tmp_path, 7)
    with refused("It holds none"):
        load_step(tmp_path / "empty", 7)


def test_later_checkpoints_are_forgotten_damaged_or_not(tmp_path: Path) -> None:
    fill(tmp_path, 5, 10, 15)
    (tmp_path / "step-000010" / "manifest.json").unlink()
    assert forget_after(tmp_path, 5) == [10, 15]
    assert [path.name for path in tmp_path.iterdir()] == ["step-000005"]
    assert forget_after(tmp_path, 5) == []


def test_a_checkpoint_holds_the_recipe_that_it_was_made_with(tmp_path: Path) -> None:
    save(tmp_path, 5, {}, {}, recipe="run: {seed: 7}\n")
    saved = load_latest(tmp_path)
    assert saved is not None
    assert saved.recipe == (tmp_path / "step-000005" / "config.yaml").read_text() == "run: {seed: 7}\n"
    (tmp_path / "step-000005" / "config.yaml").write_text("run: {seed: 8}\n")
    with refused("config.yaml: damaged: its SHA-256", error=RunError):
        load_latest(tmp_path)
