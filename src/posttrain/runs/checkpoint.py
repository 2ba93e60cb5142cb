"""Checkpoints: everything the next step reads, so that a resumed run gives the bits of one that never stopped.

    checkpoints/step-000012/
        policy.safetensors, optimizer.safetensors ...    named tensors; no pickle, nothing that can run code
        state.json                                       whatever else the next step reads
        manifest.json                                    size and SHA-256 of each file, threads, versions, score

A checkpoint is written under a temporary name, synced to the disk and renamed: a folder called step-N is whole,
or was damaged later, which the hashes show.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from posttrain.errors import RunError, UserError
from posttrain.runs.files import TEMPORARY, sync_folder, write_atomically, writing
from posttrain.runs.threads import ThreadClaim

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One saved state, read back and found undamaged."""

    step: int
    path: Path
    tensors: Mapping[str, Tensors]
    """File stem -> named tensors, on the CPU."""
    state: Mapping[str, object]
    """What `save` was given, after a passage through JSON: tuples are lists, floats keep their bits."""
    made_with: Mapping[str, object]
    """`threads`, `torch` and `cpu`: what the bits of a resumed run depend on besides the checkpoint."""


def save(
    folder: Path, step: int, tensors: Mapping[str, Tensors], state: Mapping[str, object], *, score: float | None = None
) -> Path:
    """Save a step; when this returns it is on the disk, and until then the ones before it are.

    `score` (higher is better) is what `prune` keeps the best of.  A step that is already saved and undamaged is left
    as it is: the same step of the same run has the same bits.
    """
    path = folder / f"step-{step:06d}"
    temporary = folder / (TEMPORARY + path.name)
    if path.exists() and not damage(path):
        return path
    with writing(path, folder.parent):
        folder.mkdir(exist_ok=True)
        remove(temporary)
        temporary.mkdir()
        try:
            write_files(temporary, step, tensors, state, score)
            remove(path)  # damaged, or absent
            temporary.rename(path)
            sync_folder(folder)
        finally:
            remove(temporary)  # of a failed attempt: it may be what fills the disk
    return path


def write_files(
    path: Path, step: int, tensors: Mapping[str, Tensors], state: Mapping[str, object], score: float | None
) -> None:
    """Fill a checkpoint's folder, the manifest last."""
    for stem, named in tensors.items():
        file = path / f"{stem}.safetensors"
        save_file({name: tensor.detach().contiguous() for name, tensor in named.items()}, file)
        sync_file(file)
    write_atomically(path / "state.json", json.dumps(dict(state), allow_nan=False).encode())
    files = {file.name: {"sha256": sha256(file), "bytes": file.stat().st_size} for file in sorted(path.iterdir())}
    manifest = {"format": 1, "step": step, "score": score, "made_with": environment(), "files": files}
    write_atomically(path / "manifest.json", json.dumps(manifest, indent=2).encode())


def load_latest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint, or None where none was finished.

    A damaged one is an error and not a reason to take an older one silently: that would give up steps unasked.
    """
    steps = saved_steps(folder)
    if not steps:
        return None
    path = steps[max(steps)]
    wrong = damage(path)
    if wrong:
        older = [step for step in sorted(steps, reverse=True)[1:] if not damage(steps[step])]
        remedy = (
            f"The last good checkpoint is {steps[older[0]]}: remove {path} and resume again to go on from it."
            if older
            else "No other checkpoint of this run is good: start it anew by run.overwrite = true (--run.overwrite)."
        )
        raise RunError(f"{wrong}.  {remedy}")
    return load_checkpoint(path)


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint that was found undamaged."""
    manifest = json.loads((path / "manifest.json").read_bytes())
    return Checkpoint(
        step=manifest["step"],
        path=path,
        tensors={file.stem: load_file(file) for file in sorted(path.glob("*.safetensors"))},
        state=json.loads((path / "state.json").read_bytes()),
        made_with=manifest["made_with"],
    )


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None when each is as it was written."""
    manifest = path / "manifest.json"
    try:
        files = json.loads(manifest.read_bytes())["files"]
    except (FileNotFoundError, ValueError, KeyError):
        return f"{manifest}: missing or not readable as a manifest, so the checkpoint cannot be trusted"
    for name, written in files.items():
        file = path / name
        if not file.is_file():
            return f"{file}: missing, but manifest.json lists it"
        if file.stat().st_size != written["bytes"]:
            return f"{file}: damaged: {file.stat().st_size} bytes, where manifest.json says {written['bytes']}"
        if sha256(file) != written["sha256"]:
            return f"{file}: damaged: its SHA-256 is not the one in manifest.json"
    return None


def saved_steps(folder: Path) -> dict[int, Path]:
    """Finished checkpoints by step; names of unfinished ones are skipped."""
    return {int(path.name.removeprefix("step-")): path for path in sorted(folder.glob("step-*"))}


def prune(folder: Path, *, keep_last: int, keep_best: int = 0) -> None:
    """Remove all but the newest `keep_last` (at least 1) and the `keep_best` with the highest scores."""
    assert keep_last >= 1, "a run that keeps no checkpoint cannot be resumed"
    steps = saved_steps(folder)
    scores: dict[int, float] = {}
    for step, path in steps.items():
        score = json.loads((path / "manifest.json").read_bytes())["score"]
        if score is not None:
            scores[step] = score
    kept = set(sorted(steps)[-keep_last:])
    kept |= set(sorted(scores, key=lambda step: (scores[step], step))[len(scores) - min(keep_best, len(scores)) :])
    with writing(folder, folder.parent):
        for step in steps.keys() - kept:
            # Renamed first: a kill half-way through must not leave a step-N that looks finished.
            doomed = steps[step].rename(folder / (TEMPORARY + steps[step].name))
            shutil.rmtree(doomed)
        for leftover in folder.glob(TEMPORARY + "*"):
            remove(leftover)


def environment() -> dict[str, object]:
    """What floating-point results depend on besides the program: the order of sums follows threads and CPU kernels."""
    return {
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def restore_threads(checkpoint: Checkpoint, threads: ThreadClaim) -> list[str]:
    """Compute with as many threads as the checkpoint was made with; returns notes on why bits may still differ.

    `threads` is what the session needs so far; from here on it needs that number.
    """
    recorded = int(str(checkpoint.made_with["threads"]))
    if threads.count not in (0, recorded):
        raise UserError(
            f"run.threads = {threads.count}, but {checkpoint.path} was made with {recorded} threads, and other sums"
            f" would not give the same bits.  Resume with run.threads = {recorded} or leave it out."
        )
    threads.take(recorded, f"{checkpoint.path} was made with {recorded} threads")
    now = environment()
    if now["threads"] != recorded:
        raise RunError(
            f"{checkpoint.path} was made with {recorded} threads, but torch takes only {now['threads']} here.  "
            "Look for a limit such as OMP_THREAD_LIMIT in the environment."
        )
    return [
        f"{name} is {now[name]} here and was {checkpoint.made_with[name]} when the checkpoint was made: "
        "the run continues, but its bits may differ from an uninterrupted one"
        for name in ("torch", "cpu")
        if now[name] != checkpoint.made_with[name]
    ]


def sha256(file: Path) -> str:
    """Hash of a file's content, in hexadecimal."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def sync_file(file: Path) -> None:
    """Return once a file that somebody else wrote is on the disk."""
    with file.open("rb+") as content:
        os.fsync(content.fileno())


def remove(path: Path) -> None:
    """Remove a folder if it is there."""
    if path.exists():
        shutil.rmtree(path)
