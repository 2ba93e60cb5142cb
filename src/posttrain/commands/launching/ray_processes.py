"""`posttrain launch --by ray`: the same commands, as child processes of actors that Ray places.

An actor only holds its child process.  With one actor, Ray starts nine processes and uses 1.2 GB.  It starts a
dashboard despite `include_dashboard=False`, and writes a token file to the home folder unless RAY_AUTH_MODE is
`disabled`.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from posttrain.commands.launching.processes import PlacedProcess, RunningProcess
from posttrain.errors import RunError, UserError

INSTALL = "--by ray: Ray is not installed.  Run: pip install 'posttrain[ray]'"
CPUS = 0.01
"""CPUs that Ray reserves for each process: almost none, so that all fit on a small machine."""
PLACE_SECONDS = 60
"""Timeout in seconds for Ray to place the processes."""


class ActorProcess(RunningProcess):
    """A process that an actor started, as seen from this process."""

    def __init__(self, process: PlacedProcess, log: Path, actor: Any) -> None:
        import ray

        self.process, self.log, self.actor, self.get = process, log, actor, ray.get
        self.lost = ray.exceptions.RayActorError
        try:
            self.began_at = self.get(actor.start.remote(process, str(log)))
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None

    @property
    def exit_code(self) -> int | None:
        try:
            code: int | None = self.get(self.actor.exit_code.remote())
        except self.lost:
            return LOST
        return code

    def ended(self) -> str:
        return "was lost with its actor" if self.exit_code == LOST else super().ended()

    def stop(self, seconds: float) -> None:
        import ray

        try:
            self.get(self.actor.stop.remote(seconds))
        except self.lost:
            return
        ray.kill(self.actor)


LOST = 255


class Holder:
    """The actor: starts one process, and ends it."""

    def __init__(self) -> None:
        self.running: RunningProcess | None = None

    def start(self, process: PlacedProcess, log: str) -> int:
        self.running = RunningProcess(process, Path(log))
        return self.running.began_at

    def exit_code(self) -> int | None:
        return None if self.running is None else self.running.exit_code

    def stop(self, seconds: float) -> None:
        if self.running is not None:
            self.running.stop(seconds)


@contextmanager
def started_by_ray(
    processes: Sequence[PlacedProcess], logs: Path, *, stop_seconds: float
) -> Iterator[list[RunningProcess]]:
    """`processes.started`, with actors in one placement group."""
    try:
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
    except ImportError as error:
        raise UserError(INSTALL) from error
    if not ray.is_initialized():
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    if not processes:
        yield []
        return
    logs.mkdir(parents=True, exist_ok=True)
    group = placement_group([{"CPU": CPUS}] * len(processes), strategy="PACK")
    if not group.wait(PLACE_SECONDS):
        remove_placement_group(group)
        needed = CPUS * len(processes)
        fault = f"no place for {len(processes)} processes ({needed:g} CPUs) in {PLACE_SECONDS} seconds"
        raise RunError(f"--by ray: {fault}.  Free some CPUs, or use --by processes.")
    actor = ray.remote(num_cpus=CPUS, max_restarts=0)(Holder)
    running: list[RunningProcess] = []
    try:
        for index, each in enumerate(processes):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            holder = actor.options(scheduling_strategy=strategy).remote()
            running.append(ActorProcess(each, logs.resolve() / f"{each.name}.log", holder))
        yield running
    finally:
        for one in reversed(running):
            one.stop(stop_seconds)
        remove_placement_group(group)
