"""Files of pairs of answers, such as held_out.jsonl: the margin of each is kept, and its texts are read when shown."""

import json
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path

from posttrain.viewer.folder_files import Unreadable, json_number, open_file
from posttrain.viewer.line_files import MOST_LINE, LineFile


class PairLines(LineFile):
    """Where each pair is, and by how much the chosen answer's score is higher, NaN where a score is missing."""

    def __init__(self, path: Path, scores: tuple[str, str], text: str) -> None:
        super().__init__(path)
        self.scores, self.text = scores, text
        """Names of the two scores and of the chosen text."""
        self.forget()

    def forget(self) -> None:
        self.places, self.margins, self.has_texts = array("q"), array("d"), False

    def take(self, line: bytes, start: int) -> None:
        row = json.loads(line)
        if not isinstance(row, dict):
            raise ValueError("not a JSON object")
        chosen, rejected = (json_number(row.get(name)) for name in self.scores)
        self.places.append(start)
        self.margins.append(float("nan") if chosen is None or rejected is None else chosen - rejected)
        self.has_texts = self.has_texts or bool(row_text(row, self.text))

    def rows(self, at: Sequence[int]) -> list[Mapping[str, object]]:
        """Some rows.  Raises Unreadable where the file has changed meanwhile."""
        found: list[Mapping[str, object]] = []
        try:
            with open_file(self.path) as file:
                for place in at:
                    file.seek(self.places[place])
                    row = json.loads(file.readline(MOST_LINE))
                    found.append(row if isinstance(row, dict) else {})
        except (OSError, ValueError, RecursionError) as error:
            raise Unreadable(self.path.name, f"cannot be read ({error})") from error
        return found


def row_text(row: Mapping[str, object], name: str) -> str:
    """A text of a row; a conversation as its messages, one after another; empty for anything else."""
    value = row.get(name)
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        messages = [each for each in value if isinstance(each, dict)]
        return "\n\n".join(f"{each.get('role', '')}: {each.get('content', '')}" for each in messages)
    return ""
