"""Runs of a very small model through the real command, each in a process of its own, and what two runs must share.

The processes are forked from one that has loaded everything (`forks`), and the curves of a run are left blank unless a
test asks: a run then takes half a second instead of five.
`python -m posttrain` itself is tested in test_serve_attacks.py.
"""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import yaml
from matplotlib.figure import Figure
from pyarrow import parquet
from safetensors import deserialize

from posttrain.models.loading.new_model import new_model, new_tokenizer
from posttrain.options.model import NewModelOptions
from tests.support.accidents import Accident, arrange
from tests.support.forks import fork_context
from tests.support.pictures import save_blank

SHAPE = NewModelOptions(hidden_size=16, mlp_size=24, num_layers=1, num_heads=2, num_kv_heads=1, max_positions=96)
NO_ACCIDENT = Accident()
NOTHING: Mapping[str, str] = {}


def save_tiny_model(folder: Path, *, seed: int = 0, shape: NewModelOptions = SHAPE) -> Path:
    """A random one-layer model with the tokenizer of the bundled one."""
    tokenizer = new_tokenizer()
    new_model(shape, tokenizer, seed=seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_recipe(folder: Path, **sections: Any) -> Path:
    """A recipe of four quick steps of the model beside the folder: `folder/recipe.yaml`, which writes `folder/run`."""
    folder.mkdir(exist_ok=True)
    shutil.copy(Path(__file__).with_name("dice.py"), folder)
    content: dict[str, Any] = {
        "model": {"path": str(folder.parent / "model")},
        "task": {"name": "countdown", "held_out_size": 4},
        "algorithm": {"name": "grpo"},
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_completion_tokens": 6},
        "update": {"learning_rate": 1e-2, "tokens_per_microbatch": 256},
        "evaluation": {"every_steps": 2, "samples": 2, "brief_problems": 3},
        "checkpoint": {"every_steps": 2},
        "run": {"folder": str(folder / "run"), "num_steps": 4, "threads": 1},
    }
    for name, options in sections.items():
        content[name] = {**content[name], **options} if name in content else options
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({"rewards": [{"path": f"{folder}/dice.py:dice"}], **content}))
    return path


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code (minus the signal that killed it), and what it printed."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Command:
    """A command that is running."""

    process: BaseProcess
    log: Path

    def ended(self, timeout: float = 300) -> Ended:
        """Wait for it."""
        self.process.join(timeout)
        assert self.process.exitcode is not None, f"still running after {timeout} s: {self.log.read_text()}"
        return Ended(self.process.exitcode, self.log.read_text(), self.log.with_suffix(".err").read_text())

    def wait_until(self, happened: Callable[[], bool], timeout: float = 300) -> None:
        """Look many times a second."""
        deadline = time.monotonic() + timeout
        while not happened():
            assert self.process.is_alive(), f"ended too early: {self.log.read_text()}"
            assert time.monotonic() < deadline, f"never happened: {self.log.read_text()}"
            time.sleep(0.002)

    def signal(self, number: int) -> None:
        """Send it a signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


def start(
    *argv: object,
    folder: Path,
    accident: Accident = NO_ACCIDENT,
    logs: Path | None = None,
    pictures: bool = False,
    environment: Mapping[str, str] = NOTHING,
) -> Command:
    """Begin `posttrain ARGV` in a folder; what it prints goes there too, or to another one."""
    work = partial(run_command, [str(each) for each in argv], pictures=pictures, environment=environment)
    return forked(work, folder=folder, accident=accident, logs=logs or folder)


def start_program(text: str, *, folder: Path, logs: Path) -> Command:
    """Begin a program, as `python -c` would."""
    return forked(partial(run_program, text), folder=folder, accident=NO_ACCIDENT, logs=logs)


def forked(work: Callable[[], object], *, folder: Path, accident: Accident, logs: Path) -> Command:
    """Begin a piece of work in a process of its own."""
    log = logs / f"log-{len(list(logs.glob('log-*.out')))}.out"
    process = fork_context().Process(target=in_process, args=(work, str(folder), str(log), accident), daemon=True)
    process.start()
    return Command(process, log)


def command(*argv: object, folder: Path, accident: Accident = NO_ACCIDENT, pictures: bool = False) -> Ended:
    """`posttrain ARGV`, run to its end."""
    return start(*argv, folder=folder, accident=accident, pictures=pictures).ended()


def in_process(work: Callable[[], object], folder: str, log: str, accident: Accident) -> None:
    """In the new process: do the work there, and end with the exit code that it returns."""
    for descriptor, path in ((1, log), (2, log.removesuffix(".out") + ".err")):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.chdir(folder)
    os.environ["COLUMNS"] = "200"  # room for wide lines
    arrange(accident)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    code = work()
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)  # type: ignore[arg-type]


def run_command(argv: Sequence[str], *, pictures: bool, environment: Mapping[str, str] = NOTHING) -> int:
    """What `python -m posttrain` does."""
    os.environ.update(environment)
    from posttrain.cli import main

    if not pictures:
        Figure.savefig = save_blank  # type: ignore[method-assign]  # this process does nothing else
    return main(argv)


def run_program(text: str) -> None:
    """What `python -c` does."""
    sys.path.insert(0, "")
    exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102  # a page of ours


def records(file: Path | str) -> list[dict[str, Any]]:
    """The lines of a journal."""
    return [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]


def rollout_rows(run: Path | str, step: int, folder: str = "rollouts") -> list[dict[str, Any]]:
    """The rows of a step's file."""
    return parquet.read_table(Path(run) / folder / f"step-{step:06d}.parquet").to_pylist()


def files_of(folder: Path) -> dict[str, bytes]:
    """The content of all files but the lock, which names the process."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".posttrain.lock")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def untimed(record: Mapping[str, Any]) -> dict[str, Any]:
    """A metrics line without what the clock decides: docs/metrics.md names these."""
    timed = ("step_time", "tokens_per_second", "seconds/", "environment/reply_seconds", "environment/slowest_reply")
    return {name: value for name, value in record.items() if not name.startswith(timed)}


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """The metrics of every step, without the timed ones; what was measured after training is in `after_training`."""
    lines = lines_of(run)
    return [line for line, before in zip(lines, [{"step": -1}, *lines], strict=False) if line["step"] > before["step"]]


def after_training(run: Path) -> list[dict[str, Any]]:
    """The lines that a finished run adds for its last step: one, or none where nothing is held out."""
    return lines_of(run)[len(metrics_of(run)) :]


def lines_of(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what the clock says."""
    return [untimed(line) for line in records(run / "metrics.jsonl")]


def contents(run: Path) -> dict[str, Any]:
    """All in a run folder that must not depend on interruptions; files as bytes."""
    found: dict[str, Any] = {"metrics": lines_of(run)}
    files = [path for path in sorted(run.rglob("*")) if path.is_file()]
    for path in files:
        name = path.relative_to(run).as_posix()
        if path.name.startswith("shard-"):  # the order of its keys is that in which they came
            found[name] = dict(deserialize(path.read_bytes()))
        elif path.suffix in (".safetensors", ".parquet") or name == "scores.jsonl":
            found[name] = path.read_bytes()
        elif name == "summary.json":
            summary = json.loads(path.read_bytes())
            found[name] = {key: summary[key] for key in ("before", "after", "tokens", "versions", "device")}
        elif path.name == "state.json":
            state = json.loads(path.read_bytes())
            state["run"].pop("seconds")
            state["run"].pop("recipe", None)
            found[name] = state
        else:
            found[name] = "is there"  # names the folder, or holds times
    return found


def require_same(run: Path, other: Path) -> None:
    """Two run folders must hold the same, bit for bit."""
    mine, theirs = contents(run), contents(other)
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert mine[name] == theirs[name], name
