"""Responses in fewer bytes: what several responses say is in a file once, and they name its place.

    {"$": 7}                      the shared value 7: a long text, the tokens of a text, or the row of a rollout
    {"$tokens": [3, 5, 3]}        tokens, each a shared value
    {"$likeliest": [3, -0.1, …]}  alternatives: a shared value and its log-prob by turns
    {"$same": [0, 128]}           one value, so many times
    {"$sums": [4, 1, 3]}          running sums: 4, 5, 8
    {"$entries": [["$a", 1]]}     an object with a key that begins with `$`

Floats have 4 significant digits, and more where their whole part has.  `exported_responses.js` reads this.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import cast

from posttrain.viewer.exported.exported_page import embedded_json
from posttrain.viewer.rollout_responses import Alternative, Piece, ShownRollout

SHORTEST_SHARED = 24
"""Characters of a text that is shared; a place takes about ten."""
LEAST_REPEATED = 4
"""Items of a list of numbers that is not written out."""
DIGITS = 4
PIECE, LIKELY, ROW = (frozenset(each.__annotations__) for each in (Piece, Alternative, ShownRollout))


class SharedValues:
    """The shared values of a file, as JSON texts in the order of their places."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}
        self.size = 0
        """Bytes in the file, with a comma each."""
        self._tokens: dict[tuple[object, ...], int] = {}
        """Places of tokens, which come again and again."""

    def forget_after(self, count: int) -> None:
        """Keep only the first values."""
        self._tokens.clear()
        while len(self.places) > count:
            text, _ = self.places.popitem()
            self.size -= len(text) + 1

    def compact(self, value: object) -> object:
        """The value with places of shared ones."""
        if isinstance(value, str):
            return {"$": self._place(value)} if len(value) >= SHORTEST_SHARED else value
        if isinstance(value, float):
            return rounded_number(value)
        if isinstance(value, list):
            return self._list(value)
        if not isinstance(value, dict):
            return value
        entries = {name: self.compact(each) for name, each in value.items()}
        if any(name.startswith("$") for name in value):
            return {"$entries": [*map(list, entries.items())]}
        return {"$": self._place(entries)} if value.keys() == ROW else entries

    def _list(self, values: list[object]) -> object:
        if all_of(values, PIECE):
            return {"$": self._place({"$tokens": [self._token(cast(Piece, each)) for each in values]})}
        if all_of(values, LIKELY):
            return {"$likeliest": [each for one in values for each in self._likely(cast(Alternative, one))]}
        if len(values) >= LEAST_REPEATED and all(type(each) in (int, float, type(None)) for each in values):
            numbers = cast(Sequence[float | None], values)
            if all(each == numbers[0] for each in numbers):
                return {"$same": [self.compact(numbers[0]), len(numbers)]}
            if all(type(each) is int for each in numbers):
                return {"$sums": steps_between(cast(Sequence[int], values))}
        return [self.compact(each) for each in values]

    def _likely(self, one: Alternative) -> tuple[int, object]:
        return self._token({"text": one["text"], "id": one["id"]}), self.compact(one["logprob"])

    def _token(self, value: Mapping[str, object]) -> int:
        key = tuple(value.values())
        if key not in self._tokens:
            self._tokens[key] = self._place(value)
        return self._tokens[key]

    def _place(self, value: object) -> int:
        text = embedded_json(value)
        if text not in self.places:
            self.places[text] = len(self.places)
            self.size += len(text) + 1
        return self.places[text]


def all_of(values: Sequence[object], keys: frozenset[str]) -> bool:
    """Whether these are objects with these keys, at least one."""
    return bool(values) and all(type(each) is dict and each.keys() == keys for each in values)


def steps_between(numbers: Sequence[int]) -> list[int]:
    """The first number, then how far each is from the one before."""
    steps = [numbers[0], *(b - a for a, b in pairwise(numbers))]
    assert [*accumulate(steps)] == list(numbers)
    return steps


def rounded_number(value: float) -> float | int:
    """Four significant digits; the whole part keeps all of its digits."""
    short = round(value) if abs(value) >= 10**DIGITS else float(f"{value:.{DIGITS}g}")
    return int(short) if short == int(short) else short
