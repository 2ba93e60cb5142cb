"""Columns that hold objects of the user's own: copied for each reward function where that works."""

from threading import Lock
from types import MappingProxyType, SimpleNamespace
from typing import Any

from posttrain.rewards.grading.calls import private_copy


class Puzzle:
    """A column's object of the user's own."""

    def __init__(self) -> None:
        self.numbers = [3, 8]


def test_objects_of_a_users_own_are_copied_where_that_works() -> None:
    mine, space, proxy, lock = Puzzle(), SimpleNamespace(numbers=[3, 8]), MappingProxyType({"numbers": [3, 8]}), Lock()
    for given in (mine, space):
        copied: Any = private_copy(given)
        copied.numbers.remove(3)
        assert type(copied) is type(given)
        assert given.numbers == [3, 8]
    seen: Any = private_copy(proxy)
    seen["numbers"].remove(3)
    assert type(seen) is MappingProxyType
    assert proxy["numbers"] == [3, 8]
    assert private_copy(lock) is lock
