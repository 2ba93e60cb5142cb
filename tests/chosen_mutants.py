"""Mistakes that a person would make in the maths, the table of algorithms and the loop; some test must fail for each.

tests/mutants.py changes every operator and number of the maths; this adds exchanged arguments, lost options, wrong
defaults and guards left out.  Each is tried in a copy of the sources, with the tests of its file, by a child of one
process that has already imported torch.
"""

import contextlib
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch  # noqa: F401 — before the fork, so that no child pays for it
import yaml

ROOT = Path(__file__).parents[1]
ASSETS = "src/posttrain/assets"
CHOSEN: dict[str, dict[str, list]] = yaml.safe_load(
    (ROOT / "tests" / "data" / "chosen_mutants.yaml").read_text(encoding="utf-8")
)
TESTS: dict[str, list[str]] = {file: chosen["tests"] for file, chosen in CHOSEN.items()}
MUTANTS = [(file, old, new, *(at or [0])) for file, chosen in CHOSEN.items() for old, new, *at in chosen["mistakes"]]
"""File, text, its replacement, which of its occurrences."""


def mutated(source: str, old: str, new: str, occurrence: int) -> str:
    parts = source.split(old)
    assert len(parts) > occurrence + 1, f"{old!r} is not there {occurrence + 1} times: mend data/chosen_mutants.yaml"
    return old.join(parts[: occurrence + 1]) + new + old.join(parts[occurrence + 1 :])


def tests_pass(folder: Path, tests: list[str]) -> bool:
    """Run the tests on the sources in `folder`, in a child whose output is dropped."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.chdir(folder)
    sys.dont_write_bytecode = True  # a mutant of the same size and second would pass for the one before
    sys.path.insert(0, str(folder / "src"))
    os.environ["PYTHONPATH"] = str(folder / "src")  # for the processes that tests start
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *(f"tests/{test}" for test in tests)])
    os._exit(int(code))


def main() -> int:
    started, survivors = time.monotonic(), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ignore = shutil.ignore_patterns("__pycache__", "assets")
        for part in ("src", "tests"):
            shutil.copytree(ROOT / part, folder / part, ignore=ignore)
        (folder / ASSETS).symlink_to(ROOT / ASSETS)
        shutil.copy(ROOT / "pyproject.toml", folder)
        chosen = [mutant for mutant in MUTANTS if len(sys.argv) == 1 or mutant[0] in sys.argv[1:]]
        assert tests_pass(folder, sorted({test for mutant in chosen for test in TESTS[mutant[0]]})), "fails unchanged"
        for file, old, new, occurrence in chosen:
            path = folder / "src" / "posttrain" / file
            original = path.read_text(encoding="utf-8")
            path.write_text(mutated(original, old, new, occurrence), encoding="utf-8")
            if tests_pass(folder, TESTS[file]):
                survivors.append(f"{file}: {old!r} -> {new!r} ({occurrence})")
                print("survives:", survivors[-1], flush=True)
            path.write_text(original, encoding="utf-8")
    seconds = time.monotonic() - started
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants die, in {seconds:.0f} seconds")
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main())
