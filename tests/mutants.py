"""Change the maths by one operator, number, term or name at a time: some test must notice each change.

`make mutants` runs it; a mutant that survives names a line that no test pins down.  Name files or folders to try those
alone: `.venv/bin/python tests/mutants.py algorithms/losses.py irl/paths.py`.  All of them take hours: what was found is
kept (`mutant_results.py`), so that a run that was interrupted goes on, and of a file that has not changed since only
the survivors are tried again, unless `--again` is given.

The tests of a group of files are collected once, and run once on the code as it is, which tells how long each takes and
which functions it enters.  Each mutant is then tried in a fork, on the tests that enter the function it changes, until
one fails or takes far longer than it did.  `mutations.py` says what is changed.
"""

import argparse
import ast
import contextlib
import gc
import importlib
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, FunctionType

os.environ["OMP_NUM_THREADS"] = "1"

import hypothesis
import pytest
import torch
import yaml
from _pytest.runner import runtestprotocol
from mutant_results import Fork, Results
from mutations import EQUIVALENT, PACKAGE, Mutant, mutants

ROOT = Path(__file__).parents[1]
GROUPS = yaml.safe_load((ROOT / "tests" / "data" / "mutant_groups.yaml").read_text(encoding="utf-8"))
NUM_WORKERS = 2
NUM_EXAMPLES = 8
"""Of each property that hypothesis tests."""
SLOW_SECONDS = 10
"""A test that takes longer, measured as it is here, is left out."""
PATIENCE = 5
"""A test that takes this many times as long as on the code as it is, and as many seconds more, has noticed."""

TOLD = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
"""Where results are told: what tests and their child processes write goes nowhere."""
TOOK_TOO_LONG = "a test that took too long"


@dataclass(frozen=True)
class Run:
    """A test on the code as it is."""

    seconds: float
    entered: frozenset[tuple[str, int]]
    """Functions, as `function_at` names them."""


Items = dict[str, pytest.Item]
Record = dict[str, Run]
"""By the test's id, as items are."""


class Session:
    """A pytest plugin that hands the collected tests over instead of running them."""

    def __init__(self, work: Callable[[Items], None]) -> None:
        self.work = work

    def pytest_sessionstart(self) -> None:
        """One example that fails is enough: the smallest is not searched for."""
        phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
        hypothesis.settings.register_profile("mutants", hypothesis.settings(), phases=phases)
        hypothesis.settings.load_profile("mutants")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """A few examples are enough, too."""
        for test in (getattr(item, "obj", None) for item in items):
            if given := getattr(test, "_hypothesis_internal_use_settings", None):
                few = min(given.max_examples, NUM_EXAMPLES)
                test._hypothesis_internal_use_settings = hypothesis.settings(given, max_examples=few)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if not session.testsfailed:
            self.work({item.nodeid: item for item in session.items})
        return True


def collect(files: list[str], work: Callable[[Items], None]) -> None:
    """Do the work with the tests of these files, unless they cannot even be collected."""
    sys.dont_write_bytecode = True
    os.chdir(ROOT)
    with open(os.devnull, "w") as quiet, contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        os.dup2(quiet.fileno(), 1)
        pytest.main(["-s", "-q", "-p", "no:cacheprovider", "--assert=plain", *files], [Session(work)])


@cache
def functions(file: str) -> list[tuple[int, int]]:
    """The first and last line of every function, decorators included."""
    tree = ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
    return [
        (min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]), node.end_lineno or 0)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    ]


def function_at(file: str, line: int) -> tuple[str, int]:
    """The innermost function around a line, by its file and first line, which is 0 outside all functions."""
    return file, max((first for first, last in functions(file) if first <= line <= last), default=0)


def recorded(items: Items) -> Record | None:
    """How each test goes on the code as it is; None where one fails."""
    record: Record = {}
    for name, item in items.items():
        codes: set[CodeType] = set()

        def note(frame: FrameType, event: str, argument: object, codes: set[CodeType] = codes) -> None:
            codes.add(frame.f_code)

        begun = time.perf_counter()
        sys.settrace(note)
        failed = fails(item)
        sys.settrace(None)
        if failed:
            print(f"{name} fails on the code as it is: mend that first.", file=TOLD)
            return None
        ours = [code for code in codes if code.co_filename.startswith(f"{PACKAGE}{os.sep}")]
        entered = {function_at(str(Path(c.co_filename).relative_to(PACKAGE)), c.co_firstlineno) for c in ours}
        record[name] = Run(time.perf_counter() - begun, frozenset(entered))
    return record


def fails(item: pytest.Item) -> bool:
    return any(report.failed for report in runtestprotocol(item, log=False, nextitem=None))


def noticed(items: Items, tests: Record) -> str:
    """Which of the tests fails first; none if empty."""
    for name, run in tests.items():
        signal.alarm(int(PATIENCE * (1 + run.seconds)))  # an endless loop is noticed too
        if fails(items[name]):
            return name
    return ""


def tests_of(mutant: Mutant, record: Record, killers: list[str]) -> Record:
    """The tests that enter the mutated function; where the line is in none, those that enter any of its file.

    Those that noticed mutants before come first, the latest before others, and then the quickest.
    """
    file, first = function_at(mutant.file, mutant.line)
    names = [
        name
        for name, run in record.items()
        if run.seconds <= SLOW_SECONDS and any(other == file and first in (0, begin) for other, begin in run.entered)
    ]
    places = {name: place for place, name in enumerate(reversed(killers))}
    names.sort(key=lambda name: (places.get(name, len(places)), record[name].seconds))
    return {name: record[name] for name in names}


def exchange(mutant: Mutant, live: list[FunctionType]) -> bool:
    """Let every function that has been imported do what it does in the mutated file; whether all can."""
    path, codes = str(PACKAGE / mutant.file), {}
    waiting = [compile(mutant.source, path, "exec")]
    while waiting:
        inner = [constant for constant in waiting.pop().co_consts if isinstance(constant, CodeType)]
        codes |= {code.co_qualname: code for code in inner}
        waiting += inner
    for function in live:
        if function.__code__.co_filename == path:
            new = codes[function.__code__.co_qualname]
            if new.co_freevars != function.__code__.co_freevars:
                return False
            function.__code__ = new
    return True


def noticed_afresh(mutant: Mutant, tests: Record, folder: Path) -> str:
    """The same where functions cannot be exchanged one by one, so that everything must be imported again."""
    for name in list(sys.modules):
        if name.split(".")[0] in {"posttrain", "tests", "benchmarks"}:
            del sys.modules[name]
    copy = folder / "posttrain"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "assets"))
    (copy / "assets").symlink_to(PACKAGE / "assets")
    (copy / mutant.file).write_text(mutant.source, encoding="utf-8")
    sys.path.insert(0, str(folder))
    answers: list[str] = []
    files = sorted({name.split("::")[0] for name in tests})
    collect(files, lambda items: answers.append(noticed(items, tests)))
    return answers[0] if answers else "the import"


class Trial:
    """The tests of a group on the code as it is, and on mutants."""

    def __init__(self, files: Iterable[str], items: Items) -> None:
        for file in files:
            name = ".".join(["posttrain", *Path(file).with_suffix("").parts])
            importlib.import_module(name.removesuffix(".__init__"))
        self.items = items
        self.live = [each for each in gc.get_objects() if isinstance(each, FunctionType)]
        self.record = Fork(lambda: recorded(items)).result()

    def noticed_by(self, mutant: Mutant, killers: list[str], folder: Path) -> str:
        """Which test fails first, as in `noticed`."""
        assert self.record is not None
        tests = tests_of(mutant, self.record, killers)
        if not tests:
            return ""
        if mutant.in_function and exchange(mutant, self.live):
            return noticed(self.items, tests)
        return noticed_afresh(mutant, tests, folder)

    def try_all(self, part: list[Mutant], results: Results) -> None:
        """Try mutants of one file, telling of those that survive."""
        killers: list[str] = []
        for mutant in part:
            begun = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                name = Fork(lambda mutant=mutant, at=Path(folder): self.noticed_by(mutant, killers, at)).result()
            if name:
                killers[:] = [*(other for other in killers if other != name), name]
            results.add(mutant, TOOK_TOO_LONG if name is None else name, time.monotonic() - begun)
            if name == "":
                told = f"SURVIVED {mutant.file}:{mutant.line}\n    {mutant.before}\n    {mutant.after}"
                print(told, file=TOLD)


@dataclass(frozen=True)
class Task:
    """The mutants of a file: which are there, which are to be tried, and what is known of them."""

    file: str
    num_known: int
    """Of those, listed as computing the same."""
    chosen: list[Mutant]
    waiting: list[Mutant]
    results: Results

    def report(self, seconds: float) -> int:
        """Say how it went; how many survive."""
        found = [self.results.of(mutant) for mutant in self.chosen]
        alive = sum(result is None or not result.noticed_by for result in found)
        spent = sum(result.seconds for result in found if result is not None)
        print(
            f"{self.file}: {len(self.chosen)} mutants, {alive} survive; {self.num_known} more are known to compute the "
            f"same; {len(self.waiting)} tried now in {seconds:.0f} s; {spent:.0f} s of trying in all",
            file=TOLD,
        )
        return alive


def task_of(file: str, *, again: bool) -> Task:
    """What is to be done for a file; a survivor is tried again, for tests change too."""
    found, results = list(mutants(file)), Results(file)
    if again:
        results.forget()
    chosen = [mutant for mutant in found if (mutant.file, mutant.after) not in EQUIVALENT]
    waiting = [mutant for mutant in chosen if (known := results.of(mutant)) is None or not known.noticed_by]
    return Task(file, len(found) - len(chosen), chosen, waiting, results)


def try_group(tasks: list[Task], items: Items, num_workers: int) -> bool:
    """Try what waits, file by file; whether the tests pass on the code as it is."""
    begun = time.monotonic()
    trial = Trial([task.file for task in tasks], items)
    if trial.record is None:
        return False
    print(f"{len(items)} tests recorded in {time.monotonic() - begun:.0f} s", file=TOLD)
    for task in tasks:
        begun = time.monotonic()
        parts = [task.waiting[first::num_workers] for first in range(num_workers)]
        workers = [Fork(lambda part=part, task=task: trial.try_all(part, task.results)) for part in parts]
        for worker in workers:
            worker.result()
        Task(task.file, task.num_known, task.chosen, task.waiting, Results(task.file)).report(time.monotonic() - begun)
    return True


def run_group(group: dict[str, list[str]], arguments: argparse.Namespace) -> int:
    """Whether any mutant of the group's files survives."""
    torch.set_num_threads(1)
    names: list[str] = arguments.names
    files = [str(path.relative_to(PACKAGE)) for pattern in group["files"] for path in sorted(PACKAGE.glob(pattern))]
    wanted = [file for file in files if not names or any(file.startswith(name) for name in names)]
    tasks = [task_of(file, again=arguments.again) for file in wanted]
    done: list[bool] = []
    if waiting := [task for task in tasks if task.waiting]:
        paths = [path for suite in group["suites"] for path in sorted((ROOT / "tests" / suite).rglob("test_*.py"))]
        asked = re.compile("|".join(rf"{re.escape(module)}\b" for module in group["modules"]))
        about = [str(path) for path in paths if asked.search(path.read_text(encoding="utf-8"))]
        collect(about, lambda items: done.append(try_group(waiting, items, arguments.workers)))
        if done != [True]:
            print(f"The tests of {', '.join(wanted)} fail on the code as it is, or cannot be collected.", file=TOLD)
            return 1
    survivors = [task_of(file, again=False).waiting for file in wanted]
    return 1 if any(survivors) else 0


def main() -> int:
    """Each group in a process of its own, for what has been imported stays."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="files or folders of src/posttrain; all if none")
    parser.add_argument("--again", action="store_true", help="forget what is known of their mutants")
    parser.add_argument("--workers", type=int, default=NUM_WORKERS, help="mutants that are tried side by side")
    arguments = parser.parse_args()
    codes = [Fork(lambda group=group: run_group(group, arguments)).result() for group in GROUPS]
    return max(code or 0 for code in codes)


if __name__ == "__main__":
    sys.exit(main())
