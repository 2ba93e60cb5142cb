"""What needs the extra `serve`, and what does not."""

from pathlib import Path

import pytest

from tests.support.runs import start_program

WITHOUT = """
import sys
sys.modules[{module!r}] = None
from posttrain.cli import main
sys.exit(main({arguments!r}))
"""
COMMANDS = {
    "posttrain serve": ["serve", "bundled"],
    "collect: the voting page (not needed with --terminal)": ["collect"],
}


@pytest.mark.parametrize("module", ["starlette", "uvicorn"])
@pytest.mark.parametrize("who", COMMANDS)
def test_without_the_extra_a_command_names_what_installs_it(who: str, module: str, tmp_path: Path) -> None:
    people = ["--judge.name", "person", "--run.folder", str(tmp_path / "run")] if "collect" in who else []
    program = WITHOUT.format(module=module, arguments=[*COMMANDS[who], *people])
    ended = start_program(program, folder=tmp_path, logs=tmp_path).ended()
    said = f"posttrain: {who}: {module} is not installed.  Run `pip install 'posttrain[serve]'`.\n"
    assert (ended.code, ended.err) == (2, said)
    assert not (tmp_path / "run").exists()


def test_votes_in_the_terminal_need_no_extra(tmp_path: Path) -> None:
    program = (
        "import sys; from posttrain.commands.collection import ballot; print({'starlette', 'uvicorn'} & {*sys.modules})"
    )
    assert start_program(program, folder=tmp_path, logs=tmp_path).ended().out == "set()\n"
