"""Code and recipes that this user has run on this machine, by digest.  A run folder may only name known ones.

    $XDG_STATE_HOME/posttrain/known (by default ~/.local/state/posttrain/known), one line each:
    SHA-256 of the content, the name in it, where it was

The author of a run folder cannot write there.  The digest decides, not the path, so a run may be moved.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

DIGITS = 64
"""Of a SHA-256 in hexadecimal."""


@dataclass(frozen=True, slots=True)
class KnownCode:
    """A function or class in a file, or the recipe of a run, with the digest of its content."""

    digest: str
    name: str
    where: str = ""
    """For readers of the file; not compared."""

    @property
    def key(self) -> str:
        return f"{self.digest} {self.name}"


def state_file() -> Path:
    """Raises RuntimeError for a user without a home."""
    named = Path(os.environ.get("XDG_STATE_HOME", ""))
    state = named if named.is_absolute() else Path.home() / ".local" / "state"  # as the XDG specification says
    return state / "posttrain" / "known"


def is_known(code: KnownCode) -> bool:
    return len(code.digest) == DIGITS and code.key in known_keys()


def known_keys() -> set[str]:
    """The keys of all known code; none if the file cannot be read."""
    try:
        lines = state_file().read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, RuntimeError):
        return set()
    return {" ".join(line.split(" ", 2)[:2]) for line in lines}


def remember(codes: Iterable[KnownCode]) -> None:
    """Keep these as known.  If the file cannot be written nothing is kept: a run is then resumed with --trust-code."""
    known = known_keys()
    fresh = {each.key: each for each in codes if len(each.digest) == DIGITS and each.key not in known}
    if not fresh:
        return
    lines = "".join(f"{key} {' '.join(each.where.split())}\n" for key, each in fresh.items())
    with suppress(OSError, RuntimeError):  # a full disk, say
        file = state_file()
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, lines.encode("utf-8", "replace"))  # at once, so that two processes do not mix lines
        finally:
            os.close(descriptor)
