"""Weights as files for servers: a safetensors file and its manifest, written under another name and then renamed.

    weights-*.safetensors
    weights-*.json   {"format": 1, "version": 12, "sha256": "9f86d0...", "bytes": 5910920,
                      "tensors": {"lm_head.weight": {"dtype": "float32", "shape": [384, 160]}, ...},
                      "adapter": null}

The last two versions are kept: a server may still read the one before the last.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from posttrain.errors import RunError
from posttrain.generation.rl_protocol import AdapterFields

FORMAT = 1
KEPT_VERSIONS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFile:
    """A file of weights that servers can load."""

    path: Path
    version: int
    sha256: str
    num_bytes: int
    adapter: AdapterFields | None = None
    """None if the file has all weights."""


class WeightsFolder:
    """The folder that files of weights are written to."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    def write(self, tensors: Mapping[str, Tensor], version: int, adapter: AdapterFields | None = None) -> WeightsFile:
        """Write the tensors of a version, and remove versions before the one before it."""
        name = f"{'weights' if adapter is None else 'adapter'}-{version:06d}"
        made, path = self.path / f".tmp-{name}", self.path / f"{name}.safetensors"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            save_file({key: tensor.cpu() for key, tensor in tensors.items()}, made)
            with made.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            written = WeightsFile(
                path=path, version=version, sha256=digest, num_bytes=made.stat().st_size, adapter=adapter
            )
            manifest = made.with_suffix(".json")
            manifest.write_text(json.dumps(manifest_of(written, tensors)) + "\n", encoding="utf-8")
            made.chmod(manifest.stat().st_mode & 0o777)  # safetensors' files are only readable by their owner
            manifest.rename(path.with_suffix(".json"))
            made.rename(path)
            self._keep_last()
        except (OSError, SafetensorError) as error:  # the second one where a disk is full
            for each in (made, made.with_suffix(".json")):
                each.unlink(missing_ok=True)
            fault = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise RunError(
                f"{path}: weights for the engine cannot be written: {fault}.  Make room, or name another"
                " engine.transfer_folder."
            ) from error
        return written

    def _keep_last(self) -> None:
        found: dict[int, list[Path]] = {}
        for file in self.path.glob("*-[0-9]*.*"):
            number = file.stem.rpartition("-")[2]
            if number.isdigit() and not file.name.startswith("."):
                found.setdefault(int(number), []).append(file)
        for version in sorted(found, key=lambda each: found[each][0].stat().st_mtime_ns)[:-KEPT_VERSIONS]:
            for file in found[version]:
                file.unlink(missing_ok=True)


def manifest_of(file: WeightsFile, tensors: Mapping[str, Tensor]) -> dict[str, object]:
    return {
        "format": FORMAT,
        "version": file.version,
        "sha256": file.sha256,
        "bytes": file.num_bytes,
        "tensors": {
            name: {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": [*tensor.shape]}
            for name, tensor in tensors.items()
        },
        "adapter": None if file.adapter is None else asdict(file.adapter),
    }
