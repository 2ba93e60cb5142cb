"""A flag that names code is taken by the commands that read it; others refuse it and import nothing."""

from itertools import product
from pathlib import Path

import pytest

from posttrain.cli import COMMANDS, main

OF_TASKS = ("rl", "dpo", "collect", "compare", "eval", "trace", "plan", "config")
OF_ALGORITHMS = ("rl", "compare", "trace", "plan", "config")
TAKEN = {*product(OF_TASKS, ["task.path"]), *product(OF_ALGORITHMS, ["algorithm.path"])}
FLAGS = ("task.path", "algorithm.path", "judge.path", "world.path", "features.path", "demonstrations.path")
NAMED = {
    **{name: ["bundled"] for name in ("eval", "chat", "serve", "behaviours", "check-task")},
    "trace": ["bundled", "0"],
    "compare": ["countdown-tiny"],
    "dpo": ["--dpo.rounds", "2"],
    "phases": ["phases.yaml"],
}
"""Commands that are about something named by position."""


@pytest.mark.parametrize(("command", "flag"), product(COMMANDS, FLAGS))
def test_a_path_is_imported_only_by_commands_that_read_it(
    command: str, flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("import pathlib\n\npathlib.Path('imported').touch()\n")
    Path("phases.yaml").write_text("phases: [{name: a}]")
    assert main([command, *NAMED.get(command, []), f"--{flag}", "mine.py:Name"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("posttrain: ")
    assert error.count("\n") == 1 or command == "check-task"  # which prints its usage
    assert Path("imported").exists() == ((command, flag) in TAKEN), error
    assert (f"mine.py has no {'class' if 'task' in flag else 'function'} `Name`" in error) == Path("imported").exists()
    assert flag in error or (command, flag) in TAKEN, error


@pytest.mark.parametrize("command", ["chat", "serve", "behaviours", "doctor"])
@pytest.mark.parametrize("flag", ["task.name", "algorithm.name"])
def test_a_name_is_refused_by_commands_that_do_not_read_it(
    command: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, *NAMED.get(command, []), f"--{flag}", "countdown"]) == 2
    error = capsys.readouterr().err
    section = flag.partition(".")[0]
    assert f"--{flag}: no such flag.  `posttrain {command}` does not read the section {section}." in error


def test_help_offers_a_path_only_where_it_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["behaviours", "--help"]) == 0
    assert ".path" not in capsys.readouterr().out
