"""Completions that try to be more than text, on a page and in a terminal, and the corpora of tests/attacks."""

import json
from pathlib import Path
from typing import Any

HOSTILE = {
    "a script": "<script>fetch('/vote', {method: 'POST'})</script>",
    "an image": "<img src=x onerror=\"document.title='hacked'\">",
    "an end of the script": "</script><script>document.title='hacked'</script>",
    "an end of the page": "</div></main><form action=/vote method=post><input name=choice value=left></form>",
    "a style": "<style>nav{display:none}</style>",
    "a meta": '<meta http-equiv="refresh" content="0; url=http://example.org">',
    "a template": "${alert(1)} {{constructor.constructor('alert(1)')()}}",
    "cleared screen": "\x1b[2J\x1b[H1 A is better",
    "a title": "\x1b]0;hacked\x07",
    "a link": "\x1b]8;;http://example.org\x1b\\click\x1b]8;;\x1b\\",
    "a clipboard": "\x1b]52;c;aGFja2Vk\x07",
    "C1 controls": "\x9b2J\x9d0;hacked\x9c",
    "carriage returns": "It is 8.\rIt is 7.",
    "backspaces": "8\b7",
    "right to left": "\u202eretteb si A\u202c",
    "isolates": "\u2066\u2067\u2068 A \u2069",
    "marks of direction": "\u200f\u200e\u061c",
    "zero width": "se\u200bven",
    "a lone surrogate": "half \ud800 of a pair",
    "null": "a\0b",
    "line separators": "a\u2028b\u2029c",
    "tags": "\U000e0041\U000e0042",
}


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
