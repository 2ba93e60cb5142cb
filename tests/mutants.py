"""Change the maths by one operator, number, term or name at a time: some test must notice each change.

`make mutants` runs it; a mutant that survives names a line that no test pins down.  Name files or folders to try those
alone: `.venv/bin/python tests/mutants.py algorithms/losses.py irl/paths.py`.

The tests of a group of files are collected once, and run once on the code as it is, which tells how long each takes and
which functions it enters.  Each mutant is then tried in a fork, on the tests that enter the function it changes, until
one fails or takes far longer than it did.  `mutations.py` says what is changed.
"""

import ast
import contextlib
import gc
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from multiprocessing import Pipe
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Generic, TypeVar

os.environ["OMP_NUM_THREADS"] = "1"

import hypothesis
import pytest
import torch
from _pytest.runner import runtestprotocol
from equivalent_mutants import EQUIVALENT
from mutations import PACKAGE, Mutant, mutants

ROOT = Path(__file__).parents[1]
NUM_WORKERS = 2
NUM_EXAMPLES = 8
"""Of each property that hypothesis tests."""
SLOW_SECONDS = 10
"""A test that takes longer, measured as it is here, is left out."""
PATIENCE = 5
"""A test that takes this many times as long as on the code as it is, and as many seconds more, has noticed."""

T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """Files of the maths, and the tests about them: those of the suites that import any of the modules."""

    files: list[str]
    suites: list[str]
    modules: list[str]


GROUPS = [
    Group(
        files=["algorithms/advantages.py", "algorithms/token_weights.py", "algorithms/losses.py", "algorithms/kl.py"],
        suites=["closed_form", "laws", "reference"],
        modules=[f"posttrain.{name}" for name in ("advantages", "token_weights", "losses", "kl", "algorithms")],
    ),
    Group(
        files=["irl/*.py", "neural_irl.py", "irl_runs/environment.py", "irl_runs/measures.py"],
        suites=["closed_form", "laws", "learning", "end_to_end"],
        modules=["posttrain.irl", "posttrain.neural_irl", "posttrain.irl_runs"],
    ),
]


@dataclass(frozen=True)
class Run:
    """A test on the code as it is."""

    seconds: float
    entered: frozenset[tuple[str, int]]
    """Functions, as `function_at` names them."""


Items = dict[str, pytest.Item]
Record = dict[str, Run]
"""By the test's id, as items are."""


class Fork(Generic[T]):
    """Work in a process of its own, on all that this one has loaded."""

    def __init__(self, work: Callable[[], T]) -> None:
        self.receiver, sender = Pipe(duplex=False)
        self.process = os.fork()
        if self.process == 0:
            code = 1
            try:
                sender.send(work())
                code = 0
            except BaseException:
                traceback.print_exc(file=sys.__stderr__)
                raise
            finally:
                os._exit(code)
        sender.close()

    def result(self) -> T | None:
        """What the work gave; None where it ran out of time."""
        given = None
        with contextlib.suppress(EOFError):
            given = self.receiver.recv()
        status = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        assert status in (0, -signal.SIGALRM), f"a fork ended with {status}"
        return given


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
            print(f"{name} fails on the code as it is: mend that first.", file=sys.__stdout__, flush=True)
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


def survivors_of(chosen: list[Mutant], items: Items) -> list[Mutant] | None:
    """Try every mutant, telling of those that survive; None where the tests fail on the code as it is."""
    for file in {mutant.file for mutant in chosen}:
        importlib.import_module(".".join(["posttrain", *Path(file).with_suffix("").parts]).removesuffix(".__init__"))
    live = [each for each in gc.get_objects() if isinstance(each, FunctionType)]
    record = Fork(lambda: recorded(items)).result()
    if record is None:
        return None

    def try_out(mutant: Mutant, killers: list[str], folder: Path) -> str:
        tests = tests_of(mutant, record, killers)
        if not tests:
            return ""
        if mutant.in_function and exchange(mutant, live):
            return noticed(items, tests)
        return noticed_afresh(mutant, tests, folder)

    def survive(part: list[Mutant]) -> list[Mutant]:
        alive: list[Mutant] = []
        killers: list[str] = []
        for mutant in part:
            with tempfile.TemporaryDirectory() as folder:
                noticed_by = Fork(lambda mutant=mutant, at=Path(folder): try_out(mutant, killers, at)).result()
            if noticed_by:
                killers[:] = [*(name for name in killers if name != noticed_by), noticed_by]
            elif noticed_by is not None:  # nor has a test run out of time
                alive.append(mutant)
                told = f"SURVIVED {mutant.file}:{mutant.line}\n    {mutant.before}\n    {mutant.after}"
                print(told, file=sys.__stdout__, flush=True)
        return alive

    workers = [Fork(lambda part=chosen[first::NUM_WORKERS]: survive(part)) for first in range(NUM_WORKERS)]
    return [mutant for worker in workers for mutant in worker.result() or []]


def run_group(group: Group, names: list[str]) -> int:
    """Whether any mutant of the group survived."""
    begun = time.monotonic()
    torch.set_num_threads(1)
    files = [str(path.relative_to(PACKAGE)) for pattern in group.files for path in sorted(PACKAGE.glob(pattern))]
    found = [m for file in files for m in mutants(file) if not names or any(file.startswith(name) for name in names)]
    if not found:
        return 0
    chosen = [mutant for mutant in found if (mutant.file, mutant.after) not in EQUIVALENT]
    paths = [path for suite in group.suites for path in sorted((ROOT / "tests" / suite).rglob("test_*.py"))]
    about = [path for path in paths if any(module in path.read_text(encoding="utf-8") for module in group.modules)]
    found_alive: list[list[Mutant] | None] = []
    collect([str(path) for path in about], lambda items: found_alive.append(survivors_of(chosen, items)))
    survivors = found_alive[0] if found_alive else None
    if survivors is None:
        print(f"The tests of {', '.join(group.files)} fail on the code as it is, or cannot be collected.")
        return 1
    known = len(found) - len(chosen)
    minutes = (time.monotonic() - begun) / 60
    print(
        f"{len(chosen)} mutants of {', '.join(group.files)}: {len(survivors)} survived; "
        f"{known} more are known to compute the same; {minutes:.0f} minutes",
        flush=True,
    )
    return 1 if survivors else 0


def main(names: list[str]) -> int:
    """Each group in a process of its own, for what has been imported stays."""
    codes = [Fork(lambda group=group: run_group(group, names)).result() for group in GROUPS]
    return max(code or 0 for code in codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
