"""A run's folder opened for reading: its kind, whether it is still being written, and its files.

Nothing in a folder is executed: no code, template or pickle.
"""

import fcntl
import os
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import yaml

from posttrain.config.reading import COMMAND_OF, recipe_kind
from posttrain.config.recipes import RUN_RECIPE, RecipeLayer, parse_yaml
from posttrain.runs.folder import LOCK, VERSION
from posttrain.viewer.folder_files import Content, WholeFile, mapping, parsed_object, stamp
from posttrain.viewer.line_files import Journal, LineFile
from posttrain.viewer.metric_lines import MetricLines
from posttrain.viewer.response_types import Source, State
from posttrain.viewer.score_lines import ScoreLines
from posttrain.viewer.step_files import StepFiles
from posttrain.viewer.token_pieces import TokenPieces

Lines = TypeVar("Lines", bound=LineFile)
MARKS = {"comparison.json": "compare", "phases.json": "phases"}
"""Files that mark the folder of a command that makes several runs."""
WATCHED = (
    *("format", RUN_RECIPE, "metrics.jsonl", "alarms.jsonl", "scores.jsonl", "summary.json", "held_out.jsonl"),
    *("comparison.json", "phases.json", "rollouts", "evaluations", "token_columns", "tokenizer"),
    *("demonstrations", "preferences.jsonl", "ties.jsonl", "reward.npz"),
)
"""Files and folders whose changes make a new version of the run."""


class OpenedRun:
    """The folder of one run."""

    def __init__(self, folder: Path, name: str = "") -> None:
        self.folder = folder
        self.name = name or folder.resolve().name
        self.metrics, self.alarms = MetricLines(folder / "metrics.jsonl"), Journal(folder / "alarms.jsonl")
        self.score_lines = ScoreLines(folder / "scores.jsonl")
        self.summary: WholeFile[dict[str, object]] = WholeFile(folder / "summary.json", parsed_object, {})
        self.recipe_text = WholeFile(folder / RUN_RECIPE, lambda content: content.decode("utf-8"), "")
        self.recipe: WholeFile[dict[str, object]] = WholeFile(folder / RUN_RECIPE, sections_of_recipe, {})
        self.format = WholeFile(folder / "format", lambda content: int(content[:40]), 1)
        self.rollouts, self.evaluations = StepFiles(folder / "rollouts"), StepFiles(folder / "evaluations")
        self.token_columns = StepFiles(folder / "token_columns", needed=("draw", "sample", "update"))
        self.demonstrations = StepFiles(folder / "demonstrations", needed=("example", "tokens", "learned", "logprobs"))
        self.pieces = TokenPieces(folder)
        self._whole_files: dict[str, WholeFile[Any]] = {}
        self._line_files: dict[str, Any] = {}

    @cached_property
    def place(self) -> Path:
        """The folder without links."""
        return self.folder.resolve()

    def files(self, source: Source) -> StepFiles:
        return self.rollouts if source == "rollouts" else self.evaluations

    def whole_file(self, name: str, read: Callable[[bytes], Content], missing: Content) -> WholeFile[Content]:
        """A file that only some kinds of runs have, and its content."""
        if name not in self._whole_files:
            self._whole_files[name] = WholeFile(self.folder / name, read, missing)
        return self._whole_files[name]

    def line_file(self, name: str, opened: Callable[[Path], Lines]) -> Lines:
        """A file of lines that only some kinds of runs have."""
        if name not in self._line_files:
            self._line_files[name] = opened(self.folder / name)
        found: Lines = self._line_files[name]
        return found

    def kind(self) -> str:
        """The command that made the run.  Raises Unreadable for a damaged recipe."""
        for name, kind in MARKS.items():
            if (self.folder / name).is_file():
                return kind
        sections = {name: dict(mapping(section)) for name, section in self.recipe.content().items()}
        return COMMAND_OF[recipe_kind([RecipeLayer(where="", sections=sections)])]

    def section(self, name: str) -> Mapping[str, object]:
        """A section of its recipe; empty if missing.  Raises Unreadable."""
        return mapping(self.recipe.content().get(name))

    def state(self) -> State:
        """Whether the run is active, finished or stopped."""
        if is_written(self.folder):
            return "running"
        finished = any((self.folder / name).is_file() for name in ("summary.json", *MARKS))
        begun = finished or (self.folder / RUN_RECIPE).is_file()
        return "finished" if finished else "stopped" if begun else "not begun"

    def version(self) -> str:
        """Changes with its files."""
        stamps = [stamp(self.folder / name) or folder_stamp(self.folder / name) for name in WATCHED]
        return "-".join(f"{each[0]:x}.{each[1] % 10**12:x}" if each else "" for each in stamps)

    def changed(self) -> float:
        """When a journal or the recipe last changed, in seconds since 1970; 0 if there is none."""
        found = [stamp(self.folder / name) for name in WATCHED]
        return max((each[1] for each in found if each), default=0) / 1e9

    def supported(self) -> str | None:
        """A warning about a folder of a newer format, or None.  Raises Unreadable."""
        version = self.format.content()
        if version <= VERSION:
            return None
        return f"format: {version}, but this version of posttrain reads up to {VERSION}.  Update posttrain"


def sections_of_recipe(content: bytes) -> dict[str, object]:
    """The sections of a recipe.  Raises ValueError."""
    try:
        found = parse_yaml(content.decode("utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    if not isinstance(found, dict):
        raise ValueError("not a recipe")
    return {str(name): section for name, section in found.items()}


def folder_stamp(folder: Path) -> tuple[int, int] | None:
    """Changes when a file in it is made, replaced or removed."""
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_nlink, found.st_mtime_ns


def is_written(folder: Path) -> bool:
    """Whether a process holds the folder's lock.  Nothing is written; the lock is touched for microseconds."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False
