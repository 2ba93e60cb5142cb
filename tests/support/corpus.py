"""The corpora of tests/attacks: JSON lines, whose texts may be recipes."""

import json
from pathlib import Path
from typing import Any

ATTACKS = Path(__file__).parents[1] / "attacks"


def read(name: str) -> list[dict[str, Any]]:
    """The lines of a corpus."""
    return [json.loads(line) for line in (ATTACKS / name).read_text(encoding="utf-8").splitlines()]


def built(recipe: Any) -> str:
    """The text that a recipe stands for: a string, one repeated, or a list of these."""
    match recipe:
        case str():
            return recipe
        case {"repeat": [text, times]}:
            return str(text) * times
    return "".join(map(built, recipe))
