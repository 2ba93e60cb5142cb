"""Files of weights for servers: whole or not there, the last two versions, and a manifest that is true."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from posttrain.errors import RunError
from posttrain.generation.http import weights_files
from posttrain.generation.http.weights_files import WeightsFolder
from posttrain.generation.rl_protocol import AdapterFields

TENSORS = {"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


def test_a_file_has_the_tensors_and_its_manifest_their_shapes_and_digest(tmp_path: Path) -> None:
    made = WeightsFolder(tmp_path / "weights").write(TENSORS, 3)
    assert made.path == tmp_path / "weights" / "weights-000003.safetensors"
    found = load_file(made.path)
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)
    assert made.sha256 == hashlib.sha256(made.path.read_bytes()).hexdigest()
    assert json.loads(made.path.with_suffix(".json").read_text()) == {
        "format": 1,
        "version": 3,
        "sha256": made.sha256,
        "bytes": made.path.stat().st_size,
        "tensors": {"a.weight": {"dtype": "float32", "shape": [2, 3]}, "b": {"dtype": "bfloat16", "shape": [4]}},
        "adapter": None,
    }
    assert made.path.stat().st_mode & 0o777 == made.path.with_suffix(".json").stat().st_mode & 0o777


def test_the_last_two_versions_are_kept_whatever_their_numbers(tmp_path: Path) -> None:
    folder = WeightsFolder(tmp_path)
    for version in (7, 8, 9, 2):  # a run that is resumed from an earlier step goes on with lower numbers
        folder.write(TENSORS, version)
        folder.write(TENSORS, version, AdapterFields(base_digest="d", settings={"r": 2}))
    kept = sorted(each.name for each in tmp_path.iterdir())
    assert kept == sorted(
        f"{kind}-{version:06d}.{end}"
        for kind in ("weights", "adapter")
        for version in (9, 2)
        for end in ("json", "safetensors")
    )


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_leaves_no_file(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = WeightsFolder(tmp_path)
    folder.write(TENSORS, 1)

    def full(tensors: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(weights_files, "save_file", full)
    with pytest.raises(RunError, match=r"weights-000002.*No space left.*transfer_folder"):
        folder.write(TENSORS, 2)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["weights-000001.json", "weights-000001.safetensors"]
