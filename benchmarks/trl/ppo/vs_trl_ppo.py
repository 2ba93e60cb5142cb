"""PPO's step with TRL 1.12.0's experimental trainer, its last, and with posttrain: seconds, tokens/s, peak memory.

    python benchmarks/trl/ppo/vs_trl_ppo.py

TRL's value model is a second model, and so is that of our first side; our second side has a value head on the policy's
own trunk, which is what a model of this size has by default.  The three are processes of their own, each taking one
step when told, in turns.  benchmarks/README.md says what is compared; results are kept in benchmarks/results/.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from _ppo_environment import ppo_interpreter
from _ppo_job import PpoJob
from _ppo_report import SIDES, lines, summary
from _vs_trl_workers import SOURCE, Worker, environment, measured_where, require_same_inputs
from vs_trl import LEAST_MICRO_BATCH

HERE = Path(__file__).parent
SEED = 0
WARM_UP = 1
"""Steps of each side before measuring."""
TRIAL_STEPS = 2
"""Steps of each of TRL's batch sizes before the fastest is taken, by its last step."""
PARTS = (1, 4, 16)
"""TRL's training passes are tried with all completions, a quarter and a sixteenth of them, with 8 at the least."""
LEARNING_RATE, EPOCHS, KL, LAMBDA, VALUE = 1e-5, 4, 0.05, 0.95, 0.1
"""Rate of policy and critic alike; the others are TRL's defaults."""
TOKENS_PER_MICROBATCH = 1280
"""Ours: fewer than the 4,096 of recipes/countdown-tiny-ppo.yaml, which take more memory."""
PROMPTS = 256
LIMIT, EXACT = 400, 68
"""Tokens: the limit of that recipe, and about the mean length under it."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One comparison."""

    name: str
    stops: bool
    completion_tokens: int


LINES = (
    Line(name="the end token stops", stops=True, completion_tokens=LIMIT),
    Line(name=f"{EXACT} tokens each", stops=False, completion_tokens=EXACT),
)


@dataclass(frozen=True, kw_only=True)
class Batches:
    """TRL's completions per pass."""

    micro: int
    """Forward and backward."""
    rollout: int
    """Sampling, reference, value and reward."""

    def __str__(self) -> str:
        return f"{self.micro}/{self.rollout}"


def main() -> None:
    options = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("Terminated; nothing is saved"))
    chosen = [line for line in LINES if options.line in (None, "stops" if line.stops else "exact")]
    with tempfile.TemporaryDirectory(prefix="vs-trl-ppo-") as folder:
        comparison = PpoComparison(options, Path(folder))
        results = [comparison.compare(line) for line in chosen]
    if options.sides == list(SIDES):
        save(options, results)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="prompts of a step, each with one completion")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each side")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--line", choices=("stops", "exact"), help="only this one")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="fewer than all save nothing")
    parser.add_argument("--trl-batches", help="TRL's completions per pass, MICRO/ROLLOUT; default: the fastest tried")
    parser.add_argument("--trl-python", type=Path, help="interpreter with what TRL needs, instead of the one made here")
    parser.add_argument("--trl-folder", type=Path, help="folder with TRL 1.12.0, to go with --trl-python")
    parser.add_argument("--model", type=Path, default=SOURCE / "posttrain" / "assets" / "countdown-base")
    parser.add_argument("--results", type=Path, default=HERE.parents[1] / "results", help="folder for the JSON")
    parser.set_defaults(device="cpu")
    options = parser.parse_args()
    if (options.trl_python is None) != (options.trl_folder is None):
        parser.error("--trl-python and --trl-folder go together")
    return options


class PpoComparison:
    """All sides on the bundled model."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.policy, self.endless, self.reward_model = options.model.absolute(), folder / "endless", folder / "reward"
        self.steps = WARM_UP + options.steps
        self.variables = environment(options)
        self.variables["PYTHONPATH"] = os.pathsep.join([str(SOURCE), str(HERE.parent), str(HERE)])
        self.rows = self.make_inputs()
        self.trl: tuple[Path, Path] | None = None
        if "trl" in options.sides:
            given = options.trl_python is not None
            self.trl = (options.trl_python, options.trl_folder.absolute()) if given else ppo_interpreter()
        self.tried: dict[str, float] = {}

    def make_inputs(self) -> list[dict[str, str]]:
        """Have models and prompts made, in another process: memory of this one would count in the workers'."""
        asked, rows = self.folder / "request.json", self.folder / "rows.json"
        request = {
            "policy": str(self.policy),
            "endless": str(self.endless),
            "reward_model": str(self.reward_model),
            "seed": SEED,
            "steps": max(self.steps, TRIAL_STEPS),
            "prompts": self.options.prompts,
        }
        asked.write_text(json.dumps(request), encoding="utf-8")
        command = [sys.executable, str(HERE / "_ppo_inputs.py"), str(asked), str(rows)]
        subprocess.run(command, check=True, env=self.variables)
        made: list[dict[str, str]] = json.loads(rows.read_text(encoding="utf-8"))
        return made

    def compare(self, line: Line) -> dict[str, Any]:
        """One line of the benchmark: the sides, in turns."""
        self.tried = {}
        sides = [side for side in SIDES if side in self.options.sides]
        batches = self.fastest_batches(line) if "trl" in sides else Batches(micro=0, rollout=0)
        measured: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
        load = [os.getloadavg()[0]]
        with self.workers(line, sides, batches) as workers:
            for step in range(self.steps):
                for side, worker in workers.items():
                    facts = worker.step()
                    print(f"  {side:6s} step {step}: {facts['seconds']:8.2f} s  {facts['tokens']} tokens", flush=True)
                    if step >= WARM_UP:
                        measured[side].append(facts)
            load.append(os.getloadavg()[0])
            result: dict[str, Any] = {
                **asdict(line),
                "load_average_before_and_after": load,
                "trl_batches": asdict(batches),
                "trl_batches_tried_seconds": self.tried,
                **{side: {**worker.ready, "steps": measured[side]} for side, worker in workers.items()},
            }
            require_same_inputs([worker.ready for worker in workers.values()])
        result["summary"] = summary(measured)
        print("\n".join(lines(f"{line.name}, {self.options.threads} threads:", self.said(batches), result)), flush=True)
        return result

    def said(self, batches: Batches) -> str:
        """What was the same, and what TRL was given."""
        tried = ", ".join(f"{size}: {seconds:.2f} s" for size, seconds in self.tried.items())
        return (
            f"{self.options.prompts} prompts, {EPOCHS} epochs of one mini-batch, KL {KL} (k1) in the reward, GAE 1 and"
            f" {LAMBDA}, rates {LEARNING_RATE:g}; TRL's completions per pass: {batches} (tried {tried or 'nothing'})"
        )

    def fastest_batches(self, line: Line) -> Batches:
        """Completions per training pass with all of them per rollout pass, then a quarter of those with the best."""
        if self.options.trl_batches:
            micro, rollout = map(int, self.options.trl_batches.split("/"))
            return Batches(micro=micro, rollout=rollout)
        every = self.options.prompts
        micro = [every // parts for parts in PARTS if every // parts >= min(every, LEAST_MICRO_BATCH)]
        took = {size: self.trial(line, size) for size in [Batches(micro=each, rollout=every) for each in micro]}
        best = min(took, key=lambda size: took[size])
        fewer = Batches(micro=best.micro, rollout=every // PARTS[1])
        return fewer if self.trial(line, fewer) < took[best] else best

    def trial(self, line: Line, batches: Batches) -> float:
        """Seconds of TRL's step in passes of this size."""
        with self.workers(line, ["trl"], batches) as workers:
            took = [workers["trl"].step()["seconds"] for _ in range(TRIAL_STEPS)]
        self.tried[str(batches)] = float(took[-1])
        print(f"  TRL with {batches} completions per pass: {took[-1]:.2f} s", flush=True)
        return float(took[-1])

    @contextmanager
    def workers(self, line: Line, sides: Sequence[str], batches: Batches) -> Iterator[dict[str, Worker]]:
        """The sides' processes, ready for their first step."""
        started: dict[str, Worker] = {}
        try:
            for side in sides:
                started[side] = self.start(side, line, batches)
            yield started
        finally:
            for worker in started.values():
                worker.close()

    def start(self, side: str, line: Line, batches: Batches) -> Worker:
        """A side's process, with the file that says what to do."""
        job = PpoJob(
            policy=str(self.policy if line.stops else self.endless),
            reward_model=str(self.reward_model),
            rows=self.rows,
            prompts_per_step=self.options.prompts,
            completion_tokens=line.completion_tokens,
            stops=line.stops,
            epochs=EPOCHS,
            learning_rate=LEARNING_RATE,
            kl_coefficient=KL,
            lambda_=LAMBDA,
            value_coefficient=VALUE,
            steps=len(self.rows) // self.options.prompts,
            seed=SEED,
            threads=self.options.threads,
            trunk=side,
            tokens_per_microbatch=TOKENS_PER_MICROBATCH,
            micro_batch=batches.micro,
            rollout_batch=batches.rollout,
        )
        path, variables = self.folder / f"{side}.json", dict(self.variables)
        path.write_text(json.dumps(asdict(job)), encoding="utf-8")
        command = [sys.executable, str(HERE / "_ppo_ours.py"), str(path)]
        if side == "trl":
            assert self.trl is not None, "a side that was not asked for"
            python, folder = self.trl
            variables["PYTHONPATH"] = os.pathsep.join([str(folder), variables["PYTHONPATH"]])
            command = [str(python), str(HERE / "_ppo_trl.py"), str(path)]
        return Worker(command, variables, self.folder / f"{side}.log")


def save(options: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    """Write the result with everything that it depends on; fewer prompts or lines have names of their own."""
    fewer = "" if options.prompts == PROMPTS else f"-{options.prompts}"
    path: Path = options.results / f"ppo{fewer}{f'-{options.line}' if options.line else ''}-cpu.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        **measured_where(options),
        "prompts": options.prompts,
        "epochs": EPOCHS,
        "learning_rate": LEARNING_RATE,
        "kl_coefficient": KL,
        "lambda": LAMBDA,
        "value_coefficient": VALUE,
        "tokens_per_microbatch": TOKENS_PER_MICROBATCH,
        "warm_up_steps": WARM_UP,
        "lines": results,
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"Written to {path}")


if __name__ == "__main__":
    main()
