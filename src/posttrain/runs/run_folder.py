"""The folder that a run leaves behind; nothing in it needs posttrain to be read.

    format             the version of this layout: 2; a folder without it has format 1, which has no tokenizer/ and no
                       evaluations/
    config.yaml        the resolved configuration; running it again gives the same run
    inputs.json        what else it is made of, with digests: see run_inputs.py
    metrics.jsonl      one line per step; step 0 is the state before training, a second line of the last step that after
    scores.jsonl       every score, on the disk before it is used
    tokenizer/         for `AutoTokenizer.from_pretrained`, from the start
    rollouts/          step-000012.parquet: every completion of a finished step, with what became of it
    evaluations/       step-000012.parquet: every held-out completion and its scores
    token_columns/     step-000012.parquet, with run.keep_token_columns: what each update computed for each token
    checkpoints/       step-000012/: see checkpoint.py
    summary.json       what came out: see summary.py
    model/             a plain `from_pretrained` folder; of an adapter, merged, where model.adapter.save says so
    adapter/           an adapter as peft reads it
    critic/            value_head.safetensors of an actor-critic algorithm, and a trunk of its own as a model folder
    curves.png         see curves.py
    calibration.png    of a reward model; held_out.jsonl has its scores of held-out pairs
    trackers.json      what each tracker of run.report_to calls the run; tensorboard/ and wandb/ are their files

Whatever a call writes is on the disk (fsync) when the call returns.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxtyping import Float64
from torch import Tensor

from posttrain.config import TrainingConfig
from posttrain.errors import UserError
from posttrain.records import Grades, Group
from posttrain.runs.files import (
    TEMPORARY,
    changed_line,
    cut_lines_after,
    json_lines,
    read_metrics,
    sync_folder,
    write_atomically,
    writing,
)
from posttrain.runs.folder import Folder, lock_folder, require_known_format
from posttrain.runs.reports import ScoredCompletions, UpdateTokens
from posttrain.runs.rollout_file import (
    NO_COLUMNS,
    evaluation_bytes,
    parquet_bytes,
    plain_marks,
    table_bytes,
    token_column_bytes,
    without_evaluation,
)
from posttrain.runs.run_inputs import FILE as INPUTS
from posttrain.runs.run_inputs import RunInputs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

METRICS = "metrics.jsonl"
TRACKERS = "trackers.json"
HELD_OUT = "held_out.jsonl"
JOURNALS = (METRICS, "scores.jsonl", "alarms.jsonl")
"""Files that grow by lines, each line with its step."""
PARQUET_FOLDERS = ("rollouts", "evaluations", "token_columns")
"""Folders of files named step-N.parquet."""
CONTENTS = (
    *JOURNALS,
    INPUTS,
    TRACKERS,
    "tensorboard",
    "wandb",
    "summary.json",
    "curves.png",
    "calibration.png",
    HELD_OUT,
    "tokenizer",
    "rollouts",
    "evaluations",
    "token_columns",
    "checkpoints",
    "model",
    "adapter",
    "critic",
    "config.yaml",  # last: a folder that is half cleared can still be told from someone else's
)
"""What overwriting removes; anything else in the folder stays."""


class RunFolder(Folder):
    """The folder of a run that trains a model."""

    contents = CONTENTS
    journals = JOURNALS
    folders = ("rollouts", "evaluations", "checkpoints")

    @classmethod
    def resume(cls, path: str | Path) -> "RunFolder":
        """Become the writer of a run that ended or was killed; `cut_after` comes next."""
        path = Path(path)
        if not (path / "config.yaml").is_file():
            raise UserError(
                f"--resume {path} (in Python run.folder): not a run folder, for it has no config.yaml."
                "  Name the folder of a run."
            )
        require_known_format(path)
        return cls(path, lock_folder(path), begun=True)

    @property
    def checkpoints(self) -> Path:
        """Where checkpoint.py saves to and loads from."""
        return self.path / "checkpoints"

    @property
    def config_yaml(self) -> str:
        """The configuration that the run was started with."""
        return (self.path / "config.yaml").read_text(encoding="utf-8")

    def write_inputs(self, inputs: RunInputs) -> None:
        """Save what the run is made of beside its configuration."""
        path = self.path / INPUTS
        with writing(path, self.path):
            write_atomically(path, inputs.as_json().encode())

    def append_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a step's line to metrics.jsonl.  JSON has no NaN or infinity: they are written as null and counted."""
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        num_non_finite = sum(value is None for value in finite.values())
        self._append("metrics.jsonl", [{"step": step, **finite, "num_non_finite": num_non_finite}])

    def journal_scores(self, step: int, groups: Sequence[Group], grades: Grades) -> None:
        """Put every score on the disk before it is used, a line per group; null where a function gave none."""
        lines: list[Mapping[str, object]] = []
        scores = grades.scores.tolist()
        for row, group in enumerate(groups):
            by_function = dict(zip(grades.names, (column[row] for column in scores), strict=True))
            told = {
                what: {name: list(of_group[row]) for name, of_group in by_name.items()}
                for what, by_name in (
                    ("details", grades.details),
                    ("extra", grades.extras),
                    ("logged", grades.logged),
                    ("marks", plain_marks(grades)),
                )
            }
            lines.append(
                {
                    "step": step,
                    "draw": group.draw,
                    "prompt_id": group.prompt.id,
                    "scores": {name: [None if math.isnan(s) else s for s in row] for name, row in by_function.items()},
                    "outcomes": {name: list(outcomes[row]) for name, outcomes in grades.outcomes.items()},
                    **{what: finite(by_name) for what, by_name in told.items() if by_name},
                }
            )
        self._append("scores.jsonl", lines)

    def write_rollouts(
        self,
        step: int,
        groups: Sequence[Group],
        grades: Grades,
        advantages: Float64[Tensor, "prompt group"],
        *,
        token_columns: Mapping[str, Float64[Tensor, " token"]] = NO_COLUMNS,
    ) -> Path:
        """Write every completion of a finished step, whole or not at all; an advantage of NaN means: took no part.

        Token columns are those of the first groups, which took part.
        """
        content = parquet_bytes(step, groups, grades, advantages, token_columns=token_columns)
        return self._write_parquet("rollouts", step, content)

    def write_evaluation(self, step: int, evaluation: str, completions: Sequence[ScoredCompletions]) -> None:
        """Write every held-out completion of an evaluation, beside those of another kind at the same step."""
        if not self._begun:
            self._held.append(lambda: self.write_evaluation(step, evaluation, completions))
            return
        path = self.parquet("evaluations", step)
        others = without_evaluation(path, evaluation) if path.is_file() else None
        self._write_parquet("evaluations", step, evaluation_bytes(step, evaluation, completions, others))

    def write_token_columns(self, step: int, updates: Sequence[UpdateTokens]) -> None:
        """Write what each update of a step computed for its tokens."""
        self._write_parquet("token_columns", step, token_column_bytes(step, updates))

    def write_tokenizer(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Save the tokenizer, so that the tokens of an unfinished run can be read; one that is there stays."""
        if (self.path / "tokenizer").is_dir():
            return
        from posttrain.models.loading.saving import whole_folder

        with writing(self.path / "tokenizer", self.path), whole_folder(self.path / "tokenizer") as folder:
            tokenizer.save_pretrained(folder)

    def parquet(self, folder: str, step: int) -> Path:
        """The file of a step in one of `PARQUET_FOLDERS`."""
        return self.path / folder / f"step-{step:06d}.parquet"

    def _write_parquet(self, folder: str, step: int, content: bytes) -> Path:
        path = self.parquet(folder, step)
        with writing(path, self.path):
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, content)
        return path

    def write_held_out(self, rows: Sequence[Mapping[str, object]]) -> Path:
        """Write what a reward model says of each held-out pair, whole or not at all."""
        path = self.path / HELD_OUT
        content = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
        with writing(path, self.path):
            write_atomically(path, content.encode())
        return path

    def metrics(self) -> list[dict[str, int | float | None]]:
        """The lines of metrics.jsonl so far."""
        return [json.loads(line) for line in (self.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]

    def last_step(self) -> int:
        """The last step that metrics.jsonl tells of; 0 where it tells of none."""
        file = self.path / METRICS
        return max((int(str(line["step"])) for line in read_metrics(file)), default=0) if file.exists() else 0

    def append_alarm(self, step: int, name: str, says: str, transcript: str, *, notice: bool = False) -> None:
        """Add a line to alarms.jsonl."""
        line = {"step": step, "alarm": name, "says": says, "transcript": transcript}
        self._append("alarms.jsonl", [{**line, "notice": True} if notice else line])

    def raised(self) -> dict[str, int]:
        """The step at which each alarm was raised last."""
        file = self.path / "alarms.jsonl"
        last: dict[str, int] = {}
        for number, (_, record) in enumerate(json_lines(file) if file.exists() else (), start=1):
            if not isinstance(name := record.get("alarm"), str):
                raise changed_line(file, number, f"alarm = {name!r:.40} is no name of an alarm")
            last[name] = int(str(record["step"]))
        return last

    def cut_after(self, step: int) -> None:
        """Forget what was written after `step`, so that a resumed run does not tell it twice; -1 forgets everything.

        Files that somebody else put there stay.
        """
        with writing(self.path, self.path):
            for name in JOURNALS:
                (self.path / name).touch()
                cut_lines_after(self.path / name, step, one_a_step=name == METRICS)
            (self.path / "rollouts").mkdir(exist_ok=True)
            for folder in (self.path / name for name in PARQUET_FOLDERS):
                if folder.is_dir():
                    cut_files_after(folder, step)
            ended = self.parquet("evaluations", step)
            if ended.is_file():  # the run ended here and goes on
                kept = without_evaluation(ended, "after")
                if kept is None:
                    ended.unlink()
                else:
                    write_atomically(ended, table_bytes(kept))

    def missing(self, step: int, kept_from: Mapping[str, int]) -> dict[str, list[int]]:
        """The steps up to `step` that a journal, or `rollouts`, should tell of and does not, or not in full.

        `kept_from` has the first step that each tells of.  Scores have a line for each group that metrics count.
        """
        files = (rollout_step(file) for file in (self.path / "rollouts").iterdir())
        told = {"rollouts": Counter(each for each in files if each is not None)}
        for name in kept_from.keys() - told.keys():
            told[name] = Counter(int(str(record["step"])) for _, record in json_lines(self.path / name))
        groups = {record["step"]: num_groups(record) for record in read_metrics(self.path / "metrics.jsonl")}
        found: dict[str, list[int]] = {}
        for name, first in kept_from.items():
            expected = groups if name == "scores.jsonl" else {}
            steps = [each for each in range(first, step + 1) if told[name][each] < max(1, expected.get(each, 0))]
            if steps:
                found[name] = steps
        return found


def cut_files_after(folder: Path, step: int) -> None:
    """Remove the files of later steps, and those that were never finished."""
    for file in folder.iterdir():
        written = rollout_step(file)
        ours = file.name.startswith(TEMPORARY) or (written is not None and written > step)
        if ours and file.is_file():
            file.unlink()
    sync_folder(folder)


def claim_folder(config: TrainingConfig) -> RunFolder:
    """The folder of a new run, claimed and not begun."""
    return RunFolder.claim(config.run.folder, overwrite=config.run.overwrite)


def rollout_step(file: Path) -> int | None:
    """The step that a rollout file belongs to; None where it is none."""
    name = re.fullmatch(r"step-(\d{6,})\.parquet", file.name)
    return int(name[1]) if name and file.is_file() else None


def finite(value: object) -> object:
    """Plain data with null in place of infinity and NaN, for which JSON has no word."""
    match value:
        case dict():
            return {name: finite(item) for name, item in value.items()}
        case list():
            return [finite(item) for item in value]
        case float() if not math.isfinite(value):
            return None
    return value


def num_groups(metrics: Mapping[str, object]) -> int:
    """The groups that were scored in a step, by its metrics; 0 where they do not say."""
    counts = [metrics.get(name) for name in ("num_groups", "num_replaced_groups")]
    return int(sum(count for count in counts if isinstance(count, int | float)))
