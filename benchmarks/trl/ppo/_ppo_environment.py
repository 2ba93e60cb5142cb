"""TRL 1.12.0, the last release with a PPO trainer, in a folder that goes before the other benchmarks' TRL."""

import shutil
from pathlib import Path

from _vs_trl_environment import run_pip, trl_python

TRL = "1.12.0"
FOLDER = Path(__file__).parents[3] / ".venv-trl-ppo"


def ppo_interpreter() -> tuple[Path, Path]:
    """An interpreter, and the folder to put on its path: TRL 1.12.0 over the packages of `.venv-trl`.

    What it needs beside is there already, in versions that it takes; so nothing of `.venv-trl` is changed.
    """
    python = trl_python()
    made = FOLDER / f"trl-{TRL}.dist-info" / "INSTALLER"
    if not made.is_file():
        if FOLDER.exists():
            shutil.rmtree(FOLDER)
        FOLDER.mkdir()
        (FOLDER / ".gitignore").write_text("*\n", encoding="utf-8")
        run_pip(python, ["--no-deps", "--target", str(FOLDER), f"trl=={TRL}"])
    return python, FOLDER
