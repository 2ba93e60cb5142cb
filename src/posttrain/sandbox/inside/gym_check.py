"""Scoring answers with reasoning-gym; run once in the fork-server of the reward `generated`, as `prepared`.

Sealed processes can neither import nor read anything more, so every data set is opened here and has scored once.
"""

import json
from functools import cache

import reasoning_gym

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


@cache
def data_set(key: str) -> "Any":
    """The data set of a key, which is its generator's name and options as JSON."""
    name, options = json.loads(key)
    return reasoning_gym.create_dataset(name, seed=0, size=1, **options)


def score(key: str, answer: str, entry: "dict[str, object]") -> float:
    return float(data_set(key).score_answer(answer, entry))


def open_datasets(keys: "list[str]") -> None:
    """Open the data sets, and score once with each."""
    for key in keys:
        entry = data_set(key)[0]
        score(key, entry["answer"], entry)
