"""Rows of a generator of reasoning-gym, made in a separate process: python -m posttrain.tasks.row_files.generator_rows.

Some generators iterate over sets of texts, whose order differs between processes.  So this process has a fixed hash
seed, and the same options make the same rows everywhere.  It also isolates what the library does to its process.  It
reads {"generator", "options", "seed", "size"} and writes a row a line, or {"error": ...}.
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
"""The folder of this package, wherever the run was started."""
SHOWN = 12
"""Names of generators or options that a message lists if none is similar."""


def generated_rows(source: GeneratorOptions) -> list[dict[str, object]]:
    """The rows that the options describe, the same in every process.

    Raises UserError without reasoning-gym, and for options that the generator refuses.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise UserError(
            f"generator = {source.generator}: needs reasoning-gym, which is not installed.\n"
            "    `pip install posttrain[gym]`, or name a file of rows as path."
        )
    request = {
        "generator": source.generator,
        "options": dict(source.generator_options),
        "seed": source.generator_seed,
        "size": source.generator_size,
    }
    rows = list(made_rows(json.dumps(request, sort_keys=True)))
    if "error" in rows[0]:
        raise UserError(str(rows[0]["error"]))
    return rows


@functools.lru_cache(maxsize=8)
def made_rows(request: str) -> tuple[dict[str, object], ...]:
    """The lines of JSON that this file prints, run as a program."""
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


def generator_digest() -> str:
    """The library's version, which together with the options decides a generator's rows; "" if it is not installed."""
    try:
        return importlib.metadata.version("reasoning-gym")
    except importlib.metadata.PackageNotFoundError:
        return ""


def rows_or_error(request: Mapping[str, Any]) -> Iterator[dict[str, object]]:
    """The requested rows as the task and its reward read them, or {"error": message}."""
    import reasoning_gym
    from reasoning_gym.dataset import ProceduralDataset
    from reasoning_gym.factory import DATASETS

    name, options = request["generator"], request["options"]
    if name not in DATASETS or name == "composite":
        names = sorted(DATASETS.keys() - {"composite"})
        near = did_you_mean(name, names)
        end = near if near.startswith("Did") else f"There are {', '.join(names[:SHOWN])} and {len(names) - SHOWN} more."
        yield {"error": f"generator = {name}: reasoning-gym has no generator of that name.  {end}"}
        return
    known = [each.name for each in dataclasses.fields(DATASETS[name][1])]
    for unknown in (option for option in options if option not in known):
        near = did_you_mean(unknown, [each for each in known if each not in ("seed", "size")])
        yield {"error": f"generator_options: the generator {name} has no option `{unknown}`.  {near}"}
        return
    try:
        dataset = reasoning_gym.create_dataset(name, seed=request["seed"], size=request["size"], **options)
        plain_score = type(dataset).score_answer is ProceduralDataset.score_answer
        entries = [dataset[index] for index in range(request["size"])]
    except (AssertionError, ValueError, TypeError, KeyError, IndexError) as error:
        says = f"{type(error).__name__}: {error}"
        yield {"error": f"generator_options = {options}: the generator {name} refuses them: {says}"}
        return
    for entry in entries:
        kept = plain.dump({key: entry[key] for key in ("question", "answer", "metadata")})
        yield {
            "prompt": entry["question"],
            "answer": entry["answer"],
            "generator": name,
            "scorer": scorer_of(name, one_answer=plain_score),
            "entry": json.dumps({"options": options, "entry": kept.decode("utf-8", "surrogatepass")}),
        }


if __name__ == "__main__":
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is not a row
    for row in rows_or_error(json.load(sys.stdin)):
        output.write(json.dumps(row) + "\n")
    output.flush()
