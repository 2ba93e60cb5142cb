"""The virtual environment that vs_trl.py makes for TRL: TRL from PyPI on the torch and transformers that we run on."""

import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

TRL = "1.16.0"
SHARED = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
"""Packages whose versions must be the same on both sides."""
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
FOLDER = Path(__file__).parents[2] / ".venv-trl"


def trl_python() -> Path:
    """The environment's interpreter; makes the environment where it is missing, half-made or of other versions."""
    python = FOLDER / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    wanted = "\n".join([f"trl=={TRL}", *(f"{name}=={version(name)}" for name in SHARED), sys.version])
    made = FOLDER / ".ok"  # written last
    if made.is_file() and made.read_text(encoding="utf-8") == wanted and python.exists():
        return python
    print(f"Making {FOLDER} with TRL {TRL}: a few minutes, most of it downloads", flush=True)
    if FOLDER.exists():
        shutil.rmtree(FOLDER)
    subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
    (FOLDER / ".gitignore").write_text("*\n", encoding="utf-8")
    constraints = FOLDER / "constraints.txt"
    constraints.write_text("".join(f"{name}=={version(name).partition('+')[0]}\n" for name in SHARED), encoding="utf-8")
    install_torch(python)
    run_pip(python, ["-c", str(constraints), f"trl=={TRL}"])
    made.write_text(wanted, encoding="utf-8")
    return python


def python_with_peft() -> Path:
    """The same with what adapters, a base in 4 bits and TRL's mathematical rewards need."""
    python = trl_python()
    run_pip(python, ["--no-deps", *(f"{name}=={version(name)}" for name in ("peft", "bitsandbytes"))])
    run_pip(python, [f"math-verify=={version('math-verify')}"])
    return python


def install_torch(python: Path) -> None:
    """The build of torch that we run on; the CPU build comes from PyTorch's own index, where that can be reached."""
    release, _, build = version("torch").partition("+")
    if build == "cpu":
        source = ["--no-deps", "--index-url", TORCH_CPU_INDEX, "--retries", "0", "--timeout", "15"]
        if run_pip(python, [*source, f"torch=={release}"], check=False):
            return
        print("PyTorch's CPU index cannot be reached: taking torch from the usual package index", flush=True)
    run_pip(python, [f"torch=={release}"])


def run_pip(python: Path, arguments: list[str], *, check: bool = True) -> bool:
    command = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, check=check, stderr=None if check else subprocess.DEVNULL).returncode == 0
