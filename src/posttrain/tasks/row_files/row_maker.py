"""Makes the rows of a generator, in a separate process: python -m posttrain.tasks.row_files.row_maker.

Some generators go through sets of texts, whose order is another in each process: here the seed of hashes is fixed, so
that the same options make the same rows everywhere.  And what the library does to its process stays there.

Reads {"generator", "options", "seed", "size"} and writes a row a line, or {"error": ...}.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from posttrain.rewards.exact_match import scorer_of
from posttrain.sandbox.inside import plain


def write_rows() -> None:
    rows = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is not a row
    for row in rows_or_error(json.load(sys.stdin)):
        rows.write(json.dumps(row) + "\n")
    rows.flush()


def rows_or_error(request: Mapping[str, Any]) -> Iterator[dict[str, object]]:
    """The requested rows, or the error of the request."""
    import reasoning_gym
    from reasoning_gym.dataset import ProceduralDataset
    from reasoning_gym.factory import DATASETS

    name, options = request["generator"], request["options"]
    if name not in DATASETS or name == "composite":
        yield {"error": "unknown", "known": sorted(DATASETS.keys() - {"composite"})}
        return
    known = [each.name for each in dataclasses.fields(DATASETS[name][1])]
    unknown = next((option for option in options if option not in known), None)
    if unknown is not None:
        yield {"error": "option", "option": unknown, "known": [each for each in known if each not in ("seed", "size")]}
        return
    try:
        dataset = reasoning_gym.create_dataset(name, seed=request["seed"], size=request["size"], **options)
        plain_score = type(dataset).score_answer is ProceduralDataset.score_answer
        entries = [dataset[index] for index in range(request["size"])]
    except (AssertionError, ValueError, TypeError, KeyError, IndexError) as error:
        yield {"error": "refused", "says": f"{type(error).__name__}: {error}"}
        return
    yield from (row_of(name, options, entry, scorer_of(name, one_answer=plain_score)) for entry in entries)


def row_of(name: str, options: Mapping[str, object], entry: Mapping[str, Any], scorer: str) -> dict[str, object]:
    """A row as the task and its reward read it."""
    kept = {key: entry[key] for key in ("question", "answer", "metadata")}
    packed = plain.dump(kept).decode("utf-8", "surrogatepass")
    return {
        "prompt": entry["question"],
        "answer": entry["answer"],
        "generator": name,
        "scorer": scorer,
        "entry": json.dumps({"options": options, "entry": packed}),
    }


if __name__ == "__main__":
    write_rows()
