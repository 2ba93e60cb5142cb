"""The same GRPO step with TRL and with posttrain: seconds, tokens per second and peak memory of each.

    python benchmarks/trl/vs_trl.py --shape bundled

Both sides load the same model folder and see the same prompts.  Each is a process of its own that takes one step when
told, in turns, so that a busy machine slows both.  TRL is installed from PyPI into .venv-trl the first time.
benchmarks/README.md says what is compared and why that is fair; results are kept in benchmarks/results/.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from _vs_trl_environment import trl_python
from _vs_trl_report import lines, summary
from _vs_trl_shapes import SHAPES, Line, Shape
from _vs_trl_wire import Job
from _vs_trl_workers import SOURCE, Worker, environment, measured_where, require_same_inputs

HERE = Path(__file__).parent
SEED = 0
WARM_UP = 1
"""Steps of each side before measuring: the first one loads kernels and fills allocators."""
TRIAL_STEPS = 2
"""Steps of each of TRL's micro-batch sizes before the fastest is taken, by its last step."""

LEAST_MICRO_BATCH = 8
"""Completions per pass below which TRL is not tried: matrix products only get slower."""
TRIALS = ("prompts", "group_size", "prompt_tokens", "completion_tokens")
"""Hidden options that shrink a shape, for trying this script."""


def main() -> None:
    options = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("Terminated; nothing is saved"))  # folders and workers go too
    shape = with_overrides(SHAPES[options.shape], options)
    with tempfile.TemporaryDirectory(prefix="vs-trl-") as folder:
        comparison = Comparison(options, shape, Path(folder))
        results = [comparison.compare(line) for line in shape.lines]
    if options.only is None:
        save(options, shape, results)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="bundled")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cuda: bfloat16 autocast on both sides"
    )
    parser.add_argument("--model", type=Path, help="folder to use for `bundled` instead of the package's own model")
    parser.add_argument("--steps", type=int, help="measured steps of each side")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=("ours", "trl"), help="run one side; prints no ratios and saves nothing")
    parser.add_argument(
        "--trl-micro-batch",
        type=int,
        help="TRL's completions per pass; default: all, a quarter or a sixteenth, what is fastest",
    )
    parser.add_argument("--trl-python", type=Path, help="interpreter with TRL, instead of the environment made here")
    parser.add_argument("--results", type=Path, default=HERE.parent / "results", help="folder for the result's JSON")
    for name in TRIALS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def with_overrides(shape: Shape, options: argparse.Namespace) -> Shape:
    """The shape with what the command line says otherwise."""
    return replace(
        shape, **{name: value for name in ("steps", *TRIALS) if (value := getattr(options, name)) is not None}
    )


class Comparison:
    """Both sides on one shape."""

    def __init__(self, options: argparse.Namespace, shape: Shape, folder: Path) -> None:
        self.options, self.shape, self.folder = options, shape, folder
        self.model, self.endless = self.model_folder(), folder / "endless"
        self.steps = WARM_UP + shape.steps
        self.rows = self.make_inputs()
        self.trl = (options.trl_python or trl_python()) if options.only != "ours" else None
        self.micro_batch = 0
        self.tried: dict[str, float] = {}

    def model_folder(self) -> Path:
        """The folder that both sides load; a random model is made there."""
        if self.shape.network is not None:
            return self.folder / "model"
        model: Path = self.options.model or SOURCE / "posttrain" / "assets" / "countdown-base"
        if not (model / "model.safetensors").is_file():
            raise SystemExit(f"{model} holds no model.safetensors; give a model folder with --model")
        return model.absolute()

    def make_inputs(self) -> list[dict[str, Any]]:
        """Have the model and the prompts made, in another process: memory of this one would count in the workers'."""
        network = self.shape.network
        request = {
            "model": str(self.model),
            "endless": str(self.endless),
            "network": None if network is None else asdict(network),
            "seed": SEED,
            "steps": max(self.steps, TRIAL_STEPS),
            "prompts": self.shape.prompts,
            "prompt_tokens": self.shape.prompt_tokens,
        }
        asked, rows = self.folder / "request.json", self.folder / "rows.json"
        asked.write_text(json.dumps(request), encoding="utf-8")
        command = [sys.executable, str(HERE / "_vs_trl_inputs.py"), str(asked), str(rows)]
        subprocess.run(command, check=True, env=environment(self.options))
        made: list[dict[str, Any]] = json.loads(rows.read_text(encoding="utf-8"))
        return made

    def compare(self, line: Line) -> dict[str, Any]:
        """One line of the benchmark: both sides, in turns."""
        options = self.options
        self.tried = {}
        if options.only != "ours":
            self.micro_batch = options.trl_micro_batch or self.fastest_micro_batch(line)
        sides = [side for side in ("trl", "ours") if options.only in (None, side)]
        measured: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
        with self.workers(line, sides) as workers:
            for step in range(self.steps):
                for side, worker in workers.items():
                    facts = worker.step()
                    print(f"  {side:4s} step {step}: {facts['seconds']:8.2f} s  {facts['tokens']} tokens", flush=True)
                    if step >= WARM_UP:
                        measured[side].append(facts)
            result = {
                "line": str(line),
                "trl_micro_batch": self.micro_batch,
                "trl_micro_batches_tried_seconds": self.tried,
                **{side: {**worker.ready, "steps": measured[side]} for side, worker in workers.items()},
            }
        require_same_inputs([worker.ready for worker in workers.values()])
        result["summary"] = summary(measured)
        print("\n".join(lines(options, self.shape, line, result)), flush=True)
        return result

    def fastest_micro_batch(self, line: Line) -> int:
        """All completions at once, a quarter, or a sixteenth of them: whichever TRL is fastest with."""
        rows = self.shape.prompts * self.shape.group_size
        for candidate in [rows // parts for parts in (1, 4, 16) if rows // parts >= min(rows, LEAST_MICRO_BATCH)]:
            self.micro_batch = candidate
            with self.workers(line, ["trl"]) as workers:
                took = [workers["trl"].step()["seconds"] for _ in range(TRIAL_STEPS)]
            self.tried[str(candidate)] = took[-1]
            print(f"  TRL with {candidate} completions per pass: {took[-1]:.2f} s", flush=True)
        return int(min(self.tried, key=lambda candidate: self.tried[candidate]))

    @contextmanager
    def workers(self, line: Line, sides: Sequence[str]) -> Iterator[dict[str, Worker]]:
        """The sides' processes, ready for their first step."""
        started: dict[str, Worker] = {}
        try:
            for side in sides:
                started[side] = self.start(side, line)
            yield started
        finally:
            for worker in started.values():
                worker.close()

    def start(self, side: str, line: Line) -> Worker:
        return Worker(self.command(side, line), environment(self.options), self.folder / f"{side}.log")

    def command(self, side: str, line: Line) -> list[str]:
        """What starts a side's process: interpreter, script, and the file that says what to do."""
        options, shape = self.options, self.shape
        job = Job(
            model=str(self.model if line.exact_tokens is None else self.endless),
            rows=self.rows,
            countdown=shape.network is None,
            reward=line.reward,
            prompts_per_step=shape.prompts,
            group_size=shape.group_size,
            max_completion_tokens=line.exact_tokens or shape.completion_tokens,
            learning_rate=shape.learning_rate,
            tokens_per_microbatch=shape.tokens_per_microbatch,
            steps=len(self.rows) // shape.prompts,
            seed=SEED,
            threads=options.threads,
            device=options.device,
            dtype="float32" if options.device == "cpu" else "bfloat16",
            micro_batch=self.micro_batch,
        )
        path = self.folder / f"{side}.json"
        path.write_text(json.dumps(asdict(job)), encoding="utf-8")
        python = sys.executable if side == "ours" else str(self.trl)
        return [python, str(HERE / f"_vs_trl_{side}.py"), str(path)]


def save(options: argparse.Namespace, shape: Shape, results: list[dict[str, Any]]) -> None:
    """Write the result with everything that it depends on; a shrunken shape gets a name of its own."""
    tried = any(getattr(options, name) is not None for name in TRIALS)
    path: Path = options.results / f"{options.shape}{'-trial' if tried else ''}-{options.device}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        **measured_where(options),
        "shape": {"name": options.shape, **asdict(shape)},
        "warm_up_steps": WARM_UP,
        "lines": results,
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"Written to {path}")


if __name__ == "__main__":
    main()
