"""The manifest of a checkpoint: the files of its folder, with hashes that reveal damage.

    {"format": 2, "step": 12, "score": null, "made_with": {"threads": 2, "torch": "2.13.0", "cpu": "AVX512"},
     "files": {"state.json": {"sha256": "9f86d0...", "bytes": 1520}, ...},
     "sha256": "d7a8fb..."}

The last is the hash of the rest, as JSON with sorted keys and without spaces.  Format 1, of earlier versions, lacks it
and is supported.  Torch-free.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from posttrain.errors import RunError

FILE = "manifest.json"
"""Its name in the folder of a checkpoint."""
RECIPE = "config.yaml"
"""The recipe's, there and in the run folder."""
FORMAT, WITHOUT_HASH = 2, 1
NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of an undamaged manifest."""

    step: int
    score: float | None
    """Higher is better; None says nothing."""
    made_with: Mapping[str, object]
    files: Mapping[str, Mapping[str, object]]
    """Name -> `sha256` and `bytes`."""


class DamageError(Exception):
    """A checkpoint is not as it was written; the message names the file and the fault."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an OSError for `path` into a message that names it."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror or error}.  Nothing was changed there.") from error


def saved_steps(folder: Path) -> dict[int, Path]:
    """Finished checkpoints by step; unfinished, empty and foreign folders are skipped."""
    return {step: path for step, path in step_folders(folder).items() if not is_empty(path)}


def empty_steps(folder: Path) -> dict[int, Path]:
    return {step: path for step, path in step_folders(folder).items() if is_empty(path)}


def step_folders(folder: Path) -> dict[int, Path]:
    with reading(folder):
        found = ((NAME.fullmatch(path.name), path) for path in folder.glob("step-*"))
        steps = {int(name[1]): path for name, path in found if name and path.is_dir()}
    return dict(sorted(steps.items()))


def is_empty(folder: Path) -> bool:
    """Whether a folder is empty; False where it cannot be listed, since reading its manifest says why."""
    with reading(folder):
        return os.access(folder, os.R_OK | os.X_OK) and not os.listdir(folder)


def manifest_bytes(
    step: int, score: float | None, made_with: Mapping[str, object], files: Mapping[str, Mapping[str, object]]
) -> bytes:
    content = {"format": FORMAT, "step": step, "score": score, "made_with": made_with, "files": files}
    return json.dumps({**content, "sha256": content_hash(content)}, indent=2).encode()


def content_hash(content: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_manifest(path: Path) -> Manifest:
    """The manifest in the folder of a checkpoint.  Raises DamageError where it is not as it was written."""
    file = path / FILE
    try:
        return manifest_from(file.read_bytes(), path.name)
    except OSError as error:
        raise DamageError(f"{file}: missing or not readable, so the checkpoint cannot be trusted") from error
    except DamageError as wrong:
        raise DamageError(f"{file}: damaged: {wrong}") from wrong


def manifest_from(text: bytes, name: str) -> Manifest:
    """The manifest of the checkpoint of that name.  Raises DamageError where it is not as it was written."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamageError("not readable as a manifest, so the checkpoint cannot be trusted") from error
    if wrong := fault(content, name):
        raise DamageError(wrong)
    return Manifest(**{name: content[name] for name in ("step", "score", "made_with", "files")})


def fault(content: object, name: str) -> str | None:
    """Why JSON data is not the manifest of the checkpoint of that name, or None."""
    if not isinstance(content, dict):
        return f"{type(content).__name__} in place of an object"
    if content.get("format") not in (FORMAT, WITHOUT_HASH):
        return f"format = {content.get('format')!r:.40}; this version supports {WITHOUT_HASH} and {FORMAT}"
    if content["format"] == FORMAT:
        rest = {key: value for key, value in content.items() if key != "sha256"}
        if content.get("sha256") != content_hash(rest):
            return "its content does not match its SHA-256"
    step, score, made_with, files = (content.get(key) for key in ("step", "score", "made_with", "files"))
    if type(step) is not int or f"step-{step:06d}" != name:
        return f"step = {step!r:.40} in the folder {name}"
    if score is not None and type(score) not in (int, float):
        return f"score = {score!r:.40} is not a number"
    if not is_environment(made_with):
        return f"made_with = {made_with!r:.80} lacks threads, torch or cpu"
    if "score" not in content or not isinstance(files, dict) or not all(map(is_listing, files, files.values())):
        return "`score`, or the size or hash of a file, is missing"
    return None


def is_environment(made_with: object) -> bool:
    return (
        isinstance(made_with, dict)
        and type(made_with.get("threads")) is int
        and made_with["threads"] >= 1
        and all(isinstance(made_with.get(name), str) for name in ("torch", "cpu"))
    )


def is_listing(name: str, written: object) -> bool:
    return (
        name == Path(name).name
        and isinstance(written, dict)
        and isinstance(written.get("sha256"), str)
        and type(written.get("bytes")) is int
    )


def damage(path: Path) -> str | None:
    """The first fault of a checkpoint's files, or None."""
    try:
        require_undamaged(path, read_manifest(path))
    except DamageError as wrong:
        return str(wrong)
    return None


def require_undamaged(path: Path, manifest: Manifest) -> None:
    """Raise DamageError where a file is not as the manifest says."""
    for name, written in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise DamageError(f"{file}: missing, but {FILE} lists it")
        if (size := file.stat().st_size) != written["bytes"]:
            raise DamageError(f"{file}: damaged: {size} bytes, where {FILE} says {written['bytes']}")
        with reading(file):
            if sha256(file) != written["sha256"]:
                raise DamageError(f"{file}: damaged: its SHA-256 is not the one in {FILE}")


def sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
