"""The corpora beside this file: JSON lines, whose texts may be recipes."""

import json
from pathlib import Path
from typing import Any


def read(name: str) -> list[dict[str, Any]]:
    """The lines of a corpus."""
    return [json.loads(line) for line in Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()]


def built(recipe: Any) -> str:
    """The text that a recipe stands for: a string, one repeated, or a list of these."""
    match recipe:
        case str():
            return recipe
        case {"repeat": [text, times]}:
            return str(text) * times
    return "".join(map(built, recipe))
