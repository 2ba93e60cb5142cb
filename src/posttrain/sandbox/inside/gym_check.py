"""Scoring answers with reasoning-gym; run once in the fork-server of the reward `generated`, as `prepared`.

Sealed processes can neither import nor read anything more, so every data set is opened here and has scored once.
"""

import json

import reasoning_gym

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

DATASETS: "dict[str, Any]" = {}


def open_datasets(pairs: "dict[str, Any]") -> None:
    """Make the data sets, by key, each given as its generator's name and options."""
    for key, (name, options) in pairs.items():
        dataset = reasoning_gym.create_dataset(name, seed=0, size=1, **options)
        DATASETS[key] = dataset
        entry = dataset[0]
        dataset.score_answer(entry["answer"], entry)


def score(key: str, answer: str, entry: "dict[str, object]") -> float:
    """What the generator's own scorer gives for an answer."""
    return float(DATASETS[key].score_answer(answer, entry))


def prepare(written: str) -> None:
    """Open the data sets that are written as JSON."""
    open_datasets(json.loads(written))
