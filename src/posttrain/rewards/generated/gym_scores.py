"""reasoning-gym's own scorers, asked inside the sandbox and nowhere else."""

import importlib.util
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.errors import UserError
from posttrain.rewards.function_questions import AskedFunction, answers
from posttrain.sandbox import inside
from posttrain.sandbox.execution import FEW, ServerOptions
from posttrain.sandbox.process_pool import ProcessPool
from posttrain.sandbox.sandboxes import Sandboxes, site_packages

SCORE = AskedFunction("score", "from prepared import score")
PREPARE = Path(inside.__file__).with_name("gym_check.py")


@dataclass(frozen=True, slots=True)
class GymQuestion:
    """What an answer to a problem is worth to its generator's scorer."""

    dataset: str
    """Generator and options, as `dataset_key` writes them."""
    answer: str
    entry: Mapping[str, Any]


def dataset_key(generator: str, options: Mapping[str, object]) -> str:
    """A data set by its generator and options."""
    return json.dumps([generator, options], sort_keys=True)


def gym_scores(
    questions: Sequence[GymQuestion], datasets: Collection[str], sandboxes: Sandboxes, *, cpu_seconds: float
) -> list[object]:
    """What the scorers say, a number where nothing went wrong, or `Unanswered`.

    `datasets` are all that are known, those of the questions among them: a server is started for each such collection.
    """
    asked = [(each.dataset, each.answer, each.entry) for each in questions]
    return answers(sandbox_with_datasets(sandboxes, datasets), SCORE, asked, cpu_seconds=cpu_seconds)


def sandbox_with_datasets(sandboxes: Sandboxes, datasets: Collection[str]) -> ProcessPool:
    """The sealed one with reasoning-gym imported and the data sets open."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise UserError(
            "reward generated: reasoning-gym's own scorer is asked about such answers, and it is not installed.\n"
            "    `pip install posttrain[gym]`."
        )
    source = PREPARE.read_text(encoding="utf-8") + f"\n\nprepare({sorted(datasets)!r})\n"
    return sandboxes.started_with(ServerOptions(modules=FEW, path=site_packages(), prepare=source))
