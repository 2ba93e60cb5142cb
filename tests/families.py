"""Every family of models through both passes: writes docs/models.md, in ten minutes on one core.

make families, or python -m tests.families [FAMILY ...] to print some rows and write nothing.
"""

import argparse
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable
from datetime import date
from pathlib import Path

import torch
import transformers

from tests.support.every_family import every_label
from tests.support.family_measures import FAULT, Route, distances, exports, probed, saved
from tests.support.family_page import PAGE, Measured, exported, page

FAULTS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What a family may raise; it goes to the page, and the others are measured all the same."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="rows of the table; all of them without any")
    asked: list[str] = parser.parse_args().families
    quieten()
    rows = measured(asked or every_label())
    if asked:
        return
    versions = (
        f"{date.today():%d %B %Y}, with transformers {transformers.__version__}, torch {torch.__version__}, on a CPU"
    )
    PAGE.write_text(page(rows, versions), encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")


def quieten() -> None:
    """The library warns of what tiny configs do not say, once for each family."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def measured(labels: Iterable[str]) -> dict[str, Measured]:
    """The rows, one after the other, each printed as it is known."""
    found = {}
    for label in labels:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as name:
            row = found[label] = measure(label, Path(name))
        figures = "" if row.exact is None else f"  {row.exact.sampler:.1e} {row.exact.trainer:.1e}"
        figures += "" if row.exports is None else f"  exports {' '.join(exported(row.exports))}"
        figures += "" if row.half is None else f"  {row.half.sampler:.1e} {row.half.trainer:.1e}"
        text = f"{label}: {row.route.name}{figures}  {row.route.remarks}  ({time.monotonic() - began:.1f} s)\n"
        sys.stdout.write(text)
        sys.stdout.flush()
    return found


def measure(label: str, folder: Path) -> Measured:
    """One row, in both types of arithmetic."""
    saved(label, folder)
    parts = []
    for dtype in ("float32", "bfloat16"):
        try:
            policy, route = probed(folder, dtype)
            parts.append((route, None if policy is None else distances(policy, label, folder)))
        except FAULTS as error:
            said = " ".join(str(error).split())
            parts.append((Route(FAULT, f"{type(error).__name__}: {said}".replace("|", "/")), None))
    (route, exact), (half_route, half) = parts
    return Measured(route, exact, half_route, half, None if exact is None else exports(folder, folder / "out"))


if __name__ == "__main__":
    main()
