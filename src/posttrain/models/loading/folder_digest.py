"""What tells a model folder from another, or from itself after more training; torch-free."""

import hashlib
import re
from pathlib import Path

MODEL_FILES = re.compile(r"[^.].*\.(json|safetensors|bin|model|jinja|py)|(vocab|merges)\.txt")
"""The files that a model is made of; a folder may hold others, such as notes."""
MIB = 2**20


def model_digest(folder: Path) -> str:
    """A model folder by the sizes of its files and the first and last MiB of each; empty where there is none.

    Of weights that is enough to tell another model or another training from this one, and takes no time.
    """
    digest = hashlib.sha256()
    files = [file for file in sorted(folder.glob("*")) if MODEL_FILES.fullmatch(file.name)]
    try:
        for file in files:
            digest.update(f"{file.name} {file.stat().st_size}\n".encode())
            with file.open("rb") as content:
                digest.update(content.read(MIB))
                content.seek(max(content.tell(), file.stat().st_size - MIB))
                digest.update(content.read(MIB))
    except OSError:
        return ""
    return digest.hexdigest() if files else ""
