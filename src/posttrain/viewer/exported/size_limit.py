"""Responses that fit a size, counted in their bytes in the file."""

import re
from collections.abc import Mapping

from posttrain.viewer.exported.exported_page import embedded_json
from posttrain.viewer.exported.shared_values import SharedValues

UNITS = {"": 1, "KB": 1000, "MB": 1_000_000}
SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KM]B)?", re.IGNORECASE)


def size_in_bytes(text: str) -> int:
    """`20MB`, `500 KB` or a number of bytes.  Raises ValueError."""
    found = SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"size = {text!r}: must be a size such as 20MB or 500KB")
    return int(float(found[1]) * UNITS[(found[2] or "").upper()])


class SizedResponses:
    """Responses by address, as JSON texts, up to a limit of bytes."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used, self.reserved = limit, 0, 0
        self.texts: dict[str, str] = {}
        self.shared = SharedValues()

    def add(self, responses: Mapping[str, object], *, reserve: int = 0) -> bool:
        """Add all of these responses and reserve bytes for later ones, or do neither where that is too much."""
        known = len(self.shared.places)
        compact = {path: self.shared.compact(each) for path, each in responses.items() if path not in self.texts}
        texts = {path: embedded_json(each) for path, each in compact.items()}
        size = sum(len(embedded_json(path)) + len(text) + 2 for path, text in texts.items())  # a colon and a comma
        if self.used + size + self.shared.size + self.reserved + reserve > self.limit:
            self.shared.forget_after(known)
            return False
        self.used, self.reserved = self.used + size, self.reserved + reserve
        self.texts |= texts
        return True
