"""What needs the extra `serve`, and what does not."""

import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT = """
import sys
sys.modules[{module!r}] = None
from posttrain.cli import main
sys.exit(main(sys.argv[1:]))
"""


COMMANDS = {
    "posttrain serve": ["serve", "bundled"],
    "collect: the voting page (not needed with --terminal)": ["collect"],
}


@pytest.mark.parametrize("module", ["starlette", "uvicorn"])
@pytest.mark.parametrize("who", COMMANDS)
def test_without_the_extra_a_command_names_what_installs_it(who: str, module: str, tmp_path: Path) -> None:
    people = ["--judge.name", "person", "--run.folder", str(tmp_path / "run")] if "collect" in who else []
    command = [sys.executable, "-c", WITHOUT.format(module=module), *COMMANDS[who], *people]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    said = f"posttrain: {who}: {module} is not installed.  Run `pip install 'posttrain[serve]'`.\n"
    assert (ended.returncode, ended.stderr) == (2, said)
    assert not (tmp_path / "run").exists()


def test_votes_in_the_terminal_need_no_extra() -> None:
    program = (
        "import sys; from posttrain.commands.collection import ballot; print({'starlette', 'uvicorn'} & {*sys.modules})"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True, timeout=120) == "set()\n"
