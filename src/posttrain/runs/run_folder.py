"""The folder of a run that trains a model; docs/run_folder.md lists its files, which are read without posttrain.

metrics.jsonl has one line per step.  Step 0 is the state before training; a second line of the last step is the state
after.  A folder without a file `format` has format 1, without tokenizer/ and evaluations/.
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

from posttrain.records import Example, Grades, Group
from posttrain.runs import files, rollout_file
from posttrain.runs.alarms import Alarm, Illustration
from posttrain.runs.folder import Folder, lock_folder, require_run_folder
from posttrain.runs.reports import ScoredCompletions, UpdateTokens
from posttrain.runs.run_inputs import FILE as INPUTS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

METRICS = "metrics.jsonl"
TRACKERS = "trackers.json"
HELD_OUT = "held_out.jsonl"
JOURNALS = (METRICS, "scores.jsonl", "alarms.jsonl")
"""Files that grow by lines, each line with its step."""
REPLIES = "replies.jsonl"
"""Replies of environments that are not reproducible; see reply_journal.py."""
FAILURES = "failures.txt"
"""Tracebacks of environment failures that ended the run."""
PARQUET_FOLDERS = ("rollouts", "evaluations", "token_columns", "demonstrations")
CONTENTS = (
    *(*JOURNALS, REPLIES, FAILURES),
    *(INPUTS, TRACKERS, HELD_OUT, "summary.json", "curves.png", "calibration.png", "tensorboard", "wandb", "tokenizer"),
    *PARQUET_FOLDERS,
    *("checkpoints", "model", "adapter", "critic", "weights"),
    "config.yaml",  # last: it marks a folder that is half cleared as a run's
)


class RunFolder(Folder):
    """The folder of a run that trains a model."""

    contents = CONTENTS
    journals = JOURNALS
    folders = ("rollouts", "evaluations", "checkpoints")

    @classmethod
    def resume(cls, path: str | Path) -> "RunFolder":
        """Become the writer of a run that ended or was killed; call `cut_after` next."""
        path = Path(path)
        require_run_folder(path)
        return cls(path, lock_folder(path), begun=True)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def append_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a step's line to metrics.jsonl.  JSON has no NaN or infinity: they are written as null and counted."""
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        num_non_finite = sum(value is None for value in finite.values())
        self._append(METRICS, [{"step": step, **finite, "num_non_finite": num_non_finite}])

    def journal_scores(self, step: int, groups: Sequence[Group], grades: Grades) -> None:
        """Write every score before it is used, one line per group; null if a function did not give a score."""
        lines: list[Mapping[str, object]] = []
        more: dict[str, Mapping[str, Sequence[Sequence[object]]]] = {
            "details": grades.details,
            "extra": grades.extras,
            "logged": grades.logged,
            "marks": rollout_file.plain_marks(grades),
        }
        for row, group in enumerate(groups):
            line: dict[str, object] = {"step": step, "draw": group.draw, "prompt_id": group.prompt.id}
            line["scores"] = finite(dict(zip(grades.names, grades.scores[:, row].tolist(), strict=True)))
            line["outcomes"] = {name: list(outcomes[row]) for name, outcomes in grades.outcomes.items()}
            for what, named in more.items():
                if named:
                    line[what] = finite({name: list(each[row]) for name, each in named.items()})
            if any(rollout.failure for rollout in group.rollouts):
                line["failures"] = [rollout.failure or None for rollout in group.rollouts]
            lines.append(line)
        self._append("scores.jsonl", lines)

    def append_reply(self, record: Mapping[str, object]) -> None:
        self._append(REPLIES, [record])

    def write_rollouts(
        self,
        step: int,
        groups: Sequence[Group],
        grades: Grades,
        advantages: Float64[Tensor, "prompt group"],
        *,
        token_columns: Mapping[str, Float64[Tensor, " token"]] = rollout_file.NO_COLUMNS,
    ) -> Path:
        """Write every completion of a finished step; an advantage of NaN marks a completion that was not trained on.

        Token columns belong to the first groups, which were trained on.
        """
        content = rollout_file.parquet_bytes(step, groups, grades, advantages, token_columns=token_columns)
        return self.write(f"rollouts/{parquet_name(step)}", content)

    def write_evaluation(self, step: int, evaluation: str, completions: Sequence[ScoredCompletions]) -> None:
        """Write every held-out completion of an evaluation, after those of another evaluation at the same step."""
        if not self.begun:
            self._held.append(lambda: self.write_evaluation(step, evaluation, completions))
            return
        name = f"evaluations/{parquet_name(step)}"
        others = rollout_file.without_evaluation(self.path / name, evaluation) if (self.path / name).is_file() else None
        self.write(name, rollout_file.evaluation_bytes(step, evaluation, completions, others))

    def write_token_columns(
        self, step: int, updates: Sequence[UpdateTokens], updated: UpdateTokens | None = None
    ) -> None:
        self.write(f"token_columns/{parquet_name(step)}", rollout_file.token_column_bytes(step, updates, updated))

    def write_demonstrations(self, step: int, examples: Sequence[Example], logprobs: Sequence[Sequence[float]]) -> None:
        """Write held-out demonstrations with log π of each of their learned tokens."""
        columns = {
            "step": [step] * len(examples),
            "example": range(len(examples)),
            "tokens": [example.tokens for example in examples],
            "learned": [example.sampled for example in examples],
            "logprobs": logprobs,
        }
        types = {"tokens": "int32 list", "learned": "bool list", "logprobs": "float list"}
        self.write(f"demonstrations/{parquet_name(step)}", rollout_file.table_bytes(columns, types))

    def write_tokenizer(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Save the tokenizer, so that the tokens of an unfinished run can be read; an existing one is kept."""
        if (self.path / "tokenizer").is_dir():
            return
        from posttrain.models.loading.saving import whole_folder

        with files.writing(self.path / "tokenizer", self.path), whole_folder(self.path / "tokenizer") as folder:
            tokenizer.save_pretrained(folder)

    def metrics(self) -> list[dict[str, int | float | None]]:
        return [json.loads(line) for line in (self.path / METRICS).read_text(encoding="utf-8").splitlines()]

    def last_step(self) -> int:
        file = self.path / METRICS
        return max((int(str(line["step"])) for line in files.read_metrics(file)), default=0) if file.exists() else 0

    def finished_after(self, step: int) -> int:
        """The last step up to which every step after `step` has its rollouts and metrics."""
        recorded = {int(str(line["step"])) for line in files.read_metrics(self.path / METRICS)}
        while step + 1 in recorded and (self.path / "rollouts" / parquet_name(step + 1)).is_file():
            step += 1
        return step

    def append_alarm(self, step: int, alarm: Alarm, shown: Illustration, *, notice: bool = False) -> None:
        """Write an alarm with a transcript, and the completions that it is about by draw and sample."""
        about = [{"draw": group.draw, "sample": rollout.sample} for group, rollout in shown.rollouts]
        line = {"step": step, "alarm": alarm.name, "says": alarm.says, "transcript": shown.transcript}
        line |= {"rollouts": about, **({"evaluation": shown.evaluation} if shown.evaluation else {})}
        self._append("alarms.jsonl", [{**line, "notice": True} if notice else line])

    def raised(self) -> dict[str, int]:
        file = self.path / "alarms.jsonl"
        last: dict[str, int] = {}
        for number, (_, record) in enumerate(files.json_lines(file) if file.exists() else (), start=1):
            if not isinstance(name := record.get("alarm"), str):
                raise files.changed_line(file, number, f"alarm = {name!r:.40} is not the name of an alarm")
            last[name] = int(str(record["step"]))
        return last

    def cut_after(self, step: int) -> None:
        """Remove what was written after `step`, so that a resumed run does not repeat it; -1 removes everything.

        Other files are kept.
        """
        with files.writing(self.path, self.path):
            for name in JOURNALS:
                (self.path / name).touch()
                files.cut_lines_after(self.path / name, step, one_a_step=name == METRICS)
            (self.path / "rollouts").mkdir(exist_ok=True)
            for folder in filter(Path.is_dir, (self.path / name for name in PARQUET_FOLDERS)):
                for file in folder.iterdir():  # those of later steps, and unfinished ones
                    at = rollout_step(file)
                    if (at is not None and at > step) or (file.name.startswith(files.TEMPORARY) and file.is_file()):
                        file.unlink()
                files.sync_folder(folder)
            ended = self.path / "evaluations" / parquet_name(step)
            if ended.is_file():  # the run ended here, and continues
                kept = rollout_file.without_evaluation(ended, "after")
                if kept is None:
                    ended.unlink()
                else:
                    files.write_atomically(ended, rollout_file.table_bytes(kept))

    def missing(self, step: int, kept_from: Mapping[str, int]) -> dict[str, list[int]]:
        """The steps up to `step` that are missing or incomplete in a journal, or in `rollouts`.

        `kept_from` has the first step of each.  Scores must have a line for each group that the metrics count.
        """
        steps = map(rollout_step, (self.path / "rollouts").iterdir())
        kept = {"rollouts": Counter(each for each in steps if each is not None)}
        for name in kept_from.keys() - kept.keys():
            kept[name] = Counter(int(str(record["step"])) for _, record in files.json_lines(self.path / name))
        scored = {record["step"]: num_groups(record) for record in files.read_metrics(self.path / METRICS)}
        expected = {"scores.jsonl": scored}
        found = {
            name: [
                each
                for each in range(first, step + 1)
                if kept[name][each] < max(1, expected.get(name, {}).get(each, 0))
            ]
            for name, first in kept_from.items()
        }
        return {name: steps for name, steps in found.items() if steps}


def parquet_name(step: int) -> str:
    return f"step-{step:06d}.parquet"


def rollout_step(file: Path) -> int | None:
    """The step of a rollout file; None for other files."""
    name = re.fullmatch(r"step-(\d{6,})\.parquet", file.name)
    return int(name[1]) if name and file.is_file() else None


def finite(value: object) -> object:
    """Plain data with null instead of infinity and NaN, which JSON does not have."""
    match value:
        case dict():
            return {name: finite(item) for name, item in value.items()}
        case list():
            return [finite(item) for item in value]
        case float() if not math.isfinite(value):
            return None
    return value


def num_groups(metrics: Mapping[str, object]) -> int:
    """Number of groups that a step sampled; 0 if its metrics do not say."""
    counts = [metrics.get(name) for name in ("num_groups", "num_replaced_groups")]
    return int(sum(count for count in counts if isinstance(count, int | float)))
