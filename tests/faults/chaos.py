"""Random faults over whole runs: processes are killed or stopped and networks cut until enough has happened.

    python -m tests.faults.chaos --faults 200 --seed 0

Runs take turns: one process that samples from two servers, two ranks that do, one process whose completions talk to an
environment's server, and one that samples ahead of its updates.  At a random moment a server is killed and started
anew, or stopped for a while, or its network is cut, or the driver or a rank is killed, or a rank stopped.  A run that
was killed, or that ended with an error which names what failed, is resumed.  Every run must end in time, with the bits
of an undisturbed one; one that sampled ahead with those of its replay.  The same seed chooses the same victims; the
moments depend on the machine.
"""

import argparse
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.environments import EnvironmentServer, environment_server, talking_recipe
from tests.faults.servers import Server, http_section, servers
from tests.support.faulty_proxy import FaultyProxy
from tests.support.rank_runs import start_ranks
from tests.support.runs import Command, Ended, require_same, save_tiny_model, start, tiny_recipe

STEPS = 24
MOMENT_SECONDS = (0.1, 1.2)
"""Between two faults."""
OWNED = "this server samples for "
"""The run before could not give back a server that was away when it ended: its lease lasts a minute."""
OF_AN_ENVIRONMENT = "The first failure:"
"""A message about failed completions ends with the traceback of one."""
RUN_SECONDS = 240.0
"""A run that takes longer hangs."""
PAUSE_SECONDS = 0.8
"""How long a process is stopped, or a network cut."""
RANK_SECONDS = 20.0
"""run.rank_timeout_seconds: ranks that are stopped for a while go on."""
MOST_LIVES = 60
KINDS = ("servers", "ranks", "environment", "ahead")
Fault = Callable[[Sequence[Command]], None]
"""Of the processes of a run that have not ended."""


@dataclass
class Life:
    """The processes of a run, from a start to its end."""

    processes: Sequence[Command]

    def running(self) -> list[Command]:
        return [each for each in self.processes if each.process.is_alive()]


def stopped_for_a_while(send: Callable[[int], None]) -> None:
    send(signal.SIGSTOP)
    time.sleep(PAUSE_SECONDS)
    send(signal.SIGCONT)


@dataclass
class Chaos:
    """Faults of some runs, counted."""

    place: Path
    dice: random.Random
    faults: int
    """How many are to come."""
    started: Sequence[Server]
    proxies: Sequence[FaultyProxy]
    environment: EnvironmentServer
    counts: Counter[str] = field(default_factory=Counter)

    def disturbed(self, seed: int, kind: str) -> None:
        """One run with faults.  Raises AssertionError if it hangs, fails, or differs from what it must equal."""
        folder = self.place / f"chaos-{seed}"
        whole = None if kind == "ahead" else self.undisturbed(seed, kind)
        self.until_done(kind, self.recipe(kind, folder, seed), folder)
        (folder / "run" / "failures.txt").unlink(missing_ok=True)  # tracebacks of steps that were refused
        if whole is None:
            replayed = start("replay", folder / "run", folder=folder).ended(RUN_SECONDS)
            assert replayed.code == 0, replayed.out
        else:
            require_same(folder / "run", whole)
        self.counts[f"runs: {kind}"] += 1

    def undisturbed(self, seed: int, kind: str) -> Path:
        """The same run without faults."""
        whole = self.place / f"whole-{seed}"
        recipe = self.recipe(kind, whole, seed)
        endings = self.alone(kind, recipe, whole)
        while any(OWNED in each.err for each in endings):
            time.sleep(PAUSE_SECONDS)
            endings = self.alone(kind, recipe, whole)
        assert all(each.code == 0 for each in endings), "\n".join(each.err for each in endings)
        return whole / "run"

    def alone(self, kind: str, recipe: Path, folder: Path) -> list[Ended]:
        return [each.ended(RUN_SECONDS) for each in self.begin(kind, recipe, folder).processes]

    def recipe(self, kind: str, folder: Path, seed: int) -> Path:
        sections = {
            "run": {"num_steps": STEPS, "seed": seed, "rank_timeout_seconds": RANK_SECONDS},
            "evaluation": {"every_steps": 6, "samples": 1, "brief_problems": 2},
            "checkpoint": {"every_steps": 2},
        }
        if kind == "environment":
            return talking_recipe(folder, self.environment, **sections)
        if kind == "ahead":
            sections |= {"rollout": {"max_staleness": 2}, "checkpoint": {"every_steps": 2, "keep_last": STEPS}}
        return tiny_recipe(folder, engine=http_section(self.proxies), **sections)

    def begin(self, kind: str, recipe: Path, folder: Path) -> Life:
        """A run's first life, or its next one."""
        begun = (folder / "run" / "config.yaml").exists()
        what = ["rl", *(["--resume", folder / "run"] if begun else [recipe])]
        return Life(start_ranks(*what, folder=folder) if kind == "ranks" else [start(*what, folder=folder)])

    def until_done(self, kind: str, recipe: Path, folder: Path) -> None:
        until, faults = time.monotonic() + RUN_SECONDS, self.faults_of(kind)
        for _ in range(MOST_LIVES):
            life = self.begin(kind, recipe, folder)
            while life.running():
                logs = "\n".join(each.log.read_text() for each in life.processes if each.log.exists())
                assert time.monotonic() < until, f"the run hangs: {logs}"
                time.sleep(self.dice.uniform(*MOMENT_SECONDS))
                if self.faults > 0 and (running := life.running()):
                    name = self.dice.choice(sorted(faults))
                    faults[name](running)
                    self.counts[name] += 1
                    self.faults -= 1
            if self.is_done(life):
                return
            self.counts["resumed"] += 1
        raise AssertionError(f"not done after {MOST_LIVES} lives")

    def is_done(self, life: Life) -> bool:
        """Whether a life was the last; one that ended with an error must have named what failed."""
        endings = [each.ended() for each in life.processes]
        codes, said = {each.code for each in endings}, "\n".join(each.err for each in endings)
        assert "Traceback (" not in said.partition(OF_AN_ENVIRONMENT)[0], said
        if codes == {0}:
            return True
        if -signal.SIGKILL not in codes:  # both servers were away, or one was when the run connected
            names = [*(each.url for each in self.proxies), f"127.0.0.1:{self.environment.port}", "rank "]
            assert any(name in said for name in names), said
            self.counts["ended with an error"] += 1
        return False

    def faults_of(self, kind: str) -> Mapping[str, Fault]:
        driver: dict[str, Fault] = {"driver killed": lambda running: running[0].signal(signal.SIGKILL)}
        if kind == "environment":
            server = self.environment

            def stop_environment(_: Sequence[Command]) -> None:
                stopped_for_a_while(server.send)

            return {**driver, "environment killed": lambda _: server.restart(), "environment stopped": stop_environment}
        of_ranks: dict[str, Fault] = {
            "rank killed": lambda running: self.rank_of(running).signal(signal.SIGKILL),
            "rank stopped": self.stop_rank,
        }
        return {
            **(of_ranks if kind == "ranks" else driver),
            "server killed": self.kill_server,
            "server stopped": self.stop_server,
            "network cut": self.cut_network,
        }

    def rank_of(self, running: Sequence[Command]) -> Command:
        return running[self.dice.randrange(2) % len(running)]

    def stop_rank(self, running: Sequence[Command]) -> None:
        rank = self.rank_of(running)
        stopped_for_a_while(lambda number: rank.signal(number) if rank.process.is_alive() else None)

    def kill_server(self, _: Sequence[Command]) -> None:
        server = self.dice.choice(self.started)
        server.kill()
        server.restart()

    def stop_server(self, _: Sequence[Command]) -> None:
        stopped_for_a_while(self.dice.choice(self.started).send)

    def cut_network(self, _: Sequence[Command]) -> None:
        proxy = self.dice.choice(self.proxies)
        proxy.cut_off()
        time.sleep(PAUSE_SECONDS)
        proxy.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        place = Path(folder)
        save_tiny_model(place / "model")
        with (
            servers(place / "model", place, 2) as (started, proxies),
            environment_server(place / "environment") as environment,
        ):
            chaos = Chaos(place, random.Random(given.seed), given.faults, started, proxies, environment)
            for seed in range(1, 10_000):
                chaos.disturbed(seed, KINDS[seed % len(KINDS)])
                print(f"run {seed}: the same to the bit; {dict(chaos.counts)}", flush=True)
                if chaos.faults <= 0:
                    break
    seconds = time.monotonic() - began
    runs = sum(count for name, count in chaos.counts.items() if name.startswith("runs"))
    print(f"{given.faults} faults in {runs} runs, {seconds:.0f} s: no hang, no difference")
    return 0


if __name__ == "__main__":
    sys.exit(main())
