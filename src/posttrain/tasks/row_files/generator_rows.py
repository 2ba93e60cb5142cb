"""Rows of a generator of reasoning-gym, made in a separate process: python -m posttrain.tasks.row_files.generator_rows.

Some generators go through sets of texts, whose order is another in each process: there the seed of hashes is fixed, so
that the same options make the same rows everywhere.  And what the library does to its process stays there.  It reads
{"generator", "options", "seed", "size"} and writes a row a line, or {"error": ...}.
"""

import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain.errors import UserError
from posttrain.options.dataset import GeneratorOptions
from posttrain.rewards.exact_match import scorer_of
from posttrain.sandbox.inside import plain
from posttrain.schemas import did_you_mean

ROOT = Path(__file__).parents[3]
"""The folder that this package lies in, wherever the run was started from."""
SHOWN = 12
"""Names of generators or options that a message lists where none is near."""


def generated_rows(source: GeneratorOptions) -> list[dict[str, object]]:
    """The rows that the options describe, the same in every process.

    Raises UserError without reasoning-gym, and for options that the generator refuses.
    """
    require_reasoning_gym(source.generator)
    request = {
        "generator": source.generator,
        "options": dict(source.generator_options),
        "seed": source.generator_seed,
        "size": source.generator_size,
    }
    rows = list(row_maker_answer(json.dumps(request, sort_keys=True)))
    if "error" in rows[0]:
        raise UserError(generator_refusal(source, rows[0]))
    return rows


@functools.lru_cache(maxsize=8)
def row_maker_answer(request: str) -> tuple[dict[str, object], ...]:
    """The lines of JSON of the row maker."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-P", "-m", "posttrain.tasks.row_files.generator_rows"],
        input=request,
        env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"generator {json.loads(request)['generator']}: reasoning-gym failed ({last[:300]}).")
    return tuple(json.loads(line) for line in done.stdout.splitlines())


def generator_refusal(source: GeneratorOptions, said: dict[str, object]) -> str:
    """The message for a generator's error."""
    name = source.generator
    known = said.get("known")
    names = [str(each) for each in known] if isinstance(known, list) else []
    if said["error"] == "unknown":
        near = did_you_mean(name, names)
        some = f"There are {', '.join(names[:SHOWN])} and {len(names) - SHOWN} more."
        hint = near if near.startswith("Did") else some
        return f"generator = {name}: reasoning-gym has no generator of that name.  {hint}"
    if said["error"] == "option":
        near = did_you_mean(str(said["option"]), names)
        return f"generator_options: the generator {name} has no option `{said['option']}`.  {near}"
    return f"generator_options = {dict(source.generator_options)}: the generator {name} refuses them: {said['says']}"


def require_reasoning_gym(generator: str) -> None:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise UserError(
            f"generator = {generator}: needs reasoning-gym, which is not installed.\n    `pip install posttrain[gym]`,"
            " or name a file of rows as path."
        )


def generator_digest() -> str:
    """The library's version, which decides a generator's rows with its options; "" where it is not installed."""
    try:
        return importlib.metadata.version("reasoning-gym")
    except importlib.metadata.PackageNotFoundError:
        return ""


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
