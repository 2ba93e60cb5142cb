"""No page, docstring, message or name has a sentence that a reader had to read twice, once a plain one replaced it."""

import re
from pathlib import Path

import pytest

from posttrain.course.notebooks import lessons

ROOT = Path(__file__).parents[1]
TEXTS = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *(path for path in (ROOT / "docs").rglob("*.md") if not {"_build", "api"} & {*path.relative_to(ROOT).parts}),
    *lessons().values(),
    *(path for kind in ("*.py", "*.md", "*.yaml", "*.template") for path in (ROOT / "src").rglob(kind)),
    *(ROOT / "recipes").rglob("*.yaml"),
)
BEFORE = {
    "is no engine": "is not an engine",
    "is no name that": "use letters only",
    "is no record of": "is not a valid record",
    "is no sign of": "does not mean",
    "gives up after most": "stops after one or two",
    "scoring itself failed to give": "a grader fails",
    "is called by keyword, once": "each step calls it once",
    "it is given everything": "receives every column",
    "goes on for ever": "no limit",
    "may hang on no": "must not depend on",
    "is told once and left": "is reported once",
    "all else is refused": "any other change is rejected",
    "is for all lives of a run": "counts the whole run",
    "is seldom trained in one go": "are usually trained in stages",
    "costs nothing either": "run the same command again",
    "lie between the two": "apply to every phase",
    "what is carried on is what": "only what you name is carried over",
    "an optimiser goes on over": "an optimiser state can only be reused",
    "thin matrices beside each": "two small matrices next to each",
    r"\*\*what is left\.\*\*": "**Output.**",
    "of a base in 4 bits W is": "for a 4-bit base, W is",
    "on in updates alone": "active only during updates",
    "off 1 by its noise": "differ from 1",
    "trains nothing; use": "must be at least 1",
    "owns what is trained": "owns the trained state",
    "that is learned from leaves behind": "that must outlive this step",
    "what a recipe says of": "settings from the recipe",
    "so many prompts are shown": "shows n prompts",
    "nothing, for most algorithms": "most algorithms keep nothing",
    "that came again after": "repeated alarms are omitted",
    "that was found was told": "every hack raised an alarm",
    "what is further off": "more distant tasks",
    "the rest are furniture": "the rest is infrastructure",
    "are refused by name": "are rejected with a message",
    "(told_in_fields|no_journal)": "field_messages, discard_scores",
}
"""What a text said before -> how it says it now."""


@pytest.mark.parametrize("before", BEFORE)
def test_no_text_says_it_as_before(before: str) -> None:
    words = re.compile(r"\s+(?:#\s*)?".join(before.split()), re.IGNORECASE)
    found = [str(path.relative_to(ROOT)) for path, text in read() if words.search(text)]
    assert not found, f"now: {BEFORE[before]}"


def read() -> list[tuple[Path, str]]:
    if not CONTENT:
        CONTENT.extend((path, path.read_text(encoding="utf-8")) for path in TEXTS)
        assert len(CONTENT) > 500
    return CONTENT


CONTENT: list[tuple[Path, str]] = []
"""Each text, read once."""
