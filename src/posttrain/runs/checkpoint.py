"""Checkpoints: everything the next step reads, so that a resumed run computes the same bits; and torch's threads.

checkpoints/step-000012/ has named tensors (policy.safetensors, optimizer.safetensors, …; of several ranks a file
shard-*.safetensors from each; no pickle, nothing that can run code), state.json with other state of the next step,
config.yaml with the recipe and manifest.json (see files.py).  It is written under a temporary name, synced to disk and
renamed, so a folder called step-N is complete.  If it was damaged later, the hashes show it.
"""

import json
import os
import shutil
import threading
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import load_file, save_file

from posttrain.errors import RunError, UserError
from posttrain.ranks.group import ONE_RANK, RankGroup
from posttrain.runs import files
from posttrain.runs.folder import resume_command
from posttrain.runs.tensor_state import Tensors


class ThreadClaim:
    """One session's claim to a number of threads, until it is released or garbage-collected."""

    _lock = threading.RLock()
    _open: ClassVar["weakref.WeakSet[ThreadClaim]"] = weakref.WeakSet()
    _before = 0
    """The number before the first of the open claims."""

    def __init__(self) -> None:
        self.count = 0
        """Threads that it needs; 0 means any number."""

    def __enter__(self) -> "ThreadClaim":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def take(self, count: int, what: str) -> None:
        """Claim a number; `what` begins the error message if another session has claimed a different number."""
        with self._lock:
            held = [each.count for each in self._open if each is not self and each.count]
            if any(each != count for each in held):
                raise UserError(
                    f"{what}, but another session of this process uses {held[0]}, and torch has a single number of"
                    " threads.  Close that session, use its run.threads, or start another process."
                )
            if not held and not self.count:
                ThreadClaim._before = torch.get_num_threads()
            self._open.add(self)
            self.count = count
            torch.set_num_threads(count)

    def release(self) -> None:
        """Release the claim; the last release restores the earlier number.  Releasing twice has no effect."""
        with self._lock:
            held, self.count = self.count, 0
            if held and not any(each.count for each in self._open):
                torch.set_num_threads(self._before)


def claim_threads(count: int) -> ThreadClaim:
    """Set torch's number of threads until the claim is released; 0 leaves it unchanged.

    Raises UserError if an open session has claimed another number.
    """
    claim = ThreadClaim()
    if count:
        claim.take(count, f"run.threads = {count}")
    return claim


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One saved state, read and verified."""

    step: int
    path: Path
    tensors: Mapping[str, Tensors]
    """File stem -> named tensors, on the CPU."""
    state: Mapping[str, object]
    """As saved, through JSON: tuples are lists, floats keep their bits."""
    made_with: Mapping[str, object]
    """`threads`, `torch` and `cpu`, on which the bits of a resumed run depend."""
    recipe: str = ""
    """The text of config.yaml; empty in checkpoints of earlier versions."""


@dataclass(frozen=True, slots=True)
class RankTensors:
    """Tensors of which each rank has a part."""

    parts: Mapping[str, Tensors]
    ranks: RankGroup


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensors] | RankTensors,
    state: Mapping[str, object],
    *,
    score: float | None = None,
    recipe: str = "",
) -> Path:
    """Save a step.  When this returns, it is on disk; until then, the earlier checkpoints stay.

    `prune` keeps those with the best `score` (higher is better); `recipe` is the text of the run's config.  An
    undamaged checkpoint of the step stays, since the same step of the same run has the same bits.  With several ranks,
    each writes its parts of the tensors.
    """
    path = folder / f"step-{step:06d}"
    temporary = folder / (files.TEMPORARY + path.name)
    if path.exists() and not files.damage(path):
        return path
    with files.writing(path, folder.parent):
        folder.mkdir(exist_ok=True)
        remove(temporary)
        temporary.mkdir()
        try:
            write_tensors(temporary, tensors)
            write_state(temporary, state, recipe)
            shared_by = {"ranks": tensors.ranks.size} if isinstance(tensors, RankTensors) else {}
            files.write_manifest(temporary, step, score, arithmetic() | shared_by)
            remove(path)  # damaged, or absent
            temporary.rename(path)
            files.sync_folder(folder)
        finally:
            remove(temporary)  # a failed attempt may be what fills the disk
    return path


def write_tensors(path: Path, tensors: Mapping[str, Tensors] | RankTensors) -> None:
    """Write the tensors to a checkpoint's folder, or have each rank write its parts."""
    if isinstance(tensors, RankTensors):
        from posttrain.runs.shards import write_shards

        with tensors.ranks.leading("write_shards", path):
            write_shards(path, tensors.parts)
        return
    for stem, named in tensors.items():
        file = path / f"{stem}.safetensors"
        save_file({name: tensor.detach().contiguous() for name, tensor in named.items()}, file)
        with file.open("rb+") as content:
            os.fsync(content.fileno())


def write_state(path: Path, state: Mapping[str, object], recipe: str) -> None:
    """The content of a checkpoint except tensors and the manifest."""
    files.write_atomically(path / "state.json", json.dumps(dict(state), allow_nan=False).encode())
    if recipe:
        files.write_atomically(path / files.RECIPE, recipe.encode())


def load_latest(folder: Path, *, command: str = "rl") -> Checkpoint | None:
    """The newest checkpoint, or None if none was finished; `command` is the command that resumes the run, for messages.

    A damaged checkpoint is an error: silently using an older one would lose steps.
    """
    steps = files.saved_steps(folder)
    return load_step(folder, max(steps), command=command) if steps else None


def load_step(folder: Path, step: int, *, command: str = "rl") -> Checkpoint:
    """The checkpoint of a step.  Raises UserError if it is missing, RunError if it is damaged."""
    steps = files.saved_steps(folder)
    if step not in steps:
        there = f"Choose one of {', '.join(map(str, steps))}." if steps else "There is none: start a new run."
        raise UserError(f"from_step = {step}: {folder} has no checkpoint of that step.  {there}")
    try:
        return load_checkpoint(steps[step])
    except files.DamageError as wrong:
        good = next((each for each in reversed(steps) if each < step and not files.damage(steps[each])), None)
        remedy = (
            f"The last good checkpoint is {steps[good]}.  To resume from it and lose later steps:\n"
            f"    {resume_command(folder.parent, command)} --from-step {good}\n"
            f"in Python: train(config, resume=True, from_step={good})"
            if good is not None
            else "There is no earlier undamaged checkpoint.  Start again with run.overwrite = true (--run.overwrite)."
        )
        raise RunError(f"{wrong}.  {remedy}") from wrong


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint's listed files.  Raises DamageError if one has changed since it was written."""
    manifest = files.require_undamaged(path)
    with files.reading(path):
        return Checkpoint(
            step=manifest.step,
            path=path,
            tensors=read_tensors(path, manifest.files),
            state=json.loads((path / "state.json").read_bytes()),
            made_with=manifest.made_with,
            recipe=(path / files.RECIPE).read_text(encoding="utf-8") if files.RECIPE in manifest.files else "",
        )


def read_tensors(path: Path, names: Iterable[str]) -> Mapping[str, Tensors]:
    """The tensors of a checkpoint by file or group, for any number of ranks that wrote them.

    They are read when used; files of a single rank are mapped into memory.
    """
    stems = [name.removesuffix(".safetensors") for name in names if name.endswith(".safetensors")]
    if any(stem.startswith("shard-") for stem in stems):
        from posttrain.runs.shards import read_shards

        return read_shards(path)
    return {stem: load_file(path / f"{stem}.safetensors") for stem in stems}


def forget_after(folder: Path, step: int) -> list[int]:
    """Remove the checkpoints of later steps, damaged or not, and return the steps.

    The removal is on disk when this returns: a resumed run must never find them next to shortened journals.
    """
    later = [each for each in files.saved_steps(folder) if each > step]
    with files.writing(folder, folder.parent):
        for each in later:
            discard(files.saved_steps(folder)[each])
        if later:
            files.sync_folder(folder)
    return later


def discard(path: Path) -> None:
    """Rename a checkpoint, then remove it, so that a kill in between never leaves a step-N that looks finished."""
    doomed = path.with_name(files.TEMPORARY + path.name)
    remove(doomed)
    path.rename(doomed)
    shutil.rmtree(doomed)


def prune(folder: Path, *, keep_last: int, keep_best: int = 0) -> list[str]:
    """Remove all but the newest `keep_last` (at least 1) and the `keep_best` with the highest scores.

    A checkpoint with a damaged manifest is not counted and stays, since it can be repaired.  Returns the damage.
    """
    assert keep_last >= 1, "a run that keeps no checkpoint cannot be resumed"
    steps, wrong = files.saved_steps(folder), []
    scores: dict[int, float | None] = {}
    for step, path in steps.items():
        try:
            scores[step] = files.read_manifest(path).score
        except files.DamageError as error:
            wrong.append(str(error))
    ranked = sorted((score, step) for step, score in scores.items() if score is not None)
    kept = {*sorted(scores)[-keep_last:], *(step for _, step in ranked[len(ranked) - min(keep_best, len(ranked)) :])}
    with files.writing(folder, folder.parent):
        for step in scores.keys() - kept:
            discard(steps[step])
        for leftover in folder.glob(files.TEMPORARY + "*"):
            remove(leftover)
    return wrong


def arithmetic() -> dict[str, object]:
    """What floating-point results depend on besides the program: threads and CPU kernels decide the order of sums."""
    return {
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def restore_threads(checkpoint: Checkpoint, threads: ThreadClaim, ranks: RankGroup = ONE_RANK) -> list[str]:
    """Use as many threads as the checkpoint was made with; returns notes on why bits may still differ."""
    recorded = int(str(checkpoint.made_with["threads"]))
    if threads.count not in (0, recorded):
        raise UserError(
            f"run.threads = {threads.count}, but {checkpoint.path} was made with {recorded} threads: the bits would"
            f" differ.  Set run.threads = {recorded}, or leave it out."
        )
    threads.take(recorded, f"{checkpoint.path} was made with {recorded} threads")
    now = arithmetic()
    if now["threads"] != recorded:
        raise RunError(
            f"{checkpoint.path} was made with {recorded} threads, but torch only uses {now['threads']} here.  Remove a"
            " limit such as OMP_THREAD_LIMIT from the environment."
        )
    now["ranks"] = ranks.size
    then = {"ranks": 1, **checkpoint.made_with}
    return [
        f"{name} is {now[name]} here, but was {then[name]} when the checkpoint was made: bits may differ from those of"
        " an uninterrupted run"
        for name in ("torch", "cpu", "ranks")
        if now[name] != then[name]
    ]


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
