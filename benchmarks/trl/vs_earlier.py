"""The GRPO step of this checkout beside that of an earlier one: whether a change made it slower.

    git worktree add ../earlier HEAD~20 && python benchmarks/trl/vs_earlier.py ../earlier --steps 20

Each side is a process of its own that takes one step when told, in turns, on the same model and prompts, as in
vs_trl.py, whose shapes and lines these are.  Prints the ratio of neighbouring steps and keeps nothing.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from _vs_trl_report import spread, times
from _vs_trl_shapes import SHAPES, Line
from _vs_trl_workers import Worker, environment, require_same_inputs
from vs_trl import WARM_UP, Comparison

WORKERS = ("benchmarks/trl/_vs_trl_ours.py", "benchmarks/_vs_trl_ours.py")
"""Where it is now, and where it once was."""
MEASURES = ("seconds", "cpu_seconds", "peak_mib")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a checkout of an earlier version")
    parser.add_argument("--shape", choices=SHAPES, default="bundled")
    parser.add_argument("--steps", type=int, default=10, help="measured steps of each side")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    if worker_of(given.checkout) is None:
        parser.error(f"{given.checkout} is no checkout of posttrain with {WORKERS[0]}")
    options = argparse.Namespace(**vars(given), only="ours", device="cpu", model=None)
    shape = replace(SHAPES[given.shape], steps=given.steps)
    with tempfile.TemporaryDirectory(prefix="vs-earlier-") as folder:
        comparison = WithEarlier(options, shape, Path(folder))
        for line in shape.lines:
            comparison.compare(line)


def worker_of(checkout: Path) -> Path | None:
    """The file that takes our steps in a checkout, of this version or an earlier one."""
    return next((checkout / worker for worker in WORKERS if (checkout / worker).is_file()), None)


class WithEarlier(Comparison):
    """Both checkouts on one shape."""

    def compare(self, line: Line) -> dict[str, Any]:
        """Steps in turns; which side begins changes from step to step."""
        steps: dict[str, list[dict[str, Any]]] = {"earlier": [], "ours": []}
        with self.workers(line, list(steps)) as workers:
            require_same_inputs([worker.ready for worker in workers.values()])
            for step in range(self.steps):
                for side in sorted(steps, reverse=bool(step % 2)):
                    steps[side].append(workers[side].step())
        pairs = list(zip(steps["earlier"][WARM_UP:], steps["ours"][WARM_UP:], strict=True))
        same = all(earlier[name] == ours[name] for earlier, ours in pairs for name in ("tokens", "reward"))
        result = {name: spread([ours[name] / earlier[name] for earlier, ours in pairs]) for name in MEASURES}
        middle = spread([ours["seconds"] for _, ours in pairs])["median"]
        sameness = "the same" if same else "NOT the same"
        print(
            f"{line}: ours takes {times(result['seconds'])} the seconds of a step of the earlier one, "
            f"{times(result['cpu_seconds'])} the processor seconds, {times(result['peak_mib'])} the memory "
            f"({len(pairs)} steps, {middle:.2f} s each; tokens and rewards are {sameness})",
            flush=True,
        )
        return result

    def start(self, side: str, line: Line) -> Worker:
        if side == "ours":
            return super().start(side, line)
        checkout = self.options.checkout.absolute()
        command = self.command("ours", line)
        command[1] = str(worker_of(checkout))
        variables = environment(self.options) | {"PYTHONPATH": str(checkout / "src")}
        return Worker(command, variables, self.folder / f"{side}.log")


if __name__ == "__main__":
    main()
