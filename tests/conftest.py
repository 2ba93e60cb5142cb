"""What holds for every test: shapes are checked, randomness is fixed, one thread, no network."""

import gc
import os
import shutil
import signal
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"  # for child processes too; threads that wait for each other crawl on a busy machine
os.environ["MPLBACKEND"] = "Agg"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="posttrain-state-")  # the home of who runs them stays as it is

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background: interrupts would be heard by nobody
    signal.signal(signal.SIGINT, signal.default_int_handler)

import jaxtyping
import pytest
import torch
from hypothesis import settings

from tests.support.shapes import where_stated

# Before the first import of posttrain: from here on beartype checks what states a shape.  All else is left alone: mypy
# reads it, and checks of every call would take as long as the sums of a tiny model.
SOURCE = Path(__file__).parents[1] / "src"
STATING_SHAPES = [path for path in SOURCE.rglob("*.py") if "from jaxtyping import" in path.read_text(encoding="utf-8")]
jaxtyping.jaxtyped = where_stated(jaxtyping.jaxtyped)
jaxtyping.install_import_hook(
    [".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in STATING_SHAPES], "beartype.beartype"
)

# Two workers share two cores; and a float sum over one thread has one order.
torch.set_num_threads(1)

# The same examples each time, so that a failure in CI is a failure here, and a slow machine fails nothing.
# A few: every mutant of `make mutants` dies of the first eight.
settings.register_profile(
    "posttrain", max_examples=30, derandomize=True, deadline=None, database=None, print_blob=False
)
settings.load_profile("posttrain")


def pytest_collection_finish() -> None:
    """Leave libraries and the tests themselves out of every later garbage collection."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["XDG_STATE_HOME"], ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
