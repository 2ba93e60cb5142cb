"""Files of JSON lines that are written at once, such as held_out.jsonl and preferences.jsonl."""

import json
from dataclasses import dataclass, field

MOST_FAULTS = 20


@dataclass(frozen=True, slots=True)
class JsonRows:
    """The objects in a file, and a message for each invalid line."""

    rows: list[dict[str, object]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


NO_ROWS = JsonRows()


def json_rows(content: bytes, name: str) -> JsonRows:
    """The rows of a file.  A damaged line, such as the last line of a truncated file, is left out."""
    found = JsonRows()
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("not a JSON object")
            found.rows.append(row)
        except (ValueError, RecursionError) as error:
            if len(found.faults) < MOST_FAULTS:
                found.faults.append(f"{name}, line {number}: damaged ({str(error)[:120]}); left out")
    return found


def text(row: dict[str, object], name: str) -> str:
    """A text of a row; a conversation as its messages, one after another; empty for anything else."""
    value = row.get(name)
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        messages = [each for each in value if isinstance(each, dict)]
        return "\n\n".join(f"{each.get('role', '')}: {each.get('content', '')}" for each in messages)
    return ""
