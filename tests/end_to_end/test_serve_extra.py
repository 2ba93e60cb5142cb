"""What needs the extra `serve`, and what does not."""

import subprocess
import sys

import pytest

WITHOUT = """
import sys
sys.modules[{module!r}] = None
from posttrain.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("module", ["starlette", "uvicorn"])
def test_without_the_extra_the_command_names_what_installs_it(module: str) -> None:
    command = [sys.executable, "-c", WITHOUT.format(module=module), "serve", "bundled"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    said = f"posttrain: posttrain serve: {module} is not installed.  Run `pip install 'posttrain[serve]'`.\n"
    assert (ended.returncode, ended.stderr) == (2, said)


def test_votes_in_the_terminal_need_no_extra() -> None:
    program = (
        "import sys; from posttrain.commands.collection import ballot; print({'starlette', 'uvicorn'} & {*sys.modules})"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True, timeout=120) == "set()\n"
