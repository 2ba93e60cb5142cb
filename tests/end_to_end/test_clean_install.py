"""The wheel in an environment that pip makes of it and of what it declares: nothing of the tests' environment is there.

It downloads as much as the first `make` and takes as long, so it is not part of `make test`: `make test-wheel`.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from venv import EnvBuilder

import pytest

ROOT = Path(__file__).parents[2]
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
TOOLS = ("pytest", "hypothesis", "ruff", "mypy")
SMALL = ("--task.held-out-size", "16", "--evaluation.every-steps", "0", "--run.threads", "1")


def done(command: Sequence[str], where: Path) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    found = subprocess.run(command, cwd=where, env=clean, capture_output=True, text=True, timeout=900, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


@pytest.mark.scale
@pytest.mark.timeout(1800)
def test_the_wheel_trains_with_what_it_declares_and_nothing_else(tmp_path: Path) -> None:
    done([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)], ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    EnvBuilder(with_pip=True).create(tmp_path / "env")
    scripts = tmp_path / "env" / "bin"
    pip = [str(scripts / "python"), "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    constraints = ["-c", str(ROOT / "constraints.txt")]
    cpu = [*pip, *constraints, *f"--no-deps --index-url {TORCH_CPU_INDEX} --retries 0 --timeout 15 torch".split()]
    subprocess.run(cpu, cwd=tmp_path, capture_output=True, check=False)  # as the Makefile: else from the usual index
    done([*pip, *constraints, str(wheel)], tmp_path)
    there = {path.name.lower() for path in (tmp_path / "env").glob("lib/python*/site-packages/*")}
    assert not there & set(TOOLS)

    posttrain = str(scripts / "posttrain")
    assert done([posttrain, "--version"], tmp_path).startswith("posttrain ")
    said = done([posttrain, "rl", "countdown-tiny", "--run.folder", "run", "--run.num-steps", "2", *SMALL], tmp_path)
    assert "accuracy, sampled at temperature 1" in said
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    assert "every answer got what it deserves" in done([posttrain, "check-task", "countdown"], tmp_path)
